"""Resources and placement groups of remote workers."""

import pytest

from flowrl.algorithms.a2c import A2CConfig
from flowrl.policies import ConfigError
from flowrl.sampling import placement
from flowrl.sampling.placement import Placement
from flowrl.sampling.worker_config import WorkerConfig
from tests.extras import require_extra


def groups(ray):
    """Return the existing placement groups."""
    table = ray.util.placement_group_table().values()
    return [group for group in table if group["state"] == "CREATED"]


def build(**settings):
    return A2CConfig(
        env="CartPole-v1", **{"num_workers": 2, "rollout_fragment_length": 8, **settings}
    ).build()


@pytest.mark.slow
def test_placement_groups_are_created_and_removed(ray_session):
    with build(placement_strategy="PACK", num_cpus_per_worker=0.5) as algorithm:
        algorithm.train()
        [group] = groups(ray_session)
        assert group["strategy"] == "PACK"
        assert list(group["bundles"].values()) == [{"CPU": 0.5}] * 2
        algorithm.workers.add()
        algorithm.train()
        assert sorted(len(group["bundles"]) for group in groups(ray_session)) == [1, 2]
        algorithm.workers.remove()
        assert len(groups(ray_session)) == 1
        in_group = algorithm.workers.foreach_worker(_in_placement_group)
        assert in_group == [False, True, True]
    assert groups(ray_session) == []


def _in_placement_group(worker):
    import ray

    return ray.util.get_current_placement_group() is not None


@pytest.mark.slow
def test_recreated_worker_keeps_its_bundle(ray_session):
    with build(placement_strategy="SPREAD") as algorithm:
        algorithm.train()
        ray_session.kill(algorithm.workers.remote_workers()[1])
        algorithm.train()
        assert algorithm.workers.foreach_worker(_in_placement_group) == [False, True, True]
        assert len(groups(ray_session)) == 1


@pytest.mark.slow
def test_no_placement_group_without_a_strategy(ray_session):
    with build() as algorithm:
        algorithm.train()
        assert groups(ray_session) == []


def test_failed_reservation_raises(ray_session, monkeypatch):
    monkeypatch.setattr(placement, "RESERVE_TIMEOUT_S", 0.5)
    with build(placement_strategy="STRICT_SPREAD") as algorithm:
        with pytest.raises(
            ConfigError, match=r"could not reserve 2 bundles of .* with STRICT_SPREAD"
        ):
            algorithm.train()
        assert groups(ray_session) == []


def test_tune_requests_resources_of_all_workers(ray_session):
    require_extra("tune")
    from flowrl import tune

    resources = {"num_workers": 2, "placement_strategy": "SPREAD", "num_gpus_per_worker": 0.5}
    request = tune.A2C.default_resource_request(
        {**resources, "custom_resources_per_worker": {"x": 2}}
    )
    assert request.strategy == "SPREAD"
    assert request.bundles[1:] == [{"CPU": 1.0, "GPU": 0.5, "x": 2.0}] * 2
    with pytest.raises(ConfigError, match="use PACK or SPREAD"):
        tune.A2C.default_resource_request({"placement_strategy": "STRICT_SPREAD"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_gpus_per_worker": 0.5}, r"2 workers need 0.5 of 'GPU' each; the cluster has 0"),
        ({"custom_resources_per_worker": {"tpu": 2}}, r"2 workers need 2 of 'tpu' each"),
    ],
)
def test_workers_that_need_missing_resources_raise(ray_session, settings, message):
    with build(**settings) as algorithm, pytest.raises(ConfigError, match=message):
        algorithm.train()


def test_workers_of_another_set_get_the_cpus_that_are_left(ray_session):
    total = int(ray_session.cluster_resources()["CPU"])
    training, evaluation = Placement(WorkerConfig()), Placement(WorkerConfig())
    training.reserve(0, total - 1)
    evaluation.reserve(0, 2)
    assert [p.options(0)["num_cpus"] for p in (training, evaluation)] == [1.0, 0.5]
    evaluation.release()
    training.release()
    training.reserve(0, total)
    evaluation.reserve(0, 1)  # it would wait forever for a CPU
    assert [p.options(0)["num_cpus"] for p in (training, evaluation)] == [1.0, 0.0]
    evaluation.release()
    training.release(total - 1)  # a worker was removed
    assert training.reserved_cpus == total - 1
    evaluation.reserve(0, 1)
    assert evaluation.options(0)["num_cpus"] == 1.0
    training.release()
    evaluation.release()


@pytest.mark.slow
def test_failed_addition_keeps_the_existing_workers(ray_session):
    half_node = {f"node:{ray_session.util.get_node_ip_address()}": 0.5}
    with build(custom_resources_per_worker=half_node) as algorithm:
        algorithm.train()
        with pytest.raises(ConfigError, match=r"3 workers need 0.5 of 'node:.*the cluster has 1,"):
            algorithm.workers.add(3)
        assert algorithm.workers.num_workers == 2
        algorithm.train()


@pytest.mark.slow
def test_algorithm_stops_after_repeated_failed_reservations(ray_session):
    algorithm = build(custom_resources_per_worker={"tpu": 1})
    for _ in range(2):
        with pytest.raises(ConfigError, match="2 workers need 1 of 'tpu'"):
            algorithm.train()
    algorithm.stop()


@pytest.mark.slow
def test_resources_of_other_workers_are_not_available(ray_session, monkeypatch):
    monkeypatch.setattr(placement, "RESERVE_TIMEOUT_S", 0.5)
    half_node = {f"node:{ray_session.util.get_node_ip_address()}": 0.5}
    with build(custom_resources_per_worker=half_node) as algorithm:
        algorithm.train()
        with pytest.raises(ConfigError, match=r"has 1, \d\S* of them free"):
            algorithm.workers.add()
        algorithm.workers.remove()
        algorithm.workers.add()  # takes the released resources
        algorithm.train()


@pytest.mark.slow
@pytest.mark.parametrize("resources", [{"num_cpus_per_worker": 0}])
def test_workers_that_need_no_resources_get_a_bundle(ray_session, resources):
    with build(placement_strategy="PACK", **resources) as algorithm:
        algorithm.train()
        assert algorithm.workers.foreach_worker(_in_placement_group) == [False, True, True]
        algorithm.workers.remove()
        algorithm.workers.add()
        algorithm.train()
        assert len(groups(ray_session)) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"placement_strategy": "TIGHT"}, {"num_gpus_per_worker": -1},
        {"custom_resources_per_worker": {"tpu": 0}}, {"custom_resources_per_worker": 3},
        {"num_gpus_per_worker": 1.5}, {"custom_resources_per_worker": {"CPU": 1}},
        {"custom_resources_per_worker": {"tpu": 0.00001}},
    ],
)  # fmt: skip
def test_invalid_settings_raise(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        A2CConfig(env="CartPole-v1", **settings)


def test_cpus_are_shared_if_scarce(ray_session):
    reserved = Placement(WorkerConfig(num_cpus_per_worker=1.0))
    reserved.reserve(0, 8)
    assert reserved.options(7)["num_cpus"] == 0.5
    assert Placement(WorkerConfig()).num_cpus == 1.0
