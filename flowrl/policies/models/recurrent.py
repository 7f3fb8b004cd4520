"""RecurrentNetwork: an LSTM or a GRU on any torso."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from flowrl.policies.config import ModelConfig
from flowrl.policies.models.base import ModelV2, State, hooks_of, is_float32_on_cpu, last_features
from flowrl.policies.models.encoders import ACTIVATIONS, FlatEncoder
from flowrl.policies.models.fcnet import (
    NUMPY_ACTIVATIONS,
    is_plain_linear,
    numpy_view,
    numpy_views,
)
from flowrl.policies.models.flatten import (
    flatten,
    flatten_actions_numpy,
    flatten_numpy,
    nested_size,
)
from flowrl.policies.models.torso import Heads, Torso, shares_layers
from flowrl.policies.views import ViewRequirement

MAX_PADDED_RATIO = 8  # rows with padding / rows without; above, packed sequences are faster
SATURATED = 1e4  # sigmoid(SATURATED) is 1, sigmoid(-SATURATED) is 0

# methods that compute outputs or values; the network acts with torch if one is replaced
_COMPUTING = ("forward", "value_function", "from_batch", "compute_outputs", "compute_values")

PackedOrder = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def packed_order(seq_lens: torch.Tensor) -> PackedOrder:
    """Return the order of the rows of consecutive sequences in a PackedSequence.

    Args:
        seq_lens: length of each sequence [sequences], on the CPU, each at least 1.

    Returns:
        the row at each packed position [rows], the number of sequences that have a t-th row
        [longest], and the sequences in order of decreasing length [sequences].
    """
    sequences = torch.argsort(seq_lens, descending=True, stable=True)
    starts = (torch.cumsum(seq_lens, 0) - seq_lens)[sequences]
    sorted_lens = seq_lens[sequences]
    steps = torch.arange(int(sorted_lens[0]))
    has_step = steps[:, None] < sorted_lens[None, :]
    rows = (starts[None, :] + steps[:, None])[has_step]
    return rows, has_step.sum(1), sequences


class RecurrentTower(nn.Module):
    """A torso and a recurrent cell.

    Args:
        obs_space: observation space of one frame.
        config: the settings.
        num_extra: number of features of the cell's input besides the torso's.

    Attributes:
        size: number of features.
        num_states: number of recurrent states, 2 for an LSTM and 1 for a GRU.
    """

    def __init__(self, obs_space: spaces.Space, config: ModelConfig, num_extra: int):
        super().__init__()
        torso: Any = Torso(obs_space, config)
        self.torso = torso
        self.size = config.lstm_cell_size
        self.is_lstm = config.lstm_cell_type == "lstm"
        self._cell_class: Any = nn.LSTM if self.is_lstm else nn.GRU
        rnn: Any = self._cell_class(torso.size + num_extra, self.size)
        for parameter in (rnn.weight_ih_l0, rnn.weight_hh_l0):
            for gate in parameter.data.split(self.size):
                nn.init.orthogonal_(gate)
        nn.init.zeros_(rnn.bias_ih_l0)
        nn.init.zeros_(rnn.bias_hh_l0)
        self.rnn = rnn
        self.num_states = 2 if self.is_lstm else 1
        self._activation = NUMPY_ACTIVATIONS.get(config.fcnet_activation)
        self._activation_class = ACTIVATIONS[config.fcnet_activation]

    def forward(
        self,
        observations: Any,
        extra: list[torch.Tensor],
        state: State,
        order: PackedOrder | None,
    ) -> tuple[torch.Tensor, State]:
        """Return features [rows, size] and the states after each sequence.

        Args:
            observations: observations of all rows.
            extra: further features [rows, …].
            state: states before each sequence.
            order: order of the rows, see `packed_order`; None if each row is a sequence.
        """
        features = torch.cat([self.torso(observations), *extra], 1)
        if order is None:
            parts: Any = [part.unsqueeze(0) for part in state]
            hidden, last = self._run_cell(
                features.unsqueeze(0), tuple(parts) if self.is_lstm else parts[0]
            )
            return hidden[0], [part[0] for part in (last if self.is_lstm else (last,))]
        rows, batch_sizes, sequences = order
        initial = [part[sequences] for part in state]
        run = self._run_padded if self._pads(len(rows), batch_sizes) else self._run_packed
        packed, last = run(features[rows], batch_sizes, initial)
        hidden = torch.empty_like(packed).index_copy(0, rows, packed)
        inverse = torch.argsort(sequences)
        return hidden, [part[inverse] for part in last]

    def _pads(self, rows: int, batch_sizes: torch.Tensor) -> bool:
        """Return whether to pad sequences of `rows` rows in total.

        On the CPU, oneDNN computes the LSTM of sequences with equal lengths, several times faster
        than torch computes packed ones. In bfloat16 it would round the cell states of each step.
        """
        mkldnn: Any = torch.backends.mkldnn
        uses_onednn = mkldnn.is_available() and mkldnn.enabled and is_float32_on_cpu(self)
        uses_onednn = uses_onednn and not torch.is_autocast_enabled("cpu")
        padded_rows = len(batch_sizes) * int(batch_sizes[0])
        is_plain_lstm = type(self.rnn) is nn.LSTM and self.rnn.bias
        return is_plain_lstm and uses_onednn and padded_rows <= MAX_PADDED_RATIO * rows

    def _run_packed(
        self, packed: torch.Tensor, batch_sizes: torch.Tensor, state: State
    ) -> tuple[torch.Tensor, State]:
        """Return the features [rows, size] and the states after each sequence, in packed order.

        Args:
            packed: inputs of the cell [rows, …].
            batch_sizes: number of sequences that have a t-th row, [longest].
            state: states before each sequence.
        """
        initial: Any = [part.unsqueeze(0) for part in state]
        initial = tuple(initial) if self.is_lstm else initial[0]
        hidden, last = self._run_cell(PackedSequence(packed, batch_sizes), initial)
        return hidden.data, [part[0] for part in (last if self.is_lstm else (last,))]

    def _run_cell(self, inputs: Any, initial: Any) -> Any:
        rnn: Any = self.rnn
        if rnn.weight_ih_l0.device.type == "cpu":
            return rnn(inputs, initial)
        # cuDNN needs the weights one after the other, but matrices are stored transposed
        stored = rnn._flat_weights
        block = torch.cat([weight.reshape(-1) for weight in stored])
        pieces = block.split([weight.numel() for weight in stored])
        rnn._flat_weights = [p.view(w.shape) for p, w in zip(pieces, stored, strict=True)]
        try:
            return rnn(inputs, initial)
        finally:
            rnn._flat_weights = stored

    def _run_padded(
        self, packed: torch.Tensor, batch_sizes: torch.Tensor, state: State
    ) -> tuple[torch.Tensor, State]:
        """Run the LSTM on padded sequences; arguments and results are those of `_run_packed`.

        An additional input is 1 in the padding. Its weights open the forget gate and close the
        input gate, so that the cell states after the padding are those after the sequence. (Hidden
        states change in the padding: those after a sequence are taken from its last row.)
        """
        rnn: Any = self.rnn
        longest, sequences = len(batch_sizes), int(batch_sizes[0])
        is_row = torch.arange(sequences) < batch_sizes[:, None]
        (positions,) = is_row.view(-1).nonzero(as_tuple=True)
        padding = packed.new_zeros(longest * sequences, packed.shape[1] + 1)
        padding[:, -1] = 1.0
        padded = padding.index_copy(0, positions, nn.functional.pad(packed, (0, 1)))
        padding_weights = rnn.weight_ih_l0.new_zeros(4 * self.size, 1)
        input_gate, forget_gate, _, _ = padding_weights.split(self.size)
        input_gate[:], forget_gate[:] = -SATURATED, SATURATED
        weights = [
            torch.cat([rnn.weight_ih_l0, padding_weights], 1),
            rnn.weight_hh_l0,
            rnn.bias_ih_l0,
            rnn.bias_hh_l0,
        ]
        initial = [part.unsqueeze(0) for part in state]
        inputs = padded.view(longest, sequences, -1)
        hidden, _, cell = torch.lstm(
            inputs, initial, weights, has_biases=True, num_layers=1, dropout=0.0,
            train=self.training, bidirectional=False, batch_first=False,
        )  # fmt: skip
        ends = (is_row.sum(0) - 1) * sequences + torch.arange(sequences)
        hidden = hidden.reshape(len(padded), -1)
        return hidden[positions], [hidden[ends], cell[0]]

    # -- acting ------------------------------------------------------------------------------------

    def bind_numpy_views(self) -> bool:
        """Refresh numpy views of the parameters; return whether `step_numpy` can be used."""
        if self._activation is None or not is_float32_on_cpu(self):
            return False
        if type(self.torso.encoder) is not FlatEncoder or not self._has_plain_layers():
            return False
        rnn: Any = self.rnn
        self._hidden = numpy_views([*self.torso.hidden][::2])
        self._input_layer = numpy_view(rnn.weight_ih_l0, rnn.bias_ih_l0)
        self._state_layer = numpy_view(rnn.weight_hh_l0, rnn.bias_hh_l0)
        return True

    def _has_plain_layers(self) -> bool:
        """Return whether torso and cell have the layers of the constructor, not others."""
        torso, layers, rnn = self.torso, [*self.torso.hidden], self.rnn
        return (
            type(torso) is Torso
            and type(rnn) is self._cell_class
            and (rnn.num_layers, rnn.bias, rnn.bidirectional, rnn.proj_size) == (1, True, False, 0)
            and len(layers) % 2 == 0
            and all(map(is_plain_linear, layers[::2]))
            and all(type(layer) is self._activation_class for layer in layers[1::2])
        )

    def step_numpy(
        self, observations: np.ndarray, extra: list[np.ndarray], state: list[np.ndarray]
    ) -> list[np.ndarray]:
        """Return the states [B, size] after one step of each of B rows, computed with numpy.

        The first state is also the features.

        Args:
            observations: flattened observations [B, …].
            extra: further features [B, …].
            state: states before the step.
        """
        assert self._activation is not None
        hidden = observations
        for weight, bias in self._hidden:
            hidden = hidden @ weight
            hidden += bias
            hidden = self._activation(hidden, hidden)
        features = np.concatenate([hidden, *extra], 1) if extra else hidden
        return self._lstm(features, *state) if self.is_lstm else self._gru(features, *state)

    def _lstm(self, x: np.ndarray, h: np.ndarray, c: np.ndarray) -> list[np.ndarray]:
        """Hochreiter & Schmidhuber 1997 with forget gates; gates in torch's order i, f, g, o."""
        size = self.size
        gates = x @ self._input_layer[0]
        gates += h @ self._state_layer[0]
        gates += self._input_layer[1] + self._state_layer[1]
        candidate = np.tanh(gates[:, 2 * size : 3 * size])
        sigmoids = _sigmoid(gates)
        cell = sigmoids[:, size : 2 * size] * c + sigmoids[:, :size] * candidate
        return [sigmoids[:, 3 * size :] * np.tanh(cell), cell]

    def _gru(self, x: np.ndarray, h: np.ndarray) -> list[np.ndarray]:
        """Cho et al. 2014 in torch's variant; gates in torch's order r, z, n."""
        size = self.size
        from_input = x @ self._input_layer[0] + self._input_layer[1]
        from_state = h @ self._state_layer[0] + self._state_layer[1]
        reset = _sigmoid(from_input[:, :size] + from_state[:, :size])
        update = _sigmoid(from_input[:, size : 2 * size] + from_state[:, size : 2 * size])
        candidate = np.tanh(from_input[:, 2 * size :] + reset * from_state[:, 2 * size :])
        return [(1 - update) * candidate + update * h]


class RecurrentNetwork(ModelV2):
    """A torso, a recurrent cell, and heads for policy and value.

    The value head shares the policy's cell, or has a separate torso and cell, so that large value
    losses do not disturb the policy's states.

    Args:
        obs_space, action_space, num_outputs, model_config, name: see ModelV2. It uses the
            settings `lstm_cell_type`, `lstm_cell_size`, `lstm_use_prev_action`,
            `lstm_use_prev_reward`, `max_seq_len` and `burn_in`.
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
        num_extra = 0
        if config.lstm_use_prev_action:
            self.view_requirements["prev_actions"] = ViewRequirement(
                "actions", action_space, shift=-1
            )
            num_extra += nested_size(action_space)
        if config.lstm_use_prev_reward:
            self.view_requirements["prev_rewards"] = ViewRequirement("rewards", shift=-1)
            num_extra += 1
        self.tower = RecurrentTower(obs_space, config, num_extra)
        shared = shares_layers(config, obs_space)
        self.value_tower = None if shared else RecurrentTower(obs_space, config, num_extra)
        self.heads = Heads(config.lstm_cell_size, num_outputs, free_log_std)
        self._features: torch.Tensor | None = None
        self.bind_numpy_views()

    def get_initial_state(self) -> list[np.ndarray]:
        count = self.tower.num_states * (1 if self.value_tower is None else 2)
        return [np.zeros(self.tower.size, np.float32) for _ in range(count)]

    # -- learning ----------------------------------------------------------------------------------

    def forward(
        self, input_dict: Mapping[str, Any], state: State, seq_lens: torch.Tensor | None
    ) -> tuple[torch.Tensor, State]:
        extra = []
        if self.model_config.lstm_use_prev_action:
            extra.append(flatten(self.action_space, input_dict["prev_actions"], zero_based=True))
        if self.model_config.lstm_use_prev_reward:
            extra.append(input_dict["prev_rewards"].reshape(-1, 1).to(torch.float32))
        order = None
        if seq_lens is not None:
            rows, batch_sizes, sequences = packed_order(seq_lens.cpu())
            order = rows.to(state[0].device), batch_sizes, sequences.to(state[0].device)
        count, obs = self.tower.num_states, input_dict["obs"]
        hidden, new_state = self.tower(obs, extra, state[:count], order)
        self._features = hidden
        if self.value_tower is not None:
            self._features, value_state = self.value_tower(obs, extra, state[count:], order)
            new_state = new_state + value_state
        return self.heads.outputs(hidden), new_state

    def value_function(self) -> torch.Tensor:
        return self.heads.values(last_features(self._features))

    # -- acting ------------------------------------------------------------------------------------

    @property
    def uses_numpy(self) -> bool:
        """Whether the network acts with numpy: its layers and methods are flowrl's, and the user
        has registered no hooks."""
        is_replaced = not vars(self).keys().isdisjoint(_COMPUTING)
        return self._numpy is not None and not is_replaced and not any(self._hooks)

    def bind_numpy_views(self) -> None:
        """Refresh numpy views of the parameters. Called when modules were replaced, or the
        parameters' memory has moved."""
        self._hooks = hooks_of(self)
        self._numpy: dict[str, Any] | None = None
        base, heads = RecurrentNetwork, cast(Any, self.heads)
        towers = [self.tower] + ([] if self.value_tower is None else [self.value_tower])
        is_own = all(getattr(type(self), name) is getattr(base, name) for name in _COMPUTING)
        is_own &= all(type(tower) is RecurrentTower for tower in towers) and type(heads) is Heads
        is_own = is_own and is_plain_linear(heads.policy) and is_plain_linear(heads.value)
        if not (is_own and all(tower.bind_numpy_views() for tower in towers)):
            return
        self._numpy = {
            "policy": numpy_view(heads.policy.weight, heads.policy.bias),
            "value": numpy_view(heads.value.weight, heads.value.bias),
            "log_std": None if heads.log_std is None else heads.log_std.detach().numpy(),
        }

    def compute_outputs(
        self, inputs: Mapping[str, Any]
    ) -> tuple[np.ndarray, np.ndarray | None, list[np.ndarray]]:
        parameters = self._numpy
        if parameters is None or not self.uses_numpy:
            return super().compute_outputs(inputs)
        # one step of a small network in torch would be mostly dispatch overhead
        observations = flatten_numpy(self.obs_space, inputs["obs"])
        extra = []
        if self.model_config.lstm_use_prev_action:
            extra.append(flatten_actions_numpy(self.action_space, inputs["prev_actions"]))
        if self.model_config.lstm_use_prev_reward:
            extra.append(inputs["prev_rewards"].reshape(-1, 1).astype(np.float32))
        count = self.tower.num_states
        state = [inputs[name] for name in self._state_columns(inputs)]
        new_state = self.tower.step_numpy(observations, extra, state[:count])
        hidden = value_hidden = new_state[0]
        if self.value_tower is not None:
            value_state = self.value_tower.step_numpy(observations, extra, state[count:])
            value_hidden, new_state = value_state[0], new_state + value_state
        outputs = hidden @ parameters["policy"][0] + parameters["policy"][1]
        if parameters["log_std"] is not None:
            log_std = np.broadcast_to(parameters["log_std"], outputs.shape)
            outputs = np.concatenate([outputs, log_std], 1)
        values = value_hidden @ parameters["value"][0] + parameters["value"][1]
        return outputs, values[:, 0], new_state


def _sigmoid(x: np.ndarray) -> np.ndarray:
    # tanh does not overflow
    result: np.ndarray = np.tanh(x * np.float32(0.5))
    result += np.float32(1)
    result *= np.float32(0.5)
    return result
