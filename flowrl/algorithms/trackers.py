"""Experiment trackers: every result of `train()` to Weights & Biases or MLflow (extras)."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

from flowrl.policies.config import ConfigError

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
        if not isinstance(own, dict):
            raise ConfigError(f"log_config: {name}: a mapping of settings is needed, got {own!r}")


def numbers_of(result: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """`a/b/c` -> value of every finite number in a result."""
    for key, value in result.items():
        if isinstance(value, dict):
            yield from numbers_of(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and math.isfinite(value):
            yield f"{prefix}{key}", value


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

    Raises:
        ConfigError: an unknown setting.
    """

    SETTINGS: ClassVar = ("tracking_uri", "experiment_name", "run_name", "tags")
    MOST_METRICS, MOST_PARAMS, LONGEST_PARAM = 1000, 100, 500  # of one call, by MLflow's own rule

    def __init__(self, settings: dict[str, Any], config: dict[str, Any], run_id: str | None):
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        unknown = [name for name in settings if name not in self.SETTINGS]
        if unknown:
            raise ConfigError(
                f"log_config: mlflow has no setting {unknown[0]!r}, only {', '.join(self.SETTINGS)}"
            )
        self._client = MlflowClient(tracking_uri=settings.get("tracking_uri"))
        if run_id is not None:
            self.run_id = run_id
            self._client.update_run(run_id, status="RUNNING")
            return
        name = settings.get("experiment_name", "flowrl")
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        run = self._client.create_run(
            experiment, tags=settings.get("tags"), run_name=settings.get("run_name")
        )
        self.run_id = run.info.run_id
        params = [Param(k, str(v)[: self.LONGEST_PARAM]) for k, v in config.items()]
        for i in range(0, len(params), self.MOST_PARAMS):
            self._client.log_batch(self.run_id, params=params[i : i + self.MOST_PARAMS])

    def write(self, result: dict[str, Any]) -> None:
        from mlflow.entities import Metric

        now, step = int(1000 * time.time()), result["timesteps_total"]
        metrics = [
            Metric(re.sub(r"[^\w\-. /]", "_", name), float(value), now, step)
            for name, value in numbers_of(result)
        ]
        for i in range(0, len(metrics), self.MOST_METRICS):
            self._client.log_batch(self.run_id, metrics=metrics[i : i + self.MOST_METRICS])

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")


_KINDS: dict[str, Any] = {"wandb": WandbRun, "mlflow": MlflowRun}


class Trackers:
    """The trackers that `log_to` names, started at the first result.

    One that cannot be started stops the training; one that fails later is left out, and that is
    said once.

    Attributes:
        run_ids: tracker -> id of its run, which a checkpoint holds so that who goes on from there
            adds to the same run.
    """

    def __init__(self, config: Any):
        self._config = config
        self._running: dict[str, Any] | None = None
        self.run_ids: dict[str, str] = {}

    def write(self, result: dict[str, Any]) -> None:
        """Send a result.

        Raises:
            ConfigError: a tracker cannot be started.
        """
        if self._running is None:
            self._running = {}
            for name in self._config.log_to:
                self._running[name] = self._started(name)
                self.run_ids[name] = self._running[name].run_id
        for name, run in list(self._running.items()):
            try:
                run.write(result)
            except Exception as error:
                log.warning("log_to: %s failed and gets no more results: %r", name, error)
                del self._running[name]

    def _started(self, name: str) -> Any:
        config = self._config
        settings = {key: config[key] for key in config.chosen() if key not in ("policies",)}
        plain = {
            key: v if isinstance(v, (int, float, str)) else repr(v) for key, v in settings.items()
        }
        try:
            return _KINDS[name](config.log_config.get(name, {}), plain, self.run_ids.get(name))
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"log_to: {name} cannot be started: {error}") from error

    def go_on_with(self, run_ids: dict[str, str]) -> None:
        """The training goes on from a checkpoint: further results are added to its runs."""
        if self._running is None:
            self.run_ids = run_ids

    def close(self, failed: bool = False) -> None:
        """End the runs."""
        running, self._running = self._running, None
        for name, run in (running or {}).items():
            try:
                run.close(failed)
            except Exception as error:
                log.warning("log_to: %s could not end its run: %r", name, error)
