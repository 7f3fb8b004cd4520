"""TorchPolicy: write `loss(batch)`; acting, gradients, weights and state come with it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import optree
import torch
from gymnasium import spaces

from flowrl.data import SampleBatch
from flowrl.data.sequences import with_burn_in
from flowrl.policies.config import ModelConfig
from flowrl.policies.distributions import ActionDistribution, DiagGaussian, distribution_for
from flowrl.policies.exploration import Exploration
from flowrl.policies.learning.flat_parameters import FlatAdam, FlatParameters
from flowrl.policies.learning.gradients import clip_gradient, take_gradient
from flowrl.policies.models.base import ModelV2
from flowrl.policies.models.catalog import make_model
from flowrl.policies.models.module_model import ModuleModel
from flowrl.policies.models.tensor_batch import TensorBatch
from flowrl.policies.policy import Policy
from flowrl.policies.schedules import value_at
from flowrl.policies.views import find_mismatch
from flowrl.seeding import random_stream, restore_stream, stream_state
from flowrl.settings import ConfigError

T = TypeVar("T")

__all__ = ["TensorBatch", "TorchPolicy", "TrackedBatch"]

# Small networks lose more to the hand-over between threads than they win, and the workers of one
# machine share its cores.
torch.set_num_threads(1)


class TrackedBatch(SampleBatch):
    """A batch that notes which of its columns are read."""

    read: set[str]

    def __init__(self, batch: SampleBatch):
        dict.__init__(self, batch.stored())
        vars(self).update(vars(batch))
        self._rows_there = batch.count
        self.read = set()

    @property
    def count(self) -> int:
        return self._rows_there

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        if isinstance(key, str):
            self.read.add(key)
        return super().__contains__(key)

    def stored(self) -> Any:
        """All columns: they count as read."""
        self.read |= set(dict.keys(self))
        return super().stored()


class TorchPolicy(Policy):
    """A policy with a torch model and a loss.

    A subclass writes `loss`. In it `self.model.from_batch(batch)` gives distribution inputs (and
    states), `self.model.value_function()` the values, `self.dist_class` interprets the former, and
    `self.stats` takes what to report.
    """

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space, config: Any):
        super().__init__(observation_space, action_space, config)
        self.device = self._find_device()
        self.dist_class = self.make_distribution()
        self.model = self.new_model()
        self._torch_draws = any("Dropout" in type(m).__name__ for m in self.model.modules())
        # what the model declares is the policy's, and the other way round; burn-in begins anywhere,
        # so then the states of all rows are kept
        config = self.config.model
        states = self.recurrent_views(1 if config.burn_in else config.max_seq_len)
        self.view_requirements |= {**states, **self.model.view_requirements}
        self.model.view_requirements = self.view_requirements
        self.exploration = self.make_exploration()
        self.flat = FlatParameters(self.model)
        self._linked = self.model
        self._buffers = list(self.model.buffers())
        self.model.bind_numpy_views()
        # apart from the stream of minibatches, which those who learn together draw alike
        self.learn_rng = random_stream(self.config.seed, "policy", "learning")
        made = self.make_optimizer()
        self.optimizers: list[Any] = list(made) if isinstance(made, (list, tuple)) else [made]
        odd = [o for o in self.optimizers if not hasattr(o, "param_groups")]
        if odd or not self.optimizers:
            raise ConfigError(f"make_optimizer: an optimizer, or several, are needed, got {made!r}")
        self.groups = [self._parameters_of(optimizer) for optimizer in self.optimizers]
        owners = [id(p) for group in self.groups for p in group]
        if len(set(owners)) < len(owners):
            raise ConfigError(f"{type(self).__name__}: two optimizers have the same parameters")
        self._rates = [[group["lr"] for group in o.param_groups] for o in self.optimizers]
        if self.config.compile:
            self.model.compile_for_learning()
        self.group: Any = (
            None  # a flowrl.learners.process_group.Group of the processes that learn with this one
        )
        self.stats: dict[str, torch.Tensor | float] = {}
        self.num_skipped_updates = 0
        self.noted: list[dict[str, np.ndarray]] = []  # of rows, in the pass that was last begun
        self._learned: list[dict[str, np.ndarray]] | None = None  # by updates of the minibatches

    def new_model(self) -> ModelV2:
        """A network as `make_model` makes it, where the policy is."""
        model: Any = self.make_model()
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"make_model: a torch.nn.Module is needed, got {model!r}")
        if not isinstance(model, ModelV2):
            size = self.dist_class.num_inputs(self.action_space)
            given = self.observation_space, self.action_space, size, self.config.model
            model = ModuleModel(model, *given)
        made: ModelV2 = model.to(self.device)
        return made

    def _find_device(self) -> torch.device:
        wanted = self.config.device
        if wanted == "auto":
            wanted = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            device = torch.device(wanted)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(f"device: {wanted!r} is not there: {error}") from error
        return device

    def _parameters_of(self, optimizer: Any) -> list[torch.Tensor]:
        groups = optimizer.param_groups
        own = [p for group in groups for p in group.get("params", ())]
        if not own or any(p is self.flat.vector for p in own):
            return list(self.flat.parameters)
        known = {id(p) for p in self.flat.parameters}
        if not all(id(p) in known for p in own):
            raise ConfigError("an optimizer has parameters that are not the model's")
        return own

    @property
    def optimizer(self) -> Any:
        """The optimizer; the first one of several."""
        return self.optimizers[0]

    # -- parts that a subclass may replace -------------------------------------------------------

    def make_distribution(self) -> type[ActionDistribution]:
        """The action distribution for the action space."""
        return distribution_for(self.action_space)

    def make_model(self) -> torch.nn.Module:
        """The network: a ModelV2, or any module that gives (distribution inputs, values).

        One that wants to see more of the trajectory sets `view_requirements` in its constructor.
        """
        return self.network(self.config.model)

    def network(self, config: ModelConfig, num_outputs: int | None = None, **more: Any) -> ModelV2:
        """The network that the catalog has for these settings; its first weights follow the
        policy's seed.

        Args:
            config: the settings.
            num_outputs: None: as many as the action distribution has inputs.
            more: for the catalog.
        """
        gaussian = issubclass(self.dist_class, DiagGaussian)
        if num_outputs is None:
            num_outputs = self.dist_class.num_inputs(self.action_space)
        return make_model(
            self.observation_space,
            self.action_space,
            num_outputs,
            config,
            free_log_std=gaussian and config.free_log_std,
            rng=random_stream(self.config.seed, "policy", "weights"),
            **more,
        )

    def make_exploration(self) -> Exploration:
        """How actions are taken while sampling."""
        config = self.config
        return Exploration(
            config.exploration_config, self.action_space, self.dist_class, config.normalize_actions
        )

    def make_optimizer(self) -> Any:
        """The optimizer, or several (then `loss` gives as many).

        By default one of `self.flat.vector`, all parameters in one vector. torch.optim's work, too,
        of that vector or of parameters of `self.model`: their learning rates follow the schedule
        `lr`, if they began with its first value, and their states are saved. (They are not the
        default because importing torch.optim's machinery takes as long as importing torch.)
        """
        return FlatAdam(self.flat, lr=value_at(self.config.lr, 0), eps=self.config.adam_epsilon)

    def loss(self, batch: TensorBatch) -> torch.Tensor | Sequence[torch.Tensor]:
        """The scalar to be made smaller, from columns [B, …] as tensors; a list of as many as there
        are optimizers, each for the parameters of its own."""
        raise NotImplementedError(f"{type(self).__name__} has no loss(batch): write one to learn")

    def gradient_by_hand(self, batch: TensorBatch) -> float | None:
        """The loss, with its gradient put into `self.flat.gradient`, for those whose derivative is
        written out; None where autograd is to find it from `loss`."""
        return None

    @property
    def dist_inputs(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """From the model's outputs [B, …] to what the best actions are found from."""
        return _unchanged

    def extra_action_out(
        self, input_dict: dict[str, Any], states: list[np.ndarray], outputs: np.ndarray
    ) -> dict[str, np.ndarray]:
        """More columns [B, …] to be recorded with the actions."""
        return {}

    def extra_grad_process(self) -> dict[str, torch.Tensor]:
        """Called before gradients are clipped, with them in `self.flat.gradient`; statistics."""
        return {}

    # -- acting --------------------------------------------------------------------------------

    def get_initial_state(self) -> list[np.ndarray]:
        return self.model.get_initial_state()

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
        if len(input_dict) == 1 and "obs" in input_dict:  # the way of a subclass, if it has one
            return self.compute_actions(input_dict["obs"], explore=explore)
        return self._act(input_dict, explore)

    def _act(
        self, input_dict: dict[str, Any], explore: bool
    ) -> tuple[Any, list[np.ndarray], dict[str, np.ndarray]]:
        outputs, values, states = self._computed(self.model.compute_outputs, input_dict)
        actions, logp = self.exploration.act(outputs, self, explore)
        extra = {"action_logp": logp, "action_dist_inputs": outputs}
        if values is not None:
            extra["vf_preds"] = values
        if type(self).extra_action_out is not TorchPolicy.extra_action_out:
            extra |= self.extra_action_out(input_dict, states, outputs)
        return actions, states, extra

    def _computed(self, compute: Callable[[Any], T], input_dict: dict[str, Any]) -> T:
        """compute(input_dict). If it fails, the inputs are looked at: that costs nothing where they
        are right."""
        try:
            return compute(input_dict)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            problem = self._misfit(input_dict)
            if problem is None or isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{type(self).__name__} cannot act on this: {problem}") from error

    def _misfit(self, input_dict: dict[str, Any]) -> str | None:
        """What is wrong with the views of a step, in words; None if nothing is found."""
        wanted = {n: v for n, v in self.view_requirements.items() if v.known_for_actions(n)}
        missing = sorted(set(wanted) - set(input_dict))
        if missing:
            return f"the view {missing[0]!r} is missing, there is only {sorted(input_dict)}"
        problems = [
            find_mismatch(view.space, input_dict[name], name)
            for name, view in wanted.items()
            if view.space is not None and not view.is_window
        ]
        for i, initial in enumerate(self.get_initial_state()):
            state = spaces.Box(-np.inf, np.inf, initial.shape, np.float32)
            problems.append(find_mismatch(state, input_dict.get(f"state_in_{i}"), f"state_in_{i}"))
        found = next((problem for problem in problems if problem), None)
        if found is None:
            seen: dict[str, Any] = {name: optree.tree_leaves(input_dict[name]) for name in wanted}
            rows = {name: sorted({len(leaf) for leaf in leaves}) for name, leaves in seen.items()}
            if len({count for counts in rows.values() for count in counts}) > 1:
                return f"arrays of different numbers of rows: {rows}"
        return found

    def compute_values(self, obs_batch: Any) -> np.ndarray | None:
        return self.model.compute_values({"obs": obs_batch})

    def compute_values_from_input_dict(self, input_dict: dict[str, Any]) -> np.ndarray | None:
        if len(input_dict) == 1:
            return self.compute_values(input_dict["obs"])
        return self.model.compute_values(input_dict)

    def compute_log_likelihoods(
        self, actions: Any, obs_batch: Any = None, input_dict: dict[str, Any] | None = None
    ) -> np.ndarray:
        """Log-probabilities [B] of actions [B, …] as the policy gives them (before they are
        stretched to the environment's bounds).

        Args:
            actions: arrays of the action space's structure.
            obs_batch: observations [B, …] as the sampler stores them.
            input_dict: instead, every view that the model wants, [B, …] each.
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
        """Refuse actions that are not `count` ones as the policy gives them."""
        problem = find_mismatch(self.action_space, actions, "actions")
        if problem is not None:
            raise ValueError(problem)
        leaves: Any = optree.tree_leaves(actions)
        counts = sorted({len(leaf) for leaf in leaves})
        if counts != [count]:
            raise ValueError(f"{counts} actions for {count} observations")

    # -- learning ------------------------------------------------------------------------------

    def tensors(self, batch: SampleBatch) -> TensorBatch:
        """The batch as `loss` is given it."""
        return TensorBatch(batch, self.device)

    def prepared(self, batch: SampleBatch) -> SampleBatch:
        """The batch as it is cut into minibatches: without padding, with the burn-in of its
        sequences."""
        burn_in = self.config.model.burn_in
        batch = batch.without_padding()
        if not burn_in or not self.is_recurrent or "loss_mask" in batch:
            return batch
        return with_burn_in(batch, self.config.model.max_seq_len, burn_in)

    def columns_read(self, batch: SampleBatch) -> set[str] | None:
        """What the loss and the hooks after a pass read, found by calling them once."""
        tracked = TrackedBatch(batch)
        group, self.group = self.group, None
        state, torch_rng = self.get_state(), torch.get_rng_state()
        buffers = [(buffer, buffer.clone()) for buffer in self._buffers]
        try:
            if self.config.model.burn_in:
                return None
            self.loss(self.tensors(tracked))
            self.end_epoch(tracked, {})
            self.end_learning(tracked, {})
        except Exception:
            return None  # learning from it will tell; until then everything is shipped
        finally:
            self.group = group
            self.set_state(state)
            torch.set_rng_state(torch_rng)
            _put_back(buffers)
            self.stats = {}
        return tracked.read

    def note_rows(self, batch: TensorBatch, **values: np.ndarray) -> None:
        """For `loss`: what is to be told of the rows of a batch that was drawn from a buffer,
        arrays [rows], such as `td_error`. See `row_stats`."""
        if "batch_indexes" in batch:
            self.noted.append({"batch_indexes": batch.array("batch_indexes"), **values})

    def learn_on_minibatches(
        self, batch: SampleBatch, num_sgd_iter: int = 1, sgd_minibatch_size: int = 0
    ) -> dict[str, float]:
        skipped = self.num_skipped_updates
        learned = self._learned = []
        try:
            batch = self.prepared(batch)
            stats = super().learn_on_minibatches(batch, num_sgd_iter, sgd_minibatch_size)
        finally:
            self._learned = None
        self.row_stats = _joined(learned)
        stats["cur_lr"] = float(self.optimizer.param_groups[0]["lr"])
        if self.config.on_nonfinite_update == "skip":
            stats["num_skipped_updates"] = float(self.num_skipped_updates - skipped)
        return stats

    def learn_on_batch(self, batch: SampleBatch) -> dict[str, float]:
        """One gradient step.

        Raises:
            FloatingPointError: the loss or its gradient is not finite; the weights are unchanged.
        """
        return self._unless_odd(batch, self._learn)

    def _minibatches(self, batch: SampleBatch, size: int) -> Iterator[Any]:
        parts = super()._minibatches(batch, size)
        return parts if self.group is None or self.group.shares else self.group.padded(parts)

    def share_of(self, batch: SampleBatch, rank: int, size: int) -> SampleBatch | None:
        """What one of several learners learns from: as many rows as the others have, or whole
        sequences; None where there are too few for all."""
        if "seq_lens" in batch:
            parts = _split_sequences(batch, size)
            return parts[rank]
        begin, end = (batch.count * number // size for number in (rank, rank + 1))
        return batch[begin:end] if end > begin else None

    def agreed(self, value: float | None) -> float | None:
        """A number that all processes that learn together must have alike: the mean of theirs, of
        those that have one."""
        if self.group is None:
            return value
        told: float | None = self.group.mean(value)
        return told

    def std_mean(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Standard deviation and mean of a column [B], over all processes that learn together."""
        return torch.std_mean(values) if self.group is None else self.group.std_mean(values)

    def _learn(self, batch: SampleBatch | None) -> dict[str, float]:
        self._check_links()
        if self.group is None:
            assert batch is not None
            stats = take_gradient(self, batch)
        else:
            stats = self._averaged_gradient(batch, self.group)
        self._step(stats["grad_norm"])
        if len(stats) == 1:
            return {}  # without rows there is nothing to tell
        if self._learned is None:
            self.row_stats = _joined(self.noted)
        else:
            self._learned += self.noted
        return stats

    def _averaged_gradient(self, batch: SampleBatch | None, group: Any) -> dict[str, float]:
        """Put the gradient over all processes' rows into `flat.gradient`; statistics of one's own.
        One without rows adds none."""
        if group.shares and batch is not None:
            batch = self.share_of(batch, group.rank, group.size)
        stats: dict[str, float] = {}
        self.flat.gradient.zero_()
        if batch is None:
            self.without_rows()
        else:
            try:
                stats = take_gradient(self, batch)
            except FloatingPointError:  # so that it shows everywhere
                self.flat.gradient.fill_(torch.nan)
        group.average(self.flat.gradient, 0 if batch is None else batch.count)
        norm = float(torch.linalg.vector_norm(self.flat.gradient))
        if not np.isfinite(norm):
            raise FloatingPointError(
                f"the gradient of {type(self).__name__} over {group.size} processes is not finite: "
                "the update was refused and the weights are unchanged"
            )
        return {**stats, "grad_norm": norm}

    def without_rows(self) -> None:
        """Take part in what the processes that learn together work out in `loss`."""

    def _unless_odd(
        self, batch: SampleBatch, learn: Callable[[SampleBatch], dict[str, float]]
    ) -> dict[str, float]:
        """An update, refused or left out if it is not finite; then nothing has changed."""
        buffers = [(buffer, buffer.clone()) for buffer in self._buffers]
        try:
            with self._seeded():
                return learn(self.prepared(batch) if batch is not None else batch)
        except FloatingPointError:
            _put_back(buffers)
            if self.config.on_nonfinite_update == "raise":
                raise
            self.num_skipped_updates += 1
            return {}

    @contextlib.contextmanager
    def _seeded(self) -> Iterator[None]:
        """What torch draws in here, for dropout, follows the policy's seed."""
        if not self._torch_draws:
            yield
            return
        with torch.random.fork_rng():
            torch.manual_seed(int(self.shuffle_rng.integers(2**63)))
            yield

    def _check_links(self) -> None:
        """Refuse to learn where nothing would come of it."""
        if self.flat.is_intact() and self._linked is self.model:
            return
        raise ConfigError(
            f"{type(self).__name__}: the model or the memory of its parameters was replaced after "
            "the policy was made, so learning would not reach it: make the model, with its initial "
            "weights, in make_model(), or use set_weights()"
        )

    def _step(self, norm: float) -> None:
        clip_gradient(self, norm)
        for optimizer in self.optimizers:
            optimizer.step()
        self.version += 1

    def compute_gradients(self, batch: SampleBatch) -> tuple[np.ndarray, dict[str, float]]:
        """The gradient [parameters] of the loss on a batch, and statistics. Changes nothing."""
        buffers = [(buffer, buffer.clone()) for buffer in self._buffers]
        try:
            with self._seeded():
                self._check_links()
                stats = take_gradient(self, self.prepared(batch))
        except FloatingPointError:
            if self.config.on_nonfinite_update == "raise":
                raise
            stats = {}
            self.flat.gradient.fill_(torch.nan)  # which apply_gradients leaves out
        finally:
            _put_back(buffers)
        self.row_stats = _joined(self.noted)
        return self.flat.gradient.cpu().numpy().copy(), stats

    def apply_gradients(self, gradients: np.ndarray) -> None:
        """One optimizer step with a gradient that `compute_gradients` gave.

        Raises:
            FloatingPointError: it is not finite; the weights are unchanged.
        """
        if gradients.shape != tuple(self.flat.gradient.shape):
            raise ValueError(
                f"a gradient of shape {gradients.shape} for {len(self.flat.gradient)} parameters"
            )
        norm = float(np.linalg.norm(gradients))
        if not np.isfinite(norm):
            if self.config.on_nonfinite_update == "raise":
                raise FloatingPointError("a gradient that is not finite: the weights are unchanged")
            self.num_skipped_updates += 1
            return
        self.flat.gradient.copy_(torch.from_numpy(np.array(gradients)))
        self._step(norm)

    def on_global_var_update(self, global_vars: dict[str, Any]) -> None:
        super().on_global_var_update(global_vars)
        self._follow_schedule()

    def _follow_schedule(self) -> None:
        first, now = value_at(self.config.lr, 0), value_at(self.config.lr, self.timestep)
        for optimizer, rates in zip(self.optimizers, self._rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                if rate == first:  # another one is the optimizer's own
                    group["lr"] = now

    # -- elsewhere -----------------------------------------------------------------------------

    def export(self, path: Path | str, format: str | None = None) -> Path:
        """Write the acting part, best actions and all normalisation, to a file without flowrl.

        The program takes a dict of the views that the policy acts on, [B, …] each: `obs` (raw),
        and of one that remembers `state_in_0`, …; zeros at an episode's start. It gives a dict of
        `actions` as the environment takes them, and `state_out_0`, …; where a view shows earlier
        actions also `policy_actions`, which are those that it is to show.

        Args:
            path: of the file.
            format: "torch" (a torch.export program: `torch.export.load(path).module()`) or "onnx"
                (its inputs and outputs have the same names, leaves of nested ones `obs.key`; needs
                the extra `onnx`). None: by the file's ending, `.onnx` or any other.

        Raises:
            ConfigError: another format; the extra is missing; a view that only flowrl can show.
        """
        from flowrl.policies.export import export_policy

        return export_policy(self, TorchPolicy, path, format)

    # -- state ---------------------------------------------------------------------------------

    def _tensors_by_name(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers."""
        own: dict[str, torch.Tensor] = dict(zip(self.flat.names, self.flat.parameters, strict=True))
        saved = self.model.state_dict()
        own |= {name: b for name, b in self.model.named_buffers() if name in saved}
        return own

    def get_weights(self) -> dict[str, np.ndarray]:
        return {n: t.detach().cpu().numpy().copy() for n, t in self._tensors_by_name().items()}

    def __reduce__(self) -> Any:
        # a copy is made anew: memory that is shared within the policy must be shared within it
        views = dict(self.view_requirements)
        given = self.observation_space, self.action_space, self.config
        return _remade, (type(self), *given, self.get_state(), views)

    def set_weights(self, weights: dict[str, np.ndarray]) -> None:
        """Take over weights.

        Raises:
            ValueError: names or shapes are not this network's; nothing is changed.
        """
        self._check_links()
        own = self._tensors_by_name()
        wrong = {name: (None if name not in weights else np.shape(weights[name])) for name in own}
        wrong = {n: s for n, s in wrong.items() if s != tuple(own[n].shape)}
        extra = sorted(set(weights) - set(own))
        if wrong or extra:
            lines = [f"{n}: has {tuple(own[n].shape)}, got {s}" for n, s in wrong.items()]
            raise ValueError(
                "these weights are of another network: "
                + "; ".join(lines + [f"{name}: unknown" for name in extra])
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(torch.from_numpy(np.array(weights[name])))
        self.version += 1

    def get_state(self) -> dict[str, Any]:
        state = super().get_state()
        states = [optimizer.state_dict()["state"] for optimizer in self.optimizers]
        state["optimizer"] = {
            f"{i}.{index}" if i else str(index): {
                k: v.cpu().numpy().copy() if isinstance(v, torch.Tensor) else v
                for k, v in slot.items()
            }
            for i, slots in enumerate(states)
            for index, slot in slots.items()
        }
        state["rates"] = [[group["lr"] for group in o.param_groups] for o in self.optimizers]
        state["num_skipped_updates"] = self.num_skipped_updates
        state["learn_rng"] = stream_state(self.learn_rng)
        state["exploration"] = self.exploration.state_dict()
        return state

    def get_acting_state(self) -> dict[str, Any]:
        return {**super().get_acting_state(), "exploration": self.exploration.state_dict()}

    def set_acting_state(self, state: dict[str, Any]) -> None:
        super().set_acting_state(state)
        self.exploration.load_state_dict(state["exploration"])

    def set_state(self, state: dict[str, Any]) -> None:
        before = self.get_state()
        try:
            self._take_state(state)
        except Exception:
            self._take_state(before)  # a state that does not fit changes nothing
            raise

    def _take_state(self, state: dict[str, Any]) -> None:
        missing = [part for part in ("optimizer", "learn_rng") if part not in state]
        if missing:
            raise ValueError(f"the state of a {type(self).__name__} without {', '.join(missing)}")
        super().set_state(state)
        for i, optimizer in enumerate(self.optimizers):
            whole = optimizer.state_dict()
            whole["state"] = {}
            for key, slot in state["optimizer"].items():
                number, _, index = key.rpartition(".")
                if int(number or 0) == i:
                    whole["state"][int(index)] = {
                        k: torch.from_numpy(np.array(v)) if isinstance(v, np.ndarray) else v
                        for k, v in slot.items()
                    }
            try:
                optimizer.load_state_dict(whole)
            except (KeyError, TypeError, RuntimeError) as error:
                kind = type(optimizer).__name__
                raise ValueError(f"the state is not of optimizer {i}, a {kind}: {error}") from error
        for optimizer, rates in zip(self.optimizers, state.get("rates", self._rates), strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        self._follow_schedule()
        self.num_skipped_updates = int(state.get("num_skipped_updates", 0))
        self.exploration.load_state_dict(state.get("exploration", {}))
        restore_stream(self.learn_rng, state["learn_rng"])


def _unchanged(outputs: torch.Tensor) -> torch.Tensor:
    return outputs


def _remade(
    cls: type[TorchPolicy],
    observation_space: spaces.Space,
    action_space: spaces.Space,
    config: Any,
    state: dict[str, Any],
    views: dict[str, Any],
) -> TorchPolicy:
    policy = cls(observation_space, action_space, config)
    policy.set_state(state)
    policy.view_requirements.clear()
    policy.view_requirements.update(views)
    return policy


def _joined(noted: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    if len(noted) < 2:
        return dict(noted[0]) if noted else {}
    return {name: np.concatenate([one[name] for one in noted]) for name in noted[0]}


def _split_sequences(batch: SampleBatch, size: int) -> list[SampleBatch | None]:
    """Whole sequences for each of `size` learners, as many as the others have."""
    one_each = list(batch.sequence_minibatches(1, shuffle=False))
    cuts = [len(one_each) * number // size for number in range(size + 1)]
    parts = [one_each[begin:end] for begin, end in itertools.pairwise(cuts)]
    return [SampleBatch.concat_samples(own) if own else None for own in parts]


def _put_back(buffers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for buffer, before in buffers:
        buffer.copy_(before)
