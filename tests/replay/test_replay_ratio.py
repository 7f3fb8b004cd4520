"""ReplayRatio: counts over a resume with other settings."""

from itertools import product

import pytest

from flowrl.replay.replay_ratio import ReplayRatio

BATCH = 10


def run(ratio, stores):
    """Store batches, and draw the batches that are due; return the number of drawn rows."""
    before = ratio.drawn
    for _ in range(stores):
        ratio.note_stored(BATCH)
        while ratio.may_draw(BATCH):
            ratio.note_drawn(BATCH)
    return ratio.drawn - before


def resumed(ratio, *settings):
    other = ReplayRatio(*settings)
    other.load_state_dict(ratio.state_dict())
    return other


@pytest.mark.parametrize(("before", "after"), list(product([0.5, 1.0, 4.0, None], repeat=2)))
def test_changed_training_intensity_holds_for_rows_stored_after_the_resume(before, after):
    ratio = ReplayRatio(50, before)
    run(ratio, 100)
    ratio = resumed(ratio, 50, after)
    expected = 200 * (1.0 if after is None else after)  # None: one batch per stored batch
    assert run(ratio, 20) == pytest.approx(expected, abs=BATCH)
    ratio = resumed(ratio, 50, before)
    expected = 200 * (1.0 if before is None else before)
    assert run(ratio, 20) == pytest.approx(expected, abs=BATCH)


@pytest.mark.parametrize("intensity", [2.0, None])
def test_larger_learning_starts_waits_for_more_rows_and_owes_no_draws(intensity):
    ratio = ReplayRatio(50, intensity)
    run(ratio, 20)
    ratio = resumed(ratio, 400, intensity)
    assert run(ratio, 19) == 0  # 390 rows
    assert run(ratio, 1 + 10) == pytest.approx(100 * (intensity or 1.0), abs=2 * BATCH)


def test_same_settings_continue_exactly():
    ratio, other = ReplayRatio(50, 0.3), ReplayRatio(50, 0.3)
    for _ in range(7):
        assert run(ratio, 3) == run(other, 3)
        ratio = resumed(ratio, 50, 0.3)
    assert ratio.state_dict() == other.state_dict()


def test_draws_that_are_due_stay_due():
    ratio = ReplayRatio(0, 2.0)
    ratio.note_stored(100)  # 200 rows are due
    assert "draw 20 batches" in resumed(ratio, 0, 1.0).missing_draws(BATCH)
    later = resumed(resumed(ratio, 400, 2.0), 0, 2.0)
    assert "draw 20 batches" in later.missing_draws(BATCH)
    assert "store 10 more rows" in resumed(ReplayRatio(), 10, 1.0).missing_stores(BATCH)


def test_no_draws_are_due_after_a_change_to_one_batch_per_batch():
    ratio = ReplayRatio(0, 2.0)
    ratio.note_stored(100)
    assert not resumed(ratio, 0, None).may_draw(BATCH)
