"""Networks that act for a network on a GPU: CPUCopy for small ones, CapturedForward for images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import optree
import torch

from flowrl.policies.cuda_graphs import (
    ColumnBuffer,
    CudaGraph,
    can_repeat_forward,
    make_stream,
    try_to_capture,
)
from flowrl.policies.learning.flat_parameters import FlatParameters
from flowrl.policies.models.base import ModelV2
from flowrl.policies.models.fcnet import FullyConnectedNetwork
from flowrl.policies.models.recurrent import RecurrentNetwork
from flowrl.policies.models.torso import TorsoNetwork

MAX_GRAPHS = 4  # CUDA graphs that are kept, one per number of rows
MAX_CPU_PARAMETERS = 500_000  # copying more of them after each update takes longer than the GPU


class ActingModel(Protocol):
    """The methods of a ModelV2 with which a policy acts."""

    def compute_outputs(
        self, inputs: Mapping[str, Any]
    ) -> tuple[np.ndarray, np.ndarray | None, list[np.ndarray]]: ...
    def compute_values(self, inputs: Mapping[str, Any]) -> np.ndarray | None: ...


class CPUCopy:
    """A copy on the CPU of a small network that learns on a GPU.

    For the few rows of a step numpy is faster than launching each layer on the GPU and waiting for
    the outputs.

    Args:
        model: the network on the CPU, which acts with numpy.
        source: the parameters on the GPU, of a network with the same parameters.
    """

    def __init__(self, model: ModelV2, source: FlatParameters):
        self._model, self._source = model, source
        self._own = FlatParameters(model)
        self._part = self._own.part(model.acting_network.parameters())
        self._version: int | None = None
        model.eval().bind_numpy_views()

    def forget(self) -> None:
        """Copy the weights before the next use."""
        self._version = None

    def with_weights_of(self, version: int) -> ModelV2:
        """Return the network; copy the weights if it has those of another version."""
        if version != self._version:
            part = self._part
            self._own.vector.data[part].copy_(self._source.vector.data[part])
            self._version = version
        return self._model


class CapturedForward:
    """Evaluates a network on a GPU, as one CUDA graph for each number of rows.

    Args:
        model: a TorsoNetwork on a GPU.
    """

    def __init__(self, model: ModelV2):
        self._model = model
        self._device = next(model.parameters()).device
        self._graphs: dict[int, _Forward | None] = {}  # None before the second call
        self._can_capture = True

    def compute_outputs(
        self, inputs: Mapping[str, Any]
    ) -> tuple[np.ndarray, np.ndarray | None, list[np.ndarray]]:
        """See ModelV2."""
        leaves: Any = optree.tree_leaves(inputs["obs"])
        rows = len(leaves[0])
        graph = self._graphs.get(rows)
        if graph is not None and graph.buffer.load(inputs):
            return (*graph.replay(), [])
        result = self._model.compute_outputs(inputs)  # which checks the inputs
        if self._can_capture and graph is None:
            if rows in self._graphs:
                self._graphs[rows] = try_to_capture(
                    f"the network {type(self._model).__name__}",
                    lambda: _Forward(self._model, inputs, self._device),
                )
                self._can_capture = self._graphs[rows] is not None
            elif len(self._graphs) < MAX_GRAPHS:
                self._graphs[rows] = None
        return result

    def compute_values(self, inputs: Mapping[str, Any]) -> np.ndarray | None:
        """See ModelV2."""
        return self.compute_outputs(inputs)[1]


class _Forward:
    """The graph of a forward pass for a number of rows."""

    def __init__(self, model: ModelV2, inputs: Mapping[str, Any], device: torch.device):
        self.buffer = ColumnBuffer(inputs, ["obs"], device)
        self.buffer.load(inputs)
        self._has_values = model.has_value_function

        def forward() -> torch.Tensor:
            with torch.no_grad():
                outputs = model(self.buffer.columns, [], None)[0].float()
                if not self._has_values:
                    return outputs
                return torch.cat([outputs, model.value_function().float()[:, None]], 1)

        self._graph = CudaGraph(make_stream(device), forward, forward)

    def replay(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the outputs [B, num_outputs] and the values [B]."""
        self._graph.replay()
        result = self._graph.outputs.cpu().numpy()
        return (result[:, :-1], result[:, -1]) if self._has_values else (result, None)


def make_acting_model(policy: Any) -> CPUCopy | CapturedForward | None:
    """Return what acts for the policy's network; None if the network acts itself."""
    model: ModelV2 = policy.model
    if policy.device.type == "cpu":
        return None
    network = model.acting_network
    size = sum(parameter.numel() for parameter in network.parameters())
    if type(network) in (FullyConnectedNetwork, RecurrentNetwork) and size <= MAX_CPU_PARAMETERS:
        on_cpu: Any = policy.make_model()
        copied = CPUCopy(on_cpu, policy.flat)
        return copied if on_cpu.acting_network.uses_numpy else None
    is_captured = (
        policy.config.cuda_graphs and type(model) is TorsoNetwork and can_repeat_forward(model)
    )
    return CapturedForward(model) if is_captured else None
