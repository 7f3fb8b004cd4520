"""Type aliases for ids and tensors."""

from __future__ import annotations

from typing import Any

AgentID = Any  # chosen by the environment, usually a str or an int
EpisodeID = int
PolicyID = str
TensorType = Any  # a numpy array or a framework's tensor
