"""R2D2: recurrent Q-learning from replayed sequences (Kapturowski et al. 2019)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

import numpy as np
import optree
import torch
from pydantic import model_validator

from flowrl.algorithms.dqn import DQNConfig, DQNTorchPolicy
from flowrl.data import SampleBatch
from flowrl.policies.config import ModelConfig
from flowrl.policies.torch_policy import TensorBatch
from flowrl.settings import ConfigError, Count, Positive
from flowrl.trainer.algorithm import Algorithm

PREVIOUS = {"prev_actions": "actions", "prev_rewards": "rewards"}  # views of the step before


class R2D2Config(DQNConfig):
    """Settings of R2D2."""

    algorithm: ClassVar[str] = "flowrl.algorithms.r2d2:R2D2"

    plan: str | None = "r2d2"
    model: ModelConfig = ModelConfig(
        fcnet_hiddens=[64], use_lstm=True, lstm_cell_size=64, max_seq_len=20, burn_in=10
    )
    rollout_fragment_length: Count | Literal["auto"] = 60
    """Sequences are parts of fragments, so this is to be some of `max_seq_len`."""
    train_batch_size: Count = 32
    """Sequences per train batch, drawn from the replay buffer."""
    n_step: Count = 5
    """Steps of reward before a target's value, within a sequence."""
    zero_init_states: bool = False
    """Sequences begin with zeros instead of the state that the sampler had."""
    use_h_function: bool = True
    """Values are of returns that are rescaled (Pohlen et al. 2018, proposition A.2)."""
    h_function_epsilon: Positive = 1e-3
    """How much of a return is not rescaled, so that it can be found again."""

    @model_validator(mode="after")
    def _plain_values(self) -> Self:
        for name, value in (("num_atoms", 1), ("noisy", False)):
            if getattr(self, name) != value:
                raise ValueError(f"{name} is DQN's, R2D2 has no such values: leave it out")
        if self.replay_mode == "lockstep":
            raise ValueError('replay_mode="lockstep" draws rows, R2D2 learns from sequences')
        return self

    def buffer_settings(self, policy_id: str, shard: int) -> dict[str, Any]:
        """Sequences, whose steps the loss adds up itself."""
        return {
            **super().buffer_settings(policy_id, shard),
            "n_step": 1,
            "storage_unit": "sequences",
            "max_seq_len": self.model.max_seq_len,
            "burn_in": self.model.burn_in,
        }


class R2D2TorchPolicy(DQNTorchPolicy):
    """A policy that remembers, and learns the values of its actions from whole sequences.

    Each begins with the state that was stored with it, which the burn-in brings up to date for both
    networks; one step more than it has rows is unrolled, for the value of what came last.
    """

    config_class = R2D2Config
    config: R2D2Config

    def check_views(self) -> None:
        if not self.is_recurrent:
            raise ConfigError(
                'R2D2 needs a network that remembers: model={"use_lstm": True}, or DQN without'
            )
        states = {name for name in self.model.view_requirements if name.startswith("state_in_")}
        others = set(self.model.view_requirements) - {"obs", *PREVIOUS} - states
        stacked = self.model.view_requirements["obs"].is_window
        if others or stacked or self.config.model.use_attention:
            raise ConfigError(
                "R2D2's network sees observations and what was done and gained before, not "
                f"{sorted(others) or 'several observations at once'}"
            )

    def loss(self, batch: TensorBatch) -> torch.Tensor:
        """Huber loss of the TD errors of double Q-learning after up to `n_step` steps, fewer at a
        sequence's end: h(R + gamma^k h^-1(Q_target(s', argmax_a Q(s', a)))) (Kapturowski et al.
        2019, section 2.3), weighted by `weights` [B] where there are some."""
        if "seq_lens" not in batch:
            raise ConfigError(
                "R2D2 learns from sequences: draw from config.replay_buffer(), or a ReplayBuffer "
                'with storage_unit="sequences"'
            )
        lens = batch.array("seq_lens").astype(np.int64)
        unrolled = self._unrolled(batch, lens)
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
        loss = q_function.td_loss(outputs[rows], state_values, batch["actions"], targets)
        return self._mean_loss(batch, loss)

    def _unrolled(self, batch: TensorBatch, lens: np.ndarray) -> TensorBatch:
        """What the networks see: the rows of each sequence, and what came after its last."""
        places, last = _unrolled_rows(lens), np.cumsum(lens) - 1
        ends = last + 1 + np.arange(len(lens))

        def joined(rows: Any, after: Any) -> np.ndarray:
            made = np.empty((len(rows) + len(lens), *rows.shape[1:]), rows.dtype)
            made[places], made[ends] = rows, after[last]
            return made

        columns: dict[str, Any] = {"seq_lens": (lens + 1).astype(np.int32)}
        for name in self.model.view_requirements:
            if name.startswith("state_in_"):
                state = batch.array(name)
                columns[name] = np.zeros_like(state) if self.config.zero_init_states else state
            else:
                after = "new_obs" if name == "obs" else PREVIOUS[name]
                columns[name] = optree.tree_map(joined, batch.array(name), batch.array(after))
        unrolled = TensorBatch(SampleBatch.unchecked(columns), self.device)
        unrolled.burn_in = batch.burn_in
        return unrolled

    def _sequence_targets(
        self, batch: TensorBatch, lens: np.ndarray, scores: np.ndarray, target_q: np.ndarray
    ) -> np.ndarray:
        """Return the targets [B] of the batch's actions.

        Args:
            batch: sequences one after another.
            lens: their lengths.
            scores: by which next actions are chosen, [B + sequences, n].
            target_q: the target network's values of the next actions, alike.
        """
        gamma, eps = self.config.gamma, self.config.h_function_epsilon
        rewards = batch.array("rewards").astype(np.float64)
        left = np.repeat(np.cumsum(lens), lens) - np.arange(len(rewards))  # rows to the end
        steps = np.minimum(self.config.n_step, left)
        gained = np.zeros(len(rewards))
        for k in range(int(steps.max(initial=0))):
            some = np.flatnonzero(steps > k)
            gained[some] += gamma**k * rewards[some + k]
        reached = _unrolled_rows(lens) + steps
        best = target_q[reached, scores[reached].argmax(1)].astype(np.float64)
        if self.config.use_h_function:
            best = unscaled(best, eps)
        over = np.repeat(batch.array("terminateds")[np.cumsum(lens) - 1], lens) & (steps == left)
        goals = gained + np.where(over, 0.0, gamma**steps * best)
        return (scaled(goals, eps) if self.config.use_h_function else goals).astype(np.float32)


def scaled(x: np.ndarray, eps: float) -> np.ndarray:
    """h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x (Pohlen et al. 2018, arXiv 1805.11593)."""
    made: np.ndarray = np.sign(x) * (np.sqrt(np.abs(x) + 1) - 1) + eps * x
    return made


def unscaled(x: np.ndarray, eps: float) -> np.ndarray:
    """The inverse of `scaled`."""
    root = np.sqrt(1 + 4 * eps * (np.abs(x) + 1 + eps))
    made: np.ndarray = np.sign(x) * (((root - 1) / (2 * eps)) ** 2 - 1)
    return made


def _unrolled_rows(lens: np.ndarray) -> np.ndarray:
    """Where rows lie when each sequence has one row more at its end."""
    return np.arange(int(lens.sum())) + np.repeat(np.arange(len(lens)), lens)


class R2D2(Algorithm):
    """R2D2 over the plan `r2d2`."""

    policy_class = R2D2TorchPolicy
    config_class = R2D2Config


DEFAULT_CONFIG = R2D2Config()
