"""make_model: choose a model for spaces and settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from torch import nn

from flowrl.data.spaces import has_image
from flowrl.errors import ConfigError
from flowrl.policies.config import ModelConfig
from flowrl.policies.models.attention import AttentionNetwork
from flowrl.policies.models.base import ModelV2, check_views
from flowrl.policies.models.fcnet import FullyConnectedNetwork
from flowrl.policies.models.flatten import check_supported, nested_size
from flowrl.policies.models.masked import MaskedModel
from flowrl.policies.models.module_model import ModuleModel
from flowrl.policies.models.network_memory import check_network_memory
from flowrl.policies.models.recurrent import RecurrentNetwork
from flowrl.policies.models.torso import TorsoNetwork
from flowrl.policies.torch_random import torch_seed
from flowrl.policies.views import ACTION_MASK, ViewRequirement
from flowrl.setting_values import nearest
from flowrl.settings import import_object

_CUSTOM_MODELS: dict[str, Callable[..., Any]] = {}


def register_model(name: str, model: Callable[..., Any]) -> None:
    """Register a model under a name for the setting `custom_model`.

    Ray actors know the name only if they import the module that registers it; with actors, use
    the class itself or its import path instead.

    Args:
        name: value of `custom_model` that selects the model.
        model: a model class, or a function that returns a model.

    Raises:
        TypeError: the name is not a string, or the model not callable.
    """
    if not isinstance(name, str):
        raise TypeError(f"register_model: the name must be a string, got {name!r}")
    if not callable(model):
        raise TypeError(f"register_model: the model must be a class or a function, got {model!r}")
    _CUSTOM_MODELS[name] = model


def make_model(
    obs_space: spaces.Space,
    action_space: spaces.Space,
    num_outputs: int,
    config: ModelConfig,
    free_log_std: bool = False,
    rng: np.random.Generator | None = None,
    outputs_per_action: int = 1,
    use_numpy: bool = True,
) -> ModelV2:
    """Create the model for an observation space and settings.

    This is the `custom_model` if set; a GTrXL with `use_attention`; an LSTM or GRU with
    `use_lstm`; for images and nested spaces a network with an encoder per leaf; otherwise fully
    connected networks. The leaf `action_mask` of a Dict observation masks the outputs.

    Args:
        obs_space, action_space: spaces of one agent.
        num_outputs: number of inputs of the action distribution.
        config: the settings.
        free_log_std: the second half of the outputs is a parameter.
        rng: generator of the initial weights.
        outputs_per_action: number of outputs of each action, which are masked together. Outputs
            after those of all actions are not masked.
        use_numpy: allow networks that act with numpy, whose layers cannot be replaced later.

    Raises:
        ConfigError: there is no encoder for the space, or settings do not fit the space.
    """
    rng = np.random.default_rng() if rng is None else rng
    is_nested = isinstance(obs_space, (spaces.Dict, spaces.Tuple))
    if config.num_framestacks > 1 and is_nested and config.custom_model is None:
        raise ConfigError(
            f"model: num_framestacks does not support nested spaces such as {obs_space}"
        )
    if (
        config.custom_model is None
        and isinstance(obs_space, spaces.Dict)
        and ACTION_MASK in obs_space.spaces
    ):
        unmasked = {key: space for key, space in obs_space.items() if key != ACTION_MASK}
        if not unmasked:
            raise ConfigError(f"observation space {obs_space}: it has only an action_mask")
        inner_space = next(iter(unmasked.values())) if len(unmasked) == 1 else spaces.Dict(unmasked)
        inner = make_model(
            inner_space, action_space, num_outputs, config, free_log_std, rng, use_numpy=use_numpy
        )
        return MaskedModel(inner, obs_space, action_space, num_outputs, config, outputs_per_action)
    is_fcnet = use_numpy and config.custom_model is None and _is_fully_connected(obs_space, config)
    # fully connected networks draw their weights from rng only
    with torch_seed(0 if is_fcnet else int(rng.integers(2**63))):
        model = _make(obs_space, action_space, num_outputs, config, free_log_std, rng, is_fcnet)
    if config.num_framestacks > 1:
        shift = f"-{config.num_framestacks - 1}:0"
        model.view_requirements["obs"] = ViewRequirement("obs", obs_space, shift)
    return model


def _is_fully_connected(space: spaces.Space, config: ModelConfig) -> bool:
    return not (has_image(space) or config.use_lstm or config.use_attention)


def _make(
    obs_space: spaces.Space,
    action_space: spaces.Space,
    num_outputs: int,
    config: ModelConfig,
    free_log_std: bool,
    rng: np.random.Generator,
    is_fcnet: bool,
) -> ModelV2:
    args = (obs_space, action_space, num_outputs, config)
    check_supported(obs_space)
    if config.custom_model is not None:
        return _make_custom(config, *args)
    _check_space(obs_space)
    check_network_memory(obs_space, num_outputs, config)
    if not has_image(obs_space):
        for name in ("conv_filters", "conv_type", "conv_activation", "post_fcnet_hiddens"):
            if getattr(config, name) != ModelConfig.model_fields[name].default:
                raise ConfigError(f"{name} needs images, but the space {obs_space} has none")
    if is_fcnet:
        return FullyConnectedNetwork(*args, rng=rng, name="model", free_log_std=free_log_std)
    model_class: Any = TorsoNetwork
    if config.use_attention or config.use_lstm:
        model_class = AttentionNetwork if config.use_attention else RecurrentNetwork
    model: ModelV2 = model_class(*args, "model", free_log_std)
    return model


def _check_space(space: spaces.Space) -> None:
    """Raise ConfigError if a part of an observation space is empty, or has an action mask."""
    if nested_size(space) == 0:
        raise ConfigError(f"no model for the space {space}: it is empty")
    if isinstance(space, spaces.Dict) and ACTION_MASK in space.spaces:
        raise ConfigError(
            f"{ACTION_MASK}: must be at the top level of a Dict observation, not nested"
        )
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        for part in space.values() if isinstance(space, spaces.Dict) else space:
            _check_space(part)


def _make_custom(config: ModelConfig, *args: Any) -> ModelV2:
    factory = _custom_factory(config.custom_model)
    kwargs: Mapping[str, Any] = config.custom_model_config
    is_plain_module = is_module_class(factory)
    factory_args = args[:3] if is_plain_module else (*args, "custom_model")
    model: Any
    try:
        model = factory(*factory_args, **kwargs)
    except (TypeError, AttributeError) as error:
        names = "obs_space, action_space, num_outputs"
        names += "" if is_plain_module else ", model_config, name"
        names += "".join(f", {name}=…" for name in kwargs)
        hint = ""
        if isinstance(error, TypeError) and not isinstance(factory, type):
            hint = (
                ". A function receives obs_space, action_space, num_outputs, model_config, name; "
                "a torch.nn.Module class receives the first three"
            )
        raise ConfigError(
            f"custom_model: {getattr(factory, '__name__', factory)}({names}) failed: {error}{hint}"
        ) from error
    if isinstance(model, nn.Module) and not isinstance(model, ModelV2):
        model = ModuleModel(model, *args, name=type(model).__name__)
    if not isinstance(model, ModelV2):
        raise ConfigError(f"custom_model: must create a torch.nn.Module, got {model!r}")
    name = type(model).__name__
    check_views(model.view_requirements, name)
    states: Any = model.get_initial_state()
    if not isinstance(states, (list, tuple, np.ndarray)):
        raise ConfigError(
            f"{name}.get_initial_state() must return a list of arrays, got {states!r}; [] for a "
            "network without recurrent states"
        )
    return model


def is_module_class(custom_model: Any) -> bool:
    """Return whether a `custom_model` is a class whose constructor does not receive the
    ModelConfig: any class but a ModelV2.

    Raises:
        ConfigError: it cannot be found.
    """
    factory = _custom_factory(custom_model)
    return isinstance(factory, type) and not issubclass(factory, ModelV2)


def _custom_factory(custom_model: Any) -> Any:
    """Return the class or function that `custom_model` refers to."""
    factory = custom_model
    if isinstance(factory, str):
        if factory in _CUSTOM_MODELS:
            factory = _CUSTOM_MODELS[factory]
        elif ":" in factory:
            try:
                factory = import_object(factory)
            except (ImportError, AttributeError, ValueError) as error:
                raise ConfigError(
                    f"custom_model: {factory!r} cannot be imported: {error}"
                ) from error
        else:
            hint = nearest(factory, sorted(_CUSTOM_MODELS))
            raise ConfigError(
                f"custom_model: no model is registered as {factory!r}.{hint} Register it with "
                'register_model(), or set a class or its import path "module:Class"'
            )
    if isinstance(factory, nn.Module) or not callable(factory):
        raise ConfigError(
            f"custom_model: must be a class, or a function that creates a model, got {factory!r}"
        )
    return factory
