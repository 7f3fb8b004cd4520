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
from gymnasium import spaces
from pydantic import Field, FiniteFloat, model_validator

from flowrl.algorithms.off_policy import OffPolicyConfig
from flowrl.policies.categorical_q import CategoricalQ
from flowrl.policies.config import ExplorationConfig
from flowrl.policies.exploration import Exploration
from flowrl.policies.learning.kernels.backprop import Backprop
from flowrl.policies.models.base import ModelV2
from flowrl.policies.models.fcnet import FullyConnectedNetwork, uses_numpy
from flowrl.policies.models.noisy import make_noisy, resample_noise
from flowrl.policies.models.tensor_batch import InputDict
from flowrl.policies.q_values import QValues, TDLoss
from flowrl.policies.schedules import Schedule
from flowrl.policies.target_network import TargetNetwork
from flowrl.policies.torch_policy import TensorBatch
from flowrl.settings import ConfigError, Count, Fraction, Positive
from flowrl.trainer.algorithm import Algorithm


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
    """Linear layers with learned noise, which explores: unless exploration_config is another than
    the default, nothing else does. With explore=False there is none."""
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
            name = type(self).__name__.removesuffix("TorchPolicy")
            raise ConfigError(f"{name} is for Discrete actions, not {action_space}")
        super().__init__(observation_space, action_space, config)
        self.check_views()
        self._backprop = Backprop(self.model) if self._can_backprop(self.model) else None

    def check_views(self) -> None:
        """Refuse networks that see what the loss does not give them."""
        others = set(self.model.view_requirements) - {"obs"}
        if others:
            raise ConfigError(f"DQN's network sees observations alone, not {sorted(others)}")

    @cached_property
    def values(self) -> QValues:
        """What the network's outputs mean."""
        config = self.config
        actions = int(self.action_space.n)  # type: ignore[attr-defined]
        if config.num_atoms == 1:
            return QValues(actions, config.dueling)
        return CategoricalQ(actions, config.num_atoms, config.v_min, config.v_max, config.dueling)

    def _can_backprop(self, model: ModelV2) -> TypeGuard[FullyConnectedNetwork]:
        """Whether the gradient can be had without autograd."""
        config = self.config
        own = type(self).loss is DQNTorchPolicy.loss  # not a subclass' one
        whole = len(self.groups[0]) == len(self.flat.parameters)  # one optimizer has them all
        plain = config.precision == "float32" and not config.compile
        return own and whole and plain and uses_numpy(model)

    def make_model(self) -> torch.nn.Module:
        """One network for values and advantages up to their heads, unless it is said otherwise."""
        config, values = self.config, self.values
        shared = config.model
        if shared.vf_share_layers is None:
            shared = shared.updated(vf_share_layers=True)
        model = self.network(
            shared,
            values.num_outputs,
            outputs_per_action=values.outputs_per_action,
            use_numpy=not config.noisy,
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
        usual = type(config).model_fields["exploration_config"].default
        if not config.noisy or config.exploration_config.diff(usual):
            return super().make_exploration()
        still = ExplorationConfig(type="EpsilonGreedy", epsilon=0.0)  # the noise explores
        return Exploration(still, self.action_space, self.dist_class, config.normalize_actions)

    # -- acting ------------------------------------------------------------------------------------

    def _act(
        self, input_dict: dict[str, Any], explore: bool
    ) -> tuple[np.ndarray, list[np.ndarray], dict[str, np.ndarray]]:
        if self.config.noisy:
            resample_noise(self.model, self.rng if explore else None)
        ranks, states = self._computed(self._ranks, input_dict)
        return self.exploration.act_on_values(ranks, self, explore), states, {}

    def _ranks(self, input_dict: dict[str, Any]) -> tuple[np.ndarray, list[np.ndarray]]:
        """Values [B, n] but for what is the same for all actions of a state; states after it."""
        states: list[np.ndarray] = []
        if uses_numpy(self.model):
            outputs = self.model.outputs_numpy(input_dict["obs"])
        else:
            outputs, _, states = self.model.compute_outputs(input_dict)
        return self.values.ranks(outputs), states

    @property
    def dist_inputs(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """From the model's outputs to values of the actions, or what differs by the state alone."""
        return self.values.ranks_of_tensors

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
        goals = self._goals(batch)
        if self.config.noisy:
            resample_noise(self.model, self.learn_rng)
        outputs, _ = self.model.from_batch(batch)
        state = self.model.value_function() if self.values.has_state else None
        return self._weighted(batch, self.values.judged(outputs, state, batch["actions"], goals))

    def _weighted(self, batch: TensorBatch, judged: TDLoss) -> torch.Tensor:
        self._note(batch, judged)
        losses: torch.Tensor = judged.losses
        return (losses * batch["weights"]).mean() if "weights" in batch else losses.mean()

    def gradient_by_hand(self, batch: TensorBatch) -> float | None:
        """The same loss and its derivative, where numpy computes the network: in a third of the
        time."""
        if self._backprop is None:
            return None
        goals = self._goals(batch)
        outputs, state = self._backprop.forward(batch.array("obs"))
        actions = batch.array("actions")
        has_state = self.values.has_state
        judged = self.values.judged_by_hand(outputs, state if has_state else None, actions, goals)
        self._note(batch, judged)
        share: Any = np.float32(1.0 / len(actions))
        if "weights" in batch:
            share = share * batch.array("weights").astype(np.float32, copy=False)
        assert judged.slopes is not None
        slopes = (judged.slopes.T * share).T
        self.flat.gradient.zero_()
        self._backprop.backward(*self.values.gradient(slopes, actions))
        return float((judged.losses * share).sum())

    def _goals(self, batch: TensorBatch) -> np.ndarray:
        """What should be thought of the batch's actions, [B, …]."""
        following, state = self._at_new_obs(self.target_model, batch, self.values.has_state)
        chooser = following
        if self.config.double_q:
            chooser, _ = self._at_new_obs(self.model, batch)
        best = self.values.ranks(chooser).argmax(1)
        discounts: Any = self.config.gamma
        if "n_steps" in batch:
            discounts = discounts ** batch.array("n_steps")
        discounts = np.where(batch.array("terminateds"), 0.0, discounts)
        return self.values.goals(following, state, best, batch.array("rewards"), discounts)

    def _note(self, batch: TensorBatch, judged: TDLoss) -> None:
        self.note_rows(batch, td_error=judged.errors)
        count = max(len(judged.errors), 1)
        self.stats["mean_q"] = float(judged.values.sum()) / count
        self.stats["mean_td_error"] = float(judged.errors.sum()) / count

    def _at_new_obs(
        self, model: ModelV2, batch: TensorBatch, with_state: bool = False
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Outputs [B, num_outputs] at `new_obs`, and the network's values [B] if they are wanted,
        as numbers. On small networks numpy is twice as fast as torch."""
        if uses_numpy(model):
            observations = batch.array("new_obs")
            if with_state:
                return model.forward_numpy(observations)
            return model.outputs_numpy(observations), None
        with torch.no_grad():
            model.eval()
            if self.config.noisy:
                resample_noise(model, self.learn_rng)
            outputs, _ = model(InputDict(obs=batch["new_obs"]), [], None)
            state = model.value_function().float().cpu().numpy() if with_state else None
            return outputs.float().cpu().numpy(), state

    # -- state -------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        own = self.config
        atoms = [own.num_atoms, own.v_min, own.v_max] if own.num_atoms > 1 else None
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


class DQN(Algorithm):
    """DQN over the plan `dqn`."""

    policy_class = DQNTorchPolicy
    config_class = DQNConfig


DEFAULT_CONFIG = DQNConfig()
