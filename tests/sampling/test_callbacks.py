"""Callbacks: order of calls, arguments, and effects on batches and results."""

import re
import threading
from functools import partial, partialmethod
from types import MappingProxyType

import gymnasium as gym
import numpy as np
import pytest

from flowrl.algorithms.a2c import A2CConfig
from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.envs import MultiAgentEnv, make_multi_agent
from flowrl.policies import ConfigError
from flowrl.sampling import (
    DefaultCallbacks,
    MultiAgentEpisode,
    RolloutWorker,
    SimpleListCollector,
    override,
)
from flowrl.trainer.plan_settings import plan_config

from .fakes import CountEnv, Idle, ObservedValue

EVENTS = []


class Recorder(DefaultCallbacks):
    def on_sub_environment_created(self, *, worker, sub_environment, env_context, **kwargs):
        EVENTS.append(("created", env_context.vector_index))

    def on_episode_start(self, *, worker, base_env, policies, episode, env_index, **kwargs):
        assert isinstance(episode, MultiAgentEpisode)
        assert base_env.get_sub_environments()[env_index].steps == 0
        assert set(policies) == {"default_policy"}
        assert episode.length == 0
        assert episode.last_observation_for().tolist()[1] == 0
        episode.user_data["steps"] = []
        EVENTS.append(("start", env_index, episode.episode_id))

    def on_episode_step(self, *, worker, base_env, policies, episode, env_index, **kwargs):
        assert episode.last_action_for() == 0
        assert episode.last_reward_for() == episode.length
        assert episode.prev_reward_for() == episode.length - 1
        assert episode.last_info_for() == {"n": episode.length}
        episode.user_data["steps"].append(episode.length)
        EVENTS.append(("step", env_index, episode.episode_id))

    def on_episode_end(self, *, worker, base_env, policies, episode, env_index, **kwargs):
        assert episode.is_done()
        assert episode.total_reward == 6
        assert episode.agent_rewards == {("agent0", "default_policy"): 6.0}
        episode.custom_metrics["steps"] = len(episode.user_data["steps"])
        episode.hist_data["lengths"] = episode.user_data["steps"]
        EVENTS.append(("end", env_index, episode.episode_id))

    def on_postprocess_trajectory(
        self, *, episode, agent_id, policy_id, postprocessed_batch, original_batches, **kwargs
    ):
        assert (agent_id, policy_id) == ("agent0", "default_policy")
        assert set(original_batches) == {"agent0"}
        assert episode.episode_id == postprocessed_batch["eps_id"][0]
        postprocessed_batch["custom"] = np.arange(postprocessed_batch.count)
        EVENTS.append(("post", episode.env_id, episode.episode_id))

    def on_sample_end(self, *, worker, samples, **kwargs):
        EVENTS.append(("sample", samples.count))


def test_call_order_of_an_episode():
    EVENTS.clear()
    worker = RolloutWorker(
        lambda context: CountEnv(3),
        ObservedValue,
        {"callbacks_class": Recorder, "rollout_fragment_length": 4},
    )
    assert EVENTS == [("created", 0)]
    batch = worker.sample()
    assert batch["custom"].tolist() == [0, 1, 2, 0]
    step = ("step", 0, 0)
    assert EVENTS[1:] == [
        ("start", 0, 0),
        step,
        step,
        step,
        ("post", 0, 0),
        ("end", 0, 0),
        ("start", 0, 1),
        ("step", 0, 1),
        ("post", 0, 1),
        ("sample", 4),
    ]
    (episode,) = worker.get_metrics()
    assert episode.custom_metrics == {"steps": 3}
    assert episode.hist_data == {"lengths": [1, 2, 3]}


def test_soft_horizon_ends_and_starts_an_episode():
    class Counter(DefaultCallbacks):
        def on_episode_start(self, *, episode, **kwargs):
            EVENTS.append(("start", episode.episode_id))

        def on_episode_end(self, *, episode, **kwargs):
            EVENTS.append(("end", episode.episode_id))

    EVENTS.clear()
    RolloutWorker(
        lambda context: CountEnv(6),
        ObservedValue,
        {
            "callbacks_class": Counter,
            "rollout_fragment_length": 5,
            "horizon": 2,
            "soft_horizon": True,
        },
    ).sample()
    assert EVENTS == [("start", 0), ("end", 0), ("start", 1), ("end", 1), ("start", 2)]


def test_episode_that_a_soft_horizon_ended_keeps_its_rewards():
    ended = []

    class Keeper(DefaultCallbacks):
        def on_episode_end(self, *, episode, **kwargs):
            ended.append(episode)

    RolloutWorker(
        lambda context: CountEnv(6),
        ObservedValue,
        {
            "callbacks_class": Keeper,
            "rollout_fragment_length": 5,
            "horizon": 2,
            "soft_horizon": True,
        },
    ).sample()
    assert [list(episode.agent_rewards.values()) for episode in ended] == [
        [episode.total_reward] for episode in ended
    ]
    assert ended[0].total_reward != 0


def test_recreated_environment_is_reported_and_its_episode_is_faulty():
    class FaultRecorder(DefaultCallbacks):
        def on_sub_environment_created(self, *, env_context, **kwargs):
            EVENTS.append("created")

        def on_episode_end(self, *, episode, **kwargs):
            EVENTS.append("faulty" if episode.is_faulty else "end")

    EVENTS.clear()
    environments = iter([CountEnv(3, fail_at=(1, 2)), CountEnv(3)])
    worker = RolloutWorker(
        lambda context: next(environments),
        ObservedValue,
        {"callbacks_class": FaultRecorder, "rollout_fragment_length": 8},
    )
    worker.sample()
    assert EVENTS == ["created", "end", "created", "faulty", "end"]


class NextActions(DefaultCallbacks):
    """The example of the RLlib documentation."""

    @override(DefaultCallbacks)
    def on_postprocess_trajectory(
        self,
        worker,
        episode,
        agent_id,
        policy_id,
        policies,
        postprocessed_batch,
        original_batches,
        **kwargs,
    ):
        postprocessed_batch["next_actions"] = np.concatenate(
            [
                postprocessed_batch["actions"][1:],
                np.zeros_like([policies[policy_id].action_space.sample()]),
            ]
        )


def test_callback_adds_next_actions_column():
    worker = RolloutWorker(
        "CartPole-v1", PPOTorchPolicy, {"callbacks_class": NextActions, "seed": 1}
    )
    batch = worker.sample()
    next_actions = np.append(batch["actions"][1:], 0)
    ends = np.append(np.diff(batch["unroll_id"]) != 0, True)
    assert np.array_equal(batch["next_actions"], np.where(ends, 0, next_actions))
    assert "advantages" in batch
    worker.policy.learn_on_batch(batch)


def test_original_batches_are_read_only():
    class Writes(DefaultCallbacks):
        def on_postprocess_trajectory(self, *, agent_id, original_batches, **kwargs):
            original_batches[agent_id][1]["rewards"][:] = -7

    worker = RolloutWorker("CartPole-v1", PPOTorchPolicy, {"callbacks_class": Writes})
    with pytest.raises(ValueError, match="read-only"):
        worker.sample()


def test_column_missing_in_some_segments_is_filled_with_zeros(caplog):
    class OddEpisodes(DefaultCallbacks):
        def on_postprocess_trajectory(self, *, postprocessed_batch, **kwargs):
            if postprocessed_batch["obs"][0, 0] == 1:
                postprocessed_batch["rare"] = np.ones(postprocessed_batch.count, np.float32)

    worker = RolloutWorker(
        lambda context: CountEnv(3),
        ObservedValue,
        {"callbacks_class": OddEpisodes, "rollout_fragment_length": 9},
    )
    assert worker.sample()["rare"].tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0]
    assert "rare" in caplog.text


class TrainingCallbacks(DefaultCallbacks):
    def on_learn_on_batch(self, *, policy, train_batch, result, **kwargs):
        result["rows"] = float(train_batch.count)

    def on_train_result(self, *, algorithm, result, **kwargs):
        result["custom"] = algorithm.iteration

    def on_episode_end(self, *, episode, **kwargs):
        episode.custom_metrics["double"] = 2 * episode.length


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_callbacks_add_to_train_results(workers, ray_session):
    config = (
        A2CConfig(env="CartPole-v1", train_batch_size=100, seed=1, num_workers=workers)
        .callbacks(TrainingCallbacks)
        .rollouts(rollout_fragment_length=100)
    )
    with config.build() as algorithm:
        result = algorithm.train()
        assert result["custom"] == 1
        assert result["info"]["learner"]["default_policy"]["learner_stats"]["rows"] == 100
        metrics = result["custom_metrics"]
        assert metrics["double_mean"] == 2 * result["episode_len_mean"]
        assert metrics["double_min"] <= metrics["double_mean"] <= metrics["double_max"]


@pytest.mark.parametrize("value", [3.0, "long"])
def test_data_of_a_histogram_must_be_a_list(value):
    class Numbers(DefaultCallbacks):
        def on_episode_end(self, *, episode, **kwargs):
            episode.hist_data["lengths"] = value

    settings = {"callbacks_class": Numbers, "rollout_fragment_length": 9}
    worker = RolloutWorker(lambda context: CountEnv(3), ObservedValue, settings)
    with pytest.raises(ConfigError, match=r"Numbers: hist_data\['lengths'\] must be a list"):
        worker.sample()


def test_entries_of_a_histogram_must_be_numbers():
    class Texts(DefaultCallbacks):
        def on_episode_end(self, *, episode, **kwargs):
            episode.hist_data["lengths"] = [1, "two"]

    settings = {"callbacks_class": Texts, "rollout_fragment_length": 9}
    worker = RolloutWorker(lambda context: CountEnv(3), ObservedValue, settings)
    message = r"Texts: an entry of hist_data\['lengths'\] must be a number, got 'two'"
    with pytest.raises(ConfigError, match=message):
        worker.sample()


@pytest.mark.parametrize("plan", ["a3c", "ddppo"])
def test_callback_before_learning_is_called_where_the_gradient_is_computed(plan):
    config = plan_config(plan).updated(
        num_workers=0, callbacks_class=TrainingCallbacks, min_sample_timesteps_per_iteration=0
    )
    with config.build() as algorithm:
        stats = algorithm.train()["learners"]["default_policy"]
    assert stats["rows"] > 0


def test_override_of_unknown_method_raises():
    with pytest.raises(NameError, match="on_episod_start"):

        class MisspelledOverride(DefaultCallbacks):
            @override(DefaultCallbacks)
            def on_episod_start(self, **kwargs):
                pass

    with pytest.raises(ConfigError, match="subclass of DefaultCallbacks"):
        A2CConfig().callbacks(dict)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "on_episode_ended",
            r"C\.on_episode_ended is not an event\. Did you mean 'on_episode_end'",
        ),
        ("_on_step", r"C\._on_step is not an event\. Did you mean 'on_episode_step'"),
        ("on_xyz", r"C\.on_xyz is not an event\. The events are on_sub_environment_created, on_ep"),
    ],
)
def test_methods_that_are_no_events_are_rejected(name, message):
    cls = type("C", (DefaultCallbacks,), {name: lambda self, **kwargs: None})
    with pytest.raises(ConfigError, match=rf"^callbacks_class: {message}"):
        A2CConfig(callbacks_class=cls)
    with pytest.raises(ConfigError, match=rf"^callbacks_class: {message}"):
        A2CConfig().callbacks(cls)
    assert A2CConfig(callbacks_class=type("C", (DefaultCallbacks,), {name: 5})).callbacks_class


def test_metrics_logger_of_rllib_is_rejected_with_a_hint():
    def on_episode_end(self, *, episode, metrics_logger=None, **kwargs):
        pass

    cls = type("C", (DefaultCallbacks,), {"on_episode_end": on_episode_end})
    with pytest.raises(ConfigError, match=r"C\.on_episode_end\(\).*set episode\.custom_metrics"):
        A2CConfig(callbacks_class=cls)


@pytest.mark.parametrize(
    ("method", "problem"),
    [
        (lambda self, *, episode: None, "got an unexpected keyword argument 'worker'"),
        (lambda self, worker, base_env, policies, episode: None, "keyword argument 'env_index'"),
        (lambda self, *, runner, **kwargs: None, "missing a required .*argument: 'runner'"),
    ],
)
def test_signature_that_does_not_fit_its_event_is_rejected(method, problem):
    cls = type("C", (DefaultCallbacks,), {"on_episode_end": method})
    message = rf"callbacks_class: C\.on_episode_end\(\) .*{problem}.* worker=, .* with \*\*kwargs"
    with pytest.raises(ConfigError, match=message):
        A2CConfig(callbacks_class=cls)


def test_signature_may_name_all_arguments_of_its_event():
    class C(DefaultCallbacks):
        def on_train_result(self, algorithm, result):
            pass

        @staticmethod
        def on_sample_end(**kwargs):
            pass

    assert A2CConfig(callbacks_class=C).callbacks_class is C


def test_partial_methods_are_called(capsys):
    class Partial(DefaultCallbacks):
        def log(self, text, **kwargs):
            print(text)

        on_episode_end = partialmethod(log, "ended")

    config = {"callbacks_class": Partial, "rollout_fragment_length": 9}
    RolloutWorker(lambda context: CountEnv(), Idle, config).sample()
    assert capsys.readouterr().out == "ended\n" * 3


async def wait(self, **kwargs):
    pass


def generate(self, **kwargs):
    yield


@pytest.mark.parametrize(
    ("attribute", "match"),
    [
        (
            wait,
            "on_episode_end is a coroutine function, which nothing would await: write a",
        ),
        (generate, "on_episode_end is a generator function, whose body would not run"),
        (5, "on_episode_end is not a method"),
        (staticmethod(lambda: None), r"on_episode_end\(\) got an unexpected keyword argument"),
        (classmethod(lambda cls: None), r"on_episode_end\(\) got an unexpected keyword argument"),
    ],
)
def test_attributes_that_cannot_be_called_are_rejected(attribute, match):
    callbacks = type("Bad", (DefaultCallbacks,), {"on_episode_end": attribute})
    with pytest.raises(ConfigError, match=rf"callbacks_class: Bad\.{match}"):
        A2CConfig(callbacks_class=callbacks)


@pytest.mark.parametrize("value", [None, "x", np.ones(2)])
def test_results_of_callbacks_must_be_numbers(value):
    class Adds(DefaultCallbacks):
        def on_learn_on_batch(self, *, result, **kwargs):
            result["mine"] = value

    class Replaces(DefaultCallbacks):
        def on_train_result(self, *, result, **kwargs):
            result["episode_reward_mean"] = value

    added = r"Adds\.on_learn_on_batch\(\) added to result the statistic 'mine' of type"
    replaced = r"Replaces\.on_train_result\(\) replaced in result the statistic 'episode_reward_me"
    for callbacks, match in ((Adds, added), (Replaces, replaced)):
        settings = {"train_batch_size": 200, "rollout_fragment_length": 200}
        config = A2CConfig(env="CartPole-v1", callbacks_class=callbacks, **settings)
        with config.build() as algorithm, pytest.raises(TypeError, match=match):
            algorithm.train()


class WithArgument(DefaultCallbacks):
    def __init__(self, path):
        self.path = path


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (WithArgument, r"create WithArgument without arguments, .*'path'.*: make its arguments cl"),
        (WithArgument("a"), r"got <.*: pass the class WithArgument; make its arguments class attr"),
        (partial(WithArgument, "a"), r"got functools\.partial.*: pass a class; make its arguments"),
    ],
)
def test_callbacks_that_need_arguments_say_how_to_pass_them(value, message):
    with pytest.raises(ConfigError, match=f"^callbacks_class: .*{message}"):
        A2CConfig(callbacks_class=value)


def test_functions_for_events_name_the_class_to_write():
    with pytest.raises(ConfigError, match="subclass DefaultCallbacks and override on_train_result"):
        A2CConfig().callbacks(on_train_result=lambda **kwargs: None)
    assert A2CConfig().callbacks(Recorder).callbacks(None).callbacks_class is None


def test_unknown_agent_is_named_in_error():
    episode = MultiAgentEpisode(1, 0, None, lambda agent, episode: "p")
    with pytest.raises(ConfigError, match="agent 'x' has not appeared"):
        episode.last_reward_for("x")
    assert episode.policy_for("x") == "p"
    assert episode.get_agents() == []  # it has not appeared


@pytest.mark.parametrize("value", ["fast", None, [1.0, 2.0]])
def test_custom_metric_that_is_no_number_is_named(value):
    class SetsMetric(DefaultCallbacks):
        def on_episode_end(self, *, episode, **kwargs):
            episode.custom_metrics["speed"] = value

    worker = RolloutWorker(
        lambda context: CountEnv(3), PPOTorchPolicy, {"callbacks_class": SetsMetric}
    )
    message = re.escape(f"SetsMetric: custom_metrics['speed'] must be a number, got {value!r}")
    with pytest.raises(ConfigError, match=message):
        worker.sample()


class TakesTurnsToObserve(MultiAgentEnv):
    """Both agents act in the first step; only "b" is observed after it, "a" one step later."""

    possible_agents = ["a", "b"]
    observation_space = gym.spaces.Box(-9, 9, (1,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return {agent: np.zeros(1, np.float32) for agent in "ab"}, {}

    def step(self, action_dict):
        self.steps += 1
        agents = "b" if self.steps == 1 else "ab"
        ends = {"__all__": self.steps == 3}
        return (
            {agent: np.full(1, self.steps, np.float32) for agent in agents},
            dict.fromkeys("ab", float(self.steps)),
            ends,
            {"__all__": False},
            {},
        )


def test_episode_shows_an_action_whose_agent_is_not_observed_afterwards():
    class Reads(DefaultCallbacks):
        def on_episode_step(self, *, episode, **kwargs):
            values = episode.last_action_for("a"), episode.prev_action_for("a")
            values += episode.last_reward_for("a"), episode.prev_reward_for("a")
            self.seen = [*getattr(self, "seen", []), values]

    worker = RolloutWorker(
        TakesTurnsToObserve,
        Idle,
        {"callbacks_class": Reads, "rollout_fragment_length": 3},
    )
    worker.sample()
    # "a" acts in steps 1 and 3; it gets rewards of 1, 2 and 3
    assert worker.callbacks.seen == [(0, None, 1.0, 0.0), (0, None, 3.0, 0.0), (0, 0, 3.0, 3.0)]


class NumbersItsResets(CountEnv):
    """Episodes of three steps; the infos of `reset` number the episodes from 1."""

    fails_in_episode = None

    def __init__(self):
        super().__init__(3)
        self.num_resets = 0

    def reset(self, *, seed=None, options=None):
        observation, _ = super().reset(seed=seed)
        self.num_resets += 1
        return observation, {"episode": self.num_resets}

    def step(self, action):
        if self.num_resets == self.fails_in_episode:
            raise RuntimeError("broken")
        return super().step(action)


class FailsInThirdEpisode(NumbersItsResets):
    fails_in_episode = 3


class ReadsFirstInfo(DefaultCallbacks):
    def on_episode_start(self, *, episode, env_index, **kwargs):
        infos = vars(self).setdefault("infos", {})
        infos.setdefault(env_index, []).append(episode.last_info_for())


def infos_at_starts(env, **settings):
    settings = {"num_envs_per_worker": 2, "rollout_fragment_length": 6, **settings}
    worker = RolloutWorker(
        lambda context: env(), Idle, {"callbacks_class": ReadsFirstInfo, **settings}
    )
    for _ in range(2):
        worker.sample()
    worker.stop()
    return {index: [i["episode"] for i in infos] for index, infos in worker.callbacks.infos.items()}


def vector_of_two(mode):
    return gym.vector.SyncVectorEnv([NumbersItsResets] * 2, autoreset_mode=mode)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"vectorization_mode": "sync"},
        {"vectorization_mode": "async"},
        {"sample_collector": SimpleListCollector},
    ],
)
def test_episode_shows_the_info_of_the_reset(settings):
    numbers = [1, 2, 3, 4, 5]
    assert infos_at_starts(NumbersItsResets, **settings) == {0: numbers, 1: numbers}


@pytest.mark.parametrize("mode", gym.vector.AutoresetMode)
def test_episode_shows_the_info_of_the_reset_of_a_vector_environment(mode):
    infos = infos_at_starts(partial(vector_of_two, mode))
    assert {index: found[:2] for index, found in infos.items()} == {0: [1, 2], 1: [1, 2]}


@pytest.mark.parametrize("mode", ["flowrl", "async"])
def test_episode_shows_the_info_of_the_reset_after_a_failure(mode):
    infos = infos_at_starts(FailsInThirdEpisode, vectorization_mode=mode)
    assert infos[0][:4] == [1, 2, 3, 1]


@pytest.mark.parametrize("info", [None, [], MappingProxyType({"episode": 1})])
def test_other_infos_of_a_reset_are_accepted(info):
    class Returns(CountEnv):
        def reset(self, *, seed=None, options=None):
            return super().reset(seed=seed)[0], info

    settings = {"callbacks_class": ReadsFirstInfo, "num_envs_per_worker": 1}
    worker = RolloutWorker(lambda context: Returns(3), Idle, settings)
    worker.sample()
    assert worker.callbacks.infos[0][0] == dict(info or {})


@pytest.mark.parametrize("mode", ["flowrl", "async"])
def test_infos_of_a_reset_need_not_be_sent_to_other_processes(mode):
    class Returns(CountEnv):
        def reset(self, *, seed=None, options=None):
            return super().reset(seed=seed)[0], {"lock": threading.Lock()}

    worker = RolloutWorker(lambda context: Returns(3), Idle, {"vectorization_mode": mode})
    assert worker.sample().count > 0
    worker.stop()


@pytest.mark.parametrize("mode", gym.vector.AutoresetMode)
def test_infos_of_a_vector_environment_may_have_any_keys(mode):
    class Returns(CountEnv):
        def reset(self, *, seed=None, options=None):
            return super().reset(seed=seed)[0], {"by_number": {0: 1.0}, "_flag": True, "flag": 2}

    def make(context):
        return gym.vector.SyncVectorEnv([lambda: Returns(3)] * 2, autoreset_mode=mode)

    worker = RolloutWorker(make, Idle, {"callbacks_class": ReadsFirstInfo})
    worker.sample()
    assert all(infos[1]["flag"] == 2 for infos in worker.callbacks.infos.values())


class CountsSteps(DefaultCallbacks):
    def on_episode_start(self, *, episode, **kwargs):
        episode.user_data["steps"] = 0
        episode.custom_metrics["length"] = episode.length

    def on_episode_step(self, *, episode, **kwargs):
        episode.user_data["steps"] += 1

    def on_episode_end(self, *, episode, **kwargs):
        episode.custom_metrics["steps"] = episode.user_data["steps"]
        episode.custom_metrics["reward"] = episode.total_reward


class OnlyStarts(DefaultCallbacks):
    def on_episode_start(self, *, episode, **kwargs):
        episode.custom_metrics["old"] = 1


@pytest.mark.parametrize("old", [None, OnlyStarts])
@pytest.mark.parametrize("agents", [1, 2])
def test_other_callbacks_of_a_resumed_run_see_a_start_of_running_episodes(old, agents):
    env = (lambda c: CountEnv(9)) if agents == 1 else make_multi_agent(lambda c: CountEnv(9))

    def worker(callbacks):
        config = {"rollout_fragment_length": 6, "callbacks_class": callbacks}
        return RolloutWorker(env, Idle, config)

    before, after = worker(old), worker(CountsSteps)
    before.sample()
    after.load_sampling_state_dict(before.sampling_state_dict())
    after.sample()
    (metrics,) = after.get_metrics()
    assert (metrics.episode_length, metrics.custom_metrics) == (
        9,
        {"steps": 3.0, "length": 6.0, "reward": metrics.episode_return},
    )
