"""SampleBatch and MultiAgentBatch."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from flowrl.data import MultiAgentBatch, SampleBatch, concat_samples
from flowrl.data.indexed_columns import NOTHING, IndexedColumn
from flowrl.data.sequences import without_padding


def batch_of(n, start=0):
    return SampleBatch(
        obs=np.arange(start, start + n, dtype=np.float32)[:, None].repeat(2, 1),
        actions=np.arange(start, start + n),
        terminateds=np.zeros(n, bool),
        truncateds=np.arange(n) % 3 == 2,
        infos=[{}] * n,
    )


def test_columns_read_and_write():
    batch = batch_of(5)
    assert (batch["dones"] == batch["truncateds"]).all()
    assert "dones" in batch
    assert batch.data is batch
    assert batch["obs"].dtype == np.float32
    assert batch["infos"].dtype == object
    with pytest.raises(KeyError, match="no column 'nope'"):
        batch["nope"]
    batch["new_obs"] = batch["obs"]
    assert batch["next_obs"] is batch["new_obs"]
    with pytest.raises(ValueError, match="rows"):
        batch["short"] = np.zeros(2)
    assert batch.get("nope", 3) == 3


def test_next_obs_is_stored_as_new_obs():
    batch = SampleBatch(obs=[1, 2], next_obs=[2, 3])
    assert list(batch) == ["obs", "new_obs"]
    batch["next_obs"] = np.array([8, 9])
    changed = batch.with_columns(next_obs=np.array([6, 7]))
    assert batch["new_obs"].tolist() == [8, 9]
    assert changed["new_obs"].tolist() == [6, 7]
    assert batch.pop("next_obs").tolist() == [8, 9]
    assert batch.pop("next_obs", None) is None
    assert list(batch) == ["obs"]
    with pytest.raises(ValueError, match="next_obs is another name"):
        SampleBatch(new_obs=[1], next_obs=[1])


def test_methods_of_dicts_check_columns():
    batch = SampleBatch(obs=[1, 2, 3], new_obs=[2, 3, 4])
    for write in (
        lambda: batch.update(next_obs=np.zeros(5)),
        lambda: batch.update({"rewards": [1.0]}),
        lambda: batch.setdefault("rewards", [1.0, 2.0]),
        lambda: batch.__ior__({"rewards": [1.0]}),
    ):
        with pytest.raises(ValueError, match="rows, the batch 3"):
            write()
    assert list(batch) == ["obs", "new_obs"]
    batch.update({"next_obs": [7, 8, 9]}, rewards=[0.0, 1.0, 2.0])
    assert batch["new_obs"].tolist() == [7, 8, 9]
    assert batch.setdefault("rewards", None).tolist() == [0.0, 1.0, 2.0]
    assert isinstance(batch.setdefault("t", [0, 1, 2]), np.ndarray)
    batch |= {"next_obs": [1, 1, 1]}
    assert type(batch) is SampleBatch
    del batch["next_obs"]
    assert list(batch) == ["obs", "rewards", "t"]
    with pytest.raises(KeyError):
        del batch["next_obs"]


def test_columns_are_added_to_lengths_of_sequences():
    batch = SampleBatch(seq_lens=[2])
    batch["obs"] = np.zeros(2)
    assert batch.count == 2
    with pytest.raises(ValueError, match="has 3 rows, the batch 2"):
        SampleBatch(seq_lens=[2])["obs"] = np.zeros(3)


def test_dones_need_both_flags():
    for flag in ("terminateds", "truncateds"):
        batch = SampleBatch({flag: [True, False]})
        assert "dones" not in batch
        assert batch.get("dones") is None
        with pytest.raises(KeyError, match="no column 'dones'"):
            batch["dones"]
    assert SampleBatch(terminateds=[False], truncateds=[True])["dones"].tolist() == [True]


def test_with_columns_shares_arrays_and_keeps_the_original():
    batch = batch_of(3)
    other = batch.with_columns(rewards=np.ones(3))
    assert "rewards" not in batch
    assert other["obs"] is batch["obs"]
    assert "obs" not in other.without_columns("obs")
    deep = batch.copy()
    deep["obs"][0] = 99
    assert batch["obs"][0, 0] == 0


def test_parts_of_nested_columns_may_be_lists():
    batch = SampleBatch(obs={"a": [1, 2, 3], "b": ([0.5, 1.5, 2.5],)})
    assert batch.count == 3
    np.testing.assert_array_equal(batch["obs"]["a"], [1, 2, 3])


def test_ragged_columns_are_rejected():
    with pytest.raises(ValueError, match="differ in length"):
        SampleBatch(obs=np.zeros(3), rewards=np.zeros(2))


def test_nested_columns_count_and_slice():
    batch = SampleBatch(obs={"a": np.arange(4), "b": (np.arange(8).reshape(4, 2),)})
    assert batch.count == 4
    assert batch[1:3]["obs"]["b"][0].tolist() == [[2, 3], [4, 5]]
    assert concat_samples([batch, batch])["obs"]["a"].shape == (8,)


@given(
    st.integers(0, 12),
    st.none() | st.integers(-14, 14),
    st.none() | st.integers(-14, 14),
    st.none() | st.integers(-4, 4).filter(bool),
)
def test_slices_match_list_slices(n, i, j, step):
    batch = with_next_obs(n).with_columns(actions=np.arange(n))
    part = batch[i:j:step]
    assert part["actions"].tolist() == list(range(n))[i:j:step]
    assert part["new_obs"].tolist() == list(range(1, n + 1))[i:j:step]


@given(st.integers(1, 30), st.integers(1, 12))
def test_timeslices_cover_all_rows(n, size):
    for pieces in (batch_of(n).timeslices(size=size), batch_of(n).timeslices(num_slices=size)):
        assert np.concatenate([p["actions"] for p in pieces]).tolist() == list(range(n))


def test_empty_slice_is_empty():
    assert batch_of(3)[0:0].count == 0
    assert not batch_of(3)[0:0]


def test_split_by_episode_uses_dones_or_eps_id():
    assert [p.count for p in batch_of(7).split_by_episode()] == [3, 3, 1]
    with_ids = batch_of(4).with_columns(eps_id=np.array([1, 1, 2, 2]))
    assert [p.count for p in with_ids.split_by_episode()] == [2, 2]
    assert [p.count for p in with_ids.split_by_episode(key="dones")] == [3, 1]
    with pytest.raises(KeyError, match="no column eps_id in this batch"):
        batch_of(4).split_by_episode(key="eps_id")
    with pytest.raises(ValueError, match='key is "eps_id", "dones" or None'):
        with_ids.split_by_episode(key="t")


@pytest.mark.parametrize("ends", [[], [0], [5], [1, 2], [0, 3, 5], [0, 1, 2, 3, 4, 5]])
@pytest.mark.parametrize("names", [("terminateds",), ("truncateds",), ("dones",), "both"])
@pytest.mark.parametrize("padded", [False, True])
def test_split_by_episode_uses_the_flags_that_there_are(ends, names, padded):
    flags = {"terminateds": np.zeros(6, bool), "truncateds": np.zeros(6, bool)}
    for number, end in enumerate(ends):
        flags["truncateds" if number % 2 else "terminateds"][end] = True
    if names != "both":
        flags = {names[0]: flags["terminateds"] | flags["truncateds"]}
    batch = SampleBatch(x=np.arange(6), **flags)
    lens = np.diff([0, *(end + 1 for end in ends if end < 5), 6])
    if padded:
        batch = batch.with_columns(seq_lens=lens).right_zero_pad(6)
    parts = batch.split_by_episode()
    assert [part.count for part in parts] == lens.tolist()
    assert [row["x"] for part in parts for row in part.rows()] == list(range(6))


def test_split_by_episode_compares_ids_of_any_type():
    for ids in (["a", "a", "b"], np.array([1, 1, 0], np.uint8), [2.0, 2.0, 3.0]):
        assert [p.count for p in SampleBatch(eps_id=ids).split_by_episode()] == [2, 1]
    with pytest.raises(KeyError, match="no column eps_id, dones, terminateds or truncateds"):
        SampleBatch(x=[1]).split_by_episode()


def test_concat_skips_empty_batches():
    joined = concat_samples([batch_of(2), SampleBatch(), batch_of(3, 2)])
    assert joined["actions"].tolist() == [0, 1, 2, 3, 4]
    assert concat_samples([]).count == 0
    empty = concat_samples([MultiAgentBatch({}, 0), MultiAgentBatch({}, 0)])
    assert isinstance(empty, MultiAgentBatch)
    assert (empty.count, empty.policy_batches) == (0, {})


def test_concat_fills_missing_columns_with_zeros(caplog):
    with_extra = batch_of(2).with_columns(extra=np.ones(2, np.float32))
    joined = concat_samples([batch_of(1), with_extra])
    assert joined["extra"].tolist() == [0, 1, 1]
    assert joined["extra"].dtype == np.float32
    assert "filled there with {'extra': 0}" in caplog.text
    sequences = SampleBatch(actions=np.arange(2), seq_lens=np.array([2]))
    with pytest.raises(ValueError, match="seq_lens"):
        concat_samples([batch_of(1), sequences])


def test_concat_gives_rows_that_come_from_no_buffer_full_weight_and_no_id():
    drawn = batch_of(2).with_columns(
        weights=np.array([0.5, 1], np.float32), n_steps=np.array([3, 2]),
        batch_indexes=np.array([7, 8]),
    )  # fmt: skip
    joined = concat_samples([drawn, batch_of(1)])
    assert joined["weights"].tolist() == [0.5, 1, 1]
    assert joined["n_steps"].tolist() == [3, 2, 1]
    assert joined["batch_indexes"].tolist() == [7, 8, -1]


def test_shuffle_keeps_rows_together():
    mixed = batch_of(20).shuffle(np.random.default_rng(1))
    assert sorted(mixed["actions"]) == list(range(20))
    assert (mixed["obs"][:, 0] == mixed["actions"]).all()


def test_sequences_slice_and_pad():
    batch = SampleBatch(obs=np.arange(6), seq_lens=[2, 3, 1], state_in_0=np.arange(3))
    assert batch[:2]["obs"].tolist() == [0, 1]
    assert batch[2:6]["state_in_0"].tolist() == [1, 2]
    assert batch[1:1].count == batch[6:9].count == 0
    padded = batch.right_zero_pad(4)
    assert padded["obs"].tolist() == [0, 1, 0, 0, 2, 3, 4, 0, 5, 0, 0, 0]
    assert padded.count == len(padded) == 6
    assert padded.copy().zero_padded
    with pytest.raises(ValueError, match="does not fit"):
        batch.right_zero_pad(2)
    with pytest.raises(ValueError, match="seq_lens"):
        batch_of(3).right_zero_pad(4)
    with pytest.raises(ValueError, match="add up"):
        SampleBatch(obs=np.arange(6), seq_lens=[2, 3])


def test_padded_batches_with_different_columns_are_concatenated():
    parts = [SampleBatch(obs=np.arange(1, 4), seq_lens=[1, 2]) for _ in range(2)]
    parts[0]["x"] = np.arange(4, 7)
    joined = SampleBatch.concat_samples([part.right_zero_pad(2) for part in parts])
    assert joined["x"].tolist() == [4, 0, 5, 6, 0, 0, 0, 0]
    assert joined[3:6]["x"].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("padded", [False, True])
def test_states_of_every_row_are_sliced_like_rows(padded):
    batch = SampleBatch(obs=np.arange(1, 6), seq_lens=[2, 3], state_in_0=np.arange(1, 6))
    if padded:
        batch = batch.right_zero_pad(4, exclude_states=False)
        assert without_padding(batch)["state_in_0"].tolist() == [1, 2, 3, 4, 5]
    part = batch[2:5]
    assert part["state_in_0"].tolist() == part["obs"].tolist()
    assert part["seq_lens"].tolist() == [3]


def test_sequences_without_rows_are_in_one_slice():
    lens = [0, 2, 0, 3, 0]
    batch = SampleBatch(obs=np.arange(5), seq_lens=lens, state_in_0=np.arange(5))
    parts = [batch[:2], batch[2:]]
    assert [part["seq_lens"].tolist() for part in parts] == [[0, 2], [0, 3, 0]]
    assert [part["state_in_0"].tolist() for part in parts] == [[0, 1], [2, 3, 4]]


def test_computed_dones_cannot_be_removed():
    batch = SampleBatch(terminateds=[True, False], truncateds=[False, False])
    for remove in (lambda: batch.pop("dones"), lambda: batch.pop("dones", None)):
        with pytest.raises(KeyError, match="remove terminateds or truncateds instead"):
            remove()
    with pytest.raises(KeyError, match="remove terminateds or truncateds instead"):
        del batch["dones"]
    assert SampleBatch(dones=[True]).pop("dones").tolist() == [True]
    assert SampleBatch(obs=[1]).pop("dones", 3) == 3


def test_slices_that_would_cut_a_sequence_are_rejected():
    batch = SampleBatch(obs=np.arange(6), seq_lens=[2, 2, 2], state_in_0=np.arange(3))
    assert [part["state_in_0"].tolist() for part in batch.timeslices(size=4)] == [[0, 1], [2]]
    assert [part["obs"].tolist() for part in batch.timeslices(num_slices=3)] == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]
    for cut in (
        lambda: batch[:3],
        lambda: batch[1:2],
        lambda: batch.slice(1, 6),
        lambda: batch.timeslices(size=3),
        lambda: batch.timeslices(num_slices=2),
    ):
        with pytest.raises(ValueError, match=r"part of a sequence only.*sequence_minibatches"):
            cut()


def test_rows_of_sequences_are_not_reordered():
    batch = SampleBatch(obs=np.arange(3), seq_lens=[1, 2], state_in_0=np.arange(2))
    for read in (lambda: batch.take_rows(np.array([0])), lambda: batch[[0]], batch.shuffle):
        with pytest.raises(ValueError, match="no single rows"):
            read()


@pytest.mark.parametrize("padded", [False, True])
def test_rows_of_sequences_are_sequences_of_length_1_without_states(padded):
    batch = SampleBatch(obs=np.arange(3), seq_lens=[1, 2], state_in_0=np.arange(2))
    batch = batch.right_zero_pad(4) if padded else batch
    expected = [{"obs": i, "seq_lens": 1} for i in range(3)]
    assert list(batch.rows()) == [batch[i] for i in range(3)] == expected
    assert batch[-1] == expected[-1]
    with pytest.raises(IndexError):
        batch[3]


def test_padded_sequences_are_sliced_as_wholes():
    batch = SampleBatch(obs=np.arange(1, 7), seq_lens=[2, 3, 1], state_in_0=np.arange(3))
    padded = batch.right_zero_pad(3)
    for i, j in ((0, 2), (2, 5), (2, 6), (5, 99), (-1, None), (0, None), (2, 2)):
        part, expected = padded[i:j], batch[i:j]
        assert part.count == expected.count
        assert part["state_in_0"].tolist() == expected["state_in_0"].tolist()
        padded_again = expected.right_zero_pad(3)
        assert part["obs"].tolist() == padded_again["obs"].tolist()
        assert (part.zero_padded, part.max_seq_len) == (True, 3)
    with pytest.raises(ValueError, match="part of a sequence only"):
        padded[:3]
    with pytest.raises(ValueError, match="step 1"):
        padded[::2]


@given(st.integers(0, 6), st.integers(-9, 9))
def test_row_numbers_match_list_indices(n, i):
    batch, rows = batch_of(n), [{"actions": k} for k in range(n)]
    try:
        expected = rows[i]["actions"]
    except IndexError:
        with pytest.raises(IndexError, match=f"no row {i} in a batch of {n} rows"):
            batch[i]
        with pytest.raises(IndexError):
            batch[np.array([i])]
    else:
        row = batch[i]
        assert row["actions"] == expected
        assert row.keys() == next(iter(batch.rows())).keys()
        assert row["obs"].shape == (2,)
        assert row["infos"] == {}
        assert batch[np.int64(i)]["actions"] == expected
        assert batch[[i]]["actions"].tolist() == batch[np.array([i])]["actions"].tolist()


def test_rows_of_empty_batches():
    for empty in (SampleBatch(), batch_of(3)[3:], batch_of(0)):
        assert list(empty.rows()) == empty.split_by_episode() == []
        assert empty[2:5].count == empty[::-1].count == empty[[]].count == 0
        for i in (0, -1):
            with pytest.raises(IndexError):
                empty[i]


def test_other_keys_of_rows_are_rejected():
    for key in ((0, 1), 1.0, None, True):
        with pytest.raises(TypeError, match="by column name, row number, slice or array"):
            batch_of(3)[key]
    mask = batch_of(3)["actions"] > 0
    assert batch_of(3)[mask]["actions"].tolist() == [1, 2]
    nested = SampleBatch(obs={"a": np.arange(4), "b": (np.arange(4) * 10,)})
    assert nested[-1] == {"obs": {"a": 3, "b": (30,)}}


def test_pickle_keeps_columns_and_sources():
    batch = batch_of(3)
    batch.sources = ("here",)
    restored = pickle.loads(pickle.dumps(batch))
    assert restored.sources == ("here",)
    assert (restored["obs"] == batch["obs"]).all()


def test_repr_summarizes_columns():
    text = repr(batch_of(3))
    assert "'actions': np.ndarray((3,), dtype=int64, min=0, max=2, mean=1)" in text
    assert "'infos': np.ndarray((3,), dtype=object, head={})" in text


def test_repr_shows_the_first_text_of_a_column():
    assert "head=a" in repr(SampleBatch(name=np.array(["a", "b"]), data=np.array([b"x", b"y"])))


def test_multi_agent_batch_selects_joins_and_unwraps_policies():
    batch = MultiAgentBatch({"a": batch_of(3), "b": batch_of(2)}, env_steps=3)
    assert (batch.count, batch.agent_steps()) == (3, 5)
    assert list(batch.select(["a"]).policy_batches) == ["a"]
    assert batch.select(["a"]).count == 3
    joined = concat_samples([batch, batch.select(["b"])])
    assert (joined["a"].count, joined["b"].count, joined.env_steps()) == (3, 4, 6)
    with pytest.raises(KeyError, match="no policy 'c'"):
        batch["c"]
    single = batch_of(2).as_multi_agent()
    assert MultiAgentBatch.wrap_as_needed(single.policy_batches, 2)["actions"].tolist() == [0, 1]
    assert isinstance(MultiAgentBatch.wrap_as_needed({"x": batch_of(1)}, 1), MultiAgentBatch)


@given(st.data())
def test_indexed_column_reads_as_array(data):
    base = np.arange(24.0).reshape(8, 3)
    shape = data.draw(st.sampled_from([(5,), (5, 2)]))
    index = data.draw(arrays(np.int64, shape, elements=st.integers(-1, 7)))
    expected = np.where((index == NOTHING)[..., None], 0.0, base[index])
    column = IndexedColumn(base, index)
    assert column.shape == expected.shape
    assert np.array_equal(column, expected)
    assert np.array_equal(column[1:4], expected[1:4])
    assert np.array_equal(column[2], expected[2])
    assert np.array_equal(column[-1], expected[-1])
    rows = np.array([3, 0, 3])
    assert np.array_equal(column[rows], expected[rows])
    joined = IndexedColumn.concat([column, IndexedColumn(base + 100, index)[rows]])
    part = joined[: len(rows)]
    other = np.where((index == NOTHING)[..., None], 0.0, (base + 100)[index])[rows]
    assert np.array_equal(joined, np.concatenate([expected, other]))
    assert np.array_equal(joined[rows], expected[rows])
    assert np.array_equal(part, expected[: len(rows)])
    assert part.base is joined.base  # the fragments are joined once


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.int32])
def test_sequences_of_unsigned_lengths_are_padded(dtype):
    batch = SampleBatch(obs=np.arange(1.0, 6.0), seq_lens=np.array([2, 3], dtype))
    padded = batch.right_zero_pad(4)
    assert padded["obs"].tolist() == [1, 2, 0, 0, 3, 4, 5, 0]
    assert [row["obs"] for row in padded.rows()] == [1, 2, 3, 4, 5]


def with_next_obs(n=6):
    base = np.arange(n + 1.0)
    base.flags.writeable = False
    return SampleBatch(
        obs=base[:n], new_obs=IndexedColumn(base, np.arange(1, n + 1)), x=np.zeros(n)
    )


def test_batch_reads_indexed_columns_as_arrays():
    batch = with_next_obs()
    for columns in (dict(batch), dict(batch.items()), {**batch}):
        assert all(type(column) is np.ndarray for column in columns.values())
    assert batch["new_obs"].tolist() == [1, 2, 3, 4, 5, 6]
    assert batch["next_obs"].tolist() == [1, 2, 3, 4, 5, 6]
    assert batch[2:4]["new_obs"].tolist() == [3, 4]
    assert batch.take_rows(np.array([5, 0]))["new_obs"].tolist() == [6, 1]
    joined = SampleBatch.concat_samples([batch, batch[:2]])
    assert joined["new_obs"].tolist() == [1, 2, 3, 4, 5, 6, 1, 2]
    assert [row["new_obs"] for row in batch.rows()] == [1, 2, 3, 4, 5, 6]
    assert type(batch.pop("new_obs")) is np.ndarray
    assert "new_obs" not in batch
    assert "new_obs" in repr(with_next_obs())


def test_reading_an_indexed_column_returns_a_copy():
    batch = with_next_obs()
    batch["new_obs"][:] = -1
    assert batch["new_obs"].tolist() == [1, 2, 3, 4, 5, 6]
    assert batch["obs"].tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="read-only"):
        batch["obs"][0] = 7


def test_pickle_stores_shared_rows_once():
    base = np.zeros((100, 1000))
    base.flags.writeable = False
    batch = SampleBatch(obs=base[:99], new_obs=IndexedColumn(base, np.arange(1, 100)))
    data = pickle.dumps(batch)
    assert len(data) < 1.1 * base.nbytes
    restored = pickle.loads(data)
    assert restored["obs"].shape == restored["new_obs"].shape == (99, 1000)
    assert pickle.loads(pickle.dumps(with_next_obs()[1:3]))["new_obs"].tolist() == [2, 3]
    assert pickle.loads(pickle.dumps(with_next_obs()[1:3]))["obs"].tolist() == [1, 2]


def test_column_without_rows_is_rejected():
    batch = SampleBatch(obs=np.zeros((3, 2)))
    with pytest.raises(ValueError, match="column 'mine' has a single value instead of one per row"):
        batch["mine"] = "abc"


def test_batch_without_rows_keeps_its_columns():
    empty = SampleBatch(obs=np.zeros((3, 2), np.float32), rewards=np.zeros(3))[:0]
    again = SampleBatch(empty)
    assert set(again) == {"obs", "rewards"}
    assert again["obs"].shape == (0, 2)
    with pytest.raises(ValueError, match="column 'actions' has 2 rows, the batch 0"):
        again["actions"] = np.zeros(2)


def test_column_is_removed_under_both_of_its_names():
    batch = SampleBatch(obs=np.zeros((3, 2)), new_obs=np.ones((3, 2)))
    for name in ("new_obs", "next_obs"):
        assert set(batch.without_columns(name)) == {"obs"}


def test_leaves_of_nested_columns_must_have_equal_lengths():
    obs = {"a": np.zeros(5), "b": np.zeros(3)}
    with pytest.raises(ValueError, match=r"differ in length: \{'obs': \[3, 5\], 'rewards': 5\}"):
        SampleBatch(obs=obs, rewards=np.zeros(5))


def test_rows_without_sequences_have_their_states():
    batch = SampleBatch(obs=np.zeros((2, 1)), state_in_0=np.array([[1.0], [2.0]]))
    assert batch.row(1)["state_in_0"] == [2.0]
    assert [row["state_in_0"].item() for row in batch.rows()] == [1.0, 2.0]


def test_rows_without_a_mask_are_rows_of_the_loss():
    masked = SampleBatch(obs=np.zeros(2), loss_mask=np.array([True, False]))
    joined = SampleBatch.concat_samples([masked, SampleBatch(obs=np.zeros(2))])
    assert joined["loss_mask"].tolist() == [True, False, True, True]


def test_a_misspelled_column_gets_a_suggestion():
    with pytest.raises(KeyError, match=r"no column 'obss' in this batch.*Did you mean 'obs'\?"):
        SampleBatch(obs=np.zeros(2))["obss"]


def test_batch_of_a_batch_keeps_sources_and_padding():
    batch = batch_of(3)
    batch.sources = ("a worker",)
    assert SampleBatch(batch).sources == ("a worker",)
    rows = SampleBatch(obs=np.arange(6.0), seq_lens=[2, 4])
    padded = rows.right_zero_pad(4)
    copy = SampleBatch(padded)
    assert (copy.count, copy.zero_padded, copy.max_seq_len) == (6, True, 4)


@pytest.mark.parametrize("value", [1.0, (1.0, 2.0)])
def test_column_with_a_single_value_is_rejected(value):
    with pytest.raises(ValueError, match="column 'rewards' has a single value"):
        SampleBatch(rewards=value)


def test_concatenation_names_the_column_that_differs():
    parts = [SampleBatch(obs=np.zeros((2, n)), rewards=[1.0, 1.0]) for n in (2, 3)]
    with pytest.raises(ValueError, match="column 'obs' cannot be concatenated"):
        SampleBatch.concat_samples(parts)
    parts[1] = SampleBatch(obs={"a": np.zeros((2, 2))}, rewards=[1.0, 1.0])
    with pytest.raises(ValueError, match="column 'obs' cannot be concatenated"):
        SampleBatch.concat_samples(parts)


def test_copies_of_tensors_are_tensors():
    batch = SampleBatch.unchecked({"obs": torch.ones(2, 3)})
    copy = batch.copy()
    batch["obs"][:] = 0
    assert copy["obs"].tolist() == [[1, 1, 1], [1, 1, 1]]


def test_joined_batches_keep_rows_without_env_steps():
    batches = [MultiAgentBatch({"p": batch_of(2)}, 0), MultiAgentBatch({"p": batch_of(1)}, 1)]
    joined = MultiAgentBatch.concat_samples(batches)
    assert (joined.env_steps(), joined.agent_steps()) == (1, 3)


def test_missing_infos_are_dicts_of_their_own():
    parts = [SampleBatch(rewards=[1.0], infos=[{"a": 1}]), SampleBatch(rewards=[2.0, 3.0])]
    infos = SampleBatch.concat_samples(parts)["infos"]
    infos[1]["b"] = 2
    assert list(infos) == [{"a": 1}, {"b": 2}, {}]
    assert list(SampleBatch.concat_samples(parts)["infos"]) == [{"a": 1}, {}, {}]


def test_lengths_of_sequences_are_not_negative():
    with pytest.raises(ValueError, match="seq_lens must not be negative, got"):
        SampleBatch(obs=np.zeros(5), seq_lens=np.array([6, -1]))


@pytest.mark.parametrize("env_steps", [None, -1, "3", True])
def test_env_steps_of_a_multi_agent_batch_are_an_int(env_steps):
    with pytest.raises(ValueError, match="MultiAgentBatch: env_steps must be an int"):
        MultiAgentBatch({}, env_steps)


def test_rows_of_a_multi_agent_batch_are_batches():
    with pytest.raises(TypeError, match="takes policy id -> SampleBatch, got a dict for 'a'"):
        MultiAgentBatch({"a": {"obs": np.zeros(2)}}, 2)
    with pytest.raises(TypeError, match="concat_samples takes a list of batches, got a NoneType"):
        SampleBatch.concat_samples([SampleBatch(obs=np.zeros(2)), None])
