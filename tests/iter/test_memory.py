"""Memory stays flat, however many items flow."""

import itertools
import os

import pytest

from flowrl.iter import LocalIterator, from_iterators


def rss_mb():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def local_plan():
    a, b = (
        LocalIterator(lambda: itertools.count(), "count")
        .for_each(lambda x: x + 1)
        .filter(lambda x: x % 3)
        .batch(4)
        .flatten()
        .combine(lambda x: [x])
        .shuffle(8, seed=1)
        .tap("see", lambda x: None)
        .zip_with_source()
        .duplicate(2, max_buffered=3)
    )
    return a.union(b, round_robin_weights=[1, 1])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_million_items_through_the_local_stages():
    plan = local_plan()
    for _ in itertools.islice(plan, 200_000):
        pass
    warm = rss_mb()
    for _ in itertools.islice(plan, 10_000_000):
        pass
    assert rss_mb() - warm < 5


@pytest.mark.slow
def test_three_hundred_thousand_items_through_actors(ray_session):
    parallel = from_iterators([itertools.count] * 2)
    for options, items in (({"num_async": 4}, 30_000), ({"batch_ms": 1}, 270_000)):
        with parallel.gather_async(**options) as stream:
            for _ in itertools.islice(stream, items // 10):
                pass
            warm = rss_mb()
            for _ in itertools.islice(stream, items):
                pass
            assert rss_mb() - warm < 20
    whole = ray_session.cluster_resources()["object_store_memory"]
    assert ray_session.available_resources()["object_store_memory"] > 0.99 * whole
