"""`keras.models.load_model` of a strategy's file: in a scope and out, other strategies, other backends."""

from __future__ import annotations

from tests.processes import each_backend, run, strategy
from tests.saving_multi_process_test import assert_same, make_data, make_model, state_of


def in_worker_save_for_others(path):
    model = make_model(strategy().scope())
    model.fit(*make_data(), batch_size=6, epochs=2, shuffle=False, verbose=0)
    model.save(path)
    saved = state_of(model)
    model.fit(*make_data(), batch_size=6, epochs=2, shuffle=False, verbose=0)
    return saved, state_of(model)


def in_worker_load(path, scoped):
    """Loads in a scope of every number of replicas, or out of one that is open elsewhere; trains on."""
    import contextlib

    import keras

    results = []
    for replicas in (2, 3) if scoped else (2,):
        with strategy(replicas).scope() if scoped else contextlib.nullcontext():
            model = keras.models.load_model(path)
        loaded = state_of(model)
        model.fit(*make_data(), batch_size=6, epochs=2, shuffle=False, verbose=0)
        results.append((loaded, state_of(model)))
    return results


@each_backend
def test_a_file_is_loaded_anywhere_and_trains_on(backend, tmp_path):
    path = str(tmp_path / "model.keras")
    saved, continued = run(backend, 2, in_worker_save_for_others, path)[0]
    others = {"tensorflow": "jax", "jax": "torch", "torch": "tensorflow"}
    for where, workers, scoped in (
        (backend, 1, True),
        (backend, 1, False),
        (backend, 2, True),
        (others[backend], 1, True),
    ):
        for results in run(where, workers, in_worker_load, path, scoped):
            for loaded, trained in results:
                assert_same(saved, loaded, rtol=0)
                assert_same(continued, trained, rtol=1e-4, atol=1e-5)
