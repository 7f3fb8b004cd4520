"""Row-by-row sampling returns the same rows as columnar sampling, for all settings."""

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.data import SampleBatch
from flowrl.policies import ViewRequirement
from flowrl.sampling import RolloutWorker, SimpleListCollector

from .fakes import CountEnv

ID_COLUMNS = ("eps_id", "unroll_id")


def pair(length=3, fragment=7, envs=2, views=(), env=CountEnv, **config):
    """Return a worker that samples in columns and one that samples rows, otherwise equal."""
    workers = []
    for collector in (None, SimpleListCollector):
        settings = {
            "num_envs_per_worker": envs,
            "rollout_fragment_length": fragment,
            "seed": 1,
            "sample_collector": collector,
            **config,
        }
        worker = RolloutWorker(lambda context: env(length), PPOTorchPolicy, settings)
        worker.policy.view_requirements.update(views)
        workers.append(worker)
    return workers


def assert_same(columns, rows):
    assert set(columns) == set(rows)
    for name in columns:
        a, b = columns[name], rows[name]
        assert a.dtype == b.dtype, name
        if name in ID_COLUMNS:
            assert np.array_equal(np.diff(a) != 0, np.diff(b) != 0), name
        elif name == "infos":
            assert a.tolist() == b.tolist()
        else:
            assert np.allclose(a, b, atol=1e-6), (name, a, b)


def assert_same_episodes(columns, rows):
    episodes = [sorted(tuple(e[:3]) for e in worker.get_metrics()) for worker in (columns, rows)]
    assert episodes[0] == episodes[1]
    assert columns.env_steps == rows.env_steps


@given(
    length=st.integers(1, 6),
    fragment=st.integers(1, 9),
    envs=st.integers(1, 3),
    horizon=st.sampled_from([None, 2, 4]),
    soft=st.booleans(),
    no_done_at_end=st.booleans(),
    normalize=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_rows_equal_columns(length, fragment, envs, horizon, soft, no_done_at_end, normalize):
    columns, rows = pair(
        length,
        fragment,
        envs,
        horizon=horizon,
        soft_horizon=soft and horizon is not None,
        no_done_at_end=no_done_at_end,
        normalize_observations=normalize,
        normalize_rewards=normalize,
    )
    if normalize:
        stats = {"count": 9.0, "mean": np.array([1.0, 2.0]), "m2": np.array([20.0, 30.0])}
        for worker in (columns, rows):
            worker.policy.observation_filter.load_state_dict(stats)
    for _ in range(3):
        assert_same(columns.sample(), rows.sample())
        # updates of the filters
        for one, other in zip(columns.reply_tags()["filters"], rows.reply_tags()["filters"]):  # noqa: B905
            for kind, fresh in one["default_policy"].items():
                for name, value in fresh.items():
                    assert np.allclose(value, other["default_policy"][kind][name]), (kind, name)
    assert columns.env_steps == rows.env_steps


def test_rows_equal_columns_for_normalized_float64_observations():
    class Float64(CountEnv):
        observation_space = gym.spaces.Box(-1.0, 1e6, (2,), np.float64)

        def observe(self):
            return super().observe().astype(np.float64)

    columns, rows = pair(3, 8, 2, env=Float64, normalize_observations=True)
    assert_same(columns.sample(), rows.sample())


@given(st.integers(1, 5), st.integers(1, 9), st.sampled_from([None, 2, 4]), st.booleans())
@settings(max_examples=20, deadline=None)
def test_episode_metrics_equal_columns(length, fragment, horizon, soft):
    columns, rows = pair(length, fragment, horizon=horizon, soft_horizon=soft and bool(horizon))
    for _ in range(4):
        columns.sample(), rows.sample()
    assert_same_episodes(columns, rows)


SHIFTS = st.one_of(
    st.integers(-4, 3),
    st.lists(st.integers(-4, 3), min_size=1, max_size=3),
    st.tuples(st.integers(-5, 0), st.integers(0, 3)).map(lambda ab: f"{ab[0]}:{ab[1]}"),
)


@given(
    SHIFTS,
    st.sampled_from(["obs", "actions", "rewards", "terminateds", "dones", "vf_preds"]),
    st.integers(1, 6),
    st.integers(1, 7),
    st.sampled_from([None, 2, 3]),
)
@settings(max_examples=60, deadline=None)
def test_views_equal_columns(shift, column, length, fragment, soft):
    from gymnasium.spaces import Box

    view = ViewRequirement(column, shift=shift)
    if column == "vf_preds":
        view.space = Box(-1, 1, (), np.float32)
    columns, rows = pair(
        length,
        fragment,
        views={"view": view},
        horizon=soft,
        soft_horizon=soft is not None,
    )
    for _ in range(4):
        assert_same(columns.sample(), rows.sample())


class PerSegment(PPOTorchPolicy):
    """Postprocesses each segment separately."""

    def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
        assert len(set(sample_batch["eps_id"])) == 1
        return super().postprocess_trajectory(sample_batch, other_agent_batches, episode)


@pytest.mark.parametrize("use_gae", [True, False])
def test_postprocessing_segments_equals_postprocessing_together(use_gae):
    batches = []
    for policy in (PPOTorchPolicy, PerSegment):
        worker = RolloutWorker(
            lambda context: CountEnv(3),
            policy,
            {
                "num_envs_per_worker": 2,
                "rollout_fragment_length": 7,
                "seed": 1,
                "use_gae": use_gae,
                "sample_collector": SimpleListCollector,
            },
        )
        batches.append([worker.sample() for _ in range(3)])
    for whole, segments in zip(*batches, strict=True):
        order = [np.lexsort((b["t"], b["unroll_id"])) for b in (whole, segments)]
        assert_same(whole.take_rows(order[0]), segments.take_rows(order[1]))


def test_observations_are_stored_once():
    _, rows = pair(fragment=50)
    batch = rows.sample()
    stored = dict(batch.stored())
    assert stored["new_obs"].base is stored["obs"].base
    joined = SampleBatch.concat_samples([batch, rows.sample()])
    assert joined["new_obs"].shape == joined["obs"].shape
