"""Matrix products by numpy's or torch's library."""

import warnings

import numpy as np
import pytest

from flowrl.algorithms.ppo import PPOConfig
from flowrl.policies.models import matrix_products
from flowrl.policies.models.matrix_products import (
    MIN_TORCH_SIZE,
    faster_library,
    matmul_for,
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
    ("numpy_s", "torch_s", "faster"),
    [(1.0, 2.0, "numpy"), (1.0, 1.25, "numpy"), (1.0, 1.1, "torch"), (2.0, 1.0, "torch")],
)
def test_the_faster_library_is_measured(monkeypatch, numpy_s, torch_s, faster):
    now, calls = 0.0, 0

    def takes(seconds):
        def matmul(a, b, out):
            nonlocal now, calls
            calls += 1
            now += seconds * (1 if calls % 5 else 10)  # other processes make some calls slower

        return matmul

    monkeypatch.setattr(matrix_products.time, "perf_counter", lambda: now)
    monkeypatch.setattr(matrix_products.np, "dot", takes(numpy_s))
    monkeypatch.setattr(matrix_products, "torch_matmul", takes(torch_s))
    assert faster_library.__wrapped__() == faster


def test_the_library_is_fixed_when_the_algorithm_is_built():
    assert matmul_for("numpy") is np.dot
    assert matmul_for("torch") is torch_matmul
    assert matmul_for("auto") is matmul_for(faster_library())
    for chosen in ("auto", "numpy", "torch"):
        config = PPOConfig(env="CartPole-v1", model={"matrix_products": chosen})
        fixed = config.completed().model.matrix_products
        assert fixed == (faster_library() if chosen == "auto" else chosen)
