"""Values of a separate network are computed at the end of a fragment, for all rows at once."""

import numpy as np
import pytest
from gymnasium import spaces

from flowrl.algorithms.a2c import A2CTorchPolicy
from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.policies import ViewRequirement
from flowrl.sampling import RolloutWorker

from .fakes import CountEnv

POLICIES = [PPOTorchPolicy, A2CTorchPolicy]


def worker(policy_class=PPOTorchPolicy, **config):
    settings = {"num_envs_per_worker": 3, "rollout_fragment_length": 7, "seed": 1, **config}
    return RolloutWorker(lambda context: CountEnv(5), policy_class, settings)


def without_values_while_acting(sampler):
    """Let the network fail if it computes values together with outputs."""

    def forward(observations):
        raise AssertionError("values were computed while acting")

    for policy in sampler.policy_map.values():
        policy.model.forward_numpy = forward
    return sampler


@pytest.mark.parametrize("policy_class", POLICIES)
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"normalize_observations": True},
        {"batch_mode": "complete_episodes"},
        {"horizon": 2, "soft_horizon": True},
        {"policies": {"p"}, "policy_mapping_fn": lambda *args, **kwargs: "p"},
        {"explore": False},
    ],
    ids=["plain", "normalized", "whole episodes", "soft horizon", "policies", "greedy"],
)
def test_values_are_those_of_the_observations(policy_class, config):
    sampler = without_values_while_acting(worker(policy_class, **config))
    for _ in range(3):
        batch = sampler.sample()
        if "policies" in config:
            batch = batch.policy_batches["p"]
        policy = next(iter(sampler.policy_map.values()))
        assert batch.count >= 21
        assert batch["vf_preds"].dtype == np.float32
        np.testing.assert_allclose(
            batch["vf_preds"], policy.compute_values(batch["obs"]), rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose(
            batch["value_targets"], batch["advantages"] + batch["vf_preds"], rtol=1e-5, atol=1e-5
        )


def test_large_fragments_are_computed_in_parts():
    sampler = worker(rollout_fragment_length=500)  # 1,500 rows
    batch = sampler.sample()
    one_by_one = [sampler.policy.compute_values(row[None])[0] for row in batch["obs"]]
    np.testing.assert_allclose(batch["vf_preds"], one_by_one, rtol=1e-5, atol=1e-6)


def test_compute_actions_still_returns_values():
    policy = worker().policy
    observations = np.ones((4, 2), np.float32)
    _, _, extra = policy.compute_actions(observations)
    assert set(extra) == {"action_logp", "action_dist_inputs", "vf_preds"}
    actions, states, extra = policy.compute_actions_only(observations)
    assert actions.shape == (4,) and states == []
    assert set(extra) == {"action_logp", "action_dist_inputs"}


@pytest.mark.parametrize("method", ["compute_actions", "extra_action_out", "compute_values"])
def test_overridden_methods_are_called(method):
    calls = []

    class Overrides(PPOTorchPolicy):
        pass

    def override(self, *args, **kwargs):
        calls.append(method)
        return getattr(PPOTorchPolicy, method)(self, *args, **kwargs)

    setattr(Overrides, method, override)
    sampler = worker(Overrides)
    assert not sampler.policy.has_separate_values
    batch = sampler.sample()
    assert calls and "vf_preds" in batch


@pytest.mark.parametrize(
    "model", [{"vf_share_layers": True}, {"use_lstm": True, "lstm_cell_size": 3}]
)
def test_other_networks_compute_values_while_acting(model):
    sampler = worker(model=model)
    assert not sampler.policy.has_separate_values
    assert sampler.sample()["vf_preds"].shape == (21,)


def test_a_view_of_values_shows_those_of_earlier_steps():
    sampler = worker()
    space = spaces.Box(-np.inf, np.inf, (), np.float32)
    sampler.policy.view_requirements["before"] = ViewRequirement("vf_preds", space, shift=-1)
    batch = sampler.sample()
    is_first = batch["t"] == 0
    assert (batch["before"][is_first] == 0).all()
    assert np.array_equal(batch["before"][1:][~is_first[1:]], batch["vf_preds"][:-1][~is_first[1:]])


def test_values_are_not_left_over_from_a_view():
    sampler = worker()
    space = spaces.Box(-np.inf, np.inf, (), np.float32)
    views = sampler.policy.view_requirements
    views["before"] = ViewRequirement("vf_preds", space, shift=-1)
    sampler.sample()
    del views["before"]
    batch = sampler.sample()
    np.testing.assert_allclose(
        batch["vf_preds"], sampler.policy.compute_values(batch["obs"]), rtol=1e-5, atol=1e-6
    )
