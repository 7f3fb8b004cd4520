"""The examples in the docstrings of algorithms run, with fewer env steps."""

import doctest

import pytest

import flowrl

IN_PROCESS = ["A2C", "DQN", "PPO", "R2D2", "SAC", "TD3", "DDPG", "SimpleQ"]
WITH_WORKERS = ["A3C", "APEX", "APPO", "DDPPO", "IMPALA"]


@pytest.mark.parametrize(
    "name", [*IN_PROCESS, *(pytest.param(n, marks=pytest.mark.slow) for n in WITH_WORKERS)]
)
def test_example_trains(name, request, tmp_path, monkeypatch):
    if name in WITH_WORKERS:
        request.getfixturevalue("ray_session")
    monkeypatch.chdir(tmp_path)
    algorithm_class = getattr(flowrl, name)
    (found,) = doctest.DocTestFinder(recurse=False).find(algorithm_class, name)
    sources = [example.source for example in found.examples]
    assert len(sources) == 2 and "100_000" in sources[1]
    namespace = {name: algorithm_class}
    exec(sources[0], namespace)
    with namespace["algo"]:
        exec(sources[1].replace("100_000", "500"), namespace)
        assert namespace["algo"].env_steps >= 500
