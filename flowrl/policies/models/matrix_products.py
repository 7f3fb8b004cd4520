"""Matrix products of float32 arrays by numpy's or torch's library, whichever is faster here.

Which one is faster depends on the processor: the two libraries have kernels for different ones.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch

from flowrl.policies.models.tensor_batch import as_tensor

Matmul = Callable[..., np.ndarray]
"""(a [m, k], b [k, n], out=[m, n]) -> out, the matrix product of a and b."""

MIN_TORCH_SIZE = 2**20  # m k n; below, the overhead of a torch call exceeds the gain
MIN_NUMPY_ADVANTAGE = 1.2  # numpy must be this many times as fast as torch to be chosen


def matmul_for(library: Literal["auto", "numpy", "torch"]) -> Matmul:
    """Return the function that multiplies matrices with a library; "auto" selects the faster."""
    if library == "auto":
        library = faster_library()
    return np.dot if library == "numpy" else torch_matmul


def torch_matmul(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Write the product of a [m, k] and b [k, n] into `out` [m, n], by torch unless it is small."""
    if a.size * b.shape[1] < MIN_TORCH_SIZE:
        return np.dot(a, b, out=out)
    torch.mm(as_tensor(a), as_tensor(b), out=torch.from_numpy(out))
    return out


@functools.cache
def faster_library() -> Literal["numpy", "torch"]:
    """Measure the products of a layer of 256 x 256 with 256 rows (15 ms), once per process.

    Equally fast libraries always give torch, so that repeated runs make the same choice.
    """
    rng = np.random.default_rng(0)
    inputs, weight, out = (rng.standard_normal((256, 256), dtype=np.float32) for _ in range(3))
    products = [(inputs, weight), (inputs, weight.T), (inputs.T, weight)]
    numpy_s = torch_s = 0.0
    for a, b in products:
        times: dict[Matmul, list[float]] = {np.dot: [], torch_matmul: []}
        for _ in range(12):  # alternately; the first calls load the kernels
            for matmul, seconds in times.items():
                started = time.perf_counter()
                matmul(a, b, out=out)
                seconds.append(time.perf_counter() - started)
        numpy_s += min(times[np.dot])
        torch_s += min(times[torch_matmul])
    return "numpy" if torch_s > MIN_NUMPY_ADVANTAGE * numpy_s else "torch"
