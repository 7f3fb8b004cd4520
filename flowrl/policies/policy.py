"""Policy: the interface of all policies; arrays in and out, independent of a framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
from gymnasium import spaces

from flowrl.data import SampleBatch
from flowrl.errors import ConfigError
from flowrl.policies import action_scaling
from flowrl.policies.config import PolicyConfig
from flowrl.policies.filters import ObservationFilter, RewardScaler
from flowrl.policies.learning.epochs import run_epochs, shuffled_minibatches
from flowrl.policies.overrides import is_builtin_method
from flowrl.policies.prediction import ActsOnObservations
from flowrl.policies.schedules import value_at
from flowrl.policies.views import ViewRequirement, find_masked, find_mismatch, find_out_of_range
from flowrl.seeding import random_stream, restore_stream, stream_state
from flowrl.setting_values import warn_of_misspelled_members
from flowrl.state_schema import Fields, Natural, check_state

_ACTING_FIELDS: Fields = {
    "timestep": Natural,
    "total_timesteps": Natural | None,
    "version": Natural,
    "rng": dict[str, Any],
    "shuffle_rng": dict[str, Any],
}
_STATE_FIELDS: Fields = {
    **_ACTING_FIELDS,
    "weights": dict[str, Any],
    "filters": dict[str, dict[str, Any]],
}


class Policy(ActsOnObservations):
    """Chooses actions and learns from batches.

    A subclass implements `compute_actions`; one that learns also implements `learn_on_batch`,
    `get_weights` and `set_weights`. Everything else has a default.

    Args:
        observation_space, action_space: spaces of one agent.
        config: settings; a mapping is merged over the defaults of `config_class`.

    Attributes:
        view_requirements: view name -> ViewRequirement; columns that batches have in addition to
            those that are always recorded. Changes apply from the next fragment on.
        version: increases with every change of the weights.
        filter_version: increases with every merge of new statistics into the filters.
        num_loads: number of calls of `set_state`, which may load other weights of the same version.
        timestep: env steps sampled so far, on which schedules depend.
        total_timesteps: env steps of the whole training, which schedules in percent follow; None
            if unknown.
        rng, shuffle_rng: random streams of actions and of minibatches.
        worker_index, num_workers: those of the policy's worker; 0 without remote workers.
        observation_filter, reward_scaler: running normalization; None if it is off.
        row_stats: values per row of the last update, or of the last pass over a train batch: arrays
            [rows] by name, such as `td_error` for the rows `batch_indexes` of a replay buffer.
    """

    config_class: ClassVar[type[PolicyConfig]] = PolicyConfig
    is_on_policy: ClassVar[bool] = False
    """Whether the loss assumes that fragments were sampled with the current weights."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        warn_of_misspelled_members(cls)

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space, config: Any):
        self.observation_space = observation_space
        self.action_space = action_space
        self.config = self.config_from(config)
        self.view_requirements: dict[str, ViewRequirement] = {
            "obs": ViewRequirement(space=observation_space)
        }
        self.version = 0
        self.filter_version = 0
        self.num_loads = 0
        self.row_stats: dict[str, np.ndarray] = {}
        self.timestep = 0
        self.total_timesteps: int | None = self.config.total_timesteps
        self.worker_index = self.num_workers = 0
        self.rng = random_stream(self.config.seed, "policy", "actions")
        self.shuffle_rng = random_stream(self.config.seed, "policy", "shuffle")
        self.observation_filter: ObservationFilter | None = None
        self.reward_scaler: RewardScaler | None = None
        if self.config.normalize_observations:
            if not isinstance(observation_space, spaces.Box):
                raise ConfigError(
                    f"normalize_observations needs a Box observation space, got {observation_space}"
                )
            self.observation_filter = ObservationFilter(observation_space.shape)
        if self.config.normalize_rewards:
            self.reward_scaler = RewardScaler(self.config.gamma)

    @classmethod
    def config_from(cls, config: Any) -> Any:
        """Return settings as a record of `config_class`.

        Args:
            config: a mapping, which is merged over the defaults; None; or a record. From a record
                of another class only explicitly set values are used, so that this class keeps its
                own defaults.

        Raises:
            ConfigError: a setting is unknown or has a wrong value.
        """
        if isinstance(config, cls.config_class):
            return config
        if isinstance(config, PolicyConfig):
            values = config.explicit_settings()
            known = cls.config_class.model_fields
            return cls.config_class(**{k: v for k, v in values.items() if k in known})
        if config is None:
            return cls.config_class()
        if not isinstance(config, Mapping):
            raise ConfigError(
                f"{cls.__name__}: the config is a mapping of settings or a record, got {config!r}"
            )
        return cls.config_class(**dict(config.items()))

    # -- acting --------------------------------------------------------------------------------

    def compute_actions(
        self, obs_batch: np.ndarray, explore: bool = True
    ) -> tuple[np.ndarray, list[np.ndarray], dict[str, np.ndarray]]:
        """Return actions for observations [B, …], which are normalized as the sampler stores them.

        Returns:
            actions [B, …]; recurrent states after the step, [B, …] each (see
            `get_initial_state`); extra columns [B, …] to record, such as `action_logp` and
            `vf_preds`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no compute_actions(): implement it to return (actions, "
            "states, extra columns)"
        )

    def compute_actions_from_input_dict(
        self, input_dict: dict[str, Any], explore: bool = True
    ) -> tuple[np.ndarray, list[np.ndarray], dict[str, np.ndarray]]:
        """Compute actions as `compute_actions`, from all views known at that step, [B, …] each."""
        return self.compute_actions(input_dict["obs"], explore=explore)

    @property
    def acts_on_views(self) -> bool:
        """Whether samplers call `compute_actions_from_input_dict` and
        `compute_values_from_input_dict` even if observations are the only view: the user's class
        overrides one of them."""
        names = "compute_actions_from_input_dict", "compute_values_from_input_dict"
        return not all(is_builtin_method(self, name) for name in names)

    @property
    def defers_values(self) -> bool:
        """Whether samplers compute the values at the end of a fragment, for all rows at once, and
        act with `compute_actions_only`."""
        return False

    def compute_actions_only(
        self, obs_batch: np.ndarray, explore: bool = True
    ) -> tuple[np.ndarray, list[np.ndarray], dict[str, np.ndarray]]:
        """Compute actions like `compute_actions`, without `vf_preds`.

        Called instead of `compute_actions` if `defers_values` is True; the sampler then adds the
        column `vf_preds` with the results of `compute_values`.
        """
        return self.compute_actions(obs_batch, explore=explore)

    def compute_values_from_input_dict(self, input_dict: dict[str, Any]) -> np.ndarray | None:
        """Compute values as `compute_values`, from all views known at that step, [B, …] each."""
        return self.compute_values(input_dict["obs"])

    def compute_values(self, obs_batch: np.ndarray) -> np.ndarray | None:
        """Return values [B] of observations [B, …]; None if there is no value function."""
        return None

    def find_mismatch(self, batch: SampleBatch) -> str | None:
        """Return how observations or actions of a batch differ from the spaces; None if they fit.

        Actions are in the policy's form, where discrete actions count from 0.
        """
        problem = find_mismatch(self.observation_space, batch["obs"], "obs")
        if problem is None and "new_obs" in batch:
            problem = find_mismatch(self.observation_space, batch["new_obs"], "new_obs")
        problem = problem or find_mismatch(self.action_space, batch["actions"], "actions")
        problem = problem or find_out_of_range(self.action_space, batch["actions"], "actions")
        return problem or find_masked(self.action_space, batch["obs"], batch["actions"])

    def get_initial_state(self) -> list[np.ndarray]:
        """Return the recurrent states at the start of an episode, without batch axis; empty for a
        policy without memory.

        A recurrent policy has a view `state_in_i` for each state (see `recurrent_views`), and its
        `compute_actions_from_input_dict` returns the states after the step.
        """
        return []

    @property
    def is_recurrent(self) -> bool:
        """Whether the policy has recurrent states."""
        return bool(self.get_initial_state())

    def recurrent_views(self, max_seq_len: int) -> dict[str, ViewRequirement]:
        """Return the views of the recurrent states: the state after the previous step, stored once
        per `max_seq_len` rows for training."""
        return {
            f"state_in_{i}": ViewRequirement(
                f"state_out_{i}", shift=-1, batch_repeat_value=max_seq_len
            )
            for i, _ in enumerate(self.get_initial_state())
        }

    def compute_log_likelihoods(
        self, actions: Any, obs_batch: Any = None, input_dict: dict[str, Any] | None = None
    ) -> np.ndarray:
        """Return log-probabilities [B] of actions [B, …], given observations or all views."""
        raise NotImplementedError(
            f"{type(self).__name__} has no compute_log_likelihoods(): implement it"
        )

    def actions_for_env(self, actions: Any) -> Any:
        """Convert actions [B, …] to the environment's form: scaled and clipped to its bounds,
        discrete actions counted from the space's start."""
        config = self.config
        return action_scaling.to_env(
            self.action_space, actions, config.normalize_actions, config.clip_actions
        )

    def actions_from_env(self, actions: Any) -> Any:
        """Convert the environment's actions [B, …] to the policy's form; inverse of
        `actions_for_env`."""
        return action_scaling.from_env(self.action_space, actions, self.config.normalize_actions)

    # -- learning ------------------------------------------------------------------------------

    def postprocess_fragment(self, fragment: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return columns [T, N] to add to a fragment, such as advantages.

        Args:
            fragment: time-major columns [T, N, …]: those of the batch, and `next_values` [T, N]
                if `compute_values` returns values: the value of the state that each step led to,
                0 where it terminated. `dones` is True where an episode ended and where the
                fragment or a soft horizon cut it, because the next row is of another trajectory.
        """
        return {}

    def postprocess_trajectory(
        self,
        sample_batch: SampleBatch,
        other_agent_batches: dict[Any, Any] | None = None,
        episode: Any = None,
    ) -> SampleBatch:
        """Return the rows to train on, from one agent's rows of one episode in one fragment.

        Called at the end of each fragment and of each episode. The default adds the columns of
        `postprocess_fragment`. An override returns a new batch, with the same new columns in each
        call; `super()` adds the default ones.

        The rows of a single-agent fragment count as its env steps. To add rows, such as copies with
        other goals, use an operator after ParallelRollouts, which counts the steps before.

        Args:
            sample_batch: columns [rows, …] in order of time; arrays are read-only. The column
                `next_values` (see `postprocess_fragment`) is removed afterwards.
            other_agent_batches: agent id -> (policy, rows before postprocessing) of the other
                agents of the episode; None if there are none.
            episode: the MultiAgentEpisode, if the sampler keeps one.
        """
        names = [n for n in sample_batch if not n.startswith(("state_in_", "seq_lens", "infos"))]
        columns = {
            name: column[:, None]
            for name in names
            if isinstance(column := sample_batch[name], np.ndarray)
        }
        dones = np.array(sample_batch["dones"])
        dones[-1:] = True
        added = self.postprocess_fragment({**columns, "dones": dones[:, None]})
        return sample_batch.with_columns(**{name: column[:, 0] for name, column in added.items()})

    def seed_acting(self, seed: int | None, worker_index: int, *key: str) -> None:
        """Set the random stream of actions to that of a worker.

        Args:
            seed: the seed of the worker.
            worker_index: its index; 0 in the process of the algorithm.
            key: parts of the name of the stream, such as the policy's id.
        """
        self.rng = random_stream(seed, "actions", worker_index, *key)

    def columns_read(self, batch: SampleBatch) -> set[str] | None:
        """Return the columns that learning from a batch reads; None if that is unknown.

        Workers on actors ship only these columns; others are fetched on access. The policy does
        not change.
        """
        return None

    def learn_on_batch(self, batch: SampleBatch) -> dict[str, float]:
        """Update the policy once with all rows; return statistics."""
        raise NotImplementedError(
            f"{type(self).__name__} has no learn_on_batch(): implement it, or leave the policy out "
            "of policies_to_train"
        )

    def learn_on_minibatches(
        self, batch: SampleBatch, num_sgd_iter: int = 1, sgd_minibatch_size: int = 0
    ) -> dict[str, float]:
        """Make several passes over the rows in random order, with one update per minibatch.

        The last minibatch of a pass may be smaller. `end_epoch` may stop early.

        Args:
            batch: the rows.
            num_sgd_iter: number of passes.
            sgd_minibatch_size: rows per update; 0 for all rows at once.

        Returns:
            means of the statistics of the last pass.

        Raises:
            ValueError: the minibatch is larger than the batch.
        """

        def run_epoch(batch: SampleBatch, size: int) -> list[Any]:
            minibatches = shuffled_minibatches(batch, size, self.shuffle_rng)
            return [self.learn_on_batch(rows) for rows in minibatches]

        return run_epochs(self, run_epoch, batch, num_sgd_iter, sgd_minibatch_size)

    def compute_gradients(self, batch: SampleBatch) -> tuple[Any, dict[str, float]]:
        """Return the gradient of one update, which `apply_gradients` takes, and statistics."""
        raise NotImplementedError(
            f"{type(self).__name__} has no compute_gradients(): implement it, or leave the policy "
            "out of policies_to_train"
        )

    def apply_gradients(self, gradients: Any) -> None:
        """Update the policy once with a gradient from `compute_gradients`."""
        raise NotImplementedError(
            f"{type(self).__name__} has no apply_gradients(): implement it, or leave the policy "
            "out of policies_to_train"
        )

    def end_epoch(self, batch: SampleBatch | None, stats: dict[str, float]) -> bool:
        """Return True to stop after this pass; called after each pass.

        Args:
            batch: the rows of the whole batch; None if the policy learns in several processes, and
                this one has none.
            stats: the mean statistics of the pass.
        """
        return False

    def end_learning(self, batch: SampleBatch | None, stats: dict[str, float]) -> dict[str, float]:
        """Return more statistics; called after the last pass, with the arguments of `end_epoch`."""
        return {}

    def scheduled(self, setting: Any) -> float:
        """Return the current value of a setting that may be a schedule; see `value_at`."""
        return value_at(setting, self.timestep, self.total_timesteps)

    def on_global_var_update(self, global_vars: dict[str, Any]) -> None:
        """Store what schedules depend on: `timestep`, the env steps sampled so far, and
        `total_timesteps`, unless it is None or missing."""
        self.timestep = int(global_vars["timestep"])
        total = global_vars.get("total_timesteps")
        if total is not None:
            self.total_timesteps = int(total)

    # -- state ---------------------------------------------------------------------------------

    def export(self, path: Any, format: str | None = None) -> Any:
        """Write the acting part to a file that can be used without flowrl."""
        raise NotImplementedError(
            f"{type(self).__name__} has no export(): implement it, or export a TorchPolicy"
        )

    def get_weights(self) -> dict[str, np.ndarray]:
        """Return copies of the weights by name; empty for a policy that does not learn."""
        return {}

    def set_weights(self, weights: dict[str, np.ndarray]) -> None:
        """Set weights that `get_weights` returned.

        Raises:
            ValueError: there are weights, but this policy has none.
        """
        if weights:
            raise ValueError(f"{type(self).__name__} has no weights, got {sorted(weights)}")

    def _filters(self) -> dict[str, Any]:
        filters = {"observations": self.observation_filter, "rewards": self.reward_scaler}
        return {name: one for name, one in filters.items() if one is not None}

    def filter_state_dict(self) -> dict[str, Any]:
        """Return the state of the running normalization, which workers need besides weights."""
        return {name: one.state_dict() for name, one in self._filters().items()}

    def load_filter_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state from `filter_state_dict`."""
        for name, one in self._filters().items():
            one.load_state_dict(state[name])

    def take_filter_updates(self) -> dict[str, Any]:
        """Return the statistics that the filters collected in this process since the last call."""
        return {name: one.take_new_stats() for name, one in self._filters().items()}

    def merge_filter_updates(self, updates: dict[str, Any]) -> None:
        """Merge statistics from a worker's `take_filter_updates`."""
        for name, one in self._filters().items():
            one.merge_stats(updates[name])
        if updates:
            self.filter_version += 1

    def get_state(self) -> dict[str, Any]:
        """Return the complete state: weights, filters, counters and random streams.

        Raises:
            TypeError: `get_weights` does not return a dict.
        """
        weights: Any = self.get_weights()
        if not isinstance(weights, dict):
            raise TypeError(
                f"{type(self).__name__}.get_weights() must return a dict of arrays by name, got a "
                f"{type(weights).__name__}"
            )
        return {
            "weights": weights,
            "filters": self.filter_state_dict(),
            "timestep": self.timestep,
            "total_timesteps": self.total_timesteps,
            "version": self.version,
            "rng": stream_state(self.rng),
            "shuffle_rng": stream_state(self.shuffle_rng),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Load a state from `get_state`; its `total_timesteps` only if this policy has none.

        Raises:
            ValueError: an entry or a filter is missing, or weights or filters do not fit; nothing
                changes.
        """
        check_state(state, _STATE_FIELDS, f"the state of a {type(self).__name__}")
        saved = state["filters"]
        missing = [f"normalize_{name}" for name in self._filters() if name not in saved]
        if missing:
            raise ValueError(
                f"the policy of this state was trained without {' and '.join(missing)}: leave the "
                "setting out"
            )
        if "observations" in saved and self.observation_filter is None:
            raise ValueError(
                "the state normalizes observations: the weights need normalize_observations=True"
            )
        weights, filters = self.get_weights(), self.filter_state_dict()
        try:
            self.set_weights(state["weights"])
            self.load_filter_state_dict(saved)
        except Exception:
            self.set_weights(weights)
            self.load_filter_state_dict(filters)
            raise
        self.timestep = int(state["timestep"])
        self.total_timesteps = self.total_timesteps or state["total_timesteps"]
        self.version = int(state["version"])
        self.num_loads += 1
        restore_stream(self.rng, state["rng"])
        restore_stream(self.shuffle_rng, state["shuffle_rng"])

    def acting_state_dict(self) -> dict[str, Any]:
        """Return what sampling needs besides weights and filter statistics: counters, random
        streams, reward sums and the noise of the exploration."""
        scaler = self.reward_scaler
        return {
            "timestep": self.timestep,
            "total_timesteps": self.total_timesteps,
            "version": self.version,
            "rng": stream_state(self.rng),
            "shuffle_rng": stream_state(self.shuffle_rng),
            "reward_sums": None if scaler is None else scaler.discounted_sums,
        }

    def load_acting_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state from `acting_state_dict`.

        Raises:
            ValueError: it is not such a state.
        """
        check_state(state, {**_ACTING_FIELDS, "reward_sums": np.ndarray | None})
        self.timestep, self.version = state["timestep"], state["version"]
        self.total_timesteps = self.total_timesteps or state["total_timesteps"]
        restore_stream(self.rng, state["rng"])
        restore_stream(self.shuffle_rng, state["shuffle_rng"])
        if self.reward_scaler is not None:
            self.reward_scaler.discounted_sums = state["reward_sums"]

    def load_learned_state(self, state: dict[str, Any]) -> None:
        """Load another process's `get_state`, but keep what belongs to the sampling of this
        process: the random streams of actions and of the network's noise, reward sums, the noise
        of the exploration, and the statistics of the filters, which come from the rollouts."""
        acting, filters = self.acting_state_dict(), self.filter_state_dict()
        self.set_state(state)
        self.load_filter_state_dict(filters)
        learned = {key: state[key] for key in ("version", "timestep", "shuffle_rng")}
        self.load_acting_state_dict({**acting, **learned})
        self.total_timesteps = state["total_timesteps"] or self.total_timesteps

    @classmethod
    def from_checkpoint(
        cls,
        path: Any,
        policy_id: str | None = None,
        config: dict[str, Any] | None = None,
        trust: bool = False,
    ) -> Self:
        """Return the policy of a checkpoint; needs no environment, no Ray and no plan.

        Args:
            path: a checkpoint, or a run directory (its newest checkpoint).
            policy_id: None if the checkpoint has only one policy.
            config: settings to change, or settings that could not be saved (such as a
                `custom_model` defined in a function: `{"model": {"custom_model": …}}`).
            trust: import the code that the checkpoint names, such as a custom policy class or
                model. Not needed for classes of flowrl and for the class that this method is
                called on.

        Raises:
            CheckpointError: the checkpoint cannot be read, lacks the policy, or the policy's class
                or model cannot be created.
        """
        from flowrl.policies.checkpoint_loading import policy_from_checkpoint

        return policy_from_checkpoint(cls, path, policy_id, config, trust)
