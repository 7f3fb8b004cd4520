"""Hints for methods and arguments of other libraries, such as Stable-Baselines3.

Their names for settings are in flowrl.setting_aliases.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Never, ParamSpec, TypeVar

from flowrl.errors import ConfigError
from flowrl.policies.schedules import schedules_in
from flowrl.setting_aliases import SETTING_ALIASES, renamed_setting, setting_hint
from flowrl.setting_values import nearest, nearest_name
from flowrl.settings import Settings

P = ParamSpec("P")
T = TypeVar("T")

# attribute of an algorithm in another library -> what to use instead
_ATTRIBUTES = {
    "load": "use {cls}.from_checkpoint(path)",
    "set_env": "use {cls}.from_checkpoint(path, env=…)",
    "get_env": "workers create the environments of the setting env, algorithm.config.env",
    "env": "it is the setting algorithm.config.env",
    "policy": "use get_policy()",
    "model": "the network is get_policy().model, its settings are algorithm.config.model",
    "get_module": "use get_policy(policy_id)",
    "observation_space": "use get_policy().observation_space",
    "action_space": "use get_policy().action_space",
    "device": "use get_policy().device",
    "close": "use stop()",
    "export": "use get_policy().export(path)",
    "export_policy_checkpoint": "use save(path)",
    "export_policy_model": "use get_policy().export(path)",
    "get_weights": "use get_policy().get_weights()",
    "get_parameters": "use get_policy().get_weights()",
    "set_parameters": "use get_policy().set_weights(weights)",
    "collect_rollouts": "train() samples and learns; the operators of the plan are separate",
    "compute_action": "use compute_single_action(observation)",
    "compute_actions": "use predict(observations)",
    "evaluate_policy": "use evaluate(episodes=10)",
    "n_envs": "it is the setting algorithm.config.num_envs_per_worker",
    "set_random_seed": "set the seed when you build it, {cls}(env, seed=1)",
    "env_runner_group": "use workers, the WorkerSet",
    "learner_group": "use get_policy(policy_id).learner",
    "replay_buffer": "the plan creates it; save(path) stores it",
    "save_replay_buffer": "use save(path), which stores the replay buffer, too",
    "logger": "use learn(run_dir=…) and the settings log_to and log_config",
    "num_timesteps": "use env_steps",
    "timesteps_total": "use env_steps",
    "training_iteration": "use iteration",
    "fit": "use learn(total_timesteps)",
    "reset": "build a new one, {cls}(env, seed=1)",
    "set_logger": "use learn(run_dir=…) and the settings log_to and log_config",
    "run": "use learn(total_timesteps), or train() for one result",
    "save_model": "use save(path)",
    "save_checkpoint": "use save(path)",
    "save_to_path": "use save(path)",
    "load_checkpoint": "use restore(path)",
    "restore_from_path": "use restore(path)",
}
# method -> argument in another library -> what to use instead; the key "" is for too many
# positional arguments, and for arguments that resemble no other
_ARGUMENTS = {
    "__init__": {
        "": "It takes one: an environment, with settings as keywords, {cls}(env, gamma=0.99), or a "
        "config, {cls}({cls}Config(…))",
    },
    "train": {
        "": "Each call returns the next result; learn(100_000) trains for that many env steps",
        "total_timesteps": "Use learn(total_timesteps=…)",
    },
    "learn": {
        "": "The other arguments are keywords: learn(100_000, stop=…, run_dir=…, progress=…)",
        "callback": "Set a class of callbacks: .callbacks(MyCallbacks), a subclass of "
        "DefaultCallbacks, or the setting callbacks_class",
        "log_interval": "Each iteration has one result; the setting "
        "min_sample_timesteps_per_iteration sets its env steps",
        "progress_bar": "Use progress=True or False",
        "show_progress": "Use progress=True or False",
        "reset_num_timesteps": "Env steps continue to count; build a new algorithm to start at 0",
        "tb_log_name": "Use run_dir=…, the folder of the results",
        "eval_env": 'Use the settings evaluation_interval and evaluation_config={"env": …}',
        "eval_freq": "Use the setting evaluation_interval",
        "n_eval_episodes": "Use the setting evaluation_duration",
    },
    "evaluate": {
        "": "It takes episodes=…, explore=…, num_envs=…, timesteps=…, video_dir=… and seed=…",
        "n_eval_episodes": "Use episodes=…",
        "num_episodes": "Use episodes=…",
        "deterministic": "Use explore=…, the opposite",
        "env": 'Use the setting evaluation_config={"env": …}',
        "render": "Use video_dir=…",
    },
    "predict": {
        "": "Arguments after the state are keywords: predict(obs, state, deterministic=True); "
        "state=None starts an episode",
        "observation": "Use obs=…",
        "observations": "Use obs=…",
        "explore": "Use deterministic=…, the opposite",
        "episode_start": "Pass state=None at the start of an episode",
        "mask": "Pass state=None at the start of an episode",
    },
    "compute_single_action": {
        "": "It takes one observation, explore=… and policy_id=…",
        "obs": "Use observation=…",
        "deterministic": "Use explore=…, the opposite",
        "state": "Use predict(obs, state), or get_policy().session()",
    },
    "build": {
        "": "Its argument is a plan; settings are set before",
        "env": "Set it before: config.environment(env=…).build()",
    },
    "save": {
        "": "Further JSON values for the manifest are metadata={…}",
        "checkpoint_dir": "Use path=…",
    },
    "from_checkpoint": {
        "": "It takes path, config={…}, trust=… and env=…",
        "checkpoint": "Pass the path of the checkpoint, RUN/checkpoints/000003",
        "custom_objects": "Use config=…, the settings to change",
    },
}


def with_hints(method: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method: its TypeError for wrong arguments says what to use instead."""
    signature = inspect.signature(method)
    hints = _ARGUMENTS[method.__name__]
    own = [name for name in signature.parameters if name not in ("self", "cls")]

    @functools.wraps(method)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            unknown = [name for name in kwargs if name not in signature.parameters]
            # the constructor has **settings: keywords are never the problem
            name = unknown[0] if unknown and not _accepts_any_keyword(signature) else ""
            if not args:  # called on the class
                name = method.__name__
                raise TypeError(f"{name}(): call it on an object: algo.{name}(…)") from None
            owner: Any = args[0] if isinstance(args[0], type) else type(args[0])
            hint = "" if name in hints else nearest(name, own)
            hint = hint or f" {hints[name if name in hints else '']}."
            hint = hint.replace("{cls}", owner.__name__)
            if method.__name__ == "from_checkpoint" and _is_setting(owner.config_class, name):
                hint = f" Use config={{{name!r}: …}}."
            called = f"{owner.__name__}.{method.__name__}".removesuffix(".__init__")
            problem = f"it has no argument {name!r}" if name else str(error)
            if method.__name__ == "__init__":
                first = getattr(args[1], "__name__", args[1])
                if isinstance(first, str) and first.endswith("Policy"):
                    hint += setting_hint("policy", owner.config_class.model_fields) or ""
                hint += _setting_hints(owner.config_class, unknown)
            raise TypeError(f"{called}(): {problem}.{hint}") from None
        return method(*args, **kwargs)

    return checked


def _accepts_any_keyword(signature: inspect.Signature) -> bool:
    """Return whether a signature has `**kwargs`."""
    return any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())


def _is_setting(config_class: type[Settings], name: str) -> bool:
    return name in config_class.model_fields or name in SETTING_ALIASES


def _setting_hints(config_class: type[Settings], names: list[str]) -> str:
    """Return a sentence for each name that is not a setting, with a space before it."""
    unknown = [name for name in names if not _is_setting(config_class, name)]
    return "".join(f" Unknown setting {name!r}.{config_class.hint(name)}" for name in unknown)


class _Hint:
    """An attribute that raises AttributeError, which says what to use instead."""

    def __init__(self, name: str, hint: str):
        self.name, self.hint = name, hint

    def __get__(self, instance: object, owner: Any) -> Never:
        hint = self.hint.format(cls=owner.__name__)
        raise AttributeError(f"{owner.__name__} has no attribute {self.name!r}: {hint}")


def _is_defined(cls: type, name: str) -> bool:
    return any(name in vars(base) for base in cls.__mro__)


def _attribute_hint(name: str, own: list[str], settings: Collection[str]) -> str:
    """Return a sentence about an attribute that an algorithm does not have, with a space before
    it, or "".

    Args:
        name: the attribute.
        own: attributes that exist.
        settings: the algorithm's settings.
    """
    setting = name if name in settings else renamed_setting(name, settings)
    if setting is not None:
        return f" It is the setting algorithm.config.{setting}."
    hint = setting_hint(name, settings)
    if hint:
        return hint
    similar = nearest_name(name, [*own, *_ATTRIBUTES, *settings])
    if similar is None or similar in own:
        return nearest(name, own)
    if similar in settings:
        return f" Did you mean 'config.{similar}'?"
    return f" For {similar!r}, {_ATTRIBUTES[similar]}."


def _check_no_setting(cls: type, name: str, config: Settings) -> None:
    """Check that an attribute that is assigned to an algorithm is not a setting, which would have
    no effect.

    Classes outside flowrl may have attributes whose names only resemble settings.

    Raises:
        ConfigError: it is a setting, also under its name in another library.
    """
    setting = name if name in config else renamed_setting(name, config)
    if setting is None:
        is_own_class = not cls.__module__.startswith("flowrl.")
        hint = setting_hint(name, config)
        if hint and name not in _ATTRIBUTES and not is_own_class:
            raise ConfigError(f"{cls.__name__}.{name} cannot be assigned.{hint}")
        return
    schedules = [schedule for schedule, _ in schedules_in(config)]
    schedule = (
        f", give a schedule, {setting}=[[env step, value], …]" if setting in schedules else ""
    )
    raise ConfigError(
        f"{cls.__name__}.{name} cannot be assigned: it is the setting algorithm.config.{setting}, "
        f"and a built algorithm keeps its settings. Set it in {cls.__name__}(env, {setting}=…)"
        f"{schedule}, or continue with {cls.__name__}.from_checkpoint(path, "
        f"config={{{setting!r}: …}})"
    )


class OtherLibrariesNames:
    """Raise errors with a hint for attributes that an algorithm does not have: names of other
    libraries, misspelled names, and settings."""

    if not TYPE_CHECKING:  # type checkers report unknown attributes themselves

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or _is_defined(type(self), name):
                return object.__getattribute__(self, name)  # raises the error of a property
            own = [n for n in dir(self) if not n.startswith("_")]
            hint = _attribute_hint(name, own, vars(self).get("config", {}))
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.{hint}")

    def __setattr__(self, name: str, value: Any) -> None:
        config = vars(self).get("config")
        if config is not None:
            _check_no_setting(type(self), name, config)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in _ATTRIBUTES]


for _name, _hint in _ATTRIBUTES.items():
    setattr(OtherLibrariesNames, _name, _Hint(_name, _hint))
