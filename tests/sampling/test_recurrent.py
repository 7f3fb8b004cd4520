"""Recurrent data: states go round, sequences are chopped, memory windows look back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.data import SampleBatch, pad_batch_to_sequences_of_same_size
from flowrl.policies import ConfigError, ViewRequirement
from flowrl.sampling import RolloutWorker

from .fakes import CountEnv, Idle

START = 1000.0


class Adding(Idle):
    """Its state is START plus all the steps that it has seen; its value shows the state."""

    max_seq_len = 4

    def __init__(self, *args):
        super().__init__(*args)
        self.view_requirements |= self.recurrent_views(self.max_seq_len)
        self.seen = []

    def get_initial_state(self):
        return [np.array([START], np.float32)]

    def after(self, inputs):
        return inputs["state_in_0"] + inputs["obs"][:, 1:] + 1

    def compute_actions_from_input_dict(self, input_dict, explore=True):
        self.seen.append(input_dict["state_in_0"][:, 0].copy())
        state = self.after(input_dict)
        return np.zeros(len(state), np.int64), [state], {"vf_preds": state[:, 0]}

    def compute_values_from_input_dict(self, input_dict):
        return self.after(input_dict)[:, 0]

    def postprocess_fragment(self, fragment):
        return {"next_values": fragment["next_values"]}


def worker(length=5, fragment=7, envs=1, policy=Adding, **config):
    return RolloutWorker(
        lambda context: CountEnv(length),
        policy,
        {"num_envs_per_worker": envs, "rollout_fragment_length": fragment, **config},
    )


def state_before(t):
    """The state before step t: START + 1 + 2 + … + t."""
    return START + t * (t + 1) / 2


@given(st.integers(1, 9), st.integers(1, 11), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_states_and_sequences(length, fragment, envs):
    w = worker(length, fragment, envs)
    batches = [w.sample() for _ in range(3)]
    for batch in batches:
        assert batch.count == fragment * envs
        assert batch["seq_lens"].sum() == batch.count
        assert batch["seq_lens"].max() <= 4
        assert batch["state_in_0"].shape == (len(batch["seq_lens"]), 1)
        assert "state_out_0" not in batch
        assert np.allclose(batch["vf_preds"], [state_before(t + 1) for t in batch["t"]])
        begins = np.cumsum(batch["seq_lens"]) - batch["seq_lens"]
        expected = [state_before(t) for t in batch["t"][begins]]
        assert np.allclose(batch["state_in_0"][:, 0], expected)
        for begin, count in zip(begins, batch["seq_lens"], strict=True):
            assert len(set(batch["unroll_id"][begin : begin + count])) == 1
        # the value after the last step is of the state after it
        going_on = ~batch["terminateds"]
        assert np.allclose(
            batch["next_values"][going_on], [state_before(t + 2) for t in batch["t"][going_on]]
        )
    joined = SampleBatch.concat_samples(batches)
    assert joined["seq_lens"].sum() == joined.count
    padded = pad_batch_to_sequences_of_same_size(joined)
    longest = padded.max_seq_len
    assert len(padded["loss_mask"]) == longest * len(joined["seq_lens"])
    assert padded["loss_mask"].sum() == joined.count


def test_chunks_are_counted_from_the_fragments_start():
    w = worker(length=5, fragment=4, policy=type("Three", (Adding,), {"max_seq_len": 3}))
    assert w.sample()["seq_lens"].tolist() == [3, 1]
    assert w.sample()["seq_lens"].tolist() == [1, 3]


def test_a_soft_horizon_keeps_the_state_and_a_hard_one_does_not():
    soft = worker(100, 12, horizon=3, soft_horizon=True)
    batch = soft.sample()
    assert batch["t"].tolist() == [0, 1, 2] * 4
    assert np.allclose(batch["vf_preds"], [state_before(k + 1) for k in range(12)])
    assert batch["seq_lens"].tolist() == [3, 3, 3, 3]
    assert np.allclose(batch["state_in_0"][:, 0], [state_before(k) for k in (0, 3, 6, 9)])
    assert soft.sample()["vf_preds"][0] == state_before(13)
    hard = worker(100, 12, horizon=3).sample()
    assert np.allclose(hard["vf_preds"], [state_before(t + 1) for t in (0, 1, 2)] * 4)


def test_previous_actions_and_rewards_besides():
    class More(Adding):
        def __init__(self, *args):
            super().__init__(*args)
            self.view_requirements["prev_rewards"] = ViewRequirement("rewards", shift=-1)

    batch = worker(policy=More).sample()
    assert batch["prev_rewards"].tolist() == batch["t"].tolist()


def test_memory_windows():
    class Attending(Adding):
        """Sees its last three outputs."""

        def __init__(self, *args):
            Idle.__init__(self, *args)
            self.seen = []
            self.view_requirements["state_in_0"] = ViewRequirement(
                "state_out_0", shift="-3:-1", batch_repeat_value=4
            )

        def get_initial_state(self):
            return [np.zeros(1, np.float32)]

        def after(self, inputs):
            assert inputs["state_in_0"].shape[1:] == (3, 1)
            self.seen.append(inputs["state_in_0"][0, :, 0].tolist())
            return inputs["obs"][:, 1:] + 1

        def compute_actions_from_input_dict(self, input_dict, explore=True):
            state = self.after(input_dict)
            return np.zeros(len(state), np.int64), [state], {}

        def postprocess_fragment(self, fragment):
            return {}

    w = worker(length=100, fragment=6, policy=Attending)
    batches = [w.sample() for _ in range(2)]
    assert w.policy.seen[:5] == [[0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]
    windows = np.concatenate([batch["state_in_0"][:, :, 0] for batch in batches])
    # of the sequences that begin at 0, 4 and, in the second fragment, 6 and 10
    assert windows.tolist() == [w.policy.seen[t] for t in (0, 4, 6, 10)]


def test_minibatches_keep_sequences_whole():
    learned = []

    class Learning(Adding):
        def learn_on_batch(self, batch):
            begins = np.cumsum(batch["seq_lens"]) - batch["seq_lens"]
            assert np.allclose(
                batch["state_in_0"][:, 0], [state_before(t) for t in batch["t"][begins]]
            )
            learned.append(batch.count)
            return {"rows": float(batch.count)}

    w = worker(fragment=40, policy=Learning)
    w.policy.learn_on_minibatches(w.sample(), num_sgd_iter=2, sgd_minibatch_size=10)
    assert sum(learned) == 80
    assert all(0 < n <= 13 for n in learned)
    assert sum(n < 10 for n in learned) <= 2  # the last one of a pass


def test_repeated_values_are_for_states_only():
    w = worker()
    w.policy.view_requirements["x"] = ViewRequirement("rewards", shift=-1, batch_repeat_value=3)
    with pytest.raises(ConfigError, match="view 'x': batch_repeat_value is for views named"):
        w.sample()
    with pytest.raises(ConfigError, match="batch_repeat_value must be an int"):
        ViewRequirement("x", batch_repeat_value=0)
