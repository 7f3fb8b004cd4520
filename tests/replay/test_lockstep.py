"""Env steps in lockstep: the rows of all policies, against a plain list of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.replay import MultiAgentReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer


def buffer_of(capacity=40, size=16, make=None, **more):
    made = make or (lambda policy_id: ReplayBuffer(capacity, seed=0))
    return MultiAgentReplayBuffer(made, replay_batch_size=size, mode="lockstep", **more)


class Episodes:
    """Agent 0 and 1 have policy a, agent 2 has b; each acts in every step that is not among those
    that it misses. An observation says whose it is: [episode, step, agent]."""

    def __init__(self, lengths, misses=()):
        self.lengths, self.misses = lengths, set(misses)
        self.at = [0, 0]  # episode, step
        self.rows = []  # (episode, step, agent), policy, in the order in which they were stored

    def fragment(self, steps):
        agents = {0: [], 1: [], 2: []}
        for _ in range(steps):
            episode, step = self.at
            for agent, rows in agents.items():
                if (agent, step) not in self.misses:
                    rows.append((episode, step, agent))
            last = step + 1 == self.lengths[episode % len(self.lengths)]
            self.at = [episode + 1, 0] if last else [episode, step + 1]
        parts = {}
        for policy_id, mine in (("a", (0, 1)), ("b", (2,))):
            rows = [row for agent in mine for row in agents[agent]]
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


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    misses=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 6)), max_size=6),
    steps=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    capacity=st.integers(20, 40),
)
def test_draws_are_whole_env_steps(lengths, misses, steps, capacity):
    episodes, buffer = Episodes(lengths, misses), buffer_of(capacity)
    for count in steps:
        batch = episodes.fragment(count)
        buffer.add(batch)
        if not episodes.rows:
            continue
        there = {}
        for policy_id in ("a", "b"):
            own = [row for row, pid in episodes.rows if pid == policy_id]
            there |= dict.fromkeys(own[-capacity:], policy_id)
        stored = {}  # env step -> its rows
        for row, _ in episodes.rows:
            stored.setdefault(row[:2], set()).add(row)
        drawn = buffer.sample()
        seen = [
            [tuple(row) for row in drawn[pid]["obs"].astype(int).tolist()] if pid in drawn else []
            for pid in ("a", "b")
        ]
        orders = [list(dict.fromkeys(row[:2] for row in rows)) for rows in seen]
        for step in {row[:2] for rows in seen for row in rows}:
            mine = [[row for row in rows if row[:2] == step] for rows in seen]
            assert {row for rows in mine for row in rows} == stored[step]
            assert all(row in there for rows in mine for row in rows)
            times = {
                len(rows) / len([r for r in stored[step] if there[r] == pid])
                for rows, pid in zip(mine, ("a", "b"), strict=True)
                if rows
            }
            assert len(times) == 1  # drawn as often in both
        both = [step for step in orders[0] if step in orders[1]]
        assert [step for step in orders[1] if step in orders[0]] == both
        for policy_id in drawn.policy_batches:
            rows = drawn[policy_id]
            np.testing.assert_array_equal(rows["new_obs"], rows["obs"] + [0, 1, 0])


def test_all_steps_are_drawn_alike():
    episodes, buffer = Episodes([50]), buffer_of(40, size=5_000)
    for _ in range(3):
        buffer.add(episodes.fragment(10))
    steps = buffer.sample()["b"]["t"]
    counts = np.bincount(steps, minlength=30)
    assert not counts[:10].any()  # policy a has lost the rows of these
    expected = 5_000 / 20
    assert ((counts[10:] - expected) ** 2 / expected).sum() < 43.8  # chi-square, 19, 0.001
    assert buffer.ratio.drawn == 15_000


def test_a_restored_buffer_draws_the_same():
    episodes, one, two = Episodes([7, 4]), buffer_of(), buffer_of()
    for _ in range(6):
        one.add(episodes.fragment(5))
    two.load_state_dict(one.state_dict())
    more = episodes.fragment(5)
    drawn = []
    for buffer in (one, two):
        buffer.add(more)
        drawn.append(buffer.sample())
    for policy_id in ("a", "b"):
        np.testing.assert_array_equal(*(batch[policy_id]["obs"] for batch in drawn))
    with pytest.raises(ValueError, match="of the other mode"):
        MultiAgentReplayBuffer(lambda _: ReplayBuffer(9), replay_batch_size=1).load_state_dict(
            one.state_dict()
        )


def test_what_cannot_be_in_lockstep():
    batch = Episodes([7]).fragment(4)
    with pytest.raises(ValueError, match="mode is"):
        MultiAgentReplayBuffer(lambda _: ReplayBuffer(9), replay_batch_size=1, mode="both")
    buffer = buffer_of(make=lambda _: PrioritizedReplayBuffer(40))
    with pytest.raises(ValueError, match=r"drawn uniformly.*Prioritized"):
        buffer.add(batch)
    buffer = buffer_of()
    odd = batch.with_batches({"a": batch["a"], "b": batch["b"].without_columns("t")})
    with pytest.raises(ValueError, match="the rows of policy 'b' have no eps_id and t"):
        buffer.add(odd)
    assert len(buffer) == 0
    buffer.add(batch)
    assert len(buffer) == 12
    with pytest.raises(ValueError, match="42 rows of policy 'a' at once for a capacity of 40"):
        buffer.add(Episodes([50]).fragment(21))
    buffer = buffer_of(make=lambda policy_id: ReplayBuffer(40 if policy_id == "a" else 50))
    with pytest.raises(ValueError, match="all buffers have one capacity"):
        buffer.add(batch)
    with pytest.raises(ValueError, match="the replay buffer is empty"):
        buffer_of().sample()
