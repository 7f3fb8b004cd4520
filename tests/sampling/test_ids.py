from flowrl.sampling.ids import IdCounter, first_id


def test_workers_and_their_restarts_have_ranges_of_their_own():
    firsts = [first_id(worker, restart) for worker in range(3) for restart in (0, 1, 1024, 100_000)]
    assert firsts == sorted(set(firsts))
    assert first_id(32_000, 0) < 2**63


def test_ids_are_consecutive():
    ids = IdCounter(7)
    assert [next(ids), ids.take(3), next(ids), ids.next_id] == [7, 8, 11, 12]
