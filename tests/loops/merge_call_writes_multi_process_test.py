"""`merge_call` reads and writes variables that replicas have written before."""

from __future__ import annotations

import numpy as np
import pytest

import kdist
from tests.helpers.processes import strategy
from tests.loops.clusters import each_cluster, local_results, numpy_of, on_replicas, per_replica

KINDS = (
    ("sum", "auto"),
    ("mean", "auto"),
    ("only_first_replica", "auto"),
    ("sum", "on_read"),
    ("mean", "on_read"),
)


def in_worker_pending_writes(num_replicas):
    """Writes in the replicas, in a `merge_call` and again in the replicas; returns all values."""
    import keras

    s = strategy(num_replicas)

    def variables():
        made = [
            keras.Variable(1.0, trainable=False, aggregation=how, synchronization=when) for how, when in KINDS
        ]
        return [*made, keras.Variable(1.0, trainable=False, aggregation="sum")]

    with s.scope():
        inside = variables()
    results = []
    for written in (inside, variables()):  # the latter are outside of all scopes
        *added, assigned = written

        def fn(number, added=added, assigned=assigned):
            def merge_fn(_):
                seen = [variable + 0 for variable in (*added, assigned)]
                for variable in (*added, assigned):
                    variable.assign_add(10.0)
                return seen

            for variable in added:
                variable.assign_add(number)
            assigned.assign(number)
            seen = kdist.get_replica_context().merge_call(merge_fn)
            after = [variable.value + 0 for variable in (*added, assigned)]
            added[0].assign_add(number)
            return seen, after

        found = s.run(fn, args=(per_replica(s, lambda i: np.float32(i + 1)),))
        outside = [numpy_of(variable.value) for variable in written]
        results.append([(*parts, outside) for parts in local_results(s, found)])
    return list(zip(*results, strict=True))


@pytest.mark.kills(
    merge_call_before_writes_are_aggregated="[2-replicas-on-1-torch]",
    additions_after_a_merge_call_count_from_the_start="[2-replicas-on-1-tensorflow]",
    merge_call_before_shared_variables_are_written="[2-replicas-on-1-tensorflow]",
)
@each_cluster
def test_a_merge_call_sees_what_the_replicas_wrote(backend, num_workers, num_replicas):
    numbers = np.arange(num_replicas) + 1
    total, mean = numbers.sum(), numbers.mean()
    seen = np.array([1 + total, 1 + mean, 2, 1 + total, 1 + mean, total])
    after_merge, end = seen + 10, seen + 10
    end[0] += total
    for places in on_replicas(backend, num_workers, num_replicas, in_worker_pending_writes):
        for in_merge, after, outside in places:
            np.testing.assert_allclose(in_merge, seen, rtol=1e-6)
            is_on_read = np.array([when == "on_read" for _, when in KINDS] + [False])
            np.testing.assert_allclose(np.array(after)[~is_on_read], after_merge[~is_on_read], rtol=1e-6)
            np.testing.assert_allclose(outside, end, rtol=1e-6)
