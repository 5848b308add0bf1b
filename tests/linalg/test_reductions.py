"""Gradients by hand: values, and derivatives of both orders."""

import pytest
import torch

from pyro_structvi.linalg.matrices import SumOfLogs, floored_sqrt
from pyro_structvi.weights.outputs import draw_normal

SHAPE = (2, 3, 4)


def test_the_sum_of_logs_has_first_and_second_derivatives():
    rows, columns = torch.rand(2, 4, 3) + 0.1, torch.rand(2, 5, 3) + 0.1
    arguments = rows.requires_grad_(), columns.requires_grad_()
    torch.testing.assert_close(SumOfLogs.apply(*arguments), (rows @ columns.mT).log().sum((-2, -1)))
    assert torch.autograd.gradcheck(SumOfLogs.apply, arguments, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(SumOfLogs.apply, arguments)


def test_narrow_variances_keep_their_deviations():
    variance = torch.full((3,), 1e-6, dtype=torch.float16)
    draws = draw_normal(torch.zeros_like(variance), variance, torch.ones_like(variance))
    torch.testing.assert_close(draws.double(), torch.full((3,), 1e-3), rtol=0.05, atol=0)


@pytest.mark.parametrize("kind", ["plain", "vmap"])
def test_normal_draws_have_first_and_second_derivatives(kind):
    mean, noise = torch.randn(SHAPE, requires_grad=True), torch.randn(SHAPE)
    variance = (torch.rand(SHAPE) + 0.1).requires_grad_()

    def draw(mean, variance):
        if kind == "vmap":
            return torch.func.vmap(draw_normal)(mean, variance, noise)
        return draw_normal(mean, variance, noise)

    torch.testing.assert_close(draw(mean, variance), mean + variance.sqrt() * noise)
    assert torch.autograd.gradcheck(draw, (mean, variance), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(draw, (mean, variance))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_draws_without_variance_have_no_gradient_by_it(dtype):
    """As behind the floor of a root: inputs of zeros, or rounding below zero."""
    variance = torch.tensor([0.0, -1e-9, 1e-30, 4.0], dtype=dtype, requires_grad=True)
    mean, noise = torch.zeros(4, dtype=dtype), torch.ones(4, dtype=dtype)
    draws = draw_normal(mean, variance, noise)
    torch.testing.assert_close(draws, floored_sqrt(variance))
    (own,) = torch.autograd.grad(draws.sum(), variance)
    (expected,) = torch.autograd.grad(floored_sqrt(variance).sum(), variance)
    torch.testing.assert_close(own, expected)
    assert own[:2].tolist() == [0.0, 0.0]
