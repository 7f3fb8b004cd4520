"""Fragments with known trajectories, and checks of drawn rows against them."""

import numpy as np

from flowrl.data import SampleBatch
from flowrl.data.indexed_columns import IndexedColumn, NextRows


class FragmentStream:
    """Fragments as samplers make them, from episodes of the given lengths.

    The observation of a row is [episode, step].

    Attributes:
        rows: (episode, step, reward, done) of every row so far, in order.
    """

    def __init__(self, envs, lengths, truncated=False, nested=False):
        self.lengths = iter(lengths)
        self.envs = [self._new_episode(i) for i in range(envs)]
        self.episodes = envs
        self.truncated, self.nested = truncated, nested
        self.rows = []

    def _new_episode(self, episode):
        return [episode, 0, next(self.lengths, 5)]

    def fragment(self, steps, kind="indexed"):
        """Return `steps` rows of each environment.

        `kind` is "indexed" (new_obs as NextRows), "plain", "shuffled" or "nested".
        """
        columns = {n: [] for n in ("obs", "new_obs", "rewards", "dones", "eps_id", "t")}
        for env in range(len(self.envs)):
            for _ in range(steps):
                episode, step, length = self.envs[env]
                done = step + 1 == length
                row = ([episode, step], [episode, step + 1], episode + step / 8, done)
                for name, value in zip(columns, (*row, episode, step), strict=True):
                    columns[name].append(value)
                self.rows.append((episode, step, episode + step / 8, done))
                self.envs[env][1] += 1
                if done:
                    self.envs[env] = self._new_episode(self.episodes)
                    self.episodes += 1
        dones = np.array(columns.pop("dones"))
        batch = SampleBatch(
            {
                n: np.array(c, np.float32 if n in ("obs", "rewards") else None)
                for n, c in columns.items()
            }
        )
        batch["new_obs"] = batch["new_obs"].astype(np.float32)
        flags = (np.zeros_like(dones), dones) if self.truncated else (dones, np.zeros_like(dones))
        batch["terminateds"], batch["truncateds"] = flags
        batch["agent_index"] = np.zeros(batch.count, np.int64)
        if kind == "indexed":
            return self._with_next_rows(batch, dones, steps)
        if kind == "shuffled":
            return batch.take_rows(np.random.default_rng(0).permutation(batch.count))
        if self.nested:
            for name in ("obs", "new_obs"):
                batch[name] = {"a": batch[name], "b": (batch[name][:, 0].copy(),)}
        return batch

    @staticmethod
    def _with_next_rows(batch, dones, steps):
        cuts = dones.copy()
        cuts[steps - 1 :: steps] = True
        cuts = np.flatnonzero(cuts)
        base = np.concatenate([batch["obs"], batch["new_obs"][cuts]])
        columns = {"obs": base[: batch.count], "new_obs": NextRows(base, batch.count, cuts)}
        return SampleBatch.unchecked({**dict(batch.stored()), **columns})


def with_stacks(batch, k, kind="stacked"):
    """Return a fragment whose observations are the last k frames, the first one repeated.

    `kind` is "stacked" (indexed columns with one base, as samplers make them), "separate" (each
    column has its own base) or "arrays".
    """
    stacks = {}
    for name in ("obs", "new_obs"):
        episode, step = batch[name].T
        steps = np.maximum(step[:, None] + np.arange(1 - k, 1), 0)
        stacks[name] = np.stack([np.broadcast_to(episode[:, None], steps.shape), steps], 2)
    if kind == "arrays":
        return batch.with_columns(**stacks)
    frames, index = np.unique(
        np.concatenate(list(stacks.values())).reshape(-1, 2), axis=0, return_inverse=True
    )
    frames = frames.astype(np.float32)
    obs, new_obs = index.reshape(2, batch.count, k)
    bases = frames, frames if kind == "stacked" else frames.copy()
    columns = {"obs": IndexedColumn(bases[0], obs), "new_obs": IndexedColumn(bases[1], new_obs)}
    return SampleBatch.unchecked({**dict(batch.stored()), **columns})


def check_stacks(drawn, k):
    """Check that observations are the frames [episode, step] of the last k steps."""
    for name, ahead in (("obs", 0), ("new_obs", drawn.get("n_steps", np.ones(drawn.count)))):
        step = (drawn["t"] + ahead).astype(np.float32)
        steps = np.maximum(step[:, None] + np.arange(1 - k, 1), 0)
        np.testing.assert_array_equal(drawn[name][:, :, 1], steps)
        np.testing.assert_array_equal(drawn[name][:, :, 0], drawn["eps_id"][:, None] + 0 * steps)


def array_of(observations):
    """Return the observations [rows, 2] of a nested or plain column."""
    if isinstance(observations, dict):
        np.testing.assert_array_equal(observations["b"][0], observations["a"][:, 0])
        return observations["a"]
    return observations


def check_rows(drawn, rows, n_step, gamma):
    """Check drawn rows against the stored rows (episode, step, reward, done)."""
    stored = {(episode, step): (reward, done) for episode, step, reward, done in rows}
    for i in range(drawn.count):
        episode, step = array_of(drawn["obs"])[i]
        assert (drawn["eps_id"][i], drawn["t"][i]) == (episode, step)
        assert (episode, step) in stored
        total, k = 0.0, 0
        while k < n_step and (episode, step + k) in stored:
            reward, done = stored[episode, step + k]
            total += gamma**k * reward
            k += 1
            if done:
                break
        np.testing.assert_allclose(drawn["rewards"][i], total, rtol=1e-6)
        assert array_of(drawn["new_obs"])[i].tolist() == [episode, step + k]
        assert drawn["dones"][i] == done
        if n_step > 1:
            assert drawn["n_steps"][i] == k


def chi_square(counts, expected):
    return ((counts - expected) ** 2 / expected).sum()
