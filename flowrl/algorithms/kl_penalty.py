"""KLPenalty: the adaptive KL penalty of PPO (Schulman et al. 2017, arXiv 1707.06347, section 4)."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from flowrl.policies.torch_policy import TorchPolicy
from flowrl.settings import NonNegative
from flowrl.state_schema import Amount, Fields, check_state

MAX_KL_COEFF = 1e6
KLCoeff = Annotated[NonNegative, Field(le=MAX_KL_COEFF)]

_FIELDS: Fields = {
    "kl_coeff": Annotated[Amount, Field(le=MAX_KL_COEFF)],
    "initial_kl_coeff": Amount,
}


class KLPenalty(TorchPolicy):
    """A policy whose loss has a KL penalty; its settings are `kl_coeff` and `kl_target`.

    Attributes:
        kl_coeff: current weight of the penalty.
    """

    def __init__(self, observation_space: Any, action_space: Any, config: Any):
        super().__init__(observation_space, action_space, config)
        self.kl_coeff: float = self.config.kl_coeff

    def adapt_kl_coeff(self, kl: float) -> None:
        """Adapt the weight of the penalty to the KL divergence [nats] of the last train batch."""
        self.kl_coeff = next_kl_coeff(self.kl_coeff, kl, self.config.kl_target)

    def get_state(self) -> dict[str, Any]:
        initial = self.config.kl_coeff
        return {**super().get_state(), "kl_coeff": self.kl_coeff, "initial_kl_coeff": initial}

    def set_state(self, state: dict[str, Any]) -> None:
        """Load a state from `get_state`; its weight of the penalty only if the setting `kl_coeff`
        was the same."""
        check_state(state, _FIELDS, f"the state of a {type(self).__name__}")
        super().set_state(state)
        initial = self.config.kl_coeff
        is_same = state["initial_kl_coeff"] == initial
        self.kl_coeff = float(state["kl_coeff"]) if is_same else initial


def next_kl_coeff(kl_coeff: float, kl: float, kl_target: float) -> float:
    """Return the next weight of the penalty; 0 stays 0.

    Args:
        kl_coeff: the current weight.
        kl: KL divergence [nats] between the policies before and after training on a batch.
        kl_target: its target [nats].
    """
    if kl > 1.5 * kl_target:
        return min(2 * kl_coeff, MAX_KL_COEFF)
    if kl_coeff and kl < kl_target / 1.5:
        return max(0.5 * kl_coeff, min(kl_coeff, 1e-6))
    return kl_coeff
