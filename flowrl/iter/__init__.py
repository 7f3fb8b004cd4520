"""The engine: lazy streams and the stages that move items through them. Knows no RL.

`stage.py` what a stage is · `source.py`, `linear.py`, `buffers.py`, `concurrent.py`, `branches.py`,
`gather.py` the stages · `shards.py` who serves the shards, `serving.py` what a shard does,
`recovery.py` when one dies · `local.py`, `parallel.py` the iterators that users chain · `errors.py`
what happens when an operator raises · `waiting.py` where a plan waits · `metrics.py` the shared
context · `clock.py` where the time goes · `explain.py` the plan's picture · `isolate.py` one item
for several readers.
"""

from flowrl.iter.errors import Retry, ShardFailedError, Skip
from flowrl.iter.local import LocalIterator
from flowrl.iter.metrics import MetricsContext, Timer, metrics_scope
from flowrl.iter.metrics import get_metrics as _get_shared_metrics
from flowrl.iter.parallel import (
    ParallelIterator,
    from_actors,
    from_items,
    from_iterators,
    from_range,
)
from flowrl.iter.recovery import Recovery
from flowrl.iter.shard_server import ParallelIteratorWorker
from flowrl.iter.stage import NOT_READY, Source, Stage

__all__ = [
    "NOT_READY",
    "LocalIterator",
    "MetricsContext",
    "ParallelIterator",
    "ParallelIteratorWorker",
    "Recovery",
    "Retry",
    "ShardFailedError",
    "Skip",
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
