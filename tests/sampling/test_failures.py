"""Failing environments and invalid values drop only the rows of their own episode."""

import itertools
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.algorithms.a2c import A2CConfig
from flowrl.data import SampleBatch
from flowrl.envs import MultiAgentEnv
from flowrl.sampling import DefaultCallbacks, RolloutWorker, SimpleListCollector

from .fakes import CountEnv, Idle, ObservedValue, WrongEnv

COLLECTORS = {"columns": None, "rows": SimpleListCollector}


@pytest.fixture(params=list(COLLECTORS))
def collector(request):
    """None samples in columns, SimpleListCollector row by row."""
    return COLLECTORS[request.param]


class FailingEnv(CountEnv):
    """Raises in the calls `at` (slot, call number); calls of all environments in a slot count."""

    def __init__(self, calls, at, slot, length=3):
        self.calls, self.at, self.slot = calls, at, slot
        self.tick("init")
        super().__init__(length)
        self.created_at = self.calls[self.slot]

    def tick(self, what):
        self.calls[self.slot] = self.calls.get(self.slot, -1) + 1
        if (self.slot, self.calls[self.slot]) in self.at:
            raise OSError(f"{what} failed")

    def reset(self, *, seed=None, options=None):
        self.tick("reset")
        observation, info = super().reset()
        # makes the observations of each environment unique
        self.buffer[0] += 100 * self.created_at
        return observation, info

    def step(self, action):
        self.tick("step")
        result = super().step(action)
        self.buffer[0] += 100 * self.created_at
        return result


def failing_worker(at, length=3, fragment=6, envs=2, collector=None, **config):
    calls = {}
    return RolloutWorker(
        lambda context: FailingEnv(calls, at, context.vector_index, length),
        ObservedValue,
        {
            "num_envs_per_worker": envs,
            "rollout_fragment_length": fragment,
            "sample_collector": collector,
            **config,
        },
    )


def segments(batch):
    """Yield (environment, observed episode, steps) of each segment."""
    cuts = np.flatnonzero(np.diff(batch["unroll_id"])) + 1
    for part in np.split(np.arange(batch.count), cuts):
        rows = batch.take_rows(part)
        assert len(set(rows["eps_id"])) == 1
        assert len(set(rows["obs"][:, 0])) == 1
        yield int(rows["env_id"][0]), float(rows["obs"][0, 0]), rows["t"].tolist()


# call 0 of each environment is its first creation, which is not repeated
@given(
    st.sets(st.tuples(st.integers(0, 1), st.integers(1, 40)), max_size=4),
    st.integers(1, 5),
    st.integers(1, 7),
    st.sampled_from(list(COLLECTORS)),
)
@settings(max_examples=40)
def test_remaining_rows_are_complete_after_any_failure(at, length, fragment, collector):
    worker = failing_worker(at, length, fragment, collector=COLLECTORS[collector])
    clean = failing_worker(set(), length, fragment, collector=COLLECTORS[collector])
    batches = [worker.sample() for _ in range(5)]
    total = sum(batch.count for batch in batches)
    assert worker.env_steps == worker.reply_tags()["env_steps"] == total
    for batch in (b for b in batches if b.count):
        for row in batch.rows():
            assert row["obs"][1] == row["t"]
            assert row["new_obs"].tolist() == [row["obs"][0], row["t"] + 1]
            assert row["rewards"] == row["t"] + 1
            ended = row["terminateds"] or row["truncateds"]
            assert ended == (row["t"] + 1 == length)
        for _, _, steps in segments(batch):
            assert steps == list(range(steps[0], steps[0] + len(steps)))
    full = [clean.sample() for _ in range(5)]
    failed = {slot for slot, _ in at}
    for a, b in zip(batches, full, strict=True):
        for slot in {0, 1} - failed:
            assert (a.get("env_id", np.array([])) == slot).sum() == (b["env_id"] == slot).sum()
    assert all(
        e.episode_return == length * (length + 1) / 2 and e.episode_length == length
        for e in worker.get_metrics()
    )


def test_rows_returned_before_a_failure_are_kept(collector):
    # calls: init, reset, six steps; the seventh step, in the second fragment, raises
    worker = failing_worker({(0, 8)}, length=10, envs=1, collector=collector)
    first, second = worker.sample(), worker.sample()
    assert first["t"].tolist() == [0, 1, 2, 3, 4, 5]
    assert second["t"].tolist() == [0, 1, 2, 3, 4]
    assert second["eps_id"][0] != first["eps_id"][0]
    tags = worker.reply_tags()
    assert (tags["faulty_episodes"], tags["env_restarts"]) == (1, 1)


@pytest.mark.parametrize("call", ["__init__", "reset", "step"])
def test_permanent_failure_raises_with_its_traceback(collector, call):
    class FailingMethod(CountEnv):
        pass

    calls = []

    def fail(self, *args, **kwargs):
        calls.append(1)
        raise OSError("the simulator is gone")

    setattr(FailingMethod, call, fail)
    with pytest.raises(OSError, match="the simulator is gone") as caught:
        RolloutWorker(
            lambda context: FailingMethod() if context.vector_index else CountEnv(),
            ObservedValue,
            {"num_envs_per_worker": 2, "sample_collector": collector, "max_num_env_restarts": 2},
        ).sample()
    notes = " ".join(caught.value.__notes__)
    assert "sub-environment 1 of worker 0" in notes
    if call == "__init__":  # the first creation is not repeated
        assert len(calls) == 1
    else:
        assert "worker 0, which failed 3 times in a row" in notes
        assert len(calls) == 3
    assert "fail" in [entry.name for entry in caught.traceback]


class FailingStep(CountEnv):
    """Raises at a step of every episode, `at` in turn, and appends to `failures`."""

    def __init__(self, at, failures, error=OSError):
        super().__init__(length=10**6)
        self.at, self.failures, self.error = at[len(failures) % len(at)], failures, error

    def step(self, action):
        if self.steps == self.at:
            self.failures.append(self.at)
            raise self.error("the simulator has crashed")
        return super().step(action)


@pytest.mark.parametrize(
    ("at", "error", "restarts", "failures"),
    [
        ([99], OSError, 2, 3),
        pytest.param([100, 101], OSError, 2, 201, marks=pytest.mark.slow),
        ([100, 101], OSError, 0, 1),
        ([100], OSError, 2, 4),  # the same step as before: a deterministic error
        ([100, 101], TimeoutError, 2, 3),
    ],
)
def test_failures_after_100_steps_are_allowed_100_times_as_often(
    collector, at, error, restarts, failures, caplog
):
    raised = []
    worker = RolloutWorker(
        lambda context: FailingStep(at, raised, error),
        ObservedValue,
        {
            "rollout_fragment_length": 25_000,
            "sample_collector": collector,
            "max_num_env_restarts": restarts,
        },
    )
    with pytest.raises(OSError, match="crashed") as caught:
        worker.sample()
    assert len(raised) == failures
    assert (f"failed {failures} times in a row" in caught.value.__notes__[0]) == (failures > 1)
    if restarts:
        limit = 200 if failures > 3 else 2
        assert f"at most {limit} times in a row" in caplog.text


@pytest.mark.slow
def test_complete_fragments_start_the_count_of_late_failures_again(collector):
    raised = []
    worker = RolloutWorker(
        lambda context: FailingStep([150, 151], raised),  # in every second fragment
        ObservedValue,
        {
            "rollout_fragment_length": 100,
            "sample_collector": collector,
            "max_num_env_restarts": 1,
        },
    )
    while len(raised) < 150:
        worker.sample()
    assert worker.reply_tags()["env_restarts"] == 150


@pytest.mark.parametrize("at", [6, 150])
def test_environment_that_always_fails_at_one_step_stops_the_run(collector, at):
    raised = []
    worker = RolloutWorker(
        lambda context: FailingStep([at], raised),
        ObservedValue,
        {
            "rollout_fragment_length": 4,
            "sample_collector": collector,
            "max_num_env_restarts": 2,
        },
    )
    samples = iter(worker.sample, None)
    with pytest.raises(OSError, match="crashed"):
        sum(batch.count for batch in itertools.islice(samples, 1000))
    assert len(raised) == (3 if at < 100 else 4)  # the first late one has its own count


def test_without_restarts_the_first_failure_raises_and_the_worker_recovers(collector):
    worker = failing_worker({(1, 4)}, collector=collector, max_num_env_restarts=0)
    with pytest.raises(OSError, match="step failed") as caught:
        worker.sample()
    assert "step 2 of a fragment" in " ".join(caught.value.__notes__)
    batch = worker.sample()
    assert batch.count == 12
    assert batch["t"][0] == 0


def test_stop_iteration_of_an_environment_is_an_error(collector):
    worker = RolloutWorker(
        lambda context: CountEnv(fail_at=(1, 2), fail_with=StopIteration),
        ObservedValue,
        {"sample_collector": collector, "max_num_env_restarts": 0, "rollout_fragment_length": 7},
    )
    with pytest.raises(RuntimeError, match="StopIteration was raised while sampling"):
        worker.sample()


INVALID = [
    {"obs": np.array([1, np.nan], np.float32)},
    {"obs": np.array([1, 2e6], np.float32)},
    {"reward": float("nan")},
    {"reward": np.inf},
]


def invalid_worker(collector, wrong, at=4, **config):
    created = []

    def creator(context):
        created.append(context.vector_index)
        return WrongEnv(at if created == [0] else -1, **wrong)

    return RolloutWorker(
        creator,
        ObservedValue,
        {
            "num_envs_per_worker": 2,
            "rollout_fragment_length": 7,
            "sample_collector": collector,
            **config,
        },
    )


def test_step_of_an_invalid_value_counts_from_the_start_of_the_fragment():
    """A fragment of whole episodes keeps the rows of episodes that continue."""

    class InvalidReward(CountEnv):
        def step(self, action):
            observation, reward, *rest = super().step(action)
            return observation, float("nan") if self.episode == 3 else reward, *rest

    worker = RolloutWorker(
        lambda context: InvalidReward(2) if context.vector_index == 0 else CountEnv(50),
        ObservedValue,
        {
            "num_envs_per_worker": 2,
            "rollout_fragment_length": 1,
            "batch_mode": "complete_episodes",
            "on_invalid_step": "raise",
        },
    )
    for _ in range(3):
        assert worker.sample().count == 2
    with pytest.raises(ValueError, match=r"not finite: nan, at step 0 of a fragment"):
        worker.sample()


@pytest.mark.parametrize("wrong", INVALID)
def test_invalid_values_raise_with_their_origin(collector, wrong):
    worker = invalid_worker(collector, wrong, normalize_observations=True, on_invalid_step="raise")
    with pytest.raises(ValueError, match=r"not finite|outside its space") as caught:
        worker.sample()
    text = str(caught.value) + " ".join(caught.value.__notes__)
    assert "sub-environment 0" in text
    place = "step 3 of a fragment" if collector is None else "step 0 of its episode"
    assert place in text
    assert "worker 0" in text
    for key, value in worker.policy.observation_filter.new_stats.state_dict().items():
        assert np.isfinite(value).all(), key
    assert worker.sample().count == 14


@pytest.mark.parametrize("at", [3, 4])  # with a final observation, and with another one
def test_observations_outside_a_box_are_used_with_one_warning(collector, at, caplog):
    worker = invalid_worker(collector, {"obs": np.array([1, 2e6], np.float32)}, at=at)
    batches = [worker.sample() for _ in range(3)]
    assert all(batch.count == 14 for batch in batches)
    assert (batches[0]["new_obs"][:, 1] == 2e6).sum() == 1
    (message,) = caplog.messages
    assert "worker 0: sub-environment 0 returned an observation outside its space: obs[1] is" in (
        message
    )
    assert "2000000.0, its bounds are -1.0 and 1000000.0" in message
    assert worker.reply_tags()["faulty_episodes"] == 0


@pytest.mark.parametrize("wrong", [INVALID[0], *INVALID[2:]])
def test_values_that_are_not_finite_raise_by_default(collector, wrong):
    with pytest.raises(ValueError, match=r"not finite: .*on_invalid_step: .*replace.*drop"):
        invalid_worker(collector, wrong).sample()


class LeavesItsBox(gym.Env):
    """Observes a step number, in a nested space; it leaves its Box at step 50."""

    observation_space = gym.spaces.Dict(
        {"arm": gym.spaces.Tuple([gym.spaces.Discrete(200), gym.spaces.Box(0, 49, (1,))])}
    )
    action_space = gym.spaces.Discrete(2)

    def __init__(self, state_at_50=50):
        self.state_at_50 = state_at_50

    def observe(self):
        number = self.state_at_50 if self.t == 50 else self.t
        return {"arm": (self.t, np.array([number], np.float32))}

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        return self.observe(), 1.0, self.t == 60, False, {}


def test_nested_observations_outside_a_box_do_not_stop_the_training(caplog):
    config = A2CConfig(env=LeavesItsBox, train_batch_size=100, model={"fcnet_hiddens": [4]})
    with config.build() as algorithm:
        for _ in range(2):
            algorithm.train()
    (message,) = [m for m in caplog.messages if "outside its space" in m]
    assert "obs['arm'][1][0] is 50.0, its bounds are 0.0 and 49.0" in message


def test_nested_observation_that_is_not_finite_is_named():
    config = A2CConfig(
        env=LeavesItsBox, env_config={"state_at_50": np.nan}, train_batch_size=100,
        model={"fcnet_hiddens": [4]},
    )  # fmt: skip
    with (
        config.build() as algorithm,
        pytest.raises(
            ValueError,
            match=r"^sub-environment 0 returned an observation that is not finite: "
            r"obs\['arm'\]\[1\]\[0\] is nan",
        ),
    ):
        algorithm.train()


def test_discrete_observation_outside_its_space_raises():
    class Beyond(LeavesItsBox):
        observation_space = gym.spaces.Discrete(3)

        def observe(self):
            return self.t

    with pytest.raises(ValueError, match=r"obs is 3, its bounds are 0 and 2"):
        RolloutWorker(Beyond, Idle, {"rollout_fragment_length": 5}).sample()


@pytest.mark.parametrize("wrong", INVALID)
@pytest.mark.parametrize("at", [1, 3, 4, 7])
def test_invalid_values_drop_their_episode(collector, wrong, at):
    worker = invalid_worker(
        collector, wrong, at, on_invalid_step="drop", normalize_observations=True
    )
    batch = worker.sample()
    for name in ("obs", "new_obs", "rewards", "next_values"):
        assert np.isfinite(batch[name]).all()
    assert (batch["new_obs"] <= 1e6).all()
    assert (batch["env_id"] == 1).sum() == 7
    steps = batch["t"][batch["env_id"] == 0].tolist()
    # episodes have three steps; the one with the invalid step is dropped
    before = [0, 1, 2] * ((at - 1) // 3)
    after = {1: [0, 1, 2, 0, 1, 2], 3: [0, 1, 2, 0], 4: [0, 1, 2], 7: []}[at]
    assert steps == before + after
    next_batch = worker.sample()
    assert (next_batch["env_id"] == 1).sum() == 7
    assert worker.reply_tags()["faulty_episodes"] >= 1


@pytest.mark.parametrize("wrong", INVALID)
def test_invalid_values_can_be_replaced(collector, wrong):
    batch = invalid_worker(collector, wrong, on_invalid_step="replace").sample()
    assert batch.count == 14
    for name in ("obs", "new_obs", "rewards", "next_values"):
        assert np.isfinite(batch[name]).all()
    assert (batch["new_obs"] <= 1e6).all()


class TwoAgents(MultiAgentEnv):
    """Two agents; step `fail_at` raises, step `nan_at` returns NaN to agent "b"."""

    possible_agents = ["a", "b"]
    observation_space = CountEnv.observation_space
    action_space = CountEnv.action_space

    def __init__(self, length=4, fail_at=None, nan_at=None):
        self.length, self.fail_at, self.nan_at = length, fail_at, nan_at
        self.steps = self.total = 0

    def observe(self):
        return {a: np.array([i, self.steps], np.float32) for i, a in enumerate("ab")}

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return self.observe(), {}

    def step(self, action_dict):
        self.steps += 1
        self.total += 1
        if self.total == self.fail_at:
            raise OSError("the arena failed")
        obs = self.observe()
        if self.total == self.nan_at:
            obs["b"][1] = np.nan
        done = self.steps == self.length
        return obs, dict.fromkeys("ab", 1.0), {"__all__": done}, {"__all__": False}, {}


@pytest.mark.parametrize("failure", [{"fail_at": 6}, {"nan_at": 6}])
def test_failure_drops_the_rows_of_all_agents(failure):
    def creator(context):
        first = context.vector_index == 0 and not created
        created.append(1)
        return TwoAgents(**(failure if first else {}))

    created = []
    worker = RolloutWorker(
        creator,
        {"p": ObservedValue, "q": ObservedValue},
        {
            "policy_mapping_fn": lambda agent_id: "pq"[agent_id == "b"],
            "num_envs_per_worker": 2,
            "rollout_fragment_length": 8,
            "on_invalid_step": "drop",
        },
    )
    batch = worker.sample()
    assert worker.reply_tags()["faulty_episodes"] == 1
    assert batch.env_steps() == 8 + 8 - 2
    for rows in batch.policy_batches.values():
        assert rows.count == 14
        assert np.isfinite(rows["new_obs"]).all()
        assert rows["t"][rows["env_id"] == 0].tolist() == [0, 1, 2, 3, 0, 1]


def test_worker_is_usable_after_a_callback_raises():
    class FailsOnce(DefaultCallbacks):
        raised = False

        def on_episode_step(self, *, episode, **kwargs):
            if not FailsOnce.raised and episode.length == 2:
                FailsOnce.raised = True
                raise KeyError("callback failed")

    worker = RolloutWorker(
        lambda context: CountEnv(),
        ObservedValue,
        {"callbacks_class": FailsOnce, "rollout_fragment_length": 7},
    )
    with pytest.raises(KeyError, match="callback failed") as caught:
        worker.sample()
    assert "FailsOnce.on_episode_step()" in " ".join(caught.value.__notes__)
    assert worker.env_steps == 0
    batches = [worker.sample() for _ in range(2)]
    assert SampleBatch.concat_samples(batches)["t"].tolist() == [0, 1, 2] * 4 + [0, 1]
    assert worker.env_steps == 14


class Interrupts(gym.Wrapper):
    """Raises KeyboardInterrupt in its 60th step, in the first process that has it."""

    def __init__(self, context, folder):
        super().__init__(gym.make("CartPole-v1"))
        self.file, self.steps = Path(folder) / "interrupted", 0

    def step(self, action):
        self.steps += 1
        if self.steps == 60 and not self.file.exists():
            self.file.touch()
            raise KeyboardInterrupt
        return self.env.step(action)


@pytest.mark.slow
def test_worker_that_is_interrupted_is_replaced(ray_session, tmp_path):
    config = A2CConfig(
        env=lambda context: Interrupts(context, tmp_path),
        num_workers=1,
        train_batch_size=40,
        delay_between_worker_restarts_s=0.1,
        seed=1,
    )
    with config.build() as algorithm:
        results = [algorithm.train() for _ in range(4)]
    assert (tmp_path / "interrupted").exists()
    assert results[-1]["num_remote_worker_restarts"] == 1
    assert results[-1]["num_env_steps_trained"] >= 160
