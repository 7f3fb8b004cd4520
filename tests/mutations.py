"""Check that the quick tests find mistakes in numerics and bookkeeping.

Applies one mutation at a time to a copy of the package, each a change of a single line, and runs
the tests of its subject. Prints the mutations that no test fails for; the exit code is 1 if there
are any.

    python tests/mutations.py [--only NAME ...] [--jobs 2]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = ("flowrl", "tests", "plans", "tuned_examples", "pyproject.toml", "conftest.py")
TIMEOUT_S = 300

RETURNS = "policies/returns.py"
PPO = "algorithms/ppo.py"
KL_PENALTY = "algorithms/kl_penalty.py"
DQN = "algorithms/dqn.py"
VTRACE = "algorithms/vtrace.py"
R2D2 = "algorithms/r2d2.py"
KERNELS = "policies/learning/kernels/"
SUM_TREE = "replay/sum_tree.py"
RING = "replay/ring_buffer.py"
TRAJECTORIES = "replay/trajectories.py"
RATIO = "replay/replay_ratio.py"
PRIORITIZED = "replay/prioritized.py"
BUFFERS = "replay/buffers.py"
BRANCHES = "iter/stages/branches.py"
GATHER = "iter/gather.py"
STALENESS = "ops/staleness.py"
ROLLOUT = "ops/rollout.py"
STORAGE = "data/checkpoint_storage.py"
SYNC = "sampling/weight_sync.py"
FILTERS = "policies/filters.py"
TARGET = "policies/target_network.py"
CAPTURED = "policies/learning/captured_update.py"
RECURRENT = "policies/models/recurrent.py"
RETURNS_OF_EPISODES = "sampling/episode_returns.py"
# fmt: off
TESTS = {
    RETURNS: ["policies/test_returns.py"],
    PPO: ["algorithms/test_ppo.py"],
    KL_PENALTY: ["algorithms/test_ppo.py", "algorithms/test_kl_penalty.py"],
    DQN: ["algorithms/test_dqn.py"],
    VTRACE: ["algorithms/test_vtrace.py"],
    R2D2: ["algorithms/test_r2d2.py"],
    KERNELS + "policy_gradient.py": ["policies/test_kernels.py"],
    KERNELS + "q_learning.py": ["algorithms/test_dqn.py", "policies/test_categorical_q.py"],
    CAPTURED: ["policies/test_captured_update.py"],
    KERNELS + "actor_critic.py": ["algorithms/test_actor_critic.py"],
    "policies/models/matrix_products.py": ["policies/test_matrix_products.py"],
    "policies/learning/flat_parameters.py": ["policies/test_torch_policy.py"],
    SUM_TREE: ["replay/test_prioritized.py"],
    RING: ["replay/test_buffers.py"],
    TRAJECTORIES: ["replay/test_buffers.py", "envs/test_atari.py"],
    RATIO: ["replay", "ops/test_replay.py"],
    PRIORITIZED: ["replay/test_prioritized.py"],
    BUFFERS: ["replay/test_buffers.py"],
    BRANCHES: ["iter/test_branches.py", "iter/test_stages.py"],
    GATHER: ["iter/test_parallel.py", "iter/test_failures.py"],
    STALENESS: ["ops/test_staleness.py"],
    ROLLOUT: ["ops", "test_plans.py"],
    STORAGE: ["data/test_checkpoint.py"],
    SYNC: ["sampling/test_weight_sync.py"],
    FILTERS: ["policies", "sampling/test_column_sampler.py"],
    TARGET: ["algorithms/test_dqn.py", "algorithms/test_actor_critic.py"],
    "algorithms/sac.py": ["algorithms/test_actor_critic.py"],
    RECURRENT: ["policies/test_recurrent_models.py"],
    RETURNS_OF_EPISODES: ["sampling/test_episode_returns.py"],
    "algorithms/on_policy.py": ["policies/test_returns.py", "sampling", "algorithms"],
    "policies/categorical_q.py": ["policies/test_categorical_q.py"],
    "policies/q_values.py": ["policies/test_q_values.py", "algorithms/test_dqn.py"],
    "policies/schedules.py": ["policies/test_schedules.py"],
    "ops/train.py": ["ops/test_ops.py", "algorithms/test_dqn.py"],
    "ops/plan_metrics.py": ["ops", "test_plans.py"],
    "ops/concurrency.py": ["ops/test_concurrency.py"],
    "replay/frame_table.py": ["replay/test_frame_table.py"],
    "replay/env_step_index.py": ["replay/test_env_step_index.py", "replay/test_multi_agent.py"],
}


class Mutation(NamedTuple):
    """A change of one line: `old`, which is in the file once, becomes `new`."""

    name: str
    path: str
    old: str
    new: str


MUTATIONS = [
    Mutation("GAE: values of the next state are added", RETURNS,
             "advantages = rewards + gamma * next_values - values",
             "advantages = rewards + gamma * next_values + values"),
    Mutation("GAE: crosses the end of an episode", RETURNS,
             "decay = (gamma * lambda_) * (1.0 - dones.astype(advantages.dtype))",
             "decay = (gamma * lambda_) * np.ones_like(advantages)"),
    Mutation("GAE: no discount of longer estimates", RETURNS,
             "decay = (gamma * lambda_) * (1.0 - dones.astype(advantages.dtype))",
             "decay = lambda_ * (1.0 - dones.astype(advantages.dtype))"),
    Mutation("GAE: skips the last but one row", RETURNS,
             "for t in range(len(advantages) - 2, -1, -1):",
             "for t in range(len(advantages) - 3, -1, -1):"),
    Mutation("GAE: value targets", "algorithms/on_policy.py",
             '"value_targets": advantages + values}', '"value_targets": advantages - values}'),
    Mutation("returns without GAE: no value at a truncation", "algorithms/on_policy.py",
             "bootstrapped = np.where(dones, rewards + config.gamma * next_values, rewards)",
             "bootstrapped = rewards"),
    Mutation("discounted returns: no last value", RETURNS,
             "running = np.asarray(last_values).astype(rewards.dtype)",
             "running = np.zeros_like(np.asarray(last_values)).astype(rewards.dtype)"),
    Mutation("discounted returns: the first row is missing", RETURNS,
             "for t in range(len(rewards) - 1, -1, -1):",
             "for t in range(len(rewards) - 1, 0, -1):"),
    Mutation("LSTM: the padding is remembered", RECURRENT,
             "input_gate[:], forget_gate[:] = -SATURATED, SATURATED",
             "input_gate[:], forget_gate[:] = SATURATED, -SATURATED"),
    Mutation("LSTM: hidden states after the padding", RECURRENT,
             "return hidden[positions], [hidden[ends], cell[0]]",
             "return hidden[positions], [hidden[-sequences:], cell[0]]"),
    Mutation("DQN: one random row skips the network of all", DQN,
             "if is_random is not None and is_random.all():",
             "if is_random is not None and is_random.any():"),
    Mutation("episode returns: of the rows between segments", RETURNS_OF_EPISODES,
             "sums = np.add.reduceat(values, begins_and_ends)[::2]",
             "sums = np.add.reduceat(values, begins_and_ends)[1::2]"),
    Mutation("V-trace: ratio upside down", RETURNS,
             "ratios = np.exp(target_logp - behavior_logp)",
             "ratios = np.exp(behavior_logp - target_logp)"),
    Mutation("V-trace: rho is not clipped", RETURNS,
             "deltas = np.minimum(clip_rho, ratios) *",
             "deltas = ratios *"),
    Mutation("V-trace: c is not clipped", RETURNS,
             "decay = gamma * lambda_ * np.minimum(clip_c, ratios)",
             "decay = gamma * lambda_ * ratios"),
    Mutation("V-trace: advantages use values instead of targets", RETURNS,
             "np.where(within_episode, targets[1:], next_values[:-1])",
             "next_values[:-1]"),
    Mutation("PPO: maximum instead of minimum", PPO,
             "torch.minimum(advantages * ratio, advantages * clipped)",
             "torch.maximum(advantages * ratio, advantages * clipped)"),
    Mutation("PPO: sign of the objective", PPO,
             "policy_loss = -clipped_surrogate(ratio, advantages, clip)",
             "policy_loss = clipped_surrogate(ratio, advantages, clip)"),
    Mutation("PPO: clip interval on one side", PPO,
             "ratio.clamp(1 - clip, 1 + clip)", "ratio.clamp(1 - clip, 1 + 2 * clip)"),
    Mutation("PPO: sign of the entropy bonus", PPO,
             "loss = loss - entropy_coeff * entropy", "loss = loss + entropy_coeff * entropy"),
    Mutation("PPO: smaller value loss", PPO,
             "torch.maximum((values - targets) ** 2, (clipped - targets) ** 2)",
             "torch.minimum((values - targets) ** 2, (clipped - targets) ** 2)"),
    Mutation("PPO: KL coefficient falls when it should rise", KL_PENALTY,
             "return min(2 * kl_coeff, MAX_KL_COEFF)", "return min(0.5 * kl_coeff, MAX_KL_COEFF)"),
    Mutation("PPO kernel: gradient of clipped ratios", KERNELS + "policy_gradient.py",
             "dist.logp_gradient(np.where(surrogate <= clipped, surrogate, 0) / -count)",
             "dist.logp_gradient(surrogate / -count)"),
    Mutation("PPO kernel: gradient of clipped values", KERNELS + "policy_gradient.py",
             "np.where(is_inside, clipped, 0)", "clipped"),
    Mutation("PPO kernel: sign of the KL gradient", KERNELS + "policy_gradient.py",
             "d_outputs += np.float32(policy.kl_coeff / count)",
             "d_outputs -= np.float32(policy.kl_coeff / count)"),
    Mutation("A2C kernel: sign of the entropy bonus", KERNELS + "policy_gradient.py",
             "loss = policy_loss + vf_loss_coeff * vf_loss - entropy_coeff * entropy",
             "loss = policy_loss + vf_loss_coeff * vf_loss + entropy_coeff * entropy"),
    Mutation("DQN kernel: errors are not clipped", KERNELS + "q_learning.py",
             "gradients = np.clip(errors, -1.0, 1.0)", "gradients = errors"),
    Mutation("SAC kernel: gradient of the temperature term", KERNELS + "actor_critic.py",
             "d_raw = 2 * alpha * actions - q_gradients", "d_raw = alpha * actions - q_gradients"),
    Mutation("matrix products: the slower library", "policies/models/matrix_products.py",
             "return \"torch\" if \"Intel\" in name", "return \"torch\" if \"Intel\" not in name"),
    Mutation("Adam: denormal moments stay", "policies/learning/flat_parameters.py",
             "return not is_on and torch.set_flush_denormal(True)", "return False"),
    Mutation("targets: bootstrap at terminal states", TARGET,
             'return torch.where(batch["terminateds"] != 0, 0.0, discounts)',
             'return torch.where(batch["terminateds"] != 0, discounts, discounts)'),
    Mutation("targets: truncation counts as terminal", TARGET,
             'return torch.where(batch["terminateds"] != 0, 0.0, discounts)',
             'return torch.where(batch["dones"] != 0, 0.0, discounts)'),
    Mutation("targets: discount ignores the number of steps", TARGET,
             'discounts = torch.pow(discounts, batch["n_steps"]).float()',
             'discounts = torch.pow(discounts, batch["n_steps"] * 0 + 1).float()'),
    Mutation("DQN kernel: bootstraps at terminal states", KERNELS + "q_learning.py",
             'return np.where(batch.array("terminateds"), 0.0, discounts)',
             'return np.where(batch.array("terminateds"), discounts, discounts)'),
    Mutation("DQN kernel: discount ignores the number of steps", KERNELS + "q_learning.py",
             'gamma ** batch.array("n_steps") if', 'gamma if'),
    Mutation("DQN: weights of prioritized replay are ignored", DQN,
             'return (losses * batch["weights"]).mean() if "weights" in batch else losses.mean()',
             "return losses.mean()"),
    Mutation("double Q: the target network selects actions", DQN,
             "if self.config.double_q:", "if not self.config.double_q:"),
    Mutation("dueling: mean is added", "policies/q_values.py",
             "q: np.ndarray = advantages + (state_values - advantages.mean(1))[:, None]",
             "q: np.ndarray = advantages + (state_values + advantages.mean(1))[:, None]"),
    Mutation("Q-values: sign of the TD error", "policies/q_values.py",
             "return TDLoss(losses, q.detach(), q.detach() - targets)",
             "return TDLoss(losses, q.detach(), targets - q.detach())"),
    Mutation("C51 kernel: probability on the wrong side", KERNELS + "q_learning.py",
             "np.add.at(projected, (rows, below), probs * (1.0 - upper))",
             "np.add.at(projected, (rows, below), probs * upper)"),
    Mutation("C51: rewards are not added", "policies/categorical_q.py",
             "moved = rewards[:, None] + discounts[:, None] * self._support_on(probs.device)",
             "moved = discounts[:, None] * self._support_on(probs.device)"),
    Mutation("SAC: sign of the temperature term in targets", "algorithms/sac.py",
             "return values - alpha * logp", "return values + alpha * logp"),
    Mutation("updates on a GPU: later ones follow one that is not finite", CAPTURED,
             "skipped = self._failed.float()", "skipped = self._failed.float() * 0"),
    Mutation("updates on a GPU: numbers of the loss are those of the capture", CAPTURED,
             "kind = (rows, index is None, active, *policy.loss_coefficients())",
             "kind = (rows, index is None, active)"),
    Mutation("SAC: sign of the temperature loss", "algorithms/sac.py",
             "self._log_alpha * (entropy - target)",
             "self._log_alpha * (target - entropy)"),
    Mutation("SAC: larger of two critics", "algorithms/sac.py",
             "loss = (alpha * logp - values.amin(0)).mean()",
             "loss = (alpha * logp - values.amax(0)).mean()"),
    Mutation("target network: weights swapped", TARGET,
             "lerp_(self.flat.vector.data, tau)", "lerp_(self.flat.vector.data, 1 - tau)"),
    Mutation("target network: updates are not counted", TARGET,
             "self.target_version += 1", "self.target_version += 0"),
    Mutation("target network: one step late", "ops/train.py",
             "return now - last >= self.target_update_freq",
             "return now - last > self.target_update_freq"),
    Mutation("sum tree: child of the next larger sum", SUM_TREE,
             "child = (sums > values[:, None]).argmax(1)",
             "child = (sums > values[:, None] * 0.5).argmax(1)"),
    Mutation("sum tree: one part of the total", SUM_TREE,
             "values += np.arange(count)", "values += 0 * np.arange(count)"),
    Mutation("sum tree: parents are not updated after a fill", SUM_TREE,
             "np.dot(level[start:stop], _ONES, out=sums[start:stop])",
             "np.dot(level[start:stop], _ONES, out=sums[start:stop].copy())"),
    Mutation("priorities: exponent of the weights", PRIORITIZED,
             "** np.float32(-self.beta)", "** np.float32(self.beta)"),
    Mutation("priorities: alpha is ignored", PRIORITIZED,
             "weights = (priorities + self.eps) ** self.alpha",
             "weights = (priorities + self.eps) ** 1.0"),
    Mutation("priorities: overwritten rows are updated", PRIORITIZED,
             "present = ids >= stored.start", "present = ids >= 0"),
    Mutation("priorities: maximum is not kept", PRIORITIZED,
             "self._max_weight = max(self._max_weight, highest)", "self._max_weight = highest"),
    Mutation("ring: wraps one slot early", RING,
             "room = self.capacity - self.num_added % self.capacity  # slots",
             "room = self.capacity - self.num_added % self.capacity - 1  # slots"),
    Mutation("ring: next observation of the row itself", RING,
             "next_slots = self._successors.next_slots.take(ends, mode=\"clip\")",
             "next_slots = self._successors.next_slots.take(slots, mode=\"clip\")"),
    Mutation("V-trace: a lost life is not the end", VTRACE,
             'trajectory_ends(batch) | batch.array("terminateds").astype(bool)',
             "trajectory_ends(batch)"),
    Mutation("V-trace: rows of agents that take turns are single", VTRACE,
             "continues[later] = _is_followed(batch, later)", "continues[later] = False"),
    Mutation("V-trace: dropped rows do not end a trajectory", VTRACE,
             "continues[later] = _is_followed(batch, later)", "continues[later] = True"),
    Mutation("R2D2: returns cross a lost life", R2D2,
             "np.minimum(remaining, to_terminated + 1)", "remaining"),
    Mutation("trajectories: n-step returns cross a lost life", TRAJECTORIES,
             "is_plain and not any(map(_has_done_between_cuts, batches, cuts))", "is_plain"),
    Mutation("values: masked states have the value of their mask", "policies/q_values.py",
             "torch.where(next_q <= MASKED_BELOW, 0.0, next_q)", "next_q"),
    Mutation("trajectories: link over an end", TRAJECTORIES,
             "adjacent = same & unfinished[part] & (first_", "adjacent = same & (first_"),
    Mutation("trajectories: copies take over the links of the original", TRAJECTORIES,
             "if overlaps.any():", "if False:"),
    Mutation("trajectories: copies replace the original", TRAJECTORIES,
             "if last_step < step or last_row < oldest:\n            self._unfinished",
             "if True:\n            self._unfinished"),
    Mutation("trajectories: overwritten rows are linked", TRAJECTORIES,
             "if last_step >= step or last_row < oldest:", "if last_step >= step:"),
    Mutation("replay n-step: rewards after the end count", BUFFERS,
             "rewards = (rewards * is_new_step * self._discounts).sum(0)",
             "rewards = (rewards * self._discounts).sum(0)"),
    Mutation("replay ratio: one batch too many", RATIO,
             "return self.drawn + rows <= self._rows_allowed",
             "return self.drawn <= self._rows_allowed"),
    Mutation("replay ratio: rows before learning_starts count", RATIO,
             "counted = max(0, self.stored - self.learning_starts)",
             "counted = self.stored"),
    Mutation("frames: the wrong slots are reused", "replay/frame_table.py",
             "self._num_released -= reused", "self._num_released -= 0"),
    Mutation("env steps: overwritten rows stay", "replay/env_step_index.py",
             "(self.lowest[slots] < oldest)]", "(self.lowest[slots] < 0)]"),
    Mutation("round robin: an item costs nothing", BRANCHES,
             "self._credit[index] -= 1\n", "self._credit[index] -= 0\n"),
    Mutation("round robin: debts are forgotten", BRANCHES,
             "self._credit[i] += max(rounds, 0) * self._weights[i]",
             "self._credit[i] = FULL_CREDIT"),
    Mutation("gather: items of a shard have the same number", GATHER,
             "shard.num_received += 1", "shard.num_received += 0"),
    Mutation("gather: consecutive deaths are not counted", GATHER,
             "shard.identical_deaths + 1 if is_same else 1", "1"),
    Mutation("gather: the back-off does not grow", GATHER,
             "shard.deaths += 1\n", "shard.deaths = 1\n"),
    Mutation("policy lag: one update too old", ROLLOUT,
             "is_fresh = max(lags) <= self.max_policy_lag",
             "is_fresh = max(lags) <= self.max_policy_lag + 1"),
    Mutation("ledger: dropped steps are not counted", ROLLOUT,
             'counters["num_env_steps_dropped"] += batch.env_steps()',
             'counters["num_env_steps_dropped"] += 0'),
    Mutation("ledger: agent steps count as env steps", ROLLOUT,
             'record_sampled_steps(metrics, self.workers, batch.env_steps(), agent_steps)',
             'record_sampled_steps(metrics, self.workers, batch.agent_steps(), agent_steps)'),
    Mutation("ledger: trained steps are counted twice", "ops/plan_metrics.py",
             'counters["num_env_steps_trained"] += env_steps',
             'counters["num_env_steps_trained"] += 2 * env_steps'),
    Mutation("staleness: dropped steps do not count", STALENESS,
             'int(counters["num_env_steps_trained"] + counters["num_env_steps_dropped"])',
             'int(counters["num_env_steps_trained"])'),
    Mutation("staleness: one batch too many", STALENESS,
             "must_wait = requested >= done + (self.max_batches + 1) * self.batch_size",
             "must_wait = requested >= done + (self.max_batches + 2) * self.batch_size"),
    Mutation("weights: sent again though the worker has them", SYNC,
             "if self._sent.get(index) == versions:", "if self._sent.get(index) is versions:"),
    Mutation("weights: replaced workers keep their version", SYNC,
             "self._sent.pop(index, None)", "self._sent.get(index, None)"),
    Mutation("checksum: only the last chunk counts", STORAGE,
             "self._sum = zlib.crc32(data, self._sum)", "self._sum = zlib.crc32(data)"),
    Mutation("filter: variance of merged statistics", FILTERS,
             "self.m2 = self.m2 + m2 + delta**2 * (self.count * count / total)",
             "self.m2 = self.m2 + m2"),
    Mutation("schedule: interpolation from the wrong end", "policies/schedules.py",
             "return float(v0 + (v1 - v0) * (timestep - t0) / (t1 - t0))",
             "return float(v1 + (v1 - v0) * (timestep - t0) / (t1 - t0))"),
]
# fmt: on


def mutated(mutation: Mutation) -> str:
    """Return the text of the mutation's file with the mutation.

    Raises:
        ValueError: the file has the old text not exactly once.
    """
    text = (ROOT / "flowrl" / mutation.path).read_text()
    if text.count(mutation.old) != 1:
        raise ValueError(
            f"{mutation.name}: {mutation.path} has {text.count(mutation.old)} times {mutation.old}"
        )
    return text.replace(mutation.old, mutation.new)


def is_caught(mutation: Mutation, copy: Path) -> bool:
    """Return whether a test fails for a mutation of a copy of the project."""
    path = copy / "flowrl" / mutation.path
    original, changed = path.read_text(), mutated(mutation)
    path.write_text(changed)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider"]
    command += [f"tests/{name}" for name in TESTS[mutation.path]]
    try:
        done = subprocess.run(
            command, cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, timeout=TIMEOUT_S,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(original)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{mutation.name}: pytest ended with {done.returncode}: {command}")
    return done.returncode == 1


def main() -> int:
    """Run the mutations; return the exit code."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--only", nargs="+", default=[], help="words of the names to run")
    parser.add_argument("--jobs", type=int, default=1, help="mutations at the same time")
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if not options.only or any(w in m.name for w in options.only)]
    for mutation in chosen:
        mutated(mutation)  # before anything runs
    copies: SimpleQueue[Path] = SimpleQueue()
    survivors = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        for number in range(options.jobs):
            copy = Path(folder) / str(number)
            copy.mkdir()
            for name in COPIED:
                source = ROOT / name
                if source.is_dir():
                    shutil.copytree(source, copy / name)
                else:
                    shutil.copy(source, copy)
            copies.put(copy)

        def run(mutation: Mutation) -> None:
            copy = copies.get()
            started = time.perf_counter()
            try:
                caught = is_caught(mutation, copy)
            finally:
                copies.put(copy)
            verdict = "caught" if caught else "NOT CAUGHT"
            print(f"{verdict}  {time.perf_counter() - started:4.0f} s  {mutation.name}", flush=True)
            if not caught:
                survivors.append(mutation)

        list(pool.map(run, chosen))
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutations are caught")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
