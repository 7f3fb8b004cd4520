"""Videos of evaluations: what an environment renders, an mp4 file per episode (extra `video`)."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.policies.config import ConfigError
from flowrl.sampling.envs import EnvContext, EnvCreator, env_creator_for, env_id_of

FRAMES_PER_S = 30  # where an environment does not say its own


def check_installed(what: str) -> None:
    """Refuse to record without the encoder.

    Args:
        what: the setting that asks for a video.

    Raises:
        ConfigError: the extra is missing.
    """
    if find_spec("imageio_ffmpeg") is None:
        raise ConfigError(f'{what} needs an encoder of videos: pip install "flowrl[video]"')


class Recording:
    """Writes the first episodes of one environment as folder/<name>-<episode>.mp4.

    An environment that is made by its id is told to render into arrays; one of another kind has to
    render RGB arrays [height, width, 3] of bytes by itself.

    Args:
        folder: made if it is not there.
        name: of the files, without their numbers.
        episodes: how many are recorded.

    Raises:
        ConfigError: the extra is missing, or the folder cannot be made.
    """

    def __init__(self, folder: Path | str, name: str, episodes: int = 1):
        check_installed("a video")
        self._folder, self._name, self._episodes = Path(folder), name, episodes
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"video: cannot make the folder {folder}: {error}") from error
        self._file: Generator[None, Any, None] | None = None
        self.files: list[Path] = []

    def creator(self, env: Any) -> EnvCreator:
        """Makes the same environments as `env`, the first of which is recorded."""
        return partial(self._make, env_creator_for(env))

    def _make(self, creator: EnvCreator, context: EnvContext) -> Any:
        if context.vector_index:
            return creator(context)
        if env_id_of(creator) is not None:
            context.setdefault("render_mode", "rgb_array")
        env = creator(context)
        reset, step = env.reset, env.step

        def recorded_reset(**how: Any) -> Any:
            began = reset(**how)
            self._begin(env)
            return began

        def recorded_step(action: Any) -> Any:
            given = step(action)
            self._add(env)
            return given

        env.reset, env.step = recorded_reset, recorded_step
        return env

    def _begin(self, env: Any) -> None:
        self.close()
        if len(self.files) == self._episodes:
            return
        frame = frame_of(env)
        import imageio_ffmpeg

        path = self._folder / f"{self._name}-{len(self.files)}.mp4"
        self.files.append(path)
        height, width, _ = frame.shape
        rate = (getattr(env, "metadata", None) or {}).get("render_fps", FRAMES_PER_S)
        self._file = imageio_ffmpeg.write_frames(
            str(path), (width, height), fps=rate, macro_block_size=2, ffmpeg_log_level="error"
        )
        self._file.send(None)
        self._file.send(frame)

    def _add(self, env: Any) -> None:
        if self._file is not None:
            self._file.send(frame_of(env))

    def close(self) -> None:
        """End the file that is being written."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


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
