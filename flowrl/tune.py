"""The algorithms as Trainables of Ray Tune.

`tune.run("PPO", config=config)` or `tune.Tuner(flowrl.tune.PPO, param_space=config)`, where the
config is an AlgorithmConfig or a dict and can contain search spaces.

Importing this module registers the names of the algorithms with Tune. `flowrl.algorithms` imports
it if `ray.tune` has been imported before. It needs the extra `tune`; without it, importing it
raises ImportError.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from flowrl.data.checkpoint import read_manifest
from flowrl.errors import ConfigError, install_hint
from flowrl.sampling.placement import MIN_BUNDLE_CPUS
from flowrl.setting_aliases import canonical_names
from flowrl.trainer.config import AlgorithmConfig, absolute_folders
from flowrl.trainer.plan_files import absolute_plan, is_plan_file
from flowrl.trainer.registry import algorithm_class, algorithm_names

try:
    from ray import tune

    # Private, but the only way to pass Tune a config that is not a dict: Tune calls `to_dict()` of
    # instances of registered classes. tests/test_tune.py fails if that changes.
    from ray.tune.tune import _Config as TuneConfigType
except ImportError as error:
    raise ImportError(install_hint("flowrl.tune", "tune")) from error

TuneConfigType.register(AlgorithmConfig)
_RESOURCES = {
    "num_workers", "evaluation_num_workers", "num_cpus_per_worker", "num_gpus_per_worker",
    "custom_resources_per_worker", "placement_strategy", "num_gpus",
}  # fmt: skip


class AlgorithmTrainable(tune.Trainable):
    """An algorithm as a Tune trial: `step` trains one iteration, using the algorithm's checkpoints.

    A trial that continues another trial's checkpoint, as in population-based training, keeps its
    own settings and loads the policies, counters and episodes.
    """

    algorithm: ClassVar[Any] = None
    """An Algorithm class, or the name of a registered one."""

    @classmethod
    def get_algorithm_class(cls) -> Any:
        """Return the Algorithm class."""
        return algorithm_class(cls.algorithm) if isinstance(cls.algorithm, str) else cls.algorithm

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """Return the resources of a trial.

        One CPU for the trial's process, one GPU per learner with `num_gpus`, and the resources of
        every rollout and evaluation worker.

        Raises:
            ConfigError: a setting of resources is invalid, or `placement_strategy` is a strict one.
        """
        fields = cls.get_algorithm_class().config_class.model_fields
        given = canonical_names(dict(config))
        values = {
            name: _checked(name, fields[name], given.get(name, fields[name].default))
            for name in _RESOURCES & fields.keys()
        }
        worker = {
            "CPU": values["num_cpus_per_worker"],
            "GPU": values["num_gpus_per_worker"],
            **values["custom_resources_per_worker"],
        }
        worker = {name: amount for name, amount in worker.items() if amount}
        bundles: list[dict[str, float]] = [{"CPU": 1.0}]
        bundles += [{"GPU": 1.0}] * values.get("num_gpus", 0)
        num_workers = values["num_workers"] + values["evaluation_num_workers"]
        bundles += [worker or {"CPU": MIN_BUNDLE_CPUS}] * num_workers
        strategy = values["placement_strategy"] or "PACK"
        if strategy.startswith("STRICT"):
            raise ConfigError(
                f"placement_strategy: {strategy} is not supported under Tune, where it would apply "
                "to the trial's own process, too; use PACK or SPREAD"
            )
        return tune.PlacementGroupFactory(bundles, strategy=strategy)

    def setup(self, config: dict[str, Any]) -> None:
        """Build the algorithm.

        Relative paths in the settings, but not in `log_config`, are those of the folder in which
        Tune was started. Videos are written to a folder of the trial.

        Raises:
            ConfigError: the settings are invalid.
        """
        cls = self.get_algorithm_class()
        settings = canonical_names(config)
        settings |= _absolute_paths(settings)
        if settings.get("evaluation_video_dir") is not None:  # else trials replace each other's
            settings["evaluation_video_dir"] += f"/{self.trial_id}"
        self._algorithm = cls.config_class.from_dict(settings).build_as(cls)

    def step(self) -> dict[str, Any]:
        """Train one iteration and return its result."""
        result: dict[str, Any] = self._algorithm.train()
        return result

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write a checkpoint into Tune's folder."""
        folder = os.path.join(checkpoint_dir, "algorithm")
        self._algorithm.save(folder, metadata={"trial": self.trial_id})

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Restore a checkpoint; start new logger runs if it belongs to another trial."""
        path = os.path.join(str(checkpoint), "algorithm")
        self._algorithm.restore(path)
        if read_manifest(path).get("trial") != self.trial_id:
            self._algorithm.start_new_logger_runs()

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Build another algorithm in the same process (`reuse_actors`)."""
        self._algorithm.stop()
        self.setup(new_config)
        return True

    def cleanup(self) -> None:
        """Stop the algorithm."""
        self._algorithm.stop()


def _checked(name: str, field: FieldInfo, value: Any) -> Any:
    """Return the value of a setting, converted to its type.

    Raises:
        ConfigError: it is of another type.
    """
    try:
        # None, because Annotated needs an annotation, and some fields have no metadata
        kind: Any = Annotated[field.annotation, None, *field.metadata]
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise ConfigError(f"{name}: {message[:1].lower()}{message[1:]}, got {value!r}") from None


def _absolute_paths(config: dict[str, Any]) -> dict[str, str]:
    """Return the settings that are paths as absolute ones: a trial runs in a folder of its own."""
    start = os.environ.get("TUNE_ORIG_WORKING_DIR", "")  # set by Tune in the trial's process
    paths = absolute_folders(config, start)
    if is_plan_file(config.get("plan")):
        paths["plan"] = absolute_plan(config["plan"], start)
    return paths


def trainable(algorithm: Any) -> type[AlgorithmTrainable]:
    """Return the Trainable of an Algorithm class, such as your own.

    Raises:
        ConfigError: `algorithm` is not an Algorithm class.
    """
    from flowrl.trainer.algorithm import Algorithm

    if isinstance(algorithm, type) and issubclass(algorithm, Algorithm):
        return type(algorithm.__name__, (AlgorithmTrainable,), {"algorithm": algorithm})
    raise ConfigError(f"trainable: must be a subclass of Algorithm, got {algorithm!r}")


def _registered_trainable(name: str) -> type[AlgorithmTrainable]:
    attributes = {"algorithm": name, "__module__": __name__, "__qualname__": name}
    return type(name, (AlgorithmTrainable,), attributes)


_TRAINABLES: Mapping[str, type[AlgorithmTrainable]] = {
    name: _registered_trainable(name) for name in algorithm_names()
}
globals().update(_TRAINABLES)
for _name, _trainable in _TRAINABLES.items():
    tune.register_trainable(_name, _trainable)

__all__ = ["AlgorithmTrainable", "trainable", *_TRAINABLES]
