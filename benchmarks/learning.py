"""Env steps that the shipped plans take to learn CartPole-v1, by seed.

The mean return of the last 100 episodes, or of `ppo_dqn` each policy's mean over the agents'
episodes of its window. "alone" is the branch of one policy, in an environment of its two agents.

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
from flowrl.trainer.plan_files import load_plan

GOALS = (400.0, 450.0)


def steps_to(algorithm: Algorithm, limit: int) -> dict[str, dict[float, int | None]]:
    """Who -> mean return -> env steps when it was first reached."""
    found: dict[str, dict[float, int | None]] = {}
    while True:
        result = algorithm.train()
        means = {"": result["episode_reward_mean"]}
        if len(result["policy_reward_mean"]) > 1 or "alone" in algorithm.__class__.__name__:
            means = dict(result["policy_reward_mean"])
        if result["episodes_in_window"] < algorithm.config.metrics_num_episodes_for_smoothing:
            means = dict.fromkeys(means, 0.0)
        for who, mean in means.items():
            own = found.setdefault(who, dict.fromkeys(GOALS))
            for goal in GOALS:
                if own[goal] is None and mean >= goal:
                    own[goal] = result["timesteps_total"]
        done = all(own[GOALS[-1]] is not None for who, own in found.items() if who in means)
        if done or result["timesteps_total"] >= limit:
            if len(found) > 1:
                found.pop("", None)  # before each policy had ended an episode
            return found


def algorithm_for(name: str, seed: int) -> Algorithm:
    """An algorithm over a shipped plan, or over one branch of `ppo_dqn`."""
    if not name.startswith("alone"):
        config = load_plan(name).config.updated(seed=seed, min_sample_timesteps_per_iteration=500)
        built: Algorithm = config.build(plan=name)
        return built
    import composition

    which = name.split("-")[1]
    config = load_plan("ppo_dqn").config
    config = config.updated(
        seed=seed,
        min_sample_timesteps_per_iteration=500,
        env_config={"num_agents": 2, "episode_steps": 500},
        policies={which: config.policies[which]},
        policy_mapping_fn=lambda agent_id, *args, **kwargs: which,
    )
    plan: Any = getattr(composition, f"{which}_alone")
    kind = type("alone", (Algorithm,), {"execution_plan": staticmethod(plan)})
    made: Algorithm = kind(config)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", default="dqn,a2c_replay,ppo_dqn,alone-ppo,alone-dqn")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--limit", type=int, default=100_000)
    options = parser.parse_args()
    print("| plan | policy | mean return | env steps, by seed | median |")
    print("|---|---|---:|---|---:|")
    for name in options.plans.split(","):
        found = []
        for seed in range(options.seeds):
            with algorithm_for(name, seed) as algorithm:
                found.append(steps_to(algorithm, options.limit))
        for who in found[0]:
            for goal in GOALS:
                steps = [one[who][goal] for one in found]
                shown = ", ".join("-" if s is None else f"{s:,}" for s in steps)
                median = np.median([np.inf if s is None else s for s in steps])
                print(f"| {name} | {who} | {goal:.0f} | {shown} | {median:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
