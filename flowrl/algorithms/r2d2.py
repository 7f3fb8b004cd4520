"""R2D2: recurrent Q-learning from replayed sequences (Kapturowski et al. 2019, ICLR)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

import numpy as np
import optree
import torch

from flowrl.algorithms.dqn import DQN, DQNConfig, DQNTorchPolicy
from flowrl.data import SampleBatch
from flowrl.errors import ConfigError
from flowrl.policies.config import ModelConfig
from flowrl.policies.exploration import MASKED_BELOW
from flowrl.policies.torch_policy import TensorBatch
from flowrl.policies.views import ViewRequirement, forward_views
from flowrl.settings import Count, Positive, check_of_settings
from flowrl.state_schema import check_state
from flowrl.trainer.algorithm import PolicyClass
from flowrl.trainer.config import PlanSetting, PlanSource

RAW_REWARDS = "raw_rewards"  # column: rewards before clipping and scaling, as `prev_rewards`
PREVIOUS = {"prev_actions": "actions", "prev_rewards": RAW_REWARDS}  # view -> column of the row


class R2D2Config(DQNConfig):
    """Settings of R2D2."""

    algorithm: ClassVar[str] = "flowrl.algorithms.r2d2:R2D2"

    plan: PlanSetting = "r2d2"
    model: ModelConfig = ModelConfig(
        fcnet_hiddens=[64], use_lstm=True, lstm_cell_size=64, max_seq_len=20, burn_in=10
    )
    rollout_fragment_length: Count | Literal["auto"] = 60
    """Env steps of each environment per fragment. Sequences do not cross fragments, so use a
    multiple of `max_seq_len`. With "auto", one round of all workers has only `train_batch_size` env
    steps."""
    train_batch_size: Count = 32
    """Sequences per train batch, drawn from the replay buffer."""
    n_step: Count = 5
    """Maximum number of rewards in a target before the value of the next state (n-step returns);
    fewer at the end of a sequence."""
    zero_init_states: bool = False
    """Start sequences with recurrent states of zeros; if False, with the states that the sampler
    stored."""
    use_h_function: bool = True
    """Learn values of rescaled returns (Pohlen et al. 2018, arXiv 1805.11593, proposition A.2)."""
    h_function_epsilon: Positive = 1e-3
    """Weight of the linear term of the rescaling, which makes it invertible."""

    @check_of_settings
    def _check_value_settings(self) -> Self:
        for name, value in (("num_atoms", 1), ("noisy", False)):
            if getattr(self, name) != value:
                raise ValueError(f"{name}: R2D2 does not support this option of DQN: leave it out")
        if self.replay_mode == "lockstep":
            raise ValueError('replay_mode="lockstep" draws rows, R2D2 learns from sequences')
        rows = self.model.max_seq_len + self.model.burn_in
        shards = max(self.num_replay_shards, 1)
        if self.policies is None and self.replay_buffer_capacity < rows * shards:
            raise ValueError(
                f"replay_buffer_capacity={self.replay_buffer_capacity} is less than a sequence of "
                f"{rows} rows (model.max_seq_len and model.burn_in) per replay actor: increase the "
                "capacity"
            )
        self._require(self.use_h_function, "use_h_function=True", "h_function_epsilon")
        return self

    def buffer_settings(self, policy_id: str, shard: int) -> dict[str, Any]:
        """Return the arguments of a ReplayBuffer of sequences; the loss computes n-step returns."""
        return {
            **super().buffer_settings(policy_id, shard),
            "n_step": 1,
            "storage_unit": "sequences",
            "max_seq_len": self.model.max_seq_len,
            "burn_in": self.model.burn_in,
        }

    def rows_per_train_batch(self) -> int:
        return self.train_batch_size * self.model.max_seq_len

    def build(self, plan: PlanSource | None = None) -> R2D2:
        return self._build(plan)


class R2D2TorchPolicy(DQNTorchPolicy):
    """A policy with a recurrent network that learns Q-values from sequences.

    Each sequence starts with its stored recurrent state, which the burn-in refreshes for both
    networks. Sequences are unrolled for one additional step, to evaluate their last next state.
    """

    config_class = R2D2Config
    config: R2D2Config

    def __init__(self, observation_space: Any, action_space: Any, config: Any):
        super().__init__(observation_space, action_space, config)
        if "prev_rewards" in self.view_requirements:
            self.view_requirements[RAW_REWARDS] = ViewRequirement(
                "rewards", used_for_compute_actions=False
            )

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "h_function": self._rescaling}

    @property
    def _rescaling(self) -> list[float] | None:
        """[h_function_epsilon]; None without a rescaling of values."""
        return [self.config.h_function_epsilon] if self.config.use_h_function else None

    def _check_output_settings(self, state: dict[str, Any]) -> None:
        super()._check_output_settings(state)
        check_state(
            state, {"h_function": list[float] | None}, f"the state of a {type(self).__name__}"
        )
        if state["h_function"] != self._rescaling:
            raise ValueError(
                f"cannot load a state with [h_function_epsilon] = {state['h_function']} (None: "
                f"use_h_function=False) for a policy with {self._rescaling}: its values are "
                "rescaled in another way"
            )

    def check_views(self) -> None:
        if not self.is_recurrent:
            raise ConfigError(
                'R2D2 needs a recurrent network: set model={"use_lstm": True}, or use DQN'
            )
        states = {name for name in self.model.view_requirements if name.startswith("state_in_")}
        extra_views = set(self.model.view_requirements) - {"obs", *PREVIOUS} - states
        is_stacked = self.model.view_requirements["obs"].is_window
        if extra_views or is_stacked or self.config.model.use_attention:
            raise ConfigError(
                "R2D2's network may read the observation, the previous action and the previous "
                f"reward, not {sorted(extra_views) or 'several observations at once'}"
                f"{'; for an Atari game set atari.frame_stack=1' if is_stacked else ''}"
            )

    def loss(self, batch: TensorBatch) -> torch.Tensor:
        """Return the mean Huber loss of the TD errors, weighted by the column `weights` [B] if
        there is one.

        The targets of double Q-learning are h(R + gamma^k h^-1(Q_target(s', argmax_a Q(s', a))))
        after up to `n_step` steps (Kapturowski et al. 2019, section 2.3).
        """
        if "seq_lens" not in batch:
            raise ConfigError(
                "R2D2 learns from sequences: draw from config.replay_buffer(), or from a "
                'ReplayBuffer with storage_unit="sequences"'
            )
        lens = batch.array("seq_lens").astype(np.int64)
        unrolled = self._with_last_next_states(batch, lens)
        q_function = self.q_function
        uses_state_value = q_function.uses_state_value
        outputs, _ = self.model.from_batch(unrolled)
        state_values = self.model.value_function() if uses_state_value else None
        with torch.no_grad():
            target_outputs, _ = self.target_model.from_batch(unrolled, is_training=False)
            target_values = self.target_model.value_function() if uses_state_value else None
            target_q = q_function.values(target_outputs, target_values).cpu().numpy()
        scores = outputs.detach().cpu().numpy() if self.config.double_q else target_q
        targets = self._sequence_targets(batch, lens, scores, target_q)
        rows = torch.from_numpy(_unrolled_rows(lens)).to(self.device)
        state_values = None if state_values is None else state_values[rows]
        targets_tensor = torch.from_numpy(targets).to(self.device)
        loss = q_function.td_loss(outputs[rows], state_values, batch["actions"], targets_tensor)
        return self._mean_loss(batch, loss)

    def _with_last_next_states(self, batch: TensorBatch, lens: np.ndarray) -> TensorBatch:
        """Return the networks' input columns, with the last next state of each sequence as an
        additional row at its end."""
        positions, last = _unrolled_rows(lens), np.cumsum(lens) - 1
        ends = last + 1 + np.arange(len(lens))

        def append_last(rows: Any, next_rows: Any) -> np.ndarray:
            column = np.empty((len(rows) + len(lens), *rows.shape[1:]), rows.dtype)
            column[positions], column[ends] = rows, next_rows[last]
            return column

        columns: dict[str, Any] = {"seq_lens": (lens + 1).astype(np.int32)}
        for name in forward_views(self.model.view_requirements):
            if name.startswith("state_in_"):
                state = batch.array(name)
                columns[name] = np.zeros_like(state) if self.config.zero_init_states else state
            else:
                next_name = "new_obs" if name == "obs" else PREVIOUS[name]
                if next_name == RAW_REWARDS and next_name not in batch:
                    next_name = "rewards"  # recorded rows may lack raw_rewards
                columns[name] = optree.tree_map(
                    append_last, batch.array(name), batch.array(next_name)
                )
        unrolled = TensorBatch(SampleBatch.unchecked(columns), self.device)
        unrolled.burn_in = batch.burn_in
        return unrolled

    def _sequence_targets(
        self, batch: TensorBatch, lens: np.ndarray, scores: np.ndarray, target_q: np.ndarray
    ) -> np.ndarray:
        """Return the targets [B] of the batch's actions.

        Args:
            batch: consecutive sequences.
            lens: their lengths, [sequences].
            scores: scores that select the next actions, [B + sequences, n].
            target_q: Q-values of the target network, [B + sequences, n].
        """
        gamma, eps = self.config.gamma, self.config.h_function_epsilon
        rewards = batch.array("rewards").astype(np.float64)
        number = np.arange(len(rewards))
        remaining = np.repeat(np.cumsum(lens), lens) - number  # in the sequence
        is_terminated = batch.array("terminateds").astype(bool)
        # rows up to the next terminated one, which may be inside a sequence if a life was lost
        terminated_rows = np.append(np.flatnonzero(is_terminated), len(rewards))
        to_terminated = terminated_rows[np.searchsorted(terminated_rows, number)] - number
        steps = np.minimum(self.config.n_step, np.minimum(remaining, to_terminated + 1))
        returns = np.zeros(len(rewards))
        for k in range(int(steps.max(initial=0))):
            rows = np.flatnonzero(steps > k)
            returns[rows] += gamma**k * rewards[rows + k]
        next_rows = _unrolled_rows(lens) + steps
        next_values = target_q[next_rows, scores[next_rows].argmax(1)].astype(np.float64)
        next_values[next_values <= MASKED_BELOW] = 0.0  # all actions are masked
        if self.config.use_h_function:
            next_values = inverse_rescale_value(next_values, eps)
        is_terminal = is_terminated[number + steps - 1]
        targets = returns + np.where(is_terminal, 0.0, gamma**steps * next_values)
        targets = rescale_value(targets, eps) if self.config.use_h_function else targets
        return targets.astype(np.float32)


def rescale_value(x: np.ndarray, eps: float) -> np.ndarray:
    """Return h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x (Pohlen et al. 2018, arXiv 1805.11593)."""
    result: np.ndarray = np.sign(x) * (np.sqrt(np.abs(x) + 1) - 1) + eps * x
    return result


def inverse_rescale_value(x: np.ndarray, eps: float) -> np.ndarray:
    """Return the inverse of `rescale_value`."""
    root = np.sqrt(1 + 4 * eps * (np.abs(x) + 1 + eps))
    result: np.ndarray = np.sign(x) * (((root - 1) / (2 * eps)) ** 2 - 1)
    return result


def _unrolled_rows(lens: np.ndarray) -> np.ndarray:
    """Return the row numbers of a batch's rows after a row is added at the end of each sequence."""
    return np.arange(int(lens.sum())) + np.repeat(np.arange(len(lens)), lens)


class R2D2(DQN):
    """R2D2 with the plan `r2d2`; R2D2Config has its settings.

    Example:
        >>> algo = R2D2("CartPole-v1", seed=1)  # doctest: +SKIP
        >>> algo.learn(total_timesteps=100_000)  # doctest: +SKIP
    """

    policy_class: ClassVar[PolicyClass] = R2D2TorchPolicy
    config_class = R2D2Config


DEFAULT_CONFIG = R2D2Config()
