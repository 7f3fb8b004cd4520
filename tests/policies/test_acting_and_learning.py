"""Through the sampler, a network gets the same inputs when it acts and when it learns."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from flowrl.algorithms.dqn import DQNTorchPolicy
from flowrl.algorithms.ppo import PPO, PPOConfig, PPOTorchPolicy
from flowrl.algorithms.sac import SACTorchPolicy
from flowrl.algorithms.td3 import TD3TorchPolicy
from flowrl.data import pad_batch_to_sequences_of_same_size
from flowrl.data.sequences import sequence_minibatches
from flowrl.policies import ConfigError, Policy
from flowrl.sampling import RolloutWorker
from flowrl.seeding import stream_state

from .fakes import BOX, TWO, RandomEnv, rows

NESTED = spaces.Dict(a=BOX, b=spaces.Tuple((spaces.Discrete(3, start=1), spaces.MultiBinary(2))))
ACTIONS = spaces.Dict(x=spaces.Discrete(2, start=1), y=spaces.Box(-1, 1, (2,), np.float32))
PREVIOUS = {"use_lstm": True, "lstm_use_prev_action": True, "lstm_use_prev_reward": True}
CASES = {  # observation space, action space, model
    "plain": (BOX, TWO, {}),
    "lstm": (BOX, TWO, {**PREVIOUS, "max_seq_len": 4}),
    "gru": (BOX, spaces.Box(-2, 2, (2,)), {**PREVIOUS, "lstm_cell_type": "gru"}),
    "burn-in": (BOX, TWO, {"use_lstm": True, "max_seq_len": 4, "burn_in": 3}),
    "attention": (
        BOX,
        TWO,
        {"use_attention": True, "attention_memory": 4, "max_seq_len": 5},
    ),
    "two units": (
        BOX,
        spaces.MultiDiscrete([2, 3], start=[1, 0]),
        {"use_attention": True, "attention_num_transformer_units": 2, "max_seq_len": 3},
    ),
    "frames": (BOX, TWO, {"num_framestacks": 3}),
    "nested": (NESTED, ACTIONS, {}),
    "nested lstm": (NESTED, ACTIONS, {**PREVIOUS, "max_seq_len": 3}),
    "nested attention": (NESTED, ACTIONS, {"use_attention": True}),
}


MORE_CASES = {
    "relu": (BOX, TWO, {"fcnet_activation": "relu"}),
    "image": (spaces.Box(0, 255, (16, 16, 3), np.uint8), TWO, {}),
    "resnet": (spaces.Box(0, 255, (16, 16, 3), np.uint8), TWO, {"conv_type": "resnet"}),
}


def make_worker(name, **config):
    obs_space, action_space, model = {**CASES, **MORE_CASES}[name]
    return RolloutWorker(
        lambda context: RandomEnv(obs_space, action_space),
        PPOTorchPolicy,
        {
            "model": {"fcnet_hiddens": [16], **model},
            "seed": 0,
            "num_envs_per_worker": 2,
            "rollout_fragment_length": 10,  # fragments start and end within episodes
            **config,
        },
    )


@pytest.mark.parametrize("config", [{}, {"batch_mode": "complete_episodes"}])
@pytest.mark.parametrize("name", list(CASES))
def test_learning_recomputes_the_outputs_of_acting(name, config):
    w = make_worker(name, **config)
    for _ in range(3):
        batch = w.sample()
        prepared = w.policy.learner.prepare_batch(batch)
        inputs, _ = w.policy.model.from_batch(prepared)
        np.testing.assert_allclose(inputs.detach(), batch["action_dist_inputs"], atol=1e-5)
        values = w.policy.model.value_function().detach()
        np.testing.assert_allclose(values, batch["vf_preds"], atol=1e-5)
        dist = w.policy.dist_class(inputs, w.policy.model)
        logp = dist.logp(w.policy.tensors(prepared)["actions"]).detach()
        np.testing.assert_allclose(logp, batch["action_logp"], atol=1e-4)


@pytest.mark.parametrize("name", list(CASES))
def test_each_model_learns_in_minibatches(name):
    w = make_worker(name)
    stats = w.policy.learn_on_minibatches(w.sample(), 2, 8)
    assert all(np.isfinite(value) for value in stats.values())
    assert stats["kl"] > 0  # the policy changed


@pytest.mark.parametrize("name", ["lstm", "burn-in", "attention", "nested lstm"])
def test_algorithm_trains_saves_restores_and_evaluates(name, tmp_path):
    obs_space, action_space, model = CASES[name]
    config = PPOConfig(
        env=lambda context: RandomEnv(obs_space, action_space),
        model={"fcnet_hiddens": [8], **model},
        train_batch_size=60,
        num_envs_per_worker=2,
        sgd_minibatch_size=16,
        num_sgd_iter=2,
        seed=0,
    )
    with PPO(config.updated()) as algorithm, PPO(config.updated()) as restored:
        algorithm.train()
        algorithm.save(tmp_path / "c")
        restored.restore(tmp_path / "c")
        weights = algorithm.workers.local_worker().policy.get_weights()
        for key, weight in restored.workers.local_worker().policy.get_weights().items():
            np.testing.assert_array_equal(weight, weights[key])
        assert algorithm.evaluate(episodes=4)["episode_len_mean"] == 7


# -- sequences -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*CASES, *MORE_CASES])
def test_networks_without_dropout_leave_the_random_streams_alone(name):
    policy = make_worker(name).policy
    batch = make_worker(name).sample()
    before = stream_state(policy.shuffle_rng)
    torch_rng = torch.get_rng_state()
    policy.compute_gradients(batch)
    assert stream_state(policy.shuffle_rng) == before
    assert torch.equal(torch.get_rng_state(), torch_rng)


@pytest.mark.parametrize(
    ("policy_class", "config"),
    [(DQNTorchPolicy, {"noisy": True}), (SACTorchPolicy, {}), (TD3TorchPolicy, {})],
)
def test_q_networks_leave_the_random_streams_alone(policy_class, config):
    actions = TWO if policy_class is DQNTorchPolicy else spaces.Box(-1, 1, (1,))
    policy = policy_class(BOX, actions, {"seed": 0, **config})
    batch = rows()
    columns = {"new_obs": batch["obs"], "terminateds": np.zeros(12, bool)}
    if policy_class is not DQNTorchPolicy:
        columns["actions"] = np.zeros((12, 1), np.float32)
    before = stream_state(policy.shuffle_rng)
    policy.compute_gradients(batch.with_columns(**columns))
    assert stream_state(policy.shuffle_rng) == before


def test_padding_does_not_change_the_loss():
    w = make_worker("lstm")
    batch = w.sample()
    padded = pad_batch_to_sequences_of_same_size(batch)
    assert len(padded["obs"]) > batch.count
    expected, expected_stats = w.policy.compute_gradients(batch)
    gradient, stats = w.policy.compute_gradients(padded)
    assert expected_stats == pytest.approx(stats, rel=1e-5)
    np.testing.assert_allclose(expected, gradient, rtol=1e-5, atol=1e-6)
    assert w.policy.batch_stats(batch) == pytest.approx(
        w.policy.batch_stats(padded), rel=1e-4, abs=1e-6
    )


def make_burn_in_worker(**config):
    model = {"use_lstm": True, "fcnet_hiddens": [8], "lstm_cell_size": 4, "max_seq_len": 5}
    return RolloutWorker(
        lambda context: RandomEnv(),
        PPOTorchPolicy,
        {
            "model": {**model, "burn_in": 6},
            "seed": 0,
            "rollout_fragment_length": 43,
            "standardize_advantages": False,
            **config,
        },
    )


def test_burn_in_works_in_microbatches_and_does_not_count_as_rows():
    whole, parts = make_burn_in_worker(), make_burn_in_worker(microbatch_size=16)
    batch = whole.sample()
    expected, expected_stats = whole.policy.compute_gradients(batch)
    gradient, stats = parts.policy.compute_gradients(batch)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)
    assert stats["total_loss"] == pytest.approx(expected_stats["total_loss"], rel=1e-5)
    counts = []
    policy = whole.policy
    policy.learn_on_batch = lambda b: counts.append(policy.tensors(b).count) or {"x": 1.0}
    policy.end_learning = lambda batch, stats: {}
    policy.learn_on_minibatches(batch, 1, 10)
    assert sum(counts) == batch.count
    assert all(10 <= count < 15 for count in counts[:-1])


def test_burn_in_works_in_bfloat16():
    w = make_burn_in_worker(precision="bfloat16")
    assert np.isfinite(w.policy.learn_on_batch(w.sample())["total_loss"])


def test_burn_in_needs_the_episode_column():
    policy = make_burn_in_worker().policy
    with pytest.raises(ValueError, match=r"burn.?in.*eps_id"):
        policy.learn_on_batch(rows())


def test_padded_batches_learn_in_minibatches():
    model = {"use_lstm": True, "fcnet_hiddens": [8], "lstm_cell_size": 4, "max_seq_len": 5}
    w = RolloutWorker(
        lambda context: RandomEnv(),
        PPOTorchPolicy,
        {"model": model, "seed": 0, "rollout_fragment_length": 43},
    )
    batch = w.sample()
    padded = pad_batch_to_sequences_of_same_size(batch)
    other = PPOTorchPolicy(BOX, TWO, w.policy.config)
    other.set_state(w.policy.get_state())
    stats = w.policy.learn_on_minibatches(batch, 2, 8)
    assert other.learn_on_minibatches(padded, 2, 8) == pytest.approx(stats, rel=1e-4, abs=1e-6)
    with pytest.raises(ValueError, match="without_padding"):
        next(sequence_minibatches(padded, 8))


def test_state_of_a_normalizing_policy_changes_no_other_policy():
    class Plain(Policy):
        weights = np.zeros(2)

        def get_weights(self):
            return {"w": self.weights}

        def set_weights(self, weights):
            self.weights = weights["w"]

    normalizing, other = Plain(BOX, TWO, {"normalize_observations": True}), Plain(BOX, TWO, {})
    normalizing.weights = np.ones(2)
    with pytest.raises(ValueError, match="need normalize_observations=True"):
        other.set_state(normalizing.get_state())
    assert other.weights.tolist() == [0, 0]


def test_sequences_of_one_row_learn():
    for memory in ({"use_lstm": True}, {"use_attention": True}):
        w = RolloutWorker(
            lambda context: RandomEnv(),
            PPOTorchPolicy,
            {"model": {**memory, "max_seq_len": 1}, "rollout_fragment_length": 20, "seed": 0},
        )
        assert np.isfinite(w.policy.learn_on_minibatches(w.sample(), 1, 8)["total_loss"])


@pytest.mark.parametrize("column", ["seq_lens", "state_in_0"])
def test_states_and_sequence_lengths_must_match(column):
    w = RolloutWorker(
        lambda context: RandomEnv(),
        PPOTorchPolicy,
        {"model": {"use_lstm": True, "max_seq_len": 5}, "rollout_fragment_length": 20},
    )
    batch = w.sample()
    if column == "seq_lens":
        batch = batch.with_columns(seq_lens=np.array([20], np.int32))
    else:
        batch = batch.with_columns(state_in_0=np.concatenate([batch["state_in_0"]] * 2))
    with pytest.raises(ConfigError, match="sequences of 20 rows in total"):
        w.policy.learn_on_batch(batch)
