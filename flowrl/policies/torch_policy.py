"""TorchPolicy: write `loss(batch)`; acting, gradients, weights and state come with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from flowrl.data import SampleBatch
from flowrl.policies.distributions import ActionDistribution, distribution_for
from flowrl.policies.flat import FlatAdam, FlatParameters
from flowrl.policies.models import FullyConnectedNetwork
from flowrl.policies.policy import Policy
from flowrl.policies.schedules import value_at
from flowrl.seeding import random_stream

# Small networks lose more to the hand-over between threads than they win, and the workers of one
# machine share its cores.
torch.set_num_threads(1)


class TensorBatch(dict[str, torch.Tensor]):
    """Columns of a SampleBatch as tensors that share its memory, made when first read."""

    def __init__(self, batch: SampleBatch):
        super().__init__()
        self._batch = batch

    def __missing__(self, key: str) -> torch.Tensor:
        column = self._batch[key]
        if not column.flags.writeable:
            column = column.copy()  # torch has no read-only tensors (batches from Ray are)
        tensor = self[key] = torch.from_numpy(column)
        return tensor


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

    A subclass writes `loss`. In it `self.model(batch["obs"])` gives distribution inputs and
    values, `self.dist_class` interprets the former, and `self.stats` takes what to report.
    """

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space, config: Any):
        super().__init__(observation_space, action_space, config)
        self.dist_class = self.make_distribution()
        self.model = self.make_model()
        # what the model declares is the policy's, and the other way round
        self.view_requirements |= getattr(self.model, "view_requirements", {})
        self.model.view_requirements = self.view_requirements
        self.flat = FlatParameters(self.model)
        self.model.link()
        self.optimizer = self.make_optimizer()
        self.stats: dict[str, torch.Tensor] = {}

    # -- parts that a subclass may replace -------------------------------------------------------

    def make_distribution(self) -> type[ActionDistribution]:
        """The action distribution for the action space."""
        return distribution_for(self.action_space)

    def make_model(self) -> FullyConnectedNetwork:
        """The network: observations [B, …] -> (distribution inputs [B, k], values [B]).

        One that wants to see more of the trajectory sets `view_requirements` in its constructor.
        """
        continuous = isinstance(self.action_space, spaces.Box)
        return FullyConnectedNetwork(
            self.observation_space,
            self.dist_class.num_inputs(self.action_space),
            self.config.model,
            free_log_std=continuous and self.config.model.free_log_std,
            rng=random_stream(self.config.seed, "policy", "weights"),
        )

    def make_optimizer(self) -> Any:
        """The optimizer of `self.flat.vector`, all parameters in one vector.

        A torch optimizer works, too: its learning rate follows the schedule and its state is
        saved. (It is not the default because importing torch.optim's machinery takes as long as
        importing torch.)
        """
        return FlatAdam(self.flat, lr=value_at(self.config.lr, 0), eps=self.config.adam_epsilon)

    def loss(self, batch: TensorBatch) -> torch.Tensor:
        """The scalar to be made smaller, from columns [B, …] as tensors."""
        raise NotImplementedError(f"{type(self).__name__} has no loss(batch): write one to learn")

    # -- acting --------------------------------------------------------------------------------

    def compute_actions(
        self, obs_batch: np.ndarray, explore: bool = True
    ) -> tuple[np.ndarray, list[np.ndarray], dict[str, np.ndarray]]:
        inputs, values = self._forward(obs_batch)
        actions, logp = self.dist_class.act(inputs, self.rng, explore)
        extra = {"action_logp": logp, "action_dist_inputs": inputs, "vf_preds": values}
        return actions, [], extra

    def compute_values(self, obs_batch: np.ndarray) -> np.ndarray:
        if self.model.has_numpy:
            return self.model.values_numpy(obs_batch)
        return self._forward(obs_batch)[1]

    def _forward(self, obs_batch: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self.model.has_numpy:
            return self.model.forward_numpy(obs_batch)
        with torch.inference_mode():
            inputs, values = self.model(torch.from_numpy(np.ascontiguousarray(obs_batch)))
            return inputs.numpy(), values.numpy()

    # -- learning ------------------------------------------------------------------------------

    def columns_read(self, batch: SampleBatch) -> set[str] | None:
        """What the loss and the hooks after a pass read, found by calling them once."""
        tracked = TrackedBatch(batch)
        state, torch_rng = self.get_state(), torch.get_rng_state()
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        try:
            self.loss(TensorBatch(tracked))
            self.end_epoch(tracked, {})
            self.end_learning(tracked, {})
        except Exception:
            return None  # learning from it will tell; until then everything is shipped
        finally:
            self.set_state(state)
            torch.set_rng_state(torch_rng)
            for buffer, before in zip(self.model.buffers(), buffers, strict=True):
                buffer.copy_(before)
            self.stats = {}
        return tracked.read

    def learn_on_batch(self, batch: SampleBatch) -> dict[str, float]:
        """One gradient step.

        Raises:
            FloatingPointError: the loss or its gradient is not finite; the weights are unchanged.
        """
        stats = self._gradients(batch)
        self._step(stats["grad_norm"])
        return stats

    def _gradients(self, batch: SampleBatch) -> dict[str, float]:
        self.stats = {}
        loss = self.loss(TensorBatch(batch))
        self.flat.take_gradient(loss)
        norm = torch.linalg.vector_norm(self.flat.gradient)
        named = {"total_loss": loss.detach(), **self.stats, "grad_norm": norm}
        values = torch.stack([value.detach() for value in named.values()]).tolist()
        stats = dict(zip(named, values, strict=True))
        if not np.isfinite(stats["grad_norm"]):
            odd = [name for name, value in stats.items() if not np.isfinite(value)]
            columns = [
                name
                for name, column in batch.items()
                if column.dtype.kind == "f" and not np.isfinite(column).all()
            ]
            cause = f" (not finite in it: {', '.join(columns)})" if columns else ""
            raise FloatingPointError(
                f"{', '.join(odd)} of {type(self).__name__} not finite on a batch of "
                f"{batch.count} rows{cause}: the update was refused and the weights are unchanged"
            )
        return stats

    def _step(self, norm: float) -> None:
        clip = self.config.grad_clip
        if clip is not None and norm > clip:
            self.flat.gradient.mul_(clip / norm)
        self.optimizer.step()
        self.version += 1

    def compute_gradients(self, batch: SampleBatch) -> tuple[np.ndarray, dict[str, float]]:
        """The gradient [parameters] of the loss on a batch, and statistics. Changes nothing."""
        stats = self._gradients(batch)
        return self.flat.gradient.numpy().copy(), stats

    def apply_gradients(self, gradients: np.ndarray) -> None:
        """One optimizer step with a gradient that `compute_gradients` gave."""
        if gradients.shape != tuple(self.flat.gradient.shape):
            raise ValueError(
                f"a gradient of shape {gradients.shape} for {len(self.flat.gradient)} parameters"
            )
        self.flat.gradient.copy_(torch.from_numpy(np.asarray(gradients)))
        self._step(float(np.linalg.norm(gradients)))

    def on_global_var_update(self, global_vars: dict[str, Any]) -> None:
        super().on_global_var_update(global_vars)
        for group in self.optimizer.param_groups:
            group["lr"] = value_at(self.config.lr, self.timestep)

    # -- state ---------------------------------------------------------------------------------

    def get_weights(self) -> dict[str, np.ndarray]:
        return {
            name: parameter.detach().numpy().copy()
            for name, parameter in zip(self.flat.names, self.flat.parameters, strict=True)
        }

    def set_weights(self, weights: dict[str, np.ndarray]) -> None:
        """Take over weights.

        Raises:
            ValueError: names or shapes are not this network's; nothing is changed.
        """
        own = dict(zip(self.flat.names, self.flat.parameters, strict=True))
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
            for name, parameter in own.items():
                parameter.copy_(torch.from_numpy(np.array(weights[name])))
        self.version += 1

    def get_state(self) -> dict[str, Any]:
        state = super().get_state()
        optimizer = self.optimizer.state_dict()
        state["optimizer"] = {
            str(index): {k: v.numpy().copy() for k, v in slot.items()}
            for index, slot in optimizer["state"].items()
        }
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        optimizer = self.optimizer.state_dict()
        optimizer["state"] = {
            int(index): {k: torch.from_numpy(np.array(v)) for k, v in slot.items()}
            for index, slot in state["optimizer"].items()
        }
        self.optimizer.load_state_dict(optimizer)
