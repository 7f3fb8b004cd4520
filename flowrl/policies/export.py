"""Export: the acting part of a torch policy as a program that does not need flowrl."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import optree
import torch
from gymnasium import spaces

from flowrl.data.spaces import first_value_of, zeros_of
from flowrl.errors import ConfigError, check_installed
from flowrl.policies.action_scaling import is_bounded
from flowrl.policies.config import PolicyConfig
from flowrl.policies.distributions import ActionDistribution
from flowrl.policies.filters import ObservationFilter
from flowrl.policies.models.base import ModelV2
from flowrl.policies.models.noisy import resample_noise
from flowrl.policies.models.tensor_batch import InputDict
from flowrl.policies.overrides import is_builtin_method
from flowrl.policies.views import ViewRequirement, acting_views
from flowrl.setting_values import expanded_path

FORMATS = ("torch", "onnx")
_ACTING_METHODS = (
    "compute_actions", "compute_actions_from_input_dict", "actions_for_env", "_act",
)  # fmt: skip


class ExportablePolicy(Protocol):
    """The part of a TorchPolicy that is exported."""

    observation_space: spaces.Space
    action_space: spaces.Space
    observation_filter: ObservationFilter | None
    model: ModelV2
    dist_class: type[ActionDistribution]
    config: PolicyConfig
    exploration: Any

    @property
    def view_requirements(self) -> Mapping[str, ViewRequirement]: ...

    @property
    def to_dist_inputs(self) -> Callable[[torch.Tensor], torch.Tensor]: ...

    def get_initial_state(self) -> list[np.ndarray]: ...


class ActingModule(torch.nn.Module):
    """A module that computes a policy's greedy actions, in the environment's action space.

    Args:
        policy: provides the weights and the normalization.
    """

    def __init__(self, policy: ExportablePolicy):
        super().__init__()
        self.model = policy.model
        self._dist_class: Any = policy.dist_class
        self._dist_inputs = policy.to_dist_inputs
        self._space = policy.action_space
        self._config = policy.config
        self._num_states = len(policy.get_initial_state())
        views = acting_views(policy.view_requirements)
        columns = {name: view.data_col or name for name, view in views.items()}
        self._needs_actions = "actions" in columns.values()
        self._obs_views = [name for name, column in columns.items() if column == "obs"]
        filter_ = policy.observation_filter
        self._clip = None if filter_ is None else filter_.clip
        if filter_ is not None:
            # as ObservationFilter: large float64 or integer values need all digits of the mean
            dtype: Any = np.result_type(policy.observation_space.dtype, np.float32)
            # without axes, arithmetic gives scalars instead of arrays
            mean = np.asarray(filter_.stats.mean, dtype)
            scale = np.asarray(1.0 / (filter_.stats.std + 1e-8), np.float32)
            self.register_buffer("mean", torch.from_numpy(mean))
            self.register_buffer("scale", torch.from_numpy(scale))

    def forward(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Compute actions and the states after the step.

        Args:
            inputs: views [B, …] with raw observations.

        Returns:
            `actions`, `state_out_0`, … and, if a view shows earlier actions, `policy_actions`.
        """
        inputs = InputDict(inputs)
        if self._clip is not None:
            mean: Any = self.mean
            scale: Any = self.scale
            for name in self._obs_views:
                observations = inputs[name]
                if observations.dtype == torch.bool:  # torch does not subtract from it
                    observations = observations.to(mean.dtype)
                normalized = ((observations - mean) * scale).float()
                inputs[name] = normalized.clamp(-self._clip, self._clip)
        state = [inputs[f"state_in_{i}"] for i in range(self._num_states)]
        outputs, state = self.model(inputs, state, None)
        outputs = self._dist_inputs(outputs)
        actions = self._dist_class(outputs, self.model).deterministic_sample()
        extra = {f"state_out_{i}": part for i, part in enumerate(state)}
        if self._needs_actions:
            extra["policy_actions"] = actions
        return {"actions": self._for_env(self._space, actions), **extra}

    def _for_env(self, space: Any, actions: Any) -> Any:
        """The torch equivalent of Policy.actions_for_env."""
        if isinstance(space, spaces.Dict):
            return {key: self._for_env(space[key], actions[key]) for key in sorted(space)}
        if isinstance(space, spaces.Tuple):
            return tuple(self._for_env(s, a) for s, a in zip(space, actions, strict=True))
        if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
            dtype = torch.from_numpy(np.zeros(0, space.dtype)).dtype
            return (actions + torch.as_tensor(space.start)).to(dtype)
        if not isinstance(space, spaces.Box):
            return actions
        low, high = torch.from_numpy(space.low), torch.from_numpy(space.high)
        if is_bounded(space) and self._config.normalize_actions:
            actions = (0.5 * high + 0.5 * low) + actions * (0.5 * high - 0.5 * low)
        if self._config.clip_actions:
            actions = torch.minimum(torch.maximum(actions, low), high)
        return actions.to(low.dtype)


def example_inputs(policy: ExportablePolicy, rows: int) -> dict[str, Any]:
    """Return example values for each view that the policy acts on, tensors [rows, …].

    Raises:
        ConfigError: a view shows other agents, or has no space.
    """
    inputs: dict[str, Any] = {}
    initial_state = policy.get_initial_state()
    for name, view in acting_views(policy.view_requirements).items():
        column = view.data_col or name
        if view.agents is not None:
            raise ConfigError(
                f"export: view {name!r} shows other agents, which is not possible outside flowrl"
            )
        if column.startswith("state_out_"):
            value: Any = initial_state[int(column.removeprefix("state_out_"))]
        elif column == "rewards":
            value = np.zeros((), np.float32)
        elif column == "obs":
            value = first_value_of(policy.observation_space)
        elif column == "actions":
            value = _zero_action(policy.action_space)
        elif view.space is not None:
            value = first_value_of(view.space)
        else:
            raise ConfigError(f"export: view {name!r} needs a space")
        shape = (rows, len(view.shifts)) if view.is_window else (rows,)
        inputs[name] = optree.tree_map(lambda leaf, s=shape: _repeat(leaf, s), value)
    return inputs


def _zero_action(space: spaces.Space) -> Any:
    """Return an action of zeros in the policy's form, as the exported program returns actions:
    float32, or integers from 0."""
    if isinstance(space, spaces.Dict):
        return {key: _zero_action(space[key]) for key in sorted(space)}
    if isinstance(space, spaces.Tuple):
        return tuple(_zero_action(part) for part in space)
    zeros: np.ndarray = zeros_of(space)
    if isinstance(space, spaces.Box):
        return zeros.astype(np.float32)
    return zeros if isinstance(space, spaces.MultiBinary) else zeros.astype(np.int64)


def _repeat(leaf: Any, shape: tuple[int, ...]) -> torch.Tensor:
    leaf = np.asarray(leaf)
    return torch.from_numpy(np.broadcast_to(leaf, (*shape, *leaf.shape)).copy())


def export_policy(policy: ExportablePolicy, path: Path | str, format: str | None) -> Path:
    """Write the acting part of a policy to a file. See TorchPolicy.export.

    Args:
        policy: the policy; one whose class or exploration overrides the way of acting is refused.
        path: path of the file.
        format: "torch", "onnx", or None to choose by the file's suffix.

    Returns:
        the path.
    """
    if format is None:
        format = "onnx" if Path(path).suffix == ".onnx" else "torch"
    if format not in FORMATS:
        raise ConfigError(f"export: format must be one of {', '.join(FORMATS)}, got {format!r}")
    methods = [(policy.exploration, "act"), *((policy, name) for name in _ACTING_METHODS)]
    for owner, name in methods:
        if not is_builtin_method(owner, name):
            raise ConfigError(
                f"export: {type(owner).__name__} overrides {name}(), which cannot be exported"
            )
    if format == "onnx":
        check_installed("onnxscript", "export: the format onnx", extra="onnx")
    path = expanded_path(path)
    if path.is_dir():
        raise ConfigError(f"export: {str(path)!r} is a folder, not a file")
    resample_noise(policy.model, None)
    module = copy.deepcopy(ActingModule(policy), _detached_tensors(policy.model))
    module = module.cpu().eval().requires_grad_(False)
    inputs = example_inputs(policy, 2)
    batch = torch.export.Dim("batch", min=1)
    input_tree: Any = inputs
    dynamic = optree.tree_map(lambda leaf: {0: batch}, input_tree)
    path.parent.mkdir(parents=True, exist_ok=True)
    with torch.no_grad(), _quiet_torch():
        try:
            program = torch.export.export(module, (inputs,), dynamic_shapes=(dynamic,))
        except Exception as error:
            if "specialized" not in str(error):
                raise
            raise ConfigError(
                "export: the network works only for one batch size, because its forward() reads "
                "the number of rows as a Python number: use x.shape[0] instead of len(x), or "
                "reshape(-1, …)"
            ) from error
        if format == "torch":
            torch.export.save(program, path)
        else:
            torch.onnx.export(
                program,
                (),
                str(path),
                input_names=leaf_names(inputs),
                output_names=leaf_names(module(inputs)),
                external_data=False,  # the weights are in the same file
                dynamo=True,
                verbose=False,
            )
    return path


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Hide torch's warnings about its own exporters, which users cannot act on."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _detached_tensors(model: torch.nn.Module) -> dict[int, Any]:
    """Return a memo for `copy.deepcopy` with detached copies of the non-leaf tensors that modules
    keep from their last forward pass: deepcopy does not support tensors with a graph."""
    attributes: Any = [list(vars(module).values()) for module in model.modules()]
    leaves: list[Any] = optree.tree_leaves(attributes)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return {id(tensor): tensor.detach().clone() for tensor in tensors if not tensor.is_leaf}


def leaf_names(tree: Any, name: str = "") -> list[str]:
    """Return the names of the leaves of a nested structure, such as `obs` or `obs.image` and
    `obs.rest.0`."""
    if isinstance(tree, (list, tuple)):
        tree = dict(enumerate(tree))
    if not isinstance(tree, dict):
        return [name]
    children = ((f"{name}.{key}" if name else str(key), child) for key, child in tree.items())
    return [leaf for path, child in children for leaf in leaf_names(child, path)]
