"""Policies on a GPU compute the same as on the CPU.

The tests run with tensors that only behave as if they were on a GPU, and, marked `gpu`, on one.
"""

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from flowrl.algorithms.a2c import A2CTorchPolicy
from flowrl.algorithms.appo import APPOTorchPolicy
from flowrl.algorithms.cql import CQLTorchPolicy
from flowrl.algorithms.dqn import DQNTorchPolicy
from flowrl.algorithms.impala import IMPALATorchPolicy
from flowrl.algorithms.marwil import MARWILTorchPolicy
from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.algorithms.r2d2 import R2D2TorchPolicy
from flowrl.algorithms.sac import SACTorchPolicy
from flowrl.algorithms.td3 import TD3TorchPolicy
from flowrl.policies import build_torch_policy
from flowrl.policies.distributions import Categorical
from flowrl.sampling import RolloutWorker
from flowrl.trainer.plan_settings import plan_config

LSTM = {"model": {"use_lstm": True, "lstm_cell_size": 8}}
GRU = {"model": {"use_lstm": True, "lstm_cell_size": 8, "lstm_cell_type": "gru"}}
ATTENTION = {"model": {"use_attention": True, "attention_dim": 8, "attention_memory": 3}}
CASES = {
    "ppo": (PPOTorchPolicy, "CartPole-v1", {}),
    "ppo continuous": (PPOTorchPolicy, "Pendulum-v1", {"kl_coeff": 0.2, "vf_clip_param": 1.0}),
    "ppo lstm": (PPOTorchPolicy, "CartPole-v1", LSTM),
    "ppo gru": (PPOTorchPolicy, "CartPole-v1", GRU),
    "ppo attention": (PPOTorchPolicy, "CartPole-v1", ATTENTION),
    "a2c": (A2CTorchPolicy, "CartPole-v1", {"entropy_coeff": 0.01}),
    "impala": (IMPALATorchPolicy, "CartPole-v1", {}),
    "impala lstm": (IMPALATorchPolicy, "CartPole-v1", LSTM),
    "appo": (APPOTorchPolicy, "CartPole-v1", {}),
    "marwil": (MARWILTorchPolicy, "CartPole-v1", {}),
    "dqn": (DQNTorchPolicy, "CartPole-v1", {}),
    "rainbow": (DQNTorchPolicy, "CartPole-v1", {"num_atoms": 5, "noisy": True}),
    "r2d2": (R2D2TorchPolicy, "CartPole-v1", LSTM),
    "sac": (SACTorchPolicy, "Pendulum-v1", {}),
    "sac discrete": (SACTorchPolicy, "CartPole-v1", {}),
    "td3": (TD3TorchPolicy, "Pendulum-v1", {}),
    "cql": (CQLTorchPolicy, "Pendulum-v1", {}),
}


def worker(case, **settings):
    policy_class, env, config = CASES[case]
    settings = {"num_envs_per_worker": 2, "rollout_fragment_length": 16, **config, **settings}
    return RolloutWorker(env, policy_class, {"seed": 1, "device": "cpu", **settings})


def train_batch(case, sampler):
    batch = sampler.sample()
    if case == "marwil":
        batch["value_targets"] = np.linspace(0, 1, batch.count, dtype=np.float32)
    return batch


def assert_close(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_updates_equal_those_of_the_cpu(case, cuda):
    on_cpu, on_gpu = worker(case), worker(case, device="cuda")
    policy = on_gpu.policy
    assert policy.device.type == "cuda"
    assert all(p.device.type == "cuda" for p in policy.model.parameters())
    assert_close(on_cpu.policy.get_weights(), policy.get_weights())
    for _ in range(3):
        batch = train_batch(case, on_cpu)
        stats = on_cpu.policy.learn_on_batch(batch), policy.learn_on_batch(batch)
        assert_close(*stats)
        assert_close(on_cpu.policy.get_weights(), policy.get_weights())
        policy.set_weights(on_cpu.policy.get_weights())


@pytest.mark.parametrize("case", CASES)
def test_samples_equal_those_of_the_cpu(case, cuda):
    on_cpu, on_gpu = worker(case), worker(case, device="cuda")
    a, b = on_cpu.sample(), on_gpu.sample()
    assert set(b) == set(a)
    names = set(a) - {"infos"}
    assert_close({name: a[name] for name in names}, {name: b[name] for name in names})


@pytest.mark.parametrize("case", ["ppo", "ppo lstm", "rainbow", "sac"])
def test_states_move_between_devices(case, cuda):
    on_cpu, on_gpu = worker(case), worker(case, device="cuda")
    batch = train_batch(case, on_cpu)
    on_gpu.policy.learn_on_batch(batch)
    on_cpu.policy.set_state(on_gpu.policy.get_state())
    assert_close(on_cpu.policy.get_weights(), on_gpu.policy.get_weights())
    restored = worker(case, device="cuda").policy
    restored.set_state(on_cpu.policy.get_state())
    for policy in (on_cpu.policy, restored):
        policy.learn_on_batch(batch)
    assert_close(on_cpu.policy.get_weights(), restored.get_weights())


@pytest.mark.parametrize("plan", ["ppo", "dqn", "sac"])
def test_plans_train(plan, cuda):
    env = "Pendulum-v1" if plan == "sac" else "CartPole-v1"
    small = {"train_batch_size": 32, "min_sample_timesteps_per_iteration": 64}
    small |= {"sgd_minibatch_size": 16} if plan == "ppo" else {"learning_starts": 32}
    config = plan_config(plan, env).updated(device="cuda", num_workers=0, seed=1, **small)
    with config.build(plan=plan) as algorithm:
        before = algorithm.get_policy().version
        result = algorithm.train()
        assert result["timesteps_total"] >= 64
        assert algorithm.get_policy().version > before
        assert algorithm.evaluate(1)["episodes"] == 1


def test_a_built_policy_computes_log_likelihoods(cuda):
    def distribution(policy, model, inputs, **kwargs):
        return model(inputs, [], None)[0], Categorical, []

    policy_class = build_torch_policy(
        name="Built", loss_fn=lambda *args: None, action_distribution_fn=distribution
    )
    space, observations = Box(-1.0, 1.0, (3,)), np.ones((2, 3), np.float32)
    on_cpu, on_gpu = (
        policy_class(space, Discrete(2), {"seed": 1, "device": device})
        for device in ("cpu", "cuda")
    )
    actions = np.array([0, 1])
    np.testing.assert_allclose(
        on_cpu.compute_log_likelihoods(actions, observations),
        on_gpu.compute_log_likelihoods(actions, observations),
        rtol=1e-4,
    )


def test_a_network_of_images(cuda):
    settings = {"model": {"conv_filters": [[4, 3, 2]], "post_fcnet_hiddens": [8]}}
    policies = []
    for device in ("cpu", "cuda"):
        config = {**settings, "seed": 1, "device": device}
        policies.append(PPOTorchPolicy(Box(0, 255, (12, 12, 3), np.uint8), Discrete(2), config))
    observations = np.random.default_rng(0).integers(0, 256, (5, 12, 12, 3), dtype=np.uint8)
    (_, _, a), (_, _, b) = (policy.compute_actions(observations) for policy in policies)
    assert_close(a, b)
