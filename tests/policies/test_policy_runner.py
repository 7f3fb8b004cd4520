"""Acting without worker, environment or Ray: PolicyRunner, single actions, log-likelihoods."""

import numpy as np
import pytest
from gymnasium import spaces

from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.data import SampleBatch
from flowrl.policies import ConfigError, ViewRequirement
from flowrl.sampling import RolloutWorker

from .fakes import BOX, TWO, RandomEnv

MODELS = {
    "plain": {},
    "lstm": {"use_lstm": True, "lstm_use_prev_action": True, "lstm_use_prev_reward": True},
    "gru": {"use_lstm": True, "lstm_cell_type": "gru"},
    "attention": {"use_attention": True, "attention_memory": 3},
    "frames": {"num_framestacks": 3},
}


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("normalize", [False, True])
def test_runner_shows_the_policy_the_same_views_as_the_sampler(name, normalize):
    """Replaying sampled episodes gives the sampled distribution inputs, step by step."""
    config = {"model": MODELS[name], "seed": 0, "normalize_observations": normalize}
    settings = {**config, "rollout_fragment_length": 21, "batch_mode": "truncate_episodes"}
    w = RolloutWorker(lambda context: RandomEnv(), PPOTorchPolicy, settings)
    batch = w.sample()
    outputs = []

    class ReplayingPolicy(PPOTorchPolicy):
        """Records the distribution inputs and returns the sampled actions."""

        def compute_actions_from_input_dict(self, input_dict, explore=True):
            _, states, extra = super().compute_actions_from_input_dict(input_dict, explore)
            outputs.append(extra["action_dist_inputs"][0])
            actions = batch["actions"][len(outputs) - 1 : len(outputs)]
            return actions, states, extra

    policy = ReplayingPolicy(BOX, TWO, config)
    runner = policy.session()
    reward = 0.0
    for i in range(batch.count):
        if batch["t"][i] == 0:
            runner.reset()
        obs = batch["obs"][i]
        obs = obs if obs.ndim == 1 else obs[-1]  # the latest frame
        assert runner.compute_single_action(obs, prev_reward=reward) == batch["actions"][i]
        reward = batch["rewards"][i]
    np.testing.assert_allclose(outputs, batch["action_dist_inputs"], atol=1e-5)


def test_compute_single_action_needs_only_the_observation():
    policy = PPOTorchPolicy(BOX, TWO, {"model": {"use_lstm": True}})
    with pytest.raises(ConfigError, match=r"policy.session\(\)"):
        policy.compute_single_action(np.zeros(3, np.float32))
    plain = PPOTorchPolicy(BOX, TWO, {})
    assert plain.compute_single_action([0.0, 0.0, 0.0]) in (0, 1)
    with pytest.raises(ConfigError, match=r"observation: expected an array of shape \(3,\)"):
        plain.compute_single_action(np.zeros(4, np.float32))
    nested = PPOTorchPolicy(spaces.Dict(a=BOX), TWO, {})
    assert nested.compute_single_action({"a": np.zeros(3, np.float32)}) in (0, 1)
    with pytest.raises(
        ConfigError, match=r"observation: expected a dict with \['a'\], got \['b'\]"
    ):
        nested.compute_single_action({"b": np.zeros(3, np.float32)})


def test_unsupported_views_are_rejected():
    policy = PPOTorchPolicy(BOX, TWO, {})
    policy.view_requirements["others"] = ViewRequirement("obs", agents=["x"])
    with pytest.raises(ConfigError, match="shows other agents"):
        policy.session()
    policy = PPOTorchPolicy(BOX, TWO, {})
    policy.view_requirements["vf"] = ViewRequirement("vf_preds", shift=-1)
    with pytest.raises(ConfigError, match="needs a space"):
        policy.session().compute_single_action(np.zeros(3, np.float32))


@pytest.mark.parametrize(
    "space", [TWO, spaces.MultiDiscrete([2, 3]), spaces.Box(-1, 1, (2,), np.float32)]
)
def test_log_likelihoods_equal_those_of_acting(space):
    policy = PPOTorchPolicy(BOX, space, {"seed": 1})
    obs = np.random.default_rng(0).standard_normal((20, 3)).astype(np.float32)
    actions, _, extra = policy.compute_actions(obs)
    logp = policy.compute_log_likelihoods(actions, obs)
    np.testing.assert_allclose(logp, extra["action_logp"], atol=1e-5)


def test_log_likelihoods_of_recurrent_policies():
    policy = PPOTorchPolicy(BOX, TWO, {"seed": 1, "model": {"use_lstm": True}})
    obs = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    states = [np.ones((4, 64), np.float32)] * 4
    actions, new_states, extra = policy.compute_actions(obs, state_batches=states)
    assert [part.shape for part in new_states] == [(4, 64)] * 4
    views = {"obs": obs, **{f"state_in_{i}": part for i, part in enumerate(states)}}
    logp = policy.compute_log_likelihoods(actions, input_dict=views)
    np.testing.assert_allclose(logp, extra["action_logp"], atol=1e-5)


def test_runner_leaves_the_observation_writeable():
    obs = np.zeros(3, np.float32)
    PPOTorchPolicy(BOX, TWO, {}).session().compute_single_action(obs)
    obs[0] = 1
    assert SampleBatch(obs=obs[None]).count == 1


class Scaling(PPOTorchPolicy):
    """Changes its observations in place, and keeps them."""

    def compute_actions(self, obs_batch, explore=True, **kwargs):
        obs_batch /= 2
        self.kept = [*getattr(self, "kept", []), obs_batch]
        return super().compute_actions(obs_batch, explore, **kwargs)


def test_policies_may_change_and_keep_their_observations():
    settings = {"seed": 0, "rollout_fragment_length": 6}
    worker = RolloutWorker(lambda context: RandomEnv(), Scaling, settings)
    batches = [worker.sample(), worker.sample()]
    seen = np.concatenate(worker.get_policy().kept)
    expected = np.concatenate([batch["obs"] for batch in batches]) / 2
    np.testing.assert_array_equal(seen[: len(expected)], expected)
    policy = Scaling(BOX, TWO, {"seed": 0})
    session = policy.session()
    for value in (2.0, 4.0):
        session.compute_single_action(np.full(3, value, np.float32))
    assert [kept[0, 0] for kept in policy.kept] == [1.0, 2.0]
