"""Recovery: dead or hanging shards are replaced, other shards keep their items."""

import dataclasses
import functools
import itertools
import logging
import os
import signal
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from flowrl.errors import ConfigError
from flowrl.iter import (
    LocalIterator,
    ParallelIteratorWorker,
    Recovery,
    Retry,
    ShardFailedError,
    Skip,
    from_actors,
    from_items,
    from_iterators,
    from_range,
    ray_health,
    ray_runtime,
)
from flowrl.iter.recovery import ConstructorError, is_death, original_error
from flowrl.iter.shard_stream import ShardRequest, ShardStream
from tests.processes import wait_until_ended

QUICK = Recovery(backoff_s=0.01)


class Dies:
    """Yields 0 … n-1; kills its process before item `dies_at` unless the file `marker` exists."""

    def __init__(self, n, dies_at=None, marker=""):
        self.n, self.dies_at, self.marker = n, dies_at, marker

    def __call__(self):
        for i in range(self.n):
            if i == self.dies_at and not os.path.exists(self.marker):
                if self.marker:
                    open(self.marker, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            yield i


@pytest.mark.parametrize(
    "gather", ["async", *(pytest.param(g, marks=pytest.mark.slow) for g in ("sync", "rounds"))]
)
def test_killed_shard_is_replaced_and_skips_received_items(ray_session, tmp_path, gather):
    marker = str(tmp_path / "died")
    it = from_iterators([Dies(6), Dies(6, 3, marker)], recovery=QUICK)
    stream = {
        "sync": it.gather_sync,
        "async": it.gather_async,
        "rounds": lambda: it.batch_across_shards().flatten(),
    }[gather]()
    with stream:
        pairs = [(sources[-1], item) for sources, item in stream.zip_with_source()]
        gather_stage = stream.stage if gather != "rounds" else stream.stage.parents[0]
        stats = gather_stage.extra_stats()
    items = [item for _, item in pairs]
    assert sorted(items) == sorted([*range(6)] * 2)
    assert os.path.exists(marker)
    assert stats["restarts"] == 1
    assert stats.get("shards_failed", 0) == 0
    if gather != "rounds":
        killed = [source for source, _ in pairs if source.shard == 1]
        assert [source.seq for source in killed] == [0, 1, 2, 3, 4, 5]
        assert [source.incarnation for source in killed] == [0, 0, 0, 1, 1, 1]
        assert {source.incarnation for source, _ in pairs if source.shard == 0} == {0}


@pytest.mark.slow
def test_shard_that_dies_repeatedly_fails(ray_session):
    it = from_iterators([Dies(4), Dies(4, 2)], name="mortals", recovery=QUICK)
    with it.gather_sync() as stream:
        items, failures = [], []
        while True:
            try:
                items.append(next(stream))
            except StopIteration:
                break
            except ShardFailedError as error:
                failures.append(error)
        assert sorted(items) == [0, 0, 1, 1, 2, 3]
        (failure,) = failures
        assert "shard 1 of mortals has failed: it died 3 times in a row" in str(failure)
        assert "1 of 2 shards remain" in str(failure)
        stats = stream.stats()[0]
        assert (stats["shards_failed"], stats["restarts"]) == (1, 2)
        assert stream.metrics.counters == {"num_shard_restarts": 2, "num_shards_failed": 1}


@pytest.mark.slow
def test_failure_of_all_shards_is_not_the_end_of_the_stream(ray_session):
    with from_iterators([Dies(4, 1)], recovery=QUICK).gather_async() as stream:
        assert next(stream) == 0
        with pytest.raises(ShardFailedError, match="3 times"):
            next(stream)
        for _ in range(2):
            with pytest.raises(ShardFailedError, match="all 1 shards"):
                next(stream)


def test_constructor_that_raises_is_not_retried(ray_session):
    class Broken(ParallelIteratorWorker):
        def __init__(self):
            raise ValueError("no such file")

    actor = ray_session.remote(num_cpus=0)(Broken)
    it = from_actors([actor.remote()], recreate=lambda index: actor.remote(), recovery=QUICK)
    with pytest.raises(ShardFailedError, match="its constructor raised") as caught:
        next(it.gather_sync())
    assert "Last error: ValueError: no such file." in str(caught.value)


class RaisesAtSecondCreation(ParallelIteratorWorker):
    """Yields its number; the creation that finds one file in the folder raises."""

    def __init__(self, folder):
        number = len(os.listdir(folder))
        with open(os.path.join(folder, str(number)), "w"):
            pass
        if number == 1:
            raise ConnectionError("the port is in use")
        super().__init__(lambda: itertools.repeat(number))


@pytest.mark.slow
def test_constructor_that_has_worked_is_retried(ray_session, tmp_path):
    actor = ray_session.remote(num_cpus=0)(RaisesAtSecondCreation)
    first = actor.remote(str(tmp_path))
    it = from_actors([first], recreate=lambda index: actor.remote(str(tmp_path)), recovery=QUICK)
    with it.gather_async() as stream:
        assert next(stream) == 0
        ray_session.kill(first)
        item = next(stream)
        while item == 0:  # items that the killed actor has sent
            item = next(stream)
        assert item == 2
        assert stream.metrics.counters["num_shard_restarts"] == 2


@pytest.mark.slow
def test_actor_of_the_user_is_recreated_or_reported(ray_session):
    worker = ray_session.remote(num_cpus=0)(ParallelIteratorWorker)

    def actors():
        return [worker.remote(lambda: iter(int, 1)) for _ in range(2)]

    handles = actors()
    with from_actors(handles, name="ours", recovery=QUICK).gather_async() as stream:
        stream.take(4)
        ray_session.kill(handles[0])
        items, errors = [], []
        while len(items) < 20:
            try:
                items.append(next(stream))
            except ShardFailedError as error:
                errors.append(str(error))
        (error,) = errors
        assert "shard 0 of ours has failed" in error
        assert "recreate" in error
    ray_session.kill(handles[1])

    handles, recreated = actors(), []

    def recreate(index):
        recreated.append(index)
        return worker.remote(lambda: iter(int, 1))

    with from_actors(handles, recreate=recreate, recovery=QUICK).gather_sync() as stream:
        stream.take(4)
        ray_session.kill(handles[1])
        assert stream.take(20) == [0] * 20
        assert recreated == [1]
    ray_session.kill(handles[0])


@pytest.mark.slow
@pytest.mark.parametrize("num_async", [1, 3])
def test_hanging_shard_is_replaced(ray_session, tmp_path, num_async):
    marker = tmp_path / "hung"

    class Hangs:
        def __call__(self):
            for i in range(6):
                if i == 2 and not marker.exists():
                    marker.touch()
                    time.sleep(600)
                yield i

    recovery = Recovery(timeout_s=2.0, backoff_s=0.01)
    it = from_iterators([lambda: range(6), Hangs()], recovery=recovery)
    with it.gather_async(num_async=num_async) as stream:
        assert sorted(stream) == sorted([*range(6)] * 2)
        assert stream.stats()[0]["restarts"] >= 1  # more if a busy machine delays the other


def test_back_off_doubles_with_each_death_whatever_its_cause(monkeypatch):
    gather = from_items([1], in_process=True, num_shards=1).gather_sync()
    (shard,) = gather.stage.states
    shard.recovery = Recovery(max_backoff_s=1.0)
    monkeypatch.setattr("flowrl.iter.gather.time.monotonic", lambda: 0.0)
    delays = []
    for number in range(6):
        gather.stage._handle_death(shard, 0, OSError(f"cause {number % 2}"))
        delays.append(shard.restart_at)
        shard.dead_incarnation = None
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    shard.recovery = Recovery(max_identical_deaths=2)
    with pytest.raises(ShardFailedError, match="it died 2 times in a row with the same error"):
        gather.stage._handle_death(shard, 0, OSError("cause 1"))


@pytest.mark.slow
def test_other_shards_continue_during_the_back_off_of_one(ray_session, tmp_path):
    marker = str(tmp_path / "died")
    slow = Recovery(backoff_s=3600, max_backoff_s=3600)
    it = from_iterators([lambda: iter(int, 1), Dies(4, 1, marker)], recovery=slow)
    gather = it.gather_async()
    dead = gather.stage.states[1]
    with gather.zip_with_source() as stream:

        def next_shard():
            sources, _ = next(stream)
            return sources[0].shard

        deadline, shards = time.monotonic() + 60, []
        while dead.dead_incarnation is None:
            shards.append(next_shard())
            assert time.monotonic() < deadline
        shards += [next_shard() for _ in range(200)]
        assert shards.count(1) == 1
        dead.restart_at = 0.0  # the back-off ends
        while shards.count(1) < 4:
            assert time.monotonic() < deadline
            shards.append(next_shard())


def test_a_limit_that_allows_no_request_leaves_no_deadline_of_a_restart(ray_session):
    class NoRequests:
        def may_request(self, in_flight, oldest):
            return False

    gather = from_iterators([lambda: iter(int, 1)]).gather_async()
    stage = gather.stage
    stage.states[0].dead_incarnation, stage.states[0].restart_at = 0, 1.0
    assert stage._deadlines() == [1.0]
    stage._limit = NoRequests()
    stage._send_requests()
    assert stage._deadlines() == []
    gather.stop()


@pytest.mark.slow
def test_stop_ends_all_actors_and_threads(ray_session):
    threads = set(threading.enumerate())
    stream = from_iterators([lambda: iter(int, 1)] * 2).repartition(2).gather_async(num_async=2)
    stream.take(3)
    (pool,) = stream.stage.shards.pools()
    pools = [pool, *pool.upstream]
    handles = [each.handle(index) for each in pools for index in range(len(each))]
    pids = ray_session.get([handle.apply.remote(lambda worker: os.getpid()) for handle in handles])
    assert len(set(pids)) == 4
    stream.stop()
    wait_until_ended(pids)
    assert not stream.stage.waits()
    assert not set(threading.enumerate()) - threads
    with pytest.raises(RuntimeError, match="was stopped"):
        next(stream)


def test_invalid_recovery_is_rejected():
    with pytest.raises(ValueError, match="timeout_s"):
        Recovery(timeout_s=0)
    for wrong in (
        {"max_identical_deaths": 0}, {"max_backoff_s": -1}, {"backoff_s": float("nan")},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="out of range"):
            Recovery(**wrong)


def test_recreated_stream_does_not_raise_errors_again_that_were_raised_before():
    def fails(x):
        if x in (1, 3):
            raise ValueError(x)
        return x

    steps = [("for_each", (fails,), {}, "here")]
    request = ShardRequest("s", steps, skip=1, skip_errors=1)  # after 0 and the error of 1
    stream = ShardStream(ParallelIteratorWorker(range(5)), request)
    assert stream.reply(request).items == [2]
    with pytest.raises(ValueError, match="3"):
        stream.reply(request)
    assert stream.reply(request).items == [4]


def test_shard_collects_items_for_the_time_of_a_request(monkeypatch):
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("flowrl.iter.shard_stream.time", clock)

    def takes_10_ms(item):
        now[0] += 0.010
        return item

    steps = [("for_each", (takes_10_ms,), {}, "here")]
    request = ShardRequest("s", steps, batch_ms=35)
    stream = ShardStream(ParallelIteratorWorker(range(7)), request)
    assert stream.reply(request).items == [0, 1, 2, 3]
    last = stream.reply(request)
    assert (last.items, last.end) == ([4, 5, 6], True)
    single = ShardRequest("t", steps)
    stream = ShardStream(ParallelIteratorWorker(range(7)), single)
    assert stream.reply(single).items == [0]


@pytest.mark.slow
def test_failed_recreation_is_retried(ray_session):
    actor = ray_session.remote(num_cpus=0)(ParallelIteratorWorker)
    actors = [actor.remote(lambda: iter(range(4)))]
    attempts = []

    def recreate(index):
        attempts.append(index)
        if len(attempts) == 1:
            raise OSError("the cluster is busy")
        actors.append(actor.remote(lambda: iter(range(4))))
        return actors[-1]

    with from_actors(actors[:1], recreate=recreate, recovery=QUICK).gather_async() as stream:
        assert next(stream) == 0
        ray_session.kill(actors[0])
        rest = list(stream)
        assert stream.stats()[0]["restarts"] == 1
    # one item may have been in flight
    assert rest in ([1, 2, 3], [2, 3])
    assert attempts == [0, 0]


def test_dead_actor_called_by_the_code_of_a_shard_is_not_the_death_of_the_shard(ray_session):
    helper = ray_session.remote(num_cpus=0)(ParallelIteratorWorker).remote([])
    ray_session.kill(helper)

    def call_helper(x):
        import ray

        if x == 1:
            ray.get(helper.apply.remote(len))
        return x

    it = from_iterators([lambda: iter(range(3))], recovery=QUICK).for_each(call_helper)
    with it.gather_sync(on_error=Skip()) as stream:
        assert list(stream) == [0, 2]
        assert stream.stats()[0]["skipped"] == 1
        assert "restarts" not in stream.stats()[0]


def test_shard_that_the_memory_monitor_kills_counts_as_dead():
    from ray.exceptions import OutOfMemoryError, RayTaskError

    error = OutOfMemoryError("the actor was killed")
    assert is_death(error)
    raised_by_code = RayTaskError("apply", "traceback", error).as_instanceof_cause()
    assert isinstance(raised_by_code, OutOfMemoryError)
    assert not is_death(raised_by_code)


def test_actor_that_cannot_create_its_object_counts_as_dead():
    from ray.exceptions import RayTaskError

    error = ConstructorError("OSError: the port is in use")
    raised_by_actor = RayTaskError("apply", "traceback", error).as_instanceof_cause()
    assert original_error(raised_by_actor) is error
    assert is_death(error)
    assert not is_death(raised_by_actor)


@pytest.mark.slow
def test_hanging_shard_is_detected_if_another_is_always_ready(ray_session, tmp_path):
    marker = str(tmp_path / "hung")

    class Hangs:
        def __call__(self):
            yield "started"
            if not os.path.exists(marker):
                open(marker, "w").close()
                time.sleep(600)
            yield "back"

    it = from_iterators([lambda: iter(int, 1), Hangs()], recovery=Recovery(1.0, backoff_s=0.01))
    with it.gather_async(num_async=2) as stream:
        deadline = time.monotonic() + 60
        while "back" not in {next(stream) for _ in range(20)}:
            assert time.monotonic() < deadline
        assert stream.stats()[0]["restarts"] >= 1  # more if a busy machine delays the other


@pytest.mark.slow
def test_partition_that_dies_continues_where_the_others_are(ray_session):
    it = from_iterators([lambda: iter(range(20))], recovery=QUICK).repartition(1)
    with it.gather_sync() as stream:
        first = stream.take(5)
        ray_session.kill(stream.stage.shards.handle(0))
        rest = list(stream)
    # only the items that the dead partition had received are lost, and none is repeated
    assert first == list(range(5))
    assert rest == sorted(set(rest))
    assert set(rest) <= set(range(5, 20))
    assert len(rest) >= 12


def test_rounds_continue_without_a_shard_until_its_replacement_has_started(ray_session, tmp_path):
    marker = str(tmp_path / "died")
    leaves_out = Recovery(backoff_s=0.01, rounds_wait_for_replacement=False)
    endless = Dies(10**6)
    rounds = from_iterators(
        [endless, Dies(6, 3, marker)], recovery=leaves_out
    ).batch_across_shards()
    sizes, items = [], []
    with rounds:
        for sources, (first, *others) in rounds.zip_with_source():
            assert [source.shard for source in sources] == [0, 1][: len(sources)]
            assert first == len(sizes)  # each round has an item of the healthy shard
            sizes.append(len(sources))
            items += others
            if len(items) == 6:
                break
        restarts = rounds.stage.extra_stats()["restarts"]
    assert items == [0, 1, 2, 3, 4, 5]  # none lost, none twice
    assert restarts == 1
    assert sizes[:4] == [2, 2, 2, 1]
    assert sizes[-3:] == [2, 2, 2]


class HangsInConstructor(ParallelIteratorWorker):
    def __init__(self, marker):
        super().__init__(lambda: iter(int, 1), False)
        if marker is not None and not os.path.exists(marker):
            with open(marker, "w"):
                time.sleep(600)


@pytest.mark.slow
def test_replacement_that_hangs_while_it_starts_is_replaced(ray_session, tmp_path, monkeypatch):
    monkeypatch.setattr("flowrl.iter.gather.STARTING_S", 3.0)
    actor = ray_session.remote(num_cpus=0)(HangsInConstructor)
    actors = [actor.remote(None) for _ in range(2)]

    def recreate(index):
        actors.append(actor.remote(str(tmp_path / "hung")))
        return actors[-1]

    recovery = Recovery(timeout_s=2.0, backoff_s=0.01, rounds_wait_for_replacement=False)
    rounds = from_actors(actors[:2], recreate=recreate, recovery=recovery).batch_across_shards()
    with rounds:
        assert next(rounds) == [0, 0]
        ray_session.kill(actors[1])
        started, sizes = time.monotonic(), [2]
        while len(actors) < 4 or sizes[-1] == 1:
            assert time.monotonic() - started < 90
            sizes.append(len(next(rounds)))
        assert rounds.stage.extra_stats()["restarts"] == 2
    for each in (actors[0], actors[3]):
        ray_session.kill(each)


@pytest.mark.slow
def test_only_shard_is_waited_for(ray_session, tmp_path):
    leaves_out = Recovery(backoff_s=0.01, rounds_wait_for_replacement=False)
    shards = from_iterators([Dies(6, 3, str(tmp_path / "died"))], recovery=leaves_out)
    with shards.gather_sync() as stream:
        assert list(stream) == [0, 1, 2, 3, 4, 5]


@pytest.mark.slow
def test_two_gathers_of_one_pool_replace_a_dead_actor_once(ray_session):
    actor = ray_session.remote(num_cpus=0)(ParallelIteratorWorker)
    actors = []

    def recreate(index):
        actors.append(actor.remote(lambda: iter(range(50))))
        return actors[-1]

    it = from_actors([recreate(0)], recreate=recreate, recovery=QUICK)
    with it.gather_async() as one, it.gather_async() as two:
        one.take(2), two.take(2)
        ray_session.kill(actors[0])
        while len(actors) < 2:
            next(one)
        assert len(two.take(40)) == 40
        assert len(one.take(40)) == 40
    assert len(actors) == 2


def test_options_of_start_ray_override_its_defaults(monkeypatch):
    import ray
    from ray._private.node import Node

    calls, starts_dashboard, start = [], [], Node.start_api_server

    def init(*args, **options):
        calls.append((args, options))
        starts_dashboard.append(Node.start_api_server is start)

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray_runtime, "_num_users", 0)
    monkeypatch.setattr(ray_runtime, "_check_reachable", lambda cluster: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ray_runtime.start_ray(include_dashboard=True, num_cpus=1)
    ray_runtime.start_ray("host:1", num_cpus=1, logging_level=logging.INFO)
    monkeypatch.setenv("RAY_ADDRESS", "host:2")
    ray_runtime.start_ray("host:1")
    ray_runtime.start_ray()
    monkeypatch.delenv("RAY_ADDRESS")
    ray_runtime.start_ray()
    assert starts_dashboard == [True, True, True, True, False]
    assert calls == [
        (("local",), {"logging_level": logging.WARNING, "include_dashboard": True, "num_cpus": 1}),
        (("host:1",), {"logging_level": logging.INFO}),
        (("host:1",), {"logging_level": logging.WARNING}),
        (("host:2",), {"logging_level": logging.WARNING}),
        (
            ("local",),
            {"logging_level": logging.WARNING, "include_dashboard": False, "num_cpus": None},
        ),
    ]


def test_address_that_a_connected_process_does_not_use_is_reported(ray_session, caplog):
    assert not ray_runtime.start_ray("10.255.255.1:6379")
    assert (
        "address='10.255.255.1:6379' is not used: this process is connected to the" in caplog.text
    )
    caplog.clear()
    for address in ("auto", None, ray_session.get_runtime_context().gcs_address):
        assert not ray_runtime.start_ray(address)
    assert not caplog.text


def test_address_without_a_cluster_is_an_error(monkeypatch):
    import ray

    def refuse(*args, **options):
        raise ConnectionError("nothing answers")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConfigError, match=rf"RAY_ADDRESS.*no Ray cluster at '{address}': noth"):
            ray_runtime.start_ray()
    with pytest.raises(ConfigError, match=rf"RAY_ADDRESS.*nothing listens at {address}: .*--port="):
        ray_runtime.start_ray()
    monkeypatch.delenv("RAY_ADDRESS")
    with pytest.raises(ConnectionError):
        ray_runtime.start_ray()


def test_ray_that_does_not_start_in_time_is_an_error(monkeypatch):
    import ray

    def time_out(*args, **options):
        raise Exception("The current node timed out during startup. This could happen because …")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", time_out)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=r"the machine is busy .* \(num_workers=0\)$"):
        ray_runtime.start_ray()


@pytest.mark.parametrize("in_process", [False, True])
def test_error_on_a_shard_leaves_its_item_there(ray_session, in_process):
    def fail(item):
        raise ValueError(f"bad {item}")

    stream = from_items([1], num_shards=1, in_process=in_process).for_each(fail).gather_sync()
    with stream, pytest.raises(ValueError, match="bad 1") as raised:
        next(stream)
    assert not hasattr(raised.value, "item")


class OwnConstructorError(Exception):
    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")
        self.code = code


class LockError(ValueError):
    def __init__(self):
        super().__init__("locked", threading.Lock())
        self.lock, self.number = threading.Lock(), 3


@pytest.mark.parametrize("in_process", [False, True])
def test_exceptions_that_cannot_be_pickled_keep_their_class(ray_session, in_process):
    def fail(x):
        raise OwnConstructorError(7, "diverged") if x else LockError()

    with pytest.raises(OwnConstructorError, match="7: diverged") as caught:
        from_items([1], num_shards=1, in_process=in_process).for_each(fail).gather_sync().take(1)
    assert caught.value.code == 7
    assert "fail" in "".join(caught.value.__notes__)
    with pytest.raises(LockError, match="locked") as locked:
        from_items([0], num_shards=1, in_process=in_process).for_each(fail).gather_sync().take(1)
    assert locked.value.number == 3


def test_generator_that_always_raises_cannot_be_skipped():
    """Skip would repeat it for ever."""

    def fails():
        yield 1
        raise ValueError("damaged")

    plan = from_iterators([fails, [5, 6]], in_process=True).gather_sync(on_error=Skip())
    assert plan.take(2) == [1, 5]
    with pytest.raises(ValueError, match="damaged"):
        plan.take(3)


@pytest.mark.parametrize(("on_error", "failures"), [(Retry(5), 3), (Skip(), 3), (Retry(20), 15)])
def test_generator_that_fails_a_few_times_continues(on_error, failures):
    left = [failures]

    def fails():
        yield 1
        if left[0]:
            left[0] -= 1
            raise OSError("busy")
        yield 2

    plan = from_iterators([fails], in_process=True).gather_sync(on_error=on_error)
    assert list(plan) == [1, 2]


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    reason: str


def test_skipped_errors_are_counted_across_a_restore():
    class Fails:
        def __iter__(self):
            return self

        def __next__(self):
            raise ValueError("no item")

    def plan():
        it = from_iterators([Fails()], in_process=True)
        return it.gather_sync(on_error=Skip(max=2))

    first, second = plan(), plan()
    with pytest.raises(ValueError, match="no item"):
        next(first)
    second.load_state_dict(first.state_dict())
    assert second.stage.skipped == first.stage.skipped == 2


@pytest.mark.parametrize("on_error", ["raise", Retry(2), Skip(1)])
def test_frozen_error_of_a_shard_keeps_its_type(on_error):
    def fails(item):
        raise FrozenError("full")

    shards = from_range(4, 1, in_process=True).for_each(fails, on_error=on_error)
    with pytest.raises(FrozenError):
        shards.gather_sync().take(2)


def test_statistics_that_raise_on_a_shard_lose_no_items(monkeypatch):
    class Counts:
        def __call__(self, item):
            return item

        def extra_stats(self):
            return {"rate": 1 / 0}

    monkeypatch.setattr("flowrl.iter.shard_stream.STATS_INTERVAL_S", 0.0)
    plan = from_range(6, 1, in_process=True).for_each(Counts()).gather_sync()
    assert list(plan) == list(range(6))


@pytest.mark.slow
def test_items_of_a_failed_shard_are_requested_again_after_a_resume(ray_session, tmp_path):
    marker = tmp_path / "works"

    def dies():
        for i in range(6):
            if i == 2 and not marker.exists():
                os.kill(os.getpid(), signal.SIGKILL)
            yield 10 + i

    def plan():
        recovery = Recovery(backoff_s=0, max_identical_deaths=1)
        endless = functools.partial(itertools.count, 100)
        return from_iterators([endless, dies], recovery=recovery).gather_async()

    found, has_failed = [], False
    with plan() as stream:
        while not has_failed:
            try:
                found.append(next(stream))
            except ShardFailedError:
                has_failed = True
        found.append(next(stream))  # the failed shard gets no further request
        state = stream.state_dict()
    marker.touch()
    with plan() as stream:
        stream.load_state_dict(state)
        while not set(range(10, 16)) <= set(found):
            found.append(next(stream))
    assert sorted(item for item in found if item < 100) == list(range(10, 16))
    others = [item for item in found if item >= 100]
    assert others == list(range(100, 100 + len(others)))


def test_number_of_requests_may_change_at_a_resume():
    first = from_items(list(range(20)), 2, in_process=True).gather_async(num_async=1)
    first.take(3)
    second = from_items(list(range(20)), 2, in_process=True).gather_async(num_async=4)
    second.load_state_dict(first.state_dict())
    next(second)
    assert second.stats()[-1]["in_flight"] + len(second.stage._to_request) == 8
    assert sorted(second) == list(range(4, 20))


@pytest.mark.parametrize(
    "kind",
    ["after_item", pytest.param("before_item", marks=pytest.mark.slow), "gather_sync", "tasks"],
)
def test_interrupted_fetch_loses_no_item(ray_session, monkeypatch, kind):
    import ray

    shards = from_iterators([range(0, 10, 2), range(1, 10, 2)], recovery=Recovery(timeout_s=60))
    if kind == "tasks":
        stream = LocalIterator(range(10)).for_each(lambda x: x, max_concurrency=2)
    elif kind == "gather_sync":
        stream = shards.gather_sync()
    else:
        stream = shards.gather_async(next_request=kind)
    found, calls, real = [next(stream)], itertools.count(1), ray.get

    def interrupted(*args, **kwargs):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(ray, "get", interrupted)
    interruptions = in_flight = 0
    with stream:
        while len(found) < 10:
            try:
                found.append(next(stream))
            except KeyboardInterrupt:
                interruptions += 1
            in_flight = max(in_flight, stream.stats()[-1].get("in_flight", 0))
    assert interruptions == 1
    assert in_flight <= 2 + (kind == "before_item")  # whose next request is sent before
    assert sorted(found) == list(range(10))


def test_gathers_of_actors_watch_ray(ray_session, monkeypatch):
    monkeypatch.setattr(ray_health, "_watch", None)
    with from_range(4, 2).gather_async() as stream:
        assert sorted(stream) == [0, 1, 2, 3]
    assert ray_health._watch is not None


def test_first_skipped_item_and_many_in_a_row_are_reported(caplog, monkeypatch):
    monkeypatch.setattr("flowrl.iter.errors.MANY_DROPPED", 5)

    def fails(x):
        if x < 20:
            raise ValueError(f"item {x}")
        return x

    with caplog.at_level(logging.WARNING, "flowrl"):
        assert list(LocalIterator(range(22)).for_each(fails, on_error=Skip())) == [20, 21]
    first, many = (record.getMessage() for record in caplog.records)
    assert "Skip drops an item after ValueError('item 0')" in first
    assert "dropped 5 items without a result in between" in many
    assert "ValueError('item 4')" in many


def test_handles_of_actors_are_checked():
    with pytest.raises(TypeError, match="from_actors takes handles of actors"):
        from_actors([5])


def test_operator_that_cannot_be_sent_names_its_stage(ray_session):
    lock = threading.Lock()
    with from_range(4, 2).for_each(lambda x: (x, lock)).gather_sync() as stream:
        with pytest.raises(TypeError) as caught:
            next(stream)
        assert "chained at" in "".join(caught.value.__notes__)


def test_error_of_a_shard_is_not_raised_again_after_a_resume():
    def fail_on_one(item):
        if item == 1:
            raise ValueError("boom")
        return item

    def new_stream():
        shards = from_iterators([range(4)], in_process=True).for_each(fail_on_one)
        return shards.gather_sync()

    stream, resumed = new_stream(), new_stream()
    assert next(stream) == 0
    with pytest.raises(ValueError, match="boom"):
        next(stream)
    resumed.load_state_dict(stream.state_dict())
    assert list(resumed) == list(stream) == [2, 3]
