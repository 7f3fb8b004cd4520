"""OfflineConfig: the settings of the algorithms that learn from recorded experience alone."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from gymnasium import spaces
from pydantic import SkipValidation, model_validator

from flowrl.data import DEFAULT_POLICY_ID, SampleBatch
from flowrl.envs.registry import SpacesOnlyEnv
from flowrl.ops import ReadMinari, ReadParquet
from flowrl.sampling.worker_set import WorkerSet
from flowrl.settings import ConfigError, setting
from flowrl.trainer.config import AlgorithmConfig

MINARI = "minari:"
NO_INPUT = 'none is set: the folder of recorded experience (input_="experience")'


class OfflineConfig(AlgorithmConfig):
    """Settings of the algorithms that learn from recorded experience.

    The environment is for evaluations alone, and may be left out: then the spaces must be there.
    """

    samples: ClassVar[bool] = False

    input_: str | None = setting(None, group="offline_data")
    """Folder of recorded experience, as the setting `output` and WriteParquet leave it; or
    "minari:" and the id of a Minari data set (extra minari)."""
    input_policy_id: str = setting(DEFAULT_POLICY_ID, group="offline_data")
    """Whose rows of that folder, if several policies were recorded; the plan's policy of that name
    learns from them, or the only one that it has."""
    observation_space: Annotated[Any, SkipValidation] = setting(None, group="offline_data")
    """Of the recorded experience, where no `env` says it."""
    action_space: Annotated[Any, SkipValidation] = setting(None, group="offline_data")
    """The same of its actions, as an environment would take them."""

    @model_validator(mode="after")
    def _spaces(self) -> Self:
        given = {"observation_space": self.observation_space, "action_space": self.action_space}
        for name, space in given.items():
            if space is not None and not isinstance(space, spaces.Space):
                raise ValueError(f"{name} is a gymnasium space, got {space!r}")
        for name in ("normalize_observations", "normalize_rewards"):
            if getattr(self, name):
                raise ValueError(f"{name} is for what is sampled: leave it out, nothing is")
        if self.env is None and len({space is None for space in given.values()}) > 1:
            raise ValueError("observation_space and action_space: give both, or an env")
        return self

    def check(self) -> None:
        """Refuse what only shows when a run is near; see AlgorithmConfig.check."""
        if self.env_or_spaces() is None:
            raise ConfigError(
                "env: no environment is set: one for evaluations, or the observation_space and "
                "action_space of what was recorded"
            )
        for name in ("num_workers", "output"):  # evaluations have workers
            if getattr(self, name):
                raise ConfigError(f"{name} is for what is sampled: leave it out, nothing is")
        if self.env is not None and self.observation_space is not None:
            raise ConfigError("observation_space, action_space: the env says them: leave them out")
        super().check()

    def validate(self) -> Self:  # type: ignore[override]
        """See AlgorithmConfig; and whether the recorded experience is there."""
        super().validate()
        self.check_input()
        return self

    def check_input(self) -> None:
        """Refuse to learn from a folder that is not there.

        Raises:
            ConfigError
        """
        self.check_no_search()
        if self.input_ is None:
            raise ConfigError(f"input_: {NO_INPUT}")
        if not self.input_.startswith(MINARI) and not Path(self.input_).exists():
            raise ConfigError(
                f"input_: there is no {Path(self.input_).absolute()}: the setting `output` of a "
                "run that samples makes such a folder (flowrl train ppo --output experience)"
            )

    def env_or_spaces(self) -> Any:
        """See AlgorithmConfig."""
        if self.env is None and self.observation_space is not None:
            return partial(SpacesOnlyEnv, self.observation_space, self.action_space)
        return super().env_or_spaces()

    def recorded(
        self,
        workers: WorkerSet,
        columns: Collection[str],
        prepare: Callable[[SampleBatch], SampleBatch] | None = None,
    ) -> ReadParquet | ReadMinari:
        """The train batches of a plan: random rows of `input_`.

        Args:
            workers: of the plan.
            columns: that are needed; others are left out, where there is no `prepare`.
            prepare: see ReadParquet.

        Raises:
            ConfigError: no `input_` is set.
        """
        if self.input_ is None:
            raise ConfigError(f"input_: {NO_INPUT}")
        wanted = list(columns)
        options: dict[str, Any] = {
            "columns": wanted,
            "prepare": prepare or (lambda rows: SampleBatch({n: rows[n] for n in wanted})),
            "seed": self.seed,
            "policy_id": self.input_policy_id,
        }
        if self.input_.startswith(MINARI):
            name = self.input_.removeprefix(MINARI)
            return ReadMinari(workers, name, self.train_batch_size, **options)
        return ReadParquet(workers, self.input_, self.train_batch_size, **options)
