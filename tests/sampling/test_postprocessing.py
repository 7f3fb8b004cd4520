"""postprocess_trajectory: postprocessing of single segments."""

import numpy as np
import pytest

from flowrl.algorithms.ppo import PPOTorchPolicy
from flowrl.sampling import RolloutWorker, SimpleListCollector

from .fakes import CountEnv, ObservedValue


def worker(policy_class, **config):
    settings = {"num_envs_per_worker": 2, "rollout_fragment_length": 7, "seed": 1, **config}
    return RolloutWorker(lambda context: CountEnv(3), policy_class, settings)


class PerSegment(PPOTorchPolicy):
    """Computes GAE per segment and adds a column."""

    def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
        assert len(set(sample_batch["eps_id"])) == 1
        assert not sample_batch["dones"][:-1].any()
        batch = super().postprocess_trajectory(sample_batch, other_agent_batches, episode)
        batch["return_to_go"] = np.cumsum(batch["rewards"][::-1])[::-1]
        return batch


def test_segments_give_the_columns_of_the_whole_fragment():
    whole, segments = worker(PPOTorchPolicy), worker(PerSegment)
    for _ in range(3):
        a, b = whole.sample(), segments.sample()
        assert set(b) - set(a) == {"return_to_go"}
        for name in set(a) - {"infos"}:
            assert np.allclose(a[name], b[name]), name
        assert a["infos"].tolist() == b["infos"].tolist()
        assert b["return_to_go"].shape == (14,)


def test_postprocessing_input_is_read_only():
    class WritesInPlace(ObservedValue):
        def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
            sample_batch["rewards"][:] = 0
            return sample_batch

    with pytest.raises(ValueError, match="read-only"):
        worker(WritesInPlace).sample()


def test_postprocessing_without_return_value_raises():
    class ReturnsNone(ObservedValue):
        def postprocess_trajectory(self, sample_batch, other_agent_batches=None, episode=None):
            pass

    with pytest.raises(TypeError, match=r"ReturnsNone.postprocess_trajectory\(\) must return"):
        worker(ReturnsNone).sample()


@pytest.mark.parametrize("path", ["columns", "agents", "rows"])
@pytest.mark.parametrize(
    ("clip", "expected"), [(True, [1, 1, 1]), (1.5, [1, 1.5, 1.5]), (None, [1, 2, 3])]
)
def test_clipped_rewards_are_learned_from_but_not_reported(path, clip, expected):
    settings = {"clip_rewards": clip, "rollout_fragment_length": 6}
    env = lambda context: CountEnv()  # noqa: E731 - rewards 1, 2, 3
    if path == "agents":
        settings |= {"policies": {"p"}, "policy_mapping_fn": lambda *args, **kwargs: "p"}
    if path == "rows":
        settings["sample_collector"] = SimpleListCollector
    worker = RolloutWorker(env, PPOTorchPolicy, settings)
    batch = worker.sample()
    rows = batch.policy_batches["p"] if path == "agents" else batch
    assert rows["rewards"].tolist() == expected * 2
    assert [episode.episode_return for episode in worker.get_metrics()] == [6.0, 6.0]
