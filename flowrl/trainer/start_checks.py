"""Checks at the start of training that the policies will learn."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from flowrl.data.serialization import ArrayStore, encode
from flowrl.data.spaces import is_image, leaf_spaces
from flowrl.errors import ConfigError
from flowrl.iter import Stage
from flowrl.iter.stages.function_stage import is_user_defined
from flowrl.monitoring.plan_check import check_plan
from flowrl.monitoring.plan_rules.wiring import one_report
from flowrl.ops import WriteParquet
from flowrl.ops.offline import ReadStage
from flowrl.ops.report import operators_of
from flowrl.policies.config import ModelConfig, PolicyConfig
from flowrl.policies.models.catalog import is_module_class
from flowrl.policies.policy import Policy
from flowrl.policies.policy_spec import specs_of
from flowrl.policies.schedules import needs_total, schedules_in, zero_from
from flowrl.sampling.worker_set import WorkerSet
from flowrl.setting_values import equal
from flowrl.trainer.config import AlgorithmConfig
from flowrl.trainer.evaluation import check_evaluation_env
from flowrl.trainer.memory_checks import check_rows
from flowrl.trainer.plan_files import is_shipped
from flowrl.trainer.plan_settings import plan_config

log = logging.getLogger("flowrl")

_NOT_FOR_MODULES: tuple[str, ...] = (
    "fcnet_hiddens", "fcnet_activation", "vf_share_layers", "free_log_std",
    "initial_log_std", "conv_type", "conv_filters", "conv_activation", "post_fcnet_hiddens",
    "max_seq_len", "burn_in", "matrix_products",
)  # fmt: skip
_NOT_FOR_IMAGES: tuple[str, ...] = ("fcnet_hiddens", "fcnet_activation")
MAX_USUAL_OBSERVATION = 100.0  # bounds of well-known environments are below it
UNLIMITED = 1e30  # some environments have the largest float instead of infinity as a bound
_OF_EVALUATIONS = ("evaluation_num_workers", "evaluation_video_dir")  # not used by evaluate()
# setting -> what happens after it has become 0
_AFTER_0 = {
    "lr": "nothing is learned",
    "actor_lr": "the actor does not change",
    "critic_lr": "the critics do not change",
    "clip_param": "the policy hardly changes",
}


def check_start(config: AlgorithmConfig, workers: WorkerSet, stage: Stage) -> None:
    """Check an algorithm before its first iteration; warn of probable mistakes.

    Args:
        config: the algorithm's settings.
        workers: its WorkerSet.
        stage: the last stage of its plan.

    Raises:
        ConfigError: recorded experience cannot be opened; the rows do not fit into memory; a
            schedule is in percent, but `total_timesteps` is unknown; an operator has a state that
            cannot be saved; the plan yields no results, or has several reports; a plan that records
            or reads rows has a policy whose rows cannot be recorded; or the environment of
            `evaluation_config` does not fit.
    """
    if config.get("input_") is not None:
        config.check_input()
    policies = workers.local_worker().policy_map
    check_rows(config, workers.local_worker())
    _check_states(stage)
    _check_recorded_rows(config, policies, stage)
    check_schedules(config, workers.global_vars["total_timesteps"])
    check_evaluation_env(config, policies)
    _warn_about_settings_without_effect(config)
    for problem in check_plan(stage, workers):
        if problem.rule == one_report.__name__:
            raise ConfigError(f"plan: {problem}")
        log.warning("%s", problem)
    for policy_id, policy in policies.items():
        weights: Any = policy.get_weights()
        if not isinstance(weights, dict):
            log.warning(
                "policy %s: %s.get_weights() returns a %s: checkpoints need a dict of arrays",
                policy_id, type(policy).__name__, type(weights).__name__,
            )  # fmt: skip
        if isinstance(policy.config, PolicyConfig):
            _warn_about_needed_settings(policy_id, policy)
            _warn_about_unused_settings(config, policy_id, policy)
            _warn_about_stacked_images(policy_id, policy)
            _warn_about_large_observations(policy_id, policy)


def _warn_about_settings_without_effect(config: AlgorithmConfig) -> None:
    """Warn about settings of the algorithm's config that nothing uses."""
    for name in _OF_EVALUATIONS if config.evaluation_interval is None else ():
        if config[name]:
            log.warning("%s: no effect without evaluation_interval: set it, too", name)
    defaults = type(config).model_fields
    # for Atari, `completed` adds `model`
    chosen = config.model_fields_set - {"model"}
    changed = (n for n in chosen if not equal(config[n], defaults[n].default))
    specs = {} if config.policies is None else specs_of(config.policies)
    names = sorted(
        name
        for name in changed
        if config.first_ineffective([name])
        and not all(equal(spec.config[name], config[name]) for spec in specs.values())
    )
    if names:
        log.warning(
            "%s: no effect, because every policy has its own settings. Set it there: policies={%r: "
            "{'config': {%r: …}}}", ", ".join(names), next(iter(specs)), names[0],
        )  # fmt: skip


def warn_of_unused_policies(counters: Mapping[str, float], policy_ids: Collection[str]) -> None:
    """Warn of policies that no agent has used in the first iteration.

    Args:
        counters: of the plan.
        policy_ids: ids of the policies that are to be trained.
    """
    name = "num_agent_steps_sampled"
    unused = [policy_id for policy_id in policy_ids if not counters.get(f"{name}/{policy_id}")]
    if unused and len(unused) < len(policy_ids):
        log.warning(
            "policies: no agent has used %s so far: does policy_mapping_fn return %s?",
            " or ".join(map(repr, unused)),
            "it" if len(unused) == 1 else "them",
        )


def _check_states(stage: Stage) -> None:
    """Check that the states of the user's operators can be saved, before the first checkpoint."""
    for node, operator in operators_of(stage):
        for part in (operator, node.shared_state):
            if is_user_defined(part) and hasattr(part, "state_dict"):
                try:
                    encode(part.state_dict(), "state_dict()", ArrayStore())
                except TypeError as error:
                    problem = str(error).removeprefix("checkpoint: ")
                    raise ConfigError(f"{node} (chained at {node.line}): {problem}") from None


def _check_recorded_rows(
    config: AlgorithmConfig, policies: Mapping[str, Policy], stage: Stage
) -> None:
    """Check that the policies' rows can be recorded, if a plan records or reads rows."""
    recorded = [] if config.output is None else [("output", list(policies))]
    for node, operator in operators_of(stage):
        name = f"{node} (chained at {node.line})"
        if isinstance(operator, WriteParquet):
            recorded.append((name, list(policies)))
        elif isinstance(operator, ReadStage):
            recorded.append((name, [operator.trained_policy_id()]))
    for name, policy_ids in recorded:
        for policy_id in policy_ids:
            _check_recorded_policy(name, policy_id, policies[policy_id])


def _check_recorded_policy(name: str, policy_id: str, policy: Policy) -> None:
    """Check that a policy's rows can be recorded; messages begin with a name."""
    if policy.observation_filter or policy.reward_scaler:
        raise ConfigError(
            f"{name}: policy {policy_id!r} has normalized observations or rewards, whose "
            "statistics change during the training, so recorded rows would not fit together: "
            "leave normalize_observations and normalize_rewards out"
        )
    for what, space in (
        ("observations", policy.observation_space),
        ("actions", policy.action_space),
    ):
        if not _has_only_string_keys(space):
            raise ConfigError(
                f"{name}: the {what} of policy {policy_id!r} are dicts with keys that are not "
                "strings, which cannot be recorded: use strings as keys"
            )


def _has_only_string_keys(space: spaces.Space) -> bool:
    """Return whether all keys of the Dict spaces in a space are strings."""
    if isinstance(space, spaces.Dict):
        return all(isinstance(k, str) and _has_only_string_keys(s) for k, s in space.items())
    return not isinstance(space, spaces.Tuple) or all(map(_has_only_string_keys, space))


def check_schedules(config: AlgorithmConfig, total_timesteps: int | None) -> None:
    """Check that schedules can be followed; warn if one ends the learning before the training
    ends."""
    for name, schedule in _schedules_of(config):
        is_in_percent = needs_total(schedule)
        is_of_buffer = name.endswith("prioritized_replay_beta")
        has_total = config.total_timesteps is not None and config.total_timesteps == total_timesteps
        if is_in_percent and is_of_buffer and not has_total:
            raise ConfigError(
                f"{name}: a schedule in percent needs the setting total_timesteps, with which the "
                f"replay buffer is created. It is {config.total_timesteps}: build the algorithm "
                f"with total_timesteps={total_timesteps or '…'}, the env steps of the whole "
                "training, or give the schedule in env steps"
            )
        if total_timesteps is None:
            if is_in_percent:
                raise ConfigError(
                    f"{name}: a schedule in percent needs total_timesteps, the env steps of the "
                    "whole training: set it, call learn(total_timesteps=…) instead of train(), "
                    "give the option --stop-timesteps, or give the schedule in env steps"
                )
            continue
        zero = zero_from(schedule, total_timesteps)
        effect = _AFTER_0.get(name.split(".")[-1])
        if zero is not None and zero < total_timesteps and effect is not None:
            log.warning(
                "%s is 0 from env step %s of %s on: %s after that. A schedule in percent, "
                '[["0%%", …], ["100%%", 0]], lasts as long as the training',
                name, f"{zero:,.0f}", f"{total_timesteps:,}", effect,
            )  # fmt: skip


def has_schedule_in_percent(config: AlgorithmConfig) -> bool:
    """Return whether a setting of an algorithm or of its policies depends on `total_timesteps`."""
    return any(needs_total(schedule) for _, schedule in _schedules_of(config))


def _schedules_of(config: AlgorithmConfig) -> Iterator[tuple[str, Any]]:
    """Yield (name, schedule) of an algorithm's settings, or of those of its policies."""
    if config.policies is None:
        yield from schedules_in(config)
        return
    for policy_id in specs_of(config.policies):
        try:
            settings = config.for_policy(policy_id)
        except ConfigError:  # creating the policies raises an error that names the policy
            continue
        yield from schedules_in(settings, f"policies.{policy_id}.config.")


def _warn_about_needed_settings(policy_id: str, policy: Policy) -> None:
    """Warn about settings that have no effect with the value of another one."""
    config = policy.config
    for cls in type(config).__mro__:
        for name, (other, value) in vars(cls).get("needs", {}).items():
            default = type(config).model_fields[name].default
            if config[other] == value and config[name] != default:
                log.warning(
                    "policy %s: %s: no effect, because %s is %r",
                    policy_id, name, other, config[other],
                )  # fmt: skip


def _warn_about_unused_settings(config: AlgorithmConfig, policy_id: str, policy: Policy) -> None:
    """Warn about settings of the network that a custom model does not receive, and about those of
    hidden layers that networks for images do not have.

    Values of the algorithm's defaults and of a shipped plan are not reported.
    """
    model: ModelConfig = policy.config.model
    if model.custom_model is not None and is_module_class(model.custom_model):
        not_used = _NOT_FOR_MODULES
        reason = (
            "the class of the custom_model does not receive it; custom_model_config has the "
            "arguments of its constructor"
        )
    elif model.custom_model is None and is_image(policy.observation_space):
        not_used = _NOT_FOR_IMAGES
        reason = (
            "the observation is an image; post_fcnet_hiddens has the sizes of the layers after "
            "the convolutions, conv_activation their activation"
        )
    else:
        return
    default: ModelConfig = type(policy.config).model_fields["model"].default
    unused = [
        name
        for name in not_used
        if name in model.model_fields_set and getattr(model, name) != getattr(default, name)
    ]
    if unused and isinstance(config.plan, str) and is_shipped(config.plan):
        of_plan = plan_config(config.plan, config.env)
        has_policy = policy_id in specs_of(of_plan.policies)
        in_plan = of_plan.for_policy(policy_id).model if has_policy else default
        unused = [name for name in unused if getattr(model, name) != getattr(in_plan, name)]
    if unused:
        log.warning(
            "policy %s: %s: no effect, because %s",
            policy_id, ", ".join(f"model.{name}" for name in unused), reason,
        )  # fmt: skip


def _warn_about_stacked_images(policy_id: str, policy: Policy) -> None:
    """Warn if observations are stacks of images with channels, which are flattened."""
    if policy.config.model.custom_model is not None:
        return
    for space in leaf_spaces(policy.observation_space):
        if isinstance(space, spaces.Box) and len(space.shape) == 4 and space.dtype == np.uint8:
            log.warning(
                "policy %s: observations %s are flattened, because images have at most three axes: "
                "before FrameStackObservation, remove the axis of a single channel "
                "(gymnasium.wrappers.ReshapeObservation), so that the frames become channels",
                policy_id, space.shape,
            )  # fmt: skip
            return


def _warn_about_large_observations(policy_id: str, policy: Policy) -> None:
    """Warn if the bounds of float observations are far from the values that networks learn from."""
    if policy.config.normalize_observations or policy.config.model.custom_model is not None:
        return
    for space in leaf_spaces(policy.observation_space):
        if not isinstance(space, spaces.Box) or space.dtype.kind != "f":
            continue
        bounds = np.abs(np.append(space.low, space.high).astype(np.float64))
        limit = float(bounds[bounds < UNLIMITED].max(initial=0))
        if limit > MAX_USUAL_OBSERVATION:
            remedy = "return images as uint8" if is_image(space) else "scale them to about [-1, 1]"
            log.warning(
                "policy %s: observations may be as large as %g, from which networks learn badly: "
                "%s, or set normalize_observations=True",
                policy_id, limit, remedy,
            )  # fmt: skip
            return
