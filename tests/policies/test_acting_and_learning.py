"""What a network sees when it acts is what it sees when it learns, through the sampler."""

import numpy as np
import pytest
from gymnasium import spaces

from flowrl.algorithms.ppo import PPO, PPOConfig, PPOTorchPolicy
from flowrl.data import pad_batch_to_sequences_of_same_size
from flowrl.sampling import RolloutWorker

from .fakes import BOX, TWO, RandomEnv

NESTED = spaces.Dict(a=BOX, b=spaces.Tuple((spaces.Discrete(3, start=1), spaces.MultiBinary(2))))
ACTIONS = spaces.Dict(x=spaces.Discrete(2, start=1), y=spaces.Box(-1, 1, (2,), np.float32))
PREVIOUS = {"use_lstm": True, "lstm_use_prev_action": True, "lstm_use_prev_reward": True}
CASES = {
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
    "nested with memory": (NESTED, ACTIONS, {**PREVIOUS, "max_seq_len": 3}),
    "nested with attention": (NESTED, ACTIONS, {"use_attention": True}),
}


def worker(name, **config):
    obs_space, action_space, model = CASES[name]
    return RolloutWorker(
        lambda context: RandomEnv(obs_space, action_space),
        PPOTorchPolicy,
        {
            "model": {"fcnet_hiddens": [16], **model},
            "seed": 0,
            "num_envs_per_worker": 2,
            "rollout_fragment_length": 10,  # fragments begin and end within episodes
            **config,
        },
    )


@pytest.mark.parametrize("config", [{}, {"batch_mode": "complete_episodes"}])
@pytest.mark.parametrize("name", list(CASES))
def test_acting_is_learning(name, config):
    w = worker(name, **config)
    for _ in range(3):
        batch = w.sample()
        prepared = w.policy.prepared(batch)
        inputs, _ = w.policy.model.from_batch(prepared)
        np.testing.assert_allclose(inputs.detach(), batch["action_dist_inputs"], atol=1e-5)
        values = w.policy.model.value_function().detach()
        np.testing.assert_allclose(values, batch["vf_preds"], atol=1e-5)
        dist = w.policy.dist_class(inputs, w.policy.model)
        logp = dist.logp(w.policy.tensors(prepared)["actions"]).detach()
        np.testing.assert_allclose(logp, batch["action_logp"], atol=1e-4)


@pytest.mark.parametrize("name", list(CASES))
def test_it_learns_in_minibatches(name):
    w = worker(name)
    stats = w.policy.learn_on_minibatches(w.sample(), 2, 8)
    assert all(np.isfinite(value) for value in stats.values())
    assert stats["kl"] > 0  # something moved


@pytest.mark.parametrize("name", ["lstm", "burn-in", "attention", "nested with memory"])
def test_an_algorithm_trains_saves_and_plays(name, tmp_path):
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
    with PPO(config.updated()) as algorithm, PPO(config.updated()) as other:
        algorithm.train()
        algorithm.save(tmp_path / "c")
        other.restore(tmp_path / "c")
        mine = algorithm.workers.local_worker().policy.get_weights()
        for key, weight in other.workers.local_worker().policy.get_weights().items():
            np.testing.assert_array_equal(weight, mine[key])
        told = algorithm.evaluate(episodes=4)
        assert told["episode_len_mean"] == 7


def test_losses_over_padded_rows_are_those_over_the_rows():
    """Whoever pads a batch gets the same loss: what is not real is left out."""
    w = worker("lstm")
    batch = w.sample()
    padded = pad_batch_to_sequences_of_same_size(batch)
    assert len(padded["obs"]) > batch.count
    one, two = (w.policy.compute_gradients(b) for b in (batch, padded))
    assert one[1] == pytest.approx(two[1], rel=1e-5)
    np.testing.assert_allclose(one[0], two[0], rtol=1e-5, atol=1e-6)
    told = w.policy.describe(batch)
    assert told == pytest.approx(w.policy.describe(padded), rel=1e-4, abs=1e-6)
