"""Action distributions: torch for learning, numpy for acting.

An instance wraps a model's outputs for the loss: `logp`, `entropy` and `kl`, each [B]. The class
method `act` draws actions from the same outputs with numpy. `distribution_for` returns the class
for an action space.
"""

from flowrl.policies.distributions.base import ActionDistribution
from flowrl.policies.distributions.continuous import (
    Deterministic,
    DiagGaussian,
    SquashedDeterministic,
    SquashedGaussian,
)
from flowrl.policies.distributions.discrete import Bernoulli, Categorical, MultiCategorical
from flowrl.policies.distributions.nested import Product, distribution_for

__all__ = [
    "ActionDistribution",
    "Bernoulli",
    "Categorical",
    "Deterministic",
    "DiagGaussian",
    "MultiCategorical",
    "Product",
    "SquashedDeterministic",
    "SquashedGaussian",
    "distribution_for",
]
