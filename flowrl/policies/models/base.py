"""ModelV2: the interface between a policy and its network."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import optree
import torch
from gymnasium import spaces
from torch import nn

from flowrl.data import SampleBatch
from flowrl.errors import ConfigError, add_note
from flowrl.policies.config import ModelConfig
from flowrl.policies.models.tensor_batch import InputDict, TensorBatch, as_tensor
from flowrl.policies.views import ViewRequirement, acting_views, forward_views

State = list[torch.Tensor]
NEEDS_NO_VALUES = "; DQN, APEX and R2D2 need no values with dueling=False"


def full_precision(features: torch.Tensor) -> Any:
    """Return a context that disables autocast.

    Output layers compute in float32 even if the rest of the network computes in bfloat16, whose
    three digits are too few for values.
    """
    device_type = features.device.type
    if not torch.is_autocast_enabled(device_type):
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's parameters."""
    return next((p.device for p in module.parameters()), torch.device("cpu"))


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    """Return the dicts that contain the hooks of a module and of its parts; they are empty unless
    a hook was registered."""
    return [vars(part)[name] for part in module.modules() for name in _HOOKS]


class ModelV2(nn.Module):
    """A network with which a TorchPolicy acts and learns.

    A subclass implements `forward` and, if it has values, `value_function`. In its constructor it
    adds the columns that it reads besides the observation to `view_requirements`. A model with
    recurrent states also implements `get_initial_state` (see RecurrentNetwork).

    Args:
        obs_space, action_space: spaces of one agent.
        num_outputs: number of inputs of the action distribution.
        model_config: the settings.
        name: name of the model.
    """

    train_forward: Any

    def __init__(
        self,
        obs_space: spaces.Space,
        action_space: spaces.Space,
        num_outputs: int,
        model_config: ModelConfig,
        name: str = "model",
    ):
        super().__init__()
        self.obs_space = obs_space
        self.action_space = action_space
        self.num_outputs = num_outputs
        self.model_config = model_config
        self.name = name
        object.__setattr__(self, "train_forward", self)  # do not register it as a submodule
        self.view_requirements: dict[str, ViewRequirement] = {
            "obs": ViewRequirement(space=obs_space)
        }

    def forward(
        self, input_dict: Mapping[str, Any], state: State, seq_lens: torch.Tensor | None
    ) -> tuple[torch.Tensor, State]:
        """Compute distribution inputs.

        Args:
            input_dict: the views by name, tensors [rows, …] (nested for nested spaces);
                `obs_flat` is the observation flattened to [rows, features].
            state: the states `state_in_0`, … before each sequence, [sequences, …] each.
            seq_lens: length of each sequence, int [sequences]. The sequences follow one another
                without padding. None if each row is a sequence, as when acting, or if the model
                has no states.

        Returns:
            distribution inputs [rows, num_outputs], and the states after each sequence's last row
            [sequences, …]. A model whose state views cover several earlier rows returns the states
            after each row instead.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement forward()")

    def value_function(self) -> torch.Tensor:
        """Return the values [rows] of the rows of the last `forward` call."""
        raise NotImplementedError(
            f"{type(self).__name__} must implement value_function(){NEEDS_NO_VALUES}"
        )

    def get_initial_state(self) -> list[np.ndarray]:
        """Return the recurrent states at the start of an episode, without a batch axis.

        They may also be tensors. No gradient reaches a parameter that is returned here: a loss
        reads the states from the batch.
        """
        return []

    @property
    def acting_network(self) -> ModelV2:
        """The part of the model that acts."""
        return self

    @property
    def has_value_function(self) -> bool:
        """Whether the model implements `value_function`."""
        return type(self).value_function is not ModelV2.value_function

    def bind_numpy_views(self) -> None:
        """Refresh numpy views of the parameters. Called when the parameters' memory has moved."""

    @property
    def uses_numpy(self) -> bool:
        """Whether the network acts with numpy."""
        return False

    # -- learning ----------------------------------------------------------------------------------

    def compile_for_learning(self) -> None:
        """Make `from_batch` call a compiled forward.

        The compiled forward receives a plain dict of the views that acting reads: torch.compile
        does not support a batch that creates its columns on access.
        """
        compiled = torch.compile(self.forward)

        def train_forward(batch: Any, state: State, seq_lens: Any) -> Any:
            names = forward_views(self.view_requirements)
            views = {name: batch[name] for name in names if name in batch}
            if not self.has_only_known_modules:  # flowrl's networks do not read it
                views["obs_flat"] = InputDict(views)["obs_flat"]
            return compiled(views, state, seq_lens)

        object.__setattr__(self, "train_forward", train_forward)

    def from_batch(self, train_batch: Any, is_training: bool = True) -> tuple[torch.Tensor, State]:
        """Call `forward` on all rows of a train batch, including the states of its sequences.

        Args:
            train_batch: the batch that a loss receives, or a SampleBatch.
            is_training: whether dropout and similar layers are active.

        Returns:
            distribution inputs [rows, num_outputs] and the states, see `forward`.

        Raises:
            ConfigError: the outputs are not [rows, num_outputs], or states or seq_lens are
                missing.
        """
        batch = train_batch
        if isinstance(batch, SampleBatch):
            batch = TensorBatch(batch, device_of(self))
        if is_training is not self.training:
            self.train(is_training)
        num_states = len(self.get_initial_state())
        if not num_states:
            return self._train_outputs(batch, [], None)
        missing = [n for n in _state_names(num_states) if n not in batch]
        if missing:
            raise ConfigError(
                f"{type(self).__name__} has recurrent states, but the batch has no column "
                f"{missing[0]!r}"
            )
        state = [batch[name] for name in _state_names(num_states)]
        seq_lens = batch.get("seq_lens")
        if seq_lens is None:
            sequences = rows = batch.count
        else:
            sequences, rows = len(seq_lens), int(seq_lens.sum())
        if any(len(part) != sequences for part in state) or rows != batch.count:
            raise ConfigError(
                f"{type(self).__name__}: the batch has {sequences} sequences of {rows} rows in "
                f"total, but states for {[len(part) for part in state]} sequences and "
                f"{batch.count} rows"
            )
        burn_in = getattr(batch, "burn_in", None)
        if burn_in is not None:
            state = self._states_after(burn_in, state)
        return self._train_outputs(batch, state, seq_lens)

    def _train_outputs(
        self, batch: TensorBatch, state: State, seq_lens: Any
    ) -> tuple[torch.Tensor, State]:
        try:
            return self._check_outputs(self.train_forward(batch, state, seq_lens), batch.count)
        except Exception as error:
            names = acting_views(self.view_requirements)
            self._note_inputs(error, {name: batch[name] for name in names if name in batch})
            raise

    def _states_after(self, burn_in: TensorBatch, state: State) -> State:
        """Return the states after the burn-in rows. Some sequences may have no burn-in."""
        seq_lens = burn_in["seq_lens"]
        has_rows = seq_lens > 0
        state = [part.clone() for part in state]
        with torch.no_grad():
            _, new_state = self(burn_in, [part[has_rows] for part in state], seq_lens[has_rows])
        for part, new_part in zip(state, new_state, strict=True):
            part[has_rows] = new_part.to(part.dtype)
        return state

    def _check_outputs(self, result: Any, rows: int) -> tuple[torch.Tensor, State]:
        """Validate what `forward` returned; outputs become float32."""
        model = f"the model {self._network_name}"
        is_pair = isinstance(result, tuple) and len(result) == 2
        if not (is_pair and isinstance(result[1], (list, tuple))):
            raise ConfigError(
                f"{model}: forward must return (outputs, list of states), got "
                f"{_dtype_and_shape(result)}"
            )
        outputs, state = result
        if not isinstance(outputs, torch.Tensor) or not outputs.is_floating_point():
            raise ConfigError(
                f"{model}: outputs must be a tensor of floats, got {_dtype_and_shape(outputs)}"
            )
        if outputs.shape != (rows, self.num_outputs):
            raise ConfigError(
                f"{model} returned outputs of shape {list(outputs.shape)} for {rows} rows; the "
                f"action space {self.action_space} needs [{rows}, {self.num_outputs}]"
            )
        wrong = [part for part in state if not isinstance(part, torch.Tensor)]
        if wrong:
            raise ConfigError(f"{model}: states must be tensors, got {_dtype_and_shape(wrong[0])}")
        return outputs.float(), list(state)

    # -- acting ------------------------------------------------------------------------------------

    def compute_outputs(
        self, inputs: Mapping[str, Any]
    ) -> tuple[np.ndarray, np.ndarray | None, list[np.ndarray]]:
        """Evaluate the network for acting, one step of each of B rows.

        Args:
            inputs: the views as arrays [B, …].

        Returns:
            distribution inputs [B, num_outputs], values [B] (None without a value function) and
            the states after the step [B, …].
        """
        # a user's network may change its inputs
        tensors, state = self.as_tensors(inputs, copy=not self.has_only_known_modules)
        with torch.inference_mode(self.has_only_known_modules), torch.no_grad():
            if self.training:
                self.eval()
            rows = len(optree.tree_leaves(tensors["obs"])[0])
            try:
                outputs, state = self._check_outputs(self(tensors, state, None), rows)
                values = None
                if self.has_value_function:
                    values = self.checked_values(rows).float().cpu().numpy()
            except Exception as error:
                self._note_inputs(error, inputs)
                raise
        return outputs.cpu().numpy(), values, [part.cpu().numpy() for part in state]

    @cached_property
    def has_only_known_modules(self) -> bool:
        """Whether all parts are of flowrl and torch: a user's network may keep tensors of a forward
        pass for later ones with gradients, which inference mode forbids."""
        modules = (type(module).__module__ for module in self.modules())
        return all(name.startswith(("flowrl.", "torch.")) for name in modules)

    def _note_inputs(self, error: Exception, inputs: Mapping[str, Any]) -> None:
        """Add a note to an error of the network: its class, and shapes and dtypes of its inputs."""
        if not isinstance(error, ConfigError):  # those name the model
            shown = ", ".join(f"{name}: {_dtype_and_shape(v)}" for name, v in inputs.items())
            add_note(error, f"in the network {self._network_name}, whose inputs were {shown}")

    @property
    def _network_name(self) -> str:
        return type(self).__name__

    def checked_values(self, rows: int) -> torch.Tensor:
        """Return the values [rows] of the last `forward` call, checked.

        Call it in losses of policies that do not act, such as MARWIL; acting makes the same check.

        Raises:
            ConfigError: `value_function` returned something else.
        """
        values = self.value_function()
        if not isinstance(values, torch.Tensor) or values.shape != (rows,):
            got = list(values.shape) if isinstance(values, torch.Tensor) else repr(values)
            raise ConfigError(
                f"model {self.name!r} ({type(self).__name__}): value_function must return values "
                f"[rows], got {got} for {rows} rows"
            )
        return values

    def compute_values(self, inputs: Mapping[str, Any]) -> np.ndarray | None:
        """Return values [B] only; None without a value function."""
        return self.compute_outputs(inputs)[1] if self.has_value_function else None

    def as_tensors(self, inputs: Mapping[str, Any], copy: bool = False) -> tuple[InputDict, State]:
        """Convert views [B, …] to the input dict and states that `forward` takes for one step.

        Args:
            inputs: the views.
            copy: whether the tensors never share the arrays' memory.
        """
        device = device_of(self)
        tensors = InputDict()
        for name, column in inputs.items():
            tensors[name] = optree.tree_map(
                lambda leaf: as_tensor(np.array(leaf) if copy else leaf).to(device), column
            )
        return tensors, [tensors[name] for name in self._state_columns(inputs)]

    def _state_columns(self, inputs: Mapping[str, Any]) -> list[str]:
        names = _state_names(len(self.get_initial_state()))
        if not all(name in inputs for name in names):
            raise ConfigError(
                f"{type(self).__name__} has recurrent states: pass {', '.join(names)} "
                "(state_batches of compute_actions; get_initial_state() at the start of an "
                "episode), or use policy.session()"
            )
        return names


def check_views(views: Any, network: str) -> None:
    """Check the `view_requirements` of a network.

    Raises:
        ConfigError: they are not a dict of names and ViewRequirements.
    """
    valid = isinstance(views, Mapping) and all(
        isinstance(view, ViewRequirement) for view in views.values()
    )
    if not valid:
        raise ConfigError(
            f"{network}.view_requirements must be a dict: name -> ViewRequirement, got {views!r}"
        )


def _dtype_and_shape(value: Any) -> str:
    """Return the dtypes and shapes of an array, a tensor or a nest of them, as text."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k!r}: {_dtype_and_shape(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        parts = ", ".join(map(_dtype_and_shape, value))
        return f"a list [{parts}]" if isinstance(value, list) else f"({parts})"
    dtype = str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")
    return f"{dtype} {list(np.shape(value))}"


def _state_names(count: int) -> list[str]:
    return [f"state_in_{i}" for i in range(count)]


def last_features(features: torch.Tensor | None) -> torch.Tensor:
    """Return what the last forward pass has computed.

    Raises:
        RuntimeError: there was none.
    """
    if features is None:
        raise RuntimeError(
            "value_function() returns the values of the last forward pass, but there was none: "
            "call from_batch(batch) first"
        )
    return features


def is_float32_on_cpu(module: nn.Module) -> bool:
    """Return whether all parameters are float32 on the CPU."""
    return all(p.device.type == "cpu" and p.dtype == torch.float32 for p in module.parameters())
