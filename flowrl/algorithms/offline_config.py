"""OfflineConfig: the settings of the algorithms that learn only from recorded experience."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Annotated, Any, ClassVar, Self, TypeVar

from gymnasium import spaces
from pydantic import SkipValidation

from flowrl.data import DEFAULT_POLICY_ID, SampleBatch
from flowrl.envs.registry import SpacesOnlyEnv
from flowrl.errors import ConfigError, OfflineDataError, check_installed
from flowrl.offline.minari import MinariDataset
from flowrl.offline.parquet import parquet_files, read_policy_id
from flowrl.offline.sources import ParquetSource
from flowrl.ops import ReadMinari, ReadParquet
from flowrl.sampling.worker_set import WorkerSet
from flowrl.setting_values import expanded_path
from flowrl.settings import Folder, check_of_settings, setting
from flowrl.trainer.config import AlgorithmConfig

T = TypeVar("T")

MINARI = "minari:"
NO_INPUT = 'none is set: set the folder of recorded experience (input_="experience")'


class OfflineConfig(AlgorithmConfig):
    """Settings of the algorithms that learn only from recorded experience.

    The environment is used only for evaluation. Without one, `observation_space` and `action_space`
    are required.
    """

    samples: ClassVar[bool] = False

    input_: Folder | None = setting(None, group="offline_data")
    """Folder of experience that was recorded with the setting `output` or with WriteParquet; or
    "minari:" and the id of a Minari dataset (extra minari)."""
    input_policy_id: str = setting(DEFAULT_POLICY_ID, group="offline_data")
    """Id of the recorded policy whose rows are read. The plan's policy with this id trains on them;
    if the plan has only one policy, that one does."""
    observation_space: Annotated[Any, SkipValidation] = setting(None, group="offline_data")
    """Observation space of the recorded experience; None uses the space of `env`."""
    action_space: Annotated[Any, SkipValidation] = setting(None, group="offline_data")
    """Action space of the environment that the experience was recorded in; None uses the space of
    `env`."""

    @check_of_settings
    def _check_spaces(self) -> Self:
        spaces_by_name = {
            "observation_space": self.observation_space,
            "action_space": self.action_space,
        }
        for name, space in spaces_by_name.items():
            if space is not None and not isinstance(space, spaces.Space):
                raise ValueError(f"{name} must be a gymnasium space, got {space!r}")
        for name in ("normalize_observations", "normalize_rewards", "no_done_at_end"):
            if getattr(self, name):
                raise ValueError(_not_offline(name))
        if self.clip_rewards:
            raise ValueError(
                "clip_rewards: offline algorithms learn from the recorded rewards: clip them when "
                "they are recorded"
            )
        if self.env is None and len({space is None for space in spaces_by_name.values()}) > 1:
            raise ValueError("observation_space and action_space: give both, or an env")
        return self

    def check(self) -> None:
        """Check the settings that depend on the environment; see AlgorithmConfig.check."""
        if self.env_or_spaces() is None:
            raise ConfigError(
                "env: no environment is set: set one for evaluation, or the observation_space and "
                "action_space of the recorded experience"
            )
        for name in ("num_workers", "output"):  # evaluation has its own workers
            if getattr(self, name):
                raise ConfigError(_not_offline(name))
        given = self.observation_space, self.action_space
        if self.env is not None and any(space is not None for space in given):
            raise ConfigError(
                "observation_space, action_space: the env defines them: leave them out"
            )
        super().check()

    def validate(self) -> Self:  # type: ignore[override]
        """Check all settings (see AlgorithmConfig), and that the recorded experience exists."""
        super().validate()
        self.check_input()
        return self

    def check_input(self) -> None:
        """Check that the recorded experience can be opened; a Minari dataset that is not on this
        machine is downloaded.

        Raises:
            ConfigError: `input_` is not set, the folder does not exist or has no Parquet files, the
                dataset cannot be loaded, or the extra that reads the experience is not installed.
        """
        self.check_no_search()
        if self.input_ is None:
            raise ConfigError(f"input_: {NO_INPUT}")
        if self.input_.startswith(MINARI):
            check_installed("minari", f"input_={self.input_!r}", extra="minari")
            self._open(MinariDataset, self.input_.removeprefix(MINARI))
        elif "://" in self.input_:
            raise ConfigError(f"input_: must be a folder on this machine, got {self.input_}")
        elif not (folder := expanded_path(self.input_)).exists():
            env = f" --env {self.env}" if isinstance(self.env, str) else ""
            raise ConfigError(
                f"input_: there is no {folder.absolute()}. To record experience, set "
                f"`output` in a run that samples: flowrl train ppo{env} --output experience"
            )
        else:
            check_installed("pyarrow", f"input_={self.input_!r}", extra="offline")
            files = self._open(parquet_files, self.input_)
            if not any(self._open(read_policy_id, path) == self.input_policy_id for path in files):
                others = ParquetSource(self.input_, self.input_policy_id).describe_other_policies()
                raise ConfigError(
                    f"input_policy_id: {self.input_} has no rows of policy "
                    f"{self.input_policy_id!r}{others}"
                )

    def _open(self, function: Callable[[Any], T], source: Any) -> T:
        try:
            return function(source)
        except OfflineDataError as error:
            raise ConfigError(f"input_: {error}") from error

    def env_or_spaces(self) -> Any:
        """Return the environment, or an environment class that only has the spaces; see
        AlgorithmConfig."""
        if self.env is None and self.observation_space is not None:
            return partial(SpacesOnlyEnv, self.observation_space, self.action_space)
        return super().env_or_spaces()

    def read_recorded(
        self,
        workers: WorkerSet,
        columns: Collection[str],
        prepare: Callable[[SampleBatch], SampleBatch] | None = None,
    ) -> ReadParquet | ReadMinari:
        """Return a stream of train batches: random rows of `input_`.

        Args:
            workers: the WorkerSet of the plan.
            columns: required columns.
            prepare: see ReadParquet; None keeps only `columns`.

        Raises:
            ConfigError: `input_` is not set.
        """
        if self.input_ is None:
            raise ConfigError(f"input_: {NO_INPUT}")
        names = list(columns)
        options: dict[str, Any] = {
            "columns": names,
            "prepare": prepare or (lambda rows: SampleBatch({name: rows[name] for name in names})),
            "seed": self.seed,
            "policy_id": self.input_policy_id,
        }
        if self.input_.startswith(MINARI):
            dataset_id = self.input_.removeprefix(MINARI)
            return ReadMinari(workers, dataset_id, self.train_batch_size, **options)
        return ReadParquet(workers, self.input_, self.train_batch_size, **options)


def _not_offline(name: str) -> str:
    return (
        f"{name} is for sampling, but offline algorithms do not sample: leave it out. For a plan "
        "that samples and imitates, use the config of an algorithm that samples, such as A2CConfig"
    )
