"""Export: the acting part of a torch policy as a program that needs no flowrl."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import optree
import torch
from gymnasium import spaces

from flowrl.policies.models.noisy import resample_noise
from flowrl.policies.models.tensor_batch import InputDict
from flowrl.policies.views import zeros_of
from flowrl.settings import ConfigError

if TYPE_CHECKING:
    from flowrl.policies.torch_policy import TorchPolicy

FORMATS = ("torch", "onnx")


class Acting(torch.nn.Module):
    """The best actions of a policy as the environment takes them.

    Args:
        policy: whose weights and normalisation it has.
    """

    def __init__(self, policy: TorchPolicy):
        super().__init__()
        self.model = policy.model
        self._dist_class: Any = policy.dist_class
        self._dist_inputs = policy.dist_inputs
        self._space = policy.action_space
        self._config = policy.config
        self._count = len(policy.get_initial_state())
        views = policy.view_requirements.items()
        self._shows_actions = any((view.data_col or name) == "actions" for name, view in views)
        filter_ = policy.observation_filter
        self._clip = None if filter_ is None else filter_.clip
        if filter_ is not None:
            self.register_buffer("mean", torch.from_numpy(filter_.stats.mean.astype(np.float32)))
            scale = (1.0 / (filter_.stats.std + 1e-8)).astype(np.float32)
            self.register_buffer("scale", torch.from_numpy(scale))

    def forward(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Actions and states after the step, of views [B, …] with raw observations."""
        inputs = InputDict(inputs)
        if self._clip is not None:
            mean: Any = self.mean
            scale: Any = self.scale
            inputs["obs"] = ((inputs["obs"] - mean) * scale).clamp(-self._clip, self._clip)
        state = [inputs[f"state_in_{i}"] for i in range(self._count)]
        outputs, state = self.model(inputs, state, None)
        outputs = self._dist_inputs(outputs)
        actions = self._dist_class(outputs, self.model).deterministic_sample()
        made = {f"state_out_{i}": part for i, part in enumerate(state)}
        if self._shows_actions:
            made["policy_actions"] = actions
        return {"actions": self._for_env(self._space, actions), **made}

    def _for_env(self, space: Any, actions: Any) -> Any:
        """Policy.actions_for_env by torch."""
        if isinstance(space, spaces.Dict):
            return {key: self._for_env(space[key], actions[key]) for key in sorted(space)}
        if isinstance(space, spaces.Tuple):
            return tuple(self._for_env(s, a) for s, a in zip(space, actions, strict=True))
        if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
            return actions + torch.as_tensor(space.start)
        if not isinstance(space, spaces.Box):
            return actions
        low, high = torch.from_numpy(space.low), torch.from_numpy(space.high)
        bounded = np.isfinite(space.low).all() and np.isfinite(space.high).all()
        if bounded and self._config.normalize_actions:
            actions = (0.5 * high + 0.5 * low) + actions * (0.5 * high - 0.5 * low)
        if self._config.clip_actions:
            actions = torch.minimum(torch.maximum(actions, low), high)
        return actions.to(low.dtype)


def example_inputs(policy: TorchPolicy, rows: int) -> dict[str, Any]:
    """Zeros in the shape of every view that the policy acts on, tensors [rows, …]."""
    made: dict[str, Any] = {}
    initial = policy.get_initial_state()
    for name, view in policy.view_requirements.items():
        if not view.known_for_actions(name):
            continue
        column = view.data_col or name
        if view.agents is not None:
            raise ConfigError(f"export: view {name!r} shows other agents, which nothing else has")
        if column.startswith("state_out_"):
            one: Any = initial[int(column.removeprefix("state_out_"))]
        elif column == "rewards":
            one = np.zeros((), np.float32)
        elif column == "obs":
            one = zeros_of(policy.observation_space)
        elif column == "actions":
            one = zeros_of(policy.action_space)
        elif view.space is not None:
            one = zeros_of(view.space)
        else:
            raise ConfigError(f"export: view {name!r}: give it a space")
        shape = (rows, len(view.shifts)) if view.is_window else (rows,)
        made[name] = optree.tree_map(lambda leaf, s=shape: _repeated(leaf, s), one)
    return made


def _repeated(leaf: Any, shape: tuple[int, ...]) -> torch.Tensor:
    leaf = np.asarray(leaf)
    return torch.from_numpy(np.broadcast_to(leaf, (*shape, *leaf.shape)).copy())


def _plain() -> type[TorchPolicy]:
    from flowrl.policies.torch_policy import TorchPolicy

    return TorchPolicy


def export(policy: TorchPolicy, path: Path | str, format: str | None) -> Path:
    """See TorchPolicy.export."""
    if format is None:
        format = "onnx" if Path(path).suffix == ".onnx" else "torch"
    if format not in FORMATS:
        raise ConfigError(f"export: a format is one of {', '.join(FORMATS)}, got {format!r}")
    acts = type(policy)
    for name in ("compute_actions", "compute_actions_from_input_dict", "actions_for_env"):
        if getattr(acts, name) is not getattr(_plain(), name):
            raise ConfigError(f"export: {acts.__name__} acts by a {name}() of its own")
    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"export: {str(path)!r} is a folder, not a file")
    resample_noise(policy.model, None)
    acting = copy.deepcopy(Acting(policy), _cut_off(policy.model))
    acting = acting.cpu().eval().requires_grad_(False)
    inputs = example_inputs(policy, 2)
    batch = torch.export.Dim("batch", min=1)
    every: Any = inputs
    dynamic = optree.tree_map(lambda leaf: {0: batch}, every)
    with torch.no_grad():
        program = torch.export.export(acting, (inputs,), dynamic_shapes=(dynamic,))
    path.parent.mkdir(parents=True, exist_ok=True)
    if format == "torch":
        torch.export.save(program, path)
        return path
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ConfigError("export: the format onnx needs `pip install flowrl[onnx]`") from error
    with torch.no_grad():
        outputs = acting(inputs)
    torch.onnx.export(
        program,
        (),
        str(path),
        input_names=leaf_names(inputs),
        output_names=leaf_names(outputs),
        dynamo=True,
        verbose=False,
    )
    return path


def _cut_off(model: torch.nn.Module) -> dict[int, Any]:
    """What models keep of their last forward pass, without its graph: what `copy.deepcopy` is told
    of, as it refuses such tensors."""
    kept: Any = [list(vars(module).values()) for module in model.modules()]
    leaves: list[Any] = optree.tree_leaves(kept)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return {id(tensor): tensor.detach().clone() for tensor in tensors if not tensor.is_leaf}


def leaf_names(tree: Any, name: str = "") -> list[str]:
    """What the arrays of a nest are called, in its order: `obs`, or `obs.eye` and `obs.rest.0`."""
    if isinstance(tree, (list, tuple)):
        tree = dict(enumerate(tree))
    if not isinstance(tree, dict):
        return [name]
    parts = ((f"{name}.{key}" if name else str(key), part) for key, part in tree.items())
    return [leaf for called, part in parts for leaf in leaf_names(part, called)]
