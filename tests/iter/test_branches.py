"""Unions and duplicates: exact ratios, bounded buffers, nobody held up, nobody forgotten."""

from collections import Counter, OrderedDict, deque, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.iter import NOT_READY, LocalIterator, Stage, from_range
from flowrl.ops import Concurrently


class Now(Stage):
    """Endless items of one value that come when a script says so; it can be waited for."""

    kind = "now"

    def __init__(self, value, ready=lambda n: True, waits=True):
        super().__init__()
        self.value, self.ready, self.pulls, self.wait = value, ready, 0, waits

    def pull(self, block):
        self.pulls += 1
        if not self.ready(self.pulls):
            return NOT_READY
        self.items += 1
        return self.value

    def waits(self):
        return [0.0] if self.wait else []  # a time that has passed: look again at once

    def can_wait(self):
        return True


def endless(value, **options):
    return LocalIterator(Now(value, **options))


@pytest.mark.parametrize(
    "weights", [[1, 1], [3, 1], [0.25, 1], [0.1, 0.3, 1], [2.5, 1], [1 / 3, 1], [7, 2, 5]]
)
def test_ratios_are_exact_though_branches_are_not_always_ready(weights):
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
                # the achieved share to within one turn's items of the branch
                asked = turn * weight / sum(weights)
                assert abs(seen[i] - asked) <= max(1, weight) + 1e-6


def test_whatever_a_branch_could_not_give_is_owed_to_it():
    """A branch that only its sibling can move lends its turn."""
    a, b = LocalIterator(range(12)).duplicate(2, max_buffered=4)
    # a is wanted three at a time, and b takes one of every two rounds
    plan = a.union(b.batch(2), round_robin_weights=[3, 1])
    items = list(plan)
    assert sorted(x for x in items if isinstance(x, int)) == list(range(12))
    assert [x for x in items if isinstance(x, list)] == [[i, i + 1] for i in range(0, 12, 2)]


def test_a_star_branch_is_bounded():
    plan = endless("many").union(endless("one"), round_robin_weights=["*", 1])
    seen = Counter(plan.take(2020))
    assert seen == {"many": 2000, "one": 20}


def test_an_ordered_union_waits_for_the_branch_whose_turn_it_is():
    slow = endless("slow", ready=lambda n: n % 5 == 0)
    plan = slow.union(endless("fast"), deterministic=True)
    assert plan.take(6) == ["slow", "fast"] * 3


def test_a_waiting_round_robin_does_not_hold_up_an_async_sibling():
    waiting = endless("x", ready=lambda n: False).union(endless("y"), deterministic=True)
    plan = waiting.union(endless("z"))
    assert plan.take(5) == ["z"] * 5


def test_a_synchronous_gather_does_not_hold_up_an_async_sibling(ray_session, tmp_path):
    import time

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
    got = []
    deadline = time.monotonic() + 30
    while len(got) < 6 and time.monotonic() < deadline:
        item = next(plan)
        if item != "":
            got.append(item)
    assert [x for x in got if isinstance(x, list)] == [[0, 2], [1, 3]]
    assert [x for x in got if isinstance(x, int)] == [0, 2, 1, 3]
    plan.stop()


def test_transform_where_it_could_hold_up_others_is_refused():
    waits = endless(1).transform(lambda it: it)
    with pytest.raises(ValueError, match=r"branch 1 .* transform\(<lambda>\).*cannot pause"):
        LocalIterator([1]).union(waits)
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
def test_duplicate_gives_every_child_everything_in_order(batches, room, ordered, items):
    children = LocalIterator(items).duplicate(len(batches), max_buffered=room)
    tagged = [
        child.batch(size).for_each(lambda group, i=i: (i, group))
        for i, (child, size) in enumerate(zip(children, batches, strict=True))
    ]
    got = list(tagged[0].union(*tagged[1:], deterministic=ordered))
    for i in range(len(batches)):
        assert [x for j, group in got if j == i for x in group] == items


def test_children_may_be_pulled_by_hand():
    a, b = LocalIterator([1, 2, 3]).duplicate(2)
    assert [next(a), next(b), next(a), next(b)] == [1, 1, 2, 2]
    c, d = LocalIterator([1, 2, 3, 4]).duplicate(2, max_buffered=3)
    assert c.take(3) == d.take(3) == [1, 2, 3]


def test_a_child_that_nobody_pulls_is_reported_not_a_hang():
    a, b = LocalIterator([1, 2, 3]).duplicate(2)
    assert next(a) == 1
    with pytest.raises(RuntimeError, match=r"child 1 holds 1 items.*nobody takes"):
        next(a)
    assert next(b) == 1  # and going on is possible
    assert next(a) == 2
    a, _ = LocalIterator(range(99)).duplicate(2)
    busy = a.union(endless("busy"))
    with pytest.raises(RuntimeError, match="nobody takes"):
        busy.take(5)


@pytest.mark.parametrize(
    ("when_full", "expected", "dropped"),
    [("drop_oldest", [4, 5], [0, 4]), ("drop_newest", [0, 1], [0, 4])],
)
def test_a_child_may_lose_items_instead_of_holding_up_the_others(when_full, expected, dropped):
    a, b = LocalIterator(range(6)).duplicate(2, 2, ["block", when_full])
    assert list(a) == list(range(6))
    assert list(b) == expected
    assert a.stats()[1]["dropped"] == dropped


def test_a_change_in_place_in_one_branch_is_not_seen_by_another():
    def item():
        return {"x": np.arange(3), "list": [1, [2]], "pair": (np.ones(1), 5)}

    a, b = LocalIterator([item(), item()]).duplicate(2)
    mine, yours = next(a), next(b)
    mine["list"][1].append(3)
    mine["new"] = 1
    with pytest.raises(ValueError, match="read-only"):
        mine["x"][0] = 9
    with pytest.raises(ValueError, match="read-only"):
        mine["pair"][0][0] = 9
    assert yours.keys() == {"x", "list", "pair"}
    assert yours["list"] == [1, [2]]
    assert np.shares_memory(mine["x"], yours["x"])


def test_outputs_of_a_union_may_be_dropped():
    from flowrl.iter.branches import Union

    driven = LocalIterator([1, 2, 3])
    stage = Union([driven.stage, LocalIterator([4, 5]).stage], ordered=True, outputs=[1])
    assert list(LocalIterator(stage)) == [4, 5]
    assert driven.stage.items == 3


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
def test_bad_weights(weights, message):
    with pytest.raises(ValueError, match=message):
        LocalIterator([1]).union(LocalIterator([2]), round_robin_weights=weights)


@pytest.mark.parametrize("weights", [[1, 0.1], [1, 1e-3], [0.25, 1]])
def test_no_weight_is_too_small_for_branches_that_need_each_other(weights):
    a, b = LocalIterator(range(4)).duplicate(2)
    plan = a.union(b, round_robin_weights=weights)
    assert sorted(plan.take(8)) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_tiny_weight_costs_no_time():
    plan = LocalIterator([7, 8]).union(LocalIterator([1]), round_robin_weights=[1e-9, 1])
    assert list(plan) == [1, 7, 8]


def test_pulls_in_which_nothing_moves_change_no_ratio():
    there = []
    late = [endless(i, ready=lambda n: bool(there)) for i in range(2)]
    plan = late[0].union(late[1], round_robin_weights=[1, 1])
    plan.start()
    for _ in range(50):
        assert plan.stage.pull(False) is NOT_READY
    there.append(True)
    assert plan.take(6) == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("size", [3, 50])
def test_branches_that_collect_before_they_give_do_not_lock_up(size):
    a, b = LocalIterator(range(100)).duplicate(2)
    plan = a.batch(size).union(b.batch(size + 1), deterministic=True)
    items = [x for batch in plan for x in batch]
    assert sorted(items) == sorted([*range(100)] * 2)


def test_a_branch_that_ends_early_holds_up_nobody():
    class Two(Stage):
        """The first two items of its parent."""

        def pull(self, block):
            if self.items == 2:
                raise StopIteration
            item = self._pull_up(block)
            self.items += item is not NOT_READY
            return item

    a, b = LocalIterator(range(6)).duplicate(2)
    plan = LocalIterator(Two(a.stage)).union(b, deterministic=True)
    assert sorted(plan) == [0, 0, 1, 1, 2, 3, 4, 5]


def test_items_that_are_not_handed_on_do_not_starve_the_siblings():
    never = endless(0, ready=lambda n: False)
    inner = Concurrently([endless("dropped"), never], output_indexes=[1])
    plan = inner.union(endless("given"))
    assert plan.take(3) == ["given"] * 3


def test_a_transform_over_what_siblings_bring_is_refused():
    a, b = LocalIterator(range(4)).duplicate(2)
    with pytest.raises(ValueError, match="cannot pause"):
        a.transform(iter).union(b, deterministic=True)
    plan = LocalIterator([1]).transform(iter).union(LocalIterator([2]), deterministic=True)
    assert list(plan) == [1, 2]


def test_containers_of_any_kind_are_the_readers_own():
    Pair = namedtuple("Pair", "x y")
    item = {
        "ordered": OrderedDict(x=[1]),
        "set": {1},
        "pair": Pair([1], 2),
        "tensor": torch.zeros(2),
        "deque": deque([[1]]),
    }
    a, b = LocalIterator([item]).duplicate(2)
    mine, yours = next(a), next(b)
    mine["ordered"]["x"].append(2)
    mine["set"].add(2)
    mine["pair"].x.append(2)
    mine["tensor"] += 1
    mine["deque"][0].append(2)
    assert yours["ordered"] == {"x": [1]}
    assert yours["set"] == {1}
    assert yours["pair"] == Pair([1], 2)
    assert yours["tensor"].sum() == 0
    assert yours["deque"] == deque([[1]])
    assert type(yours["pair"]) is Pair
