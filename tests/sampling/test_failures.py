"""Environments that break or lie cost their own episode's rows, and nothing else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.data import SampleBatch
from flowrl.envs import MultiAgentEnv
from flowrl.sampling import DefaultCallbacks, RolloutWorker, SimpleListCollector

from .fakes import CountEnv, ObservedValue, WrongEnv

WAYS = {"columns": None, "rows": SimpleListCollector}


@pytest.fixture(params=list(WAYS))
def way(request):
    return WAYS[request.param]


class Breaks(CountEnv):
    """Raises in the calls whose numbers, counted over all environments of a slot, are in `at`."""

    def __init__(self, calls, at, slot, length=3):
        self.calls, self.at, self.slot = calls, at, slot
        self.tick("init")
        super().__init__(length)
        self.made = self.calls[self.slot]

    def tick(self, what):
        self.calls[self.slot] = self.calls.get(self.slot, -1) + 1
        if (self.slot, self.calls[self.slot]) in self.at:
            raise OSError(f"{what} broke")

    def reset(self, *, seed=None, options=None):
        self.tick("reset")
        observation, info = super().reset()
        # which environment this is shows in the observation
        self.buffer[0] += 100 * self.made
        return observation, info

    def step(self, action):
        self.tick("step")
        result = super().step(action)
        self.buffer[0] += 100 * self.made
        return result


def breaking(at, length=3, fragment=6, envs=2, way=None, **config):
    calls = {}
    return RolloutWorker(
        lambda context: Breaks(calls, at, context.vector_index, length),
        ObservedValue,
        {
            "num_envs_per_worker": envs,
            "rollout_fragment_length": fragment,
            "sample_collector": way,
            **config,
        },
    )


def segments(batch):
    """The rows of each part of an episode: (environment, episode as observed, steps)."""
    cuts = np.flatnonzero(np.diff(batch["unroll_id"])) + 1
    for part in np.split(np.arange(batch.count), cuts):
        rows = batch.take_rows(part)
        assert len(set(rows["eps_id"])) == 1
        assert len(set(rows["obs"][:, 0])) == 1
        yield int(rows["env_id"][0]), float(rows["obs"][0, 0]), rows["t"].tolist()


@given(
    st.sets(st.tuples(st.integers(0, 1), st.integers(0, 40)), max_size=4),
    st.integers(1, 5),
    st.integers(1, 7),
    st.sampled_from(list(WAYS)),
)
@settings(max_examples=80, deadline=None)
def test_whatever_breaks_whole_rows_are_left(at, length, fragment, way):
    worker = breaking(at, length, fragment, way=WAYS[way])
    clean = breaking(set(), length, fragment, way=WAYS[way])
    batches = [worker.sample() for _ in range(5)]
    told = sum(batch.count for batch in batches)
    assert worker.env_steps == worker.reply_tags()["env_steps"] == told
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
    broken = {slot for slot, _ in at}
    for a, b in zip(batches, full, strict=True):
        for slot in {0, 1} - broken:
            assert (a.get("env_id", np.array([])) == slot).sum() == (b["env_id"] == slot).sum()
    assert all(
        e.episode_return == length * (length + 1) / 2 and e.episode_length == length
        for e in worker.get_metrics()
    )


def test_what_was_given_before_a_failure_stays(way):
    # calls: init, reset, step x 6, then the seventh step raises, in the second fragment
    worker = breaking({(0, 8)}, length=10, envs=1, way=way)
    first, second = worker.sample(), worker.sample()
    assert first["t"].tolist() == [0, 1, 2, 3, 4, 5]
    assert second["t"].tolist() == [0, 1, 2, 3, 4]
    assert second["eps_id"][0] != first["eps_id"][0]
    tags = worker.reply_tags()
    assert (tags["faulty_episodes"], tags["env_restarts"]) == (1, 1)


@pytest.mark.parametrize("call", ["__init__", "reset", "step"])
def test_one_that_always_raises_stops_the_run_with_its_own_traceback(way, call):
    class Broken(CountEnv):
        pass

    calls = []

    def broken(self, *args, **kwargs):
        calls.append(1)
        raise OSError("the simulator is gone")

    setattr(Broken, call, broken)
    with pytest.raises(OSError, match="the simulator is gone") as caught:
        RolloutWorker(
            lambda context: Broken() if context.vector_index else CountEnv(),
            ObservedValue,
            {"num_envs_per_worker": 2, "sample_collector": way, "max_num_env_restarts": 2},
        ).sample()
    notes = " ".join(caught.value.__notes__)
    assert "sub-environment 1, which failed 3 times in a row" in notes
    assert "worker 0" in notes
    assert len(calls) == 3
    assert "broken" in [entry.name for entry in caught.traceback]


def test_without_restarts_the_first_failure_stops_and_the_next_sample_goes_on(way):
    worker = breaking({(1, 4)}, way=way, max_num_env_restarts=0)
    with pytest.raises(OSError, match="step broke") as caught:
        worker.sample()
    assert "step 2 of a fragment" in " ".join(caught.value.__notes__)
    again = worker.sample()
    assert again.count == 12
    assert again["t"][0] == 0


def test_stop_iteration_is_no_end_of_the_stream(way):
    worker = RolloutWorker(
        lambda context: CountEnv(fail_at=(1, 2), fail_with=StopIteration),
        ObservedValue,
        {"sample_collector": way, "max_num_env_restarts": 0, "rollout_fragment_length": 7},
    )
    with pytest.raises(RuntimeError, match="StopIteration"):
        worker.sample()


BAD = [
    {"obs": np.array([1, np.nan], np.float32)},
    {"obs": np.array([1, 2e6], np.float32)},
    {"reward": float("nan")},
    {"reward": np.inf},
]


def lying(way, wrong, at=4, **config):
    made = []

    def creator(context):
        made.append(context.vector_index)
        return WrongEnv(at if made == [0] else -1, **wrong)

    return RolloutWorker(
        creator,
        ObservedValue,
        {
            "num_envs_per_worker": 2,
            "rollout_fragment_length": 7,
            "sample_collector": way,
            **config,
        },
    )


@pytest.mark.parametrize("wrong", BAD)
def test_bad_values_are_refused_at_their_source(way, wrong):
    worker = lying(way, wrong, normalize_observations=True)
    with pytest.raises(ValueError, match=r"not finite|outside its space") as caught:
        worker.sample()
    told = str(caught.value) + " ".join(caught.value.__notes__)
    assert "sub-environment 0" in told
    assert "step 3 of a fragment" in told
    assert "worker 0" in told
    for key, value in worker.policy.observation_filter.new_stats.state_dict().items():
        assert np.isfinite(value).all(), key
    assert worker.sample().count == 14


@pytest.mark.parametrize("wrong", BAD)
@pytest.mark.parametrize("at", [1, 3, 4, 7])
def test_bad_values_cost_their_episode(way, wrong, at):
    worker = lying(way, wrong, at, on_invalid_step="drop", normalize_observations=True)
    batch = worker.sample()
    for name in ("obs", "new_obs", "rewards", "next_values"):
        assert np.isfinite(batch[name]).all()
    assert (batch["new_obs"] <= 1e6).all()
    assert (batch["env_id"] == 1).sum() == 7
    steps = batch["t"][batch["env_id"] == 0].tolist()
    # episodes of three steps; the one with the bad step is gone: at once where rows come one by
    # one, else with the steps that it still made
    before = [0, 1, 2] * ((at - 1) // 3)
    after = {1: [0, 1, 2, 0], 3: [0, 1, 2, 0], 4: [0], 7: []}[at]
    if way is not None:
        after = {1: [0, 1, 2, 0, 1, 2], 3: [0, 1, 2, 0], 4: [0, 1, 2], 7: []}[at]
    assert steps == before + after
    again = worker.sample()
    assert (again["env_id"] == 1).sum() == 7
    assert worker.reply_tags()["faulty_episodes"] >= 1


@pytest.mark.parametrize("wrong", BAD)
def test_bad_values_can_be_replaced(way, wrong):
    batch = lying(way, wrong, on_invalid_step="replace").sample()
    assert batch.count == 14
    for name in ("obs", "new_obs", "rewards", "next_values"):
        assert np.isfinite(batch[name]).all()
    assert (batch["new_obs"] <= 1e6).all()


class Two(MultiAgentEnv):
    """Two agents; `break_at` raises, `lie_at` gives agent "b" a value of NaN."""

    possible_agents = ["a", "b"]
    observation_space = CountEnv.observation_space
    action_space = CountEnv.action_space

    def __init__(self, length=4, break_at=None, lie_at=None):
        self.length, self.break_at, self.lie_at = length, break_at, lie_at
        self.steps = self.total = 0

    def observe(self):
        return {a: np.array([i, self.steps], np.float32) for i, a in enumerate("ab")}

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return self.observe(), {}

    def step(self, action_dict):
        self.steps += 1
        self.total += 1
        if self.total == self.break_at:
            raise OSError("the arena is gone")
        obs = self.observe()
        if self.total == self.lie_at:
            obs["b"][1] = np.nan
        over = self.steps == self.length
        return obs, dict.fromkeys("ab", 1.0), {"__all__": over}, {"__all__": False}, {}


@pytest.mark.parametrize("trouble", [{"break_at": 6}, {"lie_at": 6}])
def test_agents_share_their_environments_fate(trouble):
    def creator(context):
        first = context.vector_index == 0 and not made
        made.append(1)
        return Two(**(trouble if first else {}))

    made = []
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


def test_a_callback_that_raises_leaves_the_worker_usable():
    class Once(DefaultCallbacks):
        raised = False

        def on_episode_step(self, *, episode, **kwargs):
            if not Once.raised and episode.length == 2:
                Once.raised = True
                raise KeyError("my mistake")

    worker = RolloutWorker(
        lambda context: CountEnv(),
        ObservedValue,
        {"callbacks_class": Once, "rollout_fragment_length": 7},
    )
    with pytest.raises(KeyError, match="my mistake") as caught:
        worker.sample()
    assert "Once.on_episode_step()" in " ".join(caught.value.__notes__)
    assert worker.env_steps == 0
    batches = [worker.sample() for _ in range(2)]
    assert SampleBatch.concat_samples(batches)["t"].tolist() == [0, 1, 2] * 4 + [0, 1]
    assert worker.env_steps == 14
