"""Limit the threads of numerical libraries in this process."""

from __future__ import annotations

import sys
from typing import Any

from threadpoolctl import ThreadpoolController


def limit_threads(count: int | None) -> None:
    """Limit the threads of torch and of numpy's BLAS in this process; None changes nothing.

    Small networks lose more to synchronizing threads than they gain from them, and the workers of
    one machine share its cores. The limits stay in force until the next call. torch is limited
    only if it is imported already.
    """
    if count is None:
        return
    ThreadpoolController().limit(limits=count, user_api="blas")
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != count:
        torch.set_num_threads(count)
