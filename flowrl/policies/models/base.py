"""ModelV2: what a policy asks of a network."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import optree
import torch
from gymnasium import spaces
from torch import nn

from flowrl.data import SampleBatch
from flowrl.data.indexed_columns import IndexedColumn
from flowrl.data.sequences import without_masked_rows
from flowrl.policies.config import ModelConfig
from flowrl.policies.views import ViewRequirement
from flowrl.settings import ConfigError

State = list[torch.Tensor]


class Inputs(dict[str, Any]):
    """Columns as tensors [rows, …]; `obs_flat` [rows, features] is made when it is asked for."""

    def __missing__(self, key: str) -> Any:
        if key != "obs_flat":
            raise KeyError(f"no column {key!r} in the model's input, only {sorted(self)}")
        leaves: Any = optree.tree_leaves(self["obs"])
        flat = [leaf.reshape(leaf.shape[0], -1).to(torch.float32) for leaf in leaves]
        self[key] = made = flat[0] if len(flat) == 1 else torch.cat(flat, 1)
        return made


class TensorBatch(Inputs):
    """Columns of a SampleBatch as tensors that share its memory, made when first read.

    Rows that are not to be learned from (`loss_mask` False: padding, the burn-in of sequences) are
    left out of every column, and sequences are as long as what is left of them.

    Args:
        batch: the rows.
        device: where the tensors are.

    Attributes:
        warmup: the burn-in of the sequences as a batch of its own, or None.
    """

    def __init__(self, batch: SampleBatch, device: torch.device | str = "cpu"):
        super().__init__()
        self.warmup: TensorBatch | None = None
        self.device = torch.device(device)
        self._on_cpu = self.device.type == "cpu"
        if dict.__contains__(batch, "loss_mask"):
            batch, before = without_masked_rows(batch)
            if before is not None:
                self.warmup = TensorBatch(before, device)
        self._batch = batch

    @property
    def count(self) -> int:
        """Rows to learn from."""
        return self._batch.count

    def __missing__(self, key: str) -> Any:
        if key == "obs_flat":
            return super().__missing__(key)
        column: Any = self._batch[key]
        made: Any
        if isinstance(column, np.ndarray):
            if column.dtype == object:
                raise TypeError(f"column {key!r} holds objects, which have no tensor")
            made = self._placed(column)
        else:
            made = optree.tree_map(self._placed, column)
        self[key] = made
        return made

    def array(self, key: str) -> Any:
        """A column as it is in the batch: numpy."""
        return self._batch[key]

    def rows_of(self, key: str, index: np.ndarray) -> Any:
        """Some rows of a column, numpy: of one that is stored as positions no others are made."""
        if key not in self._batch:
            raise KeyError(key)
        column = dict.get(self._batch, key)
        if column is None or (isinstance(column, IndexedColumn) and column.is_lazy):
            column = self._batch[key]
        return optree.tree_map(lambda leaf: np.asarray(leaf[index]), column)

    def _placed(self, leaf: Any) -> torch.Tensor:
        made = _tensor(leaf)
        return made if self._on_cpu else made.to(self.device)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self._batch

    def keys(self) -> Any:
        """The columns' names, whether they have been read or not."""
        return dict.fromkeys([*self._batch, *super().keys()]).keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def __bool__(self) -> bool:
        return True

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default


def exact(features: torch.Tensor) -> Any:
    """In this context arithmetic is float32 though the network's is not: bfloat16 has three digits,
    too few for values."""
    kind = features.device.type
    if not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, enabled=False)


def device_of(module: nn.Module) -> torch.device:
    """Where a module's parameters are."""
    return next((p.device for p in module.parameters()), torch.device("cpu"))


class ModelV2(nn.Module):
    """A network that a TorchPolicy acts and learns with.

    A subclass writes `forward` and, if it has values, `value_function`. What it wants to see of the
    trajectory besides the observation it puts into `view_requirements` in its constructor; one that
    remembers writes `get_initial_state`, too (see RecurrentNetwork).

    Args:
        obs_space, action_space: of one agent.
        num_outputs: inputs of the action distribution.
        model_config: the settings.
        name: of the model.
    """

    _learning: Any

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
        object.__setattr__(self, "_learning", self)  # no submodule of its own
        self.view_requirements: dict[str, ViewRequirement] = {
            "obs": ViewRequirement(space=obs_space)
        }

    def forward(
        self, input_dict: Mapping[str, Any], state: State, seq_lens: torch.Tensor | None
    ) -> tuple[torch.Tensor, State]:
        """Distribution inputs of rows.

        Args:
            input_dict: the views, tensors [rows, …] each (nested ones of nested spaces), by name;
                `obs_flat` is the observation flattened to [rows, features].
            state: `state_in_0`, … as they were before each sequence, [sequences, …] each.
            seq_lens: rows of each sequence [sequences], int; one after another, they are all the
                rows, without padding. None if each row is a sequence of its own, as when acting, or
                the model has no states.

        Returns:
            distribution inputs [rows, num_outputs]; the states: after each sequence's last row
            [sequences, …]; or, of a model whose views look back on several, after each row.
        """
        raise NotImplementedError(f"{type(self).__name__} has no forward(): write one")

    def value_function(self) -> torch.Tensor:
        """Values [rows] of the rows that `forward` was last called with."""
        raise NotImplementedError(f"{type(self).__name__} has no value_function(): write one")

    def get_initial_state(self) -> list[np.ndarray]:
        """What the model remembers at an episode's start, without the batch axis."""
        return []

    @property
    def has_value_function(self) -> bool:
        """Whether there is a value function."""
        return type(self).value_function is not ModelV2.value_function

    def link_numpy(self) -> None:
        """The parameters' memory has moved."""

    # -- learning ----------------------------------------------------------------------------------

    def compile_for_learning(self) -> None:
        """Let `from_batch` call a compiled forward, on the model's views alone: a batch that makes
        its columns when they are read cannot be compiled."""
        compiled = torch.compile(self.forward)

        def learning(batch: Any, state: State, seq_lens: Any) -> Any:
            views = {name: batch[name] for name in self.view_requirements if name in batch}
            return compiled({**views, "obs_flat": Inputs(views)["obs_flat"]}, state, seq_lens)

        object.__setattr__(self, "_learning", learning)

    def from_batch(self, train_batch: Any, is_training: bool = True) -> tuple[torch.Tensor, State]:
        """`forward` on all rows of a train batch, the states of its sequences included.

        Args:
            train_batch: the batch that a loss is given, or a SampleBatch.
            is_training: whether dropout and the like are on.

        Raises:
            ConfigError: the outputs are not [rows, num_outputs]; states or seq_lens are missing.
        """
        batch = train_batch
        if isinstance(batch, SampleBatch):
            batch = TensorBatch(batch, device_of(self))
        if is_training is not self.training:
            self.train(is_training)
        count = len(self.get_initial_state())
        if not count:
            return self._checked(self._learning(batch, [], None), batch.count)
        missing = [n for n in _state_names(count) if n not in batch]
        if missing:
            raise ConfigError(
                f"{type(self).__name__} remembers, but the batch has no column {missing[0]!r}"
            )
        state = [batch[name] for name in _state_names(count)]
        lens = batch.get("seq_lens")
        sequences, rows = (batch.count,) * 2 if lens is None else (len(lens), int(lens.sum()))
        if any(len(part) != sequences for part in state) or rows != batch.count:
            raise ConfigError(
                f"{type(self).__name__}: {sequences} sequences of {rows} rows in all, but there "
                f"are states for {[len(part) for part in state]} and {batch.count} rows"
            )
        warmup = getattr(batch, "warmup", None)
        if warmup is not None:
            state = self._warmed_up(warmup, state)
        return self._checked(self._learning(batch, state, lens), batch.count)

    def _warmed_up(self, warmup: TensorBatch, state: State) -> State:
        """The states after the burn-in rows; sequences may have none."""
        lens = warmup["seq_lens"]
        some = lens > 0
        state = [part.clone() for part in state]
        with torch.no_grad():
            _, after = self(warmup, [part[some] for part in state], lens[some])
        for part, own in zip(state, after, strict=True):
            part[some] = own.to(part.dtype)
        return state

    def _checked(self, made: Any, rows: int) -> tuple[torch.Tensor, State]:
        """What `forward` gave, if it can be used."""
        who = f"model {self.name!r} ({type(self).__name__})"
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], (list, tuple))):
            raise ConfigError(f"{who}: forward gives (outputs, list of states), it gave {made!r}")
        outputs, state = made
        if not isinstance(outputs, torch.Tensor) or not outputs.is_floating_point():
            raise ConfigError(f"{who}: outputs are a tensor of floats, forward gave {outputs!r}")
        if outputs.shape != (rows, self.num_outputs):
            raise ConfigError(
                f"{who} gave outputs of shape {list(outputs.shape)} for {rows} rows; the action "
                f"space {self.action_space} needs [{rows}, {self.num_outputs}]"
            )
        return outputs.float(), list(state)

    # -- acting ------------------------------------------------------------------------------------

    def compute_outputs(
        self, inputs: Mapping[str, Any]
    ) -> tuple[np.ndarray, np.ndarray | None, list[np.ndarray]]:
        """Distribution inputs [B, num_outputs], values [B] and states [B, …] of one step each.

        Args:
            inputs: the views as arrays [B, …].
        """
        tensors, state = self.as_tensors(inputs)
        with torch.inference_mode():
            if self.training:
                self.eval()
            rows = len(optree.tree_leaves(tensors["obs"])[0])
            outputs, state = self._checked(self(tensors, state, None), rows)
            values = self._checked_values(rows) if self.has_value_function else None
        return outputs.cpu().numpy(), values, [part.cpu().numpy() for part in state]

    def _checked_values(self, rows: int) -> np.ndarray:
        values = self.value_function()
        if not isinstance(values, torch.Tensor) or values.shape != (rows,):
            told = list(values.shape) if isinstance(values, torch.Tensor) else repr(values)
            raise ConfigError(
                f"model {self.name!r} ({type(self).__name__}): value_function gives values [rows], "
                f"it gave {told} for {rows} rows"
            )
        return values.float().cpu().numpy()

    def compute_values(self, inputs: Mapping[str, Any]) -> np.ndarray | None:
        """Values [B] alone; None if there is no value function."""
        return self.compute_outputs(inputs)[1] if self.has_value_function else None

    def as_tensors(self, inputs: Mapping[str, Any]) -> tuple[Inputs, State]:
        """What `forward` is given for one step of each of B rows, from views as arrays [B, …]."""
        device = device_of(self)
        tensors = Inputs()
        for name, column in inputs.items():
            tensors[name] = optree.tree_map(lambda leaf: _tensor(leaf).to(device), column)
        return tensors, [tensors[name] for name in self._states_in(inputs)]

    def _states_in(self, inputs: Mapping[str, Any]) -> list[str]:
        names = _state_names(len(self.get_initial_state()))
        if not all(name in inputs for name in names):
            raise ConfigError(
                f"{type(self).__name__} remembers: give it {', '.join(names)} (state_batches of "
                "compute_actions; at an episode's start get_initial_state()), or use "
                "policy.session()"
            )
        return names


def _tensor(column: Any) -> torch.Tensor:
    column = np.asarray(column)
    if not column.flags.writeable:
        column = column.copy()  # torch has no read-only tensors (batches from Ray are)
    return torch.from_numpy(column)


def _state_names(count: int) -> list[str]:
    return [f"state_in_{i}" for i in range(count)]


class ModuleModel(ModelV2):
    """Any torch.nn.Module as a model.

    Its forward gets the observations [rows, …]; if it has `view_requirements`, a dict of all its
    views. It gives distribution inputs [rows, num_outputs], or those and values [rows].
    """

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.module = module
        own = getattr(module, "view_requirements", None)
        self._wants_views = own is not None
        self.view_requirements |= own or {}
        self._values: torch.Tensor | None = None
        self._gives_values: bool | None = None

    def forward(
        self, input_dict: Mapping[str, Any], state: State, seq_lens: torch.Tensor | None
    ) -> tuple[torch.Tensor, State]:
        made = self.module(input_dict if self._wants_views else input_dict["obs"])
        if isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], torch.Tensor):
            outputs, self._values = made
            if self._values.dim() == 2:
                self._values = self._values.squeeze(-1)
        else:
            outputs, self._values = made, None
        self._gives_values = self._values is not None
        return outputs, state

    @property
    def has_value_function(self) -> bool:
        return bool(self._gives_values)

    def compute_values(self, inputs: Mapping[str, Any]) -> np.ndarray | None:
        return self.compute_outputs(inputs)[1]  # which tells whether there are any

    def value_function(self) -> torch.Tensor:
        if self._values is None:
            raise ConfigError(
                f"{type(self.module).__name__} gives no values: its forward must give (outputs, "
                "values) to learn with a value function"
            )
        return self._values
