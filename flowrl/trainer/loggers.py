"""Experiment trackers: every result of `train()` to Weights & Biases or MLflow (extras)."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

from flowrl.settings import ConfigError
from flowrl.trainer.metric_names import flat

log = logging.getLogger("flowrl")

TrackerName = Literal["wandb", "mlflow"]


def check_trackers(names: list[Any], settings: dict[str, Any]) -> None:
    """Refuse trackers that are not installed, and settings of trackers that are not used.

    Raises:
        ConfigError: see above.
    """
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(f'log_to: {name} is not installed: pip install "flowrl[{name}]"')
    for name, own in settings.items():
        if name not in names:
            raise ConfigError(f"log_config: {name!r} is not in log_to={list(names)}")
        unknown = [key for key in own if name == "mlflow" and key not in MlflowRun.SETTINGS]
        if unknown:
            raise ConfigError(
                f"log_config: mlflow has no setting {unknown[0]!r}, only "
                f"{', '.join(MlflowRun.SETTINGS)}"
            )


def numbers_of(result: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """`a/b/c` -> value of every finite number in a result."""
    for name, value in flat(result):
        if isinstance(value, (int, float)) and math.isfinite(value):
            yield name, value


class WandbRun:
    """A run of Weights & Biases. Its x axis is `timesteps_total`.

    Args:
        settings: of `wandb.init`, such as project, name, mode, dir.
        config: the algorithm's settings.
        run_id: of the run to go on with.
    """

    def __init__(self, settings: dict[str, Any], config: dict[str, Any], run_id: str | None):
        import wandb

        own = {"project": "flowrl", "reinit": "create_new", **settings}
        config = {**config, **own.pop("config", {})}
        if run_id is not None:
            own |= {"id": run_id, "resume": "allow"}
        self._run = wandb.init(config=config, **own)
        self._run.define_metric("*", step_metric="timesteps_total")
        self.run_id: str = self._run.id

    def write(self, result: dict[str, Any]) -> None:
        self._run.log(dict(numbers_of(result)))

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MlflowRun:
    """A run of MLflow. The step of a metric is `timesteps_total`.

    Args:
        settings: tracking_uri, experiment_name ("flowrl"), run_name, tags.
        config: the algorithm's settings, logged as parameters.
        run_id: of the run to go on with.
    """

    SETTINGS: ClassVar = ("tracking_uri", "experiment_name", "run_name", "tags")
    MOST_METRICS, MOST_PARAMS, LONGEST_PARAM = 1000, 100, 500  # of one call, by MLflow's own rule

    def __init__(self, settings: dict[str, Any], config: dict[str, Any], run_id: str | None):
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=settings.get("tracking_uri"))
        if run_id is not None:
            self.run_id = run_id
            self._client.update_run(run_id, status="RUNNING")
            return
        name = settings.get("experiment_name", "flowrl")
        if self._client.get_experiment_by_name(name) is None:
            with contextlib.suppress(MlflowException):  # another run has just made it
                self._client.create_experiment(name)
        experiment: Any = self._client.get_experiment_by_name(name)
        run = self._client.create_run(
            experiment.experiment_id, tags=settings.get("tags"), run_name=settings.get("run_name")
        )
        self.run_id = run.info.run_id
        params = [Param(k, str(v)[: self.LONGEST_PARAM]) for k, v in config.items()]
        for i in range(0, len(params), self.MOST_PARAMS):
            self._client.log_batch(self.run_id, params=params[i : i + self.MOST_PARAMS])

    def write(self, result: dict[str, Any]) -> None:
        from mlflow.entities import Metric

        now, step = int(1000 * time.time()), result["timesteps_total"]
        metrics = [
            Metric(_mlflow_name(name), float(value), now, step)
            for name, value in numbers_of(result)
        ]
        for i in range(0, len(metrics), self.MOST_METRICS):
            self._client.log_batch(self.run_id, metrics=metrics[i : i + self.MOST_METRICS])

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")


def _mlflow_name(name: str) -> str:
    """A metric's name as MLflow takes it: a relative path of plain words."""
    parts = [re.sub(r"[^\w\-. ]", "_", part).strip(".") for part in name.split("/")]
    return "/".join(part for part in parts if part)[:250]


_KINDS: dict[str, Any] = {"wandb": WandbRun, "mlflow": MlflowRun}


class Trackers:
    """The trackers that `log_to` names, started at the first result.

    One that cannot be started stops the training. One that fails later is told of, and left out
    after MOST_FAILURES results in a row.

    Attributes:
        run_ids: tracker -> id of its run, which a checkpoint holds so that who goes on from there
            adds to the same run.
        failed: whether the training has, so that runs that end now are marked so.
    """

    MOST_FAILURES = 3

    def __init__(self, config: Any):
        self._config = config
        self._running: dict[str, Any] | None = None
        self._failures: dict[str, int] = {}
        self.run_ids: dict[str, str] = {}
        self.failed = False

    def write(self, result: dict[str, Any]) -> None:
        """Send a result.

        Raises:
            ConfigError: a tracker cannot be started; none is.
        """
        if self._running is None:
            self._start()
        for name, run in list((self._running or {}).items()):
            try:
                run.write(result)
                self._failures[name] = 0
            except Exception as error:
                self._note_failure(name, error)

    def _note_failure(self, name: str, error: Exception) -> None:
        failures = self._failures[name] = self._failures.get(name, 0) + 1
        if failures == 1:
            log.warning("log_to: %s could not take a result: %r", name, error)
        if failures >= self.MOST_FAILURES:
            log.warning("log_to: %s failed %d times and gets no more results", name, failures)
            assert self._running is not None
            _end(name, self._running.pop(name), failed=True)

    def _start(self) -> None:
        started: dict[str, Any] = {}
        try:
            for name in self._config.log_to:
                print(f"flowrl: connecting to {name} …", file=sys.stderr, flush=True)
                started[name] = self._started(name)
        except BaseException:
            for name, run in started.items():
                _end(name, run, failed=True)
            raise
        self._running = started
        self.run_ids = {name: run.run_id for name, run in started.items()}

    def _started(self, name: str) -> Any:
        config = self._config
        plain = {
            key: value if isinstance(value, (int, float, str)) else repr(value)
            for key, value in config.chosen().items()
            if key not in ("policies", "log_config")
        }
        own, run_id = config.log_config.get(name, {}), self.run_ids.get(name)
        try:
            if run_id is not None:
                try:
                    return _KINDS[name](own, plain, run_id)
                except Exception as error:
                    log.warning(
                        "log_to: %s: run %s cannot be gone on with: %r", name, run_id, error
                    )
            return _KINDS[name](own, plain, None)
        except Exception as error:
            raise ConfigError(f"log_to: {name} cannot be started: {error}") from error

    def go_on_with(self, run_ids: dict[str, str]) -> None:
        """The training goes on from a checkpoint: further results are added to its runs."""
        if self._running is None:
            self.run_ids = run_ids

    def close(self) -> None:
        """End the runs."""
        running, self._running = self._running, None
        for name, run in (running or {}).items():
            _end(name, run, self.failed)


def _end(name: str, run: Any, failed: bool) -> None:
    try:
        run.close(failed)
    except Exception as error:
        log.warning("log_to: %s could not end its run: %r", name, error)
