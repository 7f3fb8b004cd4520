"""Send every result of `train()` to Weights & Biases or MLflow (extras of the same names)."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import sys
import time
from typing import Any, ClassVar, Literal

from flowrl.errors import ConfigError, check_installed
from flowrl.trainer.metric_names import logged_scalars

log = logging.getLogger("flowrl")

LoggerName = Literal["wandb", "mlflow"]


def check_loggers(names: list[Any], settings: dict[str, Any]) -> None:
    """Check the settings `log_to` and `log_config`.

    Args:
        names: names of the loggers.
        settings: logger name -> its settings.

    Raises:
        ConfigError: a logger is not installed, or settings are unknown or for an unused logger.
    """
    for name in names:
        check_installed(name, f"log_to: {name}", extra=name)
    for name, logger_settings in settings.items():
        if name not in names:
            raise ConfigError(f"log_config: {name!r} is not in log_to={list(names)}")
        if name != "mlflow":
            continue
        unknown = [key for key in logger_settings if key not in MlflowLogger.SETTINGS]
        if unknown:
            raise ConfigError(
                f"log_config: mlflow has no setting {unknown[0]!r}, only "
                f"{', '.join(MlflowLogger.SETTINGS)}"
            )


class WandbLogger:
    """Log to a run of Weights & Biases. The x axis is `timesteps_total`.

    Args:
        settings: arguments of `wandb.init`, such as project, name, mode, dir.
        config: the algorithm's settings.
        run_id: run to resume, or None for a new one.
    """

    def __init__(self, settings: dict[str, Any], config: dict[str, Any], run_id: str | None):
        import wandb

        arguments = {"project": "flowrl", "reinit": "create_new", **settings}
        config = {**config, **arguments.pop("config", {})}
        if run_id is not None:
            arguments |= {"id": run_id, "resume": "allow"}
        self._run = wandb.init(config=config, **arguments)
        self._run.define_metric("*", step_metric="timesteps_total")
        self.run_id: str = self._run.id

    def write(self, metrics: dict[str, float]) -> None:
        """Log the metrics of a result."""
        self._run.log(metrics)

    def close(self, failed: bool) -> None:
        """Finish the run."""
        self._run.finish(exit_code=int(failed))


class MlflowLogger:
    """Log to a run of MLflow. The step of a metric is `timesteps_total`.

    Args:
        settings: tracking_uri, experiment_name ("flowrl"), run_name, tags.
        config: the algorithm's settings, logged as parameters.
        run_id: run to resume, or None for a new one.
    """

    SETTINGS: ClassVar = ("tracking_uri", "experiment_name", "run_name", "tags")
    # MLflow's limits: metrics and parameters per call, characters per parameter
    MAX_METRICS, MAX_PARAMS, MAX_PARAM_LENGTH = 1000, 100, 500

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
            with contextlib.suppress(MlflowException):  # another run has just created it
                self._client.create_experiment(name)
        experiment: Any = self._client.get_experiment_by_name(name)
        run = self._client.create_run(
            experiment.experiment_id, tags=settings.get("tags"), run_name=settings.get("run_name")
        )
        self.run_id = run.info.run_id
        params = [Param(k, str(v)[: self.MAX_PARAM_LENGTH]) for k, v in config.items()]
        for i in range(0, len(params), self.MAX_PARAMS):
            self._client.log_batch(self.run_id, params=params[i : i + self.MAX_PARAMS])

    def write(self, metrics: dict[str, float]) -> None:
        """Log the metrics of a result."""
        from mlflow.entities import Metric

        timestamp_ms, step = int(1000 * time.time()), int(metrics["timesteps_total"])
        entries = [
            Metric(_mlflow_name(name), float(value), timestamp_ms, step)
            for name, value in metrics.items()
        ]
        for i in range(0, len(entries), self.MAX_METRICS):
            self._client.log_batch(self.run_id, metrics=entries[i : i + self.MAX_METRICS])

    def close(self, failed: bool) -> None:
        """Finish the run."""
        self._client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")


def _mlflow_name(name: str) -> str:
    """Return a metric's name in the form that MLflow accepts: a relative path of plain words."""
    parts = [re.sub(r"[^\w\-. ]", "_", part).strip(".") for part in name.split("/")]
    return "/".join(part for part in parts if part)[:250]


_LOGGERS: dict[str, Any] = {"wandb": WandbLogger, "mlflow": MlflowLogger}


class ResultLoggers:
    """The loggers of `log_to`, started at the beginning of the first `train()`.

    A logger that cannot start stops the training. A logger that fails later logs a warning, and is
    removed after MAX_FAILURES failures in a row.

    Attributes:
        run_ids: logger name -> id of its run. Checkpoints contain them, so that a resumed training
            continues the same runs.
        failed: whether the training has failed; runs that end now are marked as failed.
    """

    MAX_FAILURES = 3

    def __init__(self, config: Any):
        self._config = config
        self._running: dict[str, Any] | None = None
        self._failures: dict[str, int] = {}
        self.run_ids: dict[str, str] = {}
        self.failed = False

    def write(self, result: dict[str, Any]) -> None:
        """Send a result to all loggers.

        Raises:
            ConfigError: a logger cannot start; then none is running.
        """
        self.start()
        scalars = logged_scalars(result, self._config.logged_names)
        metrics = {
            name: value
            for name, value in scalars.items()
            if isinstance(value, (int, float)) and math.isfinite(value)
        }
        for name, logger in list((self._running or {}).items()):
            try:
                logger.write(metrics)
                self._failures[name] = 0
            except Exception as error:
                self._record_failure(name, error)

    def _record_failure(self, name: str, error: Exception) -> None:
        failures = self._failures[name] = self._failures.get(name, 0) + 1
        if failures == 1:
            log.warning("log_to: %s could not log a result: %r", name, error)
        if failures >= self.MAX_FAILURES:
            log.warning("log_to: %s failed %d times in a row and was removed", name, failures)
            assert self._running is not None
            _close(name, self._running.pop(name), failed=True)

    def start(self) -> None:
        """Start all loggers, unless they have started.

        Raises:
            ConfigError: a logger cannot start; then none is running.
        """
        if self._running is not None:
            return
        started: dict[str, Any] = {}
        try:
            for name in self._config.log_to:
                print(f"flowrl: connecting to {name} …", file=sys.stderr, flush=True)
                started[name] = self._start_logger(name)
        except BaseException:
            for name, logger in started.items():
                _close(name, logger, failed=True)
            raise
        self._running = started
        self.run_ids = {name: logger.run_id for name, logger in started.items()}

    def _start_logger(self, name: str) -> Any:
        config = {
            key: value if isinstance(value, (int, float, str)) else repr(value)
            for key, value in self._config.explicit_settings().items()
            if key not in ("policies", "log_config")
        }
        settings, run_id = self._config.log_config.get(name, {}), self.run_ids.get(name)
        try:
            if run_id is not None:
                try:
                    return _LOGGERS[name](settings, config, run_id)
                except Exception as error:
                    log.warning("log_to: %s: cannot resume run %s: %r", name, run_id, error)
            return _LOGGERS[name](settings, config, None)
        except Exception as error:
            raise ConfigError(f"log_to: cannot start {name}: {error}") from error

    def state_dict(self) -> dict[str, str]:
        """Return the ids of the runs."""
        return dict(self.run_ids)

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Continue the runs of a state, unless the loggers have started."""
        if self._running is None:
            self.run_ids = dict(state)

    def close(self) -> None:
        """Finish all runs."""
        running, self._running = self._running, None
        for name, logger in (running or {}).items():
            _close(name, logger, self.failed)


def _close(name: str, logger: Any, failed: bool) -> None:
    try:
        logger.close(failed)
    except Exception as error:
        log.warning("log_to: %s could not finish its run: %r", name, error)
