"""The engine: lazy streams, and the stages that move items of any type through them.

- `local.py`, `parallel.py`: LocalIterator and ParallelIterator, which users chain.
- `stage.py`: the base class of all stages. `stages/`: the stages.
- `gather.py`, `gather_sync.py`, `gather_async.py`: the stages that read shards.
- `shards.py`, `pools.py`: shards and their workers. `shard_server.py`, `shard_stream.py`: the code
  that runs where the workers are.
- `errors.py`, `recovery.py`: exceptions in operators, shards that die or hang.
- `waiting.py`: the place where a plan waits. `private_api.py`: private interfaces of Python, Ray.
- `metrics.py`, `profiler.py`, `explain.py`: counters and timers, time per stage, plan displays.
- `journal.py`: records decisions that depend on time, and repeats them.
- `in_process.py`: objects in this process that are used like actors.
- `readonly.py`: copies of an item for several readers. `ray_runtime.py`: start and leave Ray.
  `ray_health.py`: find out that Ray does not respond.
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
from flowrl.iter.ray_health import RayLostError
from flowrl.iter.recovery import Recovery
from flowrl.iter.shard_server import ParallelIteratorWorker
from flowrl.iter.stage import NOT_READY, Stage
from flowrl.source import Source

__all__ = [
    "NOT_READY",
    "LocalIterator",
    "MetricsContext",
    "ParallelIterator",
    "ParallelIteratorWorker",
    "RayLostError",
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
