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
from flowrl.policies.models.torso import Heads, Torso, shares_layers
from flowrl.policies.views import ViewRequirement


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


class Tower(nn.Module):
    """A torso and transformer units: rows of sequences to features."""

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
        there: torch.Tensor | None,
        distance: torch.Tensor,
        near: torch.Tensor,
    ) -> tuple[torch.Tensor, State]:
        """Features [rows, size], and what went into each unit [rows, size + 1].

        Args:
            observations: of all rows.
            memory: what went into each unit in the rows before the sequences.
            there: which places of [sequences, longest] are rows; None if each row is a sequence.
            distance, near: how far back each place of memory and sequence lies from each of the
                sequence, and whether that is in reach, [longest, memory + longest].
        """
        embedded = self.embed(self.torso(observations))
        if there is None:
            rows = embedded.unsqueeze(1)
        else:
            rows = embedded.new_zeros(*there.shape, embedded.shape[1])
            rows[there] = embedded
        after = []
        for unit, remembered in zip(self.units, memory, strict=True):
            here = torch.ones_like(rows[..., 0], dtype=torch.bool) if there is None else there
            known = torch.cat([remembered[..., -1] > 0, here], 1)
            mask = near[None] & known[:, None, :]
            mask = mask | (~here)[..., None]  # padding may look anywhere: it is not used
            own = rows[:, 0] if there is None else rows[there]
            after.append(torch.cat([own, torch.ones_like(own[:, :1])], 1).detach())
            rows = unit(rows, remembered[..., :-1], distance, mask)
        return rows[:, 0] if there is None else rows[there], after


class AttentionNetwork(ModelV2):
    """A torso, transformer units that look back on `attention_memory` rows, and heads for policy
    and value; or one such tower for each.

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
        self.tower = Tower(obs_space, config)
        shared = shares_layers(config, obs_space)
        self.value_tower = None if shared else Tower(obs_space, config)
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
        longest, there = 1, None
        if seq_lens is not None:
            lens = seq_lens.to(device).long()
            longest = int(lens.max())
            there = torch.arange(longest, device=device)[None, :] < lens[:, None]
        steps = torch.arange(longest, device=device)
        places = torch.arange(memory + longest, device=device)
        distance = memory + steps[:, None] - places[None, :]
        near = (distance >= 0) & (distance <= memory)
        where = there, distance.clamp(0, memory), near
        count, observations = len(self.tower.units), input_dict["obs"]
        features, after = self.tower(observations, state[:count], *where)
        self._features = features
        if self.value_tower is not None:
            self._features, own = self.value_tower(observations, state[count:], *where)
            after = after + own
        return self.heads.outputs(features), after

    def value_function(self) -> torch.Tensor:
        assert self._features is not None
        return self.heads.values(self._features)


def _waves(count: int, size: int) -> torch.Tensor:
    """Sines and cosines of distances 0 … count-1, [count, size] (Vaswani et al. 2017, 3.5)."""
    frequencies = torch.exp(torch.arange(0, size, 2) * (-math.log(10_000.0) / size))
    angles = torch.arange(count)[:, None] * frequencies[None, :]
    return torch.cat([angles.sin(), angles.cos()], 1)[:, :size]
