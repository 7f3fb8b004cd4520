"""Diagnosis: what limits a run, in one sentence that names the operator, the cause, the share and
the remedy.

Problems (failures, leaks, processes that compete for processors) come first; otherwise the largest
share of the run's time is described.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

from flowrl.monitoring.activity import Activity, StageActivity, WorkerActivity
from flowrl.monitoring.bottleneck import Finding, bottlenecks
from flowrl.monitoring.plan_facts import PlanFacts

# the least values in a period that a diagnosis names
MIN_RESTARTS = 2  # of remote workers
MIN_GROWTH_BYTES = 20e6  # growth of the process's memory, half of it in one operator
MIN_STEPS_WITHOUT_EPISODE = 3000  # steps of each environment
MIN_CPU_WAIT = 0.25  # share of the time that processes wait for a processor
MIN_SLOWDOWN = 2.0  # time per step of a worker over the median of the other workers
MIN_FRAGMENTS_OF_OTHERS = 5  # of workers, while another one returns none
MIN_BUSY_S = 0.05  # seconds of work of each worker, before workers are compared
MIN_LAG = 24  # updates between the weights of a batch and the newest weights
MIN_QUEUED_BATCHES = 24  # of a queue that is too large
MIN_QUEUE_SHARE = 0.2  # share of the time that a queue that is too small is full, and empty
MIN_GC_SHARE = 0.2  # share of the time in garbage collection
MIN_BUSY = 0.2  # share of the time that the limiting part works


@dataclass(frozen=True)
class Diagnosis:
    """What limits a run.

    Attributes:
        findings: the most important one first.
    """

    findings: list[Finding]

    @property
    def text(self) -> str:
        """The most important finding as a sentence."""
        if not self.findings:
            return (
                "Nothing was measured yet: the first measurement comes about two seconds after "
                "the first fragment, and none with monitor=False. If an environment hangs, set "
                "env_step_timeout_s."
            )
        return self.findings[0].text

    def __str__(self) -> str:
        return self.text


def diagnose(activity: Activity, facts: PlanFacts) -> Diagnosis:
    """Return what limited a plan in a period of its run; periods of about ten seconds work best.

    Args:
        activity: the period.
        facts: sizes and settings of the plan.
    """
    problems = [finding for rule in _PROBLEMS if (finding := rule(activity, facts)) is not None]
    limits = bottlenecks(activity, facts)
    if not problems and limits and limits[0].share < MIN_BUSY:
        problems = [_idle(limits[0], facts)]
    return Diagnosis([*problems, *limits])


def _idle(largest: Finding, facts: PlanFacts) -> Finding:
    """Report that nothing takes much time, as while workers start."""
    advice = "`explain()` of the plan shows which stages wait."
    if facts.num_workers:
        advice = "Workers may still have been starting: train longer."
    return Finding(
        "idle",
        "plan",
        1 - largest.share,
        f"Nothing limits this run yet: the largest share of the time is {largest.share:.0%} "
        f"({largest.operator}). {advice}",
    )


def _stalled(activity: Activity, facts: PlanFacts) -> Finding | None:
    if not activity.stalled_s:
        return None
    names = "env_step_timeout_s" + (" or sample_timeout_s" if facts.num_workers else "")
    return Finding(
        "stalled",
        "plan",
        1.0,
        f"Sampling has returned nothing for {activity.stalled_s:.0f} s. If an environment hangs, "
        f"set {names}.",
    )


def _restarts(activity: Activity, facts: PlanFacts) -> Finding | None:
    restarts = activity.counters.get("num_shard_restarts", 0)
    if restarts < MIN_RESTARTS:
        return None
    # a worker that has not returned a fragment since its restart is not among the others
    failing = [w.index for w in activity.workers if w.restarts and w.restarts >= restarts]
    who = f"Worker {failing[0]} fails" if failing else "Workers fail"
    return Finding(
        "worker_restarts",
        f"Worker {failing[0]}" if failing else "workers",
        1.0,
        f"{who} repeatedly: {restarts} restarts in {activity.seconds:.0f} s. The errors are "
        "in the log: most often the environment raises or needs too much memory.",
    )


def _leak(activity: Activity, facts: PlanFacts) -> Finding | None:
    added = activity.usage.get("rss_bytes_added", 0.0)
    operators = [stage for stage in activity.stages if stage.is_own]
    if added < MIN_GROWTH_BYTES or not operators:
        return None
    worst = max(operators, key=lambda stage: stage.grown_bytes)
    if worst.grown_bytes < max(added / 2, MIN_GROWTH_BYTES):
        return None
    rate = 1.5 * added / activity.seconds / 1e6  # added between the first and the last third
    return Finding(
        "memory",
        worst.name,
        min(worst.grown_bytes / added, 1.0),
        f"The memory of this process grows by {rate:.1f} MB/s in {worst.name}, chained at "
        f"{worst.line}: does it keep the items that it gets?",
        worst.line,
    )


def _no_episodes(activity: Activity, facts: PlanFacts) -> Finding | None:
    envs = facts.num_envs * max(facts.num_workers, 1)
    steps = activity.env_steps_total // envs
    most = max(MIN_STEPS_WITHOUT_EPISODE, 2 * (facts.horizon or 0))
    if not facts.samples or activity.episodes_total != 0 or steps < most:
        return None
    return Finding(
        "no_episodes",
        "environment",
        1.0,
        f"No episode has ended in {steps:,} steps of each environment, so there are no returns: "
        "set horizon, or let the environment return terminated or truncated.",
    )


def _threads(activity: Activity, facts: PlanFacts) -> Finding | None:
    """Report that the processes together have more threads than there are cores."""
    wait = _cpu_wait(activity)
    threads = facts.num_cores if facts.num_threads is None else facts.num_threads
    processes = max(facts.num_workers, 1)
    if threads < 2 or threads * processes <= facts.num_cores or wait < MIN_CPU_WAIT:
        return None
    return Finding(
        "threads",
        "numerical libraries",
        wait,
        f"{_count(processes, 'process', 'processes')} with {threads} threads each compete for "
        f"{_count(facts.num_cores, 'core')}: their threads wait {wait:.0%} of the time. Set "
        "num_threads_per_process=1.",
    )


def _many_workers(activity: Activity, facts: PlanFacts) -> Finding | None:
    wait = _cpu_wait(activity)
    if facts.num_workers <= facts.num_cores or wait < MIN_CPU_WAIT:
        return None
    return Finding(
        "too_many_workers",
        "workers",
        wait,
        f"{facts.num_workers} workers share {_count(facts.num_cores, 'core')}: they wait for a "
        f"processor {wait:.0%} of the time. Use num_workers={facts.num_cores} or fewer, with more "
        "environments each (num_envs_per_worker).",
    )


def _cpu_wait(activity: Activity) -> float:
    """Return the share of the time that the mean worker, or this process, waits for a processor."""
    workers = [worker for worker in activity.workers if worker.usage]
    waited = sum(worker.usage.get("cpu_wait_s", 0.0) for worker in workers)
    seconds = sum(worker.period_s for worker in workers)
    if not seconds:
        waited, seconds = activity.usage.get("cpu_wait_s", 0.0), activity.seconds
    return min(waited / seconds, 1.0)


def _slow_worker(activity: Activity, facts: PlanFacts) -> Finding | None:
    workers = [worker for worker in activity.workers if worker.env_steps]
    if len(workers) < 2:
        return None
    cost = {worker.index: worker.busy_s / worker.env_steps for worker in workers}
    slowest = max(cost, key=lambda index: cost[index])
    others = median(seconds for index, seconds in cost.items() if index != slowest)
    ratio = cost[slowest] / max(others, 1e-9)
    if ratio < MIN_SLOWDOWN or max(worker.busy for worker in workers) < 0.3:
        return None
    if min(worker.busy_s for worker in workers) < MIN_BUSY_S:
        return None  # a single fragment may be slow by chance
    return Finding(
        "slow_worker",
        f"worker {slowest}",
        1 - 1 / ratio,
        f"Worker {slowest} is {ratio:.1f} times slower than the median of the others: look at its "
        "machine and at what its environments do differently (env_config, worker_index).",
    )


def _silent_worker(activity: Activity, facts: PlanFacts) -> Finding | None:
    """Report a worker that returns nothing although others return several fragments, as one that
    hangs in an asynchronous plan."""
    if any(worker.restarts for worker in activity.workers):
        return None
    silent = [worker.index for worker in activity.workers if not worker.fragments]
    others = [worker.fragments for worker in activity.workers if worker.fragments]
    if not silent or not others or median(others) < MIN_FRAGMENTS_OF_OTHERS:
        return None
    return Finding(
        "silent_worker",
        f"worker {silent[0]}",
        len(silent) / len(activity.workers),
        f"Worker {silent[0]} has returned nothing for {activity.seconds:.0f} s, the median of the "
        f"others {_count(round(median(others)), 'fragment')}: its environment hangs, or is much "
        "slower. Set env_step_timeout_s or sample_timeout_s.",
    )


def _garbage_collection(activity: Activity, facts: PlanFacts) -> Finding | None:
    """Report garbage collection in workers or in this process."""
    seconds = [worker.usage.get("gc_s", 0.0) for worker in activity.workers]
    shares = [one.share_of(gc_s) for one, gc_s in zip(activity.workers, seconds, strict=True)]
    share = max(shares, default=0.0) if facts.num_workers else 0.0
    where, gc_s = "workers", sum(seconds)
    if share < MIN_GC_SHARE:
        where, gc_s = "this process", activity.usage.get("gc_s", 0.0)
        share = min(gc_s / activity.seconds, 1.0)
    if share < MIN_GC_SHARE:
        return None
    callbacks = {} if facts.num_workers and where != "workers" else _callbacks_of(activity.workers)
    called = max(callbacks, key=lambda name: callbacks[name], default=None)
    if called is not None and callbacks[called] >= gc_s / 2:
        where = f"{facts.callbacks}.{called}"
        text = (
            f"Garbage collection takes {share:.0%} of the time, in {where}: does it call "
            "gc.collect(), or create many objects?"
        )
    else:
        text = (
            f"Garbage collection takes {share:.0%} of the time of {where}: does code of the run "
            "call gc.collect(), or create many objects?"
        )
    return Finding("garbage_collection", where, share, text)


def _callbacks_of(workers: Iterable[WorkerActivity]) -> dict[str, float]:
    """Return the seconds in each callback, of all workers."""
    total: dict[str, float] = {}
    for worker in workers:
        for name, seconds in worker.callback_s.items():
            total[name] = total.get(name, 0.0) + seconds
    return total


def _queue(activity: Activity, facts: PlanFacts) -> Finding | None:
    """Report a queue of a learner thread that is too small, or so large that batches are old."""
    enqueues, dequeues = activity.stages_of("enqueue"), activity.stages_of("dequeue")
    if facts.queue_size is None or not enqueues or not dequeues:
        return None
    full = min(_seconds(enqueues[0], "backpressure_s") / activity.seconds, 1.0)
    idle = min(_seconds(dequeues[0], "learner_idle_s") / activity.seconds, 1.0)
    queued = enqueues[0].values.get("queue_size", 0)
    if activity.policy_lag_mean >= MIN_LAG and queued >= MIN_QUEUED_BATCHES:
        return Finding(
            "queue_too_large",
            enqueues[0].name,
            full,
            f"Batches have a policy lag of {activity.policy_lag_mean:.0f} updates when they are "
            f"trained on: {queued} wait in the queue of {enqueues[0].name}. Set a "
            f"smaller learner_queue_size (now {facts.queue_size}), or max_policy_lag.",
            enqueues[0].line,
        )
    if full > MIN_QUEUE_SHARE and idle > MIN_QUEUE_SHARE:
        return Finding(
            "queue_too_small",
            enqueues[0].name,
            idle,
            f"The queue of {enqueues[0].name} is too small: it is full {full:.0%} of the time, "
            f"and yet the learner waits for batches {idle:.0%} of it. Set a larger "
            f"learner_queue_size (now {facts.queue_size}).",
            enqueues[0].line,
        )
    return None


def _seconds(stage: StageActivity, name: str) -> float:
    return float(stage.values.get(name, 0.0))


def _count(number: int, singular: str, plural: str | None = None) -> str:
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


Rule = Callable[[Activity, PlanFacts], Finding | None]
_PROBLEMS: list[Rule] = [
    _restarts, _stalled, _silent_worker, _leak, _no_episodes, _garbage_collection, _threads,
    _many_workers, _slow_worker, _queue,
]  # fmt: skip
