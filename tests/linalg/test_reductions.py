"""Gradients by hand: values, and derivatives of both orders."""

import pytest
import torch

from pyro_structvi.linalg.matrices import SumOfLogs
from pyro_structvi.maps import DenseMap
from pyro_structvi.weights.outputs import NormalOutputs


def test_the_sum_of_logs_has_first_and_second_derivatives():
    rows, columns = torch.rand(2, 4, 3) + 0.1, torch.rand(2, 5, 3) + 0.1
    arguments = rows.requires_grad_(), columns.requires_grad_()
    torch.testing.assert_close(SumOfLogs.apply(*arguments), (rows @ columns.mT).log().sum((-2, -1)))
    assert torch.autograd.gradcheck(SumOfLogs.apply, arguments)
    assert torch.autograd.gradgradcheck(SumOfLogs.apply, arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_draws_without_variance_have_no_gradient_by_it(dtype):
    """As behind the floor of a root: inputs of zeros, or rounding below zero."""
    variance = torch.tensor([0.0, -1e-9, 1e-30, 4.0], dtype=dtype, requires_grad=True)
    draws = NormalOutputs(DenseMap(), torch.zeros(4, dtype=dtype), variance).rsample()
    (gradient,) = torch.autograd.grad(draws.sum(), variance)
    assert gradient[:2].tolist() == [0.0, 0.0]
    assert bool(gradient[2:].isfinite().all())
