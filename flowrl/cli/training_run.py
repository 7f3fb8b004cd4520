"""A training run from the command line: stop rules, the live line, the run directory."""

from __future__ import annotations

import secrets
import shlex
import shutil
import signal
import sys
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flowrl.cli.arguments import Rule
from flowrl.cli.run_directory import (
    RunDirectory,
    default_run_dir,
    last_good_checkpoint,
    newest_checkpoint,
    read_goal,
)
from flowrl.data.checkpoint import CheckpointError
from flowrl.iter.stage import walk
from flowrl.ops import WriteParquet
from flowrl.settings import ConfigError, nearest
from flowrl.trainer.metric_names import check_metric_name, flatten_result, metric_value
from flowrl.trainer.plan_files import plan_path

HURRIED_S = 1.0  # a second Ctrl-C so soon after the first is the same one
LIVE_SECONDS = 0.25  # between two redraws on a terminal
PLAIN_SECONDS = 5.0  # between two lines elsewhere
PATIENCE = 20  # results without a metric that is waited for, after which that is said
RECENT = 50  # iterations that the shown steps/s are over
DEFAULT_TIMESTEPS = 500_000  # goal of a run that was given none


@dataclass
class Stop:
    """When a run ends: whichever comes first.

    reward: mean return of the last 100 episodes; timesteps: env steps; iters; time_s: seconds;
    metrics: (name of a metric, ">=" or "<=", value) each.
    """

    reward: float | None = None
    timesteps: int | None = None
    iters: int | None = None
    time_s: float | None = None
    metrics: list[Rule] = field(default_factory=list)

    @classmethod
    def of_saved(cls, saved: dict[str, Any]) -> Stop:
        """The rules that a run directory has.

        Raises:
            ConfigError: they were damaged.
        """
        try:
            made = cls(**saved)
            made.metrics = [(str(n), str(r), float(v)) for n, r, v in made.metrics]
            return made
        except (TypeError, ValueError) as error:
            raise ConfigError(f"stop.json: not the stop rules of a run: {error}") from None

    def is_set(self) -> bool:
        """Whether any rule is given."""
        return self != Stop()

    def with_defaults(self, config: Any) -> Stop:
        """Where nothing is set: the environment's own reward threshold, or a number of steps."""
        if self.is_set():
            return self
        reward = _threshold(config.env) if config.samples else None
        return Stop(reward=reward, timesteps=DEFAULT_TIMESTEPS)

    def check(self, config: Any) -> None:
        """Refuse metrics that no result will have."""
        if self.reward is not None:
            check_metric_name("episode_reward_mean", config, "stop")
        for name, _, _ in self.metrics:
            check_metric_name(name, config, "stop")

    def reached(self, result: dict[str, Any], window: int, seconds: float) -> str | None:
        """What was reached, in words; None while nothing is."""
        mean = result["episode_reward_mean"]
        full = result["episodes_in_window"] >= window
        if self.reward is not None and full and mean >= self.reward:
            return f"mean return {mean:.1f} of the last {window} episodes >= {self.reward:g}"
        if self.timesteps and result["timesteps_total"] >= self.timesteps:
            return f"{result['timesteps_total']:,} env steps"
        if self.iters and result["training_iteration"] >= self.iters:
            number = result["training_iteration"]
            return f"{number} iteration{'s' if number > 1 else ''}"
        if self.time_s and seconds >= self.time_s:
            return f"{seconds:.0f} s"
        for name, relation, limit in self.metrics:
            value = metric_value(result, name)
            if value is not None and (value >= limit if relation == ">=" else value <= limit):
                return f"{name} {value:g} {relation} {limit:g}"
        return None


def check_metric(result: dict[str, Any], name: str, what: str) -> bool:
    """Whether a result has a metric that could not be told of before.

    Raises:
        ConfigError: it has not, and should have: it will never come.
    """
    if metric_value(result, name) is not None:
        return True
    learned = name.startswith(("learners/", "info/learner/")) and result["learners"]
    ended = name.startswith("custom_metrics/") and result["episodes_in_window"]
    if learned or ended:
        group = name.split("/")[0]
        known = [
            k for k, v in flatten_result({group: result[group]}) if isinstance(v, (int, float))
        ]
        raise ConfigError(
            f"{what}: there is no metric {name!r}.{nearest(name, known)} In {group} there are "
            f"{', '.join(known) or 'none'}"
        )
    return False


class PendingMetrics:
    """The metrics that a run waits for and that no result has had yet; said once, after some."""

    def __init__(self, stop: Stop, score: str | None):
        self._names = {name: "stop" for name, _, _ in stop.metrics}
        if score is not None:
            self._names.setdefault(score, "checkpoint_score_attribute")
        self._results = 0

    def look_at(self, result: dict[str, Any]) -> None:
        """Refuse what should be in this result and is not."""
        self._results += 1
        there = [n for n, what in self._names.items() if check_metric(result, n, what)]
        for name in there:
            del self._names[name]
        if self._results == PATIENCE:
            for name, what in self._names.items():
                print(
                    f"flowrl: {what}: no result has had {name!r} so far", file=sys.stderr,
                    flush=True,
                )  # fmt: skip


def _threshold(env: Any) -> float | None:
    import gymnasium as gym

    if not isinstance(env, str) or env not in gym.registry:
        return None
    return gym.spec(env).reward_threshold


def train(
    config: Any,
    plan: str | None,
    stop: Stop,
    run_dir: Path | None,
    command: list[str],
    resume: bool = False,
    checkpoint: Path | None = None,
    other_plan: bool = False,
) -> int:
    """Train until a stop rule holds; returns the exit code. Leaves a checkpoint, come what may.

    Of a run that is resumed the stop rules hold that it was given, unless it gets others.

    Args:
        checkpoint: which one a run goes on from; None: the newest.
        other_plan: the plan's text may have changed since.
    """
    if resume:
        command, saved = read_goal(run_dir)  # type: ignore[arg-type]
        if not stop.is_set():
            stop = Stop.of_saved(saved)
            if not config.samples:  # earlier runs noted one that never holds
                stop.reward = None
        checkpoint = checkpoint or newest_checkpoint(run_dir)  # type: ignore[arg-type]
    elif config.seed is None:  # drawn here, so that the run can be repeated
        config = config.updated(seed=secrets.randbits(31))
        command = [*command, "--seed", str(config.seed)]
    stop.check(config)
    if not resume and not config.samples:
        config.check_input()
    if plan is not None:
        config = config.updated(plan=str(Path(plan).resolve()) if plan.endswith(".py") else plan)
    algorithm = config.build()
    try:  # an environment or a plan that does not fit shows before any file
        algorithm.workers.local_worker()
        algorithm.check_evaluation()
        tree = algorithm.plan.explain()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        tell_failure(error)
        return 1
    stop = stop.with_defaults(config)
    named = plan or type(algorithm).__name__.lower()
    run = RunDirectory(run_dir or default_run_dir(named, config.env), resume)
    try:
        if resume:
            assert checkpoint is not None
            try:
                algorithm.restore(checkpoint, other_plan)
            except CheckpointError as error:
                print(f"flowrl: {error}", file=sys.stderr)
                _offer(run.path, checkpoint)
                return 1
            window = config.metrics_num_episodes_for_smoothing
            last = run.last_until(algorithm.iteration)
            reached = None if last is None else stop.reached(last, window, 0.0)
            if reached is not None:
                print(
                    f"reached already: {reached}. Give another goal: --stop-reward, "
                    "--stop-timesteps, …"
                )
                return 0
            if other_plan:
                run.replace_plan(config, tree, plan_path(config.plan))
            run.forget_after(algorithm.iteration)
            for stage in walk(algorithm.plan.stage):
                if isinstance(operator := getattr(stage, "fn", None), WriteParquet):
                    operator.forget_later()
        else:
            text = None if config.plan is None else plan_path(config.plan)
            run.describe(config, command, tree, text, asdict(stop))
        with Signals() as signals:
            return _loop(algorithm, stop, run, command, signals)
    finally:
        try:
            algorithm.stop()
        finally:
            run.close()


def _offer(run_dir: Path, damaged: Path) -> None:
    """Say which older checkpoint is whole."""
    good = last_good_checkpoint(run_dir, damaged)
    if good is not None:
        print(
            f"the one before is whole: {program()} resume {shlex.quote(str(run_dir))} --checkpoint "
            f"{good.name}",
            file=sys.stderr,
        )


def _loop(
    algorithm: Any, stop: Stop, run: RunDirectory, command: list[str], signals: Signals
) -> int:
    window = algorithm.config.metrics_num_episodes_for_smoothing
    live = LiveLine(stop)
    started = saved = time.perf_counter()
    code, result = 0, None
    reached = None
    awaited = PendingMetrics(stop, algorithm.config.checkpoint_score_attribute)
    if algorithm.config.num_workers:
        print(f"starting {algorithm.config.num_workers} workers …", flush=True)
    try:
        while reached is None:
            signals.raise_what_came()
            signals.armed = True
            try:
                result = algorithm.train()
            finally:
                signals.armed = False
            live.add(result)
            run.write(result)
            live.show(result)
            awaited.look_at(result)
            now = time.perf_counter()
            reached = stop.reached(result, window, now - started)
            if reached is None and _is_due(algorithm, now - saved):
                run.save(algorithm, result)
                saved = time.perf_counter()
    except KeyboardInterrupt:
        reached, code = "interrupted", 130
        result = _unwritten(algorithm, run, result)
    except (Exception, SystemExit) as error:
        # Ray's own handler of SIGTERM exits with the signal's number
        if isinstance(error, SystemExit) and error.code in (143, signal.SIGTERM):
            reached, code = "terminated", 143
            result = _unwritten(algorithm, run, result)
        else:
            return _failed(error, algorithm, run, live, result)
    written = run.save(algorithm, result)
    live.finish(result)
    seconds = time.perf_counter() - started
    print(f"{'stopped' if code else 'reached'}: {reached}, after {seconds:.1f} s")
    where = "no checkpoint" if written is None else f"checkpoint {written.relative_to(run.path)}"
    print(f"run directory: {run.path} ({where})")
    here, name = shlex.quote(str(run.path)), program()
    print(f"evaluate:      {name} evaluate {here} --episodes 100")
    print(f"go on:         {name} resume {here}{'' if code else ' --stop-timesteps …'}")
    print(f"repeat:        {name} {shlex.join(command[1:])}")
    return code if code or written is not None else 1


def _is_due(algorithm: Any, seconds: float) -> bool:
    """Whether it is time for a checkpoint."""
    config = algorithm.config
    by_iterations = config.checkpoint_frequency
    if by_iterations and algorithm.iteration % by_iterations == 0:
        return True
    return config.checkpoint_every_s is not None and seconds > config.checkpoint_every_s


def _unwritten(algorithm: Any, run: RunDirectory, result: Any) -> Any:
    """The newest result, written now if what came after it failed or was interrupted, such as its
    evaluation."""
    newest = algorithm.last_result
    if newest is None or newest is result or newest["training_iteration"] < algorithm.iteration:
        return result
    run.write(newest)
    return newest


def _failed(
    error: BaseException, algorithm: Any, run: RunDirectory, live: LiveLine, result: Any
) -> int:
    live.finish()
    result = _unwritten(algorithm, run, result)
    if result is not None:
        run.save(algorithm, result)
    tell_failure(error)
    print(f"run directory: {run.path}", file=sys.stderr)
    return 1


class Signals:
    """SIGTERM and the first Ctrl-C stop the run, which leaves a checkpoint; a later Ctrl-C leaves
    at once.

    They raise while `armed`, in training alone: raised in the middle of writing a file, or of a
    thread's lock, they could leave either in half.
    """

    def __init__(self) -> None:
        self.armed = False
        self._came: list[tuple[int, float]] = []
        self._before: dict[int, Any] = {}

    def _handle(self, number: int, _: Any) -> None:
        now = time.monotonic()
        if self._came and now - self._came[0][1] < HURRIED_S:
            return
        self._came.append((number, now))
        if self.armed or len(self._came) > 1:
            self.raise_what_came()

    def raise_what_came(self) -> None:
        """Stop if a signal came: what it raised may have been lost, as in a destructor."""
        if self._came:
            # Ray's own handler of SIGTERM exits in the same way
            terminated = self._came[0][0] == signal.SIGTERM
            raise SystemExit(143) if terminated else KeyboardInterrupt

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def program() -> str:
    """How the user calls flowrl: by its name where that is on the PATH, else by its path."""
    called, found = Path(sys.argv[0]), shutil.which("flowrl")
    if called.name != "flowrl" or (found and Path(found).resolve() == called.resolve()):
        return "flowrl"
    here = Path.cwd()
    return str(called.relative_to(here) if called.is_relative_to(here) else called)


def tell_failure(error: BaseException) -> None:
    """The error with its own traceback from the user's code on, and flowrl's notes."""
    if isinstance(error, ConfigError):
        print(f"flowrl: {error}", file=sys.stderr)
        return
    if type(error).__name__ == "DependencyNotInstalled":  # gymnasium's: it says what to install
        print(f"flowrl: env: {error}", file=sys.stderr)
        return
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    own = str(Path(__file__).parent)
    foreign = [f for f in frames if not f.filename.startswith((own, "<frozen importlib"))]
    print("Traceback (flowrl's own frames left out):", file=sys.stderr)
    print("".join(traceback.format_list(foreign)), end="", file=sys.stderr)
    print("".join(traceback.format_exception_only(error)), end="", file=sys.stderr)


class LiveLine:
    """One line that is redrawn on a terminal; plain lines every few seconds elsewhere."""

    def __init__(self, stop: Stop):
        self._stop = stop
        self._terminal = sys.stdout.isatty()
        self._shown = 0.0
        self._last = ""
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT)
        self._status: Any = None

    def add(self, result: dict[str, Any]) -> None:
        """Take note of a result."""
        self._recent.append((time.perf_counter(), result["timesteps_total"]))

    def show(self, result: dict[str, Any]) -> None:
        """Draw the line again, if it is time."""
        now = time.perf_counter()
        pause = LIVE_SECONDS if self._terminal else PLAIN_SECONDS
        if now - self._shown < pause:
            return
        self._shown = now
        text = self._last = self._line(result)
        if not self._terminal:
            print(text, flush=True)
            return
        if self._status is None:
            from rich.console import Console

            self._status = Console().status(text)
            self._status.start()
        self._status.update(text)

    def _line(self, result: dict[str, Any]) -> str:
        steps = result["timesteps_total"]
        # from the end of the first iteration on, in which workers and environments start
        (since, before), (now, _) = self._recent[0], self._recent[-1]
        rate = (steps - before) / max(now - since, 1e-9)
        goal = self._stop.timesteps
        parts = [
            f"iter {result['training_iteration']}",
            f"{steps:,}{f' of {goal:,}' if goal else ''} env steps",
        ]
        if rate:
            parts.append(f"{rate:,.0f} steps/s")
        if result["episodes_in_window"]:
            wanted = f" (goal {self._stop.reward:g})" if self._stop.reward is not None else ""
            parts.append(f"return {result['episode_reward_mean']:.1f}{wanted}")
            by_policy = result["policy_reward_mean"]
            if len(by_policy) > 1:  # of each agent, where the episode's is the sum of all
                parts.append(" ".join(f"{pid} {mean:.1f}" for pid, mean in by_policy.items()))
        if "evaluation" in result:
            parts.append(f"evaluation {result['evaluation']['episode_reward_mean']:.1f}")
        for stats in result["learners"].values():
            losses = ("policy_loss", "vf_loss", "entropy", "mean_q", "mean_logp")
            parts += [f"{name} {stats[name]:.3g}" for name in losses if name in stats]
        if goal and rate > 0:
            parts.append(f"at most {max(goal - steps, 0) / rate:,.0f} s left")
        return " | ".join(parts)

    def finish(self, result: dict[str, Any] | None = None) -> None:
        if self._status is not None:
            self._status.stop()
        if result is not None and self._recent and (text := self._line(result)) != self._last:
            print(text)
