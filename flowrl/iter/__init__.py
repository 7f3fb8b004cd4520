"""The engine: lazy streams and the stages that move items through them. Knows no RL.

`stage.py` what a stage is, and the one-branch stages · `branches.py` union and duplicate ·
`gather.py` from parallel shards to one stream · `local.py`, `parallel.py` the iterators that users
chain · `metrics.py` the shared context · `waiting.py` where a plan waits · `explain.py` its
picture.
"""

from flowrl.iter.local import LocalIterator
from flowrl.iter.metrics import MetricsContext, Timer, metrics_scope
from flowrl.iter.metrics import get_metrics as _get_shared_metrics
from flowrl.iter.parallel import (
    ParallelIterator,
    ParallelIteratorWorker,
    from_actors,
    from_items,
    from_iterators,
    from_range,
)
from flowrl.iter.stage import NOT_READY, Source, Stage

__all__ = [
    "NOT_READY",
    "LocalIterator",
    "MetricsContext",
    "ParallelIterator",
    "ParallelIteratorWorker",
    "Source",
    "Stage",
    "Timer",
    "_get_shared_metrics",
    "from_actors",
    "from_items",
    "from_iterators",
    "from_range",
    "metrics_scope",
]
