"""Where experience is made: environments, collectors, rollout workers."""

from flowrl.sampling.collector import EpisodeMetrics
from flowrl.sampling.envs import EnvContext, register_env
from flowrl.sampling.rollout_worker import RolloutWorker
from flowrl.sampling.worker_set import WorkerSet

__all__ = ["EnvContext", "EpisodeMetrics", "RolloutWorker", "WorkerSet", "register_env"]
