"""Images of weights under maps: means, variances and covariances against dense ones."""

import pytest
import torch

from pyro_structvi.maps import ConvolutionMap
from tests import dense_oracles as dense
from tests.distributions.cases import CONVOLUTION_CASES
from tests.distributions.subject import arguments, with_arguments
from tests.maps.test_conformance import (
    CHANNELS,
    CONVOLUTIONS,
    KERNELS,
    OUT,
    SPACES,
    UNEVEN,
    close,
)

SETTINGS = [
    pytest.param(1, {"groups": 2, "stride": 2, "padding": 1, "dilation": 2}, id="1d, all"),
    pytest.param(3, UNEVEN, id="3d, uneven"),
]


def filters_shape(dim, geometry):
    return (OUT, CHANNELS // geometry.get("groups", 1), *KERNELS[dim])


def make_input(dim):
    return torch.randn(2, CHANNELS, *SPACES[dim])


def make_map(dim, geometry):
    return ConvolutionMap(CONVOLUTIONS[dim], filters_shape(dim, geometry)[1:], **geometry)


def serves(case, geometry):
    return case.serves_groups or geometry.get("groups", 1) == 1


@pytest.mark.parametrize(
    ("case", "dim", "geometry"),
    [
        pytest.param(case, *setting.values, id=f"{case.name}, {setting.id}")
        for case in CONVOLUTION_CASES
        for setting in SETTINGS
        if serves(case, setting.values[1])
    ],
)
def test_every_position_of_a_convolution_has_its_exact_moments(case, dim, geometry):
    shape, x = filters_shape(dim, geometry), make_input(dim)
    q = case.make((), shape, torch.float64)
    covariance, shared = case.covariance(q), case.shared_covariance(q)
    mean, variance = dense.convolution_moments(x, q.loc, covariance, **geometry)
    image = q.image_under(make_map(dim, geometry), x)
    assert image.batch_shape + image.event_shape == mean.shape
    assert len(image.event_shape) == dim + 1
    close(image.mean, mean)
    close(image.variance, variance)
    drawn = dense.drawn_feature_map_covariance(x, covariance, shared, OUT, KERNELS[dim], **geometry)
    close(image.covariance_matrix, drawn)


@pytest.mark.parametrize("case", CONVOLUTION_CASES, ids=lambda case: case.name)
def test_a_convolution_of_zeros_has_finite_gradients(case):
    """Padding alone makes patches of zeros, and rounding may make a variance negative."""
    x = torch.zeros(1, CHANNELS, *SPACES[2])
    q = with_arguments(case.make((), filters_shape(2, {}), torch.float64), torch.clone)
    draw = q.image_under(make_map(2, {"padding": 1}), x).rsample()
    assert (draw.abs() < 1e-15).all()
    for gradient in torch.autograd.grad(draw.sum(), arguments(q)):
        assert torch.isfinite(gradient).all()
