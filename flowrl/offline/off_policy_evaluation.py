"""What a policy would have gained, from what another one did: importance sampling."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from flowrl.data import DEFAULT_POLICY_ID, SampleBatch
from flowrl.offline.parquet import OfflineDataError, parquet_files, read_parquet, run_of
from flowrl.policies.distributions import Deterministic
from flowrl.policies.policy import Policy
from flowrl.settings import ConfigError

NEEDED = ("obs", "actions", "action_logp", "rewards", "terminateds", "truncateds", "eps_id", "t")
METHODS = ("is", "wis")
IMPOSSIBLE = -1e4  # logarithm of how likely it is that a policy does what it never does


class Logged:
    """Steps of whole episodes, and how much likelier the policy takes each one's action.

    Args:
        policy: to be judged.
        batches: (run, rows with the columns `NEEDED`), in any order; those of a trajectory may be
            in several batches of a run.

    Attributes:
        rewards, log_ratios: float64 [episodes, longest], zeros after an episode's end.
        num_left_out: episodes of which a part is missing.

    Raises:
        ConfigError: a policy that remembers, or sees more than the observation, or whose actions
            have no likelihood.
        OfflineDataError: a column is missing; rows of other spaces; no whole episode.
    """

    def __init__(self, policy: Policy, batches: Iterable[tuple[int, SampleBatch]]):
        views = set(policy.view_requirements) - {"obs"}
        if policy.is_recurrent or views or policy.view_requirements["obs"].is_window:
            raise ConfigError(
                "estimates are of policies that see single observations, not "
                f"{sorted(views) or 'several at once'}"
            )
        own = type(policy).compute_log_likelihoods is not Policy.compute_log_likelihoods
        if not own or issubclass(getattr(policy, "dist_class", object), Deterministic):
            raise ConfigError(
                f"a {type(policy).__name__} says no likelihood of its actions: they cannot be "
                "weighed against those of another policy"
            )
        parts: list[dict[str, np.ndarray]] = []
        for run, batch in batches:
            missing = sorted(set(NEEDED) - set(batch))
            if missing:
                raise OfflineDataError(
                    f"there is no column {missing[0]!r}, only {', '.join(batch)}: estimates need "
                    f"{', '.join(NEEDED)}. Likelihoods are recorded by algorithms that sample "
                    "their actions from a distribution, as PPO does, not by DQN, SAC or TD3"
                )
            problem = policy.misfit(batch)
            if problem is not None:
                raise OfflineDataError(f"rows of other spaces than the policy's: {problem}")
            logp = policy.compute_log_likelihoods(batch["actions"], batch["obs"])
            agents = batch["agent_index"] if "agent_index" in batch else np.zeros(batch.count, int)
            parts.append(
                {
                    "log_ratio": np.asarray(logp, np.float64) - batch["action_logp"],
                    "reward": np.asarray(batch["rewards"], np.float64),
                    "ends": batch["terminateds"] | batch["truncateds"],
                    "eps_id": np.asarray(batch["eps_id"]),
                    "agent": np.asarray(agents),
                    "run": np.full(batch.count, run),
                    "t": np.asarray(batch["t"]),
                }
            )
        if not parts:
            raise OfflineDataError("there are no rows to estimate from")
        rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        whose = ("agent", "eps_id", "run")
        order = np.lexsort((rows["t"], *(rows[name] for name in whose)))
        rows = {name: column[order] for name, column in rows.items()}
        new = np.ones(len(order), bool)
        new[1:] = np.any([np.diff(rows[name]) != 0 for name in whose], 0)
        begins = np.flatnonzero(new)
        lengths = np.diff([*begins, len(order)])
        numbers = np.repeat(np.arange(len(begins)), lengths)
        place = np.arange(len(order)) - begins[numbers]
        gapless = np.logical_and.reduceat(rows["t"] == place, begins)
        whole = gapless & rows["ends"][begins + lengths - 1]
        if not whole.any():
            raise OfflineDataError("there is no whole episode to estimate from")
        self.num_left_out = int((~whole).sum())
        shape = int(whole.sum()), int(lengths[whole].max())
        kept = whole[numbers]
        at = (np.cumsum(whole) - 1)[numbers[kept]], place[kept]
        self.rewards, self.log_ratios = np.zeros(shape), np.zeros(shape)
        self.rewards[at] = rows["reward"][kept]
        self.log_ratios[at] = np.maximum(rows["log_ratio"][kept], IMPOSSIBLE)


def estimate(
    policy: Policy,
    experience: Path | str | SampleBatch | Iterable[SampleBatch],
    *,
    gamma: float | None = None,
    methods: str | Iterable[str] = METHODS,
    policy_id: str = DEFAULT_POLICY_ID,
) -> dict[str, dict[str, float]]:
    """The discounted return that a policy would have had in recorded episodes.

    Per-decision importance sampling (Precup et al. 2000, section 3): each reward counts by how much
    likelier the policy was to have done all that led to it. "is" is the mean over the episodes,
    which is right on average; "wis" divides by the mean weight at that step, where episodes that
    have ended keep their last one, which varies less and is right in the limit. Weights of long
    episodes vary so much that neither says anything if the policy is far from the one that was
    recorded: see `ess`; those of "is" may be too large for a number, which gives inf.

    Args:
        policy: to be judged. It must know the likelihood of its actions.
        experience: a folder of Parquet files, or rows, or batches of them, with `action_logp` of
            those that acted. Episodes of which a part is missing are left out.
        gamma: discount; None: the policy's.
        methods: some of "is", "wis".
        policy_id: whose files in the folder.

    Returns:
        by method: `v_behavior`, the mean discounted return that there was, and `v_behavior_std`
        over the episodes; `v_target`, the estimate, and `v_target_std`; `v_gain`, the latter by the
        former (nan if that is 0); `v_delta`, their difference; `ess`, how many episodes of the
        recorded policy would say as much (Kong 1992), by the weights of whole ones; `num_episodes`
        and `num_episodes_left_out`.

    Raises:
        ConfigError, OfflineDataError: see Logged; another method.
    """
    if not isinstance(policy, Policy):
        raise ConfigError(f"estimate: a policy is judged (algorithm.get_policy()), got {policy!r}")
    methods = [methods] if isinstance(methods, str) else list(methods)
    unknown = [name for name in methods if name not in METHODS]
    if unknown or not methods:
        raise ConfigError(f"methods: some of {', '.join(METHODS)}, got {methods}")
    if isinstance(experience, SampleBatch):
        experience = [experience]
    if isinstance(experience, (str, Path)):
        if str(experience).startswith("minari:"):
            raise ConfigError(
                f"{experience}: Minari data sets do not say how likely their actions were, which "
                "estimates need"
            )
        logged = Logged(policy, _of_folder(experience, policy_id))
    else:
        logged = Logged(policy, ((0, batch) for batch in experience))
    gamma = policy.config.gamma if gamma is None else gamma
    gained = logged.rewards * gamma ** np.arange(logged.rewards.shape[1])
    log_weights = np.cumsum(logged.log_ratios, 1)  # of an episode that has ended: its last one
    largest = log_weights.max(0)
    scaled = np.exp(log_weights - largest)  # so that none is too large
    shares = np.where(largest > IMPOSSIBLE / 2, scaled / scaled.sum(0), 0.0)
    squares = float(np.square(shares[:, -1]).sum())
    effective = 1.0 / squares if squares else 0.0
    behavior = gained.sum(1)
    told: dict[str, dict[str, float]] = {}
    for method in methods:
        with np.errstate(over="ignore", invalid="ignore"):
            weights = np.exp(log_weights) if method == "is" else shares * len(shares)
            target = (weights * gained).sum(1)
            before, after, spread = (
                float(x) for x in (behavior.mean(), target.mean(), target.std())
            )
        told[method] = {
            "v_behavior": before,
            "v_behavior_std": float(behavior.std()),
            "v_target": after,
            "v_target_std": spread,
            "v_gain": after / before if before else float("nan"),
            "v_delta": after - before,
            "ess": effective,
            "num_episodes": float(len(behavior)),
            "num_episodes_left_out": float(logged.num_left_out),
        }
    return told


def _of_folder(folder: Path | str, policy_id: str) -> Iterator[tuple[int, SampleBatch]]:
    """The rows of a policy, with the number of the run that they are of."""
    runs: dict[str, int] = {}
    for path in parquet_files(folder):
        own, rows = read_parquet(path)
        if own == policy_id:
            yield runs.setdefault(run_of(path), len(runs)), rows
