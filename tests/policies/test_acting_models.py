"""Acting for a network on a GPU: a copy on the CPU, or a graph of the forward pass."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete

from flowrl.algorithms.dqn import DQNTorchPolicy
from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.algorithms.sac import SACTorchPolicy
from flowrl.policies import acting_models
from flowrl.policies.acting_models import CapturedForward, CPUCopy

from .fake_device import FakeGraph

pytestmark = pytest.mark.usefixtures("cuda")

OBS, THREE = Box(-1, 1, (4,)), Discrete(3)
IMAGE = Box(0, 255, (10, 10, 2), np.uint8)
CONV = {"conv_filters": [[4, 4, 2]], "post_fcnet_hiddens": [8]}


def make(policy_class, obs_space=OBS, action_space=THREE, **settings):
    return policy_class(obs_space, action_space, {"seed": 3, "device": "cuda", **settings})


def observations(space, rows, seed=0):
    rng = np.random.default_rng(seed)
    if isinstance(space, Dict):
        return {key: observations(part, rows, seed) for key, part in space.items()}
    if space.dtype == np.uint8:
        return rng.integers(0, 256, (rows, *space.shape), np.uint8)
    return rng.standard_normal((rows, *space.shape)).astype(np.float32)


@pytest.mark.parametrize(
    ("policy_class", "action_space", "settings"),
    [
        (PPOTorchPolicy, THREE, {}),
        (DQNTorchPolicy, THREE, {}),
        (SACTorchPolicy, Box(-1, 1, (2,)), {}),
        (PPOTorchPolicy, THREE, {"model": {"use_lstm": True, "lstm_cell_size": 4}}),
    ],
)
def test_a_copy_on_the_cpu_has_the_newest_weights(policy_class, action_space, settings):
    """After updates, new weights, and the state of a policy of the same version."""
    policy = make(policy_class, OBS, action_space, **settings)
    other = make(policy_class, OBS, action_space, **{**settings, "seed": 8})
    assert isinstance(policy._acting_model, CPUCopy)

    def check():
        inputs = {"obs": observations(OBS, 3)}
        inputs |= {
            f"state_in_{i}": np.zeros((3, *part.shape), part.dtype)
            for i, part in enumerate(policy.get_initial_state())
        }
        by_copy, by_gpu = (
            model.compute_outputs(inputs) for model in (policy.acting_model, policy.model)
        )
        np.testing.assert_allclose(by_copy[0], by_gpu[0], rtol=1e-4, atol=1e-5)
        if by_gpu[1] is not None:
            np.testing.assert_allclose(by_copy[1], by_gpu[1], rtol=1e-4, atol=1e-5)
        return by_copy[0]

    before = check()
    policy.apply_gradients(np.ones(len(policy.flat.gradient), np.float32))
    after = check()
    assert (after != before).any()
    policy.set_weights(other.get_weights())
    assert (check() != after).any()
    other.version = policy.version
    policy.apply_gradients(np.ones(len(policy.flat.gradient), np.float32))
    policy.version = other.version
    policy.set_state(other.get_state())
    check()


@pytest.mark.parametrize("obs_space", [IMAGE, Dict(image=IMAGE, vector=OBS)])
@pytest.mark.parametrize(("policy_class", "dueling"), [(PPOTorchPolicy, None),
                                                       (DQNTorchPolicy, False)])  # fmt: skip
def test_graphs_of_the_forward_pass_equal_the_network(policy_class, dueling, obs_space):
    """For several numbers of rows, and after the weights change."""
    settings = {} if dueling is None else {"dueling": dueling}
    policy = make(policy_class, obs_space, model=CONV, **settings)
    captures = FakeGraph.captures
    assert isinstance(policy._acting_model, CapturedForward)
    for number, rows in enumerate((3, 3, 3, 2, 2, 3, 2)):
        if number == 5:
            policy.apply_gradients(np.ones(len(policy.flat.gradient), np.float32))
        obs = observations(obs_space, rows, seed=number)
        by_graph, by_network = (
            model.compute_outputs({"obs": obs}) for model in (policy.acting_model, policy.model)
        )
        np.testing.assert_allclose(by_graph[0], by_network[0], rtol=1e-4, atol=1e-5)
        if policy.model.has_value_function:
            np.testing.assert_allclose(by_graph[1], by_network[1], rtol=1e-4, atol=1e-5)
            values = policy.compute_values(obs)
            np.testing.assert_allclose(values, by_network[1], rtol=1e-4, atol=1e-5)
    assert len(policy._acting_model._graphs) == 2
    if not torch.cuda.is_available():
        assert FakeGraph.captures == captures + 2


def test_graphs_of_few_numbers_of_rows_are_kept(monkeypatch):
    monkeypatch.setattr(acting_models, "MAX_GRAPHS", 2)
    policy = make(PPOTorchPolicy, IMAGE, model=CONV)
    for rows in (1, 2, 3, 3, 3, 1):
        policy.compute_actions(observations(IMAGE, rows))
    assert set(policy._acting_model._graphs) == {1, 2}


def test_a_network_that_cannot_be_captured_is_tried_once(monkeypatch, caplog):
    def refuse(stream, warm_up, function):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(acting_models, "CudaGraph", refuse)
    policy = make(PPOTorchPolicy, IMAGE, model=CONV)
    for rows in (2, 2, 2, 3, 3, 3):
        policy.compute_actions(observations(IMAGE, rows))
    assert len([r for r in caplog.records if "CUDA graph" in r.getMessage()]) == 1


def test_large_networks_act_on_the_gpu():
    policy = make(PPOTorchPolicy, OBS, model={"fcnet_hiddens": [512, 512]})
    assert policy.acting_model is policy.model


def test_observations_that_do_not_fit_get_the_error_of_the_network():
    policy = make(PPOTorchPolicy, IMAGE, model=CONV)
    for _ in range(3):
        policy.compute_actions(observations(IMAGE, 2))
    with pytest.raises(ValueError, match=r"\[2, 9, 9, 2\]|9, 9"):
        policy.compute_actions(np.zeros((2, 9, 9, 2), np.uint8))


@pytest.mark.parametrize(
    ("policy_class", "obs_space", "settings"),
    [
        (PPOTorchPolicy, IMAGE, {"cuda_graphs": False, "model": CONV}),
        (DQNTorchPolicy, IMAGE, {"noisy": True, "model": CONV}),
        (PPOTorchPolicy, OBS, {"model": {"fcnet_activation": "silu"}}),
        (PPOTorchPolicy, OBS, {"device": "cpu"}),
    ],
)
def test_other_networks_act_themselves(policy_class, obs_space, settings):
    policy = make(policy_class, obs_space, **settings)
    assert policy.acting_model is policy.model
    for number in range(3):
        obs = observations(obs_space, 2, seed=number)
        actions, _, _ = policy.compute_actions(obs)
        assert actions.shape == (2,)
