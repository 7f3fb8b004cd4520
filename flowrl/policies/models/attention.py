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
from flowrl.policies.models.base import ModelV2, State
from flowrl.policies.models.torso import Heads, Torso
from flowrl.policies.view_requirement import ViewRequirement


class GRUGate(nn.Module):
    """The gate in the place of a residual connection (section 3.2 of the paper, "GRU-type").

    Args:
        size: of the features.
        bias: how far the gate is closed at first: 0 is a plain GRU, 2 lets little through.
    """

    def __init__(self, size: int, bias: float):
        super().__init__()
        self.of_y = nn.Linear(size, 3 * size, bias=False)
        self.of_x = nn.Linear(size, 2 * size, bias=False)
        self.of_reset = nn.Linear(size, size, bias=False)
        self.bias = nn.Parameter(torch.full((size,), bias))
        for layer in (self.of_y, self.of_x, self.of_reset):
            nn.init.xavier_uniform_(layer.weight)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        reset_y, update_y, new_y = self.of_y(y).chunk(3, -1)
        reset_x, update_x = self.of_x(x).chunk(2, -1)
        reset = torch.sigmoid(reset_y + reset_x)
        update = torch.sigmoid(update_y + update_x - self.bias)
        new = torch.tanh(new_y + self.of_reset(reset * x))
        return (1 - update) * x + update * new


class RelativeAttention(nn.Module):
    """Multi-head attention by distance (Transformer-XL, Dai et al. 2019, section 3.3)."""

    def __init__(self, size: int, num_heads: int, head_size: int, reach: int):
        super().__init__()
        self._heads, self._head_size = num_heads, head_size
        self.queries = nn.Linear(size, num_heads * head_size, bias=False)
        self.keys_values = nn.Linear(size, 2 * num_heads * head_size, bias=False)
        self.distances = nn.Linear(size, num_heads * head_size, bias=False)
        self.out = nn.Linear(num_heads * head_size, size, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(num_heads, head_size))
        self.distance_bias = nn.Parameter(torch.zeros(num_heads, head_size))
        for layer in (self.queries, self.keys_values, self.distances, self.out):
            nn.init.xavier_uniform_(layer.weight)
        self.waves: torch.Tensor
        self.register_buffer("waves", _waves(reach + 1, size), persistent=False)

    def forward(
        self, rows: torch.Tensor, context: torch.Tensor, distance: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """What each row finds in its context.

        Args:
            rows: [S, L, size].
            context: [S, K, size].
            distance: steps from each row back to each row of the context [L, K], 0 … reach.
            mask: whether a row may look there [S, L, K]; at least at one.
        """
        heads, size = self._heads, self._head_size
        q = self.queries(rows).unflatten(-1, (heads, size))
        k, v = self.keys_values(context).unflatten(-1, (2, heads, size)).unbind(-3)
        far = self.distances(self.waves).unflatten(-1, (heads, size))  # [reach + 1, heads, size]
        content = torch.einsum("slhd,skhd->shlk", q + self.content_bias, k)
        by_distance = torch.einsum("slhd,rhd->shlr", q + self.distance_bias, far)
        index = distance.expand(*by_distance.shape[:2], *distance.shape)
        scores = (content + by_distance.gather(-1, index)) / math.sqrt(size)
        weights = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1)
        found = torch.einsum("shlk,skhd->slhd", weights, v).flatten(-2)
        made: torch.Tensor = self.out(found)
        return made


class TransformerUnit(nn.Module):
    """Attention and a position-wise network, each normalised before and gated after."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        size, wide = config.attention_dim, config.attention_position_wise_mlp_dim
        self.before_attention = nn.LayerNorm(size)
        self.attention = RelativeAttention(
            size, config.attention_num_heads, config.attention_head_dim, config.attention_memory
        )
        self.after_attention = GRUGate(size, config.attention_init_gru_gate_bias)
        self.before_mlp = nn.LayerNorm(size)
        self.mlp = nn.Sequential(nn.Linear(size, wide), nn.ReLU(), nn.Linear(wide, size))
        self.after_mlp = GRUGate(size, config.attention_init_gru_gate_bias)

    def forward(
        self, rows: torch.Tensor, memory: torch.Tensor, distance: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        context = self.before_attention(torch.cat([memory, rows], 1))
        found = self.attention(context[:, memory.shape[1] :], context, distance, mask)
        rows = self.after_attention(rows, torch.relu(found))
        made: torch.Tensor = self.after_mlp(rows, torch.relu(self.mlp(self.before_mlp(rows))))
        return made


class AttentionNetwork(ModelV2):
    """A torso, transformer units that look back on `attention_memory` rows, and heads.

    The memory of unit i is the view `state_in_i` of what went into it in the rows before; the last
    number of each says whether there was a row (zeros before an episode's start are not looked at).
    A row sees the same rows when it acts and when it is learned from.

    Args:
        obs_space, action_space, num_outputs, model_config, name: see ModelV2. The settings
            `attention_…` and `max_seq_len` are for it.
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
        self.torso: Any = Torso(obs_space, config)
        self.embed = nn.Linear(self.torso.size, self._size)
        units = range(config.attention_num_transformer_units)
        self.units = nn.ModuleList(TransformerUnit(config) for _ in units)
        self.heads = Heads(self._size, num_outputs, free_log_std)
        box = spaces.Box(-np.inf, np.inf, (self._size + 1,), np.float32)
        for i in units:
            self.view_requirements[f"state_in_{i}"] = ViewRequirement(
                f"state_out_{i}",
                box,
                shift=f"-{self._memory}:-1",
                batch_repeat_value=config.max_seq_len,
            )
        self._features: torch.Tensor | None = None

    def get_initial_state(self) -> list[np.ndarray]:
        return [np.zeros(self._size + 1, np.float32) for _ in self.units]

    def forward(
        self, input_dict: Mapping[str, Any], state: State, seq_lens: torch.Tensor | None
    ) -> tuple[torch.Tensor, State]:
        assert seq_lens is not None
        embedded = self.embed(self.torso(input_dict["obs"]))
        device = embedded.device
        lens = seq_lens.to(device).long()
        sequences, longest, memory = len(lens), int(lens.max()), self._memory
        # rows of sequences one after another -> [sequences, longest]
        steps = torch.arange(longest, device=device)
        there = steps[None, :] < lens[:, None]
        rows = embedded.new_zeros(sequences, longest, self._size)
        rows[there] = embedded
        # how far back each row of the memory and of the sequence lies from each row
        places = torch.arange(memory + longest, device=device)
        distance = memory + steps[:, None] - places[None, :]
        near = (distance >= 0) & (distance <= memory)
        distance = distance.clamp(0, memory)
        after = []
        for unit, remembered in zip(self.units, state, strict=True):
            known = torch.cat([remembered[..., -1] > 0, there], 1)  # [sequences, memory + longest]
            mask = near[None] & known[:, None, :]
            mask = mask | (~there)[..., None]  # padding may look anywhere: it is not used
            after.append(torch.cat([rows[there], embedded.new_ones(len(embedded), 1)], 1).detach())
            rows = unit(rows, remembered[..., :-1], distance, mask)
        self._features = rows[there]
        return self.heads.outputs(self._features), after

    def value_function(self) -> torch.Tensor:
        assert self._features is not None
        return self.heads.values(self._features)


def _waves(count: int, size: int) -> torch.Tensor:
    """Sines and cosines of distances 0 … count-1, [count, size] (Vaswani et al. 2017, 3.5)."""
    frequencies = torch.exp(torch.arange(0, size, 2) * (-math.log(10_000.0) / size))
    angles = torch.arange(count)[:, None] * frequencies[None, :]
    return torch.cat([angles.sin(), angles.cos()], 1)[:, :size]
