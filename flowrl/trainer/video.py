"""Record evaluation episodes as mp4 videos (extra `video`)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.error import DependencyNotInstalled

from flowrl.envs.pettingzoo import wrap_pettingzoo
from flowrl.envs.registry import (
    EnvContext,
    EnvCreator,
    env_creator_for,
    env_id_of,
)
from flowrl.envs.validation import env_name
from flowrl.errors import ConfigError, check_installed, install_hint
from flowrl.setting_values import expanded_path

log = logging.getLogger("flowrl")

DEFAULT_FPS = 30  # frames per second, if the environment's metadata has no `render_fps`


def check_video(setting: str, mode: str = "flowrl") -> None:
    """Check that videos can be recorded.

    Args:
        setting: setting that requests the video, for the error message.
        mode: `vectorization_mode` of the environments.

    Raises:
        ConfigError: the extra is not installed, or the environments are EnvPool's.
    """
    if mode == "envpool":
        raise ConfigError(
            f"{setting}: EnvPool renders nothing; set "
            'evaluation_config={"vectorization_mode": "flowrl"}'
        )
    check_installed("imageio_ffmpeg", setting, extra="video")


class VideoRecorder:
    """Record the first episodes of one environment as folder/<name>-<episode>.mp4.

    The creator of the environment gets render_mode="rgb_array", if it accepts that. `render()` must
    return RGB arrays [height, width, 3] of uint8; if it returns no such frame after a reset, that
    is a ConfigError. If rendering fails later in an episode, recording stops with a warning and the
    episode continues.

    Args:
        folder: created if it does not exist.
        name: file name without the episode number.
        episodes: number of episodes to record.
        setting: setting that requests the video, for error messages.

    Raises:
        ConfigError: the extra is not installed, or the folder cannot be created.
    """

    def __init__(self, folder: Path | str, name: str, episodes: int, setting: str):
        check_video(setting)
        self._setting = setting
        self._folder, self._name, self.episodes = expanded_path(folder), name, episodes
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{setting}: cannot create the folder {folder}: {error}") from error
        self._writer: Generator[None, Any, None] | None = None
        self._frame_shape: tuple[int, ...] = ()
        self._path = Path()
        self._num_started = 0
        self._env: Any = None

    def creator(self, env: Any) -> EnvCreator:
        """Return a creator of the same environments as `env`; it records the first one."""
        return partial(self._create, env_creator_for(env))

    def _create(self, creator: EnvCreator, context: EnvContext) -> Any:
        if context.vector_index:
            return creator(context)
        self.close()
        env = self._env = _create_rendering(creator, context, self._setting)
        reset, step = env.reset, env.step

        def recorded_reset(**kwargs: Any) -> Any:
            result = reset(**kwargs)
            self._start_episode(env)
            return result

        def recorded_step(action: Any) -> Any:
            result = step(action)
            if self._writer is not None:
                self._stop_on_error(partial(self._add_frame, env))
            return result

        env.reset, env.step = recorded_reset, recorded_step
        return env

    def _start_episode(self, env: Any) -> None:
        self._stop_on_error(self._finish_file)
        if self._num_started < self.episodes:
            render_frame(env, self._setting)  # no frame at all is an error
            self._stop_on_error(partial(self._open_file, env))

    def _open_file(self, env: Any) -> None:
        import imageio_ffmpeg

        self._path = self._folder / f"{self._name}-{self._num_started}.mp4"
        frame = render_frame(env, self._setting)
        self._num_started += 1
        self._frame_shape = frame.shape
        fps = float((getattr(env, "metadata", None) or {}).get("render_fps", DEFAULT_FPS))
        self._writer = imageio_ffmpeg.write_frames(
            str(_temporary(self._path)), frame.shape[1::-1], fps=fps, macro_block_size=2,
            ffmpeg_log_level="error",
        )  # fmt: skip
        self._writer.send(None)
        self._writer.send(frame)

    def _add_frame(self, env: Any) -> None:
        frame = render_frame(env, self._setting)
        if frame.shape != self._frame_shape:
            raise ValueError(f"the frame size changed from {self._frame_shape} to {frame.shape}")
        assert self._writer is not None
        self._writer.send(frame)

    def _stop_on_error(self, record: Callable[[], None]) -> None:
        """Record; on an error stop recording, not the evaluation."""
        try:
            record()
        except Exception as error:
            log.warning("video: recording of %s stopped: %r", self._path.name, error)
            with suppress(Exception):  # such as a full disk: there is no file
                self._finish_file()
            _temporary(self._path).unlink(missing_ok=True)
            self._num_started = self.episodes

    def _finish_file(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
            os.replace(_temporary(self._path), self._path)

    def close(self) -> None:
        """Complete the current file and restore the environment's methods."""
        self._stop_on_error(self._finish_file)
        env, self._env = self._env, None
        if env is not None:
            for name in ("reset", "step"):
                vars(env).pop(name, None)


def _temporary(path: Path) -> Path:
    """Return the path of a file that is being written."""
    return path.with_name(f".{os.getpid()}-{path.name}")


def render_frame(env: Any, setting: str) -> np.ndarray:
    """Return the frame that an environment renders, [height, width, 3] uint8.

    Args:
        env: the environment, after a reset.
        setting: setting that requests the frame, for the error message.

    Raises:
        ConfigError: `render()` is missing, raises, or returns something else.
    """
    cause = None
    try:
        frame = env.render()
    except Exception as error:
        cause, problem = error, f"raised {error!r}"
    else:
        if isinstance(frame, np.ndarray):
            if frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] == 3:
                return np.ascontiguousarray(frame)
            returned = f"an array {list(frame.shape)} of {frame.dtype}"
        else:
            returned = "nothing" if frame is None else f"a {type(frame).__name__}"
        problem = f"returns {returned}, not an array [height, width, 3] of uint8"
    mode = getattr(env, "render_mode", None)
    remedy = (
        'Create it with render_mode="rgb_array", for example by evaluation_config={"env_config": '
        '{"render_mode": "rgb_array"}}, or do not record videos'
    )
    if isinstance(cause, (ImportError, DependencyNotInstalled)):
        remedy = install_hint(setting, "video")
    raise ConfigError(
        f"{setting}: the environment {env_name(env)} cannot be recorded: its render() {problem} "
        f"(its render_mode is {mode!r}). {remedy}"
    ) from cause


def _create_rendering(creator: EnvCreator, context: EnvContext, setting: str) -> Any:
    """Return an environment. Its creator gets render_mode="rgb_array"; if that fails, and the
    environment has no id, it is created without.

    Raises:
        ConfigError: its creation failed, or it is created by its id and has no such argument.
    """
    if "render_mode" in context:
        return wrap_pettingzoo(creator(context))
    context["render_mode"] = "rgb_array"
    try:
        return wrap_pettingzoo(creator(context))
    except Exception as error:
        env_id = env_id_of(creator)
        if env_id is not None and isinstance(error, ConfigError) and "render_mode" in str(error):
            raise ConfigError(
                f"{setting}: the environment {env_id} cannot be recorded: it has no argument "
                "render_mode"
            ) from error
        if env_id is not None:
            raise
    del context["render_mode"]
    return wrap_pettingzoo(creator(context))


def check_rendering(env: Any, context: EnvContext, setting: str) -> None:
    """Create an environment, reset it and render one frame.

    Raises:
        ConfigError: it does not render RGB arrays.
    """
    created = _create_rendering(env_creator_for(env), context, setting)
    try:
        created.reset()
        render_frame(created, setting)
    finally:
        created.close()
