"""build_torch_policy: example, hooks, pickling, with_updates."""

import gc
import pickle
import weakref

import gymnasium as gym
import numpy as np
import pytest
import torch

from flowrl.algorithms.a2c import A2C, A2CConfig
from flowrl.learners.actors import check_distributable
from flowrl.policies import ConfigError, build_tf_policy, build_torch_policy
from flowrl.policies.distributions import Categorical
from flowrl.sampling import RolloutWorker, WorkerSet

from . import fakes
from .fakes import BOX, TWO


def policy_gradient_loss(policy, model, dist_class, train_batch):
    logits, _ = model.from_batch(train_batch)
    action_dist = dist_class(logits, model)
    return -torch.mean(action_dist.logp(train_batch["actions"]) * train_batch["rewards"])


# <class 'MyTorchPolicy'>
MyTorchPolicy = build_torch_policy(name="MyTorchPolicy", loss_fn=policy_gradient_loss)


def rows():
    return fakes.rows(32)


def test_policy_gradient_example():
    policy = MyTorchPolicy(BOX, TWO, {})
    batch = rows()
    logits, _ = policy.model.from_batch(batch)
    logp = torch.log_softmax(logits, 1)[torch.arange(32), torch.from_numpy(batch["actions"])]
    expected = -(logp * torch.from_numpy(batch["rewards"])).mean()
    stats = policy.learn_on_batch(batch)
    assert stats["total_loss"] == pytest.approx(float(expected.detach()), abs=1e-6)
    next_stats = policy.learn_on_batch(batch)
    assert next_stats["total_loss"] < stats["total_loss"]
    assert MyTorchPolicy.__name__ == "MyTorchPolicy"
    assert MyTorchPolicy.__module__ == __name__


def test_class_is_pickled_by_reference():
    assert pickle.loads(pickle.dumps(MyTorchPolicy)) is MyTorchPolicy


def test_workers_sample_and_the_policy_learns():
    with WorkerSet(
        policy_class=MyTorchPolicy,
        env_creator=lambda context: gym.make("CartPole-v1"),
        num_workers=0,
    ) as workers:
        worker = workers.local_worker()
        assert np.isfinite(worker.policy.learn_on_batch(worker.sample())["total_loss"])


def test_tensorflow_policies_are_rejected():
    with pytest.raises(ConfigError, match=r"torch only.*build_torch_policy"):
        build_tf_policy(name="MyTFPolicy", loss_fn=policy_gradient_loss)


class Mixin:
    def __init__(self, *args):
        raise AssertionError("constructors of mixins must not be called")

    def doubled(self):
        return 2 * self.config["beta"]


def test_each_hook_is_called():
    calls = []

    def record(name):
        return lambda *args: calls.append(name)

    def before_init(policy, observation_space, action_space, config):
        assert config["beta"] == 0.5 and config is policy.config
        assert not hasattr(policy, "model")
        calls.append("before_init")

    def before_loss_init(policy, observation_space, action_space, config):
        assert policy.model is not None and not hasattr(policy, "optimizers")
        calls.append("before_loss_init")

    def loss(policy, model, dist_class, train_batch):
        assert policy.doubled() == 1.0
        return policy_gradient_loss(policy, model, dist_class, train_batch)

    def optimizer(policy, config):
        return torch.optim.SGD(policy.model.parameters(), lr=config["lr"])

    def extra_out(policy, input_dict, state_batches, model, action_dist):
        return {"max_prob": torch.exp(action_dist.logits).max(1).values}

    def process(policy, optimizer, loss):
        assert isinstance(optimizer, torch.optim.SGD)
        total = sum(float((p.grad**2).sum()) for p in policy.model.parameters())
        return {"squared_norm": total, "loss": loss}

    def postprocess(policy, sample_batch, other_agent_batches, episode):
        calls.append("postprocess")
        return sample_batch.with_columns(rewards=sample_batch["rewards"] * 0.5)

    policy_class = build_torch_policy(
        "Hooked",
        loss,
        get_default_config=lambda: {"beta": 0.5, "lr": 0.25},
        stats_fn=lambda policy, batch: {"mean_reward": batch["rewards"].mean()},
        postprocess_fn=postprocess,
        extra_action_out_fn=extra_out,
        extra_grad_process_fn=process,
        extra_learn_fetches_fn=lambda policy: {"fetched": 7},
        optimizer_fn=optimizer,
        validate_spaces=record("validate_spaces"),
        before_init=before_init,
        before_loss_init=before_loss_init,
        after_init=record("after_init"),
        mixins=[Mixin],
    )
    w = RolloutWorker("CartPole-v1", policy_class, {"rollout_fragment_length": 50, "seed": 0})
    assert calls == ["validate_spaces", "before_init", "before_loss_init", "after_init"]
    batch = w.sample()
    assert (batch["rewards"] == 0.5).all()
    assert batch["max_prob"].shape == (50,)
    assert ((batch["max_prob"] >= 0.5) & (batch["max_prob"] <= 1)).all()
    before = w.policy.get_weights()["hidden.0.weight"]
    gradient, _ = w.policy.compute_gradients(batch)
    stats = w.policy.learn_on_batch(batch)
    assert stats["fetched"] == 7
    assert stats["mean_reward"] == pytest.approx(0.5)
    assert stats["loss"] == pytest.approx(stats["total_loss"])
    assert stats["squared_norm"] == pytest.approx(float((gradient**2).sum()), rel=1e-4)
    # the optimizer is SGD with a learning rate of 0.25, after clipping to a norm of 0.5
    flat = w.policy.flat
    index = flat.names.index("hidden.0.weight")
    start = sum(p.numel() for p in flat.parameters[:index])
    weight_gradient = gradient[start : start + before.size].reshape(before.shape[::-1]).T
    weight_gradient = weight_gradient * min(1.0, 0.5 / np.linalg.norm(gradient))
    after = w.policy.get_weights()["hidden.0.weight"]
    np.testing.assert_allclose(after, before - 0.25 * weight_gradient, rtol=1e-5, atol=1e-6)


def test_hooks_for_model_distribution_and_sampler():
    def model_and_dist(policy, observation_space, action_space, config):
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.out = torch.nn.Linear(3, 2)

            def forward(self, obs):
                return self.out(obs)

        return Net(), Categorical

    policy_class = build_torch_policy(
        "Custom", policy_gradient_loss, make_model_and_action_dist=model_and_dist
    )
    policy = policy_class(BOX, TWO, {})
    actions, _, extra = policy.compute_actions(rows()["obs"])
    assert "vf_preds" not in extra
    assert np.isfinite(policy.learn_on_batch(rows())["total_loss"])

    def sampler(policy, model, input_dict, state_batches, *, explore, timestep):
        count = len(input_dict["obs"])
        return torch.full((count,), int(explore)), torch.zeros(count), None, []

    policy_with_sampler = policy_class.with_updates(action_sampler_fn=sampler)
    assert policy_with_sampler.__name__ == "Custom"
    policy = policy_with_sampler(BOX, TWO, {})
    actions, _, extra = policy.compute_actions(rows()["obs"])
    assert (actions == 1).all() and set(extra) == {"action_logp"}
    assert (policy.compute_actions(rows()["obs"], explore=False)[0] == 0).all()

    def distribution(policy, model, input_dict, *, state_batches, explore, timestep):
        logits = torch.tensor([[-50.0, 50.0]]).repeat(len(input_dict["obs"]), 1)
        return logits, Categorical, []

    policy_with_distribution = policy_class.with_updates(
        action_distribution_fn=distribution, name="B"
    )
    policy = policy_with_distribution(BOX, TWO, {})
    actions, _, extra = policy.compute_actions(rows()["obs"])
    assert (actions == 1).all()
    np.testing.assert_allclose(extra["action_logp"], 0, rtol=1e-5, atol=1e-6)


def test_gradient_hooks_replace_learning():
    def compute(policy, batch):
        return np.ones(len(policy.flat.gradient), np.float32), {"mean_error": 1.0}

    def apply(policy, gradients):
        with torch.no_grad():
            policy.flat.vector.sub_(torch.from_numpy(gradients))

    hooks = {"compute_gradients_fn": compute, "apply_gradients_fn": apply}
    policy = build_torch_policy("Ones", **hooks)(BOX, TWO, {})
    before, version = policy.get_weights(), policy.version
    assert policy.learn_on_batch(rows()) == {"mean_error": 1.0}
    for name, weight in policy.get_weights().items():
        np.testing.assert_allclose(weight, before[name] - 1)
    assert policy.version == version + 1


def nan_loss(policy, model, dist_class, train_batch):
    return model.from_batch(train_batch)[0].sum() * float("nan")


@pytest.mark.parametrize(
    "hook", [{"loss_fn": nan_loss}, {"compute_gradients_fn": lambda p, b: ([np.nan], {"a": 1.0})}]
)
def test_gradient_hook_never_gets_a_nonfinite_gradient(hook):
    applied = []
    policy_class = build_torch_policy(
        "Hooked", **hook, apply_gradients_fn=lambda policy, grads: applied.append(grads)
    )
    policy = policy_class(BOX, TWO, {"on_nonfinite_update": "skip"})
    assert policy.learn_on_batch(rows()) == {}
    assert (policy.num_skipped_updates, policy.version) == (1, 0)
    policy.apply_gradients(policy.compute_gradients(rows())[0])
    assert (policy.num_skipped_updates, policy.version) == (2, 0)
    strict = policy_class(BOX, TWO, {})
    with pytest.raises(FloatingPointError):
        strict.learn_on_batch(rows())
    with pytest.raises(FloatingPointError):
        strict.apply_gradients(np.array([np.inf]))
    assert not applied


def test_graph_of_the_loss_is_released_after_an_update():
    losses = []

    def loss(policy, model, dist_class, train_batch):
        result = policy_gradient_loss(policy, model, dist_class, train_batch)
        losses.append(weakref.ref(result))
        return result

    policy = build_torch_policy("Released", loss)(BOX, TWO, {})
    policy.learn_on_batch(rows())
    gc.collect()
    assert losses[0]() is None


def test_with_updates_keeps_the_methods_of_a_subclass():
    class Subclass(MyTorchPolicy):
        def extra_action_out(self, input_dict, states, outputs):
            return {"mine": 2 * outputs}

    updated = Subclass.with_updates(name="Updated", stats_fn=lambda policy, batch: {"x": 1.0})
    twice_updated = updated.with_updates(stats_fn=lambda policy, batch: {"x": 2.0})
    assert issubclass(updated, Subclass) and issubclass(twice_updated, Subclass)
    for policy_class, x in ((updated, 1.0), (twice_updated, 2.0)):
        policy = policy_class(BOX, TWO, {})
        extra = policy.compute_actions(rows()["obs"])[2]
        np.testing.assert_array_equal(extra["mine"], 2 * extra["action_dist_inputs"])
        assert policy.learn_on_batch(rows())["x"] == x
    with pytest.raises(TypeError, match="loss_fn is Subclass's"):
        updated.with_updates(loss_fn=None)


def test_settings_of_the_run_override_those_of_the_policy_and_the_algorithm():
    """Precedence: settings of the run, defaults of the policy class, defaults of the algorithm."""
    defaults = {"lr": 1e-2, "betta": 3.0}
    untyped = build_torch_policy(
        "Untyped", policy_gradient_loss, get_default_config=lambda: dict(defaults)
    )
    typed = build_torch_policy(
        "Typed", policy_gradient_loss, get_default_config=lambda: A2CConfig(lr=1e-2)
    )
    for policy_class in (untyped, typed):
        algorithm_class = type("CustomA2C", (A2C,), {"policy_class": policy_class})
        for settings, lr in (({}, 1e-2), ({"lr": 1e-4}, 1e-4)):
            config = A2CConfig(env="CartPole-v1", train_batch_size=32, gamma=0.5, **settings)
            with algorithm_class(config) as algo:
                algo.train()
                policy = algo.get_policy()
            assert (policy.config.lr, policy.config.gamma) == (lr, 0.5)
            assert policy.optimizer.param_groups[0]["lr"] == lr
            assert policy_class is not untyped or policy.config["betta"] == 3.0


def test_several_losses_and_optimizers():
    """The parameters of each optimizer follow only its loss."""

    def losses(policy, model, dist_class, train_batch):
        model.from_batch(train_batch)
        inputs, _ = model.from_batch(train_batch)
        policy_loss = policy_gradient_loss(policy, model, dist_class, train_batch)
        value_loss = ((model.value_function() - train_batch["rewards"]) ** 2).mean()
        return [policy_loss + 0 * value_loss, value_loss + 5 * inputs.sum()]

    def optimizers(policy, config):
        named = dict(policy.model.named_parameters())
        values = [p for n, p in named.items() if n.startswith("value")]
        others = [p for n, p in named.items() if not n.startswith("value")]
        return [torch.optim.Adam(others, 1e-2), torch.optim.SGD(values, 1e-2)]

    policy_class = build_torch_policy("Two", losses, optimizer_fn=optimizers)
    config = {"seed": 0, "grad_clip": None}
    policy = policy_class(BOX, TWO, config)
    single = build_torch_policy(
        "One", policy_gradient_loss, optimizer_fn=lambda p, c: optimizers(p, c)[0]
    )(BOX, TWO, config)
    for _ in range(3):
        stats = policy.learn_on_batch(rows())
        single.learn_on_batch(rows())
    assert set(stats) >= {"loss_0", "loss_1", "total_loss", "grad_norm"}
    weights, expected = policy.get_weights(), single.get_weights()
    initial = policy_class(BOX, TWO, config).get_weights()
    for name, weight in weights.items():
        if name.startswith("value"):
            assert (weight != initial[name]).any()
        else:
            np.testing.assert_allclose(weight, expected[name], rtol=1e-5, atol=1e-6)
    # the state contains both optimizers
    state = policy.get_state()
    other = policy_class(BOX, TWO, config)
    other.set_state(state)
    policy.learn_on_batch(rows())
    other.learn_on_batch(rows())
    for name, weight in policy.get_weights().items():
        np.testing.assert_array_equal(weight, other.get_weights()[name])
    policy.learner.optimizers[1].param_groups[0]["lr"] = 5e-3  # by a scheduler of the user
    other.set_state(policy.get_state())
    assert [o.param_groups[0]["lr"] for o in other.learner.optimizers] == [1e-2, 5e-3]
    slower = policy_class.with_updates(
        optimizer_fn=lambda policy, config: [
            optimizers(policy, config)[0],
            torch.optim.SGD(optimizers(policy, config)[1].param_groups[0]["params"], 1e-3),
        ]
    )(BOX, TWO, config)
    slower.set_state(policy.get_state())
    assert [o.param_groups[0]["lr"] for o in slower.learner.optimizers] == [1e-2, 1e-3]
    one_loss = policy_class.with_updates(loss_fn=policy_gradient_loss)(BOX, TWO, config)
    with pytest.raises(ConfigError, match="1 losses for 2 optimizers"):
        one_loss.learn_on_batch(rows())
    one_optimizer = policy_class.with_updates(optimizer_fn=None)(BOX, TWO, config)
    with pytest.raises(ConfigError, match="2 losses for 1 optimizers"):
        one_optimizer.learn_on_batch(rows())


def test_invalid_arguments_are_rejected():
    with pytest.raises(ConfigError, match="a loss_fn or a compute_gradients_fn is required"):
        build_torch_policy("Nothing")
    with pytest.raises(ConfigError, match="stats_fn must be a function"):
        build_torch_policy("Bad", policy_gradient_loss, stats_fn={"a": 1})
    with pytest.raises(TypeError, match="no hook 'loss_function'"):
        MyTorchPolicy.with_updates(loss_function=policy_gradient_loss)
    with pytest.raises(ConfigError, match=r"must return a torch.nn.Module"):
        MyTorchPolicy.with_updates(make_model=lambda *args: 5)(BOX, TWO, {})
    with pytest.raises(ConfigError, match="unknown setting 'betta'"):
        MyTorchPolicy(BOX, TWO, {"betta": 1})

    def missing_column_loss(policy, model, dist_class, train_batch):
        return train_batch["advantages"].mean()

    with pytest.raises(KeyError, match="advantages"):
        MyTorchPolicy.with_updates(loss_fn=missing_column_loss)(BOX, TWO, {}).learn_on_batch(rows())


def test_distribution_of_the_hook_may_be_for_a_space_that_has_none():
    class Integers(Categorical):
        @classmethod
        def num_inputs(cls, space):
            return 5

    space = gym.spaces.Box(0, 4, (1,), np.int64)
    calls = []

    def make(policy, obs_space, action_space, config):
        calls.append(1)
        return torch.nn.Linear(4, 5), Integers

    cls = build_torch_policy("Mine", lambda *a: None, make_model_and_action_dist=make)
    policy = cls(gym.spaces.Box(-1, 1, (4,)), space, {})
    assert policy.dist_class is Integers
    assert len(calls) == 1
    default = build_torch_policy(
        "Default",
        lambda *a: None,
        make_model_and_action_dist=lambda p, *a: (torch.nn.Linear(4, 2), p.dist_class),
    )
    assert issubclass(default(BOX, TWO, {}).dist_class, Categorical)
    policy.new_model()
    assert len(calls) == 2


@pytest.mark.parametrize("returned", [None, torch.distributions.Categorical])
def test_distribution_of_the_hook_must_be_an_action_distribution(returned):
    cls = build_torch_policy(
        "Mine",
        lambda *a: None,
        make_model_and_action_dist=lambda *a: (torch.nn.Linear(4, 2), returned),
    )
    with pytest.raises(ConfigError, match="must return a subclass of ActionDistribution"):
        cls(gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(2), {})


def test_trial_of_the_loss_releases_its_graph():
    graphs = weakref.WeakSet()

    def loss(policy, model, dist_class, batch):
        result = policy_gradient_loss(policy, model, dist_class, batch)
        graphs.add(result)
        return result

    policy = build_torch_policy(name="Traced", loss_fn=loss)(BOX, TWO, {})
    assert policy.learner.columns_read(rows())
    gc.collect()
    assert len(graphs) == 0


def test_own_gradients_are_not_averaged_over_processes():
    own = build_torch_policy(
        name="Own", loss_fn=policy_gradient_loss,
        compute_gradients_fn=lambda policy, batch: ([0.0], {}),
    )  # fmt: skip
    with pytest.raises(TypeError, match="the gradients of its own compute_gradients_fn cannot be"):
        check_distributable(own(BOX, TWO, {}))
    check_distributable(MyTorchPolicy(BOX, TWO, {}))
