"""Where remote workers run: what each takes of a Ray cluster, and groups of places for them."""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

from flowrl.settings import ConfigError

PLACING_S = 60.0  # for places to be free
LEAST_CPU = 0.001  # of a place for a worker that takes nothing


class _Places(NamedTuple):
    """The places of some workers that came together."""

    first: int
    number: int
    cpus: float
    group: Any  # a placement group of as many bundles; None for wherever there is room


class Placement:
    """Places for the remote workers of a set.

    A worker takes `num_cpus_per_worker`, `num_gpus_per_worker` and `custom_resources_per_worker` of
    the cluster; fewer CPUs where it has not got as many for all. With a `placement_strategy` places
    are reserved for all that come together, in one of Ray's placement groups; a worker that is made
    again gets its place back. In a trial of Ray Tune, the trial's places are used.

    Args:
        config: of the set; see above.
    """

    def __init__(self, config: Any):
        self.num_cpus = config.get("num_cpus_per_worker", 1.0)
        self.num_gpus = config.get("num_gpus_per_worker", 0.0)
        self.custom = dict(config.get("custom_resources_per_worker") or {})
        self.strategy = config.get("placement_strategy")
        self._places: list[_Places] = []

    def reserve(self, first: int, count: int) -> None:
        """Find places for so many more workers, which are numbered from `first`.

        Raises:
            ConfigError: the cluster has not got what they need.
        """
        import ray

        covered = max((p.first + p.number for p in self._places), default=0)
        count -= max(first, covered) - first  # of workers that have left, places may still be there
        first = max(first, covered)
        if count < 1:
            return
        self._wait_for_resources(count)
        there = ray.cluster_resources()
        # those that come later share what the others have left
        cpus = (ray.available_resources() if first else there).get("CPU", 0.0)
        share = min(self.num_cpus, math.floor(1000 * cpus / count) / 1000)
        group = self._group(count, share) if self.strategy is not None else None
        self._places.append(_Places(first, count, share, group))

    def _wait_for_resources(self, count: int) -> None:
        """Until GPUs and other resources for so many are free: those of workers that have just
        ended take a moment."""
        import ray

        deadline = time.monotonic() + PLACING_S
        asked = [("num_gpus_per_worker", "GPU", self.num_gpus)] if self.num_gpus else []
        asked += [("custom_resources_per_worker", name, n) for name, n in self.custom.items()]
        for setting, name, each in asked:
            while True:
                there = ray.cluster_resources().get(name, 0.0)
                free = ray.available_resources().get(name, 0.0)
                if each * count <= free:
                    break
                if each * count > there or time.monotonic() > deadline:
                    raise ConfigError(
                        f"{setting}: {count} workers with {each:g} of {name!r} each are asked for, "
                        f"the cluster has {there:g}, of which {free:g} are free"
                    )
                time.sleep(0.1)

    def _group(self, count: int, cpus: float) -> Any:
        import ray
        from ray.util.placement_group import (
            get_current_placement_group,
            placement_group,
            remove_placement_group,
        )

        if get_current_placement_group() is not None:
            return None
        bundle = {"CPU": cpus, "GPU": self.num_gpus, **self.custom}
        bundle = {name: amount for name, amount in bundle.items() if amount}
        bundle = bundle or {"CPU": LEAST_CPU}
        group = placement_group([bundle] * count, strategy=self.strategy)
        if not group.wait(PLACING_S):
            remove_placement_group(group)
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            has = [{n: one[n] for n in sorted(one) if ":" not in n} for one in nodes]
            raise ConfigError(
                f"placement_strategy: {count} places of {bundle} by {self.strategy} were not to be "
                f"had within {PLACING_S:g} s; the cluster's nodes have {has}"
            )
        return group

    def options(self, index: int) -> dict[str, Any]:
        """The options of `ray.remote` for the actor of worker `index`."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        own = next(p for p in self._places if p.first <= index < p.first + p.number)
        options: dict[str, Any] = {"num_cpus": own.cpus, "num_gpus": self.num_gpus}
        options["resources"] = self.custom
        if own.group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                own.group, placement_group_bundle_index=index - own.first
            )
        return options

    def release(self, left: int = 0) -> None:
        """Give up the places of the workers from `left` on. A group is given up as a whole, when
        none of its workers is left."""
        import ray
        from ray.util.placement_group import remove_placement_group

        for places in [p for p in self._places if p.first >= left]:
            self._places.remove(places)
            if places.group is not None and ray.is_initialized():
                remove_placement_group(places.group)
