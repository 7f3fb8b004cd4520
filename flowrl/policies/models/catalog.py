"""The model for a pair of spaces and settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from flowrl.policies.config import ModelConfig
from flowrl.policies.models.attention import AttentionNetwork
from flowrl.policies.models.base import ModelV2, ModuleModel
from flowrl.policies.models.encoders import has_image, is_image
from flowrl.policies.models.fcnet import FullyConnectedNetwork
from flowrl.policies.models.masked import MASK, MaskedModel
from flowrl.policies.models.recurrent import RecurrentNetwork
from flowrl.policies.models.torso import TorsoNetwork
from flowrl.policies.views import ViewRequirement
from flowrl.settings import ConfigError, imported, nearest

_CUSTOM: dict[str, Callable[..., Any]] = {}


def register_model(name: str, maker: Callable[..., Any]) -> None:
    """Make a model known by a name, for `custom_model`. On Ray's actors it is known where the
    module that registers it is imported: there the class itself, or its path, is better."""
    _CUSTOM[name] = maker


def make_model(
    obs_space: spaces.Space,
    action_space: spaces.Space,
    num_outputs: int,
    config: ModelConfig,
    free_log_std: bool = False,
    rng: np.random.Generator | None = None,
    outputs_per_action: int = 1,
    by_numpy: bool = True,
) -> ModelV2:
    """A model as the settings say, and as the observation space needs.

    `custom_model` if there is one; a GTrXL with `use_attention`, an LSTM or GRU with `use_lstm`;
    for images and nested spaces an encoder of each leaf; else two networks of linear layers. A Dict
    observation with a leaf `action_mask` masks the outputs.

    Args:
        obs_space, action_space: of one agent.
        num_outputs: inputs of the action distribution.
        config: the settings.
        free_log_std: the second half of the outputs is a parameter, not the network's.
        rng: what the initial weights are drawn from.
        outputs_per_action: outputs that a mask forbids with each action; what comes after those of
            all actions it leaves alone.
        by_numpy: whether a network that numpy computes, too, will do: its layers are no modules
            that could be replaced.

    Raises:
        ConfigError: a space that no encoder is for; settings that do not fit the space.
    """
    rng = np.random.default_rng() if rng is None else rng
    if (
        config.custom_model is None
        and isinstance(obs_space, spaces.Dict)
        and MASK in obs_space.spaces
    ):
        rest = {key: space for key, space in obs_space.items() if key != MASK}
        if config.num_framestacks > 1:
            raise ConfigError(
                f"model: num_framestacks is not for nested spaces such as {obs_space}"
            )
        if not rest:
            raise ConfigError(f"observation space {obs_space}: there is nothing but an action_mask")
        seen = next(iter(rest.values())) if len(rest) == 1 else spaces.Dict(rest)
        inner = make_model(
            seen, action_space, num_outputs, config, free_log_std, rng, by_numpy=by_numpy
        )
        given = obs_space, action_space, num_outputs, config
        return MaskedModel(inner, *given, outputs_per_action)
    quick = by_numpy and config.custom_model is None and _is_flat(obs_space, config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0 if quick else int(rng.integers(2**63)))
        model = _make(obs_space, action_space, num_outputs, config, free_log_std, rng, quick)
    if config.num_framestacks > 1:
        shift = f"-{config.num_framestacks - 1}:0"
        model.view_requirements["obs"] = ViewRequirement("obs", obs_space, shift)
    return model


def _is_flat(space: spaces.Space, config: ModelConfig) -> bool:
    nested = isinstance(space, (spaces.Dict, spaces.Tuple))
    return not (nested or is_image(space) or config.use_lstm or config.use_attention)


def _make(
    obs_space: spaces.Space,
    action_space: spaces.Space,
    num_outputs: int,
    config: ModelConfig,
    free_log_std: bool,
    rng: np.random.Generator,
    quick: bool,
) -> ModelV2:
    given = (obs_space, action_space, num_outputs, config)
    if config.custom_model is not None:
        return _custom(config, *given)
    if not has_image(obs_space):
        for name in ("conv_filters", "conv_type", "conv_activation", "post_fcnet_hiddens"):
            if getattr(config, name) != ModelConfig.model_fields[name].default:
                raise ConfigError(f"model: {name} is for images, {obs_space} has none")
    if config.num_framestacks > 1 and isinstance(obs_space, (spaces.Dict, spaces.Tuple)):
        raise ConfigError(f"model: num_framestacks is not for nested spaces such as {obs_space}")
    if quick:
        return FullyConnectedNetwork(*given, rng=rng, name="model", free_log_std=free_log_std)
    kind: Any = TorsoNetwork
    if config.use_attention or config.use_lstm:
        kind = AttentionNetwork if config.use_attention else RecurrentNetwork
    model: ModelV2 = kind(*given, "model", free_log_std)
    return model


def _custom(config: ModelConfig, *given: Any) -> ModelV2:
    maker: Any = config.custom_model
    if isinstance(maker, str):
        if maker in _CUSTOM:
            maker = _CUSTOM[maker]
        elif ":" in maker:
            try:
                maker = imported(maker)
            except (ImportError, AttributeError, ValueError) as error:
                raise ConfigError(f"custom_model: {maker!r} cannot be imported: {error}") from error
        else:
            raise ConfigError(
                f"custom_model: no model {maker!r}.{nearest(maker, sorted(_CUSTOM))} Register one "
                'with register_model(), or give a class, or its path "module:Class"'
            )
    settings: Mapping[str, Any] = config.custom_model_config
    if isinstance(maker, nn.Module) or not callable(maker):
        raise ConfigError(f"custom_model: a class, or a function that makes a model, got {maker!r}")
    plain = isinstance(maker, type) and not issubclass(maker, ModelV2)
    own = given[:3] if plain else (*given, "custom_model")
    made: Any
    try:
        made = maker(*own, **settings)
    except (TypeError, AttributeError) as error:
        names = "obs_space, action_space, num_outputs" + ("" if plain else ", model_config, name")
        more = "".join(f", {name}=…" for name in settings)
        raise ConfigError(
            f"custom_model: {getattr(maker, '__name__', maker)}({names}{more}) failed: {error}"
        ) from error
    if isinstance(made, nn.Module) and not isinstance(made, ModelV2):
        made = ModuleModel(made, *given, name=type(made).__name__)
    if not isinstance(made, ModelV2):
        raise ConfigError(f"custom_model: a torch.nn.Module is needed, got {made!r}")
    return made
