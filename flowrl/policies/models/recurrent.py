"""RecurrentNetwork: an LSTM or a GRU around any torso."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import optree
import torch
from gymnasium import spaces
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from flowrl.policies.config import ModelConfig
from flowrl.policies.models.base import ModelV2, State
from flowrl.policies.models.encoders import FlatEncoder, flat, nested_size
from flowrl.policies.models.fcnet import NUMPY_ACTIVATIONS, flat_numpy, numpy_layers
from flowrl.policies.models.torso import Heads, Torso, shares_layers
from flowrl.policies.views import ViewRequirement


def packed_order(lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How rows of sequences one after another lie in a PackedSequence.

    Args:
        lens: rows of each sequence [sequences], on the CPU, each at least 1.

    Returns:
        the row at each packed place [rows]; how many sequences have a t-th row [longest]; the
        sequences from the longest to the shortest [sequences].
    """
    order = torch.argsort(lens, descending=True, stable=True)
    begins = (torch.cumsum(lens, 0) - lens)[order]
    sorted_lens = lens[order]
    steps = torch.arange(int(sorted_lens[0]))
    there = steps[:, None] < sorted_lens[None, :]
    rows = (begins[None, :] + steps[:, None])[there]
    return rows, there.sum(1), order


class Tower(nn.Module):
    """A torso and a recurrent cell: rows of sequences to features.

    Args:
        obs_space: what the torso is for.
        config: the settings.
        more: features besides the torso's.
    """

    def __init__(self, obs_space: spaces.Space, config: ModelConfig, more: int):
        super().__init__()
        torso: Any = Torso(obs_space, config)
        self.torso = torso
        self.size = config.lstm_cell_size
        self.is_lstm = config.lstm_cell_type == "lstm"
        kind: Any = nn.LSTM if self.is_lstm else nn.GRU
        rnn: Any = kind(torso.size + more, self.size)
        for parameter in (rnn.weight_ih_l0, rnn.weight_hh_l0):
            for gate in parameter.data.split(self.size):
                nn.init.orthogonal_(gate)
        nn.init.zeros_(rnn.bias_ih_l0)
        nn.init.zeros_(rnn.bias_hh_l0)
        self.rnn = rnn
        self.num_states = 2 if self.is_lstm else 1
        self._activation = NUMPY_ACTIVATIONS.get(config.fcnet_activation)

    def forward(
        self,
        observations: Any,
        more: list[torch.Tensor],
        state: State,
        order: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, State]:
        """Features [rows, size] and the states after each sequence.

        Args:
            observations: of all rows.
            more: features [rows, …] besides the torso's.
            state: before each sequence.
            order: of the rows, see `packed_order`; None if each row is a sequence.
        """
        features = torch.cat([self.torso(observations), *more], 1)
        if order is None:
            each: Any = [part.unsqueeze(0) for part in state]
            hidden, last = self.rnn(features.unsqueeze(0), tuple(each) if self.is_lstm else each[0])
            return hidden[0], [part[0] for part in (last if self.is_lstm else (last,))]
        rows, sizes, sequences = order
        first: Any = [part[sequences].unsqueeze(0) for part in state]
        first = tuple(first) if self.is_lstm else first[0]
        packed, last = self.rnn(PackedSequence(features[rows], sizes), first)
        hidden = torch.empty_like(packed.data).index_copy(0, rows, packed.data)
        back = torch.argsort(sequences)
        return hidden, [part.squeeze(0)[back] for part in (last if self.is_lstm else (last,))]

    # -- acting ------------------------------------------------------------------------------------

    def link_numpy(self) -> bool:
        """Make the numpy side read the parameters' memory; whether there is one."""
        on_cpu = all(p.device.type == "cpu" and p.dtype == torch.float32 for p in self.parameters())
        if self._activation is None or not on_cpu:
            return False
        if not isinstance(self.torso.encoder, FlatEncoder):
            return False
        linear: list[Any] = [m for m in self.torso.hidden if isinstance(m, nn.Linear)]
        rnn: Any = self.rnn
        self._hidden = numpy_layers([(m.weight, m.bias) for m in linear])
        self._given = numpy_layers([(rnn.weight_ih_l0, rnn.bias_ih_l0)])[0]
        self._held = numpy_layers([(rnn.weight_hh_l0, rnn.bias_hh_l0)])[0]
        return True

    def step(
        self, observations: np.ndarray, more: list[np.ndarray], state: list[np.ndarray]
    ) -> list[np.ndarray]:
        """The states after one step of each of B rows by numpy; the first are the features."""
        assert self._activation is not None
        hidden = observations
        for weight, bias in self._hidden:
            hidden = hidden @ weight
            hidden += bias
            hidden = self._activation(hidden, hidden)
        features = np.concatenate([hidden, *more], 1) if more else hidden
        return self._lstm(features, *state) if self.is_lstm else self._gru(features, *state)

    def _lstm(self, x: np.ndarray, h: np.ndarray, c: np.ndarray) -> list[np.ndarray]:
        """Hochreiter & Schmidhuber 1997 with forget gates; gates in torch's order i, f, g, o."""
        size = self.size
        gates = x @ self._given[0]
        gates += h @ self._held[0]
        gates += self._given[1] + self._held[1]
        new = np.tanh(gates[:, 2 * size : 3 * size])
        opened = _sigmoid(gates)
        cell = opened[:, size : 2 * size] * c + opened[:, :size] * new
        return [opened[:, 3 * size :] * np.tanh(cell), cell]

    def _gru(self, x: np.ndarray, h: np.ndarray) -> list[np.ndarray]:
        """Cho et al. 2014 as torch has it: gates in the order r, z, n."""
        size = self.size
        given = x @ self._given[0] + self._given[1]
        held = h @ self._held[0] + self._held[1]
        reset = _sigmoid(given[:, :size] + held[:, :size])
        update = _sigmoid(given[:, size : 2 * size] + held[:, size : 2 * size])
        new = np.tanh(given[:, 2 * size :] + reset * held[:, 2 * size :])
        return [(1 - update) * new + update * h]


class RecurrentNetwork(ModelV2):
    """A torso, a recurrent cell, and heads for policy and value on the cell's output; or one such
    tower for each, which learn apart (large value losses do not disturb the policy's memory).

    Sequences are computed without padding: a row that is not there costs nothing and cannot leak.

    Args:
        obs_space, action_space, num_outputs, model_config, name: see ModelV2. The settings
            `lstm_cell_type`, `lstm_cell_size`, `lstm_use_prev_action`, `lstm_use_prev_reward`,
            `max_seq_len` and `burn_in` are for it.
        free_log_std: the second half of the outputs is a parameter.
    """

    def __init__(
        self,
        obs_space: spaces.Space,
        action_space: spaces.Space,
        num_outputs: int,
        model_config: ModelConfig,
        name: str = "model",
        free_log_std: bool = False,
    ):
        super().__init__(obs_space, action_space, num_outputs, model_config, name)
        config = model_config
        more = 0
        if config.lstm_use_prev_action:
            self.view_requirements["prev_actions"] = ViewRequirement(
                "actions", action_space, shift=-1
            )
            more += nested_size(action_space)
        if config.lstm_use_prev_reward:
            self.view_requirements["prev_rewards"] = ViewRequirement("rewards", shift=-1)
            more += 1
        self.tower = Tower(obs_space, config, more)
        shared = shares_layers(config, obs_space)
        self.value_tower = None if shared else Tower(obs_space, config, more)
        self.heads = Heads(config.lstm_cell_size, num_outputs, free_log_std)
        self._features: torch.Tensor | None = None
        self.link_numpy()

    def get_initial_state(self) -> list[np.ndarray]:
        count = self.tower.num_states * (1 if self.value_tower is None else 2)
        return [np.zeros(self.tower.size, np.float32) for _ in range(count)]

    # -- learning ----------------------------------------------------------------------------------

    def forward(
        self, input_dict: Mapping[str, Any], state: State, seq_lens: torch.Tensor | None
    ) -> tuple[torch.Tensor, State]:
        more = []
        if self.model_config.lstm_use_prev_action:
            more.append(flat(self.action_space, input_dict["prev_actions"], True))
        if self.model_config.lstm_use_prev_reward:
            more.append(input_dict["prev_rewards"].reshape(-1, 1).to(torch.float32))
        order = None
        if seq_lens is not None:
            rows, sizes, sequences = packed_order(seq_lens.cpu())
            order = rows.to(state[0].device), sizes, sequences.to(state[0].device)
        count = self.tower.num_states
        hidden, after = self.tower(input_dict["obs"], more, state[:count], order)
        self._features = hidden
        if self.value_tower is not None:
            self._features, own = self.value_tower(input_dict["obs"], more, state[count:], order)
            after = after + own
        return self.heads.outputs(hidden), after

    def value_function(self) -> torch.Tensor:
        assert self._features is not None
        return self.heads.values(self._features)

    # -- acting ------------------------------------------------------------------------------------

    def link_numpy(self) -> None:
        """Make the numpy side read the parameters' memory."""
        self._numpy: dict[str, Any] | None = None
        own = RecurrentNetwork
        same = type(self).forward is own.forward
        same &= type(self).value_function is own.value_function
        towers = [self.tower] + ([] if self.value_tower is None else [self.value_tower])
        if not (same and all(tower.link_numpy() for tower in towers)):
            return
        heads: Any = self.heads
        self._numpy = {
            "policy": numpy_layers([(heads.policy.weight, heads.policy.bias)])[0],
            "value": numpy_layers([(heads.value.weight, heads.value.bias)])[0],
            "log_std": None if heads.log_std is None else heads.log_std.detach().numpy(),
        }

    def compute_outputs(
        self, inputs: Mapping[str, Any]
    ) -> tuple[np.ndarray, np.ndarray | None, list[np.ndarray]]:
        """One step by numpy, where the torso is of linear layers: torch's dispatch would take
        most of the time."""
        parts = self._numpy
        if parts is None:
            return super().compute_outputs(inputs)
        observations = flat_numpy(self.obs_space, inputs["obs"])
        more = []
        if self.model_config.lstm_use_prev_action:
            more.append(_previous_numpy(self.action_space, inputs["prev_actions"]))
        if self.model_config.lstm_use_prev_reward:
            more.append(inputs["prev_rewards"].reshape(-1, 1).astype(np.float32))
        count = self.tower.num_states
        state = [inputs[name] for name in self._states_in(inputs)]
        after = self.tower.step(observations, more, state[:count])
        hidden = value_hidden = after[0]
        if self.value_tower is not None:
            own = self.value_tower.step(observations, more, state[count:])
            value_hidden, after = own[0], after + own
        outputs = hidden @ parts["policy"][0] + parts["policy"][1]
        if parts["log_std"] is not None:
            free = np.broadcast_to(parts["log_std"], outputs.shape)
            outputs = np.concatenate([outputs, free], 1)
        values = value_hidden @ parts["value"][0] + parts["value"][1]
        return outputs, values[:, 0], after


def _sigmoid(x: np.ndarray) -> np.ndarray:
    # through tanh: it does not overflow
    made: np.ndarray = np.tanh(x * np.float32(0.5))
    made += np.float32(1)
    made *= np.float32(0.5)
    return made


def _previous_numpy(space: spaces.Space, values: Any) -> np.ndarray:
    """Features of a policy's earlier actions, whose numbers begin at 0."""
    if isinstance(space, spaces.Discrete):
        return np.eye(int(space.n), dtype=np.float32)[values]
    tensors = optree.tree_map(lambda leaf: torch.from_numpy(np.array(leaf)), values)
    return flat(space, tensors, True).numpy()
