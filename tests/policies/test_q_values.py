"""QValues and Atoms: what outputs mean, with and without autograd."""

import numpy as np
import pytest
import torch

from flowrl.policies.categorical_q import CategoricalQ
from flowrl.policies.q_values import QValues

KINDS = {
    "plain": lambda: QValues(3, dueling=False),
    "dueling": lambda: QValues(3, dueling=True),
    "atoms": lambda: CategoricalQ(3, 5, -2.0, 2.0, dueling=False),
    "dueling atoms": lambda: CategoricalQ(3, 5, -2.0, 2.0, dueling=True),
}
FORBIDDEN = -1e9


@pytest.fixture(params=KINDS)
def meaning(request):
    return KINDS[request.param]()


def given(meaning, rows=8, seed=0):
    """Outputs, the state's values, actions, and what should be thought of these."""
    rng = np.random.default_rng(seed)
    outputs = 2 * rng.standard_normal((rows, meaning.num_outputs)).astype(np.float32)
    state = rng.standard_normal(rows).astype(np.float32) if meaning.has_state else None
    actions = rng.integers(0, 3, rows)
    if isinstance(meaning, CategoricalQ):
        goals = rng.dirichlet(np.ones(5), rows).astype(np.float32)
    else:
        goals = (3 * rng.standard_normal(rows)).astype(np.float32)
    return outputs, state, actions, goals


def test_slopes_and_their_gradient_are_autograds(meaning):
    outputs, state, actions, goals = given(meaning)
    share = np.linspace(0.1, 1.0, len(actions), dtype=np.float32)
    tensors = [torch.tensor(outputs, requires_grad=True)]
    if state is not None:
        tensors.append(torch.tensor(state, requires_grad=True))
    worth = tensors[1] if state is not None else None
    told = meaning.judged(tensors[0], worth, torch.from_numpy(actions), goals)
    by_hand = meaning.judged_by_hand(outputs, state, actions, goals)
    np.testing.assert_allclose(by_hand.losses, told.losses.detach(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(by_hand.values, told.values, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(by_hand.errors, told.errors, rtol=1e-5, atol=1e-6)
    (told.losses * torch.from_numpy(share)).sum().backward()
    d_outputs, d_state = meaning.gradient((by_hand.slopes.T * share).T, actions)
    np.testing.assert_allclose(d_outputs, tensors[0].grad, rtol=1e-4, atol=1e-6)
    if state is None:
        assert d_state is None
    else:
        np.testing.assert_allclose(d_state, tensors[1].grad, rtol=1e-4, atol=1e-6)


def test_ranks_order_actions_as_their_values_do(meaning):
    """The same of tensors; and forbidden actions are last."""
    outputs, state, _, _ = given(meaning)
    outputs[2, : meaning.outputs_per_action] = FORBIDDEN
    ranks = meaning.ranks(outputs)
    tensors = meaning.ranks_of_tensors(torch.from_numpy(outputs))
    np.testing.assert_allclose(tensors, ranks, rtol=1e-5, atol=1e-5)
    assert ranks[2, 0] < ranks[2, 1:].min() - 1e6
    if not isinstance(meaning, CategoricalQ):
        worth = None if state is None else torch.from_numpy(state)
        values = meaning.values_of_tensors(torch.from_numpy(outputs), worth).numpy()
        np.testing.assert_array_equal(values.argsort(1), ranks.argsort(1))


@pytest.mark.parametrize("kind", ["plain", "dueling"])
def test_goals_are_the_reward_and_what_the_best_action_is_worth(kind):
    """Also where an action is forbidden, or all of them; and nothing follows a discount of 0."""
    meaning = KINDS[kind]()
    outputs, state, _, _ = given(meaning, 4)
    outputs[1, 0] = FORBIDDEN
    outputs[3] = FORBIDDEN
    best = np.array([2, 1, 0, 0])
    rewards, discounts = np.arange(4, dtype=np.float32), np.array([0.9, 0.5, 0.0, 0.0])
    goals = meaning.goals(outputs, state, best, rewards, discounts)
    values = outputs.astype(np.float64)
    if state is not None:
        allowed = [[0, 1, 2], [1, 2], [0, 1, 2]]
        values[:3] += [[state[i] - outputs[i, own].mean()] for i, own in enumerate(allowed)]
    expected = [0 + 0.9 * values[0, 2], 1 + 0.5 * values[1, 1], 2, 3]
    np.testing.assert_allclose(goals, expected, rtol=1e-5)
    assert goals.dtype == np.float32
