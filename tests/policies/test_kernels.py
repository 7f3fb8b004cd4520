"""Accelerated kernels compute the shipped losses and their gradients."""

import functools

import numpy as np
import pytest
import torch
from gymnasium import spaces

from flowrl.algorithms.a2c import A2CTorchPolicy
from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.data import SampleBatch
from flowrl.policies import TorchPolicy
from flowrl.policies.learning.kernels.policy_gradient import standardized
from flowrl.policies.learning.kernels.registry import _KERNELS
from flowrl.settings import import_object

OBS = spaces.Box(-1, 1, (3,), np.float32)
BOX = spaces.Box(-2, 2, (2, 2), np.float32)
THREE = spaces.Discrete(3)


@pytest.mark.parametrize("name", _KERNELS)
def test_registry_names_existing_classes_and_methods(name):
    policy_class = import_object(":".join(name.rsplit(".", 1)))
    assert issubclass(policy_class, TorchPolicy)
    for method in _KERNELS[name].methods:
        found = getattr(policy_class, method)
        assert callable(found) or isinstance(found, property)


def rows(policy, count=48, seed=0):
    """Return rows that a nearby policy sampled, with ratios on both sides of the clip bounds."""
    rng = np.random.default_rng(seed)
    obs = rng.uniform(-1, 1, (count, 3)).astype(np.float32)
    actions, _, extra = policy.compute_actions(obs)
    inputs = extra["action_dist_inputs"]
    return SampleBatch(
        obs=obs,
        actions=actions,
        action_dist_inputs=inputs + 0.2 * rng.standard_normal(inputs.shape).astype(np.float32),
        action_logp=extra["action_logp"] + 0.2 * rng.standard_normal(count).astype(np.float32),
        advantages=rng.standard_normal(count).astype(np.float32),
        value_targets=rng.standard_normal(count).astype(np.float32),
        vf_preds=extra["vf_preds"] + 0.2 * rng.standard_normal(count).astype(np.float32),
    )


PPO_TERMS = {"kl_coeff": 0.3, "vf_clip_param": 0.1, "entropy_coeff": 0.05}


@pytest.mark.parametrize("free_log_std", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("actions", [THREE, BOX], ids=["discrete", "box"])
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (PPOTorchPolicy, {}),
        (PPOTorchPolicy, PPO_TERMS),
        (PPOTorchPolicy, {"standardize_advantages": False, "vf_loss_coeff": 2.0}),
        (A2CTorchPolicy, {"entropy_coeff": 0.05}),
        (A2CTorchPolicy, {"entropy_coeff": 0.0, "standardize_advantages": True}),
    ],
    ids=["ppo", "ppo with all terms", "ppo, raw advantages", "a2c", "a2c without bonus"],
)
def test_policy_gradient_kernel_equals_autograd(kind, more, actions, shared, free_log_std):
    """Compare all parameters; the second batch checks that no state remains from the first."""
    model = {
        "fcnet_hiddens": [16, 8],
        "fcnet_activation": "relu" if shared else "tanh",
        "vf_share_layers": shared,
        "free_log_std": free_log_std,
    }
    policy = kind(OBS, actions, {"seed": 0, "model": model, **more})
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(policy.flat.vector.shape, generator=generator)
    policy.flat.vector.data.add_(0.3 * noise)
    for seed in (0, 1):
        batch = rows(policy, seed=seed)
        policy.stats = {}
        kernel_loss = policy.learner.kernel(policy.tensors(batch))
        gradient, stats = policy.flat.gradient.clone(), policy.stats
        policy.stats = {}
        loss = policy.loss(policy.tensors(batch))
        policy.flat.take_gradient(loss)
        assert kernel_loss == pytest.approx(loss.item(), rel=1e-4, abs=1e-5)
        expected = {name: float(value) for name, value in policy.stats.items()}
        assert stats == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert float(gradient.abs().max()) > 0.01
        torch.testing.assert_close(gradient, policy.flat.gradient, rtol=1e-4, atol=1e-6)


def test_kernels_accept_columns_of_float64():
    policy = PPOTorchPolicy(OBS, BOX, {"seed": 0, **PPO_TERMS})
    batch = rows(policy)
    expected = policy.learner.kernel(policy.tensors(batch))
    gradient = policy.flat.gradient.clone()
    names = set(batch) - {"obs"}
    wide = SampleBatch({**batch, **{name: batch[name].astype(np.float64) for name in names}})
    assert policy.learner.kernel(policy.tensors(wide)) == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(gradient, policy.flat.gradient, rtol=1e-4, atol=1e-6)


def test_policy_gradient_kernel_is_used_only_for_shipped_losses():
    class Doubled(PPOTorchPolicy):
        def loss(self, batch):
            return 2 * super().loss(batch)

    class OtherValues(PPOTorchPolicy):
        def _value_loss(self, values, batch):
            return values.square().mean()

    image = spaces.Box(0, 255, (8, 8, 3), np.uint8)
    masked = spaces.Dict(action_mask=spaces.MultiBinary(3), observations=OBS)
    bounded = {"model": {"fcnet_activation": "gelu"}}
    cases = [
        (Doubled, OBS, THREE, {}), (OtherValues, OBS, THREE, {}),
        (PPOTorchPolicy, image, THREE, {}), (PPOTorchPolicy, masked, THREE, {}),
        (PPOTorchPolicy, OBS, spaces.MultiDiscrete([2, 3]), {}),
        (PPOTorchPolicy, OBS, THREE, bounded), (PPOTorchPolicy, OBS, THREE, {"compile": True}),
        (A2CTorchPolicy, OBS, THREE, {"precision": "bfloat16"}),
        (A2CTorchPolicy, OBS, BOX, {"numpy_gradients": False}),
        (A2CTorchPolicy, OBS, BOX, {"model": {"use_lstm": True}}),
    ]  # fmt: skip
    for kind, space, actions, more in cases:
        assert kind(space, actions, {"seed": 0, **more}).learner.kernel is None
    for kind, actions in ((PPOTorchPolicy, THREE), (A2CTorchPolicy, BOX)):
        assert kind(OBS, actions, {"seed": 0}).learner.kernel is not None


def test_replaced_loss_is_used(monkeypatch):
    policy = PPOTorchPolicy(OBS, THREE, {"seed": 0})
    batch = rows(policy)
    expected = policy.compute_gradients(batch)[0]
    loss = PPOTorchPolicy.loss
    policy.loss = lambda batch: 2 * loss(policy, batch)
    np.testing.assert_allclose(
        policy.compute_gradients(batch)[0], 2 * expected, rtol=1e-3, atol=1e-6
    )
    wrapped = functools.wraps(loss)(lambda self, batch: 2 * loss(self, batch))
    for replacement in (wrapped, property(lambda self: wrapped)):
        monkeypatch.setattr(PPOTorchPolicy, "loss", replacement)
        assert PPOTorchPolicy(OBS, THREE, {"seed": 0}).learner.kernel is None


@pytest.mark.parametrize("kind", [PPOTorchPolicy, A2CTorchPolicy])
def test_frozen_parameters_stay(kind):
    policy = kind(OBS, THREE, {"seed": 0})
    policy.learn_on_minibatches(rows(policy))  # the optimizer has moments of all parameters
    policy.model.hidden.requires_grad_(False)
    before = policy.get_weights()
    policy.learn_on_minibatches(rows(policy))
    changed = {n for n, w in policy.get_weights().items() if not np.array_equal(w, before[n])}
    assert changed
    assert not any(name.startswith("hidden") for name in changed)


def test_ratios_that_overflow_are_an_error_without_a_warning(recwarn):
    policy = PPOTorchPolicy(OBS, THREE, {"seed": 0})
    batch = rows(policy)
    batch["action_logp"] -= 200
    with pytest.raises(FloatingPointError, match="total_loss"):
        policy.learn_on_batch(batch)
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, np.bool_])
def test_actions_of_another_dtype_are_numbers_of_actions(dtype):
    gradients = []
    for gradients_of_numpy in (True, False):
        policy = PPOTorchPolicy(OBS, THREE, {"seed": 0, "numpy_gradients": gradients_of_numpy})
        batch = rows(policy)
        batch["actions"] = (batch["actions"] % 2).astype(dtype)
        gradients.append(policy.compute_gradients(batch)[0])
    np.testing.assert_allclose(*gradients, rtol=1e-4, atol=1e-6)


def test_negative_actions_are_an_error():
    policy = PPOTorchPolicy(OBS, THREE, {"seed": 0})
    batch = rows(policy)
    batch["actions"][3] = -1
    with pytest.raises(IndexError, match=r"actions: -1 is not in \[0, 3\)"):
        policy.learn_on_batch(batch)


@pytest.mark.parametrize(
    "values", [np.full(100, 3.3), np.array([2.0]), 1e25 * np.arange(8), np.arange(64.0) ** 2]
)
def test_advantages_are_standardized_like_those_of_other_losses(values):
    values = values.astype(np.float32)
    learner = PPOTorchPolicy(BOX, spaces.Discrete(2), {}).learner
    expected = learner.standardize(torch.from_numpy(values).double()).numpy()
    np.testing.assert_allclose(standardized(values), expected, rtol=1e-5, atol=1e-6)
