"""Partitioners and placement match TensorFlow's, for any shapes and dtypes."""

from __future__ import annotations

from tests.helpers.processes import run


def compare() -> int:
    """Compares both implementations in a process with TensorFlow; returns the number of comparisons."""
    import tensorflow as tf
    from hypothesis import given, settings
    from hypothesis import strategies as st

    from kdist.coordinator import partitioners
    from kdist.coordinator.placement import place

    theirs = tf.distribute.experimental.partitioners
    dtypes = st.sampled_from(
        [tf.float32, tf.float64, tf.bfloat16, tf.int8, tf.uint16, tf.bool, tf.complex128, tf.string, tf.half]
        + [tf.qint32, tf.dtypes.experimental.float8_e5m2, tf.dtypes.experimental.int4]
    )
    numbers = st.integers(1, 300) | st.integers(1, 1 << 40)
    kinds = st.one_of(
        st.tuples(st.just("FixedShardsPartitioner"), st.tuples(st.integers(1, 40))),
        st.tuples(st.just("MinSizePartitioner"), st.tuples(numbers, st.integers(1, 40), numbers)),
        st.tuples(st.just("MaxSizePartitioner"), st.tuples(numbers, st.none() | st.integers(0, 40), numbers)),
    )
    count = 0

    @settings(max_examples=400, deadline=None, database=None)
    @given(
        kinds,
        st.lists(st.integers(1, 40) | st.integers(1, 1 << 30), min_size=1, max_size=4),
        dtypes,
        st.data(),
    )
    def same(kind, sizes, dtype, data):
        nonlocal count
        name, args = kind
        axis = data.draw(st.integers(-len(sizes), len(sizes) - 1))
        native, own = getattr(theirs, name)(*args), getattr(partitioners, name)(*args)
        shape = tf.TensorShape(sizes)
        expected = native(shape, dtype, axis=axis)
        assert own(shape, dtype, axis=axis) == expected
        assert own(tuple(sizes), dtype.name, axis=axis) == expected
        # A strategy also accepts TensorFlow's partitioners.
        if native(shape, dtype)[0] < 1000:
            assert place(sizes, dtype.name, native, 3) == place(sizes, dtype.name, own, 3)
        count += 1

    same()
    return count


def native_rows(num_rows: int, num_shards: int, num_servers: int) -> list[tuple[list[int], list[int]]]:
    """Returns how TensorFlow's strategy shards two variables: the rows per shard, and the servers."""
    from contextlib import nullcontext
    from unittest import mock

    import tensorflow as tf
    from tensorflow.python.distribute import parameter_server_strategy_v2 as native

    class Noting:
        """Forwards to TensorFlow's operations and notes the requested servers; it needs no server."""

        ops = native.ops

        def __getattr__(self, name):
            return getattr(self.ops, name)

        def device(self, name):
            servers.append(int(name.removeprefix("/job:ps/task:").split("/")[0]))
            return nullcontext()

    kind = native.ParameterServerStrategyV2Extended
    extended = kind.__new__(kind)
    extended._num_ps, extended._variable_count = num_servers, 0
    extended._variable_partitioner = tf.distribute.experimental.partitioners.FixedShardsPartitioner(
        num_shards
    )
    extended._create_var_creator = lambda next_creator, **kwargs: next_creator
    found = []
    for rows in (num_rows, num_rows + 1):
        servers: list[int] = []
        with mock.patch.object(native, "ops", Noting()):
            made = extended._create_variable(
                lambda initial_value, **_: tf.Variable(
                    initial_value() if callable(initial_value) else initial_value
                ),
                initial_value=tf.zeros([rows, 2]),
            )
        parts = getattr(made, "variables", [made])
        found.append(([int(part.shape[0]) for part in parts], servers))
    return found


def own_rows(num_rows: int, num_shards: int, num_servers: int) -> list[tuple[list[int], list[int]]]:
    from kdist.coordinator.partitioners import FixedShardsPartitioner
    from kdist.coordinator.placement import place

    found, placed = [], 0
    for rows in (num_rows, num_rows + 1):
        made = place((rows, 2), "float32", FixedShardsPartitioner(num_shards), num_servers, placed)
        placed += made.num_shards
        found.append(([stop - start for start, stop in made.spans], list(made.servers)))
    return found


def test_they_say_what_tensorflow_s_say():
    assert run("tensorflow", 1, compare)[0] >= 100


def test_parts_are_where_tensorflow_s_strategy_has_them():
    for case in ((10, 4, 3), (7, 2, 2), (3, 5, 2), (9, 1, 2)):
        assert own_rows(*case) == run("tensorflow", 1, native_rows, *case)[0]
