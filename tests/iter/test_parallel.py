"""ParallelIterator in process and on actors: same items, same order, errors name the shard."""

import os
import threading
import time
from collections import deque

import pytest

from flowrl.iter import (
    NOT_READY,
    LocalIterator,
    ParallelIteratorWorker,
    Retry,
    Skip,
    from_actors,
    from_items,
    from_iterators,
    from_range,
)
from flowrl.iter.parallel import ParallelIterator
from flowrl.iter.pools import Pool
from flowrl.iter.shards import Shard

# for tests whose case on actors takes seconds
ACTORS_ARE_SLOW = pytest.mark.parametrize(
    "num_workers",
    [
        pytest.param(0, id="in_process"),
        pytest.param(2, id="two_actors", marks=pytest.mark.slow),
    ],
    indirect=True,
)


@pytest.fixture
def in_process(num_workers):
    return num_workers == 0


def test_gather_of_partitions_leaves_no_stream_on_the_workers():
    worker = ParallelIteratorWorker(list(range(9)))
    pool = Pool(lambda: [worker], 1)
    for it in (ParallelIterator([Shard(pool, 0)], "items"),) * 2:
        with it.repartition(2).gather_sync() as stream:
            assert len(stream.take(3)) == 3
            assert len(vars(worker)["_flowrl_streams"]) == 1
        assert not vars(worker)["_flowrl_streams"]


class Pairs:
    """Combines the items of a stream in pairs."""

    state_fields: dict = {"pending": list}

    def __init__(self):
        self.pending = []

    def __call__(self, item):
        self.pending.append(item)
        if len(self.pending) < 2:
            return []
        pair, self.pending = self.pending, []
        return [pair]

    def state_dict(self):
        return {"pending": self.pending}

    def load_state_dict(self, state):
        self.pending = state["pending"]


@ACTORS_ARE_SLOW
def test_shards_do_not_share_operators_with_a_state(in_process):
    it = from_items([0, 1, 2, 3], 2, in_process=in_process).combine(Pairs())
    for _ in range(2):
        with it.gather_sync() as stream:
            assert list(stream) == [[0, 2], [1, 3]]


class Locked(Pairs):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


def test_operators_of_shards_that_cannot_be_copied_are_named():
    it = from_items([0, 1, 2, 3], 2, in_process=True)
    with it.for_each(Locked()).gather_sync() as stream:
        assert len(list(stream)) == 4  # for_each shares the operator
    with (
        it.combine(Locked()).gather_sync() as stream,
        pytest.raises(TypeError, match=r"combine\(Locked\): each shard needs a copy"),
    ):
        stream.take(1)


def test_pools_before_one_that_cannot_start_are_released():
    def fails():
        raise OSError("no workers")

    first, second = Pool(lambda: [ParallelIteratorWorker([1])], 1), Pool(fails, 1)
    it = ParallelIterator([Shard(first, 0), Shard(second, 0)], "items")
    stream = it.gather_sync()
    for _ in range(2):
        with pytest.raises(OSError, match="no workers"):
            stream.take(1)
    stream.stop()
    assert first._num_readers == 0


@pytest.mark.parametrize("saves", [True, False])
def test_items_of_a_round_that_failed_are_saved_unless_they_are_useless(saves):
    it = from_items([1, 0], 2, in_process=True).for_each(lambda x: 1 // x)
    with it.batch_across_shards() as stream:
        stream.stage.saves_partial_rounds = saves
        with pytest.raises(ZeroDivisionError):
            next(stream)
        assert len(stream.stage.state_dict()["round"]) == len(stream.stage.queued()) == int(saves)


def test_gather_sync_returns_items_in_shard_order(in_process):
    it = from_range(10, 2, in_process=in_process).for_each(lambda x: 2 * x)
    with it.gather_sync() as stream:
        assert list(stream) == [0, 10, 2, 12, 4, 14, 6, 16, 8, 18]


@pytest.mark.slow_on_actors
def test_last_round_has_items_of_live_shards_only(in_process):
    with from_items([1, 2, 3], 2, in_process=in_process).batch_across_shards() as stream:
        assert list(stream) == [[1, 2], [3]]


@pytest.mark.parametrize(("next_request", "batch_ms"), [("after_item", 0), ("before_item", 5)])
def test_gather_async_returns_all_items_with_their_sources(in_process, next_request, batch_ms):
    it = from_items(list(range(20)), 3, in_process=in_process)
    options = {"num_async": 2, "next_request": next_request, "batch_ms": batch_ms}
    with it.gather_async(**options).zip_with_source() as stream:
        pairs = list(stream)
    assert sorted(item for _, item in pairs) == list(range(20))
    # also for several items in one reply
    assert all(sources[0].shard == item % 3 for sources, item in pairs)
    assert all(sources[0].seq == item // 3 for sources, item in pairs)


@pytest.mark.slow_on_actors
def test_steps_run_in_the_shards(in_process):
    it = from_range(12, 2, in_process=in_process).filter(lambda x: x % 2 == 0).batch(2)
    with it.gather_sync() as stream:
        assert list(stream) == [[0, 2], [6, 8], [4], [10]]
    it = from_items([[1, 2], [3]], 2, in_process=in_process).flatten().combine(lambda x: [x, x])
    it = it.transform(lambda it: (-x for x in it))
    with it.gather_sync() as stream:
        assert list(stream) == [-1, -3, -1, -3, -2, -2]


def test_local_shuffle_is_seeded():
    it = from_range(8, 1, in_process=True).local_shuffle(3, seed=5)
    assert it.take(8) == it.take(8) != list(range(8))
    assert sorted(it.take(8)) == list(range(8))


def test_error_names_the_shard_and_the_stream_continues(in_process):
    def bad(x):
        if x == 6:
            raise ValueError("six")
        return x

    it = from_range(10, 2, in_process=in_process).for_each(bad)
    with it.batch_across_shards() as stream:
        assert next(stream) == [0, 5]
        with pytest.raises(ValueError, match="six") as caught:
            next(stream)
        assert type(caught.value) is ValueError
        assert str(caught.value) == "six"
        notes = caught.value.__notes__
        assert any("shard 1" in note for note in notes)
        assert sum("for_each(bad), chained at" in note for note in notes) == 1
        assert sum("test_parallel.py:" in note.splitlines()[0] for note in notes) == 2
        if not in_process:
            assert notes[0].startswith("Traceback in the worker:")
            assert 'raise ValueError("six")' in notes[0]
            assert notes[0].endswith("\nValueError: six")
        assert next(stream) == [1, 7]  # the item of shard 0 was kept
        assert next(stream) == [2, 8]


@pytest.mark.slow_on_actors
def test_error_policies_of_a_gather(in_process):
    def bad(x):
        if x in (1, 6, 7):
            raise ValueError(str(x))
        return x

    it = from_range(10, 2, in_process=in_process).for_each(bad)
    with it.gather_sync(on_error=Skip()) as stream:
        assert sorted(stream) == [0, 2, 3, 4, 5, 8, 9]
        assert stream.stats()[0]["skipped"] == 3
    with it.gather_async(on_error=Retry(2)) as stream:
        assert sorted(stream) == [0, 2, 3, 4, 5, 8, 9]
    if not in_process:
        return
    with it.gather_sync(on_error=Retry(1)) as stream, pytest.raises(ValueError, match="7"):
        list(stream)
    later = it.for_each(lambda x: x, on_error=Skip())  # not the policy of the stage before
    with later.gather_sync() as stream, pytest.raises(ValueError, match="1"):
        stream.take(4)


@pytest.mark.slow_on_actors
def test_stop_iteration_in_a_shard_is_an_error(in_process):
    def ends(x):
        raise StopIteration

    with from_range(4, 2, in_process=in_process).for_each(ends).gather_async() as stream:
        with pytest.raises(RuntimeError, match="StopIteration") as caught:
            next(stream)
        assert "raised by shard" in "".join(caught.value.__notes__)


def test_error_in_the_generator_of_a_shard_is_not_its_end(in_process):
    calls = []

    def generator():
        calls.append(1)
        yield 1
        if len(calls) == 1:
            raise OSError("once")
        yield 2

    with from_iterators([generator], in_process=in_process).gather_sync() as stream:
        assert next(stream) == 1
        with pytest.raises(OSError, match="once"):
            next(stream)
        assert list(stream) == [2]


@pytest.mark.slow_on_actors
def test_items_have_the_sources_of_their_shards(in_process):
    with from_range(4, 2, in_process=in_process).gather_sync().zip_with_source() as stream:
        assert next(stream)[1] == 0
        sources, _ = next(stream)
    assert [source.shard for source in sources] == [1]
    assert {source.seq for source in sources} == {0}
    it = from_range(8, 2, in_process=in_process)
    both = it.gather_sync().union(it.for_each(lambda x: -x).gather_async(), deterministic=True)
    with both.batch(3).zip_with_source() as stream:
        for sources, items in stream:
            assert [source.shard for source in sources] == [abs(x) // 4 for x in items]


@pytest.mark.slow
def test_zip_with_source_actor_returns_the_actor_of_each_item(ray_session):
    worker = ray_session.remote(num_cpus=0)(ParallelIteratorWorker)
    actors = [worker.remote([i] * 3) for i in range(3)]
    a, b = from_actors(actors[:2]).gather_async(), from_actors(actors[2:]).gather_async(num_async=2)
    pairs = list(a.union(b).zip_with_source_actor())
    assert len(pairs) == 9
    assert all(actors[item] is actor for actor, item in pairs)
    for actor in actors:
        ray_session.kill(actor)


def test_lag_does_not_exceed_the_requests_in_flight(ray_session):
    """An item is at most num_async items of its shard older than the item returned last."""

    class Echo(ParallelIteratorWorker):
        """Serves the number of items that the driver had received at the time of the request."""

        def __init__(self):
            super().__init__(lambda: iter(lambda: self.received, None))
            self.received = 0

        def set_received(self, n):
            self.received = n

    actor = ray_session.remote(num_cpus=0)(Echo).remote()
    for num_async in (1, 3):
        for next_request in ("after_item", "before_item"):
            ray_session.get(actor.set_received.remote(0))
            stream = from_actors([actor]).gather_async(
                num_async=num_async, next_request=next_request
            )
            lags = []
            while len(lags) < 20:
                lags.append(len(lags) - next(stream))
                actor.set_received.remote(len(lags))
            assert max(lags) == num_async - (next_request == "after_item")
            stream.stop()
    ray_session.kill(actor)


@ACTORS_ARE_SLOW
def test_get_shard_and_shards_return_streams_of_single_shards(in_process):
    it = from_range(10, 2, in_process=in_process).for_each(lambda x: x + 1)
    assert it.num_shards() == 2
    with it.get_shard(1, num_async=3) as stream:
        assert list(stream) == [6, 7, 8, 9, 10]
    with it.get_shard(0, batch_ms=5) as stream:
        assert list(stream) == [1, 2, 3, 4, 5]
    streams = it.shards()
    assert [list(stream) for stream in streams] == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    for stream in streams:
        stream.stop()


@ACTORS_ARE_SLOW
def test_select_shards_and_union(in_process):
    a, b = from_range(6, 3, in_process=in_process), from_items([7, 8, 9], 1, in_process=in_process)
    assert a.select_shards([2, 0]).take(9) == [0, 4, 1, 5]
    united = a.for_each(lambda x: -x).union(b).for_each(lambda x: 10 * x)
    assert united.num_shards() == 4
    assert united.take(20) == [0, -20, -40, 70, -10, -30, -50, 80, 90]
    assert united.select_shards([3]).take(5) == [70, 80, 90]


@ACTORS_ARE_SLOW
def test_repartition_distributes_all_items(in_process):
    it = from_range(12, 2, in_process=in_process).for_each(lambda x: x)
    two = it.repartition(2)
    assert two.num_shards() == 2
    again = two.repartition(3, batch_ms=2).for_each(lambda x: x + 1)
    with again.gather_async() as stream:
        assert sorted(stream) == list(range(1, 13))
    if in_process:
        with two.get_shard(0) as even:
            assert sorted(even) == [0, 2, 4, 6, 8, 10]


def test_partitions_of_one_reader_share_the_streams_of_the_shards():
    """Each reader generates an item once for all of its partitions."""
    generated = []

    def items():
        for i in range(12):
            generated.append(i)
            yield i

    it = from_iterators([items, items], in_process=True)
    parts = it.repartition(2).repartition(3)
    with parts.gather_async() as stream:
        assert sorted(stream) == sorted([*range(12), *range(12)])
    assert len(generated) == 24
    with it.repartition(2).union(it.repartition(3)).gather_sync() as stream:
        assert sorted(stream) == sorted([*range(12)] * 4)
    assert len(generated) == 3 * 24
    with parts.union(parts).gather_sync() as stream:
        assert sorted(stream) == sorted([*range(12)] * 4)
    assert len(generated) == 5 * 24


def test_partition_without_a_reader_raises(monkeypatch):
    monkeypatch.setattr("flowrl.iter.shard_stream.MAX_BACKLOG", 5)
    stream = from_range(100, 1, in_process=True).repartition(2).get_shard(0)
    with pytest.raises(RuntimeError, match="partition 1 is 5 items behind"):
        list(stream)


def test_for_each_runs_as_ray_tasks(ray_session):
    def slow(x):
        time.sleep(0.05 * (x == 0))
        return x + 1

    with LocalIterator(range(8)).for_each(slow, max_concurrency=3) as stream:
        assert sorted(stream) == list(range(1, 9))
    with LocalIterator(range(8)).for_each(slow, max_concurrency=0) as stream:
        assert sorted(stream) == list(range(1, 9))
    with LocalIterator(range(3)).for_each(slow, resources={"num_cpus": 0.5}) as stream:
        assert list(stream) == [1, 2, 3]
    with from_range(6, 2).for_each(slow, max_concurrency=2).gather_sync() as stream:
        assert sorted(stream) == [1, 2, 3, 4, 5, 6]

    def num_cpus(x):
        import ray

        return ray.get_runtime_context().get_assigned_resources()["CPU"]

    with LocalIterator(range(2)).for_each(num_cpus, resources={"num_cpus": 3}) as stream:
        assert list(stream) == [3.0, 3.0]

    def bad(x):
        if x == 2:
            raise ValueError("two")
        return x

    with LocalIterator(range(5)).for_each(bad, max_concurrency=2) as stream:
        results, errors = [], []
        while True:
            try:
                results.append(next(stream))
            except StopIteration:
                break
            except ValueError as error:
                errors.append("".join(error.__notes__))
        assert sorted(results) == [0, 1, 3, 4]
        assert len(errors) == 1
        assert "int 2" in errors[0]
    first = LocalIterator(range(8)).for_each(slow, max_concurrency=2)
    first_items = first.take(3)
    second = LocalIterator(range(8)).for_each(slow, max_concurrency=2)
    second.load_state_dict(first.state_dict())
    assert sorted(first_items + list(second)) == list(range(1, 9))
    first.stop()


def test_restored_tasks_keep_the_limit(ray_session, tmp_path):
    gate = tmp_path / "open"

    def wait(x):
        while not gate.exists():
            time.sleep(0.01)
        return x

    first = LocalIterator(range(8)).for_each(wait, max_concurrency=6)
    assert first.stage.pull(False) is NOT_READY
    state = first.state_dict()
    with LocalIterator(range(8)).for_each(wait, max_concurrency=2) as second:
        second.load_state_dict(state)
        assert second.stage.holds_items()
        try:
            assert second.stage.pull(False) is NOT_READY
            assert len(second.stage._in_flight) == 2
        finally:
            gate.touch()
        assert sorted(second) == list(range(8))
    first.stop()


def test_tasks_do_not_block_an_async_sibling(ray_session, tmp_path):
    gate = tmp_path / "open"

    def wait(x):
        while not gate.exists():
            time.sleep(0.01)
        return x

    tasks = LocalIterator(range(3)).for_each(wait, max_concurrency=2)
    plan = tasks.union(LocalIterator(lambda: iter(str, 1)))
    assert plan.take(100) == [""] * 100
    assert [stage["in_flight"] for stage in plan.stats() if "in_flight" in stage] == [2]
    gate.touch()
    results = []
    deadline = time.monotonic() + 30
    while len(results) < 3 and time.monotonic() < deadline:
        item = next(plan)
        if item != "":
            results.append(item)
    assert sorted(results) == [0, 1, 2]
    plan.stop()


def test_streams_pickle_and_run_in_remote_tasks(ray_session):
    it = from_range(6, 2).for_each(lambda x: 2 * x)

    @ray_session.remote(num_cpus=0)
    def read(stream):
        return list(stream)

    assert ray_session.get([read.remote(s) for s in it.shards()]) == [[0, 2, 4], [6, 8, 10]]
    assert ray_session.get(read.remote(it.gather_sync().batch(2))) == [[0, 6], [2, 8], [4, 10]]

    @ray_session.remote(num_cpus=0)
    def total(parallel):
        return sum(parallel.gather_async())

    assert ray_session.get(total.remote(it)) == 30


@pytest.mark.slow_on_actors
def test_restored_plan_continues_where_it_was_saved(in_process):
    def plan():
        it = from_range(12, 2, in_process=in_process).for_each(lambda x: x + 1).local_shuffle(3, 1)
        return it.gather_sync().filter(lambda x: x != 5).batch(2).shuffle(2, seed=4)

    whole = from_range(12, 2, in_process=True).for_each(lambda x: x + 1).local_shuffle(3, 1)
    whole = whole.gather_sync().filter(lambda x: x != 5).batch(2).shuffle(2, seed=4)
    expected = list(whole)
    for taken in range(5) if in_process else (3,):
        with plan() as first, plan() as second:
            first_items = first.take(taken)
            second.load_state_dict(first.state_dict())
            assert first_items + list(second) == expected


def test_state_of_a_plan_with_other_stages_is_rejected_with_their_names():
    def plan():
        return from_items([1, 2, 3, 4], 2, in_process=True).gather_sync()

    with plan().batch(1) as saved, plan().shuffle(2, seed=1) as other:
        names = "only this plan has the stages shuffle.*; only the saved one has the stages batch"
        with pytest.raises(ValueError, match=names):
            other.load_state_dict(saved.state_dict())
        with pytest.raises(ValueError, match="another plan: only the saved one has the stages"):
            plan().load_state_dict(saved.state_dict())


def test_state_with_another_number_of_shards_is_rejected_and_changes_nothing():
    def plan(num_shards):
        return from_items([1, 2, 3, 4, 5, 6], num_shards, in_process=True).gather_sync().batch(1)

    saved = plan(2)
    saved.take(2)
    saved.metrics.counters["seen"] = 5
    state = saved.state_dict()
    other = plan(3)
    with pytest.raises(ValueError, match="the saved state has 2 shards, this plan has 3"):
        other.load_state_dict(state)
    assert not other.metrics.counters
    assert [row["items"] for row in other.stats()] == [0, 0]
    assert sorted(other) == [[1], [2], [3], [4], [5], [6]]


def test_state_lists_gathers_that_restart(ray_session):
    worker = ray_session.remote(num_cpus=0)(ParallelIteratorWorker)
    actor = worker.remote([1, 2, 3])
    assert from_actors([actor]).gather_sync().state_dict()["restarts"] == ["gather_sync"]
    assert from_range(3).gather_sync().state_dict()["restarts"] == []
    ray_session.kill(actor)


def test_building_a_plan_creates_no_actors(monkeypatch):
    import ray

    monkeypatch.setattr(ray, "remote", None)  # creating an actor raises
    it = from_range(4).for_each(str).repartition(3).union(from_items([1]))
    plan = it.gather_async().union(it.gather_sync().for_each(str)).batch(2)
    assert "gather_async" in plan.explain()
    plan.stop()


def test_stats_include_the_stages_on_the_shards(in_process):
    it = from_range(9, 2, in_process=in_process).for_each(str).filter(lambda text: text != "0")
    with it.gather_sync() as stream:
        assert "shards" not in stream.stats()[0]
        assert len(list(stream)) == 8
        shards = stream.stats()[0]["shards"]
        items = [[row["items"] for row in shards[index]] for index in (0, 1)]
        assert items == [[3, 4, 4], [5, 5, 5]]  # of filter, for_each and the source
        assert all(0 <= row["busy"] <= 1 for row in shards[0])
        assert "(on 2 shards: for_each(str)  [9 items" in stream.explain()
        assert "(on 2 shards: filter(" in stream.explain()
        assert "(on 2 shards: ParallelIteratorWorker  [9 items" in stream.explain()


def test_repeat_starts_again_at_the_end():
    it = from_iterators([lambda: [1, 2]], repeat=True, in_process=True)
    assert it.take(5) == [1, 2, 1, 2, 1]
    assert from_items([], 1, repeat=True, in_process=True).take(3) == []
    with pytest.raises(ValueError, match="repeat=True"):
        from_iterators([iter([1])], repeat=True, in_process=True).take(1)


def test_repr_shows_the_chained_methods():
    assert (
        repr(from_range(4, 2, in_process=True).for_each(str).filter(bool))
        == "ParallelIterator[from_range[4, shards=2].for_each().filter()]"
    )


def test_invalid_arguments_are_rejected_when_chained():
    it = from_range(4, in_process=True)
    with pytest.raises(TypeError, match="gather_sync"):
        iter(it)
    with pytest.raises(ValueError, match="num_async"):
        it.gather_async(num_async=0)
    with pytest.raises(ValueError, match="batch_ms"):
        it.gather_async(batch_ms=-1)
    with pytest.raises(ValueError, match="repartition: batch_ms"):
        it.repartition(2, batch_ms=-1)
    with pytest.raises(TypeError, match="from_items: items must be iterable, got NoneType"):
        from_items(None)
    with pytest.raises(TypeError, match="from_iterators: generators must be iterable, got int"):
        from_iterators(3)
    with pytest.raises(ValueError, match="next_request"):
        it.gather_async(next_request="never")
    with pytest.raises(TypeError, match="for_each"):
        it.for_each(3)
    with pytest.raises(ValueError, match="at least 1"):
        it.batch(0)
    with pytest.raises(ValueError, match="shuffle_buffer_size"):
        it.local_shuffle(0)
    with pytest.raises(ValueError, match="no shard 2"):
        it.get_shard(2)
    with pytest.raises(ValueError, match="at least one"):
        it.select_shards([])
    with pytest.raises(ValueError, match="no shard 7"):
        it.select_shards([0, 7])
    with pytest.raises(TypeError, match="ParallelIterator"):
        it.union([1])
    with pytest.raises(ValueError, match="num_partitions"):
        it.repartition(0)
    with pytest.raises(ValueError, match="num_shards"):
        from_range(4, 0)
    with pytest.raises(ValueError, match="at least one"):
        from_actors([])
    with pytest.raises(TypeError, match="iterable"):
        from_iterators([3])
    with pytest.raises(ValueError, match="gather them apart"):
        it.union(from_range(3)).gather_sync()


@pytest.mark.slow_on_actors
def test_readers_of_one_iterator_are_independent(in_process):
    it = from_range(8, 2, in_process=in_process)
    with it.gather_sync() as stream:
        assert next(stream) == 0
        assert it.take(2) == [0, 4]
        first, second = it.shards()
        assert next(first) == 0
        first.stop()
        assert next(second) == 4
        second.stop()
        assert list(stream) == [4, 1, 5, 2, 6, 3, 7]


def test_readers_of_one_repartition_are_independent():
    parts = from_range(8, 2, in_process=True).repartition(3)
    one, two = parts.gather_sync(), parts.gather_sync()
    pairs = list(zip(one, two, strict=True))
    assert sorted(a for a, _ in pairs) == sorted(b for _, b in pairs) == list(range(8))


def test_restored_stream_does_not_repeat_an_earlier_error():
    def build():
        it = from_range(8, 1, in_process=True)
        return it.for_each(lambda x: 1 // (x - 2) or x).gather_sync()

    def rest(stream):
        results = []
        while True:
            try:
                results.append(next(stream))
            except ZeroDivisionError:
                results.append("error")
            except StopIteration:
                return results

    whole = rest(build())
    assert whole.count("error") == 1
    first, second = build(), build()
    first_items = []
    for _ in range(4):
        try:
            first_items.append(next(first))
        except ZeroDivisionError:
            first_items.append("error")
    assert "error" in first_items
    second.load_state_dict(first.state_dict())
    assert first_items + rest(second) == whole


@ACTORS_ARE_SLOW
def test_shuffle_on_shards_is_seeded_and_restored(in_process):
    def build():
        return from_range(20, 2, in_process=in_process).local_shuffle(5).gather_sync()

    def whole(seed):
        with build() as stream:
            stream.start(seed)
            return list(stream)

    assert whole(1) == whole(1) != whole(2)
    with build() as first, build() as second:
        first_items = first.take(7)
        second.load_state_dict(first.state_dict())
        assert sorted(first_items + list(second)) == list(range(20))


def test_gather_of_tasks_on_shards_is_not_resumable(ray_session):
    it = from_range(4, 1).for_each(str, max_concurrency=2).gather_sync()
    assert it.state_dict()["restarts"] == ["gather_sync"]


def test_actor_can_have_methods_of_any_name(ray_session):
    class Custom:
        def apply(self, fn, *args):
            return fn(self, *args)

        def items(self):
            return range(3)

        def next_item(self, *args):
            return ["m"]

    actor = ray_session.remote(num_cpus=0)(Custom).remote()
    with from_actors([actor]).gather_sync() as stream:
        assert list(stream) == [0, 1, 2]
    ray_session.kill(actor)


def test_failed_task_is_retried_as_a_task(ray_session):
    def fails(x):
        raise KeyError(os.getpid())

    with LocalIterator([1, 2]).for_each(fails, max_concurrency=2, on_error=Retry(1)) as stream:
        for _ in range(2):
            with pytest.raises(KeyError) as caught:
                next(stream)
            assert caught.value.args[0] != os.getpid()
            assert "raise KeyError(os.getpid())" in caught.value.__notes__[0]
        assert list(stream) == []
    unpicklable = LocalIterator([1]).for_each(threading.Lock().locked, max_concurrency=2)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"cannot pickle|Could not serialize"):
            next(unpicklable)


def test_item_that_cannot_be_serialized_fails_like_other_items(ray_session):
    items = [1, threading.Lock(), 3]
    skipping = LocalIterator(items).for_each(str, max_concurrency=2, on_error=Skip())
    assert sorted(skipping) == ["1", "3"]
    raising = LocalIterator(items).for_each(str, max_concurrency=2)
    with pytest.raises(TypeError, match="Could not serialize") as caught:
        raising.take(3)
    assert "chained at" in "".join(caught.value.__notes__)
    retrying = LocalIterator(items).for_each(str, max_concurrency=2, on_error=Retry(2))
    lost = []
    retrying.metrics.on_lost.append(lost.append)
    with pytest.raises(TypeError, match="Could not serialize"):
        retrying.take(3)
    assert lost == [items[1]]
    with pytest.raises(ValueError, match="resources cannot contain max_retries"):
        LocalIterator(items).for_each(str, resources={"max_retries": 2})


def test_stop_lets_the_tasks_of_other_plans_run(ray_session):
    other = LocalIterator(range(40)).for_each(str, max_concurrency=4)
    for _ in range(5):
        stopped = LocalIterator(range(20)).for_each(str, max_concurrency=4)
        stopped.take(1)
        stopped.stop()
        assert len(other.take(4)) == 4


def test_sources_of_selected_shards_name_their_workers():
    """The number identifies the worker, for its weights and counters."""
    it = from_range(8, 4, in_process=True)
    with it.select_shards([1, 3]).gather_sync().zip_with_source() as stream:
        assert [source.shard for (source,), _ in stream] == [1, 3, 1, 3]
    with it.select_shards([2]).gather_async().zip_with_source_actor() as stream:
        assert {actor.items()[0] for actor, _ in stream} == {4}
    with (
        it.for_each(lambda x: 1 / 0).get_shard(3) as stream,
        pytest.raises(ZeroDivisionError) as caught,
    ):
        next(stream)
    assert any("raised by shard 3 of" in note for note in caught.value.__notes__)
    both = it.select_shards([3]).union(from_range(2, 1, in_process=True))  # two pools
    with both.gather_sync().zip_with_source() as stream:
        assert [source.shard for (source,), _ in stream] == [0, 1, 0, 1]


def test_shuffle_in_a_repartition_is_seeded_by_the_plan():
    it = from_range(40, 2, in_process=True).local_shuffle(10).repartition(2)

    def order(seed):
        stream = it.gather_sync()
        stream.start(seed)
        with stream:
            return list(stream)

    assert order("a") == order("a") != order("b")


def test_sequences_that_cannot_be_sliced_are_distributed_and_restored():
    items = deque(range(6))
    assert from_items(items, 2, in_process=True).take(6) == [0, 1, 2, 3, 4, 5]
    stream, copy = LocalIterator(items), LocalIterator(items)
    assert stream.take(2) == [0, 1]
    copy.load_state_dict(stream.state_dict())
    assert list(copy) == [2, 3, 4, 5]


@pytest.mark.parametrize("n", [-1, 1.5])
def test_invalid_ranges_are_rejected(n):
    with pytest.raises(ValueError, match="n must be an int of at least 0"):
        from_range(n)


def test_tasks_need_no_free_processor(ray_session):
    import ray

    @ray.remote(num_cpus=4)
    class Occupied:
        def ready(self):
            return True

    actor = Occupied.remote()
    ray.get(actor.ready.remote())
    with LocalIterator(range(3)).for_each(lambda x: x + 1, max_concurrency=2) as stream:
        assert sorted(stream) == [1, 2, 3]
    ray.kill(actor)


def test_generator_of_a_task_is_rejected(ray_session):
    def two(x):
        yield x
        yield 10 * x

    stream = LocalIterator([1]).for_each(two, max_concurrency=2)
    with stream, pytest.raises(TypeError, match=r"returned a generator: return a list"):
        next(stream)


def test_options_of_tasks_that_ray_rejects_name_the_stage(ray_session):
    stream = LocalIterator([1]).for_each(str, max_concurrency=2, resources={"processors": 1})
    with stream, pytest.raises(ValueError, match="processors") as caught:
        next(stream)
    assert "chained at" in "".join(caught.value.__notes__)


class StopsLate:
    def __init__(self, path, seconds=0.0, error=None):
        self.path, self.seconds, self.error = path, seconds, error

    def __call__(self, item):
        return item

    def stop(self):
        time.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        with open(self.path, "a") as file:
            file.write("stopped\n")


def test_error_of_one_shard_does_not_keep_others_from_stopping(tmp_path):
    path = tmp_path / "log"
    shards = from_range(10, 2, in_process=True)
    fails = shards.select_shards([0]).for_each(StopsLate(path, error=OSError("x")))
    stream = fails.union(shards.select_shards([1]).for_each(StopsLate(path))).gather_sync()
    next(stream)
    with pytest.raises(OSError, match="x"):
        stream.stop()
    assert path.read_text() == "stopped\n"


@pytest.mark.slow
def test_operators_on_actors_stop_before_the_actors_end(tmp_path, ray_session):
    path = tmp_path / "log"
    stream = from_range(10, 2).for_each(StopsLate(path, 0.3)).gather_sync()
    next(stream)
    stream.stop()
    assert path.read_text() == "stopped\n" * 2


def test_stopping_a_repeated_generator_closes_it():
    closed = []

    def numbers():
        try:
            yield from range(5)
        finally:
            closed.append(True)

    stream = from_iterators([numbers], repeat=True, in_process=True).gather_sync()
    next(stream)
    stream.stop()
    assert closed == [True]
