"""Conformance checks for every stage; chains are equal to operations on lists."""

import dataclasses
import json
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray import cloudpickle

from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.data.indexed_columns import IndexedColumn
from flowrl.data.lazy_columns import LazyColumn
from flowrl.iter import NOT_READY, LocalIterator, Retry, Skip, Stage, from_items, metrics_scope
from flowrl.iter.metrics import MetricsContext
from flowrl.iter.stage import walk
from flowrl.ops import Replay, SimpleReplayBuffer
from flowrl.ops.report import ReportDue


class WithNotReady(Stage):
    """Returns NOT_READY before each item."""

    name = "with_not_ready"

    def __init__(self, items):
        super().__init__()
        self.results = [x for item in items for x in (NOT_READY, item)]
        self.pulls = 0

    def pull(self, block):
        self.pulls += 1
        if not self.results:
            raise StopIteration
        return self.results.pop(0)

    def waits(self):
        return [0.0]  # a time in the past: pull again at once

    def can_return_not_ready(self):
        return True


def fail_on(bad):
    def fn(x):
        if x == bad:
            raise ValueError("bad item")
        return x

    return fn


class WithHooks:
    def __init__(self):
        self.fetches = 0

    def ready(self):
        return True

    def _on_fetch_start(self):
        self.fetches += 1

    def __call__(self, x):
        return x + 1


STAGES = {
    "for_each": (lambda it: it.for_each(lambda x: x + 1), [2, 3, 4, 5]),
    "for_each_with_hooks": (lambda it: it.for_each(WithHooks()), [2, 3, 4, 5]),
    "filter": (lambda it: it.filter(lambda x: x % 2 == 0), [2, 4]),
    "combine": (lambda it: it.combine(lambda x: [x] * (x - 1)), [2, 3, 3, 4, 4, 4]),
    "batch": (lambda it: it.batch(3), [[1, 2, 3], [4]]),
    "flatten": (lambda it: it.for_each(lambda x: [x, x]).flatten(), [1, 1, 2, 2, 3, 3, 4, 4]),
    "shuffle": (lambda it: it.shuffle(3, seed=7), [1, 2, 3, 4]),
    "transform": (lambda it: it.transform(lambda items: map(str, items)), ["1", "2", "3", "4"]),
    "tap": (lambda it: it.tap("see", lambda x: None), [1, 2, 3, 4]),
    "zip_with_source": (lambda it: it.zip_with_source(), [((), i) for i in (1, 2, 3, 4)]),
    "union": (lambda it: it.union(LocalIterator([9])), [1, 9, 2, 3, 4]),
    "round_robin": (
        lambda it: it.union(LocalIterator([9, 8]), round_robin_weights=[2, 1]),
        [1, 2, 9, 3, 4, 8],
    ),
    "duplicate": (
        lambda it: (lambda a, b: a.union(b))(*it.duplicate(2)),
        [1, 1, 2, 2, 3, 3, 4, 4],
    ),
}


@pytest.mark.parametrize("name", STAGES)
def test_stage_is_lazy_passes_not_ready_on_and_ends(name):
    build, expected = STAGES[name]
    source = WithNotReady([1, 2, 3, 4])
    iterator = build(LocalIterator(source))
    assert source.pulls == 0
    for format in ("tree", "mermaid", "json"):
        assert iterator.explain(format)
    assert len(json.loads(iterator.explain("json"))) == len(list(walk(iterator.stage)))
    assert source.pulls == 0
    iterator.start()
    items = []
    for _ in range(60):
        try:
            item = iterator.stage.pull(False)
        except StopIteration:
            break
        if item is not NOT_READY:
            items.append(item)
    else:
        pytest.fail("the stage did not end")
    assert sorted(map(repr, items)) == sorted(map(repr, expected))
    with pytest.raises(StopIteration):
        iterator.stage.pull(False)


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("taken", [0, 1, 2, 3])
def test_restored_plan_continues_with_the_same_items(name, taken):
    build, _ = STAGES[name]
    items = list(range(1, 9))
    whole = [repr(item) for item in build(LocalIterator(items))]
    first = build(LocalIterator(items))
    if first.state_dict()["restarts"]:
        assert first.state_dict()["restarts"] == [name]
        return
    first_items = [repr(item) for item in first.take(taken)]
    second = build(LocalIterator(items))
    second.load_state_dict(first.state_dict())
    rest = [repr(item) for item in second]
    assert first_items + rest == whole
    assert [repr(item) for item in first] == rest


@pytest.mark.parametrize("name", STAGES)
def test_plan_pickles_before_its_start_only(name):
    build, _ = STAGES[name]
    plan = build(LocalIterator([1, 2, 3, 4]))
    copy = cloudpickle.loads(cloudpickle.dumps(plan))
    assert repr(copy) == repr(plan)
    assert list(map(repr, copy)) == list(map(repr, plan))
    with pytest.raises(TypeError, match="has started"):
        cloudpickle.dumps(plan)


@pytest.mark.parametrize("name", STAGES)
def test_error_in_the_source_is_not_the_end(name):
    build, _ = STAGES[name]

    class RaisesOnce:
        """An iterator that raises at its third item and then continues."""

        def __init__(self):
            self.n = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.n += 1
            if self.n == 3:
                raise OSError("once")
            if self.n > 5:
                raise StopIteration
            return self.n

    plan, results, errors = build(LocalIterator(RaisesOnce)), [], 0
    while True:
        try:
            results.append(next(plan))
        except StopIteration:
            break
        except OSError:
            errors += 1
    assert errors == 1
    assert sorted(map(repr, results)) == sorted(map(repr, build(LocalIterator([1, 2, 4, 5]))))


@pytest.mark.parametrize("name", ["for_each", "filter", "combine"])
def test_error_in_an_operator_leaves_the_stream_usable(name):
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


@pytest.mark.parametrize("name", ["for_each", "filter", "combine"])
def test_skip_drops_and_counts_failed_items(name):
    fn = fail_on(2)
    operator = {"for_each": fn, "filter": fn, "combine": lambda x: [fn(x)]}[name]
    iterator = getattr(LocalIterator([1, 2, 2, 3]), name)(operator, on_error=Skip(max=2))
    assert list(iterator) == [1, 3]
    assert iterator.stats()[0]["skipped"] == 2
    iterator = getattr(LocalIterator([2, 2, 3]), name)(operator, on_error=Skip(max=1))
    with pytest.raises(ValueError, match="bad item"):
        next(iterator)
    assert list(iterator) == [3]


@pytest.mark.parametrize("name", ["for_each", "filter", "combine"])
def test_retry_calls_again_with_the_same_item(name):
    calls = []

    def fn(x):
        calls.append(x)
        if x == 2 and calls.count(2) < 3:
            raise ValueError("not yet")
        return [x] if name == "combine" else x

    iterator = getattr(LocalIterator([1, 2, 3]), name)(fn, on_error=Retry(2))
    assert list(iterator) == [1, 2, 3]
    assert calls == [1, 2, 2, 2, 3]
    calls.clear()
    iterator = getattr(LocalIterator([2, 3]), name)(fn, on_error=Retry(1))
    with pytest.raises(ValueError, match="not yet") as caught:
        next(iterator)
    assert "tried 2 times" in "".join(caught.value.__notes__)


def test_invalid_error_policies_are_rejected():
    with pytest.raises(TypeError, match="on_error"):
        LocalIterator([1]).for_each(str, on_error="ignore")
    with pytest.raises(ValueError, match="at least 1"):
        Skip(0)
    with pytest.raises(ValueError, match="at least 1"):
        Retry(0)


def test_stop_iteration_from_an_operator_is_an_error_not_the_end():
    def ends(x):
        raise StopIteration

    with pytest.raises(RuntimeError, match="raised StopIteration"):
        next(LocalIterator([1]).for_each(ends))
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        next(LocalIterator(lambda: ends(1)))
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        next(LocalIterator([1]).transform(lambda items: [next(items) + next(items)]))


def test_result_of_a_filter_is_true_or_false():
    arrays = [np.zeros(2), np.ones(1)]
    with pytest.raises(ValueError, match="ambiguous") as error:
        next(LocalIterator(arrays).filter(lambda array: array))
    assert any("filter" in note for note in error.value.__notes__)
    kept = LocalIterator(arrays).filter(lambda array: array, on_error=Skip()).take(2)
    assert kept == [np.ones(1)]


def test_filter_and_combine_warn_once_if_they_return_nothing(caplog):
    assert list(LocalIterator(range(2500)).filter(lambda item: item > 2400)) == list(
        range(2401, 2500)
    )
    (record,) = caplog.records
    assert "has returned nothing for 1000 items in a row" in record.message
    caplog.clear()
    assert not list(LocalIterator(range(2500)).combine(lambda item: []))
    (record,) = caplog.records
    assert record.message.startswith("combine(<lambda>), chained at ")
    caplog.clear()
    collected = LocalIterator(range(6000)).combine(lambda item: [] if item % 1500 else [item])
    assert list(collected) == [0, 1500, 3000, 4500]
    assert not caplog.records
    rare = LocalIterator(range(6000)).filter(lambda item: item % 1500 == 1499)
    assert list(rare) == [1499, 2999, 4499, 5999]
    assert len(caplog.records) == 1
    caplog.clear()
    with metrics_scope(MetricsContext()):  # the filter of results drops most items
        assert not list(LocalIterator(range(1500)).filter(ReportDue(10, None)))
    assert not caplog.records


def test_generator_that_raised_is_recreated_at_its_position():
    calls = []

    def generator():
        calls.append(1)
        for i in range(6):
            if i == 3 and len(calls) == 1:
                raise OSError("once")
            yield i

    it = LocalIterator(generator)
    assert it.take(3) == [0, 1, 2]
    with pytest.raises(OSError, match="once"):
        next(it)
    assert list(it) == [3, 4, 5]
    one_shot = LocalIterator(iter(generator()))  # a later call: does not raise
    assert list(one_shot) == list(range(6))

    def always():
        yield 1
        raise OSError("for ever")

    it = LocalIterator(always())
    assert next(it) == 1
    for _ in range(3):
        with pytest.raises(OSError, match="for ever"):
            next(it)


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


def test_state_is_loaded_into_a_new_plan():
    first = LocalIterator(range(10)).for_each(Counter())
    first.take(4)
    second = LocalIterator(range(10)).tap("a tap has no state", print).for_each(Counter())
    second.load_state_dict(first.state_dict())
    assert next(second) == 5
    with pytest.raises(ValueError, match=r"another plan.*Counter"):
        LocalIterator(range(3)).load_state_dict(first.state_dict())
    with pytest.raises(RuntimeError, match="this plan has started"):
        first.load_state_dict(first.state_dict())


def test_state_lists_stages_that_restart():
    plan = LocalIterator(lambda: iter(range(3))).transform(lambda it: it).for_each(str)
    next(plan)
    assert plan.state_dict()["restarts"] == ["transform", "from_iterable"]
    assert LocalIterator([1]).state_dict()["restarts"] == []


def test_operators_of_one_class_have_separate_state():
    def plan():
        return LocalIterator(range(10)).for_each(Counter()).for_each(Counter()).batch(2)

    first = plan()
    first.take(2)
    state = first.state_dict()
    assert {"for_each(Counter)", "for_each(Counter)#2"} <= set(state["stages"])
    second = plan()
    second.load_state_dict(state)
    assert next(second) == [5, 6]


def test_invalid_arguments_are_rejected_when_chained():
    it = LocalIterator([1])
    with pytest.raises(TypeError, match="for_each"):
        it.for_each(3)
    with pytest.raises(TypeError, match="transform"):
        it.transform(3)
    with pytest.raises(ValueError, match="at least 1"):
        it.batch(0)
    with pytest.raises(ValueError, match="at least 1"):
        it.shuffle(0)
    with pytest.raises(ValueError, match="at least 2"):
        it.duplicate(1)
    with pytest.raises(ValueError, match="max_buffered"):
        it.duplicate(2, max_buffered=0)
    with pytest.raises(ValueError, match="when_full"):
        it.duplicate(2, when_full="drop")
    with pytest.raises(TypeError, match="union"):
        it.union([1])
    with pytest.raises(ValueError, match="max_concurrency"):
        it.for_each(str, max_concurrency=-1)
    with pytest.raises(ValueError, match="format"):
        it.explain("dot")


def test_fetch_hook_is_called_once_per_item():
    fn = WithHooks()
    plan = LocalIterator(WithNotReady([1, 2, 3])).for_each(fn)
    plan.start()
    results = [plan.stage.pull(False) for _ in range(6)]
    assert [x for x in results if x is not NOT_READY] == [2, 3, 4]
    assert fn.fetches == 3
    assert list(plan) == []  # also with timed pulls


def test_operator_that_is_not_ready_gets_no_items():
    class Full(WithHooks):
        full = False

        def ready(self):
            return not self.full

    fn, source = Full(), WithNotReady([1, 2])
    plan = LocalIterator(source).for_each(fn)
    plan.start()
    fn.full = True
    assert plan.stage.pull(False) is NOT_READY
    assert source.pulls == 0
    fn.full = False
    assert [plan.stage.pull(False) for _ in range(2)] == [NOT_READY, 2]


def test_shuffle_is_seeded_by_the_plan():
    def order(seed):
        plan = LocalIterator(range(50)).shuffle(10)
        plan.start(seed=seed)
        return list(plan)

    assert order(1) == order(1) != order(2)
    assert sorted(order(1)) == list(range(50))
    assert list(LocalIterator(range(5)).shuffle(1, seed=3)) == list(range(5))


steps = st.lists(
    st.sampled_from(["double", "even", "repeat", "batch", "tap", "duplicate", "window"]),
    max_size=5,
)


@given(st.lists(st.integers(0, 20), max_size=30), steps)
def test_chains_are_equal_to_list_operations(items, chain):
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
        elif step == "tap":
            iterator = iterator.tap("t", lambda x: None)
        elif step == "window":
            iterator = iterator.shuffle(1).transform(lambda it: (x + 1 for x in it))
            expected = [x + 1 for x in expected]
        elif step == "duplicate":
            a, b = iterator.duplicate(2)
            iterator = a.union(b.for_each(lambda x: -x), deterministic=True)
            expected = [x for y in expected for x in (y, -y)]
        else:
            iterator = iterator.batch(3)
            expected = [expected[i : i + 3] for i in range(0, len(expected), 3)]
            nested = True
    assert list(iterator) == expected


@given(st.lists(st.integers(), max_size=20), st.integers(1, 4), st.integers(1, 3))
def test_gathers_return_all_items(items, shards, others):
    parallel = from_items(items, num_shards=shards, in_process=True)
    assert sorted(parallel.gather_sync()) == sorted(items)
    assert sorted(parallel.gather_async(num_async=others)) == sorted(items)
    assert sorted(parallel.repartition(others).gather_sync()) == sorted(items)


def sources_of(plan):
    return [(item, [(s.shard, s.seq) for s in sources]) for sources, item in plan]


PROVENANCE = {
    "batch": lambda it: it.batch(2),
    "shuffle": lambda it: it.shuffle(3, seed=1),
    "combine": lambda it: it.batch(2).combine(lambda pair: [sum(pair), max(pair)]),
    "flatten": lambda it: it.batch(2).flatten(),
    "hooked": lambda it: it.for_each(WithHooks()),
    "duplicate": lambda it: (lambda a, b: a.union(b))(*it.duplicate(2)),
}


@pytest.mark.parametrize("name", PROVENANCE)
@pytest.mark.parametrize("taken", [1, 2, 3])
def test_sources_are_saved_with_the_items(name, taken):
    def build():
        gathered = from_items(list(range(8)), 2, in_process=True).gather_sync()
        return PROVENANCE[name](gathered).zip_with_source()

    whole = sources_of(build())
    assert all(sources for _, sources in whole)
    first, second = build(), build()
    first_items = sources_of(first.take(taken))
    second.load_state_dict(first.state_dict())
    assert first_items + sources_of(second) == whole


def test_elements_of_a_round_keep_their_sources():
    it = from_items(list(range(8)), 2, in_process=True)
    rounds = it.batch_across_shards().flatten().zip_with_source()
    assert sources_of(rounds) == [(i, [(i % 2, i // 2)]) for i in range(8)]


def test_sources_of_a_dropped_item_are_discarded():
    it = from_items([0, 1, 2], 1, in_process=True).gather_sync()
    pairs = sources_of(it.combine(lambda x: [fail_on(1)(x)], on_error=Skip()).zip_with_source())
    assert pairs == [(0, [(0, 0)]), (2, [(0, 2)])]


def test_combine_retries_generator_functions():
    calls = []

    def fails_twice(x):
        calls.append(x)
        if len(calls) < 3:
            raise OSError("not yet")
        yield x

    assert list(LocalIterator([1]).combine(fails_twice, on_error=Retry(2))) == [1]
    assert calls == [1, 1, 1]


def test_generator_can_raise_twice_at_the_same_item():
    failures = [1, 2]

    def items():
        for i in range(5):
            if i == 3 and failures:
                failures.pop()
                raise OSError("twice")
            yield i

    plan, results, errors = LocalIterator(items), [], 0
    while len(results) < 5:
        try:
            results.append(next(plan))
        except OSError:
            errors += 1
    assert (results, errors) == ([0, 1, 2, 3, 4], 2)


@pytest.mark.parametrize("hook", ["ready", "_on_fetch_start"])
def test_stop_iteration_from_a_hook_is_an_error(hook):
    class Operator:
        def __call__(self, x):
            return x

    def raise_stop(self):
        raise StopIteration

    setattr(Operator, hook, raise_stop)
    plan = LocalIterator([1]).for_each(Operator())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="StopIteration") as caught:
            next(plan)
    assert "for_each(Operator)" in "".join(caught.value.__notes__)


def test_item_whose_repr_raises_does_not_hide_the_error():
    class NoRepr:
        def __repr__(self):
            raise TypeError("no")

    plan = LocalIterator([NoRepr()]).for_each(lambda x: {}["key"])
    with pytest.raises(KeyError) as caught:
        next(plan)
    assert "NoRepr whose repr() raises TypeError" in "".join(caught.value.__notes__)


def test_plan_that_fails_to_start_leaves_its_stages_usable():
    source = LocalIterator([1, 2])
    with pytest.raises(RuntimeError, match="two consumers"):
        next(source.union(source))
    assert list(source.for_each(str)) == ["1", "2"]


def test_stage_is_started_once_for_all_children_of_a_duplicate():
    def build():
        return LocalIterator(range(20)).shuffle(10).duplicate(2, max_buffered=30)

    a, b = build()
    a.start(seed=1)
    first = a.take(5)
    b.start(seed=2)  # does not seed the shuffle again
    items = first + a.take(15)
    assert b.take(20) == items
    c, _ = build()
    c.start(seed=1)
    assert c.take(20) == items


def test_stop_continues_after_an_error():
    stopped = []

    class Stoppable(Stage):
        def __init__(self, *parents, fails=False):
            super().__init__(*parents)
            self.fails = fails

        def stop(self):
            stopped.append(self.fails)
            if self.fails:
                raise OSError("cannot stop")

    with pytest.raises(OSError, match="cannot stop"):
        LocalIterator(Stoppable(Stoppable(), fails=True)).stop()
    assert stopped == [True, False]


def test_describing_a_batch_in_an_error_does_not_read_its_lazy_columns(capsys):
    def fetch():
        raise RuntimeError("the worker is gone")

    lazy = LazyColumn("infos", fetch, (2,), np.dtype(object))
    batch = SampleBatch.unchecked(
        {"obs": np.zeros((2, 3)), "infos": IndexedColumn(lazy, np.arange(2))}
    )
    plan = LocalIterator([batch]).inspect("here").for_each(lambda x: {}["key"])
    with pytest.raises(KeyError) as caught:
        next(plan)
    text = "SampleBatch of 2 rows (obs: (2, 3), infos: (2,))"
    assert text in "".join(caught.value.__notes__)
    assert text in capsys.readouterr().out


def _raise_with_cause(*_):
    try:
        return {}["key"]
    except KeyError as error:
        raise ValueError("explicit") from error


def _raise_with_context(*_):
    try:
        return {}["key"]
    except KeyError:
        raise ValueError("implicit")  # noqa: B904


def _raise_stop(*_):
    raise StopIteration


def _with_hook(fn):
    operator = WithHooks()
    operator._on_fetch_start = fn
    return operator


FAILING_PLANS = {
    "for_each": lambda fn: LocalIterator([1]).for_each(fn),
    "tap": lambda fn: LocalIterator([1]).tap("x", fn),
    "hook": lambda fn: LocalIterator([1]).for_each(_with_hook(fn)),
    "source": lambda fn: LocalIterator(fn),
    "gather": lambda fn: from_items([1], 1, in_process=True).for_each(fn).gather_sync(),
}


@pytest.mark.parametrize("plan", FAILING_PLANS)
def test_error_keeps_its_cause_and_context(plan):
    build = FAILING_PLANS[plan]
    with pytest.raises(ValueError, match="explicit") as caught:
        next(build(_raise_with_cause))
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(ValueError, match="implicit") as caught:
        next(build(_raise_with_context))
    assert isinstance(caught.value.__context__, KeyError)
    assert not caught.value.__suppress_context__
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        next(build(_raise_stop))
    assert isinstance(caught.value.__cause__, StopIteration)


@pytest.mark.parametrize("method", ["state_dict", "load_state_dict"])
def test_operator_with_half_of_the_state_methods_is_rejected(method):
    operator = type("Half", (), {"__call__": lambda self, item: item, method: lambda *args: {}})()
    with pytest.raises(TypeError, match=rf"Half has {method}\(\) only"):
        LocalIterator([1]).for_each(operator)


def test_restored_items_of_duplicate_are_read_only():
    def streams():
        return LocalIterator(np.ones((3, 2))).duplicate(2, max_buffered=3)

    first, second = streams()
    first.take(2)
    state = second.state_dict()
    _, restored = streams()
    restored.load_state_dict(state)
    for item in restored.take(2):
        with pytest.raises(ValueError, match="read-only"):
            item[0] = 5


def test_operator_that_writes_into_a_shared_array_is_told_to_copy():
    def double(item):
        item *= 2
        return item

    first, _ = LocalIterator(np.ones((3, 2))).duplicate(2)
    with pytest.raises(ValueError, match="read-only") as caught:
        first.for_each(double).take(1)
    assert "return a changed copy instead" in caught.value.__notes__[-1]


@pytest.mark.parametrize("value", [1.5, True, "2", None])
def test_numbers_of_items_must_be_ints(value):
    stream = LocalIterator([1, 2])
    calls = [
        stream.take, stream.batch, stream.shuffle, stream.duplicate, Retry,
        lambda number: stream.duplicate(2, max_buffered=number),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ValueError, match="must be an int of at least"):
            call(value)
    if value is not None:
        with pytest.raises(ValueError, match=r"Skip\(max\) must be an int of at least 1"):
            Skip(value)


class BrokenOperator:
    """Fails to load its state and to describe itself."""

    def __init__(self, error=KeyError):
        self.error = error

    def __call__(self, item):
        return item

    def state_dict(self):
        return {"n": 1}

    def load_state_dict(self, state):
        raise self.error("m")

    def extra_stats(self):
        return 5


@pytest.mark.parametrize("error", [KeyError, ValueError, RuntimeError])
def test_error_of_an_operator_that_loads_its_state_names_it(error):
    streams = [LocalIterator(range(3)).for_each(BrokenOperator(error)) for _ in range(2)]
    message = (
        rf"for_each\(BrokenOperator\), chained at .*: load_state_dict\(\) .* {error.__name__}: "
    )
    with pytest.raises(ValueError, match=message):
        streams[1].load_state_dict(streams[0].state_dict())


def test_error_in_extra_stats_is_a_value_of_the_stats():
    stream = LocalIterator(range(3)).for_each(BrokenOperator())
    assert stream.take(1) == [0]
    (text,) = [one["extra_stats"] for one in stream.stats() if "extra_stats" in one]
    assert text == "raised TypeError: 'int' object is not iterable"
    assert text in stream.explain()


class OddStats:
    """Has statistics that JSON cannot hold, and names of the engine."""

    def __call__(self, item):
        return item

    def extra_stats(self):
        loop = {}
        loop["self"] = loop
        return {
            "id": 7, (1, "a"): np.float32(0.5), "rows": {2: None}, "lock": threading.Lock(),
            "loop": loop, "time": np.datetime64("2026-01-01"), "broken": NoText(), "n": np.int8(3),
        }  # fmt: skip


class NoText:
    def __str__(self):
        raise RuntimeError


def test_statistics_of_an_operator_are_plain_and_replace_none_of_the_engine():
    stream = LocalIterator(range(3)).for_each(OddStats())
    assert stream.take(1) == [0]
    row = stream.stats()[0]
    assert (row["id"], row["own_id"], row["(1, 'a')"], row["rows"]) == (0, 7, 0.5, {"2": None})
    assert (row["n"], row["time"]) == (3, "2026-01-01")
    assert row["broken"] == "<NoText whose text raised RuntimeError>"
    assert json.loads(stream.explain("json"))[0]["rows"] == {"2": None}


def test_operator_without_the_state_of_the_saved_plan(caplog):
    def stream(**members):
        operator = type("Counter", (), {"__call__": lambda self, item: item, **members})
        return LocalIterator(range(3)).for_each(operator())

    methods = {"state_dict": lambda self: {}, "load_state_dict": lambda self, state: None}
    message = r"for_each\(Counter\), chained at .*: .* but the operator has no load_state_dict"
    with pytest.raises(ValueError, match=message):
        stream().load_state_dict(stream(**methods).state_dict())
    stream(**methods).load_state_dict(stream().state_dict())
    assert "has no state of this operator: it begins with its initial state" in caplog.text


@dataclasses.dataclass
class Remembers:
    values: list

    def __call__(self, item):
        self.values.append(item)
        return item


def test_title_of_an_operator_with_a_long_state_is_short():
    stream = LocalIterator(range(1000)).for_each(Remembers([]))
    assert list(stream) == list(range(1000))
    assert len(stream.stats()[0]["stage"]) < 300


def test_combine_names_a_batch_that_is_not_in_a_list():
    batch = MultiAgentBatch({"a": SampleBatch(obs=np.zeros(2))}, 2)
    with pytest.raises(TypeError, match="it returned a MultiAgentBatch: put it in a list"):
        LocalIterator([1]).combine(lambda x: batch).take(1)
    with pytest.raises(TypeError, match="it returned a int: put it in a list, or use for_each"):
        LocalIterator([1]).combine(lambda x: x).take(1)
    with pytest.raises(TypeError, match=r"flatten\(\) takes lists"):
        LocalIterator([batch]).flatten().take(1)


def test_type_error_names_the_stage_before():
    stream = LocalIterator([1]).for_each(lambda x: None).for_each(len)
    with pytest.raises(TypeError) as caught:
        next(stream)
    notes = "".join(caught.value.__notes__)
    assert "the items of this stage come from for_each(<lambda>)" in notes


def test_plan_may_be_restored_with_tasks_but_not_without_those_in_flight():
    def stream(**options):
        return LocalIterator(range(3)).for_each(abs, **options)

    without, with_tasks = stream(), stream(max_concurrency=2)
    with_tasks.load_state_dict(without.state_dict())
    state = with_tasks.state_dict()
    without.load_state_dict(state)
    (saved,) = [one for one in state["stages"].values() if "in_flight" in one]
    saved["in_flight"] = [[1, [], 0]]
    with pytest.raises(ValueError, match="in Ray tasks, which had 1 items in flight"):
        without.load_state_dict(state)


def test_blocked_transform_raises_in_a_replay():
    class Replaying:
        replays, num_observed = True, 0

        @property
        def plan_log(self):
            return self

    stream = Replay(local_buffer=SimpleReplayBuffer(2)).transform(iter)
    stream.metrics.journal = Replaying()
    with pytest.raises(RuntimeError, match=r"transform\(iter\) is blocked"):
        next(stream)
