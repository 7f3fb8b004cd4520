"""QValues and CategoricalQ: losses, gradients, greedy scores and TD targets."""

import numpy as np
import pytest
import torch

from flowrl.policies.categorical_q import CategoricalQ
from flowrl.policies.learning.kernels.q_learning import (
    loss_and_gradients,
    output_gradients,
    td_targets,
)
from flowrl.policies.q_values import QValues

KINDS = {
    "plain": lambda: QValues(3, dueling=False),
    "dueling": lambda: QValues(3, dueling=True),
    "atoms": lambda: CategoricalQ(3, 5, -2.0, 2.0, dueling=False),
    "dueling atoms": lambda: CategoricalQ(3, 5, -2.0, 2.0, dueling=True),
}
MASKED = -1e9


@pytest.fixture(params=KINDS)
def q_function(request):
    return KINDS[request.param]()


def random_inputs(q_function, rows=8, seed=0):
    """Return outputs, state values, actions and targets."""
    rng = np.random.default_rng(seed)
    outputs = 2 * rng.standard_normal((rows, q_function.num_outputs)).astype(np.float32)
    state = rng.standard_normal(rows).astype(np.float32) if q_function.uses_state_value else None
    actions = rng.integers(0, 3, rows)
    if isinstance(q_function, CategoricalQ):
        targets = rng.dirichlet(np.ones(5), rows).astype(np.float32)
    else:
        targets = (3 * rng.standard_normal(rows)).astype(np.float32)
    return outputs, state, actions, targets


def test_kernel_loss_and_gradients_equal_autograd(q_function):
    outputs, state, actions, targets = random_inputs(q_function)
    share = np.linspace(0.1, 1.0, len(actions), dtype=np.float32)
    tensors = [torch.tensor(outputs, requires_grad=True)]
    if state is not None:
        tensors.append(torch.tensor(state, requires_grad=True))
    values = tensors[1] if state is not None else None
    expected = q_function.td_loss(
        tensors[0], values, torch.from_numpy(actions), torch.from_numpy(targets)
    )
    loss, gradients = loss_and_gradients(q_function, outputs, state, actions, targets)
    np.testing.assert_allclose(loss.losses, expected.losses.detach(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(loss.q, expected.q, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(loss.errors, expected.errors, rtol=1e-5, atol=1e-6)
    (expected.losses * torch.from_numpy(share)).sum().backward()
    d_outputs, d_state = output_gradients(q_function, (gradients.T * share).T, actions)
    np.testing.assert_allclose(d_outputs, tensors[0].grad, rtol=1e-4, atol=1e-6)
    if state is None:
        assert d_state is None
    else:
        np.testing.assert_allclose(d_state, tensors[1].grad, rtol=1e-4, atol=1e-6)


def test_values_and_gradients_are_finite_if_all_actions_are_masked():
    outputs = torch.tensor([[MASKED] * 3, [1.0, 2.0, MASKED]], requires_grad=True)
    state = torch.ones(2, requires_grad=True)
    values = QValues(3, dueling=True).values(outputs, state)
    np.testing.assert_allclose(values.detach(), [[MASKED] * 3, [0.5, 1.5, MASKED]])
    values.sum().backward()
    assert torch.isfinite(outputs.grad).all()
    assert torch.isfinite(state.grad).all()


def test_greedy_scores_order_actions_by_value(q_function):
    """Masked actions come last; tensors and arrays score alike."""
    outputs, state, _, _ = random_inputs(q_function)
    outputs[2, : q_function.outputs_per_action] = MASKED
    scores = q_function.greedy_scores(outputs)
    tensors = q_function.greedy_scores_of_tensors(torch.from_numpy(outputs))
    np.testing.assert_allclose(tensors, scores, rtol=1e-5, atol=1e-5)
    assert scores[2, 0] < scores[2, 1:].min() - 1e6
    if not isinstance(q_function, CategoricalQ):
        state_values = None if state is None else torch.from_numpy(state)
        values = q_function.values(torch.from_numpy(outputs), state_values).numpy()
        np.testing.assert_array_equal(values.argsort(1), scores.argsort(1))


def test_scores_of_arrays_and_of_tensors_are_replaced_together():
    with pytest.raises(TypeError, match="Lowest replaces greedy_scores"):

        class Lowest(QValues):
            def greedy_scores(self, outputs):
                return -outputs


@pytest.mark.parametrize("kind", ["plain", "dueling"])
def test_td_targets_add_the_discounted_value_of_the_best_action(kind):
    """Also if one or all actions are masked; a discount of 0 adds nothing."""
    q_function = KINDS[kind]()
    outputs, state, _, _ = random_inputs(q_function, 4)
    outputs[1, 0] = MASKED
    outputs[3] = MASKED
    best = np.array([2, 1, 0, 0])
    rewards, discounts = np.arange(4, dtype=np.float32), np.array([0.9, 0.5, 0.0, 0.0])
    arrays = outputs, state, best, rewards, discounts
    targets = q_function.td_targets(
        *(None if array is None else torch.from_numpy(array) for array in arrays)
    ).numpy()
    np.testing.assert_allclose(td_targets(q_function, *arrays), targets, rtol=1e-6)
    values = outputs.astype(np.float64)
    if state is not None:
        allowed = [[0, 1, 2], [1, 2], [0, 1, 2]]
        values[:3] += [[state[i] - outputs[i, a].mean()] for i, a in enumerate(allowed)]
    expected = [0 + 0.9 * values[0, 2], 1 + 0.5 * values[1, 1], 2, 3]
    np.testing.assert_allclose(targets, expected, rtol=1e-5)
    assert targets.dtype == np.float32


@pytest.mark.parametrize("dueling", [False, True])
def test_value_of_a_state_without_allowed_actions_is_zero(dueling):
    """A truncated episode may end with a mask that allows no action."""
    q_function = QValues(3, dueling=dueling)
    outputs = np.array([[1.0, 2.0, 0.0], [MASKED] * 3], np.float32)
    state = np.array([0.5, 0.5], np.float32) if dueling else None
    best, rewards = np.array([1, 0]), np.array([1.0, 3.0], np.float32)
    discounts = np.full(2, 0.9, np.float32)
    targets = td_targets(q_function, outputs, state, best, rewards, discounts)
    next_value = 0.5 + 2 - 1 if dueling else 2.0
    np.testing.assert_allclose(targets, [1 + 0.9 * next_value, 3.0], rtol=1e-6)
    tensors = [None if a is None else torch.from_numpy(a) for a in (outputs, state, best)]
    expected = q_function.td_targets(
        *tensors, torch.from_numpy(rewards), torch.from_numpy(discounts)
    )
    np.testing.assert_allclose(targets, expected, rtol=1e-6)


@pytest.mark.parametrize("dueling", [False, True])
def test_distribution_of_a_state_without_allowed_actions_is_at_the_reward(dueling):
    q_function = CategoricalQ(3, 5, 0.0, 8.0, dueling=dueling)
    outputs = np.full((1, q_function.num_outputs), MASKED, np.float32)
    if dueling:
        outputs[:, 15:] = np.linspace(-1, 1, 5)
    best, rewards, discounts = np.array([1]), np.array([4.0], "f4"), np.array([0.9], "f4")
    expected = [[0, 0, 1, 0, 0]]
    targets = td_targets(q_function, outputs, None, best, rewards, discounts)
    np.testing.assert_allclose(targets, expected, atol=1e-6)
    tensors = map(torch.from_numpy, (best, rewards, discounts))
    of_tensors = q_function.td_targets(torch.from_numpy(outputs), None, *tensors)
    np.testing.assert_allclose(of_tensors, expected, atol=1e-6)


def test_values_that_are_not_numbers_stay_in_targets():
    outputs = np.array([[np.nan, 1.0, 1.0]], np.float32)
    best, rewards, discounts = np.array([0]), np.array([1.0], "f4"), np.array([0.9], "f4")
    q_function = QValues(3, dueling=False)
    assert np.isnan(td_targets(q_function, outputs, None, best, rewards, discounts)).all()
    tensors = map(torch.from_numpy, (best, rewards, discounts))
    assert q_function.td_targets(torch.from_numpy(outputs), None, *tensors).isnan().all()
