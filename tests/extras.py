"""Skip the tests of features whose extra is not installed."""

from importlib.util import find_spec

import pytest

from flowrl.errors import install_hint

MODULES = {
    "atari": ["ale_py", "cv2"],
    "box2d": ["Box2D", "pygame"],
    "envpool": ["envpool"],
    "marl": ["mpe2", "pettingzoo", "pygame"],
    "minari": ["minari", "pyarrow", "h5py"],
    "minatar": ["minatar"],
    "minigrid": ["minigrid"],
    "mlflow": ["mlflow", "sqlalchemy"],
    "mujoco": ["mujoco"],
    "offline": ["pyarrow"],
    "onnx": ["onnxscript", "onnxruntime"],
    "optuna": ["optuna"],
    "plot": ["matplotlib"],
    "tensorboard": ["tensorboard"],
    "tune": ["pandas", "pyarrow"],  # ray.tune imports both
    "video": ["imageio_ffmpeg", "pygame"],
    "wandb": ["wandb"],
    "web": ["starlette", "uvicorn"],
}
"""Extra of a feature -> modules that its tests need."""


def require_extra(extra: str) -> None:
    """Skip the test unless an extra is installed.

    Called by a test or a fixture, or at the top of a test module to skip all of its tests.
    """
    if any(find_spec(module) is None for module in MODULES[extra]):
        pytest.skip(install_hint("this test", extra), allow_module_level=True)
