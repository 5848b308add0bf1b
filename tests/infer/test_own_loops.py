"""Loops of the user's own over two processes, by torch's ``DistributedDataParallel``."""

import pyro
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pyro_structvi as ps
from tests.infer.two_ranks import assert_close, make_fit, on_two_ranks
from tests.infer.validated_fits import assert_equal
from tests.models import linear_function


def gradients_of(module):
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def own_loop():
    model, guide, (x, y) = make_fit(ps.MAPGuide)
    guide.initialize(x, y)
    loss = DistributedDataParallel(ps.StructuredELBO(kl_weight=0.5)(model, guide))
    x, y = (value.chunk(2)[dist.get_rank()] for value in (x, y))
    loss(x, y).backward()
    return gradients_of(guide)


def test_an_own_loop_gets_the_gradients_of_the_whole_batch(tmp_path):
    model, guide, data = make_fit(ps.MAPGuide)
    ps.StructuredELBO(kl_weight=0.5)(model, guide)(*data).backward()
    for found in on_two_ranks(own_loop, tmp_path):
        assert_close(found, gradients_of(guide))


def own_loop_of_a_function():
    guide = ps.KTiedGuide(linear_function)
    x, y = torch.randn(6, 3), torch.randn(6, 2)
    guide.initialize(x, y)
    pyro.set_rng_seed(dist.get_rank())
    loss = DistributedDataParallel(ps.StructuredELBO()(linear_function, guide))
    adam = torch.optim.Adam(loss.parameters(), lr=0.02)
    losses = []
    for _ in range(200):
        adam.zero_grad()
        value = loss(x, y)
        value.backward()
        adam.step()
        losses.append(value.item())
    return losses, guide.state_dict()


@pytest.mark.slow
def test_an_own_loop_trains_a_function(tmp_path):
    (losses, first), (others, second) = on_two_ranks(own_loop_of_a_function, tmp_path)
    assert sum(losses[-20:]) < sum(losses[:20])
    assert losses != others, "noise of its own"
    assert_equal(first, second)
