"""Programs written for ray.util.iter return the same results with flowrl.iter."""

import pytest

import flowrl.iter as flowrl_iter

ray_iter = pytest.importorskip("ray.util.iter")  # deprecated: a later Ray may not ship it


def _iterators(it):
    a = it.from_range(4).for_each(str).filter(bool)
    b = it.from_items([1, 2, 3], num_shards=3, repeat=True).batch(2).flatten()
    c = it.from_iterators([range(2)], name="named").combine(lambda x: [x])
    local = it.from_iterators([range(3), range(2)]).gather_sync()
    return [
        a,
        b,
        c,
        it.from_items([]).transform(lambda x: x).local_shuffle(shuffle_buffer_size=2, seed=1),
        it.from_range(5).local_shuffle(3),
        a.repartition(3),
        a.union(b),
        a.select_shards([1]),
        a.get_shard(1),
        a.batch_across_shards(),
        a.gather_async(num_async=2),
        local.for_each(str).filter(bool).batch(2).flatten().combine(list).shuffle(3, seed=0),
        local.shuffle(3).transform(lambda x: x).zip_with_source_actor(),
        *local.duplicate(2),
        a.gather_sync().union(local, deterministic=True),
    ]


PROGRAMS = {
    "gather_sync": lambda it: list(it.from_range(7).for_each(lambda x: 2 * x).gather_sync()),
    "items": lambda it: list(it.from_items([5, 6, 7, 8, 9], num_shards=3).gather_sync()),
    "rounds": lambda it: list(it.from_items([5, 6, 7], num_shards=2).batch_across_shards()),
    "uneven": lambda it: it.from_range(5, 3).take(9),
    "take_twice": lambda it: [(p := it.from_range(6)).take(3), p.take(2)],
    "repeat": lambda it: it.from_items([1, 2, 3], repeat=True).take(9),
    "batch": lambda it: list(it.from_range(7).batch(2).gather_sync().flatten()),
    "combine": lambda it: list(it.from_range(4).combine(lambda x: [x] * x).gather_sync()),
    "filter": lambda it: list(it.from_range(9).filter(lambda x: x % 3).gather_sync().batch(4)),
    "transform": lambda it: list(
        it.from_range(6).transform(lambda i: (x + 1 for x in i)).gather_sync()
    ),
    "shuffle": lambda it: it.from_range(12, 1).local_shuffle(4, seed=3).take(12),
    "local_shuffle": lambda it: list(it.from_range(9, 1).gather_sync().shuffle(3, seed=8)),
    "shard": lambda it: list(it.from_range(9, 3).for_each(str).get_shard(1, num_async=2)),
    "shards": lambda it: [list(s) for s in it.from_range(9, 3).shards()],
    "select": lambda it: it.from_range(9, 3).select_shards([2, 0]).take(9),
    "union": lambda it: it.from_range(3).union(it.from_items([7, 8], 1)).take(9),
    "two": lambda it: list(
        it.from_range(3, 1)
        .gather_sync()
        .union(it.from_range(5, 1).gather_sync(), deterministic=True)
    ),
    "weights": lambda it: list(
        it.from_range(8, 1)
        .gather_sync()
        .union(it.from_range(4, 1).gather_sync(), round_robin_weights=[3, 1])
    ),
    "duplicate": lambda it: [
        (a := it.from_range(4).gather_sync().duplicate(2))[0]
        .union(a[1].for_each(lambda x: -x), deterministic=True)
        .take(8)
    ],
    "repartition": lambda it: sorted(it.from_range(20, 3).repartition(2).gather_sync()),
    "concurrency": lambda it: sorted(
        it.from_range(5).for_each(lambda x: x, max_concurrency=2).take(5)
    ),
    "reprs": lambda it: [repr(iterator) for iterator in _iterators(it)],
    "strings": lambda it: [str(iterator) for iterator in _iterators(it)],
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("program", PROGRAMS)
def test_program_returns_the_same_result(program, ray_session):
    assert PROGRAMS[program](flowrl_iter) == PROGRAMS[program](ray_iter)


MISTAKES = {
    "no_shard": lambda it: it.from_range(3).get_shard(9),
    "nothing_selected": lambda it: it.from_range(3).select_shards([]),
    "union": lambda it: it.from_range(3).union(3),
    "num_async": lambda it: it.from_range(3).gather_async(num_async=0),
    "batch_ms": lambda it: it.from_range(3).gather_async(batch_ms=-1),
    "one_copy": lambda it: it.from_range(3).gather_sync().duplicate(1),
    "not_ordered": lambda it: iter(it.from_range(3)),
    "weights": lambda it: (x := it.from_range(3).gather_sync()).union(x, round_robin_weights=[1]),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_raises_the_same_type(mistake, ray_session):
    with pytest.raises((ValueError, TypeError)) as expected:
        MISTAKES[mistake](ray_iter)
    with pytest.raises(expected.type):
        MISTAKES[mistake](flowrl_iter)
