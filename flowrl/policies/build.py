"""build_torch_policy: a policy class from functions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NoReturn

import numpy as np
import torch
from pydantic import create_model

from flowrl.data import SampleBatch
from flowrl.policies.config import ExplorationConfig, PolicyConfig
from flowrl.policies.exploration import Exploration
from flowrl.policies.torch_policy import TensorBatch, TorchPolicy
from flowrl.settings import ConfigError


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
    """A TorchPolicy class from functions.

    The class can be pickled by its name if it is bound to that name in its module, and
    `with_updates(…)` gives one with some of the functions replaced.

    Args:
        name: of the class.
        loss_fn: (policy, model, dist_class, train_batch) -> the loss, or one for each optimizer.
        get_default_config: () -> default settings; names that no policy has are its own ones.
        stats_fn: (policy, train_batch) -> statistics of an update.
        postprocess_fn: (policy, sample_batch, other_agent_batches, episode) -> the batch to train
            on; see Policy.postprocess_trajectory.
        extra_action_out_fn: (policy, input_dict, state_batches, model, action_dist) -> columns to
            be recorded with the actions.
        extra_grad_process_fn: (policy, optimizer, loss) -> statistics; called for each optimizer
            before gradients are clipped, when the parameters have their `grad`.
        extra_learn_fetches_fn: (policy) -> more statistics.
        optimizer_fn: (policy, config) -> an optimizer of `policy.model.parameters()`, or several.
        validate_spaces, before_init, before_loss_init, after_init: (policy, observation_space,
            action_space, config); called before anything is there but `policy.config`; after that;
            when the model is there, before the optimizer; at the end.
        action_sampler_fn: (policy, model, input_dict, state_batches, *, explore, timestep) ->
            (actions, logp, dist_inputs or None, states).
        action_distribution_fn: (policy, model, input_dict, *, state_batches, explore, timestep) ->
            (dist_inputs, dist_class, states).
        make_model: (policy, observation_space, action_space, config) -> the model.
        make_model_and_action_dist: the same -> (model, dist_class).
        compute_gradients_fn: (policy, batch) -> (gradients, statistics).
        apply_gradients_fn: (policy, gradients) -> None.
        mixins: more base classes. Their `__init__` is not called; a hook may.

    Raises:
        ConfigError: a hook is not a function; there is neither a loss_fn nor a
            compute_gradients_fn.
    """
    hooks = {k: v for k, v in locals().items() if k not in ("name", "mixins") and v is not None}
    return _build(name, hooks, tuple(mixins), sys._getframe(1).f_globals.get("__name__", __name__))


def build_tf_policy(name: str = "", *args: Any, **kwargs: Any) -> NoReturn:
    """There is no TensorFlow in flowrl.

    Raises:
        ConfigError: always, saying what to use instead.
    """
    raise ConfigError(
        f"build_tf_policy({name!r}): flowrl is torch only: write the loss with torch and use "
        "build_torch_policy(name=…, loss_fn=…), which takes the same hooks; or subclass Policy, "
        "which asks for no framework"
    )


def _build(
    name: str,
    hooks: dict[str, Any],
    mixins: tuple[type, ...],
    module: str,
    base: type[BuiltTorchPolicy] | None = None,
) -> type[BuiltTorchPolicy]:
    base = BuiltTorchPolicy if base is None else base
    for hook, own in hooks.items():
        if not callable(own):
            raise ConfigError(f"build_torch_policy({name!r}): {hook} is a function, got {own!r}")
    if "loss_fn" not in hooks and "compute_gradients_fn" not in hooks:
        raise ConfigError(f"build_torch_policy({name!r}): a loss_fn is needed")
    members: dict[str, Any] = {
        "__module__": module,
        "__init__": base.__init__,  # not a mixin's
        "__doc__": inspect.getdoc(hooks.get("loss_fn")),
        "hooks": hooks,
        "mixins": mixins,
        "base": base,
    }
    new = {name for name, own in hooks.items() if base.hooks.get(name) is not own}
    if "get_default_config" in new:
        members["config_class"] = _config_class(name, hooks["get_default_config"](), module)
    if "postprocess_fn" in new:
        members["postprocess_trajectory"] = _postprocess
    return type(name, (*mixins, base), members)


def _config_class(name: str, default: Any, module: str) -> type[PolicyConfig]:
    """A record of the default settings; what no policy knows is a setting of its own."""
    if not isinstance(default, (Mapping, PolicyConfig)):
        raise ConfigError(
            f"build_torch_policy({name!r}): get_default_config gives a mapping, got {default!r}"
        )
    base = type(default) if isinstance(default, PolicyConfig) else PolicyConfig
    known = base.model_fields
    values = dict(default.items())
    checked = base(**{k: v for k, v in values.items() if k in known})
    fields: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(key, str) or key.startswith("_") or hasattr(base, key):
            raise ConfigError(f"build_torch_policy({name!r}): {key!r} cannot be a setting's name")
        kind: Any = Any
        if key in known:
            kind, value = known[key].annotation, checked[key]
            for limit in known[key].metadata:
                kind = Annotated[kind, limit]
        fields[key] = (kind, value)
    return create_model(f"{name}Config", __base__=base, __module__=module, **fields)


def _postprocess(
    self: Any,
    sample_batch: SampleBatch,
    other_agent_batches: dict[Any, Any] | None = None,
    episode: Any = None,
) -> SampleBatch:
    made: SampleBatch = self.hooks["postprocess_fn"](
        self, sample_batch, other_agent_batches, episode
    )
    return made


class BuiltTorchPolicy(TorchPolicy):
    """What `build_torch_policy` makes subclasses of.

    Attributes:
        hooks: the functions, by name.
        mixins: the other base classes.
        base: the class under the functions: this one, or one with methods of its own.
    """

    hooks: ClassVar[dict[str, Any]] = {}
    mixins: ClassVar[tuple[type, ...]] = ()
    base: ClassVar[Any] = None

    def __init__(self, observation_space: Any, action_space: Any, config: Any = None):
        given = self.config = self.settings_of({} if config is None else config)
        for hook in ("validate_spaces", "before_init"):
            self._call_init_hook(hook, observation_space, action_space)
        TorchPolicy.__init__(self, observation_space, action_space, given)
        self._call_init_hook("after_init", observation_space, action_space)

    def _call_init_hook(self, hook: str, observation_space: Any, action_space: Any) -> None:
        if hook in self.hooks:
            self.hooks[hook](self, observation_space, action_space, self.config)

    @classmethod
    def with_updates(cls, **overrides: Any) -> type[BuiltTorchPolicy]:
        """A class of the same functions but for these; of a subclass that was written, a subclass.

        Raises:
            TypeError: there is no such hook, or one of a subclass' base shall be none.
        """
        known = inspect.signature(build_torch_policy).parameters
        unknown = [hook for hook in overrides if hook not in known]
        if unknown:
            raise TypeError(f"with_updates(): no hook {unknown[0]!r}, only {', '.join(known)}")
        name = overrides.pop("name", cls.__name__)
        written = "hooks" not in vars(cls)  # a subclass with methods of its own
        mixins = tuple(overrides.pop("mixins", () if written else cls.mixins))
        base = cls if written else cls.base
        gone = [k for k, v in overrides.items() if v is None and k in base.hooks]
        if gone:
            raise TypeError(f"with_updates(): {gone[0]} is {base.__name__}'s: override its method")
        hooks = {k: v for k, v in {**cls.hooks, **overrides}.items() if v is not None}
        module = sys._getframe(1).f_globals.get("__name__", __name__)
        return _build(name, hooks, mixins, module, base)

    # -- parts -------------------------------------------------------------------------------------

    def make_model(self) -> torch.nn.Module:
        given = self.observation_space, self.action_space, self.config
        if "make_model_and_action_dist" in self.hooks:
            made = self.hooks["make_model_and_action_dist"](self, *given)
            model, self.dist_class = _parts("make_model_and_action_dist", made, "model, dist_class")
        elif "make_model" in self.hooks:
            model = self.hooks["make_model"](self, *given)
        else:
            return super().make_model()
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"make_model: a torch.nn.Module is needed, got {model!r}")
        return model

    def make_optimizer(self) -> Any:
        self._call_init_hook("before_loss_init", self.observation_space, self.action_space)
        if "optimizer_fn" in self.hooks:
            return self.hooks["optimizer_fn"](self, self.config)
        return super().make_optimizer()

    # -- acting ------------------------------------------------------------------------------------

    def make_exploration(self) -> Exploration:
        acting = {"action_sampler_fn", "action_distribution_fn"} & set(self.hooks)
        if acting and self.config.exploration_config != ExplorationConfig():
            raise ConfigError(
                f"exploration_config: {type(self).__name__} explores by its {acting.pop()}"
            )
        return super().make_exploration()

    def compute_log_likelihoods(
        self, actions: Any, obs_batch: Any = None, input_dict: dict[str, Any] | None = None
    ) -> np.ndarray:
        if "action_sampler_fn" in self.hooks:
            raise ConfigError(
                f"{type(self).__name__} acts by its action_sampler_fn, which has no log-likelihoods"
            )
        if "action_distribution_fn" not in self.hooks:
            return super().compute_log_likelihoods(actions, obs_batch, input_dict)
        outputs, kind, _ = self._distribution(input_dict or {"obs": obs_batch}, explore=False)
        with torch.inference_mode():
            logp: np.ndarray = kind(outputs, self.model).logp(torch.as_tensor(actions)).numpy()
        return logp

    def export(self, path: Any, format: str | None = None) -> Any:
        acting = {"action_sampler_fn", "action_distribution_fn"} & set(self.hooks)
        if acting:
            raise ConfigError(f"export: {type(self).__name__} acts by its {acting.pop()}")
        return super().export(path, format)

    def _distribution(self, input_dict: dict[str, Any], explore: bool) -> tuple[Any, Any, Any]:
        tensors, state = self.model.as_tensors(input_dict)
        self.model.eval()
        with torch.inference_mode():
            made = self.hooks["action_distribution_fn"](
                self,
                self.model,
                tensors,
                state_batches=state,
                explore=explore,
                timestep=self.timestep,
            )
        outputs, kind, states = _parts(
            "action_distribution_fn", made, "dist_inputs, dist_class, states"
        )
        return outputs, kind, states

    def _act(self, input_dict: dict[str, Any], explore: bool) -> Any:
        sampler = self.hooks.get("action_sampler_fn")
        distribution = self.hooks.get("action_distribution_fn")
        if sampler is None and distribution is None:
            return super()._act(input_dict, explore)
        extra: dict[str, np.ndarray] = {}
        if sampler is not None:
            tensors, state = self.model.as_tensors(input_dict)
            self.model.eval()
            with torch.inference_mode(), torch.random.fork_rng():
                torch.manual_seed(int(self.rng.integers(2**63)))
                made = sampler(
                    self, self.model, tensors, state, explore=explore, timestep=self.timestep
                )
            actions, logp, outputs, state = _parts(
                "action_sampler_fn", made, "actions, logp, dist_inputs, states"
            )
            actions, dist = _array(actions), None
        else:
            outputs, kind, state = self._distribution(input_dict, explore)
            actions, logp = kind.act(_array(outputs), self.rng, explore)
            dist = kind(outputs, self.model)
        if logp is not None:
            extra["action_logp"] = _array(logp)
        if outputs is not None:
            extra["action_dist_inputs"] = _array(outputs)
        states = [_array(part) for part in state]
        extra |= self._extra_of(input_dict, states, dist)
        return actions, states, extra

    def extra_action_out(
        self, input_dict: dict[str, Any], states: list[np.ndarray], outputs: np.ndarray
    ) -> dict[str, np.ndarray]:
        if "extra_action_out_fn" not in self.hooks:
            return {}
        dist = self.dist_class(torch.from_numpy(np.array(outputs)), self.model)
        return self._extra_of(input_dict, states, dist)

    def _extra_of(
        self, input_dict: dict[str, Any], states: list[np.ndarray], dist: Any
    ) -> dict[str, np.ndarray]:
        own = self.hooks.get("extra_action_out_fn")
        if own is None:
            return {}
        with torch.inference_mode():
            made = own(self, input_dict, states, self.model, dist)
        if not isinstance(made, Mapping):
            raise ConfigError(f"extra_action_out_fn gives a dict of columns, it gave {made!r}")
        return {name: _array(value) for name, value in made.items()}

    # -- learning ----------------------------------------------------------------------------------

    def loss(self, batch: TensorBatch) -> Any:
        if "loss_fn" not in self.hooks:
            return super().loss(batch)
        loss = self.hooks["loss_fn"](self, self.model, self.dist_class, batch)
        self._latest = loss, batch
        return loss

    def extra_grad_process(self) -> dict[str, torch.Tensor]:
        losses, batch = self._latest
        told: dict[str, float] = {}
        if "extra_grad_process_fn" in self.hooks:
            losses = [losses] if isinstance(losses, torch.Tensor) else losses
            for optimizer, loss in zip(self.optimizers, losses, strict=True):
                own = self.hooks["extra_grad_process_fn"](self, optimizer, loss)
                told |= _numbers("extra_grad_process_fn", own or {})
        for hook, given in (("stats_fn", (self, batch)), ("extra_learn_fetches_fn", (self,))):
            if hook in self.hooks:
                told |= _numbers(hook, self.hooks[hook](*given))
        return {name: torch.as_tensor(value) for name, value in told.items()}

    def compute_gradients(self, batch: SampleBatch) -> tuple[Any, dict[str, float]]:
        if "compute_gradients_fn" not in self.hooks:
            return super().compute_gradients(batch)
        made = self.hooks["compute_gradients_fn"](self, self.learner.prepare_batch(batch))
        gradients, stats = _parts("compute_gradients_fn", made, "gradients, statistics")
        return gradients, _numbers("compute_gradients_fn", stats)

    def apply_gradients(self, gradients: Any) -> None:
        if "apply_gradients_fn" not in self.hooks:
            super().apply_gradients(gradients)
            return
        self.hooks["apply_gradients_fn"](self, gradients)
        self.version += 1

    def learn_on_batch(self, batch: SampleBatch) -> dict[str, float]:
        if not {"compute_gradients_fn", "apply_gradients_fn"} & set(self.hooks):
            return super().learn_on_batch(batch)
        return self.learner.skip_nonfinite(self._learn_by_hooks, batch)

    def _learn_by_hooks(self, batch: SampleBatch) -> dict[str, float]:
        gradients, stats = self.compute_gradients(batch)
        self.apply_gradients(gradients)
        return stats


def _parts(hook: str, made: Any, names: str) -> Any:
    """A tuple that a hook gave."""
    if not isinstance(made, (tuple, list)) or len(made) != len(names.split(", ")):
        raise ConfigError(f"{hook} gives ({names}), it gave {made!r}")
    return made


def _numbers(hook: str, made: Any) -> dict[str, float]:
    try:
        return {name: float(value) for name, value in made.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{hook} gives a dict of numbers, it gave {made!r}") from error


def _array(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _array(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_array, value))
    return value.cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
