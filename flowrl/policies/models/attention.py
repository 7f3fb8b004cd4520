"""AttentionNetwork: a gated transformer with memory (GTrXL, Parisotto et al. 2019)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from flowrl.policies.config import ModelConfig
from flowrl.policies.models.base import ModelV2, State, last_features
from flowrl.policies.models.torso import Heads, Torso, shares_layers
from flowrl.policies.views import ViewRequirement


class GRUGate(nn.Module):
    """A gate in place of a residual connection (section 3.2 of the paper, "GRU-type").

    Args:
        size: number of features.
        bias: initial bias of the update gate: 0 is a plain GRU, with 2 the gate starts almost
            closed, so that little of `y` passes.
    """

    def __init__(self, size: int, bias: float):
        super().__init__()
        self.y_gates = nn.Linear(size, 3 * size, bias=False)
        self.x_gates = nn.Linear(size, 2 * size, bias=False)
        self.reset_gate = nn.Linear(size, size, bias=False)
        self.bias = nn.Parameter(torch.full((size,), bias))
        for layer in (self.y_gates, self.x_gates, self.reset_gate):
            nn.init.xavier_uniform_(layer.weight)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        reset_y, update_y, candidate_y = self.y_gates(y).chunk(3, -1)
        reset_x, update_x = self.x_gates(x).chunk(2, -1)
        reset = torch.sigmoid(reset_y + reset_x)
        update = torch.sigmoid(update_y + update_x - self.bias)
        candidate = torch.tanh(candidate_y + self.reset_gate(reset * x))
        return (1 - update) * x + update * candidate


class RelativeAttention(nn.Module):
    """Multi-head attention with relative positions (Transformer-XL, Dai et al. 2019, section 3.3).

    Args:
        size: number of features.
        num_heads: number of heads.
        head_size: size of each head.
        max_distance: largest distance between a row and its context, in rows.
    """

    def __init__(self, size: int, num_heads: int, head_size: int, max_distance: int):
        super().__init__()
        self._num_heads, self._head_size = num_heads, head_size
        self.queries = nn.Linear(size, num_heads * head_size, bias=False)
        self.keys_values = nn.Linear(size, 2 * num_heads * head_size, bias=False)
        self.distances = nn.Linear(size, num_heads * head_size, bias=False)
        self.out = nn.Linear(num_heads * head_size, size, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(num_heads, head_size))
        self.distance_bias = nn.Parameter(torch.zeros(num_heads, head_size))
        for layer in (self.queries, self.keys_values, self.distances, self.out):
            nn.init.xavier_uniform_(layer.weight)
        self.encodings: torch.Tensor
        encodings = _sinusoidal_encodings(max_distance + 1, size)
        self.register_buffer("encodings", encodings, persistent=False)

    def forward(
        self, rows: torch.Tensor, context: torch.Tensor, distance: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Attend from each row to its context.

        Args:
            rows: [S, L, size].
            context: [S, K, size].
            distance: distance from each row back to each row of the context, int [L, K], between
                0 and `max_distance`.
            mask: True where a row may attend to a row of the context, bool [S, L, K]; each row
                attends to at least one.

        Returns:
            features [S, L, size].
        """
        heads, size = self._num_heads, self._head_size
        q = self.queries(rows).unflatten(-1, (heads, size))
        k, v = self.keys_values(context).unflatten(-1, (2, heads, size)).unbind(-3)
        r = self.distances(self.encodings).unflatten(-1, (heads, size))  # [distances, heads, size]
        content_scores = torch.einsum("slhd,skhd->shlk", q + self.content_bias, k)
        distance_scores = torch.einsum("slhd,rhd->shlr", q + self.distance_bias, r)
        index = distance.expand(*distance_scores.shape[:2], *distance.shape)
        scores = (content_scores + distance_scores.gather(-1, index)) / math.sqrt(size)
        weights = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1)
        attended = torch.einsum("shlk,skhd->slhd", weights, v).flatten(-2)
        features: torch.Tensor = self.out(attended)
        return features


class TransformerUnit(nn.Module):
    """Attention and a position-wise network, each with layer norm before and a gate after it."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        size, hidden_size = config.attention_dim, config.attention_position_wise_mlp_dim
        self.attention_norm = nn.LayerNorm(size)
        self.attention = RelativeAttention(
            size, config.attention_num_heads, config.attention_head_dim, config.attention_memory
        )
        self.attention_gate = GRUGate(size, config.attention_init_gru_gate_bias)
        self.mlp_norm = nn.LayerNorm(size)
        self.mlp = nn.Sequential(
            nn.Linear(size, hidden_size), nn.ReLU(), nn.Linear(hidden_size, size)
        )
        self.mlp_gate = GRUGate(size, config.attention_init_gru_gate_bias)

    def forward(
        self, rows: torch.Tensor, memory: torch.Tensor, distance: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        context = self.attention_norm(torch.cat([memory, rows], 1))
        attended = self.attention(context[:, memory.shape[1] :], context, distance, mask)
        rows = self.attention_gate(rows, torch.relu(attended))
        features: torch.Tensor = self.mlp_gate(rows, torch.relu(self.mlp(self.mlp_norm(rows))))
        return features


class AttentionTower(nn.Module):
    """A torso and transformer units."""

    def __init__(self, obs_space: spaces.Space, config: ModelConfig):
        super().__init__()
        torso: Any = Torso(obs_space, config)
        self.torso = torso
        self.embed = nn.Linear(torso.size, config.attention_dim)
        count = config.attention_num_transformer_units
        self.units = nn.ModuleList(TransformerUnit(config) for _ in range(count))

    def forward(
        self,
        observations: Any,
        memory: State,
        valid: torch.Tensor | None,
        distance: torch.Tensor,
        in_reach: torch.Tensor,
    ) -> tuple[torch.Tensor, State]:
        """Return features [rows, size] and the inputs of each unit [rows, size + 1].

        Args:
            observations: observations of all rows.
            memory: inputs of each unit in the rows before the sequences,
                [sequences, memory, size + 1].
            valid: False for padding, bool [sequences, longest]; None if each row is a sequence.
            distance: distance from each row of a sequence back to each row of memory and sequence,
                int [longest, memory + longest].
            in_reach: whether a row may attend at that distance, bool of the same shape.
        """
        embedded = self.embed(self.torso(observations))
        if valid is None:
            rows = embedded.unsqueeze(1)
        else:
            rows = embedded.new_zeros(*valid.shape, embedded.shape[1])
            rows[valid] = embedded
        new_memory = []
        for unit, unit_memory in zip(self.units, memory, strict=True):
            is_row = torch.ones_like(rows[..., 0], dtype=torch.bool) if valid is None else valid
            is_context = torch.cat([unit_memory[..., -1] > 0, is_row], 1)
            mask = in_reach[None] & is_context[:, None, :]
            mask = mask | (~is_row)[..., None]  # a row of padding needs any context; it is unused
            inputs = rows[:, 0] if valid is None else rows[valid]
            new_memory.append(torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1).detach())
            rows = unit(rows, unit_memory[..., :-1], distance, mask)
        return rows[:, 0] if valid is None else rows[valid], new_memory


class AttentionNetwork(ModelV2):
    """A torso, transformer units that attend to the last `attention_memory` rows, and heads for
    policy and value; policy and value share the units or have separate ones.

    The memory of unit i is the view `state_in_i`: the unit's inputs in earlier rows. The last
    number of each entry is 1 if the row exists; zeros before an episode's start are not attended
    to. A row attends to the same rows when acting and when learning.

    Args:
        obs_space, action_space, num_outputs, model_config, name: see ModelV2. It uses the settings
            `attention_…` and `max_seq_len`.
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
        self._memory, self._size = config.attention_memory, config.attention_dim
        self.tower = AttentionTower(obs_space, config)
        shared = shares_layers(config, obs_space)
        self.value_tower = None if shared else AttentionTower(obs_space, config)
        self.heads = Heads(self._size, num_outputs, free_log_std)
        box = spaces.Box(-np.inf, np.inf, (self._size + 1,), np.float32)
        for i in range(len(self.get_initial_state())):
            self.view_requirements[f"state_in_{i}"] = ViewRequirement(
                f"state_out_{i}",
                box,
                shift=f"-{self._memory}:-1",
                batch_repeat_value=config.max_seq_len,
            )
        self._features: torch.Tensor | None = None

    def get_initial_state(self) -> list[np.ndarray]:
        count = len(self.tower.units) * (1 if self.value_tower is None else 2)
        return [np.zeros(self._size + 1, np.float32) for _ in range(count)]

    def forward(
        self, input_dict: Mapping[str, Any], state: State, seq_lens: torch.Tensor | None
    ) -> tuple[torch.Tensor, State]:
        device, memory = state[0].device, self._memory
        longest, valid = 1, None
        if seq_lens is not None:
            seq_lens = seq_lens.to(device).long()
            longest = int(seq_lens.max())
            valid = torch.arange(longest, device=device)[None, :] < seq_lens[:, None]
        steps = torch.arange(longest, device=device)
        positions = torch.arange(memory + longest, device=device)
        distance = memory + steps[:, None] - positions[None, :]
        in_reach = (distance >= 0) & (distance <= memory)
        layout = valid, distance.clamp(0, memory), in_reach
        count, observations = len(self.tower.units), input_dict["obs"]
        features, new_memory = self.tower(observations, state[:count], *layout)
        self._features = features
        if self.value_tower is not None:
            self._features, value_memory = self.value_tower(observations, state[count:], *layout)
            new_memory = new_memory + value_memory
        return self.heads.outputs(features), new_memory

    def value_function(self) -> torch.Tensor:
        return self.heads.values(last_features(self._features))


def _sinusoidal_encodings(count: int, size: int) -> torch.Tensor:
    """Return encodings of distances 0 … count - 1, [count, size] (Vaswani et al. 2017, 3.5)."""
    frequencies = torch.exp(torch.arange(0, size, 2) * (-math.log(10_000.0) / size))
    angles = torch.arange(count)[:, None] * frequencies[None, :]
    return torch.cat([angles.sin(), angles.cos()], 1)[:, :size]
