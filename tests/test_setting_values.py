"""Comparison of setting values."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from flowrl.algorithms.ppo import PPOConfig
from flowrl.policies.config import ModelConfig
from flowrl.policies.policy_spec import PolicySpec
from flowrl.setting_values import equal, equal_code

SOURCE = """
class Network:
    pass

def make(size=1):
    return {body}
"""


@dataclass(slots=True)
class Slotted:
    value: object


def executed(body="size"):
    names = {"__name__": "plan_file"}
    exec(SOURCE.format(body=body), names)
    return names["Network"], names["make"]


@pytest.mark.parametrize(
    "value_of",
    [
        lambda network, make: network,
        lambda network, make: make,
        lambda network, make: partial(make, size=2),
        lambda network, make: ModelConfig(custom_model=network),
        lambda network, make: {"a": [make, (network, 1)]},
        lambda network, make: PPOConfig(env=make).env,
        lambda network, make: PolicySpec(policy_class=network),
        lambda network, make: Slotted(make),
    ],
)
def test_code_of_two_executions_of_a_file_is_equal(value_of):
    one, two = value_of(*executed()), value_of(*executed())
    assert equal_code(one, two)
    assert not equal(one, two)


@pytest.mark.parametrize(
    "value_of",
    [
        lambda make: make,
        lambda make: partial(make, size=2),
        lambda make: {"a": [make]},
    ],
)
def test_code_that_has_changed_differs(value_of):
    assert not equal_code(value_of(executed()[1]), value_of(executed("size + 1")[1]))


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (partial(int, "1"), partial(int, "2")),
        (partial(int), partial(int, "1")),
        (ModelConfig(), ModelConfig(fcnet_hiddens=[8])),
        ({"a": 1}, {"b": 1}),
        ([1], [1, 2]),
        ([1], (1,)),
        (np.zeros(2), np.zeros(3)),
        (int, float),
        (Slotted(1), Slotted(2)),
    ],
)
def test_different_values_are_not_equal(one, two):
    assert not equal_code(one, two)
    assert not equal(one, two)


class Makes:
    def __init__(self, size):
        self.size = size

    def make(self):
        return self.size


def capturing(size):
    return lambda: size


def with_default(size):
    def make(size=size):
        return size

    return make


def local_class(size):
    class Local:
        value = size

        @property
        def doubled(self):
            return 2 * self.value

        @staticmethod
        def area(width=size):
            return width * size

    return Local


def mutual(size):
    def one(n):
        return other(n - 1) if n else size

    def other(n):
        return one(n)

    return one


def random_stream_in(seed):
    stream = np.random.default_rng(seed)
    return lambda: stream.random()


@pytest.mark.parametrize(
    "code", [capturing, with_default, local_class, mutual, lambda n: Makes(n).make]
)
def test_code_with_other_values_differs(code):
    assert not equal_code(code(1), code(2))


@pytest.mark.parametrize(
    "code",
    [
        capturing,
        with_default,
        local_class,
        mutual,
        random_stream_in,
        lambda n: Makes(n).make,
        lambda n: capturing(Makes(n)),
        lambda n: local_class(Makes(n)),
    ],
)
def test_code_with_equal_values_is_equal(code):
    assert equal_code(code(1), code(1))


@pytest.mark.parametrize("value", [1, "text", None, [1, {"a": 2.0}], np.arange(3), int])
def test_value_is_equal_to_itself(value):
    assert equal_code(value, value)
    assert equal(value, value)
