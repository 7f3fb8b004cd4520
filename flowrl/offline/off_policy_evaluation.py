"""Off-policy evaluation: estimate a policy's return from recorded episodes of another policy."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from pathlib import Path

import numpy as np

from flowrl.data import DEFAULT_POLICY_ID, MultiAgentBatch, SampleBatch
from flowrl.data.columns import PER_SEQUENCE
from flowrl.data.sequences import without_padding
from flowrl.errors import ConfigError, OfflineDataError
from flowrl.offline.parquet import parquet_files, read_rows_of, read_run_id
from flowrl.offline.recorded_rows import rows_for_policy
from flowrl.offline.sources import ParquetSource
from flowrl.policies.distributions import Deterministic
from flowrl.policies.policy import Policy
from flowrl.policies.views import acting_views

log = logging.getLogger("flowrl")

REQUIRED_COLUMNS = (
    "obs", "actions", "action_logp", "rewards", "terminateds", "truncateds", "eps_id", "t",
)  # fmt: skip
METHODS = ("is", "wis")
ROWS_AT_A_TIME = 1024  # for which likelihoods are computed
MIN_LOG_RATIO = -1e30  # of actions that the evaluated policy never takes; unlikely ones have more


def estimate(
    policy: Policy,
    experience: Path | str | SampleBatch | Iterable[SampleBatch],
    *,
    gamma: float | None = None,
    methods: str | Iterable[str] = METHODS,
    policy_id: str = DEFAULT_POLICY_ID,
) -> dict[str, dict[str, float]]:
    """Estimate the discounted return of a policy from recorded episodes.

    Per-decision importance sampling (Precup et al. 2000, section 3): each reward is weighted by the
    product of the likelihood ratios of the actions up to it. "is" averages over the episodes and is
    unbiased. "wis" divides by the mean weight at each step (ended episodes keep their last weight);
    it is consistent and has a lower variance. For long episodes the variance of the weights grows
    so large that neither is informative if the two policies differ much: check `ess`. If weights
    of "is" overflow, its `v_target` is inf or -inf, or nan if rewards of both signs have such
    weights, and its `v_target_std` is nan.

    Args:
        policy: the policy to evaluate; must implement `compute_log_likelihoods`.
        experience: a folder of Parquet files, a batch, or an iterable of batches, with the column
            `action_logp` of the policy that acted. Files have observations as the environment
            returned them, batches have them as the policy sees them (normalized, if it normalizes
            them). Rows that were sampled with explore=False cannot
            be used: their column has the likelihoods of sampled actions. Incomplete episodes are
            ignored; those of several agents are complete if they have a row for each env step.
        gamma: discount factor; None uses the policy's.
        methods: "is", "wis" or both.
        policy_id: policy whose files are read from the folder.

    Returns:
        by method: `v_behavior`, the mean discounted return of the recorded episodes, and
        `v_behavior_std` over the episodes; `v_target`, the estimate, and `v_target_std`, the
        standard deviation of the weighted returns of the episodes (not the standard error of
        `v_target`); `v_gain`, v_target / v_behavior (nan if the latter is 0); `v_delta`, v_target -
        v_behavior; `ess`, the effective sample size in episodes (Kong 1992), from the weights of
        whole episodes;
        `num_episodes` and `num_episodes_left_out`, the number of incomplete ones.

    Raises:
        ConfigError: an unknown method, an invalid gamma, or a policy that cannot be evaluated.
        OfflineDataError: the experience cannot be read, lacks a column, does not fit the policy's
            spaces, has rewards or likelihoods that are not finite, or has no complete episode.
    """
    if not isinstance(policy, Policy):
        raise ConfigError(f"estimate: expected a Policy (algorithm.get_policy()), got {policy!r}")
    if gamma is not None and not (isinstance(gamma, Real) and 0 <= gamma <= 1):
        raise ConfigError(f"gamma: expected a number from 0 to 1, got {gamma!r}")
    chosen = [methods] if isinstance(methods, str) or not isinstance(methods, Iterable) else methods
    chosen = list(chosen)
    if not chosen or any(name not in METHODS for name in chosen):
        raise ConfigError(f"methods: expected some of {', '.join(METHODS)}, got {methods!r}")
    _check_policy(policy)
    if isinstance(experience, (SampleBatch, MultiAgentBatch)):
        experience = [experience]
    if isinstance(experience, (str, Path)):
        if str(experience).startswith("minari:"):
            raise ConfigError(
                f"{experience}: Minari datasets do not store action likelihoods, which importance "
                "sampling requires"
            )
        parts = _read_folder(policy, experience, policy_id)
    else:
        try:
            batches = iter(experience)
        except TypeError:
            raise ConfigError(
                "estimate: expected a folder, a SampleBatch or an iterable of SampleBatches, got "
                f"a {type(experience).__name__}"
            ) from None
        parts = [_select_columns(policy, 0, batch) for batch in batches]
    episodes = _episodes_of(parts)
    gamma = policy.config.gamma if gamma is None else gamma
    discounted = episodes.rewards * gamma**episodes.steps
    log_weights = episodes.cumulative_log_ratios()
    last = log_weights[episodes.starts + episodes.lengths - 1]
    scaled = np.exp(last - last.max()) if last.max() > MIN_LOG_RATIO / 2 else np.zeros_like(last)
    sum_of_squares = float(np.square(scaled / (scaled.sum() or 1.0)).sum())
    ess = 1.0 / sum_of_squares if sum_of_squares else 0.0
    returns = np.add.reduceat(discounted, episodes.starts)
    v_behavior = float(returns.mean())
    results: dict[str, dict[str, float]] = {}
    for method in chosen:
        with np.errstate(over="ignore", invalid="ignore"):
            relative = log_weights if method == "is" else episodes.relative_to_mean(log_weights)
            weights = np.exp(relative)
            # a weight of inf times a reward of 0 is nan
            weighted = np.where(discounted == 0, 0.0, weights * discounted)
            weighted_returns = np.add.reduceat(weighted, episodes.starts)
            v_target, v_target_std = float(weighted_returns.mean()), float(weighted_returns.std())
        results[method] = {
            "v_behavior": v_behavior,
            "v_behavior_std": float(returns.std()),
            "v_target": v_target,
            "v_target_std": v_target_std,
            "v_gain": v_target / v_behavior if v_behavior else float("nan"),
            "v_delta": v_target - v_behavior,
            "ess": ess,
            "num_episodes": float(len(returns)),
            "num_episodes_left_out": float(episodes.num_incomplete),
        }
    return results


@dataclass
class RecordedEpisodes:
    """Complete episodes, one after the other.

    Attributes:
        rewards: float64 [rows], those of an episode in the order of its steps.
        log_ratios: float64 [rows]: log-probability of each action under the evaluated policy minus
            that under the recorded one.
        lengths: rows of each episode [episodes].
        num_incomplete: number of episodes with missing rows, which are not included.
    """

    rewards: np.ndarray
    log_ratios: np.ndarray
    lengths: np.ndarray
    num_incomplete: int

    def __post_init__(self) -> None:
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.steps = np.arange(len(self.rewards)) - np.repeat(self.starts, self.lengths)

    def cumulative_log_ratios(self) -> np.ndarray:
        """Return the log-weights [rows]: the sums of an episode's log-ratios up to each row."""
        parts = np.split(self.log_ratios, self.starts[1:])
        return np.concatenate([np.cumsum(part) for part in parts])

    def relative_to_mean(self, log_weights: np.ndarray) -> np.ndarray:
        """Return log-weights [rows] minus the logarithm of the mean weight of all episodes at the
        same step; ended episodes keep their last weight. -inf where all weights are 0."""
        last = log_weights[self.starts + self.lengths - 1]
        num_steps = int(self.lengths.max())
        log_sums = np.full(num_steps + 1, -np.inf)
        np.logaddexp.at(log_sums, self.lengths, last)
        log_sums = np.logaddexp.accumulate(log_sums)[:num_steps]  # of the ended episodes
        np.logaddexp.at(log_sums, self.steps, log_weights)
        log_means = log_sums - np.log(len(self.lengths))
        is_possible = log_means > MIN_LOG_RATIO / 2
        return np.where(is_possible[self.steps], log_weights - log_means[self.steps], -np.inf)


def _episodes_of(parts: list[dict[str, np.ndarray]]) -> RecordedEpisodes:
    """Collect rows into complete episodes.

    Args:
        parts: results of `_select_columns`, in any order. The rows of an episode may be in several
            parts of a run.

    Raises:
        OfflineDataError: there are no rows, or no complete episode.
    """
    if not parts:
        raise OfflineDataError("there are no rows to estimate from")
    rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    keys = ("agent", "eps_id", "run")
    order = np.lexsort((rows["t"], *(rows[name] for name in keys)))
    rows = {name: column[order] for name, column in rows.items()}
    is_first = np.ones(len(order), bool)
    is_first[1:] = np.any([rows[name][1:] != rows[name][:-1] for name in keys], 0)
    starts = np.flatnonzero(is_first)
    lengths = np.diff([*starts, len(order)])
    episode = np.repeat(np.arange(len(starts)), lengths)
    step = np.arange(len(order)) - starts[episode]
    has_all_steps = np.logical_and.reduceat(rows["t"] == step, starts)
    complete = has_all_steps & rows["ends"][starts + lengths - 1]
    repeats = ~is_first[1:] & (rows["t"][1:] == rows["t"][:-1])
    if repeats.any():
        problem = (
            "several rows have the same eps_id, agent_index and t. Give each episode an eps_id of "
            "its own, or write each file with its own run: write_parquet(…, run=…)"
        )
        if not complete.any():
            raise OfflineDataError(problem)
        ids = len(np.unique(episode[1:][repeats]))
        log.warning("estimate leaves out episodes (%d ids): %s", ids, problem)
    if not complete.any():
        raise OfflineDataError(
            "there is no complete episode to estimate from: an agent needs a row for each env step "
            "of its episode, and the last one must be terminated or truncated (rows that were "
            "recorded with no_done_at_end or soft_horizon are not)"
        )
    selected = complete[episode]
    log_ratios = np.maximum(rows["log_ratio"][selected], MIN_LOG_RATIO)
    num_incomplete = int((~complete).sum())
    return RecordedEpisodes(rows["reward"][selected], log_ratios, lengths[complete], num_incomplete)


def _check_policy(policy: Policy) -> None:
    """Check that a policy acts on single observations and has action likelihoods."""
    views = acting_views(policy.view_requirements).keys() - {"obs"}
    if policy.is_recurrent or views or policy.view_requirements["obs"].is_window:
        raise ConfigError(
            "estimate: the policy must act on single observations, not on "
            f"{sorted(views) or 'several at once'}"
        )
    overridden = type(policy).compute_log_likelihoods is not Policy.compute_log_likelihoods
    if not overridden or issubclass(getattr(policy, "dist_class", object), Deterministic):
        raise ConfigError(
            f"estimate: a {type(policy).__name__} has no action likelihood, which importance "
            "sampling requires"
        )


def _select_columns(policy: Policy, run: int, batch: SampleBatch) -> dict[str, np.ndarray]:
    """Return the columns [rows] of a batch that the estimates need."""
    if not isinstance(batch, SampleBatch):
        raise ConfigError(
            f"estimate: expected SampleBatches, got a {type(batch).__name__} (those of a "
            "MultiAgentBatch are in its policy_batches)"
        )
    missing = sorted(set(REQUIRED_COLUMNS) - set(batch))
    if missing:
        hint = ""
        if "action_logp" in missing:
            hint = ". PPO, A2C, IMPALA and APPO record likelihoods; DQN, SAC and TD3 do not"
        raise OfflineDataError(
            f"there is no column {missing[0]!r} among {sorted(batch)}: estimate needs "
            f"{', '.join(REQUIRED_COLUMNS)}{hint}"
        )
    batch = without_padding(batch)
    batch = batch.without_columns(*(name for name in batch if name.startswith(PER_SEQUENCE)))
    if batch.count:
        batch = rows_for_policy(batch, policy, policy.observation_filter is not None)
    for name in ("rewards", "action_logp"):
        if not np.isfinite(np.asarray(batch[name], np.float64)).all():
            raise OfflineDataError(f"the column {name!r} has values that are not finite")
    parts = batch.timeslices(size=ROWS_AT_A_TIME)
    logp = np.concatenate([np.zeros(0), *(_log_probabilities(policy, part) for part in parts)])
    agents = batch["agent_index"] if "agent_index" in batch else np.zeros(batch.count, int)
    return {
        "log_ratio": logp - batch["action_logp"],
        "reward": np.asarray(batch["rewards"], np.float64),
        "ends": np.asarray(batch["terminateds"], bool) | np.asarray(batch["truncateds"], bool),
        "eps_id": np.asarray(batch["eps_id"]),
        "agent": np.asarray(agents),
        "run": np.full(batch.count, run),
        "t": np.asarray(batch["t"]),
    }


def _log_probabilities(policy: Policy, rows: SampleBatch) -> np.ndarray:
    """Return the log-probabilities [rows] of recorded actions under a policy."""
    found = policy.compute_log_likelihoods(rows["actions"], rows["obs"])
    logp: np.ndarray = np.asarray(found, np.float64)
    if np.isnan(logp).any() or (logp == np.inf).any():
        raise OfflineDataError("the policy's likelihoods of the recorded actions are not finite")
    return logp


def _read_folder(policy: Policy, folder: Path | str, policy_id: str) -> list[dict[str, np.ndarray]]:
    """Return the result of `_select_columns` for each file of a policy; observations are normalized
    as the evaluated policy normalizes them.

    Raises:
        ConfigError, OfflineDataError: see `estimate`.
    """
    runs: dict[str, int] = {}
    parts = []
    for path in parquet_files(folder):
        rows = read_rows_of(path, policy_id)
        if rows is None:
            continue
        run = runs.setdefault(read_run_id(path), len(runs))
        try:
            if policy.observation_filter is not None and rows.count and "obs" in rows:
                rows = rows_for_policy(rows, policy)
                rows = rows.with_columns(obs=policy.observation_filter(rows["obs"]))
            parts.append(_select_columns(policy, run, rows))
        except OfflineDataError as error:
            raise OfflineDataError(f"{path}: {error}") from None
    if not parts:
        others = ParquetSource(folder, policy_id).describe_other_policies()
        raise OfflineDataError(f"{folder}: no rows of policy {policy_id!r}{others}")
    return parts
