"""Videos of evaluations: what an environment renders, an mp4 file per episode (extra `video`)."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.envs.registry import EnvContext, EnvCreator, env_creator_for, env_id_of
from flowrl.settings import ConfigError

log = logging.getLogger("flowrl")

FRAMES_PER_S = 30  # where an environment does not say its own


def check_video(what: str, mode: str = "flowrl") -> None:
    """Refuse what cannot be recorded.

    Args:
        what: the setting that asks for a video.
        mode: how environments are vectorised.

    Raises:
        ConfigError: the extra is missing, or environments are EnvPool's.
    """
    if mode == "envpool":
        raise ConfigError(
            f'{what}: EnvPool renders nothing: evaluation_config={{"vectorization_mode": "flowrl"}}'
        )
    if find_spec("imageio_ffmpeg") is None:
        raise ConfigError(f'{what} needs an encoder of videos: pip install "flowrl[video]"')


class Recording:
    """Writes the first episodes of one environment as folder/<name>-<episode>.mp4.

    An environment that is made by its id is told to render into arrays; one of another kind has to
    render RGB arrays [height, width, 3] of bytes by itself. One whose rendering fails later is
    played on without a video.

    Args:
        folder: made if it is not there.
        name: of the files, without their numbers.
        episodes: how many are recorded.

    Attributes:
        files: those that are whole.

    Raises:
        ConfigError: the extra is missing, or the folder cannot be made.
    """

    def __init__(self, folder: Path | str, name: str, episodes: int = 1):
        check_video("a video")
        self._folder, self._name, self.episodes = Path(folder), name, episodes
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"video: cannot make the folder {folder}: {error}") from error
        self._writer: Generator[None, Any, None] | None = None
        self._shape: tuple[int, ...] = ()
        self._path = Path()
        self._begun = 0
        self._env: Any = None
        self.files: list[Path] = []

    def creator(self, env: Any) -> EnvCreator:
        """Makes the same environments as `env`, the first of which is recorded."""
        return partial(self._make, env_creator_for(env))

    def _make(self, creator: EnvCreator, context: EnvContext) -> Any:
        if context.vector_index:
            return creator(context)
        if env_id_of(creator) is not None:
            context.setdefault("render_mode", "rgb_array")
        self.close()
        env = self._env = creator(context)
        reset, step = env.reset, env.step

        def recorded_reset(**how: Any) -> Any:
            began = reset(**how)
            self._begin(env)
            return began

        def recorded_step(action: Any) -> Any:
            given = step(action)
            if self._writer is not None:
                self._guarded(self._add, env)
            return given

        env.reset, env.step = recorded_reset, recorded_step
        return env

    def _begin(self, env: Any) -> None:
        self._end()
        if self._begun < self.episodes:
            frame_of(env)  # what it gives at all is looked at outside of the guard
            self._guarded(self._open, env)

    def _open(self, env: Any) -> None:
        import imageio_ffmpeg

        frame = frame_of(env)
        self._path = self._folder / f"{self._name}-{self._begun}.mp4"
        self._begun += 1
        self._shape = frame.shape
        rate = float((getattr(env, "metadata", None) or {}).get("render_fps", FRAMES_PER_S))
        self._writer = imageio_ffmpeg.write_frames(
            str(_part(self._path)), frame.shape[1::-1], fps=rate, macro_block_size=2,
            ffmpeg_log_level="error",
        )  # fmt: skip
        self._writer.send(None)
        self._writer.send(frame)

    def _add(self, env: Any) -> None:
        frame = frame_of(env)
        if frame.shape != self._shape:
            raise ValueError(f"a frame {frame.shape} after one of {self._shape}")
        assert self._writer is not None
        self._writer.send(frame)

    def _guarded(self, record: Any, env: Any) -> None:
        try:
            record(env)
        except Exception as error:  # the evaluation is worth more than its video
            log.warning("video: %s was not recorded further: %r", self._path.name, error)
            self._end()
            self._begun = self.episodes

    def _end(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
            os.replace(_part(self._path), self._path)
            self.files.append(self._path)

    def close(self) -> None:
        """End the file that is being written; the environment is as it was."""
        self._end()
        env, self._env = self._env, None
        for name in ("reset", "step"):
            vars(env or self).pop(name, None)


def _part(path: Path) -> Path:
    """Where a file is until it is whole."""
    return path.with_name(f".{path.name}")


def frame_of(env: Any) -> np.ndarray:
    """What an environment renders now, [height, width, 3] of bytes.

    Raises:
        ConfigError: it renders something else, or nothing.
    """
    frame = env.render() if hasattr(env, "render") else None
    if isinstance(frame, np.ndarray):
        if frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] == 3:
            return np.ascontiguousarray(frame)
        got = f"an array {list(frame.shape)} of {frame.dtype}"
    else:
        got = "nothing" if frame is None else f"a {type(frame).__name__}"
    raise ConfigError(
        f"video: {type(env).__name__}.render() gives {got}, an array [height, width, 3] of bytes "
        'is needed: make it with render_mode="rgb_array", for instance by evaluation_config='
        '{"env_config": {"render_mode": "rgb_array"}}'
    )


def check_renders(env: Any, context: EnvContext) -> None:
    """Make an environment, reset it and render it once.

    Raises:
        ConfigError: it cannot be recorded.
    """
    creator = env_creator_for(env)
    if env_id_of(creator) is not None:
        context.setdefault("render_mode", "rgb_array")
    made = creator(context)
    try:
        made.reset()
        frame_of(made)
    finally:
        made.close()
