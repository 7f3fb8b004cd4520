"""Lockstep mode of MultiAgentReplayBuffer, compared with a list of the rows of each env step."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.replay import MultiAgentReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer
from flowrl.replay.env_step_index import EnvStepIndex


def lockstep_buffer(capacity=40, size=16, make=None):
    make = make or (lambda policy_id: ReplayBuffer(capacity, seed=0))
    return MultiAgentReplayBuffer(make, replay_batch_size=size, mode="lockstep")


class Episodes:
    """Fragments of agents 0 and 1 with policy a, and agent 2 with policy b.

    Each agent acts in every step, except for the pairs (agent, step) in `missing`. The observation
    of a row is [episode, step, agent].

    Attributes:
        rows: ((episode, step, agent), policy id) of every row so far, in order.
    """

    def __init__(self, lengths, missing=()):
        self.lengths, self.missing = lengths, set(missing)
        self.position = [0, 0]  # episode, step
        self.rows = []

    def fragment(self, steps):
        agents = {0: [], 1: [], 2: []}
        for _ in range(steps):
            episode, step = self.position
            for agent, rows in agents.items():
                if (agent, step) not in self.missing:
                    rows.append((episode, step, agent))
            last = step + 1 == self.lengths[episode % len(self.lengths)]
            self.position = [episode + 1, 0] if last else [episode, step + 1]
        parts = {}
        for policy_id, policy_agents in (("a", (0, 1)), ("b", (2,))):
            rows = [row for agent in policy_agents for row in agents[agent]]
            rows.sort(key=lambda row: (row[0], row[2]))
            if rows:
                parts[policy_id] = batch_of(rows)
                self.rows += [(row, policy_id) for row in rows]
        return MultiAgentBatch(parts, steps)


def batch_of(rows):
    table = np.array(rows)
    obs = table.astype(np.float32)
    return SampleBatch(
        obs=obs,
        new_obs=obs + np.array([0, 1, 0], np.float32),
        actions=np.zeros(len(rows), np.int64),
        rewards=table[:, 1].astype(np.float32),
        eps_id=table[:, 0],
        t=table[:, 1],
        agent_index=table[:, 2],
    )


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    missing=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 6)), max_size=6),
    steps=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    capacity=st.integers(20, 40),
)
def test_drawn_env_steps_are_complete(lengths, missing, steps, capacity):
    episodes, buffer = Episodes(lengths, missing), lockstep_buffer(capacity)
    for count in steps:
        batch = episodes.fragment(count)
        buffer.add(batch)
        if not episodes.rows:
            continue
        present = {}
        for policy_id in ("a", "b"):
            rows = [row for row, pid in episodes.rows if pid == policy_id]
            present |= dict.fromkeys(rows[-capacity:], policy_id)
        stored = {}  # env step -> its rows
        for row, _ in episodes.rows:
            stored.setdefault(row[:2], set()).add(row)
        drawn = buffer.sample()
        drawn_rows = [
            [tuple(row) for row in drawn[pid]["obs"].astype(int).tolist()] if pid in drawn else []
            for pid in ("a", "b")
        ]
        orders = [list(dict.fromkeys(row[:2] for row in rows)) for rows in drawn_rows]
        for step in {row[:2] for rows in drawn_rows for row in rows}:
            step_rows = [[row for row in rows if row[:2] == step] for rows in drawn_rows]
            assert {row for rows in step_rows for row in rows} == stored[step]
            assert all(row in present for rows in step_rows for row in rows)
            repeats = {
                len(rows) / len([r for r in stored[step] if present[r] == pid])
                for rows, pid in zip(step_rows, ("a", "b"), strict=True)
                if rows
            }
            assert len(repeats) == 1  # equally often for both policies
        common = [step for step in orders[0] if step in orders[1]]
        assert [step for step in orders[1] if step in orders[0]] == common
        for policy_id in drawn.policy_batches:
            rows = drawn[policy_id]
            np.testing.assert_array_equal(rows["new_obs"], rows["obs"] + [0, 1, 0])


@settings(max_examples=100)
@given(
    batches=st.lists(
        st.lists(
            st.dictionaries(st.sampled_from("ab"), st.integers(1, 3), min_size=1),
            min_size=1,
            max_size=2,
        ),
        max_size=12,
    ),
    capacity=st.integers(6, 9),
)
@example([[{"a": 1}], *[[{"b": 1}]] * 5, [{"a": 1}], [{"a": 6}]], 6)
def test_number_of_complete_env_steps(batches, capacity):
    """Compare with a list of the rows of each step; the policies may act in different steps."""
    index, steps = EnvStepIndex(capacity), []
    num_rows = {"a": 0, "b": 0}
    for batch in batches:
        first_rows, rows = dict(num_rows), {"a": [], "b": []}
        for counts in batch:
            ids = {}
            for policy_id, count in counts.items():
                rows[policy_id] += [len(steps)] * count
                ids[policy_id] = range(num_rows[policy_id], num_rows[policy_id] + count)
                num_rows[policy_id] += count
            steps.append(ids)
        parts = {
            policy_id: SampleBatch(eps_id=np.zeros(len(t), np.int64), t=np.array(t))
            for policy_id, t in rows.items()
            if t
        }
        index.check(parts)
        index.extend(parts, first_rows)
        oldest = {policy_id: max(0, count - capacity) for policy_id, count in num_rows.items()}
        index.remove_before({policy_id: oldest[policy_id] for policy_id in parts})
        complete = [
            ids
            for ids in steps[-capacity:]
            if all(rows.start >= oldest[policy_id] for policy_id, rows in ids.items())
        ]
        assert len(index) == len(complete)
        total = sum(len(rows) for ids in complete for rows in ids.values())
        assert index.rows_per_step() == total / max(len(complete), 1)


def test_env_steps_are_drawn_uniformly():
    episodes, buffer = Episodes([50]), lockstep_buffer(40, size=5_000)
    for _ in range(3):
        buffer.add(episodes.fragment(10))
    steps = buffer.sample()["b"]["t"]
    counts = np.bincount(steps, minlength=30)
    assert not counts[:10].any()  # policy a's rows of these steps are overwritten
    expected = 5_000 / 20
    assert (
        (counts[10:] - expected) ** 2 / expected
    ).sum() < 43.8  # p = 0.001 (19 degrees of freedom)
    assert buffer.ratio.drawn == 15_000
    assert [stats["num_rows_sampled"] for stats in buffer.stats().values()] == [10_000, 5_000]


def test_restored_buffer_draws_identically():
    episodes, original, restored = Episodes([7, 4]), lockstep_buffer(), lockstep_buffer()
    for _ in range(6):
        original.add(episodes.fragment(5))
    restored.load_state_dict(original.state_dict())
    next_fragment = episodes.fragment(5)
    drawn = []
    for buffer in (original, restored):
        buffer.add(next_fragment)
        drawn.append(buffer.sample())
    for policy_id in ("a", "b"):
        np.testing.assert_array_equal(*(batch[policy_id]["obs"] for batch in drawn))
    with pytest.raises(ValueError, match="the state is of the other mode"):
        MultiAgentReplayBuffer(lambda _: ReplayBuffer(9), replay_batch_size=1).load_state_dict(
            original.state_dict()
        )


def test_buffers_and_rows_that_cannot_be_in_lockstep_are_rejected():
    batch = Episodes([7]).fragment(4)
    with pytest.raises(ValueError, match="mode must be"):
        MultiAgentReplayBuffer(lambda _: ReplayBuffer(9), replay_batch_size=1, mode="both")
    buffer = lockstep_buffer(make=lambda _: PrioritizedReplayBuffer(40))
    with pytest.raises(ValueError, match=r"draws env steps uniformly.*Prioritized"):
        buffer.add(batch)
    buffer = lockstep_buffer()
    incomplete = batch.with_batches({"a": batch["a"], "b": batch["b"].without_columns("t")})
    with pytest.raises(ValueError, match="the rows of policy 'b' have no eps_id and t"):
        buffer.add(incomplete)
    assert len(buffer) == 0
    buffer.add(batch)
    assert len(buffer) == 12
    with pytest.raises(
        ValueError, match="42 rows of policy 'a' in one batch exceed the capacity of 40"
    ):
        buffer.add(Episodes([50]).fragment(21))
    rows = Episodes([9]).fragment(6)["b"]
    later = rows.with_columns(t=rows["t"] + 6)
    small = lockstep_buffer(make=lambda _: ReplayBuffer(8))
    with pytest.raises(ValueError, match="12 env steps in one batch exceed the capacity of 8"):
        small.add(MultiAgentBatch({"a": rows, "b": later}, 12))
    buffer = lockstep_buffer(make=lambda policy_id: ReplayBuffer(40 if policy_id == "a" else 50))
    with pytest.raises(ValueError, match="buffers of equal capacity"):
        buffer.add(batch)
    with pytest.raises(ValueError, match="the replay buffer is empty"):
        lockstep_buffer().sample()
