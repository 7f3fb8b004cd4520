"""Activities of runs that do not exist."""

from flowrl.monitoring.activity import Activity, StageActivity, WorkerActivity

SMALL = {
    "train_batch_size": 64,
    "sgd_minibatch_size": 32,
    "num_sgd_iter": 1,
    "model": {"fcnet_hiddens": [8]},
    "seed": 0,
}


def stage(kind, name="Operator", **values):
    """Return the activity of a stage that does nothing."""
    defaults = {
        "id": 0, "title": name, "name": name, "line": "plan.py:7", "kind": kind, "parents": [],
        "items": 1, "busy": 0.0, "waiting": 0.0, "blocked": 1.0, "grown_bytes": 0.0,
    }  # fmt: skip
    return StageActivity(**{**defaults, **values})


def worker(index=1, **values):
    """Return the activity of a worker that samples all the time."""
    defaults = {
        "index": index, "restarts": 0, "period_s": 10.0,
        "fragments": 10, "env_steps": 1000, "num_bytes": 100_000,
        "seconds": {"sample_s": 9.0, "env_step_s": 3.0, "inference_s": 4.0}, "callback_s": {},
        "operator_s": {}, "usage": {"cpu_s": 9.0},
    }  # fmt: skip
    return WorkerActivity(**{**defaults, **values})


def activity(*stages, workers=(), **values):
    """Return the activity of ten seconds."""
    defaults = {
        "time": 0.0, "seconds": 10.0, "iteration": 5, "env_steps_total": 1000,
        "counters": {"num_env_steps_trained": 100}, "usage": {}, "weights_s": 0.0,
        "outside_s": 0.0, "policy_lag_mean": 0.0, "policy_lag_max": 0.0, "episodes_total": 3,
    }  # fmt: skip
    stages = list(stages) or [stage("training", "TrainOneStep")]
    return Activity(stages=stages, workers=list(workers), **{**defaults, **values})
