"""ModuleModel: any torch.nn.Module as a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from flowrl.errors import ConfigError
from flowrl.policies.models.base import NEEDS_NO_VALUES, ModelV2, State, check_views


class ModuleModel(ModelV2):
    """Wrap any torch.nn.Module.

    The module's forward receives the observations [rows, …], or a dict of all views if the module
    has the attribute `view_requirements`. It returns distribution inputs [rows, num_outputs], or
    a tuple of those and values [rows] or [rows, 1].

    Args:
        module: the network.
        args, kwargs: arguments of ModelV2.
    """

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.module = module
        views: Any = getattr(module, "view_requirements", None)
        check_views(views or {}, type(module).__name__)
        self._takes_views = views is not None
        self.view_requirements |= views or {}
        self._values: torch.Tensor | None = None
        self._returns_values: bool | None = None  # known after the first forward pass

    def forward(
        self, input_dict: Mapping[str, Any], state: State, seq_lens: torch.Tensor | None
    ) -> tuple[torch.Tensor, State]:
        result = self.module(input_dict if self._takes_views else input_dict["obs"])
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], torch.Tensor):
            outputs, self._values = result
            if self._values.dim() == 2:
                self._values = self._values.squeeze(-1)
            if isinstance(outputs, torch.Tensor) and self._values.shape != outputs.shape[:1]:
                raise ConfigError(
                    f"{type(self.module).__name__}: forward must return (outputs, values) with "
                    f"values [rows], got {list(result[1].shape)} for {len(outputs)} rows"
                )
        else:
            outputs, self._values = result, None
        self._returns_values = self._values is not None
        return outputs, state

    @property
    def _network_name(self) -> str:
        received = "a dict of views" if self._takes_views else "obs, not a dict of views"
        return f"{type(self.module).__name__} (its forward receives {received})"

    @property
    def has_value_function(self) -> bool:
        return bool(self._returns_values)

    def compute_values(self, inputs: Mapping[str, Any]) -> np.ndarray | None:
        return self.compute_outputs(inputs)[1]  # the forward pass finds out whether there are any

    def value_function(self) -> torch.Tensor:
        if self._values is None:
            raise ConfigError(
                f"{type(self.module).__name__} returns no values: its forward must return "
                f"(outputs, values) to learn with a value function{NEEDS_NO_VALUES}"
            )
        return self._values
