"""The algorithms as Ray Tune's Trainables: `tune.run("PPO", config=config)`, or
`tune.Tuner(flowrl.tune.PPO, param_space=config)`.

Importing this registers their names, and makes Tune take an AlgorithmConfig as it is, with search
spaces in it. `flowrl.algorithms` does so by itself where `ray.tune` was imported before.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

from ray import tune
from ray.tune.tune import _Config

from flowrl.data.checkpoint import read_manifest
from flowrl.setting_aliases import canonical_names
from flowrl.settings import ConfigError
from flowrl.trainer.config import AlgorithmConfig
from flowrl.trainer.registry import algorithm_class, algorithm_names

_Config.register(AlgorithmConfig)  # what Tune takes by its to_dict()


class AlgorithmTrainable(tune.Trainable):
    """An algorithm as a trial of Tune: an iteration is one `train()`, a checkpoint one `save()`.

    A trial that goes on from another one's checkpoint, as in population based training, has its own
    settings and the other's policies, counters and episodes.
    """

    algorithm: ClassVar[Any] = None
    """An Algorithm class, or the name of a registered one."""

    @classmethod
    def _class(cls) -> Any:
        found = cls.algorithm
        return algorithm_class(found) if isinstance(found, str) else found

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """A CPU for the learner, GPUs for learners that have some, and what the workers beside
        take."""
        given = canonical_names(dict(config))
        fields = cls._class().config_class.model_fields
        default = {name: field.default for name, field in fields.items()}
        config = {**default, **given}
        of_worker = {"CPU": config["num_cpus_per_worker"], **config["custom_resources_per_worker"]}
        if config["num_gpus_per_worker"]:
            of_worker["GPU"] = config["num_gpus_per_worker"]
        bundles: list[dict[str, float]] = [{"CPU": 1.0}]
        bundles += [{"GPU": 1.0}] * config.get("num_gpus", 0)
        bundles += [of_worker] * (config["num_workers"] + config["evaluation_num_workers"])
        strategy = config["placement_strategy"] or "PACK"
        if strategy.startswith("STRICT"):
            raise ConfigError(
                f"placement_strategy: a trial's places are its trainer's, too, so {strategy} would "
                "mean something else under Tune: take PACK or SPREAD"
            )
        return tune.PlacementGroupFactory(bundles, strategy=strategy)

    def setup(self, config: dict[str, Any]) -> None:
        """Build the algorithm.

        Raises:
            ConfigError: settings that cannot work.
        """
        self._built = self._class().config_class.from_dict(config).build_as(self._class())

    def step(self) -> dict[str, Any]:
        """One result."""
        result: dict[str, Any] = self._built.train()
        return result

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write a checkpoint into Tune's folder."""
        self._built.save(os.path.join(checkpoint_dir, "algorithm"), trial=self.trial_id)

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Go on from one. What a tracker was told of another trial stays that one's."""
        path = os.path.join(str(checkpoint), "algorithm")
        self._built.restore(path)
        if read_manifest(path).get("trial") != self.trial_id:
            self._built.forget_trackers()

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Build another algorithm in the same process (`reuse_actors`)."""
        self._built.stop()
        self.setup(new_config)
        return True

    def cleanup(self) -> None:
        """End the algorithm's workers."""
        self._built.stop()


def trainable(algorithm: Any) -> type[AlgorithmTrainable]:
    """The Trainable of an Algorithm class, one's own too.

    Raises:
        ConfigError: it is none.
    """
    from flowrl.trainer.algorithm import Algorithm

    if isinstance(algorithm, type) and issubclass(algorithm, Algorithm):
        return type(algorithm.__name__, (AlgorithmTrainable,), {"algorithm": algorithm})
    raise ConfigError(f"trainable: a subclass of Algorithm is needed, got {algorithm!r}")


def _named(name: str) -> type[AlgorithmTrainable]:
    about = {"algorithm": name, "__module__": __name__, "__qualname__": name}
    return type(name, (AlgorithmTrainable,), about)


_TRAINABLES: Mapping[str, type[AlgorithmTrainable]] = {n: _named(n) for n in algorithm_names()}
globals().update(_TRAINABLES)
for _name, _trainable in _TRAINABLES.items():
    tune.register_trainable(_name, _trainable)

__all__ = ["AlgorithmTrainable", "trainable", *_TRAINABLES]
