"""Journal: recorded observations come back in a replay, in their order."""

import time
from functools import partial

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.iter import from_iterators
from flowrl.iter.journal import JournalReader, JournalWriter, ReplayEnded, ReplayError

observations = st.lists(
    st.tuples(st.sampled_from(["arrival", "room"]), st.integers(0, 300), st.sampled_from([0, 1])),
    max_size=40,
)


def record(path, observed, flush_after=()):
    writer = JournalWriter(path)
    for number, one in enumerate(observed):
        writer.plan_log.observe(*one)
        if number in flush_after:
            writer.flush()
    writer.flush()
    writer.close()
    return JournalReader(path)


@given(observed=observations, flush_after=st.sets(st.integers(0, 40), max_size=5))
def test_recorded_values_come_back(tmp_path_factory, observed, flush_after):
    path = tmp_path_factory.mktemp("journal") / "journal"
    reader = record(path, observed, flush_after)
    replayed = [reader.plan_log.observe(name, 10**9, expected) for name, _, expected in observed]
    assert replayed == [value for _, value, _ in observed]
    with pytest.raises(ReplayEnded):
        reader.plan_log.observe("arrival", 0)


def test_another_observation_than_the_recorded_one_is_an_error(tmp_path):
    reader = record(tmp_path / "journal", [("arrival", 0, 0), ("arrival", 2, 0)])
    reader.plan_log.observe("arrival", 0)
    with pytest.raises(ReplayError, match=r"observation 2 is 'room', but the run had 'arrival'"):
        reader.plan_log.observe("room", 0)


def test_the_learner_continues_with_expected_values_after_its_last_entry(tmp_path):
    writer = JournalWriter(tmp_path / "journal")
    writer.learner_log.observe("timestep", 7)
    writer.flush()
    reader = JournalReader(tmp_path / "journal")
    assert reader.learner_log.observe("timestep", 0) == 7
    assert reader.learner_log.observe("timestep", 0, expected=5) == 5


def test_a_recording_ends_with_its_reason(tmp_path):
    writer = JournalWriter(tmp_path / "journal")
    writer.plan_log.observe("arrival", 1)
    writer.end("worker 2 died")
    for value in (0, 2, 0):
        writer.end("later")
        writer.plan_log.observe("arrival", value)
        writer.flush()
    reader = JournalReader(tmp_path / "journal")
    assert reader.plan_log.observe("arrival", 0) == 1
    with pytest.raises(ReplayEnded, match=r"^worker 2 died$"):
        reader.plan_log.observe("arrival", 0)


def test_an_incomplete_end_is_dropped(tmp_path):
    path = tmp_path / "journal"
    record(path, [("arrival", 1, 0), ("room", 2, 0)], flush_after={0})
    path.write_bytes(path.read_bytes()[:-1])
    reader = JournalReader(path)
    assert reader.plan_log.observe("arrival", 0) == 1
    with pytest.raises(ReplayEnded):
        reader.plan_log.observe("room", 0)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xff", b"text", msgpack.packb({"version": 2}), msgpack.packb([1])]
    + [msgpack.packb({"version": 1}) + msgpack.packb(part) for part in (1, {}, {"plan": 3})],
)
def test_damaged_files_are_refused(tmp_path, content):
    path = tmp_path / "journal"
    path.write_bytes(content)
    with pytest.raises(ReplayError, match=str(path)):
        JournalReader(path)


def test_entries_take_few_bytes(tmp_path):
    record(tmp_path / "journal", [("gather_async", worker % 3 + 1, 0) for worker in range(10_000)])
    assert (tmp_path / "journal").stat().st_size < 31_000


def arrivals(make_plan, journal, n):
    plan = make_plan()
    plan.metrics.journal = journal
    plan.start(seed=1)
    with plan:
        return plan.take(n)


def delayed(items, delay_s):
    for item in items:
        time.sleep(delay_s)
        yield item


def test_items_of_actors_arrive_in_the_recorded_order(ray_session, tmp_path):
    def plan_with(first_s, second_s):
        makers = [partial(delayed, range(20), first_s), partial(delayed, range(20, 40), second_s)]
        return lambda: from_iterators(makers).gather_async(num_async=2)

    writer = JournalWriter(tmp_path / "journal")
    items = arrivals(plan_with(0.0, 0.05), writer, 30)
    writer.flush()
    for plan in (plan_with(0.0, 0.0), plan_with(0.05, 0.0)):
        assert arrivals(plan, JournalReader(tmp_path / "journal"), 30) == items
