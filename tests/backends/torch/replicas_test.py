import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from tests.backends.where import in_worker

if in_worker:
    import keras
    import torch

    from kdist.arrays.splitting import split_rows
    from kdist.backends.replica import shares_of
    from kdist.backends.threads import ReplicaThreads
    from kdist.backends.torch.replicas import TorchReplica, VariableCopies
    from kdist.backends.torch.workers import Workers


def in_replicas(rows, replicas, body):
    """Runs `body(replica, its rows)` in each replica."""
    split = split_rows(rows, replicas)
    shares = shares_of(split)
    threads = ReplicaThreads([f"replica {i}" for i in range(replicas)])

    def one(index, baton):
        strategy = SimpleNamespace(own_ops=None, runtime=SimpleNamespace(compression=None, low_rank=None))
        return body(TorchReplica(strategy, index, shares, index, baton, Workers()), slice(*split[index]))

    return threads.run(one)


# The replicas do not divide the rows, divide them, or outnumber them.
SIZES = [(7, 2), (8, 3), (6, 3), (2, 3)]


@pytest.mark.parametrize(("rows", "replicas"), SIZES)
def test_synchronized_moments_and_their_gradients_are_those_of_all_rows(rows, replicas):
    x = torch.randn(rows, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3 + 100
    weight = torch.linspace(0.5, 1.5, 3, dtype=torch.float64)
    factor = torch.randn(rows, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def loss_of(x, weight, factor, moments):
        h = x * weight
        mean, variance = moments(h)
        # The factor differs between rows: otherwise the loss would have no gradient through the mean.
        return ((((h - mean) / torch.sqrt(variance + 1e-3)) * factor) ** 3).mean(), mean, variance

    w = weight.clone().requires_grad_()
    expected, mean, variance = loss_of(x, w, factor, lambda h: (h.mean((0, 1)), h.var((0, 1), correction=0)))
    expected.backward()

    def body(replica, own):
        local = weight.clone().requires_grad_()
        loss, *moments = loss_of(x[own], local, factor[own], lambda h: replica.moments(h, [0, 1]))
        loss.backward()
        (gradient,) = replica.sum_gradients([local.grad], [local])
        return replica.mean_over_rows([loss.detach()])[0], gradient, *moments

    for loss, gradient, its_mean, its_variance in in_replicas(rows, replicas, body):
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(gradient, w.grad)
        torch.testing.assert_close(its_mean.detach(), mean.detach())
        torch.testing.assert_close(its_variance.detach(), variance.detach())


@pytest.mark.parametrize(("rows", "replicas"), SIZES)
def test_second_derivatives_go_through_the_sum(rows, replicas):
    x = torch.arange(rows, dtype=torch.float64) + 1

    def penalty_of(x, w, mean_of):
        h = mean_of(w * x**2) * w * x
        loss = (h**2).mean()
        (gradient,) = torch.autograd.grad(loss, w, create_graph=True)
        return loss, gradient

    w = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    loss, gradient = penalty_of(x, w, torch.mean)
    (second,) = torch.autograd.grad(gradient, w)

    def body(replica, own):
        local = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

        def mean_of(values):
            return replica.all_reduce_with_gradient(values.mean() * replica.rows.share)

        _, mine = penalty_of(x[own], local, mean_of)
        (mine_second,) = torch.autograd.grad(mine, local)
        return replica.mean_over_rows([mine.detach(), mine_second])

    for first, its_second in in_replicas(rows, replicas, body):
        torch.testing.assert_close(first, gradient.detach())
        torch.testing.assert_close(its_second, second)


def test_variance_keeps_its_digits_where_the_mean_is_large():
    x = torch.randn(30, 2, generator=torch.Generator().manual_seed(1)) + 3000.0
    expected = x.double().var(0, correction=0)
    for variance in in_replicas(30, 2, lambda replica, own: replica.moments(x[own], [0])[1]):
        np.testing.assert_allclose(variance, expected, rtol=1e-4)


def test_half_precision_moments_do_not_overflow():
    x = torch.full((8, 2), 60000.0, dtype=torch.float16)
    x[::2] -= 100
    for mean, variance in in_replicas(8, 2, lambda replica, own: replica.moments(x[own], [0], keepdims=True)):
        assert mean.dtype == variance.dtype == torch.float16
        assert mean.shape == (1, 2)
        assert torch.isfinite(mean).all()


def test_copies_do_not_keep_variables_alive_and_follow_them():
    copies = VariableCopies(torch.device("cpu"))
    variable = keras.Variable([1.0, 2.0])
    copy = copies.get(variable)
    copy.grad = torch.ones(2)
    assert copy.is_leaf
    assert copy.requires_grad
    variable.assign([3.0, 4.0])
    variable.trainable = False
    copies.start_step()
    assert copies.get(variable) is copy
    assert copy.tolist() == [3.0, 4.0]
    assert copy.grad is None
    assert not copy.requires_grad
    gone = weakref.ref(variable)
    del variable
    gc.collect()
    assert gone() is None
    copies.start_step()
    assert copies.versions() == {}


def test_sums_have_one_collective_a_dtype_and_keep_shapes():
    meetings = []

    def body(replica, own):
        meet = replica._baton.meet
        replica._baton.meet = lambda index, what, *rest: (meetings.append(what), meet(index, what, *rest))[1]
        tensors = [torch.ones(2, 3), torch.tensor(2, dtype=torch.int64), torch.ones(()), torch.zeros(0)]
        found = replica.all_reduce_packed(tensors)
        replica._baton.meet = meet
        return found

    for a, b, c, d in in_replicas(4, 2, body):
        assert a.shape == (2, 3)
        assert a.eq(2).all()
        assert b.dtype == torch.int64
        assert int(b) == 4
        assert float(c) == 2.0
        assert d.shape == (0,)
    assert {len(what[1]) for what in meetings if what[0] == "sum"} == {2}


def test_what_is_summed_is_not_written_to():
    def body(replica, own):
        tensor = torch.ones(3)
        replica.all_reduce_sum([tensor])
        replica.mean_over_rows([tensor])
        return tensor

    for tensor in in_replicas(4, 2, body):
        assert tensor.eq(1).all()
