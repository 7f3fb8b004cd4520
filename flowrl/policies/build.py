"""build_torch_policy: create a policy class from functions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, NoReturn

import numpy as np
import optree
import torch
from gymnasium import spaces
from pydantic import create_model

from flowrl.data import SampleBatch
from flowrl.errors import ConfigError
from flowrl.policies.config import ExplorationConfig, PolicyConfig
from flowrl.policies.distributions import ActionDistribution
from flowrl.policies.exploration import Exploration
from flowrl.policies.learning.torch_learner import NONFINITE_GRADIENT
from flowrl.policies.models.tensor_batch import TensorBatch
from flowrl.policies.torch_policy import TorchPolicy
from flowrl.policies.torch_random import torch_seed

_ACTING_HOOKS = {"action_sampler_fn", "action_distribution_fn"}


def build_torch_policy(
    name: str,
    loss_fn: Callable[..., Any] | None = None,
    *,
    get_default_config: Callable[[], Any] | None = None,
    stats_fn: Callable[..., Mapping[str, Any]] | None = None,
    postprocess_fn: Callable[..., SampleBatch] | None = None,
    extra_action_out_fn: Callable[..., Mapping[str, Any]] | None = None,
    extra_grad_process_fn: Callable[..., Mapping[str, Any]] | None = None,
    extra_learn_fetches_fn: Callable[..., Mapping[str, Any]] | None = None,
    optimizer_fn: Callable[..., Any] | None = None,
    validate_spaces: Callable[..., None] | None = None,
    before_init: Callable[..., None] | None = None,
    before_loss_init: Callable[..., None] | None = None,
    after_init: Callable[..., None] | None = None,
    action_sampler_fn: Callable[..., tuple[Any, Any, Any, Sequence[Any]]] | None = None,
    action_distribution_fn: Callable[..., tuple[Any, Any, Sequence[Any]]] | None = None,
    make_model: Callable[..., torch.nn.Module] | None = None,
    make_model_and_action_dist: Callable[..., tuple[Any, Any]] | None = None,
    compute_gradients_fn: Callable[..., tuple[Any, Mapping[str, Any]]] | None = None,
    apply_gradients_fn: Callable[..., None] | None = None,
    mixins: Sequence[type] = (),
) -> type[BuiltTorchPolicy]:
    """Create a TorchPolicy class from functions.

    The class can be pickled by reference if its module binds it to its name. Its method
    `with_updates` creates a class with some functions replaced.

    Args:
        name: name of the class.
        loss_fn: (policy, model, dist_class, train_batch) -> the loss, or a list with one loss per
            optimizer.
        get_default_config: () -> default settings. Names that PolicyConfig does not have become
            settings of this class.
        stats_fn: (policy, train_batch) -> statistics of an update.
        postprocess_fn: (policy, sample_batch, other_agent_batches, episode) -> the batch to train
            on; see Policy.postprocess_trajectory.
        extra_action_out_fn: (policy, input_dict, state_batches, model, action_dist) -> further
            columns to record with the actions.
        extra_grad_process_fn: (policy, optimizer, loss) -> statistics; called for each optimizer
            before gradients are clipped, when the parameters have their `grad`.
        extra_learn_fetches_fn: (policy) -> further statistics.
        optimizer_fn: (policy, config) -> an optimizer of `policy.model.parameters()`, or several.
        validate_spaces: (policy, observation_space, action_space, config); called first, when the
            policy has only its `config`.
        before_init: same arguments; called after `validate_spaces`.
        before_loss_init: same arguments; called when the policy has its model, but no optimizer.
        after_init: same arguments; called at the end.
        action_sampler_fn: (policy, model, input_dict, state_batches, *, explore, timestep) ->
            (actions, logp, dist_inputs or None, states).
        action_distribution_fn: (policy, model, input_dict, *, state_batches, explore, timestep) ->
            (dist_inputs, dist_class, states).
        make_model: (policy, observation_space, action_space, config) -> the model.
        make_model_and_action_dist: same arguments -> (model, dist_class).
        compute_gradients_fn: (policy, batch) -> (gradients, statistics).
        apply_gradients_fn: (policy, gradients) -> None.
        mixins: further base classes. Their `__init__` is not called; a hook may call it.

    Raises:
        ConfigError: a hook is not a function, or both loss_fn and compute_gradients_fn are
            missing.
    """
    hooks = {k: v for k, v in locals().items() if k not in ("name", "mixins") and v is not None}
    return _build(name, hooks, tuple(mixins), sys._getframe(1).f_globals.get("__name__", __name__))


def build_tf_policy(name: str = "", *args: Any, **kwargs: Any) -> NoReturn:
    """Raise an error: flowrl does not support TensorFlow.

    Raises:
        ConfigError: always; the message names the alternatives.
    """
    raise ConfigError(
        f"build_tf_policy({name!r}): flowrl is torch only. Write the loss with torch and use "
        "build_torch_policy(name=…, loss_fn=…), which has the same hooks, or subclass Policy, "
        "which does not depend on a framework"
    )


def _build(
    name: str,
    hooks: dict[str, Any],
    mixins: tuple[type, ...],
    module: str,
    base: type[BuiltTorchPolicy] | None = None,
) -> type[BuiltTorchPolicy]:
    base = BuiltTorchPolicy if base is None else base
    for hook, fn in hooks.items():
        if not callable(fn):
            raise ConfigError(
                f"build_torch_policy({name!r}): {hook} must be a function, got {fn!r}"
            )
    if "loss_fn" not in hooks and "compute_gradients_fn" not in hooks:
        raise ConfigError(
            f"build_torch_policy({name!r}): a loss_fn or a compute_gradients_fn is required"
        )
    members: dict[str, Any] = {
        "__module__": module,
        "__init__": base.__init__,  # not that of a mixin
        "__doc__": inspect.getdoc(hooks.get("loss_fn")),
        "hooks": hooks,
        "mixins": mixins,
        "base": base,
    }
    new = {hook for hook, fn in hooks.items() if base.hooks.get(hook) is not fn}
    if "get_default_config" in new:
        members["config_class"] = _config_class(name, hooks["get_default_config"](), module)
    if "postprocess_fn" in new:
        members["postprocess_trajectory"] = _postprocess
    return type(name, (*mixins, base), members)


def _config_class(name: str, default: Any, module: str) -> type[PolicyConfig]:
    """Return a config class with these defaults. Unknown names become additional fields."""
    if not isinstance(default, (Mapping, PolicyConfig)):
        raise ConfigError(
            f"build_torch_policy({name!r}): get_default_config must return a mapping, got "
            f"{default!r}"
        )
    base = type(default) if isinstance(default, PolicyConfig) else PolicyConfig
    known = base.model_fields
    values = dict(default.items())
    validated = base(**{k: v for k, v in values.items() if k in known})
    fields: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(key, str) or key.startswith("_") or hasattr(base, key):
            raise ConfigError(f"build_torch_policy({name!r}): {key!r} cannot be a setting's name")
        annotation: Any = Any
        if key in known:
            annotation, value = known[key].annotation, validated[key]
            for constraint in known[key].metadata:
                annotation = Annotated[annotation, constraint]
        fields[key] = (annotation, value)
    return create_model(f"{name}Config", __base__=base, __module__=module, **fields)


def _postprocess(
    self: Any,
    sample_batch: SampleBatch,
    other_agent_batches: dict[Any, Any] | None = None,
    episode: Any = None,
) -> SampleBatch:
    batch: SampleBatch = self.hooks["postprocess_fn"](
        self, sample_batch, other_agent_batches, episode
    )
    return batch


class BuiltTorchPolicy(TorchPolicy):
    """Base class of the classes that `build_torch_policy` creates.

    Attributes:
        hooks: the functions by name.
        mixins: the further base classes.
        base: the class to which the functions are added: this one, or a handwritten subclass.
    """

    hooks: ClassVar[dict[str, Any]] = {}
    mixins: ClassVar[tuple[type, ...]] = ()
    base: ClassVar[Any] = None

    def __init__(self, observation_space: Any, action_space: Any, config: Any = None):
        settings = self.config = self.config_from({} if config is None else config)
        # loss and batch of the current update, for extra_grad_process
        self._last_loss: tuple[Any, Any] = (None, None)
        for hook in ("validate_spaces", "before_init"):
            self._call_init_hook(hook, observation_space, action_space)
        TorchPolicy.__init__(self, observation_space, action_space, settings)
        self._call_init_hook("after_init", observation_space, action_space)

    def _call_init_hook(self, hook: str, observation_space: Any, action_space: Any) -> None:
        if hook in self.hooks:
            self.hooks[hook](self, observation_space, action_space, self.config)

    @classmethod
    def with_updates(cls, **overrides: Any) -> type[BuiltTorchPolicy]:
        """Create a class with some hooks replaced.

        Called on a handwritten subclass, it creates a subclass of that, so that its methods are
        kept.

        Args:
            overrides: arguments of `build_torch_policy`; None removes a hook.

        Raises:
            TypeError: an unknown hook, or None for a hook of the base class.
        """
        known = inspect.signature(build_torch_policy).parameters
        unknown = [hook for hook in overrides if hook not in known]
        if unknown:
            raise TypeError(f"with_updates(): no hook {unknown[0]!r}, only {', '.join(known)}")
        name = overrides.pop("name", cls.__name__)
        is_handwritten = "hooks" not in vars(cls)
        mixins = tuple(overrides.pop("mixins", () if is_handwritten else cls.mixins))
        base = cls if is_handwritten else cls.base
        removed = [k for k, v in overrides.items() if v is None and k in base.hooks]
        if removed:
            raise TypeError(
                f"with_updates(): {removed[0]} is {base.__name__}'s and cannot be removed: "
                "override the method instead"
            )
        hooks = {k: v for k, v in {**cls.hooks, **overrides}.items() if v is not None}
        module = sys._getframe(1).f_globals.get("__name__", __name__)
        return _build(name, hooks, mixins, module, base)

    # -- parts -------------------------------------------------------------------------------------

    _model_of_hook: Any = None  # that make_model_and_action_dist returned with the distribution

    def make_distribution(self) -> Any:
        hook = "make_model_and_action_dist"
        if hook not in self.hooks:
            return super().make_distribution()
        try:  # the hook may read it
            self.dist_class = super().make_distribution()
        except ConfigError:  # the space has none
            self.dist_class = ActionDistribution
        args = self.observation_space, self.action_space, self.config
        self._model_of_hook, dist_class = _unpack(
            hook, self.hooks[hook](self, *args), "model, dist_class"
        )
        return dist_class

    def make_model(self) -> torch.nn.Module:
        args = self.observation_space, self.action_space, self.config
        if "make_model_and_action_dist" in self.hooks:
            if self._model_of_hook is None:  # another network is needed
                self.dist_class = self.make_distribution()
            model, self._model_of_hook = self._model_of_hook, None
        elif "make_model" in self.hooks:
            model = self.hooks["make_model"](self, *args)
        else:
            return super().make_model()
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"make_model: must return a torch.nn.Module, got {model!r}")
        return model

    def make_optimizer(self) -> Any:
        self._call_init_hook("before_loss_init", self.observation_space, self.action_space)
        if "optimizer_fn" in self.hooks:
            return self.hooks["optimizer_fn"](self, self.config)
        return super().make_optimizer()

    # -- acting ------------------------------------------------------------------------------------

    def make_exploration(self) -> Exploration:
        hooks = _ACTING_HOOKS & set(self.hooks)
        if hooks and self.config.exploration_config != ExplorationConfig():
            raise ConfigError(
                f"exploration_config: {type(self).__name__} explores with its {hooks.pop()}"
            )
        return super().make_exploration()

    def compute_log_likelihoods(
        self, actions: Any, obs_batch: Any = None, input_dict: dict[str, Any] | None = None
    ) -> np.ndarray:
        if "action_sampler_fn" in self.hooks:
            raise ConfigError(
                f"{type(self).__name__} acts with its action_sampler_fn, which has no "
                "log-likelihoods"
            )
        if "action_distribution_fn" not in self.hooks:
            return super().compute_log_likelihoods(actions, obs_batch, input_dict)
        inputs = input_dict or {"obs": obs_batch}
        outputs, dist_class, _ = self._call_distribution_fn(inputs, explore=False)
        self._check_actions(actions, len(outputs))
        with torch.inference_mode():
            dist = dist_class(outputs, self.model)
            on_device: Any = partial(torch.as_tensor, device=outputs.device)
            is_nested = isinstance(self.action_space, (spaces.Dict, spaces.Tuple))
            tensors = optree.tree_map(on_device, actions) if is_nested else on_device(actions)
            logp: np.ndarray = dist.logp(tensors).cpu().numpy()
        return logp

    def export(self, path: Any, format: str | None = None) -> Any:
        hooks = _ACTING_HOOKS & set(self.hooks)
        if hooks:
            raise ConfigError(
                f"export: {type(self).__name__} acts with its {hooks.pop()}, which cannot be "
                "exported"
            )
        return super().export(path, format)

    def _call_distribution_fn(
        self, input_dict: dict[str, Any], explore: bool
    ) -> tuple[Any, Any, Any]:
        tensors, state = self.model.as_tensors(input_dict, copy=True)
        self.model.eval()
        with torch.inference_mode(), self._seeded():
            result = self.hooks["action_distribution_fn"](
                self,
                self.model,
                tensors,
                state_batches=state,
                explore=explore,
                timestep=self.timestep,
            )
        outputs, dist_class, states = _unpack(
            "action_distribution_fn", result, "dist_inputs, dist_class, states"
        )
        if not (isinstance(dist_class, type) and issubclass(dist_class, ActionDistribution)):
            raise ConfigError(
                "action_distribution_fn must return a subclass of ActionDistribution, got "
                f"{dist_class!r}"
            )
        return outputs, dist_class, states

    def _act(self, input_dict: dict[str, Any], explore: bool) -> Any:
        sampler_fn = self.hooks.get("action_sampler_fn")
        if sampler_fn is None and "action_distribution_fn" not in self.hooks:
            return super()._act(input_dict, explore)
        extra: dict[str, np.ndarray] = {}
        if sampler_fn is not None:
            tensors, state = self.model.as_tensors(input_dict, copy=True)
            self.model.eval()
            with torch.inference_mode(), torch_seed(int(self.rng.integers(2**63))):
                result = sampler_fn(
                    self, self.model, tensors, state, explore=explore, timestep=self.timestep
                )
            actions, logp, outputs, state = _unpack(
                "action_sampler_fn", result, "actions, logp, dist_inputs, states"
            )
            actions, dist = _to_numpy(actions), None
        else:
            outputs, dist_class, state = self._call_distribution_fn(input_dict, explore)
            actions, logp = dist_class.act(_to_numpy(outputs), self.rng, explore)
            dist = dist_class(outputs, self.model)
        if logp is not None:
            extra["action_logp"] = _to_numpy(logp)
        if outputs is not None:
            extra["action_dist_inputs"] = _to_numpy(outputs)
        states = [_to_numpy(part) for part in state]
        extra |= self._call_extra_action_out_fn(input_dict, states, dist)
        return actions, states, extra

    def extra_action_out(
        self, input_dict: dict[str, Any], states: list[np.ndarray], outputs: np.ndarray
    ) -> dict[str, np.ndarray]:
        if "extra_action_out_fn" not in self.hooks:
            return {}
        dist = self.dist_class(torch.from_numpy(np.array(outputs)), self.model)
        return self._call_extra_action_out_fn(input_dict, states, dist)

    def _call_extra_action_out_fn(
        self, input_dict: dict[str, Any], states: list[np.ndarray], dist: Any
    ) -> dict[str, np.ndarray]:
        fn = self.hooks.get("extra_action_out_fn")
        if fn is None:
            return {}
        with torch.inference_mode():
            columns = fn(self, input_dict, states, self.model, dist)
        if not isinstance(columns, Mapping):
            raise ConfigError(f"extra_action_out_fn must return a dict of columns, got {columns!r}")
        return {name: _to_numpy(value) for name, value in columns.items()}

    # -- learning ----------------------------------------------------------------------------------

    def loss(self, batch: TensorBatch) -> Any:
        if "loss_fn" not in self.hooks:
            return super().loss(batch)
        loss = self.hooks["loss_fn"](self, self.model, self.dist_class, batch)
        self._last_loss = loss, batch
        return loss

    def end_learning(self, batch: Any, stats: dict[str, float]) -> dict[str, float]:
        self._last_loss = (None, None)  # the trial of `columns_read` leaves a graph
        return super().end_learning(batch, stats)

    def extra_grad_process(self) -> dict[str, torch.Tensor]:
        losses, batch = self._last_loss
        self._last_loss = (None, None)  # release the graph
        stats: dict[str, float] = {}
        if "extra_grad_process_fn" in self.hooks:
            losses = [losses] if isinstance(losses, torch.Tensor) else losses
            for optimizer, loss in zip(self.optimizers, losses, strict=True):
                result = self.hooks["extra_grad_process_fn"](self, optimizer, loss)
                stats |= _to_stats("extra_grad_process_fn", result or {})
        for hook, args in (("stats_fn", (self, batch)), ("extra_learn_fetches_fn", (self,))):
            if hook in self.hooks:
                stats |= _to_stats(hook, self.hooks[hook](*args))
        return {name: torch.as_tensor(value) for name, value in stats.items()}

    def compute_gradients(self, batch: SampleBatch) -> tuple[Any, dict[str, float]]:
        if "compute_gradients_fn" not in self.hooks:
            return super().compute_gradients(batch)
        result = self.hooks["compute_gradients_fn"](self, self.learner.prepare_batch(batch))
        gradients, stats = _unpack("compute_gradients_fn", result, "gradients, statistics")
        return gradients, _to_stats("compute_gradients_fn", stats)

    def apply_gradients(self, gradients: Any) -> None:
        if "apply_gradients_fn" not in self.hooks:
            super().apply_gradients(gradients)
            return
        if not _is_finite(gradients):
            self.learner.refuse_gradient()
            return
        self.hooks["apply_gradients_fn"](self, gradients)
        self.version += 1

    def learn_on_batch(self, batch: SampleBatch) -> dict[str, float]:
        if not {"compute_gradients_fn", "apply_gradients_fn"} & set(self.hooks):
            return super().learn_on_batch(batch)
        return self.learner.skip_nonfinite(self._learn_with_hooks, batch)

    def _learn_with_hooks(self, batch: SampleBatch) -> dict[str, float]:
        gradients, stats = self.compute_gradients(batch)
        if not _is_finite(gradients):
            raise FloatingPointError(NONFINITE_GRADIENT)
        self.apply_gradients(gradients)
        return stats


def _unpack(hook: str, result: Any, names: str) -> Any:
    """Return a hook's result if it is a tuple of as many values as there are names."""
    if not isinstance(result, (tuple, list)) or len(result) != len(names.split(", ")):
        raise ConfigError(f"{hook} must return ({names}), got {result!r}")
    return result


def _is_finite(gradients: Any) -> bool:
    """Return whether all numbers in a nest of arrays and tensors are finite."""
    leaves: list[Any] = optree.tree_leaves(gradients)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    arrays = [np.asarray(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors) and all(
        bool(np.isfinite(array).all()) for array in arrays if array.dtype.kind in "fc"
    )


def _to_stats(hook: str, result: Any) -> dict[str, float]:
    try:
        return {name: float(value) for name, value in result.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{hook} must return a dict of numbers, got {result!r}") from error


def _to_numpy(value: Any) -> Any:
    """Convert tensors in dicts and tuples to arrays."""
    if isinstance(value, dict):
        return {key: _to_numpy(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_to_numpy, value))
    return value.cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
