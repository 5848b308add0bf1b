"""Draws by the part of the noise that they show: the same values, and gradients of the same mean."""

import pytest
import torch

from pyro_structvi.structures.full_covariance import rao_blackwell_sample


def gradient(columns, noise, function):
    columns = columns.detach().requires_grad_()
    drawn = rao_blackwell_sample(columns, noise)
    return drawn.detach(), torch.autograd.grad(function(drawn).sum(), columns)[0]


def test_the_gradient_is_the_mean_of_that_of_the_noise_given_the_draws():
    columns, noise = torch.randn(7, 3), torch.randn(7)
    drawn, own = gradient(columns, noise, lambda f: f.sin().prod(-1))
    torch.testing.assert_close(drawn, noise @ columns, rtol=1e-12, atol=1e-12)
    f = drawn.requires_grad_()
    (by_output,) = torch.autograd.grad(f.sin().prod(-1), f)
    mean = columns @ torch.linalg.solve(columns.mT @ columns, drawn.detach())
    torch.testing.assert_close(own, torch.outer(mean, by_output), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_that_depend_on_each_other_have_finite_gradients(dtype):
    """An input of zeros, and two outputs that are one."""
    columns = torch.randn(7, 1, dtype=dtype) @ torch.tensor([[1.0, 1.0, 0.0]], dtype=dtype)
    noise = torch.randn(4, 7, dtype=dtype)
    for each in (columns, torch.zeros_like(columns)):
        drawn, own = gradient(each, noise, lambda f: f.square().sum(-1))
        torch.testing.assert_close(drawn, noise @ each)
        assert bool(own.isfinite().all())
