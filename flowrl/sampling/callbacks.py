"""DefaultCallbacks: code of one's own at the events of sampling and training."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from flowrl.data import MultiAgentBatch, SampleBatch
    from flowrl.policies.policy import Policy
    from flowrl.sampling.episode import MultiAgentEpisode
    from flowrl.sampling.rollout_worker import RolloutWorker

F = TypeVar("F", bound=Callable[..., Any])


def override(cls: type) -> Callable[[F], F]:
    """Say that a method stands for one of `cls`.

    Raises:
        NameError: `cls` has no such method.
    """

    def check(method: F) -> F:
        if not hasattr(cls, method.__name__):
            raise NameError(f"{method.__name__}() overrides nothing: {cls.__name__} has none")
        return method

    return check


class DefaultCallbacks:
    """What happens at the events of sampling and training: nothing. Override what you need.

    One object per worker, made there. Arguments come by name, and more may be added: end the
    signature in `**kwargs`. An episode's events are `on_episode_start`, once per step
    `on_episode_step`, and `on_episode_end`. Overriding one of these, or
    `on_sub_environment_created` with nothing else, changes no row of what is sampled.
    """

    def on_sub_environment_created(
        self, *, worker: RolloutWorker, sub_environment: Any, env_context: Any, **kwargs: Any
    ) -> None:
        """An environment was made, at the start or in the place of one that broke."""

    def on_episode_start(
        self,
        *,
        worker: RolloutWorker,
        base_env: Any,
        policies: dict[str, Policy],
        episode: MultiAgentEpisode,
        env_index: int,
        **kwargs: Any,
    ) -> None:
        """An episode begins: its first observations are there, nobody has acted."""

    def on_episode_step(
        self,
        *,
        worker: RolloutWorker,
        base_env: Any,
        policies: dict[str, Policy],
        episode: MultiAgentEpisode,
        env_index: int,
        **kwargs: Any,
    ) -> None:
        """The environment was stepped; called before the episode ends."""

    def on_episode_end(
        self,
        *,
        worker: RolloutWorker,
        base_env: Any,
        policies: dict[str, Policy],
        episode: MultiAgentEpisode,
        env_index: int,
        **kwargs: Any,
    ) -> None:
        """An episode is over, its rows are postprocessed. If its environment broke,
        `episode.is_faulty`."""

    def on_postprocess_trajectory(
        self,
        *,
        worker: RolloutWorker,
        episode: MultiAgentEpisode | None,
        agent_id: Any,
        policy_id: str,
        policies: dict[str, Policy],
        postprocessed_batch: SampleBatch,
        original_batches: dict[Any, tuple[Policy, SampleBatch]],
        **kwargs: Any,
    ) -> None:
        """An agent's part of a fragment was postprocessed by its policy.

        Columns may be set in `postprocessed_batch`; they reach the train batch. Arrays are
        read-only. `original_batches`: by agent id, the policy and the rows before postprocessing.
        """

    def on_sample_end(
        self, *, worker: RolloutWorker, samples: SampleBatch | MultiAgentBatch, **kwargs: Any
    ) -> None:
        """`worker.sample()` is about to return `samples`."""

    def on_learn_on_batch(
        self, *, policy: Policy, train_batch: SampleBatch, result: dict[str, float], **kwargs: Any
    ) -> None:
        """A policy is about to learn from a train batch; what is put into `result` is reported
        with its statistics."""

    def on_train_result(self, *, algorithm: Any, result: dict[str, Any], **kwargs: Any) -> None:
        """`Algorithm.train()` is about to return `result`, which may be added to."""


def call(method: Callable[..., None], **arguments: Any) -> None:
    """Call a callback; what it raises says so.

    Raises:
        RuntimeError: it raised StopIteration, which would end a stream.
    """
    try:
        method(**arguments)
    except StopIteration as error:
        raise RuntimeError(f"{_name(method)}() raised StopIteration") from error
    except Exception as error:
        error.add_note(f"raised by {_name(method)}()")
        raise


def _name(method: Any) -> str:
    return f"{type(method.__self__).__name__}.{method.__name__}"


def overrides(callbacks: DefaultCallbacks, *names: str) -> bool:
    """Whether the callbacks' class has its own version of one of these methods."""
    return any(
        getattr(type(callbacks), name) is not getattr(DefaultCallbacks, name) for name in names
    )
