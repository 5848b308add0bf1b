"""Functions of single elements: closed forms and quadrature against numerical integration."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyro_structvi.moments import RandomTensor, Settings
from pyro_structvi.moments.nonlinear import relu
from tests.moments.signs import assert_same, random_input

REACH, PANEL = 40.0, 0.5
NODES, WEIGHTS = np.polynomial.legendre.leggauss(20)


def normal_moments(function, mean, scale, kinks=()):
    """Return mean and variance of ``function(x)`` for ``x ~ N(mean, scale^2)``.

    Gauss-Legendre's rule on panels of half a standard deviation, cut where the function has kinks, in
    extended precision. The variance is an integral about the mean, so that nothing is subtracted.
    """
    mean, scale = np.longdouble(mean), np.longdouble(scale)
    edges = np.arange(-REACH, REACH + PANEL, PANEL, dtype=np.longdouble)
    cuts = [(np.longdouble(kink) - mean) / scale for kink in kinks]
    edges = np.unique(np.concatenate([edges, [cut for cut in cuts if abs(cut) < REACH]]))
    half, middle = np.diff(edges) / 2, (edges[1:] + edges[:-1]) / 2
    z = (middle[:, None] + half[:, None] * NODES).ravel()
    weights = (half[:, None] * WEIGHTS).ravel() * np.exp(-z * z / 2)
    weights = weights / np.sqrt(2 * np.pi * np.ones((), np.longdouble))
    values = function(mean + scale * z)
    first = (weights * values).sum()
    return first, (weights * (values - first) ** 2).sum()


FLOAT64 = torch.float64
DISTANCES = (-30.0, -8.0, -3.0, -1.0, -0.2, 0.0, 0.3, 1.0, 2.5, 8.0, 30.0)  # in standard deviations
SCALES = (1e-6, 1e-3, 0.1, 1.0, 5.0)
SELU = (1.0507009873554805, 1.6732632423543772)


def random(loc, variance, **options):
    loc = torch.as_tensor(loc, dtype=FLOAT64)
    return RandomTensor(loc, torch.as_tensor(variance, dtype=FLOAT64), Settings(), **options)


def check_gradients(function, mean, scale):
    def run(mean, variance):
        found = function(random(mean, variance))
        return found.loc, found.variance

    leaves = mean.requires_grad_(), scale.square().requires_grad_()
    assert torch.autograd.gradcheck(run, leaves, atol=1e-6)


def elu(x, alpha=1.0):
    return np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


# Torch's function, the same in numpy, and its kinks.
CLOSED = {
    "relu": (F.relu, lambda x: np.maximum(x, 0), (0.0,)),
    "leaky relu": (
        lambda x: F.leaky_relu(x, 0.2),
        lambda x: np.where(x > 0, x, 0.2 * x),
        (0.0,),
    ),
    "abs": (torch.abs, np.abs, (0.0,)),
    "clamp": (lambda x: x.clamp(-0.5, 2.0), lambda x: np.clip(x, -0.5, 2.0), (-0.5, 2.0)),
    "clamp from below": (lambda x: x.clamp(min=0.5), lambda x: np.maximum(x, 0.5), (0.5,)),
    "clamp from above": (lambda x: x.clamp(max=0.5), lambda x: np.minimum(x, 0.5), (0.5,)),
    "relu6": (F.relu6, lambda x: np.clip(x, 0, 6), (0.0, 6.0)),
    "hardtanh": (F.hardtanh, lambda x: np.clip(x, -1, 1), (-1.0, 1.0)),
    "hardsigmoid": (F.hardsigmoid, lambda x: np.clip(x / 6 + 0.5, 0, 1), (-3.0, 3.0)),
    "elu": (F.elu, elu, (0.0,)),
    "elu, alpha": (lambda x: F.elu(x, 0.5), lambda x: elu(x, 0.5), (0.0,)),
    "selu": (F.selu, lambda x: SELU[0] * elu(x, SELU[1]), (0.0,)),
    "square": (torch.square, np.square, (0.0,)),
    "power": (lambda x: x**3, lambda x: x**3, (0.0,)),
    "sin": (torch.sin, np.sin, (0.0, 1.3)),
    "cos": (torch.cos, np.cos, (0.0, 1.3)),
}


def cases(kinks, scales=SCALES, distances=DISTANCES):
    grid = [(kink + a * s, s) for kink in kinks for s in scales for a in distances]
    mean, scale = (torch.tensor(part, dtype=FLOAT64) for part in zip(*grid, strict=True))
    return mean, scale


def integrated(function, mean, scale, kinks=()):
    pairs = zip(mean.tolist(), scale.tolist(), strict=True)
    found = [normal_moments(function, m, s, kinks) for m, s in pairs]
    return (torch.tensor([float(value) for value in part]) for part in zip(*found, strict=True))


@pytest.mark.parametrize("name", CLOSED)
def test_closed_forms_are_exact_from_tail_to_tail_and_at_small_variances(name):
    """Errors of the variance are small beside it or beside the input's variance."""
    function, in_numpy, kinks = CLOSED[name]
    mean, scale = cases(kinks)
    found = function(random(mean, scale.square()))
    loc, variance = integrated(in_numpy, mean, scale, kinks)
    error = (found.loc - loc).abs()
    assert (error <= 1e-9 * loc.abs() + 1e-14 * (1 + scale)).all()
    error = (found.variance - variance).abs()
    assert (error <= 2e-8 * variance + 1e-13 * scale.square()).all()


@pytest.mark.parametrize(
    ("function", "in_numpy", "points"),
    [
        (F.relu, lambda x: np.maximum(x, 0), {"distances": (-30.0, -20.0, -12.0)}),
        (torch.exp, np.exp, {"scales": (1e-6, 1e-3, 0.1, 1.0), "distances": (-3.0, 0.0, 3.0)}),
        (torch.tanh, np.tanh, {"scales": (1e-3,), "distances": (-3e3, -500.0, 800.0, 3e3)}),
    ],
)
def test_means_and_variances_keep_their_relative_accuracy(function, in_numpy, points):
    """Far below zero a hinge has a variance of 1e-200 times the input's."""
    mean, scale = cases((0.0,), **points)
    found = function(random(mean, scale.square()))
    loc, variance = integrated(in_numpy, mean, scale, (0.0,))
    torch.testing.assert_close(found.loc, loc, rtol=1e-9, atol=0)
    torch.testing.assert_close(found.variance, variance, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("function", [F.relu, torch.tanh, F.softplus])
@pytest.mark.parametrize("least", [0.0, 1e-30])
def test_a_rounded_covariance_of_an_element_without_variance_counts_for_nothing(
    function, least, dtype
):
    """As of a saturated softmax; the correlation would be 1e+9, 1e+13 or 1e+148."""
    loc = torch.tensor([[0.0, 0.5, -0.5]], dtype=dtype, requires_grad=True)
    rows = [least, 1e-6, 1e-6], [1e-6, 1.0, 0.4], [1e-6, 0.4, 1.0]
    covariance = torch.tensor([rows], dtype=dtype, requires_grad=True)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    found = function(RandomTensor(loc, variance, Settings(True), covariance))
    known = function(
        RandomTensor(loc[:, 1:], variance[:, 1:], Settings(True), covariance[:, 1:, 1:])
    )
    torch.testing.assert_close(found.loc[:, 0], function(loc)[:, 0])
    torch.testing.assert_close(found.covariance[:, 1:, 1:], known.covariance)
    assert found.covariance[:, 0].abs().max() < 1e-6
    total = found.loc.sum() + found.covariance.sum()
    gradients = torch.autograd.grad(total, [loc, covariance])
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert least or max(gradient.abs().max() for gradient in gradients) < 10


def test_gradients_of_the_widest_inputs_are_finite_in_single_precision():
    """The function is a hinge to them, whose mean has the probability above zero as derivative."""
    mean = (1e6 * torch.tensor([-50.0, -5.0, 0.0, 1.0, 5.0])).float().requires_grad_()
    found = F.elu(RandomTensor(mean, torch.full_like(mean, 1e12), Settings()))
    (of_mean,) = torch.autograd.grad(found.loc.sum(), mean, retain_graph=True)
    expected = torch.special.ndtr(mean.double() / 1e6).float()
    torch.testing.assert_close(of_mean, expected, rtol=0, atol=1e-6)
    (of_variance,) = torch.autograd.grad(found.variance.sum(), mean)
    assert of_variance.isfinite().all()


@pytest.mark.parametrize("name", ["hardtanh", "hardsigmoid", "elu", "selu"])
def test_deviations_are_accurate_in_single_precision_at_every_scale(name):
    """Also of an input that is narrow at a kink, or wide beside the part in which a function changes."""
    function, in_numpy, kinks = CLOSED[name]
    scales, distances = (1e-6, 1e-3, 0.03, 1.0, 30.0, 1e4, 1e6), (-6.0, -2.0, -0.2, 0.0, 0.5, 3.0)
    mean, scale = (part.float() for part in cases((0.0,), scales, distances))
    found = function(RandomTensor(mean, scale.square(), Settings()))
    parts = *kinks, -0.3, -1.0, -3.0, -10.0, -30.0
    loc, variance = integrated(in_numpy, mean, scale, parts)
    rounding = torch.finfo(torch.float32).eps * (1 + loc.abs())
    assert ((found.loc - loc).abs() <= 1e-3 * variance.sqrt() + 4 * rounding).all()
    torch.testing.assert_close(found.variance.double().sqrt(), variance.sqrt(), rtol=2e-3, atol=0)


DIFFERENT = ("leaky relu", "clamp", "clamp from above", "elu, alpha", "square", "sin")


@pytest.mark.parametrize("name", DIFFERENT)
def test_gradients_of_closed_forms(name):
    function, _, kinks = CLOSED[name]
    check_gradients(function, *cases(kinks, (0.3, 2.0), (-3.0, -0.4, 0.1, 2.0)))


@pytest.mark.parametrize("name", ["relu", *DIFFERENT])
def test_gradients_are_finite_without_variance_and_far_away(name):
    function, _, kinks = CLOSED[name]
    for dtype in (torch.float32, FLOAT64):
        mean = torch.tensor([*kinks, -50.0, -1e3, 1e3, 50.0, 0.2], dtype=dtype).requires_grad_()
        for size in (0.0, 1e-12, 1.0):
            variance = torch.full_like(mean, size).requires_grad_()
            found = function(RandomTensor(mean, variance, Settings()))
            assert torch.isfinite(found.loc).all()
            assert (found.variance >= 0).all()
            for gradient in torch.autograd.grad(
                (found.loc + found.variance).sum(), [mean, variance]
            ):
                assert torch.isfinite(gradient).all()
    at_zero = function(random(mean.detach(), torch.zeros(len(mean))))
    torch.testing.assert_close(at_zero.loc, function(mean.detach()).double(), atol=1e-9, rtol=1e-9)
    assert at_zero.variance.max() <= 1e-12


# Torch's function, the same in numpy, and the error of 32 nodes for a unit scale and one of 2.
SMOOTH = {
    "log sigmoid": (F.logsigmoid, lambda x: -np.logaddexp(0, -x), 1e-8, 2e-5),
    "erf": (torch.erf, lambda x: 2 * _normal_cdf(math.sqrt(2) * x) - 1, 1e-4, 5e-3),
    "gelu": (F.gelu, lambda x: x * _normal_cdf(x), 1e-6, 5e-4),
    "gelu by tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        1e-4,
        2e-3,
    ),
    "softsign": (F.softsign, lambda x: x / (1 + np.abs(x)), 5e-3, 1e-2),
    "hardswish": (F.hardswish, lambda x: x * np.clip(x / 6 + 0.5, 0, 1), 4e-3, 2e-2),
}


def _normal_cdf(x):
    return torch.special.ndtr(torch.as_tensor(x.astype(np.float64))).numpy()


@pytest.mark.parametrize("name", SMOOTH)
def test_quadrature_has_the_stated_error(name):
    function, in_numpy, *bounds = SMOOTH[name]
    for scale, bound in zip((1.0, 2.0), bounds, strict=True):
        mean = torch.linspace(-3, 3, 7)
        found = function(random(mean, torch.full((7,), scale**2)))
        loc, variance = integrated(in_numpy, mean, torch.full((7,), scale), (0.0, -3.0, 3.0))
        for actual, expected in ((found.loc, loc), (found.variance, variance)):
            error = (actual - expected).abs().max().item()
            assert error < bound, (scale, error)


@pytest.mark.parametrize(("name", "stated"), [("gelu", 0.04), ("softsign", 0.14), ("erf", 0.25)])
def test_the_stated_error_of_wide_inputs(name, stated):
    """Of standard deviations at one of 10 of the input, as the documentation has it."""
    function, in_numpy, *_ = SMOOTH[name]
    mean, scale = torch.linspace(-30, 30, 121), torch.full((121,), 10.0)
    found = function(random(mean, scale.square()))
    _, variance = integrated(in_numpy, mean, scale, (0.0, -3.0, 3.0))
    error = ((found.variance / variance).sqrt() - 1).abs().max().item()
    assert error == pytest.approx(stated, abs=0.01)


@pytest.mark.parametrize("name", SMOOTH)
def test_the_stated_error_at_a_scale_of_two(name):
    """Below 4 % of standard deviations, but for hardswish far below zero."""
    function, in_numpy, *_ = SMOOTH[name]
    mean, scale = torch.linspace(-6, 6, 49), torch.full((49,), 2.0)
    found = function(random(mean, scale.square()))
    _, variance = integrated(in_numpy, mean, scale, (0.0, -3.0, 3.0))
    assert ((found.variance / variance).sqrt() - 1).abs().max() < 0.04


RISES = {
    "tanh": (torch.tanh, np.tanh, 0.5),
    "sigmoid": (torch.sigmoid, lambda x: np.exp(-np.logaddexp(0, -x)), 1.0),
}


@pytest.mark.parametrize("name", RISES)
def test_rising_functions_are_accurate_at_every_scale(name):
    """By nodes up to the last scale of the function, and by a mixture of normal functions above it."""
    function, in_numpy, last = RISES[name]
    scales = (1e-3, 0.5 * last, 0.999 * last, 1.001 * last, 2 * last, 10.0, 300.0)
    mean, scale = cases((0.0,), scales)
    found = function(random(mean, scale.square()))
    cuts = [sign * 2.0**power for power in range(-2, 6) for sign in (-1, 1)]
    loc, variance = integrated(in_numpy, mean, scale, (0.0, *cuts))
    torch.testing.assert_close(found.loc, loc, rtol=0, atol=1e-8)
    torch.testing.assert_close(found.variance, variance, rtol=0, atol=1e-8)
    assert (found.variance >= 0).all()
    near = scale < 0.7 * last
    torch.testing.assert_close(found.variance[near], variance[near], rtol=1e-6, atol=0)
    points = cases((0.0,), (0.5 * last, 2 * last, 10.0), (-2.0, -0.3, 0.0, 1.0))
    check_gradients(function, *points)


def test_a_power_without_moments_is_refused():
    for exponent in (0.5, -1, 0, 32, torch.tensor(2.0)):
        with pytest.raises(
            NotImplementedError, match=r"A power of .* has no moments, only one of 1 to 31"
        ):
            random([1.0], [1.0]) ** exponent


# ---- in place, and as modules --------------------------------------------------------------------


MASK = torch.tensor([True, False, True])
IN_PLACE = (
    (torch.relu_, torch.relu),
    (lambda x: x.relu_(), torch.relu),
    (nn.ReLU(inplace=True), F.relu),
    (nn.LeakyReLU(0.1, inplace=True), lambda x: F.leaky_relu(x, 0.1)),
    (nn.Hardswish(inplace=True), F.hardswish),
    (lambda x: x.clamp_(0.0, 1.0), lambda x: x.clamp(0.0, 1.0)),
    (lambda x: x.mul_(3.0), lambda x: 3 * x),
    (lambda x: x.masked_fill_(MASK, 1.5), lambda x: x.masked_fill(MASK, 1.5)),
    (lambda x: x.add_(torch.ones(3), alpha=2), lambda x: x + 2),
)


def test_functions_in_place_change_the_tensor_and_return_it():
    for in_place, plain in IN_PLACE:
        x, other = (random([-1.0, 0.5, 2.0], [0.3, 1.0, 2.0]) for _ in range(2))
        found, expected = in_place(x), plain(other)
        assert found is x
        assert_same(x, expected)
    with pytest.raises(NotImplementedError, match="`add_` would make a known tensor random"):
        torch.zeros(2).add_(random([1.0, 1.0], [1.0, 1.0]))


def test_a_clamp_with_crossed_ends_is_the_upper_one():
    found = random([-1.0, 0.5, 2.0], [0.3, 1.0, 2.0]).clamp(1.0, -1.0)
    torch.testing.assert_close(found.loc, torch.zeros(3).clamp(1.0, -1.0))
    assert not found.variance.any()


# From a tensor to its part, which shares memory with it in torch.
VIEWS = (
    lambda x: x[:2],
    lambda x: x.view(3, 1),
    lambda x: x.unsqueeze(0).squeeze(0)[1:],
    lambda x: x.detach(),
    lambda x: x.contiguous(),
    lambda x: x.chunk(3)[0],
)
COPIES = (lambda x: x[[0, 1]], lambda x: x.clone(), lambda x: x.flip(0))


def test_memory_that_was_changed_elsewhere_is_refused():
    refused = pytest.raises(NotImplementedError, match=r"after its view, .* has no moments")
    for view in VIEWS:
        x = random([-1.0, 0.5, 2.0], [0.3, 1.0, 2.0])
        own = view(x).mul_(2.0)
        torch.testing.assert_close(own.variance, view(4 * torch.tensor([0.3, 1.0, 2.0])))
        with refused:
            x + 1
        x = random([-1.0, 0.5, 2.0], [0.3, 1.0, 2.0])
        old = view(x)
        double = 2 * old
        x.mul_(2.0)
        for use in (lambda old=old: old + 1, lambda old=old, double=double: old + double):
            with refused:
                use()
        torch.testing.assert_close(view(x).variance, own.variance)
    for copy in COPIES:
        x = random([-1.0, 0.5, 2.0], [0.3, 1.0, 2.0])
        copy(x).mul_(2.0)
        torch.testing.assert_close(x.variance, torch.tensor([0.3, 1.0, 2.0]))


def test_a_part_keeps_its_moments_after_another_one_is_changed():
    first, second = random([-1.0, 0.5], [0.3, 1.0]).chunk(2)
    first.mul_(2.0)
    torch.testing.assert_close(second.variance, torch.tensor([1.0]))


def test_a_division_that_rounds_is_refused():
    x = random([1.0], [1.0])
    torch.testing.assert_close(torch.div(x, 2, rounding_mode=None).loc, torch.tensor([0.5]))
    with pytest.raises(NotImplementedError, match="A division that rounds has no moments"):
        torch.div(x, 2, rounding_mode="floor")


# ---- with a covariance ---------------------------------------------------------------------------


def test_polynomials_have_their_exact_covariance():
    """``Cov(x_i^2, x_j^2) = 2 S_ij^2 + 4 m_i m_j S_ij``."""
    x = random_input(2, 4, full=True)
    outer = x.loc.unsqueeze(-1) * x.loc.unsqueeze(-2)
    expected = 2 * x.covariance.square() + 4 * outer * x.covariance
    torch.testing.assert_close(torch.square(x).covariance, expected)


@pytest.mark.parametrize("function", [torch.tanh, torch.relu, lambda x: x.clamp(-0.1, 0.1)])
def test_covariances_of_functions_that_are_narrow_beside_the_input_are_proper(function):
    """Nodes of quadrature have up to a third more variance than the function."""
    loc = torch.linspace(-30, 30, 101).unsqueeze(-1).expand(101, 2)
    covariance = torch.full((101, 2, 2), 100.0)
    found = function(RandomTensor(loc, 0 * loc + 100, Settings(True), covariance))
    own = found.variance.amax(-1)
    assert (torch.linalg.eigvalsh(found.covariance)[:, 0] >= -1e-12 * own).all()
    torch.testing.assert_close(found.covariance.diagonal(dim1=-2, dim2=-1), found.variance)


@pytest.mark.parametrize(("function", "bound"), [(torch.tanh, 4e-3), (torch.relu, 0.02)])
def test_covariances_by_four_of_hermites_polynomials(function, bound):
    """Against a grid of two variables; relative to both standard deviations."""
    root = torch.randn(4, 4)
    covariance = (root @ root.mT).expand(2, 4, 4)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    x = RandomTensor(torch.randn(2, 4), variance, Settings(True), covariance)
    found = function(x)
    nodes = torch.linspace(-8, 8, 321)
    weights = torch.exp(-0.5 * nodes.square())
    weights = weights / weights.sum()
    s = x.variance.sqrt()
    for i in range(4):
        for j in range(i):
            rho = x.covariance[:, i, j] / (s[:, i] * s[:, j])
            first = function(x.loc[:, i, None, None] + s[:, i, None, None] * nodes[:, None])
            z = rho[:, None, None] * nodes[:, None] + (1 - rho[:, None, None] ** 2).sqrt() * nodes
            second = function(x.loc[:, j, None, None] + s[:, j, None, None] * z)
            grid = weights[:, None] * weights
            means = ((grid * first).sum((1, 2)), (grid * second).sum((1, 2)))
            expected = (grid * first * second).sum((1, 2)) - means[0] * means[1]
            size = (found.variance[:, i] * found.variance[:, j]).sqrt()
            assert ((found.covariance[:, i, j] - expected).abs() / size < bound).all()
    torch.testing.assert_close(found.covariance.diagonal(dim1=-2, dim2=-1), found.variance)


# ---- gradients by hand of a rectified normal -----------------------------------------------------


M = torch.tensor([-9.0, -2.0, -0.1, 0.0, 0.3, 1.5, 12.0], dtype=torch.float64)
V = torch.tensor([0.7, 2.0, 0.1, 1.3, 0.4, 0.05, 3.0], dtype=torch.float64)


def test_derivatives_and_batches():
    inputs = (M.clone().requires_grad_(), V.clone().requires_grad_())
    assert torch.autograd.gradcheck(relu, inputs, rtol=1e-6)
    assert torch.autograd.gradgradcheck(relu, inputs, rtol=1e-6)
    forward, backward = (
        by(relu, argnums=(0, 1))(M, V) for by in (torch.func.jacfwd, torch.func.jacrev)
    )
    torch.testing.assert_close(forward, backward, rtol=1e-12, atol=1e-14)
    means, variances = torch.stack([M, M - 1]), torch.stack([V, 2 * V])
    torch.testing.assert_close(torch.func.vmap(relu)(means, variances), relu(means, variances))


def test_gradients_at_the_floor_of_the_variance_are_finite():
    """A known input of zero is half above it, and its variance has no part in the mean."""
    m, v = (torch.zeros(1, dtype=torch.float64, requires_grad=True) for _ in range(2))
    loc, variance = relu(m, v)
    (loc + variance).backward()
    assert (float(m.grad), float(v.grad)) == (0.5, 0.5)
