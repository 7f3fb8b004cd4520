"""Devices of networks."""

from __future__ import annotations

import logging
from typing import TypeVar

import torch

from flowrl.policies.config import PolicyConfig

log = logging.getLogger("flowrl")

C = TypeVar("C", bound=PolicyConfig)


def missing_reason(device: str) -> str | None:
    """Return why a device such as "cuda:1" cannot be used; None if it can, or is "auto"."""
    if device == "auto":
        return None
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0].partition(". ")[0]  # torch may add a table
    return None


def on_available_device(config: C) -> C:
    """Return the settings; with `device="cpu"`, and a warning, if this machine lacks their device.

    For policies that act on another machine than the one that trained them.
    """
    if missing_reason(config.device) is None:
        return config
    log.warning("device: %r is not available, so the CPU is used", config.device)
    return config.updated(device="cpu")
