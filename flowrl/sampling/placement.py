"""Placement: the cluster resources of remote workers, and their placement groups."""

from __future__ import annotations

import math
import time
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from flowrl.errors import ConfigError
from flowrl.iter.private_api import captures_child_tasks
from flowrl.sampling.worker_config import WorkerConfig

RESERVE_TIMEOUT_S = 60.0
MIN_BUNDLE_CPUS = 0.001  # of a worker without any resources; a bundle must not be empty


_placements: weakref.WeakSet[Placement] = weakref.WeakSet()  # of this process


class _Reservation(NamedTuple):
    """Resources of consecutive workers that were added together."""

    first: int
    num_workers: int
    cpus: float  # of each worker
    group: Any  # a placement group with one bundle per worker; None without a strategy


def _is_in_placement_group() -> bool:
    """Return whether workers take their resources from a placement group of this process, as in a
    trial of Ray Tune, which has reserved them."""
    from ray.util.placement_group import get_current_placement_group

    return get_current_placement_group() is not None and captures_child_tasks()


def _needs(count: int, name: str, amount: float) -> str:
    """Return a text such as `2 workers need 0.5 of 'GPU' each`."""
    if count == 1:
        return f"1 worker needs {amount:g} of {name!r}"
    return f"{count} workers need {amount:g} of {name!r} each"


def _limited_resources(config: WorkerConfig) -> list[tuple[str, str, float]]:
    """Return (setting, resource, amount per worker) of GPUs and custom resources."""
    gpus = config.num_gpus_per_worker
    needed = [("num_gpus_per_worker", "GPU", gpus)] if gpus else []
    custom = config.custom_resources_per_worker.items()
    return needed + [("custom_resources_per_worker", name, amount) for name, amount in custom]


def check_evaluation_resources(sets: Sequence[WorkerConfig], num_learner_gpus: int) -> None:
    """Check that the cluster has the GPUs and custom resources of several sets of workers, and the
    GPUs of learners, together.

    Does nothing before Ray has started, and in a placement group.

    Args:
        sets: the settings of each set, with `num_workers`.
        num_learner_gpus: GPUs of learners on actors.

    Raises:
        ConfigError: the cluster does not have the resources.
    """
    import ray

    if not ray.is_initialized() or _is_in_placement_group():
        return
    needed: dict[str, float] = defaultdict(float, GPU=float(num_learner_gpus))
    for config in sets:
        for _, name, amount in _limited_resources(config):
            needed[name] += config.num_workers * amount
    total = ray.cluster_resources()
    for name, amount in needed.items():
        if amount > total.get(name, 0.0):
            raise ConfigError(
                f"evaluation_num_workers: all workers and learners together need {amount:g} of "
                f"{name!r}; the cluster has {total.get(name, 0.0):g}"
            )


class Placement:
    """Reserves cluster resources for the remote workers of a set; workers are numbered from 0.

    A worker takes `num_cpus_per_worker`, `num_gpus_per_worker` and `custom_resources_per_worker`,
    with fewer CPUs if the cluster does not have enough for all workers of this process. With a
    `placement_strategy`, workers that are added together get a Ray placement group; a recreated
    worker gets the bundle of its predecessor. In a Ray Tune trial, the trial's placement group is
    used.

    Args:
        config: settings of the set, as named above.
    """

    def __init__(self, config: WorkerConfig):
        self.num_cpus = config.num_cpus_per_worker
        self.num_gpus = config.num_gpus_per_worker
        self.custom = dict(config.custom_resources_per_worker)
        self.strategy = config.placement_strategy
        self._limited = _limited_resources(config)
        self._reservations: list[_Reservation] = []
        _placements.add(self)

    @property
    def reserved_cpus(self) -> float:
        """CPUs that are reserved for all workers of the set."""
        return sum(r.cpus * r.num_workers for r in self._reservations)

    def reserve(self, first: int, count: int) -> None:
        """Reserve resources for `count` more workers, numbered from `first`.

        Raises:
            ConfigError: the cluster does not have the resources.
        """
        import ray

        end = first + count
        # removed workers may have left bundles of a placement group behind
        first = max(first, *(r.first + r.num_workers for r in self._reservations), 0)
        count = end - first
        if count < 1:
            return
        if not _is_in_placement_group():
            self._wait_for_resources(count)
        if first:  # workers that are added later share the remaining CPUs
            cpus = ray.available_resources().get("CPU", 0.0)
        else:
            reserved = sum(one.reserved_cpus for one in _placements if one is not self)
            cpus = max(ray.cluster_resources().get("CPU", 0.0) - reserved, 0.0)
        share = min(self.num_cpus, math.floor(1000 * cpus / count) / 1000)
        group = self._create_group(count, share) if self.strategy is not None else None
        self._reservations.append(_Reservation(first, count, share, group))

    def _wait_for_resources(self, count: int) -> None:
        """Wait until GPUs and custom resources are free; Ray releases the resources of ended
        workers with a delay."""
        import ray

        deadline = time.monotonic() + RESERVE_TIMEOUT_S
        for setting, name, amount in self._limited:
            while True:
                total = ray.cluster_resources().get(name, 0.0)
                free = ray.available_resources().get(name, 0.0)
                if amount * count <= free:
                    break
                if amount * count > total or time.monotonic() > deadline:
                    raise ConfigError(
                        f"{setting}: {_needs(count, name, amount)}; the cluster has {total:g}, "
                        f"{free:g} of them free"
                    )
                time.sleep(0.1)

    def _create_group(self, count: int, cpus: float) -> Any:
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group

        if _is_in_placement_group():
            return None
        bundle = {"CPU": cpus, "GPU": self.num_gpus, **self.custom}
        bundle = {name: amount for name, amount in bundle.items() if amount}
        bundle = bundle or {"CPU": MIN_BUNDLE_CPUS}
        group = placement_group([bundle] * count, strategy=self.strategy)
        if not group.wait(RESERVE_TIMEOUT_S):
            remove_placement_group(group)
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            available = [{n: one[n] for n in sorted(one) if ":" not in n} for one in nodes]
            raise ConfigError(
                f"placement_strategy: could not reserve {count} bundles of {bundle} with "
                f"{self.strategy} within {RESERVE_TIMEOUT_S:g} s; the cluster's nodes have "
                f"{available}"
            )
        return group

    def options(self, index: int) -> dict[str, Any]:
        """Return the options of `ray.remote` for the actor of worker `index`."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        reservation = next(
            r for r in self._reservations if r.first <= index < r.first + r.num_workers
        )
        options: dict[str, Any] = {"num_cpus": reservation.cpus, "num_gpus": self.num_gpus}
        options["resources"] = self.custom
        if reservation.group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                reservation.group, placement_group_bundle_index=index - reservation.first
            )
        return options

    def release(self, num_workers: int = 0) -> None:
        """Release the resources of the workers numbered `num_workers` and higher.

        A placement group is only released as a whole, after all its workers were removed.
        """
        import ray
        from ray.util.placement_group import remove_placement_group

        for index, kept in enumerate(self._reservations):
            if kept.first < num_workers < kept.first + kept.num_workers and kept.group is None:
                self._reservations[index] = kept._replace(num_workers=num_workers - kept.first)
        for reservation in [r for r in self._reservations if r.first >= num_workers]:
            self._reservations.remove(reservation)
            if reservation.group is not None and ray.is_initialized():
                remove_placement_group(reservation.group)
