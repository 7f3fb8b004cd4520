"""Matrix products of float32 arrays by numpy's or torch's library, whichever is faster here."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from flowrl.policies.models.tensor_batch import as_tensor

Matmul = Callable[..., np.ndarray]
"""(a [m, k], b [k, n], out=[m, n]) -> out, the matrix product of a and b."""

MIN_TORCH_SIZE = 2**20  # m k n; below, the overhead of a torch call exceeds the gain


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
    """Return the library whose large products are faster on this processor: torch's on Intel's.

    torch has Intel's MKL, numpy has OpenBLAS (`benchmarks/train_sac.py` compares both). The choice
    does not depend on a measurement, so that repeated runs make the same products.
    """
    file = Path("/proc/cpuinfo")
    name = file.read_text() if file.exists() else platform.processor()
    return "torch" if "Intel" in name else "numpy"
