"""Policy: numpy in, numpy out, no framework in the interface."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
from gymnasium import spaces

from flowrl.data import SampleBatch
from flowrl.policies.config import PolicyConfig
from flowrl.policies.filters import ObservationFilter, RewardScaler
from flowrl.policies.learning.epochs import run_epochs, shuffled_minibatches
from flowrl.policies.policy_runner import PolicyRunner
from flowrl.policies.views import ViewRequirement, find_mismatch, find_out_of_range
from flowrl.seeding import random_stream, restore_stream, stream_state
from flowrl.settings import ConfigError

_STATE = ("weights", "filters", "timestep", "version", "rng", "shuffle_rng")


class Policy:
    """Decides on actions and learns from batches.

    A subclass writes `compute_actions`; one that learns also `learn_on_batch`, `get_weights` and
    `set_weights`. The rest has defaults.

    Args:
        observation_space, action_space: of one agent.
        config: settings; a mapping is merged over the defaults of `config_class`.

    Attributes:
        view_requirements: view name -> ViewRequirement. What batches show of the trajectory
            besides the columns as they are; may be changed, from the next fragment on.
        version: grows with every change of the weights.
        worker_index, num_workers: of the process, 0 and 0 where nobody samples on actors.
        observation_filter, reward_scaler: running normalisation, None where it is off.
        row_stats: what the last learning tells of rows, arrays [rows] by name, such as `td_error`
            for the rows `batch_indexes` of a replay buffer.
    """

    config_class: ClassVar[type[PolicyConfig]] = PolicyConfig

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space, config: Any):
        self.observation_space = observation_space
        self.action_space = action_space
        self.config = self.settings_of(config)
        self.view_requirements: dict[str, ViewRequirement] = {
            "obs": ViewRequirement(space=observation_space)
        }
        self.version = 0
        self.row_stats: dict[str, np.ndarray] = {}
        self.timestep = 0
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
    def settings_of(cls, config: Any) -> Any:
        """A mapping merged over the defaults of `config_class`; of another record only what is set
        in it and known here, so that the policy's own defaults go before that one's.

        Raises:
            ConfigError: an unknown setting, or a wrong value.
        """
        if isinstance(config, cls.config_class):
            return config
        values = config.chosen() if isinstance(config, PolicyConfig) else dict(config.items())
        if isinstance(config, PolicyConfig):
            values = {k: v for k, v in values.items() if k in cls.config_class.model_fields}
        return cls.config_class(**values)

    # -- acting --------------------------------------------------------------------------------

    def compute_actions(
        self, obs_batch: np.ndarray, explore: bool = True
    ) -> tuple[np.ndarray, list[np.ndarray], dict[str, np.ndarray]]:
        """Actions for observations [B, …] as the sampler stores them (normalised).

        Returns:
            actions [B, …]; states after the step, [B, …] each (see `get_initial_state`); extra
            columns [B, …] to be recorded, such as `action_logp` and `vf_preds`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no compute_actions(): write one that gives (actions, "
            "states, extra columns)"
        )

    def compute_actions_from_input_dict(
        self, input_dict: dict[str, Any], explore: bool = True
    ) -> tuple[np.ndarray, list[np.ndarray], dict[str, np.ndarray]]:
        """Like `compute_actions`, from every view that is known by then, [B, …] each."""
        return self.compute_actions(input_dict["obs"], explore=explore)

    def compute_values_from_input_dict(self, input_dict: dict[str, Any]) -> np.ndarray | None:
        """Like `compute_values`, from every view that is known by then, [B, …] each."""
        return self.compute_values(input_dict["obs"])

    def compute_values(self, obs_batch: np.ndarray) -> np.ndarray | None:
        """Values [B] of observations [B, …]; None for a policy without a value function."""
        return None

    def find_mismatch(self, batch: SampleBatch) -> str | None:
        """What is wrong with the observations and actions of rows, in words; None if nothing is
        found. Actions are as the policy gives them: numbers of Discrete ones from 0."""
        problem = find_mismatch(self.observation_space, batch["obs"], "obs")
        problem = problem or find_mismatch(self.action_space, batch["actions"], "actions")
        return problem or find_out_of_range(self.action_space, batch["actions"], "actions")

    def get_initial_state(self) -> list[np.ndarray]:
        """What a recurrent policy remembers at an episode's start, one array per state (without
        the batch axis). Empty for one that remembers nothing.

        A policy with states has for each i the view `state_in_i` (see `recurrent_views`), and
        its `compute_actions_from_input_dict` gives the states after the step.
        """
        return []

    @property
    def is_recurrent(self) -> bool:
        """Whether the policy has states."""
        return bool(self.get_initial_state())

    def recurrent_views(self, max_seq_len: int) -> dict[str, ViewRequirement]:
        """The views of a recurrent policy's states: what each step before gave, once per
        `max_seq_len` rows for training."""
        return {
            f"state_in_{i}": ViewRequirement(
                f"state_out_{i}", shift=-1, batch_repeat_value=max_seq_len
            )
            for i, _ in enumerate(self.get_initial_state())
        }

    def compute_single_action(self, obs: Any, explore: bool = False) -> Any:
        """The action to send to an environment that gave the raw observation `obs`.

        Raises:
            ConfigError: it is not of the observation space's shape; the policy wants to see more
                than an observation (then a `session()` remembers it).
        """
        wanted = [n for n, view in self.view_requirements.items() if view.known_for_actions(n)]
        if wanted != ["obs"] or self.view_requirements["obs"].shift != 0:
            raise ConfigError(
                f"{type(self).__name__} sees {wanted}, not the observation alone: use "
                "policy.session(), which remembers what came before"
            )
        return self.session().compute_single_action(obs, explore=explore)

    def session(self) -> PolicyRunner:
        """Somebody who plays an episode with the policy, without a worker: see PolicyRunner."""
        return PolicyRunner(self)

    def compute_log_likelihoods(
        self, actions: Any, obs_batch: Any = None, input_dict: dict[str, Any] | None = None
    ) -> np.ndarray:
        """Log-probabilities [B] of actions [B, …] at observations, or at all views of
        `input_dict`."""
        raise NotImplementedError(f"{type(self).__name__} has no compute_log_likelihoods()")

    def actions_for_env(self, actions: Any) -> Any:
        """Actions [B, …] as the environment takes them: stretched and clipped to its bounds, whole
        numbers counted from the space's start."""
        return self._for_env(self.action_space, actions)

    def _for_env(self, space: spaces.Space, actions: Any) -> Any:
        if isinstance(space, spaces.Discrete):
            return actions + space.start if space.start else actions
        if isinstance(space, spaces.MultiDiscrete):
            return actions + space.start if space.start.any() else actions
        if isinstance(space, spaces.Dict):
            return {key: self._for_env(space[key], actions[key]) for key in sorted(space)}
        if isinstance(space, spaces.Tuple):
            return tuple(self._for_env(s, a) for s, a in zip(space, actions, strict=True))
        if not isinstance(space, spaces.Box):
            return actions
        bounded = np.isfinite(space.low).all() and np.isfinite(space.high).all()
        if bounded and self.config.normalize_actions:
            low, high = 0.5 * space.low, 0.5 * space.high  # halves: the whole may be too wide
            actions = (high + low) + actions * (high - low)
        if self.config.clip_actions:
            actions = np.clip(actions, space.low, space.high)
        return actions.astype(space.dtype, copy=False).reshape(-1, *space.shape)

    def actions_from_env(self, actions: Any) -> Any:
        """Actions [B, …] as the policy gives them, of those that an environment took: the other way
        round than `actions_for_env`."""
        return self._from_env(self.action_space, actions)

    def _from_env(self, space: spaces.Space, actions: Any) -> Any:
        if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
            return actions - space.start
        if isinstance(space, spaces.Dict):
            return {key: self._from_env(space[key], actions[key]) for key in sorted(space)}
        if isinstance(space, spaces.Tuple):
            return tuple(self._from_env(s, a) for s, a in zip(space, actions, strict=True))
        if not isinstance(space, spaces.Box):
            return actions
        bounded = np.isfinite(space.low).all() and np.isfinite(space.high).all()
        if bounded and self.config.normalize_actions:
            low, high = 0.5 * space.low, 0.5 * space.high
            width = np.where(high > low, high - low, 1.0)
            actions = (actions - (high + low)) / width
        return actions.astype(np.float32, copy=False)

    # -- learning ------------------------------------------------------------------------------

    def postprocess_fragment(self, fragment: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Columns to add to a fragment of time-major columns [T, N, …], such as advantages.

        Besides the batch columns the fragment has `next_values` [T, N]: the value of the state
        that each step led to, 0 where it terminated; only if `compute_values` gives values.
        """
        return {}

    def postprocess_trajectory(
        self,
        sample_batch: SampleBatch,
        other_agent_batches: dict[Any, Any] | None = None,
        episode: Any = None,
    ) -> SampleBatch:
        """The rows of one episode's part of a fragment, as they shall be trained on.

        Called at the end of each fragment and of each episode, never with rows of two. By default
        it adds what `postprocess_fragment` gives. Where a subclass overrides it, each part is
        handed to it apart (`super()` adds the columns); it gives a new batch, with the same new
        columns each time. The batch also has the column `next_values` (see
        `postprocess_fragment`), which is taken off afterwards.

        Args:
            sample_batch: columns [rows, …], in order of time; arrays are read-only.
            other_agent_batches: of the other agents in the episode; None where there are none.
            episode: the episode, where the sampler keeps a record of it.
        """
        columns = {
            name: column[:, None]
            for name, column in sample_batch.items()
            if isinstance(column, np.ndarray)
            and not name.startswith(("state_in_", "seq_lens", "infos"))
        }
        made = self.postprocess_fragment({**columns, "dones": sample_batch["dones"][:, None]})
        return sample_batch.with_columns(**{name: column[:, 0] for name, column in made.items()})

    def columns_read(self, batch: SampleBatch) -> set[str] | None:
        """The columns that learning from a batch reads; None where that cannot be tried.

        Nothing is changed by the trial. It only says what workers on actors ship with every batch:
        a column that is not read here can be read all the same, and is fetched then.
        """
        return None

    def learn_on_batch(self, batch: SampleBatch) -> dict[str, float]:
        """One update from all the rows; returns statistics."""
        raise NotImplementedError(
            f"{type(self).__name__} has no learn_on_batch(): leave it out of policies_to_train, or "
            "write one"
        )

    def learn_on_minibatches(
        self, batch: SampleBatch, num_sgd_iter: int = 1, sgd_minibatch_size: int = 0
    ) -> dict[str, float]:
        """Several passes over the rows in random order, one update per minibatch.

        The last minibatch of a pass may be smaller. `end_epoch` may stop early.

        Returns:
            the means of the statistics of the last pass.

        Raises:
            ValueError: the minibatch is larger than the batch.
        """
        minibatches = partial(shuffled_minibatches, rng=self.shuffle_rng)
        return run_epochs(self, minibatches, batch, num_sgd_iter, sgd_minibatch_size)

    def compute_gradients(self, batch: SampleBatch) -> tuple[Any, dict[str, float]]:
        """The gradient of one update, which another policy of this class can apply; statistics."""
        raise NotImplementedError(f"{type(self).__name__} has no compute_gradients(): write one")

    def apply_gradients(self, gradients: Any) -> None:
        """One update by what `compute_gradients` gave."""
        raise NotImplementedError(f"{type(self).__name__} has no apply_gradients(): write one")

    def end_epoch(self, batch: SampleBatch, stats: dict[str, float]) -> bool:
        """Called after each pass with its statistics' means; True makes it the last."""
        return False

    def end_learning(self, batch: SampleBatch, stats: dict[str, float]) -> dict[str, float]:
        """Called after the last pass; returns more statistics."""
        return {}

    def on_global_var_update(self, global_vars: dict[str, Any]) -> None:
        """Take note of `timestep`, the env steps sampled so far: schedules follow it."""
        self.timestep = int(global_vars["timestep"])

    # -- state ---------------------------------------------------------------------------------

    def export(self, path: Any, format: str | None = None) -> Any:
        """Write the acting part to a file that needs no flowrl."""
        raise NotImplementedError(f"{type(self).__name__} has no export(): write one")

    def get_weights(self) -> dict[str, np.ndarray]:
        """Copies of the weights by name; none for a policy that does not learn."""
        return {}

    def set_weights(self, weights: dict[str, np.ndarray]) -> None:
        """Take over weights that `get_weights` gave.

        Raises:
            ValueError: there are some, and this policy has none.
        """
        if weights:
            raise ValueError(f"{type(self).__name__} has no weights, got {sorted(weights)}")

    def filter_state(self) -> dict[str, Any]:
        """What the workers need besides the weights: the normalisation in force."""
        filters = {"observations": self.observation_filter, "rewards": self.reward_scaler}
        return {k: f.state_dict() for k, f in filters.items() if f is not None}

    def set_filter_state(self, state: dict[str, Any]) -> None:
        """Take over what `filter_state` gave."""
        if self.observation_filter is not None:
            self.observation_filter.load_state_dict(state["observations"])
        if self.reward_scaler is not None:
            self.reward_scaler.load_state_dict(state["rewards"])

    def take_fresh_filters(self) -> dict[str, Any]:
        """What the filters of this process saw since the last call."""
        filters = {"observations": self.observation_filter, "rewards": self.reward_scaler}
        return {k: f.take_new_stats() for k, f in filters.items() if f is not None}

    def absorb_filters(self, fresh: dict[str, Any]) -> None:
        """Merge what a worker's filters saw."""
        if self.observation_filter is not None:
            self.observation_filter.merge_stats(fresh["observations"])
        if self.reward_scaler is not None:
            self.reward_scaler.merge_stats(fresh["rewards"])
        if fresh:
            self.version += 1

    def get_state(self) -> dict[str, Any]:
        """Everything that the policy's future depends on."""
        return {
            "weights": self.get_weights(),
            "filters": self.filter_state(),
            "timestep": self.timestep,
            "version": self.version,
            "rng": stream_state(self.rng),
            "shuffle_rng": stream_state(self.shuffle_rng),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Take over what `get_state` gave.

        Raises:
            ValueError: parts of it are missing, or the weights are another network's; nothing is
                changed.
        """
        missing = [part for part in _STATE if part not in state]
        if missing:
            raise ValueError(f"a policy's state without {', '.join(missing)}")
        self.set_weights(state["weights"])
        self.set_filter_state(state["filters"])
        self.timestep = int(state["timestep"])
        self.version = int(state["version"])
        restore_stream(self.rng, state["rng"])
        restore_stream(self.shuffle_rng, state["shuffle_rng"])

    def get_acting_state(self) -> dict[str, Any]:
        """What actions depend on besides the weights and what filters have learned."""
        scaler = self.reward_scaler
        return {
            "timestep": self.timestep,
            "version": self.version,
            "rng": stream_state(self.rng),
            "shuffle_rng": stream_state(self.shuffle_rng),
            "reward_sums": None if scaler is None else scaler.discounted_sums,
        }

    def set_acting_state(self, state: dict[str, Any]) -> None:
        """Take over what `get_acting_state` gave."""
        self.timestep, self.version = state["timestep"], state["version"]
        restore_stream(self.rng, state["rng"])
        restore_stream(self.shuffle_rng, state["shuffle_rng"])
        if self.reward_scaler is not None:
            self.reward_scaler.discounted_sums = state["reward_sums"]

    @classmethod
    def from_checkpoint(
        cls,
        path: Any,
        policy_id: str | None = None,
        config: dict[str, Any] | None = None,
        trust: bool = False,
    ) -> Policy:
        """The policy of a checkpoint: without environment, Ray or plan.

        Args:
            path: of the checkpoint's folder.
            policy_id: which one; None for the only one.
            config: settings that are to be others, or that could not be saved (such as a
                `custom_model` that is defined in a function: `{"model": {"custom_model": …}}`).
            trust: import code that the checkpoint names and that is not flowrl's, such as the class
                of a policy of one's own (not needed where this is called of that class).

        Raises:
            CheckpointError: it cannot be read, has no such policy, or its class or model cannot be
                made again.
        """
        from flowrl.policies.checkpoint_loading import policy_from_checkpoint

        return policy_from_checkpoint(cls, path, policy_id, config, trust)

    @classmethod
    def like(cls, other: Policy) -> Self:
        """A new policy of this class with another one's spaces and settings."""
        return cls(other.observation_space, other.action_space, other.config)
