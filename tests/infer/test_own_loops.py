"""Loops of the user's own over two processes, by torch's ``DistributedDataParallel``."""

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pyro_structvi as ps
from tests.infer.two_ranks import assert_close, make_fit, on_two_ranks


def gradients_of(module):
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def own_loop():
    model, guide, (x, y) = make_fit(ps.MAPGuide)
    guide.initialize(x, y)
    loss = DistributedDataParallel(ps.StructuredELBO(kl_weight=0.5)(model, guide))
    x, y = (value.chunk(2)[dist.get_rank()] for value in (x, y))
    loss(x, y).backward()
    return gradients_of(guide)


@pytest.mark.slow
def test_an_own_loop_gets_the_gradients_of_the_whole_batch(tmp_path):
    model, guide, data = make_fit(ps.MAPGuide)
    ps.StructuredELBO(kl_weight=0.5)(model, guide)(*data).backward()
    for found in on_two_ranks(own_loop, tmp_path):
        assert_close(found, gradients_of(guide))
