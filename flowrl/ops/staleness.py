"""StalenessLimit: a limit on how far sampling runs ahead of training."""

from __future__ import annotations

from collections import deque
from typing import Any

from flowrl.iter import _get_shared_metrics
from flowrl.setting_values import check_int


def check_waiting(max_policy_lag: int | None, count_steps_by: str) -> None:
    """Check the settings that `stale_policy="wait"` needs.

    Raises:
        ValueError: there is no limit, or fragments are counted by agent steps, so that the number
            of their env steps is unknown.
    """
    if max_policy_lag is None:
        raise ValueError('stale_policy="wait" needs a max_policy_lag')
    if count_steps_by != "env_steps":
        raise ValueError(
            'count_steps_by: stale_policy="wait" can guarantee max_policy_lag only if this is '
            f'"env_steps", got {count_steps_by!r}'
        )


class StalenessLimit:
    """Limits how far sampling runs ahead of training, and so the policy lag of fragments.

    A fragment is requested only while

        requested < done + (max_batches + 1) * batch_size

    where `requested` is the number of env steps requested so far, and `done` the number that had
    been trained on or dropped when the oldest fragment that is not trained on yet was requested. A
    fragment has the weights of its request, so at most `max_batches` train batches are trained on
    between its request and its own training, even if it comes from the slowest worker. Exception: a
    fragment is always requested if none is in flight and those received do not fill a train batch.
    The rule is the staleness control of AReaL (Fu et al. 2025, arXiv 2505.24298). Waits for it are
    counted as `num_sampling_waits`.

    Use the limit in plans with one source of fragments that train on each fragment once. If an
    operator raises an error on a fragment, the env steps of the fragment are counted as
    `num_env_steps_dropped`; an operator that drops fragments on purpose must add their env steps to
    this counter itself. A restored plan does not know the policy lag of fragments that were
    requested before.

    Args:
        batch_size: minimum env steps of a train batch.
        max_batches: see above; 0 alternates between sampling and training.
        steps_per_fragment: estimated env steps of a requested fragment; ParallelRollouts sets it.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(self, batch_size: int, max_batches: int, steps_per_fragment: int = 1):
        for name, value, minimum in (
            ("batch_size", batch_size, 1),
            ("max_batches", max_batches, 0),
            ("steps_per_fragment", steps_per_fragment, 1),
        ):
            check_int(name, value, minimum)
        self.batch_size = batch_size
        self.max_batches = max_batches
        self.steps_per_fragment = steps_per_fragment
        # per fragment: (env steps sampled up to its end, progress at its request)
        self._untrained: deque[tuple[int, int]] = deque()
        self._steps_sampled: int | None = None
        self._is_waiting = False
        self._metrics: Any = None  # the MetricsContext that reports lost items

    def progress(self) -> int:
        """Return the number of env steps that were trained on or dropped. From the first call on,
        the env steps of lost fragments are counted, too."""
        metrics = _get_shared_metrics()
        if metrics is not self._metrics:
            if _count_lost not in metrics.on_lost:  # of another limit in the plan
                metrics.on_lost.append(_count_lost)
            self._metrics = metrics
        counters = metrics.counters
        return int(counters["num_env_steps_trained"] + counters["num_env_steps_dropped"])

    def received(self, progress: int, item: Any) -> None:
        """Record a received fragment and the progress at its request."""
        self._steps_sampled = self._count_sampled() + item.env_steps()
        self._untrained.append((self._steps_sampled, progress))

    def may_request(self, in_flight: int, oldest: int | None) -> bool:
        """Return whether another fragment may be requested.

        Args:
            in_flight: number of requests in flight.
            oldest: progress at the oldest request in flight; None if none is in flight.
        """
        done_now = self.progress()
        while self._untrained and self._untrained[0][0] <= done_now:
            self._untrained.popleft()
        done = done_now if oldest is None else min(done_now, oldest)
        if self._untrained:
            done = min(done, self._untrained[0][1])
        requested = self._count_sampled() + in_flight * self.steps_per_fragment
        must_wait = requested >= done + (self.max_batches + 1) * self.batch_size
        if not in_flight and self._count_sampled() - done_now < self.batch_size:
            must_wait = False  # the received fragments do not fill a train batch yet
        if must_wait and not self._is_waiting:
            _get_shared_metrics().counters["num_sampling_waits"] += 1
        self._is_waiting = must_wait
        return not must_wait

    def _count_sampled(self) -> int:
        if self._steps_sampled is None:  # continue the counter of a resumed run
            self._steps_sampled = int(_get_shared_metrics().counters["num_env_steps_sampled"])
        return self._steps_sampled

    def __repr__(self) -> str:
        return f"StalenessLimit({self.batch_size}, {self.max_batches})"


def _count_lost(item: Any) -> None:
    """Count the env steps of a lost item as dropped."""
    _get_shared_metrics().counters["num_env_steps_dropped"] += _untrained_steps(item)


def _untrained_steps(item: Any) -> int:
    """Return the env steps of a batch, of a list of batches, or of (sources, batch); 0 for other
    items, such as (batch, info) of an operator that has trained on the batch."""
    if hasattr(item, "env_steps"):
        return int(item.env_steps())
    if isinstance(item, list):
        return sum(map(_untrained_steps, item))
    is_pair = isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], tuple)
    return _untrained_steps(item[1]) if is_pair else 0
