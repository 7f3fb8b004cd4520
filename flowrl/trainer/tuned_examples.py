"""Tuned examples: YAML files with the settings of a shipped plan for single environments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.envs.atari import is_atari
from flowrl.trainer.plan_files import is_shipped
from flowrl.trainer.run_files import read_run_file

_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class TunedExample:
    """The settings of a plan that are tuned for an environment.

    Attributes:
        plan: name of the plan.
        env: id of the environment.
        path: the YAML file; `flowrl train FILE.yaml` trains it.
        name: of the run in the file; "" if the file has a single run.
        settings: settings that differ from those of the plan.
    """

    plan: str
    env: str
    path: Path
    name: str
    settings: dict[str, Any]

    def __str__(self) -> str:
        """The file in the folder of tuned examples, such as `ppo/CartPole-v1.yaml`."""
        return f"{self.path.parent.name}/{self.path.name}"


def tuned_folder() -> Path:
    """Return the folder of the tuned examples: inside the wheel, or that of a checkout."""
    shipped = _PACKAGE / "_tuned_examples"
    return shipped if shipped.is_dir() else _PACKAGE.parent / "tuned_examples"


def tuned_examples(plan: str = "*") -> Iterator[TunedExample]:
    """Yield the tuned examples of a plan, or of all plans, by plan and environment."""
    for path in sorted(tuned_folder().glob(f"{plan}/*.yaml")):
        yield from _examples_of(path)


def _examples_of(path: Path) -> Iterator[TunedExample]:
    """Yield the tuned examples in a file."""
    for name, entry in read_run_file(path).items():
        settings = dict(entry.get("config") or {})
        steps = (entry.get("stop") or {}).get("timesteps_total")
        if steps is not None:
            settings.setdefault("total_timesteps", steps)
        yield TunedExample(entry["plan"], entry["env"], path, name, settings)


def tuned_example(plan: str, env: Any) -> TunedExample | None:
    """Return the tuned example of a shipped plan for an environment; None if there is none.

    A game without an example uses the first one of its collection, such as ALE/… or MinAtar/….
    """
    if not isinstance(env, str) or not is_shipped(plan):
        return None
    file = tuned_folder() / plan / f"{env}.yaml"
    # most files have the name of their environment
    examples = list(_examples_of(file) if file.is_file() else tuned_examples(plan))
    exact = next((example for example in examples if example.env == env), None)
    collection = "ALE" if is_atari(env) else env.rpartition("/")[0]
    if exact is not None or not collection:
        return exact
    return next((one for one in examples if one.env.startswith(f"{collection}/")), None)
