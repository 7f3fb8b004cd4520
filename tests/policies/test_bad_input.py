"""Mistakes in models, losses, batches and settings: refused by name, nothing half-done."""

import copy
import pickle

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from flowrl.algorithms.ppo import PPOConfig, PPOTorchPolicy
from flowrl.data import SampleBatch, pad_batch_to_sequences_of_same_size
from flowrl.policies import (
    ConfigError,
    ExplorationConfig,
    ModelConfig,
    ModelV2,
    TorchPolicy,
    build_torch_policy,
)
from flowrl.policies.returns import (
    discounted_returns,
    generalized_advantages,
    lambda_returns,
    n_step_returns,
    vtrace,
)
from flowrl.sampling import RolloutWorker

from .fakes import PlainModule, RandomEnv

BOX = spaces.Box(-1, 1, (3,), np.float32)
TWO = spaces.Discrete(2)


class Regress(TorchPolicy):
    def loss(self, batch):
        inputs, _ = self.model.from_batch(batch)
        logp = self.dist_class(inputs, self.model).logp(batch["actions"])
        return -(logp * batch["rewards"]).mean()


def rows(n=12, seed=0):
    rng = np.random.default_rng(seed)
    return SampleBatch(
        obs=rng.standard_normal((n, 3)).astype(np.float32),
        actions=rng.integers(0, 2, n),
        rewards=rng.standard_normal(n).astype(np.float32),
    )


def unchanged(policy, before):
    after = policy.get_weights()
    return all(np.array_equal(before[name], after[name]) for name in before)


# -- models ----------------------------------------------------------------------------------------


def giving(result):
    class Odd(PlainModule):
        def forward(self, obs):
            return result(self, obs)

    return Odd


def with_values(values):
    class Odd(ModelV2):
        def __init__(self, *args):
            super().__init__(*args)
            self.out = nn.Linear(3, self.num_outputs)

        def forward(self, input_dict, state, seq_lens):
            self.rows = len(input_dict["obs"])
            return self.out(input_dict["obs"]), state

        def value_function(self):
            return values(self.rows)

    return Odd


class Bare(ModelV2):
    def forward(self, input_dict, state, seq_lens):
        return input_dict["obs"][:, :2]


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (5, "must be a class, or a function"),
        (nn.Linear(3, 2), "must be a class, or a function"),
        (nn.Linear, "Linear.*failed"),
        (lambda: None, "lambda.*obs_space.*failed"),
        ("torch:no_such_name", "cannot be imported"),
        (giving(lambda self, obs: None), "a tensor of floats"),
        (giving(lambda self, obs: {"a": obs}), "a tensor of floats"),
        (giving(lambda self, obs: self.out(obs).long()), "a tensor of floats"),
        (giving(lambda self, obs: self.out(obs)[:, :1]), r"outputs of shape \[12, 1\]"),
        (giving(lambda self, obs: (self.out(obs), obs)), r"values \[rows\], got \[12, 3\]"),
        (with_values(lambda n: torch.zeros(n, 1)), r"values \[rows\], got \[12, 1\]"),
        (with_values(lambda n: None), "got None"),
        (Bare, "forward must return"),
    ],
)
def test_models_that_cannot_be_used(model, match):
    with pytest.raises(ConfigError, match=match):
        PPOTorchPolicy(BOX, TWO, {"model": {"custom_model": model}}).compute_actions(rows()["obs"])


@pytest.mark.parametrize("made", [None, 5, nn.Linear, (nn.Linear(3, 2),)])
def test_make_model_gives_a_module(made):
    own = type("Own", (Regress,), {"make_model": lambda self: made})
    with pytest.raises(ConfigError, match=r"a torch.nn.Module is needed"):
        own(BOX, TWO, {})


def test_other_precisions_are_refused():
    with pytest.raises(ConfigError, match="is not float32"):
        PPOTorchPolicy(
            BOX,
            TWO,
            {"model": {"custom_model": lambda o, a, n, c, name: PlainModule(o, a, n).double()}},
        )


@pytest.mark.parametrize("made", [None, [], "adam", {}])
def test_make_optimizer_gives_optimizers(made):
    own = type("Own", (Regress,), {"make_optimizer": lambda self: made})
    with pytest.raises(ConfigError, match="an optimizer, or several"):
        own(BOX, TWO, {})


def test_two_optimizers_of_the_same_parameters_are_refused():
    def both(policy, config):
        return [torch.optim.SGD(policy.model.parameters(), 0.1) for _ in range(2)]

    made = build_torch_policy("Both", lambda p, m, d, b: None, optimizer_fn=both)
    with pytest.raises(ConfigError, match="the same parameters"):
        made(BOX, TWO, {})


def test_frozen_layers_stay_and_the_others_learn():
    class Frozen(PlainModule):
        def __init__(self, *args):
            super().__init__(*args)
            self.value.requires_grad_(False)

    policy = Regress(BOX, TWO, {"model": {"custom_model": Frozen}, "lr": 0.1})
    before = policy.get_weights()
    policy.learn_on_batch(rows())
    after = policy.get_weights()
    assert np.array_equal(before["module.value.weight"], after["module.value.weight"])
    assert not np.array_equal(before["module.out.weight"], after["module.out.weight"])


@pytest.mark.parametrize("how", ["memory", "model", "layer moved"])
def test_models_that_were_replaced_behind_the_policy(how):
    policy = Regress(BOX, TWO, {})
    if how == "model":
        policy.model = Regress(BOX, TWO, {}).model
    else:
        for parameter in policy.model.parameters():
            parameter.data = torch.ones_like(parameter)
    with pytest.raises(ConfigError, match="was replaced after"):
        policy.learn_on_batch(rows())
    with pytest.raises(ConfigError, match="was replaced after"):
        policy.set_weights(policy.get_weights())


@pytest.mark.parametrize("model", [{}, {"use_lstm": True}])
def test_copies_are_policies_of_their_own(model):
    policy = PPOTorchPolicy(BOX, TWO, {"seed": 0, "model": model})
    for copied in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        inputs = {"obs": rows()["obs"]}
        for i, state in enumerate(policy.get_initial_state()):
            inputs[f"state_in_{i}"] = np.repeat(state[None], 12, 0)
        expected = policy.compute_actions_from_input_dict(inputs, explore=False)[2]
        own = copied.compute_actions_from_input_dict(inputs, explore=False)[2]
        np.testing.assert_array_equal(own["action_dist_inputs"], expected["action_dist_inputs"])
        before = policy.get_weights()
        copied.flat.vector.data.add_(1.0)
        assert unchanged(policy, before)
        moved = copied.compute_actions_from_input_dict(inputs, explore=False)[2]
        assert (moved["vf_preds"] != own["vf_preds"]).any()


# -- updates ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "result",
    [
        lambda loss: None,
        lambda loss: 1.0,
        lambda loss: loss.detach(),
        lambda loss: loss.repeat(3),
        lambda loss: [loss.detach()],
    ],
)
def test_losses_are_tensors_of_one_number(result):
    class Odd(Regress):
        def loss(self, batch):
            return result(super().loss(batch))

    policy = Odd(BOX, TWO, {})
    before = policy.get_weights()
    with pytest.raises(ConfigError, match="a loss is a tensor of one number"):
        policy.learn_on_batch(rows())
    assert unchanged(policy, before)


class Normed(PlainModule):
    def __init__(self, *args):
        super().__init__(*args)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, obs):
        return super().forward(self.norm(obs))


@pytest.mark.parametrize("mode", ["raise", "skip"])
def test_a_refused_update_changes_nothing(mode):
    policy = Regress(BOX, TWO, {"model": {"custom_model": Normed}, "on_nonfinite_update": mode})
    before, version = policy.get_weights(), policy.version
    obs = rows()["obs"].copy()
    obs[3] = np.nan
    odd = rows().with_columns(obs=obs)
    if mode == "raise":
        with pytest.raises(FloatingPointError, match="not finite in it: obs"):
            policy.learn_on_batch(odd)
    else:
        assert policy.learn_on_batch(odd) == {}
    assert unchanged(policy, before)
    assert policy.version == version
    gradient, _ = policy.compute_gradients(rows())
    assert unchanged(policy, before)
    gradient[0] = np.nan
    if mode == "raise":
        with pytest.raises(FloatingPointError, match="not finite"):
            policy.apply_gradients(gradient)
    else:
        policy.apply_gradients(gradient)
        assert policy.num_skipped_updates == 2
        other = Regress.like(policy)
        other.set_state(policy.get_state())
        assert other.num_skipped_updates == 2
    assert unchanged(policy, before)


def test_a_loss_that_is_not_finite_is_refused_though_its_gradient_is():
    class Odd(Regress):
        def loss(self, batch):
            return super().loss(batch) + float("nan")

    with pytest.raises(FloatingPointError, match="total_loss"):
        Odd(BOX, TWO, {}).learn_on_batch(rows())


def test_dropout_follows_the_seed_and_the_describing_does_not_draw():
    class Dropping(PlainModule):
        def __init__(self, *args):
            super().__init__(*args)
            self.drop = nn.Dropout(0.5)

        def forward(self, obs):
            return super().forward(self.drop(obs))

    config = {"model": {"custom_model": Dropping}, "seed": 0}
    one, two = (Regress(BOX, TWO, config) for _ in range(2))
    assert one.learn_on_batch(rows()) == two.learn_on_batch(rows())
    w = RolloutWorker(
        lambda c: RandomEnv(), PPOTorchPolicy, {**config, "rollout_fragment_length": 50}
    )
    batch = w.sample()
    assert w.policy.describe(batch) == w.policy.describe(batch)
    assert w.policy.describe(batch)["kl"] == pytest.approx(0, abs=1e-6)


# -- sequences -------------------------------------------------------------------------------------


def burning(**config):
    model = {"use_lstm": True, "fcnet_hiddens": [8], "lstm_cell_size": 4, "max_seq_len": 5}
    return RolloutWorker(
        lambda context: RandomEnv(),
        PPOTorchPolicy,
        {
            "model": {**model, "burn_in": 6},
            "seed": 0,
            "rollout_fragment_length": 43,
            "standardize_advantages": False,
            **config,
        },
    )


def test_burn_in_accumulates_and_is_not_counted():
    whole, parts = burning(), burning(microbatch_size=16)
    batch = whole.sample()
    expected, stats = whole.policy.compute_gradients(batch)
    gradient, told = parts.policy.compute_gradients(batch)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)
    assert told["total_loss"] == pytest.approx(stats["total_loss"], rel=1e-5)
    counts = []
    policy = whole.policy
    policy.learn_on_batch = lambda b: counts.append(policy.tensors(b).count) or {"x": 1.0}
    policy.end_learning = lambda batch, stats: {}
    policy.learn_on_minibatches(batch, 1, 10)
    assert sum(counts) == batch.count
    assert all(10 <= count < 15 for count in counts[:-1])


def test_burn_in_in_half_precision():
    w = burning(precision="bfloat16")
    assert np.isfinite(w.policy.learn_on_batch(w.sample())["total_loss"])


def test_burn_in_wants_its_columns():
    policy = burning().policy
    with pytest.raises(ValueError, match="burn-in needs the column eps_id"):
        policy.learn_on_batch(rows())


def test_padded_batches_are_learned_from_in_minibatches():
    model = {"use_lstm": True, "fcnet_hiddens": [8], "lstm_cell_size": 4, "max_seq_len": 5}
    w = RolloutWorker(
        lambda context: RandomEnv(),
        PPOTorchPolicy,
        {"model": model, "seed": 0, "rollout_fragment_length": 43},
    )
    batch = w.sample()
    padded = pad_batch_to_sequences_of_same_size(batch)
    other = PPOTorchPolicy(BOX, TWO, w.policy.config)
    other.set_state(w.policy.get_state())
    stats = w.policy.learn_on_minibatches(batch, 2, 8)
    assert other.learn_on_minibatches(padded, 2, 8) == pytest.approx(stats, rel=1e-4, abs=1e-6)
    with pytest.raises(ValueError, match="without_padding"):
        next(padded.sequence_minibatches(8))


def test_sequences_of_one_row():
    for memory in ({"use_lstm": True}, {"use_attention": True}):
        w = RolloutWorker(
            lambda context: RandomEnv(),
            PPOTorchPolicy,
            {"model": {**memory, "max_seq_len": 1}, "rollout_fragment_length": 20, "seed": 0},
        )
        assert np.isfinite(w.policy.learn_on_minibatches(w.sample(), 1, 8)["total_loss"])


@pytest.mark.parametrize("change", ["lens", "states"])
def test_states_and_sequences_must_fit(change):
    w = RolloutWorker(
        lambda context: RandomEnv(),
        PPOTorchPolicy,
        {"model": {"use_lstm": True, "max_seq_len": 5}, "rollout_fragment_length": 20},
    )
    batch = w.sample()
    if change == "lens":
        batch = batch.with_columns(seq_lens=np.array([20], np.int32))
    else:
        batch = batch.with_columns(state_in_0=np.concatenate([batch["state_in_0"]] * 2))
    with pytest.raises(ConfigError, match="sequences of 20 rows in total"):
        w.policy.learn_on_batch(batch)


def test_acting_without_states():
    policy = PPOTorchPolicy(BOX, TWO, {"model": {"use_lstm": True}})
    with pytest.raises(ConfigError, match="state_batches of compute_actions"):
        policy.compute_actions(rows()["obs"])


# -- observations and settings ---------------------------------------------------------------------


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
def test_observations_that_are_not_of_the_space(space, obs):
    with pytest.raises(ConfigError, match="observation (has|is)"):
        PPOTorchPolicy(space, TWO, {}).compute_single_action(obs)


def test_numbers_out_of_range_have_no_features():
    for space, obs in ((spaces.Discrete(5), [-1]), (spaces.MultiDiscrete([2, 3]), [[2, 1]])):
        with pytest.raises(ValueError, match="are not in"):
            PPOTorchPolicy(space, TWO, {}).compute_actions(np.array(obs))


def test_rewards_that_are_not_finite_do_not_reach_a_memory():
    model = {"use_lstm": True, "lstm_use_prev_reward": True}
    session = PPOTorchPolicy(BOX, TWO, {"model": model}).session()
    session.compute_single_action([0.0, 0.0, 0.0])
    with pytest.raises(ConfigError, match="prev_reward is not finite"):
        session.compute_single_action([0.0, 0.0, 0.0], prev_reward=float("nan"))


@pytest.mark.parametrize(
    ("kind", "settings", "match"),
    [
        (ModelConfig, {"conv_type": "resnet", "conv_filters": [[8, 3, 1]]}, "has its own"),
        (ModelConfig, {"lstm_cell_size": 5}, "needs use_lstm"),
        (ModelConfig, {"attention_dim": 5}, "needs use_attention"),
        (ExplorationConfig, {"epsilon": 0.3}, "is for the type EpsilonGreedy"),
        (ExplorationConfig, {"type": "EpsilonGreedy", "epsilon": 2.0}, "at most 1"),
        (ExplorationConfig, {"type": "EpsilonGreedy", "epsilon": [(0, 5.0)]}, "at most 1"),
        (ExplorationConfig, {"type": "EpsilonGreedy", "scale": 0.3}, "is for the type Gaussian"),
    ],
)
def test_settings_without_effect_are_refused(kind, settings, match):
    with pytest.raises(ConfigError, match=match):
        kind(**settings)


def test_a_refused_assignment_leaves_the_setting():
    config = PPOConfig()
    before = config.sgd_minibatch_size
    with pytest.raises(ConfigError):
        config.sgd_minibatch_size = 50_000
    assert config.sgd_minibatch_size == before
    config.lr = 0.1
    model = ModelConfig()
    with pytest.raises(ConfigError, match="needs use_lstm"):
        model.burn_in = 5
    assert model.burn_in == 0


def test_default_settings_are_checked():
    for default in ({"gamma": 7.0}, {"lr": -1.0}, {"num_sgd_iter": 0}):
        with pytest.raises(ConfigError):
            build_torch_policy("Odd", lambda *a: None, get_default_config=lambda d=default: d)
    made = build_torch_policy("Fine", lambda *a: None, get_default_config=lambda: {"gamma": 0.5})
    with pytest.raises(ConfigError, match="gamma"):
        made(BOX, TWO, {"gamma": 7.0})
    for default in (None, [], {"_hidden": 1}, {"items": 1}):
        with pytest.raises(ConfigError, match=r"get_default_config|setting's name"):
            build_torch_policy("Odd", lambda *a: None, get_default_config=lambda d=default: d)


@pytest.mark.parametrize("hook", ["stats_fn", "extra_learn_fetches_fn", "extra_grad_process_fn"])
@pytest.mark.parametrize("result", [5, {"a": "x"}, {"a": np.ones(3)}])
def test_hooks_give_numbers(hook, result):
    def loss(policy, model, dist_class, batch):
        return model.from_batch(batch)[0].sum()

    policy = build_torch_policy("Odd", loss, **{hook: lambda *args: result})(BOX, TWO, {})
    with pytest.raises(ConfigError, match=f"{hook} must return a dict of numbers"):
        policy.learn_on_batch(rows())


def test_columns_of_a_hook_are_a_dict():
    made = build_torch_policy("Odd", lambda *a: None, extra_action_out_fn=lambda *args: None)
    with pytest.raises(ConfigError, match="must return a dict of columns"):
        made(BOX, TWO, {}).compute_actions(rows()["obs"])


@pytest.mark.parametrize("told", [np.ones(2), torch.ones(1), "x", None])
def test_statistics_are_numbers(told):
    class Odd(Regress):
        def loss(self, batch):
            self.stats["mine"] = told
            return super().loss(batch)

    with pytest.raises(ConfigError, match=r"statistics are numbers.* but not mine"):
        Odd(BOX, TWO, {}).learn_on_batch(rows())


def test_columns_of_objects_have_no_tensors():
    class Reads(Regress):
        def loss(self, batch):
            return super().loss(batch) + len(batch["infos"])

    batch = rows().with_columns(infos=[{}] * 12)
    with pytest.raises(TypeError, match="column 'infos' holds objects"):
        Reads(BOX, TWO, {}).learn_on_batch(batch)


def test_learning_from_values_that_no_model_gives():
    class Headless(ModelV2):
        def __init__(self, *args):
            super().__init__(*args)
            self.out = nn.Linear(4, 2)

        def forward(self, input_dict, state, seq_lens):
            return self.out(input_dict["obs"]), state

    worker = RolloutWorker("CartPole-v1", PPOTorchPolicy, {"model": {"custom_model": Headless}})
    with pytest.raises(ConfigError, match="learns from values, but its model gives none"):
        worker.sample()


def test_names_that_others_use():
    with pytest.raises(ConfigError, match="Did you mean 'lr'"):
        PPOConfig().training(learning_rate=1e-3)


def _use(made):
    policy = made(BOX, TWO, {})
    policy.compute_actions(rows()["obs"])
    policy.learn_on_batch(rows())


@pytest.mark.parametrize(
    ("hook", "gives"),
    [
        ("action_sampler_fn", "actions, logp, dist_inputs, states"),
        ("action_distribution_fn", "dist_inputs, dist_class, states"),
        ("compute_gradients_fn", "gradients, statistics"),
        ("make_model_and_action_dist", "model, dist_class"),
    ],
)
def test_hooks_give_tuples(hook, gives):
    made = build_torch_policy("Odd", lambda *a: None, **{hook: lambda *args, **more: 5})
    with pytest.raises(ConfigError, match=rf"{hook} must return \({gives}\), got 5"):
        _use(made)


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
def test_what_cannot_be_acted_on_is_told(obs, match):
    with pytest.raises(ConfigError, match=match):
        PPOTorchPolicy(BOX, TWO, {}).compute_actions(obs)


def test_views_that_cannot_be_acted_on_are_told():
    policy = PPOTorchPolicy(BOX, TWO, {})
    with pytest.raises(ConfigError, match="the view 'obs' is missing, there is only"):
        policy.compute_actions_from_input_dict({"ob": np.zeros((2, 3))})
    nested = PPOTorchPolicy(spaces.Dict(a=BOX, b=TWO), TWO, {})
    obs = np.zeros((2, 3), np.float32)
    for given, match in [
        (obs, r"expected a dict of arrays for \['a', 'b'\], got one of float32 \[2, 3\]"),
        ({"a": obs}, r"got a dict of \['a'\]"),
        ({"a": obs, "b": np.zeros(3, np.int64)}, r"different numbers of rows: {'obs': \[2, 3\]}"),
        ({"a": obs, "b": ["x", "y"]}, r"obs\['b'\]: expected an array of int64 \[B\]"),
    ]:
        with pytest.raises(ConfigError, match=match):
            nested.compute_actions(given)
    pair = PPOTorchPolicy(spaces.Tuple((BOX, TWO)), TWO, {})
    with pytest.raises(ConfigError, match="expected a tuple of 2 arrays, got a list of 2"):
        pair.compute_actions([obs, np.zeros((3, 1), np.int64)])
    image = PPOTorchPolicy(spaces.Box(0, 255, (20, 20, 3), np.uint8), TWO, {})
    with pytest.raises(ConfigError, match=r"got one of shape \[2, 3, 20, 20\]"):
        image.compute_actions(np.zeros((2, 3, 20, 20), np.uint8))
    memory = PPOTorchPolicy(BOX, TWO, {"model": {"use_lstm": True}})
    with pytest.raises(ConfigError, match=r"state_in_0: expected an array \[B, 64\]"):
        memory.compute_actions(obs, state_batches=[np.zeros((2, 3), np.float32)] * 4)


def test_a_state_that_does_not_fit_changes_nothing():
    policy, other = (Regress(BOX, TWO, {"seed": seed}) for seed in (0, 1))
    for one in (policy, other):
        one.learn_on_batch(rows())
    before, given = policy.get_state(), other.get_state()
    slot = given["optimizer"]["0"]
    for part in before:
        if part in ("rates", "num_skipped_updates", "exploration"):
            continue  # not in older checkpoints
        with pytest.raises((ValueError, KeyError), match=part):
            policy.set_state({k: v for k, v in given.items() if k != part})
    for wrong, match in [
        ({"optimizer": {}}, "Adam keeps step, exp_avg and exp_avg_sq, these are"),
        ({"optimizer": {"0": {"momentum": np.zeros(2)}}}, r"these are \['momentum'\]"),
        ({"optimizer": {"0": {**slot, "exp_avg": np.zeros(2)}}}, "not of optimizer 0, a FlatAdam"),
        ({"rng": {}}, "PCG64"),
        ({"rates": [[1.0, 2.0]]}, "zip"),
    ]:
        with pytest.raises(ValueError, match=match):
            policy.set_state({**given, **wrong})
    after = policy.get_state()
    for name, weight in before["weights"].items():
        np.testing.assert_array_equal(after["weights"][name], weight)
    for name, part in before["optimizer"]["0"].items():
        np.testing.assert_array_equal(after["optimizer"]["0"][name], part)
    assert {k: after[k] for k in ("rng", "rates", "version")} == {
        k: before[k] for k in ("rng", "rates", "version")
    }


def test_a_mask_deeper_down_is_refused():
    space = spaces.Dict({"a": spaces.Dict({"action_mask": spaces.MultiBinary(2), "at": BOX})})
    with pytest.raises(ConfigError, match="at the top level of a Dict"):
        PPOTorchPolicy(space, TWO, {})


def test_very_wide_bounds():
    space = spaces.Box(-3e38, 3e38, (1,), np.float32)
    actions = PPOTorchPolicy(BOX, space, {}).actions_for_env(np.array([[-1.0], [0.0], [0.5]]))
    np.testing.assert_allclose(actions, np.float32([[-3e38], [0], [1.5e38]]))


def test_as_many_actions_as_observations():
    policy = PPOTorchPolicy(BOX, TWO, {})
    with pytest.raises(ValueError, match=r"3.* actions for 12 observations"):
        policy.compute_log_likelihoods(np.zeros(3, np.int64), rows()["obs"])
    for actions, match in [
        (0, r"expected an array of int64 \[B\], got a int"),
        (np.zeros(12), r"expected an array of int64 \[B\], got one of float64"),
        (np.zeros((12, 1), np.int64), r"expected an array \[B\], got one of shape \[12, 1\]"),
        (np.full(12, 2), r"not of Discrete\(2\), with numbers from 0"),
        (np.full(12, -1), r"not of Discrete\(2\), with numbers from 0"),
    ]:
        with pytest.raises(ValueError, match=match):
            policy.compute_log_likelihoods(actions, rows()["obs"])


# -- returns ---------------------------------------------------------------------------------------


def test_returns_of_whole_numbers():
    ones, none = np.ones((4, 1), np.int64), np.zeros((4, 1), bool)
    expected = [[3.439], [2.71], [1.9], [1.0]]
    np.testing.assert_allclose(discounted_returns(ones, none, np.zeros(1), 0.9), expected)
    np.testing.assert_allclose(lambda_returns(ones, 0 * ones, none, 0.9, 1), expected)
    advantages = generalized_advantages(ones, 0 * ones, 0 * ones, none, 0.9, 1)
    np.testing.assert_allclose(advantages, expected)
    targets, _ = vtrace(0 * ones, 0 * ones, ones, 0 * ones, 0 * ones, none, 0.9)
    np.testing.assert_allclose(targets, expected)


def test_returns_of_other_shapes_are_refused():
    a, b = np.ones((4, 2)), np.ones((4, 1))
    for call in (
        lambda: discounted_returns(a, b, np.zeros(2), 0.9),
        lambda: generalized_advantages(a, a, b, a, 0.9, 1),
        lambda: lambda_returns(a, b, a, 0.9, 1),
        lambda: n_step_returns(a, b, 2, 0.9),
        lambda: vtrace(a, a, a, b, a, a, 0.9),
    ):
        with pytest.raises(ValueError, match=r"has the shape \(4, 1\)"):
            call()
    with pytest.raises(ValueError, match="must be an int"):
        n_step_returns(a, a, 2.5, 0.9)
