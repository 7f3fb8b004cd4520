"""DefaultCallbacks: user code that runs at events of sampling and training."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.errors import ConfigError, add_note
from flowrl.policies.policy import Policy
from flowrl.sampling.callback_worker import CallbackWorker
from flowrl.sampling.episode import MultiAgentEpisode
from flowrl.setting_values import nearest

EPISODE_EVENTS = ("on_episode_start", "on_episode_step", "on_episode_end")
EVENTS_WITH_EPISODE = (*EPISODE_EVENTS, "on_postprocess_trajectory")  # get a MultiAgentEpisode
SAMPLING_EVENTS = (*EVENTS_WITH_EPISODE, "on_sample_end")  # called while a worker samples

F = TypeVar("F", bound=Callable[..., Any])


def override(cls: type) -> Callable[[F], F]:
    """Decorate a method that must override one of `cls`; checked when its class is defined.

    Raises:
        NameError: `cls` has no method of this name.
    """

    def check(method: F) -> F:
        if not hasattr(cls, method.__name__):
            raise NameError(
                f"{method.__name__}() overrides nothing: {cls.__name__} has no such method"
            )
        return method

    return check


class DefaultCallbacks:
    """Base class of callbacks; every method does nothing. Override the ones that you need.

    Each worker creates one instance, without arguments: put configuration into class attributes.
    Arguments are passed by name, and later versions may add some: end each signature with
    `**kwargs`. The calls of an episode are `on_episode_start`, `on_episode_step` after each step,
    and `on_episode_end`. Overriding one of these or `on_sub_environment_created` does not change
    the sampled rows.
    """

    def on_sub_environment_created(
        self, *, worker: CallbackWorker, sub_environment: Any, env_context: Any, **kwargs: Any
    ) -> None:
        """Called after an environment was created, also if it replaces a failed one; if a vector
        environment is created as a whole, with the vector environment.

        The first environment is created before the policies: `worker` has only `config`,
        `worker_index` and `callbacks` then."""

    def on_episode_start(
        self,
        *,
        worker: CallbackWorker,
        base_env: Any,
        policies: dict[str, Policy],
        episode: MultiAgentEpisode,
        env_index: int,
        **kwargs: Any,
    ) -> None:
        """Called when an episode starts: after its first observations, before any action.

        `episode.last_info_for(agent_id)` returns the info of the reset. With
        `vectorization_mode="async"`, it is empty if it cannot be pickled.
        """

    def on_episode_step(
        self,
        *,
        worker: CallbackWorker,
        base_env: Any,
        policies: dict[str, Policy],
        episode: MultiAgentEpisode,
        env_index: int,
        **kwargs: Any,
    ) -> None:
        """Called after each env step, before `on_episode_end`."""

    def on_episode_end(
        self,
        *,
        worker: CallbackWorker,
        base_env: Any,
        policies: dict[str, Policy],
        episode: MultiAgentEpisode,
        env_index: int,
        **kwargs: Any,
    ) -> None:
        """Called when an episode ends. Its last rows may not be postprocessed yet.

        `episode.is_faulty` is True if the environment failed.
        """

    def on_postprocess_trajectory(
        self,
        *,
        worker: CallbackWorker,
        episode: MultiAgentEpisode | None,
        agent_id: Any,
        policy_id: str,
        policies: dict[str, Policy],
        postprocessed_batch: SampleBatch,
        original_batches: dict[Any, tuple[Policy, SampleBatch]],
        **kwargs: Any,
    ) -> None:
        """Called after a policy postprocessed an agent's rows of a fragment.

        Columns that are set in `postprocessed_batch` reach the train batch. Arrays are read-only.
        `original_batches` has the policy and the rows before postprocessing by agent id.
        """

    def on_sample_end(
        self, *, worker: CallbackWorker, samples: SampleBatch | MultiAgentBatch, **kwargs: Any
    ) -> None:
        """Called before `worker.sample()` returns `samples`."""

    def on_learn_on_batch(
        self, *, policy: Policy, train_batch: SampleBatch, result: dict[str, float], **kwargs: Any
    ) -> None:
        """Called before a policy learns from a train batch, in the process that learns or computes
        the gradient.

        Entries that are added to `result` are reported with the policy's statistics.
        """

    def on_train_result(self, *, algorithm: Any, result: dict[str, Any], **kwargs: Any) -> None:
        """Called before `Algorithm.train()` returns `result`; entries may be added."""


EVENTS = tuple(name for name in vars(DefaultCallbacks) if name.startswith("on_"))


_SB3_EVENTS = (
    "_on_step", "_on_training_start", "_on_training_end", "_on_rollout_start", "_on_rollout_end",
)  # fmt: skip


def check_callbacks_class(value: Any) -> None:
    """Check that workers can create an object of a callbacks class and call its methods.

    Raises:
        ConfigError: it is not a subclass of DefaultCallbacks, its constructor needs arguments, a
            method does not accept the arguments of its event, or the name of a method resembles
            the name of an event.
    """
    arguments = "make its arguments class attributes, and set them in a subclass"
    if not (isinstance(value, type) and issubclass(value, DefaultCallbacks)):
        hint = ""
        if isinstance(value, DefaultCallbacks):
            hint = f": pass the class {type(value).__name__}; {arguments}"
        elif isinstance(value, partial):
            hint = f": pass a class; {arguments}"
        raise ConfigError(
            f"callbacks_class: must be a subclass of DefaultCallbacks, got {value!r}{hint}"
        )
    try:
        inspect.signature(value).bind()
    except TypeError as error:
        raise ConfigError(
            f"callbacks_class: workers create {value.__name__} without arguments, but its "
            f"constructor needs some ({error}): {arguments}"
        ) from None
    for name in EVENTS:
        _check_signature(value, name)
    for name in dir(value):
        event = name.removeprefix("_") if name in _SB3_EVENTS else name
        if event.startswith("on_") and name not in EVENTS and callable(getattr(value, name)):
            raise ConfigError(
                f"callbacks_class: {value.__name__}.{name} is not an event."
                f"{nearest(event, list(EVENTS)) or ' The events are ' + ', '.join(EVENTS)}"
            )


def _check_signature(cls: type[DefaultCallbacks], event: str) -> None:
    """Check that a method of a callbacks class can be called, with the arguments of its event.

    Raises:
        ConfigError: it is not a plain method, it does not accept them, or it has an argument of
            RLlib's that does not exist here.
    """
    method, base = inspect.getattr_static(cls, event), getattr(DefaultCallbacks, event)
    if method is base:
        return
    takes_self = not isinstance(method, staticmethod)
    method = getattr(method, "__func__", method)  # of static and class methods
    kind = None
    if not callable(getattr(cls, event)):
        kind = "not a method"
    elif inspect.iscoroutinefunction(method):
        kind = "a coroutine function, which nothing would await"
    elif inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        kind = "a generator function, whose body would not run"
    if kind is not None:
        raise ConfigError(
            f"callbacks_class: {cls.__name__}.{event} is {kind}: write a plain method, "
            f"def {event}(self, **kwargs)"
        )
    if not inspect.isfunction(method):
        return
    if "metrics_logger" in inspect.signature(method).parameters:
        raise ConfigError(
            f"callbacks_class: {cls.__name__}.{event}() has the argument metrics_logger of RLlib: "
            "set episode.custom_metrics[name] = value, or entries of result in on_train_result"
        )
    kinds = inspect.signature(base).parameters
    names = [n for n, parameter in kinds.items() if parameter.kind is parameter.KEYWORD_ONLY]
    try:
        inspect.signature(method).bind(*[None] * takes_self, **dict.fromkeys(names))
    except TypeError as error:
        raise ConfigError(
            f"callbacks_class: {cls.__name__}.{event}() {error}: it is called with "
            f"{', '.join(f'{name}=' for name in names)}; end its signature with **kwargs, which "
            "takes those that it does not name"
        ) from None


def call(callbacks: DefaultCallbacks, name: str, **arguments: Any) -> None:
    """Call a callback, and measure its time; add a note with its name to an exception.

    Raises:
        RuntimeError: the callback raised StopIteration, which would end a stream.
    """
    started = time.perf_counter()
    try:
        getattr(callbacks, name)(**arguments)
    except StopIteration as error:
        raise RuntimeError(f"{type(callbacks).__name__}.{name}() raised StopIteration") from error
    except Exception as error:
        add_note(error, f"raised by {type(callbacks).__name__}.{name}()")
        raise
    seconds = callback_seconds(callbacks)
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started


def call_for_episode(
    worker: CallbackWorker, name: str, base_env: Any, episode: MultiAgentEpisode
) -> None:
    """Call a callback of a worker with an episode."""
    call(
        worker.callbacks,
        name,
        worker=worker,
        base_env=base_env,
        policies=dict(worker.policy_map),
        episode=episode,
        env_index=episode.env_id,
    )


def callback_seconds(callbacks: DefaultCallbacks) -> dict[str, float]:
    """Return the seconds in each method of the callbacks so far, by name."""
    # not set by __init__, which a subclass may override
    seconds: dict[str, float] = callbacks.__dict__.setdefault("_flowrl_seconds", {})
    return seconds


def name_of(callbacks: DefaultCallbacks) -> str:
    """Return the name of the class of callbacks, which a resumed run compares."""
    return type(callbacks).__qualname__


def overrides(callbacks: DefaultCallbacks, *names: str) -> bool:
    """Return whether the class of the callbacks overrides one of these methods."""
    return any(
        getattr(type(callbacks), name) is not getattr(DefaultCallbacks, name) for name in names
    )
