"""DQN: the loss against a reference implementation, acting, target networks, the plan."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from flowrl.algorithms.a2c import A2CTorchPolicy
from flowrl.algorithms.dqn import DQN, DQNConfig, DQNTorchPolicy
from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.algorithms.simple_q import SimpleQ, SimpleQConfig, SimpleQTorchPolicy
from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.iter import MetricsContext, metrics_scope
from flowrl.ops import (
    ApplyGradients,
    AverageGradients,
    ComputeGradients,
    UpdateTargetNetwork,
)
from flowrl.policies import ConfigError, PolicySpec, ViewRequirement
from flowrl.policies.exploration import Exploration
from flowrl.policies.models.base import ModelV2
from flowrl.policies.models.fcnet import FullyConnectedNetwork
from flowrl.policies.models.noisy import NoisyLinear
from flowrl.replay import ReplayBuffer
from flowrl.sampling import RolloutWorker, WorkerSet
from flowrl.trainer.plan_settings import plan_config

from ..sampling.fakes import CountEnv, Idle

BOX = spaces.Box(-1, 1, (3,), np.float32)
THREE = spaces.Discrete(3)
MASKED = spaces.Dict({"action_mask": spaces.MultiBinary(3), "at": BOX})


def rows(n=12, seed=0, space=BOX):
    rng = np.random.default_rng(seed)

    def observations():
        at = rng.uniform(-1, 1, (n, 3)).astype(np.float32)
        if space is BOX:
            return at
        mask = rng.integers(0, 2, (n, 3)).astype(np.int8)
        mask[:, 1] = 1
        return {"action_mask": mask, "at": at}

    return SampleBatch(
        obs=observations(),
        new_obs=observations(),
        actions=np.full(n, 1) if space is MASKED else rng.integers(0, 3, n),
        rewards=rng.standard_normal(n).astype(np.float32),
        terminateds=rng.random(n) < 0.3,
        truncateds=np.zeros(n, bool),
        n_steps=rng.integers(1, 4, n),
        weights=rng.random(n).astype(np.float32),
        batch_indexes=np.arange(n),
    )


def reference_values(model, at, mask, dueling):
    """Compute the Q-values of one observation in float64 from the weights of the layers."""
    network = getattr(model, "model", model)
    x = torch.as_tensor(at, dtype=torch.float64)
    for layer in network.hidden:
        x = torch.tanh(x @ layer.weight.double().T + layer.bias.double())
    head, value = network.policy_head, network.value_head
    advantages = x @ head.weight.double().T + head.bias.double()
    allowed = torch.as_tensor(mask, dtype=torch.bool)
    if not dueling:
        return advantages.masked_fill(~allowed, -1e9)
    v = float(x @ value.weight.double().T[:, 0] + value.bias.double()[0])
    mean = advantages[allowed].mean()
    return torch.where(allowed, v + advantages - mean, torch.tensor(-1e9, dtype=torch.float64))


@pytest.mark.parametrize("dueling", [True, False])
@pytest.mark.parametrize("double_q", [True, False])
@pytest.mark.parametrize("space", [BOX, MASKED], ids=["box", "masked"])
def test_loss_matches_the_papers(dueling, double_q, space):
    policy = DQNTorchPolicy(
        space, THREE, {"dueling": dueling, "double_q": double_q, "gamma": 0.9, "seed": 0}
    )
    with torch.no_grad():  # make the networks differ
        noise = torch.randn(policy._target.vector.shape, generator=torch.manual_seed(3))
        policy._target.vector.add_(0.3 * noise)
    batch = rows(space=space)
    loss = float(policy.loss(policy.tensors(batch)).detach())

    total, errors = 0.0, []
    with torch.no_grad():
        for row in batch.rows():
            masks, ats = [], []
            for name in ("obs", "new_obs"):
                nested = isinstance(row[name], dict)
                ats.append(row[name]["at"] if nested else row[name])
                masks.append(row[name]["action_mask"] if nested else np.ones(3))
            target = reference_values(policy.target_model, ats[1], masks[1], dueling)
            selector = policy.model if double_q else policy.target_model
            best = int(reference_values(selector, ats[1], masks[1], dueling).argmax())
            td_target = float(row["rewards"])
            if not row["terminateds"]:
                td_target += 0.9 ** int(row["n_steps"]) * float(target[best])
            q = reference_values(policy.model, ats[0], masks[0], dueling)[int(row["actions"])]
            error = float(q) - td_target
            errors.append(error)
            huber = 0.5 * error**2 if abs(error) < 1 else abs(error) - 0.5
            total += float(row["weights"]) * huber
    assert loss == pytest.approx(total / batch.count, rel=1e-5)
    policy.learn_on_minibatches(batch)
    np.testing.assert_allclose(policy.row_stats["td_error"], errors, atol=1e-5)
    assert policy.row_stats["batch_indexes"].tolist() == list(range(12))


def test_targets_bootstrap_at_truncations():
    policy = DQNTorchPolicy(BOX, THREE, {"gamma": 0.9, "seed": 0})
    batch = rows()
    expected = policy.td_targets(policy.tensors(batch)).numpy()
    cut = batch.with_columns(truncateds=~batch["terminateds"])
    np.testing.assert_array_equal(policy.td_targets(policy.tensors(cut)), expected)
    assert (expected != batch["rewards"]).any()


def test_flags_of_recorded_data_may_be_integers():
    policy = DQNTorchPolicy(BOX, THREE, {"seed": 0, "numpy_gradients": False})
    batch = rows()
    integers = batch.with_columns(terminateds=batch["terminateds"].astype(np.int64))
    targets = [policy.td_targets(policy.tensors(one)) for one in (batch, integers)]
    torch.testing.assert_close(*targets)


def _floats(stats):
    return {name: float(value) for name, value in stats.items()}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("dueling", [True, False])
def test_kernel_gradient_equals_autograd(dueling, activation, shared):
    """Check all layers, the Huber loss, weights and dueling means; the second batch checks that no
    state remains from the first."""
    policy = DQNTorchPolicy(
        BOX,
        THREE,
        {
            "dueling": dueling,
            "seed": 0,
            "model": {
                "fcnet_hiddens": [16, 8],
                "fcnet_activation": activation,
                "vf_share_layers": shared,
            },
        },
    )
    for seed, names in ((0, ()), (1, ("weights", "n_steps"))):
        batch = rows(seed=seed).without_columns(*names)
        batch["rewards"] *= 3  # errors on both sides of 1
        kernel_loss = policy.learner.kernel(policy.tensors(batch))
        gradient, stats = policy.flat.gradient.clone(), dict(policy.stats)
        loss = policy.loss(policy.tensors(batch))
        policy.flat.take_gradient(loss)
        assert kernel_loss == pytest.approx(loss.item(), rel=1e-6)
        assert stats == pytest.approx(_floats(policy.stats), rel=1e-5, abs=1e-6)
        assert float(gradient.abs().max()) > 0.01
        torch.testing.assert_close(gradient, policy.flat.gradient, rtol=1e-5, atol=1e-7)


def test_kernel_is_used_only_for_the_shipped_loss():
    class Doubled(DQNTorchPolicy):
        def loss(self, batch):
            return 2 * super().loss(batch)

    batch = rows()
    gradient, doubled = (
        kind(BOX, THREE, {"seed": 0}).compute_gradients(batch)[0]
        for kind in (DQNTorchPolicy, Doubled)
    )
    np.testing.assert_allclose(doubled, 2 * gradient, rtol=1e-5, atol=1e-7)
    image = spaces.Box(0, 255, (8, 8, 3), np.uint8)
    for space, more in (
        (MASKED, {}),
        (image, {}),
        (BOX, {"precision": "bfloat16"}),
        (BOX, {"numpy_gradients": False}),
    ):
        policy = DQNTorchPolicy(space, THREE, {"seed": 0, **more})
        assert policy.learner.kernel is None


def q_values(policy, obs):
    """Return the online network's values of all actions [B, n]."""
    with torch.no_grad():
        outputs, _ = policy.model.from_batch(SampleBatch(obs=obs), is_training=False)
        return policy.q_function.values(outputs, policy.model.value_function()).numpy()


def test_dueling_values_of_images():
    image = spaces.Box(0, 255, (8, 8, 3), np.uint8)
    policy = DQNTorchPolicy(image, THREE, {"seed": 0})
    rng = np.random.default_rng(0)
    observations = rng.integers(0, 255, (4, 8, 8, 3), np.uint8)
    values = q_values(policy, observations)
    with torch.no_grad():
        outputs, _ = policy.model({"obs": torch.from_numpy(observations)}, [], None)
        advantages = outputs - outputs.mean(1, keepdim=True)
        expected = policy.model.value_function().unsqueeze(1) + advantages
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)
    assert policy.compute_actions(observations, explore=False)[0].tolist() == (
        values.argmax(1).tolist()
    )


def test_acting_is_epsilon_greedy():
    config = {"exploration_config": {"type": "EpsilonGreedy", "epsilon": 0.3}, "seed": 0}
    policy = DQNTorchPolicy(MASKED, THREE, config)
    obs = rows(4000, space=MASKED)["obs"]
    best, states, extra = policy.compute_actions(obs, explore=False)
    allowed = obs["action_mask"] != 0
    values = np.where(allowed, q_values(policy, obs), -np.inf)
    np.testing.assert_array_equal(best, values.argmax(1))
    assert (states, extra) == ([], {})
    drawn, _, _ = policy.compute_actions(obs)
    assert allowed[np.arange(4000), drawn].all()
    # a random action is the best one with probability 1 / (number of allowed actions)
    expected = 1 - 0.3 * (1 - (1 / allowed.sum(1)).mean())
    assert (drawn == best).mean() == pytest.approx(expected, abs=0.025)


IMAGE = spaces.Box(0, 255, (10, 10, 1), np.uint8)


def image_policy(policy_class=DQNTorchPolicy, **settings):
    model = {"conv_filters": [[4, 4, 2]], "post_fcnet_hiddens": [8]}
    return policy_class(IMAGE, THREE, DQNConfig(model=model, seed=0, **settings))


@pytest.mark.parametrize(
    "exploration", [{"epsilon": 1.0}, {"epsilon": 0.3}, {"type": "Random"}, {"epsilon": 0.0}]
)
def test_actions_are_the_same_if_the_network_is_skipped(exploration):
    skipping, computing = (image_policy(exploration_config=exploration) for _ in range(2))
    assert skipping._skips_network
    computing._skips_network = False
    rng = np.random.default_rng(0)
    for count in (1, 1, 1, 1, 1, 40):
        observations = rng.integers(0, 256, (count, *IMAGE.shape), np.uint8)
        actions = [p.compute_actions(observations)[0] for p in (skipping, computing)]
        np.testing.assert_array_equal(*actions)
    states = [p.rng.bit_generator.state for p in (skipping, computing)]
    assert states[0] == states[1]


def test_random_actions_do_not_compute_the_network(monkeypatch):
    policy = image_policy(exploration_config={"epsilon": 1.0})
    observations = np.zeros((40, *IMAGE.shape), np.uint8)

    def fail(*args):
        raise RuntimeError("the network is computed")

    monkeypatch.setattr(policy.model, "compute_outputs", fail)
    assert set(policy.compute_actions(observations)[0].tolist()) == {0, 1, 2}
    with pytest.raises(RuntimeError, match="the network is computed"):
        policy.compute_actions(observations, explore=False)


@pytest.mark.parametrize(
    "wrong", [None, 3, np.zeros(IMAGE.shape, np.uint8), np.zeros((2, 9, 10, 1))]
)
def test_random_actions_need_valid_observations(wrong):
    policy = image_policy(exploration_config={"epsilon": 1.0})
    with pytest.raises(ConfigError, match="obs"):
        policy.compute_actions(wrong)


class ForbidsFirst(nn.Module):
    """A user's network that masks the first action."""

    def __init__(self, obs_space, action_space, num_outputs):
        super().__init__()
        self.layer = nn.Linear(100, num_outputs)

    def forward(self, obs):
        outputs = self.layer(obs.reshape(len(obs), -1).float())
        return outputs + torch.tensor([-1e9, 0.0, 0.0])


class ForbidsFirstScore(DQNTorchPolicy):
    """A user's policy that masks the first action."""

    def _greedy_scores(self, input_dict):
        scores, states = super()._greedy_scores(input_dict)
        return scores + np.array([-1e9, 0, 0], np.float32), states


def test_random_actions_are_never_masked_ones():
    settings = {"exploration_config": {"epsilon": 1.0}, "dueling": False}
    images = np.zeros((60, *IMAGE.shape), np.uint8)
    config = DQNConfig(model={"custom_model": ForbidsFirst}, seed=0, **settings)
    mask = np.tile(np.array([0, 1, 1], np.int8), (60, 1))
    cases = [
        (DQNTorchPolicy(IMAGE, THREE, config), images),
        (image_policy(ForbidsFirstScore, **settings), images),
        (
            DQNTorchPolicy(MASKED, THREE, DQNConfig(seed=0, **settings)),
            {"action_mask": mask, "at": np.zeros((60, 3), np.float32)},
        ),
    ]
    for policy, observations in cases:
        assert set(policy.compute_actions(observations)[0].tolist()) == {1, 2}


def test_target_network_updates_are_soft_or_hard():
    policy = DQNTorchPolicy(BOX, THREE, {"tau": 0.25, "seed": 0})
    start = policy._target.vector.clone()
    np.testing.assert_array_equal(start.detach(), policy.flat.vector.detach())
    policy.learn_on_minibatches(rows())
    np.testing.assert_array_equal(policy._target.vector.detach(), start.detach())
    policy.update_target()
    expected = 0.75 * start + 0.25 * policy.flat.vector
    torch.testing.assert_close(policy._target.vector, expected)
    policy.update_target(1.0)
    torch.testing.assert_close(policy._target.vector, policy.flat.vector)


def test_restored_policy_learns_identically():
    policy, other = (DQNTorchPolicy(BOX, THREE, {"tau": 0.5, "seed": s}) for s in (0, 1))
    policy.learn_on_minibatches(rows())
    policy.update_target()
    other.set_state(policy.get_state())
    for seed in (1, 2):
        stats = [trained.learn_on_minibatches(rows(seed=seed)) for trained in (policy, other)]
        assert stats[0] == stats[1]
        policy.update_target()
        other.update_target()
    with pytest.raises(ValueError, match='has no "target"'):
        policy.set_state({k: v for k, v in other.get_state().items() if k != "target"})
    with pytest.raises(ValueError, match="has parameters of other names"):
        policy.set_state({**other.get_state(), "target": {"x": np.zeros(3, np.float32)}})


def test_state_of_a_dueling_network_does_not_fit_a_plain_one():
    dueling, plain = (DQNTorchPolicy(BOX, THREE, {"dueling": d, "seed": 0}) for d in (True, False))
    with pytest.raises(ValueError, match="dueling=True for a policy with dueling=False"):
        plain.set_state(dueling.get_state())


def test_state_of_another_algorithm_is_rejected():
    state = PPOTorchPolicy(BOX, THREE, {"seed": 0}).get_state()
    with pytest.raises(ValueError, match="belongs to a policy without a target network"):
        DQNTorchPolicy(BOX, THREE, {"seed": 0}).set_state(state)
    state["target"] = {}
    with pytest.raises(ValueError, match="the state of a DQNTorchPolicy/dueling: field required"):
        DQNTorchPolicy(BOX, THREE, {"seed": 0}).set_state(state)


@pytest.mark.parametrize("numpy_gradients", [True, False])
@pytest.mark.parametrize("num_atoms", [1, 11])
@pytest.mark.parametrize("dtype", [np.int16, np.uint8, np.bool_])
def test_actions_of_small_dtypes_are_numbers_of_actions(dtype, num_atoms, numpy_gradients):
    atoms = {"num_atoms": num_atoms, "v_min": 0.0, "v_max": 10.0} if num_atoms > 1 else {}
    settings = {"seed": 0, "numpy_gradients": numpy_gradients, **atoms}
    batch = rows()
    batch["actions"] = batch["actions"] % 2
    gradients = []
    for actions in (batch["actions"], batch["actions"].astype(dtype)):
        policy = DQNTorchPolicy(BOX, THREE, settings)
        gradients.append(policy.compute_gradients(batch.with_columns(actions=actions))[0])
    np.testing.assert_array_equal(*gradients)


def test_td_errors_are_those_of_the_last_pass():
    policy, other = (DQNTorchPolicy(BOX, THREE, {"seed": 0, "lr": 0.01}) for _ in range(2))
    policy.learn_on_minibatches(rows(), 3, 12)
    for _ in range(3):
        other.learn_on_minibatches(rows(), 1, 12)
    assert policy.row_stats.keys() == other.row_stats.keys()
    for name, values in policy.row_stats.items():
        np.testing.assert_array_equal(values, other.row_stats[name])


def test_skipped_update_reports_no_td_errors():
    policy = DQNTorchPolicy(BOX, THREE, {"on_nonfinite_update": "skip", "seed": 0})
    batch = rows()
    policy.learn_on_minibatches(batch)
    assert len(policy.row_stats["td_error"]) == 12
    rewards = batch["rewards"].copy()
    rewards[2] = np.nan
    policy.learn_on_minibatches(batch.with_columns(rewards=rewards))
    assert policy.row_stats == {}


def test_td_errors_are_reported_by_all_ways_of_learning():
    policy = DQNTorchPolicy(BOX, THREE, {"microbatch_size": 5, "seed": 0})
    batch = rows()
    policy.compute_gradients(batch)
    assert policy.row_stats["batch_indexes"].tolist() == list(range(12))
    for _ in range(3):
        policy.learn_on_batch(batch)  # reports only this batch
        assert policy.row_stats["batch_indexes"].tolist() == list(range(12))
        policy.learn_on_minibatches(batch, 2, 6)
    assert sorted(policy.row_stats["batch_indexes"]) == [*range(12)]  # of the last pass
    with WorkerSet("CartPole-v1", DQNTorchPolicy, DQNConfig(env="CartPole-v1", seed=0)) as workers:
        drawn = workers.local_worker().sample().with_columns(batch_indexes=np.arange(4))
        with metrics_scope(MetricsContext()):
            gradients = ComputeGradients(workers)(drawn)
            _, info = ApplyGradients(workers)(AverageGradients()([gradients, gradients]))
            with pytest.raises(ValueError, match="name no workers"):
                ApplyGradients(workers, update_all=False)(replace(gradients, sources=()))
    assert info["default_policy"]["row_stats"]["batch_indexes"].tolist() == [0, 1, 2, 3] * 2


def test_target_updates_count_the_steps_of_each_policy():
    updates = []

    class RecordsUpdates(Idle):
        def update_target(self):
            updates.append(self.name)

    mapping = {"policy_mapping_fn": lambda agent_id, *args, **kwargs: "a"}
    workers = WorkerSet(
        lambda context: CountEnv(), {"a": RecordsUpdates, "b": RecordsUpdates}, mapping
    )
    for name, policy in workers.local_worker().policy_map.items():
        policy.name = name
    operator = UpdateTargetNetwork(workers, 10, by_steps_trained=True)
    with metrics_scope(MetricsContext()) as metrics:
        for i in range(20):
            info = {"ab"[i % 2]: {"num_agent_steps_trained": 5}}
            operator((None, info))
        assert sorted(updates) == ["a"] * 5 + ["b"] * 5
        assert metrics.counters["num_target_updates"] == 10
        update_b = UpdateTargetNetwork(workers, 0, policies=["b"])
        update_b((None, {}))
        workers.local_worker().policy_map["b"] = Idle(BOX, THREE, {})
        with pytest.raises(TypeError, match="policy 'b', a Idle, has no target network"):
            update_b((None, {}))
    other = UpdateTargetNetwork(workers, 10, by_steps_trained=True)
    other.load_state_dict(operator.state_dict())
    assert other.state_dict() == operator.state_dict()
    with pytest.raises(TypeError, match=r"takes \(batch, info\), got int"):
        operator(5)
    with pytest.raises(ValueError, match="at least 0"):
        UpdateTargetNetwork(workers, -1)
    workers.stop()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"replay_buffer_capacity": 20}, "replay_buffer_capacity=20 is less than"),
        ({"learning_starts": 60_000}, "learning_starts=60000: increase the capacity"),
        ({"prioritized_replay": False, "prioritized_replay_alpha": 0.5}, "needs prioritized_rep"),
        ({"training_intensity": 0}, "training_intensity"),
        ({"n_step": 0}, "n_step"),
        ({"tau": 1.5}, "tau"),
    ],
)
def test_invalid_settings_are_rejected(settings, match):
    with pytest.raises(ConfigError, match=match):
        DQNConfig(**settings)


class ReadsReward(torch.nn.Linear):
    def __init__(self, obs_space, action_space, num_outputs):
        super().__init__(1, num_outputs)
        self.view_requirements = {"prev_rewards": ViewRequirement("rewards", shift=-1)}


def test_unsupported_actions_and_views_are_rejected():
    with pytest.raises(ConfigError, match="DQN is for Discrete actions"):
        DQNTorchPolicy(BOX, BOX, {})
    with pytest.raises(ConfigError, match=r"DQN read only the view `obs`, not \['prev_rewards'\]"):
        DQNTorchPolicy(BOX, THREE, {"model": {"custom_model": ReadsReward}})


def tiny(**settings):
    defaults = {"learning_starts": 32, "min_sample_timesteps_per_iteration": 64, "seed": 0}
    return plan_config("dqn").updated(**defaults, **settings)


@pytest.mark.parametrize("prioritized", [False, True])
def test_run_resumes_from_its_checkpoint(prioritized, tmp_path):
    config = tiny(prioritized_replay=prioritized)
    with config.build() as algo:
        algo.train()
        algo.save(tmp_path / "c")
        with config.build() as other:
            other.restore(tmp_path / "c")
            first, second = algo.train(), other.train()
            for name in ("num_env_steps_sampled", "num_env_steps_trained", "learners"):
                assert first[name] == second[name]
            weights = [algorithm.get_policy().get_weights() for algorithm in (algo, other)]
    for name, array in weights[0].items():
        np.testing.assert_array_equal(array, weights[1][name])


def test_seeded_runs_repeat():
    def weights():
        with tiny(prioritized_replay=True).build() as algo:
            algo.train()
            return algo.get_policy().get_weights()

    first, second = weights(), weights()
    assert all((first[name] == second[name]).all() for name in first)


def test_simple_q_is_dqn_without_extensions():
    config = SimpleQConfig(env="CartPole-v1", seed=0, learning_starts=32)
    config.reporting(min_sample_timesteps_per_iteration=64)
    assert (config.double_q, config.dueling, config.prioritized_replay) == (False,) * 3
    with config.build() as algo:
        assert isinstance(algo, SimpleQ)
        assert algo.train()["learners"]["default_policy"]["total_loss"] > 0
        assert type(algo.get_policy()) is SimpleQTorchPolicy


def test_replay_settings_reach_the_buffers():
    config = DQNConfig(
        replay_buffer_capacity=101,
        learning_starts=40,
        training_intensity=3,
        train_batch_size=7,
        n_step=4,
        gamma=0.9,
        prioritized_replay_alpha=0.3,
        prioritized_replay_beta=[(0, 0.2), (10, 0.8)],
        prioritized_replay_eps=0.5,
        num_replay_shards=3,
        seed=0,
    )
    buffer = config.new_buffer()
    assert (buffer.capacity, buffer.n_step, buffer.gamma) == (101, 4, 0.9)
    assert (buffer.alpha, buffer.beta, buffer.eps) == (0.3, 0.2, 0.5)
    shard = config.new_buffer(num_shards=5)  # it stores a fifth of the rows
    obs = np.zeros((1, 2))
    batch = SampleBatch(obs=obs, new_obs=obs, actions=[0], rewards=[0.0], terminateds=[True])
    shard.add(batch.with_columns(eps_id=np.array([0]), t=np.array([0])))
    assert shard.beta == pytest.approx(0.5)
    with pytest.raises(
        ConfigError, match="num_replay_shards is for plans whose buffer is on actor"
    ):
        config.replay_buffer()
    local = config.updated(num_replay_shards=2).replay_buffer()
    assert local.replay_batch_size == 7
    actors = config.replay_actors()
    assert (actors.num_shards, actors.batch_rows) == (3, 7)
    for ratio in (local.ratio, actors.ratio):
        assert (ratio.learning_starts, ratio.training_intensity) == (40, 3)
    shards = [actors.make_shard(shard).make_buffer("default_policy") for shard in range(3)]
    assert [shard.capacity for shard in shards] == [34] * 3
    assert len({int(shard.rng.integers(10**9)) for shard in shards}) == 3
    assert type(config.updated(**UNIFORM).new_buffer()) is ReplayBuffer
    assert local.mode == "independent"
    lockstep = config.updated(**UNIFORM, replay_mode="lockstep", num_replay_shards=2)
    assert lockstep.replay_buffer().mode == "lockstep"
    with pytest.raises(ConfigError, match="draws uniformly"):
        config.updated(replay_mode="lockstep")
    spec = PolicySpec(config=DQNConfig(train_batch_size=8))
    shared = DQNConfig(policies={"a": spec}, policy_mapping_fn=lambda *args, **kwargs: "a")
    with pytest.raises(ConfigError, match=r"policy 'a' has train_batch_size=8.*separate buffer"):
        shared.replay_buffer().make_buffer("a")


UNIFORM = {
    "prioritized_replay": False,
    "prioritized_replay_alpha": 0.6,
    "prioritized_replay_beta": 0.4,
    "prioritized_replay_eps": 1e-6,
}


def test_on_policy_losses_reject_replayed_rows_by_default():
    config = {"rollout_fragment_length": 8, "seed": 0}
    worker = RolloutWorker("CartPole-v1", A2CTorchPolicy, config)
    drawn = worker.sample().with_columns(batch_indexes=np.arange(8))
    for learn in (worker.policy.learn_on_minibatches, worker.policy.compute_gradients):
        with pytest.raises(ConfigError, match="drawn from a replay buffer: set allow_off_policy"):
            learn(drawn)
    policy_spaces = worker.policy.observation_space, worker.policy.action_space
    off_policy = A2CTorchPolicy(*policy_spaces, {"allow_off_policy": True})
    assert off_policy.learn_on_minibatches(drawn)["total_loss"] != 0
    assert off_policy.compute_gradients(drawn)[1]["total_loss"] != 0
    worker.stop()


# -- distributions and noisy networks --------------------------------------------------------------

C51 = {"num_atoms": 7, "v_min": -3.0, "v_max": 3.0, "gamma": 0.9, "seed": 0}


def reference_probs(model, at, mask, dueling):
    """Compute the probabilities of each action's atoms [3, 7] for one observation; nan for masked
    actions."""
    network = getattr(model, "model", model)
    x = torch.as_tensor(at, dtype=torch.float64)
    for layer in network.hidden:
        x = torch.tanh(x @ layer.weight.double().T + layer.bias.double())
    logits = x @ network.policy_head.weight.double().T + network.policy_head.bias.double()
    action_logits = logits[:21].reshape(3, 7)
    allowed = torch.as_tensor(mask, dtype=torch.bool)
    if dueling:
        action_logits = action_logits + logits[21:] - action_logits[allowed].mean(0)
    action_logits[~allowed] = torch.nan
    return torch.softmax(action_logits, 1)


def reference_projection(probs, reward, discount, support):
    target = torch.zeros(7, dtype=torch.float64)
    for z, prob in zip(support, probs, strict=True):
        position = (min(max(reward + discount * z, -3.0), 3.0) + 3.0) / 1.0
        for atom in range(7):  # triangular kernel of width 1 around each atom
            target[atom] += prob * max(0.0, 1.0 - abs(position - atom))
    return target


@pytest.mark.parametrize("dueling", [True, False])
@pytest.mark.parametrize("double_q", [True, False])
@pytest.mark.parametrize("space", [BOX, MASKED], ids=["box", "masked"])
def test_distributional_loss_matches_the_paper(dueling, double_q, space):
    policy = DQNTorchPolicy(space, THREE, {**C51, "dueling": dueling, "double_q": double_q})
    with torch.no_grad():  # make the networks differ, with distributions that are not uniform
        for vector in (policy.flat.vector, policy._target.vector):
            vector.add_(0.3 * torch.randn(vector.shape, generator=torch.manual_seed(3)))
        policy._target.vector.mul_(0.7)
    batch = rows(space=space)
    loss = float(policy.loss(policy.tensors(batch)).detach())
    support = np.linspace(-3, 3, 7)

    total, errors = 0.0, []
    with torch.no_grad():
        for row in batch.rows():
            masks, ats = [], []
            for name in ("obs", "new_obs"):
                nested = isinstance(row[name], dict)
                ats.append(row[name]["at"] if nested else row[name])
                masks.append(row[name]["action_mask"] if nested else np.ones(3))
            next_probs = reference_probs(policy.target_model, ats[1], masks[1], dueling)
            selector = policy.model if double_q else policy.target_model
            selector_probs = reference_probs(selector, ats[1], masks[1], dueling)
            means = (selector_probs * torch.tensor(support)).sum(1)
            best = int(means.nan_to_num(-1e9).argmax())
            discount = 0.0 if row["terminateds"] else 0.9 ** int(row["n_steps"])
            target = reference_projection(
                next_probs[best], float(row["rewards"]), discount, support
            )
            probs = reference_probs(policy.model, ats[0], masks[0], dueling)[int(row["actions"])]
            cross_entropy = -float((target * probs.log()).sum())
            total += float(row["weights"]) * cross_entropy
            terms = target * (target.clamp(min=1e-30) / probs).log()
            errors.append(float(terms[target > 0].sum()))
    assert loss == pytest.approx(total / batch.count, rel=1e-4)
    policy.loss(policy.tensors(batch))
    policy.learn_on_minibatches(batch)
    np.testing.assert_allclose(policy.row_stats["td_error"], errors, atol=1e-4)


@pytest.mark.parametrize("dueling", [True, False])
def test_categorical_kernel_gradient_equals_autograd(dueling):
    policy = DQNTorchPolicy(BOX, THREE, {**C51, "dueling": dueling})
    for seed, names in ((0, ()), (1, ("weights", "n_steps"))):
        batch = rows(seed=seed).without_columns(*names)
        kernel_loss = policy.learner.kernel(policy.tensors(batch))
        gradient, stats = policy.flat.gradient.clone(), dict(policy.stats)
        loss = policy.loss(policy.tensors(batch))
        policy.flat.take_gradient(loss)
        assert kernel_loss == pytest.approx(loss.item(), rel=1e-5)
        assert stats == pytest.approx(_floats(policy.stats), rel=1e-4, abs=1e-5)
        assert float(gradient.abs().max()) > 0.001
        torch.testing.assert_close(gradient, policy.flat.gradient, rtol=1e-4, atol=1e-6)


def test_distributional_policy_maximizes_the_mean_return():
    policy = DQNTorchPolicy(MASKED, THREE, {**C51, "dueling": True})
    with torch.no_grad():
        noise = torch.randn(policy.flat.vector.shape, generator=torch.manual_seed(3))
        policy.flat.vector.add_(0.3 * noise)
    obs = rows(50, space=MASKED)["obs"]
    best, _, _ = policy.compute_actions(obs, explore=False)
    with torch.no_grad():
        for at, mask, action in zip(obs["at"], obs["action_mask"], best, strict=True):
            probs = reference_probs(policy.model, at, mask, True)
            means = (probs * torch.linspace(-3, 3, 7)).sum(1).nan_to_num(-1e9)
            assert action == int(means.argmax())


def test_state_with_other_atoms_is_rejected():
    state = DQNTorchPolicy(BOX, THREE, C51).get_state()
    with pytest.raises(ValueError, match="num_atoms"):
        DQNTorchPolicy(BOX, THREE, {**C51, "v_max": 5.0}).set_state(state)
    DQNTorchPolicy(BOX, THREE, C51).set_state(state)


NOISY = {"noisy": True, "sigma0": 0.5, "seed": 0}


@pytest.mark.parametrize("more", [{}, {"num_atoms": 7}], ids=["values", "atoms"])
@pytest.mark.parametrize("space", [BOX, MASKED], ids=["box", "masked"])
def test_noisy_network_explores_only_if_asked(space, more):
    policy = DQNTorchPolicy(space, THREE, {**NOISY, **more})
    obs = rows(50, space=space)["obs"]
    greedy = [policy.compute_actions(obs, explore=False)[0].tolist() for _ in range(5)]
    noisy = [policy.compute_actions(obs)[0].tolist() for _ in range(5)]
    assert all(actions == greedy[0] for actions in greedy)
    assert len({tuple(actions) for actions in noisy}) == 5
    same_seed = DQNTorchPolicy(space, THREE, {**NOISY, **more})
    same_seed.compute_actions(obs, explore=False)
    assert [same_seed.compute_actions(obs)[0].tolist() for _ in range(5)] == noisy


def test_noisy_layers_match_the_paper():
    layer = NoisyLinear(nn.Linear(4, 3), 0.5)
    inputs = torch.randn(6, 4, generator=torch.manual_seed(3))
    assert layer.weight_sigma.unique().tolist() == [0.25]  # 0.5 / sqrt(4)
    torch.testing.assert_close(layer(inputs), inputs @ layer.weight.T + layer.bias)
    layer.resample(np.random.default_rng(5))
    drawn = np.random.default_rng(5).standard_normal(7, dtype=np.float32)
    e = [float(np.sign(x) * abs(x) ** 0.5) for x in drawn]
    expected = torch.zeros(6, 3)
    for row in range(6):
        for out in range(3):
            total = float(layer.bias[out]) + 0.25 * e[4 + out]
            for i in range(4):
                weight = float(layer.weight[out, i]) + 0.25 * e[4 + out] * e[i]
                total += weight * float(inputs[row, i])
            expected[row, out] = total
    torch.testing.assert_close(layer(inputs), expected, rtol=1e-5, atol=1e-6)
    layer.resample(None)
    torch.testing.assert_close(layer(inputs), inputs @ layer.weight.T + layer.bias)


def test_noisy_networks_replace_only_the_default_exploration():
    custom = {"exploration_config": {"type": "EpsilonGreedy", "epsilon": 0.25}}
    assert DQNTorchPolicy(BOX, THREE, NOISY).exploration.config.epsilon == 0.0
    assert DQNTorchPolicy(BOX, THREE, {**NOISY, **custom}).exploration.config.epsilon == 0.25


def test_noisy_layers_add_a_bias_without_drawing_random_numbers():
    for has_bias in (False, True):
        linear = nn.Linear(4, 3, bias=has_bias)
        before = torch.random.get_rng_state()
        layer = NoisyLinear(linear, 0.5)
        assert torch.equal(torch.random.get_rng_state(), before)
        assert layer.bias.tolist() == ([0, 0, 0] if not has_bias else linear.bias.tolist())


@pytest.mark.parametrize("dueling", [True, False])
def test_terminal_observation_may_mask_all_actions(dueling):
    policy = DQNTorchPolicy(MASKED, THREE, {**C51, "dueling": dueling})
    batch = rows(space=MASKED)
    batch["terminateds"][:] = True
    batch["new_obs"]["action_mask"][:] = 0
    assert np.isfinite(policy.learn_on_minibatches(batch)["total_loss"])


def test_noisy_loss_resamples_the_noise_of_each_network(monkeypatch):
    policy = DQNTorchPolicy(BOX, THREE, NOISY)
    names = {id(policy.model): "online", id(policy.target_model): "target"}
    drawn = []
    monkeypatch.setattr(
        "flowrl.algorithms.dqn.resample_noise",
        lambda model, rng: drawn.append((names[id(model)], rng is policy.learner.rng)),
    )
    policy.loss(policy.tensors(rows()))
    # to evaluate the next actions, to select them, and to compute the trained values
    assert drawn == [("target", True), ("online", True), ("online", True)]


def test_noise_scales_are_learned_and_saved():
    policy = DQNTorchPolicy(BOX, THREE, NOISY)
    sigma = [name for name in policy.get_weights() if "sigma" in name]
    assert len(sigma) == 2 * 4  # two hidden layers and two heads
    before = policy.get_weights()
    policy.learn_on_minibatches(rows())
    after = policy.get_weights()
    assert all((before[name] != after[name]).any() for name in sigma)
    other = DQNTorchPolicy(BOX, THREE, {**NOISY, "seed": 9})
    other.set_state(policy.get_state())
    for trained in (policy, other):
        trained.learn_on_minibatches(rows(seed=4))
    np.testing.assert_array_equal(policy.flat.vector.detach(), other.flat.vector.detach())


def test_invalid_distributions_and_noisy_models_are_rejected():
    with pytest.raises(ConfigError, match="is not below v_max"):
        DQNConfig(num_atoms=51, v_min=2.0, v_max=1.0)
    for invalid in (
        {"num_atoms": 0},
        {"sigma0": 0},
        {"v_min": float("nan")},
        {"v_max": float("inf"), "num_atoms": 51},
        {"v_max": 20.0},
        {"sigma0": 0.3},
        {"v_min": -1.0, "noisy": True},
    ):
        with pytest.raises(ConfigError, match=next(iter(invalid))):
            DQNConfig(**invalid)
    with pytest.raises(ConfigError, match="vf_share_layers"):
        DQNConfig(num_atoms=51, model={"vf_share_layers": False})

    class NoLayers(nn.Module):
        def __init__(self, obs_space, action_space, num_outputs):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3, num_outputs))

        def forward(self, obs):
            return obs @ self.weight

    with pytest.raises(ConfigError, match="build a custom_model of torch"):
        DQNTorchPolicy(BOX, THREE, {**NOISY, "model": {"custom_model": FullyConnectedNetwork}})
    with pytest.raises(ConfigError, match="no linear layers"):
        DQNTorchPolicy(BOX, THREE, {**NOISY, "dueling": False, "model": {"custom_model": NoLayers}})


def test_only_noise_explores_after_a_restore(tmp_path):
    config = DQNConfig(env="CartPole-v1", noisy=True, learning_starts=50, seed=0)
    config = config.reporting(min_sample_timesteps_per_iteration=60)
    with config.build() as algorithm:
        algorithm.train()
        algorithm.save(tmp_path / "c")
        expected = algorithm.train()["learners"]
        assert algorithm.get_policy().exploration.config.epsilon == 0.0
    with DQN.from_checkpoint(tmp_path / "c") as restored:
        assert restored.get_policy().exploration.config.epsilon == 0.0
        assert restored.train()["learners"] == expected
    both = config.updated(exploration_config={"epsilon": 0.2})
    assert DQNTorchPolicy(BOX, THREE, both).exploration.config.epsilon == 0.2


def test_float64_weights_of_custom_buffers_give_the_same_gradient():
    policy = DQNTorchPolicy(BOX, THREE, {"seed": 0})
    batch = rows()
    as_float64 = batch.with_columns(weights=batch["weights"].astype(np.float64))
    gradient, expected = (policy.compute_gradients(rows_)[0] for rows_ in (as_float64, batch))
    np.testing.assert_array_equal(gradient, expected)


@pytest.mark.parametrize("method", ["replay_buffer", "replay_actors"])
def test_policies_of_a_buffer_are_a_collection(method):
    config = DQNConfig(env="CartPole-v1", num_replay_shards=2 if method == "replay_actors" else 0)
    with pytest.raises(TypeError, match=r"policies must be a collection.*\['dqn'\]"):
        getattr(config, method)("dqn")


def test_replay_actor_settings_of_a_policy_are_rejected_with_a_local_buffer():
    spec = PolicySpec(config={"num_replay_shards": 4})
    config = DQNConfig(env="CartPole-v1", policies={"a": spec, "b": None})
    with pytest.raises(ConfigError, match="num_replay_shards is for plans whose buffer is on act"):
        config.replay_buffer()
    config = DQNConfig(env="CartPole-v1", replay_buffer_shards_colocated_with_driver=False)
    with pytest.raises(ConfigError, match="colocated_with_driver is for plans whose buffer is on"):
        config.replay_buffer()


class OutputsOnly(nn.Module):
    def __init__(self, obs_space, action_space, num_outputs):
        super().__init__()
        self.out = nn.Linear(3, num_outputs)

    def forward(self, obs):
        return self.out(obs)


class ModelWithoutValues(ModelV2):
    def __init__(self, *args):
        super().__init__(*args)
        self.out = nn.Linear(3, self.num_outputs)

    def forward(self, input_dict, state, seq_lens):
        return self.out(input_dict["obs"]), state


@pytest.mark.parametrize("model", [OutputsOnly, ModelWithoutValues])
def test_model_without_values_needs_dueling_to_be_disabled(model):
    config = {"model": {"custom_model": model}}
    error = ConfigError if model is OutputsOnly else NotImplementedError
    with pytest.raises(error, match="DQN, APEX and R2D2 need no values with dueling=False"):
        DQNTorchPolicy(BOX, THREE, config).learn_on_minibatches(rows())
    policy = DQNTorchPolicy(BOX, THREE, {**config, "dueling": False})
    assert np.isfinite(policy.learn_on_minibatches(rows())["total_loss"])


class AlwaysZero(Exploration):
    def act(self, inputs, policy, explore):
        actions, logp = super().act(inputs, policy, explore)
        return actions * 0, logp


def test_own_exploration_chooses_the_actions():
    class WithZero(DQNTorchPolicy):
        def make_exploration(self):
            config = self.config.exploration_config
            return AlwaysZero(config, self.action_space, self.dist_class, True)

    for policy_class in (WithZero, DQNTorchPolicy):
        w = RolloutWorker("CartPole-v1", policy_class, {"seed": 1, "rollout_fragment_length": 50})
        assert w.sample()["actions"].any() == (policy_class is DQNTorchPolicy)


class Counting(Exploration):
    """Epsilon-greedy; counts its calls, and halves epsilon with each."""

    calls = 0

    def epsilon(self, policy):
        self.calls += 1
        return 0.5**self.calls

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        states.append(dict(state))
        self.calls = state["calls"]


states = []  # that were loaded


class WithCounting(DQNTorchPolicy):
    def make_exploration(self):
        config = self.config.exploration_config
        return Counting(config, self.action_space, self.dist_class, True)


class CountingDQN(DQN):
    policy_class = WithCounting


def test_own_exploration_keeps_its_state_in_updates_checkpoints_and_evaluations(tmp_path):
    settings = {"learning_starts": 32, "min_sample_timesteps_per_iteration": 64, "seed": 1}
    with CountingDQN("CartPole-v1", **settings, model={"fcnet_hiddens": [8]}) as algorithm:
        algorithm.train()  # with updates
        calls = algorithm.get_policy().exploration.calls
        assert calls == 64
        algorithm.evaluate(episodes=1)
        states.clear()
        algorithm.evaluate(episodes=1, explore=True)
        assert states[0] == {"calls": calls}  # of the copy that acts
        assert algorithm.get_policy().exploration.calls == calls
        path = algorithm.save(tmp_path)
    with CountingDQN.from_checkpoint(path, trust=True) as algorithm:
        assert algorithm.get_policy().exploration.calls == calls


def test_returns_cross_fragments_unless_the_buffer_has_shards():
    def steps_before_a_border(num_shards=1, **settings):
        """Return the steps of the row before the border of two fragments; the observations change
        there, as by running normalization."""
        buffer = DQNConfig(n_step=3, seed=0, **settings).new_buffer(num_shards=num_shards)
        flags = np.zeros(4, bool)
        for number in (0, 1):
            t = np.arange(4 * number, 4 * number + 4)
            obs = (t + number / 2).astype(np.float32)[:, None]
            buffer.add(
                SampleBatch(
                    obs=obs, new_obs=obs + 1, rewards=np.ones(4, np.float32), t=t,
                    terminateds=flags, truncateds=flags, eps_id=np.zeros(4, np.int64),
                )
            )  # fmt: skip
        drawn = buffer.sample(200)
        return set(drawn["n_steps"][drawn["t"] == 3].tolist())

    assert steps_before_a_border() == {1}
    assert steps_before_a_border(normalize_observations=True) == {3}
    assert steps_before_a_border(num_shards=2, normalize_observations=True) == {1}


def test_policies_with_other_settings_of_a_common_buffer_are_rejected():
    policies = {"a": PolicySpec(config=DQNConfig(train_batch_size=64)), "b": None}
    config = DQNConfig(env="CartPole-v1", policies=policies, policy_mapping_fn=lambda *_, **__: "a")
    message = r"'a' has train_batch_size=64, but the replay buffer that it shares .* has 32"
    with pytest.raises(ConfigError, match=message):
        config.replay_buffer().add(MultiAgentBatch({"a": rows()}, rows().count))
    config.replay_buffer(["b"]).add(MultiAgentBatch({"b": rows()}, rows().count))


def test_place_of_replay_actors_needs_actors():
    config = DQNConfig(num_replay_shards=0, replay_buffer_shards_colocated_with_driver=False)
    with pytest.raises(ConfigError, match="needs num_replay_shards of at least 1"):
        config.replay_actors()


def test_skipped_updates_report_no_errors_of_rows():
    """They would be priorities of the replay buffer that are not finite."""
    config = DQNConfig(on_nonfinite_update="skip", seed=0, model={"fcnet_hiddens": [8]})
    policy, batch = DQNTorchPolicy(BOX, THREE, config), rows()
    broken = batch.with_columns(rewards=np.full(12, np.nan, np.float32))
    policy.learn_on_batch(batch)
    assert np.isfinite(policy.row_stats["td_error"]).all()
    policy.learn_on_batch(broken)
    assert policy.row_stats == {}
    policy.compute_gradients(batch)
    assert np.isfinite(policy.row_stats["td_error"]).all()
    gradient, _ = policy.compute_gradients(broken)
    assert np.isnan(gradient).all()
    assert policy.row_stats == {}
