"""postprocess_trajectory: each episode's part of a fragment, apart."""

import numpy as np
import pytest

from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.sampling import RolloutWorker

from .fakes import CountEnv, ObservedValue


def worker(policy_class, **config):
    settings = {"num_envs_per_worker": 2, "rollout_fragment_length": 7, "seed": 1, **config}
    return RolloutWorker(lambda context: CountEnv(3), policy_class, settings)


class ByHand(PPOTorchPolicy):
    """GAE for each part apart, and a column of its own."""

    def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
        assert len(set(sample_batch["eps_id"])) == 1
        assert not sample_batch["dones"][:-1].any()
        batch = super().postprocess_trajectory(sample_batch, other_agent_batches, episode)
        batch["return_to_go"] = np.cumsum(batch["rewards"][::-1])[::-1]
        return batch


def test_parts_give_what_the_whole_fragment_gives():
    whole, parts = worker(PPOTorchPolicy), worker(ByHand)
    for _ in range(3):
        a, b = whole.sample(), parts.sample()
        assert set(b) - set(a) == {"return_to_go"}
        for name in set(a) - {"infos"}:
            assert np.allclose(a[name], b[name]), name
        assert a["infos"].tolist() == b["infos"].tolist()
        assert b["return_to_go"].shape == (14,)


def test_what_is_given_cannot_be_changed_in_place():
    class Rude(ObservedValue):
        def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
            sample_batch["rewards"][:] = 0
            return sample_batch

    with pytest.raises(ValueError, match="read-only"):
        worker(Rude).sample()


def test_a_policy_that_returns_nothing_is_named():
    class Forgetful(ObservedValue):
        def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
            pass

    with pytest.raises(TypeError, match=r"Forgetful.postprocess_trajectory\(\) must return"):
        worker(Forgetful).sample()
