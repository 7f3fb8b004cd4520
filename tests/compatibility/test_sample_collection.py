"""The examples and options of RLlib's documentation of sample collection and trajectory views
(docs/reference/compatibility.md)."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from flowrl.algorithms import ppo
from flowrl.algorithms.a2c import A2C, A2CConfig
from flowrl.data import MultiAgentBatch, SampleBatch
from flowrl.envs import make_multi_agent
from flowrl.policies import ModelV2, ViewRequirement, ViewRequirements, build_torch_policy
from flowrl.sampling import (
    AsyncSampler,
    DefaultCallbacks,
    RolloutWorker,
    SamplerInput,
    SimpleListCollector,
    SyncSampler,
    override,
)
from flowrl.trainer.config import AlgorithmConfig

from ..sampling.fakes import CountEnv, Idle


def make_worker(length=98, policy=Idle, **config):
    return RolloutWorker(lambda context: CountEnv(length), policy, config)


# -- samplers and rollouts -------------------------------------------------------------------------


@pytest.mark.parametrize(("sample_async", "kind"), [(False, SyncSampler), (True, AsyncSampler)])
def test_worker_has_a_sampler(sample_async, kind):
    worker = make_worker(sample_async=sample_async, rollout_fragment_length=10)
    assert isinstance(worker.sampler, SamplerInput)
    assert type(worker.sampler) is kind
    # an AsyncSampler's next() also has the fragments that its thread has sampled meanwhile
    counts = (10, 20, 30) if sample_async else (10,)
    assert worker.sample().count in counts
    assert worker.sampler.next().count in counts
    worker.stop()


def test_trajectory_views_are_always_used():
    A2CConfig(_use_trajectory_view_api=True)
    with pytest.raises(ValueError, match="_use_trajectory_view_api: must be True"):
        A2CConfig(_use_trajectory_view_api=False)


@pytest.mark.parametrize("batch_mode", ["truncate_episodes", "truncated_episodes"])
def test_rollouts_have_exactly_the_fragment_length(batch_mode):
    """A rollout may span several episodes, and start and end within one."""
    config = AlgorithmConfig().rollout(batch_mode=batch_mode, rollout_fragment_length=7)
    assert config.batch_mode == "truncate_episodes"
    worker = make_worker(length=5, batch_mode=batch_mode, rollout_fragment_length=7)
    batches = [worker.sample() for _ in range(3)]
    assert [batch.count for batch in batches] == [7, 7, 7]
    assert [batch["t"].tolist() for batch in batches[:2]] == [
        [0, 1, 2, 3, 4, 0, 1],
        [2, 3, 4, 0, 1, 2, 3],
    ]


def test_rollouts_of_complete_episodes_have_at_least_the_fragment_length():
    config = AlgorithmConfig().rollouts(batch_mode="complete_episodes", rollout_fragment_length=100)
    worker = make_worker(length=98, **config.explicit_settings())
    for _ in range(2):
        batch = worker.sample()
        assert batch.count == 196
        assert batch["t"].tolist() == [*range(98), *range(98)]
        assert np.flatnonzero(batch["dones"]).tolist() == [97, 195]
    assert (
        make_worker(length=98, **config.explicit_settings()).sampler.next().count == 98
    )  # one episode


@pytest.mark.parametrize(
    "setting",
    [
        {"count_steps_by": "agent_steps"},
        {"count_steps_as": "agent_steps"},
        {"multiagent": {"count_steps_by": "agent_steps"}},
    ],
)
def test_rollouts_are_counted_in_agent_steps(setting):
    config = AlgorithmConfig(**setting)
    assert config.count_steps_by == "agent_steps"
    assert AlgorithmConfig().multi_agent(count_steps_by="agent_steps").count_steps_by == (
        "agent_steps"
    )
    counts = {}
    for unit in ("env_steps", "agent_steps"):
        worker = RolloutWorker(
            make_multi_agent("CartPole-v1"),
            {"default_policy": ppo.PPOTorchPolicy},
            {
                "env_config": {"num_agents": 2},
                "rollout_fragment_length": 8,
                "count_steps_by": unit,
            },
        )
        batch = worker.sample()
        counts[unit] = batch.as_multi_agent().agent_steps()
    assert counts == {"env_steps": 16, "agent_steps": 8}


def test_env_steps_and_agent_steps_are_equal_for_one_agent():
    worker = make_worker(rollout_fragment_length=9, count_steps_by="agent_steps")
    batch = worker.sample()
    assert batch.env_steps() == batch.agent_steps() == 9


def test_rollouts_are_concatenated_into_train_batches():
    config = A2CConfig(env="CartPole-v1", train_batch_size=50, rollout_fragment_length=20)
    with config.build() as algorithm:
        learner = algorithm.train()["info"]["learner"]["default_policy"]
        assert learner["num_agent_steps_trained"] == 60


def test_trajectories_are_postprocessed_at_episode_ends_and_fragment_ends():
    calls = []

    class Records(Idle):
        def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
            calls.append((sample_batch["eps_id"].tolist(), sample_batch["t"].tolist()))
            return sample_batch

    worker = make_worker(length=3, policy=Records, rollout_fragment_length=5)
    worker.sample(), worker.sample()
    assert [t for _, t in calls] == [[0, 1, 2], [0, 1], [2], [0, 1, 2], [0]]
    assert all(len(set(eps_id)) == 1 for eps_id, _ in calls)


def test_collector_is_a_setting():
    class Counts(SimpleListCollector):
        rows = 0

        def add_action_reward_next_obs(self, *args, **kwargs):
            Counts.rows += 1
            super().add_action_reward_next_obs(*args, **kwargs)

    assert AlgorithmConfig(sample_collector=Counts).sample_collector is Counts
    batch = make_worker(sample_collector=Counts, rollout_fragment_length=6).sample()
    assert Counts.rows == batch.count == 6


# -- view requirements -----------------------------------------------------------------------------


class PlainModel(ModelV2):
    """A model with a linear layer, and views that a test adds."""

    views = {}

    def __init__(self, obs_space, action_space, num_outputs, model_config, name):
        super().__init__(obs_space, action_space, num_outputs, model_config, name)
        self.view_requirements |= self.views
        self.layer = torch.nn.Linear(obs_space.shape[0], num_outputs)
        self.inputs = []

    def forward(self, input_dict, state, seq_lens):
        self.inputs.append({name: input_dict[name].numpy() for name in self.view_requirements})
        self.values = input_dict["obs"].sum(1)
        return self.layer(input_dict["obs"].float()), state

    def value_function(self):
        return self.values


def worker_with_views(views, length=5, fragment=7):
    model = type("Model", (PlainModel,), {"views": views})
    return RolloutWorker(
        lambda context: CountEnv(length),
        ppo.PPOTorchPolicy,
        {"model": {"custom_model": model}, "rollout_fragment_length": fragment, "seed": 0},
    )


def test_models_have_view_requirements():
    env = gym.make("CartPole-v1")
    spaces = env.observation_space, env.action_space
    simple = ppo.PPOTorchPolicy(*spaces, {})
    assert list(simple.model.view_requirements) == ["obs"]
    view = simple.model.view_requirements["obs"]
    assert (view.shift, view.space) == (0, env.observation_space)
    assert repr(view).startswith("ViewRequirement(shift=0, space=Box(")
    model = {"use_lstm": True, "lstm_use_prev_action": True, "lstm_use_prev_reward": True}
    lstm = ppo.PPOTorchPolicy(*spaces, {"model": model})
    views = lstm.model.view_requirements
    assert lstm.view_requirements is views
    assert repr(views["prev_actions"]) == (
        "ViewRequirement(data_col='actions', shift=-1, space=Discrete(2))"
    )
    assert (views["prev_rewards"].data_col, views["prev_rewards"].shift) == ("rewards", -1)
    without = ppo.PPOTorchPolicy(*spaces, {"model": {"use_lstm": True}}).model.view_requirements
    assert not {"prev_actions", "prev_rewards"} & set(without)


def test_attention_looks_back_on_its_own_outputs():
    env = gym.make("CartPole-v1")
    model = {"use_attention": True, "attention_memory": 50}
    policy = ppo.PPOTorchPolicy(env.observation_space, env.action_space, {"model": model})
    view = policy.model.view_requirements["state_in_0"]
    assert (view.data_col, view.shift) == ("state_out_0", "-50:-1")


class WithPreviousStep(PlainModel):
    """The lines of the LSTM wrapper that add views in the constructor."""

    def __init__(self, obs_space, action_space, num_outputs, model_config, name):
        super().__init__(obs_space, action_space, num_outputs, model_config, name)
        assert model_config["lstm_use_prev_action"] is False
        self.view_requirements[SampleBatch.PREV_ACTIONS] = ViewRequirement(
            SampleBatch.ACTIONS, space=self.action_space, shift=-1
        )
        self.view_requirements[SampleBatch.PREV_REWARDS] = ViewRequirement(
            SampleBatch.REWARDS, shift=-1
        )


class WithMemory(PlainModel):
    """The lines of the attention network that feed its last outputs back into it."""

    def __init__(self, obs_space, action_space, num_outputs, model_config, name):
        super().__init__(obs_space, action_space, num_outputs, model_config, name)
        space = Box(-1.0, 1e6, shape=(1,))
        for i in range(1):
            self.view_requirements[f"state_in_{i}"] = ViewRequirement(
                f"state_out_{i}", shift="-3:-1", batch_repeat_value=4, space=space
            )
            self.view_requirements[f"state_out_{i}"] = ViewRequirement(
                space=space, used_for_training=False
            )

    def get_initial_state(self):
        return [np.zeros(1)]

    def forward(self, input_dict, state, seq_lens):
        (memory,) = state
        assert memory.shape[1:] == (3, 1)
        self.values = input_dict["obs"].sum(1)
        self.inputs.append(memory[:, :, 0].tolist())
        return self.layer(input_dict["obs"].float()), [input_dict["obs"][:, 1:] + 1]


def test_models_add_views_in_their_constructors():
    worker = RolloutWorker(
        lambda context: CountEnv(5),
        ppo.PPOTorchPolicy,
        {"model": {"custom_model": WithPreviousStep}, "rollout_fragment_length": 7},
    )
    batch = worker.sample()
    assert batch["prev_rewards"].tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert batch["prev_actions"].tolist()[1:5] == batch["actions"].tolist()[:4]


def test_models_look_back_on_their_last_outputs():
    worker = RolloutWorker(
        lambda context: CountEnv(5),
        ppo.PPOTorchPolicy,
        {"model": {"custom_model": WithMemory}, "rollout_fragment_length": 7},
    )
    model = worker.policy.model
    model.inputs.clear()
    batch = worker.sample()
    assert model.inputs[:6] == [
        [[0, 0, 0]], [[0, 0, 1]], [[0, 1, 2]], [[1, 2, 3]], [[2, 3, 4]], [[0, 0, 0]]
    ]  # fmt: skip
    assert batch["seq_lens"].tolist() == [4, 1, 2]
    assert batch["state_in_0"][:, :, 0].tolist() == [[0, 0, 0], [2, 3, 4], [0, 0, 0]]
    assert "state_out_0" not in batch


def test_views_of_the_model_are_the_same_when_acting_and_in_the_batch():
    views = {
        "prev_actions": ViewRequirement(data_col="actions", shift=-1, space=Discrete(2)),
        "prev_rewards": ViewRequirement(data_col="rewards", shift=-1),
        "last_obs": ViewRequirement("obs", shift="-2:0"),
    }
    worker = worker_with_views(views)
    model = worker.policy.model
    model.inputs.clear()
    batch = worker.sample()
    acting = [inputs for inputs in model.inputs if len(inputs["obs"]) == 1][:7]
    for name in views:
        np.testing.assert_array_equal(np.concatenate([i[name] for i in acting]), batch[name])
    assert batch["prev_rewards"].tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert batch["last_obs"][:, :, 1].tolist()[:3] == [[0, 0, 0], [0, 0, 1], [0, 1, 2]]


def test_data_col_is_the_name_of_the_view_by_default():
    assert ViewRequirements is ViewRequirement  # both names are in the examples
    views = {
        "rewards": ViewRequirements(shift=0),
        "prev_rewards": ViewRequirements(data_col="rewards", shift=-1),
    }
    worker = make_worker(length=4, rollout_fragment_length=4)
    worker.policy.view_requirements |= views
    batch = worker.sample()
    assert batch["rewards"].tolist() == [1, 2, 3, 4]
    assert batch["prev_rewards"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("shift", "expected"),
    [
        (0, [1, 2, 3, 4]),
        (1, [2, 3, 4, 0]),
        (-1, [0, 1, 2, 3]),
        ([-2, -1], [[0, 0], [0, 1], [1, 2], [2, 3]]),
        ("-3:-1", [[0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3]]),
        ("-50:-1", [[0] * (50 - t) + list(range(1, t + 1)) for t in range(4)]),
    ],
)
def test_shifts(shift, expected):
    worker = make_worker(length=4, rollout_fragment_length=4)
    worker.policy.view_requirements["view"] = ViewRequirement("rewards", shift=shift)
    assert worker.sample()["view"].tolist() == expected


def test_space_has_the_values_before_the_start():
    worker = make_worker(length=4, rollout_fragment_length=4)
    views = worker.policy.view_requirements
    views["before"] = ViewRequirement("actions", space=Discrete(2), shift=[-2, -1])
    batch = worker.sample()
    assert batch["before"].dtype == batch["actions"].dtype
    assert batch["before"].tolist()[0] == [0, 0]


def test_views_that_are_not_for_training_are_not_in_the_batch():
    seen = []

    class Sees(Idle):
        def compute_actions_from_input_dict(self, input_dict, explore=True):
            seen.append(input_dict["prev_rewards"].tolist())
            return super().compute_actions_from_input_dict(input_dict, explore)

    worker = make_worker(policy=Sees, rollout_fragment_length=3)
    worker.policy.view_requirements["prev_rewards"] = ViewRequirement(
        "rewards", shift=-1, used_for_training=False
    )
    assert "prev_rewards" not in worker.sample()
    assert seen[:3] == [[0], [1], [2]]


@pytest.mark.slow
def test_columns_that_the_loss_does_not_read_stay_on_their_worker(ray_session):
    """Rewards and dones are always there."""
    from flowrl.sampling import WorkerSet

    def loss(policy, model, dist_class, train_batch):
        logits, _ = model.from_batch(train_batch)
        return -dist_class(logits, model).logp(train_batch["actions"]).mean()

    policy_class = build_torch_policy(name="Clones", loss_fn=loss)
    with WorkerSet("CartPole-v1", policy_class, {"num_workers": 1}) as workers:
        (actor,) = workers.remote_workers()
        batch = ray_session.get(actor.sample.remote())
        assert batch.is_lazy("vf_preds")
        assert not any(batch.is_lazy(name) for name in ("obs", "actions", "rewards"))
        assert len(batch["dones"]) == batch.count
        assert batch["vf_preds"].shape == (batch.count,)  # fetched when it is read


def test_next_actions_are_added_after_policy_construction():
    action_space = Discrete(2)
    rollout_worker = RolloutWorker(
        env_creator=lambda _: gym.make("CartPole-v1"),
        policy_config=ppo.DEFAULT_CONFIG,
        policy_spec=ppo.PPOTorchPolicy,
    )
    policy = rollout_worker.policy_map["default_policy"]
    # Add the next action to the view reqs of the policy.
    policy.view_requirements["next_actions"] = ViewRequirement(
        SampleBatch.ACTIONS, shift=1, space=action_space
    )
    # Check, whether a sampled batch has the requested `next_actions` view.
    batch = rollout_worker.sample()
    assert "next_actions" in batch.data
    check_next_actions(batch)


class MyCallback(DefaultCallbacks):
    @override(DefaultCallbacks)
    def on_postprocess_trajectory(
        self,
        worker,
        episode,
        agent_id,
        policy_id,
        policies,
        postprocessed_batch,
        original_batches,
        **kwargs,
    ):
        postprocessed_batch["next_actions"] = np.concatenate(
            [
                postprocessed_batch["actions"][1:],
                np.zeros_like([policies[policy_id].action_space.sample()]),
            ]
        )


@pytest.mark.parametrize("name", ["callbacks", "callbacks_class"])
def test_next_actions_are_added_by_a_callback(name):
    worker = RolloutWorker(
        env_creator=lambda _: gym.make("CartPole-v1"),
        policy_config={name: MyCallback},
        policy_spec=ppo.PPOTorchPolicy,
    )
    check_next_actions(worker.sample())


def check_next_actions(batch):
    for episode in batch.split_by_episode():
        assert episode["next_actions"][:-1].tolist() == episode["actions"][1:].tolist()
        assert episode["next_actions"][-1] == 0


def test_train_batches_have_the_columns_of_callbacks():
    read = []

    class Reads(ppo.PPOTorchPolicy):
        def loss(self, batch):
            read.append(batch["next_actions"].shape)
            return super().loss(batch)

    class Reading(A2C):
        policy_class = Reads
        config_class = ppo.PPOConfig

    config = ppo.PPOConfig(env="CartPole-v1", train_batch_size=40, sgd_minibatch_size=0)
    with Reading(config.callbacks(MyCallback)) as algorithm:
        algorithm.train()
    assert read[-1] == (40,)


def test_several_policies_give_a_multi_agent_batch():
    worker = RolloutWorker(
        make_multi_agent("CartPole-v1"),
        {"even": ppo.PPOTorchPolicy, "odd": ppo.PPOTorchPolicy},
        {
            "env_config": {"num_agents": 2},
            "rollout_fragment_length": 8,
            "policy_mapping_fn": lambda agent_id, **kwargs: ("even", "odd")[agent_id % 2],
        },
    )
    batch = worker.sample()
    assert isinstance(batch, MultiAgentBatch)
    assert set(batch.policy_batches) == {"even", "odd"}
    assert batch.env_steps() == 8
