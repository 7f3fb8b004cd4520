"""CQL: the penalty against a reference implementation, the plan, rejected settings."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from gymnasium import spaces

from flowrl.algorithms import cql
from flowrl.algorithms.cql import CQL, CQLConfig, CQLTorchPolicy
from flowrl.algorithms.sac import SACTorchPolicy
from flowrl.data import SampleBatch
from flowrl.errors import OfflineDataError
from flowrl.offline.parquet import write_parquet
from flowrl.policies import ConfigError
from tests.extras import require_extra

BOX = spaces.Box(-1, 1, (3,), np.float32)
BOUNDS = spaces.Box(-2, 2, (2,), np.float32)
THREE = spaces.Discrete(3)
MASKED = spaces.Dict({"action_mask": spaces.MultiBinary(3), "at": BOX})
SMALL = {"model": {"fcnet_hiddens": [8, 8]}, "seed": 0, "gamma": 0.9}


def rows(n=10, seed=0, actions=BOUNDS, space=BOX):
    rng = np.random.default_rng(seed)

    def observations():
        at = rng.uniform(-1, 1, (n, 3)).astype(np.float32)
        if space is BOX:
            return at
        mask = rng.integers(0, 2, (n, 3)).astype(np.int8)
        mask[:, 1] = 1
        return {"action_mask": mask, "at": at}

    drawn_actions = rng.integers(0, 3, n) if space is BOX else np.ones(n, np.int64)
    if actions is BOUNDS:
        drawn_actions = rng.uniform(-0.9, 0.9, (n, 2)).astype(np.float32)
    return SampleBatch(
        obs=observations(),
        new_obs=observations(),
        actions=drawn_actions,
        rewards=rng.standard_normal(n).astype(np.float32),
        terminateds=rng.random(n) < 0.3,
        truncateds=np.zeros(n, bool),
        unroll_id=np.zeros(n, np.int64),
    )


def test_actions_are_clipped():
    recorded = rows()
    recorded["actions"] = np.linspace(-2.2, 2.2, 20, dtype=np.float32).reshape(10, 2)
    assert np.abs(cql._clip_actions(recorded)["actions"]).max() == 1


@pytest.mark.parametrize(("space", "temperature"), list(product([BOX, MASKED], [1.0, 2.0])))
def test_gap_of_discrete_actions(space, temperature):
    policy = CQLTorchPolicy(space, THREE, {**SMALL, "temperature": temperature})
    policy.flat.vector.data += 0.3 * torch.randn(
        policy.flat.vector.shape, generator=torch.Generator().manual_seed(0)
    )
    batch = rows(actions=THREE, space=space)
    with torch.no_grad():
        gaps = policy.gaps(policy.tensors(batch)).numpy()
        values = policy.model.q_values(policy.tensors(batch)["obs"]).double().numpy()
    for critic in range(2):
        expected = []
        for row in range(10):
            allowed = range(3)
            if space is MASKED:
                allowed = np.flatnonzero(batch["obs"]["action_mask"][row])
            exps = [math.exp(values[critic, row, a] / temperature) for a in allowed]
            soft_maximum = temperature * math.log(sum(exps))
            expected.append(soft_maximum - values[critic, row, batch["actions"][row]])
        assert gaps[critic] == pytest.approx(np.mean(expected), rel=1e-4)


def test_gap_of_continuous_actions():
    """The soft maximum is the log of the mean of exp(Q) / density over the drawn actions."""
    policy = CQLTorchPolicy(BOX, BOUNDS, {**SMALL, "num_actions": 3})
    policy.flat.vector.data += 0.2 * torch.randn(
        policy.flat.vector.shape, generator=torch.Generator().manual_seed(0)
    )
    batch = rows()
    tensors = policy.tensors(batch)
    state = policy.learner.rng.bit_generator.state
    drawn, logps = policy._draw_actions(tensors)
    policy.learner.rng.bit_generator.state = state
    with torch.no_grad():
        gaps = policy.gaps(tensors).numpy()
        for critic in range(2):
            expected = []
            for row in range(10):
                total = 0.0
                for k in range(9):
                    index = k * 10 + row
                    action = torch.from_numpy(drawn[index : index + 1])
                    value = policy.model.q_values(tensors["obs"][row : row + 1], action)[critic, 0]
                    if k < 3:
                        logp = -2 * math.log(2.0)  # uniform on [-1, 1]^2
                    else:
                        obs = batch["obs" if k < 6 else "new_obs"][row : row + 1]
                        outputs = torch.from_numpy(policy.model.outputs_numpy(obs))
                        logp = float(policy.dist_class(outputs, policy.model).logp(action)[0])
                    assert logps[index] == pytest.approx(logp, abs=2e-3)
                    total += math.exp(float(value) - logp)
                recorded = policy.model.q_values(
                    tensors["obs"][row : row + 1], tensors["actions"][row : row + 1]
                )
                expected.append(math.log(total / 9) - float(recorded[critic, 0]))
            assert gaps[critic] == pytest.approx(np.mean(expected), abs=2e-3)


def test_action_without_axes():
    actions = spaces.Box(-2, 3, (), np.float32)
    policy = CQLTorchPolicy(BOX, actions, SMALL)
    drawn = np.linspace(-0.9, 0.9, 10, dtype=np.float32)
    stats = policy.learn_on_batch(rows().with_columns(actions=drawn))
    assert all(np.isfinite(value) for value in stats.values())


@pytest.mark.parametrize("actions", [BOUNDS, THREE], ids=["continuous", "discrete"])
def test_critic_loss_is_sac_loss_plus_weighted_gap(actions):
    batch = rows(actions=actions)
    losses = {}
    for weight in (0.0, 1.0, 3.0):
        policy = CQLTorchPolicy(BOX, actions, {**SMALL, "min_q_weight": weight})
        losses[weight] = float(policy.critic_loss(policy.tensors(batch)).detach())
        gap = 2 * float(policy.stats["cql_gap"])  # of two critics
    assert losses[1.0] - losses[0.0] == pytest.approx(gap, rel=1e-3)
    assert losses[3.0] - losses[0.0] == pytest.approx(3 * gap, rel=1e-3)


def test_cql_without_penalty_equals_sac():
    batch = rows(actions=THREE)
    sac = SACTorchPolicy(BOX, THREE, SMALL)
    cql = CQLTorchPolicy(BOX, THREE, {**SMALL, "min_q_weight": 0.0})
    np.testing.assert_array_equal(sac.flat.vector.detach(), cql.flat.vector.detach())
    for policy in (sac, cql):
        policy.learn_on_minibatches(batch)
    sac_weights, cql_weights = sac.get_weights(), cql.get_weights()
    for name in sac_weights:
        np.testing.assert_allclose(sac_weights[name], cql_weights[name], rtol=1e-5, atol=1e-6)


def test_penalty_reduces_the_gap():
    batch = rows(12, actions=THREE)
    gaps = {}
    for weight in (0.0, 5.0):
        settings = {**SMALL, "min_q_weight": weight, "lr": 3e-3}
        policy = CQLTorchPolicy(BOX, THREE, settings)
        for _ in range(100):
            policy.learn_on_minibatches(batch)
        gaps[weight] = float(policy.gaps(policy.tensors(batch)).mean())
    assert gaps[5.0] < gaps[0.0] - 0.5


def test_lagrangian_weight_depends_on_the_threshold():
    batch = rows(64, actions=THREE)
    weights = {}
    for threshold in (0.01, 50.0):
        settings = {**SMALL, "lagrangian": True, "lagrangian_thresh": threshold, "lr": 3e-3}
        policy = CQLTorchPolicy(BOX, THREE, settings)
        for _ in range(20):
            stats = policy.learn_on_minibatches(batch)
        weights[threshold] = stats["min_q_weight"]
    assert weights[0.01] > 5.0 > weights[50.0]
    state = policy.get_state()
    other = CQLTorchPolicy(BOX, THREE, {**settings, "seed": 4})
    other.set_state(state)
    assert float(other.model.log_min_q_weight.exp()) == pytest.approx(weights[50.0], rel=0.1)


@pytest.mark.parametrize("actions", [BOUNDS, THREE], ids=["continuous", "discrete"])
def test_actor_imitates_in_the_first_updates(actions):
    policy = CQLTorchPolicy(BOX, actions, {**SMALL, "bc_iters": 2})
    batch = rows(actions=actions)
    losses = []
    for _ in range(3):
        logp = policy.compute_log_likelihoods(batch["actions"], batch["obs"]).mean()
        losses.append(policy.learn_on_minibatches(batch)["actor_loss"] + logp)
    assert losses[:2] == pytest.approx([0, 0], abs=1e-4)
    assert abs(losses[2]) > 1e-3
    assert policy.learner.num_updates == 3


@pytest.fixture(scope="module")
def pendulum(tmp_path_factory):
    """A folder of recorded random rows."""
    require_extra("offline")
    folder = tmp_path_factory.mktemp("pendulum")
    batch = rows(300)
    write_parquet(folder / "rows.parquet", batch)
    return folder


def test_plan_trains_and_resumes_from_a_checkpoint(pendulum, tmp_path):
    config = CQLConfig(
        **SMALL,
        input_=str(pendulum),
        observation_space=BOX,
        action_space=BOUNDS,
        train_batch_size=50,
        min_sample_timesteps_per_iteration=300,
    )
    with config.build() as algorithm:
        first = algorithm.train()
        assert first["num_env_steps_trained"] == 300
        algorithm.save(tmp_path / "c")
        expected = algorithm.train()["learners"]["default_policy"]
        assert algorithm.get_policy().target_version == 13  # including the initial copy
        with pytest.raises(ConfigError, match="no environment"):
            algorithm.evaluate()
    with config.build() as resumed:
        resumed.restore(tmp_path / "c")
        assert resumed.train()["learners"]["default_policy"] == expected
    with CQL.from_checkpoint(tmp_path / "c") as loaded:  # including its spaces
        assert loaded.config.action_space == BOUNDS
        loaded.train()


def test_unsupported_spaces_settings_and_data_are_rejected(pendulum, tmp_path):
    with pytest.raises(ConfigError, match="MultiDiscrete"):
        CQLTorchPolicy(BOX, spaces.MultiDiscrete([2, 2]), SMALL)
    for invalid in ({"min_q_weight": -1}, {"temperature": 0}, {"num_actions": 0}, {"bc_iters": -1}):
        with pytest.raises(ConfigError, match=next(iter(invalid))):
            CQLConfig(**invalid)
    with pytest.raises(ConfigError, match="n_step"):
        CQLConfig(n_step=3)  # a setting of replay buffers
    base = {**SMALL, "observation_space": BOX, "min_sample_timesteps_per_iteration": 10}
    config = CQLConfig(**base, input_=str(pendulum), action_space=THREE)
    with config.build() as algorithm, pytest.raises(OfflineDataError, match="actions"):
        algorithm.train()
    write_parquet(tmp_path / "rows.parquet", rows().without_columns("new_obs"))
    config = CQLConfig(**base, input_=str(tmp_path), action_space=BOUNDS)
    with config.build() as algorithm, pytest.raises(OfflineDataError, match="'new_obs'"):
        algorithm.train()
    with pytest.raises(ConfigError, match="input_"):
        CQLConfig(**base, action_space=BOUNDS).build().train()


def test_lagrange_weight_falls_from_its_maximum_and_does_not_rise_above_it():
    config = {**SMALL, "lagrangian": True, "lr": 1e-2, "min_q_weight": 1.1e6}

    def log_weights(threshold):
        policy = CQLTorchPolicy(BOX, THREE, {**config, "lagrangian_thresh": threshold})
        weights = []
        for _ in range(20):
            stats = policy.learn_on_batch(rows(64, actions=THREE))
            assert stats["min_q_weight"] <= 1e6
            weights.append(float(policy.model.log_min_q_weight))
        return weights

    falling = log_weights(1000.0)  # the gap is below
    assert falling[-1] < falling[0]
    assert falling[-1] < math.log(1e6)
    constant = log_weights(1e-3)
    assert constant[-1] == constant[0] == pytest.approx(math.log(1.1e6))


def test_weight_follows_the_setting_after_a_restore():
    settings = {**SMALL, "lagrangian": True, "lagrangian_thresh": 1.0}

    def make(weight):
        return CQLTorchPolicy(BOX, BOUNDS, {**settings, "min_q_weight": weight})

    trained = make(5.0)
    trained.learn_on_minibatches(rows())
    state = trained.get_state()
    weights = []
    for weight in (5.0, 1.0):
        policy = make(weight)
        policy.set_state(state)
        weights.append(math.exp(policy.model.log_min_q_weight.item()))
    assert weights[0] == pytest.approx(math.exp(trained.model.log_min_q_weight.item()))
    assert weights[0] != pytest.approx(5.0, rel=1e-6)
    assert weights[1] == pytest.approx(1.0)


def test_weight_of_the_penalty_is_learned_beside_a_fixed_temperature():
    settings = {**SMALL, "lagrangian": True, "target_entropy": None, "initial_alpha": 0.2}
    policy = CQLTorchPolicy(BOX, BOUNDS, settings)
    before = float(policy.model.log_min_q_weight)
    for _ in range(3):
        policy.learn_on_batch(rows())
    assert float(policy.model.log_min_q_weight) != before
    assert policy.alpha == pytest.approx(0.2)
