"""Recurrent policies: states, sequences and windows of states."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.data import SampleBatch, pad_batch_to_sequences_of_same_size
from flowrl.policies import ConfigError, ViewRequirement
from flowrl.sampling import RolloutWorker

from .fakes import CountEnv, Idle

START = 1000.0


class SummingState(Idle):
    """Its state is START plus the sum of the observed steps (from 1); its value is the state."""

    max_seq_len = 4

    def __init__(self, *args):
        super().__init__(*args)
        self.view_requirements |= self.recurrent_views(self.max_seq_len)
        self.recorded_states = []

    def get_initial_state(self):
        return [np.array([START], np.float32)]

    def after(self, inputs):
        return inputs["state_in_0"] + inputs["obs"][:, 1:] + 1

    def compute_actions_from_input_dict(self, input_dict, explore=True):
        self.recorded_states.append(input_dict["state_in_0"][:, 0].copy())
        state = self.after(input_dict)
        return np.zeros(len(state), np.int64), [state], {"vf_preds": state[:, 0]}

    def compute_values_from_input_dict(self, input_dict):
        return self.after(input_dict)[:, 0]

    def postprocess_fragment(self, fragment):
        return {"next_values": fragment["next_values"]}


def worker(length=5, fragment=7, envs=1, policy=SummingState, **config):
    return RolloutWorker(
        lambda context: CountEnv(length),
        policy,
        {"num_envs_per_worker": envs, "rollout_fragment_length": fragment, **config},
    )


def state_before(t):
    """Return the state before step t: START + 1 + 2 + ... + t."""
    return START + t * (t + 1) / 2


@given(st.integers(1, 9), st.integers(1, 11), st.integers(1, 3))
@settings(max_examples=30)
def test_states_and_sequences_are_consistent(length, fragment, envs):
    w = worker(length, fragment, envs)
    batches = [w.sample() for _ in range(3)]
    for batch in batches:
        assert batch.count == fragment * envs
        assert batch["seq_lens"].sum() == batch.count
        assert batch["seq_lens"].max() <= 4
        assert batch["state_in_0"].shape == (len(batch["seq_lens"]), 1)
        assert "state_out_0" not in batch
        assert np.allclose(batch["vf_preds"], [state_before(t + 1) for t in batch["t"]])
        starts = np.cumsum(batch["seq_lens"]) - batch["seq_lens"]
        expected = [state_before(t) for t in batch["t"][starts]]
        assert np.allclose(batch["state_in_0"][:, 0], expected)
        for start, count in zip(starts, batch["seq_lens"], strict=True):
            assert len(set(batch["unroll_id"][start : start + count])) == 1
        # the value after the last step uses the state after it
        running = ~batch["terminateds"]
        assert np.allclose(
            batch["next_values"][running], [state_before(t + 2) for t in batch["t"][running]]
        )
    joined = SampleBatch.concat_samples(batches)
    assert joined["seq_lens"].sum() == joined.count
    padded = pad_batch_to_sequences_of_same_size(joined)
    longest = padded.max_seq_len
    assert len(padded["loss_mask"]) == longest * len(joined["seq_lens"])
    assert padded["loss_mask"].sum() == joined.count


def test_sequences_start_at_the_fragment_start():
    w = worker(length=5, fragment=4, policy=type("Three", (SummingState,), {"max_seq_len": 3}))
    assert w.sample()["seq_lens"].tolist() == [3, 1]
    assert w.sample()["seq_lens"].tolist() == [1, 3]


def test_only_soft_horizons_keep_the_state():
    soft = worker(100, 12, horizon=3, soft_horizon=True)
    batch = soft.sample()
    assert batch["t"].tolist() == [0, 1, 2] * 4
    assert np.allclose(batch["vf_preds"], [state_before(k + 1) for k in range(12)])
    assert batch["seq_lens"].tolist() == [3, 3, 3, 3]
    assert np.allclose(batch["state_in_0"][:, 0], [state_before(k) for k in (0, 3, 6, 9)])
    assert soft.sample()["vf_preds"][0] == state_before(13)
    hard = worker(100, 12, horizon=3).sample()
    assert np.allclose(hard["vf_preds"], [state_before(t + 1) for t in (0, 1, 2)] * 4)


def test_recurrent_policy_may_view_previous_rewards():
    class WithPreviousReward(SummingState):
        def __init__(self, *args):
            super().__init__(*args)
            self.view_requirements["prev_rewards"] = ViewRequirement("rewards", shift=-1)

    batch = worker(policy=WithPreviousReward).sample()
    assert batch["prev_rewards"].tolist() == batch["t"].tolist()


def test_state_views_may_be_windows():
    class WindowState(SummingState):
        """Its state input is the window of its last three outputs."""

        def __init__(self, *args):
            Idle.__init__(self, *args)
            self.recorded_states = []
            self.view_requirements["state_in_0"] = ViewRequirement(
                "state_out_0", shift="-3:-1", batch_repeat_value=4
            )

        def get_initial_state(self):
            return [np.zeros(1, np.float32)]

        def after(self, inputs):
            assert inputs["state_in_0"].shape[1:] == (3, 1)
            self.recorded_states.append(inputs["state_in_0"][0, :, 0].tolist())
            return inputs["obs"][:, 1:] + 1

        def compute_actions_from_input_dict(self, input_dict, explore=True):
            state = self.after(input_dict)
            return np.zeros(len(state), np.int64), [state], {}

        def postprocess_fragment(self, fragment):
            return {}

    w = worker(length=100, fragment=6, policy=WindowState)
    batches = [w.sample() for _ in range(2)]
    assert w.policy.recorded_states[:5] == [[0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]
    windows = np.concatenate([batch["state_in_0"][:, :, 0] for batch in batches])
    # the sequences start at 0 and 4, and in the second fragment at 6 and 10
    assert windows.tolist() == [w.policy.recorded_states[t] for t in (0, 4, 6, 10)]


def test_minibatches_do_not_split_sequences():
    learned = []

    class ChecksStates(SummingState):
        def learn_on_batch(self, batch):
            starts = np.cumsum(batch["seq_lens"]) - batch["seq_lens"]
            assert np.allclose(
                batch["state_in_0"][:, 0], [state_before(t) for t in batch["t"][starts]]
            )
            learned.append(batch.count)
            return {"rows": float(batch.count)}

    w = worker(fragment=40, policy=ChecksStates)
    w.policy.learn_on_minibatches(w.sample(), num_sgd_iter=2, sgd_minibatch_size=10)
    assert sum(learned) == 80
    assert all(0 < n <= 13 for n in learned)
    assert sum(n < 10 for n in learned) <= 2  # the last one of each pass


def test_batch_repeat_value_is_only_for_states():
    w = worker()
    w.policy.view_requirements["x"] = ViewRequirement("rewards", shift=-1, batch_repeat_value=3)
    with pytest.raises(ConfigError, match="view 'x': batch_repeat_value is only for views named"):
        w.sample()
    with pytest.raises(ConfigError, match="batch_repeat_value must be an int"):
        ViewRequirement("x", batch_repeat_value=0)
