"""The shares of a run's time: sampling and its parts, transfers, weights, operators, training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flowrl.monitoring.activity import Activity, StageActivity, WorkerActivity
from flowrl.monitoring.plan_facts import PlanFacts
from flowrl.ops.inspection import Breakpoint
from flowrl.sampling.callbacks import EPISODE_EVENTS

SMALL_MINIBATCH = 16  # rows
MANY_UPDATES = 4.0  # per row stored in a replay buffer
LARGE_FRAGMENT_BYTES = 1e6
MIN_DROPPED_ITEMS = 20  # items in a period, all of which a filter has dropped
MIN_SHARE_OF_FULL_QUEUE = 0.9  # of a learner that sampling waits for, although both overlap
REPLAY = ("replay", "replay_actors")  # kinds of stages that draw batches
LEARNING_ON_SHARDS = ("LearnOnWorker", "ComputeGradientsOnWorker")


@dataclass(frozen=True)
class Finding:
    """One thing that limits a run.

    Attributes:
        cause: identifies the kind of the finding, such as "env_step" or "training".
        operator: the stage, worker or part of the program that it is about.
        share: share of the time that it takes, from 0 to 1.
        text: a sentence with the remedy.
        line: `file:line` of the plan, or "".
    """

    cause: str
    operator: str
    share: float
    text: str
    line: str = ""


def seconds_of(workers: Iterable[WorkerActivity]) -> float:
    """Return the seconds of work of workers."""
    return sum(worker.busy_s for worker in workers)


def bottlenecks(activity: Activity, facts: PlanFacts) -> list[Finding]:
    """Return where the time of a plan goes, the largest share first."""
    findings = [
        _sampling(activity, facts),
        _transfer(activity, facts),
        _weights(activity, facts),
        _outside(activity, facts),
        *(_training(stage, activity, facts) for stage in activity.stages_of("training")),
        *(_learner_thread(stage, activity, facts) for stage in activity.stages_of("dequeue")),
        *(_tasks(stage, activity) for stage in activity.stages_of("tasks")),
        *(_replay_actors(stage, activity) for stage in activity.stages_of("replay_actors")),
        *(_operator(stage) for stage in activity.stages if _is_other(stage)),
        *(_dropping(stage, activity) for stage in activity.stages if stage.is_own),
    ]
    found = [finding for finding in findings if finding is not None]
    return sorted(found, key=lambda finding: -finding.share)


def _is_other(stage: StageActivity) -> bool:
    kinds = ("operator", "tasks", "store", *REPLAY, "enqueue", "report")
    return stage.kind in kinds and stage.name != Breakpoint.__name__  # the user is debugging


# -- sampling --------------------------------------------------------------------------------------


def _sampling(activity: Activity, facts: PlanFacts) -> Finding | None:
    """Describe the largest part of the time of sampling."""
    share = _sampling_share(activity, facts)
    if share <= 0:
        return None
    of_workers = seconds_of(activity.workers)
    parts = _parts(activity)
    cause = max(parts, key=lambda name: parts[name], default="")
    if not cause or of_workers <= 0:
        return None
    part = min(parts[cause] / of_workers, 1.0)
    time_of = "the workers' time" if facts.num_workers else "the sampling time"
    waits = any(worker.waits_for_env for worker in activity.workers)
    can_add = facts.num_workers < facts.num_cores or waits
    what, remedy = _describe(cause, facts, can_add, waits)
    if what.startswith(LEARNING_ON_SHARDS):
        text = f"Training limits this run: {what} takes {part:.0%} of the workers' time"
        return _training_finding(text, what, share, facts, draws=facts.replay is not None)
    sampling = f"Sampling limits this run ({share:.0%} of the time)"
    return Finding(
        cause.partition(":")[0],
        what,
        share,
        f"{sampling}: {what} takes {part:.0%} of {time_of}. {remedy}",
    )


def _sampling_share(activity: Activity, facts: PlanFacts) -> float:
    """Return the share of the time that the plan depends on sampling."""
    shares = [worker.busy for worker in activity.workers]
    if not facts.num_workers:
        # the stage counts its time continuously, the worker when a fragment ends
        stages = [stage.busy for stage in activity.stages_of("sampling")]
        return max(stages, default=0.0) or max(shares, default=0.0)
    asynchronous = any(stage.name == "gather_async" for stage in activity.stages_of("sampling"))
    if asynchronous or facts.queue_size is not None:  # sampling and learning overlap
        return min(sum(shares) / facts.num_workers, 1.0)
    return min(max(shares, default=0.0), _waiting_for_workers(activity))


def _waiting_for_workers(activity: Activity) -> float:
    return max((stage.waiting for stage in activity.stages_of("sampling")), default=0.0)


def _parts(activity: Activity) -> dict[str, float]:
    """Return the seconds of the parts of sampling, of all workers; callbacks and operators on the
    shards as "callback:NAME" and "operator:TITLE"."""
    total: dict[str, float] = {}
    for worker in activity.workers:
        seconds = worker.seconds
        reset = min(seconds.get("reset_s", 0.0), seconds.get("env_step_s", 0.0))
        named = {
            "reset": reset,
            "env_step": seconds.get("env_step_s", 0.0) - reset,
            "inference": seconds.get("inference_s", 0.0),
            **{f"callback:{name}": value for name, value in worker.callback_s.items()},
            **{f"operator:{title}": value for title, value in worker.operator_s.items()},
        }
        postprocessing = seconds.get("postprocess_s", 0.0)
        postprocessing -= worker.callback_s.get("on_postprocess_trajectory", 0.0)
        collection = seconds.get("collection_s", 0.0)
        collection -= sum(worker.callback_s.get(name, 0.0) for name in EPISODE_EVENTS)
        # episodes that end within a fragment are postprocessed while rows are stored
        collection += min(postprocessing, 0.0)
        named["postprocessing"] = max(postprocessing, 0.0)
        named["collection"] = max(collection, 0.0)
        for name, value in named.items():
            total[name] = total.get(name, 0.0) + value
    return total


def _describe(
    cause: str, facts: PlanFacts, can_add_workers: bool, waits_for_env: bool
) -> tuple[str, str]:
    """Return the name of a part of sampling, and a remedy."""
    kind, _, name = cause.partition(":")
    more = "Use more environments per worker (num_envs_per_worker)"
    workers = "add workers (num_workers)" if can_add_workers else "use a machine with more cores"
    parallel = ""
    if waits_for_env and facts.steps_in_turn and facts.num_envs > 1:
        parallel = 'step environments in parallel (vectorization_mode="async"), '
    return {
        "env_step": ("env.step", f"Make it faster, {parallel}or {workers}."),
        "reset": ("env.reset", f"Make it faster, use longer episodes, or {workers}."),
        "inference": ("computing actions", f"{more}, a smaller model, or {workers}."),
        "postprocessing": (
            "postprocessing of fragments",
            "Use longer fragments (rollout_fragment_length), or make postprocess_trajectory of "
            "the policy faster.",
        ),
        "collection": ("storing rows", f"{more}, or {workers}."),
        "callback": (f"{facts.callbacks}.{name}", "Make this callback faster."),
        "operator": (f"{name}, on the shards,", "Make it faster."),
    }[kind]


# -- between workers and this process --------------------------------------------------------------


def _transfer(activity: Activity, facts: PlanFacts) -> Finding | None:
    """Describe the time in which fragments are received and concatenated, or in which the plan
    waits for workers that do not sample."""
    stages = activity.stages_of("sampling")
    if not facts.num_workers or not stages or facts.queue_size is not None:
        return None
    gather = max(stages, key=lambda stage: stage.busy + stage.waiting)
    busiest = max((worker.busy for worker in activity.workers), default=0.0)
    weights = activity.weights_s / activity.seconds
    share = max(gather.busy - weights, 0.0) + max(gather.waiting - busiest, 0.0)
    share = min(share + sum(stage.busy for stage in activity.stages_of("rollouts")), 1.0)
    fragments = sum(worker.fragments for worker in activity.workers)
    num_bytes = sum(worker.num_bytes for worker in activity.workers)
    size = num_bytes / max(fragments, 1)
    if size >= LARGE_FRAGMENT_BYTES:
        text = (
            f"Moving fragments of {size / 1e6:.1f} MB from the workers to this process takes "
            f"{share:.0%} of the time ({num_bytes / activity.seconds / 1e6:.0f} MB/s). Use shorter "
            "fragments (rollout_fragment_length), smaller observations (uint8), or sample in this "
            "process (num_workers=0)."
        )
    else:
        text = (
            f"Requests to the workers take {share:.0%} of the time: {fragments} fragments of "
            f"{size / 1e3:.0f} kB. Use longer fragments (rollout_fragment_length)."
        )
    return Finding("transfer", gather.name, share, text, gather.line)


def _weights(activity: Activity, facts: PlanFacts) -> Finding | None:
    """Describe the time in which weights are prepared, and loaded by the busiest worker."""
    if not facts.num_workers:
        return None
    loading = max(
        (one.share_of(one.seconds.get("weights_s", 0.0)) for one in activity.workers), default=0.0
    )
    share = min(activity.weights_s / activity.seconds + loading, 1.0)
    interval = "broadcast_interval, " if "broadcast_interval" in facts.settings else ""
    return Finding(
        "weights",
        "weights",
        share,
        f"Sending weights to the workers takes {share:.0%} of the time. Send them less often "
        f"({interval}longer fragments), or use a smaller model.",
    )


def _outside(activity: Activity, facts: PlanFacts) -> Finding:
    """Describe the time between two results."""
    share = min(activity.outside_s / activity.seconds, 1.0)
    callback = activity.callback_s.get("on_train_result", 0.0)
    if callback > activity.outside_s / 2 > 0:
        name = f"{facts.callbacks}.on_train_result"
        text = f"{name} takes {share:.0%} of the time. Make this callback faster."
        return Finding("callback", name, share, text)
    return Finding(
        "between_results",
        "between results",
        share,
        f"Work between two results takes {share:.0%} of the time: evaluation, checkpoints, or the "
        "code that calls train(). Do it less often.",
    )


# -- training and other operators ------------------------------------------------------------------


def _training(stage: StageActivity, activity: Activity, facts: PlanFacts) -> Finding:
    share, replay = stage.busy, facts.replay
    draws = any(other.kind in REPLAY for other in _upstream(stage, activity))
    if draws and replay is not None and replay.updates_per_row >= MANY_UPDATES:
        blocked = max((one.blocked for one in activity.stages_of("store")), default=0.0)
        return Finding(
            "replay_ratio",
            stage.name,
            share,
            f"training_intensity={replay.training_intensity:g} starves sampling: it makes "
            f"{replay.updates_per_row:.3g} updates per stored row, so that {stage.name} takes "
            f"{share:.0%} of the time and the branch that stores is blocked {blocked:.0%} of it. "
            "Lower it, or leave it out: then one batch is drawn per stored fragment.",
            stage.line,
        )
    callback = activity.callback_s.get("on_learn_on_batch", 0.0) / activity.seconds
    if callback > share / 2 > 0:
        name = f"{facts.callbacks}.on_learn_on_batch"
        text = f"{name} takes {callback:.0%} of the time. Make this callback faster."
        return Finding("callback", name, min(callback, 1.0), text, stage.line)
    name = stage.name
    if len(activity.stages_of("training")) > 1:
        name += f", chained at {stage.line},"
    text = f"Training limits this run: {name} takes {share:.0%} of the time"
    return _training_finding(text, stage.name, share, facts, draws, stage.line, stage.id)


def _upstream(stage: StageActivity, activity: Activity) -> list[StageActivity]:
    """Return the stages that a stage pulls, directly or not."""
    by_id = {other.id: other for other in activity.stages}
    found, open_ids = [], list(stage.parents)
    while open_ids:
        other = by_id[open_ids.pop()]
        found.append(other)
        open_ids += other.parents
    return found


def _learner_thread(stage: StageActivity, activity: Activity, facts: PlanFacts) -> Finding:
    share = min(max(float(stage.values.get("learn_s", 0.0)) / activity.seconds, 0.0), 1.0)
    enqueues = activity.stages_of("enqueue")
    full = sum(float(one.values.get("backpressure_s", 0.0)) for one in enqueues) / activity.seconds
    text = f"Training limits this run: the learner takes {share:.0%} of the time"
    if full > 0.1:
        text += f", its queue is full {full:.0%} of it"
        if share > 0.5:
            share = max(share, MIN_SHARE_OF_FULL_QUEUE)  # sampling waits for it
    draws = facts.replay is not None
    return _training_finding(text, "learner", share, facts, draws, stage.line)


def _training_finding(
    text: str,
    operator: str,
    share: float,
    facts: PlanFacts,
    draws: bool,
    line: str = "",
    stage_id: int | None = None,
) -> Finding:
    """Return the finding that training limits a run; a remedy is added to the text.

    Args:
        text: the start of the text.
        operator, share, line: see Finding.
        facts: sizes and settings of the plan.
        draws: whether the operator trains on batches of a replay buffer.
        stage_id: id of the stage that trains; None: all operators of the plan that train.
    """
    size, num_passes = facts.of_training(stage_id)
    if size is not None and size <= SMALL_MINIBATCH:
        remedy = f" with minibatches of {size} rows. Increase sgd_minibatch_size."
        return Finding("small_minibatches", operator, share, text + remedy, line)
    remedies = ["a smaller model"]
    if size is not None:
        remedies.append("larger minibatches (sgd_minibatch_size)")
    if num_passes > 1:
        remedies.append("fewer passes (num_sgd_iter)")
    if draws:
        remedies.append("fewer updates per env step (training_intensity)")
    if "num_learners" in facts.settings:
        remedies.append("several learners (num_learners)")
    remedy = f". Use {_joined(remedies)}."
    return Finding("training", operator, share, text + remedy, line)


def _joined(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} or {parts[-1]}"


def _tasks(stage: StageActivity, activity: Activity) -> Finding:
    """Describe the time in which the plan waits for the tasks of an operator."""
    share = _own_waiting(stage, activity)
    return Finding(
        "tasks",
        stage.name,
        share,
        f"The plan waits for the tasks of the operator {stage.name} {share:.0%} of the time; it is "
        f"chained at {stage.line}. Run more of them at once (max_concurrency), or make it faster.",
        stage.line,
    )


def _replay_actors(stage: StageActivity, activity: Activity) -> Finding:
    """Describe the time in which the plan waits for replay actors, and not for samples to store."""
    share = min(_own_waiting(stage, activity), 1 - _waiting_for_workers(activity))
    return Finding(
        "replay_actors",
        stage.name,
        share,
        f"The plan waits for batches from the replay actors {share:.0%} of the time. Use more of "
        "them (num_replay_shards), or smaller batches (train_batch_size).",
        stage.line,
    )


def _own_waiting(stage: StageActivity, activity: Activity) -> float:
    """Return the share of the time that a stage waits, and not for its parents."""
    parents = [other for other in activity.stages if other.id in stage.parents]
    return max(stage.waiting - sum(other.busy + other.waiting for other in parents), 0.0)


def _dropping(stage: StageActivity, activity: Activity) -> Finding | None:
    """Describe a filter of the user that drops all of many items in a run without results."""
    received = sum(other.items for other in activity.stages if other.id in stage.parents)
    drops = stage.title.startswith("filter(") and not stage.items
    if activity.iteration or not drops or received < MIN_DROPPED_ITEMS:
        return None
    return Finding(
        "dropping",
        stage.name,
        1.0,
        f"{stage.title} has dropped all {received:,} items, so the stages after it have nothing to "
        f"do; it is chained at {stage.line}.",
        stage.line,
    )


def _operator(stage: StageActivity) -> Finding:
    """Describe another operator in this process."""
    remedy = "Larger batches or fragments make it take less."
    if stage.is_own:
        remedy = (
            "Make it faster, run it on the workers, or in Ray tasks (for_each(fn, "
            "max_concurrency=2))."
        )
    return Finding(
        "operator",
        stage.name,
        stage.busy,
        f"The operator {stage.name} takes {stage.busy:.0%} of the time; it is chained at "
        f"{stage.line}. {remedy}",
        stage.line,
    )
