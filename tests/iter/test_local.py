"""LocalIterator: running, metrics context, one consumer per stream, explain and stats."""

import collections.abc
import dataclasses
import itertools
import json
import pickle
import sys
import threading
import time
import traceback
from types import TracebackType

import numpy as np
import pytest

from flowrl.iter import (
    LocalIterator,
    MetricsContext,
    Retry,
    _get_shared_metrics,
    from_items,
    metrics_scope,
)
from flowrl.iter.errors import without_engine_frames


def stream(*items):
    return LocalIterator(list(items), "items")


def test_take_and_show_consume_items(capsys):
    it = stream(1, 2, 3)
    assert it.take(0) == []
    assert it.take(2) == [1, 2]
    it.show()
    assert capsys.readouterr().out == "3\n"
    assert it.take(5) == []
    many = LocalIterator(range(100))
    many.show(2)
    assert capsys.readouterr().out == "0\n1\n"
    many.show()
    assert len(capsys.readouterr().out.splitlines()) == 20
    assert next(many) == 22


def test_nothing_runs_before_the_first_pull():
    calls = []

    def make():
        calls.append(1)
        return [1]

    it = LocalIterator(make).for_each(lambda x: x)
    it.explain()
    assert not calls
    assert list(it) == [1]


def test_repr_shows_the_chained_methods():
    it = stream(1).for_each(str).filter(bool).batch(2)
    assert repr(it) == "LocalIterator[items.for_each().filter().batch(2)]"
    assert (
        repr(stream(1).union(stream(2)))
        == "LocalIterator[LocalUnion[LocalIterator[items], LocalIterator[items]]]"
    )


def test_functions_of_filter_and_combine_return_a_bool_and_a_list():
    with pytest.raises(TypeError, match="returned None: return True to keep the item, or False"):
        next(stream(1).filter(lambda x: None))
    assert list(stream(1, 0).filter(lambda x: x)) == [1]
    for item, kind in (({"obs": [1]}, "dict"), ("text", "str")):
        with pytest.raises(TypeError, match=f"a list of items, it returned a {kind}"):
            next(stream(item).combine(lambda x: x))
    with pytest.raises(TypeError, match=r"a list of items, it returned None: return \[\] if"):
        next(stream(1).combine(lambda x: None))
    assert list(stream([1, 2]).combine(iter)) == [1, 2]


def test_union_follows_order_and_weights():
    assert list(stream(1, 2, 3).union(stream(4, 5, 6), deterministic=True)) == [1, 4, 2, 5, 3, 6]
    weighted = stream(1, 1, 1, 1).union(
        stream(2, 2), stream(3, 3, 3), round_robin_weights=[3, 1, 2]
    )
    assert list(weighted) == [1, 1, 1, 2, 3, 3, 1, 2, 3]


def test_stream_with_two_consumers_is_rejected():
    source = stream(1, 2)
    with pytest.raises(RuntimeError, match=r"duplicate\(\) first"):
        next(source.for_each(str).union(source.filter(bool)))
    source = stream(1, 2)
    first, second = source.for_each(str), source.for_each(str)
    assert next(first) == "1"
    with pytest.raises(RuntimeError, match="two consumers"):
        next(second)
    same = stream(1, 2)
    with pytest.raises(RuntimeError, match="two consumers"):
        next(same.union(same))


def test_stopped_plan_raises():
    plan = stream(1, 2)
    with plan:
        next(plan)
    with pytest.raises(RuntimeError, match="was stopped"):
        next(plan)


def test_tap_and_inspect_pass_items_on(capsys):
    seen = []
    plan = stream(1, [2, 3]).tap("watch", seen.append).inspect("here")
    assert list(plan) == [1, [2, 3]]
    assert seen == [1, [2, 3]]
    assert capsys.readouterr().out == "here: int 1\nhere: list [2, 3]\n"
    assert "tap(watch)" in plan.explain()

    def bad(item):
        raise KeyError("tap")

    plan = stream(1, 2).tap("bad", bad)
    with pytest.raises(KeyError) as caught:
        next(plan)
    assert "tap(bad)" in "".join(caught.value.__notes__)


def test_tap_rejects_a_function_with_state():
    """Its state would be lost in a checkpoint."""

    class Counter:
        def __call__(self, item):
            pass

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    with pytest.raises(TypeError, match=r"tap\(count\).*state_dict: use for_each"):
        stream(1).tap("count", Counter())

    class Store:
        shared_state = Counter()

        def __call__(self, item):
            pass

    with pytest.raises(TypeError, match=r"tap\(store\).*shared_state: use for_each"):
        stream(1).tap("store", Store())


def test_state_that_operators_share_is_saved_once():
    class Total:
        value = 0

        def state_dict(self):
            return [self.value]

        def load_state_dict(self, state):
            (self.value,) = state

    class Add:
        def __init__(self, total):
            self.shared_state = total

        def __call__(self, item):
            self.shared_state.value += item
            return item

    first, second = Total(), Total()
    plans = [stream(1, 2).for_each(Add(total)).for_each(Add(total)) for total in (first, second)]
    plans[0].take(2)
    state = plans[0].state_dict()
    assert list(state["shared"].values()) == [[6]]
    plans[1].load_state_dict(state)
    assert second.value == 6
    for total in ({}, object()):
        with pytest.raises(
            TypeError, match=r"Add.shared_state needs state_dict\(\) and load_state"
        ):
            stream(1).for_each(Add(total))


def test_metrics_context_is_active_during_a_pull():
    def count(x):
        _get_shared_metrics().counters["seen"] += 1
        return x

    with pytest.raises(ValueError, match="outside an iterator"):
        _get_shared_metrics()
    a, b = stream(1, 2).for_each(count), stream(3).for_each(count)
    union = a.union(b).union(stream(4).for_each(count).union(stream(5).for_each(count)))
    list(union)
    assert union.metrics.counters["seen"] == 5
    with pytest.raises(ValueError, match="outside an iterator"):
        LocalIterator.get_metrics()
    with metrics_scope(MetricsContext()) as context:
        count(1)
    assert context.counters["seen"] == 1


def test_plan_inside_an_operator_has_its_own_metrics():
    def count(x):
        _get_shared_metrics().counters["seen"] += x
        return x

    inner = LocalIterator(lambda: iter(int, 1)).for_each(lambda _: count(10))

    def outer(x):
        next(inner)
        return count(x)

    plan = stream(1, 2).for_each(outer)
    list(plan)
    assert plan.metrics.counters["seen"] == 3
    assert inner.metrics.counters["seen"] == 20


def test_thread_counts_in_the_context_of_its_metrics_scope():
    context = MetricsContext()

    def work():
        with metrics_scope(context):
            _get_shared_metrics().counters["done"] += 1

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert context.counters["done"] == 1


def test_timer_mean_and_throughput():
    timer = MetricsContext().timers["t"]
    assert timer.mean == 0
    with timer:
        pass
    timer.push_units_processed(10)
    assert timer.mean_throughput > 0
    with timer, pytest.raises(RuntimeError, match="twice"), timer:
        pass


def test_zip_with_source_actor_without_actors_raises():
    with pytest.raises(ValueError, match="no source actor"):
        next(stream(1).zip_with_source_actor())


def test_error_names_the_path_without_arguments():
    class Breaks:
        def __init__(self, lr):
            self.lr = lr

        def __call__(self, x):
            raise ValueError("broken")

        def __repr__(self):
            return f"Breaks(lr={self.lr})"

    plan = stream(1).union(stream(2).for_each(Breaks(3)), deterministic=True).for_each(str)
    next(plan)
    with pytest.raises(ValueError, match="broken") as caught:
        next(plan)
    (note,) = caught.value.__notes__
    assert note.startswith("in the plan at for_each(str) › union[1] › for_each(Breaks), chained at")
    assert "for_each(Breaks(lr=3))" in plan.explain()


def test_traceback_of_an_operators_error_has_no_frames_of_the_engine():
    def broken(x):
        raise ValueError("broken")

    plan = stream(1).for_each(str).for_each(broken).filter(bool).combine(lambda x: [x])
    with pytest.raises(ValueError, match="broken") as caught:
        next(plan)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names == ["test_traceback_of_an_operators_error_has_no_frames_of_the_engine", "broken"]


def test_traceback_may_have_frames_without_a_line():
    """A signal may interrupt an instruction that belongs to no line."""

    def frame_and_error():
        try:
            raise ValueError("interrupted")
        except ValueError as error:
            return sys._getframe(), error

    frame, error = frame_and_error()
    begin = next(begin for begin, _, line in frame.f_code.co_lines() if line is None)
    trace = TracebackType(None, frame, begin, -1)
    assert trace.tb_lineno is None
    shortened = without_engine_frames(error.with_traceback(trace))
    assert (shortened.tb_frame, shortened.tb_lineno) == (frame, 0)


def test_error_of_the_engine_keeps_its_frames(monkeypatch):
    def broken_pull(block):
        raise AssertionError("engine")

    plan = stream(1).for_each(str)
    monkeypatch.setattr(plan.stage, "pull", broken_pull)
    with pytest.raises(AssertionError, match="engine") as caught:
        next(plan)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[1] == "__next__"
    assert names[-1] == "broken_pull"


def test_stats_report_times_and_items_of_every_stage():
    def work(x):
        until = time.perf_counter() + 0.004
        while time.perf_counter() < until:
            pass
        return x

    plan = LocalIterator(range(100), "numbers").for_each(work).filter(lambda x: x % 2)
    before = plan.stats()
    assert [row["items"] for row in before] == [0, 0, 0]
    assert "busy" not in before[0]
    for _ in plan:
        time.sleep(0.001)  # time of the consumer
    rows = plan.stats()
    assert [row["stage"] for row in rows] == ["filter(<lambda>)", "for_each(work)", "numbers"]
    assert [row["items"] for row in rows] == [50, 100, 100]
    for row in rows:
        assert row["busy"] + row["waiting"] + row["blocked"] == pytest.approx(1)
        assert row["busy_s"] + row["waiting_s"] + row["blocked_s"] > 0.3
    busiest = max(rows, key=lambda row: row["busy"])
    assert busiest["stage"] == "for_each(work)"
    assert rows[0]["busy"] < 0.05
    assert rows[0]["waiting"] > rows[1]["waiting"]
    assert "busy" in plan.explain()
    assert [row["stage"] for row in json.loads(plan.explain("json"))] == [r["stage"] for r in rows]
    assert plan.explain("mermaid").startswith("flowchart LR\n  s0[")
    assert "s1 --> s0" in plan.explain("mermaid")


def test_item_counts_are_exact_if_quick_pulls_are_sampled():
    plan = LocalIterator(range(10_000)).for_each(lambda x: x).for_each(lambda x: x)
    for _ in plan:
        pass
    assert [row["items"] for row in plan.stats()] == [10_000] * 3


def test_invalid_arguments_are_rejected():
    with pytest.raises(TypeError, match="iterable"):
        LocalIterator(3)
    with pytest.raises(ValueError, match="take"):
        stream(1).take(-1)
    with pytest.raises(ValueError, match="state_dict"):
        stream(1).load_state_dict({})


def test_rare_slow_pulls_are_timed(monkeypatch):
    """One slow pull among many quick ones takes most of the time; sampling must not miss it."""
    now = 0.0

    def work(i):
        nonlocal now
        now += 0.01 if i % 64 == 5 else 1e-6
        return i

    monkeypatch.setattr("flowrl.iter.profiler.time.perf_counter", lambda: now)
    plan = LocalIterator(range(64 * 200)).for_each(work)
    assert len(list(plan)) == 64 * 200
    assert plan.stats()[0]["busy"] == pytest.approx(0.99, abs=0.1)


def test_quick_pulls_that_become_slow_are_timed_at_once(monkeypatch):
    now, seconds = 0.0, 1e-4

    def work(i):
        nonlocal now
        now += seconds
        return i

    monkeypatch.setattr("flowrl.iter.profiler.time.perf_counter", lambda: now)
    plan = LocalIterator(range(100_000)).for_each(work)
    plan.take(20_000)
    before, started, seconds = plan.stats()[0]["busy_s"], now, 0.5
    for _ in range(6):  # the stream is measured once per second
        plan.take(2)
        busy_s = plan.stats()[0]["busy_s"] - before
        assert busy_s <= now - started + 0.01  # with quick pulls before
    assert busy_s >= now - started - 2


def test_map_names_for_each():
    for it, cls in ((stream(1), "LocalIterator"), (from_items([1]), "ParallelIterator")):
        message = rf"^'{cls}' object has no attribute 'map': use for_each\(fn\)$"
        with pytest.raises(AttributeError, match=message):
            it.map(str)
        with pytest.raises(AttributeError, match=r"has no attribute 'size'$"):
            it.size  # noqa: B018


def test_metrics_of_a_started_plan_can_be_pickled():
    it = stream(1).for_each(lambda x: x)
    next(it)
    assert pickle.loads(pickle.dumps(it.metrics)).counters == {}


@pytest.mark.parametrize("item", ["text", {"obs": [1]}, 3])
def test_flatten_takes_lists(item):
    with pytest.raises(TypeError, match=r"flatten\(\) takes lists"):
        next(stream(item).flatten())
    assert list(stream([1, 2], (3,)).flatten()) == [1, 2, 3]


def test_class_as_a_function_is_called_without_its_methods():
    class Noted:
        def __init__(self, item):
            self.item = item

        def stop(self):
            raise AssertionError

        state_dict = extra_stats = stop

    it = stream(1, 2).for_each(Noted)
    assert next(it).item == 1
    assert it.stats()
    it.state_dict()
    it.stop()


def test_item_that_a_tap_loses_is_reported():
    def fails(item):
        raise ValueError("no")

    it, lost = stream(1, 2).tap("t", fails), []
    it.metrics.on_lost.append(lost.append)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            next(it)
    assert lost == [1, 2]


def test_error_that_is_a_frozen_dataclass_keeps_its_type():
    @dataclasses.dataclass(frozen=True)
    class FrozenError(Exception):
        reason: str

    def fails(item):
        raise FrozenError("full")

    with pytest.raises(FrozenError) as caught:
        next(stream(1).for_each(fails))
    assert "chained at" in caught.value.__notes__[0]


def test_transform_waits_while_its_branches_progress():
    """The stage before it returns items only after several pulls."""
    a, b = stream(*range(4)).duplicate(2)
    joined = a.batch(2).union(b.batch(4), deterministic=True)
    assert list(joined.transform(iter)) == [[0, 1], [2, 3], [0, 1, 2, 3]]


def test_numpy_numbers_of_an_operator_are_numbers_in_json():
    class Counts:
        def __call__(self, x):
            return x

        def extra_stats(self):
            return {"rows": np.int64(3)}

    plan = LocalIterator(range(3)).for_each(Counts())
    assert list(plan) == [0, 1, 2]
    (row,) = [row for row in json.loads(plan.explain("json")) if "rows" in row]
    assert row["rows"] == 3


def test_class_with_a_method_of_an_operator_is_called_for_each_item():
    class Task:
        def __init__(self, x):
            self.x = x

        def ready(self):
            return False

    assert [task.x for task in LocalIterator(range(3)).for_each(Task)] == [0, 1, 2]


@pytest.mark.parametrize(
    "fn",
    [
        lambda items: (x + 1 for x in items),
        lambda items: map(int, (x + 1 for x in items)),
        lambda items: (x for _, x in enumerate(x + 1 for x in items)),
    ],
)
def test_a_transform_continues_after_an_error_of_its_input(fn):
    def fail_at_2(x):
        if x == 2:
            raise ValueError("two")
        return x

    stream = LocalIterator(lambda: iter(range(5)), "source").for_each(fail_at_2).transform(fn)
    found = []
    for _ in range(10):
        try:
            found.append(next(stream))
        except ValueError:
            found.append("error")
        except StopIteration:
            break
    assert found == [1, 2, "error", 4, 5]
    assert next(stream, None) is None


def test_a_transform_ends_after_an_error_of_the_last_item():
    def fail_at_2(x):
        if x == 2:
            raise ValueError("two")
        return x

    stream = LocalIterator(lambda: iter(range(3)), "source").for_each(fail_at_2)
    headed = stream.transform(lambda items: itertools.chain(["header"], items))
    assert headed.take(3) == ["header", 0, 1]
    with pytest.raises(ValueError, match="two"):
        next(headed)
    assert next(headed, None) is None


def test_stopping_a_plan_closes_the_generators_that_it_created():
    closed = []

    def numbers():
        try:
            yield from range(5)
        finally:
            closed.append("source")

    def add_one(items):
        try:
            yield from (x + 1 for x in items)
        finally:
            closed.append("transform")

    stream = LocalIterator(numbers, "source").transform(add_one)
    assert next(stream) == 1
    stream.stop()
    assert sorted(closed) == ["source", "transform"]


def test_all_errors_of_stopping_a_plan_are_shown():
    class Fails:
        def __init__(self, name):
            self.name = name

        def __call__(self, item):
            return item

        def stop(self):
            raise OSError(self.name)

    stream = LocalIterator(lambda: iter(range(5)), "source").for_each(Fails("first"))
    stream = stream.for_each(Fails("second"))
    next(stream)
    with pytest.raises(OSError, match=r"first|second") as caught:
        stream.stop()
    shown = [str(caught.value), *caught.value.__notes__]
    assert all(any(name in text for text in shown) for name in ("first", "second"))


@pytest.mark.parametrize("saved_after", range(1, 5))
def test_restored_sequence_does_not_read_an_index_that_raised_again(saved_after):
    class Records(collections.abc.Sequence):
        def __len__(self):
            return 5

        def __getitem__(self, index):
            if index in (1, 2):
                raise OSError(f"bad record {index}")
            return index

    def outcome(stream):
        try:
            return next(stream)
        except OSError as error:
            return str(error)

    expected = [0, "bad record 1", "bad record 2", 3, 4]
    stream = LocalIterator(Records())
    before = [outcome(stream) for _ in range(saved_after)]
    restored = LocalIterator(Records())
    restored.load_state_dict(stream.state_dict())
    assert before + [outcome(restored) for _ in range(5 - saved_after)] == expected
    assert list(restored) == []


def test_sequence_continues_after_an_item_that_raises():
    class Rows(collections.abc.Sequence):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            if index == 1:
                raise ValueError("damaged row")
            return index

    stream = LocalIterator(Rows())
    assert next(stream) == 0
    with pytest.raises(ValueError, match="damaged row"):
        next(stream)
    assert list(stream) == [2]


def test_item_that_a_transform_fails_on_is_reported_as_lost():
    def fails_on_2(items):
        for item in items:
            if item == 2:
                raise ValueError(item)
            yield item

    plan = LocalIterator(range(4), "source").transform(fails_on_2)
    lost = []
    plan.metrics.on_lost.append(lost.append)
    assert plan.take(2) == [0, 1]
    with pytest.raises(ValueError, match="2"):
        next(plan)
    assert (list(plan), lost) == ([3], [2])


def test_all_items_that_a_transform_loses_together_are_reported():
    def threes(items):
        while len(part := list(itertools.islice(items, 3))) == 3:
            if part[0] == 3:
                raise ValueError(part)
            yield part

    plan = LocalIterator(range(9), "source").transform(threes)
    lost = []
    plan.metrics.on_lost.append(lost.append)
    assert next(plan) == [0, 1, 2]
    with pytest.raises(ValueError, match="3, 4, 5"):
        next(plan)
    assert (next(plan), lost) == ([6, 7, 8], [3, 4, 5])


def test_what_states_of_operators_count_is_saved():
    class CountsInState:
        def __call__(self, item):
            return item

        def state_dict(self):
            plan.metrics.counters["lost"] += 1
            return {}

        def load_state_dict(self, state):
            pass

    plan = LocalIterator([1], "source").for_each(CountsInState())
    next(plan)
    assert plan.state_dict()["metrics"]["counters"]["lost"] == 1


@pytest.mark.parametrize("seed", [-1, "abc", float("nan")])
def test_seed_of_shuffle_is_an_int(seed):
    with pytest.raises(ValueError, match="seed must be an int of at least 0"):
        stream(1).shuffle(2, seed)
    assert list(stream(1, 2).shuffle(2, np.int64(3))) == list(stream(1, 2).shuffle(2, 3))


def test_function_of_transform_returns_an_iterable():
    with pytest.raises(TypeError, match="must return an iterable, it returned None"):
        next(stream(1).transform(lambda items: None))


def test_item_is_reported_as_lost_if_a_retry_is_interrupted():
    errors = iter([ValueError("first"), KeyboardInterrupt()])

    def fails(item):
        raise next(errors)

    lost = []
    stream = LocalIterator([1, 2]).for_each(fails, on_error=Retry(3))
    stream.metrics.on_lost.append(lost.append)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert lost == [1]
