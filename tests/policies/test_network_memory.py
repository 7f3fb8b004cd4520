"""Networks that do not fit into memory are refused before their weights are allocated."""

import numpy as np
import pytest
from gymnasium import spaces

from flowrl import memory_limit
from flowrl.errors import ConfigError
from flowrl.memory_limit import GIB
from flowrl.policies.config import ModelConfig
from flowrl.policies.models.catalog import make_model
from flowrl.policies.models.network_memory import BYTES_PER_WEIGHT, check_network_memory

VECTOR = spaces.Box(-1, 1, (100,), np.float32)
IMAGE = spaces.Box(0, 255, (84, 84, 4), np.uint8)
HUGE = 10**7


@pytest.mark.parametrize(
    ("space", "settings", "name"),
    [
        (VECTOR, {"fcnet_hiddens": [HUGE]}, "fcnet_hiddens"),
        (VECTOR, {"fcnet_hiddens": [HUGE, HUGE]}, "fcnet_hiddens"),
        (VECTOR, {"num_framestacks": HUGE}, "num_framestacks"),
        (VECTOR, {"use_lstm": True, "lstm_cell_size": HUGE}, "lstm_cell_size"),
        (VECTOR, {"use_attention": True, "attention_dim": HUGE}, r"attention_\*"),
        (VECTOR, {"use_attention": True, "attention_memory": HUGE}, "attention_memory"),
        (IMAGE, {"post_fcnet_hiddens": [HUGE, HUGE]}, "post_fcnet_hiddens"),
        (IMAGE, {"conv_filters": [[HUGE, 8, 4], [64, 4, 2]]}, "conv_filters"),
    ],
)
def test_huge_networks_are_refused_with_the_name_of_the_setting(space, settings, name, monkeypatch):
    monkeypatch.setattr(memory_limit, "machine_memory", lambda: GIB)
    with pytest.raises(ConfigError, match=rf"^model\.{name}: weights: .* GiB"):
        make_model(space, spaces.Discrete(2), 2, ModelConfig(**settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"fcnet_hiddens": [64, 32]},
        {"fcnet_hiddens": [64], "use_lstm": True, "lstm_cell_size": 48},
        {"fcnet_hiddens": [64], "use_attention": True},
    ],
)
def test_estimate_is_close_to_the_weights_of_the_network(settings, monkeypatch):
    config = ModelConfig(vf_share_layers=True, **settings)
    model = make_model(VECTOR, spaces.Discrete(2), 2, config)
    actual = BYTES_PER_WEIGHT * sum(p.numel() for p in model.parameters() if p.ndim > 1)
    estimates = []
    name = "flowrl.policies.models.network_memory.check_memory"
    monkeypatch.setattr(name, lambda size, what: estimates.append(size))
    check_network_memory(VECTOR, 2, config)
    assert 0.5 * actual <= estimates[0] <= 1.5 * actual
