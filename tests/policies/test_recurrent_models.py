"""Recurrent models and attention: learning from sequences equals acting step by step."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.data import SampleBatch
from flowrl.data.sequences import pad_batch_to_sequences_of_same_size, with_burn_in
from flowrl.policies import ConfigError
from flowrl.policies.models.recurrent import packed_order
from flowrl.policies.torch_policy import TensorBatch
from flowrl.trainer.registry import algorithm_class, algorithm_names

from .fakes import BOX, model_for


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8))
@settings(max_examples=50)
def test_packed_order_sorts_sequences_by_length(lens):
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
@settings(max_examples=15)
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
    for padded in (pad_batch_to_sequences_of_same_size(batch, 6), batch.right_zero_pad(6)):
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


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
@settings(max_examples=30)
def test_padded_and_packed_sequences_give_equal_features_states_and_gradients(lens):
    tower = recurrent_model(lstm_cell_size=5).tower
    generator = torch.Generator().manual_seed(0)
    rows, batch_sizes, _ = packed_order(torch.tensor(lens))
    inputs = torch.randn(len(rows), 7, generator=generator)
    states = [torch.randn(len(lens), 5, generator=generator) for _ in range(2)]
    weights = torch.randn(len(rows), 5, generator=generator)
    found = []
    for run in (tower._run_packed, tower._run_padded):
        leaves = [part.clone().requires_grad_() for part in (inputs, *states)]
        features, last = run(leaves[0], batch_sizes, leaves[1:])
        # the states count, too: burn-in and custom losses may use them
        loss = (features * weights).sum() + sum((part**2).sum() for part in last)
        gradients = torch.autograd.grad(loss, [*leaves, *tower.rnn.parameters()])
        found.append([features, *last, *gradients])
    for packed, padded in zip(*found, strict=True):
        torch.testing.assert_close(packed, padded, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("cell_type", "lens", "pads"),
    [
        ("lstm", [20, 3], True),
        ("lstm", [9] + [1] * 63, True),  # 576 padded rows, 8 for each of 72
        ("lstm", [9] + [1] * 64, False),  # 585 padded rows for 73
        ("gru", [20, 3], False),  # torch computes no GRU by oneDNN
    ],
)
def test_sequences_of_an_lstm_are_padded_up_to_a_limit(cell_type, lens, pads, monkeypatch):
    tower = recurrent_model(lstm_cell_size=5, lstm_cell_type=cell_type).tower
    calls = []
    for name in ("_run_padded", "_run_packed"):
        run = getattr(tower, name)
        monkeypatch.setattr(tower, name, lambda *a, n=name, f=run: calls.append(n) or f(*a))
    states = [torch.zeros(len(lens), 5)] * tower.num_states
    tower(torch.zeros(sum(lens), 3), [], states, packed_order(torch.tensor(lens)))
    pads = pads and torch.backends.mkldnn.is_available()
    assert calls == ["_run_padded" if pads else "_run_packed"]


def test_cell_states_stay_float32_in_bfloat16():
    tower = recurrent_model(lstm_cell_size=5).tower
    order = packed_order(torch.tensor([40, 3]))
    inputs = torch.randn(43, 3, generator=torch.Generator().manual_seed(0))
    _, (_, expected) = tower(inputs, [], [torch.zeros(2, 5)] * 2, order)
    with torch.autocast("cpu", torch.bfloat16):
        _, (_, cells) = tower(inputs, [], [torch.zeros(2, 5)] * 2, order)
    assert cells.dtype == torch.float32
    torch.testing.assert_close(cells, expected, atol=0.05, rtol=0.05)


def test_recurrent_networks_of_users_are_not_padded():
    class OwnLSTM(torch.nn.LSTM):
        pass

    tower = recurrent_model(lstm_cell_size=5).tower
    tower.rnn = OwnLSTM(7, 5)
    assert not tower._pads(23, torch.tensor([2] * 3 + [1] * 17))


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


def test_batch_without_states_is_rejected():
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


@pytest.mark.parametrize("setting", ["use_lstm", "use_attention"])
@pytest.mark.parametrize("name", algorithm_names())
def test_algorithms_without_networks_with_memory_name_those_that_have_them(name, setting):
    algorithm = algorithm_class(name)
    config = algorithm.config_class(model={"use_lstm": False, "burn_in": 0, setting: True})
    box = spaces.Box(-1, 1, (2,), np.float32)
    actions = box if name in ("SAC", "TD3", "DDPG", "CQL") else spaces.Discrete(2)
    if name in ("PPO", "A2C", "A3C", "IMPALA", "APPO", "DDPPO"):
        assert algorithm.policy_class(box, actions, config).is_recurrent
        return
    if name == "R2D2":
        if setting == "use_lstm":
            assert algorithm.policy_class(box, actions, config).is_recurrent
        return
    with pytest.raises(ConfigError) as error:
        algorithm.policy_class(box, actions, config)
    message = str(error.value)
    assert message.startswith(f"model.{setting}: ")
    assert "supports only networks without memory; those with memory are for PPO, A2C," in message
    assert ("R2D2" in message) == (setting == "use_lstm")
