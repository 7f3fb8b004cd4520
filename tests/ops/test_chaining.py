"""Operators that are chained with the wrong method are rejected when they are chained."""

import inspect

import pytest

import flowrl.ops
from flowrl.iter import LocalIterator, from_range
from flowrl.ops import ConcatBatches, MixInReplay, OncePerTimeInterval, SelectExperiences

ONE_OF_EACH = [
    (SelectExperiences(["a"]), "for_each", "one item for each item"),
    (ConcatBatches(64), "combine", "a list of items for each item"),
    (MixInReplay(4, 1), "combine", "a list of items for each item"),
    (OncePerTimeInterval(1.0), "filter", "whether to keep an item"),
]


@pytest.mark.parametrize("stream", [LocalIterator([]), from_range(2, in_process=True)])
@pytest.mark.parametrize(("operator", "method", "result"), ONE_OF_EACH)
def test_wrong_method_is_rejected_with_the_right_one(stream, operator, method, result):
    for wrong in {"for_each", "combine", "filter"} - {method}:
        with pytest.raises(TypeError) as caught:
            getattr(stream, wrong)(operator)
        name = type(operator).__name__
        assert str(caught.value).startswith(f"{wrong}({name}): {name} returns {result}, so it must")
        assert f".{method}({name}(" in str(caught.value)
    getattr(stream, method)(operator)


def test_class_instead_of_an_operator_is_rejected():
    with pytest.raises(TypeError, match=r"combine\(ConcatBatches\) needs an operator, not its"):
        LocalIterator([]).combine(ConcatBatches)


def test_functions_and_other_operators_may_be_chained_with_any_method():
    stream = LocalIterator([1, 2]).for_each(lambda x: [x]).combine(lambda x: x)
    assert list(stream.filter(lambda x: x > 1)) == [2]


def test_each_operator_names_its_method():
    """The first word of an operator's docstring is its method."""
    for name in flowrl.ops.__all__:
        operator = getattr(flowrl.ops, name)
        word = (inspect.getdoc(operator) or "").split(",")[0]
        if inspect.isclass(operator) and word in ("for_each", "combine", "filter"):
            assert operator.chained_with == word, name
