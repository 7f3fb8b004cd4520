"""The faults that the marker `chaos` covers, and the tests of each."""

from typing import NamedTuple


class FaultCase(NamedTuple):
    """A kind of fault; `tests` are `file::function` below tests/."""

    fault: str
    outcome: str
    tests: tuple[str, ...]


FAULTS = (
    FaultCase(
        "A worker is killed, once or repeatedly",
        "it is replaced; no env step is counted twice",
        (
            "algorithms/test_faults.py::test_killed_worker_is_replaced_and_no_step_counts_twice",
            "algorithms/test_faults.py::test_training_continues_while_a_killed_worker_is_replaced",
            "iter/test_failures.py::test_killed_shard_is_replaced_and_skips_received_items",
            "iter/test_failures.py::test_shard_that_dies_repeatedly_fails",
        ),
    ),
    FaultCase(
        "All workers are killed at once",
        "all are replaced",
        ("algorithms/test_faults.py::test_a2c_continues_after_all_workers_died",),
    ),
    FaultCase(
        "An environment raises",
        "it is created again; rows of the unfinished episode are complete or dropped",
        (
            "sampling/test_failures.py::test_remaining_rows_are_complete_after_any_failure",
            "sampling/test_failures.py::test_permanent_failure_raises_with_its_traceback",
            "envs/test_permanent_errors.py::test_error_is_raised_once_before_actors_start",
        ),
    ),
    FaultCase(
        "An environment ends its process, forks, prints floods, ignores signals, opens many files",
        "the worker is replaced if its process ended; nothing is left after the run",
        ("chaos/test_environments.py::test_training_continues",),
    ),
    FaultCase(
        "An environment hangs",
        "it is created again after `env_step_timeout_s`; or its worker is killed after "
        "`sample_timeout_s` and replaced; the others continue",
        (
            "envs/test_call_limits.py::test_environment_that_hangs_is_created_again",
            "algorithms/test_faults.py::test_hanging_worker_is_replaced",
            "iter/test_failures.py::test_hanging_shard_is_detected_if_another_is_always_ready",
        ),
    ),
    FaultCase(
        "A worker hangs while others wait for it, or while a checkpoint is written",
        "DD-PPO replaces only this worker; checkpoints leave it out after 15 s, and do not wait "
        "for it again; `flowrl diagnose` names it",
        (
            "learners/test_actors.py::test_workers_that_wait_for_a_hanging_one_are_not_replaced",
            "sampling/test_worker_calls.py::"
            "test_state_of_a_hanging_worker_is_left_out_and_not_waited_for_again",
            "monitoring/test_diagnosis.py::test_worker_that_returns_nothing_is_named",
        ),
    ),
    FaultCase(
        "An evaluation worker dies, or hangs",
        "the evaluation is lost, and the next one has new workers; if it hangs, after "
        "`evaluation_timeout_s`",
        (
            "trainer/test_evaluation.py::test_dead_evaluation_worker_is_replaced",
            "trainer/test_evaluation.py::test_hanging_evaluation_is_stopped",
        ),
    ),
    FaultCase(
        "A worker is slow",
        "asynchronous plans continue; the policy lag is bounded",
        (
            "complaints/test_complaints.py::test_policy_lag_is_bounded_and_reported_with_a_slow_worker",
        ),
    ),
    FaultCase(
        "An environment leaks memory",
        "its worker is replaced above `max_worker_memory_mb`; no env step is lost",
        ("sampling/test_worker_memory.py::test_leaking_worker_is_replaced_and_no_step_is_lost",),
    ),
    FaultCase(
        "Observations or rewards are NaN, infinite or of another shape",
        "an error names worker, environment, field and step; or the episode is dropped",
        (
            "sampling/test_failures.py::test_invalid_values_raise_with_their_origin",
            "sampling/test_failures.py::test_invalid_values_drop_their_episode",
            "sampling/test_failures.py::test_values_that_are_not_finite_raise_by_default",
        ),
    ),
    FaultCase(
        "A replay actor dies",
        "an empty one replaces it; its rows are counted as lost",
        (
            "ops/test_replay_actors.py::test_dead_shard_is_replaced",
            "ops/test_replay_actors.py::test_dead_shard_is_replaced_only_once",
        ),
    ),
    FaultCase(
        "A learner dies",
        "all learners restart from the last weights; the update is repeated",
        (
            "learners/test_actors.py::test_dead_learner_is_restarted_and_the_update_repeated",
            "complaints/test_complaints.py::test_error_of_the_learner_thread_ends_training",
            "learners/test_actors.py::test_group_continues_without_dead_workers",
        ),
    ),
    FaultCase(
        "The process is killed",
        "another process resumes the run; no process is left",
        (
            "trainer/test_resume.py::test_another_process_resumes_the_run_of_a_killed_process",
            "test_cluster.py::test_killed_driver_leaves_no_processes",
        ),
    ),
    FaultCase(
        "The process is killed while it writes a checkpoint",
        "the previous or the new checkpoint loads",
        (
            "data/test_checkpoint.py::test_interrupted_write_leaves_the_previous_or_the_new_checkpoint",
            "data/test_checkpoint.py::test_killed_writer_leaves_the_previous_checkpoint",
        ),
    ),
    FaultCase(
        "A checkpoint is damaged: bits, sizes, types",
        "it is refused by file and field; nothing is changed",
        (
            "data/test_checkpoint.py::test_flipped_bit_is_rejected_with_the_file_name",
            "data/test_checkpoint.py::test_truncated_and_missing_files_are_rejected_with_the_file_name",
            "trainer/test_damaged_states.py::test_mutated_state_is_refused_or_trains",
        ),
    ),
    FaultCase(
        "A file contains code",
        "it is not executed without `trust=True`",
        (
            "data/test_checkpoint.py::test_planted_pickle_is_never_loaded",
            "trainer/test_trust.py::test_no_field_of_a_manifest_executes_code",
            "trainer/test_trust.py::test_links_in_a_run_directory_are_not_followed",
        ),
    ),
    FaultCase(
        "The disk is full",
        "training continues without new checkpoints and keeps the old ones; it ends with a message "
        "if rows of a replay buffer or recorded rows cannot be written",
        (
            "chaos/test_resources.py::test_full_disk_is_reported_without_a_traceback",
            "cli/test_checkpoints.py::test_full_disk_keeps_the_old_checkpoints_and_continues_training",
            "trainer/runs/test_result_files.py::test_training_goes_on_with_a_full_disk",
            "replay/test_memmap.py::test_full_disk_raises_an_error_with_the_folder",
            "offline/test_parquet_writer.py::test_failed_write_keeps_the_rows",
        ),
    ),
    FaultCase(
        "Too many open files; a deleted run directory; a clock that jumps; a small object store",
        "a clear error, or training continues",
        (
            "chaos/test_resources.py::test_too_many_open_files_is_an_error_and_the_run_can_continue",
            "chaos/test_resources.py::test_training_goes_on_without_its_run_directory",
            "chaos/test_resources.py::test_a_clock_that_jumps_changes_nothing",
            "chaos/test_resources.py::test_a_small_object_store_limits_what_is_in_flight",
        ),
    ),
    FaultCase(
        "The memory monitor of Ray kills a worker",
        "it is replaced",
        ("iter/test_failures.py::test_shard_that_the_memory_monitor_kills_counts_as_dead",),
    ),
    FaultCase(
        "The learner is slow",
        "sampling stops while the queues are full; the driver waits without work",
        ("complaints/test_complaints.py::test_slow_learner_stops_sampling_without_a_busy_driver",),
    ),
    FaultCase(
        "Ctrl-C, SIGTERM, SIGHUP",
        "a checkpoint is written, then the process ends",
        (
            "trainer/runs/test_signal_handler.py::test_signal_leaves_a_checkpoint",
            "trainer/runs/test_signal_handler.py::test_interrupted_run_continues_like_an_uninterrupted_one",
        ),
    ),
    FaultCase(
        "Ray's raylet or GCS dies, or the GCS restarts without its state",
        "RayLostError within 30 seconds; a checkpoint is written",
        (
            "iter/test_ray_health.py::test_a_dead_process_of_ray_is_an_error_and_the_state_can_be_saved",
            "iter/test_ray_health.py::test_the_end_of_the_process_behind_a_socket_is_noticed",
            "iter/test_ray_health.py::test_a_gcs_that_restarts_is_lost_only_if_it_has_another_cluster_id",
            "test_cluster.py::test_gcs_that_restarts_without_its_state_is_an_error_and_the_state_can_be_saved",
        ),
    ),
    FaultCase(
        "The machine has no network",
        "workers on the machine continue to train",
        ("chaos/test_resources.py::test_training_with_workers_needs_no_network",),
    ),
    FaultCase(
        "A node of the cluster disappears",
        "its workers are replaced on other nodes",
        ("test_cluster.py::test_lost_node_loses_no_counted_steps",),
    ),
    FaultCase(
        "An operator raises",
        "the error names its place in the plan and the item; the plan stays usable",
        (
            "cli/test_display.py::test_operator_that_raises_is_located",
            "iter/test_failures.py::test_error_on_a_shard_leaves_its_item_there",
        ),
    ),
    FaultCase(
        "A logger fails",
        "it is removed after three failures; training continues",
        ("trainer/test_loggers.py::test_failing_logger_is_removed_after_three_failures",),
    ),
    FaultCase(
        "Settings, files or flags are invalid",
        "refused with the field, before anything starts",
        ("cli/test_mutated_input.py::test_mutated_input_is_refused_or_trains",),
    ),
    FaultCase(
        "Two runs use one directory",
        "the second is refused",
        ("cli/test_run_directory.py::test_run_directory_with_other_files_or_in_use_is_rejected",),
    ),
    FaultCase(
        "A trial of Ray Tune is killed or cloned",
        "it restarts from its checkpoint",
        (
            "test_tune.py::test_killed_trial_restarts_from_its_checkpoint",
            "test_tune.py::test_population_based_training_keeps_counters_and_changes_settings",
        ),
    ),
)
