"""Matrix products by numpy's or torch's library."""

import warnings

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from flowrl.policies.config import ModelConfig
from flowrl.policies.models import matrix_products
from flowrl.policies.models.fcnet import FullyConnectedNetwork
from flowrl.policies.models.matrix_products import (
    MIN_TORCH_SIZE,
    faster_library,
    torch_matmul,
)


@pytest.mark.parametrize("sizes", [(1, 4, 3), (256, 23, 256), (256, 256, 256), (300, 257, 129)])
@pytest.mark.parametrize("transposed", ["", "a", "b"])
def test_torch_matmul_equals_numpy(sizes, transposed):
    m, k, n = sizes
    rng = np.random.default_rng(0)
    a = rng.standard_normal((k, m) if transposed == "a" else (m, k), dtype=np.float32)
    b = rng.standard_normal((n, k) if transposed == "b" else (k, n), dtype=np.float32)
    for array in (a, b):
        array.flags.writeable = False  # as arrays of Ray are
    a, b = a.T if transposed == "a" else a, b.T if transposed == "b" else b
    out = np.full((m, n), np.nan, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch_matmul(a, b, out=out) is out
    exact = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(out, exact, rtol=1e-4, atol=1e-4)


def test_torch_multiplies_only_large_matrices(monkeypatch):
    calls = []
    monkeypatch.setattr(matrix_products.torch, "mm", lambda a, b, out: calls.append(a.shape))
    for rows in (MIN_TORCH_SIZE // 64 // 64 - 1, MIN_TORCH_SIZE // 64 // 64):
        a, b = np.zeros((rows, 64), np.float32), np.zeros((64, 64), np.float32)
        torch_matmul(a, b, out=np.empty((rows, 64), np.float32))
    assert calls == [(256, 64)]


@pytest.mark.parametrize(
    ("vendor", "faster"), [("GenuineIntel", "torch"), ("AuthenticAMD", "numpy"), ("arm", "numpy")]
)
def test_the_faster_library_depends_on_the_processor(monkeypatch, vendor, faster):
    class CpuInfo:
        def __init__(self, path):
            assert path == "/proc/cpuinfo"

        def exists(self):
            return vendor != "arm"

        def read_text(self):
            return f"vendor_id\t: {vendor}\n"

    monkeypatch.setattr(matrix_products, "Path", CpuInfo)
    monkeypatch.setattr(matrix_products.platform, "processor", lambda: vendor)
    assert faster_library.__wrapped__() == faster


@pytest.mark.parametrize("library", ["auto", "numpy", "torch"])
def test_networks_multiply_with_the_library_of_their_settings(library):
    config = ModelConfig(matrix_products=library)
    network = FullyConnectedNetwork(Box(-1, 1, (3,)), Discrete(2), 2, config)
    chosen = faster_library() if library == "auto" else library
    assert network.matmul is {"numpy": np.dot, "torch": torch_matmul}[chosen]
