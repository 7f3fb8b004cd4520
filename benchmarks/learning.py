"""Env steps until the shipped plans learn CartPole-v1, by seed.

The goal is a mean return of the last 100 episodes; for `ppo_dqn`, a mean return of each policy over
its window. The "alone" plans train one branch of `ppo_dqn` in an environment with its two agents.

    python benchmarks/learning.py [--plans dqn,ppo_dqn,…] [--seeds 5] [--limit 100000]
"""

from __future__ import annotations

import argparse
import os
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import numpy as np

from flowrl.trainer.algorithm import Algorithm
from flowrl.trainer.plan_settings import plan_config

GOALS = (400.0, 450.0)


def steps_to(algorithm: Algorithm, limit: int) -> dict[str, dict[float, int | None]]:
    """Return policy id -> goal -> env steps until the mean return first reached the goal.

    The policy id is "" for algorithms with one policy.
    """
    reached: dict[str, dict[float, int | None]] = {}
    while True:
        result = algorithm.train()
        means = {"": result["episode_reward_mean"]}
        if len(result["policy_reward_mean"]) > 1 or "alone" in algorithm.__class__.__name__:
            means = dict(result["policy_reward_mean"])
        if result["episodes_in_window"] < algorithm.config.metrics_num_episodes_for_smoothing:
            means = dict.fromkeys(means, 0.0)
        for policy_id, mean in means.items():
            steps = reached.setdefault(policy_id, dict.fromkeys(GOALS))
            for goal in GOALS:
                if steps[goal] is None and mean >= goal:
                    steps[goal] = result["timesteps_total"]
        done = all(reached[policy_id][GOALS[-1]] is not None for policy_id in means)
        if done or result["timesteps_total"] >= limit:
            if len(reached) > 1:
                reached.pop("", None)  # results before each policy has finished an episode
            return reached


def algorithm_for(name: str, seed: int) -> Algorithm:
    """Build the algorithm of a shipped plan, or of one branch of `ppo_dqn`."""
    if not name.startswith("alone"):
        config = plan_config(name).updated(seed=seed, min_sample_timesteps_per_iteration=500)
        algorithm: Algorithm = config.build(plan=name)
        return algorithm
    import composition

    policy_id = name.split("-")[1]
    config = plan_config("ppo_dqn")
    config = config.updated(
        seed=seed,
        min_sample_timesteps_per_iteration=500,
        env_config={"num_agents": 2, "episode_steps": 500},
        policies={policy_id: config.policies[policy_id]},
        policy_mapping_fn=lambda agent_id, *args, **kwargs: policy_id,
    )
    plan: Any = getattr(composition, f"{policy_id}_alone")
    branch_class = type("alone", (Algorithm,), {"execution_plan": staticmethod(plan)})
    branch: Algorithm = branch_class(config)
    return branch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", default="dqn,a2c_replay,ppo_dqn,alone-ppo,alone-dqn")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--limit", type=int, default=100_000)
    options = parser.parse_args()
    print("| plan | policy | mean return | env steps, by seed | median |")
    print("|---|---|---:|---|---:|")
    for name in options.plans.split(","):
        reached = []
        for seed in range(options.seeds):
            with algorithm_for(name, seed) as algorithm:
                reached.append(steps_to(algorithm, options.limit))
        for policy_id in reached[0]:
            for goal in GOALS:
                steps = [by_policy[policy_id][goal] for by_policy in reached]
                by_seed = ", ".join("-" if s is None else f"{s:,}" for s in steps)
                median = np.median([np.inf if s is None else s for s in steps])
                cells = f"{name} | {policy_id} | {goal:.0f} | {by_seed} | {median:,.0f}"
                print(f"| {cells} |", flush=True)


if __name__ == "__main__":
    main()
