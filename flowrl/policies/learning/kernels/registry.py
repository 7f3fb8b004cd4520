"""Registry of kernels: find the one that computes a policy's loss and gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

from flowrl.policies.learning.kernels.actor_critic import sac_kernel, td3_kernel
from flowrl.policies.learning.kernels.policy_gradient import a2c_kernel, ppo_kernel
from flowrl.policies.learning.kernels.q_learning import q_learning_kernel
from flowrl.policies.models.tensor_batch import TensorBatch
from flowrl.policies.overrides import is_defined_by_flowrl


class Kernel(Protocol):
    """Computes the loss of a batch and writes its gradient into `policy.flat.gradient`."""

    @property
    def networks(self) -> Sequence[Any]:
        """The networks whose gradients it computes, which must all act with numpy
        (`uses_numpy`)."""

    def __call__(self, batch: TensorBatch) -> float: ...


class _Entry(NamedTuple):
    make: Callable[[Any], Kernel | None]  # None for a network that numpy does not compute
    methods: tuple[str, ...]  # the kernel computes the same as these methods of the class


_ACTOR_CRITIC_METHODS = (
    "loss", "critic_loss", "td_targets", "discounts", "next_values", "action_values", "actor_loss",
    "make_distribution",
)  # fmt: skip
_SAC_METHODS = (*_ACTOR_CRITIC_METHODS, "_sample_actions", "alpha", "_log_alpha")
_KERNELS = {
    "flowrl.algorithms.a2c.A2CTorchPolicy": _Entry(a2c_kernel, ("loss",)),
    "flowrl.algorithms.ppo.PPOTorchPolicy": _Entry(ppo_kernel, ("loss", "_value_loss")),
    "flowrl.algorithms.dqn.DQNTorchPolicy": _Entry(
        q_learning_kernel,
        ("loss", "td_targets", "_at_new_obs", "discounts", "_mean_loss", "record_td_loss"),
    ),
    "flowrl.algorithms.sac.SACTorchPolicy": _Entry(sac_kernel, _SAC_METHODS),
    "flowrl.algorithms.td3.TD3TorchPolicy": _Entry(td3_kernel, _ACTOR_CRITIC_METHODS),
}


def find_kernel(policy: Any, has_single_optimizer: bool) -> Kernel | None:
    """Return the kernel for a policy's loss; None if autograd has to differentiate it.

    There is a kernel only if the methods that make up the loss are flowrl's, unchanged, one
    optimizer has all parameters, arithmetic is float32 and not compiled, and the network is one
    that numpy computes.
    """
    config = policy.config
    plain = config.precision == "float32" and not config.compile
    if not (config.numpy_gradients and plain and has_single_optimizer):
        return None
    entry = _find_entry(type(policy))
    return None if entry is None else entry.make(policy)


def has_shipped_loss(policy: Any) -> bool:
    """Return whether a policy has a loss of this table unchanged."""
    return _find_entry(type(policy)) is not None


def _is_shipped(cls: type[Any], base: type[Any], name: str) -> bool:
    """Return whether a method or property is that of a shipped class, neither overridden nor
    replaced."""
    method: Any = getattr(cls, name)
    return method is getattr(base, name) and is_defined_by_flowrl(method)


def has_replaced_methods(policy: Any) -> bool:
    """Return whether a method of a policy's loss was replaced by assigning to the policy."""
    cls: Any = type(policy)
    return not vars(policy).keys().isdisjoint(_methods_of_loss(cls))


@cache
def _methods_of_loss(cls: Any) -> tuple[str, ...]:
    entry = _find_entry(cls)
    return () if entry is None else entry.methods


def _find_entry(cls: type[Any]) -> _Entry | None:
    for base in cls.__mro__:
        entry = _KERNELS.get(f"{base.__module__}.{base.__qualname__}")
        if entry is not None:
            return entry if all(_is_shipped(cls, base, name) for name in entry.methods) else None
    return None
