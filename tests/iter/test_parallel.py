"""ParallelIterator in process and on actors: same items, same order, errors name the shard."""

import pytest

from flowrl.iter import ParallelIteratorWorker, from_actors, from_items, from_iterators, from_range


@pytest.fixture
def in_process(num_workers):
    return num_workers == 0


def test_gather_sync_order(in_process):
    it = from_range(10, 2, in_process=in_process).for_each(lambda x: 2 * x)
    with it.gather_sync() as stream:
        assert list(stream) == [0, 10, 2, 12, 4, 14, 6, 16, 8, 18]


def test_ragged_rounds(in_process):
    with from_items([1, 2, 3], 2, in_process=in_process).batch_across_shards() as stream:
        assert list(stream) == [[1, 2], [3]]


def test_gather_async_gives_all(in_process):
    with from_items(list(range(20)), 3, in_process=in_process).gather_async(num_async=2) as stream:
        assert sorted(stream) == list(range(20))


def test_steps_run_in_the_shards(in_process):
    it = from_range(12, 2, in_process=in_process).filter(lambda x: x % 2 == 0).batch(2)
    with it.gather_sync() as stream:
        assert list(stream) == [[0, 2], [6, 8], [4], [10]]
    it = from_items([[1, 2], [3]], 2, in_process=in_process).flatten().combine(lambda x: [x, x])
    with it.gather_sync() as stream:
        assert sorted(stream) == [1, 1, 2, 2, 3, 3]


def test_an_error_names_the_shard_and_the_stream_goes_on(in_process):
    def bad(x):
        if x == 6:
            raise ValueError("six")
        return x

    it = from_range(10, 2, in_process=in_process).for_each(bad)
    with it.batch_across_shards() as stream:
        assert next(stream) == [0, 5]
        with pytest.raises(ValueError, match="six") as caught:
            next(stream)
        assert "shard 1" in "".join(caught.value.__notes__)
        assert next(stream) == [1, 7]  # shard 0's item was kept, shard 1 asked again
        assert next(stream) == [2, 8]


def test_provenance(in_process):
    with from_range(4, 2, in_process=in_process).gather_sync().zip_with_source() as stream:
        assert next(stream)[1] == 0
        sources, _ = next(stream)
    assert [source.worker for source in sources] == [1]
    assert {source.seq for source in sources} == {0}


def test_source_actor(ray_session):
    worker = ray_session.remote(num_cpus=0)(ParallelIteratorWorker)
    actors = [worker.remote([i] * 3) for i in range(2)]
    it = from_actors(actors).gather_async()
    pairs = list(it.zip_with_source_actor())
    assert len(pairs) == 6
    assert all(actors[item] is actor for actor, item in pairs)
    for actor in actors:
        ray_session.kill(actor)


def test_repeat_and_callables():
    it = from_iterators([lambda: [1, 2]], repeat=True, in_process=True)
    assert it.take(5) == [1, 2, 1, 2, 1]


def test_names():
    assert (
        repr(from_range(4, 2, in_process=True).for_each(str).filter(bool))
        == "ParallelIterator[from_range[4, shards=2].for_each().filter()]"
    )
    with pytest.raises(TypeError, match="gather_sync"):
        iter(from_range(4))
    with pytest.raises(ValueError, match="num_async"):
        from_range(4, in_process=True).gather_async(num_async=0)
