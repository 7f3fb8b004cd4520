"""Shards that die or hang: replaced in place, the others' items kept, all of it counted."""

import os
import signal
import threading
import time

import pytest

from flowrl.iter import (
    ParallelIteratorWorker,
    Recovery,
    ShardFailedError,
    Skip,
    from_actors,
    from_iterators,
)

QUICK = Recovery(backoff_s=0.01)


class Mortal:
    """Gives 0 … n-1, and kills its process before `dies_at` unless the file `sign` exists."""

    def __init__(self, n, dies_at=None, sign=""):
        self.n, self.dies_at, self.sign = n, dies_at, sign

    def __call__(self):
        for i in range(self.n):
            if i == self.dies_at and not os.path.exists(self.sign):
                if self.sign:
                    open(self.sign, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            yield i


@pytest.mark.parametrize("gather", ["sync", "async", "rounds"])
def test_a_killed_shard_is_replaced_and_skips_what_it_gave(ray_session, tmp_path, gather):
    sign = str(tmp_path / "died")
    it = from_iterators([Mortal(6), Mortal(6, 3, sign)], recovery=QUICK)
    stream = {
        "sync": it.gather_sync,
        "async": it.gather_async,
        "rounds": lambda: it.batch_across_shards().flatten(),
    }[gather]()
    with stream:
        pairs = [(sources[-1], item) for sources, item in stream.zip_with_source()]
        numbers = stream.stage if gather != "rounds" else stream.stage.parents[0]
        numbers = numbers.extra_stats()
    items = [item for _, item in pairs]
    assert sorted(items) == sorted([*range(6)] * 2)
    assert os.path.exists(sign)
    assert numbers["restarts"] == 1
    assert numbers.get("shards_failed", 0) == 0
    if gather != "rounds":
        mine = [source for source, _ in pairs if source.worker == 1]
        assert [source.seq for source in mine] == [0, 1, 2, 3, 4, 5]
        assert [source.incarnation for source in mine] == [0, 0, 0, 1, 1, 1]
        assert {source.incarnation for source, _ in pairs if source.worker == 0} == {0}


def test_a_shard_that_dies_again_and_again_is_given_up(ray_session):
    it = from_iterators([Mortal(4), Mortal(4, 2)], name="mortals", recovery=QUICK)
    with it.gather_sync() as stream:
        got, failures = [], []
        while True:
            try:
                got.append(next(stream))
            except StopIteration:
                break
            except ShardFailedError as error:
                failures.append(error)
        assert sorted(got) == [0, 0, 1, 1, 2, 3]
        (failure,) = failures
        assert "shard 1 of mortals has failed: it died 3 times in a row" in str(failure)
        assert "1 of 2 shards are left" in str(failure)
        numbers = stream.stats()[0]
        assert (numbers["shards_failed"], numbers["restarts"]) == (1, 2)
        assert stream.metrics.counters == {"num_shard_restarts": 2, "num_shards_failed": 1}


def test_when_all_have_failed_it_is_no_end(ray_session):
    with from_iterators([Mortal(4, 1)], recovery=QUICK).gather_async() as stream:
        assert next(stream) == 0
        with pytest.raises(ShardFailedError, match="3 times"):
            next(stream)
        for _ in range(2):
            with pytest.raises(ShardFailedError, match="all 1 shards"):
                next(stream)


def test_a_constructor_that_raises_is_not_tried_again(ray_session):
    class Broken(ParallelIteratorWorker):
        def __init__(self):
            raise ValueError("no such file")

    actor = ray_session.remote(num_cpus=0)(Broken)
    it = from_actors([actor.remote()], recreate=lambda index: actor.remote(), recovery=QUICK)
    with pytest.raises(ShardFailedError, match="its constructor raised") as caught:
        next(it.gather_sync())
    assert "Last seen: ValueError: no such file." in str(caught.value)


def test_a_foreign_actor_is_recreated_or_reported(ray_session):
    worker = ray_session.remote(num_cpus=0)(ParallelIteratorWorker)

    def actors():
        return [worker.remote(lambda: iter(int, 1)) for _ in range(2)]

    handles = actors()
    with from_actors(handles, name="ours", recovery=QUICK).gather_async() as stream:
        stream.take(4)
        ray_session.kill(handles[0])
        got, errors = [], []
        while len(got) < 20:
            try:
                got.append(next(stream))
            except ShardFailedError as error:
                errors.append(str(error))
        (error,) = errors
        assert "shard 0 of ours has failed" in error
        assert "recreate" in error
    ray_session.kill(handles[1])

    handles, made = actors(), []

    def recreate(index):
        made.append(index)
        return worker.remote(lambda: iter(int, 1))

    with from_actors(handles, recreate=recreate, recovery=QUICK).gather_sync() as stream:
        stream.take(4)
        ray_session.kill(handles[1])
        assert stream.take(20) == [0] * 20
        assert made == [1]
    ray_session.kill(handles[0])


@pytest.mark.parametrize("num_async", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_shard_that_hangs_is_replaced(ray_session, tmp_path, num_async):
    sign = tmp_path / "hung"

    class Hangs:
        def __call__(self):
            for i in range(6):
                if i == 2 and not sign.exists():
                    sign.touch()
                    time.sleep(600)
                yield i

    recovery = Recovery(timeout_s=2.0, backoff_s=0.01)
    it = from_iterators([lambda: range(6), Hangs()], recovery=recovery)
    with it.gather_async(num_async=num_async) as stream:
        assert sorted(stream) == sorted([*range(6)] * 2)
        assert stream.stats()[0]["restarts"] == 1


def test_others_go_on_while_one_backs_off(ray_session, tmp_path):
    sign = str(tmp_path / "died")
    slow = Recovery(backoff_s=1.0)
    it = from_iterators([lambda: iter(int, 1), Mortal(4, 1, sign)], recovery=slow)
    with it.gather_async().zip_with_source() as stream:
        seen, started = [], time.monotonic()
        while time.monotonic() - started < 0.8 or len(seen) < 10:
            sources, _ = next(stream)
            seen.append(sources[0].worker)
        assert seen.count(0) > 5  # the other was not held up
        while seen.count(1) < 4:
            sources, _ = next(stream)
            seen.append(sources[0].worker)


def test_stop_leaves_nothing(ray_session):
    threads = threading.active_count()
    stream = from_iterators([lambda: iter(int, 1)] * 2).repartition(2).gather_async(num_async=2)
    stream.take(3)
    (pool,) = stream.stage.shards.pools()
    pools = [pool, *pool._upstream]
    handles = [each.handle(index) for each in pools for index in range(len(each))]
    pids = ray_session.get([handle.apply.remote(lambda worker: os.getpid()) for handle in handles])
    assert len(set(pids)) == 4
    stream.stop()
    deadline = time.monotonic() + 20
    while any(map(_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(_alive, pids))
    assert not stream.stage.waits()
    assert threading.active_count() <= threads
    with pytest.raises(RuntimeError, match="was stopped"):
        next(stream)


def test_bad_recovery_is_refused():
    with pytest.raises(ValueError, match="timeout_s"):
        Recovery(timeout_s=0)
    with pytest.raises(ValueError, match="out of range"):
        Recovery(breaker=0)


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_a_recreation_that_fails_is_tried_again(ray_session):
    import ray

    actor = ray.remote(num_cpus=0)(ParallelIteratorWorker)
    made = [actor.remote(lambda: iter(range(4)))]
    tries = []

    def recreate(index):
        tries.append(index)
        if len(tries) == 1:
            raise OSError("the cluster is busy")
        made.append(actor.remote(lambda: iter(range(4))))
        return made[-1]

    with from_actors(made[:1], recreate=recreate, recovery=QUICK).gather_async() as stream:
        assert next(stream) == 0
        ray.kill(made[0])
        rest = list(stream)
        assert stream.stats()[0]["restarts"] == 1
    # one item was perhaps on its way
    assert rest in ([1, 2, 3], [2, 3])
    assert tries == [0, 0]


def test_a_dead_actor_that_the_code_of_a_shard_asks_is_not_the_death_of_the_shard(ray_session):
    import ray

    helper = ray.remote(num_cpus=0)(ParallelIteratorWorker).remote([])
    ray.kill(helper)

    def ask(x):
        if x == 1:
            ray.get(helper.apply.remote(len))
        return x

    it = from_iterators([lambda: iter(range(3))], recovery=QUICK).for_each(ask)
    with it.gather_sync(on_error=Skip()) as stream:
        assert list(stream) == [0, 2]
        assert stream.stats()[0]["skipped"] == 1
        assert "restarts" not in stream.stats()[0]


def test_a_shard_that_hangs_is_found_though_another_is_always_ready(ray_session, tmp_path):
    sign = str(tmp_path / "hung")

    class Hangs:
        def __call__(self):
            yield "started"
            if not os.path.exists(sign):
                open(sign, "w").close()
                time.sleep(600)
            yield "back"

    it = from_iterators([lambda: iter(int, 1), Hangs()], recovery=Recovery(1.0, backoff_s=0.01))
    with it.gather_async(num_async=2) as stream:
        until = time.monotonic() + 60
        while "back" not in {next(stream) for _ in range(20)}:
            assert time.monotonic() < until
        assert stream.stats()[0]["restarts"] == 1


def test_a_partition_that_dies_goes_on_where_the_others_are(ray_session):
    import ray

    it = from_iterators([lambda: iter(range(20))], recovery=QUICK).repartition(1)
    with it.gather_sync() as stream:
        begun = stream.take(5)
        ray.kill(stream.stage.shards.handle(0))
        rest = list(stream)
    # what the dead partition had in its hands is lost, nothing else, and nothing comes twice
    assert begun == list(range(5))
    assert rest == sorted(set(rest))
    assert set(rest) <= set(range(5, 20))
    assert len(rest) >= 12


def test_two_gathers_of_one_pool_replace_a_dead_actor_once(ray_session):
    import ray

    actor = ray.remote(num_cpus=0)(ParallelIteratorWorker)
    made = []

    def recreate(index):
        made.append(actor.remote(lambda: iter(range(50))))
        return made[-1]

    it = from_actors([recreate(0)], recreate=recreate, recovery=QUICK)
    with it.gather_async() as one, it.gather_async() as two:
        one.take(2), two.take(2)
        ray.kill(made[0])
        while len(made) < 2:
            next(one)
        assert len(two.take(40)) == 40
        assert len(one.take(40)) == 40
    assert len(made) == 2
