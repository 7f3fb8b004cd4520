"""The cost of a plan: PPO and DQN as plans, and the same calls in a plain loop.

The loop calls the same worker, replay buffer and policy methods as the plan, without stages,
metrics and results. PPO: CartPole-v1, the shipped settings. DQN: CartPole-v1, the shipped settings
with an update of 32 rows every 4 env steps; its cost is also given per round of 4 env steps. Both
run in one process and take turns of about a second; prints medians over the turns' ratios.

    python benchmarks/overhead.py [--rounds 15]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

from peer_env import spread

from flowrl.trainer.plan_settings import plan_config

PPO_BATCHES, DQN_STEPS, EVERY = 3, 4000, 4


def settings(plan: str, **changes: Any) -> Any:
    """Return the shipped settings of a plan for CartPole-v1."""
    config = plan_config(plan, "CartPole-v1", tuned=False)
    return config.updated(total_timesteps=10**7, seed=0, **changes)


def ppo_config() -> Any:
    return settings("ppo")


def dqn_config() -> Any:
    return settings("dqn", rollout_fragment_length=EVERY, train_batch_size=32)


def ppo_loop(workers: Any, config: Any) -> Callable[[int], None]:
    """Return a function that trains for a number of env steps."""
    worker = workers.local_worker()
    policy = worker.get_policy()

    def train(num_steps: int) -> None:
        for _ in range(num_steps // config.train_batch_size):
            batch = worker.sample()
            workers.global_vars["timestep"] += batch.count
            policy.learn_on_minibatches(batch, config.num_sgd_iter, config.sgd_minibatch_size)
            policy.on_global_var_update(workers.global_vars)
            worker.get_metrics()

    return train


def dqn_loop(workers: Any, config: Any) -> Callable[[int], None]:
    """Return a function that trains for a number of env steps."""
    worker = workers.local_worker()
    policy, buffer = worker.get_policy(), config.replay_buffer()
    since_update = 0

    def train(num_steps: int) -> None:
        nonlocal since_update
        for _ in range(num_steps // EVERY):
            batch = worker.sample()
            workers.global_vars["timestep"] += batch.count
            since_update += batch.count
            buffer.add(batch)
            if len(buffer) < config.learning_starts:
                continue
            replayed = buffer.sample()
            policy.learn_on_minibatches(replayed)
            policy.on_global_var_update(workers.global_vars)
            rows = policy.row_stats
            buffer.update_priorities("default_policy", rows["batch_indexes"], abs(rows["td_error"]))
            if since_update >= config.target_network_update_freq:
                policy.update_target()
                since_update = 0
        worker.get_metrics()

    return train


def measure(make_config: Callable[[], Any], loop: Any, steps: int, rounds: int) -> list[Any]:
    """Return (seconds of the plan, seconds of the loop) per round of about `steps` env steps."""
    found = []
    with make_config().build() as planned, make_config().build() as plain:
        train = loop(plain.workers, plain.config)

        def run_plan(num_steps: int) -> int:
            begin = planned.env_steps
            while planned.env_steps < begin + num_steps:
                planned.train()
            return planned.env_steps - begin

        run_plan(steps), train(steps)  # warm up, and fill the replay buffers
        for _ in range(rounds):
            started = time.perf_counter()
            done = run_plan(steps)
            between = time.perf_counter()
            train(done)
            found.append(((between - started) / done, (time.perf_counter() - between) / done))
        learners = [a.workers.local_worker().get_policy().learner for a in (planned, plain)]
        planned_updates, plain_updates = (learner.num_updates for learner in learners)
        assert abs(planned_updates - plain_updates) <= 0.01 * plain_updates
    return found


def main() -> None:
    """Measure both and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print("| | μs per env step in the loop | plan / loop | μs of the plan per round of 4 steps |")
    print("|---|---:|---:|---:|")
    cases = {
        "PPO": (ppo_config, ppo_loop, PPO_BATCHES * ppo_config().train_batch_size),
        "DQN": (dqn_config, dqn_loop, DQN_STEPS),
    }
    for name, (make_config, loop, steps) in cases.items():
        found = measure(make_config, loop, steps, options.rounds)
        in_loop = spread([1e6 * b for _, b in found], 1)
        per_round = spread([1e6 * EVERY * (a - b) for a, b in found], 1) if name == "DQN" else ""
        print(f"| {name} | {in_loop} | {spread([a / b for a, b in found])} | {per_round} |")


if __name__ == "__main__":
    main()
