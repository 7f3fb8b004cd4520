"""Models: the catalog, images, nested spaces, recurrence, attention, masks, custom models."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import optree
import pytest
import torch
from gymnasium import spaces
from torch import nn

from flowrl.algorithms.a2c import A2C, A2CTorchPolicy
from flowrl.algorithms.dqn import DQN
from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.data import SampleBatch
from flowrl.policies import ConfigError, ModelConfig, ModelV2, ViewRequirement, register_model
from flowrl.policies.distributions import Categorical
from flowrl.policies.models.attention import AttentionNetwork
from flowrl.policies.models.base import device_of
from flowrl.policies.models.encoders import ImageEncoder
from flowrl.policies.models.fcnet import FullyConnectedNetwork
from flowrl.policies.models.flatten import flatten, flatten_numpy
from flowrl.policies.models.recurrent import RecurrentNetwork
from flowrl.policies.models.tensor_batch import TensorBatch
from flowrl.policies.models.torso import TorsoNetwork
from flowrl.sampling import RolloutWorker

from .fakes import BOX, TWO, PlainModule, RandomEnv, model_for, rows

IMAGE = spaces.Box(0, 255, (84, 84, 4), np.uint8)
VECTORS = spaces.Dict(
    rest=spaces.Tuple((spaces.Discrete(3, start=1), spaces.MultiBinary(2), BOX)),
    some=spaces.MultiDiscrete([2, 4]),
)
NESTED = spaces.Dict(
    eye=spaces.Box(0, 255, (10, 8, 3), np.uint8),
    rest=spaces.Tuple((spaces.Discrete(3, start=1), spaces.MultiBinary(2), BOX)),
    some=spaces.MultiDiscrete([2, 4]),
)


def sample_batch(space, count, seed=0):
    """Samples of a space, stacked."""
    space.seed(seed)
    samples = [space.sample() for _ in range(count)]
    return optree.tree_map(lambda *leaves: np.array(leaves), *samples)


@pytest.mark.parametrize(
    ("space", "config", "model_class"),
    [
        (BOX, {}, FullyConnectedNetwork),
        (spaces.Discrete(4, start=3), {}, FullyConnectedNetwork),
        (spaces.MultiDiscrete([3, 2], start=[1, 0]), {}, FullyConnectedNetwork),
        (spaces.MultiBinary((2, 3)), {}, FullyConnectedNetwork),
        (spaces.Box(0, 1, (2, 3, 4), np.float64), {}, FullyConnectedNetwork),
        (IMAGE, {}, TorsoNetwork),
        (spaces.Box(0, 255, (3, 40, 50), np.uint8), {"conv_type": "resnet"}, TorsoNetwork),
        (spaces.Box(0, 255, (84, 84), np.uint8), {"num_framestacks": 4}, TorsoNetwork),
        (BOX, {"num_framestacks": 3}, FullyConnectedNetwork),
        (spaces.Discrete(3), {"num_framestacks": 3}, FullyConnectedNetwork),
        (spaces.MultiDiscrete([3, 2]), {"num_framestacks": 3}, FullyConnectedNetwork),
        (VECTORS, {}, FullyConnectedNetwork),
        (NESTED, {"vf_share_layers": False}, TorsoNetwork),
        (NESTED, {"use_lstm": True}, RecurrentNetwork),
        (BOX, {"use_attention": True}, AttentionNetwork),
    ],
)
def test_catalog_has_a_model_for_each_space(space, config, model_class):
    """`compute_outputs` agrees with `forward`, whether it uses numpy or torch."""
    model = model_for(space, 5, spaces.Discrete(5), **config)
    assert type(model) is model_class
    assert (device_of(model).type, model.has_value_function) == ("cpu", True)
    inputs = {"obs": sample_batch(space, 6)}
    frames = config.get("num_framestacks", 1)
    if frames > 1:
        inputs["obs"] = np.stack([sample_batch(space, 6, seed) for seed in range(frames)], 1)
        assert model.view_requirements["obs"].shift == f"-{frames - 1}:0"
    for i, state in enumerate(model.get_initial_state()):
        shape = (6, 50) if model_class is AttentionNetwork else (6,)
        inputs[f"state_in_{i}"] = np.broadcast_to(state, (*shape, *state.shape)).copy()
    outputs, values, states = model.compute_outputs(inputs)
    assert (outputs.shape, values.shape) == ((6, 5), (6,))
    expected, expected_states = model(*model.as_tensors(inputs), None)
    np.testing.assert_allclose(outputs, expected.detach(), atol=1e-5)
    np.testing.assert_allclose(values, model.value_function().detach(), atol=1e-5)
    np.testing.assert_allclose(values, model.compute_values(inputs), rtol=1e-5, atol=1e-6)
    for state, expected_state in zip(states, expected_states, strict=True):
        np.testing.assert_allclose(state, expected_state.detach(), atol=1e-5)


def test_initial_weights_follow_the_seed_and_leave_torchs_generator_alone():
    for config in ({}, {"use_lstm": True}, {"use_attention": True}):
        first, same, other = (model_for(BOX, seed=s, **config).state_dict() for s in (1, 1, 2))
        assert all(torch.equal(first[name], same[name]) for name in first)
        assert not all(torch.equal(first[name], other[name]) for name in first)
    before = torch.get_rng_state()
    model_for(NESTED)
    assert torch.equal(before, torch.get_rng_state())


def test_flatten_numpy_equals_flatten():
    for space in (
        spaces.Discrete(4, start=2),
        spaces.MultiDiscrete([3, 2], start=[1, 5]),
        spaces.MultiDiscrete([[3, 2], [2, 2]]),
    ):
        values = sample_batch(space, 9)
        features = flatten_numpy(space, values)
        assert features.dtype == np.float32
        np.testing.assert_array_equal(features, flatten(space, torch.from_numpy(values)))
        assert (features.sum(1) == np.size(values[0])).all()


def test_settings_of_convolutions_and_transformer_units():
    """conv_activation and attention_{num_heads,position_wise_mlp_dim,init_gru_gate_bias}."""
    layers = {type(m) for m in model_for(IMAGE, conv_activation="elu").modules()}
    assert nn.ELU in layers and nn.ReLU not in layers
    resnet = model_for(IMAGE, conv_type="resnet", conv_activation="elu")
    assert nn.ELU in {type(m) for m in resnet.modules()}  # of the layers after the convolutions
    wide = model_for(BOX, use_attention=True, attention_position_wise_mlp_dim=37)
    assert any(37 in p.shape for p in wide.parameters())

    def num_parameters(heads):
        model = model_for(BOX, use_attention=True, attention_num_heads=heads)
        return sum(p.numel() for p in model.parameters())

    assert num_parameters(3) - num_parameters(2) == num_parameters(2) - num_parameters(1) > 0

    def output_change(bias):
        """Largest change of the outputs if the memory changes."""
        model = model_for(BOX, use_attention=True, attention_init_gru_gate_bias=bias)
        inputs = {"obs": sample_batch(BOX, 6)}
        for i, state in enumerate(model.get_initial_state()):
            memory = np.random.default_rng(i).standard_normal((6, 50, *state.shape))
            memory[..., -1] = 1.0  # the row exists
            inputs[f"state_in_{i}"] = memory.astype(np.float32)
        outputs = model.compute_outputs(inputs)[0]
        changed = {k: v if k == "obs" else v[:, ::-1] ** 3 for k, v in inputs.items()}
        return np.abs(model.compute_outputs(changed)[0] - outputs).max()

    # with a high bias only the unit's input passes the gates (Parisotto et al. 2020)
    assert output_change(30.0) < 1e-6 < output_change(0.0)


def test_image_encoder_scales_uint8_and_detects_the_channel_axis():
    channels_last = ImageEncoder(IMAGE, ModelConfig())
    channels_first = ImageEncoder(spaces.Box(0, 255, (4, 84, 84), np.uint8), ModelConfig())
    channels_first.load_state_dict(channels_last.state_dict())
    images = torch.from_numpy(sample_batch(IMAGE, 2))
    features = channels_last(images)
    torch.testing.assert_close(features, channels_first(images.permute(0, 3, 1, 2)))
    # sizes in the Nature CNN (Mnih et al. 2015): 20 x 20, 9 x 9, 7 x 7
    assert channels_last.head[0].in_features == 64 * 7 * 7
    floats = ImageEncoder(spaces.Box(0, 1, (84, 84, 4), np.float32), ModelConfig())
    floats.load_state_dict(channels_last.state_dict())
    torch.testing.assert_close(features, floats(images.float() / 255))


@pytest.mark.parametrize(
    ("space", "config", "match"),
    [
        (spaces.Text(3), {}, "no model for the space"),
        (spaces.Dict(a=spaces.Text(3)), {}, "no model for the space"),
        (spaces.Box(0, 255, (8, 8, 3), np.uint8), {"conv_filters": [[8, 9, 1]]}, "conv_filters"),
        (BOX, {"conv_filters": [[8, 3, 1]]}, "needs images"),
        (BOX, {"conv_type": "resnet"}, "needs images"),
        (NESTED, {"num_framestacks": 2}, "does not support nested spaces"),
        (BOX, {"custom_model": "missing"}, "no model is registered as 'missing'"),
        (BOX, {"custom_model": "no.module:Model"}, "cannot be imported"),
        (BOX, {"custom_model": lambda *args: 5}, "must create a torch.nn.Module"),
        (spaces.Dict({"action_mask": spaces.MultiBinary(2)}), {}, "only an action_mask"),
        (
            spaces.Dict({"action_mask": spaces.MultiBinary(3), "obs": BOX}),
            {},
            r"needs a mask of shape \(2,\)",
        ),
    ],
)
def test_unsupported_spaces_and_settings_are_rejected(space, config, match):
    with pytest.raises(ConfigError, match=match):
        model_for(space, **config)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"use_lstm": True, "use_attention": True}, "one of them"),
        ({"lstm_use_prev_action": True}, "needs use_lstm"),
        ({"burn_in": 3}, "needs use_lstm"),
        ({"use_attention": True, "burn_in": 3}, "needs use_lstm"),
        ({"custom_model_config": {"a": 1}}, "needs a custom_model"),
        ({"fcnet_hidden": [3]}, "fcnet_hiddens"),
        ({"lstm_cell_type": "rnn"}, "lstm_cell_type"),
        ({"fcnet_hiddens": [0]}, "fcnet_hiddens"),
    ],
)
def test_contradictory_settings_are_rejected(config, match):
    with pytest.raises(ConfigError, match=match):
        ModelConfig(**config)


# -- masks -----------------------------------------------------------------------------------------

MASKED = spaces.Dict(action_mask=spaces.MultiBinary(3), at=BOX)


def test_masked_actions_are_never_drawn():
    policy = PPOTorchPolicy(MASKED, spaces.Discrete(3), {"seed": 0})
    mask = np.array([[1, 0, 1], [0, 1, 0], [1, 1, 1]] * 100, np.int8)
    obs = {"action_mask": mask, "at": sample_batch(BOX, 300)}
    actions, _, extra = policy.compute_actions(obs)
    assert mask[np.arange(300), actions].all()
    assert set(actions[2::3]) == {0, 1, 2}
    # a single allowed action has probability 1
    np.testing.assert_allclose(extra["action_logp"][1::3], 0, rtol=1e-5, atol=1e-6)
    batch = SampleBatch(obs=obs, actions=actions)
    tensors = policy.tensors(batch)
    inputs, _ = policy.model.from_batch(tensors)
    dist = policy.dist_class(inputs, policy.model)
    np.testing.assert_allclose(
        dist.logp(tensors["actions"]).detach(), extra["action_logp"], atol=1e-5
    )
    entropy = dist.entropy()
    assert torch.isfinite(entropy).all()
    np.testing.assert_allclose(entropy[1::3].detach(), 0, rtol=1e-5, atol=1e-6)
    assert torch.isfinite(dist.kl(dist)).all()
    gradient = torch.autograd.grad(entropy.sum(), policy.flat.parameters, allow_unused=True)
    assert all(torch.isfinite(g).all() for g in gradient if g is not None)
    np.testing.assert_allclose(
        policy.compute_log_likelihoods(actions, obs), extra["action_logp"], atol=1e-5
    )


def test_multi_discrete_masks_and_masks_without_any_action():
    space = spaces.Dict(action_mask=spaces.MultiBinary(5), at=BOX)
    policy = PPOTorchPolicy(space, spaces.MultiDiscrete([2, 3]), {"seed": 0})
    mask = np.array([[0, 1, 1, 0, 1]] * 50, np.int8)
    actions, _, _ = policy.compute_actions({"action_mask": mask, "at": sample_batch(BOX, 50)})
    assert set(actions[:, 0]) == {1}
    assert set(actions[:, 1]) == {0, 2}
    mask[3] = [1, 1, 0, 0, 0]
    with pytest.raises(ValueError, match="no action is allowed in observation 3"):
        policy.compute_actions({"action_mask": mask, "at": sample_batch(BOX, 50)})
    with pytest.raises(ConfigError, match="support masks, not"):
        PPOTorchPolicy(MASKED, BOX, {})


# -- custom models ---------------------------------------------------------------------------------


class PrevActionModel(ModelV2):
    """A model that also reads the previous action."""

    def __init__(self, *args, hidden=4):
        super().__init__(*args)
        self.view_requirements["prev_actions"] = ViewRequirement("actions", TWO, shift=-1)
        self.net = nn.Sequential(nn.Linear(4, hidden), nn.Tanh())
        self.out, self.value = nn.Linear(hidden, self.num_outputs), nn.Linear(hidden, 1)

    def forward(self, input_dict, state, seq_lens):
        prev_actions = input_dict["prev_actions"].float().unsqueeze(1)
        self.features = self.net(torch.cat([input_dict["obs_flat"], prev_actions], 1))
        return self.out(self.features), state

    def value_function(self):
        return self.value(self.features).squeeze(1)


class PrevRewardModule(PlainModule):
    """A module that also reads the previous reward."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.view_requirements = {"prev_rewards": ViewRequirement("rewards", shift=-1)}

    def forward(self, views):
        return super().forward(views["obs"] + views["prev_rewards"].unsqueeze(1))


@pytest.mark.parametrize(
    "custom_model",
    [
        PrevActionModel,
        PlainModule,
        PrevRewardModule,
        "registered",
        f"{__name__}:PrevActionModel",
    ],
)
def test_custom_models_learn(custom_model):
    register_model("registered", PrevActionModel)
    model = {"custom_model": custom_model, "custom_model_config": {"hidden": 6}}
    w = RolloutWorker(
        lambda context: RandomEnv(),
        PPOTorchPolicy,
        {"model": model, "seed": 0, "rollout_fragment_length": 40, "num_envs_per_worker": 2},
    )
    batch = w.sample()
    stats = w.policy.learn_on_batch(batch)
    assert np.isfinite(stats["total_loss"])
    # learning sees the same inputs as acting
    outputs, _ = PPOTorchPolicy(
        w.policy.observation_space, w.policy.action_space, w.policy.config
    ).model.from_batch(batch)
    np.testing.assert_allclose(outputs.detach(), batch["action_dist_inputs"], atol=1e-5)


def test_outputs_of_the_wrong_size_are_reported():
    class Wide(PlainModule):
        def __init__(self, obs_space, action_space, num_outputs):
            super().__init__(obs_space, action_space, num_outputs + 1)

    policy = PPOTorchPolicy(BOX, TWO, {"model": {"custom_model": Wide}})
    with pytest.raises(ConfigError, match=r"outputs of shape \[5, 3\] for 5 rows.*\[5, 2\]"):
        policy.compute_actions(sample_batch(BOX, 5))


def test_weights_include_batch_norm_statistics():
    class Normed(PlainModule):
        def __init__(self, *args):
            super().__init__(*args)
            self.norm = nn.BatchNorm1d(3)

        def forward(self, obs):
            return super().forward(self.norm(obs))

    config = {"model": {"custom_model": Normed}, "seed": 0}
    original, restored = (PPOTorchPolicy(BOX, TWO, config) for _ in range(2))
    original.model.from_batch(SampleBatch(obs=sample_batch(BOX, 64) + 3))
    weights = original.get_weights()
    assert "module.norm.running_mean" in weights
    restored.set_weights(weights)
    obs = sample_batch(BOX, 5)
    np.testing.assert_array_equal(
        original.model.compute_outputs({"obs": obs})[0],
        restored.model.compute_outputs({"obs": obs})[0],
    )


def test_actions_masked_with_infinity_have_finite_entropy_and_divergence():
    logits = torch.tensor([[-torch.inf, 1.0, 2.0]], requires_grad=True)
    first, second = Categorical(logits), Categorical(logits + 0.0)
    p = torch.softmax(torch.tensor([1.0, 2.0]), 0)
    assert first.entropy().item() == pytest.approx(float(-(p * p.log()).sum()))
    assert first.kl(second).item() == 0.0
    (first.entropy() + first.logp(torch.tensor([2]))).sum().backward()
    assert torch.isfinite(logits.grad[0, 1:]).all()


class Caching(torch.nn.Module):
    """Keeps a tensor of its first forward pass, which is one without gradients."""

    def __init__(self, obs_space, action_space, num_outputs):
        super().__init__()
        self.layer, self.scale = torch.nn.Linear(obs_space.shape[0], num_outputs + 1), None

    def forward(self, obs):
        if self.scale is None:
            self.scale = torch.ones(1)
        outputs = self.layer(obs) * self.scale
        return outputs[:, :-1], outputs[:, -1]


def test_network_may_keep_tensors_of_its_first_pass():
    with A2C("CartPole-v1", train_batch_size=8, model={"custom_model": Caching}) as algorithm:
        algorithm.train()


class InPlace(PlainModule):
    def forward(self, obs):
        obs *= 0
        return super().forward(obs)


def test_network_that_changes_its_inputs_does_not_change_what_is_recorded():
    config = {"model": {"custom_model": InPlace}, "rollout_fragment_length": 20, "seed": 1}
    batch = RolloutWorker(lambda context: RandomEnv(), PPOTorchPolicy, config).sample()
    assert batch["obs"].all()
    assert batch["new_obs"].all()
    observations = rows()["obs"]
    PPOTorchPolicy(BOX, TWO, config).compute_actions(observations)
    assert observations.all()


class Causal(PlainModule):
    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))


def test_buffers_may_be_infinite(tmp_path):
    model = {"custom_model": Causal}

    def env(context):
        return RandomEnv()

    with A2C(env, train_batch_size=8, model=model) as algorithm:
        algorithm.train()
        algorithm.save(tmp_path)
        weights = algorithm.get_policy().get_weights()
    with A2C.from_checkpoint(tmp_path, config={"model": model, "env": env}) as restored:
        np.testing.assert_array_equal(
            restored.get_policy().get_weights()["module.mask"], weights["module.mask"]
        )
        for name, value in (("module.out.bias", np.inf), ("module.mask", np.nan)):
            wrong = {**weights, name: np.full_like(weights[name], value)}
            with pytest.raises(ValueError, match=rf"not finite numbers: \['{name}'\]"):
                restored.get_policy().set_weights(wrong)
    with DQN(env, model=model, learning_starts=10, train_batch_size=8) as algorithm:
        algorithm.train()  # with a target network


class OwnNetwork(FullyConnectedNetwork):
    """A user's subclass, which the catalog creates without a generator."""


def test_subclass_of_a_shipped_network_follows_the_seed():
    first, second, other = (
        A2CTorchPolicy(
            BOX, TWO, {"model": {"custom_model": OwnNetwork}, "seed": seed}
        ).get_weights()
        for seed in (7, 7, 8)
    )
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert not all(np.array_equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("space", [TWO, spaces.Tuple((spaces.Box(-1, 1, (2,)),))])
def test_initial_log_std_without_a_parameter_is_rejected(space):
    with pytest.raises(ConfigError, match=r"initial_log_std: .*, but there are none for"):
        A2CTorchPolicy(BOX, space, {"model": {"initial_log_std": -1.0}})


@pytest.mark.parametrize("space", [spaces.Text(4), spaces.Sequence(spaces.Discrete(2))])
def test_spaces_without_arrays_are_rejected_also_for_custom_models(space):
    for model in ({}, {"custom_model": Caching}):
        with pytest.raises(ConfigError, match="no model for the space"):
            A2CTorchPolicy(space, TWO, {"model": model})


def test_threads_may_act_with_one_policy():
    space = spaces.Box(-1, 1, (64,), np.float32)
    policy = PPOTorchPolicy(space, TWO, {"model": {"fcnet_hiddens": [256, 256]}, "seed": 1})
    observations = np.random.default_rng(0).uniform(-1, 1, (2, 500, 64)).astype(np.float32)
    expected = [[policy.predict(row)[0] for row in rows] for rows in observations]
    with ThreadPoolExecutor(2) as threads:
        actual = threads.map(lambda rows: [policy.predict(row)[0] for row in rows], observations)
        assert list(actual) == expected


def test_batch_of_a_loss_iterates_over_all_columns():
    infos = np.array([{}, {"a": 1}], object)
    batch = TensorBatch(SampleBatch(obs=np.ones((2, 3)), rewards=np.zeros(2), infos=infos))
    assert sorted(name for name, _ in batch.items()) == ["obs", "rewards"]
    assert [tuple(column.shape) for column in batch.values()] == [(2, 3), (2,)]
    assert batch.copy().keys() == batch.keys() - {"infos"}
