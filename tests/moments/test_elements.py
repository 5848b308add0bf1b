"""Functions of functions of the same elements, against torch's own functions and sampling."""

import math

import pytest
import torch
import torch.nn.functional as F

from pyro_structvi.distributions import MatrixNormal
from pyro_structvi.moments import RandomTensor, Settings
from pyro_structvi.moments.linear import RandomWeight
from pyro_structvi.moments.rules import LONGEST
from tests.moments.signs import assert_same, random_input

KEPT = torch.tensor([True, False, True])


def gelu_of_transformers(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def in_place(x):
    gate = torch.sigmoid(x)
    x.mul_(1)
    return x.mul_(gate)


SAME = {
    "swish": (lambda x: x * torch.sigmoid(x), F.silu),
    "swish, in place": (in_place, F.silu),
    "swish, reversed": (lambda x: torch.sigmoid(1.0 * x).mul(x.clone()), F.silu),
    "gelu": (lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))), F.gelu),
    "gelu of transformers": (gelu_of_transformers, lambda x: F.gelu(x, approximate="tanh")),
    "mish": (lambda x: x * F.softplus(x).tanh(), F.mish),
    "square": (lambda x: x.clone() * x, torch.square),
    "power": (lambda x: x * (x * x), lambda x: x**3),
    "sum": (lambda x: torch.add(x, -x, alpha=3), lambda x: -2 * x),
    "by name": (lambda x: torch.mul(input=x, other=x.sigmoid()), F.silu),
    "interpolation": (
        lambda x: torch.lerp(x, x * torch.sigmoid(x), 0.5),
        lambda x: (x + F.silu(x)) / 2,
    ),
    "masks": (
        lambda x: 2 * x - torch.where(KEPT, x, 0.0) - x.masked_fill(KEPT, 0.0),
        lambda x: x.clone(),
    ),
    "difference": (lambda x: F.gelu(x) + x - x, F.gelu),
    "known parts": (lambda x: (x + torch.ones(3)) * (2 * x / 2 + 1), lambda x: (x + 1).square()),
}


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("covariance", [False, True])
def test_functions_by_hand_have_the_moments_of_torchs(name, covariance):
    by_hand, function = SAME[name]
    expected = function(x := random_input(2, 3, full=covariance))
    assert (expected.covariance is not None) == covariance
    assert_same(by_hand(RandomTensor(x.loc, x.variance, x.settings, x.covariance)), expected)


def squared(y):
    return y * y


def test_functions_of_functions_by_integration():
    """On a grid of normal probabilities; functions with a kink have an error of half a percent."""
    z = torch.linspace(-9, 9, 100_001)
    weights = (-z.square() / 2).exp() / (-z.square() / 2).exp().sum()
    for function, error in (
        (lambda x: x + x.tanh(), 1e-6),
        (lambda x: x - torch.relu(x), 0.03),
        (lambda x: x.square() * x.sigmoid() - x, 1e-6),
        (lambda x: squared(x.tanh()), 1e-5),
        (lambda x: x.tanh() ** 2, 1e-5),
        (lambda x: (2 * x.sigmoid() - 1).square_(), 1e-5),
        (lambda x: torch.exp(-x.tanh()), 1e-5),
        (lambda x: torch.lerp(x.tanh(), x, x.sigmoid()), 1e-5),
        (lambda x: squared(torch.relu(x)), 0.03),
    ):
        values = function(0.4 + 0.8 * z)
        loc = weights @ values
        scale = (weights @ (values - loc).square()).sqrt()
        found = function(RandomTensor(torch.tensor([0.4]), torch.tensor([0.64]), Settings()))
        assert (found.loc - loc).abs() < error * scale
        assert (found.variance.sqrt() / scale - 1).abs() < error


def test_different_elements_are_independent():
    x = random_input(2, 6)
    first, second = x.chunk(2, -1)
    found = first.tanh() * second.sigmoid()
    a, b = first.tanh(), second.sigmoid()
    expected = a.variance * b.variance + a.variance * b.loc.square() + b.variance * a.loc.square()
    torch.testing.assert_close(found.variance, expected)
    wide = random_input(1, 3) + torch.zeros(2, 3)  # rows are copies, as by `expand`
    torch.testing.assert_close((wide * wide.neg()).loc, -wide.loc.square() - wide.variance)


def test_long_chains_are_cut():
    x = y = random_input(2, 3)
    for _ in range(2 * LONGEST):
        y = 1.001 * y
    assert y.of_elements.length <= LONGEST
    torch.testing.assert_close((x * y).loc, x.loc * y.loc)


def test_gradients_are_those_of_torchs_function():
    found = []
    loc, variance = torch.randn(4), torch.rand(4)
    for function in SAME["mish"]:
        leaves = [part.clone().requires_grad_() for part in (loc, variance)]
        y = function(RandomTensor(*leaves, Settings()))
        found.append(torch.autograd.grad((y.loc * y.variance).sum(), leaves))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("full", [False, True])
def test_outputs_of_a_layer_are_elements_like_others(full):
    q = MatrixNormal(torch.randn(4, 3), torch.rand(4, 4).tril(), torch.rand(3, 3).tril())
    h = F.linear(random_input(2, 3, full=full), RandomWeight(q, Settings(full)))
    found = SAME["swish"][0](h)
    assert (found.covariance is not None) == full
    assert found.form_covariance is None
    assert_same(found, F.silu(h))
