"""DQN: deep Q-learning (Mnih et al. 2015), double (van Hasselt et al. 2016, arXiv 1509.06461),
dueling (Wang et al. 2016, arXiv 1511.06581), with steps and priorities as the buffer has them;
distributional (Bellemare et al. 2017, arXiv 1707.06887) and noisy (Fortunato et al. 2018, arXiv
1706.10295). With all of these it is Rainbow (Hessel et al. 2018, arXiv 1710.02298)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, Self, TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from pydantic import Field, FiniteFloat, model_validator

from flowrl.algorithms.algorithm import Algorithm
from flowrl.algorithms.off_policy import OffPolicyConfig
from flowrl.policies.atoms import Atoms
from flowrl.policies.config import (
    ConfigError,
    Count,
    ExplorationConfig,
    Fraction,
    Positive,
    Schedule,
)
from flowrl.policies.exploration import FORBIDDEN, Exploration
from flowrl.policies.models.backprop import Backprop
from flowrl.policies.models.base import Inputs, ModelV2
from flowrl.policies.models.fcnet import FullyConnectedNetwork, is_quick
from flowrl.policies.models.noisy import draw_noise, make_noisy
from flowrl.policies.target import TargetNetwork
from flowrl.policies.torch_policy import TensorBatch


class DQNConfig(OffPolicyConfig):
    """Settings of DQN."""

    algorithm: ClassVar[str] = "flowrl.algorithms.dqn:DQN"

    plan: str | None = "dqn"
    lr: Schedule = 5e-4
    grad_clip: Positive | None = 10.0
    double_q: bool = True
    """The online network chooses the next action, the target network says its value."""
    dueling: bool = True
    """Values are a state's value plus the actions' advantages over their mean."""
    num_atoms: Count = 1
    """Values that a return can have: above 1 their distribution is learned, by its cross-entropy
    (C51 has 51), and priorities are Kullback-Leibler divergences."""
    v_min: FiniteFloat = -10.0
    """The least of those: no discounted return should be below."""
    v_max: FiniteFloat = 10.0
    """The largest of those."""
    noisy: bool = False
    """Linear layers with learned noise, which explores: unless an exploration_config is given,
    nothing else does. With explore=False there is none."""
    sigma0: Positive = 0.5
    """How strong the noise is at first."""
    prioritized_replay: bool = True
    target_network_update_freq: int = Field(default=500, ge=0)
    """Env steps sampled between updates of the target network; 0 is after every train batch. For
    hard updates tau is 1."""
    tau: Fraction = 1.0
    """How far each update of the target network goes: 1 copies the online network (hard updates),
    0.01 after every train batch follows it softly."""
    exploration_config: ExplorationConfig = ExplorationConfig(type="EpsilonGreedy")

    @model_validator(mode="after")
    def _distribution(self) -> Self:
        if not self.v_min < self.v_max:
            raise ValueError(f"v_min={self.v_min} is not below v_max={self.v_max}")
        needs = {"v_min": self.num_atoms > 1, "v_max": self.num_atoms > 1, "sigma0": self.noisy}
        for name, used in needs.items():
            if not used and getattr(self, name) != type(self).model_fields[name].default:
                of = "noisy=True" if name == "sigma0" else "num_atoms above 1"
                raise ValueError(f"{name} needs {of}")
        if self.num_atoms > 1 and self.model.vf_share_layers is False:
            raise ValueError(
                "vf_share_layers=False: with num_atoms above 1 the state's distribution and those "
                "of the actions come from one network"
            )
        return self


class DQNTorchPolicy(TargetNetwork):
    """A policy that acts by the values of actions and learns them by temporal differences.

    Attributes:
        target_model: the network that says the values of what follows.
        row_stats: has `td_error` [rows].
    """

    config_class = DQNConfig
    config: DQNConfig

    def __init__(self, observation_space: Any, action_space: Any, config: Any):
        if not isinstance(action_space, spaces.Discrete):
            raise ConfigError(f"DQN is for Discrete actions, not {action_space}")
        super().__init__(observation_space, action_space, config)
        self.check_views()
        self._backprop = Backprop(self.model) if self._can_backprop(self.model) else None

    def check_views(self) -> None:
        """Refuse networks that see what the loss does not give them."""
        others = set(self.model.view_requirements) - {"obs"}
        if others:
            raise ConfigError(f"DQN's network sees observations alone, not {sorted(others)}")

    @cached_property
    def atoms(self) -> Atoms | None:
        """What turns outputs into distributions; None where they are values themselves."""
        config = self.config
        if config.num_atoms == 1:
            return None
        actions = int(self.action_space.n)  # type: ignore[attr-defined]
        return Atoms(actions, config.num_atoms, config.v_min, config.v_max, config.dueling)

    def _can_backprop(self, model: ModelV2) -> TypeGuard[FullyConnectedNetwork]:
        """Whether the gradient can be had without autograd."""
        config = self.config
        own = type(self).loss is DQNTorchPolicy.loss  # not a subclass' one
        whole = len(self.groups[0]) == len(self.flat.parameters)  # one optimizer has them all
        plain = config.precision == "float32" and not config.compile
        return own and whole and plain and is_quick(model)

    def make_model(self) -> torch.nn.Module:
        """One network for values and advantages up to their heads, unless it is said otherwise."""
        config, atoms = self.config, self.atoms
        shared = config.model
        if shared.vf_share_layers is None:
            shared = shared.updated(vf_share_layers=True)
        if atoms is None:
            model = self.network(shared, by_numpy=not config.noisy)
        else:
            model = self.network(
                shared,
                atoms.num_outputs,
                outputs_per_action=atoms.num_atoms,
                by_numpy=not config.noisy,
            )
        if config.noisy:
            told = f"noisy: a {type(model).__name__} has no linear layers that can be replaced"
            if any(isinstance(part, FullyConnectedNetwork) for part in model.modules()):
                raise ConfigError(f"{told}: build a custom_model of torch.nn.Linear")
            if not make_noisy(model, config.sigma0):
                raise ConfigError(told)
        return model

    def make_exploration(self) -> Exploration:
        config = self.config
        if not config.noisy or "exploration_config" in config.model_fields_set:
            return super().make_exploration()
        still = ExplorationConfig(type="EpsilonGreedy", epsilon=0.0)  # the noise explores
        return Exploration(still, self.action_space, self.dist_class, config.normalize_actions)

    # -- acting ------------------------------------------------------------------------------------

    def _act(
        self, input_dict: dict[str, Any], explore: bool
    ) -> tuple[np.ndarray, list[np.ndarray], dict[str, np.ndarray]]:
        if self.config.noisy:
            draw_noise(self.model, self.rng if explore else None)
        values, states = self._computed(self._advantages, input_dict)
        return self.exploration.act_on_values(values, self, explore), states, {}

    def _advantages(self, input_dict: dict[str, Any]) -> tuple[np.ndarray, list[np.ndarray]]:
        """Values [B, n] but for what is the same for all actions of a state; states after it."""
        states: list[np.ndarray] = []
        if is_quick(self.model):
            outputs = self.model.outputs_numpy(input_dict["obs"])
        else:
            outputs, _, states = self.model.compute_outputs(input_dict)
        return outputs if self.atoms is None else self.atoms.values(outputs), states

    @property
    def dist_inputs(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """From the model's outputs to values of the actions, or what differs by the state alone."""
        return super().dist_inputs if self.atoms is None else self.atoms.values_of_tensors

    def compute_log_likelihoods(
        self, actions: Any, obs_batch: Any = None, input_dict: dict[str, Any] | None = None
    ) -> np.ndarray:
        """Of the greedy policy: 0 [B] for the best action, minus infinity for any other."""
        best, _, _ = self._act({"obs": obs_batch} if input_dict is None else input_dict, False)
        self._check_actions(actions, len(best))
        return np.where(actions == best, 0.0, -np.inf).astype(np.float32)

    # -- learning ----------------------------------------------------------------------------------

    def loss(self, batch: TensorBatch) -> torch.Tensor:
        """Huber loss of the TD errors, weighted by `weights` [B] where there are some.

        The target of double Q-learning (van Hasselt et al. 2016, equation 4) after k steps:
        R + gamma^k Q_target(s', argmax_a Q(s', a)), R alone where s' is terminal. With atoms it is
        the cross-entropy to their distribution, moved likewise (Bellemare et al. 2017).
        """
        if self.atoms is not None:
            return self._distributional_loss(batch, self.atoms)
        goals = self._targets(batch)
        targets = torch.from_numpy(goals).to(self.device)
        if self.config.noisy:
            draw_noise(self.model, self.learn_rng)
        outputs, _ = self.model.from_batch(batch)
        values = self._values(outputs, self.model)
        chosen = values.gather(1, batch["actions"].unsqueeze(1)).squeeze(1)
        self._note_errors(batch, chosen.detach().cpu().numpy(), goals)
        if "weights" not in batch:
            return F.smooth_l1_loss(chosen, targets)
        losses = F.smooth_l1_loss(chosen, targets, reduction="none")
        return (losses * batch["weights"]).mean()

    def gradient_by_hand(self, batch: TensorBatch) -> float | None:
        """The same loss and its derivative, where numpy computes the network: in a third of the
        time."""
        if self._backprop is None:
            return None
        if self.atoms is not None:
            return self._distributional_gradient(batch, self.atoms, self._backprop)
        goals = self._targets(batch)
        outputs, values = self._backprop.forward(batch.array("obs"))
        actions = np.arange(len(outputs)), batch.array("actions")
        dueling = self.config.dueling
        chosen = (_dueling_numpy(outputs, values) if dueling else outputs)[actions]
        errors = self._note_errors(batch, chosen, goals)
        slopes = np.clip(errors, -1.0, 1.0)  # of the Huber loss, which is s (e - s / 2) there
        share = np.float32(1.0 / len(errors))
        if "weights" in batch:
            share = share * batch.array("weights")
        loss = float((slopes * (errors - 0.5 * slopes) * share).sum())
        slopes *= share
        d_outputs = np.zeros_like(outputs)
        d_outputs[actions] = slopes
        if dueling:
            d_outputs -= (slopes / outputs.shape[1])[:, None]
        self.flat.gradient.zero_()
        self._backprop.backward(d_outputs, slopes if dueling else None)
        return loss

    def _distributional_loss(self, batch: TensorBatch, atoms: Atoms) -> torch.Tensor:
        goals = self._target_chances(batch, atoms)
        if self.config.noisy:
            draw_noise(self.model, self.learn_rng)
        outputs, _ = self.model.from_batch(batch)
        index = batch["actions"][:, None, None].expand(-1, 1, atoms.num_atoms)
        logp = atoms.logits(outputs).gather(1, index).squeeze(1).log_softmax(1)
        losses = -(torch.from_numpy(goals).to(self.device) * logp).sum(1)
        self._note_divergence(batch, losses.detach().cpu().numpy(), goals, logp, atoms)
        return (losses * batch["weights"]).mean() if "weights" in batch else losses.mean()

    def _distributional_gradient(
        self, batch: TensorBatch, atoms: Atoms, backprop: Backprop
    ) -> float:
        goals = self._target_chances(batch, atoms)
        outputs, _ = backprop.forward(batch.array("obs"))
        actions = batch.array("actions")
        logits = atoms.logits(outputs)[np.arange(len(actions)), actions]
        logits -= logits.max(1, keepdims=True)
        logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        losses = -(goals * logp).sum(1)
        self._note_divergence(batch, losses, goals, logp, atoms)
        share = np.full(len(actions), 1.0 / len(actions), np.float32)
        if "weights" in batch:
            share *= batch.array("weights")
        d_logits = (np.exp(logp) - goals) * share[:, None]
        self.flat.gradient.zero_()
        backprop.backward(atoms.gradient(d_logits, actions))
        return float((losses * share).sum())

    def _target_chances(self, batch: TensorBatch, atoms: Atoms) -> np.ndarray:
        """How likely the atoms of the batch's actions are to be, [B, atoms]."""
        following = self._outputs_at_new_obs(self.target_model, batch)
        chooser = following
        if self.config.double_q:
            chooser = self._outputs_at_new_obs(self.model, batch)
        best = atoms.values(chooser).argmax(1)
        discounts = np.where(batch.array("terminateds"), 0.0, self._discounts(batch))
        chances = atoms.chances(following, best)
        return atoms.projected(chances, batch.array("rewards"), discounts)

    def _note_divergence(
        self, batch: TensorBatch, losses: np.ndarray, goals: np.ndarray, logp: Any, atoms: Atoms
    ) -> None:
        """Tell how far distributions are from their goals [B], in nats: which is what is left of
        the cross-entropy when they are alike."""
        entropy = -(goals * np.log(np.maximum(goals, 1e-12))).sum(1)
        errors = np.maximum(losses - entropy, 0.0)
        self.note_rows(batch, td_error=errors)
        chances = np.exp(logp.detach().cpu().numpy() if isinstance(logp, torch.Tensor) else logp)
        count = max(len(errors), 1)
        self.stats["mean_q"] = float((chances @ atoms.support).sum()) / count
        self.stats["mean_td_error"] = float(errors.sum()) / count

    def _note_errors(self, batch: TensorBatch, chosen: np.ndarray, goals: np.ndarray) -> np.ndarray:
        """TD errors [B] of the values of the batch's actions, which are told."""
        errors = chosen - goals
        self.note_rows(batch, td_error=errors)
        count = max(len(errors), 1)
        self.stats["mean_q"] = float(chosen.sum()) / count
        self.stats["mean_td_error"] = float(errors.sum()) / count
        return errors

    def _targets(self, batch: TensorBatch) -> np.ndarray:
        """What the values of the batch's actions are to be, [B]."""
        following = self._values_of(self.target_model, batch)
        if self.config.double_q:
            best = self._values_of(self.model, batch).argmax(1)
            reached = np.take_along_axis(following, best[:, None], 1)[:, 0]
        else:
            reached = following.max(1)
        reached = np.where(batch.array("terminateds"), 0.0, self._discounts(batch) * reached)
        return (batch.array("rewards") + reached).astype(np.float32)

    def _discounts(self, batch: TensorBatch) -> Any:
        """Of what follows the batch's rows."""
        gamma = self.config.gamma
        return gamma ** batch.array("n_steps") if "n_steps" in batch else gamma

    def _outputs_at_new_obs(self, model: ModelV2, batch: TensorBatch) -> np.ndarray:
        """Outputs [B, num_outputs] at `new_obs`."""
        if is_quick(model):
            return model.outputs_numpy(batch.array("new_obs"))
        with torch.no_grad():
            model.eval()
            if self.config.noisy:
                draw_noise(model, self.learn_rng)
            return model(Inputs(obs=batch["new_obs"]), [], None)[0].float().cpu().numpy()

    def _values_of(self, model: ModelV2, batch: TensorBatch) -> np.ndarray:
        """Values [B, n] of the actions at `new_obs`, as numbers. On small networks numpy is twice
        as fast as torch."""
        if is_quick(model):
            observations = batch.array("new_obs")
            if not self.config.dueling:
                return model.outputs_numpy(observations)
            return _dueling_numpy(*model.forward_numpy(observations))
        with torch.no_grad():
            model.eval()
            if self.config.noisy:
                draw_noise(model, self.learn_rng)
            outputs, _ = model(Inputs(obs=batch["new_obs"]), [], None)
            return self._values(outputs, model).cpu().numpy()

    def _values(self, outputs: torch.Tensor, model: ModelV2) -> torch.Tensor:
        """Values [B, n] from what a network gave last."""
        return _dueling(outputs, model.value_function()) if self.config.dueling else outputs

    # -- state -------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        own = self.config
        atoms = [own.num_atoms, own.v_min, own.v_max] if self.atoms else None
        return {**super().get_state(), "dueling": own.dueling, "atoms": atoms}

    def set_state(self, state: dict[str, Any]) -> None:
        if state.get("dueling", self.config.dueling) != self.config.dueling:
            raise ValueError(
                f"a state with dueling={state['dueling']} for a policy with "
                f"dueling={self.config.dueling}: its outputs mean something else there"
            )
        own = self.get_state()["atoms"]
        if state.get("atoms", own) != own:
            raise ValueError(
                f"a state with num_atoms, v_min, v_max of {state['atoms']} for a policy with {own}"
            )
        super().set_state(state)


def _dueling(advantages: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Wang et al. 2016, equation 9; the mean is over the actions that are allowed."""
    allowed = advantages > FORBIDDEN
    mean = (advantages * allowed).sum(1, keepdim=True) / allowed.sum(1, keepdim=True)
    return torch.where(allowed, values.unsqueeze(1) + advantages - mean, advantages)


def _dueling_numpy(advantages: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The same of arrays, of a network without masks."""
    made: np.ndarray = advantages + (values - advantages.mean(1))[:, None]
    return made


class DQN(Algorithm):
    """DQN over the plan `dqn`."""

    policy_class = DQNTorchPolicy
    config_class = DQNConfig


DEFAULT_CONFIG = DQNConfig()
