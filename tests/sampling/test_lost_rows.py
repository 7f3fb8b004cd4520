"""Rows that are dropped leave no trace in the rows, statistics and records of others."""

import gymnasium as gym
import numpy as np
import pytest

from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.envs.validation import InvalidStepError
from flowrl.sampling import RolloutWorker, SimpleListCollector
from flowrl.sampling.callbacks import DefaultCallbacks

from .fakes import CountEnv
from .test_column_sampler import Uneven, assert_same

NAN = float("nan")


def worker(env, **config):
    return RolloutWorker(env, PPOTorchPolicy, {"seed": 1, "num_envs_per_worker": 1, **config})


def first_then(bad, good):
    """Return a creator of environments: `bad` for the first one, `good` for those after it."""
    creators = iter([bad])
    return lambda context: next(creators, good)()


class NanThenError(CountEnv):
    """Returns a reward that is not finite in its second episode, and fails one step later."""

    def step(self, action):
        obs, reward, *rest = super().step(action)
        if self.episode == 1 and self.steps == 2:
            raise OSError("the environment broke")
        return obs, NAN if self.episode == 1 else reward, *rest


def test_whole_episodes_have_no_estimates_from_other_memory():
    w = worker(
        lambda context: Uneven(7),
        num_envs_per_worker=3,
        rollout_fragment_length=7,
        batch_mode="complete_episodes",
    )
    for _ in range(100):
        for size in (16, 32, 64, 96):  # freed memory that new arrays may reuse
            np.full(size, NAN, np.float32)
        assert np.isfinite(w.sample()["advantages"]).all()


@pytest.mark.parametrize("normalize", [False, True])
def test_values_of_a_failed_episode_reach_no_other_rows(normalize):
    w = worker(
        first_then(NanThenError, CountEnv),
        rollout_fragment_length=8,
        on_invalid_step="drop",
        normalize_rewards=normalize,
        normalize_observations=normalize,
    )
    for _ in range(3):
        batch = w.sample()
        assert all(np.isfinite(batch[name]).all() for name in ("advantages", "rewards", "obs"))


def test_reward_sums_of_a_lost_episode_end_with_it():
    class Fails(CountEnv):
        count = 0

        def step(self, action):
            Fails.count += 1
            if Fails.count == 8:  # the last row of the second fragment
                raise OSError("the environment broke")
            return super().step(action)

    batches = []
    for collector in (None, SimpleListCollector):
        Fails.count = 0
        w = worker(
            lambda context: Fails(20),
            rollout_fragment_length=4,
            normalize_rewards=True,
            sample_collector=collector,
        )
        assert [w.sample().count for _ in range(2)] == [4, 0]
        batches.append(w.sample())
    assert_same(*batches)


def test_whole_episodes_count_each_reward_once():
    w = worker(
        lambda context: Uneven(6),
        num_envs_per_worker=3,
        rollout_fragment_length=4,
        batch_mode="complete_episodes",
        normalize_rewards=True,
        gamma=0.5,
    )
    for _ in range(5):
        batch = w.sample()
        (filters,) = w.reply_tags()["filters"]
        sums = []
        for episode in batch.split_by_episode():
            total = 0.0
            for step in range(1, episode.count + 1):  # the reward is the number of the step
                total = 0.5 * total + step
                sums.append(total)
        stats = filters["default_policy"]["rewards"]
        assert stats["count"] == len(sums)
        assert stats["mean"] == pytest.approx(np.mean(sums))


class Continuous(CountEnv):
    action_space = gym.spaces.Box(-1, 1, (2,))


class NanObservation(Continuous):
    def step(self, action):
        obs, *rest = super().step(action)
        return (np.array([1, NAN], np.float32) if self.steps == 2 else obs), *rest


def test_policy_that_acts_on_invalid_observations_is_not_blamed():
    creator = first_then(lambda: NanObservation(5), lambda: Continuous(5))
    w = worker(creator, rollout_fragment_length=8, on_invalid_step="drop")
    assert w.sample().count == 6
    assert w.sample().count == 8
    w = worker(lambda context: NanObservation(4), on_invalid_step="raise")
    with pytest.raises(InvalidStepError, match=r"obs\[1\] is nan"):
        w.sample()


@pytest.mark.parametrize("at_reset", [False, True])
def test_filters_do_not_see_dropped_observations(at_reset):
    class Wrong(CountEnv):
        resets = 0

        def reset(self, **kwargs):
            Wrong.resets += 1
            obs, info = super().reset(**kwargs)
            wrong = at_reset and Wrong.resets in (3, 4)
            return (np.array([NAN, 0], np.float32) if wrong else obs), info

        def step(self, action):
            obs, reward, *rest = super().step(action)
            wrong = not at_reset and self.episode == 1 and self.steps == 2
            return obs, NAN if wrong else reward, *rest

    stats = []
    for collector in (None, SimpleListCollector):
        Wrong.resets = 0
        w = worker(
            first_then(lambda: Wrong(3), lambda: Wrong(3)),
            rollout_fragment_length=6,
            on_invalid_step="drop",
            normalize_observations=True,
            sample_collector=collector,
        )
        w.sample()
        (filters,) = w.reply_tags()["filters"]
        stats.append(filters["default_policy"]["observations"])
        assert np.isfinite(stats[-1]["mean"]).all()


def test_filters_see_first_observations_instead_of_final_ones():
    w = worker(
        lambda context: gym.vector.SyncVectorEnv([lambda: CountEnv(3)] * 2),
        rollout_fragment_length=6,
        normalize_observations=True,
    )
    w.sample()
    (filters,) = w.reply_tags()["filters"]
    # steps 1 and 2 of two episodes in each environment, and step 0 of the second one
    assert filters["default_policy"]["observations"]["count"] == 2 * 5
    assert filters["default_policy"]["observations"]["mean"][1] == pytest.approx(6 / 5)


class LooksUpOthers(DefaultCallbacks):
    """Reads the episodes of all environments whenever a callback is called."""

    def read(self, event, worker, episode):
        self.ids = getattr(self, "ids", set()) | {episode.episode_id}
        for episode_id in self.ids:
            worker.episode(episode_id)
        self.seen = getattr(self, "seen", [])
        obs = episode.last_raw_obs_for().tolist()
        self.seen.append((event, episode.env_id, episode.length, obs, episode.is_done()))

    def on_episode_start(self, *, worker, episode, **kwargs):
        self.read("start", worker, episode)

    def on_episode_step(self, *, worker, episode, **kwargs):
        self.read("step", worker, episode)

    def on_episode_end(self, *, worker, episode, **kwargs):
        self.read("end", worker, episode)


def test_looking_up_episodes_in_callbacks_changes_nothing():
    seen = []
    for collector in (None, SimpleListCollector):
        environments = iter([Uneven(4), Uneven(4, fail_at=(1, 2))])
        w = worker(
            lambda context, environments=environments: next(environments, Uneven(4)),
            num_envs_per_worker=2,
            rollout_fragment_length=9,
            callbacks_class=LooksUpOthers,
            sample_collector=collector,
        )
        w.sample()
        seen.append(w.callbacks.seen)
    assert seen[0] == seen[1]


def test_state_of_a_worker_without_callbacks_fits_one_with_callbacks():
    class Ends(DefaultCallbacks):
        def on_episode_end(self, *, episode, **kwargs):
            episode.custom_metrics["length"] = episode.length

    saved = worker(lambda context: CountEnv(5), rollout_fragment_length=7)
    saved.sample()
    w = worker(lambda context: CountEnv(5), rollout_fragment_length=7, callbacks_class=Ends)
    w.load_sampling_state_dict(saved.sampling_state_dict())
    assert w.sample().count == 7
    assert w.get_metrics()


@pytest.mark.parametrize("at_reset", [False, True])
@pytest.mark.parametrize("collector", [None, SimpleListCollector])
def test_callbacks_see_no_invalid_values_of_dropped_episodes(collector, at_reset, caplog):
    class Wrong(CountEnv):
        resets = 0

        def reset(self, **kwargs):
            Wrong.resets += 1
            obs, info = super().reset(**kwargs)
            wrong = at_reset and Wrong.resets in (1, 4)
            return (np.array([NAN, 0], np.float32) if wrong else obs), info

        def step(self, action):
            obs, reward, *rest = super().step(action)
            wrong = not at_reset and self.episode == 2 and self.steps == 2
            return obs, NAN if wrong else reward, *rest

    class Records(DefaultCallbacks):
        def on_episode_start(self, *, episode, **kwargs):
            self.seen = [*getattr(self, "seen", []), episode.last_raw_obs_for().tolist()]

        def on_episode_end(self, *, episode, **kwargs):
            end = episode.length, episode.total_reward, episode.is_faulty
            self.seen.append(end)

    w = worker(
        first_then(lambda: Wrong(3), lambda: Wrong(3) if at_reset else CountEnv(3)),
        rollout_fragment_length=8,
        on_invalid_step="drop",
        callbacks_class=Records,
        sample_collector=collector,
    )
    for _ in range(2):
        batch = w.sample()
        assert np.isfinite(batch["obs"]).all() and np.isfinite(batch["rewards"]).all()
    seen = w.callbacks.seen
    assert np.isfinite([value for part in seen for value in part]).all()
    faulty = [part for part in seen if len(part) == 3 and part[2]]
    tags = w.reply_tags()
    assert len(faulty) == tags["faulty_episodes"] == (0 if at_reset else 1)
    assert tags["env_restarts"] == (2 if at_reset else 1)
    tags = w.reply_tags()  # reported failures are not counted again
    assert tags["faulty_episodes"] == tags["env_restarts"] == 0
    assert "recreating the environment" in caplog.text
    assert '"drop" drops' not in caplog.text


def test_infos_of_kept_rows_are_restored():
    config = {
        "num_envs_per_worker": 2,
        "rollout_fragment_length": 2,
        "batch_mode": "complete_episodes",
        "collect_infos": True,
    }

    class Seeded(CountEnv):
        def reset(self, **kwargs):
            gym.Env.reset(self, seed=kwargs.get("seed"))
            self.episode = 0
            return super().reset()

    def make(context):
        return Seeded(3 + 2 * context.vector_index)

    whole, restored = (worker(make, **config) for _ in range(2))
    whole.sample()
    assert restored.load_sampling_state_dict(whole.sampling_state_dict()) == 0
    for _ in range(3):
        expected, found = whole.sample(), restored.sample()
        assert [i["n"] for i in expected["infos"]] == [i["n"] for i in found["infos"]]
