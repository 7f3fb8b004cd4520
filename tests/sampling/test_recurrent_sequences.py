"""Sequences of recurrent policies equal those of a plain loop over the episodes, step by step."""

import itertools
from collections import defaultdict

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flowrl.algorithms.a2c import A2CTorchPolicy
from flowrl.data import SampleBatch, chop_into_sequences, pad_batch_to_sequences_of_same_size
from flowrl.data.sequences import sequence_minibatches, with_burn_in, without_padding
from flowrl.policies import ViewRequirement
from flowrl.policies.models.recurrent import RecurrentNetwork
from flowrl.replay import ReplayBuffer
from flowrl.sampling import RolloutWorker

from .fakes import Idle

INITIAL = np.array([-7.0, -8.0, 0.5], np.float32)


class Episodes(gym.Env):
    """Observes (environment, episode, t); its episodes have the given lengths, in turn.

    Every third episode is truncated, the others terminate.
    """

    observation_space = gym.spaces.Box(-1.0, 1e6, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, index, lengths):
        self.index, self.lengths = index, lengths
        self.episode, self.t = -1, 0

    def observe(self):
        return np.array([self.index, self.episode, self.t], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        end = self.t == length_of(self.lengths, self.index, self.episode)
        is_truncated = end and self.episode % 3 == 2
        return self.observe(), 1.0, end and not is_truncated, is_truncated, {}


def length_of(lengths, env, episode):
    return lengths[(env + episode) % len(lengths)]


def next_state(state, env, episode, t):
    """Return the state after a step: its place, and a number that depends on all earlier steps."""
    return np.array([env, episode, 0.5 * state[2] + t + 1], np.float32)


class Remembers(Idle):
    """Its state is `next_state` of the last step; its value is the last number of the state."""

    max_seq_len = 4
    initial = INITIAL

    def __init__(self, *args):
        super().__init__(*args)
        self.view_requirements |= self.recurrent_views(self.max_seq_len)

    def get_initial_state(self):
        return [self.initial.copy()]

    def after(self, inputs):
        pairs = zip(inputs["state_in_0"], inputs["obs"], strict=True)
        return np.stack([next_state(state, *obs) for state, obs in pairs])

    def compute_actions_from_input_dict(self, input_dict, explore=True):
        states = self.after(input_dict)
        return np.zeros(len(states), np.int64), [states], {"vf_preds": states[:, 2]}

    def compute_values_from_input_dict(self, input_dict):
        return self.after(input_dict)[:, 2]


class PostprocessesTrajectories(Remembers):
    """The same; its trajectories are postprocessed one by one."""

    def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
        batch = super().postprocess_trajectory(sample_batch, other_agent_batches, episode)
        return batch.with_columns(length=np.full(batch.count, batch.count))


class StatesOfRows(Remembers):
    """The same with a state for each row, as policies with burn-in have it."""

    def __init__(self, *args):
        super().__init__(*args)
        self.view_requirements["state_in_0"] = ViewRequirement("state_out_0", shift=-1)


def make_worker(policy, lengths, fragment, envs, max_seq_len, batch_mode, burn_in=0):
    return RolloutWorker(
        lambda context: Episodes(context.vector_index, lengths),
        type(policy.__name__, (policy,), {"max_seq_len": max_seq_len}),
        {
            "num_envs_per_worker": envs,
            "rollout_fragment_length": fragment,
            "batch_mode": batch_mode,
            "model": {"use_lstm": True, "burn_in": burn_in},
        },
    )


def reference_state(env, episode, t):
    """Return the state before step t."""
    state = INITIAL
    for step in range(t):
        state = next_state(state, env, episode, step)
    return state


def steps_of(lengths, env):
    """Yield (env, episode, t) of an environment's steps."""
    for episode in itertools.count():
        for t in range(length_of(lengths, env, episode)):
            yield env, episode, t


def chopped(steps, max_seq_len):
    """Cut the consecutive steps of an environment into sequences: at episode starts, and after
    `max_seq_len` steps."""
    sequences = []
    for step in steps:
        _, _, t = step
        if not sequences or t == 0 or len(sequences[-1]) == max_seq_len:
            sequences.append([])
        sequences[-1].append(step)
    return sequences


def sequences_in(batch):
    """Return the sequences of an unpadded batch: lists of (env, episode, t), and their states."""
    places = [tuple(map(int, obs)) for obs in batch["obs"]]
    ends = np.cumsum(batch["seq_lens"]).tolist()
    sequences = [places[i:j] for i, j in itertools.pairwise([0, *ends])]
    return sequences, batch["state_in_0"]


def check_states(batch):
    """Check the state of each sequence of an unpadded batch; return the sequences."""
    sequences, states = sequences_in(batch)
    assert len(sequences) == len(states)
    for sequence, state in zip(sequences, states, strict=True):
        env, episode, t = sequence[0]
        assert sequence == [(env, episode, t + k) for k in range(len(sequence))]
        np.testing.assert_allclose(state, reference_state(env, episode, t), rtol=1e-6)
        if t == 0:
            np.testing.assert_array_equal(state, INITIAL)
    assert states.dtype == np.float32
    return sequences


def check_padding(batch, max_seq_len):
    """Check the padded batch against the sequences of the batch."""
    sequences, states = sequences_in(batch)
    for length in (None, max_seq_len, max_seq_len + 2):
        padded = pad_batch_to_sequences_of_same_size(batch, length)
        width = length or max(map(len, sequences))
        np.testing.assert_array_equal(padded["state_in_0"], states)
        rows = padded["obs"].reshape(len(sequences), width, 3)
        mask = padded["loss_mask"].reshape(len(sequences), width)
        for sequence, row, valid in zip(sequences, rows, mask, strict=True):
            assert row[: len(sequence)].tolist() == [list(map(float, step)) for step in sequence]
            assert not row[len(sequence) :].any()
            assert valid.tolist() == [k < len(sequence) for k in range(width)]
        check_states(without_padding(padded))


def check_chopping(batch, max_seq_len):
    """Check that chopping rows with a state each gives the same sequences."""
    sequences, states = sequences_in(batch)
    state_of_rows = np.stack([reference_state(*step) for s in sequences for step in s])
    (obs,), (initial,), lens = chop_into_sequences(
        feature_columns=[batch["obs"]],
        state_columns=[state_of_rows],
        max_seq_len=max_seq_len,
        episode_ids=batch["eps_id"],
        unroll_ids=batch["unroll_id"],
        agent_indices=batch["agent_index"],
    )
    assert lens.tolist() == list(map(len, sequences))
    np.testing.assert_allclose(initial, states, rtol=1e-6)
    assert obs.reshape(len(lens), -1, 3)[:, 0].tolist() == [
        list(map(float, s[0])) for s in sequences
    ]


cases = {
    "lengths": st.lists(st.integers(1, 9), min_size=1, max_size=4),
    "fragment": st.integers(1, 11),
    "envs": st.integers(1, 3),
    "max_seq_len": st.integers(1, 6),
    "policy": st.sampled_from([Remembers, PostprocessesTrajectories]),
}


@given(**cases)
@settings(max_examples=20)
def test_truncated_episodes(lengths, fragment, envs, max_seq_len, policy):
    worker = make_worker(policy, lengths, fragment, envs, max_seq_len, "truncate_episodes")
    steps = {env: steps_of(lengths, env) for env in range(envs)}
    batches = [worker.sample() for _ in range(4)]
    for batch in batches:
        expected = [
            sequence
            for env in range(envs)
            for sequence in chopped(itertools.islice(steps[env], fragment), max_seq_len)
        ]
        assert sorted(check_states(batch)) == sorted(expected)
        check_padding(batch, max_seq_len)
        check_chopping(batch, max_seq_len)
    joined = SampleBatch.concat_samples(batches)
    check_states(joined)
    check_padding(joined, max_seq_len)
    for minibatch in sequence_minibatches(joined, 5, np.random.default_rng(0)):
        check_states(minibatch)


@given(**cases)
@settings(max_examples=20)
def test_complete_episodes(lengths, fragment, envs, max_seq_len, policy):
    worker = make_worker(policy, lengths, fragment, envs, max_seq_len, "complete_episodes")
    num_episodes = defaultdict(int)
    for _ in range(4):
        batch = worker.sample()
        assert batch.count >= fragment * envs
        sequences = check_states(batch)
        for env in range(envs):
            of_env = [sequence for sequence in sequences if sequence[0][0] == env]
            first, num_sampled = num_episodes[env], sum(s[0][2] == 0 for s in of_env)
            num_episodes[env] += num_sampled
            steps = itertools.dropwhile(lambda step, n=first: step[1] < n, steps_of(lengths, env))
            expected = itertools.takewhile(lambda step, n=first + num_sampled: step[1] < n, steps)
            assert of_env == chopped(expected, max_seq_len)
        check_padding(batch, max_seq_len)
        check_chopping(batch, max_seq_len)


@given(
    **{**cases, "policy": st.just(StatesOfRows)},
    burn_in=st.integers(1, 3),
    batch_mode=st.sampled_from(["truncate_episodes", "complete_episodes"]),
)
@settings(max_examples=15)
def test_sequences_with_burn_in(lengths, fragment, envs, max_seq_len, policy, burn_in, batch_mode):
    worker = make_worker(policy, lengths, fragment, envs, max_seq_len, batch_mode, burn_in)
    buffer = ReplayBuffer(
        500, storage_unit="sequences", max_seq_len=max_seq_len, burn_in=burn_in, seed=0
    )
    for _ in range(3):
        batch = worker.sample()
        states = [reference_state(*map(int, obs)) for obs in batch["obs"]]
        np.testing.assert_allclose(batch["state_in_0"], states, rtol=1e-6)
        burned_in = with_burn_in(batch, max_seq_len, burn_in)
        check_states(burned_in)
        check_padding(burned_in.without_columns("loss_mask"), max_seq_len + burn_in)
        check_states(without_padding(pad_batch_to_sequences_of_same_size(batch, max_seq_len)))
        buffer.add(batch)
        check_states(buffer.sample(6))


class StartsElsewhere(A2CTorchPolicy):
    """Its initial states are not zeros."""

    def get_initial_state(self):
        return [np.full_like(state, 0.25) for state in super().get_initial_state()]


class LearnedStart(RecurrentNetwork):
    """Its initial states are tensors, of parameters."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        shapes = [state.shape for state in super().get_initial_state()]
        self.start = nn.ParameterList([nn.Parameter(torch.full(shape, 0.5)) for shape in shapes])

    def get_initial_state(self):
        return [parameter.double() for parameter in self.start]


@pytest.mark.parametrize("batch_mode", ["truncate_episodes", "complete_episodes"])
@pytest.mark.parametrize(
    ("policy_class", "model", "start"),
    [
        (A2CTorchPolicy, {"use_lstm": True}, 0.0),
        (A2CTorchPolicy, {"use_lstm": True, "max_seq_len": 1}, 0.0),
        (A2CTorchPolicy, {"use_lstm": True, "lstm_cell_type": "gru"}, 0.0),
        (StartsElsewhere, {"use_lstm": True}, 0.25),
        (A2CTorchPolicy, {"custom_model": LearnedStart}, 0.5),
    ],
)
def test_states_of_a_network(policy_class, model, start, batch_mode):
    """The network's states at the starts of sequences are those of a loop over single steps."""
    worker = RolloutWorker(
        lambda context: Episodes(context.vector_index, [5, 2, 7]),
        policy_class,
        {
            "num_envs_per_worker": 2,
            "rollout_fragment_length": 8,
            "batch_mode": batch_mode,
            "model": {"fcnet_hiddens": [8], "max_seq_len": 3, **model},
            "seed": 0,
        },
    )
    policy = worker.policy
    names = [f"state_in_{i}" for i, _ in enumerate(policy.get_initial_state())]
    for _ in range(3):
        batch = worker.sample()
        padded = pad_batch_to_sequences_of_same_size(batch)
        starts = np.cumsum(batch["seq_lens"]) - batch["seq_lens"]
        for number, (env, episode, t) in enumerate(batch["obs"][starts]):
            states = [np.full((1, *batch[n].shape[1:]), start, np.float32) for n in names]
            for step in range(int(t)):
                obs = np.array([[env, episode, step]], np.float32)
                _, states, _ = policy.compute_actions(obs, explore=False, state_batches=states)
            for name, state in zip(names, states, strict=True):
                np.testing.assert_allclose(batch[name][number], state[0], rtol=1e-5, atol=1e-6)
                np.testing.assert_array_equal(padded[name][number], batch[name][number])
                assert batch[name].dtype == np.float32
    assert np.isfinite(policy.learn_on_batch(batch)["total_loss"])
