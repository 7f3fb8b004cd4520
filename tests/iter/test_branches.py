"""Union and duplicate: exact ratios, bounded buffers, independent branches."""

import itertools
import queue
import time
from collections import Counter, OrderedDict, deque, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.iter import NOT_READY, LocalIterator, Stage, from_range
from flowrl.iter.stages.branches import Union
from flowrl.ops import Concurrently, Dequeue, Enqueue


class Endless(Stage):
    """Returns one value forever, in the pulls n for which ready(n) is true."""

    name = "endless"

    def __init__(self, value, ready=lambda n: True):
        super().__init__()
        self.value, self.ready, self.pulls = value, ready, 0

    def pull(self, block):
        self.pulls += 1
        if not self.ready(self.pulls):
            return NOT_READY
        self.items += 1
        return self.value

    def waits(self):
        return [0.0]  # a time in the past: pull again at once

    def can_return_not_ready(self):
        return True


def endless(value, **options):
    return LocalIterator(Endless(value, **options))


@pytest.mark.parametrize(
    "weights",
    [[1, 1], [3, 1], [0.25, 1], [0.1, 0.3, 1], [2.5, 1], [1 / 3, 1], [7, 2, 5], [1e-3, 3e-3]],
)
def test_ratios_are_exact_if_branches_are_not_always_ready(weights):
    branches = [
        endless(i, ready=lambda n, i=i: (n * 7 + i) % (i + 2) != 0) for i in range(len(weights))
    ]
    plan = branches[0].union(*branches[1:], round_robin_weights=weights)
    seen = Counter()
    for _ in range(10_000):
        seen[next(plan)] += 1
        turn = sum(seen.values())
        if turn % 1000 == 0:
            for i, weight in enumerate(weights):
                # within the items of one turn of the branch
                expected = turn * weight / sum(weights)
                assert abs(seen[i] - expected) <= max(1, weight) + 1e-6


def test_branch_that_waits_for_a_sibling_gets_its_lent_turns_back():
    a, b = LocalIterator(range(12)).duplicate(2, max_buffered=4)
    # three items of a per turn, while b needs two items for one batch
    plan = a.union(b.batch(2), round_robin_weights=[3, 1])
    items = list(plan)
    assert sorted(x for x in items if isinstance(x, int)) == list(range(12))
    assert [x for x in items if isinstance(x, list)] == [[i, i + 1] for i in range(0, 12, 2)]


def test_star_branch_is_bounded():
    plan = endless("many").union(endless("one"), round_robin_weights=["*", 1])
    seen = Counter(plan.take(2020))
    assert seen == {"many": 2000, "one": 20}


def test_ordered_union_waits_for_the_branch_whose_turn_it_is():
    slow = endless("slow", ready=lambda n: n % 5 == 0)
    plan = slow.union(endless("fast"), deterministic=True)
    assert plan.take(6) == ["slow", "fast"] * 3


def test_waiting_round_robin_does_not_block_an_async_sibling():
    waiting = endless("x", ready=lambda n: False).union(endless("y"), deterministic=True)
    plan = waiting.union(endless("z"))
    assert plan.take(5) == ["z"] * 5


@pytest.mark.slow
def test_synchronous_gather_does_not_block_an_async_sibling(ray_session, tmp_path):
    gate = tmp_path / "open"

    def wait(x):
        while not gate.exists():
            time.sleep(0.01)
        return x

    gathers = [
        from_range(4, 2).for_each(wait).batch_across_shards(),
        from_range(4, 2).for_each(wait).gather_sync(),
    ]
    plan = gathers[0].union(gathers[1], LocalIterator(lambda: iter(str, 1)))
    assert plan.take(500) == [""] * 500
    gate.touch()
    items = []
    deadline = time.monotonic() + 30
    while len(items) < 6 and time.monotonic() < deadline:
        item = next(plan)
        if item != "":
            items.append(item)
    assert [x for x in items if isinstance(x, list)] == [[0, 2], [1, 3]]
    assert [x for x in items if isinstance(x, int)] == [0, 2, 1, 3]
    plan.stop()


def test_transform_that_could_block_siblings_is_rejected():
    waiting = endless(1).transform(lambda it: it)
    with pytest.raises(ValueError, match=r"branch 1 .* transform\(<lambda>\).*cannot pause"):
        LocalIterator([1]).union(waiting)
    with pytest.raises(ValueError, match=r"branch 1 \('\*'\) of a round-robin union has transform"):
        LocalIterator([1]).union(waiting, round_robin_weights=[1, "*"])
    plan = LocalIterator([1, 2]).transform(lambda it: it).union(LocalIterator([3]))
    assert sorted(plan) == [1, 2, 3]
    ordered = endless(1, ready=lambda n: n % 2).transform(lambda it: it)
    assert ordered.union(LocalIterator([3]), deterministic=True).take(3) == [1, 3, 1]


def test_transform_never_sees_not_ready():
    seen = []

    def fn(it):
        for item in it:
            seen.append(item)
            yield item

    source = endless(1, ready=lambda n: n % 3 == 0)
    assert source.transform(fn).take(4) == [1] * 4
    assert seen == [1] * 4


@given(
    st.lists(st.integers(1, 3), min_size=2, max_size=4),
    st.integers(1, 3),
    st.booleans(),
    st.lists(st.integers(), max_size=25),
)
def test_duplicate_returns_all_items_in_order_to_every_child(batches, max_buffered, ordered, items):
    children = LocalIterator(items).duplicate(len(batches), max_buffered=max_buffered)
    tagged = [
        child.batch(size).for_each(lambda group, i=i: (i, group))
        for i, (child, size) in enumerate(zip(children, batches, strict=True))
    ]
    groups = list(tagged[0].union(*tagged[1:], deterministic=ordered))
    for i in range(len(batches)):
        assert [x for j, group in groups if j == i for x in group] == items


def test_children_can_be_pulled_by_hand():
    a, b = LocalIterator([1, 2, 3]).duplicate(2)
    assert [next(a), next(b), next(a), next(b)] == [1, 1, 2, 2]
    c, d = LocalIterator([1, 2, 3, 4]).duplicate(2, max_buffered=3)
    assert c.take(3) == d.take(3) == [1, 2, 3]


@pytest.mark.parametrize("deterministic", [True, False])
def test_branch_that_always_raises_takes_turns_with_the_others(deterministic):
    def fail(item):
        raise ValueError(item)

    failing = LocalIterator(itertools.count).for_each(fail)
    stream = failing.union(LocalIterator(itertools.count), deterministic=deterministic)
    outcomes = []
    for _ in range(10):
        try:
            outcomes.append(next(stream))
        except ValueError as error:
            outcomes.append(error.args)
    assert outcomes == [(0,), 0, (1,), 1, (2,), 2, (3,), 3, (4,), 4]


def test_child_without_a_consumer_raises_instead_of_blocking():
    a, b = LocalIterator([1, 2, 3]).duplicate(2)
    assert next(a) == 1
    with pytest.raises(RuntimeError, match=r"child 1 holds 1 items.*no plan consumes it"):
        next(a)
    assert next(b) == 1  # the stream stays usable
    assert next(a) == 2
    a, _ = LocalIterator(range(99)).duplicate(2)
    busy = a.union(endless("busy"))
    with pytest.raises(RuntimeError, match="no plan consumes it"):
        busy.take(5)


@pytest.mark.parametrize(
    ("when_full", "expected", "dropped"),
    [("drop_oldest", [4, 5], [0, 4]), ("drop_newest", [0, 1], [0, 4])],
)
def test_child_drops_items_instead_of_blocking_the_others(when_full, expected, dropped):
    a, b = LocalIterator(range(6)).duplicate(2, 2, ["block", when_full])
    assert list(a) == list(range(6))
    assert list(b) == expected
    assert a.stats()[1]["dropped"] == dropped


def test_in_place_change_in_one_branch_is_not_visible_in_another():
    def item():
        return {"x": np.arange(3), "list": [1, [2]], "pair": (np.ones(1), 5)}

    a, b = LocalIterator([item(), item()]).duplicate(2)
    first, second = next(a), next(b)
    first["list"][1].append(3)
    first["new"] = 1
    with pytest.raises(ValueError, match="read-only"):
        first["x"][0] = 9
    with pytest.raises(ValueError, match="read-only"):
        first["pair"][0][0] = 9
    assert second.keys() == {"x", "list", "pair"}
    assert second["list"] == [1, [2]]
    assert np.shares_memory(first["x"], second["x"])


def test_union_drops_items_of_branches_that_are_not_outputs():
    dropped = LocalIterator([1, 2, 3])
    stage = Union([dropped.stage, LocalIterator([4, 5]).stage], ordered=True, outputs=[1])
    assert list(LocalIterator(stage)) == [4, 5]
    assert dropped.stage.items == 3


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1], "entries"),
        ([0, 1], "> 0"),
        ([float("nan"), 1], "> 0"),
        (["*", "*"], "at least one"),
        (["x", 1], "number"),
    ],
)
def test_invalid_weights_are_rejected(weights, message):
    with pytest.raises(ValueError, match=message):
        LocalIterator([1]).union(LocalIterator([2]), round_robin_weights=weights)


@pytest.mark.parametrize("weights", [[1, 0.1], [1, 1e-3], [0.25, 1]])
def test_small_weights_do_not_block_children_of_one_duplicate(weights):
    a, b = LocalIterator(range(4)).duplicate(2)
    plan = a.union(b, round_robin_weights=weights)
    assert sorted(plan.take(8)) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_tiny_weight_takes_no_time():
    plan = LocalIterator([7, 8]).union(LocalIterator([1]), round_robin_weights=[1e-9, 1])
    assert list(plan) == [1, 7, 8]


def test_pulls_without_progress_do_not_change_the_ratio():
    ready = []
    branches = [endless(i, ready=lambda n: bool(ready)) for i in range(2)]
    plan = branches[0].union(branches[1], round_robin_weights=[1, 1])
    plan.start()
    for _ in range(50):
        assert plan.stage.pull(False) is NOT_READY
    ready.append(True)
    assert plan.take(6) == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("size", [3, 50])
def test_branches_that_batch_duplicated_items_do_not_deadlock(size):
    a, b = LocalIterator(range(100)).duplicate(2)
    plan = a.batch(size).union(b.batch(size + 1), deterministic=True)
    items = [x for batch in plan for x in batch]
    assert sorted(items) == sorted([*range(100)] * 2)


def test_branch_that_ends_early_does_not_block_its_sibling():
    class FirstTwo(Stage):
        """Returns the first two items of its parent."""

        def pull(self, block):
            if self.items == 2:
                raise StopIteration
            item = self._pull_up(block)
            self.items += item is not NOT_READY
            return item

    a, b = LocalIterator(range(6)).duplicate(2)
    plan = LocalIterator(FirstTwo(a.stage)).union(b, deterministic=True)
    assert sorted(plan) == [0, 0, 1, 1, 2, 3, 4, 5]


def test_dropped_items_do_not_starve_the_siblings():
    never = endless(0, ready=lambda n: False)
    inner = Concurrently([endless("dropped"), never], output_indexes=[1])
    plan = inner.union(endless("returned"))
    assert plan.take(3) == ["returned"] * 3


def test_transform_of_items_that_depend_on_siblings_is_rejected():
    a, b = LocalIterator(range(4)).duplicate(2)
    with pytest.raises(ValueError, match="cannot pause"):
        a.transform(iter).union(b, deterministic=True)
    plan = LocalIterator([1]).transform(iter).union(LocalIterator([2]), deterministic=True)
    assert list(plan) == [1, 2]


def test_every_child_gets_its_own_containers():
    Pair = namedtuple("Pair", "x y")
    item = {
        "ordered": OrderedDict(x=[1]),
        "set": {1},
        "pair": Pair([1], 2),
        "tensor": torch.zeros(2),
        "deque": deque([[1]]),
    }
    a, b = LocalIterator([item]).duplicate(2)
    first, second = next(a), next(b)
    first["ordered"]["x"].append(2)
    first["set"].add(2)
    first["pair"].x.append(2)
    first["tensor"] += 1
    first["deque"][0].append(2)
    assert second["ordered"] == {"x": [1]}
    assert second["set"] == {1}
    assert second["pair"] == Pair([1], 2)
    assert second["tensor"].sum() == 0
    assert second["deque"] == deque([[1]])
    assert type(second["pair"]) is Pair


@pytest.mark.parametrize("mode", ["round_robin", "async"])
def test_stream_ends_with_the_branches_whose_items_are_returned(mode):
    plan = Concurrently([LocalIterator([1, 2, 3]), endless(0)], mode=mode, output_indexes=[0])
    assert list(plan) == [1, 2, 3]


@pytest.mark.parametrize("mode", ["round_robin", "async"])
def test_nested_plan_that_drops_items_lets_its_siblings_run(mode):
    """The sibling fills the queue that the nested plan reads."""
    items = queue.Queue(2)
    inner = Concurrently([endless(0), Dequeue(items)], mode="async", output_indexes=[1])
    feed = LocalIterator(itertools.count).for_each(Enqueue(items))
    assert sorted(Concurrently([inner, feed], mode=mode).take(6)) == [0, 0, 1, 1, 2, 2]


def test_child_of_a_stopped_duplicate_returns_its_items_and_raises():
    a, b = LocalIterator(range(5)).duplicate(2)
    assert next(a) == 0
    a.stop()
    assert next(b) == 0
    with pytest.raises(RuntimeError, match="was stopped with one of its children"):
        next(b)


def test_stopped_child_does_not_stop_the_other_one():
    stopped = []

    class Noting:
        def __call__(self, item):
            return item

        def stop(self):
            stopped.append(1)

    a, b = LocalIterator(range(4)).for_each(Noting()).duplicate(2)
    assert (next(a), next(b)) == (0, 0)
    a.stop()
    assert list(b) == [1, 2, 3]
    assert not stopped
    b.stop()
    assert stopped == [1]


@pytest.mark.parametrize("weights", [[20, 1], [1, 1]])
def test_items_that_are_buffered_for_other_branches_are_not_lost(weights):
    seen = []
    a, b = LocalIterator(range(50)).duplicate(2, max_buffered=50)
    plan = Concurrently(
        [a, b.batch(4).for_each(seen.extend)], round_robin_weights=weights, output_indexes=[0]
    )
    assert list(plan) == list(range(50)) == seen


def test_branches_of_a_stream_that_has_ended_do_not_hold_items_back():
    a, b = LocalIterator(itertools.count).duplicate(2)
    b.start()
    first = Concurrently([LocalIterator([1, 2]), a], mode="async", output_indexes=[0])
    assert list(first) == [1, 2]
    assert len(b.take(20)) == 20


def test_branch_that_ends_early_leaves_children_that_others_read():
    class FirstTwo(Stage):
        def pull(self, block):
            if self.items == 2:
                raise StopIteration
            item = self._pull_up(block)
            self.items += item is not NOT_READY
            return item

    a, b = LocalIterator(range(5)).duplicate(2)
    c, d = a.duplicate(2)
    plan = LocalIterator(FirstTwo(c.stage)).union(d, b, deterministic=True)
    assert sorted(plan) == sorted([0, 1, *range(5), *range(5)])


def test_branch_that_ends_early_leaves_children_that_another_plan_reads():
    a, b = LocalIterator(range(6)).duplicate(2, max_buffered=10)
    c, d = a.duplicate(2, max_buffered=10)
    assert d.take(1) == [0]
    plan = Concurrently([c, LocalIterator([7, 8])], output_indexes=[1])
    assert list(plan) == [7, 8]
    assert list(d) == [1, 2, 3, 4, 5]
    assert list(b) == [0, 1, 2, 3, 4, 5]


def test_state_of_another_number_of_branches_is_rejected_before_anything_is_loaded():
    def plan(count):
        return LocalIterator(range(9)).union(*[LocalIterator(range(9)) for _ in range(count - 1)])

    two, three = plan(2), plan(3)
    three.take(4)
    with pytest.raises(ValueError, match="saved state is of another number of branches"):
        two.stage.check_state(three.stage.state_dict())
    two.stage.check_state(two.stage.state_dict())


@pytest.mark.parametrize("mode", ["round_robin", "async"])
def test_end_of_a_dropped_branch_with_another_endless_source(mode):
    seen = []
    a, b = LocalIterator(range(3)).duplicate(2)
    side = b.for_each(lambda item: seen.append(item) or item).union(endless(9))
    plan = Concurrently([a, side], mode=mode, output_indexes=[0])
    assert list(plan) == [0, 1, 2]
    assert seen == [0, 1, 2]


def test_end_of_a_dropped_branch_with_another_source_loses_no_item():
    seen = []
    a, b = LocalIterator(range(3)).duplicate(2)
    side = b.combine(lambda item: [item] * 3).union(LocalIterator(range(10, 15)))
    plan = Concurrently([a, side.for_each(seen.append)], output_indexes=[0])
    assert list(plan) == [0, 1, 2]
    assert sorted(seen) == [0, 0, 0, 1, 1, 1, 2, 2, 2, *range(10, 15)]


def test_end_of_a_dropped_branch_that_is_blocked():
    full = queue.Queue(1)
    full.put(0)
    a, b = LocalIterator(range(3)).duplicate(2, max_buffered=9)
    plan = Concurrently([a, b.for_each(Enqueue(full)).union(endless(9))], output_indexes=[0])
    assert list(plan) == [0, 1, 2]


def test_item_that_duplicate_cannot_copy_names_the_stage():
    class Frozen(dict):
        def __setitem__(self, key, value):
            raise TypeError("frozen")

    children = LocalIterator([Frozen(a=1), 2]).duplicate(2)
    both = Concurrently(children)
    with pytest.raises(TypeError, match="frozen") as caught:
        next(both)
    assert "duplicate_child[0] › duplicate, chained at" in "".join(caught.value.__notes__)
    assert both.take(2) == [2, 2]


@pytest.mark.parametrize("weights", [2, "**"])
def test_weights_that_are_no_list_are_rejected(weights):
    branches = [LocalIterator([1]), LocalIterator([2])]
    with pytest.raises(TypeError, match="round_robin_weights must be a list with one weight"):
        Concurrently(branches, round_robin_weights=weights)


def test_policy_for_full_buffers_that_is_no_list_is_rejected():
    with pytest.raises(TypeError, match="duplicate: when_full must be one of"):
        LocalIterator([1]).duplicate(2, when_full=3)


def test_weights_and_policies_may_be_arrays():
    children = LocalIterator([1, 2]).duplicate(2, when_full=np.array(["block", "drop_oldest"]))
    assert Concurrently(children, round_robin_weights=np.array([1.0, 1.0])).take(2) == [1, 1]
