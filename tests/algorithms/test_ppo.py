"""PPO: the loss and its gradients against a plain reference in float64, and the KL penalty."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from flowrl.algorithms.kl_penalty import next_kl_coeff
from flowrl.algorithms.ppo import PPO, PPOTorchPolicy, clipped_surrogate
from flowrl.data import SampleBatch
from flowrl.errors import ConfigError
from flowrl.policies.distributions import Categorical
from tests.policies.fakes import DrawingNetwork

BOX = spaces.Box(-1, 1, (3,), np.float32)
THREE = spaces.Discrete(3)


def rows(count=40):
    """Return rows whose ratios and value changes are on both sides of the clip bounds."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((count, 3)).astype(np.float32)
    actions = rng.integers(0, 3, count)
    logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return SampleBatch(
        obs=rng.uniform(-1, 1, (count, 3)).astype(np.float32),
        actions=actions,
        action_dist_inputs=logits,
        action_logp=logp[np.arange(count), actions].astype(np.float32),
        advantages=rng.standard_normal(count).astype(np.float32),
        value_targets=rng.standard_normal(count).astype(np.float32),
        vf_preds=(0.3 * rng.standard_normal(count)).astype(np.float32),
    )


def reference_loss(weights, batch, clip, vf_clip, vf_coeff, entropy_coeff, kl_coeff):
    """Compute the loss row by row, in float64, from the weights of the layers."""

    def layers(kind, x):
        x = torch.tanh(x @ weights[f"{kind}hidden.0.weight"].T + weights[f"{kind}hidden.0.bias"])
        head = "value_head" if kind else "policy_head"
        return x @ weights[f"{head}.weight"].T + weights[f"{head}.bias"]

    total = torch.zeros((), dtype=torch.float64)
    for row in batch.rows():
        obs = torch.tensor(row["obs"], dtype=torch.float64)
        logp = torch.log_softmax(layers("", obs), 0)
        value, target = layers("value_", obs)[0], float(row["value_targets"])
        ratio = torch.exp(logp[int(row["actions"])] - float(row["action_logp"]))
        advantage = float(row["advantages"])
        bounded = min(max(float(ratio.detach()), 1 - clip), 1 + clip)
        is_clipped = bounded * advantage < float(ratio.detach()) * advantage
        surrogate = bounded * advantage if is_clipped else ratio * advantage
        error = (value - target) ** 2
        if vf_clip is not None:
            old = float(row["vf_preds"])
            moved = old + torch.clamp(value - old, -vf_clip, vf_clip)
            error = torch.maximum(error, (moved - target) ** 2)
        entropy = -(logp.exp() * logp).sum()
        old_logp = torch.log_softmax(torch.tensor(row["action_dist_inputs"]).double(), 0)
        kl = (old_logp.exp() * (old_logp - logp)).sum()
        total = total - surrogate + vf_coeff * error - entropy_coeff * entropy + kl_coeff * kl
    return total / batch.count


@pytest.mark.parametrize("vf_clip", [None, 0.2])
@pytest.mark.parametrize(("entropy_coeff", "kl_coeff"), [(0.0, 0.0), (0.1, 0.0), (0.1, 0.7)])
def test_loss_and_gradients_match_the_paper(vf_clip, entropy_coeff, kl_coeff):
    policy = PPOTorchPolicy(
        BOX,
        THREE,
        {
            "model": {"fcnet_hiddens": [8]},
            "standardize_advantages": False,
            "clip_param": 0.3,
            "vf_clip_param": vf_clip,
            "vf_loss_coeff": 0.4,
            "entropy_coeff": entropy_coeff,
            "kl_coeff": kl_coeff,
            "seed": 0,
        },
    )
    with torch.no_grad():  # the first weights of the head are small: let ratios differ
        policy.model.policy_head.weight.mul_(50)
    batch = rows()
    parameters = dict(policy.model.named_parameters())
    loss = policy.loss(policy.tensors(batch))
    gradients = torch.autograd.grad(loss, list(parameters.values()))

    weights = {n: p.detach().double().clone().requires_grad_() for n, p in parameters.items()}
    expected = reference_loss(weights, batch, 0.3, vf_clip, 0.4, entropy_coeff, kl_coeff)
    expected_gradients = torch.autograd.grad(expected, list(weights.values()))
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-5)
    for name, one, two in zip(parameters, gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(one.numpy(), two.numpy(), atol=1e-5, err_msg=name)


def test_surrogate_matches_hand_computed_values():
    """A ratio outside of [0.8, 1.2] counts in full only if that lowers the objective."""
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1])
    advantages = torch.tensor([2.0, -2.0, 2.0, -2.0, 1.0])
    expected = [2 * 1.2, -2 * 1.5, 2 * 0.5, -2 * 0.8, 1.1]
    value = clipped_surrogate(ratio, advantages, 0.2)
    assert float(value) == pytest.approx(sum(expected) / 5, abs=1e-6)


@pytest.mark.parametrize(
    ("coeff", "kl", "expected"),
    [
        (0.2, 0.02, 0.4),  # above 1.5 times the target
        (0.2, 0.005, 0.1),  # below the target / 1.5
        (0.2, 0.01, 0.2),
        (0.2, 0.014, 0.2),
        (0.0, 1.0, 0.0),
        (0.0, 0.0, 0.0),
        (9e5, 1.0, 1e6),
        (1.5e-6, 0.0, 1e-6),
        (1e-8, 0.0, 1e-8),
    ],
)
def test_kl_coefficient_follows_the_divergence(coeff, kl, expected):
    assert next_kl_coeff(coeff, kl, kl_target=0.01) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["advantages", "value_targets", "action_logp", "vf_preds"])
def test_columns_with_another_axis_are_rejected(name):
    with PPO("CartPole-v1", train_batch_size=64, sgd_minibatch_size=32) as algorithm:
        worker = algorithm.workers.local_worker()
        batch = worker.sample()
        wrong = batch.with_columns(**{name: batch[name][:, None]})
        with pytest.raises(ValueError, match=rf"the column '{name}' has the shape \[\d+, 1\]"):
            worker.policy.learn_on_minibatches(wrong)


def test_statistics_of_a_network_that_draws_repeat():
    def train():
        settings = {"train_batch_size": 64, "sgd_minibatch_size": 32, "num_sgd_iter": 2}
        model = {"custom_model": DrawingNetwork}
        with PPO("CartPole-v1", model=model, kl_coeff=0.2, seed=3, **settings) as algorithm:
            algorithm.train()
            return algorithm.train()["learners"]["default_policy"]

    torch.manual_seed(1)
    first = train()
    assert first["kl"] > 0
    torch.manual_seed(2)
    assert train() == first


class NeedsModel(Categorical):
    """A distribution that reads the model."""

    def __init__(self, inputs, model):
        assert model is not None
        super().__init__(inputs, model)


def test_distributions_of_the_sampling_policy_get_the_model():
    class Policy(PPOTorchPolicy):
        def make_distribution(self):
            return NeedsModel

    policy = Policy(BOX, THREE, {"kl_coeff": 0.2, "seed": 0})
    stats = policy.learn_on_minibatches(rows(), 1, 20)
    assert np.isfinite([stats["kl"], stats["policy_loss"]]).all()


def test_on_policy_algorithm_refuses_rows_of_a_replay_buffer():
    policy, batch = PPOTorchPolicy(BOX, THREE, {"seed": 0}), rows()
    drawn = batch.with_columns(batch_indexes=np.arange(batch.count))
    for learn in (policy.learn_on_batch, policy.compute_gradients, policy.learn_on_minibatches):
        with pytest.raises(ConfigError, match="PPOTorchPolicy is an on-policy algorithm"):
            learn(drawn)
    allowed = PPOTorchPolicy(BOX, THREE, {"seed": 0, "allow_off_policy": True})
    assert np.isfinite(allowed.learn_on_batch(drawn)["total_loss"])
