"""Estimate the memory of a network from its settings, before its weights are allocated."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from gymnasium import spaces

from flowrl.data.spaces import has_image
from flowrl.memory_limit import check_memory
from flowrl.policies.config import ModelConfig
from flowrl.policies.models.flatten import nested_size

BYTES_PER_WEIGHT = 16  # float32: the weight, its gradient, and Adam's two moments


def check_network_memory(obs_space: spaces.Space, num_outputs: int, config: ModelConfig) -> None:
    """Check that this machine has memory for the weights of a network with these settings.

    Counts the weights of the widest layers; biases, heads and layers whose size depends on the
    shape of an image are left out.

    Raises:
        ConfigError: it has not; the message names the setting with the most weights.
    """
    weights: dict[str, int] = {}
    image = has_image(obs_space)
    hidden_name = "post_fcnet_hiddens" if image else "fcnet_hiddens"
    hiddens: list[int] = list(getattr(config, hidden_name))
    inputs = [] if image else [nested_size(obs_space) * config.num_framestacks]
    weights[hidden_name] = _dense([*inputs, *hiddens, num_outputs])
    if config.num_framestacks > max(hiddens, default=1):
        weights["num_framestacks"] = weights.pop(hidden_name)
    if config.conv_filters:
        channels = [(1, 1, 1), *config.conv_filters]
        weights["conv_filters"] = sum(
            before[0] * after[0] * after[1] ** 2 for before, after in itertools.pairwise(channels)
        )
    size = config.lstm_cell_size
    if config.use_lstm:
        weights["lstm_cell_size"] = 4 * size * (size + hiddens[-1] if hiddens else size)
    if config.use_attention:
        dim, heads = config.attention_dim, config.attention_num_heads * config.attention_head_dim
        mlp, units = config.attention_position_wise_mlp_dim, config.attention_num_transformer_units
        weights["attention_*"] = units * dim * (4 * heads + 2 * mlp + 12 * dim)
        # of one row; a row attends to all rows of the memory
        weights["attention_memory"] = units * config.attention_memory * dim
    largest = max(weights, key=weights.__getitem__)
    check_memory(BYTES_PER_WEIGHT * sum(weights.values()), f"model.{largest}: weights")


def _dense(sizes: Iterable[int]) -> int:
    return sum(before * after for before, after in itertools.pairwise(sizes))
