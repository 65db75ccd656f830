"""Scope rules, as `tf.distribute` documents them. Expectations are written down by hand.

`DefaultStrategy` and strategies without a runtime need no backend; models do, in worker processes.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import kdist
from kdist.context import ReplicaContext, Scope
from kdist.errors import StrategyScopeError
from tests.processes import each_backend, run


class PlainStrategy(kdist.Strategy):
    """A strategy whose resources are a note of what was entered and left."""

    def __init__(self, name="one"):
        self.name = name
        self.log = []

    @property
    def num_replicas_in_sync(self):
        return 2

    def scope(self):
        return Scope(self, self._resources)

    @contextlib.contextmanager
    def _resources(self):
        self.log.append("enter")
        try:
            yield
        finally:
            self.log.append("leave")


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    yield
    kdist.experimental_set_strategy(None)
    assert not kdist.has_strategy()


def state():
    return kdist.get_strategy(), kdist.has_strategy(), kdist.in_cross_replica_context()


def test_outside_of_any_scope():
    default = kdist.get_strategy()
    assert state() == (default, False, False)
    assert kdist.get_strategy() is default
    assert default.num_replicas_in_sync == 1 and default.cluster_resolver is None
    replica = kdist.get_replica_context()
    assert replica.replica_id_in_sync_group == 0 and replica.num_replicas_in_sync == 1
    assert replica.strategy is default


def test_in_a_scope_and_after_it():
    strategy = PlainStrategy()
    with strategy.scope() as entered:
        assert entered is strategy
        assert state() == (strategy, True, True)
        assert kdist.get_replica_context() is None
    assert not kdist.has_strategy() and strategy.log == ["enter", "leave"]


def test_the_same_strategy_may_be_nested():
    strategy = PlainStrategy()
    with strategy.scope():
        with strategy.scope() as inner:
            assert inner is strategy and state() == (strategy, True, True)
        assert state() == (strategy, True, True)
    assert not kdist.has_strategy()


def test_one_scope_object_may_be_entered_again():
    strategy = PlainStrategy()
    scope = strategy.scope()
    for _ in range(2):
        with scope:
            assert kdist.get_strategy() is strategy
    with scope, scope:
        assert kdist.get_strategy() is strategy
    assert strategy.log == ["enter", "leave"] * 2 + ["enter", "enter", "leave", "leave"]


def test_mixing_strategies_is_a_runtime_error():
    one, two = PlainStrategy("one"), PlainStrategy("two")
    with one.scope():
        with pytest.raises(RuntimeError, match="cannot be mixed") as info:
            two.scope().__enter__()
        assert isinstance(info.value, StrategyScopeError) and "current=" in str(info.value)
        assert kdist.get_strategy() is one and two.log == []
    with two.scope():
        assert kdist.get_strategy() is two


def test_wrong_order_of_leaving_is_a_runtime_error():
    strategy = PlainStrategy()
    outer, inner = strategy.scope(), strategy.scope()
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(RuntimeError, match="reverse order"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)
    with pytest.raises(RuntimeError, match="reverse order"):
        outer.__exit__(None, None, None)
    assert not kdist.has_strategy()


def test_an_error_in_the_block_leaves_the_scope():
    strategy = PlainStrategy()
    with pytest.raises(KeyError), strategy.scope():
        raise KeyError
    assert not kdist.has_strategy() and strategy.log == ["enter", "leave"]


def test_a_scope_whose_resources_fail_is_not_entered():
    class Failing(PlainStrategy):
        @contextlib.contextmanager
        def _resources(self):
            raise OSError("no device")
            yield

    with pytest.raises(OSError, match="no device"):
        Failing().scope().__enter__()
    assert not kdist.has_strategy()


def test_a_scope_counts_for_its_thread_only():
    one, two = PlainStrategy("one"), PlainStrategy("two")
    with one.scope(), ThreadPoolExecutor(1) as other:
        assert other.submit(state).result(10) == (kdist_default(), False, False)

        def enters_its_own():
            with two.scope():
                return kdist.get_strategy()

        assert other.submit(enters_its_own).result(10) is two
        assert kdist.get_strategy() is one
    scope = one.scope()
    scope.__enter__()
    errors = []

    def leaves_it():
        try:
            scope.__exit__(None, None, None)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=leaves_it)
    thread.start()
    thread.join(10)
    assert errors and "thread that entered" in str(errors[0])
    scope.__exit__(None, None, None)


def kdist_default():
    from kdist.strategies.default import default_strategy

    return default_strategy()


def test_the_default_strategy():
    # "Code written using this strategy should behave exactly as code written without any strategy."
    default = kdist.get_strategy()
    with default.scope() as entered:
        assert entered is default
        assert state() == (default, False, False)
        assert kdist.get_replica_context().replica_id_in_sync_group == 0
        with PlainStrategy().scope() as inner:
            assert kdist.get_strategy() is inner
        with default.scope():
            assert state() == (default, False, False)
    with PlainStrategy().scope(), pytest.raises(RuntimeError, match="cannot be mixed"):
        default.scope().__enter__()


def test_experimental_set_strategy():
    one, two = PlainStrategy("one"), PlainStrategy("two")
    kdist.experimental_set_strategy(one)
    assert state() == (one, True, True)
    with one.scope():
        pass
    with pytest.raises(RuntimeError, match="cannot be mixed"):
        two.scope().__enter__()
    kdist.experimental_set_strategy(two)
    assert kdist.get_strategy() is two and one.log[-1] == "leave"
    kdist.experimental_set_strategy(None)
    assert not kdist.has_strategy()
    kdist.experimental_set_strategy(None)


def test_experimental_set_strategy_inside_a_scope_is_a_runtime_error():
    one, two = PlainStrategy("one"), PlainStrategy("two")
    with one.scope():
        for value in (None, one, two):
            with pytest.raises(RuntimeError, match="must not be called inside"):
                kdist.experimental_set_strategy(value)
        assert kdist.get_strategy() is one


def test_experimental_set_strategy_inside_a_scope_of_the_set_one():
    one = PlainStrategy("one")
    kdist.experimental_set_strategy(one)
    with one.scope():
        with pytest.raises(RuntimeError, match="must not be called inside"):
            kdist.experimental_set_strategy(None)
        assert kdist.get_strategy() is one
    assert kdist.get_strategy() is one


def test_in_a_replica():
    strategy = PlainStrategy()
    with strategy.scope(), ReplicaContext(strategy, 1) as replica:
        assert state() == (strategy, True, False)
        assert kdist.get_replica_context() is replica
        assert replica.num_replicas_in_sync == 2 and replica.replica_id_in_sync_group == 1
        with pytest.raises(RuntimeError, match="cross-replica context"):
            strategy.scope().__enter__()
        with pytest.raises(RuntimeError):
            kdist.experimental_set_strategy(None)
    assert kdist.get_replica_context().strategy is kdist.get_strategy()


def test_strategy_is_abstract_in_meaning():
    assert issubclass(kdist.MirroredStrategy, kdist.Strategy)
    assert isinstance(kdist.get_strategy(), kdist.Strategy)


# With a backend ---------------------------------------------------------------------------------------------


def _model():
    import keras

    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def _data(rows=8):
    import numpy as np

    x = np.random.RandomState(0).randn(rows, 2).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def _remembers_outside():
    import numpy as np

    from kdist import keras_hooks
    from tests.processes import strategy as own

    strategy = own()
    assert strategy.num_replicas_in_sync == 2
    outside = _model()
    with strategy.scope():
        assert kdist.get_strategy() is strategy and kdist.in_cross_replica_context()
        model = _model()
        # Deeper nesting of the same strategy changes nothing.
        with strategy.scope():
            nested = _model()
    assert not kdist.has_strategy()
    assert keras_hooks.strategy_of(model) is keras_hooks.strategy_of(nested) is strategy
    assert keras_hooks.strategy_of(outside) is None
    losses = [m.fit(*_data(), batch_size=4, epochs=2, shuffle=False, verbose=0) for m in (outside, model)]
    assert np.allclose(losses[0].history["loss"], losses[1].history["loss"], rtol=1e-5)
    # Fitted in a scope, a model still belongs to where it was made.
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
        with pytest.raises(RuntimeError, match="cannot be mixed"):
            model.fit(*_data(), verbose=0)
    assert keras_hooks.strategy_of(outside) is None


@each_backend
def test_models_remember_the_strategy_they_were_created_under(backend):
    run(backend, 1, _remembers_outside)


def _calls_of_plain_keras():
    """What Keras's own methods saw: kdist's loop calls none of them."""
    from kdist.training import methods

    calls = []
    with pytest.MonkeyPatch.context() as patch:  # the worker is kept for other tests
        for name in ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"):
            original = getattr(methods, name)

            def counted(*args, _name=name, _original=original, **kwargs):
                calls.append(_name)
                return _original(*args, **kwargs)

            patch.setattr(methods, name, counted)
        _call_models(calls)


def _call_models(calls):
    import keras

    from tests.processes import strategy as own

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
    # A clone is a model like any other: it belongs to where it is made.
    assert keras.models.clone_model(model) is not model
    clone = keras.models.clone_model(model)
    clone.compile("sgd", "mse")
    clone.fit(x, y, verbose=0)
    assert calls == ["fit", "predict_on_batch"]


@each_backend
def test_models_outside_of_a_scope_run_keras_own_methods(backend):
    run(backend, 1, _calls_of_plain_keras)


def _scope_rules():
    """The rules once more with real strategies, and with `tf.distribute` itself where it is there."""
    import keras

    from tests.processes import strategy as own

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
