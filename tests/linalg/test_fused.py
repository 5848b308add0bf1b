"""Steps with gradients by hand: values, gradients of both orders, and what is written in place."""

import pytest
import torch

from pyro_structvi.linalg.precision import floored_sqrt
from pyro_structvi.linalg.reductions import AddScaledNoise, BankAndSquaredNorm, variance_and_sums
from pyro_structvi.weights.outputs import draw_normal, square

SHAPE = (2, 3, 4)
COEFFICIENTS = [(), (1,), (1, 1, 1), (3, 1), (2, 1, 4), (2, 3, 4)]


def add_noise(outputs, coefficient, noise):
    """Add to a copy: the outputs of a layer are no leaves."""
    return AddScaledNoise.apply(outputs.clone(), coefficient, noise)


@pytest.mark.parametrize("shape", COEFFICIENTS, ids=str)
def test_noise_is_added_in_place(shape):
    outputs, coefficient, noise = torch.randn(SHAPE), torch.randn(shape), torch.randn(SHAPE)
    expected = outputs + coefficient * noise
    result = AddScaledNoise.apply(outputs, coefficient, noise)
    assert result.data_ptr() == outputs.data_ptr()
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("shape", COEFFICIENTS, ids=str)
def test_gradients_of_added_noise_are_those_of_finite_differences(shape):
    outputs = torch.randn(SHAPE, requires_grad=True)
    arguments = outputs, torch.randn(shape, requires_grad=True), torch.randn(SHAPE)
    assert torch.autograd.gradcheck(add_noise, arguments)
    assert torch.autograd.gradgradcheck(add_noise, arguments)


@pytest.mark.parametrize("name", ["outputs", "coefficient"])
def test_either_argument_may_be_constant(name):
    arguments = {"outputs": torch.randn(SHAPE), "coefficient": torch.randn(3, 1)}
    arguments[name].requires_grad_()
    noise = torch.randn(SHAPE)
    (gradient,) = torch.autograd.grad(add_noise(**arguments, noise=noise).sum(), arguments[name])
    expected = torch.ones(SHAPE) if name == "outputs" else noise.sum((0, 2)).unsqueeze(-1)
    torch.testing.assert_close(gradient, expected)


def test_writing_over_what_a_gradient_needs_is_an_error_as_everywhere():
    leaf = torch.randn(SHAPE, requires_grad=True)
    outputs = leaf.exp()  # whose gradient is its value
    result = AddScaledNoise.apply(outputs, torch.tensor(1.0), torch.randn(SHAPE))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


@pytest.mark.parametrize("shape", [(), (3, 1)], ids=str)
def test_mixed_precision_adds_noise_to_outputs_of_half_the_bits(shape):
    """Under autocast outputs are in bfloat16, coefficient and noise in float32."""
    leaf = torch.randn(SHAPE, dtype=torch.bfloat16, requires_grad=True)
    coefficient = torch.rand(shape, dtype=torch.float32, requires_grad=True)
    noise = torch.randn(SHAPE, dtype=torch.float32)
    result = add_noise(leaf, coefficient, noise)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.float(), leaf + coefficient * noise, rtol=0.01, atol=0.02)
    of_leaf, of_coefficient = torch.autograd.grad(result.float().sum(), (leaf, coefficient))
    assert of_leaf.eq(1).all()
    torch.testing.assert_close(of_coefficient, noise.sum_to_size(shape), rtol=0.01, atol=0.02)


# ---- a bank of filters and a norm ----------------------------------------------------------------


def test_bank_and_squared_norm():
    x, matrix = torch.randn(5, 4), torch.randn(3, 4)
    hidden, norms = BankAndSquaredNorm.apply(x, matrix)
    torch.testing.assert_close(hidden, x @ matrix.mT)
    torch.testing.assert_close(norms, x.square().sum(-1, keepdim=True))


@pytest.mark.parametrize("constant", [(), ("x",), ("matrix",)], ids=str)
def test_gradients_of_bank_and_norm_are_those_of_finite_differences(constant):
    shapes = {"x": (5, 4), "matrix": (3, 4)}
    arguments = [
        torch.randn(shape, requires_grad=name not in constant) for name, shape in shapes.items()
    ]
    assert torch.autograd.gradcheck(BankAndSquaredNorm.apply, arguments)
    assert torch.autograd.gradgradcheck(BankAndSquaredNorm.apply, arguments)


@pytest.mark.parametrize("index", [0, 1])
def test_one_of_the_two_outputs_may_be_unused(index):
    x, matrix = torch.randn(5, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    output = BankAndSquaredNorm.apply(x, matrix)[index]
    plain = (x @ matrix.mT, x.square().sum(-1) + 0 * matrix.sum())[index]
    found = torch.autograd.grad(output.sum(), (x, matrix))
    torch.testing.assert_close(found, torch.autograd.grad(plain.sum(), (x, matrix)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixed_precision_gives_gradients_to_inputs_of_either_dtype(dtype):
    x = torch.randn(5, 4, dtype=dtype, requires_grad=True)
    matrix = torch.randn(3, 4, dtype=torch.float32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        hidden, norms = BankAndSquaredNorm.apply(x, matrix)
    found = torch.autograd.grad(hidden.float().sum() + norms.float().sum(), (x, matrix))
    exact = x.detach().double().requires_grad_(), matrix.detach().double().requires_grad_()
    plain = (exact[0] @ exact[1].mT).sum() + exact[0].square().sum()
    for gradient, leaf, oracle in zip(
        found, (x, matrix), torch.autograd.grad(plain, exact), strict=True
    ):
        assert gradient.dtype == leaf.dtype
        torch.testing.assert_close(gradient.double(), oracle, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("event_dim", [0, 1, 3])
def test_variances_and_their_sums_have_all_derivatives(event_dim):
    log_scale = torch.randn(SHAPE, requires_grad=True)
    variance, total, log_det = variance_and_sums(log_scale, event_dim)
    event = log_scale.shape[3 - event_dim :].numel()
    torch.testing.assert_close(variance, log_scale.exp().square())
    torch.testing.assert_close(total, variance.reshape(*total.shape, event).sum(-1))
    torch.testing.assert_close(log_det, variance.log().reshape(*total.shape, event).sum(-1))

    def apply(log_scale):
        return variance_and_sums(log_scale, event_dim)

    assert torch.autograd.gradcheck(apply, (log_scale,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(apply, (log_scale,))


@pytest.mark.parametrize("output", [0, 1, 2])
def test_variances_and_their_sums_may_be_used_one_at_a_time_and_under_vmap(output):
    log_scale = torch.randn(SHAPE, requires_grad=True)

    def apply(shift):
        return variance_and_sums(log_scale + shift, 3)[output].sum()

    shifts = torch.randn(4)
    (gradient,) = torch.autograd.grad(torch.func.vmap(apply)(shifts).sum(), log_scale)
    (expected,) = torch.autograd.grad(sum(apply(shift) for shift in shifts), log_scale)
    torch.testing.assert_close(gradient, expected)
    plain = {0: log_scale.exp().square(), 1: log_scale.exp().square(), 2: 2 * log_scale}[output]
    own = torch.autograd.grad(variance_and_sums(log_scale, 3)[output].sum(), log_scale)
    torch.testing.assert_close(own, torch.autograd.grad(plain.sum(), log_scale))


def test_squares_have_all_derivatives_also_under_vmap():
    x = torch.randn(SHAPE, requires_grad=True)
    torch.testing.assert_close(square(x), x * x)
    assert torch.autograd.gradcheck(square, (x,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(square, (x,))
    mapped = torch.func.vmap(torch.func.grad(lambda row: square(row).sum()))(x)
    torch.testing.assert_close(mapped, 2 * x)


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
