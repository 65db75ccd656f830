"""Sharding delivers every row exactly once, for any number of rows, workers and replicas."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.processes import run

# The readers need Keras's trees, but no particular backend.
BACKEND = "torch"
sizes = st.lists(st.integers(0, 9), max_size=8)
places = st.tuples(st.integers(1, 4), st.integers(1, 3))  # workers, replicas per worker


def in_worker_check_readers():
    import numpy as np

    from kdist.arrays.splitting import even_split
    from kdist.backends.contract import Runtime
    from kdist.data.reading import read_global, read_per_replica, read_pieces
    from kdist.data.sources import source_of

    def batches_of(sizes):
        starts = np.cumsum([0, *sizes])
        return [np.arange(a, b) for a, b in itertools.pairwise(starts)]

    class Place(Runtime):
        def __init__(self, workers, local, index, needs_equal_shapes):
            self.devices = ("cpu:0",) * local
            self.num_workers, self.worker_index = workers, index
            self.needs_equal_shapes = needs_equal_shapes

    Place.__abstractmethods__ = frozenset()  # it never communicates

    def places_of(workers, local, needs_equal_shapes=False):
        return [Place(workers, local, i, needs_equal_shapes) for i in range(workers)]

    def rows_of(batch, place):
        """Returns the rows of a worker's replicas in a step, after the whole batches are split."""
        if batch.whole is None:
            return [[] if part is None else part.tolist() for part in batch.parts]
        split = even_split(len(batch.whole), place.num_replicas)
        return [batch.whole[slice(*split[i])].tolist() for i in place.replica_ids]

    @settings(max_examples=200, deadline=None)
    @given(sizes, places, st.booleans())
    def one_dataset_for_all(sizes, shape, needs_equal_shapes):
        seen = []
        for place in places_of(*shape, needs_equal_shapes):
            steps = list(read_global(source_of(batches_of(sizes)), place, 0, 0))
            seen += [row for step in steps for part in rows_of(step, place) for row in part]
        assert sorted(seen) == list(range(sum(sizes)))

    @settings(max_examples=200, deadline=None)
    @given(sizes, places, st.integers(0, 3))
    def own_pipelines(sizes, shape, start):
        for place in places_of(*shape):
            steps = list(read_per_replica([source_of(batches_of(sizes))], place, 0, start))
            seen = [row for step in steps for part in rows_of(step, place) for row in part]
            skipped = sum(sizes[: start * len(place.devices)])
            assert seen == list(range(skipped, sum(sizes)))

    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.integers(1, 9), min_size=1, max_size=8), places, st.integers(0, 5))
    def pieces(sizes, shape, start):
        workers, local = shape
        sizes = [max(sizes[0], workers * local), *sizes[1:]]
        for place in places_of(*shape):
            steps = list(read_pieces(source_of(batches_of(sizes)), place, 0, 0))
            seen = [row for step in steps for part in rows_of(step, place) for row in part]
            assert seen == list(range(sum(sizes)))
            resumed = list(read_pieces(source_of(batches_of(sizes)), place, 0, start))
            assert [s.counts for s in resumed] == [s.counts for s in steps[start:]]

    @given(st.integers(0, 1000), st.integers(1, 64))
    def split(rows, replicas):
        parts = even_split(rows, replicas)
        assert [n for a, b in parts for n in range(a, b)] == list(range(rows))
        lengths = [b - a for a, b in parts]
        assert max(lengths) - min(lengths) <= 1
        assert lengths == sorted(lengths, reverse=True)

    for check in (one_dataset_for_all, own_pipelines, pieces, split):
        check()
    return True


@pytest.mark.kills("data_rows_of_the_chief", "data_skips_too_few")
def test_every_row_is_delivered_exactly_once():
    assert run(BACKEND, 1, in_worker_check_readers)[0]


def in_worker_check_travelling():
    import numpy as np
    from hypothesis.extra import numpy as hnp

    from kdist.arrays.row_exchange import decode, encode

    arrays = hnp.arrays(
        st.sampled_from(["float32", "int64", "uint8", "bool", "complex64", "<U3", "S4"]),
        hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4),
    )
    strings = st.lists(st.one_of(st.binary(max_size=5), st.text(max_size=5)), max_size=4).map(
        lambda items: np.array([*items, None], object)[:-1]
    )
    trees = st.recursive(
        st.one_of(arrays, strings, st.none()),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.text(max_size=3), inner, max_size=3),
        ),
        max_leaves=6,
    )

    def assert_same(a, b):
        assert type(a) is type(b)
        if isinstance(a, dict):
            assert list(a) == list(b)
            a, b = list(a.values()), list(b.values())
        if isinstance(a, (list, tuple)):
            assert len(a) == len(b)
            for x, y in zip(a, b, strict=True):
                assert_same(x, y)
        elif a is not None:
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)

    @settings(max_examples=300, deadline=None)
    @given(trees)
    def there_and_back(tree):
        assert_same(tree, decode(encode(tree)))

    there_and_back()
    return True


def test_rows_arrive_as_they_were_sent():
    assert run(BACKEND, 1, in_worker_check_travelling)[0]
