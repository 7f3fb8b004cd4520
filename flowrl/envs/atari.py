"""Atari games of the Arcade Learning Environment, preprocessed as in the literature.

The steps are those of Machado et al. 2018 ("Revisiting the Arcade Learning Environment"), and of
Mnih et al. 2015 for lost lives. gymnasium's AtariPreprocessing makes the frames.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import gymnasium as gym
from gymnasium.wrappers import AtariPreprocessing

from flowrl.errors import ConfigError, check_installed
from flowrl.settings import Count, Fraction, NonNegativeInt, Settings

FIRE = 1  # index of the action in the action sets that have it
_IDS = re.compile(r"ALE/|\w+(NoFrameskip|Deterministic)-v\d")
_OLD_IDS = re.compile(r"[A-Z]\w+-v[04]$")  # Breakout-v4, but also ids of other packages


class AtariSettings(Settings):
    """The preprocessing of Atari games."""

    frame_skip: Count = 4
    """Frames per env step; the action is repeated, the rewards are added, and the observation is
    the maximum of the last two frames."""
    noop_max: NonNegativeInt = 30
    """An episode starts with up to this number of frames without an action, chosen at random; with
    none in games in which there is always an action (Backgammon)."""
    fire_on_reset: bool = True
    """Press FIRE at the start of an episode and after a lost life, in games that have it."""
    screen_size: Count = 84
    """Width and height of the observation in pixels."""
    grayscale: bool = True
    """Observe brightness [screen_size, screen_size, 1] instead of colors [..., 3]."""
    frame_stack: Count = 4
    """Latest observations that the network sees; sets `model.num_framestacks` if that is 1. A
    `custom_model` sees one observation."""
    terminal_on_life_loss: bool = True
    """Learn as if an episode terminated where a life is lost; the episode itself and its return
    continue. Evaluations are not affected."""
    repeat_action_probability: Fraction | None = None
    """Probability of repeating the previous action in a frame ("sticky actions"); None uses that of
    the environment's id, 0.25 for ALE/*-v5."""
    full_action_space: bool = False
    """Offer all 18 actions in every game."""

    @classmethod
    def hint(cls, name: str, known: list[str] | None = None) -> str:
        if "clip" in name:
            return " Rewards are clipped by the algorithm's setting `clip_rewards`."
        return super().hint(name, known)


def is_atari(env: Any) -> bool:
    """Return whether this is the id of an Atari game. Registers the games of ale-py first if it is
    an old id, such as Breakout-v4."""
    if not isinstance(env, str):
        return False
    if has_old_form(env) and env not in gym.registry:
        with suppress(ConfigError):  # ale-py is not installed
            register_atari(env)
    module, _, name = env.rpartition(":")  # "module:id" imports the module first
    spec = gym.registry.get(name)
    if spec is not None:
        return str(spec.entry_point).startswith("ale_py")
    return module in ("", "ale_py") and _IDS.match(name) is not None


def has_old_form(env_id: str) -> bool:
    """Return whether an id may be the old one of a game, such as Breakout-v4."""
    return _OLD_IDS.match(env_id) is not None


def is_unprocessed(env: Any) -> bool:
    """Return whether an environment is an Atari game without any preprocessing of its frames."""
    shape = getattr(getattr(env, "observation_space", None), "shape", None)
    return shape == (210, 160, 3) and type(env.unwrapped).__module__.startswith("ale_py")


def register_atari(env_id: str) -> None:
    """Register the games of ale-py with gymnasium, if this one is not registered.

    Raises:
        ConfigError: the extra `atari` is not installed.
    """
    feature = f"env: the Atari environment {env_id!r}"
    check_installed("ale_py", feature, extra="atari")
    check_installed("cv2", feature, extra="atari")  # gymnasium's preprocessing needs OpenCV
    import ale_py

    if env_id not in gym.registry:
        gym.register_envs(ale_py)


def make_atari(env_id: str, settings: AtariSettings | None = None, **kwargs: Any) -> gym.Env:
    """Create a preprocessed game, as training does for `env=env_id`.

    Args:
        env_id: its id in gymnasium's registry.
        settings: the preprocessing; None for the defaults.
        kwargs: arguments of the environment.

    Returns:
        an environment with observations uint8 [screen_size, screen_size, 1 or 3] and infos with
        `lives`.

    Raises:
        ConfigError: an argument is a setting of `atari`, or the extra `atari` is not installed.
    """
    register_atari(env_id)
    settings = settings or AtariSettings()
    check_env_config(kwargs, {"frameskip", "repeat_action_probability", "full_action_space"})
    if "obs_type" in kwargs:
        raise ConfigError(
            "env_config: 'obs_type' is for games without preprocessing: set atari=None"
        )
    kwargs |= {"frameskip": 1, "full_action_space": settings.full_action_space}
    if settings.repeat_action_probability is not None:
        kwargs["repeat_action_probability"] = settings.repeat_action_probability
    game: Any = gym.make(env_id, disable_env_checker=True, **kwargs)
    actions = game.unwrapped.get_action_meanings()
    env: gym.Env = AtariPreprocessing(
        game,
        noop_max=settings.noop_max if actions[0] == "NOOP" else 0,
        frame_skip=settings.frame_skip,
        screen_size=settings.screen_size,
        grayscale_obs=settings.grayscale,
        grayscale_newaxis=True,
    )
    has_fire = actions[FIRE:][:1] == ["FIRE"]
    return FireAfterReset(env) if settings.fire_on_reset and has_fire else env


def check_env_config(env_config: Mapping[str, Any], arguments: Collection[str]) -> None:
    """Raise ConfigError if `env_config` has one of the arguments that the preprocessing sets."""
    own = set(arguments) & set(env_config)
    if own:
        raise ConfigError(
            f"env_config: {min(own)!r} is set by the preprocessing of Atari games: use the setting "
            "`atari`, or atari=None to leave the preprocessing out"
        )


def for_vector_entry_point(settings: AtariSettings) -> dict[str, Any]:
    """Return the arguments with which ale-py's vector environment preprocesses in the same way.

    It presses FIRE at the start of an episode only, and its observations are
    [1, screen_size, screen_size].

    Raises:
        ConfigError: it cannot do this.
    """
    if not settings.grayscale:
        raise ConfigError('atari.grayscale=False needs vectorization_mode="flowrl" or "envpool"')
    arguments: dict[str, Any] = {
        "frameskip": settings.frame_skip,
        "noop_max": settings.noop_max,
        "use_fire_reset": settings.fire_on_reset,
        "img_height": settings.screen_size,
        "img_width": settings.screen_size,
        "full_action_space": settings.full_action_space,
        "stack_num": 1,
        "reward_clipping": False,
    }
    if settings.repeat_action_probability is not None:
        arguments["repeat_action_probability"] = settings.repeat_action_probability
    return arguments


def for_envpool(env_id: str, settings: AtariSettings) -> dict[str, Any]:
    """Return the arguments with which EnvPool preprocesses in the same way.

    It presses FIRE at the start of an episode only, for one frame, so that the starts of games
    differ; its observations are [1 or 3, screen_size, screen_size].
    """
    probability = settings.repeat_action_probability
    if probability is None:
        probability = gym.spec(env_id).kwargs["repeat_action_probability"]
    return {
        "frame_skip": settings.frame_skip,
        "noop_max": max(settings.noop_max, 1),  # its least number
        "use_fire_reset": settings.fire_on_reset,
        "img_height": settings.screen_size,
        "img_width": settings.screen_size,
        "gray_scale": settings.grayscale,
        "full_action_space": settings.full_action_space,
        "repeat_action_probability": probability,
        "stack_num": 1,
        "reward_clip": False,
        "episodic_life": False,
    }


class FireAfterReset(gym.Wrapper):
    """Press FIRE at the start of an episode and after each lost life; some games wait for it."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self._lives = 0

    def reset(self, **kwargs: Any) -> Any:
        observation, info = self.env.reset(**kwargs)
        self._lives = info.get("lives", 0)
        observation, _, terminated, truncated, info = self.env.step(FIRE)
        return self.env.reset() if terminated or truncated else (observation, info)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(action)
        lives = info.get("lives", 0)
        if lives < self._lives and not (terminated or truncated):
            observation, more, terminated, truncated, info = self.env.step(FIRE)
            reward = float(reward) + float(more)
            info = {**info, "lives": min(lives, info.get("lives", 0))}
        self._lives = lives
        return observation, reward, terminated, truncated, info
