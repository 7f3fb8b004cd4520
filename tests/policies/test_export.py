"""Policies elsewhere: exported programs, and policies from checkpoints."""

import json
import subprocess
import sys

import numpy as np
import optree
import pytest
import torch
from gymnasium import spaces

from flowrl.algorithms.a2c import A2CTorchPolicy
from flowrl.algorithms.dqn import DQNTorchPolicy
from flowrl.algorithms.ppo import PPOConfig, PPOTorchPolicy
from flowrl.algorithms.r2d2 import R2D2Config
from flowrl.algorithms.sac import SACTorchPolicy
from flowrl.data import SampleBatch
from flowrl.data.checkpoint import CheckpointError, _sealed, read_manifest
from flowrl.policies import ConfigError, ModelV2, Policy, ViewRequirement
from flowrl.policies.export import example_inputs, leaf_names
from flowrl.policies.json_codec import space_from_json, space_to_json

from .fakes import PlainModule

BOX = spaces.Box(-1, 1, (4,), np.float32)
NESTED = spaces.Dict(a=BOX, eye=spaces.Box(0, 255, (12, 12, 3), np.uint8))


class WithLastObs(ModelV2):
    """A view that comes before `obs` in the alphabet."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.view_requirements["last_obs"] = ViewRequirement("obs", self.obs_space, shift=-1)
        self.out, self.values = torch.nn.Linear(8, self.num_outputs), torch.nn.Linear(8, 1)

    def forward(self, input_dict, state, seq_lens):
        self.features = torch.cat([input_dict["obs"], 3 * input_dict["last_obs"]], 1)
        return self.out(self.features), state

    def value_function(self):
        return self.values(self.features).squeeze(1)


CASES = {
    "plain": (BOX, spaces.Discrete(3, start=1), {}),
    "bounds": (BOX, spaces.Box(-2, 3, (2,), np.float32), {"normalize_observations": True}),
    "lstm": (
        BOX,
        spaces.MultiDiscrete([2, 3], start=[1, 0]),
        {"model": {"use_lstm": True, "lstm_use_prev_action": True, "lstm_use_prev_reward": True}},
    ),
    "attention": (
        BOX,
        spaces.Discrete(3),
        {"model": {"use_attention": True, "attention_memory": 4}},
    ),
    "last_obs": (BOX, spaces.Discrete(3), {"model": {"custom_model": WithLastObs}}),
    "frames": (BOX, spaces.Discrete(3), {"model": {"num_framestacks": 3}}),
    "nested": (NESTED, spaces.Dict(x=spaces.Discrete(2), y=spaces.MultiBinary(2)), {}),
    "mask": (
        spaces.Dict({"action_mask": spaces.MultiBinary(3), "at": BOX}),
        spaces.Discrete(3),
        {},
    ),
}


def a_policy(name, seed=0):
    obs_space, action_space, config = CASES[name]
    policy = PPOTorchPolicy(obs_space, action_space, {**config, "seed": seed})
    with torch.no_grad():  # heads as if it had learned something
        policy.flat.vector.add_(0.3 * torch.randn(len(policy.flat.vector)))
    if policy.observation_filter is not None:
        policy.observation_filter.new_stats.update(np.random.default_rng(0).normal(2, 3, (50, 4)))
        policy.observation_filter.merge_stats(policy.observation_filter.take_new_stats())
    return policy


def random_inputs(policy, rows):
    rng = np.random.default_rng(1)

    def draw(leaf):
        if leaf.dtype == torch.uint8:
            return torch.from_numpy(rng.integers(0, 255, leaf.shape, np.uint8))
        if leaf.dtype.is_floating_point:
            return torch.from_numpy(rng.standard_normal(leaf.shape).astype(np.float32))
        return torch.from_numpy(rng.integers(0, 2, leaf.shape)).to(leaf.dtype)

    inputs = optree.tree_map(draw, example_inputs(policy, rows))
    if isinstance(inputs["obs"], dict) and "action_mask" in inputs["obs"]:
        inputs["obs"]["action_mask"][:, 0] = 1
    return inputs


def expected_of(policy, inputs):
    arrays = optree.tree_map(lambda leaf: leaf.numpy(), inputs)
    if policy.observation_filter is not None:
        arrays["obs"] = policy.observation_filter(arrays["obs"])
    actions, states, _ = policy.compute_actions_from_input_dict(arrays, explore=False)
    return policy.actions_for_env(actions), states


def quick(name):
    """The others are tried in the slow suite."""
    return pytest.param(name, marks=() if name in ("bounds", "lstm") else pytest.mark.slow)


@pytest.mark.parametrize("name", map(quick, CASES))
def test_exported_programs_act_like_the_policy(name, tmp_path):
    torch.manual_seed(0)
    policy = a_policy(name)
    path = policy.export(tmp_path / "deep" / "policy.pt2")
    program = torch.export.load(path).module()
    for rows in (1, 7):
        inputs = random_inputs(policy, rows)
        actions, states = expected_of(policy, inputs)
        with torch.no_grad():
            made = program(inputs)
        optree.tree_map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), made["actions"], actions
        )
        for i, state in enumerate(states):
            np.testing.assert_allclose(made[f"state_out_{i}"], state, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "last_obs",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("plain", "bounds", "lstm", "nested", "mask", "attention", "frames")
        ),
    ],
)
def test_onnx(name, tmp_path):
    import onnxruntime

    torch.manual_seed(0)
    policy = a_policy(name)
    path = policy.export(tmp_path / "policy.onnx", format="onnx")
    session = onnxruntime.InferenceSession(str(path))
    for rows in (1, 5):
        inputs = random_inputs(policy, rows)
        actions, states = expected_of(policy, inputs)
        names = [i.name for i in session.get_inputs()]
        assert sorted(names) == sorted(leaf_names(inputs))
        made = session.run(None, {name: leaf_called(inputs, name).numpy() for name in names})
        told = dict(zip([o.name for o in session.get_outputs()], made, strict=True))
        expected = {"actions": actions, **{f"state_out_{i}": s for i, s in enumerate(states)}}
        assert set(told) - set(leaf_names(expected)) <= {"policy_actions", "policy_actions.0"}
        for name in leaf_names(expected):
            np.testing.assert_allclose(told[name], leaf_called(expected, name), atol=1e-4)


def leaf_called(tree, name):
    for key in name.split("."):
        tree = tree[int(key) if isinstance(tree, tuple) else key]
    return tree


@pytest.mark.parametrize("dueling", [True, False])
@pytest.mark.parametrize(
    "more",
    [{"num_atoms": 7}, {"noisy": True, "sigma0": 3.0}, {"noisy": True, "num_atoms": 7}],
    ids=["atoms", "noisy", "both"],
)
def test_values_of_actions(more, dueling, tmp_path):
    """Distributions become values, and the noise of the last step is not exported."""
    space = spaces.Dict({"action_mask": spaces.MultiBinary(3), "at": BOX})
    config = {**more, "dueling": dueling, "seed": 0}
    policy = DQNTorchPolicy(space, spaces.Discrete(3, start=1), config)
    policy.flat.vector.data.add_(0.3 * torch.randn(policy.flat.vector.shape))
    rng = np.random.default_rng(0)
    mask = rng.integers(0, 2, (50, 3)).astype(np.int8)
    mask[:, 1] = 1
    obs = {"action_mask": mask, "at": rng.uniform(-1, 1, (50, 4)).astype(np.float32)}
    policy.compute_actions(obs)
    program = torch.export.load(policy.export(tmp_path / "policy.pt2")).module()
    given = {"obs": {name: torch.from_numpy(leaf) for name, leaf in obs.items()}}
    best, _, _ = policy.compute_actions(obs, explore=False)
    assert program(given)["actions"].tolist() == (best + 1).tolist()
    assert len(set(best.tolist())) > 1


@pytest.mark.parametrize("kind", ["image", "nested", "memory"])
def test_after_learning(kind, tmp_path):
    """Networks that torch computes keep what they gave last, with its graph."""
    if kind == "memory":
        config = R2D2Config(env="CartPole-v1", learning_starts=60, seed=0)
        algorithm = config.reporting(min_sample_timesteps_per_iteration=70).build()
        algorithm.train()
        policy = algorithm.get_policy()
    else:
        space = NESTED["eye"] if kind == "image" else NESTED
        cls = DQNTorchPolicy if kind == "image" else SACTorchPolicy
        actions = spaces.Discrete(3) if kind == "image" else BOX
        policy = cls(space, actions, {"seed": 0, "model": {"fcnet_hiddens": [8]}})
        space.seed(0), actions.seed(0)
        rows = [space.sample() for _ in range(8)]
        obs = optree.tree_map(lambda *parts: np.stack(parts), *rows)
        batch = SampleBatch(
            obs=obs,
            new_obs=obs,
            actions=np.stack([actions.sample() for _ in range(8)]),
            rewards=np.ones(8, np.float32),
            terminateds=np.zeros(8, bool),
        )
        policy.learn_on_batch(batch)
    policy.export(tmp_path / "policy.pt2")
    program = torch.export.load(tmp_path / "policy.pt2").module()
    inputs = example_inputs(policy, 3)
    given = optree.tree_map(lambda leaf: leaf.numpy(), inputs)
    actions, _, _ = policy.compute_actions_from_input_dict(given, explore=False)
    np.testing.assert_allclose(program(inputs)["actions"], actions, atol=1e-5)


def test_what_cannot_be_exported(tmp_path):
    policy = a_policy("plain")
    with pytest.raises(ConfigError, match="is a folder"):
        policy.export(tmp_path)
    with pytest.raises(ConfigError, match="must be one of torch, onnx"):
        policy.export(tmp_path / "x", format="tf")
    policy.view_requirements["others"] = ViewRequirement("obs", agents=["x"])
    with pytest.raises(ConfigError, match="shows other agents"):
        policy.export(tmp_path / "x")
    with pytest.raises(NotImplementedError, match="no export"):
        Policy(BOX, spaces.Discrete(2), {}).export(tmp_path / "x")


# -- from checkpoints ------------------------------------------------------------------------------


def trained(tmp_path, **settings):
    config = PPOConfig(env="CartPole-v1", train_batch_size=200, seed=3, **settings)
    with config.build() as algorithm:
        algorithm.train()
        path = algorithm.save(tmp_path / "checkpoint")
        policies = dict(algorithm.workers.local_worker().policy_map)
    return path, policies


def test_a_policy_from_a_checkpoint(tmp_path):
    path, policies = trained(tmp_path, normalize_observations=True, model={"fcnet_hiddens": [8]})
    policy = Policy.from_checkpoint(path)
    original = policies["default_policy"]
    assert type(policy) is PPOTorchPolicy
    assert policy.observation_space == original.observation_space
    assert policy.config.model.fcnet_hiddens == [8]
    for _ in range(20):
        obs = original.observation_space.sample()
        assert policy.compute_single_action(obs) == original.compute_single_action(obs)


def test_it_needs_no_environment_and_no_ray(tmp_path):
    path, policies = trained(tmp_path, model={"use_lstm": True})
    code = f"""
import sys
from flowrl.policies import Policy
session = Policy.from_checkpoint({str(path)!r}).session()
print([int(session.compute_single_action([0.1 * t, 0.0, 0.05, 0.0], 1.0)) for t in range(10)])
assert "ray" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    session = policies["default_policy"].session()
    expected = [
        int(session.compute_single_action([0.1 * t, 0.0, 0.05, 0.0], 1.0)) for t in range(10)
    ]
    assert json.loads(done.stdout) == expected


def test_the_class_of_a_script(tmp_path):
    """A class in `__main__` cannot be imported elsewhere: the one that is asked is taken."""
    script = """
import sys
from flowrl.algorithms.a2c import A2C, A2CConfig, A2CTorchPolicy
class Mine(A2CTorchPolicy):
    pass
class Own(A2C):
    policy_class = Mine
if __name__ == "__main__":
    with Own(A2CConfig(env="CartPole-v1", train_batch_size=32)) as algo:
        algo.train()
        algo.save(sys.argv[1])
"""
    (tmp_path / "script.py").write_text(script)
    place = tmp_path / "checkpoint"
    subprocess.run([sys.executable, tmp_path / "script.py", place], check=True)
    with pytest.raises(CheckpointError, match="call its from_checkpoint"):
        Policy.from_checkpoint(place)
    mine = type("Mine", (A2CTorchPolicy,), {})
    mine.__qualname__ = "Mine"
    assert type(mine.from_checkpoint(place)) is mine


def test_what_is_wrong_with_a_checkpoint_is_said(tmp_path):
    path, _ = trained(tmp_path)
    with pytest.raises(CheckpointError, match=r"no policy 'x', only \['default_policy'\]"):
        Policy.from_checkpoint(path, "x")
    with pytest.raises(CheckpointError, match="does not fit the policy"):
        Policy.from_checkpoint(path, config={"model": {"fcnet_hiddens": [3]}})
    manifest = read_manifest(path)
    del manifest["blake2b"]
    for change, match in (
        ({"class": "os:system"}, "is not a Policy"),
        ({"class": "no.such:Thing"}, "cannot be created"),
        ({"observation_space": None}, "cannot be created"),
    ):
        told = {"default_policy": {**manifest["policies"]["default_policy"], **change}}
        (path / "manifest.json").write_bytes(_sealed({**manifest, "policies": told}))
        with pytest.raises(CheckpointError, match=match):
            Policy.from_checkpoint(path, trust=True)
        if "class" in change:
            with pytest.raises(CheckpointError, match="trust=True"):
                Policy.from_checkpoint(path)
    del manifest["policies"]
    (path / "manifest.json").write_bytes(_sealed(manifest))
    with pytest.raises(CheckpointError, match="before checkpoints described"):
        Policy.from_checkpoint(path)


def test_settings_that_are_code(tmp_path):
    class Local(PlainModule):
        def __init__(self, *given):
            super().__init__(*given)
            self.out, self.value = torch.nn.Linear(4, 2), torch.nn.Linear(4, 1)

    path, policies = trained(tmp_path, model={"custom_model": Local})
    with pytest.raises(CheckpointError, match=r"does not fit the policy.*left out.*model"):
        Policy.from_checkpoint(path)
    policy = Policy.from_checkpoint(path, config={"model": {"custom_model": Local}})
    obs = np.ones((3, 4), np.float32)
    expected = policies["default_policy"].model.compute_outputs({"obs": obs})[0]
    np.testing.assert_array_equal(policy.model.compute_outputs({"obs": obs})[0], expected)


SPACES = [
    BOX,
    spaces.Box(np.array([-1.0, -np.inf]), np.array([np.inf, 2.5]), dtype=np.float64),
    spaces.Box(0, 255, (2, 3), np.uint8),
    spaces.Discrete(3, start=-1),
    spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 0], [0, 2]]),
    spaces.MultiBinary((2, 3)),
    NESTED,
    spaces.Tuple((BOX, spaces.Dict(b=spaces.Discrete(2)))),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_spaces_as_json(space):
    assert space_from_json(json.loads(json.dumps(space_to_json(space), allow_nan=False))) == space


def test_spaces_that_are_no_json():
    with pytest.raises(TypeError, match="cannot be stored"):
        space_to_json(spaces.Text(3))
