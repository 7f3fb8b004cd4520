"""TorchPolicy: a policy with a torch network; a subclass writes `loss(batch)`."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
import optree
import torch
from gymnasium import spaces

from flowrl.data import SampleBatch
from flowrl.data.spaces import has_image
from flowrl.errors import ConfigError
from flowrl.policies.acting_models import ActingModel, CPUCopy, make_acting_model
from flowrl.policies.config import ModelConfig
from flowrl.policies.devices import missing_reason, on_available_device
from flowrl.policies.distributions import ActionDistribution, DiagGaussian, distribution_for
from flowrl.policies.exploration import Exploration
from flowrl.policies.export import export_policy
from flowrl.policies.learning.flat_parameters import FlatAdam, FlatParameters, as_tensor_like
from flowrl.policies.learning.torch_learner import TorchLearner
from flowrl.policies.models.base import ModelV2
from flowrl.policies.models.catalog import make_model
from flowrl.policies.models.module_model import ModuleModel
from flowrl.policies.models.tensor_batch import TensorBatch, as_state
from flowrl.policies.policy import Policy
from flowrl.policies.schedules import initial_value
from flowrl.policies.torch_random import torch_seed
from flowrl.policies.views import find_input_problem, find_mismatch, find_out_of_range
from flowrl.seeding import random_stream, restore_stream, stream_state
from flowrl.state_schema import check_finite, check_state, has_valid_numbers

T = TypeVar("T")
_UNSEEDED = contextlib.nullcontext()
# of a state: what sampling needs besides the fields of Policy
_ACTING_FIELDS = {"exploration": dict[str, Any], "network_rng": dict[str, Any]}

__all__ = ["TensorBatch", "TorchPolicy"]


class TorchPolicy(Policy):
    """A policy with a torch model and a loss.

    A subclass writes `loss`, using `self.model.from_batch(batch)` for distribution inputs,
    `self.model.value_function()` for values, `self.dist_class` for distributions, and `self.stats`
    for statistics to report. This class acts; its `learner` learns.

    Attributes:
        model: the network, a ModelV2.
        dist_class: the action distribution.
        device: the torch.device of the network.
        exploration: the Exploration, which chooses actions while sampling.
        flat: all parameters and gradients of the network, each in one vector.
        learner: the TorchLearner.
        stats: statistics of the current update, numbers or tensors without axes.
    """

    learner_class: ClassVar[type[TorchLearner]] = TorchLearner
    scalar_columns: ClassVar[tuple[str, ...]] = ()
    """Columns of which flowrl's losses need one number per row."""

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space, config: Any):
        super().__init__(observation_space, action_space, config)
        self.device = self._find_device()
        self.dist_class = self.make_distribution()
        if not (
            isinstance(self.dist_class, type) and issubclass(self.dist_class, ActionDistribution)
        ):
            raise ConfigError(
                f"{type(self).__name__}.make_distribution() must return a subclass of "
                f"ActionDistribution, got {self.dist_class!r}"
            )
        self.model = self.new_model()
        # policy and model share one dict of views; with burn-in a sequence may start at any row,
        # so the states of all rows are stored
        model_config = self.config.model
        states = self.recurrent_views(1 if model_config.burn_in else model_config.max_seq_len)
        self.view_requirements |= {**states, **self.model.view_requirements}
        self.model.view_requirements = self.view_requirements
        self.exploration = self.make_exploration()
        self._network_rng = random_stream(self.config.seed, "policy", "network")
        self._draws_while_acting: bool | None = None  # known after the first pass
        self.flat = FlatParameters(self.model)
        self.model.bind_numpy_views()
        self._acting_model = make_acting_model(self)
        self.stats: dict[str, torch.Tensor | float] = {}
        self.learner = self.learner_class(self)

    def new_model(self) -> ModelV2:
        """Return a new network from `make_model`, on the policy's device."""
        model: Any = self.make_model()
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"make_model: a torch.nn.Module is needed, got {model!r}")
        if not isinstance(model, ModelV2):
            num_outputs = self.dist_class.num_inputs(self.action_space)
            model = ModuleModel(
                model, self.observation_space, self.action_space, num_outputs, self.config.model
            )
        extra = [n for n in model.state_dict() if n.rpartition(".")[2] == "_extra_state"]
        if extra:
            raise ConfigError(
                "model: checkpoints contain parameters and buffers, but not what get_extra_state() "
                f"returns ({extra[0]}): keep it in a buffer (register_buffer)"
            )
        placed: ModelV2 = model.to(self.device)
        return placed

    @property
    def algorithm_name(self) -> str:
        """Name of the algorithm, for messages: the name of the class without `TorchPolicy`."""
        return type(self).__name__.removesuffix("TorchPolicy")

    @property
    def acting_model(self) -> ActingModel:
        """The network that computes actions: `model` or, on a GPU, a copy of a small network on the
        CPU, which follows `version`, or a CUDA graph of a network for images."""
        if isinstance(self._acting_model, CPUCopy):
            return self._acting_model.with_weights_of(self.version)
        return self._acting_model or self.model

    def _find_device(self) -> torch.device:
        name = self.config.device
        if name == "auto":
            name = (
                "cuda" if has_image(self.observation_space) and torch.cuda.is_available() else "cpu"
            )
        if (reason := missing_reason(name)) is not None:
            raise ConfigError(f"device: {name!r} is not available: {reason}")
        return torch.device(name)

    # -- parts that a subclass may replace -------------------------------------------------------

    def make_distribution(self) -> type[ActionDistribution]:
        """Return the action distribution class for the action space."""
        return distribution_for(self.action_space)

    def make_model(self) -> torch.nn.Module:
        """Return the network: a ModelV2, or any module that returns (distribution inputs, values).

        A ModelV2 that needs more of the trajectory sets `view_requirements` in its constructor.
        """
        return self.make_catalog_model(self.config.model)

    def make_catalog_model(
        self, config: ModelConfig, num_outputs: int | None = None, **options: Any
    ) -> ModelV2:
        """Return the catalog's network for these settings, with weights from the policy's seed.

        Args:
            config: settings of the network.
            num_outputs: None for the number of inputs of the action distribution.
            options: see flowrl.policies.models.make_model.
        """
        gaussian = issubclass(self.dist_class, DiagGaussian)
        if num_outputs is None:
            num_outputs = self.dist_class.num_inputs(self.action_space)
        model = make_model(
            self.observation_space,
            self.action_space,
            num_outputs,
            config,
            free_log_std=gaussian and config.free_log_std,
            rng=random_stream(self.config.seed, "policy", "weights"),
            **options,
        )
        if config.initial_log_std:
            named = [(name.split(".")[-1], part) for name, part in model.named_parameters()]
            found = [parameter for name, parameter in named if name == "log_std"]
            if not found:
                reason = f"there are none for {self.action_space}"
                if config.custom_model is not None:
                    reason = "the custom_model has no parameter log_std"
                raise ConfigError(
                    "model.initial_log_std: it is the initial value of the parameters for standard "
                    f"deviations of a Box, but {reason}: leave it out"
                )
            for parameter in found:
                torch.nn.init.constant_(parameter, config.initial_log_std)
        return model

    def make_exploration(self) -> Exploration:
        """Return the exploration that chooses actions while sampling."""
        config = self.config
        return Exploration(
            config.exploration_config, self.action_space, self.dist_class, config.normalize_actions
        )

    def exploration_for_evaluation(self) -> Exploration:
        """Return an exploration without the noise of the training. If its class overrides
        `load_state_dict`, the new object has a copy of the present state."""
        exploration = self.make_exploration()
        if type(exploration).load_state_dict is not Exploration.load_state_dict:
            exploration.load_state_dict(copy.deepcopy(self.exploration.state_dict()))
        return exploration

    def make_optimizer(self) -> Any:
        """Return the optimizer, or several; then `loss` returns one loss for each.

        The default is Adam on `self.flat.vector`, which holds all parameters. Optimizers of
        torch.optim whose `step()` needs no closure work as well, on that vector or on parameters of
        `self.model`. Their states are saved. Parameter groups whose initial learning rate is the
        first value of the schedule `lr` follow that schedule; other groups keep their rate.
        (They are not the default because importing torch.optim takes as long as importing torch.)
        """
        return FlatAdam(self.flat, lr=initial_value(self.config.lr), eps=self.config.adam_epsilon)

    def loss(self, batch: TensorBatch) -> torch.Tensor | Sequence[torch.Tensor]:
        """Return the scalar to minimize; a list with one scalar per optimizer if there are several.

        Args:
            batch: columns [B, …] as tensors.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no loss(batch): implement it to learn"
        )

    @property
    def to_dist_inputs(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Function from model outputs [B, …] to distribution inputs of greedy actions."""
        return torch.nn.Identity()

    def extra_action_out(
        self, input_dict: dict[str, Any], states: list[np.ndarray], outputs: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Return more columns [B, …] to record with the actions."""
        return {}

    def loss_coefficients(self) -> tuple[float, ...]:
        """Return the scheduled or adapted coefficients that the loss reads. A CUDA graph of an
        update contains their values, so the update is captured again when they change."""
        return ()

    def extra_grad_process(self) -> dict[str, torch.Tensor]:
        """Return statistics; called before `self.flat.gradient` is clipped. `self.stats` has those
        of the loss: floats, or tensors if autograd computed the gradient."""
        return {}

    # -- acting --------------------------------------------------------------------------------

    def get_initial_state(self) -> list[np.ndarray]:
        return [as_state(state) for state in self.model.get_initial_state()]

    def compute_actions(
        self,
        obs_batch: Any,
        explore: bool = True,
        state_batches: Sequence[np.ndarray] | None = None,
    ) -> tuple[Any, list[np.ndarray], dict[str, np.ndarray]]:
        inputs = {"obs": obs_batch}
        for i, state in enumerate(state_batches or ()):
            inputs[f"state_in_{i}"] = state
        return self._act(inputs, explore)

    def compute_actions_from_input_dict(
        self, input_dict: dict[str, Any], explore: bool = True
    ) -> tuple[Any, list[np.ndarray], dict[str, np.ndarray]]:
        if len(input_dict) == 1 and "obs" in input_dict:  # a subclass may override compute_actions
            return self.compute_actions(input_dict["obs"], explore=explore)
        return self._act(input_dict, explore)

    def _act(
        self, input_dict: dict[str, Any], explore: bool
    ) -> tuple[Any, list[np.ndarray], dict[str, np.ndarray]]:
        with self._seeded():
            outputs, values, states = self._computed(self.acting_model.compute_outputs, input_dict)
        actions, logp = self.exploration.act(outputs, self, explore)
        extra = {"action_logp": logp, "action_dist_inputs": outputs}
        if values is not None:
            extra["vf_preds"] = values
        if self._has_own_columns:
            extra |= self.extra_action_out(input_dict, states, outputs)
        return actions, states, extra

    @cached_property
    def _has_own_columns(self) -> bool:
        """Whether a subclass records columns of its own with the actions (`extra_action_out`)."""
        return type(self).extra_action_out is not TorchPolicy.extra_action_out

    def _act_by_numpy(
        self, input_dict: dict[str, Any], explore: bool
    ) -> tuple[Any, list[np.ndarray], dict[str, np.ndarray]]:
        """Compute actions without values; only for networks that act with numpy."""
        model: Any = self.acting_model
        outputs = self._computed(lambda inputs: model.outputs_numpy(inputs["obs"]), input_dict)
        actions, logp = self.exploration.act(outputs, self, explore)
        return actions, [], {"action_logp": logp, "action_dist_inputs": outputs}

    def _seeded(self) -> contextlib.AbstractContextManager[None]:
        """Seed torch's random numbers for a forward pass that acts, unless the first such pass has
        drawn none."""
        if self._draws_while_acting is False or not self.learner.draws_from_torch:
            return _UNSEEDED
        return self._seeded_pass()

    @contextlib.contextmanager
    def _seeded_pass(self) -> Iterator[None]:
        is_first = self._draws_while_acting is None
        with torch_seed(int(self._network_rng.integers(2**63))):
            before = self._generator_states() if is_first else []
            yield
            if is_first:
                unchanged = map(torch.equal, before, self._generator_states())
                self._draws_while_acting = not all(unchanged)

    def _generator_states(self) -> list[torch.Tensor]:
        """Return the states of torch's generators that the network may draw from."""
        states = [torch.get_rng_state()]
        if self.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self.device))
        return states

    def _computed(self, compute: Callable[[Any], T], input_dict: dict[str, Any]) -> T:
        """Return compute(input_dict); check the inputs only if that fails."""
        try:
            return compute(input_dict)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            views, states = self.view_requirements, self.get_initial_state()
            problem = find_input_problem(views, states, input_dict)
            if problem is None or isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{type(self).__name__} cannot act on this: {problem}") from error

    def compute_values(self, obs_batch: Any) -> np.ndarray | None:
        with self._seeded():
            return self.acting_model.compute_values({"obs": obs_batch})

    def compute_values_from_input_dict(self, input_dict: dict[str, Any]) -> np.ndarray | None:
        if len(input_dict) == 1:
            return self.compute_values(input_dict["obs"])
        with self._seeded():
            return self.acting_model.compute_values(input_dict)

    def compute_log_likelihoods(
        self, actions: Any, obs_batch: Any = None, input_dict: dict[str, Any] | None = None
    ) -> np.ndarray:
        """Return log-probabilities (float32 [B]) of actions [B, …] as the policy computes them,
        before they are scaled to the environment's bounds.

        Args:
            actions: arrays of the action space's structure.
            obs_batch: observations [B, …] as the sampler stores them.
            input_dict: every view that the model needs, [B, …] each; used instead of `obs_batch`.

        Raises:
            ValueError: actions have another form than the space, integers are outside of it, or the
                numbers of actions and of observations differ.
        """
        inputs = {"obs": obs_batch} if input_dict is None else input_dict
        outputs, _, _ = self._computed(self.model.compute_outputs, inputs)
        self._check_actions(actions, len(outputs))
        with torch.inference_mode():
            dist = self.dist_class(torch.from_numpy(outputs), self.model)
            tensors = TensorBatch(SampleBatch({"actions": actions}))["actions"]
            try:
                return dist.logp(tensors).numpy()
            except (IndexError, RuntimeError) as error:
                raise ValueError(
                    f"actions: not of {self.action_space}, with numbers from 0: {actions}"
                ) from error

    def _check_actions(self, actions: Any, count: int) -> None:
        """Raise ValueError for actions that are not `count` actions of the policy."""
        problem = find_mismatch(self.action_space, actions, "actions")
        problem = problem or find_out_of_range(self.action_space, actions, "actions")
        if problem is not None:
            raise ValueError(problem)
        leaves: Any = optree.tree_leaves(actions)
        counts = sorted({len(leaf) for leaf in leaves})
        if counts != [count]:
            raise ValueError(f"{counts} actions for {count} observations")

    # -- learning ------------------------------------------------------------------------------

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers, one for each loss."""
        return self.learner.optimizers

    @property
    def optimizer(self) -> Any:
        """The first optimizer."""
        return self.optimizers[0]

    @property
    def num_skipped_updates(self) -> int:
        """Updates skipped because they were not finite."""
        return self.learner.num_skipped_updates

    def tensors(self, batch: SampleBatch) -> TensorBatch:
        """Return the batch in the form that `loss` receives."""
        loaded = self.learner.captured.tensors(batch)
        return TensorBatch(batch, self.device) if loaded is None else loaded

    def seed_acting(self, seed: int | None, worker_index: int, *key: str) -> None:
        """Set the random streams of actions and of the network's own noise; see the base class."""
        super().seed_acting(seed, worker_index, *key)
        if worker_index:
            self._network_rng = random_stream(seed, "network", worker_index, *key)

    def columns_read(self, batch: SampleBatch) -> set[str] | None:
        return self.learner.columns_read(batch)

    def record_row_stats(self, batch: TensorBatch, **values: np.ndarray | torch.Tensor) -> None:
        """Record values per row of a batch that was drawn from a replay buffer, for `row_stats`.

        For use in `loss`.

        Args:
            batch: the rows; those of other batches are not recorded.
            values: arrays or tensors [rows], such as `td_error`.
        """
        if "batch_indexes" in batch:
            indexes = batch.array("batch_indexes")
            self.learner.record_row_stats({"batch_indexes": indexes, **values})

    def loss_without_rows(self) -> None:
        """Take part in the collective operations of `loss` when this process has no rows.

        Needed if `loss` uses `learner.standardize`, `learner.mean_of_rows` or
        `learner.mean_over_group`: call the same methods, with an empty tensor or None.
        """

    def learn_on_minibatches(
        self, batch: SampleBatch, num_sgd_iter: int = 1, sgd_minibatch_size: int = 0
    ) -> dict[str, float]:
        return self.learner.learn_on_minibatches(batch, num_sgd_iter, sgd_minibatch_size)

    def learn_on_batch(self, batch: SampleBatch) -> dict[str, float]:
        """Make one optimizer step from all the rows; return statistics.

        Raises:
            FloatingPointError: the loss or its gradient is not finite; the weights are unchanged.
        """
        return self.learner.learn_on_batch(batch)

    def compute_gradients(self, batch: SampleBatch) -> tuple[np.ndarray, dict[str, float]]:
        """Return the gradient [parameters] of the loss, and statistics; nothing changes."""
        return self.learner.compute_gradients(batch)

    def apply_gradients(self, gradients: np.ndarray | torch.Tensor | Mapping[str, Any]) -> None:
        """Make one optimizer step.

        Args:
            gradients: the gradient [parameters] from `compute_gradients`; or arrays or tensors by
                the names of `model.named_parameters()`, zeros for names that are missing or None.

        Raises:
            ValueError: there is no such parameter, or a gradient has another shape.
            FloatingPointError: it is not finite; the weights are unchanged.
        """
        self.learner.apply_gradients(gradients)

    def on_global_var_update(self, global_vars: dict[str, Any]) -> None:
        super().on_global_var_update(global_vars)
        self.learner.follow_schedules()

    # -- export --------------------------------------------------------------------------------

    def export(self, path: Path | str, format: str | None = None) -> Path:
        """Write the acting part to a file that can be used without flowrl.

        The exported program includes the normalization and takes the greedy actions. Its input is a
        dict of the policy's views, [B, …] each: `obs` (raw observations, with the dtypes of the
        observation space) and, for recurrent policies, `state_in_0`, … (float32, zeros at an
        episode's start). Its output is a dict of `actions`, in the environment's form and with the
        dtypes of the action space, and `state_out_0`, … (float32); if a view contains earlier
        actions also `policy_actions`, the actions to pass in that view.

        Args:
            path: of the file.
            format: "torch" (a torch.export program: `torch.export.load(path).module()`) or "onnx"
                (one file; inputs and outputs have the same names, parts of nested ones `obs.key`;
                needs the extra `onnx`). None chooses "onnx" for a path that ends in `.onnx`.

        Raises:
            ConfigError: the format is unknown, the extra is missing, or a view cannot be exported.
        """
        return export_policy(self, path, format)

    # -- state ---------------------------------------------------------------------------------

    def _tensors_by_name(self) -> dict[str, torch.Tensor]:
        """Return parameters and saved buffers by name."""
        own: dict[str, torch.Tensor] = dict(zip(self.flat.names, self.flat.parameters, strict=True))
        saved = self.model.state_dict()
        own |= {name: b for name, b in self.model.named_buffers() if name in saved}
        return own

    @property
    def _buffer_names(self) -> set[str]:
        """Names of the network's buffers, which may be infinite, such as masks of attention."""
        return {name for name, _ in self.model.named_buffers()}

    def get_weights(self) -> dict[str, np.ndarray]:
        return {n: t.detach().cpu().numpy().copy() for n, t in self._tensors_by_name().items()}

    def __reduce__(self) -> Any:
        # rebuild the policy, because its parts share memory
        views = dict(self.view_requirements)
        given = self.observation_space, self.action_space, self.config
        return _rebuild, (type(self), *given, self.get_state(), views)

    def set_weights(self, weights: dict[str, np.ndarray]) -> None:
        """Set the weights.

        Raises:
            ValueError: names or shapes do not fit this network, a parameter is not finite, or a
                buffer is NaN; nothing changes.
        """
        if not isinstance(weights, dict):
            raise ValueError(f"weights must be a dict, as of get_weights(), got {type(weights)}")
        self.learner.check_model()
        own = self._tensors_by_name()
        wrong = {n: np.shape(weights[n]) if n in weights else "no value" for n in own}
        wrong = {n: s for n, s in wrong.items() if s != tuple(own[n].shape)}
        extra = sorted(set(weights) - set(own))
        if wrong or extra:
            lines = [f"{n}: has {tuple(own[n].shape)}, got {s}" for n, s in wrong.items()]
            raise ValueError(
                "these weights do not fit this network: "
                + "; ".join(lines + [f"{name}: unknown" for name in extra])
            )
        new = {name: as_tensor_like(weights[name], own[name]) for name in own}
        valid = {
            name
            for name, tensor in new.items()
            if tensor is not None and has_valid_numbers(tensor, name in self._buffer_names)
        }
        if len(valid) < len(own):
            invalid = [name for name in own if name not in valid]
            raise ValueError(f"these weights have values that are not finite numbers: {invalid}")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(cast(Any, new[name]))
        self.version += 1
        if isinstance(self._acting_model, CPUCopy):
            self._acting_model.forget()  # the state of another policy may have the same version

    def get_state(self) -> dict[str, Any]:
        return {
            **super().get_state(),
            "learner": self.learner.state_dict(),
            "exploration": self.exploration.state_dict(),
            "network_rng": stream_state(self._network_rng),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        before, total_timesteps = self.get_state(), self.total_timesteps
        try:
            self._set_state(state)
        except Exception:
            self._set_state(before)  # a state that does not fit changes nothing
            self.total_timesteps = total_timesteps
            raise

    def _set_state(self, state: dict[str, Any]) -> None:
        fields = {"learner": dict[str, Any], **_ACTING_FIELDS}
        check_state(state, fields, f"the state of a {type(self).__name__}")
        check_finite(state, "state", self._buffer_names)
        super().set_state(state)
        self.learner.load_state_dict(state["learner"])
        self.learner.follow_schedules()
        self.exploration.load_state_dict(state["exploration"])
        restore_stream(self._network_rng, state["network_rng"])

    def acting_state_dict(self) -> dict[str, Any]:
        return {
            **super().acting_state_dict(),
            "exploration": self.exploration.state_dict(),
            "network_rng": stream_state(self._network_rng),
        }

    def load_acting_state_dict(self, state: dict[str, Any]) -> None:
        check_state(state, _ACTING_FIELDS)
        super().load_acting_state_dict(state)
        self.exploration.load_state_dict(state["exploration"])
        restore_stream(self._network_rng, state["network_rng"])


def _rebuild(
    cls: type[TorchPolicy],
    observation_space: spaces.Space,
    action_space: spaces.Space,
    config: Any,
    state: dict[str, Any],
    views: dict[str, Any],
) -> TorchPolicy:
    policy = cls(observation_space, action_space, on_available_device(config))
    policy.set_state(state)
    policy.view_requirements.clear()
    policy.view_requirements.update(views)
    return policy
