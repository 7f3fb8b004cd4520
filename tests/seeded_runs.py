"""Record seeded short runs of every shipped plan, and compare two recordings.

Refactoring must not change the results. A recording contains every result without its times, and a
checksum of the final weights. Plans that are not repeatable on workers are only recorded without
workers. (The final weights of `ppo_async` depend on timing, its results do not.)

    python -m tests.seeded_runs record before.json
    python -m tests.seeded_runs compare before.json after.json
"""

import argparse
import json
import math
import sys
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path

from flowrl.trainer.plan_files import shipped_plans
from flowrl.trainer.plan_settings import plan_config

OFFLINE = {"bc": "CartPole-v1", "marwil": "CartPole-v1", "cql": "Pendulum-v1"}
NOT_REPEATABLE = {"apex", "appo", "impala", "dqn_distributed"}
NOT_REPEATABLE_ON_WORKERS = NOT_REPEATABLE | {"a3c", "ppo_async", *OFFLINE}
TIMES = ("timers", "time_", "_time", "throughput", "duration", "hist_stats/", "bytes")


def small_settings(config):
    if "learning_starts" in config:
        return config.updated(learning_starts=64, replay_buffer_capacity=2000)
    minibatch = min(config.sgd_minibatch_size, 32)
    return config.updated(train_batch_size=128, sgd_minibatch_size=minibatch)


def small_config(plan, num_workers=0, **settings):
    config = plan_config(plan).updated(
        num_envs_per_worker=2,
        seed=3,
        min_sample_timesteps_per_iteration=256,
        num_workers=num_workers,
        **settings,
    )
    if config.policies is None:
        return small_settings(config)
    specs = {
        policy_id: replace(spec, config=small_settings(spec.config))
        for policy_id, spec in config.policies.items()
    }
    return config.updated(policies=specs)


def flatten(value, prefix=""):
    """Yield (name, value) of every entry of a result, except times."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flatten(inner, f"{prefix}{key}/")
        return
    name = prefix[:-1]
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, float) and math.isnan(value):
        value = "nan"
    if not any(part in name for part in TIMES):
        yield name, value


def checksum(policy):
    weights = policy.get_weights()
    crc = 0
    for name in sorted(weights):
        crc = zlib.crc32(weights[name].tobytes(), crc)
    return crc


def record_run(plan, num_workers, experience):
    if plan in OFFLINE:
        config = plan_config(plan).updated(
            seed=3, train_batch_size=128, input_=experience[OFFLINE[plan]]
        )
    else:
        config = small_config(plan, num_workers)
    with config.build(plan=plan) as algorithm:
        results = [dict(flatten(algorithm.train())) for _ in range(4)]
        policies = algorithm.workers.local_worker().policy_map
        weights = {policy_id: checksum(policy) for policy_id, policy in policies.items()}
        return {"results": results, "weights": weights}


def record(path):
    recording = {}
    with tempfile.TemporaryDirectory() as folder:
        experience = {}
        for env, plan in (("CartPole-v1", "ppo"), ("Pendulum-v1", "sac")):
            experience[env] = f"{folder}/{env}"
            with small_config(plan, output=experience[env]).build(plan=plan) as algorithm:
                for _ in range(4):
                    algorithm.train()
        for num_workers, excluded in ((0, NOT_REPEATABLE), (2, NOT_REPEATABLE_ON_WORKERS)):
            for plan in shipped_plans():
                if plan not in excluded:
                    name = f"{plan}, {num_workers} workers"
                    recording[name] = record_run(plan, num_workers, experience)
                    print(name, recording[name]["weights"], flush=True)
    Path(path).write_text(json.dumps(recording))


def compare(path, other_path):
    """Print the first differences of each run; return the number of runs that differ."""
    recording, other = (json.loads(Path(p).read_text()) for p in (path, other_path))
    num_different = 0
    for name in sorted(set(recording) | set(other)):
        one, two = (r.get(name, {"results": [], "weights": None}) for r in (recording, other))
        differences = [("weights", one["weights"], two["weights"])]
        for i, pair in enumerate(zip(one["results"], two["results"], strict=False)):
            keys = sorted(set(pair[0]) | set(pair[1]))
            differences += [(f"{i}: {key}", pair[0].get(key), pair[1].get(key)) for key in keys]
        differences = [entry for entry in differences if entry[1] != entry[2]]
        print(f"{name}: {len(differences) or 'no'} differences")
        for entry in differences[:5]:
            print("   ", *entry)
        num_different += bool(differences)
    return num_different


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["record", "compare"])
    parser.add_argument("files", nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "record":
        record(*arguments.files)
    else:
        sys.exit(compare(*arguments.files) > 0)
