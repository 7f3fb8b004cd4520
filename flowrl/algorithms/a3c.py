"""A3C: asynchronous advantage actor-critic (Mnih et al. 2016, arXiv 1602.01783).

The loss is A2C's; workers compute its gradients from their own samples.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from flowrl.algorithms.a2c import A2C, A2CConfig, A2CTorchPolicy
from flowrl.ops.staleness import check_waiting
from flowrl.settings import Count, NonNegativeInt, check_of_settings
from flowrl.trainer.algorithm import PolicyClass
from flowrl.trainer.config import PlanSetting, PlanSource, check_device_of_workers

log = logging.getLogger("flowrl")


class A3CConfig(A2CConfig):
    """Settings of A3C."""

    algorithm: ClassVar[str] = "flowrl.algorithms.a3c:A3C"

    plan: PlanSetting = "a3c"
    rollout_fragment_length: Count | Literal["auto"] = 20
    """Env steps of each environment per gradient (t_max in the paper)."""
    train_batch_size: Count = 160
    """Env steps of one round of all workers. Used only with `rollout_fragment_length="auto"`; A3C
    has no train batches."""
    max_requests_in_flight_per_worker: Annotated[Count, Field(le=1000)] = 2
    """Gradient requests in flight per worker. With 2, a worker does not wait for the update with
    its last gradient; its next gradient is computed with weights that lack this update."""
    max_policy_lag: NonNegativeInt | None = None
    """Maximum policy lag of a gradient, in updates (optimizer steps); None for no limit."""
    stale_policy: Literal["drop", "wait"] = "drop"
    """"drop" drops gradients that exceed `max_policy_lag`; "wait" delays sampling, so that no
    gradient exceeds it."""
    min_sample_timesteps_per_iteration: NonNegativeInt = 1000

    def staleness(self) -> dict[str, Any]:
        """Return the options of AsyncGradients that limit the policy lag of gradients."""
        return {"max_policy_lag": self.max_policy_lag, "stale_policy": self.stale_policy}

    @check_of_settings
    def _check_gradient_settings(self) -> Self:
        if self.num_sgd_iter != 1 or self.sgd_minibatch_size:
            raise ValueError(
                "num_sgd_iter and sgd_minibatch_size: A3C computes one gradient per fragment: "
                "leave them out"
            )
        if self.stale_policy == "wait":
            check_waiting(self.max_policy_lag, self.count_steps_by)
        requests, max_lag = self.max_requests_in_flight_per_worker, self.max_policy_lag
        in_flight = self.num_workers * requests
        if self.stale_policy != "drop" or max_lag is None or not self.num_workers:
            return self
        # the weights of a gradient lack the updates with those that are in flight with it
        least = max(requests - 1, (in_flight + 1) // 2 - 1)
        if max_lag < least:
            raise ValueError(
                f"max_policy_lag={max_lag} would drop most gradients: with "
                f"num_workers={self.num_workers} and "
                f"max_requests_in_flight_per_worker={requests}, {in_flight} gradients are in "
                f"flight, and their policy lag is usually {in_flight - 1} updates. Set "
                f'stale_policy="wait", or max_policy_lag to at least {least}'
            )
        return self

    @check_of_settings
    def _check_device(self) -> Self:
        check_device_of_workers(self, "A3C")
        return self

    def check(self) -> None:
        """Check what a run needs, see AlgorithmConfig.check; warn of a setting without effect."""
        super().check()
        default = type(self).model_fields["train_batch_size"].default
        if self.rollout_fragment_length != "auto" and self.train_batch_size != default:
            log.warning(
                "train_batch_size: no effect, because rollout_fragment_length is %s: set that, or "
                'rollout_fragment_length="auto"', self.rollout_fragment_length,
            )  # fmt: skip

    def build(self, plan: PlanSource | None = None) -> A3C:
        return self._build(plan)


class A3CTorchPolicy(A2CTorchPolicy):
    """A policy that is trained with the advantage policy gradient."""

    config_class = A3CConfig
    config: A3CConfig


class A3C(A2C):
    """A3C with the plan `a3c`; A3CConfig has its settings.

    Example:
        >>> algo = A3C("CartPole-v1", num_workers=2, seed=1)  # doctest: +SKIP
        >>> algo.learn(total_timesteps=100_000)  # doctest: +SKIP
    """

    policy_class: ClassVar[PolicyClass] = A3CTorchPolicy
    config_class = A3CConfig


DEFAULT_CONFIG = A3CConfig()
