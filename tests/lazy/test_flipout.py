"""Flipout: an example's outputs have the distribution of a drawn weight, examples are uncorrelated."""

import itertools
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from pyro_structvi.distributions import LowRankNormal, MeanFieldNormal
from pyro_structvi.maps import BiasColumnMap, ConvolutionMap, DenseMap
from pyro_structvi.weights.outputs import flipout
from tests import dense_oracles as dense
from tests.distributions.cases import make_k_tied, make_mean_field
from tests.lazy_weights import lazy
from tests.unit_noise import assert_close, assert_draws, unit_draws

OUT, CHANNELS, KERNEL = 4, 2, (2, 1)
MAKERS = {"mean field": make_mean_field, "k-tied": make_k_tied(2)}
GEOMETRIES = [{"stride": (2, 1), "padding": 1}, {"dilation": 2, "groups": 2}]


@pytest.fixture(params=MAKERS.values(), ids=MAKERS.keys())
def make(request):
    return lambda *shape: request.param((), shape, torch.float64)


def covariance(q):
    return torch.diag(q.variance.flatten())


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


def with_signs(draw, *patterns):
    """Return a function that makes a draw with given signs of the inputs and of the outputs, 0 or 1.

    Without patterns they are random, and the same at each call. A draw is linear in its normal noise for
    any signs, which do not change the distribution of one example's outputs.
    """

    def run():
        generator, given = torch.Generator().manual_seed(3), iter(patterns)
        random = torch.randint

        def randint(high, shape, dtype, device):
            if patterns:
                return torch.tensor(next(given), dtype=dtype).reshape(shape)
            return random(high, shape, dtype=dtype, device=device, generator=generator)

        with patch("torch.randint", randint):
            return draw()

    return run


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_the_outputs_of_an_example_have_the_distribution_of_a_drawn_weight(make, geometry):
    groups = geometry.get("groups", 1)
    q, x = make(OUT, CHANNELS, *KERNEL), torch.randn(1, CHANNELS * groups, 3, 3)
    linear_map = ConvolutionMap(F.conv2d, (CHANNELS, *KERNEL), **geometry)
    expected = dense.feature_map_covariance(x, covariance(q), OUT, KERNEL, **geometry)
    assert_draws(
        with_signs(lambda: flipout(q, linear_map, x)), F.conv2d(x, q.loc, **geometry), expected
    )


@pytest.mark.parametrize("join", [False, True], ids=["plain", "joined bias"])
def test_so_have_those_of_a_sequence_and_gradients_of_draws_are_its_own(make, join):
    q, x = make(OUT, 3 + join), torch.randn(1, 2, 3)
    leaves = [getattr(q, name).requires_grad_() for name in q.argument_names]
    linear_map = BiasColumnMap(DenseMap()) if join else DenseMap()
    rows = F.pad(x[0], (0, int(join)), value=1.0)
    operator = torch.cat([torch.kron(torch.eye(OUT), row.unsqueeze(0)) for row in rows])
    found = unit_draws(with_signs(lambda: flipout(q, linear_map, x).flatten(1)))
    expected = operator @ q.loc.flatten(), operator @ covariance(q) @ operator.mT
    for own, dense_one in zip((found.mean[0], found.covariance), expected, strict=True):
        assert_close(own, dense_one)
        probe = torch.randn_like(own)
        of_own, of_dense = (
            torch.autograd.grad(
                (probe * each).sum(), leaves, retain_graph=True, materialize_grads=True
            )
            for each in (own, dense_one)
        )
        assert_close(flat(of_own), flat(of_dense))


@pytest.mark.parametrize("part", ["inputs", "outputs"])
def test_the_signs_of_either_side_leave_examples_uncorrelated(make, part):
    """The covariance of two examples is averaged over all signs of one side, given one of the other."""
    q, x = make(2, 3), torch.randn(1, 3).expand(2, 1, 3)
    total, largest = torch.zeros(2, 2), 0.0
    for signs in itertools.product([0, 1], repeat=6 if part == "inputs" else 4):
        patterns = (signs, [1, 0, 0, 1]) if part == "inputs" else ([1, 1, 0, 0, 1, 0], signs)
        draws = unit_draws(with_signs(lambda: flipout(q, DenseMap(), x), *patterns))
        between = draws.covariance[:2, 2:]
        total, largest = total + between, max(largest, between.abs().max().item())
    assert largest > 0.05
    assert_close(total, torch.zeros(2, 2))


def standard_normal(*shape):
    return MeanFieldNormal(torch.zeros(shape), torch.tensor(1.0))


def test_a_lazy_weight_takes_it_for_positions_of_independent_elements():
    """The outputs of three examples of ones, of one channel each, then have one size."""

    def outputs(q, function, *shape, bias=None, local_reparam="flipout"):
        weight = lazy(q, local_reparam=local_reparam)
        values = function(torch.ones(3, *shape), weight, bias).flatten()
        return values, torch.equal(values.abs(), values[0].abs().expand(3)), weight.is_drawn

    assert outputs(standard_normal(1, 1, 1), F.conv1d, 1, 1)[1:] == (True, False)
    assert outputs(standard_normal(1, 1), F.linear, 1, 1)[1:] == (True, False)
    assert outputs(standard_normal(1, 1), F.linear, 1)[1:] == (False, False)
    plain = outputs(standard_normal(1, 1, 1), F.conv1d, 1, 1, local_reparam=True)
    assert plain[1:] == (False, False)
    q = LowRankNormal(torch.zeros(1, 1, 1), torch.ones(1, 1, 1, 1), torch.tensor(1.0), event_dim=3)
    values, _, is_drawn = outputs(q, F.conv1d, 1, 1)
    assert is_drawn
    assert torch.equal(values, values[0].expand(3))
    bias = lazy(standard_normal(1), "bias", local_reparam="flipout")
    narrow = MeanFieldNormal(torch.zeros(1, 1, 1), torch.tensor(1e-9))
    values, *_ = outputs(narrow, F.conv1d, 1, 1, bias=bias)
    assert not bias.is_drawn
    assert len(values.round(decimals=6).unique()) == 3
