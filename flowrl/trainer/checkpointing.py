"""Checkpointing: the methods of Algorithm that save and restore its state."""

from __future__ import annotations

import json
import logging
import shlex
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Self

from flowrl.data.checkpoint import (
    CHECKPOINTS,
    RESERVED,
    CheckpointError,
    is_run_dir,
    read_checkpoint,
    read_manifest,
    resolve_checkpoint,
    write_checkpoint,
)
from flowrl.errors import ConfigError
from flowrl.iter.stage import walk
from flowrl.monitoring.monitor import Monitor
from flowrl.policies.policy import Policy
from flowrl.sampling.worker_set import WorkerSet
from flowrl.state_schema import Amount, Fields, Natural, check_state
from flowrl.trainer.checkpoint_loading import algorithm_from_checkpoint, needs_trust
from flowrl.trainer.checkpoint_saving import (
    load_sampling_state,
    loading_errors,
    manifest_of,
    sampling_state_of,
)
from flowrl.trainer.config import AlgorithmConfig
from flowrl.trainer.evaluator import Evaluator
from flowrl.trainer.loggers import ResultLoggers
from flowrl.trainer.operator_times import OperatorTimes
from flowrl.trainer.other_libraries import with_hints
from flowrl.trainer.plan_building import Plan, PlanBuilder

log = logging.getLogger("flowrl")


_STATE: Fields = {
    "sampling": dict[str, Any],
    "plan": dict[str, Any],
    "env_steps_lost": Natural,
    "worker": dict[str, Any],
    "global_vars": dict[str, Any],
    "iteration": Natural,
    "time_total_s": Amount,
    "loggers": dict[str, str],
}
_GLOBAL_VARS: Fields = {"timestep": Natural, "total_timesteps": Natural | None}


class OtherPlanError(CheckpointError):
    """The checkpoint was written by another plan."""


class Checkpointing:
    """The part of Algorithm that saves and restores its state; see Algorithm for the attributes."""

    config: AlgorithmConfig
    workers: WorkerSet
    iteration: int
    run_dir: Path | None
    policy_class: ClassVar[type[Policy] | None]
    _plan: Plan | None
    _monitor: Monitor | None
    _plan_builder: PlanBuilder
    _evaluator: Evaluator
    _loggers: ResultLoggers
    _time_total_s: float
    _save_s: float
    last_result: dict[str, Any] | None
    _operator_times: OperatorTimes
    _warned_about_left_out: bool

    @property
    def plan(self) -> Plan:
        """The execution plan."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint contains: policies and optimizers, the workers' episodes and
        random streams, the plan's counters and operators, and times."""
        with self.workers.local_worker().lock:  # pauses a learner thread
            self.workers.weight_sync.merge_filter_updates()
            return {
                **sampling_state_of(self.workers, self.plan),
                "worker": self.workers.local_worker().state_dict(),
                "global_vars": dict(self.workers.global_vars),
                "iteration": self.iteration,
                "time_total_s": self._time_total_s,
                "loggers": self._loggers.state_dict(),
            }

    def manifest(self) -> dict[str, Any]:
        """Return the manifest of a checkpoint, as JSON values: versions, settings, algorithm,
        policies and progress."""
        policies = self.workers.local_worker().policy_map
        manifest = manifest_of(type(self), self.config, policies)
        # loading executes the plan file again, which defines this code
        of_plan = [n for n in manifest["left_out"] if self._plan_builder.is_set_by_plan_file(n)]
        return manifest | {
            "left_out": [n for n in manifest["left_out"] if n not in of_plan],
            "settings_of_plan": of_plan,
            "plan_sha256": self._plan_builder.sha256,
            "training_iteration": self.iteration,
            "timesteps_total": self.plan.metrics.counters["num_env_steps_sampled"],
        }

    @with_hints
    def save(
        self, path: Path | str | None = None, *, metadata: Mapping[str, Any] | None = None
    ) -> Path | str:
        """Write a checkpoint and return its path; see `flowrl.data.checkpoint`.

        Settings that are objects, or code without an import path (such as a lambda), are left
        out; a warning names them.

        Args:
            path: a folder, or a URI that fsspec supports; None: a folder in the run directory, or
                a new temporary folder if there is none.
            metadata: additional JSON values for the manifest; its own names raise an error.

        Raises:
            ConfigError: the folder is a run directory, whose checkpoints have their own folder, or
                the manifest has a name of `metadata` already, or a value is not JSON.
            OSError: the checkpoint cannot be written; existing files are unchanged.
            RuntimeError: the algorithm was stopped.
        """
        started = time.perf_counter()
        in_run = None
        if path is None:
            in_run = self.run_dir and self.run_dir / CHECKPOINTS / f"{self.iteration:06d}"
            path = in_run or Path(tempfile.mkdtemp(prefix="flowrl-checkpoint-"))
        elif not str(path):
            raise ConfigError("save: the path is empty")
        elif is_run_dir(path):
            raise ConfigError(
                f"save: {path} is a run directory, whose checkpoints are in {CHECKPOINTS}/: call "
                "save() without a path to write one there, or name another folder"
            )
        manifest = self.manifest()
        metadata = dict(metadata or {})
        for name, value in metadata.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"save: metadata[{name!r}] is not JSON: {error}") from None
        if in_run:
            with suppress(CheckpointError):  # there is none at this iteration
                score = read_manifest(in_run).get("score")
                metadata = metadata if score is None else {"score": score, **metadata}
        if taken := sorted(metadata.keys() & (manifest.keys() | RESERVED)):
            raise ConfigError(
                f"save: metadata has names that the manifest uses: {taken}; rename them"
            )
        if manifest["left_out"] and not self._warned_about_left_out:
            log.warning(
                "the checkpoint does not contain the settings %s, because they are objects, or "
                "code without an import path: pass them again, from_checkpoint(path, config={…})",
                manifest["left_out"],
            )  # fmt: skip
            self._warned_about_left_out = True
        written = write_checkpoint(path, self.state_dict(), manifest | metadata)
        self._save_s += time.perf_counter() - started
        return written

    @classmethod
    @with_hints
    def from_checkpoint(
        cls,
        path: Path | str,
        config: Mapping[str, Any] | None = None,
        trust: bool = False,
        *,
        env: Any = None,
    ) -> Self:
        """Return the algorithm of a checkpoint, ready to train.

        Args:
            path: a checkpoint, a run directory (its newest checkpoint is used), or a checkpoint
                folder of Ray Tune.
            config: settings to change, or settings that the checkpoint does not contain.
            trust: import code outside flowrl that the checkpoint names: an algorithm, an
                environment or a plan file. Not needed for the class that this method is called on.
            env: another environment with the same spaces; None uses the checkpoint's.

        Raises:
            CheckpointError: the checkpoint cannot be read, lacks a setting, names code that is not
                trusted, or belongs to another plan.
            ConfigError: `config` has an invalid setting.
        """
        if env is not None:
            if config is not None and "env" in config:
                raise ConfigError("from_checkpoint: env is given twice, also in config: give one")
            config = {**(config or {}), "env": env}
        algorithm: Self = algorithm_from_checkpoint(cls, path, config, trust)
        return algorithm

    def _other_plan(self, saved: Any) -> str:
        """Return how the plan of a checkpoint differs from this algorithm's."""
        plan = self.config.plan
        if saved == plan:
            return (
                f"the plan {plan} has changed since it was written (a run directory keeps the "
                "earlier text as plan.py)"
            )
        return f"it was written by the plan {saved!r}, this algorithm has {plan!r}"

    def restore(self, path: Path | str, other_plan: bool = False) -> None:
        """Load a checkpoint of the same plan and settings.

        Remote workers that have died are replaced, unless `recreate_failed_workers` is False.

        Args:
            path: a checkpoint, or a run directory (its newest checkpoint is used).
            other_plan: accept a plan file whose text differs; its stages must be the same.

        Raises:
            CheckpointError: the checkpoint cannot be read, or belongs to another plan or network;
                the algorithm is unchanged.
            RuntimeError: the algorithm was stopped.
        """
        path = resolve_checkpoint(path)
        state, manifest = read_checkpoint(path)
        if manifest.get("plan_sha256") != self._plan_builder.sha256 and not other_plan:
            saved = manifest.get("algorithm")
            name = None if saved is None else saved.rpartition(":")[2]
            if name not in (None, type(self).__qualname__):
                raise OtherPlanError(
                    f"{path}: it was written by {name}, but this algorithm is "
                    f"{type(self).__name__}: use {name}.from_checkpoint(path); for policies of the "
                    "same class, restore_policies(path) loads only these"
                )
            folder, plan_setting = Path(path).parent, self.config.plan
            command = ""
            if folder.name == "checkpoints" and isinstance(plan_setting, str):
                words = ["flowrl", "resume", str(folder.parent), "--plan", plan_setting]
                if needs_trust(path, plan_setting):
                    words.append("--trust")
                command = f"`{shlex.join(words)}`, or in Python "
            raise OtherPlanError(
                f"{path}: {self._other_plan(manifest.get('plan'))}. To load it anyway, use "
                f"{command}restore(path, other_plan=True)"
            )
        # a running plan cannot be rewound, so the state is loaded into a new one
        plan = self._plan_builder.build(self.workers)
        stages = [] if self._plan is None else list(walk(self._plan.stage))
        threads = [thread for s in stages if (thread := getattr(s, "learner_thread", None))]
        threads = [thread for thread in threads if thread.is_alive()]
        for thread in threads:
            thread.stop()
        try:
            self._load_state_dict(state, manifest, plan, path)
        except BaseException:
            plan.stop()
            for thread in threads:
                assert self._plan is not None
                thread.start(self._plan.metrics.journal)
            raise
        old_plan, self._plan = self._plan, plan
        self.last_result, self._operator_times = None, OperatorTimes()
        self._evaluator.discard()
        if self._monitor is not None:
            self._monitor = self._monitor.moved_to(plan)
        if old_plan is not None:
            old_plan.stop()

    def _load_state_dict(
        self, state: dict[str, Any], manifest: dict[str, Any], plan: Plan, path: Path | str
    ) -> None:
        policies = self.workers.local_worker().policy_map
        with loading_errors(path, manifest, policies, self.config):
            check_state(state, _STATE, "state")
            check_state(state["global_vars"], _GLOBAL_VARS, "global_vars")
            iteration, time_total_s = int(state["iteration"]), float(state["time_total_s"])
            global_vars, run_ids = dict(state["global_vars"]), dict(state["loggers"])
            load_sampling_state(self.workers, plan, state)
            total = self.config.total_timesteps
            saved = manifest.get("config", {}).get("values", {}).get("total_timesteps")
            if total in (None, saved):  # the setting has not changed; the run may have extended it
                total = global_vars["total_timesteps"] or total
            self.workers.global_vars.update(global_vars)
            self.workers.set_total_timesteps(total)
        self.iteration, self._time_total_s = iteration, time_total_s
        self._loggers.load_state_dict(run_ids)

    def start_new_logger_runs(self) -> None:
        """Log results to new runs instead of those of a loaded checkpoint.

        Call it before the first `train()`; loggers that have started keep their runs.
        """
        self._loggers.load_state_dict({})

    def restore_policies(self, path: Path | str) -> None:
        """Load only the policies of a checkpoint; its plan may differ.

        Args:
            path: a checkpoint, or a run directory (its newest checkpoint is used).

        Raises:
            CheckpointError: the checkpoint cannot be read, or its networks do not fit.
        """
        path = resolve_checkpoint(path)
        state, manifest = read_checkpoint(path, "worker")
        worker = self.workers.local_worker()
        with loading_errors(path, manifest, worker.policy_map):
            worker.load_state_dict(state["worker"])
        self.workers.weight_sync.invalidate()
