from flowrl.sampling.ids import IdCounter, first_id


def test_workers_and_their_restarts_have_ranges_of_their_own():
    firsts = [first_id(worker, restart) for worker in range(3) for restart in (0, 1, 1024, 100_000)]
    assert firsts == sorted(set(firsts))
    largest = first_id(32_767, 262_143) + 2**30 - 1
    assert largest < 2**63
    assert first_id(4, 262_143) + 2**30 <= first_id(5, 0)


def test_ids_are_consecutive():
    ids = IdCounter(7)
    assert [next(ids), ids.take(3), next(ids), ids.next_id] == [7, 8, 11, 12]
