"""BC and MARWIL: reading recorded experience, losses, plans."""

import gymnasium as gym
import numpy as np
import pytest
import torch

from flowrl.algorithms.a2c import A2CConfig
from flowrl.algorithms.marwil import (
    BC,
    MARWIL,
    BCConfig,
    MARWILConfig,
    MARWILTorchPolicy,
    _PrepareRows,
    returns_of,
)
from flowrl.data import SampleBatch
from flowrl.errors import OfflineDataError
from flowrl.offline.parquet import write_parquet
from flowrl.ops import ReadParquet
from flowrl.ops.offline import ReadStage
from flowrl.policies import ConfigError, PolicySpec
from flowrl.state_schema import StateError
from tests.extras import require_extra


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A folder of experience of an untrained policy on CartPole: 6 files of 80 rows."""
    require_extra("offline")
    folder = tmp_path_factory.mktemp("experience")
    config = A2CConfig(
        env="CartPole-v1", seed=0, rollout_fragment_length=40, train_batch_size=80,
        num_envs_per_worker=2, output=str(folder), output_rows_per_file=80,
    )  # fmt: skip
    with config.build() as algorithm:
        for _ in range(6):
            algorithm.train()
    assert len(list(folder.glob("*.parquet"))) == 6
    return folder


def small(kind, folder, **settings):
    base = {"env": "CartPole-v1", "seed": 0, "train_batch_size": 64}
    base |= {"min_sample_timesteps_per_iteration": 480, "input_": str(folder)}
    return kind(**{**base, **settings})


def test_offline_data_sets_input_and_output_settings():
    config = BCConfig(env="CartPole-v1").offline_data(input_="here", output_rows_per_file=7)
    assert (config.input_, config.output_rows_per_file) == ("here", 7)


def test_every_row_is_read_once_per_pass(recorded):
    with small(BCConfig, recorded).build() as algorithm:
        stream = ReadParquet(algorithm.workers, recorded, 50, columns=["obs", "t"], seed=1)
        batches = stream.take(48)  # 5 passes of 480 rows
        rows = np.concatenate([batch["obs"] for batch in batches])
        assert [batch.count for batch in batches] == [50] * 48
        assert stream.metrics.counters["num_env_steps_sampled"] == 2400
        assert stream.metrics.counters["num_passes_over_data"] == 4
    first, second = (np.unique(rows[i * 480 : (i + 1) * 480], axis=0) for i in range(2))
    np.testing.assert_array_equal(first, second)
    assert (rows[:480] != rows[480:960]).any()  # in a different order


def test_passes_count_once_if_a_read_fails(recorded, monkeypatch):
    with small(BCConfig, recorded).build() as algorithm:
        stream = ReadParquet(algorithm.workers, recorded, 480 + 100, seed=1)
        read, calls = ReadStage._read, []

        def fails_in_the_second_pass(self, part):
            calls.append(part)
            if len(calls) == 8:
                raise OSError("disk")
            return read(self, part)

        monkeypatch.setattr(ReadStage, "_read", fails_in_the_second_pass)
        with pytest.raises(OSError, match="disk"):
            next(stream)
        next(stream)
        assert stream.metrics.counters["num_passes_over_data"] == 1


def test_restored_stream_resumes_at_its_row(recorded):
    with small(BCConfig, recorded).build() as algorithm:
        for read in (1, 3, 11, 30):
            original, restored = (
                ReadParquet(algorithm.workers, recorded, 33, seed=seed) for seed in (1, 2)
            )
            original.take(read)
            restored.load_state_dict(original.state_dict())
            for expected, actual in zip(original.take(20), restored.take(20), strict=True):
                np.testing.assert_array_equal(actual["obs"], expected["obs"])


def test_returns_stop_at_the_end_of_a_trajectory():
    rows = SampleBatch(
        {
            "obs": np.zeros((6, 1), np.float32),
            "rewards": np.array([1, 2, 3, 4, 5, 6], np.float32),
            "terminateds": np.array([0, 1, 0, 0, 0, 0], bool),
            "truncateds": np.array([0, 0, 0, 1, 0, 0], bool),
            "unroll_id": np.array([0, 0, 0, 0, 1, 1]),
        }
    )
    np.testing.assert_allclose(returns_of(rows, 0.5), [2, 2, 5, 4, 8, 6])
    numbers = SampleBatch({**dict(rows.items()), "terminateds": rows["terminateds"].astype("f4")})
    np.testing.assert_allclose(returns_of(numbers, 0.5), [2, 2, 5, 4, 8, 6])


def test_rows_of_a_trajectory_must_be_consecutive():
    rows = SampleBatch(
        obs=np.zeros((4, 1), np.float32),
        rewards=np.ones(4, np.float32),
        terminateds=np.array([False, False, True, True]),
        truncateds=np.zeros(4, bool),
        unroll_id=np.array([0, 1, 0, 1]),
    )
    with pytest.raises(OfflineDataError, match="the rows with unroll_id 0 are not consecutive"):
        returns_of(rows, 0.5)
    rows["terminateds"] = np.ones(4, bool)  # ids of complete episodes may be used again
    np.testing.assert_allclose(returns_of(rows, 0.5), np.ones(4))


def random_batch(count=16):
    rng = np.random.default_rng(0)
    return SampleBatch(
        {
            "obs": rng.normal(size=(count, 4)).astype(np.float32),
            "actions": rng.integers(2, size=count),
            "value_targets": rng.normal(5, 3, count).astype(np.float32),
        }
    )


def test_most_returns_without_later_rewards_are_a_warning(caplog):
    rows = {"terminateds": np.zeros(6, bool), "truncateds": np.zeros(6, bool)}
    rows |= {"rewards": np.ones(6, np.float32), "unroll_id": np.arange(6) // 2}
    rows |= {"obs": np.zeros((6, 4), np.float32), "actions": np.zeros(6, np.int64)}
    rows["terminateds"][[1, 3]] = True
    prepare = _PrepareRows(beta=1.0, gamma=0.5)
    prepare(SampleBatch(rows))
    assert not caplog.records
    rows["terminateds"][3] = False
    for _ in range(2):
        prepare(SampleBatch(rows))
    (record,) = caplog.records
    assert 'record with batch_mode="complete_episodes"' in record.getMessage()
    _PrepareRows(beta=1.0, gamma=0.5)(SampleBatch(rows))  # of another run
    assert len(caplog.records) == 2


@pytest.mark.parametrize("beta", [0.0, 1.0, 3.0])
def test_loss_matches_a_reference_implementation(beta):
    average = "moving_average_sqd_adv_norm"
    more = {"vf_coeff": 0.3, f"{average}_start": 50.0, f"{average}_update_rate": 0.2}
    with MARWIL(small(MARWILConfig, ".", beta=beta, **more)) as algorithm:
        policy = algorithm.workers.local_worker().policy
        batch = random_batch()
        logits, values, _ = policy.model.compute_outputs({"obs": batch["obs"]})
        logits = logits.astype(np.float64)
        total = 0.0
        mean_square = 50.0
        advantages = batch["value_targets"].astype(np.float64) - values
        if beta:
            mean_square += 0.2 * ((advantages**2).mean() - mean_square)
        for i in range(16):
            logp = logits[i] - np.log(np.exp(logits[i]).sum())
            weight = min(np.exp(beta * advantages[i] / np.sqrt(mean_square)), np.exp(5.0))
            total -= weight * logp[batch["actions"][i]] / 16
            if beta:
                total += 0.3 * 0.5 * advantages[i] ** 2 / 16
        _, stats = policy.compute_gradients(batch)
        assert stats["total_loss"] == pytest.approx(total, rel=1e-5)
        assert policy.mean_square == 50.0
        policy.learn_on_batch(batch)
        assert policy.mean_square == pytest.approx(mean_square)
        state = policy.get_state()
        policy.mean_square = 7.0
        policy.set_state(state)
        assert policy.mean_square == pytest.approx(mean_square)


def test_moving_average_starts_at_its_setting():
    settings = {"seed": 0, "moving_average_sqd_adv_norm_start": 4.0}
    space = gym.spaces.Box(-1, 1, (4,), np.float32)
    policy = MARWILTorchPolicy(space, gym.spaces.Discrete(2), settings)
    assert policy.mean_square == 4.0


def test_moving_average_changes_once_per_update_however_rows_are_split():
    settings = {"beta": 1.0, "seed": 0, "moving_average_sqd_adv_norm_update_rate": 0.2}
    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    policies = [
        MARWILTorchPolicy(observation_space, gym.spaces.Discrete(2), {**settings, **more})
        for more in ({}, {"microbatch_size": 4}, {})
    ]
    for policy in policies[:2]:
        policy.learn_on_batch(random_batch())
    gradient, _ = policies[2].compute_gradients(random_batch())
    policies[2].apply_gradients(gradient)
    averages = [policy.mean_square for policy in policies]
    assert averages == pytest.approx([averages[0]] * 3)
    assert averages[0] != 100.0


class Group:
    """Stands for a process group whose processes have these squared advantages together."""

    splits_rows = False

    def __init__(self, squares):
        self.squares = squares

    def std_mean(self, values):
        return torch.std_mean(self.squares)


def test_gradients_of_shares_are_those_of_the_whole_batch():
    settings = {"beta": 1.0, "seed": 0, "moving_average_sqd_adv_norm_update_rate": 1.0}
    space = gym.spaces.Box(-1, 1, (4,), np.float32)
    policy = MARWILTorchPolicy(space, gym.spaces.Discrete(2), settings)
    batch = random_batch()
    whole, _ = policy.compute_gradients(batch)
    values = policy.model.compute_outputs({"obs": batch["obs"]})[1]
    policy.learner.process_group = Group(torch.from_numpy(batch["value_targets"] - values) ** 2)
    shares = [policy.compute_gradients(part)[0] for part in (batch[:8], batch[8:])]
    np.testing.assert_allclose(np.mean(shares, 0), whole, rtol=1e-4, atol=1e-6)


def test_moving_average_ignores_an_update_that_is_skipped():
    settings = {"beta": 1.0, "seed": 0, "on_nonfinite_update": "skip"}
    space = gym.spaces.Box(-1, 1, (4,), np.float32)
    policy = MARWILTorchPolicy(space, gym.spaces.Discrete(2), settings)
    batch = random_batch()
    invalid = batch.copy()
    invalid["value_targets"] = np.full(batch.count, np.inf, np.float32)
    gradient, _ = policy.compute_gradients(invalid)
    policy.apply_gradients(gradient)
    assert policy.mean_square == 100.0
    gradient, _ = policy.compute_gradients(batch)
    policy.apply_gradients(gradient)
    assert np.isfinite(policy.mean_square)
    assert policy.mean_square != 100.0


@pytest.mark.parametrize("kind", [BCConfig, MARWILConfig])
def test_plans_learn_from_files(kind, tmp_path):
    require_extra("offline")
    rng = np.random.default_rng(0)
    for i in range(3):  # the recorded action pushes in the direction in which the pole leans
        obs = rng.normal(size=(160, 4)).astype(np.float32)
        rows = {"obs": obs, "actions": (obs[:, 2] > 0).astype(np.int64)}
        rows |= {"rewards": np.ones(160, np.float32), "unroll_id": np.arange(160) // 40}
        ends = {"terminateds": np.arange(160) % 40 == 39, "truncateds": np.zeros(160, bool)}
        write_parquet(tmp_path / f"{i}.parquet", SampleBatch({**rows, **ends}))
    config = small(kind, tmp_path, lr=1e-2, evaluation_interval=2, evaluation_duration=3)
    with config.build() as algorithm:
        results = [algorithm.train() for _ in range(4)]
        assert results[-1]["num_env_steps_trained"] == results[-1]["timesteps_total"] >= 4 * 480
        assert results[-1]["counters"]["num_passes_over_data"] >= 3
        mean_logps = [result["learners"]["default_policy"]["mean_logp"] for result in results]
        assert mean_logps[0] < mean_logps[-1]
        assert mean_logps[-1] > -0.1
        assert results[1]["evaluation"]["episode_reward_mean"] > 0
        assert algorithm.workers.local_worker().env_steps == 0  # training does not sample
        algorithm.save(tmp_path / "c")
        expected = algorithm.train()["learners"]
    with (BC if kind is BCConfig else MARWIL).from_checkpoint(tmp_path / "c") as restored:
        assert restored.train()["learners"] == expected


def test_actions_with_larger_returns_become_more_likely():
    """Both actions are recorded equally often."""
    with MARWIL(small(MARWILConfig, ".", beta=3.0, lr=1e-2)) as algorithm:
        policy = algorithm.workers.local_worker().policy
        obs = np.zeros((64, 4), np.float32)
        actions = np.arange(64) % 2
        returns = np.where(actions == 1, 20.0, 0.0).astype(np.float32)
        batch = SampleBatch({"obs": obs, "actions": actions, "value_targets": returns})
        for _ in range(200):
            policy.learn_on_batch(batch)
        logp = policy.compute_log_likelihoods(np.array([0, 1]), obs[:2])
        assert logp[1] > logp[0] + 1
        assert torch.isfinite(policy.flat.vector).all()


def test_missing_or_incompatible_data_is_rejected(recorded, tmp_path):
    with (
        small(BCConfig, tmp_path).build() as algorithm,
        pytest.raises(ConfigError, match=r"input_: .*: there is no \.parquet file"),
    ):
        algorithm.train()
    with pytest.raises(
        ConfigError, match="input_: none is set: set the folder of recorded experience"
    ):
        BCConfig(env="CartPole-v1").build().train()
    with (
        small(BCConfig, recorded, env="Pendulum-v1").build() as algorithm,
        pytest.raises(OfflineDataError, match="do not fit the spaces of the policy: obs"),
    ):
        algorithm.train()
    rows = random_batch()
    write_parquet(tmp_path / "a.parquet", rows.without_columns("value_targets"))
    with small(MARWILConfig, tmp_path).build() as algorithm:
        with pytest.raises(OfflineDataError, match="there is no column 'rewards'"):
            algorithm.train()
        with pytest.raises(OfflineDataError, match="there are no rows of policy 'other'"):
            ReadParquet(algorithm.workers, tmp_path, 5, policy_id="other").take(1)
        write_parquet(tmp_path / "empty" / "a.parquet", rows[:0])
        with pytest.raises(OfflineDataError, match="'default_policy': the files contain no rows"):
            ReadParquet(algorithm.workers, tmp_path / "empty", 5).take(1)
        with pytest.raises(ValueError, match="batch_size must be an int of at least 1"):
            ReadParquet(algorithm.workers, tmp_path, 0)
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content[: len(content) // 2])
    with (
        small(BCConfig, tmp_path).build() as algorithm,
        pytest.raises(ConfigError, match=r"input_: .* cannot be read"),
    ):
        algorithm.train()


@pytest.mark.parametrize("settings", [{"beta": -1}, {"input": 3}, {"vf_coeff": -1}])
def test_invalid_settings_are_rejected(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        MARWILConfig(**settings)


@pytest.mark.parametrize("mean_square", [None, -1.0, "one"])
def test_state_with_a_wrong_average_changes_nothing(mean_square):
    space = gym.spaces.Box(-1, 1, (4,), np.float32)
    policy = MARWILTorchPolicy(space, gym.spaces.Discrete(2), {"seed": 0})
    other = MARWILTorchPolicy(space, gym.spaces.Discrete(2), {"seed": 1})
    before = policy.get_weights()
    with pytest.raises(StateError, match="mean_square"):
        policy.set_state({**other.get_state(), "mean_square": mean_square})
    for name, weight in policy.get_weights().items():
        np.testing.assert_array_equal(weight, before[name])


def test_returns_have_the_discount_of_the_trained_policy(recorded):
    def targets(**settings):
        with small(MARWILConfig, recorded, **settings).build() as algorithm:
            batch = next(algorithm.config.batches(algorithm.workers))
        rows = batch if isinstance(batch, SampleBatch) else batch["x"]
        return rows["value_targets"]

    spec = {"x": PolicySpec(config={"gamma": 0.5})}
    np.testing.assert_array_equal(targets(policies=spec), targets(gamma=0.5))
    assert (targets(gamma=0.5) != targets()).any()


def test_value_targets_must_have_one_number_per_row():
    space = gym.spaces.Box(-1, 1, (4,), np.float32)
    policy = MARWILTorchPolicy(space, gym.spaces.Discrete(2), {"seed": 0})
    targets = np.zeros((16, 1), np.float32)
    with pytest.raises(ValueError, match=r"'value_targets' has the shape \[16, 1\]"):
        policy.learn_on_batch(random_batch().with_columns(value_targets=targets))
