"""Schedules over env steps and over percentages of the training."""

import numpy as np
import pytest

from flowrl.algorithms.a2c import A2CConfig
from flowrl.algorithms.dqn import DQNConfig
from flowrl.algorithms.sac import SACConfig
from flowrl.data import SampleBatch
from flowrl.errors import ConfigError
from flowrl.policies.config import PolicyConfig
from flowrl.policies.schedules import (
    initial_value,
    needs_total,
    schedules_in,
    value_at,
    zero_from,
)

LINEAR = [("0%", 1.0), ("100%", 0.0)]
HALVING = {"initial": 1.0, "decay": 0.5, "steps": "10%"}


@pytest.mark.parametrize("total", [1000, 50_000])
def test_schedules_in_percent_follow_the_total(total):
    for share in (0.0, 0.25, 0.5, 1.0, 1.5):
        assert value_at(LINEAR, int(share * total), total) == pytest.approx(max(0.0, 1 - share))
    assert value_at([(0, 1.0), ("2.5%", 0.5)], total // 40, total) == 0.5
    assert value_at(HALVING, total // 5, total) == 0.25


def test_schedules_in_env_steps_ignore_the_total():
    absolute = [(0, 1.0), (100, 0.0)]
    assert {value_at(absolute, 25, total) for total in (None, 50, 10_000)} == {0.75}


@pytest.mark.parametrize("schedule", [LINEAR, HALVING])
def test_schedule_in_percent_needs_the_total(schedule):
    assert needs_total(schedule)
    assert initial_value(schedule) == value_at(schedule, 0) == 1.0
    with pytest.raises(ConfigError, match="needs total_timesteps"):
        value_at(schedule, 1)


@pytest.mark.parametrize("schedule", [0.1, [(0, 1.0), (100, 0.0)], {**HALVING, "steps": 10}])
def test_other_schedules_do_not_need_the_total(schedule):
    assert not needs_total(schedule)


def test_zero_from_is_the_first_step_of_the_final_zeros():
    assert zero_from([(0, 1.0), (100, 0.0)], None) == 100
    assert zero_from([(0, 0.0), (50, 1.0), (100, 0.0), (200, 0.0)], None) == 100
    assert zero_from([("0%", 1.0), ("20%", 0.0)], 500) == 100
    for schedule in (0.0, [(0, 1.0), (100, 0.1)], HALVING):
        assert zero_from(schedule, 500) is None


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([("0%", 1.0), (100, 0.0)], "all env steps or all percentages"),
        ([("0%", 1.0), ("101%", 0.0)], "101% is more than 100%"),
        ([("50%", 1.0), ("20%", 0.0)], "rising steps"),
        ([("0%", 1.0), ("all", 0.0)], "'all' is neither a number of env steps nor a percentage"),
        ([(0.0, 1.0), (1.0, 0.0)], "write shares of the training as '0%' … '100%'"),
        ({**HALVING, "steps": "10"}, "'10' is neither"),
        ({**HALVING, "initial": "10%"}, "initial must be a number"),
        ({**HALVING, "initial": 0.1, "final": 0.2}, "final, the smallest value .* above initial"),
    ],
)
def test_invalid_steps_are_rejected(schedule, message):
    with pytest.raises(ConfigError, match=f"lr: .*{message}"):
        PolicyConfig(lr=schedule)


def test_schedules_of_a_record_are_found_by_their_type():
    assert "exploration_config.epsilon" in dict(schedules_in(DQNConfig()))
    found = dict(schedules_in(SACConfig(actor_lr=LINEAR)))
    assert found["actor_lr"] == LINEAR
    assert "critic_lr" not in found  # None: lr applies
    assert "gamma" not in found
    assert {"lr", "entropy_coeff", "vf_loss_coeff"} < set(dict(schedules_in(A2CConfig())))


def test_beta_of_prioritized_replay_may_be_in_percent():
    settings = {"prioritized_replay_beta": [("0%", 0.4), ("100%", 1.0)]}
    buffer = DQNConfig(total_timesteps=200, **settings).new_buffer()
    assert buffer.beta == 0.4
    obs = np.zeros((100, 1), np.float32)
    buffer.add(SampleBatch(obs=obs, new_obs=obs))
    assert buffer.beta == pytest.approx(0.7)
    with pytest.raises(ConfigError, match="needs total_timesteps"):
        DQNConfig(**settings).new_buffer()
    assert "prioritized_replay_beta" in dict(schedules_in(DQNConfig()))
    for invalid, message in (([(5, 0.4), (0, 1.0)], "rising steps"), (-1, "from 0 to 1e")):
        with pytest.raises(ConfigError, match=f"prioritized_replay_beta: .*{message}"):
            DQNConfig(prioritized_replay_beta=invalid)
