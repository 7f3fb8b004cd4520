"""Exported programs act like the policy."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import optree
import pytest
import torch
from gymnasium import spaces

from flowrl.algorithms.dqn import DQNTorchPolicy
from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.algorithms.r2d2 import R2D2Config
from flowrl.algorithms.sac import SACTorchPolicy
from flowrl.data import SampleBatch
from flowrl.policies import ConfigError, ModelV2, Policy, ViewRequirement
from flowrl.policies.export import example_inputs, leaf_names
from flowrl.policies.filters import ObservationFilter
from tests.extras import require_extra

ROOT = Path(__file__).parents[2]
BOX = spaces.Box(-1, 1, (4,), np.float32)
NESTED = spaces.Dict(a=BOX, eye=spaces.Box(0, 255, (12, 12, 3), np.uint8))


class LastObsModel(ModelV2):
    """A model with a view whose name sorts before `obs`."""

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
    "bools": (
        spaces.Box(0, 1, (4,), np.bool_),
        spaces.Discrete(3),
        {"normalize_observations": True},
    ),
    "scalar": (
        spaces.Box(-1, 1, (), np.float32),
        spaces.Discrete(3),
        {"normalize_observations": True},
    ),
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
    "last_obs": (BOX, spaces.Discrete(3), {"model": {"custom_model": LastObsModel}}),
    "frames": (BOX, spaces.Discrete(3), {"model": {"num_framestacks": 3}}),
    "nested": (NESTED, spaces.Dict(x=spaces.Discrete(2), y=spaces.MultiBinary(2)), {}),
    "mask": (
        spaces.Dict({"action_mask": spaces.MultiBinary(3), "at": BOX}),
        spaces.Discrete(3),
        {},
    ),
}


def make_policy(name, seed=0):
    obs_space, action_space, config = CASES[name]
    policy = PPOTorchPolicy(obs_space, action_space, {**config, "seed": seed})
    with torch.no_grad():  # heads start near zero; make actions differ
        policy.flat.vector.add_(0.3 * torch.randn(len(policy.flat.vector)))
    if policy.observation_filter is not None:
        rows = np.random.default_rng(0).normal(2, 3, (50, *obs_space.shape))
        policy.observation_filter.new_stats.update(rows)
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


def act(policy, inputs):
    """Best actions and states of the policy itself."""
    arrays = optree.tree_map(lambda leaf: leaf.numpy(), inputs)
    if policy.observation_filter is not None:
        arrays["obs"] = policy.observation_filter(arrays["obs"])
    actions, states, _ = policy.compute_actions_from_input_dict(arrays, explore=False)
    return policy.actions_for_env(actions), states


def cases(*fast):
    """All cases; those not in `fast` run in the slow suite."""
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in CASES]


@pytest.mark.parametrize("name", cases("bounds", "lstm"))
def test_exported_programs_act_like_the_policy(name, tmp_path):
    torch.manual_seed(0)
    policy = make_policy(name)
    path = policy.export(tmp_path / "deep" / "policy.pt2")
    program = torch.export.load(path).module()
    for rows in (1, 7):
        inputs = random_inputs(policy, rows)
        actions, states = act(policy, inputs)
        with torch.no_grad():
            outputs = program(inputs)
        optree.tree_map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), outputs["actions"], actions
        )
        for i, state in enumerate(states):
            np.testing.assert_allclose(outputs[f"state_out_{i}"], state, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["pt2", "onnx"])
def test_export_prints_nothing_and_writes_one_file(suffix, tmp_path):
    if suffix == "onnx":
        require_extra("onnx")
    code = (
        "from flowrl import PPO; policy = PPO('CartPole-v1', seed=1).get_policy(); "
        f"policy.export('policy.{suffix}')"
    )
    command = [sys.executable, "-W", "default", "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert process.stdout + process.stderr == ""
    assert [path.name for path in tmp_path.iterdir()] == [f"policy.{suffix}"]


@pytest.mark.parametrize("name", cases("last_obs"))
def test_onnx_programs_act_like_the_policy(name, tmp_path):
    require_extra("onnx")
    import onnxruntime

    torch.manual_seed(0)
    policy = make_policy(name)
    path = policy.export(tmp_path / "policy.onnx", format="onnx")
    assert list(tmp_path.iterdir()) == [path]
    session = onnxruntime.InferenceSession(str(path))
    for rows in (1, 5):
        inputs = random_inputs(policy, rows)
        actions, states = act(policy, inputs)
        names = [i.name for i in session.get_inputs()]
        assert sorted(names) == sorted(leaf_names(inputs))
        arrays = session.run(None, {name: find_leaf(inputs, name).numpy() for name in names})
        outputs = dict(zip([o.name for o in session.get_outputs()], arrays, strict=True))
        expected = {"actions": actions, **{f"state_out_{i}": s for i, s in enumerate(states)}}
        assert set(outputs) - set(leaf_names(expected)) <= {"policy_actions", "policy_actions.0"}
        for name in leaf_names(expected):
            np.testing.assert_allclose(outputs[name], find_leaf(expected, name), atol=1e-4)


def find_leaf(tree, name):
    for key in name.split("."):
        tree = tree[int(key) if isinstance(tree, tuple) else key]
    return tree


@pytest.mark.parametrize("dueling", [True, False])
@pytest.mark.parametrize(
    "settings",
    [{"num_atoms": 7}, {"noisy": True, "sigma0": 3.0}, {"noisy": True, "num_atoms": 7}],
    ids=["atoms", "noisy", "both"],
)
def test_exported_q_networks_are_greedy(settings, dueling, tmp_path):
    """Categorical distributions become Q-values; the noise of the last step is not exported."""
    space = spaces.Dict({"action_mask": spaces.MultiBinary(3), "at": BOX})
    config = {**settings, "dueling": dueling, "seed": 0}
    policy = DQNTorchPolicy(space, spaces.Discrete(3, start=1), config)
    policy.flat.vector.data.add_(0.3 * torch.randn(policy.flat.vector.shape))
    rng = np.random.default_rng(0)
    mask = rng.integers(0, 2, (50, 3)).astype(np.int8)
    mask[:, 1] = 1
    obs = {"action_mask": mask, "at": rng.uniform(-1, 1, (50, 4)).astype(np.float32)}
    policy.compute_actions(obs)
    program = torch.export.load(policy.export(tmp_path / "policy.pt2")).module()
    inputs = {"obs": {name: torch.from_numpy(leaf) for name, leaf in obs.items()}}
    best, _, _ = policy.compute_actions(obs, explore=False)
    assert program(inputs)["actions"].tolist() == (best + 1).tolist()
    assert len(set(best.tolist())) > 1


@pytest.mark.parametrize("kind", ["image", "nested", "recurrent"])
def test_export_after_learning(kind, tmp_path):
    """Models keep tensors with a graph from their last forward pass."""
    if kind == "recurrent":
        config = R2D2Config(env="CartPole-v1", learning_starts=60, seed=0)
        algorithm = config.reporting(min_sample_timesteps_per_iteration=70).build()
        algorithm.train()
        policy = algorithm.get_policy()
    else:
        space = NESTED["eye"] if kind == "image" else NESTED
        policy_class = DQNTorchPolicy if kind == "image" else SACTorchPolicy
        actions = spaces.Discrete(3) if kind == "image" else BOX
        policy = policy_class(space, actions, {"seed": 0, "model": {"fcnet_hiddens": [8]}})
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
    arrays = optree.tree_map(lambda leaf: leaf.numpy(), inputs)
    actions, _, _ = policy.compute_actions_from_input_dict(arrays, explore=False)
    np.testing.assert_allclose(program(inputs)["actions"], actions, atol=1e-5)


def test_unsupported_exports_are_rejected(tmp_path):
    policy = make_policy("plain")
    with pytest.raises(ConfigError, match="is a folder"):
        policy.export(tmp_path)
    with pytest.raises(ConfigError, match="must be one of torch, onnx"):
        policy.export(tmp_path / "x", format="tf")
    policy.view_requirements["others"] = ViewRequirement("obs", agents=["x"])
    with pytest.raises(ConfigError, match="shows other agents"):
        policy.export(tmp_path / "x")
    with pytest.raises(NotImplementedError, match="no export"):
        Policy(BOX, spaces.Discrete(2), {}).export(tmp_path / "x")


class CountsRows(torch.nn.Module):
    """A network whose forward reads the number of rows as a Python number."""

    def __init__(self, obs_space, action_space, num_outputs):
        super().__init__()
        self.layer, self.value = torch.nn.Linear(4, num_outputs), torch.nn.Linear(4, 1)

    def forward(self, obs):
        rows = obs.reshape(len(obs), 4)
        return self.layer(rows), self.value(rows).squeeze(-1)


def test_network_for_one_batch_size_is_rejected_with_a_hint(tmp_path):
    policy = PPOTorchPolicy(BOX, spaces.Discrete(2), {"model": {"custom_model": CountsRows}})
    with pytest.raises(ConfigError, match=r"use x\.shape\[0\] instead of len\(x\)"):
        policy.export(tmp_path / "policy.pt2", format="torch")


def test_observations_with_a_start_are_exported(tmp_path):
    require_extra("onnx")
    parts = {
        "a": spaces.Discrete(3, start=5),
        "b": spaces.Box(-1, 1, (2,)),
        "c": spaces.MultiDiscrete([3, 4], start=[1, -1]),
    }
    space = spaces.Dict(parts)
    policy = PPOTorchPolicy(space, spaces.Discrete(2), {"seed": 0})
    example = optree.tree_map(np.asarray, example_inputs(policy, 1)["obs"])
    assert space.contains(optree.tree_map(lambda leaf: leaf[0], example))
    assert policy.export(tmp_path / "policy.onnx", format="onnx").is_file()


class HistoryModel(LastObsModel):
    """Sees three earlier observations in a view with another name."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.view_requirements["last_obs"] = ViewRequirement("obs", self.obs_space, shift=-1)


@pytest.mark.parametrize("dtype", [np.float64, np.int64])
def test_large_observations_keep_their_digits(tmp_path, dtype):
    """Such as times in seconds: float32 has steps of 128 there."""
    space = spaces.Box(0, 2_000_000_000, (2,), dtype)
    policy = PPOTorchPolicy(
        space, spaces.Box(-1, 1, (1,)), {"normalize_observations": True, "seed": 1}
    )
    observations = (1_700_000_000 + np.arange(60).reshape(-1, 1) * np.ones(2)).astype(dtype)
    policy.observation_filter.merge_stats(stats_of(observations))
    program = torch.export.load(policy.export(tmp_path / "p.pt2")).module()
    expected = [policy.predict(row, deterministic=True)[0] for row in observations[:5]]
    actions = program({"obs": torch.from_numpy(observations[:5])})["actions"]
    np.testing.assert_allclose(actions.numpy(), expected, atol=1e-5)


def stats_of(observations):
    filter_ = ObservationFilter(observations.shape[1:])
    filter_.new_stats.update(observations)
    return filter_.take_new_stats()


def test_all_views_of_observations_are_normalized(tmp_path):
    policy = PPOTorchPolicy(
        BOX,
        spaces.Discrete(3),
        {"normalize_observations": True, "model": {"custom_model": HistoryModel}, "seed": 1},
    )
    policy.observation_filter.merge_stats(stats_of(np.linspace(0, 8, 40).reshape(10, 4)))
    program = torch.export.load(policy.export(tmp_path / "p.pt2")).module()
    views = {
        "obs": torch.full((1, 4), 3.0),
        "last_obs": torch.full((1, 4), 5.0),
    }
    outputs = {
        name: torch.from_numpy(policy.observation_filter(value.numpy()))
        for name, value in views.items()
    }
    with torch.no_grad():
        logits, _ = policy.model(outputs, [], None)
    assert program(views)["actions"].tolist() == logits.argmax(1).tolist()


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3, dtype=np.int32),
        spaces.MultiDiscrete([2, 3], dtype=np.int32),
        spaces.MultiDiscrete([2, 3], dtype=np.int32, start=[1, 0]),
    ],
)
def test_actions_have_the_dtype_of_the_space(tmp_path, space):
    policy = PPOTorchPolicy(BOX, space, {"seed": 1})
    assert space.contains(policy.predict(np.zeros(4, np.float32))[0])
    actions, _, _ = policy.compute_actions(np.zeros((2, 4), np.float32))
    assert policy.actions_for_env(actions).dtype == np.int32
    program = torch.export.load(policy.export(tmp_path / "p.pt2")).module()
    assert program({"obs": torch.zeros(1, 4)})["actions"].dtype == torch.int32


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (2,), np.float64),
        spaces.Discrete(3, dtype=np.int32),
        spaces.MultiBinary(2),
        spaces.Dict(a=spaces.Box(-1, 1, (1,)), b=spaces.Discrete(2)),
    ],
)
def test_programs_take_their_own_actions_as_previous_actions(tmp_path, space):
    model = {"use_lstm": True, "lstm_use_prev_action": True, "max_seq_len": 4}
    policy = PPOTorchPolicy(BOX, space, {"seed": 1, "model": model})
    program = torch.export.load(policy.export(tmp_path / "p.pt2")).module()
    inputs = example_inputs(policy, 1)
    outputs = program(inputs)
    program({**inputs, "prev_actions": outputs["policy_actions"]})
