import pytest

from flowrl.learners.group_store import GroupStore


@pytest.fixture
def stores():
    server = GroupStore(("localhost", 0))
    return server, GroupStore(server.address)


def test_workers_find_the_newest_group(stores):
    server, worker = stores
    server.announce("1", [1, 2], b"first\0state")
    server.announce("2", [2], b"second")
    assert worker.newest_group() == "2"
    assert (worker.members("1"), worker.state("1")) == ([1, 2], b"first\0state")
    assert (worker.members("2"), worker.state("2")) == ([2], b"second")


def test_a_group_is_complete_when_all_members_have_arrived(stores):
    server, worker = stores
    server.announce("1", [1, 2], b"")
    worker.arrive("1")
    assert not server.is_complete("1")
    GroupStore(server.address).arrive("1")
    assert worker.is_complete("1")


def test_entries_of_a_forgotten_group_are_removed(stores):
    server, worker = stores
    server.announce("1", [1], b"")
    worker.arrive("1")
    server.announce("2", [1], b"")
    server.forget("1")
    for entry in ("state/1", "members/1", "arrived/1", "complete/1"):
        assert not worker._store.check([entry])
    assert not worker.is_complete("1")
    worker.arrive("2")
    assert worker.is_complete("2")


def test_global_variables_are_those_written_last(stores):
    server, worker = stores
    server.set_global_vars({"timestep": 1})
    assert worker.global_vars() == {"timestep": 1}
    server.set_global_vars({"timestep": 2})
    assert worker.global_vars() == {"timestep": 2}
