"""The adaptive weight of the KL penalty in saved states."""

import pytest

from flowrl import Algorithm
from flowrl.algorithms.appo import APPOConfig
from flowrl.algorithms.ppo import PPOConfig

SMALL = {"env": "CartPole-v1", "model": {"fcnet_hiddens": [8]}, "train_batch_size": 64, "seed": 0}


@pytest.mark.parametrize("config_class", [PPOConfig, APPOConfig])
def test_checkpoint_continues_with_the_adapted_weight_or_with_another_setting(
    config_class, tmp_path
):
    config = config_class(**SMALL, num_sgd_iter=2, sgd_minibatch_size=32, kl_coeff=0.2)
    with config.build() as algorithm:
        algorithm.get_policy().kl_coeff = 0.8
        path = algorithm.save(tmp_path)
    for changes, expected in (({}, 0.8), ({"kl_coeff": 0.5}, 0.5), ({"kl_coeff": 0.0}, 0.0)):
        with Algorithm.from_checkpoint(path, config=changes) as algorithm:
            assert algorithm.get_policy().kl_coeff == expected
