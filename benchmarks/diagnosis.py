"""Does the diagnosis of a run name its cause? 20 planted faults.

Each case builds a run with one fault, whose size and place depend on the seed, trains for ten
seconds after the workers have started, and compares `Algorithm.diagnose()` with the planted cause.

    python benchmarks/diagnosis.py [--seeds 3] [--cases slow_step,leak]
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from flowrl import DQN, IMPALA, PPO
from flowrl.algorithms.impala import IMPALATorchPolicy
from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.envs.registry import EnvContext
from flowrl.ops import ConcatBatches, ParallelRollouts, StandardMetricsReporting, TrainOneStep
from flowrl.policies import Policy
from flowrl.process_usage import num_cores
from flowrl.sampling.callbacks import DefaultCallbacks

SECONDS = 10.0


# -- environments ----------------------------------------------------------------------------------


class Faulty(gym.Wrapper):
    """CartPole with a fault that `env_config` describes."""

    def __init__(self, config: EnvContext):
        super().__init__(gym.make("CartPole-v1"))
        self.config = config

    def reset(self, **options: Any) -> Any:
        time.sleep(self.config.get("reset_s", 0.0))
        return self.env.reset(**options)

    def step(self, action: Any) -> Any:
        config = self.config
        if config.get("at_worker", config.worker_index) == config.worker_index:
            time.sleep(config.get("step_s", 0.0))
            if np.random.random() < config.get("exit_probability", 0.0):
                os._exit(1)
        _compute(config.get("compute_s", 0.0))
        if np.random.random() < config.get("pause_probability", 0.0):
            time.sleep(config["pause_s"])
        return self.env.step(action)


def _compute(seconds: float) -> None:
    """Use a processor for this time of the process."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Endless(gym.Env):
    """An environment whose episodes never end."""

    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, config: EnvContext):
        self._observation = np.zeros(4, np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self._observation, {}

    def step(self, action: Any) -> Any:
        return self._observation, 1.0, False, False, {}


class Images(gym.Env):
    """Large observations that cost nothing to make."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, config: EnvContext):
        shape = config["shape"]
        self.observation_space = gym.spaces.Box(-1, 1, shape, np.float32)
        self._observation = np.zeros(shape, np.float32)
        self._steps = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self._steps = 0
        return self._observation, {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        return self._observation, 1.0, self._steps == 50, False, {}


# -- policies --------------------------------------------------------------------------------------


class SlowActing(PPOTorchPolicy):
    """Acts slowly."""

    seconds = 0.003

    def compute_actions(self, *args: Any, **options: Any) -> Any:
        time.sleep(self.seconds)
        return super().compute_actions(*args, **options)


class SlowPostprocessing(PPOTorchPolicy):
    """Postprocesses slowly."""

    seconds = 0.01

    def postprocess_trajectory(self, batch: Any, others: Any = None, episode: Any = None) -> Any:
        time.sleep(self.seconds)
        return super().postprocess_trajectory(batch, others, episode)


class LargeWeights(PPOTorchPolicy):
    """Has weights that are much larger than its network."""

    num_bytes = 40_000_000

    def get_weights(self) -> Any:
        return {**super().get_weights(), "ballast": np.ones(self.num_bytes // 4, np.float32)}

    def set_weights(self, weights: Any) -> None:
        weights = dict(weights)
        weights.pop("ballast").copy()
        super().set_weights(weights)


class RandomPolicy(Policy):
    """Acts at random and learns nothing."""

    def compute_actions(self, obs_batch: Any, *args: Any, **options: Any) -> Any:
        return self.rng.integers(2, size=len(obs_batch)), [], {}

    def learn_on_batch(self, batch: Any) -> dict[str, float]:
        return {"loss": 0.0}

    def get_weights(self) -> Any:
        return {"w": np.zeros(1, np.float32)}

    def set_weights(self, weights: Any) -> None:
        pass


class UnsteadyLearner(IMPALATorchPolicy):
    """Learns in bursts: some updates take long."""

    seconds = 0.3

    def learn_on_batch(self, batch: Any) -> Any:
        if self.shuffle_rng.random() < 0.2:
            time.sleep(self.seconds)
        return super().learn_on_batch(batch)


class SlowLearner(IMPALATorchPolicy):
    """Learns slowly."""

    seconds = 0.05

    def learn_on_batch(self, batch: Any) -> Any:
        time.sleep(self.seconds)
        return super().learn_on_batch(batch)


class Collecting(DefaultCallbacks):
    """Collects garbage after each step."""

    def on_episode_step(self, **kwargs: Any) -> None:
        gc.collect()


# -- plans -----------------------------------------------------------------------------------------


def plan_with(operator: Callable[[Any], Any], on_shards: bool = False) -> Callable[..., Any]:
    """Return PPO's plan with one more operator."""

    def execution_plan(workers: Any, config: Any) -> Any:
        if on_shards:
            shards = ParallelRollouts(workers, mode="raw").for_each(operator)
            rollouts = shards.gather_sync()
        else:
            rollouts = ParallelRollouts(workers, mode="bulk_sync").for_each(operator)
        train = rollouts.combine(ConcatBatches(config.train_batch_size))
        return StandardMetricsReporting(train.for_each(TrainOneStep(workers)), workers, config)

    return execution_plan


class Slow:
    """An operator that takes long."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def __call__(self, batch: Any) -> Any:
        time.sleep(self.seconds)
        return batch


class Leak:
    """An operator that keeps memory."""

    def __init__(self, num_bytes: int):
        self.num_bytes = num_bytes
        self.kept: list[Any] = []

    def __call__(self, batch: Any) -> Any:
        self.kept.append(np.ones(self.num_bytes, np.uint8))
        return batch


# -- cases -----------------------------------------------------------------------------------------

Case = tuple[Any, str, str]  # the algorithm, the cause, a part of the sentence


def with_policy(algorithm: type, policy: type, **settings: Any) -> Any:
    """Return an algorithm with another policy class."""
    return type(algorithm.__name__, (algorithm,), {"policy_class": policy})(**settings)


def settings_of(rng: np.random.Generator) -> dict[str, Any]:
    """Return settings that every case varies."""
    return {
        "env": Faulty,
        "num_workers": int(rng.integers(1, 3)),
        "num_envs_per_worker": int(rng.choice([2, 4, 8])),
        "train_batch_size": int(rng.choice([256, 512])),
        "sgd_minibatch_size": 128,
        "num_sgd_iter": 2,
        "seed": int(rng.integers(1000)),
    }


def slow_step(rng: Any) -> Case:
    config = {"step_s": rng.uniform(0.001, 0.005)}
    return PPO(**settings_of(rng), env_config=config), "env_step", "env.step"


def slow_reset(rng: Any) -> Case:
    config = {"reset_s": rng.uniform(0.05, 0.2)}
    return PPO(**settings_of(rng), env_config=config), "reset", "env.reset"


def slow_worker(rng: Any) -> Case:
    worker = int(rng.integers(1, 4))
    config = {"step_s": rng.uniform(0.001, 0.004), "at_worker": worker}
    settings = settings_of(rng) | {"num_workers": 3}
    return PPO(**settings, env_config=config), "slow_worker", f"Worker {worker} "


def slow_inference(rng: Any) -> Case:
    policy = type("SlowActing", (SlowActing,), {"seconds": rng.uniform(0.002, 0.01)})
    return with_policy(PPO, policy, **settings_of(rng)), "inference", "computing actions"


def slow_postprocessing(rng: Any) -> Case:
    policy = type("SlowPost", (SlowPostprocessing,), {"seconds": rng.uniform(0.01, 0.05)})
    return with_policy(PPO, policy, **settings_of(rng)), "postprocessing", "postprocess"


def slow_operator(rng: Any) -> Case:
    plan = plan_with(Slow(rng.uniform(0.2, 0.8)))
    return PPO.config_class(**settings_of(rng)).build(plan=plan), "operator", "Slow"


def slow_operator_on_shards(rng: Any) -> Case:
    plan = plan_with(Slow(rng.uniform(0.2, 0.8)), on_shards=True)
    return PPO.config_class(**settings_of(rng)).build(plan=plan), "operator", "Slow"


def slow_learner(rng: Any) -> Case:
    settings = settings_of(rng) | {"num_sgd_iter": int(rng.integers(40, 100))}
    return PPO(**settings), "training", "TrainOneStep"


def small_minibatches(rng: Any) -> Case:
    settings = settings_of(rng) | {"sgd_minibatch_size": int(rng.choice([2, 4, 8]))}
    return PPO(**settings), "small_minibatches", "sgd_minibatch_size"


def impala(rng: Any, policy: type, **settings: Any) -> Any:
    common = settings_of(rng)
    del common["sgd_minibatch_size"], common["num_sgd_iter"]
    return with_policy(IMPALA, policy, **(common | {"num_workers": 2} | settings))


def small_queue(rng: Any) -> Case:
    policy = type("Unsteady", (UnsteadyLearner,), {"seconds": rng.uniform(0.3, 0.6)})
    config = {"pause_probability": 0.007, "pause_s": rng.uniform(0.3, 0.6)}
    algorithm = impala(
        rng, policy, env_config=config, learner_queue_size=1, train_batch_size=64,
        rollout_fragment_length=16, num_envs_per_worker=4,
    )  # fmt: skip
    return algorithm, "queue_too_small", "too small"


def large_queue(rng: Any) -> Case:
    policy = type("Slow", (SlowLearner,), {"seconds": rng.uniform(0.03, 0.06)})
    algorithm = impala(
        rng, policy, learner_queue_size=int(rng.choice([64, 128, 256])), train_batch_size=64,
        rollout_fragment_length=16, num_envs_per_worker=4,
    )  # fmt: skip
    return algorithm, "queue_too_large", "policy lag of"


def starved_branch(rng: Any) -> Case:
    settings = {"env": "CartPole-v1", "learning_starts": 200, "seed": int(rng.integers(1000))}
    intensity = float(rng.choice([500, 1000, 4000]))
    return DQN(**settings, training_intensity=intensity), "replay_ratio", "training_intensity"


def large_weights(rng: Any) -> Case:
    size = int(rng.choice([40_000_000, 80_000_000]))
    policy = type("Large", (LargeWeights,), {"num_bytes": size})
    settings = settings_of(rng) | {"num_sgd_iter": 1, "train_batch_size": 128}
    return with_policy(PPO, policy, **settings), "weights", "Sending weights"


def large_fragments(rng: Any) -> Case:
    settings = settings_of(rng) | {
        "env": Images,
        "env_config": {"shape": (int(rng.choice([200, 300])), 200, 3)},
        "num_workers": 2,
        "num_envs_per_worker": 2,
        "num_sgd_iter": 1,
        "sgd_minibatch_size": 0,
    }
    return with_policy(PPO, RandomPolicy, **settings), "transfer", "MB from the workers to this"


def failing_worker(rng: Any) -> Case:
    settings = settings_of(rng) | {"num_workers": 2, "num_envs_per_worker": 2}
    worker = int(rng.integers(1, 3))
    config = {"exit_probability": rng.uniform(0.0005, 0.002), "at_worker": worker}
    return PPO(**settings, env_config=config), "worker_restarts", f"Worker {worker} "


def leak(rng: Any) -> Case:
    plan = plan_with(Leak(int(rng.uniform(1e6, 5e6))))
    settings = settings_of(rng) | {"rollout_fragment_length": 16}
    return PPO.config_class(**settings).build(plan=plan), "memory", "Leak"


def endless_episodes(rng: Any) -> Case:
    return PPO(**(settings_of(rng) | {"env": Endless})), "no_episodes", "No episode"


def many_workers(rng: Any) -> Case:
    settings = settings_of(rng) | {"num_workers": int(rng.integers(3, 5) * num_cores())}
    config = {"compute_s": rng.uniform(0.0002, 0.001)}
    return PPO(**settings, env_config=config), "too_many_workers", "share"


def many_threads(rng: Any) -> Case:
    settings = settings_of(rng) | {
        "num_workers": 2,
        "num_envs_per_worker": 32,
        "num_threads_per_process": int(rng.choice([4, 8])),
        "model": {"fcnet_hiddens": [512, 512]},
    }
    return PPO(**settings), "threads", "num_threads_per_process"


def garbage(rng: Any) -> Case:
    settings = settings_of(rng) | {"callbacks_class": Collecting}
    return PPO(**settings), "garbage_collection", "Collecting.on_episode_step"


CASES = [
    slow_step, slow_reset, slow_worker, slow_inference, slow_postprocessing, slow_operator,
    slow_operator_on_shards, slow_learner, small_minibatches, small_queue, large_queue,
    starved_branch, large_weights, large_fragments, failing_worker, leak, endless_episodes,
    many_workers, many_threads, garbage,
]  # fmt: skip


def observe(algorithm: Any) -> list[Any]:
    """Train for SECONDS after the first measured step; return the findings."""
    with algorithm:
        started = None
        while started is None or time.monotonic() - started < SECONDS:
            algorithm.train()
            started = started or time.monotonic()
        return list(algorithm.diagnose().findings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--cases", default="")
    args = parser.parse_args()
    chosen = [case for case in CASES if not args.cases or case.__name__ in args.cases.split(",")]
    for seed in range(args.seeds):
        found = 0
        for case in chosen:
            rng = np.random.default_rng([seed, CASES.index(case)])
            algorithm, cause, part = case(rng)
            findings = observe(algorithm)
            text = findings[0].text if findings else "(nothing)"
            is_right = bool(findings) and findings[0].cause == cause and part in text
            found += is_right
            print(f"{'right' if is_right else 'WRONG'}  {case.__name__}: {text}", flush=True)
            if not is_right:
                others = [(finding.cause, round(finding.share, 2)) for finding in findings[1:4]]
                print(f"       next: {others}", flush=True)
        print(f"seed {seed}: {found} of {len(chosen)}", flush=True)


if __name__ == "__main__":
    main()
