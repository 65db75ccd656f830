"""Placement puts each row into exactly one shard, whatever the variable and the partitioner."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdist.coordinator.placement import place
from kdist.errors import InvalidArgumentError

shapes = st.lists(st.integers(0, 12), max_size=3).map(tuple)


def into(parts):
    return lambda shape, dtype: [parts, *[1] * (len(shape) - 1)]


@pytest.mark.kills("servers_take_turns")
@given(shapes, st.integers(1, 20), st.integers(1, 5), st.integers(0, 9))
def test_cut_and_joined_it_is_the_same(shape, parts, num_servers, placed):
    placement = place(shape, "int64", into(parts), num_servers, placed)
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    shards = placement.cut(array)
    assert [shard.shape for shard in shards] == placement.shard_shapes
    assert all(np.shares_memory(shard, array) for shard in shards if shard.size)
    np.testing.assert_array_equal(placement.join(shards), array)
    rows = [row for start, stop in placement.spans for row in range(start, stop)]
    assert rows == list(range(shape[0] if shape else 1))
    sizes = [stop - start for start, stop in placement.spans]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    assert len(sizes) == (min(parts, shape[0]) if shape and shape[0] else 1)
    assert placement.servers == tuple((placed + shard) % num_servers for shard in range(len(sizes)))


@pytest.mark.kills("rows_of_a_part_count_from_its_first")
@given(st.integers(1, 30), st.integers(1, 8), st.data())
def test_each_row_that_is_asked_for_is_found_in_one_part(rows, parts, data):
    placement = place((rows, 2), "int64", into(parts), 3)
    ids = data.draw(st.lists(st.integers(0, rows - 1), max_size=40))
    array = np.arange(2 * rows).reshape(rows, 2)
    shards = placement.cut(array)
    found = placement.rows_by_shard(ids)
    assert sorted(position for one in found for position in one.positions.tolist()) == list(range(len(ids)))
    assert all(len(one.rows) for one in found)
    pulled = placement.join_rows(found, [shards[one.shard][one.rows] for one in found], array.dtype)
    np.testing.assert_array_equal(pulled, array[ids] if ids else array[:0])
    assert pulled.dtype == array.dtype


def test_a_partitioner_is_not_asked_about_what_cannot_be_divided():
    def never(shape, dtype):
        raise AssertionError

    assert place((), "float32", never, 2, 1).servers == (1,)
    assert place((0, 4), "float32", never, 2).spans == ((0, 0),)
    assert place((7,), "float32", None, 2).spans == ((0, 7),)


@pytest.mark.parametrize(
    "answer", [[0, 1], [-2, 1], [], [2, 2], [1, 2], [2, 0], [2, -1, -1], [1.5, 1], None, 3, "21"]
)
def test_an_answer_that_cannot_be_is_shown(answer):
    with pytest.raises(InvalidArgumentError, match="did not return a valid number of parts") as error:
        place((4, 3), "float32", lambda shape, dtype: answer, 2)
    assert f"returned={answer!r}" in str(error.value) and "shape=(4, 3)" in str(error.value)


def test_integers_of_any_kind_are_taken_and_shards_are_not_more_than_rows():
    assert place((3, 2), "float32", lambda shape, dtype: np.array([9, 1]), 2).spans == (
        (0, 1),
        (1, 2),
        (2, 3),
    )


def test_arrays_and_rows_of_others_are_refused():
    placement = place((4, 3), "float32", into(2), 2)
    for wrong in (
        lambda: placement.cut(np.zeros((5, 3))),
        lambda: placement.join([np.zeros((2, 3))]),
        lambda: placement.join([np.zeros((1, 3)), np.zeros((3, 3))]),
        lambda: placement.rows_by_shard([4]),
        lambda: placement.rows_by_shard([-1]),
        lambda: placement.rows_by_shard([0.5]),
        lambda: placement.rows_by_shard([[1]]),
        lambda: place((), "float32", None, 1).rows_by_shard([0]),
        lambda: place((4,), "float32", None, 0),
    ):
        with pytest.raises(InvalidArgumentError):
            wrong()
