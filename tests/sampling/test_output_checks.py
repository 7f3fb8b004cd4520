"""What a policy returns is checked before it reaches an environment or a batch."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from flowrl.policies import Policy
from flowrl.sampling import RolloutWorker, SimpleListCollector

from .fakes import CountEnv


def sample(policy, action_space=None, num_fragments=1, **config):
    class Env(CountEnv):
        pass

    if action_space is not None:
        Env.action_space = action_space
    settings = {"rollout_fragment_length": 6, **config}
    worker = RolloutWorker(lambda context: Env(), policy, settings)
    return [worker.sample() for _ in range(num_fragments)]


def policy_returning(result):
    """A policy whose n-th call returns result(observations, n), from 0."""

    class Returns(Policy):
        num_calls = -1

        def compute_actions(self, obs_batch, explore=True):
            self.num_calls += 1
            return result(obs_batch, self.num_calls)

    return Returns


@pytest.mark.parametrize(
    ("outputs", "found"),
    [
        (None, "NoneType"),
        (np.zeros(1, int), "ndarray"),
        ((np.zeros(1, int), []), r"\(ndarray, list\)"),
        ((np.zeros(1, int), [], []), r"\(ndarray, list, list\)"),
        ((np.zeros(1, int), None, {}), r"\(ndarray, NoneType, dict\)"),
    ],
)
def test_policy_must_return_actions_states_and_extra_columns(outputs, found):
    with pytest.raises(TypeError, match=f"must return .actions, states, extra.*returned {found}"):
        sample(policy_returning(lambda obs, n: outputs))


@pytest.mark.parametrize("actions", [[0], torch.zeros(1, dtype=torch.int64), 0])
def test_actions_must_be_arrays(actions):
    with pytest.raises(TypeError, match="actions as numpy arrays, it returned a"):
        sample(policy_returning(lambda obs, n: (actions, [], {})))


@pytest.mark.parametrize(
    ("space", "actions", "message"),
    [
        (spaces.Box(-1, 1, (3,)), np.zeros((1, 1), np.float32), r"shape \(1, 1\).*needs \(1, 3\)"),
        (spaces.Box(-1, 1, (3,)), np.zeros(1, np.float32), r"shape \(1,\).*needs \(1, 3\)"),
        (spaces.MultiDiscrete([3, 4]), np.full((1, 2), 1.7), "float64.*needs integers"),
        (spaces.MultiDiscrete([3, 4]), np.zeros((1, 1), int), r"needs \(1, 2\)"),
        (spaces.MultiBinary(3), np.full((1, 3), 0.5), "float64.*needs integers"),
        (spaces.Discrete(2), np.zeros((1, 1), int), r"needs \(1,\)"),
        (spaces.Discrete(2), np.zeros(1, bool), "dtype bool.*needs integers"),
        (spaces.Box(-1, 1, (1,)), np.array([["a"]]), "needs numbers"),
    ],
)
def test_actions_must_fit_the_space(space, actions, message):
    with pytest.raises(ValueError, match=message):
        sample(policy_returning(lambda obs, n: (actions, [], {})), space)


@pytest.mark.parametrize(
    ("space", "actions"),
    [
        (spaces.Dict(a=spaces.Discrete(2)), {"b": np.zeros(1, int)}),
        (spaces.Tuple([spaces.Discrete(2)]), [np.zeros(1, int)] * 2),
    ],
)
def test_actions_must_have_the_structure_of_the_space(space, actions):
    with pytest.raises(TypeError, match=r"must return actions as a (dict|tuple)"):
        sample(policy_returning(lambda obs, n: (actions, [], {})), space)


@pytest.mark.parametrize("has_column", [lambda n: n != 2, lambda n: n == 2])
def test_extra_columns_must_be_the_same_in_every_step(has_column):
    def result(obs, n):
        extra = {"q": np.full(len(obs), n)} if has_column(n) else {}
        return np.zeros(len(obs), int), [], extra

    with pytest.raises(ValueError, match="return the same columns in every step"):
        sample(policy_returning(result))


def test_extra_columns_may_change_between_fragments():
    def result(obs, n):
        extra = {"q": np.full(len(obs), n)} if n >= 6 else {}
        return np.zeros(len(obs), int), [], extra

    first, second = sample(policy_returning(result), num_fragments=2)
    assert "q" not in first
    assert second["q"].tolist() == [6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"policies": ["p"], "policy_mapping_fn": lambda agent: "p"},
        {"sample_collector": SimpleListCollector},
    ],
    ids=["columns", "agents", "collector"],
)
def test_columns_of_earlier_fragments_are_not_returned_again(config):
    def result(obs, n):
        extra = {"q": np.full(len(obs), n)} if not 6 <= n < 12 else {}
        return np.zeros(len(obs), int), [], extra

    fragments = sample(policy_returning(result), num_fragments=3, **config)
    columns = [next(iter(batch.policy_batches.values())).get("q") for batch in fragments]
    assert [None if q is None else q.tolist() for q in columns] == [
        [0, 1, 2, 3, 4, 5],
        None,
        [12, 13, 14, 15, 16, 17],
    ]


def test_rows_of_one_episode_have_the_same_columns():
    def result(obs, n):
        extra = {"q": np.full(len(obs), n)} if n >= 3 else {"p": np.full(len(obs), n)}
        return np.zeros(len(obs), int), [], extra

    settings = {"batch_mode": "complete_episodes", "rollout_fragment_length": 1}
    worker = RolloutWorker(
        lambda context: CountEnv(3 + 2 * context.vector_index),
        policy_returning(result),
        {"num_envs_per_worker": 2, **settings},
    )
    assert "p" in worker.sample()
    with pytest.raises(ValueError, match=r"columns \['q'\], but \['p'\] in earlier steps"):
        worker.sample()


@pytest.mark.parametrize(
    "config", [{}, {"policies": ["p"], "policy_mapping_fn": lambda agent: "p"}]
)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"actions": np.zeros((1, 2), np.float32)},
            r"actions of shape \(1, 2\) for 2 observations",
        ),
        (
            {"actions": np.zeros((2, 1), np.float32)},
            r"actions of shape \(2, 1\) for 2 observations",
        ),
        ({"q": np.zeros((2, 1))}, r"q of shape \(2, 1\) for 2 observations, expected \(2, 3\)"),
        ({"q": np.zeros((1, 3))}, r"q of shape \(1, 3\) for 2 observations, expected \(2, 3\)"),
    ],
)
def test_shapes_must_be_the_same_in_every_step(config, changes, message):
    def result(obs, n):
        outputs = {"actions": np.zeros((2, 2), np.float32), "q": np.zeros((2, 3))}
        outputs |= changes if n == 3 else {}
        return outputs["actions"], [], {"q": outputs["q"]}

    box = spaces.Box(-1, 1, (2,))
    with pytest.raises(ValueError, match=message):
        sample(policy_returning(result), box, num_envs_per_worker=2, **config)


def test_dtypes_must_be_the_same_in_every_step():
    def later_halves(obs, n):
        return np.zeros(len(obs), int), [], {"q": np.full(len(obs), 0.5 if n else 0)}

    with pytest.raises(ValueError, match="q of dtype float64, but of int64 in the first step"):
        sample(policy_returning(later_halves))

    def later_floats(obs, n):
        return np.full((len(obs), 1), 0.5 if n else 0), [], {}

    with pytest.raises(ValueError, match="actions of dtype float64, but of int64 in the first"):
        sample(policy_returning(later_floats), spaces.Box(-1, 1, (1,)))


def test_float32_columns_accept_float64():
    def result(obs, n):
        return np.zeros(len(obs), int), [], {"q": np.full(len(obs), n, f"f{4 if not n else 8}")}

    (rows,) = sample(policy_returning(result))
    assert rows["q"].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("column", [[1], 1, np.float32(1)])
def test_extra_columns_must_be_arrays(column):
    with pytest.raises(TypeError, match="column 'x' as a numpy array of 1 rows"):
        sample(policy_returning(lambda obs, n: (np.zeros(1, int), [], {"x": column})))


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([], "returned 0 states, .* has 1"),
        ([np.zeros((1, 4)), np.zeros((1, 4))], "returned 2 states"),
        ([np.zeros(4)], r"state 0 of shape \(4,\) for 1 observations.*\(1, 4\)"),
        ([np.zeros((2, 4))], r"state 0 of shape \(2, 4\)"),
        ([np.zeros((1, 5))], r"state 0 of shape \(1, 5\)"),
    ],
)
def test_states_must_fit_the_initial_ones(states, message):
    class Stateful(policy_returning(lambda obs, n: (np.zeros(1, int), states, {}))):
        def get_initial_state(self):
            return [np.zeros(4)]

    with pytest.raises(ValueError, match=message):
        sample(Stateful)
