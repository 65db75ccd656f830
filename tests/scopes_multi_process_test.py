"""Scopes and models: models use the strategy of the scope in which they were created, and otherwise plain Keras."""

from __future__ import annotations

import functools

import pytest

import kdist
from tests.helpers.data import make_data
from tests.helpers.models import network
from tests.helpers.processes import each_backend, run

_model = functools.partial(network, 1, seed=3)
_data = functools.partial(make_data, 8)


def _remembers_outside():
    import numpy as np

    from kdist import keras_hooks
    from tests.helpers.processes import strategy as own

    strategy = own()
    assert strategy.num_replicas_in_sync == 2
    outside = _model()
    with strategy.scope():
        assert kdist.get_strategy() is strategy and kdist.in_cross_replica_context()
        model = _model()
        # A nested scope of the same strategy has no effect.
        with strategy.scope():
            nested = _model()
    assert not kdist.has_strategy()
    assert keras_hooks.strategy_of(model) is keras_hooks.strategy_of(nested) is strategy
    assert keras_hooks.strategy_of(outside) is None
    losses = [m.fit(*_data(), batch_size=4, epochs=2, shuffle=False, verbose=0) for m in (outside, model)]
    assert np.allclose(losses[0].history["loss"], losses[1].history["loss"], rtol=1e-5)
    # If you fit a model in a scope, it keeps the strategy under which it was created.
    inside = _model()
    model.set_weights(inside.get_weights())
    with strategy.scope():
        losses = [m.fit(*_data(), batch_size=4, epochs=2, shuffle=False, verbose=0) for m in (inside, model)]
        assert np.allclose(
            inside.evaluate(*_data(), verbose=0), model.evaluate(*_data(), verbose=0), rtol=1e-5
        )
        assert np.allclose(
            inside.predict(_data()[0], verbose=0), model.predict(_data()[0], verbose=0), rtol=1e-5
        )
        assert kdist.get_strategy() is strategy and kdist.in_cross_replica_context()
    assert np.allclose(losses[0].history["loss"], losses[1].history["loss"], rtol=1e-5)
    with kdist.OneDeviceStrategy("cpu:0").scope():
        inside.fit(*_data(), verbose=0)
        with pytest.raises(RuntimeError, match="inside the scope of another strategy"):
            model.fit(*_data(), verbose=0)
    assert keras_hooks.strategy_of(outside) is None


@each_backend
def test_models_remember_the_strategy_they_were_created_under(backend):
    run(backend, 1, _remembers_outside)


def _calls_of_plain_keras():
    """Checks that models outside of a scope run Keras's own methods, and not the loops of kdist."""
    from kdist.training import methods

    calls = []
    with pytest.MonkeyPatch.context() as patch:  # the worker also runs other tests
        for name in ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"):
            original = getattr(methods, name)

            def counted(*args, _name=name, _original=original, **kwargs):
                calls.append(_name)
                return _original(*args, **kwargs)

            patch.setattr(methods, name, counted)
        _call_models(calls)


def _call_models(calls):
    import keras

    from tests.helpers.processes import strategy as own

    strategy = own()
    x, y = _data()
    plain = _model()
    default = kdist.get_strategy()
    with default.scope():
        under_default = _model()
    for model in (plain, under_default):
        model.fit(x, y, verbose=0)
        model.evaluate(x, y, verbose=0)
        model.predict(x, verbose=0)
        model.train_on_batch(x, y)
        model.test_on_batch(x, y)
        model.predict_on_batch(x)
    assert calls == []
    with strategy.scope():
        model = _model()
    model.fit(x, y, verbose=0)
    model.predict_on_batch(x)
    assert calls == ["fit", "predict_on_batch"]
    # A clone is a normal model: it uses the strategy under which it was created.
    assert keras.models.clone_model(model) is not model
    clone = keras.models.clone_model(model)
    clone.compile("sgd", "mse")
    clone.fit(x, y, verbose=0)
    assert calls == ["fit", "predict_on_batch"]


@each_backend
def test_models_outside_of_a_scope_run_keras_own_methods(backend):
    run(backend, 1, _calls_of_plain_keras)


def _scope_rules():
    """Checks the rules of `context_test.py` with real strategies and, on TensorFlow, with `tf.distribute` itself."""
    import keras

    from tests.helpers.processes import strategy as own

    mirrored, one = own(), kdist.OneDeviceStrategy("cpu:0")
    pairs = [(kdist, mirrored, one)]
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        native = tf.distribute
        pairs.append((native, native.MirroredStrategy(["cpu:0", "cpu:1"]), native.OneDeviceStrategy("cpu:0")))
    seen = []
    for module, first, second in pairs:
        log = [module.has_strategy(), module.in_cross_replica_context()]
        default = module.get_strategy()
        with first.scope() as entered:
            log += [entered is first, module.get_strategy() is first, module.has_strategy()]
            log.append(module.in_cross_replica_context())
            log.append(module.get_replica_context() is None)
            with first.scope():
                log.append(module.get_strategy() is first)
            for call in (second.scope().__enter__, lambda m=module: m.experimental_set_strategy(None)):
                try:
                    call()
                    log.append("no error")
                except RuntimeError:
                    log.append("RuntimeError")
        module.experimental_set_strategy(second)
        log.append(module.get_strategy() is second)
        try:
            first.scope().__enter__()
            log.append("no error")
        except RuntimeError:
            log.append("RuntimeError")
        module.experimental_set_strategy(first)
        log.append(module.get_strategy() is first)
        module.experimental_set_strategy(None)
        log.append(module.has_strategy())
        with module.get_strategy().scope(), second.scope():
            log.append(module.get_strategy() is second)
        try:
            with second.scope():
                default.scope().__enter__()
            log.append("no error")
        except RuntimeError:
            log.append("RuntimeError")
        seen.append(log)
    return seen


EXPECTED = [False, False, True, True, True, True, True, True, "RuntimeError", "RuntimeError"]
EXPECTED += [True, "RuntimeError", True, False, True, "RuntimeError"]


@each_backend
def test_rules_with_real_strategies(backend):
    for log in run(backend, 1, _scope_rules)[0]:
        assert log == EXPECTED
