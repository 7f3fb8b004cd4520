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
from flowrl.policies.models.fcnet import _NUMPY, flat_numpy, numpy_layers
from flowrl.policies.models.torso import Heads, Torso
from flowrl.policies.view_requirement import ViewRequirement


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


def use_previous(
    views: dict[str, ViewRequirement], action_space: spaces.Space, action: bool, reward: bool
) -> int:
    """Add views of the action and reward before; gives the features that they are."""
    if action:
        views["prev_actions"] = ViewRequirement("actions", action_space, shift=-1)
    if reward:
        views["prev_rewards"] = ViewRequirement("rewards", shift=-1)
    return action * nested_size(action_space) + int(reward)


class RecurrentNetwork(ModelV2):
    """A torso, a recurrent cell, and heads for policy and value on the cell's output.

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
        self.torso: Any = Torso(obs_space, config)
        more = use_previous(
            self.view_requirements,
            action_space,
            config.lstm_use_prev_action,
            config.lstm_use_prev_reward,
        )
        self.cell_size = config.lstm_cell_size
        self._is_lstm = config.lstm_cell_type == "lstm"
        kind: Any = nn.LSTM if self._is_lstm else nn.GRU
        self.rnn: Any = kind(self.torso.size + more, self.cell_size)
        for parameter in (self.rnn.weight_ih_l0, self.rnn.weight_hh_l0):
            for gate in parameter.data.split(self.cell_size):
                nn.init.orthogonal_(gate)
        nn.init.zeros_(self.rnn.bias_ih_l0)
        nn.init.zeros_(self.rnn.bias_hh_l0)
        self.heads = Heads(self.cell_size, num_outputs, free_log_std)
        # burn-in begins anywhere, so the states of all rows are kept
        repeat = 1 if config.burn_in else config.max_seq_len
        for i in range(len(self.get_initial_state())):
            self.view_requirements[f"state_in_{i}"] = ViewRequirement(
                f"state_out_{i}", shift=-1, batch_repeat_value=repeat
            )
        self._features: torch.Tensor | None = None
        self.link()

    def get_initial_state(self) -> list[np.ndarray]:
        return [np.zeros(self.cell_size, np.float32) for _ in range(1 + self._is_lstm)]

    # -- learning ----------------------------------------------------------------------------------

    def forward(
        self, input_dict: Mapping[str, Any], state: State, seq_lens: torch.Tensor | None
    ) -> tuple[torch.Tensor, State]:
        assert seq_lens is not None
        features = [self.torso(input_dict["obs"])]
        if self.model_config.lstm_use_prev_action:
            features.append(flat(self.action_space, input_dict["prev_actions"], True))
        if self.model_config.lstm_use_prev_reward:
            features.append(input_dict["prev_rewards"].reshape(-1, 1).to(torch.float32))
        hidden, state = self._run(torch.cat(features, 1), state, seq_lens)
        self._features = hidden
        return self.heads.outputs(hidden), state

    def _run(
        self, features: torch.Tensor, state: State, seq_lens: torch.Tensor
    ) -> tuple[torch.Tensor, State]:
        rows, sizes, order = packed_order(seq_lens.cpu())
        device = features.device
        rows, order = rows.to(device), order.to(device)
        first: Any = [part[order].unsqueeze(0) for part in state]
        first = tuple(first) if self._is_lstm else first[0]
        packed, last = self.rnn(PackedSequence(features[rows], sizes), first)
        hidden = torch.empty_like(packed.data)
        hidden = hidden.index_copy(0, rows, packed.data)
        back = torch.argsort(order)
        after = last if self._is_lstm else (last,)
        return hidden, [part.squeeze(0)[back] for part in after]

    def value_function(self) -> torch.Tensor:
        assert self._features is not None
        return self.heads.values(self._features)

    # -- acting ------------------------------------------------------------------------------------

    def link(self) -> None:
        """Make the numpy side read the parameters' memory."""
        self._numpy: dict[str, Any] | None = None
        activation = _NUMPY.get(self.model_config.fcnet_activation)
        on_cpu = all(p.device.type == "cpu" and p.dtype == torch.float32 for p in self.parameters())
        own = RecurrentNetwork
        same = type(self).forward is own.forward and type(self)._run is own._run
        same &= type(self).value_function is own.value_function
        plain = isinstance(self.torso.encoder, FlatEncoder)
        if not (activation and on_cpu and plain and same):
            return
        linear: list[Any] = [m for m in self.torso.hidden if isinstance(m, nn.Linear)]
        heads: Any = self.heads
        rnn = self.rnn
        self._numpy = {
            "activation": activation,
            "hidden": numpy_layers([(m.weight, m.bias) for m in linear]),
            "input": numpy_layers([(rnn.weight_ih_l0, rnn.bias_ih_l0)])[0],
            "state": numpy_layers([(rnn.weight_hh_l0, rnn.bias_hh_l0)])[0],
            "policy": numpy_layers([(heads.policy.weight, heads.policy.bias)])[0],
            "value": numpy_layers([(heads.value.weight, heads.value.bias)])[0],
            "log_std": None if heads.log_std is None else heads.log_std.detach().numpy(),
        }

    def act(
        self, inputs: Mapping[str, Any]
    ) -> tuple[np.ndarray, np.ndarray | None, list[np.ndarray]]:
        """One step by numpy, where the torso is of linear layers: torch's dispatch would take
        most of the time."""
        parts = self._numpy
        if parts is None:
            return super().act(inputs)
        hidden = flat_numpy(self.obs_space, inputs["obs"])
        for weight, bias in parts["hidden"]:
            hidden = hidden @ weight
            hidden += bias
            hidden = parts["activation"](hidden, hidden)
        more = [hidden]
        if self.model_config.lstm_use_prev_action:
            more.append(_previous_numpy(self.action_space, inputs["prev_actions"]))
        if self.model_config.lstm_use_prev_reward:
            more.append(inputs["prev_rewards"].reshape(-1, 1).astype(np.float32))
        features = np.concatenate(more, 1) if len(more) > 1 else hidden
        state = [inputs[f"state_in_{i}"] for i in range(1 + self._is_lstm)]
        state = (
            self._step_lstm(features, *state) if self._is_lstm else self._step_gru(features, *state)
        )
        outputs = state[0] @ parts["policy"][0] + parts["policy"][1]
        if parts["log_std"] is not None:
            free = np.broadcast_to(parts["log_std"], outputs.shape)
            outputs = np.concatenate([outputs, free], 1)
        values = state[0] @ parts["value"][0] + parts["value"][1]
        return outputs, values[:, 0], state

    def _step_lstm(self, x: np.ndarray, h: np.ndarray, c: np.ndarray) -> list[np.ndarray]:
        """Hochreiter & Schmidhuber 1997 with forget gates; gates in torch's order i, f, g, o."""
        parts, size = self._numpy, self.cell_size
        assert parts is not None
        gates = x @ parts["input"][0]
        gates += h @ parts["state"][0]
        gates += parts["input"][1] + parts["state"][1]
        new = np.tanh(gates[:, 2 * size : 3 * size])
        open_ = _sigmoid(gates)
        cell = open_[:, size : 2 * size] * c + open_[:, :size] * new
        return [open_[:, 3 * size :] * np.tanh(cell), cell]

    def _step_gru(self, x: np.ndarray, h: np.ndarray) -> list[np.ndarray]:
        """Cho et al. 2014 as torch has it: gates in the order r, z, n."""
        parts, size = self._numpy, self.cell_size
        assert parts is not None
        given = x @ parts["input"][0] + parts["input"][1]
        held = h @ parts["state"][0] + parts["state"][1]
        reset = _sigmoid(given[:, :size] + held[:, :size])
        update = _sigmoid(given[:, size : 2 * size] + held[:, size : 2 * size])
        new = np.tanh(given[:, 2 * size :] + reset * held[:, 2 * size :])
        return [(1 - update) * new + update * h]


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
