"""LocalIterator: unions, duplicates, the metrics context, one consumer per stream."""

import pytest

from flowrl.iter import LocalIterator, MetricsContext, _get_shared_metrics, metrics_scope


def stream(*items):
    return LocalIterator(list(items), "items")


def test_take_and_show(capsys):
    it = stream(1, 2, 3)
    assert it.take(0) == []
    assert it.take(2) == [1, 2]
    it.show()
    assert capsys.readouterr().out == "3\n"
    assert it.take(5) == []


def test_nothing_runs_before_the_first_pull():
    made = []

    def make():
        made.append(1)
        return [1]

    it = LocalIterator(make).for_each(lambda x: x)
    it.explain()
    assert not made
    assert list(it) == [1]


def test_repr_is_the_chain():
    it = stream(1).for_each(str).filter(bool).batch(2)
    assert repr(it) == "LocalIterator[items.for_each().filter().batch(2)]"
    assert (
        repr(stream(1).union(stream(2)))
        == "LocalIterator[LocalUnion[LocalIterator[items], LocalIterator[items]]]"
    )


def test_union_order():
    assert list(stream(1, 2, 3).union(stream(4, 5, 6), deterministic=True)) == [1, 4, 2, 5, 3, 6]
    weighted = stream(1, 1, 1, 1).union(
        stream(2, 2), stream(3, 3, 3), round_robin_weights=[3, 1, 2]
    )
    assert list(weighted) == [1, 1, 1, 2, 3, 3, 1, 2, 3]


def test_fractional_weights_are_exact():
    ones, twos = (
        LocalIterator(lambda: iter(lambda: 1, 0)),
        LocalIterator(lambda: iter(lambda: 2, 0)),
    )
    got = ones.union(twos, round_robin_weights=[0.25, 1]).take(1000)
    assert got.count(1) == 200


@pytest.mark.parametrize(
    ("weights", "message"),
    [([1], "entries"), ([0, 1], "> 0"), (["*", "*"], "at least one"), (["x", 1], "number")],
)
def test_bad_weights(weights, message):
    with pytest.raises(ValueError, match=message):
        stream(1).union(stream(2), round_robin_weights=weights)


def test_duplicate_gives_every_child_everything():
    a, b = stream(1, 2, 3).duplicate(2)
    assert list(a.union(b.for_each(lambda x: -x))) == [1, -1, 2, -2, 3, -3]


def test_children_may_be_pulled_by_hand():
    a, b = stream(1, 2, 3).duplicate(2)
    assert [next(a), next(b), next(a), next(b)] == [1, 1, 2, 2]
    c, d = stream(1, 2, 3, 4).duplicate(2, max_buffered=3)
    assert c.take(3) == d.take(3) == [1, 2, 3]


def test_a_child_that_nobody_pulls_is_reported():
    a, _ = stream(1, 2, 3).duplicate(2)
    assert next(a) == 1
    with pytest.raises(RuntimeError, match="nobody takes"):
        next(a)


def test_a_stream_used_twice_is_refused():
    source = stream(1, 2)
    with pytest.raises(RuntimeError, match=r"duplicate\(\) first"):
        next(source.for_each(str).union(source.filter(bool)))
    source = stream(1, 2)
    first, second = source.for_each(str), source.for_each(str)
    assert next(first) == "1"
    with pytest.raises(RuntimeError, match="two consumers"):
        next(second)


def test_metrics_belong_to_the_pull():
    def count(x):
        _get_shared_metrics().counters["seen"] += 1
        return x

    with pytest.raises(ValueError, match="outside an iterator"):
        _get_shared_metrics()
    a, b = stream(1, 2).for_each(count), stream(3).for_each(count)
    union = a.union(b)
    list(union)
    assert union.metrics.counters["seen"] == 3
    with pytest.raises(ValueError, match="outside an iterator"):
        LocalIterator.get_metrics()
    with metrics_scope(MetricsContext()) as context:
        count(1)
    assert context.counters["seen"] == 1


def test_timer():
    timer = MetricsContext().timers["t"]
    assert timer.mean == 0
    with timer:
        pass
    timer.push_units_processed(10)
    assert timer.mean_throughput > 0
    with timer, pytest.raises(RuntimeError, match="twice"), timer:
        pass


def test_transform_and_source_actor_without_actors():
    assert list(stream(1, 2).transform(lambda it: (x * 3 for x in it))) == [3, 6]
    with pytest.raises(ValueError, match="no source actor"):
        next(stream(1).zip_with_source_actor())
