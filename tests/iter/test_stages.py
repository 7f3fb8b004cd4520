"""Every stage passes one conformance check; chains mean what lists mean."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.iter import NOT_READY, LocalIterator, Stage, from_items


class Fitful(Stage):
    """Items with NOT_READY in between, for stages that must pass it on."""

    kind = "fitful"

    def __init__(self, items):
        super().__init__()
        self.script = [x for item in items for x in (NOT_READY, item)]
        self.pulls = 0

    def pull(self, block):
        self.pulls += 1
        if not self.script:
            raise StopIteration
        return self.script.pop(0)


def fail_on(bad):
    def fn(x):
        if x == bad:
            raise ValueError("bad item")
        return x

    return fn


STAGES = {
    "for_each": (lambda it: it.for_each(lambda x: x + 1), [2, 3, 4, 5]),
    "filter": (lambda it: it.filter(lambda x: x % 2 == 0), [2, 4]),
    "combine": (lambda it: it.combine(lambda x: [x] * (x - 1)), [2, 3, 3, 4, 4, 4]),
    "batch": (lambda it: it.batch(3), [[1, 2, 3], [4]]),
    "flatten": (lambda it: it.for_each(lambda x: [x, x]).flatten(), [1, 1, 2, 2, 3, 3, 4, 4]),
    "zip_with_source": (lambda it: it.zip_with_source(), [((), i) for i in (1, 2, 3, 4)]),
    "union": (lambda it: it.union(LocalIterator([9])), [1, 9, 2, 3, 4]),
}


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_is_lazy_passes_not_ready_and_ends(name):
    build, expected = STAGES[name]
    source = Fitful([1, 2, 3, 4])
    iterator = build(LocalIterator(source))
    assert source.pulls == 0
    assert iterator.explain()
    assert source.pulls == 0
    seen = []
    for _ in range(50):
        try:
            item = iterator.stage.pull(False)
        except StopIteration:
            break
        if item is not NOT_READY:
            seen.append(item)
    else:
        pytest.fail("the stage did not end")
    assert sorted(map(repr, seen)) == sorted(map(repr, expected))
    with pytest.raises(StopIteration):
        iterator.stage.pull(False)


@pytest.mark.parametrize("name", ["for_each", "filter", "combine"])
def test_an_error_in_an_operator_leaves_the_stream_usable(name):
    fn = fail_on(2)
    operator = {"for_each": fn, "filter": fn, "combine": lambda x: [fn(x)]}[name]
    iterator = getattr(LocalIterator([1, 2, 3]), name)(operator).for_each(lambda x: x)
    assert next(iterator) == 1
    with pytest.raises(ValueError, match="bad item") as caught:
        next(iterator)
    note = "".join(caught.value.__notes__)
    assert f"for_each(<lambda>) › {name}(" in note
    assert "test_stages.py:" in note
    assert "int 2" in note
    assert list(iterator) == [3]


def test_a_stop_iteration_from_an_operator_is_an_error_not_the_end():
    def ends(x):
        raise StopIteration

    with pytest.raises(RuntimeError, match="raised StopIteration"):
        next(LocalIterator([1]).for_each(ends))


def test_state_goes_into_a_fresh_plan():
    class Counter:
        def __init__(self):
            self.seen = 0

        def __call__(self, x):
            self.seen += 1
            return self.seen

        def state_dict(self):
            return {"seen": self.seen}

        def load_state_dict(self, state):
            self.seen = state["seen"]

    first = LocalIterator(range(10)).for_each(Counter())
    first.take(4)
    second = LocalIterator(range(10)).for_each(Counter())
    second.load_state_dict(first.state_dict())
    assert next(second) == 5
    with pytest.raises(ValueError, match="stages"):
        LocalIterator(range(3)).load_state_dict(first.state_dict())


def test_wrong_arguments_are_refused_at_once():
    it = LocalIterator([1])
    with pytest.raises(TypeError, match="for_each"):
        it.for_each(3)
    with pytest.raises(ValueError, match="at least 1"):
        it.batch(0)
    with pytest.raises(ValueError, match="at least 2"):
        it.duplicate(1)
    with pytest.raises(TypeError, match="union"):
        it.union([1])


steps = st.lists(
    st.sampled_from(["double", "even", "repeat", "batch"]),
    max_size=5,
)


@given(st.lists(st.integers(0, 20), max_size=30), steps)
def test_chains_mean_what_lists_mean(items, chain):
    iterator, expected, nested = LocalIterator(list(items)), list(items), False
    for step in chain:
        if nested:
            iterator, expected = iterator.flatten(), [x for group in expected for x in group]
            nested = False
        if step == "double":
            iterator, expected = iterator.for_each(lambda x: 2 * x), [2 * x for x in expected]
        elif step == "even":
            iterator = iterator.filter(lambda x: x % 4 == 0)
            expected = [x for x in expected if x % 4 == 0]
        elif step == "repeat":
            iterator = iterator.combine(lambda x: [x] * (x % 3))
            expected = [x for y in expected for x in [y] * (y % 3)]
        else:
            iterator = iterator.batch(3)
            expected = [expected[i : i + 3] for i in range(0, len(expected), 3)]
            nested = True
    assert list(iterator) == expected


@given(st.lists(st.integers(), max_size=20), st.integers(1, 4))
def test_gathers_lose_nothing(items, shards):
    parallel = from_items(items, num_shards=shards, in_process=True)
    assert sorted(parallel.gather_sync()) == sorted(items)
    assert sorted(parallel.gather_async()) == sorted(items)
