"""Off-policy evaluation: importance sampling, incomplete episodes, invalid input."""

import re
import tracemalloc

import numpy as np
import pytest
import torch
from gymnasium import spaces

from flowrl.algorithms.a2c import A2CTorchPolicy
from flowrl.algorithms.dqn import DQNTorchPolicy
from flowrl.algorithms.ppo import PPOConfig
from flowrl.algorithms.td3 import TD3TorchPolicy
from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.data.sequences import sequence_lengths
from flowrl.errors import ConfigError, OfflineDataError
from flowrl.offline import off_policy_evaluation
from flowrl.offline.off_policy_evaluation import estimate
from flowrl.offline.parquet import parquet_files, read_parquet, write_parquet
from flowrl.offline.parquet_writer import ParquetWriter
from tests.extras import require_extra

BOX = spaces.Box(-1, 1, (3,), np.float32)


@pytest.fixture
def policy():
    policy = A2CTorchPolicy(BOX, spaces.Discrete(2), {"seed": 0, "gamma": 0.9})
    policy.flat.vector.data *= 3  # far from uniform
    return policy


def episode_batch(number, actions, rewards, obs=None):
    """One episode of a uniformly random policy."""
    steps = len(actions)
    return SampleBatch(
        obs=np.zeros((steps, 3), np.float32) if obs is None else obs,
        actions=actions,
        action_logp=np.full(steps, np.log(0.5), np.float32),
        rewards=np.asarray(rewards, np.float32),
        terminateds=np.arange(steps) == steps - 1,
        truncateds=np.zeros(steps, bool),
        eps_id=np.full(steps, number),
        t=np.arange(steps),
    )


def random_episodes(count=40, seed=0, longest=6):
    """Episodes of 1 to `longest` uniformly random actions; reward 1 for action 1."""
    rng = np.random.default_rng(seed)
    episodes = []
    for number in range(count):
        steps = int(rng.integers(1, longest + 1))
        actions = rng.integers(0, 2, steps)
        obs = rng.uniform(-1, 1, (steps, 3)).astype(np.float32)
        episodes.append(episode_batch(number * 7, actions, actions, obs))
    return episodes


def reference_estimates(policy, episodes, gamma):
    """Both estimates ("is", "wis"), computed one episode and one step at a time."""
    weighted_episodes = []
    for episode in episodes:
        weight, weights = 1.0, []
        for i in range(episode.count):
            logp = policy.compute_log_likelihoods(
                episode["actions"][i : i + 1], episode["obs"][i : i + 1]
            )[0]
            weight *= float(np.exp(logp - episode["action_logp"][i]))
            weights.append(weight)
        weighted_episodes.append((weights, episode["rewards"]))
    longest = max(len(weights) for weights, _ in weighted_episodes)
    mean_weight = [
        np.mean([w[min(t, len(w) - 1)] for w, _ in weighted_episodes]) for t in range(longest)
    ]
    plain, weighted = [], []
    for weights, rewards in weighted_episodes:
        steps = list(enumerate(weights))
        plain.append(sum(gamma**t * w * rewards[t] for t, w in steps))
        weighted.append(sum(gamma**t * w / mean_weight[t] * rewards[t] for t, w in steps))
    return np.mean(plain), np.mean(weighted)


def test_estimates_follow_the_definition(policy):
    episodes = random_episodes()
    plain, weighted = reference_estimates(policy, episodes, 0.9)
    results = estimate(policy, episodes)
    assert results["is"]["v_target"] == pytest.approx(plain, rel=1e-5)
    assert results["wis"]["v_target"] == pytest.approx(weighted, rel=1e-5)
    returns = [sum(0.9**t * r for t, r in enumerate(e["rewards"])) for e in episodes]
    for result in results.values():
        assert result["v_behavior"] == pytest.approx(np.mean(returns), rel=1e-5)
        assert result["v_gain"] == pytest.approx(result["v_target"] / result["v_behavior"])
        assert result["v_delta"] == pytest.approx(result["v_target"] - result["v_behavior"])
        assert result["num_episodes"] == 40
        assert 1 <= result["ess"] < 40
    for gamma in (2.0, -0.1, "1"):
        with pytest.raises(ConfigError, match="gamma: expected a number from 0 to 1"):
            estimate(policy, episodes, gamma=gamma)
    undiscounted = estimate(policy, episodes, gamma=1.0, methods=["is"])
    assert set(undiscounted) == {"is"}
    expected = reference_estimates(policy, episodes, 1.0)[0]
    assert undiscounted["is"]["v_target"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.int8])
def test_observations_are_normalized_as_in_training(tmp_path, dtype):
    require_extra("offline")
    settings = {"seed": 0, "gamma": 0.9, "normalize_observations": True}
    box = BOX if dtype is np.float32 else spaces.Box(-128, 127, BOX.shape, np.int8)
    policy = A2CTorchPolicy(box, spaces.Discrete(2), settings)
    policy.flat.vector.data *= 3
    episodes = random_episodes()
    if dtype is np.int8:
        episodes = [e.with_columns(obs=(20 * e["obs"]).astype(dtype)) for e in episodes]
    observations = np.concatenate([episode["obs"] for episode in episodes])
    policy.observation_filter.new_stats.update(5 * observations + 1)
    policy.observation_filter.merge_stats(policy.observation_filter.take_new_stats())
    normalized = [e.with_columns(obs=policy.observation_filter(e["obs"])) for e in episodes]
    plain, weighted = reference_estimates(policy, normalized, 0.9)
    writer = ParquetWriter(tmp_path)  # files have them as the environment returned them
    for episode in episodes:
        writer.add(episode)
    writer.flush()
    for results in (estimate(policy, normalized), estimate(policy, tmp_path)):
        assert results["is"]["v_target"] == pytest.approx(plain, rel=1e-5)
        assert results["wis"]["v_target"] == pytest.approx(weighted, rel=1e-5)


def test_likelihoods_are_computed_for_some_rows_at_a_time(policy, monkeypatch):
    sizes, compute = [], policy.compute_log_likelihoods

    def record(actions, obs_batch):
        sizes.append(len(actions))
        return compute(actions, obs_batch)

    whole = SampleBatch.concat_samples(random_episodes())
    expected = estimate(policy, whole)
    monkeypatch.setattr("flowrl.offline.off_policy_evaluation.ROWS_AT_A_TIME", 50)
    policy.compute_log_likelihoods = record
    results = estimate(policy, whole)
    assert max(sizes) <= 50 < whole.count
    for method, result in expected.items():
        assert results[method] == pytest.approx(result, rel=1e-5)


def test_actions_that_are_not_finite_are_rejected():
    continuous = A2CTorchPolicy(BOX, BOX, {"seed": 0})
    episode = episode_batch(0, np.full((3, 3), np.nan, np.float32), [1.0, 1.0, 1.0])
    with pytest.raises(OfflineDataError, match="likelihoods of the recorded actions are not fin"):
        estimate(continuous, episode)


def test_estimate_of_the_recorded_policy_is_its_mean_return(policy):
    episodes = []
    for episode in random_episodes():
        logp = policy.compute_log_likelihoods(episode["actions"], episode["obs"])
        episodes.append(episode.with_columns(action_logp=logp))
    for result in estimate(policy, episodes).values():
        assert result["v_target"] == pytest.approx(result["v_behavior"], rel=1e-5)
        assert result["ess"] == pytest.approx(40, rel=1e-5)


def test_estimates_converge_to_the_true_value(policy):
    """The true value is known: the discounted probability of action 1 at each step."""
    policy.model.policy_head.bias.data[1] += 1.0
    episodes = random_episodes(4000, longest=3)
    probs = [
        np.exp(policy.compute_log_likelihoods(np.ones(e.count, np.int64), e["obs"]))
        for e in episodes
    ]
    true_value = np.mean([sum(0.9**t * p for t, p in enumerate(episode)) for episode in probs])
    results = estimate(policy, episodes)
    for method in ("is", "wis"):
        standard_error = results[method]["v_target_std"] / np.sqrt(4000)
        assert abs(results[method]["v_target"] - true_value) < 4 * standard_error
        assert abs(results[method]["v_delta"]) > 4 * standard_error  # the policies differ enough


@pytest.mark.parametrize("method", ["is", "wis"])
def test_policy_with_longer_episodes_has_a_higher_value(policy, method):
    """Action 0 ends the episode, each step has reward 1; the recorded policy is uniform."""
    policy.model.policy_head.weight.data.zero_()
    policy.model.policy_head.bias.data[:] = torch.tensor([0.0, 0.8])
    prob_stay = float(torch.softmax(policy.model.policy_head.bias.detach(), 0)[1])
    rng, episodes = np.random.default_rng(0), []
    for number in range(4000):
        steps = int(min(rng.geometric(0.5), 12))
        actions = np.ones(steps, np.int64)
        actions[-1] = 0 if steps < 12 else rng.integers(0, 2)
        episodes.append(episode_batch(number, actions, np.ones(steps)))
    true_value = sum(0.9**t * prob_stay**t for t in range(12))
    result = estimate(policy, episodes)[method]
    assert result["v_target"] == pytest.approx(true_value, rel=0.06)
    assert result["v_behavior"] < 0.8 * true_value


def test_weights_may_overflow_or_vanish(policy):
    steps = 3000
    policy.model.policy_head.weight.data.zero_()
    policy.model.policy_head.bias.data[:] = torch.tensor([0.0, 5.0])
    long_episode = episode_batch(999, np.ones(steps, np.int64), np.ones(steps))
    results = estimate(policy, [long_episode, *random_episodes(3)])
    assert results["is"]["v_target"] == float("inf") or results["is"]["v_target"] > 1e6
    assert results["wis"]["v_target"] == pytest.approx(10, rel=0.01)  # 1 / (1 - gamma)
    assert results["wis"]["ess"] == pytest.approx(1)
    greedy = DQNTorchPolicy(BOX, spaces.Discrete(2), {"seed": 0})
    best = int(greedy.compute_actions(np.zeros((1, 3), np.float32), explore=False)[0][0])
    impossible = long_episode.with_columns(actions=np.full(steps, 1 - best))
    results = estimate(greedy, impossible)
    assert (results["is"]["v_target"], results["wis"]["v_target"]) == (0, 0)
    assert results["wis"]["ess"] == 0


def test_weights_of_unlikely_episodes_are_divided_by_their_mean(policy):
    """The log-likelihood ratio of the whole episodes is about -100,000."""
    policy.model.policy_head.weight.data.zero_()
    policy.model.policy_head.bias.data[:] = torch.tensor([0.0, 100.0])
    steps = 1000
    episodes = [episode_batch(i, np.zeros(steps, np.int64), np.full(steps, i)) for i in (1, 3)]
    results = estimate(policy, episodes, gamma=1.0)
    assert results["wis"]["v_target"] == pytest.approx(2 * steps)
    assert results["wis"]["ess"] == pytest.approx(2)
    assert results["is"]["v_target"] < 1e-40


def test_overflowing_weights_of_rewards_of_zero_do_not_give_nan(policy):
    steps = 3000
    policy.model.policy_head.weight.data.zero_()
    policy.model.policy_head.bias.data[:] = torch.tensor([0.0, 5.0])
    sparse = np.arange(steps) == 1400  # weights overflow before and after the reward
    episodes = [episode_batch(999, np.ones(steps, np.int64), sparse), *random_episodes(3)]
    with np.errstate(all="raise", under="ignore"):
        positive = estimate(policy, episodes)["is"]
        negative = estimate(policy, [e.with_columns(rewards=-e["rewards"]) for e in episodes])["is"]
    assert (positive["v_target"], negative["v_target"]) == (np.inf, -np.inf)
    assert np.isnan(positive["v_target_std"])
    both = sparse - 2.0 * (np.arange(steps) == 1401)
    mixed = estimate(policy, episode_batch(0, np.ones(steps, np.int64), both))["is"]
    assert np.isnan(mixed["v_target"])


def test_rows_may_be_in_any_order_and_in_several_batches(policy, tmp_path):
    require_extra("offline")
    episodes = random_episodes()
    rows = SampleBatch.concat_samples(episodes)
    shuffled = rows.take_rows(np.random.default_rng(1).permutation(rows.count))
    expected = estimate(policy, episodes)
    batches = [shuffled[:30], shuffled[30:31], shuffled[31:]]
    for results in (estimate(policy, batches), estimate(policy, (batch for batch in batches))):
        assert results["wis"]["v_target"] == pytest.approx(expected["wis"]["v_target"])
    for i, batch in enumerate(batches):
        write_parquet(tmp_path / f"{i}.parquet", batch)
    write_parquet(tmp_path / "other.parquet", episodes[0], policy_id="other")
    results = estimate(policy, tmp_path)
    assert results["is"]["v_target"] == pytest.approx(expected["is"]["v_target"])


def test_episodes_of_two_runs_are_not_merged(policy, tmp_path):
    """Both runs use the same episode ids; a resumed run continues its own."""
    require_extra("offline")
    runs = [random_episodes(20, seed=1), random_episodes(20, seed=2)]
    for name, episodes in zip(("a", "b"), runs, strict=True):
        rows = SampleBatch.concat_samples(episodes)
        writer = ParquetWriter(tmp_path / name)
        writer.add(rows[:11])
        writer.flush()
        resumed = ParquetWriter(tmp_path / name)  # in the middle of an episode
        resumed.load_state_dict(writer.state_dict())
        resumed.add(rows[11:])
        resumed.flush()
    (tmp_path / "both").mkdir()
    for path in [*parquet_files(tmp_path / "a"), *parquet_files(tmp_path / "b")]:
        path.rename(tmp_path / "both" / path.name)
    result = estimate(policy, tmp_path / "both")["is"]
    assert (result["num_episodes"], result["num_episodes_left_out"]) == (40, 0)
    separate = [estimate(policy, episodes)["is"]["v_target"] for episodes in runs]
    assert result["v_target"] == pytest.approx(np.mean(separate))


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float32])
def test_flags_may_be_numbers(policy, dtype):
    episodes = [*random_episodes()[:-1], random_episodes()[-1][:-1]]
    cast = [
        e.with_columns(
            terminateds=e["terminateds"].astype(dtype), truncateds=e["truncateds"].astype(dtype)
        )
        for e in episodes
    ]
    assert estimate(policy, cast) == estimate(policy, episodes)


def test_incomplete_episodes_are_omitted(policy):
    episodes = [episode for episode in random_episodes() if episode.count > 2]
    no_start, no_end = episodes[0][1:], episodes[1][:-1]
    no_middle = SampleBatch.concat_samples([episodes[2][:1], episodes[2][2:]])
    result = estimate(policy, [no_start, no_end, no_middle, *episodes[3:]])["is"]
    assert result["num_episodes_left_out"] == 3
    complete = estimate(policy, episodes[3:])["is"]
    assert result["v_target"] == pytest.approx(complete["v_target"])


def test_recorded_ppo_run_is_evaluated(tmp_path):
    require_extra("offline")
    config = PPOConfig(env="CartPole-v1", seed=1, train_batch_size=400, sgd_minibatch_size=100)
    with config.offline_data(output=str(tmp_path)).build() as algorithm:
        initial_weights = algorithm.get_policy().get_weights()
        algorithm.train()
        policy = algorithm.get_policy()
        policy.set_weights(initial_weights)
    result = estimate(policy, tmp_path)["is"]
    assert result["v_target"] == pytest.approx(result["v_behavior"], rel=1e-4)
    assert result["num_episodes"] > 5
    (path,) = parquet_files(tmp_path)
    last_episode_ended = read_parquet(path)[1]["terminateds"][-1]
    assert result["num_episodes_left_out"] == 1 - last_episode_ended


def test_invalid_policies_and_experience_are_rejected(policy, tmp_path):
    episodes = random_episodes(3)
    for methods in (["dm"], "dm", [], None, 3, [["is"]]):
        with pytest.raises(ConfigError, match=f"is, wis, got {re.escape(repr(methods))}"):
            estimate(policy, episodes, methods=methods)
    with pytest.raises(ConfigError, match=r"expected a Policy \(algorithm\.get_policy"):
        estimate("ppo", episodes)
    with pytest.raises(ConfigError, match="Minari datasets do not store action likelihoods"):
        estimate(policy, "minari:tests/pendulum-v0")
    assert estimate(policy, episodes, methods="is").keys() == {"is"}
    with pytest.raises(OfflineDataError, match=r"action_logp.*PPO, A2C"):
        estimate(policy, [episodes[0].without_columns("action_logp")])
    with pytest.raises(OfflineDataError, match=r"no column 'truncateds' .* eps_id, t$"):
        estimate(policy, [episodes[0].without_columns("truncateds")])
    with pytest.raises(OfflineDataError, match="no complete episode"):
        estimate(policy, [e[1:] for e in episodes if e.count > 1])
    with pytest.raises(OfflineDataError, match="no rows"):
        estimate(policy, [])
    write_parquet(tmp_path / "a.parquet", episodes[0].without_columns("action_logp"))
    with pytest.raises(OfflineDataError, match=r"a\.parquet: there is no column 'action_logp'"):
        estimate(policy, tmp_path)
    with pytest.raises(OfflineDataError, match=r"no rows of policy 'p', only of 'default_policy'"):
        estimate(policy, tmp_path, policy_id="p")
    (tmp_path / "a.parquet").unlink()
    for name in ("rewards", "action_logp"):
        missing = np.full(episodes[0].count, np.nan)
        with pytest.raises(OfflineDataError, match=f"column '{name}' has values that are not fin"):
            estimate(policy, [episodes[0].with_columns(**{name: missing})])
    column = episodes[0]["action_logp"][:, None]
    with pytest.raises(OfflineDataError, match="column 'action_logp' must have the shape"):
        estimate(policy, [episodes[0].with_columns(action_logp=column)])
    several = MultiAgentBatch({"p": episodes[0]}, episodes[0].count)
    for experience in ([dict(episodes[0])], [None], several):
        with pytest.raises(ConfigError, match="expected SampleBatches, got a"):
            estimate(policy, experience)
    wrong_shape = np.zeros((episodes[0].count, 4), np.float32)
    with pytest.raises(OfflineDataError, match="do not fit the spaces"):
        estimate(policy, [episodes[0].with_columns(obs=wrong_shape)])
    with pytest.raises(OfflineDataError, match="there is no such folder"):
        estimate(policy, tmp_path / "missing")
    recurrent = A2CTorchPolicy(BOX, spaces.Discrete(2), {"model": {"use_lstm": True}})
    with pytest.raises(ConfigError, match="single observations"):
        estimate(recurrent, episodes)
    deterministic = TD3TorchPolicy(BOX, BOX, {})
    continuous = [episode.with_columns(actions=episode["obs"]) for episode in episodes]
    with pytest.raises(ConfigError, match="likelihood"):
        estimate(deterministic, continuous)


def test_greedy_policy_ignores_episodes_from_other_actions():
    policy = DQNTorchPolicy(BOX, spaces.Discrete(2), {"seed": 0, "gamma": 0.9})
    episodes = random_episodes(500, longest=3)
    total = 0.0
    for episode in episodes:
        best = policy.compute_actions(episode["obs"], explore=False)[0]
        for t in range(episode.count):
            if (best[: t + 1] == episode["actions"][: t + 1]).all():
                total += 0.9**t * 2 ** (t + 1) * float(episode["rewards"][t])
    result = estimate(policy, episodes)["is"]
    assert result["v_target"] == pytest.approx(total / 500, rel=1e-5)
    assert result["v_target"] > 0


def test_rows_that_occur_several_times_are_reported(policy, caplog):
    first, second = random_episodes(2)
    with pytest.raises(OfflineDataError, match="several rows have the same eps_id"):
        estimate(policy, [first, first])
    assert estimate(policy, [first, first, second])["is"]["num_episodes_left_out"] == 1
    assert "estimate leaves out episodes (1 ids): several rows have the same" in caplog.text


@pytest.mark.parametrize("experience", [None, 3])
def test_experience_of_another_type_is_rejected(policy, experience):
    with pytest.raises(ConfigError, match="expected a folder, a SampleBatch or an iterable"):
        estimate(policy, experience)


def test_memory_does_not_depend_on_the_longest_episode(policy):
    lengths = [1] * 1000 + [1000]
    batch = SampleBatch.concat_samples(
        [episode_batch(k, np.zeros(n, np.int64), np.ones(n)) for k, n in enumerate(lengths)]
    )
    tracemalloc.start()
    estimate(policy, batch)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 * batch.size_bytes()


def test_sequences_and_padding_do_not_change_the_estimate(policy, monkeypatch):
    monkeypatch.setattr(off_policy_evaluation, "ROWS_AT_A_TIME", 7)
    episodes = SampleBatch.concat_samples(random_episodes(20))
    expected = estimate(policy, episodes, gamma=np.float32(0.9))
    lengths = sequence_lengths(5, episodes["eps_id"])
    sequences = episodes.with_columns(seq_lens=lengths)
    for batch in (sequences, sequences.right_zero_pad(5)):
        assert estimate(policy, batch, gamma=np.float32(0.9)) == expected
