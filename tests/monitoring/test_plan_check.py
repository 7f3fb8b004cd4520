"""Mistakes in plans that are found without running them."""

import functools
from pathlib import Path

import pytest

from flowrl import A2C, DQN, PPO
from flowrl.algorithms.a2c import A2CConfig
from flowrl.algorithms.dqn import DQNConfig
from flowrl.algorithms.ppo import PPOConfig
from flowrl.cli.run_settings import parse_plan_run
from flowrl.envs import make_multi_agent
from flowrl.errors import ConfigError
from flowrl.iter import _get_shared_metrics
from flowrl.learners.thread import LearnerThread
from flowrl.monitoring.plan_check import check_plan
from flowrl.ops import (
    ConcatBatches,
    Concurrently,
    CountRollouts,
    Dequeue,
    Enqueue,
    ParallelRollouts,
    Print,
    Replay,
    SelectExperiences,
    SimpleReplayBuffer,
    StandardMetricsReporting,
    StoreToReplayBuffer,
    TrainOneStep,
    UpdateReplayPriorities,
    UpdateTargetNetwork,
    record_training,
)
from flowrl.ops.staleness import StalenessLimit
from flowrl.policies.policy_spec import PolicySpec
from flowrl.replay import MultiAgentReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer
from flowrl.sampling import WorkerSet
from flowrl.trainer.config import AlgorithmConfig
from flowrl.trainer.plan_settings import plan_config

SMALL = {"env": "CartPole-v1", "train_batch_size": 32, "model": {"fcnet_hiddens": [8]}, "seed": 0}
PLANS_DIR = Path(__file__).parents[2] / "plans"
PLANS = sorted(path.stem for path in PLANS_DIR.glob("*.py"))


def problems_of(execution_plan, config=None):
    """Return the problems of a plan by rule."""
    config = config or A2CConfig(**SMALL)
    with config.build(plan=execution_plan) as algorithm:
        problems = check_plan(algorithm.plan.stage, algorithm.workers)
    assert all(problem.line.startswith(f"{__file__}:") for problem in problems), problems
    return {problem.rule: problem.text for problem in problems}


def report(stream, workers, config):
    return StandardMetricsReporting(stream, workers, config)


@pytest.mark.parametrize("plan", PLANS)
def test_shipped_plans_have_no_problems(plan):
    with plan_config(plan).build(plan=plan) as algorithm:
        assert check_plan(algorithm.plan.stage, algorithm.workers) == []


def test_plan_without_a_report():
    def plan(workers, config):
        return ParallelRollouts(workers).for_each(TrainOneStep(workers))

    assert "end it with `return StandardMetricsReporting" in problems_of(plan)["one_report"]

    def with_own_report(workers, config):
        return plan(workers, config).for_each(lambda item: {"timesteps_total": 1})

    assert "one_report" not in problems_of(with_own_report)


def test_operator_that_trains_a_frozen_policy():
    def plan(workers, config):
        trained = ParallelRollouts(workers).for_each(TrainOneStep(workers, policies=["a", "b"]))
        return report(trained, workers, config)

    config = PPOConfig(
        env=make_multi_agent("CartPole-v1"),
        env_config={"num_agents": 2},
        policies={"a", "b"},
        policy_mapping_fn=lambda agent, episode, worker: "ab"[agent],
    )
    for to_train, is_frozen in ((["a"], True), (["a", "b"], False), (None, False)):
        problems = problems_of(plan, config.updated(policies_to_train=to_train))
        assert ("trains 'b'" in problems.get("trained_although_frozen", "")) == is_frozen


def test_plan_with_two_reports():
    def plan(workers, config):
        streams = ParallelRollouts(workers).duplicate(2)
        reports = [
            report(stream.for_each(TrainOneStep(workers)), workers, config) for stream in streams
        ]
        return reports[0].union(reports[1])

    assert "report once, at the end" in problems_of(plan)["one_report"]
    with (
        A2CConfig(env="CartPole-v1").build(plan=plan) as algorithm,
        pytest.raises(ConfigError, match="the plan has 2 StandardMetricsReporting"),
    ):
        algorithm.train()


def test_raw_rollouts_that_nothing_counts():
    def plan(workers, config):
        raw = ParallelRollouts(workers, mode="raw").for_each(lambda batch: batch)
        return report(raw.gather_sync().for_each(TrainOneStep(workers)), workers, config)

    text = problems_of(plan)["uncounted_rollouts"]
    assert "zip_with_source().for_each(CountRollouts(workers))" in text

    def counted(workers, config):
        raw = ParallelRollouts(workers, mode="raw").for_each(lambda batch: batch)
        rollouts = raw.gather_sync().zip_with_source().for_each(CountRollouts(workers))
        return report(rollouts.for_each(TrainOneStep(workers)), workers, config)

    def count(batch):
        _get_shared_metrics().counters["num_env_steps_sampled"] += batch.count
        return batch

    def counted_by_the_user(workers, config):
        raw = ParallelRollouts(workers, mode="raw").gather_async()
        return report(raw.for_each(count).for_each(TrainOneStep(workers)), workers, config)

    for other in (counted, counted_by_the_user):
        assert "uncounted_rollouts" not in problems_of(other)
    with A2CConfig(**SMALL).build(plan=counted) as algorithm:
        assert algorithm.train()["timesteps_total"] == 32


def test_rollouts_that_are_counted_twice():
    def plan(workers, config, mode="bulk_sync"):
        rollouts = ParallelRollouts(workers, mode=mode)
        if mode == "raw":
            rollouts = rollouts.gather_sync()
        counted = rollouts.zip_with_source().for_each(CountRollouts(workers))
        return report(counted.for_each(TrainOneStep(workers)), workers, config)

    assert "leave CountRollouts out" in problems_of(plan)["rollouts_counted_twice"]

    def raw(workers, config):
        return plan(workers, config, "raw")

    assert problems_of(raw) == {}


def test_rows_of_policies_that_a_buffer_does_not_store():
    def plan(workers, config, selected=None):
        buffer = MultiAgentReplayBuffer(
            lambda policy_id: ReplayBuffer(100), replay_batch_size=8, policies=["a"]
        )
        rollouts = ParallelRollouts(workers)
        if selected is not None:
            rollouts = rollouts.for_each(SelectExperiences(selected))
        store = rollouts.for_each(StoreToReplayBuffer(local_buffer=buffer))
        train = Replay(local_buffer=buffer).for_each(TrainOneStep(workers, policies=["a"]))
        both = Concurrently([store, train], output_indexes=[1])
        return report(both, workers, config)

    config = A2CConfig(
        **{**SMALL, "env": make_multi_agent("CartPole-v1")},
        env_config={"num_agents": 2},
        policies={"a": PolicySpec(), "b": PolicySpec()},
        policy_mapping_fn=lambda agent_id: "ab"[agent_id],
    )
    text = problems_of(plan, config)["rows_of_other_policies"]
    assert "SelectExperiences(['a'])" in text

    def on_workers(workers, config):
        buffer = MultiAgentReplayBuffer(
            lambda policy_id: ReplayBuffer(100), replay_batch_size=8, policies=["a"]
        )
        raw = ParallelRollouts(workers, mode="raw").for_each(SelectExperiences(["a"]))
        counted = raw.gather_sync().zip_with_source().for_each(CountRollouts(workers))
        store = counted.for_each(StoreToReplayBuffer(local_buffer=buffer))
        train = Replay(local_buffer=buffer).for_each(TrainOneStep(workers, policies=["a"]))
        return report(Concurrently([store, train], output_indexes=[1]), workers, config)

    assert "rows_of_other_policies" not in problems_of(on_workers, config)
    for selected, expected in ((["a"], False), (["b"], True)):
        found = problems_of(lambda w, c, s=selected: plan(w, c, s), config)
        assert ("rows_of_other_policies" in found) == expected


@pytest.mark.parametrize("use_lstm", [False, True])
@pytest.mark.parametrize("unit", ["timesteps", "sequences"])
def test_single_rows_of_a_recurrent_policy(use_lstm, unit):
    def plan(workers, config):
        buffer = MultiAgentReplayBuffer(
            lambda policy_id: ReplayBuffer(100, storage_unit=unit), replay_batch_size=8
        )
        store = ParallelRollouts(workers).for_each(StoreToReplayBuffer(local_buffer=buffer))
        train = Replay(local_buffer=buffer).for_each(TrainOneStep(workers))
        return report(Concurrently([store, train], output_indexes=[1]), workers, config)

    config = A2CConfig(**SMALL).updated(model={"use_lstm": use_lstm})
    is_found = "rows_of_a_recurrent_policy" in problems_of(plan, config)
    assert is_found == (use_lstm and unit == "timesteps")


def test_weights_of_branches_that_share_a_buffer():
    def plan(workers, config, weights=(1, 2)):
        buffer = MultiAgentReplayBuffer(lambda policy_id: ReplayBuffer(100), replay_batch_size=8)
        store = ParallelRollouts(workers).for_each(StoreToReplayBuffer(local_buffer=buffer))
        train = Replay(local_buffer=buffer).for_each(TrainOneStep(workers))
        both = Concurrently([store, train], round_robin_weights=weights, output_indexes=[1])
        return report(both, workers, config)

    assert "training_intensity" in problems_of(plan)["weights_of_one_buffer"]

    def without_weights(workers, config):
        return plan(workers, config, None)

    assert "weights_of_one_buffer" not in problems_of(without_weights)


def test_weights_of_branches_with_separate_buffers():
    def plan(workers, config):
        buffers = [
            MultiAgentReplayBuffer(lambda policy_id: ReplayBuffer(100), replay_batch_size=8)
            for _ in range(2)
        ]
        stored = ParallelRollouts(workers)
        for buffer in buffers:
            stored = stored.for_each(StoreToReplayBuffer(local_buffer=buffer))
        draws = [Replay(local_buffer=buffer) for buffer in buffers]
        mixed = Concurrently(draws, round_robin_weights=[1, 3]).for_each(TrainOneStep(workers))
        return report(Concurrently([stored, mixed], output_indexes=[1]), workers, config)

    text = problems_of(plan)["weights_of_one_buffer"]
    assert "no effect on the numbers of batches that branches draw from replay buffers" in text


def test_priorities_of_another_buffer():
    def plan(workers, config, same=False):
        buffers = [
            MultiAgentReplayBuffer(
                lambda policy_id: PrioritizedReplayBuffer(100), replay_batch_size=8
            )
            for _ in range(2)
        ]
        stored = ParallelRollouts(workers)
        for buffer in buffers:
            stored = stored.for_each(StoreToReplayBuffer(local_buffer=buffer))
        branches = [stored]
        for buffer, updated in zip(buffers, buffers if same else buffers[::-1], strict=True):
            trained = Replay(local_buffer=buffer).for_each(TrainOneStep(workers))
            branches.append(trained.for_each(UpdateReplayPriorities(local_buffer=updated)))
        return report(Concurrently(branches, output_indexes=[1, 2]), workers, config)

    text = problems_of(plan)["priorities_of_another_buffer"]
    assert text.startswith("UpdateReplayPriorities gets batches of another buffer, which Replay")

    def with_same_buffers(workers, config):
        return plan(workers, config, True)

    assert "priorities_of_another_buffer" not in problems_of(with_same_buffers)


@pytest.mark.parametrize(
    ("length", "is_found"), [(None, False), ("auto", False), (16, False), (100, True)]
)
def test_rounds_of_rollouts_that_are_larger_than_the_batches(length, is_found):
    settings = {} if length is None else {"rollout_fragment_length": length}
    config = A2CConfig(**SMALL, num_envs_per_worker=2, **settings)
    with config.build() as algorithm:
        problems = check_plan(algorithm.plan.stage, algorithm.workers)
    texts = [one.text for one in problems if one.rule == "rounds_larger_than_batches"]
    assert len(texts) == int(is_found)
    assert all("200 env steps" in text and "instead of 32" in text for text in texts)


def test_operators_in_the_wrong_order():
    def batches_after_training(workers, config):
        trained = ParallelRollouts(workers).for_each(TrainOneStep(workers))
        return report(trained.combine(ConcatBatches(32)), workers, config)

    text = problems_of(batches_after_training)["wrong_order"]
    assert text.startswith("ConcatBatches takes batches, but is chained after TrainOneStep")

    def training_after_report(workers, config):
        reported = report(ParallelRollouts(workers), workers, config)
        return reported.for_each(TrainOneStep(workers))

    text = problems_of(training_after_report)["wrong_order"]
    assert "chain TrainOneStep before it" in text

    class ReturnsBatch(TrainOneStep):
        def __call__(self, batch):
            return super().__call__(batch)[0]

    def own_order(workers, config):
        trained = ParallelRollouts(workers).for_each(ReturnsBatch(workers))
        return report(trained.combine(ConcatBatches(32)), workers, config)

    assert "wrong_order" not in problems_of(own_order)


def test_plan_that_never_trains():
    def plan(workers, config):
        return report(ParallelRollouts(workers), workers, config)

    assert "no operator that trains" in problems_of(plan)["nothing_trains"]


def test_target_network_that_is_never_updated():
    def plan(workers, config):
        buffer = config.replay_buffer()
        store = ParallelRollouts(workers).for_each(StoreToReplayBuffer(local_buffer=buffer))
        train = Replay(local_buffer=buffer).for_each(TrainOneStep(workers))
        return report(Concurrently([store, train]), workers, config)

    found = problems_of(plan, DQNConfig(**SMALL, prioritized_replay=False))
    assert list(found) == ["target_without_update"]
    found = problems_of(plan, DQNConfig(**SMALL, prioritized_replay=True))
    assert list(found) == ["target_without_update", "priorities_not_updated"]


def dqn_plan(store=True, draw=True, learning_starts=None):
    def plan(workers, config):
        buffer = config.replay_buffer()
        branches = []
        if store:
            store_to = StoreToReplayBuffer(local_buffer=buffer)
            branches.append(ParallelRollouts(workers).for_each(store_to))
        else:
            branches.append(ParallelRollouts(workers).for_each(TrainOneStep(workers)))
        if draw:
            branches.append(
                Replay(local_buffer=buffer)
                .for_each(TrainOneStep(workers))
                .for_each(UpdateReplayPriorities(local_buffer=buffer))
                .for_each(UpdateTargetNetwork(workers, 100))
            )
        else:
            train = ParallelRollouts(workers).for_each(TrainOneStep(workers))
            branches.append(train.for_each(UpdateTargetNetwork(workers, 100)))
        return report(Concurrently(branches, output_indexes=[1]), workers, config)

    return plan


def test_buffers_need_a_store_and_a_draw():
    config = DQNConfig(**SMALL)
    assert problems_of(dqn_plan(), config) == {}
    assert list(problems_of(dqn_plan(store=False), config)) == ["replay_without_store"]
    assert list(problems_of(dqn_plan(draw=False), config)) == ["store_without_replay"]


def test_replay_that_never_begins():
    def plan(workers, config):
        buffer = MultiAgentReplayBuffer(
            lambda policy_id: ReplayBuffer(100), replay_batch_size=32, learning_starts=200
        )
        store = ParallelRollouts(workers).for_each(StoreToReplayBuffer(local_buffer=buffer))
        train = Replay(local_buffer=buffer).for_each(TrainOneStep(workers))
        train = train.for_each(UpdateTargetNetwork(workers, 100))
        return report(Concurrently([store, train]), workers, config)

    assert "keeps 100" in problems_of(plan, DQNConfig(**SMALL))["replay_never_ready"]


def test_branches_without_effect():
    def plan(workers, config):
        train = ParallelRollouts(workers).for_each(TrainOneStep(workers))
        other = ParallelRollouts(workers).combine(ConcatBatches(100))
        return report(Concurrently([other, train], output_indexes=[1]), workers, config)

    found = problems_of(plan)
    assert list(found) == ["unused_branch"]
    assert "branch 0" in found["unused_branch"]


def test_queue_with_one_end():
    def without_dequeue(workers, config):
        enqueue = ParallelRollouts(workers).for_each(Enqueue(LearnerThread(workers)))
        return report(enqueue.for_each(TrainOneStep(workers)), workers, config)

    def without_enqueue(workers, config):
        return report(Dequeue(LearnerThread(workers)), workers, config)

    assert list(problems_of(without_dequeue)) == ["enqueue_without_dequeue"]
    assert list(problems_of(without_enqueue)) == ["dequeue_without_enqueue"]


def test_child_of_duplicate_that_is_not_read():
    def plan(workers, config):
        first, _, third = ParallelRollouts(workers).duplicate(3)
        train = [child.for_each(TrainOneStep(workers)) for child in (first, third)]
        return report(Concurrently(train), workers, config)

    assert "child 1 of duplicate(3)" in problems_of(plan)["unread_duplicate"]


def test_functions_that_use_a_buffer_count_as_its_other_end():
    class Draws:
        def __init__(self, buffer):
            self.buffer = buffer

        def __call__(self, batch):
            return self.buffer.sample()

    def plan(workers, config):
        buffer, other = config.replay_buffer(), config.replay_buffer()
        store = ParallelRollouts(workers).for_each(StoreToReplayBuffer(local_buffer=buffer))
        drawn = store.for_each(Draws(buffer)).for_each(TrainOneStep(workers))
        first = drawn.for_each(UpdateTargetNetwork(workers, 100))

        def add(batch):
            other.add(batch)
            return batch

        second = ParallelRollouts(workers).for_each(add)
        third = Replay(local_buffer=other).for_each(TrainOneStep(workers))
        return report(Concurrently([first, second, third]), workers, config)

    assert problems_of(plan, DQNConfig(**SMALL)) == {}


def test_printing_branch_and_changed_results_are_no_problems():
    def note(result):
        result["custom_metrics"]["n"] = 1
        return result

    def plan(workers, config):
        train = ParallelRollouts(workers).for_each(TrainOneStep(workers))
        other = ParallelRollouts(workers).for_each(Print())
        both = Concurrently([other, train], output_indexes=[1])
        return report(both, workers, config).for_each(note)

    assert problems_of(plan) == {}


@pytest.mark.parametrize("thread", [False, True])
def test_asynchronous_rollouts_of_an_on_policy_loss(ray_session, thread):
    def plan_with(**options):
        def plan(workers, config):
            rollouts = ParallelRollouts(workers, mode="async", **options)
            if not thread:
                return report(rollouts.for_each(TrainOneStep(workers)), workers, config)
            learner = LearnerThread(workers)
            both = [rollouts.for_each(Enqueue(learner)), Dequeue(learner)]
            return report(Concurrently(both, mode="async", output_indexes=[1]), workers, config)

        return plan

    remote = A2CConfig(**SMALL, num_workers=1)
    assert list(problems_of(plan_with(), remote)) == ["unlimited_lag"]
    assert problems_of(plan_with(max_policy_lag=2), remote) == {}
    assert problems_of(plan_with(limit=StalenessLimit(32, 1)), remote) == {}
    assert problems_of(plan_with(), remote.updated(allow_off_policy=True)) == {}
    assert problems_of(plan_with()) == {}  # in process nothing lags


def test_replay_for_a_policy_that_learns_on_policy():
    def plan(workers, config):
        buffer = MultiAgentReplayBuffer(lambda policy_id: ReplayBuffer(100), replay_batch_size=8)
        store = ParallelRollouts(workers).for_each(StoreToReplayBuffer(local_buffer=buffer))
        train = Replay(local_buffer=buffer).for_each(TrainOneStep(workers))
        return report(Concurrently([store, train], output_indexes=[1]), workers, config)

    config = A2CConfig(**SMALL)
    problems = problems_of(plan, config)
    assert "set allow_off_policy=True" in problems["replay_for_on_policy"]
    with config.build(plan=plan) as algorithm, pytest.raises(ConfigError, match="on-policy"):
        algorithm.train()
    allowed = problems_of(plan, config.updated(allow_off_policy=True))
    assert "replay_for_on_policy" not in allowed

    def whole_batches(workers, config):
        buffer = SimpleReplayBuffer(4)
        store = ParallelRollouts(workers).for_each(StoreToReplayBuffer(local_buffer=buffer))
        train = Replay(local_buffer=buffer).for_each(TrainOneStep(workers))
        return report(Concurrently([store, train], output_indexes=[1]), workers, config)

    assert "replay_for_on_policy" not in problems_of(whole_batches, config)

    class OffPolicyLoss:
        trains, policies = True, None

        def __call__(self, batch):
            return record_training(self, batch, {})

    def own_loss(workers, config):
        buffer = MultiAgentReplayBuffer(lambda policy_id: ReplayBuffer(100), replay_batch_size=8)
        store = ParallelRollouts(workers).for_each(StoreToReplayBuffer(local_buffer=buffer))
        train = Replay(local_buffer=buffer).for_each(OffPolicyLoss())
        return report(Concurrently([store, train], output_indexes=[1]), workers, config)

    assert "replay_for_on_policy" not in problems_of(own_loss, config)


def test_rollouts_of_workers_that_nothing_trains():
    others = []

    def plan(workers, config):
        others.append(WorkerSet(config.env, A2C.policy_class, config))
        rollouts = ParallelRollouts(others[0])
        return report(rollouts.for_each(TrainOneStep(workers)), workers, config)

    assert list(problems_of(plan)) == ["untrained_workers"]
    others[0].stop()


def scale(batch):
    batch["rewards"] *= 0.1
    return batch


def zero(batch):
    batch["rewards"][:] = 0
    return batch


def drop(batch):
    batch.pop("rewards")
    return batch


def sort(batch):
    batch["rewards"].sort()
    return batch


class Scale:
    def __call__(self, batch):
        batch["rewards"] *= 0.1
        return batch


@pytest.mark.parametrize("operator", [scale, zero, drop, sort, Scale()])
def test_operator_that_changes_its_input(operator):
    def plan(workers, config):
        rollouts = ParallelRollouts(workers).for_each(operator)
        return report(rollouts.for_each(TrainOneStep(workers)), workers, config)

    assert "with_columns" in problems_of(plan)["changes_its_input"]


def forgets(batch):
    print(batch.count)


class Forgets:
    def __call__(self, batch):
        if batch.count:
            return


def fails(batch):
    raise NotImplementedError


@pytest.mark.parametrize("operator", [forgets, Forgets()])
def test_operator_that_returns_nothing(operator):
    def plan(workers, config):
        rollouts = ParallelRollouts(workers).for_each(operator)
        return report(rollouts.for_each(TrainOneStep(workers)), workers, config)

    assert "returns None" in problems_of(plan)["returns_nothing"]
    assert "return the item" in problems_of(plan)["returns_nothing"]


def test_decorated_operator_is_not_judged_by_the_function_in_it():
    def returning(function):
        @functools.wraps(function)
        def wrapper(batch):
            function(batch)
            return batch

        return wrapper

    def plan(workers, config):
        rollouts = ParallelRollouts(workers).for_each(returning(forgets))
        return report(rollouts.for_each(TrainOneStep(workers)), workers, config)

    assert "returns_nothing" not in problems_of(plan)


class Counts:
    def __init__(self):
        self.rows = 0

    def __call__(self, batch):
        self.rows += batch.count
        return batch


class Averages(Counts):
    def __call__(self, batch):
        self.rows, self.last = 0.9 * self.rows + 0.1 * batch.count, batch
        self.rows = 0.9 * self.rows + 0.1 * batch.count
        return batch


class Saves(Counts):
    def state_dict(self):
        return {"rows": self.rows}

    def load_state_dict(self, state):
        self.rows = state["rows"]


class KeepsLast:
    def __call__(self, batch):
        self.last = batch
        self.policy = self.policy or object()
        return batch


class CountsOneBatch(Counts):
    def __call__(self, batch):
        self.rows, self.parts = 0, 0
        self.last: int = 0
        for part in (batch, batch):
            self.rows += part.count
            self.last += 1
        return batch


@pytest.mark.parametrize(
    ("operator", "is_lost"),
    [
        (Counts(), True),
        (Averages(), True),
        (Saves(), False),
        (KeepsLast(), False),
        (CountsOneBatch(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_state_that_is_not_saved(operator, is_lost):
    def plan(workers, config):
        rollouts = ParallelRollouts(workers).for_each(operator)
        return report(rollouts.for_each(TrainOneStep(workers)), workers, config)

    found = problems_of(plan)
    assert ("lost_state" in found) == is_lost
    assert not is_lost or "changes self.rows, but has no state_dict()" in found["lost_state"]
    assert not is_lost or "self.rows is lost when the run is resumed" in found["lost_state"]


@pytest.mark.parametrize("returns", ["batch", "record", "named record"])
def test_own_trainer_that_records_nothing(returns):
    class Batch:
        trains, policies = True, None

        def __call__(self, batch):
            return batch

    class Record(Batch):
        def __call__(self, batch):
            return record_training(self, batch, {})

    class NamedRecord(Batch):
        def __call__(self, item):
            item = record_training(self, item, {})
            return item  # noqa: RET504 - the rule must accept it

    operators = {"batch": Batch(), "record": Record(), "named record": NamedRecord()}

    def plan(workers, config):
        operator = operators[returns]
        return report(ParallelRollouts(workers).for_each(operator), workers, config)

    assert ("trains_without_record" in problems_of(plan)) == (returns == "batch")


def assign(batch):
    batch["rewards"] = batch["rewards"] * 0.1
    return batch


def copied(batch):
    batch = batch.copy()
    batch["rewards"] *= 0.1
    return batch


def count(batch, totals=[0]):  # noqa: B006
    totals[0] += batch.count
    return batch


@pytest.mark.parametrize("operator", [assign, copied, count, fails, lambda batch: batch])
def test_operator_that_returns_a_changed_copy(operator):
    def plan(workers, config):
        rollouts = ParallelRollouts(workers).for_each(operator)
        return report(rollouts.for_each(TrainOneStep(workers)), workers, config)

    assert problems_of(plan) == {}


def test_problems_are_warnings_at_the_start_of_a_run(caplog):
    def plan(workers, config):
        rollouts = ParallelRollouts(workers).for_each(assign).for_each(Scale())
        return report(rollouts.for_each(TrainOneStep(workers)), workers, config)

    with A2CConfig(**SMALL).build(plan=plan) as algorithm:
        algorithm.train()
    assert f"{__file__}:" in caplog.text
    assert "changes its input in place" in caplog.text


def test_plans_of_algorithms_have_no_problems():
    for cls in (PPO, DQN):
        with cls("CartPole-v1") as algorithm:
            assert check_plan(algorithm.plan.stage, algorithm.workers) == []


def plan_with_sgd_settings(**arguments):
    def plan(workers, config):
        rollouts = ParallelRollouts(workers).combine(ConcatBatches(config.train_batch_size))
        return report(rollouts.for_each(TrainOneStep(workers, **arguments)), workers, config)

    return plan


def test_setting_that_neither_plan_nor_policy_reads():
    config = PPOConfig(**SMALL, num_sgd_iter=3, sgd_minibatch_size=16, clip_param=0.1)
    plan = plan_with_sgd_settings(num_sgd_iter=1, sgd_minibatch_size=0)
    with config.build(plan=plan) as algorithm:
        problems = check_plan(algorithm.plan.stage, algorithm.workers)
    assert [problem.rule for problem in problems] == ["unused_setting"] * 2
    assert "num_sgd_iter=3 has no effect" in problems[0].text
    assert "PPOTorchPolicy" in problems[0].text
    assert "sgd_minibatch_size=16 has no effect" in problems[1].text


def test_training_operators_read_the_settings_that_they_were_not_given():
    settings = {**SMALL, "num_sgd_iter": 3, "sgd_minibatch_size": 32, "train_batch_size": 64}
    assert problems_of(plan_with_sgd_settings(), PPOConfig(**settings)) == {}
    with PPOConfig(**settings).build(plan=plan_with_sgd_settings()) as algorithm:
        algorithm.train()
        assert algorithm.get_policy().version == 3 * 2


def test_settings_that_base_classes_of_the_config_read_have_an_effect(tmp_path):
    config = plan_config("r2d2").updated(replay_buffer_dir=str(tmp_path))
    with config.build(plan="r2d2") as algorithm:
        assert check_plan(algorithm.plan.stage, algorithm.workers) == []


class OwnBuffer(DQNConfig):
    def new_buffer(self, policy_id="default_policy", shard=0, num_shards=1):
        return ReplayBuffer(self.replay_buffer_capacity)


def test_settings_that_only_a_replaced_method_reads_have_no_effect():
    with OwnBuffer(env="CartPole-v1", n_step=3).build(plan="dqn") as algorithm:
        problems = check_plan(algorithm.plan.stage, algorithm.workers)
    assert [problem.text.partition(" has")[0] for problem in problems] == ["n_step=3"]


def test_unused_setting_names_the_line_that_sets_it(tmp_path):
    text = (PLANS_DIR / "dqn.py").read_text()
    text = text.replace("config.target_network_update_freq", "500")
    old = 'env="CartPole-v1",'
    text = text.replace(old, f"{old}\n    target_network_update_freq=64,")
    path = tmp_path / "my_plan.py"
    path.write_text(text)
    with plan_config(str(path)).build(plan=str(path)) as algorithm:
        (problem,) = check_plan(algorithm.plan.stage, algorithm.workers)
    number = text[: text.index("target_network_update_freq=")].count("\n") + 1
    assert problem.line == f"{path}:{number}"
    assert problem.text.startswith("target_network_update_freq=64 has no effect")


@pytest.mark.parametrize(
    ("plan", "name", "value"),
    [
        ("ppo", "num_sgd_iter", 7),
        ("ppo", "sgd_minibatch_size", 32),
        ("impala", "num_sgd_iter", 7),
        ("dqn", "target_network_update_freq", 7),
        ("dqn", "learning_starts", 2000),
        ("sac", "learning_starts", 2000),
    ],
)
def test_setting_of_one_policy_that_the_plan_reads_for_all_policies(plan, name, value):
    policies = {"a": PolicySpec(config={name: value}), "b": None}
    config = plan_config(plan).updated(
        num_workers=0, policies=policies, policy_mapping_fn=lambda *args, **kwargs: "a"
    )
    with config.build(plan=plan) as algorithm:
        problems = check_plan(algorithm.plan.stage, algorithm.workers)
    (problem,) = [one for one in problems if one.rule == "unused_setting_of_policy"]
    assert f"{name}={value} in the config of 'a' has no effect" in problem.text
    assert problem.line.endswith(f"{plan}.py:{problem.line.rpartition(':')[2]}")


@pytest.mark.parametrize(
    "own",
    [
        PPOConfig(rollout_fragment_length=8),
        PPOConfig(explore=False),
        PPOConfig(evaluation_interval=3),
        {"evaluation_interval": 3},  # in a mapping, a setting of the workers is an error
    ],
    ids=["fragment", "explore", "evaluation", "mapping"],
)
def test_settings_of_the_run_in_the_config_of_one_policy_have_no_effect(own):
    ((name, value),) = own.items() if isinstance(own, dict) else [(n, own[n]) for n in own.diff()]
    config = PPOConfig(
        **{**SMALL, "sgd_minibatch_size": 0},
        policies={"a": PolicySpec(config=own)},
        policy_mapping_fn=lambda *args, **kwargs: "a",
    )
    with config.build(plan="ppo") as algorithm:
        (problem,) = check_plan(algorithm.plan.stage, algorithm.workers)
    assert problem.text == (
        f"policies: {name}={value!r} in the config of 'a' has no effect: the run has one value "
        "for all policies. Set it in the config of the run"
    )


def test_train_batch_size_of_one_policy_is_used_only_by_replay_buffers():
    settings = {**SMALL, "sgd_minibatch_size": 0, "policy_mapping_fn": lambda *_, **__: "a"}
    own = PPOConfig(train_batch_size=64, sgd_minibatch_size=0)
    policies = {"a": PolicySpec(config=own)}
    with PPOConfig(**settings, policies=policies).build(plan="ppo") as algorithm:
        (problem,) = check_plan(algorithm.plan.stage, algorithm.workers)
    assert "train_batch_size=64 in the config of 'a' has no effect" in problem.text

    def plan(workers, config):
        dqn = config.for_policy("a")
        buffer = dqn.replay_buffer(["a"])
        store = ParallelRollouts(workers).for_each(StoreToReplayBuffer(local_buffer=buffer))
        train = (
            Replay(local_buffer=buffer)
            .for_each(TrainOneStep(workers))
            .for_each(UpdateTargetNetwork(workers, 500))
        )
        both = Concurrently([store, train], mode="round_robin", output_indexes=[1])
        return StandardMetricsReporting(both, workers, config)

    own = DQNConfig(train_batch_size=64, prioritized_replay=False)
    config = AlgorithmConfig(
        env="CartPole-v1",
        policies={"a": PolicySpec(config=own)},
        policy_mapping_fn=lambda *_, **__: "a",
    )
    assert "unused_setting_of_policy" not in problems_of(plan, config)


def test_flags_for_one_policy_are_the_only_settings_that_are_checked():
    flags = ["--policies.dqn.config.lr", "5e-4"]
    _, config = parse_plan_run("ppo_dqn", flags)
    with config.build(plan="ppo_dqn") as algorithm:
        assert check_plan(algorithm.plan.stage, algorithm.workers) == []


@pytest.mark.parametrize("as_record", [False, True], ids=["mapping", "record"])
def test_settings_of_one_policy_that_it_reads_itself_are_used(as_record):
    own = {"lr": 1e-3, "clip_param": 0.1, "lambda_": 0.9, "kl_coeff": 0.5, "gamma": 0.5}
    own |= {"grad_clip": 3.0, "normalize_observations": True}
    own = PPOConfig(**own) if as_record else own
    settings = {**SMALL, "sgd_minibatch_size": 0}
    config = PPOConfig(
        **settings,
        policies={"a": PolicySpec(config=own)},
        policy_mapping_fn=lambda *args, **kwargs: "a",
    )
    with config.build(plan="ppo") as algorithm:
        assert check_plan(algorithm.plan.stage, algorithm.workers) == []


@pytest.mark.parametrize("plan", ["ppo_dqn", "three_way"])
def test_settings_of_one_policy_that_the_plan_reads_for_it_are_used(plan):
    with plan_config(plan).build(plan=plan) as algorithm:
        assert check_plan(algorithm.plan.stage, algorithm.workers) == []


@pytest.mark.parametrize("plan", ["dqn", "dqn_distributed"])
def test_settings_of_the_replay_buffer_of_one_policy_are_used(plan):
    own = {"replay_buffer_capacity": 5000, "n_step": 2, "prioritized_replay": False}
    config = plan_config(plan).updated(
        num_workers=0,
        policies={"a": PolicySpec(config=own), "b": None},
        policy_mapping_fn=lambda *args, **kwargs: "a",
    )
    with config.build(plan=plan) as algorithm:
        assert check_plan(algorithm.plan.stage, algorithm.workers) == []
    buffer = config.for_policy("a").new_buffer("a")
    assert (buffer.capacity, buffer.n_step) == (5000, 2)


def test_own_number_of_passes_is_used_by_operators_without_one():
    policies = {"a": PolicySpec(config={"num_sgd_iter": 2})}
    settings = {**SMALL, "sgd_minibatch_size": 0, "policy_mapping_fn": lambda *args, **kwargs: "a"}
    config = PPOConfig(**settings, policies=policies)
    assert problems_of(plan_with_sgd_settings(), config) == {}
    found = problems_of(plan_with_sgd_settings(num_sgd_iter=10), config)
    assert list(found) == ["unused_setting_of_policy"]


@pytest.mark.parametrize("name", ["num_sgd_iter", "sgd_minibatch_size"])
def test_unused_setting_is_a_warning_at_the_start(name, caplog):
    plan = plan_with_sgd_settings(num_sgd_iter=1, sgd_minibatch_size=0)
    with A2CConfig(**SMALL, **{name: 2}).build(plan=plan) as algorithm:
        algorithm.train()
    assert f"{name}=2 has no effect" in caplog.text


def test_settings_that_methods_of_the_config_read_are_used():
    def plan(workers, config):
        buffer = config.replay_buffer()
        store = ParallelRollouts(workers).for_each(StoreToReplayBuffer(local_buffer=buffer))
        train = Replay(local_buffer=buffer).for_each(TrainOneStep(workers))
        train = train.for_each(UpdateTargetNetwork(workers, 100))
        return report(Concurrently([store, train], mode="round_robin"), workers, config)

    settings = {**SMALL, "prioritized_replay": False, "learning_starts": 64, "double_q": False}
    settings |= {"replay_buffer_capacity": 500, "training_intensity": 4.0, "n_step": 2}
    assert problems_of(plan, DQNConfig(**settings)) == {}
    found = problems_of(plan, DQNConfig(**settings, target_network_update_freq=64))
    assert list(found) == ["unused_setting"]


def two_policies(**settings):
    return A2CConfig(
        **{**SMALL, "env": make_multi_agent("CartPole-v1")},
        env_config={"num_agents": 2},
        policies={"a": PolicySpec(), "b": PolicySpec()},
        policy_mapping_fn=lambda agent_id: "ab"[agent_id],
        **settings,
    )


@pytest.mark.parametrize(("trained", "is_problem"), [(["a"], False), (["b"], True), (None, False)])
def test_selected_rows_must_be_of_the_trained_policies(trained, is_problem):
    def plan(workers, config):
        rows = ParallelRollouts(workers, mode="bulk_sync").for_each(SelectExperiences(["a"]))
        train = rows.for_each(TrainOneStep(workers, policies=trained))
        return report(train, workers, config)

    found = problems_of(plan, two_policies())
    assert ("rows_that_nothing_trains" in found) == is_problem


@pytest.mark.parametrize("count_steps_by", ["env_steps", "agent_steps"])
@pytest.mark.parametrize("selects", [True, False])
def test_selected_rows_are_counted_in_agent_steps(selects, count_steps_by):
    def plan(workers, config):
        rollouts = ParallelRollouts(workers, mode="bulk_sync")
        rows = rollouts.for_each(SelectExperiences(["a"])) if selects else rollouts
        batches = rows.combine(ConcatBatches(100, count_steps_by=count_steps_by))
        return report(batches.for_each(TrainOneStep(workers)), workers, config)

    found = problems_of(plan, two_policies())
    is_problem = selects and count_steps_by == "env_steps"
    assert ("env_steps_of_selected_rows" in found) == is_problem


def test_duplicate_whose_full_buffer_drops_items_needs_no_reader():
    def plan(workers, config, when_full):
        rollouts = ParallelRollouts(workers, mode="bulk_sync")
        first, _ = rollouts.duplicate(2, when_full=["block", when_full])
        return report(first.for_each(TrainOneStep(workers)), workers, config)

    for when_full, is_problem in (("block", True), ("drop_oldest", False)):
        found = problems_of(lambda w, c, one=when_full: plan(w, c, one))
        assert ("unread_duplicate" in found) == is_problem


def test_rows_of_joined_branches_are_those_of_all_of_them():
    def plan(workers, config):
        first, second = ParallelRollouts(workers, mode="bulk_sync").duplicate(2)
        both = first.for_each(SelectExperiences(["a"])).union(
            second.for_each(SelectExperiences(["b"])), deterministic=True
        )
        batches = both.combine(ConcatBatches(100))
        return report(batches.for_each(TrainOneStep(workers)), workers, config)

    found = problems_of(plan, two_policies())
    assert not {"rows_that_nothing_trains", "env_steps_of_selected_rows"} & found.keys()
