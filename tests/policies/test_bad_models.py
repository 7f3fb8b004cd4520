"""Invalid models, optimizers, losses and updates are rejected and change nothing."""

import copy
import pickle

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn
from torch.nn import functional

from flowrl.algorithms.a2c import A2CTorchPolicy
from flowrl.algorithms.dqn import DQNTorchPolicy
from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.policies import ConfigError, ModelV2, Policy, TorchPolicy, build_torch_policy
from flowrl.sampling import RolloutWorker

from .fakes import BOX, TWO, PlainModule, RandomEnv, rows


class ReinforcePolicy(TorchPolicy):
    def loss(self, batch):
        inputs, _ = self.model.from_batch(batch)
        logp = self.dist_class(inputs, self.model).logp(batch["actions"])
        return -(logp * batch["rewards"]).mean()


def weights_equal(policy, weights):
    return all(np.array_equal(w, weights[name]) for name, w in policy.get_weights().items())


# -- models and optimizers -------------------------------------------------------------------------


def module_returning(result):
    """A module class whose forward returns result(module, obs)."""

    class BadModule(PlainModule):
        def forward(self, obs):
            return result(self, obs)

    return BadModule


def model_with_values(values):
    """A model class whose value_function returns values(number of rows)."""

    class BadModel(ModelV2):
        def __init__(self, *args):
            super().__init__(*args)
            self.out = nn.Linear(3, self.num_outputs)

        def forward(self, input_dict, state, seq_lens):
            self.rows = len(input_dict["obs"])
            return self.out(input_dict["obs"]), state

        def value_function(self):
            return values(self.rows)

    return BadModel


class StatelessModel(ModelV2):
    """forward returns no states."""

    def forward(self, input_dict, state, seq_lens):
        return input_dict["obs"][:, :2]


def module_with_views(views):
    """A module class with this attribute `view_requirements`."""
    return type("BadViews", (PlainModule,), {"view_requirements": views})


def recurrent(initial, states):
    """A model class with these initial states, whose forward returns the other ones."""

    class BadStates(ModelV2):
        def get_initial_state(self):
            return initial

        def forward(self, input_dict, state, seq_lens):
            return input_dict["obs"][:, :2], states

    return BadStates


class LazyModule(PlainModule):
    def __init__(self, obs_space, action_space, num_outputs):
        super().__init__(obs_space, action_space, num_outputs)
        self.out = nn.LazyLinear(num_outputs)


class WithExtraState(PlainModule):
    def get_extra_state(self):
        return 5

    def set_extra_state(self, state):
        pass


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (5, "must be a class, or a function"),
        (nn.Linear(3, 2), "must be a class, or a function"),
        (nn.Linear, "Linear.*failed"),
        (lambda: None, "lambda.*obs_space.*failed"),
        (
            lambda obs_space, action_space, num_outputs: nn.Linear(3, num_outputs),
            r"\. A function receives .*, name; a torch\.nn\.Module class receives the first three$",
        ),
        ("torch:no_such_name", "cannot be imported"),
        (module_returning(lambda self, obs: None), "a tensor of floats"),
        (module_returning(lambda self, obs: {"a": obs}), "a tensor of floats"),
        (
            module_returning(lambda self, obs: (self.out(obs), obs, obs)),
            r"floats, got \(float32 \[12, 2\], float32 \[12, 3\], float32 \[12, 3\]\)$",
        ),
        (module_returning(lambda self, obs: self.out(obs).long()), "a tensor of floats"),
        (module_returning(lambda self, obs: self.out(obs)[:, :1]), r"outputs of shape \[12, 1\]"),
        (module_returning(lambda self, obs: (self.out(obs), obs)), r"\[rows\], got \[12, 3\]"),
        (
            module_returning(lambda self, obs: (self.out(obs), obs.mean().reshape(1, 1))),
            r"values \[rows\], got \[1, 1\] for 12 rows",
        ),
        (model_with_values(lambda n: torch.zeros(n, 1)), r"values \[rows\], got \[12, 1\]"),
        (model_with_values(lambda n: None), "got None"),
        (StatelessModel, "forward must return"),
        (
            module_returning(lambda self, obs: [self.out(obs), obs]),
            r"BadModule .*: outputs must be a tensor of floats, got a list \[float32 \[12, 2\]",
        ),
        (module_with_views(["prev_actions"]), r"must be a dict: name -> ViewRequirement, got \["),
        (module_with_views({"prev_actions": "actions"}), r"BadViews\.view_requirements must be"),
        (recurrent(None, None), r"get_initial_state\(\) must return a list of arrays, got None"),
        (recurrent([np.zeros(1, np.float32)], [None]), "states must be tensors, got NoneType"),
        (LazyModule, r"the parameter 'module\.out\.weight' has no shape yet"),
        (WithExtraState, r"get_extra_state\(\) returns \(module\._extra_state\): keep it in a buf"),
    ],
)
def test_invalid_models_are_rejected(model, match):
    states = [np.zeros((12, 1), np.float32)]
    with pytest.raises(ConfigError, match=match):
        PPOTorchPolicy(BOX, TWO, {"model": {"custom_model": model}}).compute_actions(
            rows()["obs"], state_batches=states
        )


class TooWide(ModelV2):
    """A network for observations of size 7."""

    def __init__(self, *args):
        super().__init__(*args)
        self.out = nn.Linear(7, self.num_outputs)

    def forward(self, input_dict, state, seq_lens):
        return self.out(input_dict["obs"]), state

    def value_function(self):
        return torch.zeros(12)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (TooWide, "TooWide"),
        (
            module_returning(lambda self, obs: self.out(obs[:, :1])),
            "BadModule (its forward receives obs, not a dict of views)",
        ),
    ],
)
def test_error_of_a_network_names_its_class_and_inputs(model, name):
    policy = PPOTorchPolicy(BOX, TWO, {"model": {"custom_model": model}})
    note = f"in the network {name}, whose inputs were obs: float32 [12, 3]"
    for call in (
        lambda: policy.compute_actions(rows()["obs"]),
        lambda: policy.model.from_batch(rows()),
    ):
        with pytest.raises(RuntimeError) as caught:
            call()
        assert caught.value.__notes__ == [note]


def test_error_of_a_network_describes_nested_inputs():
    space = spaces.Dict({"a": BOX, "b": spaces.Tuple([TWO])})
    policy = PPOTorchPolicy(space, TWO, {"model": {"custom_model": TooWide}})
    obs = {"a": np.zeros((2, 3), np.float32), "b": (np.zeros(2, np.int64),)}
    with pytest.raises((AttributeError, TypeError)) as caught:
        policy.compute_actions(obs)
    (note,) = caught.value.__notes__
    assert note.endswith("obs: {'a': float32 [2, 3], 'b': (int64 [2])}")


def test_error_of_an_attention_network_is_not_blamed_on_its_inputs():
    settings = {"use_attention": True, "attention_dim": 4, "attention_memory": 3}
    policy = PPOTorchPolicy(BOX, TWO, {"model": settings})
    states = np.zeros((12, 3, 5), np.float32)
    inputs = {"obs": rows()["obs"], "state_in_0": states, "state_in_1": states}
    policy.compute_actions_from_input_dict(inputs)

    def fail(*args):
        raise RuntimeError("out of memory")

    policy.model.heads.outputs = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        policy.compute_actions_from_input_dict(inputs)
    with pytest.raises(ConfigError, match=r"state_in_0: expected an array \[B, 3, 5\], got one of"):
        policy.compute_actions_from_input_dict({**inputs, "state_in_0": states[:, 1:]})


def test_make_distribution_must_return_a_distribution():
    policy_class = type("BadPolicy", (ReinforcePolicy,), {"make_distribution": lambda self: None})
    with pytest.raises(ConfigError, match=r"BadPolicy\.make_distribution\(\) must .*, got None"):
        policy_class(BOX, TWO, {})


@pytest.mark.parametrize("gradients", [None, [np.zeros(3)]])
def test_gradients_must_be_one_array(gradients):
    policy_class = build_torch_policy(
        "Bad", compute_gradients_fn=lambda policy, batch: (gradients, {})
    )
    with pytest.raises(ValueError, match=r"Bad: the gradient must be an array \[parameters\]"):
        policy_class(BOX, TWO, {}).learn_on_batch(rows())


def test_weights_must_be_a_dict():
    class WithList(Policy):
        def get_weights(self):
            return [np.zeros(3)]

    with pytest.raises(TypeError, match=r"WithList\.get_weights\(\) must .*by name, got a list"):
        WithList(BOX, TWO, {}).get_state()


@pytest.mark.parametrize("model", [None, 5, nn.Linear, (nn.Linear(3, 2),)])
def test_make_model_must_return_a_module(model):
    policy_class = type("BadPolicy", (ReinforcePolicy,), {"make_model": lambda self: model})
    with pytest.raises(ConfigError, match=r"torch.nn.Module"):
        policy_class(BOX, TWO, {})


def test_float64_parameters_are_rejected():
    def double_model(obs_space, action_space, num_outputs, model_config, name):
        return PlainModule(obs_space, action_space, num_outputs).double()

    with pytest.raises(ConfigError, match="float32"):
        PPOTorchPolicy(BOX, TWO, {"model": {"custom_model": double_model}})


@pytest.mark.parametrize("optimizer", [None, [], "adam", {}])
def test_make_optimizer_must_return_optimizers(optimizer):
    policy_class = type("BadPolicy", (ReinforcePolicy,), {"make_optimizer": lambda self: optimizer})
    with pytest.raises(ConfigError, match="make_optimizer"):
        policy_class(BOX, TWO, {})


def test_two_optimizers_of_the_same_parameters_are_rejected():
    def optimizers(policy, config):
        return [torch.optim.SGD(policy.model.parameters(), 0.1) for _ in range(2)]

    policy_class = build_torch_policy("Bad", lambda p, m, d, b: None, optimizer_fn=optimizers)
    with pytest.raises(ConfigError, match="the same parameters"):
        policy_class(BOX, TWO, {})


def test_frozen_layers_do_not_change():
    class Frozen(PlainModule):
        def __init__(self, *args):
            super().__init__(*args)
            self.value.requires_grad_(False)

    policy = ReinforcePolicy(BOX, TWO, {"model": {"custom_model": Frozen}, "lr": 0.1})
    before = policy.get_weights()
    policy.learn_on_batch(rows())
    after = policy.get_weights()
    assert np.array_equal(before["module.value.weight"], after["module.value.weight"])
    assert not np.array_equal(before["module.out.weight"], after["module.out.weight"])


@pytest.mark.parametrize("replaced", ["memory", "model", "layer moved"])
def test_learning_is_rejected_if_the_model_was_replaced(replaced):
    policy = ReinforcePolicy(BOX, TWO, {})
    if replaced == "model":
        policy.model = ReinforcePolicy(BOX, TWO, {}).model
    else:
        for parameter in policy.model.parameters():
            parameter.data = torch.ones_like(parameter)
    with pytest.raises(ConfigError, match="replaced"):
        policy.learn_on_batch(rows())
    with pytest.raises(ConfigError, match="replaced"):
        policy.set_weights(policy.get_weights())


@pytest.mark.parametrize("model", [{}, {"use_lstm": True}])
def test_copies_of_a_policy_share_no_weights(model):
    policy = PPOTorchPolicy(BOX, TWO, {"seed": 0, "model": model})
    for copied in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        inputs = {"obs": rows()["obs"]}
        for i, state in enumerate(policy.get_initial_state()):
            inputs[f"state_in_{i}"] = np.repeat(state[None], 12, 0)
        expected = policy.compute_actions_from_input_dict(inputs, explore=False)[2]
        extra = copied.compute_actions_from_input_dict(inputs, explore=False)[2]
        np.testing.assert_array_equal(extra["action_dist_inputs"], expected["action_dist_inputs"])
        before = policy.get_weights()
        copied.flat.vector.data.add_(1.0)
        assert weights_equal(policy, before)
        changed = copied.compute_actions_from_input_dict(inputs, explore=False)[2]
        assert (changed["vf_preds"] != extra["vf_preds"]).any()


def test_learning_from_values_without_a_value_function_is_rejected():
    class NoValues(ModelV2):
        def __init__(self, *args):
            super().__init__(*args)
            self.out = nn.Linear(4, 2)

        def forward(self, input_dict, state, seq_lens):
            return self.out(input_dict["obs"]), state

    worker = RolloutWorker("CartPole-v1", PPOTorchPolicy, {"model": {"custom_model": NoValues}})
    with pytest.raises(ConfigError, match="learns from values, but its model"):
        worker.sample()


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
def test_losses_must_be_scalar_tensors(result):
    class BadLoss(ReinforcePolicy):
        def loss(self, batch):
            return result(super().loss(batch))

    policy = BadLoss(BOX, TWO, {})
    before = policy.get_weights()
    with pytest.raises(ConfigError, match=r"loss.*(scalar|one number)"):
        policy.learn_on_batch(rows())
    assert weights_equal(policy, before)


class BatchNormModule(PlainModule):
    def __init__(self, *args):
        super().__init__(*args)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, obs):
        return super().forward(self.norm(obs))


@pytest.mark.parametrize("mode", ["raise", "skip"])
def test_nonfinite_update_changes_nothing(mode):
    config = {"model": {"custom_model": BatchNormModule}, "on_nonfinite_update": mode}
    policy = ReinforcePolicy(BOX, TWO, config)
    before, version = policy.get_weights(), policy.version
    obs = rows()["obs"].copy()
    obs[3] = np.nan
    bad_rows = rows().with_columns(obs=obs)
    if mode == "raise":
        with pytest.raises(FloatingPointError, match=r"not finite.*obs"):
            policy.learn_on_batch(bad_rows)
    else:
        assert policy.learn_on_batch(bad_rows) == {}
    assert weights_equal(policy, before)
    assert policy.version == version
    gradient, _ = policy.compute_gradients(rows())
    assert weights_equal(policy, before)
    gradient[0] = np.nan
    if mode == "raise":
        with pytest.raises(FloatingPointError, match="not finite"):
            policy.apply_gradients(gradient)
    else:
        policy.apply_gradients(gradient)
        assert policy.num_skipped_updates == 2
        other = ReinforcePolicy(policy.observation_space, policy.action_space, policy.config)
        other.set_state(policy.get_state())
        assert other.num_skipped_updates == 2
    assert weights_equal(policy, before)


def test_nonfinite_loss_with_finite_gradient_is_rejected():
    class NanLoss(ReinforcePolicy):
        def loss(self, batch):
            return super().loss(batch) + float("nan")

    with pytest.raises(FloatingPointError, match="total_loss"):
        NanLoss(BOX, TWO, {}).learn_on_batch(rows())


class DropoutModule(PlainModule):
    def __init__(self, *args):
        super().__init__(*args)
        self.drop = nn.Dropout(0.5)

    def forward(self, obs):
        return super().forward(self.drop(obs))


class FunctionalNoise(PlainModule):
    def forward(self, obs):
        return super().forward(functional.dropout(obs, 0.5, self.training))


class StackedCells(PlainModule):
    def __init__(self, *args):
        super().__init__(*args)
        self.recurrent = nn.LSTM(3, 3, num_layers=2, dropout=0.5)

    def forward(self, obs):
        return super().forward(self.recurrent(obs[None])[0][0])


class NoisyActing(PlainModule):
    def forward(self, obs):
        return super().forward(obs if self.training else obs + torch.randn_like(obs))


def test_noise_of_a_network_that_acts_follows_the_seed():
    def sampled(seed):
        with torch.random.fork_rng():
            torch.manual_seed(0)  # initial weights
            config = {"model": {"custom_model": NoisyActing}, "rollout_fragment_length": 20}
            w = RolloutWorker(lambda context: RandomEnv(), PPOTorchPolicy, {**config, "seed": seed})
            torch.manual_seed(torch.seed())
            return w.sample()

    first, second, other = map(sampled, (1, 1, 2))
    for name in ("actions", "vf_preds", "advantages"):
        np.testing.assert_array_equal(first[name], second[name])
    assert not np.array_equal(first["vf_preds"], other["vf_preds"])


def test_networks_of_workers_draw_different_noise():
    settings = {"model": {"custom_model": NoisyActing}, "seed": 1, "num_workers": 2}
    noise = []
    for index, count in ((0, 0), (1, 0), (2, 0), (1, 1)):
        with torch.random.fork_rng():
            torch.manual_seed(0)  # initial weights
            worker = RolloutWorker(
                lambda context: RandomEnv(), PPOTorchPolicy, settings,
                worker_index=index, restart_count=count,
            )  # fmt: skip
            noise.append(worker.policy.compute_actions(rows()["obs"])[2]["vf_preds"].tobytes())
    assert len(set(noise)) == 4


def test_greedy_actions_of_a_custom_network_do_not_change_later_samples():
    config = {"model": {"custom_model": PlainModule}, "seed": 1, "rollout_fragment_length": 20}
    with torch.random.fork_rng():
        workers = []
        for _ in range(2):
            torch.manual_seed(0)
            workers.append(RolloutWorker(lambda context: RandomEnv(), PPOTorchPolicy, config))
        workers[0].policy.compute_actions(rows()["obs"], explore=False)
        workers[0].policy.compute_values(rows()["obs"])
        first, second = (worker.sample() for worker in workers)
    np.testing.assert_array_equal(first["actions"], second["actions"])


@pytest.mark.parametrize("module", [DropoutModule, FunctionalNoise, StackedCells])
def test_dropout_follows_the_seed_and_is_off_in_statistics(module):
    config = {"model": {"custom_model": module}, "seed": 0}
    with torch.random.fork_rng():  # modules may draw their initial weights
        policies = []
        for _ in range(2):
            torch.manual_seed(0)
            policies.append(ReinforcePolicy(BOX, TWO, config))
    first, second = (policy.compute_gradients(rows())[0] for policy in policies)
    np.testing.assert_array_equal(first, second)
    w = RolloutWorker(
        lambda context: RandomEnv(), PPOTorchPolicy, {**config, "rollout_fragment_length": 50}
    )
    batch = w.sample()
    assert w.policy.batch_stats(batch) == w.policy.batch_stats(batch)
    assert w.policy.batch_stats(batch)["kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("value", [np.ones(2), torch.ones(1), "x", None])
def test_statistics_must_be_numbers(value):
    class BadStats(ReinforcePolicy):
        def loss(self, batch):
            self.stats["mine"] = value
            return super().loss(batch)

    with pytest.raises(ConfigError, match="the statistic 'mine' must be a number"):
        BadStats(BOX, TWO, {}).learn_on_batch(rows())


def test_columns_of_objects_cannot_become_tensors():
    class ReadsInfos(ReinforcePolicy):
        def loss(self, batch):
            return super().loss(batch) + len(batch["infos"])

    batch = rows().with_columns(infos=[{}] * 12)
    with pytest.raises(TypeError, match="column 'infos' holds objects"):
        ReadsInfos(BOX, TWO, {}).learn_on_batch(batch)


# -- state -----------------------------------------------------------------------------------------


def test_state_without_filters_is_rejected_and_changes_nothing():
    class Minimal(Policy):
        weights = {"w": np.zeros(1)}

        def get_weights(self):
            return self.weights

        def set_weights(self, weights):
            self.weights = weights

    for policy_class in (Minimal, ReinforcePolicy):
        state = policy_class(BOX, TWO, {"seed": 1}).get_state()
        policy = policy_class(BOX, TWO, {"seed": 0, "normalize_observations": True})
        before = policy.get_weights()
        state["weights"] = {name: one + 1 for name, one in state["weights"].items()}
        with pytest.raises(ValueError, match="trained without normalize_observations"):
            policy.set_state(state)
        for name, weight in before.items():
            np.testing.assert_array_equal(policy.get_weights()[name], weight)


@pytest.mark.parametrize("policy_class", [Policy, ReinforcePolicy])
def test_state_whose_filters_do_not_fit_changes_nothing(policy_class):
    class Minimal(policy_class):
        weights = {"w": np.zeros(1)}

        def get_weights(self):
            return self.weights if policy_class is Policy else super().get_weights()

        def set_weights(self, weights):
            if policy_class is Policy:
                self.weights = weights
            else:
                super().set_weights(weights)

    policy = Minimal(BOX, TWO, {"seed": 0, "normalize_observations": True})
    before = policy.get_weights()
    state = policy.get_state()
    state["weights"] = {name: one + 1 for name, one in state["weights"].items()}
    other = Minimal(spaces.Box(-1, 1, (4,)), TWO, {"seed": 0, "normalize_observations": True})
    state["filters"] = other.get_state()["filters"]
    with pytest.raises(ValueError, match="shape"):
        policy.set_state(state)
    for name, weight in before.items():
        np.testing.assert_array_equal(policy.get_weights()[name], weight)


def test_invalid_state_changes_nothing():
    policy, other = (ReinforcePolicy(BOX, TWO, {"seed": seed}) for seed in (0, 1))
    policy.learn_on_batch(rows())
    other.learn_on_batch(rows())
    before, state = policy.get_state(), other.get_state()
    learner = state["learner"]
    slot = learner["optimizers"][0]["0"]
    for part in before:
        with pytest.raises((ValueError, KeyError), match=part):
            policy.set_state({k: v for k, v in state.items() if k != part})
    for changes, match in [
        ({"optimizers": [{}]}, "step, exp_avg and exp_avg_sq"),
        ({"optimizers": [{"0": {"momentum": np.zeros(2)}}]}, r"\['momentum'\]"),
        ({"optimizers": [{"0": {**slot, "exp_avg": np.zeros(2)}}]}, r"optimizer 0 \(FlatAdam\)"),
        ({"rng": {}}, "random stream/bit_generator: field required"),
        ({"lrs": [[1.0, 2.0]]}, r"have \[2\] parameter groups, those of this policy \[1\]"),
        (
            {"optimizer_types": ["SGD"]},
            "the optimizers SGD, this policy has FlatAdam",
        ),
    ]:
        with pytest.raises(ValueError, match=match):
            policy.set_state({**state, "learner": {**learner, **changes}})
    after = policy.get_state()
    for name, weight in before["weights"].items():
        np.testing.assert_array_equal(after["weights"][name], weight)
    slots = [saved["learner"]["optimizers"][0]["0"] for saved in (before, after)]
    for name, part in slots[0].items():
        np.testing.assert_array_equal(slots[1][name], part)
    assert after["learner"]["lrs"] == before["learner"]["lrs"]
    with pytest.raises(ValueError, match="optimizers"):
        policy.set_state({**state, "total_timesteps": 1000, "learner": {**learner, "lrs": [[]]}})
    assert policy.total_timesteps is None
    assert {k: after[k] for k in ("rng", "version")} == {k: before[k] for k in ("rng", "version")}


def test_losses_without_a_gradient_or_a_forward_pass_are_explained():
    class Detached(A2CTorchPolicy):
        def loss(self, batch):
            return super().loss(batch).detach()

    class ValuesFirst(A2CTorchPolicy):
        def loss(self, batch):
            return self.model.value_function().mean()

    for kind, error, message in (
        (Detached, ConfigError, "got one without a gradient"),
        (ValuesFirst, RuntimeError, r"call from_batch\(batch\) first"),
    ):
        for model in ({"fcnet_hiddens": [8]}, {"use_lstm": True, "lstm_cell_size": 4}):
            settings = {"model": model, "rollout_fragment_length": 8}
            worker = RolloutWorker("CartPole-v1", kind, settings)
            batch = worker.sample()
            worker.policy.model._features = None
            with pytest.raises(error, match=message):
                worker.policy.learn_on_batch(batch)


class WithBatchNorm(nn.Module):
    """A module with statistics that its forward pass updates in training only."""

    def __init__(self, obs_space, num_outputs):
        super().__init__()
        self.norm = nn.BatchNorm1d(obs_space.shape[0])
        self.outputs = nn.Linear(obs_space.shape[0], num_outputs + 1)

    def forward(self, obs):
        outputs = self.outputs(self.norm(obs))
        return outputs[:, :-1], outputs[:, -1]


def test_gradients_that_are_sent_do_not_contain_buffers(caplog):
    class WithStatistics(A2CTorchPolicy):
        def make_model(self):
            return WithBatchNorm(self.observation_space, 2)

    worker = RolloutWorker("CartPole-v1", WithStatistics, {"rollout_fragment_length": 8})
    batch = worker.sample()
    for _ in range(2):
        worker.policy.compute_gradients(batch)
    (record,) = caplog.records
    assert "the network of WithStatistics has buffers" in record.message


class WithMean(nn.Module):
    """A module that replaces its buffer in each forward pass."""

    def __init__(self, obs_space, action_space, num_outputs):
        super().__init__()
        self.register_buffer("mean", torch.zeros(obs_space.shape[0]))
        self.outputs = nn.Linear(obs_space.shape[0], num_outputs + 1)

    def forward(self, obs):
        self.mean = 0.9 * self.mean + 0.1 * obs.mean(0)
        outputs = self.outputs(obs)
        return outputs[:, :-1], outputs[:, -1]


def buffer_of(model):
    return dict(model.named_buffers())["module.mean"].clone()


def test_buffers_that_a_network_replaces_are_copied_and_restored():
    settings = {"model": {"custom_model": WithMean}, "rollout_fragment_length": 8}
    worker = RolloutWorker("CartPole-v1", DQNTorchPolicy, settings)
    policy, batch = worker.policy, worker.sample()
    policy.learn_on_batch(batch)
    policy.update_target(1.0)
    before = buffer_of(policy.model)
    assert before.any()
    assert torch.equal(buffer_of(policy.target_model), before)
    policy.compute_gradients(batch)
    assert torch.equal(buffer_of(policy.model), before)
    with pytest.raises(FloatingPointError):
        policy.learn_on_batch(batch.with_columns(rewards=np.full(batch.count, np.nan, np.float32)))
    assert torch.equal(buffer_of(policy.model), before)
