"""Models: the catalog, images, nested spaces, recurrence, attention, masks, custom models."""

import numpy as np
import optree
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.data import SampleBatch
from flowrl.data.sequences import pad_batch_to_sequences_of_same_size, with_burn_in
from flowrl.policies import ConfigError, ModelConfig, ModelV2, ViewRequirement, register_model
from flowrl.policies.models import make_model
from flowrl.policies.models.attention import AttentionNetwork
from flowrl.policies.models.base import device_of
from flowrl.policies.models.encoders import ImageEncoder
from flowrl.policies.models.fcnet import FullyConnectedNetwork
from flowrl.policies.models.flatten import flatten, flatten_numpy
from flowrl.policies.models.recurrent import RecurrentNetwork, packed_order
from flowrl.policies.models.torso import TorsoNetwork
from flowrl.policies.torch_policy import TensorBatch
from flowrl.sampling import RolloutWorker

from .fakes import BOX, TWO, PlainModule, RandomEnv

IMAGE = spaces.Box(0, 255, (84, 84, 4), np.uint8)
NESTED = spaces.Dict(
    eye=spaces.Box(0, 255, (10, 8, 3), np.uint8),
    rest=spaces.Tuple((spaces.Discrete(3, start=1), spaces.MultiBinary(2), BOX)),
    some=spaces.MultiDiscrete([2, 4]),
)


def model_for(obs_space, num_outputs=2, action_space=TWO, seed=0, **config):
    rng = np.random.default_rng(seed)
    return make_model(obs_space, action_space, num_outputs, ModelConfig(**config), rng=rng)


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
    """conv_activation, attention_position_wise_mlp_dim and attention_init_gru_gate_bias."""
    layers = {type(m) for m in model_for(IMAGE, conv_activation="elu").modules()}
    assert nn.ELU in layers and nn.ReLU not in layers
    wide = model_for(BOX, use_attention=True, attention_position_wise_mlp_dim=37)
    assert any(37 in p.shape for p in wide.parameters())

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
def test_unsupported_spaces_and_settings_are_refused(space, config, match):
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
def test_contradictory_settings_are_refused(config, match):
    with pytest.raises(ConfigError, match=match):
        ModelConfig(**config)


# -- recurrence ------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8))
@settings(max_examples=50, deadline=None)
def test_packed_order(lens):
    rows, batch_sizes, order = packed_order(torch.tensor(lens))
    starts = np.cumsum([0, *lens[:-1]])
    expected = []
    for step in range(max(lens)):
        sequences = [i for i in order.tolist() if lens[i] > step]
        assert batch_sizes[step] == len(sequences)
        expected += [starts[i] + step for i in sequences]
    assert rows.tolist() == expected
    assert [lens[i] for i in order.tolist()] == sorted(lens, reverse=True)


def recurrent_model(shared=True, **config):
    config = {"use_lstm": True, "fcnet_hiddens": [7], "vf_share_layers": shared, **config}
    return model_for(BOX, 3, spaces.Discrete(3), **config)


def sequence_batch(lens, cell_size=5, num_states=2, seed=0):
    rng = np.random.default_rng(seed)
    rows = sum(lens)
    columns = {
        "obs": rng.standard_normal((rows, 3)).astype(np.float32),
        "seq_lens": np.array(lens, np.int32),
        "prev_actions": rng.integers(0, 3, rows),
        "prev_rewards": rng.standard_normal(rows).astype(np.float32),
    }
    for i in range(num_states):
        columns[f"state_in_{i}"] = rng.standard_normal((len(lens), cell_size)).astype(np.float32)
    return SampleBatch(columns)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("cell_type", ["lstm", "gru"])
@given(lens=st.lists(st.integers(1, 5), min_size=1, max_size=5))
@settings(max_examples=15, deadline=None)
def test_learning_from_sequences_equals_acting_step_by_step(cell_type, shared, lens):
    model = recurrent_model(
        shared,
        lstm_cell_type=cell_type,
        lstm_cell_size=5,
        lstm_use_prev_action=True,
        lstm_use_prev_reward=True,
    )
    num_states = len(model.get_initial_state())
    assert num_states == (2 if cell_type == "lstm" else 1) * (1 if shared else 2)
    batch = sequence_batch(lens, num_states=num_states)
    outputs, last_states = model.from_batch(batch)
    values = model.value_function()
    start = 0
    for i, length in enumerate(lens):
        states = [batch[f"state_in_{k}"][i : i + 1] for k in range(num_states)]
        for row in range(start, start + length):
            inputs = {n: batch[n][row : row + 1] for n in ("obs", "prev_actions", "prev_rewards")}
            inputs |= {f"state_in_{k}": state for k, state in enumerate(states)}
            step_outputs, step_values, states = model.compute_outputs(inputs)
            np.testing.assert_allclose(step_outputs[0], outputs[row].detach(), atol=1e-5)
            np.testing.assert_allclose(step_values[0], values[row].detach(), atol=1e-5)
        for k in range(num_states):
            np.testing.assert_allclose(states[k][0], last_states[k][i].detach(), atol=1e-5)
        start += length


def test_gradient_is_the_same_with_padding_and_sequence_by_sequence():
    lens = [3, 1, 4, 2]
    batch = sequence_batch(lens)
    targets = np.random.default_rng(1).standard_normal(10).astype(np.float32)
    batch = batch.with_columns(targets=targets)
    model = recurrent_model(lstm_cell_size=5)

    def gradient(loss):
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        return torch.cat([part.reshape(-1) for part in gradients])

    def loss_of(rows):
        tensors = TensorBatch(rows)
        outputs, _ = model.from_batch(tensors)
        errors = outputs.sum(1) + model.value_function() - tensors["targets"]
        assert len(errors) == len(tensors["targets"])
        return (errors**2).sum() / 10

    expected = gradient(loss_of(batch))
    padded = pad_batch_to_sequences_of_same_size(batch, 6)
    assert len(padded["obs"]) == 24
    torch.testing.assert_close(gradient(loss_of(padded)), expected, atol=1e-6, rtol=0)
    losses = []
    start = 0
    for i, length in enumerate(lens):
        rows = {n: batch[n][start : start + length] for n in ("obs", "targets", "prev_rewards")}
        states = {n: batch[n][i : i + 1] for n in ("state_in_0", "state_in_1")}
        losses.append(loss_of(SampleBatch({**rows, **states, "seq_lens": np.array([length])})))
        start += length
    torch.testing.assert_close(gradient(sum(losses)), expected, atol=1e-6, rtol=0)


def test_burn_in_recomputes_states_without_gradient():
    model = recurrent_model(lstm_cell_size=5)
    rng = np.random.default_rng(0)
    rows = SampleBatch(
        obs=rng.standard_normal((9, 3)).astype(np.float32),
        eps_id=np.array([1] * 6 + [2] * 3),
        unroll_id=np.array([1] * 6 + [2] * 3),
        state_in_0=rng.standard_normal((9, 5)).astype(np.float32),
        state_in_1=rng.standard_normal((9, 5)).astype(np.float32),
    )
    batch = with_burn_in(rows, max_seq_len=4, burn_in=3)
    assert batch["seq_lens"].tolist() == [4, 5, 3]
    assert batch["loss_mask"].tolist() == [True] * 4 + [False] * 3 + [True] * 2 + [True] * 3
    np.testing.assert_array_equal(batch["state_in_0"], rows["state_in_0"][[0, 1, 6]])
    outputs, _ = model.from_batch(batch)
    assert outputs.shape == (9, 3)
    # the second sequence: burn-in rows 1 … 3 from the state of row 1, then rows 4 and 5
    part = SampleBatch(
        obs=rows["obs"][1:6],
        seq_lens=np.array([5]),
        state_in_0=rows["state_in_0"][1:2],
        state_in_1=rows["state_in_1"][1:2],
    )
    expected, _ = model.from_batch(part)
    torch.testing.assert_close(outputs[4:6], expected[3:])
    # the gradient of rows 4 and 5 equals the one from a constant state
    weight = model.tower.rnn.weight_hh_l0
    (grad,) = torch.autograd.grad(outputs[4:6].sum(), weight, retain_graph=True)
    before = SampleBatch(
        obs=rows["obs"][1:4],
        seq_lens=np.array([3]),
        state_in_0=rows["state_in_0"][1:2],
        state_in_1=rows["state_in_1"][1:2],
    )
    _, state = model.from_batch(before)
    last = SampleBatch(
        obs=rows["obs"][4:6],
        seq_lens=np.array([2]),
        state_in_0=state[0].detach().numpy(),
        state_in_1=state[1].detach().numpy(),
    )
    outputs, _ = model.from_batch(last)
    (expected,) = torch.autograd.grad(outputs.sum(), weight)
    torch.testing.assert_close(grad, expected)


def test_batch_without_states_is_refused():
    model = recurrent_model(lstm_cell_size=5)
    with pytest.raises(ConfigError, match="no column 'state_in_0'"):
        model.from_batch(SampleBatch(obs=np.zeros((2, 3), np.float32)))


@pytest.mark.parametrize(("units", "shared"), [(1, True), (2, True), (1, False)])
def test_attention_attends_to_the_same_rows_when_acting_and_learning(units, shared):
    memory, size = 4, 6
    model = model_for(
        BOX,
        3,
        spaces.Discrete(3),
        use_attention=True,
        vf_share_layers=shared,
        attention_num_transformer_units=units,
        attention_dim=size,
        attention_head_dim=5,
        attention_memory=memory,
        max_seq_len=3,
    )
    observations = np.random.default_rng(0).standard_normal((10, 3)).astype(np.float32)
    count = len(model.get_initial_state())
    history = [[np.zeros((1, size + 1), np.float32)] * memory for _ in range(count)]
    acting_outputs, windows = [], []
    for t in range(10):
        inputs = {f"state_in_{i}": np.stack(rows[-memory:], 1) for i, rows in enumerate(history)}
        windows.append(inputs)
        outputs, _, states = model.compute_outputs({"obs": observations[t : t + 1], **inputs})
        acting_outputs.append(outputs[0])
        for rows, state in zip(history, states, strict=True):
            rows.append(state)
    starts = [0, 3, 6, 9]
    columns = {n: np.concatenate([windows[t][n] for t in starts]) for n in windows[0]}
    batch = SampleBatch(obs=observations, seq_lens=np.array([3, 3, 3, 1]), **columns)
    learning_outputs, _ = model.from_batch(batch)
    np.testing.assert_allclose(learning_outputs.detach(), np.array(acting_outputs), atol=1e-5)
    # rows beyond the memory have no effect, rows within it have one
    if units == 1:
        changed = observations.copy()
        changed[4] += 1
        inputs = columns | {"obs": changed}
        outputs, _ = model.from_batch(SampleBatch(seq_lens=np.array([3, 3, 3, 1]), **inputs))
        differs = (outputs - learning_outputs).detach().abs().sum(1) > 1e-6
        assert differs.tolist() == [False] * 4 + [True] * 2 + [False] * 4


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
    outputs, _ = PPOTorchPolicy.like(w.policy).model.from_batch(batch)
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
    one, other = (PPOTorchPolicy(BOX, TWO, config) for _ in range(2))
    one.model.from_batch(SampleBatch(obs=sample_batch(BOX, 64) + 3))
    weights = one.get_weights()
    assert "module.norm.running_mean" in weights
    other.set_weights(weights)
    obs = sample_batch(BOX, 5)
    np.testing.assert_array_equal(
        one.model.compute_outputs({"obs": obs})[0], other.model.compute_outputs({"obs": obs})[0]
    )
