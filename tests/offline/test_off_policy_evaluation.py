"""Importance sampling against the definition, with its variance and its refusals."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from flowrl.algorithms.a2c import A2CTorchPolicy
from flowrl.algorithms.dqn import DQNTorchPolicy
from flowrl.algorithms.ppo import PPOConfig
from flowrl.algorithms.td3 import TD3TorchPolicy
from flowrl.data import SampleBatch
from flowrl.offline.off_policy_evaluation import estimate
from flowrl.offline.parquet import (
    OfflineDataError,
    ParquetWriter,
    parquet_files,
    read_parquet,
    write_parquet,
)
from flowrl.policies import ConfigError

BOX = spaces.Box(-1, 1, (3,), np.float32)


@pytest.fixture
def policy():
    made = A2CTorchPolicy(BOX, spaces.Discrete(2), {"seed": 0, "gamma": 0.9})
    made.flat.vector.data *= 3  # far from uniform
    return made


def episodes(count=40, seed=0, longest=6):
    """Rows of uniformly random actions; reward 1 for action 1, episodes of 1 to `longest` steps."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        steps = int(rng.integers(1, longest + 1))
        actions = rng.integers(0, 2, steps)
        made.append(
            SampleBatch(
                obs=rng.uniform(-1, 1, (steps, 3)).astype(np.float32),
                actions=actions,
                action_logp=np.full(steps, np.log(0.5), np.float32),
                rewards=actions.astype(np.float32),
                terminateds=np.arange(steps) == steps - 1,
                truncateds=np.zeros(steps, bool),
                eps_id=np.full(steps, number * 7),
                t=np.arange(steps),
            )
        )
    return made


def plainly(policy, rows, gamma):
    """Both estimates, an episode and a step at a time."""
    logs = []
    for episode in rows:
        weight, weights = 1.0, []
        for i in range(episode.count):
            logp = policy.compute_log_likelihoods(
                episode["actions"][i : i + 1], episode["obs"][i : i + 1]
            )[0]
            weight *= float(np.exp(logp - episode["action_logp"][i]))
            weights.append(weight)
        logs.append((weights, episode["rewards"]))
    longest = max(len(weights) for weights, _ in logs)
    mean = [np.mean([w[min(t, len(w) - 1)] for w, _ in logs]) for t in range(longest)]
    plain, weighted = [], []
    for weights, rewards in logs:
        plain.append(sum(gamma**t * w * rewards[t] for t, w in enumerate(weights)))
        weighted.append(sum(gamma**t * w / mean[t] * rewards[t] for t, w in enumerate(weights)))
    return np.mean(plain), np.mean(weighted)


def test_it_is_the_definition(policy):
    rows = episodes()
    plain, weighted = plainly(policy, rows, 0.9)
    told = estimate(policy, rows)
    assert told["is"]["v_target"] == pytest.approx(plain, rel=1e-5)
    assert told["wis"]["v_target"] == pytest.approx(weighted, rel=1e-5)
    behavior = np.mean([sum(0.9**t * r for t, r in enumerate(e["rewards"])) for e in rows])
    for one in told.values():
        assert one["v_behavior"] == pytest.approx(behavior, rel=1e-5)
        assert one["v_gain"] == pytest.approx(one["v_target"] / one["v_behavior"])
        assert one["v_delta"] == pytest.approx(one["v_target"] - one["v_behavior"])
        assert one["num_episodes"] == 40
        assert 1 <= one["ess"] < 40
    undiscounted = estimate(policy, rows, gamma=1.0, methods=["is"])
    assert set(undiscounted) == {"is"}
    assert undiscounted["is"]["v_target"] == pytest.approx(plainly(policy, rows, 1.0)[0], rel=1e-5)


def test_of_the_policy_itself_it_is_what_there_was(policy):
    rows = []
    for episode in episodes():
        logp = policy.compute_log_likelihoods(episode["actions"], episode["obs"])
        rows.append(episode.with_columns(action_logp=logp))
    for one in estimate(policy, rows).values():
        assert one["v_target"] == pytest.approx(one["v_behavior"], rel=1e-5)
        assert one["ess"] == pytest.approx(40, rel=1e-5)


def test_it_is_right_on_average(policy):
    """What the policy is worth is known here: its chance of action 1, discounted, as long as
    episodes last."""
    policy.model.policy_head.bias.data[1] += 1.0
    rows = episodes(4000, longest=3)
    chances = [
        np.exp(policy.compute_log_likelihoods(np.ones(e.count, np.int64), e["obs"])) for e in rows
    ]
    true = np.mean([sum(0.9**t * c for t, c in enumerate(own)) for own in chances])
    told = estimate(policy, rows)
    for method in ("is", "wis"):
        error = told[method]["v_target_std"] / np.sqrt(4000)
        assert abs(told[method]["v_target"] - true) < 4 * error
        assert abs(told[method]["v_delta"]) > 4 * error  # so that it says something


@pytest.mark.parametrize("method", ["is", "wis"])
def test_a_policy_that_lasts_longer_is_worth_more(policy, method):
    """Action 0 ends the episode, each step gives 1: the recorded policy does that half the time."""
    policy.model.policy_head.weight.data.zero_()
    policy.model.policy_head.bias.data[:] = torch.tensor([0.0, 0.8])
    stays = float(torch.softmax(policy.model.policy_head.bias, 0)[1])
    rng, rows = np.random.default_rng(0), []
    for number in range(4000):
        steps = int(min(rng.geometric(0.5), 12))
        actions = np.ones(steps, np.int64)
        actions[-1] = 0 if steps < 12 else rng.integers(0, 2)
        rows.append(
            SampleBatch(
                obs=np.zeros((steps, 3), np.float32),
                actions=actions,
                action_logp=np.full(steps, np.log(0.5), np.float32),
                rewards=np.ones(steps, np.float32),
                terminateds=np.arange(steps) == steps - 1,
                truncateds=np.zeros(steps, bool),
                eps_id=np.full(steps, number),
                t=np.arange(steps),
            )
        )
    true = sum(0.9**t * stays**t for t in range(12))
    told = estimate(policy, rows)[method]
    assert told["v_target"] == pytest.approx(true, rel=0.06)
    assert told["v_behavior"] < 0.8 * true


def test_weights_that_no_number_holds(policy):
    steps = 3000
    policy.model.policy_head.weight.data.zero_()
    policy.model.policy_head.bias.data[:] = torch.tensor([0.0, 5.0])
    long = SampleBatch(
        obs=np.zeros((steps, 3), np.float32),
        actions=np.ones(steps, np.int64),
        action_logp=np.full(steps, np.log(0.5), np.float32),
        rewards=np.ones(steps, np.float32),
        terminateds=np.arange(steps) == steps - 1,
        truncateds=np.zeros(steps, bool),
        eps_id=np.full(steps, 999),
        t=np.arange(steps),
    )
    told = estimate(policy, [long, *episodes(3)])
    assert told["is"]["v_target"] == float("inf") or told["is"]["v_target"] > 1e6
    assert told["wis"]["v_target"] == pytest.approx(10, rel=0.01)  # 1 / (1 - gamma)
    assert told["wis"]["ess"] == pytest.approx(1)
    never = DQNTorchPolicy(BOX, spaces.Discrete(2), {"seed": 0})
    best = int(never.compute_actions(np.zeros((1, 3), np.float32), explore=False)[0][0])
    told = estimate(never, long.with_columns(actions=np.full(steps, 1 - best)))
    assert (told["is"]["v_target"], told["wis"]["v_target"], told["wis"]["ess"]) == (0, 0, 0)


def test_rows_in_any_order_and_parts(policy, tmp_path):
    rows = episodes()
    whole = SampleBatch.concat_samples(rows)
    mixed = whole.take_rows(np.random.default_rng(1).permutation(whole.count))
    expected = estimate(policy, rows)
    parts = [mixed[:30], mixed[30:31], mixed[31:]]
    for told in (estimate(policy, parts), estimate(policy, (part for part in parts))):
        assert told["wis"]["v_target"] == pytest.approx(expected["wis"]["v_target"])
    for i, part in enumerate(parts):
        write_parquet(tmp_path / f"{i}.parquet", part)
    write_parquet(tmp_path / "other.parquet", rows[0], policy_id="other")
    told = estimate(policy, tmp_path)
    assert told["is"]["v_target"] == pytest.approx(expected["is"]["v_target"])


def test_episodes_of_two_runs_are_not_mixed(policy, tmp_path):
    """Both number their episodes from 0; a run that goes on has the same ones."""
    one, other = episodes(20, seed=1), episodes(20, seed=2)
    for name, rows in (("a", one), ("b", other)):
        joined = SampleBatch.concat_samples(rows)
        writer = ParquetWriter(tmp_path / name)
        writer.add(joined[:11])
        writer.flush()
        again = ParquetWriter(tmp_path / name)  # goes on in the middle of an episode
        again.load_state_dict(writer.state_dict())
        again.add(joined[11:])
        again.flush()
    (tmp_path / "both").mkdir()
    for path in [*parquet_files(tmp_path / "a"), *parquet_files(tmp_path / "b")]:
        path.rename(tmp_path / "both" / path.name)
    told = estimate(policy, tmp_path / "both")["is"]
    assert (told["num_episodes"], told["num_episodes_left_out"]) == (40, 0)
    each = [estimate(policy, rows)["is"]["v_target"] for rows in (one, other)]
    assert told["v_target"] == pytest.approx(np.mean(each))


def test_parts_of_episodes_are_left_out(policy):
    rows = [episode for episode in episodes() if episode.count > 2]
    cut = [rows[0][1:], rows[1][:-1], SampleBatch.concat_samples([rows[2][:1], rows[2][2:]])]
    told = estimate(policy, [*cut, *rows[3:]])["is"]
    assert told["num_episodes_left_out"] == 3
    assert told["v_target"] == pytest.approx(estimate(policy, rows[3:])["is"]["v_target"])


def test_what_was_recorded_by_a_run(tmp_path):
    config = PPOConfig(env="CartPole-v1", seed=1, train_batch_size=400, sgd_minibatch_size=100)
    with config.offline_data(output=str(tmp_path)).build() as algorithm:
        before = algorithm.get_policy().get_weights()
        algorithm.train()
        learned = algorithm.get_policy()
        learned.set_weights(before)
    told = estimate(learned, tmp_path)["is"]
    assert told["v_target"] == pytest.approx(told["v_behavior"], rel=1e-4)
    assert told["num_episodes"] > 5
    (path,) = parquet_files(tmp_path)
    assert told["num_episodes_left_out"] == 1 - read_parquet(path)[1]["terminateds"][-1]


def test_what_cannot_be_judged_is_refused(policy, tmp_path):
    rows = episodes(3)
    with pytest.raises(ConfigError, match="is, wis"):
        estimate(policy, rows, methods=["dm"])
    with pytest.raises(ConfigError, match=r"a policy is judged \(algorithm\.get_policy"):
        estimate("ppo", rows)
    with pytest.raises(ConfigError, match="Minari data sets do not say how likely"):
        estimate(policy, "minari:tests/pendulum-v0")
    assert estimate(policy, rows, methods="is").keys() == {"is"}
    with pytest.raises(OfflineDataError, match="action_logp"):
        estimate(policy, [rows[0].without_columns("action_logp")])
    with pytest.raises(OfflineDataError, match="no whole episode"):
        estimate(policy, [e[1:] for e in rows if e.count > 1])
    with pytest.raises(OfflineDataError, match="no rows"):
        estimate(policy, [])
    with pytest.raises(OfflineDataError, match="other spaces"):
        estimate(policy, [rows[0].with_columns(obs=np.zeros((rows[0].count, 4), np.float32))])
    with pytest.raises(OfflineDataError):
        estimate(policy, tmp_path / "nowhere")
    recurrent = A2CTorchPolicy(BOX, spaces.Discrete(2), {"model": {"use_lstm": True}})
    with pytest.raises(ConfigError, match="single observations"):
        estimate(recurrent, rows)
    ddpg = TD3TorchPolicy(BOX, BOX, {})
    acted = [episode.with_columns(actions=episode["obs"]) for episode in rows]
    with pytest.raises(ConfigError, match="likelihood"):
        estimate(ddpg, acted)


def test_of_a_greedy_policy_other_actions_count_nothing():
    policy = DQNTorchPolicy(BOX, spaces.Discrete(2), {"seed": 0, "gamma": 0.9})
    rows = episodes(500, longest=3)
    total = 0.0
    for episode in rows:
        best = policy.compute_actions(episode["obs"], explore=False)[0]
        for t in range(episode.count):
            if (best[: t + 1] == episode["actions"][: t + 1]).all():
                total += 0.9**t * 2 ** (t + 1) * float(episode["rewards"][t])
    told = estimate(policy, rows)["is"]
    assert told["v_target"] == pytest.approx(total / 500, rel=1e-5)
    assert told["v_target"] > 0
