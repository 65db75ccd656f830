"""The rules of scopes that `tf.distribute` documents, with expected values written by hand.

`DefaultStrategy` and strategies without a runtime do not need a backend, so the tests run in this process.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import kdist
from kdist.context import ReplicaContext, Scope
from kdist.errors import StrategyScopeError


class PlainStrategy(kdist.Strategy):
    """A strategy whose resources only log when a scope is entered and left."""

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
        with pytest.raises(RuntimeError, match="inside the scope of another strategy") as info:
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
    with pytest.raises(RuntimeError, match="not the innermost scope of this thread"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)
    with pytest.raises(RuntimeError, match="not the innermost scope of this thread"):
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
    assert errors and "of this thread" in str(errors[0])
    scope.__exit__(None, None, None)


def kdist_default():
    from kdist.strategies.default import default_strategy

    return default_strategy()


@pytest.mark.kills("default_strategy_saves_nothing")
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
    with PlainStrategy().scope(), pytest.raises(RuntimeError, match="inside the scope of another strategy"):
        default.scope().__enter__()
    assert default.extended.should_checkpoint and default.extended.should_save_summary
    with pytest.raises(RuntimeError, match="has no devices"):  # as in `tf.distribute`
        default.extended.worker_devices  # noqa: B018


def test_experimental_set_strategy():
    one, two = PlainStrategy("one"), PlainStrategy("two")
    kdist.experimental_set_strategy(one)
    assert state() == (one, True, True)
    with one.scope():
        pass
    with pytest.raises(RuntimeError, match="inside the scope of another strategy"):
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
            with pytest.raises(RuntimeError, match="Cannot call experimental_set_strategy inside"):
                kdist.experimental_set_strategy(value)
        assert kdist.get_strategy() is one


def test_experimental_set_strategy_inside_a_scope_of_the_set_one():
    one = PlainStrategy("one")
    kdist.experimental_set_strategy(one)
    with one.scope():
        with pytest.raises(RuntimeError, match="Cannot call experimental_set_strategy inside"):
            kdist.experimental_set_strategy(None)
        assert kdist.get_strategy() is one
    assert kdist.get_strategy() is one


def test_in_a_replica():
    strategy = PlainStrategy()
    with strategy.scope(), ReplicaContext(strategy, 1) as replica:
        assert state() == (strategy, True, False)
        assert kdist.get_replica_context() is replica
        assert replica.num_replicas_in_sync == 2 and replica.replica_id_in_sync_group == 1
        with pytest.raises(RuntimeError, match="inside a replica"):
            strategy.scope().__enter__()
        with pytest.raises(RuntimeError):
            kdist.experimental_set_strategy(None)
    assert kdist.get_replica_context().strategy is kdist.get_strategy()


def test_strategy_is_abstract_in_meaning():
    assert issubclass(kdist.MirroredStrategy, kdist.Strategy)
    assert isinstance(kdist.get_strategy(), kdist.Strategy)
