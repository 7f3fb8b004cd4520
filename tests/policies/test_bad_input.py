"""Invalid observations, actions, settings and hook results are rejected with a clear message."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from flowrl.algorithms.ppo import PPOConfig, PPOTorchPolicy
from flowrl.policies import (
    ConfigError,
    ExplorationConfig,
    ModelConfig,
    Policy,
    ViewRequirement,
    build_torch_policy,
)
from flowrl.policies.distributions import ActionDistribution
from flowrl.policies.models.catalog import register_model

from .fakes import BOX, TWO, rows

# -- observations ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "obs"),
    [
        (spaces.Discrete(5), -1),
        (spaces.Discrete(5), 5),
        (spaces.Discrete(5), 2.7),
        (spaces.Discrete(5), "1"),
        (spaces.MultiDiscrete([2, 3]), [2, 1]),
        (BOX, [np.nan, 0, 0]),
        (BOX, [None, 0, 0]),
        (spaces.Box(0, 255, (8, 8, 3), np.uint8), np.full((8, 8, 3), 0.9)),
        (BOX, np.zeros(3, complex)),
    ],
)
def test_single_observation_outside_the_space_is_rejected(space, obs):
    with pytest.raises(ConfigError, match=r"observation(:| is)"):
        PPOTorchPolicy(space, TWO, {}).compute_single_action(obs)


def test_integers_outside_the_space_are_rejected():
    for space, obs in ((spaces.Discrete(5), [-1]), (spaces.MultiDiscrete([2, 3]), [[2, 1]])):
        with pytest.raises(ValueError, match="are not in"):
            PPOTorchPolicy(space, TWO, {}).compute_actions(np.array(obs))


def test_nonfinite_prev_reward_is_rejected():
    model = {"use_lstm": True, "lstm_use_prev_reward": True}
    runner = PPOTorchPolicy(BOX, TWO, {"model": model}).session()
    runner.compute_single_action([0.0, 0.0, 0.0])
    with pytest.raises(ConfigError, match="prev_reward must be a finite number"):
        runner.compute_single_action([0.0, 0.0, 0.0], prev_reward=float("nan"))


@pytest.mark.parametrize(
    ("obs", "match"),
    [
        ([[0.0, 0.0, 0.0]], r"expected an array of float32 \[B, 3\], got a list of 1"),
        (np.zeros(3, np.float32), r"expected an array \[B, 3\], got one of shape \[3\]"),
        (np.zeros((2, 4), np.float32), r"expected an array \[B, 3\], got one of shape \[2, 4\]"),
        ("abc", "got a str"),
        (None, "got a NoneType"),
        ({"a": np.zeros((2, 3))}, r"got a dict of \['a'\]"),
    ],
)
def test_message_describes_invalid_observations(obs, match):
    with pytest.raises(ConfigError, match=match):
        PPOTorchPolicy(BOX, TWO, {}).compute_actions(obs)


def test_message_describes_invalid_views():
    policy = PPOTorchPolicy(BOX, TWO, {})
    with pytest.raises(ConfigError, match="'obs'"):
        policy.compute_actions_from_input_dict({"ob": np.zeros((2, 3))})
    nested = PPOTorchPolicy(spaces.Dict(a=BOX, b=TWO), TWO, {})
    obs = np.zeros((2, 3), np.float32)
    for invalid, match in [
        (obs, r"expected a dict of arrays for \['a', 'b'\], got one of float32 \[2, 3\]"),
        ({"a": obs}, r"got a dict of \['a'\]"),
        ({"a": obs, "b": np.zeros(3, np.int64)}, r"rows: {'obs': \[2, 3\]}"),
        ({"a": obs, "b": ["x", "y"]}, r"obs\['b'\]: expected an array of int64 \[B\]"),
    ]:
        with pytest.raises(ConfigError, match=match):
            nested.compute_actions(invalid)
    pair = PPOTorchPolicy(spaces.Tuple((BOX, TWO)), TWO, {})
    with pytest.raises(ConfigError, match="expected a tuple of 2 arrays, got a list of 2"):
        pair.compute_actions([obs, np.zeros((3, 1), np.int64)])
    image = PPOTorchPolicy(spaces.Box(0, 255, (20, 20, 3), np.uint8), TWO, {})
    with pytest.raises(ConfigError, match=r"got one of shape \[2, 3, 20, 20\]"):
        image.compute_actions(np.zeros((2, 3, 20, 20), np.uint8))
    recurrent = PPOTorchPolicy(BOX, TWO, {"model": {"use_lstm": True}})
    with pytest.raises(ConfigError, match=r"state_in_0: expected an array \[B, 64\]"):
        recurrent.compute_actions(obs, state_batches=[np.zeros((2, 3), np.float32)] * 4)


def test_recurrent_policy_needs_states():
    policy = PPOTorchPolicy(BOX, TWO, {"model": {"use_lstm": True}})
    with pytest.raises(ConfigError, match="state_batches of compute_actions"):
        policy.compute_actions(rows()["obs"])


def test_nested_action_mask_is_rejected():
    space = spaces.Dict({"a": spaces.Dict({"action_mask": spaces.MultiBinary(2), "at": BOX})})
    with pytest.raises(ConfigError, match="at the top level of a Dict"):
        PPOTorchPolicy(space, TWO, {})


# -- actions ---------------------------------------------------------------------------------------


def test_actions_scale_to_very_wide_bounds():
    space = spaces.Box(-3e38, 3e38, (1,), np.float32)
    actions = PPOTorchPolicy(BOX, space, {}).actions_for_env(np.array([[-1.0], [0.0], [0.5]]))
    np.testing.assert_allclose(actions, np.float32([[-3e38], [0], [1.5e38]]))


def test_log_likelihoods_of_invalid_actions_are_rejected():
    policy = PPOTorchPolicy(BOX, TWO, {})
    with pytest.raises(ValueError, match=r"3.*12 observations"):
        policy.compute_log_likelihoods(np.zeros(3, np.int64), rows()["obs"])
    for actions, match in [
        (0, r"expected an array of int64 \[B\], got a int"),
        (np.zeros(12), r"expected an array of int64 \[B\], got one of float64"),
        (np.zeros((12, 1), np.int64), r"expected an array \[B\], got one of shape \[12, 1\]"),
        (np.full(12, 2), "expected integers from 0 to below 2, got 2 to 2"),
        (np.full(12, -1), "expected integers from 0 to below 2, got -1 to -1"),
    ]:
        with pytest.raises(ValueError, match=match):
            policy.compute_log_likelihoods(actions, rows()["obs"])


# -- settings --------------------------------------------------------------------------------------


DECAYING = {"initial": 1.0, "decay": 0.5, "steps": 100}


@pytest.mark.parametrize(
    ("config_class", "settings", "match"),
    [
        (ModelConfig, {"conv_type": "resnet", "conv_filters": [[8, 3, 1]]}, "conv_filters"),
        (ModelConfig, {"lstm_cell_size": 5}, "lstm_cell_size.*use_lstm"),
        (ModelConfig, {"attention_dim": 5}, "attention_dim.*use_attention"),
        (ExplorationConfig, {"epsilon": 0.3}, "epsilon.*EpsilonGreedy"),
        (ExplorationConfig, {"type": "EpsilonGreedy", "epsilon": 2.0}, "at most 1"),
        (ExplorationConfig, {"type": "EpsilonGreedy", "epsilon": [(0, 5.0)]}, "at most 1"),
        (
            ExplorationConfig,
            {"type": "EpsilonGreedy", "epsilon": DECAYING | {"initial": 2}},
            "at most 1",
        ),
        (
            ExplorationConfig,
            {"type": "EpsilonGreedy", "epsilon": DECAYING | {"initial": 3, "final": 2}},
            "at most 1",
        ),
        (ExplorationConfig, {"type": "EpsilonGreedy", "scale": 0.3}, "scale.*Gaussian"),
    ],
)
def test_settings_without_effect_are_rejected(config_class, settings, match):
    with pytest.raises(ConfigError, match=match):
        config_class(**settings)


def test_invalid_assignment_keeps_the_setting():
    config = PPOConfig()
    before = config.sgd_minibatch_size
    with pytest.raises(ConfigError):
        config.sgd_minibatch_size = 50_000
    assert config.sgd_minibatch_size == before
    config.lr = 0.1
    model = ModelConfig()
    with pytest.raises(ConfigError, match="use_lstm"):
        model.burn_in = 5
    assert model.burn_in == 0


def test_similar_setting_is_suggested():
    with pytest.raises(ConfigError, match="Did you mean 'lr'"):
        PPOConfig().training(learning_rate=1e-3)


# -- hooks of build_torch_policy -------------------------------------------------------------------


def test_default_config_is_validated():
    for default in ({"gamma": 7.0}, {"lr": -1.0}, {"num_sgd_iter": 0}):
        with pytest.raises(ConfigError):
            build_torch_policy("Bad", lambda *a: None, get_default_config=lambda d=default: d)
    valid = build_torch_policy("Valid", lambda *a: None, get_default_config=lambda: {"gamma": 0.5})
    with pytest.raises(ConfigError, match="gamma"):
        valid(BOX, TWO, {"gamma": 7.0})
    for default in (None, [], {"_hidden": 1}, {"items": 1}):
        with pytest.raises(ConfigError, match=r"get_default_config|setting's name"):
            build_torch_policy("Bad", lambda *a: None, get_default_config=lambda d=default: d)


@pytest.mark.parametrize("hook", ["stats_fn", "extra_learn_fetches_fn", "extra_grad_process_fn"])
@pytest.mark.parametrize("result", [5, {"a": "x"}, {"a": np.ones(3)}])
def test_statistics_hooks_must_return_numbers(hook, result):
    def loss(policy, model, dist_class, batch):
        return model.from_batch(batch)[0].sum()

    policy = build_torch_policy("Bad", loss, **{hook: lambda *args: result})(BOX, TWO, {})
    with pytest.raises(ConfigError, match=f"{hook} must return a dict of numbers"):
        policy.learn_on_batch(rows())


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (1.0, "must return a dict of statistics, got a float"),
        ({"loss": "small"}, "the statistic 'loss' of type str: statistics are numbers"),
        ({"loss": np.ones(3)}, "the statistic 'loss' of type ndarray"),
    ],
)
def test_statistics_of_an_update_must_be_numbers(result, message):
    class Learns(Policy):
        def learn_on_batch(self, batch):
            return result

    with pytest.raises(TypeError, match=rf"Learns.learn_on_batch\(\).*{message}"):
        Learns(BOX, TWO, {}).learn_on_minibatches(rows())


def test_statistics_of_an_update_become_floats():
    class Learns(Policy):
        def learn_on_batch(self, batch):
            return {"loss": torch.tensor(2.0), "steps": np.int64(3)}

    stats = Learns(BOX, TWO, {}).learn_on_minibatches(rows())
    assert stats == {"loss": 2.0, "steps": 3.0}
    assert set(map(type, stats.values())) == {float}


def test_extra_action_out_fn_must_return_a_dict():
    policy_class = build_torch_policy(
        "Bad", lambda *a: None, extra_action_out_fn=lambda *args: None
    )
    with pytest.raises(ConfigError, match="must return a dict of columns"):
        policy_class(BOX, TWO, {}).compute_actions(rows()["obs"])


@pytest.mark.parametrize(
    ("hook", "values"),
    [
        ("action_sampler_fn", "actions, logp, dist_inputs, states"),
        ("action_distribution_fn", "dist_inputs, dist_class, states"),
        ("compute_gradients_fn", "gradients, statistics"),
        ("make_model_and_action_dist", "model, dist_class"),
    ],
)
def test_hooks_must_return_their_tuples(hook, values):
    def use(policy_class):
        policy = policy_class(BOX, TWO, {})
        policy.compute_actions(rows()["obs"])
        policy.learn_on_batch(rows())

    policy_class = build_torch_policy("Bad", lambda *a: None, **{hook: lambda *args, **kwargs: 5})
    with pytest.raises(ConfigError, match=rf"{hook} must return \({values}\), got 5"):
        use(policy_class)


def test_numbers_that_float32_cannot_hold_change_nothing():
    policy = PPOTorchPolicy(BOX, TWO, {})
    weights = policy.get_weights()
    with pytest.raises(FloatingPointError, match="not finite"):
        policy.apply_gradients(np.full(sum(w.size for w in weights.values()), 1e39))
    name, *_, last = weights
    for other in (
        {name: np.full(weights[name].shape, 1e300)},
        {last: np.full(weights[last].shape, None)},
        {last: weights[last].astype(complex)},
    ):
        with pytest.raises(ValueError, match="not finite numbers"):
            policy.set_weights({**weights, **other})
    for key, array in policy.get_weights().items():
        np.testing.assert_array_equal(array, weights[key])


def test_log_likelihoods_of_bits_outside_0_and_1_are_rejected():
    policy = PPOTorchPolicy(BOX, spaces.MultiBinary(2), {})
    with pytest.raises(ValueError, match="expected integers from 0 to below 2, got -5 to 9"):
        policy.compute_log_likelihoods(np.array([[-5, 9]], np.int8), rows()["obs"][:1])


@pytest.mark.parametrize("agents", [[], (), "all"])
def test_view_of_agents_names_at_least_one(agents):
    with pytest.raises(ConfigError, match="a list of at least one agent id"):
        ViewRequirement("obs", agents=agents)


def test_missing_method_of_a_distribution_is_named():
    class Mine(ActionDistribution):
        pass

    with pytest.raises(NotImplementedError, match=r"Mine has no kl\(\): implement it"):
        Mine(None).kl(None)
    with pytest.raises(NotImplementedError, match=r"Mine has no num_inputs\(\): implement it"):
        Mine.num_inputs(TWO)


@pytest.mark.parametrize(
    ("passes", "size", "message"),
    [
        (0, 4, "num_sgd_iter must be an int of at least 1"),
        (1.5, 4, "num_sgd_iter must be an int of at least 1"),
        (1, -1, "sgd_minibatch_size must be an int of at least 0"),
        (1, None, "sgd_minibatch_size must be an int of at least 0"),
    ],
)
def test_numbers_of_passes_and_rows_are_checked(passes, size, message):
    with pytest.raises(ValueError, match=message):
        PPOTorchPolicy(BOX, TWO, {}).learn_on_minibatches(rows(), passes, size)


@pytest.mark.parametrize("shift", [range(-2, 1), np.arange(-2, 1), [-2, -1, 0], "-2:0"])
def test_shift_of_a_view_in_every_form(shift):
    assert ViewRequirement("obs", shift=shift).shifts == (-2, -1, 0)
    assert ViewRequirement("obs", shift=np.int64(-1)).shift == -1
    with pytest.raises(ConfigError, match='text such as "-3:0"'):
        ViewRequirement("obs", shift=1.5)


def test_registered_models_have_names():
    with pytest.raises(TypeError, match="the name must be a string, got None"):
        register_model(None, lambda *a: None)
    with pytest.raises(TypeError, match="the model must be a class or a function, got 3"):
        register_model("x", 3)


@pytest.mark.parametrize("explore", ["default_policy", [np.zeros(2)], None])
def test_explore_is_a_bool(explore):
    policy = PPOTorchPolicy(BOX, TWO, {})
    with pytest.raises(ConfigError, match="explore must be True or False, got"):
        policy.compute_single_action(rows()["obs"][0], explore)
