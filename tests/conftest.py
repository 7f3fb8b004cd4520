"""Fixtures: the two execution modes, one Ray for the whole session, small environments."""

import os

import pytest

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")


# Ray's own record of tasks, which grows for a while in each process, is no memory of ours
os.environ.setdefault("RAY_task_events_report_interval_ms", "0")


@pytest.fixture(scope="session")
def ray_session():
    """One Ray on this machine for all tests that ask for actors."""
    import ray

    ray.init(
        "local", num_cpus=4, include_dashboard=False, logging_level="WARNING", log_to_driver=False
    )
    yield ray
    ray.shutdown()


@pytest.fixture(params=[0, 2], ids=["in_process", "two_actors"])
def num_workers(request):
    """Both execution modes; Ray starts only for the second."""
    if request.param:
        request.getfixturevalue("ray_session")
    return request.param


def pytest_collection_modifyitems(items):
    """What starts actors for seconds and is shown by others, too, is for the slow suite, and so is
    learning with one seed."""
    for item in items:
        learns = item.path.name == "test_learning.py" and not item.get_closest_marker("seeds")
        if item.name in SLOW_ON_ACTORS or learns:
            item.add_marker(pytest.mark.slow)


SLOW_ON_ACTORS = {
    *(f"test_two_learners_are_one[{case}]" for case in ("lstm", "one row", "a2c")),
    "test_gradients_in_lockstep_are_those_of_a2c",
    "test_on_actors_a_resumed_run_is_the_same_run[a2c]",
    "test_gradients_as_they_come[two_actors]",
    "test_on_actors_one_of_them_records",
    *(f"test_plan_runs[two_actors-{plan}]" for plan in ("a2c", "a2c_replay", "dqn", "ppo")),
    *(
        f"test_plan_runs[two_actors-{plan}]"
        for plan in ("a3c", "appo", "ddppo", "ppo_async", "apex")
    ),
    *(f"test_plan_runs[in_process-{plan}]" for plan in ("apex", "dqn_distributed")),
    "test_a_seeded_run_repeats[two_actors-True]",
    "test_a_frozen_opponent[two_actors]",
    "test_in_a_plan_over_workers[two_actors]",
    *(f"test_plan_runs[two_actors-{plan}]" for plan in ("dqn_distributed", "ppo_dqn")),
    "test_it_is_what_the_plan_does[two_actors]",
    "test_select_and_union[two_actors]",
    "test_what_is_random_on_a_shard_follows_the_seed_and_is_replayed[two_actors]",
    "test_shards_one_by_one[two_actors]",
    "test_repartition[two_actors]",
    "test_rounds_are_joined_or_listed[two_actors]",
    "test_in_a_whole_run[1]",
    *(f"test_a_running_plan_takes_them[{kind}]" for kind in ("async", "gradients", "group")),
    "test_a_checkpoint_has_those_that_joined",
    "test_a_loaded_algorithm_that_has_not_started_takes_them",
    "test_steps_of_those_that_left_are_not_taken_for_some_in_flight",
    "test_who_leaves_is_asked_no_more_and_who_comes_back_is_another_one",
    "test_two_chains_on_the_same_workers_both_get_them",
    "test_workers_that_take_nothing_have_a_place[asked0]",
    "test_what_others_have_taken_is_not_there",
    "test_after_a_refusal_it_is_refused_again_and_stops",
    "test_a_fragment_that_was_lost_counts_as_dropped[2]",
    "test_a_round_is_the_update_of_all_rows",
    "test_large_weights_are_one_object_per_version",
    "test_a_dead_evaluation_worker_is_made_again",
    *(
        f"test_plan_runs[two_actors-{plan}]"
        for plan in ("sac", "td3", "three_way", "impala", "rainbow", "r2d2")
    ),
    "test_a_failed_worker_that_leaves_is_not_missed",
    "test_a_worker_made_again_has_its_place",
    "test_without_a_strategy_there_is_no_group",
    "test_workers_wait_rather_than_get_stale[IMPALAConfig-0]",
    "test_workers_wait_rather_than_get_stale[IMPALAConfig-2]",
    "test_plans_learn_from_aggregated_batches[APPOConfig]",
    "test_a_fragment_that_was_lost_counts_as_dropped[0]",
    "test_workers_wait_rather_than_get_stale[A3CConfig-1]",
    "test_it_goes_on_from_a_checkpoint",
    "test_plans_learn_from_aggregated_batches[IMPALAConfig]",
    "test_a_running_plan_takes_them[sync]",
    "test_a_task_that_dies_is_run_again",
    "test_a_restored_set_of_shards_goes_on",
    "test_priorities_of_all_shares_come_back",
    "test_with_async_rollouts_counters_go_on_and_what_was_in_flight_is_dropped",
    "test_a_learners_thread_on_actors",
    "test_a_worker_that_is_gone_loses_its_episodes_alone",
    "test_a_live_algorithm_goes_back[0-2]",
    "test_an_algorithm_of_ones_own[1]",
    "test_places_are_reserved_and_given_back",
    "test_workers_that_cannot_be_placed_do_not_join",
    "test_all_workers_have_the_same_weights_after_each_round",
    "test_schedules_follow_the_env_steps[2]",
    "test_a_live_algorithm_goes_back[2-2]",
    "test_a_synchronous_gather_does_not_hold_up_an_async_sibling",
    "test_what_learning_raises_comes_from_the_learners",
    *(
        f"test_on_actors_a_resumed_run_is_the_same_run[{plan}]"
        for plan in ("ppo", "dqn", "ppo_dqn")
    ),
}
