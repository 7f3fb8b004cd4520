"""Values of a separate network are computed at the end of a fragment, for all rows at once."""

import numpy as np
import optree
import pytest
from gymnasium import spaces

from flowrl.algorithms.a2c import A2CTorchPolicy
from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.envs import MultiAgentEnv
from flowrl.policies import ViewRequirement
from flowrl.policies.models.fcnet import FullyConnectedNetwork
from flowrl.sampling import RolloutWorker
from flowrl.sampling.callbacks import DefaultCallbacks

from .fakes import CountEnv
from .test_column_sampler import Nested, Uneven
from .test_multi_agent_sampler import Crowd, policy_of

SCALAR = spaces.Box(-np.inf, np.inf, (), np.float32)


class WithActions(PPOTorchPolicy):
    """Computes values with the actions."""

    defers_values = False


def worker(policy_class=PPOTorchPolicy, env=CountEnv, **config):
    settings = {"num_envs_per_worker": 3, "rollout_fragment_length": 7, "seed": 1, **config}
    return RolloutWorker(lambda context: env(5), policy_class, settings)


def assert_equal_columns(batch, expected):
    assert set(batch) == set(expected)
    for name in set(batch) - {"infos"}:
        pairs = zip(
            optree.tree_leaves(batch[name]), optree.tree_leaves(expected[name]), strict=True
        )
        for a, b in pairs:
            assert a.dtype == b.dtype, name
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=name)


def fails(length):
    """An environment whose third episode fails in its second step."""
    return CountEnv(length, fail_at=(2, 2), fail_with=OSError)


class Numbered(CountEnv):
    """Observes the step as a number."""

    observation_space = spaces.Discrete(10)

    def observe(self):
        return self.steps


MODES = {
    "plain": {},
    "one environment": {"num_envs_per_worker": 1},
    "normalized": {"normalize_observations": True, "normalize_rewards": True},
    "whole episodes": {"batch_mode": "complete_episodes"},
    "soft horizon": {"horizon": 2, "soft_horizon": True},
    "greedy": {"explore": False},
    "returns": {"use_gae": False},
    "large": {"rollout_fragment_length": 500},
}


CASES = [
    (mode, env)
    for mode in MODES
    for env in (CountEnv, Uneven, Nested, Numbered, fails)
    if mode != "normalized" or env not in (Nested, Numbered)  # only Box observations are
]


@pytest.mark.parametrize(("mode", "env"), CASES)
def test_fragments_are_the_same(mode, env):
    deferred, with_actions = (worker(c, env, **MODES[mode]) for c in (PPOTorchPolicy, WithActions))
    assert deferred.policy.defers_values
    for _ in range(4):
        assert_equal_columns(deferred.sample(), with_actions.sample())


def test_fragments_of_a_vectorized_environment_are_the_same():
    settings = {"num_envs_per_worker": 4, "rollout_fragment_length": 60, "seed": 1}
    settings["vectorization_mode"] = "vector_entry_point"
    deferred, with_actions = (
        RolloutWorker("CartPole-v1", policy_class, settings)
        for policy_class in (PPOTorchPolicy, WithActions)
    )
    for _ in range(3):
        assert_equal_columns(deferred.sample(), with_actions.sample())


@pytest.mark.parametrize("kind", ["always", "random", "turns"])
@pytest.mark.parametrize("mode", ["truncate_episodes", "complete_episodes"])
def test_fragments_of_several_agents_are_the_same(kind, mode):
    workers = [
        RolloutWorker(
            lambda context: Crowd([0, context.vector_index], kind),
            {"p": policy_class, "q": policy_class},
            {
                "policy_mapping_fn": policy_of, "num_envs_per_worker": 2, "batch_mode": mode,
                "rollout_fragment_length": 9, "seed": 1,
            },
        )
        for policy_class in (PPOTorchPolicy, WithActions)
    ]  # fmt: skip
    for _ in range(4):
        batches, expected = (worker.sample().policy_batches for worker in workers)
        assert batches.keys() == expected.keys()
        for policy_id, batch in batches.items():
            assert_equal_columns(batch, expected[policy_id])


def test_a_view_of_other_agents_shows_values():
    class Pair(MultiAgentEnv):
        possible_agents = [0, 1]
        observation_space = spaces.Box(-1.0, 10.0, (1,), np.float32)
        action_space = spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            self.steps = 0
            return {a: np.zeros(1, np.float32) for a in (0, 1)}, {}

        def step(self, action_dict):
            self.steps += 1
            obs = {a: np.full(1, self.steps + a, np.float32) for a in (0, 1)}
            return obs, {0: 0.0, 1: 0.0}, {"__all__": self.steps == 4}, {"__all__": False}, {}

    sampler = RolloutWorker(
        lambda context: Pair(),
        {"p": PPOTorchPolicy, "q": PPOTorchPolicy},
        {"policy_mapping_fn": lambda agent, *args, **kwargs: "pq"[agent], "seed": 1,
         "rollout_fragment_length": 8},
    )  # fmt: skip
    view = ViewRequirement("vf_preds", SCALAR, shift=-1, agents="others")
    sampler.policy_map["p"].view_requirements["before"] = view
    batches = sampler.sample().policy_batches
    first = batches["p"]["t"] == 0
    seen, other = batches["p"]["before"][:, 0], batches["q"]["vf_preds"]
    assert (seen[first] == 0).all() and (other[~first] != 0).all()
    np.testing.assert_allclose(seen[1:][~first[1:]], other[:-1][~first[1:]], rtol=1e-6)


@pytest.mark.parametrize("policy_class", [PPOTorchPolicy, A2CTorchPolicy])
def test_no_values_are_computed_while_acting(policy_class, monkeypatch):
    def forward_numpy(self, observations):
        raise AssertionError("values were computed while acting")

    monkeypatch.setattr(FullyConnectedNetwork, "forward_numpy", forward_numpy)
    assert "vf_preds" in worker(policy_class).sample()


def test_compute_actions_still_returns_values():
    policy = worker().policy
    observations = np.ones((4, 2), np.float32)
    _, _, extra = policy.compute_actions(observations)
    assert set(extra) == {"action_logp", "action_dist_inputs", "vf_preds"}
    best, states, extra = policy.compute_actions_only(observations, explore=False)
    assert set(extra) == {"action_logp", "action_dist_inputs"} and states == []
    assert (best == extra["action_dist_inputs"].argmax(1)).all()


@pytest.mark.parametrize(
    ("method", "of_instance"),
    [
        ("compute_actions", False),
        ("compute_actions", True),
        ("_act", False),
        ("_act", True),
        ("compute_values", False),
        ("compute_values", True),
        ("extra_action_out", False),
    ],
)
def test_replaced_methods_of_a_policy_are_called(method, of_instance):
    calls = []

    class Replaces(PPOTorchPolicy):
        pass

    def replacement(self, *args, **kwargs):
        calls.append(method)
        return getattr(PPOTorchPolicy, method)(self, *args, **kwargs)

    if not of_instance:
        setattr(Replaces, method, replacement)
    sampler = worker(Replaces)
    if of_instance:
        setattr(sampler.policy, method, replacement.__get__(sampler.policy))
    assert not sampler.policy.defers_values
    assert "vf_preds" in sampler.sample()
    assert calls


@pytest.mark.parametrize("method", ["compute_outputs", "forward_numpy", "compute_values"])
@pytest.mark.parametrize("of_instance", [False, True])
def test_replaced_methods_of_a_network_are_called(method, of_instance):
    calls = []

    class Network(FullyConnectedNetwork):
        pass

    def replacement(self, *args, **kwargs):
        calls.append(method)
        return getattr(FullyConnectedNetwork, method)(self, *args, **kwargs)

    if not of_instance:
        setattr(Network, method, replacement)
    sampler = worker(model={} if of_instance else {"custom_model": Network})
    if of_instance:
        model = sampler.policy.model
        object.__setattr__(model, method, replacement.__get__(model))
    assert not sampler.policy.defers_values
    assert "vf_preds" in sampler.sample()
    assert calls


@pytest.mark.parametrize(
    "model",
    [
        {"vf_share_layers": True},
        {"use_lstm": True, "lstm_cell_size": 3},
        {"fcnet_activation": "silu"},
    ],
)
def test_other_networks_compute_values_while_acting(model):
    sampler = worker(model=model)
    assert not sampler.policy.defers_values
    assert sampler.sample()["vf_preds"].shape == (21,)


def test_a_view_of_values_shows_those_of_earlier_steps():
    sampler = worker()
    sampler.policy.view_requirements["before"] = ViewRequirement("vf_preds", SCALAR, shift=-1)
    batch = sampler.sample()
    is_first = batch["t"] == 0
    assert (batch["before"][is_first] == 0).all()
    assert np.array_equal(batch["before"][1:][~is_first[1:]], batch["vf_preds"][:-1][~is_first[1:]])


@pytest.mark.parametrize("agents", [False, True])
def test_rows_of_running_episodes_have_values_if_a_view_begins_to_show_them(agents):
    settings = {"batch_mode": "complete_episodes", "rollout_fragment_length": 3}
    if agents:
        settings |= {"policies": {"p"}, "policy_mapping_fn": lambda *args, **kwargs: "p"}
    sampler = worker(env=Uneven, **settings)
    (policy,) = sampler.policy_map.values()
    for adds in (False, True, False, True):
        if adds:
            policy.view_requirements["before"] = ViewRequirement("vf_preds", SCALAR, shift=-1)
        else:
            policy.view_requirements.pop("before", None)
        batch = sampler.sample()
        batch = batch.policy_batches["p"] if agents else batch
        expected = policy.compute_values(batch["obs"])
        np.testing.assert_allclose(batch["vf_preds"], expected, rtol=1e-5, atol=1e-6)


class Turns(MultiAgentEnv):
    """Two agents take turns."""

    possible_agents = ("a", "b")
    observation_space = spaces.Box(-1, 100, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, length):
        self.length = length

    def reset(self, *, seed=None, options=None):
        self.n = 0
        return {"a": np.zeros(2, np.float32)}, {}

    def step(self, action_dict):
        self.n += 1
        ends = {"__all__": self.n >= self.length}
        agent = self.possible_agents[self.n % 2]
        return {agent: np.full(2, self.n, np.float32)}, {agent: 1.0}, ends, {"__all__": False}, {}


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("policies", ["p", "pq"])
def test_agents_that_wait_have_values_if_a_view_begins_to_show_them(policies, length):
    settings = {"rollout_fragment_length": length, "policies": set(policies)}
    mapping = dict(zip("ab", (policies * 2)[:2], strict=True))
    sampler = worker(
        env=Turns, policy_mapping_fn=lambda agent, *args, **kwargs: mapping[agent], **settings
    )
    for number in range(6):
        if number == 3:
            for policy in sampler.policy_map.values():
                policy.view_requirements["last"] = ViewRequirement("rewards", SCALAR, shift=-1)
        for policy_id, batch in sampler.sample().policy_batches.items():
            expected = sampler.policy_map[policy_id].compute_values(batch["obs"])
            np.testing.assert_allclose(batch["vf_preds"], expected, rtol=1e-5, atol=1e-6)


def test_rows_have_values_if_the_policy_does_not_act_after_a_view_was_added():
    settings = {"batch_mode": "complete_episodes", "rollout_fragment_length": 1}
    sampler = RolloutWorker(
        lambda context: CountEnv(2), PPOTorchPolicy, {**settings, "num_envs_per_worker": 2}
    )
    for number in range(4):
        if number == 1:
            sampler.policy.view_requirements["last"] = ViewRequirement("rewards", SCALAR, shift=-1)
        batch = sampler.sample()
        expected = sampler.policy.compute_values(batch["obs"])
        np.testing.assert_allclose(batch["vf_preds"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("before", [PPOTorchPolicy, WithActions])
@pytest.mark.parametrize("after", [PPOTorchPolicy, WithActions])
def test_rows_of_running_episodes_have_values_after_a_restore(before, after):
    settings = {"batch_mode": "complete_episodes", "rollout_fragment_length": 3}
    saved, restored = (worker(c, Uneven, **settings) for c in (before, after))
    saved.sample()
    restored.load_sampling_state_dict(saved.sampling_state_dict())
    batch = restored.sample()
    expected = restored.policy.compute_values(batch["obs"])
    np.testing.assert_allclose(batch["vf_preds"], expected, rtol=1e-5, atol=1e-6)


def test_values_have_the_weights_of_the_end_of_the_fragment():
    class RaisesBias(DefaultCallbacks):
        def on_episode_start(self, *, worker, **kwargs):
            worker.policy.model.value_head.bias.data.add_(1.0)

    sampler = worker(callbacks_class=RaisesBias)
    batch = sampler.sample()
    expected = sampler.policy.compute_values(batch["obs"])
    np.testing.assert_allclose(batch["vf_preds"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("values", [None, np.float32(1.0), np.zeros((21, 1), np.float32)])
def test_values_of_another_shape_are_rejected(values):
    class Wrong(PPOTorchPolicy):
        defers_values = True

        def compute_values(self, obs_batch):
            return values

    with pytest.raises(ValueError, match=r"Wrong.compute_values\(\) returned .* for 21 observ"):
        worker(Wrong).sample()


def test_nested_observations_need_no_copy_of_the_whole_fragment(monkeypatch):
    seen = []
    compute_values = PPOTorchPolicy.compute_values

    def counted(self, obs_batch):
        seen.append(len(optree.tree_leaves(obs_batch)[0]))
        return compute_values(self, obs_batch)

    monkeypatch.setattr(PPOTorchPolicy, "compute_values", counted)
    monkeypatch.setattr(PPOTorchPolicy, "defers_values", True)
    batch = worker(env=Nested, rollout_fragment_length=500).sample()
    assert max(seen) <= 1024 < batch.count


@pytest.mark.parametrize("callback", ["on_episode_start", "on_postprocess_trajectory"])
def test_values_are_computed_although_a_callback_replaces_a_method_within_a_fragment(callback):
    def replace(self, *, worker, **kwargs):
        policy = worker.policy
        policy.compute_values = lambda obs: PPOTorchPolicy.compute_values(policy, obs)

    callbacks = type("Callbacks", (DefaultCallbacks,), {callback: replace})
    sampler = worker(callbacks_class=callbacks, rollout_fragment_length=60)
    assert sampler.policy.defers_values
    assert "vf_preds" in sampler.sample()
    assert not sampler.policy.defers_values
    assert "vf_preds" in sampler.sample()
