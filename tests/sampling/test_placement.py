"""Where remote workers run."""

import pytest

from flowrl.algorithms.a2c import A2CConfig
from flowrl.policies import ConfigError
from flowrl.sampling import placement
from flowrl.sampling.placement import Placement


def groups(ray):
    """The placement groups that there are."""
    table = ray.util.placement_group_table().values()
    return [one for one in table if one["state"] == "CREATED"]


def build(**settings):
    return A2CConfig(
        env="CartPole-v1", **{"num_workers": 2, "rollout_fragment_length": 8, **settings}
    ).build()


def test_places_are_reserved_and_given_back(ray_session):
    with build(placement_strategy="PACK", num_cpus_per_worker=0.5) as algorithm:
        algorithm.train()
        [group] = groups(ray_session)
        assert group["strategy"] == "PACK"
        assert list(group["bundles"].values()) == [{"CPU": 0.5}] * 2
        algorithm.workers.add()
        algorithm.train()
        assert sorted(len(one["bundles"]) for one in groups(ray_session)) == [1, 2]
        algorithm.workers.remove()
        assert len(groups(ray_session)) == 1
        in_group = algorithm.workers.foreach_worker(_in_a_group)
        assert in_group == [False, True, True]
    assert groups(ray_session) == []


def _in_a_group(worker):
    import ray

    return ray.util.get_current_placement_group() is not None


def test_a_worker_made_again_has_its_place(ray_session):
    with build(placement_strategy="SPREAD") as algorithm:
        algorithm.train()
        ray_session.kill(algorithm.workers.remote_workers()[1])
        algorithm.train()
        assert algorithm.workers.foreach_worker(_in_a_group) == [False, True, True]
        assert len(groups(ray_session)) == 1


def test_without_a_strategy_there_is_no_group(ray_session):
    with build() as algorithm:
        algorithm.train()
        assert groups(ray_session) == []


def test_places_that_cannot_be_had(ray_session, monkeypatch):
    monkeypatch.setattr(placement, "PLACING_S", 0.5)
    with build(placement_strategy="STRICT_SPREAD") as algorithm:
        with pytest.raises(
            ConfigError, match=r"2 places of .* by STRICT_SPREAD were not to be had"
        ):
            algorithm.train()
        assert groups(ray_session) == []


def test_tune_takes_what_means_the_same_there(ray_session):
    tune = pytest.importorskip("flowrl.tune")
    asked = {"num_workers": 2, "placement_strategy": "SPREAD", "num_gpus_per_worker": 0.5}
    request = tune.A2C.default_resource_request({**asked, "custom_resources_per_worker": {"x": 2}})
    assert request.strategy == "SPREAD"
    assert request.bundles[1:] == [{"CPU": 1.0, "GPU": 0.5, "x": 2.0}] * 2
    with pytest.raises(ConfigError, match="take PACK or SPREAD"):
        tune.A2C.default_resource_request({"placement_strategy": "STRICT_SPREAD"})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_gpus_per_worker": 0.5}, r"2 workers with 0.5 of 'GPU' each .* cluster has 0"),
        ({"custom_resources_per_worker": {"tpu": 2}}, r"2 workers with 2 of 'tpu' each"),
    ],
)
def test_what_the_cluster_has_not_got(ray_session, settings, said):
    with build(**settings) as algorithm, pytest.raises(ConfigError, match=said):
        algorithm.train()


def test_workers_that_cannot_be_placed_do_not_join(ray_session):
    with build() as algorithm:
        algorithm.train()
        algorithm.workers._placement.custom = {"tpu": 1}
        with pytest.raises(ConfigError, match="1 workers with 1 of 'tpu'"):
            algorithm.workers.add()
        assert algorithm.workers.num_workers == 2
        algorithm.train()


def test_after_a_refusal_it_is_refused_again_and_stops(ray_session):
    algorithm = build(custom_resources_per_worker={"tpu": 1})
    for _ in range(2):
        with pytest.raises(ConfigError, match="2 workers with 1 of 'tpu'"):
            algorithm.train()
    algorithm.stop()


def test_what_others_have_taken_is_not_there(ray_session, monkeypatch):
    monkeypatch.setattr(placement, "PLACING_S", 0.5)
    node = ray_session.get_runtime_context().get_node_id()
    mine = {f"node:{ray_session.util.get_node_ip_address()}": 0.5}
    assert node
    with build(custom_resources_per_worker=mine) as algorithm:
        algorithm.train()
        with pytest.raises(ConfigError, match=r"has 1, of which \d\S* are free"):
            algorithm.workers.add()
        algorithm.workers.remove()
        algorithm.workers.add()  # takes the place that was left
        algorithm.train()


@pytest.mark.parametrize("asked", [{"num_cpus_per_worker": 0}])
def test_workers_that_take_nothing_have_a_place(ray_session, asked):
    with build(placement_strategy="PACK", **asked) as algorithm:
        algorithm.train()
        assert algorithm.workers.foreach_worker(_in_a_group) == [False, True, True]
        algorithm.workers.remove()
        algorithm.workers.add()
        algorithm.train()
        assert len(groups(ray_session)) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"placement_strategy": "TIGHT"}, {"num_gpus_per_worker": -1},
        {"custom_resources_per_worker": {"tpu": 0}}, {"custom_resources_per_worker": 3},
    ],
)  # fmt: skip
def test_settings_that_are_none(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        A2CConfig(env="CartPole-v1", **settings)


def test_cpus_are_shared(ray_session):
    many = Placement({"num_cpus_per_worker": 1.0})
    many.reserve(0, 8)
    assert many.options(7)["num_cpus"] == 0.5
    assert Placement({}).num_cpus == 1.0
