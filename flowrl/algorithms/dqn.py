"""DQN: deep Q-learning (Mnih et al. 2015), and Rainbow (Hessel et al. 2018, arXiv 1710.02298).

Options: double (van Hasselt et al. 2016, arXiv 1509.06461), dueling (Wang et al. 2016, arXiv
1511.06581), distributional (Bellemare et al. 2017, arXiv 1707.06887) and noisy networks (Fortunato
et al. 2018, arXiv 1706.10295). OffPolicyConfig contains multi-step returns and prioritized replay.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Annotated, Any, ClassVar, Self

import numpy as np
import optree
import torch
from gymnasium import spaces
from pydantic import Field, FiniteFloat

from flowrl.algorithms.action_spaces import wrong_action_space
from flowrl.algorithms.off_policy import OffPolicyConfig
from flowrl.errors import ConfigError
from flowrl.policies.categorical_q import CategoricalQ
from flowrl.policies.config import ExplorationConfig
from flowrl.policies.exploration import Exploration
from flowrl.policies.models.base import ModelV2
from flowrl.policies.models.fcnet import FullyConnectedNetwork, uses_numpy
from flowrl.policies.models.noisy import make_noisy, resample_noise
from flowrl.policies.models.tensor_batch import InputDict
from flowrl.policies.models.torso import TorsoNetwork
from flowrl.policies.q_values import QValues, TDLoss
from flowrl.policies.schedules import Schedule
from flowrl.policies.target_network import TargetNetworkPolicy
from flowrl.policies.torch_policy import TensorBatch
from flowrl.policies.views import find_input_problem
from flowrl.settings import (
    Count,
    Fraction,
    NonNegativeInt,
    Positive,
    check_of_settings,
)
from flowrl.state_schema import check_state
from flowrl.trainer.algorithm import Algorithm, PolicyClass
from flowrl.trainer.config import PlanSetting, PlanSource


class DQNConfig(OffPolicyConfig):
    """Settings of DQN."""

    algorithm: ClassVar[str] = "flowrl.algorithms.dqn:DQN"

    plan: PlanSetting = "dqn"
    lr: Schedule = 5e-4
    grad_clip: Positive | None = 10.0
    double_q: bool = True
    """Double Q-learning: the online network selects the next action, the target network evaluates
    it."""
    dueling: bool = True
    """Dueling network: Q-values are the sum of a state value and of advantages with mean 0."""
    num_atoms: Annotated[Count, Field(le=10_000)] = 1
    """Number of atoms of the return distribution (C51 uses 51); 1 learns expected returns. With
    several atoms the loss is a cross-entropy, and priorities are Kullback-Leibler divergences."""
    v_min: FiniteFloat = -10.0
    """Smallest atom, a lower bound of the discounted returns."""
    v_max: FiniteFloat = 10.0
    """Largest atom, an upper bound of the discounted returns."""
    noisy: bool = False
    """Explore with noisy linear layers, whose noise is learned. They replace the default
    exploration; another `exploration_config` is used in addition. explore=False disables the
    noise."""
    sigma0: Positive = 0.5
    """Initial scale of the noise of noisy layers."""
    prioritized_replay: bool = True
    target_network_update_freq: NonNegativeInt = 500
    """Env steps sampled between updates of the target network; 0 updates it after every train
    batch."""
    tau: Fraction = 1.0
    """Polyak coefficient of target updates, target = tau * online + (1 - tau) * target: 1 copies
    (hard updates), 0.01 after every train batch gives soft updates."""
    exploration_config: ExplorationConfig = ExplorationConfig(type="EpsilonGreedy")

    @check_of_settings
    def _check_network_settings(self) -> Self:
        if not self.v_min < self.v_max:
            raise ValueError(f"v_min={self.v_min} is not below v_max={self.v_max}")
        self._require(self.num_atoms > 1, "num_atoms above 1", "v_min", "v_max")
        self._require(self.noisy, "noisy=True", "sigma0")
        if self.num_atoms > 1 and self.model.vf_share_layers is False:
            raise ValueError(
                "vf_share_layers=False: with num_atoms above 1, one network computes the "
                "distributions of the state value and of the advantages"
            )
        return self

    def build(self, plan: PlanSource | None = None) -> DQN:
        return self._build(plan)


class DQNTorchPolicy(TargetNetworkPolicy):
    """A policy that acts greedily by Q-values and learns them from temporal differences.

    Attributes:
        target_model: the network that evaluates the next actions.
        row_stats: contains `td_error` [rows].
    """

    config_class = DQNConfig
    config: DQNConfig

    def __init__(self, observation_space: Any, action_space: Any, config: Any):
        if not isinstance(action_space, spaces.Discrete):
            raise wrong_action_space(self.algorithm_name, "Discrete", action_space)
        super().__init__(observation_space, action_space, config)
        self.check_views()

    def check_views(self) -> None:
        """Raise ConfigError for networks with views that the loss does not support."""
        self.config.model.check_no_memory(self.algorithm_name)
        extra_views = set(self.model.view_requirements) - {"obs"}
        if extra_views:
            raise ConfigError(
                f"model: networks of {self.algorithm_name} read only the view `obs`, not "
                f"{sorted(extra_views)}: a view of several observations needs the name obs"
            )

    @cached_property
    def q_function(self) -> QValues:
        """Interprets the network's outputs as Q-values."""
        config = self.config
        num_actions = int(self.action_space.n)  # type: ignore[attr-defined]
        if config.num_atoms == 1:
            return QValues(num_actions, config.dueling)
        return CategoricalQ(
            num_actions, config.num_atoms, config.v_min, config.v_max, config.dueling
        )

    def make_model(self) -> torch.nn.Module:
        """Return a network with heads for values and advantages, or separate networks if
        `vf_share_layers` is False."""
        config, q_function = self.config, self.q_function
        model_config = config.model
        if model_config.vf_share_layers is None:
            model_config = model_config.updated(vf_share_layers=True)
        model = self.make_catalog_model(
            model_config,
            q_function.num_outputs,
            outputs_per_action=q_function.outputs_per_action,
            use_numpy=not config.noisy,
        )
        if config.noisy:
            message = f"noisy: a {type(model).__name__} has no linear layers to replace"
            if any(isinstance(part, FullyConnectedNetwork) for part in model.modules()):
                raise ConfigError(f"{message}: build a custom_model of torch.nn.Linear")
            if not make_noisy(model, config.sigma0):
                raise ConfigError(message)
        return model

    def make_exploration(self) -> Exploration:
        config = self.config
        default = type(config).model_fields["exploration_config"].default
        if not config.noisy or config.exploration_config.diff(default):
            return super().make_exploration()
        greedy = ExplorationConfig(type="EpsilonGreedy", epsilon=0.0)  # the noise explores
        return Exploration(greedy, self.action_space, self.dist_class, config.normalize_actions)

    # -- acting ------------------------------------------------------------------------------------

    def _act(
        self, input_dict: dict[str, Any], explore: bool
    ) -> tuple[np.ndarray, list[np.ndarray], dict[str, np.ndarray]]:
        if self.config.noisy:
            resample_noise(self.model, self.rng if explore else None)
        exploration, is_random = self.exploration, None
        if explore and self._skips_network:
            count = self._computed(self._count_rows, input_dict)
            is_random = exploration.draw_random_rows(count, self)
            if is_random is not None and is_random.all():
                scores = np.zeros((count, self.q_function.num_actions), np.float32)
                return exploration.act_on_values(scores, is_random, self), [], {}
        with self._seeded():
            scores, states = self._computed(self._greedy_scores, input_dict)
        has_own = self._has_own_columns
        extra = self.extra_action_out(input_dict, states, scores) if has_own else {}
        if not explore:
            return scores.argmax(1), states, extra
        if is_random is None:
            is_random = exploration.draw_random_rows(len(scores), self)
        return exploration.act_on_values(scores, is_random, self), states, extra

    @cached_property
    def _skips_network(self) -> bool:
        """Whether the network is not computed if all actions of a step are random.

        Only for networks on images, which take long. They have no recurrent states and mask no
        actions; the network of a user or of a subclass may.
        """
        return (
            not self._has_own_columns
            and type(self.model) is TorsoNetwork
            and type(self.q_function) in (QValues, CategoricalQ)
            and type(self)._greedy_scores is DQNTorchPolicy._greedy_scores
        )

    def _count_rows(self, input_dict: dict[str, Any]) -> int:
        """Return the number of observations.

        Raises:
            ValueError: they are not those of the observation space.
        """
        problem = find_input_problem(self.view_requirements, [], input_dict)
        if problem is not None:
            raise ValueError(problem)
        leaves: Any = optree.tree_leaves(input_dict["obs"])
        return len(leaves[0])

    def _greedy_scores(self, input_dict: dict[str, Any]) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return scores [B, n] that order actions by value, and the next recurrent states."""
        states: list[np.ndarray] = []
        model = self.acting_model
        if uses_numpy(model):
            outputs = model.outputs_numpy(input_dict["obs"])
        else:
            outputs, _, states = model.compute_outputs(input_dict)
        return self.q_function.greedy_scores(outputs), states

    @property
    def to_dist_inputs(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """See TorchPolicy."""
        return self.q_function.greedy_scores_of_tensors

    def compute_log_likelihoods(
        self, actions: Any, obs_batch: Any = None, input_dict: dict[str, Any] | None = None
    ) -> np.ndarray:
        """Return the log-probabilities [B] of the greedy policy: 0 for the best action, else minus
        infinity."""
        best, _, _ = self._act({"obs": obs_batch} if input_dict is None else input_dict, False)
        self._check_actions(actions, len(best))
        return np.where(actions == best, 0.0, -np.inf).astype(np.float32)

    # -- learning ----------------------------------------------------------------------------------

    def loss(self, batch: TensorBatch) -> torch.Tensor:
        """Return the mean TD loss, weighted by the column `weights` [B] if there is one.

        It is the Huber loss of QValues, or the cross-entropy of CategoricalQ.
        """
        targets = self.td_targets(batch)
        if self.config.noisy:
            resample_noise(self.model, self.learner.rng)
        outputs, _ = self.model.from_batch(batch)
        state_values = self.model.value_function() if self.q_function.uses_state_value else None
        actions = batch["actions"]
        return self._mean_loss(
            batch, self.q_function.td_loss(outputs, state_values, actions, targets)
        )

    def _mean_loss(self, batch: TensorBatch, loss: TDLoss) -> torch.Tensor:
        self.record_td_loss(batch, loss)
        losses: torch.Tensor = loss.losses
        return (losses * batch["weights"]).mean() if "weights" in batch else losses.mean()

    def td_targets(self, batch: TensorBatch) -> torch.Tensor:
        """Return the TD targets [B, …].

        After k steps they are R + gamma^k Q_target(s', a'), and R if s' is terminal. With
        `double_q`, a' is the best action of the online network (van Hasselt et al. 2016, equation
        4), else that of the target network. With several atoms, the targets are distributions with
        the same shift and scale (Bellemare et al. 2017).
        """
        q_function = self.q_function
        with torch.no_grad():
            outputs = self._at_new_obs(self.target_model, batch)
            uses_value = q_function.uses_state_value
            state_values = self.target_model.value_function().float() if uses_value else None
            selection_outputs = outputs
            if self.config.double_q:
                selection_outputs = self._at_new_obs(self.model, batch)
            best_actions = q_function.greedy_scores_of_tensors(selection_outputs).argmax(1)
            rewards, discounts = batch["rewards"], self.discounts(batch)
            return q_function.td_targets(outputs, state_values, best_actions, rewards, discounts)

    def record_td_loss(self, batch: TensorBatch, loss: TDLoss) -> None:
        """Record the statistics of a loss, and its errors as the rows' `td_error`."""
        self.record_row_stats(batch, td_error=loss.errors)
        count = max(len(loss.errors), 1)
        self.stats["mean_q"] = loss.q.sum() / count
        self.stats["mean_td_error"] = loss.errors.sum() / count

    def _at_new_obs(self, model: ModelV2, batch: TensorBatch) -> torch.Tensor:
        """Return a network's outputs [B, num_outputs] at `new_obs`."""
        model.eval()
        if self.config.noisy:
            resample_noise(model, self.learner.rng)
        outputs, _ = model(InputDict(obs=batch["new_obs"]), [], None)
        return outputs.float()

    # -- state -------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "dueling": self.config.dueling, "atoms": self._atoms}

    @property
    def _atoms(self) -> list[float] | None:
        """[num_atoms, v_min, v_max]; None without atoms."""
        config = self.config
        return [config.num_atoms, config.v_min, config.v_max] if config.num_atoms > 1 else None

    def set_state(self, state: dict[str, Any]) -> None:
        if "target" in state:  # else the base class says that it belongs to another algorithm
            self._check_output_settings(state)
        super().set_state(state)

    def _check_output_settings(self, state: dict[str, Any]) -> None:
        """Check that the outputs of a state's network have the same meaning.

        Raises:
            ValueError: they have another one.
        """
        fields = {"dueling": bool, "atoms": list[float] | None}
        check_state(state, fields, f"the state of a {type(self).__name__}")
        if state["dueling"] != self.config.dueling:
            raise ValueError(
                f"cannot load a state with dueling={state['dueling']} for a policy with "
                f"dueling={self.config.dueling}: the networks' outputs have different meanings"
            )
        if state["atoms"] != self._atoms:
            raise ValueError(
                f"cannot load a state with [num_atoms, v_min, v_max] = {state['atoms']} for a "
                f"policy with {self._atoms}"
            )


class DQN(Algorithm):
    """DQN with the plan `dqn`; DQNConfig has its settings.

    Example:
        >>> algo = DQN("CartPole-v1", seed=1)  # doctest: +SKIP
        >>> algo.learn(total_timesteps=100_000)  # doctest: +SKIP
    """

    policy_class: ClassVar[PolicyClass] = DQNTorchPolicy
    config_class = DQNConfig


DEFAULT_CONFIG = DQNConfig()
