"""EpisodeReturns: returns and lengths of episodes that span fragments."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.sampling.episode_returns import EpisodeReturns
from flowrl.sampling.segments import Event, Segments


@st.composite
def lanes_of_segments(draw):
    """Return the number of rows, and for each lane (begin, end, whether the episode ends)."""
    rows = draw(st.integers(1, 12))
    lanes = []
    for _ in range(draw(st.integers(1, 4))):
        cuts = sorted(draw(st.sets(st.integers(0, rows), max_size=6)))
        parts = list(itertools.pairwise(cuts))
        kept = [part for part in parts if draw(st.booleans())]  # the others are lost rows
        lanes.append(
            [(*part, part != kept[-1] or draw(st.booleans())) for part in kept],
        )
    return rows, lanes


def segments_of(lanes, continues):
    parts = [
        (lane, begin, end, 3 if i == 0 and continues[lane] else 0, ends)
        for lane, of_lane in enumerate(lanes)
        for i, (begin, end, ends) in enumerate(of_lane)
    ]
    lane, begins, ends, steps, ended = (np.array(a, np.int64) for a in zip(*parts, strict=True))
    count = len(parts)
    return Segments(
        lanes=lane,
        begins=begins,
        ends=ends,
        first_t=steps,
        rows_before=steps,
        episode_ids=np.arange(count),
        events=np.where(ended == 1, Event.ENDED, Event.OPEN),
        final_index=np.full(count, -1),
        continued=np.zeros(count, bool),
        envs=lane,
        agents=np.zeros(count, np.int64),
    )


@given(lanes_of_segments(), st.lists(st.booleans(), min_size=4, max_size=4), st.integers(0, 99))
@settings(max_examples=200)
def test_returns_are_sums_over_segments(drawn, continues, seed):
    rows, lanes = drawn
    if not any(lanes):
        return
    rng = np.random.default_rng(seed)
    rewards = rng.integers(-3, 4, (rows, len(lanes))).astype(np.float32)
    returns = EpisodeReturns(len(lanes))
    before = rng.integers(-9, 9, len(lanes)).astype(float)
    returns.so_far[:] = before
    episodes = returns.end_fragment(segments_of(lanes, continues), rewards, None)
    found, running = [], before.copy()
    for lane, of_lane in enumerate(lanes):
        for i, (begin, end, ends) in enumerate(of_lane):
            is_continued = i == 0 and continues[lane]
            total = sum(rewards[begin:end, lane].tolist()) + is_continued * before[lane]
            if ends:
                found.append((end, lane, total, end - begin + 3 * is_continued))
            running[lane] = 0.0 if ends else total
    expected = [(total, length, lane) for _, lane, total, length in sorted(found)]
    assert [tuple(episode)[:3] for episode in episodes] == expected
    np.testing.assert_array_equal(returns.so_far, running)
