"""Comparisons of nested values, and of results without what depends on time."""

import json

import numpy as np

TIMES = ("time", "throughput", "sampler_", "diagnosis")
_OTHERS = ("timestep", "lifetime")  # contain "time"


def assert_same(tree, expected):
    """Check that two nested values have the same types, keys in the same order, and values."""
    assert type(tree) is type(expected)
    if isinstance(tree, dict):
        assert list(tree) == list(expected)
        for key in tree:
            assert_same(tree[key], expected[key])
    elif isinstance(tree, (list, tuple)):
        assert len(tree) == len(expected)
        for leaf, expected_leaf in zip(tree, expected, strict=True):
            assert_same(leaf, expected_leaf)
    elif isinstance(tree, np.ndarray):
        assert tree.dtype == expected.dtype
        assert tree.shape == expected.shape
        np.testing.assert_array_equal(tree, expected)
    else:  # NaN differs from itself
        assert tree == expected or (tree != tree and expected != expected)


def without_times(result):
    """Return name -> text of the values of a result, without those that depend on time."""
    tree = json.loads(json.dumps(result, default=str))
    return {name: value for name, value in _flatten(tree) if not _is_timed(name)}


def _is_timed(name):
    for word in _OTHERS:
        name = name.replace(word, "")
    return any(word in name for word in TIMES)


def _flatten(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", repr(value)
