"""Sums with gradients by hand, gamma functions, Walsh-Hadamard transforms, draws by shown noise."""

import math

import pytest
import torch
from scipy.linalg import hadamard

from pyro_structvi.linalg.matrices import SumOfLogs, log_gamma_ratio, walsh_hadamard_transform
from pyro_structvi.maps import DenseMap
from pyro_structvi.structures.full_covariance import rao_blackwell_sample
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


def value_and_derivative(function, at):
    at = at.clone().requires_grad_()
    value = function(at)
    return value.detach(), *torch.autograd.grad(value.sum(), at)


DEGREES = (1e-3, 1.0, 4.0, 1999.0, 2000.0, 2001.0, 3e4, 1e6, 1e9, 1e12, 1e16, 1e50)


@pytest.mark.parametrize("change", [1, 3, 40, 10**5])
def test_ratios_of_gamma_functions_of_any_degrees_of_freedom(change):
    """For even sizes a ratio is a product; two ratios of odd ones have an even size together."""

    def product(df):
        return (df.unsqueeze(-1) / 2 + torch.arange(change)).log().sum(-1)

    def two_odd(df):
        return log_gamma_ratio(df, change) + log_gamma_ratio(df + change, change)

    close, degrees = torch.testing.assert_close, torch.tensor(DEGREES)
    expected = value_and_derivative(product, degrees)
    even = value_and_derivative(lambda df: log_gamma_ratio(df, 2 * change), degrees)
    for found in (even, value_and_derivative(two_odd, degrees)):
        close(found[0], expected[0], rtol=1e-12, atol=1e-12)
        close(found[1], expected[1], rtol=1e-11, atol=0)
    for df, value in zip(degrees, even[0], strict=True):
        close(log_gamma_ratio(df, 2 * change), value, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(3, 1), (2,), (0, 8), (2, 1, 3, 64), (3, 2048)])
def test_it_multiplies_by_the_matrix_and_so_do_gradients(shape):
    x, size = torch.randn(shape, requires_grad=True), shape[-1]
    matrix = torch.from_numpy(hadamard(size, float)) / math.sqrt(size)
    found, direction = walsh_hadamard_transform(x), torch.randn(shape)
    torch.testing.assert_close(found, x @ matrix)
    (gradient,) = torch.autograd.grad((found * direction).sum(), x)
    torch.testing.assert_close(gradient, direction @ matrix)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
def test_any_dtype(dtype):
    x = torch.randn(3, 256, dtype=dtype)
    found, wide = walsh_hadamard_transform(x), torch.promote_types(dtype, torch.float64)
    assert found.dtype == dtype
    tolerance, exact = 16 * torch.finfo(dtype).eps, walsh_hadamard_transform(x.to(wide))
    torch.testing.assert_close(found.to(wide), exact, atol=tolerance, rtol=tolerance)


def test_no_state_is_left_by_inference_mode_or_a_transform():
    x = torch.randn(3, 16)
    with torch.inference_mode():
        expected = walsh_hadamard_transform(x)
    per_row = torch.func.vmap(torch.func.grad(lambda row: walsh_hadamard_transform(row)[0]))(x)
    torch.testing.assert_close(per_row, torch.full_like(x, 0.25))
    torch.testing.assert_close(walsh_hadamard_transform(x), expected)


def test_other_sizes_are_refused():
    for shape in ((), (2, 0), (4, 6)):
        with pytest.raises(ValueError, match="The last dimension of `x` must be a power of two"):
            walsh_hadamard_transform(torch.zeros(shape))


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


def test_a_second_derivative_is_refused():
    """The gradient is linear in E[e | f], and its derivative in E[e e' | f]."""
    columns = torch.randn(7, 3, requires_grad=True)
    drawn = rao_blackwell_sample(columns, torch.randn(7))
    with pytest.raises(RuntimeError, match=r"first derivatives only.*`local_reparam=False`"):
        torch.autograd.grad(drawn.sin().sum(), columns, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_that_depend_on_each_other_have_finite_gradients(dtype):
    """An input of zeros, and two outputs that are one."""
    columns = torch.randn(7, 1, dtype=dtype) @ torch.tensor([[1.0, 1.0, 0.0]], dtype=dtype)
    noise = torch.randn(4, 7, dtype=dtype)
    for each in (columns, torch.zeros_like(columns)):
        drawn, own = gradient(each, noise, lambda f: f.square().sum(-1))
        torch.testing.assert_close(drawn, noise @ each)
        assert bool(own.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_factored_in_single(dtype):
    columns, noise = torch.randn(7, 3).to(dtype), torch.randn(4, 7).to(dtype)
    found = gradient(columns, noise, lambda f: f.square().sum(-1))
    expected = gradient(columns.double(), noise.double(), lambda f: f.square().sum(-1))
    for own, exact in zip(found, expected, strict=True):
        assert own.dtype == dtype
        torch.testing.assert_close(own.double(), exact, rtol=0.05, atol=0.05)
