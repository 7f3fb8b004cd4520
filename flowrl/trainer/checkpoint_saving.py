"""Contents of an algorithm's checkpoint: its manifest and its state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import gymnasium
import torch

import flowrl
from flowrl.data.checkpoint import DAMAGED, CheckpointError
from flowrl.iter import LocalIterator
from flowrl.iter.gather import Gather
from flowrl.iter.stage import walk
from flowrl.ops.plan_metrics import PlanMetrics
from flowrl.policies.checkpoint_loading import describe_policy
from flowrl.policies.code_references import code_path
from flowrl.policies.json_codec import config_to_json, space_from_json
from flowrl.policies.policy import Policy
from flowrl.sampling.worker_set import WorkerSet
from flowrl.sampling.worker_states import env_steps_in
from flowrl.trainer.config import AlgorithmConfig


def manifest_of(
    algorithm_class: type, config: AlgorithmConfig, policies: dict[str, Policy]
) -> dict[str, Any]:
    """Return versions, settings, algorithm and policies as JSON values.

    `left_out` lists the settings that are code without an import path.
    """
    settings, left_out = config_to_json(config)
    return {
        "flowrl": flowrl.__version__,
        "torch": torch.__version__,
        "gymnasium": gymnasium.__version__,
        "algorithm": f"{algorithm_class.__module__}:{algorithm_class.__qualname__}",
        "config": settings,
        "left_out": left_out,
        "plan": config.plan if isinstance(config.plan, str | None) else code_path(config.plan),
        "policies": {pid: describe_policy(policy) for pid, policy in policies.items()},
    }


FIXED_SETTINGS = ("num_workers", "num_envs_per_worker", "vectorization_mode")
"""Settings that a resumed run keeps, because each worker and environment continues from its own
state."""


def sampling_state_of(workers: WorkerSet, plan: LocalIterator[Any]) -> dict[str, Any]:
    """Return the states of the plan and of sampling, which belong together.

    `env_steps_lost` is the number of env steps that workers have sampled but that the plan has
    neither counted nor queued: fragments in flight, and fragments that an operator on the shards
    dropped. Resuming from the checkpoint counts them as sampled and dropped. It is 0 if no fragment
    can be in flight, because the local worker samples when it is called.
    """
    sampling = workers.state_dict()
    if not workers.num_workers and not workers.config.sample_async:
        return {"sampling": sampling, "plan": plan.state_dict(), "env_steps_lost": 0}
    # of workers without a state, only the counted steps are known
    without_state = {i for i, state in enumerate(sampling["remote"]) if state is None}
    queued = sum(
        source.tags.get("env_steps", 0)
        for stage in walk(plan.stage)
        if isinstance(stage, Gather)
        for source in stage.queued()
        if source.shard not in without_state
    )
    counted = plan.metrics.counters["num_env_steps_sampled"]
    lost = env_steps_in(sampling) - counted - queued
    return {"sampling": sampling, "plan": plan.state_dict(), "env_steps_lost": max(0, lost)}


def load_sampling_state(
    workers: WorkerSet, plan: LocalIterator[Any], state: dict[str, Any]
) -> None:
    """Load the states of `sampling_state_of` and of the local worker ("worker").

    Raises:
        KeyError, ValueError: they belong to other policies, workers or stages; the workers are
            unchanged. After other errors, such as that of a worker, the policies are unchanged.
    """
    lost = int(state["env_steps_lost"])
    PlanMetrics.of(plan.metrics)  # checks its state, before another one is loaded
    plan.load_state_dict(state["plan"])
    worker = workers.local_worker()
    names = ["num_env_steps_sampled", "num_env_steps_dropped"]
    if not worker.is_multi_agent:
        names.append("num_agent_steps_sampled")
    for name in names if lost else ():
        plan.metrics.counters[name] += lost
    before = worker.state_dict()
    worker.load_state_dict(state["worker"])
    try:
        workers.load_state_dict(state["sampling"])
    except BaseException:  # also an interrupt
        worker.load_state_dict(before)
        workers.weight_sync.invalidate()
        raise


class OtherSettingsError(CheckpointError):
    """The state in a checkpoint does not fit the plan, the settings or the spaces."""


@contextmanager
def loading_errors(
    path: Path | str,
    manifest: Mapping[str, Any],
    policies: Mapping[str, Policy],
    config: AlgorithmConfig | None = None,
) -> Iterator[None]:
    """Convert errors of loading a state to OtherSettingsError with the checkpoint's path.

    Args:
        path: the checkpoint.
        manifest: its manifest.
        policies: policy id -> policy that is loaded.
        config: settings of the algorithm, if the states of workers and environments are loaded.
    """
    try:
        yield
    except DAMAGED as error:
        problem = _differing_space(manifest, policies)
        if problem is None and config is not None:
            problem = _differing_sampling(manifest, config)
        problem = problem or _differing_class(manifest, policies)
        if problem is None:
            is_message = isinstance(error, ValueError)
            problem = str(error) if is_message else f"{type(error).__name__}: {error}"
        raise OtherSettingsError(f"{path}: does not fit these settings: {problem}") from error


def _differing_sampling(manifest: Mapping[str, Any], config: AlgorithmConfig) -> str | None:
    """Describe a number of workers or environments, or another way to step them, that is not the
    one of a manifest."""
    saved = manifest.get("config", {}).get("values", {})
    for name in FIXED_SETTINGS:
        if name in saved and saved[name] != config[name]:
            return (
                f"{name} is {config[name]}, in the checkpoint it is {saved[name]}, and each worker "
                f"and environment continues from its own state: keep {name}={saved[name]}, or load "
                "only the policies into a new algorithm: algorithm.restore_policies(path)"
            )
    return None


def _differing_space(manifest: Mapping[str, Any], policies: Mapping[str, Policy]) -> str | None:
    """Describe the first policy whose spaces are not those in a manifest; None if all are."""
    saved_policies = manifest.get("policies", {})
    for policy_id, policy in policies.items():
        for name in ("observation_space", "action_space"):
            with suppress(*DAMAGED):
                saved = space_from_json(saved_policies[policy_id][name])
                if saved != getattr(policy, name):
                    return (
                        f"policy {policy_id!r} has the {name} {getattr(policy, name)}, in the "
                        f"checkpoint it has {saved}"
                    )
    return None


def _differing_class(manifest: Mapping[str, Any], policies: Mapping[str, Policy]) -> str | None:
    """Describe the first policy whose class has another name than in a manifest; None if all have
    the same. Their modules may differ: that of a script is `__main__`."""
    saved_policies = manifest.get("policies", {})
    for policy_id, policy in policies.items():
        path, present = saved_policies.get(policy_id, {}).get("class"), type(policy)
        saved = path.rpartition(":")[2] if isinstance(path, str) else present.__qualname__
        if saved != present.__qualname__:
            return (
                f"policy {policy_id!r} is of the class {present.__name__}, in the checkpoint it is "
                f"of the class {saved}: copy the weights of equal networks with policy.set_weights("
                f"{saved}.from_checkpoint(path, policy_id={policy_id!r}).get_weights())"
            )
    return None
