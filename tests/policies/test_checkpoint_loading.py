"""Loading policies from checkpoints."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces

from flowrl.algorithms.a2c import A2CTorchPolicy
from flowrl.algorithms.ppo import PPO, PPOConfig, PPOTorchPolicy
from flowrl.data.checkpoint import CheckpointError, read_checkpoint, write_checkpoint
from flowrl.errors import ConfigError
from flowrl.policies import Policy
from flowrl.policies.code_references import CodeResolver
from flowrl.policies.config import ModelConfig
from flowrl.policies.json_codec import decode, encode, space_from_json, space_to_json
from flowrl.policies.policy_spec import PolicySpec

from .fakes import PlainModule

BOX = spaces.Box(-1, 1, (4,), np.float32)
NESTED = spaces.Dict(a=BOX, image=spaces.Box(0, 255, (12, 12, 3), np.uint8))


def train_and_save(tmp_path, **settings):
    config = PPOConfig(env="CartPole-v1", train_batch_size=200, seed=3, **settings)
    with config.build() as algorithm:
        algorithm.train()
        path = algorithm.save(tmp_path / "checkpoint")
        policies = dict(algorithm.workers.local_worker().policy_map)
    return path, policies


class FromScript(PlainModule):
    """A network whose class only trusted checkpoints import."""

    def __init__(self, *args):
        super().__init__(*args)
        self.out, self.value = torch.nn.Linear(4, 2), torch.nn.Linear(4, 1)


def policy_of_algorithm(path, config=None):
    with PPO.from_checkpoint(path, config=config) as algorithm:
        return algorithm.get_policy()


LOADERS = [Policy.from_checkpoint, policy_of_algorithm]


def test_loaded_policy_acts_like_the_original(tmp_path):
    path, policies = train_and_save(
        tmp_path, normalize_observations=True, model={"fcnet_hiddens": [8]}
    )
    policy = Policy.from_checkpoint(path)
    original = policies["default_policy"]
    assert type(policy) is PPOTorchPolicy
    assert policy.observation_space == original.observation_space
    assert policy.config.model.fcnet_hiddens == [8]
    for _ in range(20):
        obs = original.observation_space.sample()
        assert policy.compute_single_action(obs) == original.compute_single_action(obs)


def test_loading_needs_neither_environment_nor_ray(tmp_path):
    path, policies = train_and_save(tmp_path, model={"use_lstm": True})
    code = f"""
import sys
from flowrl.policies import Policy
runner = Policy.from_checkpoint({str(path)!r}).session()
print([int(runner.compute_single_action([0.1 * t, 0.0, 0.05, 0.0], 1.0)) for t in range(10)])
assert "ray" not in sys.modules
"""
    command = [sys.executable, "-c", code]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    runner = policies["default_policy"].session()
    expected = [
        int(runner.compute_single_action([0.1 * t, 0.0, 0.05, 0.0], 1.0)) for t in range(10)
    ]
    assert json.loads(process.stdout) == expected


def test_class_of_a_script_loads_with_a_class_of_the_same_name(tmp_path):
    """A class in `__main__` cannot be imported in another process."""
    script = """
import sys
from flowrl.algorithms.a2c import A2C, A2CConfig, A2CTorchPolicy
class CustomPolicy(A2CTorchPolicy):
    pass
class CustomA2C(A2C):
    policy_class = CustomPolicy
if __name__ == "__main__":
    with CustomA2C(A2CConfig(env="CartPole-v1", train_batch_size=32)) as algo:
        algo.train()
        algo.save(sys.argv[1])
"""
    (tmp_path / "script.py").write_text(script)
    path = tmp_path / "checkpoint"
    subprocess.run([sys.executable, tmp_path / "script.py", path], check=True)
    with pytest.raises(CheckpointError, match="call its from_checkpoint"):
        Policy.from_checkpoint(path)
    policy_class = type("CustomPolicy", (A2CTorchPolicy,), {"__qualname__": "CustomPolicy"})
    assert type(policy_class.from_checkpoint(path)) is policy_class


def test_message_describes_invalid_checkpoints(tmp_path):
    path, _ = train_and_save(tmp_path)
    with pytest.raises(CheckpointError, match=r"no policy 'x', only \['default_policy'\]"):
        Policy.from_checkpoint(path, "x")
    with pytest.raises(CheckpointError, match="does not fit the policy"):
        Policy.from_checkpoint(path, config={"model": {"fcnet_hiddens": [3]}})
    state, manifest = read_checkpoint(path)
    generated = ("format", "files", "blake2b")
    metadata = {key: value for key, value in manifest.items() if key not in generated}
    for change, match in (
        ({"class": "os:system"}, "is not a Policy"),
        ({"class": "no.such:Thing"}, "cannot be created"),
        ({"observation_space": None}, "observation_space of policy .* could not be saved"),
        ({"observation_space": {}}, "cannot be created"),
    ):
        policies = {"default_policy": {**metadata["policies"]["default_policy"], **change}}
        write_checkpoint(path, state, {**metadata, "policies": policies})
        with pytest.raises(CheckpointError, match=match):
            Policy.from_checkpoint(path, trust=True)
        if "class" in change:
            with pytest.raises(CheckpointError, match="trust=True"):
                Policy.from_checkpoint(path)
    del metadata["policies"]
    write_checkpoint(path, state, metadata)
    with pytest.raises(CheckpointError, match="describes no policies"):
        Policy.from_checkpoint(path)


def test_code_without_an_import_path_must_be_passed_again(tmp_path):
    class Local(PlainModule):
        def __init__(self, *args):
            super().__init__(*args)
            self.out, self.value = torch.nn.Linear(4, 2), torch.nn.Linear(4, 1)

    path, policies = train_and_save(tmp_path, model={"custom_model": Local, "max_seq_len": 7})
    obs = np.ones((3, 4), np.float32)
    expected = policies["default_policy"].model.compute_outputs({"obs": obs})[0]
    for load in LOADERS:
        with pytest.raises(CheckpointError, match=r"'model.custom_model'.*{'model': {'custom_mod"):
            load(path)
        policy = load(path, config={"model": {"custom_model": Local}})
        assert policy.config.model.max_seq_len == 7
        np.testing.assert_array_equal(policy.model.compute_outputs({"obs": obs})[0], expected)


@pytest.mark.parametrize("load", LOADERS)
def test_invalid_saved_record_names_the_checkpoint(tmp_path, load):
    path, _ = train_and_save(tmp_path, model={"fcnet_activation": "relu"})
    state, manifest = read_checkpoint(path)
    manifest = json.loads(json.dumps(manifest).replace('"relu"', '"step"'))
    generated = ("format", "files", "blake2b")
    write_checkpoint(path, state, {k: v for k, v in manifest.items() if k not in generated})
    with pytest.raises(CheckpointError, match=r"checkpoint.*fcnet_activation"):
        load(path)


@pytest.mark.parametrize("load", LOADERS)
def test_changes_of_a_nested_record_keep_its_other_settings(tmp_path, load):
    exploration = {"type": "EpsilonGreedy", "epsilon": 0.3, "random_timesteps": 10}
    model = {"fcnet_hiddens": [8], "fcnet_activation": "relu"}
    path, policies = train_and_save(tmp_path, model=model, exploration_config=exploration)
    changes = {"model": {"max_seq_len": 7}, "exploration_config": {"epsilon": 0.1}}
    policy = load(path, config=changes)
    assert policy.config.model == ModelConfig(**model, max_seq_len=7)
    assert policy.config.exploration_config.random_timesteps == 10
    assert policy.config.exploration_config.epsilon == 0.1
    obs = np.ones((3, 4), np.float32)
    expected = policies["default_policy"].model.compute_outputs({"obs": obs})[0]
    np.testing.assert_array_equal(policy.model.compute_outputs({"obs": obs})[0], expected)
    with pytest.raises(ConfigError, match=r"model\.fcnet_hiddens"):
        load(path, config={"model": {"fcnet_hiddens": 3}})


@pytest.mark.parametrize("is_code", [True, False], ids=["code", "array"])
@pytest.mark.parametrize("load", LOADERS)
def test_changes_of_a_nested_record_do_not_trust_its_other_settings(tmp_path, load, is_code):
    path, _ = train_and_save(tmp_path, model={"custom_model": FromScript})
    state, manifest = read_checkpoint(path)
    code = f"{FromScript.__module__}:{FromScript.__qualname__}"
    other = code.replace("FromScript", "Other")
    encoded = {"__code__": other} if is_code else encode(np.array(other))
    text = json.dumps(manifest)
    assert json.dumps({"__code__": code}) in text
    manifest = json.loads(text.replace(json.dumps({"__code__": code}), json.dumps(encoded)))
    generated = ("format", "files", "blake2b")
    write_checkpoint(path, state, {k: v for k, v in manifest.items() if k not in generated})
    with pytest.raises(CheckpointError, match=r"model\.custom_model is the code.*not trusted"):
        load(path, config={"model": {"max_seq_len": 7}})


# -- JSON ------------------------------------------------------------------------------------------


SPACES = [
    BOX,
    spaces.Box(np.array([-1.0, -np.inf]), np.array([np.inf, 2.5]), dtype=np.float64),
    spaces.Box(0, 255, (2, 3), np.uint8),
    spaces.Box(0, 1, (3,), np.bool_),
    spaces.Box(np.array([0, 1]), np.array([0, 1]), dtype=np.bool_),
    spaces.Discrete(3, start=-1),
    spaces.Discrete(3, dtype=np.int32),
    spaces.MultiDiscrete([2, 3], dtype=np.uint8),
    spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 0], [0, 2]]),
    spaces.MultiBinary(2),
    spaces.MultiBinary((2, 3)),
    NESTED,
    spaces.Tuple((BOX, spaces.Dict(b=spaces.Discrete(2)))),
    spaces.Dict({0: BOX, 1: spaces.Discrete(2)}),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_spaces_survive_json(space):
    loaded = space_from_json(json.loads(json.dumps(space_to_json(space), allow_nan=False)))
    assert loaded == space
    assert loaded.dtype == space.dtype


def test_unsupported_spaces_are_rejected():
    with pytest.raises(TypeError, match="cannot be stored"):
        space_to_json(spaces.Text(3))
    with pytest.raises(TypeError, match=r"the key 1\.5 of a Dict space cannot"):
        space_to_json(spaces.Dict({1.5: BOX}))


@pytest.mark.parametrize(
    "value",
    [
        np.arange(3),
        np.zeros((0, 2), np.uint8),
        np.array([[np.nan, -np.inf]], ">f4"),
        np.array(["text", "é"]),
        np.float32(0.1),
        np.True_,
    ],
)
def test_arrays_in_settings_are_restored(value):
    resolver = CodeResolver(False, {}, [])
    restored = decode(json.loads(json.dumps(encode({"maps": [value]}))), resolver)["maps"][0]
    assert type(restored) is type(value)
    assert restored.dtype == value.dtype
    np.testing.assert_array_equal(restored, value, strict=True)
    with pytest.raises(TypeError, match="cannot be stored"):
        encode(np.array([object()]))
    with pytest.raises(ValueError, match=r"size|shape|buffer"):
        decode({**encode(np.arange(3)), "shape": [4]}, resolver)


def test_policy_class_of_a_plan_file_is_stored_by_a_path_that_leads_to_it(monkeypatch):
    name = "flowrl_plan_two"
    first, second, earlier = (type("PG", (), {"__module__": name}) for _ in range(3))
    module = SimpleNamespace(PG=first, OTHER=second)
    monkeypatch.setitem(sys.modules, name, module)
    path = encode(PolicySpec(policy_class=first))
    assert f"{name}:PG" in str(path)
    assert encode(PolicySpec(policy_class=earlier)) == path  # of an earlier execution of the file
    with pytest.raises(TypeError, match="cannot be stored"):
        encode(PolicySpec(policy_class=second))
    with pytest.raises(TypeError, match="cannot be stored"):
        encode({"policy_class": first()})
