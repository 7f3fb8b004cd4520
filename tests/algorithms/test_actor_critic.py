"""SAC, TD3 and DDPG: losses against reference implementations, and effects of the settings."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from flowrl.algorithms.cql import CQLTorchPolicy
from flowrl.algorithms.sac import SAC, SACConfig, SACTorchPolicy
from flowrl.algorithms.td3 import DDPG, TD3, DDPGConfig, TD3Config, TD3TorchPolicy
from flowrl.data import SampleBatch
from flowrl.iter import metrics_scope
from flowrl.iter.metrics import MetricsContext
from flowrl.ops import ParallelRollouts, UpdateTargetNetwork
from flowrl.policies import ConfigError, ViewRequirement
from flowrl.policies.config import ModelConfig
from flowrl.policies.distributions import SquashedGaussian
from flowrl.policies.learning.flat_parameters import FlatAdam, FlatParameters
from flowrl.policies.models.fcnet import FullyConnectedNetwork
from flowrl.policies.models.numpy_forward import outputs_by_numpy
from flowrl.sampling import WorkerSet
from flowrl.seeding import random_stream

OBS = spaces.Box(-2.0, 2.0, (3,), np.float32)
BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)
DISCRETE = spaces.Discrete(3)
SMALL = {"fcnet_hiddens": [8, 6], "fcnet_activation": "relu"}


def make(kind=SACTorchPolicy, actions=BOX, obs=OBS, **settings):
    return kind(obs, actions, kind.config_class(**{"model": SMALL, "seed": 3, **settings}))


def rows(count=12, actions=BOX, n_steps=False, weights=False, seed=0):
    rng = np.random.default_rng(seed)
    if isinstance(actions, spaces.Box):
        drawn_actions = rng.uniform(-0.9, 0.9, (count, 2)).astype(np.float32)
    else:
        drawn_actions = rng.integers(3, size=count)
    columns = {
        "obs": rng.normal(size=(count, 3)).astype(np.float32),
        "new_obs": rng.normal(size=(count, 3)).astype(np.float32),
        "actions": drawn_actions,
        "rewards": rng.normal(size=count).astype(np.float32),
        "terminateds": rng.random(count) < 0.3,
    }
    if n_steps:
        columns["n_steps"] = rng.integers(1, 4, count)
    if weights:
        columns["weights"] = rng.random(count).astype(np.float32)
        columns["batch_indexes"] = np.arange(count)
    return SampleBatch(columns)


def gradients_by_name(policy, batch):
    gradient, stats = policy.compute_gradients(batch)
    gradients = dict(zip(policy.flat.names, _split(policy, gradient), strict=True))
    return gradients, stats


def _split(policy, vector):
    offset = 0
    for parameter in policy.flat.parameters:
        piece = vector[offset : offset + parameter.numel()]
        shape = tuple(parameter.shape)
        yield piece.reshape(shape[::-1]).T if len(shape) == 2 else piece.reshape(shape)
        offset += parameter.numel()


class Reference:
    """A reference implementation of a policy's networks in float64."""

    def __init__(self, policy):
        self.policy = policy
        as64 = {n: torch.tensor(w, dtype=torch.float64) for n, w in policy.get_weights().items()}
        self.weights = {n: w.requires_grad_() for n, w in as64.items()}
        self.target = {
            n: torch.tensor(t.numpy(), dtype=torch.float64)
            for n, t in policy.target_model.state_dict().items()
        }

    @staticmethod
    def run(weights, prefix, x):
        for i in range(2):
            w, b = (weights[f"{prefix}hidden.{i}.{kind}"] for kind in ("weight", "bias"))
            x = torch.relu(x @ w.T + b)
        return x @ weights[f"{prefix}policy_head.weight"].T + weights[f"{prefix}policy_head.bias"]

    def actor(self, obs, target=False):
        return self.run(self.target if target else self.weights, "actor.", obs)

    def critics(self, inputs, target=False, frozen=False):
        weights = self.target if target else self.weights
        if frozen:
            weights = {n: w.detach() for n, w in weights.items()}
        count = len({n.split(".")[1] for n in weights if n.startswith("critics.")})
        return [self.run(weights, f"critics.{i}.", inputs) for i in range(count)]

    def noise(self, shape, *skipped):
        """Return the noise that the policy draws while learning, after arrays of shapes
        `skipped`."""
        stream = random_stream(3, "policy", "learning")
        for skipped_shape in skipped:
            stream.standard_normal(skipped_shape, dtype=np.float32)
        return torch.tensor(stream.standard_normal(shape, dtype=np.float32).astype(np.float64))

    def compare(self, loss, batch):
        """Compare the policy's loss and gradients on a batch with those of `loss`."""
        loss.backward()
        gradients, stats = gradients_by_name(self.policy, batch)
        assert stats["total_loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
        for name, weight in self.weights.items():
            expected = np.zeros(weight.shape) if weight.grad is None else weight.grad.numpy()
            np.testing.assert_allclose(gradients[name], expected, atol=2e-5, err_msg=name)
        return stats


def columns(batch):
    tensors = {n: torch.tensor(np.asarray(c, dtype=np.float64)) for n, c in batch.items()}
    tensors.setdefault("n_steps", torch.ones(batch.count, dtype=torch.float64))
    tensors.setdefault("weights", torch.ones(batch.count, dtype=torch.float64))
    return tensors


def squashed(outputs, noise):
    """Return actions and their log probabilities (appendix C of the paper)."""
    mean, log_std = outputs.chunk(2, 1)
    raw = mean + log_std.exp() * noise
    normal = torch.distributions.Normal(mean, log_std.exp())
    logp = normal.log_prob(raw).sum(1) - torch.log(1 - torch.tanh(raw) ** 2 + 1e-12).sum(1)
    return torch.tanh(raw), logp


def perturb_target(policy):
    """Make the target network differ from the online network."""
    rng = np.random.default_rng(9)
    with torch.no_grad():
        for tensor in policy.target_model.parameters():
            tensor.add_(torch.tensor(rng.normal(scale=0.3, size=tuple(tensor.shape))).float())


@pytest.mark.parametrize("use_numpy", [True, False])
@pytest.mark.parametrize("more", [{}, {"n_steps": True, "weights": True}])
@pytest.mark.parametrize("twin_q", [True, False])
def test_sac_loss_matches_the_paper(use_numpy, more, twin_q):
    policy = make(gamma=0.9, initial_alpha=0.3, twin_q=twin_q)
    policy.model.use_numpy = use_numpy
    perturb_target(policy)
    batch = rows(**more)
    c, reference = columns(batch), Reference(policy)
    shape = (batch.count, 2)
    with torch.no_grad():
        next_actions, next_logp = squashed(reference.actor(c["new_obs"]), reference.noise(shape))
        next_inputs = torch.cat([c["new_obs"], next_actions], 1)
        next_q = torch.cat(reference.critics(next_inputs, target=True), 1).min(1).values
        next_values = next_q - 0.3 * next_logp
        targets = c["rewards"] + 0.9 ** c["n_steps"] * (1 - c["terminateds"]) * next_values
    q = torch.cat(reference.critics(torch.cat([c["obs"], c["actions"]], 1)), 1)
    critic = (c["weights"] * 0.5 * ((q - targets[:, None]) ** 2).sum(1)).mean()
    actions, logp = squashed(reference.actor(c["obs"]), reference.noise(shape, shape))
    policy_q = torch.cat(reference.critics(torch.cat([c["obs"], actions], 1), frozen=True), 1)
    actor = (0.3 * logp - policy_q.min(1).values).mean()
    log_alpha = reference.weights["log_alpha"]
    temperature = -(log_alpha * (logp.detach() + -2.0)).mean()
    stats = reference.compare(critic + actor + temperature, batch)
    assert stats["critic_loss"] == pytest.approx(float(critic.detach()), abs=1e-5)
    assert stats["actor_loss"] == pytest.approx(float(actor.detach()), abs=1e-5)
    assert stats["alpha"] == pytest.approx(0.3)
    assert stats["entropy"] == pytest.approx(float(-logp.detach().mean()), abs=1e-5)
    if "weights" in more:
        errors = (q - targets[:, None]).abs().mean(1).detach().numpy()
        np.testing.assert_allclose(policy.row_stats["td_error"], errors, atol=1e-5)


def test_discrete_sac_loss_matches_the_paper():
    """Expectations over all actions, row by row."""
    policy = make(actions=DISCRETE, gamma=0.9, initial_alpha=0.4)
    perturb_target(policy)
    batch = rows(actions=DISCRETE)
    c, reference = columns(batch), Reference(policy)
    loss = 0.0
    entropies = []
    for i in range(batch.count):
        row = {name: column[i : i + 1] for name, column in c.items()}
        with torch.no_grad():
            logits = reference.actor(row["new_obs"])[0]
            probs = torch.exp(logits) / torch.exp(logits).sum()
            next_q = torch.stack([q[0] for q in reference.critics(row["new_obs"], target=True)])
            next_value = sum(
                probs[a] * (next_q[:, a].min() - 0.4 * torch.log(probs[a])) for a in range(3)
            )
            target = row["rewards"][0] + 0.9 * (1 - row["terminateds"][0]) * next_value
        action = int(row["actions"][0])
        for q in reference.critics(row["obs"]):
            loss = loss + 0.5 * (q[0, action] - target) ** 2
        probs = torch.softmax(reference.actor(row["obs"])[0], 0)
        frozen = reference.critics(row["obs"], frozen=True)
        min_q = torch.stack([q[0] for q in frozen]).min(0).values
        loss = loss + sum(probs[a] * (0.4 * torch.log(probs[a]) - min_q[a]) for a in range(3))
        entropies.append(float(-(probs * torch.log(probs)).sum()))
    target_entropy = 0.98 * math.log(3)
    loss = loss / batch.count
    loss = loss + reference.weights["log_alpha"] * (np.mean(entropies) - target_entropy)
    reference.compare(loss, batch)


@pytest.mark.parametrize("kind", [TD3Config, DDPGConfig])
def test_td3_loss_matches_the_paper(kind):
    is_td3 = kind is TD3Config
    policy = TD3TorchPolicy(OBS, BOX, kind(model=SMALL, seed=3, gamma=0.9, policy_delay=1))
    perturb_target(policy)
    batch = rows()
    c, reference = columns(batch), Reference(policy)
    with torch.no_grad():
        next_actions = torch.tanh(reference.actor(c["new_obs"], target=True))
        if is_td3:
            noise = (0.2 * reference.noise((batch.count, 2))).clamp(-0.5, 0.5)
            next_actions = (next_actions + noise).clamp(-1, 1)
        next_inputs = torch.cat([c["new_obs"], next_actions], 1)
        next_q = torch.cat(reference.critics(next_inputs, target=True), 1)
        assert next_q.shape[1] == (2 if is_td3 else 1)
        targets = c["rewards"] + 0.9 * (1 - c["terminateds"]) * next_q.min(1).values
    q = torch.cat(reference.critics(torch.cat([c["obs"], c["actions"]], 1)), 1)
    critic = 0.5 * ((q - targets[:, None]) ** 2).sum(1).mean()
    inputs = torch.cat([c["obs"], torch.tanh(reference.actor(c["obs"]))], 1)
    reference.compare(critic - reference.critics(inputs, frozen=True)[0].mean(), batch)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("share", [0.2, 1.0])
@pytest.mark.parametrize("outputs", [1, 3])
def test_numpy_gradients_equal_autograd(activation, frozen, share, outputs):
    config = ModelConfig(fcnet_hiddens=[7, 5], fcnet_activation=activation, vf_share_layers=True)
    network = FullyConnectedNetwork(OBS, BOX, outputs, config, rng=np.random.default_rng(0))
    rng = np.random.default_rng(1)
    output_gradient = torch.from_numpy(rng.normal(size=(20, outputs)).astype(np.float32))
    output_gradient *= torch.from_numpy(rng.random((20, 1)) < share)
    results = []
    for use_numpy in (True, False):
        network.zero_grad()
        features = torch.from_numpy(rng.normal(size=(20, 3)).astype(np.float32) * 0 + 0.5)
        features = (features + torch.arange(20)[:, None] / 10 - 1).requires_grad_()
        if use_numpy:
            result = outputs_by_numpy(network, features, frozen)
        else:
            result = network({"obs": features}, [], None)[0]
        result.backward(output_gradient)
        tensors = [result.detach(), features.grad]
        if not (frozen and not use_numpy):
            parameters = [*network.hidden.parameters(), *network.policy_head.parameters()]
            tensors += [p.grad for p in parameters]
        results.append(tensors)
    by_numpy, by_autograd = results
    if frozen:
        assert all(gradient is None for gradient in by_numpy[2:])
    for actual, expected in zip(by_numpy, by_autograd, strict=False):
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)


def test_td3_delays_updates_of_actor_and_targets():
    policy = make(TD3TorchPolicy, policy_delay=3)
    updates = []
    for _ in range(6):
        before, target = policy.get_weights(), policy.target_model.state_dict()
        target = {name: tensor.clone() for name, tensor in target.items()}
        policy.learn_on_batch(rows())
        policy.update_target()
        after = policy.get_weights()
        changed = {n.split(".")[0] for n in after if (after[n] != before[n]).any()}
        new_target = policy.target_model.state_dict()
        target_changed = any((t != target[n]).any() for n, t in new_target.items())
        updates.append((sorted(changed), target_changed))
    full_update = (["actor", "critics"], True)
    assert updates == [(["critics"], False), (["critics"], False), full_update] * 2


def test_td3_updates_the_targets_after_batches_of_several_updates():
    policy = make(TD3TorchPolicy, policy_delay=2)
    updated = []
    for num_sgd_iter in (3, 3, 1, 1, 2):  # 3, 6, 7, 8 and 10 updates
        policy.learn_on_minibatches(rows(), num_sgd_iter=num_sgd_iter)
        updated.append(policy.update_target())
    assert updated == [True, True, False, True, True]


def test_temperature_adapts_to_the_target_entropy():
    """It grows while the entropy is below the target, and shrinks above."""
    for target_entropy, sign in ((5.0, 1), (-50.0, -1)):
        policy = make(target_entropy=target_entropy, entropy_lr=0.1)
        policy.learn_on_batch(rows())
        assert np.sign(policy.alpha - 1.0) == sign
    policy = make(target_entropy=None, initial_alpha=0.2)
    policy.learn_on_batch(rows())
    assert policy.target_entropy is None
    assert policy.alpha == pytest.approx(0.2)
    assert make().target_entropy == -2
    assert make(actions=DISCRETE).target_entropy == pytest.approx(0.98 * math.log(3))


@pytest.mark.parametrize(
    ("saved", "loading", "expected"),
    [
        ({}, {}, "saved"),
        ({}, {"initial_alpha": 0.2}, 0.2),
        ({"target_entropy": None, "initial_alpha": 0.5}, {"target_entropy": None}, 1.0),
        ({}, {"target_entropy": None, "initial_alpha": 0.2}, 0.2),
        ({"initial_alpha": 0.2}, {"target_entropy": None, "initial_alpha": 0.2}, 0.2),
    ],
)
@pytest.mark.parametrize("kind", [SACTorchPolicy, CQLTorchPolicy])
def test_changed_initial_temperature_applies_to_a_loaded_state(kind, saved, loading, expected):
    policy = make(kind, entropy_lr=0.1, **saved)
    policy.learn_on_batch(rows())
    other = make(kind, **loading)
    other.set_state(policy.get_state())
    assert other.alpha == pytest.approx(policy.alpha if expected == "saved" else expected)
    if other.target_entropy is None:  # the saved moments of the optimizer do not change it
        other.learn_on_batch(rows())
        assert other.alpha == pytest.approx(expected)


def test_changed_learning_rates_apply_to_a_loaded_state():
    policy = make(lr=1e-3, actor_lr=1e-2)
    policy.learn_on_batch(rows())
    other = make(lr=1e-3, actor_lr=1e-4)
    other.set_state(policy.get_state())
    before = other.get_weights()
    other.learn_on_batch(rows())
    after = other.get_weights()
    largest = max(abs(after[n] - before[n]).max() for n in after if n.startswith("actor"))
    assert largest < 1.1e-4


def test_actor_critics_and_temperature_have_separate_learning_rates():
    """Adam's first step has the size of the learning rate for any gradient."""
    policy = make(lr=1e-3, actor_lr=1e-2, critic_lr=1e-4, entropy_lr=1e-1)
    before = policy.get_weights()
    policy.learn_on_batch(rows(64))
    steps = {}
    for name, weight in policy.get_weights().items():
        steps.setdefault(name.split(".")[0], []).append(np.abs(weight - before[name]).max())
    rates = {part: max(sizes) for part, sizes in steps.items()}
    assert rates["actor"] == pytest.approx(1e-2, rel=1e-2)
    assert rates["critics"] == pytest.approx(1e-4, rel=1e-2)
    assert rates["log_alpha"] == pytest.approx(1e-1, rel=1e-2)


def test_lr_schedule_applies_to_parts_without_their_own_rate():
    policy = make(lr=[(0, 1e-3), (100, 0.0)], critic_lr=5e-4)
    policy.on_global_var_update({"timestep": 50})
    assert [g["lr"] for g in policy.optimizer.param_groups] == pytest.approx([5e-4, 5e-4, 5e-4])
    policy.on_global_var_update({"timestep": 100})
    assert [g["lr"] for g in policy.optimizer.param_groups] == pytest.approx([0.0, 5e-4, 0.0])


def test_flat_adam_with_parts_equals_torch_adam_with_groups():
    torch.manual_seed(0)
    ours, theirs = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    theirs.load_state_dict(ours.state_dict())
    flat = FlatParameters(ours)
    parts = [(flat.part([ours.weight]), 1e-2), (flat.part([ours.bias]), 1e-3)]
    adam = FlatAdam(flat, 1e-2, parts=parts)
    groups = [{"params": [theirs.weight], "lr": 1e-2}, {"params": [theirs.bias], "lr": 1e-3}]
    torch_adam = torch.optim.Adam(groups, eps=1e-8)
    for step in range(5):
        loss = [net(torch.ones(2, 4) * step).square().sum() for net in (ours, theirs)]
        flat.take_gradient(loss[0])
        adam.param_groups[1]["active"] = bool(step % 2)
        adam.step()
        torch_adam.zero_grad()
        loss[1].backward()
        if not step % 2:
            theirs.bias.grad = None
        torch_adam.step()
    torch.testing.assert_close(ours.weight, theirs.weight)
    torch.testing.assert_close(ours.bias, theirs.bias)
    restored = FlatAdam(flat, 1e-2, parts=parts)
    restored.load_state_dict({"state": {i: dict(s) for i, s in adam.state_dict()["state"].items()}})
    assert [int(part.count) for part in restored._parts] == [5, 2]


def test_q_model_configures_the_critics():
    model = make(q_model={"fcnet_hiddens": [5], "fcnet_activation": "tanh"}).model
    assert [layer.out_features for layer in model.actor.hidden] == [8, 6]
    assert [[layer.out_features for layer in c.hidden] for c in model.critics] == [[5], [5]]


def test_q_model_changes_only_the_settings_that_it_names():
    model = make(q_model={"fcnet_hiddens": [5]}).model
    assert [critic.model_config.fcnet_activation for critic in model.critics] == ["relu"] * 2
    config = SACConfig(model=SMALL, q_model={"fcnet_hiddens": [5]})
    assert SACConfig.from_dict(config.to_dict()) == config
    assigned = SACConfig(model=SMALL)
    assigned.q_model = {"fcnet_hiddens": [5]}
    assert assigned.q_model == config.q_model
    with pytest.raises(ConfigError, match=r"unknown setting 'q_model\.hidden'"):
        SACConfig(q_model={"hidden": [5]})
    with pytest.raises(ConfigError, match=r"unknown setting 'model\.hidden'"):
        SACConfig(model={"hidden": [5]}, q_model={"fcnet_hiddens": [5]})
    model = make(q_model={"fcnet_activation": "tanh"}).model
    assert [[layer.out_features for layer in c.hidden] for c in model.critics] == [[8, 6]] * 2


def test_message_about_a_custom_model_names_the_critic():
    class OfObservations(torch.nn.Module):
        def __init__(self, obs_space, action_space, num_outputs):
            super().__init__()
            if obs_space.shape != OBS.shape:
                raise TypeError("unknown shape")
            self.out = torch.nn.Linear(obs_space.shape[0], num_outputs)

        def forward(self, obs):
            return self.out(obs)

    with pytest.raises(
        ConfigError, match=r"unknown shape \(for a critic: obs_space is Box.*q_model"
    ):
        make(model={"custom_model": OfObservations})
    model = make(model={"custom_model": OfObservations}, q_model={"custom_model": None}).model
    assert type(model.critics[0]).__name__ == "FullyConnectedNetwork"
    with_arguments = {"custom_model": OfObservations, "custom_model_config": {"size": 1}}
    assert (
        SACConfig(model=with_arguments, q_model={"custom_model": None}).q_model == SACConfig().model
    )


def test_restored_policy_learns_identically():
    for kind, actions in ((SACTorchPolicy, BOX), (SACTorchPolicy, DISCRETE), (TD3TorchPolicy, BOX)):
        policy, other = make(kind, actions), make(kind, actions, seed=4)
        policy.learn_on_batch(rows(actions=actions))
        other.set_state(policy.get_state())
        for trained in (policy, other):
            for seed in range(3):
                trained.learn_on_batch(rows(actions=actions, seed=seed))
                trained.update_target()
        for name, weight in policy.get_weights().items():
            np.testing.assert_array_equal(weight, other.get_weights()[name])
        other_target = other.target_model.state_dict()
        for name, tensor in policy.target_model.state_dict().items():
            assert torch.equal(tensor, other_target[name]), name


NESTED = spaces.Dict({"a": OBS, "b": spaces.Discrete(4)})
IMAGE = spaces.Box(0, 255, (10, 10, 3), np.uint8)


@pytest.mark.parametrize("obs", [NESTED, IMAGE, spaces.Discrete(5)])
@pytest.mark.parametrize(
    ("kind", "actions"), [(SACTorchPolicy, BOX), (SACTorchPolicy, DISCRETE), (TD3TorchPolicy, BOX)]
)
def test_policies_learn_from_other_observation_spaces(obs, kind, actions):
    policy = make(kind, actions, obs, model={"fcnet_hiddens": [8], "fcnet_activation": "relu"})
    space = spaces.Dict({"obs": obs})
    space.seed(0)
    samples = [space.sample()["obs"] for _ in range(8)]
    stacked = (
        {key: np.stack([sample[key] for sample in samples]) for key in obs} if obs is NESTED
        else np.stack(samples)
    )  # fmt: skip
    batch = SampleBatch({**rows(8, actions), "obs": stacked, "new_obs": stacked})
    before = policy.get_weights()
    for _ in range(2):
        stats = policy.learn_on_batch(batch)
        policy.update_target()
    assert np.isfinite(stats["total_loss"])
    after = policy.get_weights()
    changed = {n.split(".")[0] for n in after if (after[n] != before[n]).any()}
    assert {"actor", "critics"} <= changed
    computed_actions, _, extra = policy.compute_actions(stacked)
    assert len(computed_actions) == 8 and extra == {}


def test_bfloat16_loss_is_close_to_float32():
    stats = [make(precision=name).learn_on_batch(rows()) for name in ("float32", "bfloat16")]
    assert stats[0]["critic_loss"] == pytest.approx(stats[1]["critic_loss"], rel=0.05)


@pytest.mark.parametrize("kind", [SACConfig, TD3Config, DDPGConfig])
@pytest.mark.parametrize("more", [{}, {"prioritized_replay": True, "n_step": 3}])
def test_plans_train(kind, more):
    config = kind(
        env="Pendulum-v1", seed=0, learning_starts=32, train_batch_size=16, model=SMALL,
        min_sample_timesteps_per_iteration=50, num_envs_per_worker=2, **more,
    )  # fmt: skip
    with config.build() as algorithm:
        results = [algorithm.train() for _ in range(3)]
        assert results[-1]["num_env_steps_trained"] > 16 * 30
        assert np.isfinite(results[-1]["learners"]["default_policy"]["critic_loss"])
        assert algorithm.plan.stats()
        action = algorithm.compute_single_action(np.zeros(3, np.float32), explore=False)
        assert algorithm.workers.local_worker().policy.action_space.shape == (1,)
        assert -2 <= float(action[0]) <= 2


def test_discrete_sac_trains_in_a_plan():
    config = SACConfig(
        env="CartPole-v1", seed=0, learning_starts=32, train_batch_size=16, model=SMALL,
        min_sample_timesteps_per_iteration=50,
    )  # fmt: skip
    with config.build() as algorithm:
        result = [algorithm.train() for _ in range(3)][-1]
    assert 0 < result["learners"]["default_policy"]["entropy"] <= math.log(2) + 1e-6


def test_masked_actions_are_ignored():
    obs_space = spaces.Dict({"action_mask": spaces.MultiBinary(3), "features": OBS})
    policy = make(actions=DISCRETE, obs=obs_space)
    mask = np.tile(np.array([1, 0, 1], np.int8), (6, 1))
    unmasked = rows(6, DISCRETE)
    obs = {"action_mask": mask, "features": unmasked["obs"]}
    batch = SampleBatch({**unmasked, "obs": obs, "new_obs": obs, "actions": np.zeros(6, int)})
    for _ in range(3):
        stats = policy.learn_on_batch(batch)
    assert 0 < stats["entropy"] <= math.log(2) + 1e-6
    actions, _, _ = policy.compute_actions(obs)
    assert 1 not in actions


@pytest.mark.parametrize(
    ("kind", "actions", "settings", "message"),
    [
        (SACTorchPolicy, spaces.MultiDiscrete([2, 2]), {}, "SAC is for Box and Discrete actions"),
        (TD3TorchPolicy, DISCRETE, {}, "TD3 is for Box actions, not Discrete"),
        (SACTorchPolicy, spaces.Box(-np.inf, np.inf, (1,)), {}, "SAC needs bounded actions"),
        (SACTorchPolicy, spaces.Box(0, 1, (1,), np.int64), {}, "SAC computes continuous actions"),
        (TD3TorchPolicy, spaces.Box(0, 1, (1,), np.uint8), {}, "TD3 computes continuous actions"),
        (TD3TorchPolicy, spaces.Box(-2, 2, (1,)), {"normalize_actions": False},
         "normalize_actions: TD3 computes actions in"),
        (SACTorchPolicy, BOX, {"model": {"use_lstm": True}}, "without memory"),
        (SACTorchPolicy, BOX, {"q_model": {"use_lstm": True}}, r"^q_model\.use_lstm: SAC"),
        (SACTorchPolicy, BOX, {"model": {"num_framestacks": 2}}, "an environment wrapper"),
        (TD3TorchPolicy, BOX, {"model": {"vf_share_layers": True}},
         r"^model\.vf_share_layers: .*of TD3 are separate networks"),
    ],
)  # fmt: skip
def test_unsupported_spaces_and_models_are_rejected(kind, actions, settings, message):
    with pytest.raises(ConfigError, match=message):
        make(kind, actions, **settings)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (SACConfig, {"initial_alpha": 0}), (SACConfig, {"tau": 2}), (SACConfig, {"actor_lr": -1}),
        (SACConfig, {"target_entropy": "much"}), (TD3Config, {"policy_delay": 0}),
        (TD3Config, {"target_noise": -1}), (TD3Config, {"q_model": {"fcnet_hidden": [3]}}),
    ],
)  # fmt: skip
def test_invalid_settings_are_rejected(kind, settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        kind(**settings)


def test_environments_with_other_actions_are_rejected():
    for algorithm, env in ((TD3, "CartPole-v1"), (DDPG, "CartPole-v1")):
        with pytest.raises(ConfigError, match="is for Box actions"):
            algorithm(algorithm.config_class(env=env)).train()


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (SACTorchPolicy, {}),
        (SACTorchPolicy, {"twin_q": False, "target_entropy": None}),
        (TD3TorchPolicy, {"policy_delay": 1}),
        (TD3TorchPolicy, {"policy_delay": 2}),
    ],
    ids=["sac", "one critic", "td3", "delayed"],
)
def test_kernel_gradient_equals_autograd(kind, more, activation):
    """Compare all parameters; the second batch checks that no state remains from the first."""
    model = {"fcnet_hiddens": [16, 8], "fcnet_activation": activation}
    policy = kind(OBS, BOX, {"seed": 0, "gamma": 0.9, "model": model, **more})
    noise = torch.randn(policy.flat.vector.shape, generator=torch.manual_seed(3))
    policy.flat.vector.data.add_(0.3 * noise)
    if kind is SACTorchPolicy:  # so that some standard deviations are clipped
        policy.model.actor.policy_head.bias.data[-1] = 3.0
    for seed, with_columns in ((0, True), (1, False)):
        batch = rows(seed=seed, n_steps=with_columns, weights=with_columns)
        stream = policy.learner.rng.bit_generator.state
        kernel_loss = policy.learner.kernel(policy.tensors(batch))
        gradient, stats = policy.flat.gradient.clone(), dict(policy.stats)
        policy.learner.rng.bit_generator.state = stream
        loss = policy.loss(policy.tensors(batch))
        policy.flat.take_gradient(loss)
        assert kernel_loss == pytest.approx(loss.item(), rel=1e-4, abs=1e-5)
        expected = {name: float(value) for name, value in policy.stats.items()}
        assert stats == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert float(gradient.abs().max()) > 0.01
        torch.testing.assert_close(gradient, policy.flat.gradient, rtol=1e-4, atol=1e-6)


def test_kernel_is_used_only_for_shipped_losses():
    class DoubledLoss(SACTorchPolicy):
        def actor_loss(self, batch):
            return 2 * super().actor_loss(batch)

    class DoubledValues(TD3TorchPolicy):
        def action_values(self, batch):
            return 2 * super().action_values(batch)

    image = spaces.Box(0, 255, (8, 8, 3), np.uint8)
    cases = [(DoubledLoss, OBS, BOX, {}), (DoubledValues, OBS, BOX, {}),
             (SACTorchPolicy, OBS, spaces.Discrete(2), {}),
             (SACTorchPolicy, image, BOX, {}), (CQLTorchPolicy, OBS, BOX, {}),
             (SACTorchPolicy, OBS, BOX, {"precision": "bfloat16"}),
             (SACTorchPolicy, OBS, BOX, {"numpy_gradients": False}),
             (TD3TorchPolicy, OBS, BOX, {"numpy_gradients": False})]  # fmt: skip
    for kind, space, actions, more in cases:
        assert kind(space, actions, {"seed": 0, **more}).learner.kernel is None
    assert SACTorchPolicy(OBS, BOX, {}).learner.kernel is not None
    assert SACTorchPolicy(OBS, BOX, {}).model.use_numpy
    assert not CQLTorchPolicy(OBS, BOX, {"numpy_gradients": False}).model.use_numpy


def test_target_noise_is_clipped():
    """Clipped to 0, the noise has no effect."""
    obs = torch.from_numpy(rows()["new_obs"])
    values = {
        clip: make(TD3TorchPolicy, target_noise=5.0, target_noise_clip=clip).next_values(obs)
        for clip in (0.0, 0.5)
    }
    without_noise = make(TD3TorchPolicy, target_noise=0.0).next_values(obs)
    np.testing.assert_array_equal(values[0.0], without_noise)
    assert (values[0.5] != without_noise).any()


def test_each_part_follows_its_own_schedule():
    config = {"lr": 1e-3, "actor_lr": [(0, 4e-3), (100, 0.0)], "entropy_lr": 0.5}
    policy = SACTorchPolicy(OBS, BOX, config)
    rates = lambda: [group["lr"] for group in policy.optimizer.param_groups]  # noqa: E731
    assert rates() == [4e-3, 1e-3, 0.5]
    policy.on_global_var_update({"timestep": 50})
    assert rates() == pytest.approx([2e-3, 1e-3, 0.5])
    restored = SACTorchPolicy(OBS, BOX, config)
    restored.set_state(policy.get_state())
    assert [group["lr"] for group in restored.optimizer.param_groups] == pytest.approx(rates())


def test_custom_optimizer_keeps_its_learning_rate():
    class CustomOptimizer(SACTorchPolicy):
        def make_optimizer(self):
            return FlatAdam(self.flat, lr=5e-4)

    policy = CustomOptimizer(OBS, BOX, {"lr": 1e-3})
    policy.on_global_var_update({"timestep": 50})
    assert [group["lr"] for group in policy.optimizer.param_groups] == [5e-4]


@pytest.mark.parametrize("whole_vector", [False, True])
def test_custom_optimizer_changes_the_actor_only_in_its_updates(whole_vector):
    class CustomOptimizer(TD3TorchPolicy):
        def make_optimizer(self):
            if whole_vector:
                return FlatAdam(self.flat, lr=1e-2)
            return torch.optim.Adam(self.model.parameters(), lr=1e-2)

    policy = make(CustomOptimizer, policy_delay=2, num_sgd_iter=1)
    changes = []
    for seed in range(6):
        before = {name: value.clone() for name, value in policy.model.named_parameters()}
        policy.learn_on_batch(rows(seed=seed))
        changed = {
            name.split(".")[0]
            for name, value in policy.model.named_parameters()
            if not torch.equal(value, before[name])
        }
        changes.append(sorted(changed))
    assert changes == [["critics"], ["actor", "critics"]] * 3
    assert all(p.grad is not None for p in policy.model.parameters())


def test_delayed_target_update_remains_due():
    config = TD3Config(env="Pendulum-v1", policy_delay=2, model=SMALL, seed=0)
    with WorkerSet("Pendulum-v1", TD3TorchPolicy, config) as workers:
        policy = workers.local_worker().policy
        operator = UpdateTargetNetwork(workers, 30, by_steps_trained=True)
        start, updates = policy.target_version, []
        batch = ParallelRollouts(workers).take(1)[0]
        with metrics_scope(MetricsContext()) as metrics:
            for _ in range(8):  # the interval of 30 rows passes at odd and at even updates
                policy.learn_on_batch(batch)
                operator((None, {"default_policy": {"num_agent_steps_trained": 10}}))
                updates.append(policy.target_version - start)
            assert metrics.counters["num_target_updates"] == updates[-1]
    assert updates == [0, 0, 0, 1, 1, 1, 1, 2]


@pytest.mark.parametrize("algorithm", [SAC, TD3])
def test_all_networks_learn_in_training_mode(algorithm):
    modes = {}

    class Spy(torch.nn.Module):
        def __init__(self, obs_space, action_space, num_outputs):
            super().__init__()
            self.layer = torch.nn.Linear(math.prod(obs_space.shape), num_outputs)

        def forward(self, obs):
            if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
                modes.setdefault(obs.shape[1], []).append(self.training)
            return self.layer(obs)

    settings = {"learning_starts": 50, "min_sample_timesteps_per_iteration": 100, "seed": 1}
    with algorithm("Pendulum-v1", model={"custom_model": Spy}, **settings) as algo:
        algo.train()
    assert set(modes) == {3, 4}  # inputs of the actor and of the critics
    assert all(map(all, modes.values()))


MASKED = spaces.Dict(obs=OBS, action_mask=spaces.MultiBinary(3))


def masked_rows(allowed):
    """Rows with masks [B, 3], the last of them a terminal observation without allowed actions."""
    batch = rows(actions=DISCRETE)
    count, masks = batch.count, np.tile(np.array(allowed, np.int8), (batch.count, 1))
    batch["obs"] = {"obs": batch["obs"], "action_mask": masks}
    next_masks = masks.copy()
    next_masks[-1] = 0
    batch["new_obs"] = {"obs": batch["new_obs"], "action_mask": next_masks}
    batch["terminateds"] = np.arange(count) == count - 1
    batch["actions"] = np.zeros(count, np.int64)
    return batch


def test_terminal_observation_may_forbid_all_actions():
    policy = make(actions=DISCRETE, obs=MASKED)
    stats = policy.learn_on_batch(masked_rows([1, 1, 0]))
    assert np.isfinite(stats["critic_loss"])
    observation = {"obs": np.zeros((1, 3), np.float32), "action_mask": np.zeros((1, 3), np.int8)}
    with pytest.raises(ValueError, match="no action is allowed"):
        policy.compute_actions(observation)


def test_target_entropy_counts_the_actions_that_are_not_masked():
    """A temperature that aims at the entropy of all actions would grow without end."""
    policy = make(actions=DISCRETE, obs=MASKED, entropy_lr=0.05)
    for _ in range(60):
        stats = policy.learn_on_batch(masked_rows([1, 1, 0]))
    assert stats["entropy"] <= math.log(2) + 1e-6
    assert stats["alpha"] < 3.0
    assert policy._mean_target_entropy(torch.tensor([[0.0, 0.0, -1e9]])) == pytest.approx(
        0.98 * math.log(2)
    )


def test_nan_in_next_observations_is_not_taken_for_a_mask():
    policy = make(actions=DISCRETE)
    batch = rows(actions=DISCRETE)
    batch["new_obs"] = np.full_like(batch["new_obs"], np.nan)
    with pytest.raises(FloatingPointError, match="not finite in it: new_obs"):
        policy.learn_on_batch(batch)


@pytest.mark.parametrize("kind", [SACTorchPolicy, TD3TorchPolicy])
def test_initial_log_std_has_no_parameter_to_set(kind):
    with pytest.raises(ConfigError, match="initial_log_std: the networks of"):
        make(kind, model={**SMALL, "initial_log_std": -1.0})


def test_noise_is_clipped_to_the_bounds_without_scaling():
    noise = {"type": "GaussianNoise", "scale": 5.0, "random_timesteps": 0}
    policy = make(TD3TorchPolicy, normalize_actions=False, exploration_config=noise)
    actions, _, _ = policy.compute_actions(np.zeros((50, 3), np.float32))
    assert abs(actions).max() == 1.0


@pytest.mark.parametrize("kind", [SACTorchPolicy, TD3TorchPolicy])
def test_further_columns_of_a_subclass_are_recorded(kind):
    class WithColumn(kind):
        def extra_action_out(self, input_dict, states, outputs):
            return {"my_column": outputs[:, 0]}

    _, _, extra = make(WithColumn).compute_actions(np.zeros((4, 3), np.float32))
    assert extra["my_column"].shape == (4,)


def test_kernels_of_actor_critics_are_used_only_for_shipped_distributions():
    class OtherDistribution(SquashedGaussian):
        pass

    class OtherSAC(SACTorchPolicy):
        def make_distribution(self):
            return OtherDistribution.for_space(self.action_space)

    class OtherSamples(SACTorchPolicy):
        def _sample_actions(self, outputs):
            actions, logp = super()._sample_actions(outputs)
            return 0.5 * actions, logp

    class OtherTD3(TD3TorchPolicy):
        def make_distribution(self):
            return super().make_distribution()

    for kind, is_used in (
        (SACTorchPolicy, True), (TD3TorchPolicy, True), (OtherSAC, False), (OtherSamples, False),
        (OtherTD3, False),
    ):  # fmt: skip
        assert (make(kind).learner.kernel is not None) == is_used


def test_sac_learns_with_a_temperature_that_underflows():
    policy = make()
    with torch.no_grad():
        policy.model.log_alpha.fill_(-200.0)
    assert policy.alpha == 0.0
    assert math.isfinite(policy.learn_on_batch(rows())["total_loss"])


class ReadsFourObservations(nn.Module):
    def __init__(self, obs_space, action_space, num_outputs):
        super().__init__()
        self.view_requirements = {"obs": ViewRequirement("obs", obs_space, shift="-3:0")}
        self.layer = nn.Linear(8, num_outputs)

    def forward(self, obs):
        return self.layer(obs.flatten(1))


@pytest.mark.parametrize("kind", [SACTorchPolicy, TD3TorchPolicy])
def test_view_of_several_observations_is_rejected(kind):
    settings = {"model": {"custom_model": ReadsFourObservations}, "q_model": {"custom_model": None}}
    with pytest.raises(ConfigError, match="a single observation, not several observations"):
        kind(BOX, BOX, settings)


def test_error_of_an_invalid_model_names_it():
    for model in (None, "fc"):
        with pytest.raises(ConfigError, match=r"(?<!q_)model"):
            SACConfig(model=model, q_model={"fcnet_hiddens": [64]})
