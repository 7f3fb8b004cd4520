"""Networks, policies and optimizers that the user has changed: acting, learning and the exported
program do the same."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from flowrl.algorithms.a2c import A2CTorchPolicy
from flowrl.algorithms.dqn import DQNTorchPolicy
from flowrl.algorithms.marwil import MARWILTorchPolicy
from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.algorithms.sac import SACTorchPolicy
from flowrl.algorithms.td3 import TD3TorchPolicy
from flowrl.data import SampleBatch
from flowrl.envs import make_multi_agent
from flowrl.errors import ConfigError
from flowrl.policies import build_torch_policy
from flowrl.policies.exploration import Exploration
from flowrl.policies.models.actor_critic import ActorCritic
from flowrl.policies.models.base import ModelV2
from flowrl.policies.models.fcnet import FullyConnectedNetwork
from flowrl.policies.schedules import initial_value
from flowrl.sampling import RolloutWorker

OBS = spaces.Box(-1, 1, (3,), np.float32)
BOX = spaces.Box(-1, 1, (2,), np.float32)
THREE = spaces.Discrete(3)
SMALL = {"model": {"fcnet_hiddens": [8, 8]}, "seed": 0}


def observations(count=16):
    return np.random.default_rng(0).uniform(-1, 1, (count, 3)).astype(np.float32)


def rows(policy, count=16, **columns):
    """Return rows with the columns of all losses."""
    rng, obs = np.random.default_rng(1), observations(count)
    actions, _, extra = policy.compute_actions(obs)
    numbers = rng.standard_normal((3, count)).astype(np.float32)
    return SampleBatch(
        {
            **{name: value for name, value in extra.items() if name != "vf_preds"},
            "obs": obs,
            "new_obs": obs[::-1].copy(),
            "actions": actions,
            "rewards": numbers[0],
            "advantages": numbers[1],
            "value_targets": numbers[2],
            "terminateds": np.zeros(count, bool),
            **columns,
        }
    )


def gradients(policy_class, space, **columns):
    """Return the gradients of two equal policies, with and without kernels."""
    found = []
    for numpy_gradients in (True, False):
        policy = policy_class(OBS, space, {**SMALL, "numpy_gradients": numpy_gradients})
        found.append(policy.compute_gradients(rows(policy, **columns))[0])
    return found


def acting_network(policy):
    return policy.model.acting_network


def replace_layer(network):
    torch.manual_seed(0)
    network.hidden[0] = nn.Linear(3, 8)


def append_layer(network):
    torch.manual_seed(0)
    network.hidden.append(nn.Linear(8, 8))


def normalize_layer(network):
    torch.manual_seed(0)
    nn.utils.parametrizations.spectral_norm(network.hidden[1])


CHANGES = [replace_layer, append_layer, normalize_layer]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("base", [A2CTorchPolicy, DQNTorchPolicy, SACTorchPolicy])
def test_changed_layers_act_and_learn(base, change):
    class Changed(base):
        def make_model(self):
            model = super().make_model()
            change(model.acting_network)
            return model

    space = BOX if base is SACTorchPolicy else THREE
    policy = Changed(OBS, space, SMALL)
    network = acting_network(policy)
    outputs = network.compute_outputs({"obs": observations()})[0]
    with torch.no_grad():
        hidden = torch.from_numpy(observations())
        for layer in network.hidden:
            hidden = (
                torch.tanh(layer(hidden)) if base is not SACTorchPolicy else layer(hidden).relu()
            )
        expected = network.policy_head(hidden)
        if network.log_std is not None:
            expected = torch.cat([expected, network.log_std.expand_as(expected)], -1)
    np.testing.assert_allclose(outputs, expected.numpy(), rtol=1e-5, atol=1e-6)
    found = gradients(Changed, space)
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-6)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    policy.learn_on_batch(rows(policy))
    after = network.state_dict()
    learned = [name for name in after if not torch.equal(before[name], after[name])]
    assert sum(name.startswith("hidden.") for name in learned) >= 2


@pytest.mark.parametrize("layer", [nn.LayerNorm(8), nn.ReLU()])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_changed_torso_of_a_recurrent_network_acts_and_learns(layer, cell):
    class Changed(A2CTorchPolicy):
        def make_model(self):
            model = super().make_model()
            model.tower.torso.hidden[1] = layer
            return model

    model = {"fcnet_hiddens": [8], "use_lstm": True, "lstm_cell_type": cell, "lstm_cell_size": 4}
    policy = Changed(OBS, THREE, {"model": model, "seed": 0})
    assert not policy.model.uses_numpy
    inputs = {"obs": observations()}
    states = [np.zeros((16, 4), np.float32) for _ in policy.get_initial_state()]
    inputs |= {f"state_in_{i}": state for i, state in enumerate(states)}
    acted = policy.model.compute_outputs(inputs)[0]
    with torch.no_grad():
        tensors = [torch.from_numpy(state) for state in states]
        learned, _ = policy.model({"obs": torch.from_numpy(observations())}, tensors, None)
    np.testing.assert_allclose(acted, learned.numpy(), rtol=1e-5, atol=1e-7)


class Scaled(ActorCritic):
    def q_values(self, *args, **kwargs):
        return 100 * super().q_values(*args, **kwargs)


def test_network_of_the_user_may_call_the_methods_of_numpy():
    class Shifted(FullyConnectedNetwork):
        def compute_outputs(self, inputs):
            outputs, values = self.forward_numpy(inputs["obs"])
            return outputs + 1, values, []

    outputs = []
    for network in (FullyConnectedNetwork, Shifted):
        policy = A2CTorchPolicy(OBS, THREE, {**SMALL, "model": {"custom_model": network}})
        outputs.append(policy.compute_actions(observations())[2]["action_dist_inputs"])
    np.testing.assert_allclose(outputs[1], outputs[0] + 1, rtol=1e-6)


def test_loss_of_the_user_may_have_columns_of_other_shapes():
    class Objectives(DQNTorchPolicy):
        def loss(self, batch):
            return (self.model.from_batch(batch)[0].mean() - batch["rewards"].mean()) ** 2

    policy = Objectives(OBS, THREE, SMALL)
    policy.learn_on_batch(rows(policy, rewards=np.ones((16, 2), np.float32)))


@pytest.mark.parametrize("base", [SACTorchPolicy, TD3TorchPolicy])
def test_changed_q_values_are_learned(base):
    class Changed(base):
        def make_model(self):
            model = super().make_model()
            model.__class__ = Scaled
            return model

    assert base(OBS, BOX, SMALL).learner.kernel is not None
    policy, plain = Changed(OBS, BOX, SMALL), base(OBS, BOX, SMALL)
    assert policy.learner.kernel is None
    changed, unchanged = (p.learn_on_batch(rows(plain))["grad_norm"] for p in (policy, plain))
    assert changed > 10 * unchanged


def test_changed_temperature_is_learned():
    class Cold(SACTorchPolicy):
        alpha = 0.0

    assert Cold(OBS, BOX, SMALL).learner.kernel is None


class Doubled(FullyConnectedNetwork):
    def from_batch(self, batch):
        outputs, state = super().from_batch(batch)
        return 2 * outputs, state


class Negated(FullyConnectedNetwork):
    def compute_outputs(self, inputs):
        outputs, values, states = super().compute_outputs(inputs)
        return -outputs, values, states


def test_overridden_from_batch_is_learned():
    def loss(policy_class, model):
        class Squares(policy_class):
            def loss(self, batch):
                return self.model.from_batch(batch)[0].square().mean()

        policy = Squares(OBS, THREE, {**SMALL, "model": {"custom_model": model}})
        return policy.learn_on_batch(rows(policy))["total_loss"]

    assert A2CTorchPolicy(OBS, THREE, {"model": {"custom_model": Doubled}}).learner.kernel is None
    plain = loss(A2CTorchPolicy, FullyConnectedNetwork)
    assert loss(A2CTorchPolicy, Doubled) == pytest.approx(4 * plain, rel=1e-5)


def test_overridden_outputs_choose_the_actions_of_dqn():
    config = {**SMALL, "dueling": False}
    plain = DQNTorchPolicy(OBS, THREE, {**config, "model": {"custom_model": FullyConnectedNetwork}})
    policy = DQNTorchPolicy(OBS, THREE, {**config, "model": {"custom_model": Negated}})
    policy.set_weights(plain.get_weights())
    actions, _, _ = policy.compute_actions(observations(), explore=False)
    outputs = plain.model.compute_outputs({"obs": observations()})[0]
    np.testing.assert_array_equal(actions, outputs.argmin(1))


@pytest.mark.parametrize("base", [A2CTorchPolicy, PPOTorchPolicy, DQNTorchPolicy, SACTorchPolicy])
def test_hooks_are_called(base):
    space = BOX if base is SACTorchPolicy else THREE
    policy, calls = base(OBS, space, SMALL), []
    batch = rows(policy)
    handles = [
        module.register_forward_hook(lambda *_: calls.append(1))
        for module in (acting_network(policy), acting_network(policy).hidden[0])
    ]
    policy.compute_actions(observations())
    assert len(calls) >= 2
    calls.clear()
    policy.learn_on_batch(batch)
    assert len(calls) >= 2
    for handle in handles:
        handle.remove()
    calls.clear()
    policy.compute_actions(observations())
    policy.learn_on_batch(batch)
    assert not calls


def test_hook_of_a_parameter_changes_its_gradient():
    policy = A2CTorchPolicy(OBS, THREE, SMALL)
    weight = policy.model.hidden[0].weight
    before = weight.detach().clone()
    weight.register_hook(lambda gradient: 0 * gradient)
    policy.learn_on_batch(rows(policy))
    assert torch.equal(weight, before)


def test_replaced_forward_acts_and_learns():
    policy = A2CTorchPolicy(OBS, THREE, SMALL)
    batch = rows(policy)
    own, plain = policy.model.forward, policy.compute_gradients(batch)[0]

    def forward(*args):
        outputs, state = own(*args)
        return 3 * outputs, state

    before = policy.model.compute_outputs({"obs": observations()})[0]
    policy.model.forward = forward
    after = policy.model.compute_outputs({"obs": observations()})[0]
    np.testing.assert_allclose(after, 3 * before, rtol=1e-5)
    assert not np.array_equal(policy.compute_gradients(batch)[0], plain)


# -- optimizers ------------------------------------------------------------------------------------


def test_gradients_are_applied_after_zero_grad():
    class WithSGD(A2CTorchPolicy):
        def make_optimizer(self):
            return torch.optim.SGD(self.model.parameters(), lr=initial_value(self.config.lr))

    weights = []
    for clears in (False, True):
        policy = WithSGD(OBS, THREE, {**SMALL, "lr": 1.0, "grad_clip": 0.1})
        gradient, _ = policy.compute_gradients(rows(policy))
        if clears:
            policy.optimizer.zero_grad()
        policy.apply_gradients(gradient)
        weights.append(policy.flat.vector.detach().clone())
    assert torch.equal(*weights)


def test_hook_can_clip_the_parameters_of_the_default_optimizer():
    norms = []

    def loss(policy, model, dist_class, train_batch):
        outputs, _ = model.from_batch(train_batch)
        return outputs.square().mean()

    def clip(policy, optimizer, loss):
        for group in optimizer.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            norms.append(nn.utils.clip_grad_norm_(parameters, 1e-6))
        return {}

    policy_class = build_torch_policy("Clipped", loss_fn=loss, extra_grad_process_fn=clip)
    policy = policy_class(OBS, THREE, SMALL)
    policy.learn_on_batch(rows(A2CTorchPolicy(OBS, THREE, SMALL)))
    assert norms[0] > 1e-6
    assert policy.flat.gradient.norm() == pytest.approx(1e-6, rel=1e-3)
    policy.optimizer.zero_grad()
    assert policy.flat.gradient.norm() == 0


# -- samplers and exported programs ----------------------------------------------------------------


class ActsOnViews(A2CTorchPolicy):
    def compute_actions_from_input_dict(self, input_dict, explore=True):
        actions, states, extra = super().compute_actions_from_input_dict(input_dict, explore)
        return np.zeros_like(actions), states, extra

    def compute_values_from_input_dict(self, input_dict):
        return np.full(len(input_dict["obs"]), 7.0, np.float32)


@pytest.mark.parametrize("env", ["CartPole-v1", make_multi_agent("CartPole-v1")])
def test_samplers_act_with_an_overridden_method_of_views(env):
    worker = RolloutWorker(env, ActsOnViews, {"rollout_fragment_length": 8, **SMALL})
    for batch in worker.sample().policy_batches.values():
        assert not batch["actions"].any()


def test_exploration_of_the_user_is_not_exported(tmp_path):
    class Negates(Exploration):
        def act(self, inputs, policy, explore):
            return super().act(-inputs, policy, explore)

    class Changed(A2CTorchPolicy):
        def make_exploration(self):
            exploration = super().make_exploration()
            exploration.__class__ = Negates
            return exploration

    with pytest.raises(ConfigError, match=r"export: Negates overrides act\(\)"):
        Changed(OBS, THREE, SMALL).export(tmp_path / "policy.pt2")


# -- wrong batches ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy_class", "space", "column"),
    [
        (A2CTorchPolicy, THREE, "advantages"),
        (PPOTorchPolicy, THREE, "value_targets"),
        (DQNTorchPolicy, THREE, "rewards"),
        (DQNTorchPolicy, THREE, "weights"),
        (SACTorchPolicy, BOX, "rewards"),
        (TD3TorchPolicy, BOX, "terminateds"),
    ],
)
def test_columns_with_another_axis_are_rejected(policy_class, space, column):
    policy = policy_class(OBS, space, SMALL)
    batch = rows(policy)
    batch[column] = np.zeros((batch.count, 1), np.float32)
    for learn in (policy.learn_on_batch, policy.learn_on_minibatches, policy.compute_gradients):
        with pytest.raises(ValueError, match=rf"'{column}' has the shape \[16, 1\]"):
            learn(batch)


@pytest.mark.parametrize("numpy_gradients", [True, False])
@pytest.mark.parametrize("shape", [(16, 1), (16,), (16, 3)])
def test_actions_of_another_size_are_rejected(numpy_gradients, shape):
    policy = A2CTorchPolicy(OBS, BOX, {**SMALL, "numpy_gradients": numpy_gradients})
    batch = rows(policy, actions=np.zeros(shape, np.float32))
    with pytest.raises(ValueError, match=r"actions have size \d, expected 2"):
        policy.learn_on_batch(batch)


@pytest.mark.parametrize("action", [-1, 3])
def test_actions_outside_the_space_are_rejected_by_dqn(action):
    policy = DQNTorchPolicy(OBS, THREE, SMALL)
    batch = rows(policy, actions=np.full(16, action))
    with pytest.raises(IndexError, match=rf"actions: {action} is not in \[0, 3\)"):
        policy.learn_on_batch(batch)


def test_error_of_wrong_observations_names_the_column():
    policy = A2CTorchPolicy(OBS, THREE, SMALL)
    batch = rows(policy, obs=np.zeros((16, 2), np.float32))
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        policy.learn_on_batch(batch)
    assert "in the batch: obs" in "".join(caught.value.__notes__)


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [({"obs": 1}, TypeError, "learns from a SampleBatch, got a dict"),
     (SampleBatch(obs=np.zeros((0, 3), np.float32)), ValueError, "the batch has no rows")],
)  # fmt: skip
def test_other_batches_are_rejected(batch, error, message):
    with pytest.raises(error, match=message):
        A2CTorchPolicy(OBS, THREE, SMALL).learn_on_batch(batch)


class WideValues(ModelV2):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.layer = nn.Linear(3, self.num_outputs + 1)

    def forward(self, input_dict, state, seq_lens):
        outputs = self.layer(input_dict["obs"])
        self._values = outputs[:, -1:]
        return outputs[:, :-1], state

    def value_function(self):
        return self._values


def test_values_with_another_axis_are_rejected_by_marwil():
    policy = MARWILTorchPolicy(OBS, THREE, {"model": {"custom_model": WideValues}, "beta": 1.0})
    batch = rows(A2CTorchPolicy(OBS, THREE, SMALL))
    with pytest.raises(ConfigError, match=r"value_function must return values \[rows\]"):
        policy.learn_on_batch(batch)


def test_images_with_negative_strides_are_accepted():
    space = spaces.Box(0, 255, (36, 36, 3), np.uint8)
    policy = A2CTorchPolicy(space, THREE, {"seed": 0})
    image = np.random.default_rng(0).integers(0, 255, (1, 36, 36, 3), np.uint8)[..., ::-1]
    flipped = policy.compute_actions(image, explore=False)[2]["action_dist_inputs"]
    copied = policy.compute_actions(image.copy(), explore=False)[2]["action_dist_inputs"]
    np.testing.assert_array_equal(flipped, copied)


@pytest.mark.parametrize("config", ["lr", 3, [("lr", 1)]])
def test_configs_that_are_no_mappings_are_rejected(config):
    with pytest.raises(ConfigError, match="A2CTorchPolicy: the config is a mapping"):
        A2CTorchPolicy(OBS, THREE, config)


def test_config_may_be_none():
    assert A2CTorchPolicy(OBS, THREE, None).config == A2CTorchPolicy.config_class()


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [([-1.0, 2.0], [1.0, 2.0], -np.log(2.0)),
     ([-3e38, 0.0], [3e38, 1.0], -np.log(6e38))],
)  # fmt: skip
def test_random_actions_have_finite_probabilities(low, high, expected):
    space = spaces.Box(np.array(low, np.float32), np.array(high, np.float32))
    settings = {"exploration_config": {"type": "Random"}, "normalize_actions": False}
    policy = A2CTorchPolicy(OBS, space, {**SMALL, **settings})
    actions, _, extra = policy.compute_actions(observations())
    assert all(space.contains(action) for action in actions)
    np.testing.assert_allclose(extra["action_logp"], expected, rtol=1e-5)
