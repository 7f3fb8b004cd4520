"""Updates by CUDA graphs equal updates operation by operation, and those on the CPU.

The tests run with an emulated GPU and, marked `gpu`, on one (see test_cuda.py).
"""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete

from flowrl.algorithms.a2c import A2CTorchPolicy
from flowrl.algorithms.dqn import DQNTorchPolicy
from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.algorithms.sac import SACTorchPolicy
from flowrl.algorithms.td3 import TD3TorchPolicy
from flowrl.data import SampleBatch
from flowrl.policies.cuda_graphs import ColumnBuffer
from flowrl.policies.learning import captured_update

from .fake_device import FakeGraph

pytestmark = pytest.mark.usefixtures("cuda")

OBS, BOX, THREE = Box(-1, 1, (4,)), Box(-1, 1, (2,)), Discrete(3)
IMAGE = Box(0, 255, (10, 10, 2), np.uint8)
SMALL = {"fcnet_hiddens": [8, 8]}
CONV = {"conv_filters": [[4, 4, 2]], "post_fcnet_hiddens": [8]}
CASES = {
    "ppo": (PPOTorchPolicy, OBS, THREE, {"entropy_coeff": 0.01, "model": SMALL}),
    "ppo box": (PPOTorchPolicy, OBS, BOX, {"kl_coeff": 0.2, "vf_clip_param": 1.0, "model": SMALL}),
    "ppo images": (PPOTorchPolicy, IMAGE, THREE, {"model": CONV}),
    "ppo dict": (PPOTorchPolicy, Dict(a=OBS, b=OBS), THREE, {"model": SMALL}),
    "ppo integers": (PPOTorchPolicy, MultiDiscrete([3, 4], start=[1, 2]), THREE, {"model": SMALL}),
    "ppo clipped by parameter": (
        PPOTorchPolicy, OBS, THREE, {"grad_clip_by": "norm", "grad_clip": 0.01, "model": SMALL},
    ),
    "ppo clipped by value": (
        PPOTorchPolicy, OBS, THREE, {"grad_clip_by": "value", "grad_clip": 1e-3, "model": SMALL},
    ),
    "ppo bfloat16": (PPOTorchPolicy, OBS, THREE, {"precision": "bfloat16", "model": SMALL}),
    "a2c": (A2CTorchPolicy, OBS, THREE, {"entropy_coeff": 0.01, "model": SMALL}),
    "dqn": (DQNTorchPolicy, OBS, THREE, {"model": SMALL}),
    "dqn images": (DQNTorchPolicy, IMAGE, THREE, {"dueling": False, "model": CONV}),
    "categorical dqn": (DQNTorchPolicy, OBS, THREE, {"num_atoms": 5, "model": SMALL}),
    "sac": (SACTorchPolicy, OBS, BOX, {"model": SMALL}),
    "sac discrete": (SACTorchPolicy, OBS, THREE, {"model": SMALL}),
    "td3": (TD3TorchPolicy, OBS, BOX, {"model": SMALL}),
}  # fmt: skip


def make(case, **settings):
    policy_class, obs_space, action_space, config = CASES[case]
    return policy_class(obs_space, action_space, {"seed": 3, **config, **settings})


def rows(case, count=24, seed=0):
    """Return a train batch of the policy's columns."""
    policy_class, obs_space, action_space, _ = CASES[case]
    rng = np.random.default_rng(seed)

    def observations():
        def leaf(space):
            if space.dtype == np.uint8:
                return rng.integers(0, 256, (count, *space.shape), np.uint8)
            if isinstance(space, MultiDiscrete):
                return space.start + rng.integers(0, space.nvec, (count, 2))
            return rng.standard_normal((count, *space.shape)).astype(np.float32)

        if isinstance(obs_space, Dict):
            return {key: leaf(space) for key, space in obs_space.items()}
        return leaf(obs_space)

    def floats(*shape):
        return rng.standard_normal((count, *shape)).astype(np.float32)

    is_box = isinstance(action_space, Box)
    columns = {
        "obs": observations(),
        "actions": np.tanh(floats(2)) if is_box else rng.integers(0, 3, count),
    }
    if policy_class in (PPOTorchPolicy, A2CTorchPolicy):
        columns |= {"advantages": floats(), "value_targets": floats(), "vf_preds": floats()}
        columns |= {
            "action_logp": floats() / 10 - 1,
            "action_dist_inputs": floats(4 if is_box else 3),
        }
    else:
        columns |= {"new_obs": observations(), "rewards": floats()}
        columns |= {"terminateds": rng.random(count) < 0.3, "n_steps": rng.integers(1, 4, count)}
        columns |= {"weights": rng.uniform(0.2, 1, count).astype(np.float32)}
        columns |= {"batch_indexes": np.arange(count)}
    return SampleBatch(columns)


def assert_close(a, b, rtol=1e-3, atol=2e-5):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=rtol, atol=atol, err_msg=name)


def count_captures(monkeypatch):
    """Return a list that grows with each graph."""
    captured, make_graph = [], captured_update.CudaGraph

    def counting(stream, warm_up, function):
        captured.append(function)
        return make_graph(stream, warm_up, function)

    monkeypatch.setattr(captured_update, "CudaGraph", counting)
    return captured


@pytest.mark.parametrize(
    ("case", "size"), [*((case, 10) for case in CASES), ("ppo", 0), ("sac", 0), ("td3", 0)]
)
def test_updates_by_graphs_equal_those_of_the_cpu(case, size, monkeypatch):
    """Weights, statistics, values per row and random numbers, over several batches."""
    captured = count_captures(monkeypatch)
    policies = make(case, device="cuda"), make(case, device="cpu")
    for number in range(4):
        batch = rows(case, seed=number)
        stats = [policy.learn_on_minibatches(batch, 2, size) for policy in policies]
        loose = {"rtol": 0.05, "atol": 5e-3} if "bfloat16" in case else {}
        assert_close(*stats, **loose)
        assert_close(*(policy.row_stats for policy in policies), atol=1e-4)
        assert_close(*(policy.get_weights() for policy in policies), **loose)
        for policy in policies:
            getattr(policy, "update_target", lambda: None)()
    gpu, cpu = policies
    assert gpu.version == cpu.version
    assert gpu.learner.num_updates == cpu.learner.num_updates
    assert gpu.learner.rng.random() == cpu.learner.rng.random()
    assert gpu.shuffle_rng.random() == cpu.shuffle_rng.random()
    kinds = 2 if size == 10 else 1  # the last minibatch of 10 rows has 4
    kinds *= 2 if case == "td3" else 1
    assert len(captured) == kinds or (case == "ppo box" and len(captured) > kinds)  # kl_coeff


def test_graphs_can_be_disabled(monkeypatch):
    captured = count_captures(monkeypatch)
    with_graphs, without = (make("sac", device="cuda", cuda_graphs=on) for on in (True, False))
    for number in range(3):
        for policy in (with_graphs, without):
            policy.learn_on_minibatches(rows("sac", seed=number))
    assert len(captured) == 1
    assert_close(with_graphs.get_weights(), without.get_weights())


def test_numbers_of_the_loss_and_learning_rates_follow_their_schedules(monkeypatch):
    """Graphs with old numbers are not replayed; learning rates need no new graph."""
    captured = count_captures(monkeypatch)
    schedules = {"clip_param": [(0, 0.3), (100, 0.01)], "lr": [(0, 1e-2), (100, 1e-4)]}
    gpu, cpu = (make("ppo", **schedules, device=device) for device in ("cuda", "cpu"))
    for timestep in (0, 50, 100):
        for policy in (gpu, cpu):
            policy.on_global_var_update({"timestep": timestep})
            stats = policy.learn_on_minibatches(rows("ppo", seed=timestep), 2, 8)
            assert stats["cur_lr"] == pytest.approx(1e-2 + timestep / 100 * (1e-4 - 1e-2))
        assert_close(gpu.get_weights(), cpu.get_weights())
    assert len(captured) == 3
    for policy in (gpu, cpu):
        policy.on_global_var_update({"timestep": 200})  # only the learning rate has changed
        policy.learner.optimizers[0].param_groups[0]["lr"] = 1e-3
        policy.learn_on_minibatches(rows("ppo"), 1, 8)
    assert_close(gpu.get_weights(), cpu.get_weights())
    assert len(captured) == 3


@pytest.mark.parametrize("bad", [0, 2])
def test_an_update_that_is_not_finite_raises_and_changes_no_weights(bad):
    """The updates before it remain, the ones after it are not made."""
    gpu, cpu = (make("ppo", device=device) for device in ("cuda", "cpu"))
    for policy in (gpu, cpu):
        policy.learn_on_minibatches(rows("ppo"), 1, 8)
    order = np.random.default_rng()
    order.bit_generator.state = cpu.shuffle_rng.bit_generator.state
    batch = rows("ppo", seed=1)
    batch["advantages"][order.permutation(24)[8 * bad]] = np.nan
    for policy in (gpu, cpu):
        with pytest.raises(FloatingPointError, match=r"total_loss.*8 rows \(not finite in it: adv"):
            policy.learn_on_minibatches(batch, 1, 8)
    assert_close(gpu.get_weights(), cpu.get_weights())
    assert (gpu.version, gpu.learner.num_updates) == (cpu.version, cpu.learner.num_updates)
    for policy in (gpu, cpu):  # and learning can continue
        policy.learn_on_minibatches(rows("ppo", seed=2), 1, 8)
    assert_close(gpu.get_state()["learner"]["optimizers"][0]["0"],
                 cpu.get_state()["learner"]["optimizers"][0]["0"])  # fmt: skip


@pytest.mark.parametrize("size", [0, 8])
def test_skipped_updates_have_no_values_per_row(size):
    """They are no priorities of replay."""
    settings = {"on_nonfinite_update": "skip"}
    gpu, cpu = (make("dqn", device=device, **settings) for device in ("cuda", "cpu"))
    for number in range(3):
        batch = rows("dqn", seed=number)
        batch["rewards"][0] = np.nan
        for policy in (gpu, cpu):
            policy.learn_on_minibatches(batch, 1, size)
        assert_close(gpu.row_stats, cpu.row_stats, atol=1e-4)
        assert_close(gpu.get_weights(), cpu.get_weights())


def test_an_error_in_a_first_update_leaves_nothing_behind(monkeypatch):
    gpu, cpu = (make("sac", device=device) for device in ("cuda", "cpu"))
    with monkeypatch.context() as patched:
        patched.setattr(gpu.learner.gradient, "clip_on_device", lambda norm: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            gpu.learn_on_minibatches(rows("sac"))
    assert (gpu.version, gpu.learner.num_updates) == (cpu.version, cpu.learner.num_updates)
    cpu.learner.rng = np.random.default_rng()
    cpu.learner.rng.bit_generator.state = gpu.learner.rng.bit_generator.state
    for number in range(3):
        for policy in (gpu, cpu):
            policy.learn_on_minibatches(rows("sac", seed=number))
    assert_close(gpu.get_weights(), cpu.get_weights())


def test_an_update_that_is_not_finite_is_skipped():
    settings = {"on_nonfinite_update": "skip"}
    gpu, cpu = (make("ppo", device=device, **settings) for device in ("cuda", "cpu"))
    for number in range(3):
        batch = rows("ppo", seed=number)
        batch["advantages"][0] = np.inf
        stats = [policy.learn_on_minibatches(batch, 1, 8) for policy in (gpu, cpu)]
        assert_close(*stats)
        assert stats[0]["num_skipped_updates"] == number + 1
    assert_close(gpu.get_weights(), cpu.get_weights())


def test_batches_of_other_sizes_columns_and_dtypes():
    """The memory of the columns is renewed where it does not fit."""
    gpu, cpu = (make("dqn", device=device) for device in ("cuda", "cpu"))
    batches = [rows("dqn", count) for count in (8, 8, 5, 5, 12, 12, 8)]
    batches += [rows("dqn", 8).without_columns("weights")] * 2
    batches += [rows("dqn", 8).with_columns(rewards=np.linspace(0, 1, 8))] * 2  # float64
    for batch in batches:
        stats = [policy.learn_on_minibatches(batch) for policy in (gpu, cpu)]
        assert_close(*stats)
        assert_close(gpu.row_stats, cpu.row_stats)
        assert_close(gpu.get_weights(), cpu.get_weights())


def test_many_kinds_of_updates_keep_few_graphs(monkeypatch):
    monkeypatch.setattr(captured_update, "MAX_GRAPHS", 3)
    policy = make("a2c", device="cuda")
    for count in (*range(20, 10, -1), 20, 20):
        policy.learn_on_minibatches(rows("a2c", count))
    assert len(policy.learner.captured._updates) == 3


class OwnLoss(PPOTorchPolicy):
    def loss(self, batch):
        return super().loss(batch)


class OwnTarget(SACTorchPolicy):
    @property
    def target_entropy(self):
        return -self.timestep / 100


class OwnEpochs(PPOTorchPolicy):
    def end_epoch(self, batch, stats):
        batch["advantages"][:] *= 0.5
        return False


class OwnNetwork(PPOTorchPolicy):
    def make_model(self):
        return Net()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, obs):
        outputs = self.layer(obs)
        return outputs[:, :3], outputs[:, 3]


LSTM = {"use_lstm": True, "lstm_cell_size": 4, "vf_share_layers": True}


@pytest.mark.parametrize(
    ("policy_class", "config"),
    [
        (OwnLoss, {}),
        (OwnNetwork, {}),
        (OwnEpochs, {}),
        (OwnTarget, {}),
        (PPOTorchPolicy, {"model": LSTM}),
        (PPOTorchPolicy, {"microbatch_size": 4}),
        (DQNTorchPolicy, {"noisy": True}),
    ],
)
def test_updates_that_a_graph_cannot_repeat_are_not_captured(policy_class, config, monkeypatch):
    captured = count_captures(monkeypatch)
    policy = policy_class(OBS, THREE, {"seed": 0, "device": "cuda", **config})
    is_off_policy = policy_class in (DQNTorchPolicy, OwnTarget)
    batch = rows("dqn" if is_off_policy else "ppo")
    if policy.is_recurrent:
        batch = batch.with_columns(
            **{f"state_in_{i}": np.zeros((24, 4), np.float32) for i in range(2)}
        )
    for _ in range(3):
        policy.learn_on_minibatches(batch, 1, 8)
    assert policy.learner.num_updates == 9
    assert not captured


def test_an_update_that_fails_to_be_captured_continues_without_graphs(monkeypatch, caplog):
    def refuse(stream, warm_up, function):
        warm_up()
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(captured_update, "CudaGraph", refuse)
    gpu, cpu = (make("sac", device=device) for device in ("cuda", "cpu"))
    for number in range(4):
        for policy in (gpu, cpu):
            policy.learn_on_minibatches(rows("sac", seed=number))
    assert_close(gpu.get_weights(), cpu.get_weights())
    messages = [r.getMessage() for r in caplog.records if "CUDA graph" in r.getMessage()]
    assert len(messages) == 1
    assert "the update of SACTorchPolicy cannot be captured" in messages[0]


def test_column_buffer_keeps_dtypes_and_nests():
    batch = rows("ppo dict", 6).with_columns(flags=np.arange(6) % 2 == 0, big=np.arange(6))
    buffer = ColumnBuffer(batch, {"obs", "flags", "big", "actions"}, torch.device("cuda"))
    part = batch[:4]
    assert buffer.load(part)
    for name in ("flags", "big", "actions"):
        values = buffer.columns[name][:4].cpu().numpy()
        np.testing.assert_array_equal(values, part[name])
        assert values.dtype == part[name].dtype
    for key in ("a", "b"):
        np.testing.assert_array_equal(buffer.columns["obs"][key][:4].cpu(), part["obs"][key])
    longer = rows("ppo dict", 7).with_columns(flags=np.ones(7, bool), big=np.arange(7))
    floats = batch.with_columns(big=np.arange(6.0))
    for other in (longer, floats, batch.with_columns(big=np.ones((6, 1), int))):
        assert not buffer.load(other)
    np.testing.assert_array_equal(buffer.columns["big"][:4].cpu(), part["big"])


def test_the_emulated_graph_refuses_to_wait(cuda):
    if torch.cuda.is_available():
        pytest.skip("for the emulation")
    graph = FakeGraph(None, lambda: None, lambda: torch.ones(2, device="cuda").sum().item())
    with pytest.raises(RuntimeError, match="not permitted"):
        graph.replay()
