"""A3C: asynchronous advantage actor-critic (Mnih et al. 2016, arXiv 1602.01783): A2C's loss, whose
gradients are computed where the experience is sampled."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from flowrl.algorithms.a2c import A2CConfig, A2CTorchPolicy
from flowrl.settings import Count
from flowrl.trainer.algorithm import Algorithm


class A3CConfig(A2CConfig):
    """Settings of A3C."""

    algorithm: ClassVar[str] = "flowrl.algorithms.a3c:A3C"

    plan: str | None = "a3c"
    rollout_fragment_length: Count | Literal["auto"] = 20
    """Env steps of each environment per gradient (t_max in the paper)."""
    train_batch_size: Count = 160
    """Env steps of a round of all workers, where `rollout_fragment_length` is "auto"."""
    max_requests_in_flight_per_worker: Count = 2
    """Gradients that a worker is asked for at a time. With 2 it need not wait for the update by its
    own, and computes the next one with weights that lack it."""
    max_policy_lag: int | None = Field(default=None, ge=0)
    """The most updates that a gradient's weights may be old; None for any."""
    stale_policy: Literal["drop", "wait"] = "drop"
    """Drop gradients of older weights, or have workers wait, so that there are none."""
    min_sample_timesteps_per_iteration: int = Field(default=1000, ge=0)

    def staleness(self) -> dict[str, Any]:
        """The options of AsyncGradients by which gradients do not get too old."""
        return {"max_policy_lag": self.max_policy_lag, "stale_policy": self.stale_policy}

    @model_validator(mode="after")
    def _one_gradient(self) -> Self:
        if self.num_sgd_iter != 1 or self.sgd_minibatch_size:
            raise ValueError(
                "num_sgd_iter and sgd_minibatch_size: A3C makes one gradient of each fragment: "
                "leave them out"
            )
        if self.stale_policy == "wait" and self.max_policy_lag is None:
            raise ValueError('stale_policy="wait" needs a max_policy_lag')
        own = self.max_requests_in_flight_per_worker - 1  # updates that all gradients are older by
        lag = self.max_policy_lag
        if self.stale_policy == "drop" and lag is not None and lag < own:
            raise ValueError(
                f"max_policy_lag={lag} would drop most gradients: with "
                f"max_requests_in_flight_per_worker={own + 1} they are {own} updates old at least. "
                "Set that to 1, or allow more"
            )
        return self


class A3CTorchPolicy(A2CTorchPolicy):
    """A policy that learns by the advantage policy gradient."""

    config_class = A3CConfig
    config: A3CConfig


class A3C(Algorithm):
    """A3C over the plan `a3c`."""

    policy_class = A3CTorchPolicy
    config_class = A3CConfig


DEFAULT_CONFIG = A3CConfig()
