"""Files from elsewhere run no code without trust: checkpoints, run directories, YAML, datasets."""

import copy
import hashlib
import json
import pickle
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from flowrl.algorithms import Algorithm
from flowrl.algorithms.a2c import A2C, A2CConfig
from flowrl.cli.main import main
from flowrl.data import SampleBatch
from flowrl.data.checkpoint import (
    MANIFEST,
    CheckpointError,
    read_checkpoint,
    read_manifest,
    seal_manifest,
    write_checkpoint,
)
from flowrl.errors import ConfigError, OfflineDataError
from flowrl.offline.minari import MinariDataset
from flowrl.offline.parquet import (
    read_parquet,
    read_policy_id,
    write_parquet,
)
from flowrl.policies import Policy
from flowrl.trainer.plan_files import load_plan
from flowrl.trainer.trust import untrusted_code
from tests.extras import require_extra

GENERATED = ("format", "files", "blake2b")
CODE = """
import pathlib
pathlib.Path({marker!r}).touch()
import gymnasium as gym
from flowrl.algorithms.a2c import A2C, A2CConfig
gym.register("Evil-v0", "gymnasium.envs.classic_control.cartpole:CartPoleEnv")
class Evil(gym.Env):
    pass
config = A2CConfig(env="CartPole-v1")
def execution_plan(workers, config):
    raise RuntimeError
"""


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """A folder on the import path with code that leaves a marker when it is executed."""
    folder, marker = tmp_path / "evil", tmp_path / "executed"
    folder.mkdir()
    for name in ("evil_module.py", "plan.py"):
        (folder / name).write_text(CODE.format(marker=str(marker)))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(tmp_path)  # some payloads are accepted as names of folders
    monkeypatch.delitem(sys.modules, "evil_module", raising=False)

    class Evil:
        plan = str(folder / "plan.py")

        @staticmethod
        def executed():
            return marker.exists() or "evil_module" in sys.modules

    return Evil


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """State and manifest of a checkpoint."""
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    config = A2CConfig(
        env="CartPole-v1",
        train_batch_size=16,
        num_envs_per_worker=1,
        policies={"p": (None,)},
        model={"fcnet_hiddens": [4]},
    )
    with config.build() as algorithm:
        algorithm.save(path)
    state, manifest = read_checkpoint(path)
    return state, {name: value for name, value in manifest.items() if name not in GENERATED}


def places(value, path=()):
    """Yield the path of every value in a JSON tree."""
    yield path
    if isinstance(value, list):
        value = dict(enumerate(value))
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield from places(inner, (*path, key))


def replaced(tree, path, value):
    """Return a copy of a JSON tree with another value at a path."""
    tree = copy.deepcopy(tree)
    inner = tree
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return tree


def payloads(evil, marker):
    """Return references and paths that would execute code if they were followed."""
    return [
        "evil_module:Evil",
        "evil_module:Evil-v0",
        evil.plan,
        evil.plan.removesuffix(".py"),
        {"__code__": "evil_module:Evil"},
        {"__code__": "flowrl.algorithms.a2c:evil_module.Evil"},
        {"__code__": "flowrl.data.checkpoint:shutil.os.system"},
        {"__code__": "flowrl.data.checkpoint:shutil.os.mkdir"},
        {"__code__": "flowrl.settings:imported"},
        {"__code__": "flowrl.algorithms.a2c:A2C"},
        {"__code__": "flowrl.trainer.plan_files:load_plan"},
        {"__code__": "flowrl.policies.torch_policy:TorchPolicy"},
        {"__settings__": "evil_module:Evil", "values": {}, "chosen": []},
        {"__settings__": "flowrl.data.checkpoint:shutil.os.mkdir", "values": {}, "chosen": []},
        {"env": "evil_module:Evil-v0"},
        {"env": {"__code__": "flowrl.data.checkpoint:shutil.os.mkdir"}},
        {"custom_model": "evil_module:Evil"},
        {"model": {"custom_model": "evil_module:Evil"}},
        {"p": {"__policy_spec__": {"policy_class": {"__code__": "evil_module:Evil"}}}},
        {"p": {"__policy_spec__": {"config": {"model": {"custom_model": "evil_module:Evil"}}}}},
    ]


def load_and_use(path):
    """Load a checkpoint in every way, and use what is loaded as far as that works."""
    for cls in (Algorithm, A2C):
        try:
            algorithm = cls.from_checkpoint(path)
        except (CheckpointError, ConfigError):
            continue
        with algorithm:
            try:
                _ = algorithm.plan
                if algorithm.config.env != "CartPole-v1" or algorithm.config.evaluation_config:
                    algorithm.evaluate(episodes=1)
            except Exception:  # a damaged setting may fail in any way
                continue
    for cls in (Policy, A2C.policy_class):
        try:
            cls.from_checkpoint(path)
        except (CheckpointError, ConfigError):
            continue


def write_manifest(path, state, manifest):
    write_checkpoint(path, state, manifest)
    return path


# -- checkpoints -----------------------------------------------------------------------------------


def test_valid_checkpoint_loads_without_trust(saved, tmp_path, evil):
    path = write_manifest(tmp_path / "c", *saved)
    with A2C.from_checkpoint(path) as algorithm, Algorithm.from_checkpoint(path) as other:
        assert type(algorithm) is type(other) is A2C
        algorithm.evaluate(episodes=1)
    assert isinstance(Policy.from_checkpoint(path), A2C.policy_class)
    assert not evil.executed()


def test_payloads_execute_if_they_are_trusted(saved, tmp_path, evil):
    """The payloads of the other tests are not harmless by mistake."""
    manifest = replaced(saved[1], ("config", "values", "env"), {"__code__": "evil_module:Evil"})
    path = write_manifest(tmp_path / "c", saved[0], manifest)
    with pytest.raises(Exception), Algorithm.from_checkpoint(path, trust=True) as algorithm:  # noqa: B017, PT011
        algorithm.evaluate(episodes=1)
    assert evil.executed()


WALK = {"__code__": "flowrl.data.checkpoint:shutil.os.mkdir"}
ENV = ("config", "values", "env")
SINGLE_CHANGES = [
    (("algorithm",), "evil_module:Evil"),
    (ENV, WALK),
    (ENV, {"__code__": "evil_module:Evil"}),
    (ENV, {"__code__": "flowrl.settings:imported"}),
    (ENV, "evil_module:Evil-v0"),
    (("config", "values", "evaluation_config"), {"env": WALK, "env_config": {"path": "MARKER"}}),
    (("config", "values", "evaluation_config"), {"env": "evil_module:Evil-v0"}),
    (("config", "values", "plan"), "PLAN"),
    (("config", "values", "plan"), "../../../../../../../../../..PLAN_WITHOUT_SUFFIX"),
    (("config", "values", "model", "values", "custom_model"), "evil_module:Evil"),
    (("config", "values", "callbacks_class"), {"__code__": "evil_module:Evil"}),
    (("config", "values", "address"), "ray://nowhere:10001"),
    (("config", "values", "log_config"), {"wandb": {"settings": {"git_root": "."}}}),
    # classes that may be named, in a setting of another kind
    (ENV, {"__code__": "flowrl.algorithms.a2c:A2C"}),
    (("config", "values", "evaluation_config"), {"env": {"__code__": "flowrl.algorithms.a2c:A2C"}}),
    (("config", "values", "policy_mapping_fn"), {"__code__": "flowrl.algorithms.a2c:A2C"}),
    (
        ("config", "values", "model", "values", "custom_model"),
        {"__code__": "flowrl.algorithms.a2c:A2C"},
    ),
    (("config", "__settings__"), "evil_module:Evil"),
]


@pytest.mark.parametrize(("place", "payload"), SINGLE_CHANGES)
def test_checkpoint_that_names_code_is_rejected(saved, tmp_path, evil, place, payload):
    text = json.dumps(payload).replace("PLAN_WITHOUT_SUFFIX", evil.plan.removesuffix(".py"))
    text = text.replace("PLAN", evil.plan).replace("MARKER", str(tmp_path / "executed"))
    manifest = replaced(saved[1], place, json.loads(text))
    if "A2C" in text:
        manifest["config"]["values"]["env_config"] = {"env": "CartPole-v1", "plan": evil.plan}
    else:
        manifest["config"]["values"]["env_config"] = {"path": str(tmp_path / "executed")}
    path = write_manifest(tmp_path / "c", saved[0], manifest)
    for cls in (Algorithm, A2C):
        with pytest.raises(
            (CheckpointError, ConfigError), match=r"trust=True|unknown plan|evil_mod"
        ):
            cls.from_checkpoint(path)
    assert not evil.executed()


@pytest.mark.parametrize("place", [("class",), ("config_class",), ("config", "model")])
def test_policy_that_names_code_is_rejected(saved, tmp_path, evil, place):
    payload = "evil_module:Evil"
    payload = {"custom_model": payload} if place[-1] == "model" else payload
    manifest = replaced(saved[1], ("policies", "p", *place), payload)
    path = write_manifest(tmp_path / "c", saved[0], manifest)
    for cls in (Policy, A2C.policy_class):
        with pytest.raises(CheckpointError, match="trust=True"):
            cls.from_checkpoint(path)
    assert not evil.executed()


def test_policy_loads_although_its_run_names_code_of_the_user(saved, tmp_path, evil):
    manifest = replaced(saved[1], ("policies", "p", "config", "env"), WALK)
    code = {"__code__": "evil_module:Evil"}
    manifest = replaced(manifest, ("policies", "p", "config", "callbacks_class"), code)
    path = write_manifest(tmp_path / "c", saved[0], manifest)
    assert isinstance(Policy.from_checkpoint(path), A2C.policy_class)
    assert not evil.executed()


def test_caller_can_replace_untrusted_settings(saved, tmp_path, evil):
    values = {"env": WALK, "address": "ray://nowhere:10001", "plan": evil.plan}
    manifest = saved[1]
    for name, value in values.items():
        manifest = replaced(manifest, ("config", "values", name), value)
    path = write_manifest(tmp_path / "c", saved[0], manifest)
    changes = {"env": "CartPole-v1", "address": None, "plan": "a2c"}
    with A2C.from_checkpoint(path, config=changes) as algorithm:
        assert algorithm.config.env == "CartPole-v1"
    assert not evil.executed()


def test_changes_of_one_policy_do_not_replace_the_code_of_others(saved, tmp_path, evil):
    spec = {"__policy_spec__": {"config": {"model": {"custom_model": "evil_module:Evil"}}}}
    manifest = replaced(saved[1], ("config", "values", "policies"), {"a": spec, "b": spec})
    path = write_manifest(tmp_path / "c", saved[0], manifest)
    changes = {"policies": {"a": {"config": {"lr": 0.1}}}}
    with pytest.raises(CheckpointError, match="trust=True"):
        A2C.from_checkpoint(path, config=changes)
    assert not evil.executed()


def test_ray_on_this_machine_needs_no_trust(saved, tmp_path):
    manifest = replaced(saved[1], ("config", "values", "address"), "local")
    with Algorithm.from_checkpoint(write_manifest(tmp_path / "c", saved[0], manifest)) as algorithm:
        assert algorithm.config.address == "local"


def test_address_of_a_cluster_needs_trust(saved, tmp_path):
    manifest = replaced(saved[1], ("config", "values", "address"), "ray://nowhere:10001")
    remedy = r"pass trust=True to allow that, or replace the setting: config=\{…\}"
    with pytest.raises(CheckpointError, match=rf"nowhere:10001 \(this process exchanges.*{remedy}"):
        Algorithm.from_checkpoint(write_manifest(tmp_path / "c", saved[0], manifest))


def test_damaged_manifest_of_a_shipped_plan_names_no_code_of_it(saved, tmp_path):
    """A shipped plan's own functions are trusted only with the plan's hash."""
    reference = {"__code__": "flowrl_plan_a2c:execution_plan"}
    manifest = replaced(saved[1], ("config", "values", "policy_mapping_fn"), reference)
    with Algorithm.from_checkpoint(write_manifest(tmp_path / "c", saved[0], manifest)):
        pass
    manifest["plan_sha256"] = "0" * 64
    with pytest.raises(CheckpointError, match="trust=True"):
        Algorithm.from_checkpoint(write_manifest(tmp_path / "c", saved[0], manifest))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_field_of_a_manifest_executes_code(saved, tmp_path, evil):
    """Every value of the manifest, replaced by every twelfth payload in turn."""
    path = write_manifest(tmp_path / "c", *saved)
    manifest = read_manifest(path)
    count = 0
    for number, place in enumerate(list(places(saved[1]))[1:]):
        for payload in list(payloads(evil, tmp_path))[number % 12 :: 12]:
            changed = replaced(manifest, place, payload)
            (path / MANIFEST).write_bytes(seal_manifest(changed))
            try:
                load_and_use(path)
            except (TypeError, KeyError, AttributeError, ValueError) as error:
                raise AssertionError(f"{place}: {payload}: {error!r}") from error
            assert not evil.executed(), (place, payload)
            count += 1
    assert count > 500


# -- run directories and YAML ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A finished run."""
    path = tmp_path_factory.mktemp("run") / "r"
    flags = ["--stop-iters", "1", "--train-batch-size", "16", "--num-envs-per-worker", "1"]
    assert main(["train", "a2c", *flags, "--run-dir", str(path)]) == 0
    return path


def change_setting(path, name, value):
    """Change a setting in the checkpoint of a run."""
    (checkpoint,) = (path / "checkpoints").iterdir()
    manifest = read_manifest(checkpoint)
    values = manifest["config"]["values"]
    if name == "model":
        values["model"]["values"] |= value
    else:
        values[name] = value
    (checkpoint / MANIFEST).write_bytes(seal_manifest(manifest))


def run_commands(path):
    """Return the exit codes of the commands that read a run directory."""
    return [
        main(["resume", str(path), "--stop-iters", "1"]),
        main(["evaluate", str(path), "--episodes", "1"]),
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("env", "evil_module:Evil-v0"),
        ("plan", "PLAN"),
        ("evaluation_config", {"env": "evil_module:Evil-v0"}),
        ("model", {"custom_model": "evil_module:Evil"}),
        ("address", "ray://nowhere:10001"),
    ],
)
def test_run_directory_that_names_code_is_rejected(run_dir, tmp_path, evil, capsys, name, value):
    path = shutil.copytree(run_dir, tmp_path / "r")
    change_setting(path, name, evil.plan if value == "PLAN" else value)
    assert run_commands(path) == [2, 2]
    assert "pass --trust" in capsys.readouterr().err
    assert not evil.executed()


def test_trusted_run_directory_executes_its_code(run_dir, tmp_path, evil):
    path = shutil.copytree(run_dir, tmp_path / "r")
    change_setting(path, "plan", evil.plan)
    main(["evaluate", str(path), "--trust", "--episodes", "1"])
    assert evil.executed()


@pytest.mark.parametrize(
    "of_plan", [["policies"], ["model"], ["env_config"], ["policies", "model"]]
)
@pytest.mark.parametrize("encoded", ["plain", "items", "tuple"])
def test_settings_that_the_manifest_assigns_to_the_plan_are_not_trusted(
    run_dir, tmp_path, evil, of_plan, encoded
):
    """They are not settings that the caller has passed."""
    path = shutil.copytree(run_dir, tmp_path / "r")
    (checkpoint,) = (path / "checkpoints").iterdir()
    manifest = read_manifest(checkpoint)
    manifest["settings_of_plan"] = of_plan
    code = "evil_module:Evil"
    if encoded == "plain":
        manifest["config"]["values"]["model"]["values"]["custom_model"] = code
    elif encoded == "items":
        manifest["config"]["values"]["model"] = {"__items__": [["custom_model", code]]}
    else:
        manifest["config"]["values"]["model"] = {"custom_model": {"__tuple__": [code]}}
    manifest["config"]["values"]["evaluation_config"] = {"env": "evil_module:Evil-v0"}
    (checkpoint / MANIFEST).write_bytes(seal_manifest(manifest))
    assert run_commands(path) == [2, 2]
    (path / "setup.json").write_text(json.dumps(manifest))
    assert main(["replay", str(path)]) == 2
    assert not evil.executed()


def test_settings_in_config_json_are_only_shown(run_dir, tmp_path, evil):
    path = shutil.copytree(run_dir, tmp_path / "r")
    config = json.loads((path / "config.json").read_text())
    config |= {"plan": evil.plan, "env": "evil_module:Evil-v0"}
    (path / "config.json").write_text(json.dumps(config))
    assert main(["evaluate", str(path), "--trust", "--episodes", "1"]) == 0
    assert not evil.executed()


@pytest.mark.parametrize(
    "command",
    [
        "flowrl train PLAN",
        "flowrl train evil.yaml --trust",
        "flowrl train --run=A2C --env evil_module:Evil-v0",
        "flowrl train --run=A2C --model.custom-model evil_module:Evil",
        "flowrl train --run=A2C --callbacks-class evil_module:Evil",
        "flowrl train --run=A2C --policy-mapping-fn shutil:os.system",
        "flowrl train a2c --policies.p.config.lr 1 --callbacks-class evil_module:Evil",
        "flowrl train a2c --help",
        'flowrl train --run=A2C --config \'{"plan": "PLAN"}\'',
        "flowrl train a2c --policies.p.config.model.custom-model evil_module:Evil",
        "flowrl resume --trust",
    ],
)
def test_command_of_a_run_executes_no_code(run_dir, tmp_path, evil, command, capsys):
    path = shutil.copytree(run_dir, tmp_path / "r")
    (path / "command.txt").write_text(command.replace("PLAN", evil.plan) + "\n")
    (path / "plan.py").write_text(Path(evil.plan).read_text())
    for arguments in (["resume", str(path), "--stop-iters", "1"], ["evaluate", str(path)]):
        with suppress(SystemExit):  # an option that the command does not have
            main([*arguments, *(["--episodes", "1"] if arguments[0] == "evaluate" else [])])
    assert not evil.executed()


@pytest.mark.parametrize(
    "text",
    [
        "{plan: PLAN}",
        "{plan: PLAN/, env: CartPole-v1}",
        "{plan: PLAN/., env: CartPole-v1}",
        "{run: SAC, env: Pendulum-v1, config: {q_model: {custom_model: 'evil_module:Evil'}}}",
        "{run: A2C, env: GymV21Environment-v0, env_config: {env_id: 'evil_module:x'}}",
        "{run: A2C, env: 'evil_module:Evil-v0'}",
        "{run: A2C, env: CartPole-v1, config: {plan: PLAN}}",
        "{run: A2C, env: CartPole-v1, config: {evaluation_config: {env: 'evil_module:Evil-v0'}}}",
        "{run: A2C, env: CartPole-v1, config: {model: {custom_model: 'evil_module:Evil'}}}",
        "{run: A2C, env: CartPole-v1, config: {address: 'ray://nowhere:10001'}}",
        "!!python/object/apply:os.mkdir [MARKER]",
    ],
)
def test_yaml_file_that_names_code_is_rejected(tmp_path, evil, capsys, text):
    text = text.replace("PLAN", evil.plan).replace("MARKER", str(tmp_path / "executed"))
    (tmp_path / "x.yaml").write_text(text)
    assert main(["train", str(tmp_path / "x.yaml"), "--run-dir", str(tmp_path / "r")]) == 2
    assert "pass --trust" in capsys.readouterr().err or "!!python" in text
    assert not evil.executed()


def test_links_in_a_run_directory_are_not_followed(run_dir, tmp_path, capsys):
    for name in ("activity.jsonl", "journal.msgpack", "checkpoints"):
        path = shutil.copytree(run_dir, tmp_path / name.strip("."))
        target = tmp_path / f"target of {name}"
        if name == "checkpoints":
            (path / name).rename(target)
        else:
            target.write_text("mine")
            (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(target)
        assert main(["resume", str(path), "--stop-iters", "2"]) == 2
        assert "is a symbolic link" in capsys.readouterr().err
        assert target.is_dir() or target.read_text() == "mine"


def test_plain_settings_of_trackers_need_no_trust():
    plain = {"wandb": {"project": "x", "mode": "offline"}, "mlflow": {"run_name": "y"}}
    assert untrusted_code(A2CConfig(env="CartPole-v1", log_config=plain)) is None
    server = {"wandb": {"project": "x", "settings": {"base_url": "http://localhost"}}}
    assert "settings" in untrusted_code(A2CConfig(env="CartPole-v1", log_config=server))


def test_arguments_of_environments_of_other_packages_need_trust(monkeypatch):
    config = A2CConfig(env="CartPole-v1", env_config={"sutton_barto_reward": True})
    assert untrusted_code(config) is None
    spec = copy.deepcopy(gym.spec("CartPole-v1"))
    spec.id, spec.entry_point = "Other-v0", "other_package:Env"
    monkeypatch.setitem(gym.registry, "Other-v0", spec)
    assert untrusted_code(config.updated(env="Other-v0", env_config={})) is None
    assert "Other-v0 with the env_config" in untrusted_code(config.updated(env="Other-v0"))


# -- recorded experience ---------------------------------------------------------------------------


def test_minari_metadata_creates_no_environment(tmp_path, evil, monkeypatch):
    """Minari creates the environment of the metadata if a space is missing there."""
    require_extra("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
    folder = tmp_path / "datasets" / "evil-v0" / "data"
    folder.mkdir(parents=True)
    spec = gym.spec("CartPole-v1").to_json()
    spec = json.dumps({**json.loads(spec), "entry_point": "evil_module:Evil"})
    metadata = {"env_spec": spec, "dataset_id": "evil-v0", "data_format": "hdf5"}
    (folder / "metadata.json").write_text(json.dumps(metadata))
    with pytest.raises(OfflineDataError, match="lacks action_space, observation_space"):
        MinariDataset("evil-v0")
    assert not evil.executed()


@pytest.fixture
def pickled_type():
    """An Arrow type whose values are pickles, as Ray Data registers one."""
    require_extra("offline")
    import pyarrow as pa

    class PickledArray(pa.ExtensionArray):
        def to_numpy(self, zero_copy_only=True):
            return np.array([pickle.loads(value) for value in self.storage.to_pylist()])

    class PickledType(pa.ExtensionType):
        def __init__(self):
            super().__init__(pa.binary(), "flowrl.tests.pickled")

        def __arrow_ext_serialize__(self):
            return b""

        @classmethod
        def __arrow_ext_deserialize__(cls, storage_type, serialized):
            return cls()

        def __arrow_ext_class__(self):
            return PickledArray

    pa.register_extension_type(PickledType())
    yield PickledType()
    pa.unregister_extension_type("flowrl.tests.pickled")


class EvilPickle:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("data_format", ["arrow", "parquet"])
def test_minari_columns_of_extension_types_are_rejected(
    tmp_path, monkeypatch, pickled_type, data_format
):
    require_extra("minari")
    import minari
    import pyarrow as pa
    import pyarrow.dataset
    from minari.data_collector import EpisodeBuffer

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
    space, marker = gym.spaces.Box(0, 1, (1,)), tmp_path / "executed"
    arrays = {"observations": np.zeros((3, 1), np.float32), "actions": np.zeros((2, 1), np.float32)}
    flags = {"rewards": [0.0, 0.0], "terminations": [False, True], "truncations": [False, False]}
    dataset = minari.create_dataset_from_buffers(
        "evil-v0", [EpisodeBuffer(id=0, **arrays, **flags)], observation_space=space,
        action_space=space, data_format=data_format, algorithm_name="x", author="x",
        author_email="x", code_permalink="x", description="x",
    )  # fmt: skip
    folder = dataset.storage.data_path / "0"
    (file,) = folder.glob(f"*.{data_format}")
    table = pyarrow.dataset.dataset(file, format=data_format).to_table()
    values = pa.array([pickle.dumps(EvilPickle(marker))] * 3, pa.binary())
    column = pa.ExtensionArray.from_storage(pickled_type, values)
    infos = pa.StructArray.from_arrays([column], ["info"])
    file.unlink()
    pyarrow.dataset.write_dataset(
        table.append_column("infos", infos), folder, format=data_format,
        existing_data_behavior="overwrite_or_ignore",
    )  # fmt: skip
    with pytest.raises(OfflineDataError, match=r"evil-v0: cannot be read: .*extension types"):
        MinariDataset("evil-v0").read([0])
    assert not marker.exists()
    list(minari.load_dataset("evil-v0").iterate_episodes([0]))
    assert marker.exists()  # Minari itself executes it


def test_parquet_columns_of_extension_types_are_rejected(tmp_path):
    """Other libraries register Arrow types whose values are pickles."""
    require_extra("offline")
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "rows.parquet"
    write_parquet(path, SampleBatch(obs=np.zeros((2, 3), np.float32)))
    table = pq.read_table(path)
    column = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes(16)] * 2, pa.binary(16)))
    pq.write_table(table.append_column("infos", column), path)
    with pytest.raises(OfflineDataError, match="extension types"):
        read_parquet(path)


def test_no_field_of_parquet_metadata_executes_code(tmp_path, evil):
    require_extra("offline")
    import pyarrow.parquet as pq

    path = tmp_path / "rows.parquet"
    infos = np.array([{"a": 1}, {"a": 2}], object)
    write_parquet(path, SampleBatch(obs={"x": np.zeros((2, 3))}, infos=infos))
    table = pq.read_table(path)
    metadata = json.loads(table.schema.metadata[b"flowrl"])
    for place in list(places(metadata))[1:]:
        for payload in payloads(evil, tmp_path):
            changed = json.dumps(replaced(metadata, place, payload)).encode()
            pq.write_table(table.replace_schema_metadata({b"flowrl": changed}), path)
            with suppress(OfflineDataError):
                read_parquet(path)
                read_policy_id(path)
            assert not evil.executed(), (place, payload)


def reseal(path, change):
    """Change the manifest of a checkpoint, as somebody who crafts one can."""
    manifest = read_manifest(path)
    change(manifest)
    (path / MANIFEST).write_bytes(seal_manifest(manifest))


@pytest.fixture
def crafted(saved, tmp_path):
    """A checkpoint to be changed."""
    state, metadata = saved
    return write_checkpoint(tmp_path / "crafted", state, metadata)


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize("inner", [DEEP, "[" * 400 + "]" * 400, "1e999", "9" * 5000])
def test_deep_or_huge_values_of_a_manifest_are_reported_as_damage(crafted, capsys, inner):
    text = (crafted / MANIFEST).read_bytes().rpartition(b',\n "blake2b"')[0]
    body = text.replace(b'"train_batch_size": 16', b'"train_batch_size": ' + inner.encode())
    assert body != text
    seal = hashlib.blake2b(body, digest_size=16).hexdigest()
    (crafted / MANIFEST).write_bytes(body + b',\n "blake2b": "' + seal.encode() + b'"\n}\n')
    with pytest.raises(CheckpointError, match=r"is damaged|settings cannot be restored"):
        A2C.from_checkpoint(crafted)
    for command in (["evaluate", str(crafted)], ["resume", str(crafted)]):
        assert main(command) == 2
        assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("shape", [[1 << 40], [1 << 20, 1 << 20]])
@pytest.mark.parametrize("dtype", ["float32", "U999999999"])
def test_huge_spaces_of_a_manifest_are_reported_as_damage(crafted, shape, dtype):
    box = {"Box": ["0", "1"], "shape": shape, "dtype": dtype}
    reseal(crafted, lambda m: m["policies"]["p"].update(observation_space=box))
    with pytest.raises(CheckpointError, match=r"is too large|not understood"):
        Policy.from_checkpoint(crafted)


def test_inspected_text_cannot_control_the_terminal(crafted, capsys):
    reseal(crafted, lambda m: m.update(torch="\x1b[2J\x1b]0;title\x07 2\n  score       9"))
    assert main(["checkpoint", "inspect", str(crafted)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\\x1b[2J" in out
    assert not any(line.startswith("  score") for line in out.splitlines())
    reseal(crafted, lambda m: m.update(algorithm="\x1b[2J:x"))
    assert main(["evaluate", str(crafted)]) == 2
    assert "\x1b" not in capsys.readouterr().err
    reseal(crafted, lambda m: m.update(training_iteration=[]))
    assert main(["checkpoint", "inspect", str(crafted)]) == 1
    assert "not the manifest of an algorithm" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config.json", "stop.json"])
def test_deep_files_of_a_run_are_rejected(tmp_path, capsys, name):
    with A2C("CartPole-v1", train_batch_size=16) as algorithm:
        algorithm.learn(16, run_dir=tmp_path / "r", progress=False)
    (tmp_path / "r" / name).write_text(DEEP)
    assert main(["resume", str(tmp_path / "r")]) == 2
    assert name in capsys.readouterr().err


ALIASES = "\n".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]" for i in range(9))


@pytest.mark.parametrize(
    "text", [f"a0: &a0 [1]\n{ALIASES}", "run: &a [*a]", DEEP, "run: " + "9" * 5000]
)
def test_yaml_file_that_would_exhaust_memory_is_rejected(tmp_path, capsys, text):
    (tmp_path / "runs.yaml").write_text(text)
    assert main(["train", str(tmp_path / "runs.yaml")]) == 2
    err = capsys.readouterr().err
    assert "runs.yaml: cannot be read" in err
    assert len(err) < 1000


def test_checked_text_of_a_plan_is_the_one_executed(tmp_path, monkeypatch):
    plan = tmp_path / "changing.py"
    plan.write_text("def execution_plan(workers, config):\n    return 1\n")
    checked = plan.read_bytes()
    plan.write_text("raise RuntimeError('not the checked text')\n")
    assert load_plan(str(plan), checked).execution_plan(None, None) == 1
