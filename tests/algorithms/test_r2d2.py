"""R2D2: the loss on sequences against a step-by-step unroll, stored states, burn-in, the plan."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from flowrl.algorithms.r2d2 import R2D2Config, R2D2TorchPolicy, inverse_rescale_value, rescale_value
from flowrl.data import SampleBatch
from flowrl.envs import make_multi_agent
from flowrl.policies import ConfigError, PolicySpec, ViewRequirement
from flowrl.sampling import RolloutWorker
from flowrl.trainer.plan_settings import plan_config

from ..learning_envs import HiddenVelocities
from ..sampling.fakes import CountEnv

SMALL = {
    "fcnet_hiddens": [8],
    "use_lstm": True,
    "lstm_cell_size": 6,
    "max_seq_len": 5,
    "burn_in": 3,
}


def test_unscaled_inverts_scaled():
    x = np.concatenate([-np.logspace(-3, 5, 30), [0.0], np.logspace(-3, 5, 30)])
    for eps in (1e-3, 1e-2):
        np.testing.assert_allclose(
            inverse_rescale_value(rescale_value(x, eps), eps), x, rtol=1e-6, atol=1e-9
        )
    assert rescale_value(np.array([3.0, -3.0]), 0.01).tolist() == pytest.approx([1.03, -1.03])


@pytest.mark.parametrize("lost", [[], [2], [1, 4], [3, 6]])
def test_targets_end_at_lost_lives_inside_of_a_sequence(lost):
    lens, gamma, n_step = np.array([5, 3]), 0.9, 3
    observations, actions = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)
    config = {"seed": 0, "gamma": gamma, "n_step": n_step, "use_h_function": False}
    policy = R2D2TorchPolicy(observations, actions, {**config, "model": SMALL})
    rewards = np.arange(1.0, 9, dtype=np.float32)
    terminateds = np.isin(np.arange(8), lost)
    batch = policy.tensors(SampleBatch(rewards=rewards, terminateds=terminateds))
    # of each sequence's observations, with the last one
    scores, q = np.random.default_rng(0).standard_normal((2, 10, 2)).astype(np.float32)
    q[3] = -1e9  # all actions are masked
    values = q[np.arange(10), scores.argmax(1)]
    values[3] = 0
    targets = policy._sequence_targets(batch, lens, scores, q)
    expected = []
    for start, length, shift in ((0, 5, 0), (5, 3, 1)):
        for row in range(start, start + length):
            total, discount, at = 0.0, 1.0, row
            for _ in range(n_step):
                total += discount * rewards[at]
                discount *= gamma
                at += 1
                if terminateds[at - 1] or at == start + length:
                    break
            bootstrap = 0.0 if terminateds[at - 1] else discount * values[at + shift]
            expected.append(total + bootstrap)
    np.testing.assert_allclose(targets, expected, rtol=1e-5)


def sampled(policy_config, rows=34, length=11):
    """Return a worker of CountEnv (episodes of `length` steps), its policy, and a fragment."""
    worker = RolloutWorker(
        lambda context: CountEnv(length),
        R2D2TorchPolicy,
        R2D2Config(seed=0, rollout_fragment_length=rows, learning_starts=1, **policy_config),
    )
    batch = worker.sample()
    policy = worker.policy_map["default_policy"]
    with torch.no_grad():  # make the networks differ, with outputs that are not tiny
        draws = torch.Generator().manual_seed(1)
        for vector in (policy.flat.vector, policy._target.vector):
            vector.add_(0.2 * torch.randn(vector.shape, generator=draws))
    return worker, policy, batch


def q_values(policy, outputs, model):
    state_values = model.value_function() if policy.config.dueling else None
    return policy.q_function.values(outputs, state_values)


def unroll(model, policy, rows, state):
    """Return the Q-values [rows, n] of a model that runs on one row at a time."""
    values = []
    for row in rows:
        inputs = {"obs": torch.as_tensor(row["obs"])[None]}
        for name in ("prev_actions", "prev_rewards"):
            if name in row:
                inputs[name] = torch.as_tensor(row[name])[None]
        with torch.no_grad():
            outputs, state = model(inputs, state, None)
            values.append(q_values(policy, outputs, model)[0].double().numpy())
    return values


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n_step": 1, "double_q": False},
        {"use_h_function": False, "dueling": False},
        {"zero_init_states": True},
        {"model": {**SMALL, "burn_in": 0}},
        {"model": {**SMALL, "lstm_use_prev_action": True, "lstm_use_prev_reward": True}},
        {"model": {**SMALL, "lstm_cell_type": "gru"}},
    ],
    ids=["default", "one step", "unscaled", "zero states", "no burn-in", "previous", "gru"],
)
def test_loss_matches_a_step_by_step_unroll(more):
    settings = {"model": SMALL, "gamma": 0.9, "n_step": 3, **more}
    worker, policy, batch = sampled(settings)
    buffer = policy.config.replay_buffer()
    buffer.add(batch)
    drawn = buffer.buffers["default_policy"].sample(6)
    loss = float(policy.loss(policy.tensors(drawn)).detach())

    config = policy.config
    total, errors, count = 0.0, [], 0
    begins = np.cumsum(drawn["seq_lens"]) - drawn["seq_lens"]
    for index, (begin, length) in enumerate(zip(begins, drawn["seq_lens"], strict=True)):
        rows = [
            {name: drawn[name][i] for name in drawn if name != "seq_lens" and name[:5] != "state"}
            for i in range(begin, begin + length)
        ]
        last = dict(rows[-1], obs=rows[-1]["new_obs"])
        last |= {"prev_actions": rows[-1]["actions"], "prev_rewards": rows[-1]["rewards"]}
        if "prev_actions" not in rows[0]:
            del last["prev_actions"], last["prev_rewards"]
        num_states = len(policy.get_initial_state())
        state = [torch.as_tensor(drawn[f"state_in_{i}"][index])[None] for i in range(num_states)]
        if config.zero_init_states:
            state = [torch.zeros_like(part) for part in state]
        online = unroll(policy.model, policy, [*rows, last], state)
        target = unroll(policy.target_model, policy, [*rows, last], state)
        for i, row in enumerate(rows):
            if not row.get("loss_mask", True):
                continue
            td_target, k = 0.0, 0
            while k < config.n_step and i + k < length:
                td_target += 0.9**k * float(rows[i + k]["rewards"])
                k += 1
            if not (i + k == length and rows[-1]["terminateds"]):
                selector = online if config.double_q else target
                value = target[i + k][int(np.argmax(selector[i + k]))]
                if config.use_h_function:
                    value = float(
                        inverse_rescale_value(np.float64(value), config.h_function_epsilon)
                    )
                td_target += 0.9**k * value
            if config.use_h_function:
                td_target = float(rescale_value(np.float64(td_target), config.h_function_epsilon))
            error = online[i][int(row["actions"])] - td_target
            errors.append(error)
            total += 0.5 * error**2 if abs(error) < 1 else abs(error) - 0.5
            count += 1
    weights = drawn["weights"]
    assert len(set(weights.tolist())) == 1  # all new rows have the same priority
    assert loss == pytest.approx(total / count, rel=1e-4)
    policy.learn_on_minibatches(drawn)
    np.testing.assert_allclose(policy.row_stats["td_error"], errors, atol=1e-4)
    worker.stop()


def test_stored_states_equal_those_of_an_unroll_from_the_start():
    """With unchanged weights, values computed from a stored state in the middle of an episode equal
    those of an unroll of the whole episode; values computed from zeros do not."""
    worker, policy, _ = sampled({"model": {**SMALL, "burn_in": 0}}, rows=11)
    batch = worker.sample()  # the first fragment was sampled with other weights
    assert batch["t"].tolist() == list(range(11))
    buffer = policy.config.new_buffer()
    buffer.add(batch)
    rows = [{"obs": batch["obs"][i]} for i in range(11)]
    state = [torch.as_tensor(part)[None] for part in policy.get_initial_state()]
    episode_values = unroll(policy.model, policy, rows, state)
    for use_stored in (True, False):
        policy.config = policy.config.updated(zero_init_states=not use_stored)
        sequences = buffer.sample(20)
        tensors = policy.tensors(sequences)
        lens = sequences["seq_lens"].astype(np.int64)
        with torch.no_grad():
            outputs, _ = policy.model.from_batch(policy._with_last_next_states(tensors, lens))
            values = q_values(policy, outputs, policy.model).numpy()
        equal, position = [], 0
        for begin, length in zip(np.cumsum(lens) - lens, lens, strict=True):
            first = int(sequences["obs"][begin][1] - batch["obs"][0][1])
            expected = np.array(episode_values[first : first + length])
            actual = values[position : position + length]
            equal.append(first == 0 or np.allclose(actual, expected, atol=1e-5))
            position += length + 1
        assert all(equal) is use_stored
    worker.stop()


def test_priorities_of_sequences_come_from_their_rows():
    _, policy, batch = sampled({"model": SMALL})
    buffer = policy.config.replay_buffer()
    buffer.add(batch)
    drawn = buffer.buffers["default_policy"].sample(4)
    policy.learn_on_minibatches(drawn)
    indexes, td_errors = policy.row_stats["batch_indexes"], policy.row_stats["td_error"]
    assert len(td_errors) == len(indexes) == int(drawn["loss_mask"].sum())
    policy_buffer = buffer.buffers["default_policy"]
    policy_buffer.update_priorities(indexes, abs(td_errors))
    errors = abs(td_errors[indexes == indexes[0]])
    # a sequence that was drawn twice has the same errors twice
    priority = 0.9 * errors.max() + 0.1 * errors.mean() + policy_buffer.eps
    weight = policy_buffer.weights[indexes[0] % policy_buffer.capacity]
    assert weight == pytest.approx(priority**policy_buffer.alpha, rel=1e-4)


def test_unsupported_models_settings_and_batches_are_rejected():
    box = spaces.Box(-1, 1, (3,), np.float32)
    with pytest.raises(ConfigError, match="recurrent network"):
        R2D2TorchPolicy(box, spaces.Discrete(2), {"model": {"use_lstm": False, "burn_in": 0}})
    with pytest.raises(ConfigError, match="for Discrete actions"):
        R2D2TorchPolicy(box, box, {})
    cases = [{"num_atoms": 51}, {"noisy": True}, {"h_function_epsilon": 0}]
    cases += [{"replay_mode": "lockstep"}, {"rollout_fragment_length": -5}]
    small = {"train_batch_size": 4, "learning_starts": 10}
    cases.append({"replay_buffer_capacity": 50, **small, "num_replay_shards": 2})
    cases[-1] |= {"model": {"max_seq_len": 26}}
    cases.append({"replay_buffer_capacity": 25, **small, "model": {"max_seq_len": 26}})
    assert R2D2Config(rollout_fragment_length="auto").rollout_fragment_length == "auto"
    for invalid in cases:
        with pytest.raises(ConfigError, match=next(iter(invalid))):
            R2D2Config(**invalid)
    for more, message in (
        ({"num_framestacks": 2}, "not several observations at once"),
        ({"use_attention": True, "use_lstm": False}, "burn_in needs use_lstm=True"),
    ):
        with pytest.raises(ConfigError, match=message):
            R2D2TorchPolicy(box, spaces.Discrete(2), {"model": {**SMALL, **more}})
    policy = R2D2TorchPolicy(box, spaces.Discrete(2), {"model": {**SMALL, "burn_in": 0}})
    rows = SampleBatch(
        obs=np.zeros((4, 3), np.float32),
        new_obs=np.zeros((4, 3), np.float32),
        actions=np.zeros(4, np.int64),
        rewards=np.zeros(4, np.float32),
        terminateds=np.zeros(4, bool),
    )
    with pytest.raises(ConfigError, match="sequences"):
        policy.learn_on_batch(rows)


def test_run_resumes_from_a_checkpoint(tmp_path):
    config = plan_config("r2d2").updated(
        env=HiddenVelocities,
        seed=3,
        learning_starts=300,
        num_envs_per_worker=2,
        min_sample_timesteps_per_iteration=240,
    )
    with config.build(plan="r2d2") as algorithm:
        algorithm.train()
        algorithm.train()
        path = algorithm.save(tmp_path / "c")
        expected = algorithm.train()
    with config.build(plan="r2d2") as resumed:
        resumed.restore(path)
        result = resumed.train()
    for name in ("timesteps_total", "num_env_steps_trained", "episode_reward_mean"):
        assert result[name] == expected[name]
    stats, expected_stats = (
        r["info"]["learner"]["default_policy"]["learner_stats"] for r in (result, expected)
    )
    assert stats == expected_stats


@pytest.mark.parametrize("names", [["default_policy"], ["a"], ["a", "b"]], ids="-".join)
def test_env_steps_are_rows_and_not_sequences(names):
    settings = {"learning_starts": 100, "min_sample_timesteps_per_iteration": 400, "seed": 1}
    config = R2D2Config(
        env=make_multi_agent("CartPole-v1"),
        env_config={"num_agents": len(names)},
        policies={name: PolicySpec() for name in names},
        policy_mapping_fn=lambda agent_id, *args, **kwargs: names[agent_id % len(names)],
        train_batch_size=4,
        **settings,
    )
    with config.build() as algorithm:
        result = algorithm.train()
        batches = algorithm.get_policy(names[0]).learner.num_updates
    steps, rows = result["num_env_steps_trained"], result["num_agent_steps_trained"]
    assert rows / len(names) <= steps <= rows
    assert steps > 3 * 4 * batches  # sequences have 20 rows, and fewer at the ends of episodes


class Growing(CountEnv):
    """Rewards grow with the step and are far above 1."""

    def step(self, action):
        observation, _, terminated, truncated, info = super().step(action)
        self.calls = getattr(self, "calls", 0) + 1
        return observation, 100.0 * self.calls, terminated, truncated, info


@pytest.mark.parametrize("scaling", [{"clip_rewards": True}, {"normalize_rewards": True}])
def test_network_sees_unscaled_rewards_also_after_the_last_row(scaling):
    """Acting and the other rows show the environment's rewards."""
    model = {**SMALL, "burn_in": 0, "lstm_use_prev_reward": True}
    config = R2D2Config(
        seed=0, rollout_fragment_length=12, learning_starts=1, model=model, **scaling
    )
    worker = RolloutWorker(lambda context: Growing(30), R2D2TorchPolicy, config)
    policy, batch = worker.policy_map["default_policy"], worker.sample()
    buffer = policy.config.replay_buffer()
    buffer.add(batch)
    drawn = policy.tensors(buffer.buffers["default_policy"].sample(4))
    lens = drawn.array("seq_lens").astype(np.int64)
    shown = policy._with_last_next_states(drawn, lens).array("prev_rewards")
    assert lens.min() > 1
    for end in np.cumsum(lens + 1) - 1:
        assert shown[end] == pytest.approx(shown[end - 1] + 100.0)


class SmallGRU(torch.nn.Module):
    """A recurrent network of a user."""


def test_custom_recurrent_network_replaces_the_default_one():
    config = R2D2Config(env="CartPole-v1", model={"custom_model": SmallGRU, "max_seq_len": 6})
    assert (config.model.use_lstm, config.model.burn_in) == (False, 10)
    assert R2D2Config(model={"custom_model": SmallGRU, "burn_in": 0}).model.burn_in == 0
    changed = R2D2Config().training(model={"custom_model": SmallGRU})
    assert not changed.model.use_lstm


def test_views_that_acting_does_not_read_do_not_change_learning():
    losses = []
    for extra in (False, True):
        config = {"seed": 0, "num_envs_per_worker": 2, "rollout_fragment_length": 30}
        worker = RolloutWorker("CartPole-v1", R2D2TorchPolicy, {**config, "model": SMALL})
        if extra:
            view = ViewRequirement("rewards", shift=-1, used_for_compute_actions=False)
            worker.policy.view_requirements["last_reward"] = view
        losses.append(worker.policy.learn_on_minibatches(worker.sample())["total_loss"])
    assert losses[0] == losses[1]


def test_minibatches_are_compared_with_the_rows_of_a_train_batch():
    model = {"use_lstm": True, "max_seq_len": 10, "burn_in": 0}
    assert R2D2Config(train_batch_size=8, sgd_minibatch_size=80, model=model)
    message = "train_batch_size=8, with at most 80 rows, is smaller than sgd_minibatch_size=81"
    with pytest.raises(ConfigError, match=message):
        R2D2Config(train_batch_size=8, sgd_minibatch_size=81, model=model)


def test_states_of_differently_rescaled_values_are_rejected():
    given = spaces.Box(-1, 1, (3,)), spaces.Discrete(2)
    state = R2D2TorchPolicy(*given, R2D2Config()).get_state()
    for changes in ({"use_h_function": False}, {"h_function_epsilon": 0.1}):
        policy = R2D2TorchPolicy(*given, R2D2Config(**changes))
        with pytest.raises(ValueError, match="its values are rescaled in another way"):
            policy.set_state(state)
