"""IMPALA and APPO: V-trace of trajectories, losses against reference implementations."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.algorithms.appo import APPOConfig
from flowrl.algorithms.impala import IMPALAConfig
from flowrl.algorithms.vtrace import trajectory_ends, vtrace_of_rows
from flowrl.data import SampleBatch
from flowrl.errors import ConfigError
from flowrl.ops import ParallelRollouts
from flowrl.policies import ModelV2, ViewRequirement
from flowrl.policies.torch_policy import TensorBatch
from tests.policies.test_returns import reference_vtrace

CLIPS = {"gamma": 0.9, "clip_rho": 1.2, "clip_c": 0.8, "clip_pg_rho": 1.1, "lambda_": 0.95}


@settings(max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 2**31))
def test_vtrace_of_trajectories_of_different_lengths(lengths, seed):
    rng, rows = np.random.default_rng(seed), sum(lengths)
    mu, pi, rewards, values, next_values = rng.standard_normal((5, rows))
    ends = np.zeros(rows, bool)
    ends[np.cumsum(lengths) - 1] = True
    next_values[:-1] = np.where(ends[:-1], next_values[:-1], values[1:])
    targets, advantages = vtrace_of_rows(mu, pi, rewards, values, next_values, ends, **CLIPS)

    def column(x):
        return np.asarray(x)[:, None]

    expected = reference_vtrace(
        *map(column, (mu, pi, rewards, values, next_values, ends)), 0.9, 1.2, 0.8, 0.95
    )[:, 0]
    np.testing.assert_allclose(targets, expected, atol=1e-9)
    next_targets = np.where(ends, next_values, np.append(expected[1:], 0))
    expected_advantages = np.minimum(1.1, np.exp(pi - mu)) * (rewards + 0.9 * next_targets - values)
    np.testing.assert_allclose(advantages, expected_advantages, atol=1e-9)


def test_trajectory_ends_where_the_next_row_is_not_the_next_step():
    batch = SampleBatch(
        eps_id=[1, 1, 1, 2, 2, 2, 2],
        agent_index=[0, 0, 0, 0, 0, 1, 1],
        t=[4, 5, 9, 10, 11, 12, 13],
    )
    assert trajectory_ends(batch).tolist() == [0, 1, 1, 0, 1, 0, 1]


def test_trajectory_of_an_agent_that_takes_turns():
    batch = SampleBatch(
        eps_id=[1] * 7,
        agent_index=[0, 0, 0, 0, 0, 1, 1],
        t=np.array([1, 3, 6, 8, 2, 4, 5], np.uint32),
        obs={"at": np.array([[1.0], [3], [6], [8], [2], [4], [5]])},
        new_obs={"at": np.array([[3.0], [6], [7], [9], [4], [5], [6]])},
    )
    expected = [0, 0, 1, 1, 1, 0, 1]  # rows between the steps 6 and 8 were dropped
    assert trajectory_ends(batch).tolist() == expected
    assert trajectory_ends(TensorBatch(batch)).tolist() == expected
    without_next = batch.without_columns("new_obs")
    assert trajectory_ends(without_next).tolist() == [1, 1, 1, 1, 1, 0, 1]


def test_dropped_rows_end_a_trajectory():
    with IMPALAConfig(env="CartPole-v1", num_workers=0, seed=0).build() as algorithm:
        batch = algorithm.workers.local_worker().sample()
        batch = batch.take_rows(np.array([0, 1, 2, 10, 11]))
        assert trajectory_ends(batch).tolist() == [0, 0, 1, 0, 1]
        assert trajectory_ends(algorithm.get_policy().tensors(batch)).tolist() == [0, 0, 1, 0, 1]


@pytest.mark.parametrize("kind", [IMPALAConfig, APPOConfig])
@pytest.mark.parametrize("dtype", [bool, np.uint8, np.float32])
def test_value_after_a_lost_life_is_zero(kind, dtype):
    """A row inside of an episode may be terminated: its target has no later reward or value."""
    with kind(env="CartPole-v1", num_workers=0, seed=0, gamma=0.9).build() as algorithm:
        policy = algorithm.get_policy()
        rows = {
            "obs": np.zeros((6, 4), np.float32),
            "new_obs": np.zeros((6, 4), np.float32),
            "actions": np.zeros(6, np.int64),
            "rewards": np.array([0, 0, 0, 0, 1, 0], np.float32),
            "action_logp": np.full(6, -0.5, np.float32),
            "eps_id": np.zeros(6, np.int64),
            "agent_index": np.zeros(6, np.int64),
            "t": np.arange(6),
        }
        lost = np.isin(np.arange(6), [2, 5]).astype(dtype)
        batch = policy.tensors(SampleBatch(rows, terminateds=lost))
        targets, _ = policy.vtrace_targets(batch, batch.array("action_logp"), np.zeros(6, "f4"))
    np.testing.assert_allclose(targets, [0, 0, 0, 0.9, 1, 0], atol=1e-6)


def small(kind, **changes):
    base = {"env": "CartPole-v1", "num_envs_per_worker": 3, "rollout_fragment_length": 17}
    base |= {"seed": 5, "plan": "impala", "train_batch_size": 51, "vtrace_clip_c_threshold": 0.7}
    return kind(**{**base, "model": {"fcnet_hiddens": [8]}, "lambda_": 0.9, **changes})


def perturb_weights(policy):
    """Change the policy's weights, so that earlier samples are off-policy."""
    rng = np.random.default_rng(1)
    weights = policy.get_weights()
    policy.set_weights(
        {n: (w + 0.3 * rng.standard_normal(w.shape)).astype(w.dtype) for n, w in weights.items()}
    )


def reference_targets(policy, batch, target_logp, config):
    """Return V-trace targets and advantages, computed by the definition."""
    ends = trajectory_ends(batch)
    values = policy.compute_values(batch["obs"]).astype(np.float64)
    end_values = policy.compute_values(batch["new_obs"]).astype(np.float64)
    end_values[batch["terminateds"]] = 0
    next_values = np.where(ends, end_values, np.append(values[1:], 0))

    def column(x):
        return np.asarray(x, np.float64)[:, None]

    targets = reference_vtrace(
        *map(column, (batch["action_logp"], target_logp, batch["rewards"], values, next_values)),
        ends[:, None], config.gamma, config.vtrace_clip_rho_threshold,
        config.vtrace_clip_c_threshold, config.lambda_,
    )[:, 0]  # fmt: skip
    next_targets = np.where(ends, next_values, np.append(targets[1:], 0))
    ratio = np.exp(target_logp - batch["action_logp"].astype(np.float64))
    clipped = np.minimum(config.vtrace_clip_pg_rho_threshold, ratio)
    return targets, clipped * (batch["rewards"] + config.gamma * next_targets - values)


def distribution(policy, model, obs):
    logits, _ = model.from_batch(TensorBatch(SampleBatch(obs=obs)))
    return torch.distributions.Categorical(logits=logits.double()), model.value_function()


def test_impala_loss_matches_a_reference_implementation():
    config = small(IMPALAConfig, entropy_coeff=0.03, vf_loss_coeff=0.7)
    with config.build() as algorithm:
        batch = SampleBatch.concat_samples(ParallelRollouts(algorithm.workers).take(3))
        assert "vf_preds" not in batch
        policy = algorithm.get_policy()
        perturb_weights(policy)
        loss = float(policy.loss(policy.tensors(batch)))
        dist, values = distribution(policy, policy.model, batch["obs"])
        logp = dist.log_prob(torch.from_numpy(batch["actions"])).detach().numpy()
        targets, advantages = reference_targets(policy, batch, logp, config)
        expected = (
            -(logp * advantages).mean()
            + 0.7 * ((values.detach().numpy() - targets) ** 2).mean()
            - 0.03 * float(dist.entropy().mean())
        )
        assert loss == pytest.approx(expected, rel=1e-4)
        assert np.abs(np.exp(logp - batch["action_logp"]) - 1).max() > 0.1  # off-policy


def test_appo_loss_matches_a_reference_implementation():
    settings = {"kl_coeff": 0.4, "clip_param": 0.1, "clip_sampled_ratio": 1.05, "num_sgd_iter": 2}
    config = small(APPOConfig, plan="appo", **settings)
    with config.build() as algorithm:
        batch = SampleBatch.concat_samples(ParallelRollouts(algorithm.workers).take(3))
        policy = algorithm.get_policy()
        perturb_weights(policy)
        policy.update_target(0.5)
        loss = float(policy.loss(policy.tensors(batch)))
        dist, values = distribution(policy, policy.model, batch["obs"])
        target, _ = distribution(policy, policy.target_model, batch["obs"])
        actions = torch.from_numpy(batch["actions"])
        logp, target_logp = (
            dist.log_prob(actions).detach().numpy(),
            target.log_prob(actions).numpy(),
        )
        targets, advantages = reference_targets(policy, batch, target_logp, config)
        sampled = batch["action_logp"].astype(np.float64)
        ratio = np.minimum(np.exp(sampled - target_logp), 1.05) * np.exp(logp - sampled)
        surrogate = np.minimum(ratio * advantages, np.clip(ratio, 0.9, 1.1) * advantages)
        expected = (
            -surrogate.mean()
            + 0.5 * ((values.detach().numpy() - targets) ** 2).mean()
            - 0.01 * float(dist.entropy().mean())
            + 0.4 * float(torch.distributions.kl_divergence(target, dist).mean())
        )
        assert loss == pytest.approx(expected, rel=1e-4)


def test_appo_adapts_and_saves_its_kl_coefficient_and_target():
    config = small(APPOConfig, plan="appo", kl_coeff=0.2, kl_target=1e-9, lr=0.01, num_sgd_iter=3)
    with config.build() as algorithm:
        policy = algorithm.get_policy()
        stats = [algorithm.train()["learners"]["default_policy"] for _ in range(3)]
        assert stats[-1]["cur_kl_coeff"] > 0.2
        state = policy.get_state()
        other = type(policy)(policy.observation_space, policy.action_space, policy.config)
        other.set_state(state)
        assert other.kl_coeff == state["kl_coeff"]  # the learner thread changes that of `policy`
        for name, array in state["target"].items():
            np.testing.assert_array_equal(other.get_state()["target"][name], array)


def test_kl_penalty_of_appo_needs_updates_that_differ_from_the_target_network():
    with pytest.raises(ConfigError, match="kl_coeff: the target network almost always equals"):
        APPOConfig(kl_coeff=0.2)
    with pytest.raises(ConfigError, match="kl_coeff"):
        APPOConfig(kl_coeff=0.2, train_batch_size=500, target_network_update_freq=500)
    for used in (
        {"num_sgd_iter": 2}, {"tau": 0.5}, {"train_batch_size": 500, "sgd_minibatch_size": 100},
        {"train_batch_size": 500, "target_network_update_freq": 501},
    ):  # fmt: skip
        assert APPOConfig(kl_coeff=0.2, **used).kl_coeff == 0.2


def test_minibatches_contain_whole_trajectories():
    with small(IMPALAConfig).build() as algorithm:
        batch = SampleBatch.concat_samples(ParallelRollouts(algorithm.workers).take(4))
        policy = algorithm.get_policy()
        ends = trajectory_ends(batch)
        parts = list(policy.learner.minibatches(batch, 40))
        assert len(parts) > 2
        assert all(part.count >= 40 for part in parts[:-1])
        assert sum(trajectory_ends(part).sum() for part in parts) == ends.sum()
        all_obs = np.concatenate([part["obs"] for part in parts])
        assert sorted(map(tuple, all_obs)) == sorted(map(tuple, batch["obs"]))
        (only_part,) = policy.learner.minibatches(batch, batch.count)
        assert only_part is batch


LSTM = {"use_lstm": True, "lstm_cell_size": 4, "fcnet_hiddens": [8], "max_seq_len": 6}


@pytest.mark.parametrize("burn_in", [0, 3])
def test_parts_of_recurrent_batches_contain_whole_trajectories(burn_in):
    with small(IMPALAConfig, model={**LSTM, "burn_in": burn_in}).build() as algorithm:
        batch = SampleBatch.concat_samples(ParallelRollouts(algorithm.workers).take(4))
        policy, size = algorithm.get_policy(), 40
        learner = policy.learner
        prepared = learner.prepare_batch(batch)
        for parts in (
            list(learner.minibatches(prepared, size)),
            list(learner.microbatches(prepared, size)),
            [learner.rows_of_process(prepared, rank, 3) for rank in range(3)],
        ):
            assert len(parts) > 2
            rows = [policy.tensors(part) for part in parts]
            assert sum(trajectory_ends(part).sum() for part in rows) == trajectory_ends(batch).sum()
            all_obs = np.concatenate([part.array("obs") for part in rows])
            assert sorted(map(tuple, all_obs)) == sorted(map(tuple, batch["obs"]))
            assert all(part["seq_lens"].max() <= 6 + burn_in for part in parts)


@pytest.mark.parametrize("kind", [IMPALAConfig, APPOConfig])
@pytest.mark.parametrize("model", [{"fcnet_hiddens": [8]}, LSTM], ids=["plain", "lstm"])
def test_microbatches_have_the_gradient_of_the_whole_batch(kind, model):
    with small(kind, model=model).build() as algorithm:
        batch = SampleBatch.concat_samples(ParallelRollouts(algorithm.workers).take(4))
        policy = algorithm.get_policy()
        settings = policy.config.updated(microbatch_size=20)
        parted = type(policy)(policy.observation_space, policy.action_space, settings)
        parted.set_state(policy.get_state())
        (whole, stats), (sum_of_parts, other) = (
            each.compute_gradients(batch) for each in (policy, parted)
        )
        np.testing.assert_allclose(sum_of_parts, whole, rtol=1e-3, atol=1e-5)
        assert other["vf_loss"] == pytest.approx(stats["vf_loss"], rel=1e-4)


@pytest.mark.parametrize("kind", [IMPALAConfig, APPOConfig])
@pytest.mark.parametrize(
    "settings",
    [
        {"model": {"use_lstm": True, "lstm_cell_size": 8, "max_seq_len": 6}},
        {"model": {"fcnet_hiddens": [8], "vf_share_layers": True}},
        {"env": "Pendulum-v1"},
        {"sgd_minibatch_size": 20, "num_sgd_iter": 2},
        {"replay_proportion": 0.5, "replay_buffer_num_slots": 4},
        {"batch_mode": "complete_episodes"},
    ],
    ids=["lstm", "shared", "continuous", "minibatches", "replay", "episodes"],
)
def test_models_spaces_and_settings_train(kind, settings):
    plan = {"plan": kind.model_fields["plan"].default}
    config = small(kind, min_sample_timesteps_per_iteration=100, **{**plan, **settings})
    with config.build() as algorithm:
        for _ in range(3):
            stats = algorithm.train()["learners"]["default_policy"]
        assert np.isfinite(stats["total_loss"])
        if "use_lstm" in settings.get("model", {}):
            batch = ParallelRollouts(algorithm.workers).take(1)[0]
            assert "bootstrap_values" in batch


class WithLastAction(ModelV2):
    """Also reads the previous action, but has no recurrent state."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.view_requirements["prev_actions"] = ViewRequirement("actions", shift=-1)
        self.out, self.value = torch.nn.Linear(5, self.num_outputs), torch.nn.Linear(5, 1)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, input_dict, state, seq_lens):
        last = input_dict["prev_actions"].float()[:, None]
        self.features = self.dropout(torch.cat([input_dict["obs"], last], 1))
        return self.out(self.features), state

    def value_function(self):
        return self.value(self.features).squeeze(1)


@pytest.mark.parametrize("kind", [IMPALAConfig, APPOConfig])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_network_with_views_of_its_own_learns(kind, precision):
    config = small(kind, model={"custom_model": WithLastAction}, precision=precision)
    with config.build() as algorithm:
        batch = next(ParallelRollouts(algorithm.workers))
        policy = algorithm.workers.local_worker().policy
        last = np.flatnonzero(trajectory_ends(batch))
        alive = last[~batch["terminateds"][last]]
        inputs = {"obs": batch["new_obs"][alive], "prev_actions": batch["actions"][alive]}
        np.testing.assert_allclose(
            batch["bootstrap_values"][alive],
            policy.compute_values_from_input_dict(inputs),
            atol=1e-5,
        )
        assert np.isfinite(policy.learn_on_batch(batch)["vf_loss"])


def test_target_network_has_no_dropout():
    """The first ratios of the sampling policy to the target network's are 1."""
    with small(APPOConfig, model={"custom_model": WithLastAction}).build() as algorithm:
        policy = algorithm.workers.local_worker().policy
        batch = next(ParallelRollouts(algorithm.workers))
        policy.loss(policy.tensors(batch))
        assert not policy.target_model.training


@pytest.mark.parametrize("kind", [IMPALAConfig, APPOConfig])
def test_columns_of_trajectories_must_have_one_number_per_row(kind):
    with small(kind).build() as algorithm:
        batch = algorithm.workers.local_worker().sample()
        for name in ("rewards", "action_logp"):
            columns = {name: np.asarray(batch[name])[:, None]}
            with pytest.raises(ValueError, match=rf"'{name}' has the shape"):
                algorithm.get_policy().learn_on_batch(batch.with_columns(**columns))


def test_appo_learns_from_actions_that_were_almost_impossible_when_sampled():
    """The ratio of the policy to the sampling policy is infinite in float32, that of the sampling
    policy to the target network is 0: their product would be NaN."""
    with small(APPOConfig).build() as algorithm:
        policy = algorithm.get_policy()
        batch = algorithm.workers.local_worker().sample()
        logp = np.full(batch.count, -160.0, np.float32)
        stats = policy.learn_on_batch(batch.with_columns(action_logp=logp))
        assert np.isfinite(stats["total_loss"])
