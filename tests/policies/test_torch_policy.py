"""TorchPolicy and its parts: networks, flat parameters, Adam, filters, schedules."""

import shutil

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from flowrl import PPO
from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.data import SampleBatch
from flowrl.policies import ConfigError, ModelConfig, PolicyConfig, TorchPolicy
from flowrl.policies.filters import ObservationFilter, RewardScaler, RunningMeanStd
from flowrl.policies.learning.flat_parameters import FlatAdam, FlatParameters
from flowrl.policies.models import FullyConnectedNetwork
from flowrl.policies.schedules import value_at
from flowrl.sampling import RolloutWorker

BOX = spaces.Box(-1, 1, (3,), np.float32)


class ValueRegression(TorchPolicy):
    """A minimal TorchPolicy: regresses values on rewards."""

    def loss(self, batch):
        inputs, _ = self.model.from_batch(batch)
        values = self.model.value_function()
        vf_loss = ((values - batch["rewards"]) ** 2).mean()
        self.stats["vf_loss"] = vf_loss
        return vf_loss + 0.0 * inputs.sum()


def make_policy(**config):
    return ValueRegression(
        BOX, spaces.Discrete(2), {"seed": 1, "model": {"fcnet_hiddens": [8]}, **config}
    )


def rows(n=32, seed=0):
    rng = np.random.default_rng(seed)
    return SampleBatch(
        obs=rng.standard_normal((n, 3)).astype(np.float32),
        rewards=rng.standard_normal(n).astype(np.float32),
    )


@pytest.mark.parametrize("activation", ["tanh", "relu", "silu"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("space", [BOX, spaces.Discrete(4, start=2), spaces.Box(0, 9, (2, 2))])
def test_numpy_forward_equals_torch(activation, shared, space):
    config = ModelConfig(fcnet_hiddens=[8, 6], fcnet_activation=activation, vf_share_layers=shared)
    rng = np.random.default_rng(0)
    net = FullyConnectedNetwork(
        space, spaces.Box(-1, 1, (2,)), 4, config, free_log_std=True, rng=rng
    )
    space.seed(0)
    observations = np.stack([space.sample() for _ in range(5)])
    outputs, _ = net({"obs": torch.from_numpy(observations)}, [], None)
    values = net.value_function()
    assert outputs.shape == (5, 4)
    assert net.uses_numpy == (activation != "silu")
    if net.uses_numpy:
        numpy_outputs, numpy_values = net.forward_numpy(observations)
        tolerance = {"rtol": 1e-5, "atol": 1e-6}  # sums of float32 in another order
        np.testing.assert_allclose(numpy_outputs, outputs.detach(), **tolerance)
        np.testing.assert_allclose(numpy_values, values.detach(), **tolerance)
        np.testing.assert_allclose(net.values_numpy(observations), numpy_values, **tolerance)


def test_initialization_is_orthogonal():
    rng = np.random.default_rng(0)
    net = FullyConnectedNetwork(BOX, spaces.Discrete(2), 2, ModelConfig(), rng=rng)
    weight = net.hidden[1].weight.detach().double()
    torch.testing.assert_close(weight @ weight.T, 2.0 * torch.eye(64).double(), atol=1e-5, rtol=0)
    assert abs(float(net.policy_head.weight.detach().norm(dim=1)[0]) - 0.01) < 1e-6
    assert float(net.policy_head.bias.detach().abs().sum()) == 0


def test_unsupported_observation_space_is_rejected():
    with pytest.raises(ValueError, match="no model for the space"):
        ValueRegression(spaces.Text(2), spaces.Discrete(2), {})


@pytest.mark.parametrize("eps", [1e-8, 1e-5])
def test_flat_adam_equals_torch_adam(eps):
    torch.manual_seed(0)
    layer, reference = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    reference.load_state_dict(layer.state_dict())
    flat = FlatParameters(layer)
    flat_adam = FlatAdam(flat, 1e-2, eps=eps)
    torch_adam = torch.optim.Adam(reference.parameters(), 1e-2, eps=eps)
    for _ in range(30):
        x = torch.randn(4, 5)
        flat.take_gradient((layer(x) ** 2).sum())
        flat_adam.step()
        torch_adam.zero_grad()
        (reference(x) ** 2).sum().backward()
        torch_adam.step()
    torch.testing.assert_close(layer.weight, reference.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("flushes", [False, True])
def test_moments_of_adam_decay_to_zero_and_other_arithmetic_keeps_denormals(flushes):
    """Steps with denormal moments are many times slower."""
    flat = FlatParameters(torch.nn.Linear(5, 3))
    adam = FlatAdam(flat, 1e-2)
    flat.gradient.fill_(1.0)
    torch.set_flush_denormal(flushes)  # by the program
    try:
        adam.step()
        flat.gradient.zero_()
        for _ in range(900):  # 0.9**900 is 7e-42
            adam.step()
        assert (np.float32(1e-40) * np.float32(1.0) == 0.0) == flushes
    finally:
        torch.set_flush_denormal(False)
    (slot,) = adam.state_dict()["state"].values()
    assert float(slot["exp_avg"].abs().max()) == 0.0


def test_views_of_gradients_can_be_restored_but_not_those_of_parameters():
    flat = make_policy().flat
    parameter = flat.parameters[0]
    view, parameter.grad = parameter.grad, None
    assert flat.restore_views()
    assert parameter.grad is view
    parameter.data = parameter.data.clone()
    assert not flat.restore_views()


def test_update_equals_plain_torch():
    policy, batch = make_policy(grad_clip=0.1, lr=0.01), rows()
    net = make_policy().model
    adam = torch.optim.Adam(net.parameters(), 0.01, eps=policy.config.adam_epsilon)
    for _ in range(5):
        policy.learn_on_batch(batch)
        adam.zero_grad()
        net.from_batch(batch)
        values = net.value_function()
        ((values - torch.from_numpy(batch["rewards"])) ** 2).mean().backward()
        for parameter in net.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        adam.step()
    parameters = zip(policy.get_weights().items(), net.parameters(), strict=True)
    for (name, weight), expected in parameters:
        np.testing.assert_allclose(weight, expected.detach(), rtol=1e-5, atol=1e-6, err_msg=name)


def test_compute_and_apply_gradients_equal_learn_on_batch():
    policy, other, batch = make_policy(), make_policy(), rows()
    before = policy.get_weights()
    gradient, stats = policy.compute_gradients(batch)
    np.testing.assert_array_equal(
        before["value_head.weight"], policy.get_weights()["value_head.weight"]
    )
    assert stats == other.learn_on_batch(batch)
    policy.apply_gradients(gradient)
    for name, weight in policy.get_weights().items():
        np.testing.assert_array_equal(weight, other.get_weights()[name])
    with pytest.raises(ValueError, match="shape"):
        policy.apply_gradients(gradient[:3])


def test_gradients_by_name_equal_those_of_compute_gradients():
    policy, other, batch = make_policy(), make_policy(), rows()
    policy.apply_gradients(policy.compute_gradients(batch)[0])
    named = dict(other.model.named_parameters())
    found = torch.autograd.grad(other.loss(other.tensors(batch)), list(named.values()))
    other.apply_gradients(dict(zip(named, found, strict=True)))
    assert other.version == policy.version == 1
    for name, weight in policy.get_weights().items():
        np.testing.assert_allclose(weight, other.get_weights()[name], rtol=1e-6, err_msg=name)
    before = other.get_weights()
    name = "value_head.weight"
    other = make_policy(lr=1e-2)
    other.set_weights(before)
    other.apply_gradients({name: np.ones(before[name].shape), "value_head.bias": None})
    changed = {n for n, weight in other.get_weights().items() if (weight != before[n]).any()}
    assert changed == {name}
    (weight,) = (p for n, p in other.model.named_parameters() if n == name)
    other.apply_gradients({name: (weight**2).detach() * weight, "value_head.bias": [0.0]})
    with pytest.raises(ValueError, match=r"gradients of \['no_such'\]"):
        other.apply_gradients({"no_such": np.ones(1)})
    with pytest.raises(ValueError, match=r"has the shape \(3,\)"):
        other.apply_gradients({name: np.ones(3)})


def test_nonfinite_loss_is_rejected_and_changes_nothing():
    policy, batch = make_policy(), rows()
    before = policy.get_weights()
    with pytest.raises(FloatingPointError, match="vf_loss"):
        policy.learn_on_batch(batch.with_columns(rewards=np.full(32, np.nan, np.float32)))
    for name, weight in policy.get_weights().items():
        np.testing.assert_array_equal(weight, before[name])


def test_minibatches_cover_the_batch_in_every_epoch():
    seen = []

    class Recorder(ValueRegression):
        def learn_on_batch(self, batch):
            seen.append(batch["obs"][:, 0])
            return super().learn_on_batch(batch)

    policy = Recorder(BOX, spaces.Discrete(2), {"seed": 1})
    policy.learn_on_minibatches(rows(10), num_sgd_iter=2, sgd_minibatch_size=4)
    assert [len(s) for s in seen] == [4, 4, 2, 4, 4, 2]
    for epoch in (seen[:3], seen[3:]):
        assert sorted(np.concatenate(epoch)) == sorted(rows(10)["obs"][:, 0])
    with pytest.raises(ValueError, match="sgd_minibatch_size=99"):
        policy.learn_on_minibatches(rows(10), sgd_minibatch_size=99)


def test_restored_policy_learns_and_acts_identically():
    original = make_policy(normalize_observations=True)
    original.observation_filter.new_stats.update(rows()["obs"])
    original.merge_filter_updates(original.take_filter_updates())
    original.learn_on_batch(rows())
    restored = make_policy(seed=9, normalize_observations=True)
    restored.set_state(original.get_state())
    for policy in (original, restored):
        policy.learn_on_minibatches(rows(seed=3), 2, 8)
    for name, weight in original.get_weights().items():
        np.testing.assert_array_equal(weight, restored.get_weights()[name])
    actions = [policy.compute_actions(rows()["obs"])[0] for policy in (original, restored)]
    np.testing.assert_array_equal(*actions)


def test_weights_of_another_network_are_rejected():
    policy = make_policy()
    other = make_policy(model={"fcnet_hiddens": [9]}).get_weights()
    with pytest.raises(ValueError, match=r"hidden.0.weight: has \(8, 3\), got \(9, 3\)"):
        policy.set_weights(other)
    with pytest.raises(ValueError, match="unknown"):
        policy.set_weights({**policy.get_weights(), "extra": np.zeros(1)})
    with pytest.raises(ValueError, match="weights must be a dict, as of get_weights"):
        policy.set_weights([np.zeros(1)])


def test_weights_that_are_not_finite_are_rejected():
    policy = make_policy()
    before, version = policy.get_weights(), policy.version
    broken = {name: weight.copy() for name, weight in before.items()}
    broken["hidden.0.weight"][0, 0] = np.nan
    with pytest.raises(ValueError, match=r"not finite numbers: \['hidden.0.weight'\]"):
        policy.set_weights(broken)
    for name, weight in policy.get_weights().items():
        np.testing.assert_array_equal(weight, before[name])
    assert policy.version == version


def test_learning_accepts_read_only_batches():
    batch = rows()
    for column in batch.values():
        column.setflags(write=False)
    make_policy().learn_on_batch(batch)


def test_actions_are_scaled_and_clipped_to_the_bounds():
    box = spaces.Box(np.array([-2.0, 0.0]), np.array([2.0, 10.0]), dtype=np.float32)
    policy = ValueRegression(BOX, box, {"seed": 1})
    actions = np.array([[-1.0, 1.0], [0.0, 0.0], [5.0, -5.0]], np.float32)
    assert policy.actions_for_env(actions).tolist() == [[-2, 10], [0, 5], [2, 0]]
    plain = ValueRegression(BOX, box, {"normalize_actions": False})
    assert plain.actions_for_env(actions).tolist() == [[-1, 1], [0, 0], [2, 0]]
    unclipped = ValueRegression(BOX, box, {"normalize_actions": False, "clip_actions": False})
    assert unclipped.actions_for_env(actions).tolist() == actions.tolist()


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(0, 1000))
def test_merged_statistics_equal_statistics_of_all_rows(sizes, seed):
    rng = np.random.default_rng(seed)
    parts = [rng.standard_normal((n, 2)) * 3 + 5 for n in sizes]
    merged = RunningMeanStd((2,))
    for part in parts:
        stats = RunningMeanStd((2,))
        stats.update(part)
        merged.merge(stats)
    all_rows = np.concatenate(parts)
    assert merged.count == len(all_rows)
    if len(all_rows) > 1:
        np.testing.assert_allclose(merged.mean, all_rows.mean(0))
        np.testing.assert_allclose(merged.std, all_rows.std(0))


def test_observation_filter_changes_only_between_fragments():
    normalize = ObservationFilter((2,))
    data = np.array([[1.0, 10.0], [3.0, 30.0]])
    normalize.new_stats.update(data)
    assert normalize(data)[0, 0] == 1.0
    normalize.merge_stats(normalize.take_new_stats())
    np.testing.assert_allclose(normalize(data), [[-1, -1], [1, 1]], atol=1e-5)
    assert normalize(np.array([[1e9, 0.0]]))[0, 0] == 10.0


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64, np.uint8])
def test_observation_filter_returns_float32(dtype):
    assert ObservationFilter((2,))(np.zeros((3, 2), dtype)).dtype == np.float32


def test_reward_scaler_divides_by_the_standard_deviation_of_returns():
    scaler, rewards = RewardScaler(0.5), np.array([[2.0], [4.0], [6.0]], np.float32)
    starts = np.array([[False], [False], [True]])
    sums = np.array([2.0, 5.0, 6.0])
    assert scaler.observe(rewards, None, starts) == 6.0
    np.testing.assert_allclose(scaler.scale(rewards)[:, 0], rewards[:, 0] / sums.std(), rtol=1e-5)


def test_learning_rate_follows_its_schedule():
    points = [(10, 1.0), (20, 0.0)]
    assert [value_at(points, t) for t in (0, 10, 15, 20, 99)] == [1, 1, 0.5, 0, 0]
    policy = make_policy(lr=[(0, 1e-2), (100, 0.0)])
    policy.on_global_var_update({"timestep": 50})
    assert policy.optimizer.param_groups[0]["lr"] == pytest.approx(5e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lrr": 1}, "unknown setting 'lrr'. Did you mean 'lr'"),
        ({"gamma": 2}, "gamma: .*less than or equal to 1.*got 2"),
        ({"lr": -1}, "lr: values must be from 0"),
        ({"lr": "fast"}, "lr: "),
        ({"lr": [(5, 1.0), (5, 0.0)]}, "rising steps, none below 0"),
        ({"lr": [(-1, 1.0), (5, 0.0)]}, "rising steps, none below 0"),
        ({"model": {"fcnet_hidden": [3]}}, "fcnet_hidden.*fcnet_hiddens"),
        ({"model": {"fcnet_activation": "tan"}}, "'tanh'"),
        ({"grad_clip": 0}, "grad_clip"),
        ({"seed": -1}, "seed"),
        ({"num_sgd_iter": 0}, "num_sgd_iter"),
    ],
)
def test_invalid_settings_are_rejected(settings, message):
    with pytest.raises(ConfigError, match=message):
        PolicyConfig(**settings)


def test_policy_config_is_a_mapping():
    config = PolicyConfig(gamma=0.5)
    assert config["gamma"] == 0.5
    assert dict(config.items())["gamma"] == 0.5
    assert "gamma" in config
    assert config.get("nope", 1) == 1
    with pytest.raises(KeyError, match="Did you mean 'gamma'"):
        config["gama"]
    with pytest.raises(ConfigError, match="gamma"):
        config.gamma = 7


# -- training settings -----------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["global_norm", "norm", "value"])
def test_gradients_are_clipped(by):
    policy, batch = make_policy(grad_clip=0.01, grad_clip_by=by), rows()
    gradient, _ = policy.compute_gradients(batch)
    grads = dict(zip(policy.flat.names, (p.grad for p in policy.flat.parameters), strict=True))
    before = {name: grad.clone() for name, grad in grads.items()}
    policy.learner.gradient.clip(float(np.linalg.norm(gradient)))
    for name, grad in grads.items():
        if by == "value":
            expected = before[name].clamp(-0.01, 0.01)
        else:
            norm = before[name].norm() if by == "norm" else np.linalg.norm(gradient)
            expected = before[name] * min(1.0, 0.01 / max(float(norm), 1e-12))
        torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-8)


def test_microbatch_gradients_equal_those_of_the_whole_batch():
    whole, parts, batch = make_policy(), make_policy(microbatch_size=5), rows()
    expected, expected_stats = whole.compute_gradients(batch)
    gradient, stats = parts.compute_gradients(batch)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)
    for name in ("vf_loss", "grad_norm"):
        assert stats[name] == pytest.approx(expected_stats[name], rel=1e-5)


def test_statistics_that_some_microbatches_report_are_means_over_those():
    class Reports(ValueRegression):
        reports = True

        def loss(self, batch):
            if self.reports:
                self.stats["only_sometimes"] = 5.0
            self.reports = False
            return super().loss(batch)

    policy = Reports(BOX, spaces.Discrete(2), {"seed": 0, "microbatch_size": 5})
    _, stats = policy.compute_gradients(rows())
    assert stats["only_sometimes"] == 5.0


def test_microbatch_gradients_of_sequences_equal_those_of_the_whole_batch():
    model = {"use_lstm": True, "fcnet_hiddens": [8], "lstm_cell_size": 4}
    batch = rows().with_columns(seq_lens=np.array([10, 3, 12, 7], np.int32))
    states = {
        f"state_in_{i}": np.random.default_rng(i).standard_normal((4, 4)).astype(np.float32)
        for i in range(4)
    }
    batch = batch.with_columns(**states)
    expected, _ = make_policy(model=model).compute_gradients(batch)
    gradient, _ = make_policy(model=model, microbatch_size=6).compute_gradients(batch)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)


def test_bfloat16_gradients_are_close_and_learn():
    exact, half, batch = make_policy(), make_policy(precision="bfloat16"), rows()
    expected, _ = exact.compute_gradients(batch)
    gradient, _ = half.compute_gradients(batch)
    assert gradient.dtype == np.float32
    assert 0 < np.abs(gradient - expected).max() < 0.02
    before = half.learn_on_batch(batch)["total_loss"]
    for _ in range(50):
        after = half.learn_on_batch(batch)["total_loss"]
    assert after < before


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_networks_learn_like_uncompiled_ones():
    config = {"rollout_fragment_length": 32, "seed": 0}
    worker = RolloutWorker("CartPole-v1", ValueRegression, config)
    batch, plain = worker.sample(), worker.policy
    compiled = ValueRegression(plain.observation_space, plain.action_space, {"compile": True})
    compiled.set_weights(plain.get_weights())
    for _ in range(3):
        expected, stats = plain.learn_on_batch(batch), compiled.learn_on_batch(batch)
    assert stats["total_loss"] == pytest.approx(expected["total_loss"], rel=1e-4)
    for name, weight in compiled.get_weights().items():
        np.testing.assert_allclose(weight, plain.get_weights()[name], atol=1e-5)
    actions, _, _ = compiled.compute_actions(batch["obs"], explore=False)
    np.testing.assert_array_equal(actions, plain.compute_actions(batch["obs"], explore=False)[0])


def test_nonfinite_updates_can_be_skipped():
    policy, batch = make_policy(on_nonfinite_update="skip"), rows()
    before = policy.get_weights()
    rewards = batch["rewards"].copy()
    rewards[3] = np.nan
    bad_rows = batch.with_columns(rewards=rewards)
    stats = policy.learn_on_minibatches(bad_rows, 1, 8)
    assert stats["num_skipped_updates"] == 1
    assert np.isfinite(stats["total_loss"])
    stats = policy.learn_on_minibatches(bad_rows, 2)
    assert stats == {"num_skipped_updates": 3.0, "cur_lr": 3e-4}
    assert policy.num_skipped_updates == 3
    assert any((before[n] != w).any() for n, w in policy.get_weights().items())
    with pytest.raises(FloatingPointError, match=r"not finite in it: rewards"):
        make_policy().learn_on_batch(bad_rows)


def test_unavailable_devices_are_rejected():
    assert make_policy().device.type in ("cpu", "cuda")
    with pytest.raises(ConfigError, match="'cuda:99' is not available"):
        make_policy(device="cuda:99")
    if not torch.xpu.is_available():
        message = r"'xpu' is not available: [^\n]{10,150}$"
        with pytest.raises(ConfigError, match=message):
            make_policy(device="xpu")
    for device in ("abacus", "mps"):
        with pytest.raises(ConfigError, match="device: must be auto, cpu, cuda"):
            make_policy(device=device)


def test_learning_rates_of_torch_optimizers_follow_the_schedule():
    class TwoParameterGroups(ValueRegression):
        def make_optimizer(self):
            parameters = list(self.model.parameters())
            return torch.optim.Adam(
                [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 7.0}], 1.0
            )

    policy = TwoParameterGroups(BOX, spaces.Discrete(2), {"lr": [(0, 1.0), (10, 0.5)]})
    policy.on_global_var_update({"timestep": 10})
    assert [group["lr"] for group in policy.optimizer.param_groups] == [0.5, 7.0]


@pytest.mark.parametrize("model", [{}, {"use_lstm": True}, {"use_attention": True}])
def test_first_actions_have_the_initial_standard_deviation(model):
    settings = {"train_batch_size": 64, "sgd_minibatch_size": 32, "seed": 1}
    with PPO("Pendulum-v1", model={**model, "initial_log_std": -2.0}, **settings) as algorithm:
        batch = algorithm.workers.local_worker().sample()
    np.testing.assert_array_equal(batch["action_dist_inputs"][:, 1], np.float32(-2.0))
    with pytest.raises(ConfigError, match="initial_log_std needs free_log_std=True"):
        PPO("Pendulum-v1", model={"free_log_std": False, "initial_log_std": -2.0})


@pytest.mark.parametrize("dtype", [np.float64, np.int64])
@pytest.mark.parametrize("base", [1e8 + 3, 1.7e9 + 50])
def test_large_observations_are_normalized_exactly(dtype, base):
    rng = np.random.default_rng(0)
    rows = (base + 100 * rng.normal(size=(1000, 1))).astype(dtype)
    observations = ObservationFilter((1,))
    observations.new_stats.update(rows)
    observations.merge_stats(observations.take_new_stats())
    normalized = observations(rows)
    exact = rows.astype(np.float64)
    expected = (exact - exact.mean()) / exact.std()
    assert normalized.dtype == np.float32
    np.testing.assert_allclose(normalized, expected, atol=2e-3)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}])
def test_restored_optimizers_of_torch_make_the_same_updates(options):
    class WithAdam(ValueRegression):
        def make_optimizer(self):
            return torch.optim.Adam(self.model.parameters(), lr=1e-2, **options)

    config = {"seed": 1, "model": {"fcnet_hiddens": [8]}}
    policy = WithAdam(BOX, spaces.Discrete(2), config)
    batch = SampleBatch(
        obs=np.random.default_rng(0).standard_normal((9, 3)).astype(np.float32),
        rewards=np.arange(9, dtype=np.float32),
    )
    for _ in range(3):
        policy.learn_on_batch(batch)
    restored = WithAdam(BOX, spaces.Discrete(2), config)
    restored.set_state(policy.get_state())
    for one in (policy, restored):
        one.learn_on_batch(batch)
    for name, weights in policy.get_weights().items():
        np.testing.assert_array_equal(restored.get_weights()[name], weights)


def test_complex_buffers_are_weights():
    class Filter(torch.nn.Module):
        def __init__(self, obs_space, action_space, num_outputs):
            super().__init__()
            self.linear = torch.nn.Linear(3, num_outputs)
            self.register_buffer("filt", torch.ones(4, dtype=torch.complex64))

        def forward(self, obs):
            return self.linear(obs), obs[:, 0]

    policy = PPOTorchPolicy(BOX, spaces.Discrete(2), {"model": {"custom_model": Filter}})
    policy.set_weights(policy.get_weights())
