"""Images of weights under maps: means, variances and covariances against dense ones."""

import pytest
import torch

from pyro_structvi.distributions import MeanFieldNormal
from pyro_structvi.maps import ConvolutionMap, DenseMap
from tests import dense_oracles as dense
from tests.distributions.cases import CASES, CONVOLUTION_CASES
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
    pytest.param(2, {name: value[:2] for name, value in UNEVEN.items()}, id="2d, uneven"),
    pytest.param(2, {}, id="2d, plain"),
    pytest.param(2, {"groups": 4, "padding": 1}, id="2d, depthwise"),
    pytest.param(3, {"stride": 2, "padding": 2, "dilation": 2}, id="3d, all"),
]


def filters_shape(dim, geometry):
    return (OUT, CHANNELS // geometry.get("groups", 1), *KERNELS[dim])


def make_input(dim):
    return torch.randn(2, CHANNELS, *SPACES[dim])


def make_map(dim, geometry):
    return ConvolutionMap(CONVOLUTIONS[dim], filters_shape(dim, geometry)[1:], **geometry)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("shape", [(3,), (7, 3)])
def test_a_joined_bias_is_met_by_an_input_of_one(case, shape):
    q, x = case.make((), (OUT, 4), torch.float64), torch.randn(shape)
    image = q.image_under(*DenseMap().join_bias(x))
    inputs = torch.cat([x, torch.ones(*shape[:-1], 1)], -1)
    close(image.mean, dense.image_mean(inputs, q.loc, 2))
    close(image.covariance_matrix, dense.image_covariance(inputs, case.covariance(q), OUT))


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
def test_an_input_without_batch_is_a_batch_of_one(case):
    x, linear_map = make_input(2), make_map(2, {})
    q = case.make((), filters_shape(2, {}), torch.float64)
    single, batch = q.image_under(linear_map, x[1]), q.image_under(linear_map, x)
    assert single.batch_shape == ()
    close(single.mean, batch.mean[1])
    close(single.variance, batch.variance[1])


def assert_bias_moves_only_the_moments(q, linear_map, x, channel_shape):
    """Compare images with and without a bias, constant or random."""
    plain = q.image_under(linear_map, x)
    bias = torch.randn(OUT)
    constant = q.image_under(linear_map, x, bias)
    close(constant.mean, plain.mean + bias.reshape(channel_shape))
    close(constant.variance, plain.variance)
    scale = torch.rand(OUT) + 0.1
    random = q.image_under(linear_map, x, MeanFieldNormal(bias, scale))
    close(random.mean, plain.mean + bias.reshape(channel_shape))
    close(random.variance, plain.variance + scale.square().reshape(channel_shape))


@pytest.mark.parametrize(
    ("case", "groups"),
    [
        pytest.param(case, groups, id=f"{case.name}, {groups}")
        for case in CONVOLUTION_CASES
        for groups in (1, 2)
        if serves(case, {"groups": groups})
    ],
)
def test_a_bias_moves_the_moments_of_a_convolution(case, groups):
    dim = 3 - groups
    geometry = {"groups": groups, "padding": 1}
    q = case.make((), filters_shape(dim, geometry), torch.float64)
    channel_shape = (OUT, *(1 for _ in range(dim)))
    assert_bias_moves_only_the_moments(q, make_map(dim, geometry), make_input(dim), channel_shape)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("batch_shape", [(), (2,)])
def test_a_bias_moves_the_moments_of_a_linear_layer(case, batch_shape):
    q = case.make(batch_shape, (OUT, 3), torch.float64)
    x = torch.randn(7, *(1 for _ in batch_shape), 3)
    assert_bias_moves_only_the_moments(q, DenseMap(), x, (OUT,))


@pytest.mark.parametrize("case", CONVOLUTION_CASES, ids=lambda case: case.name)
def test_a_convolution_of_zeros_has_finite_gradients(case):
    """Padding alone makes patches of zeros, and rounding may make a variance negative."""
    x = torch.zeros(1, CHANNELS, *SPACES[2])
    q = with_arguments(case.make((), filters_shape(2, {}), torch.float64), torch.clone)
    draw = q.image_under(make_map(2, {"padding": 1}), x).rsample()
    assert (draw.abs() < 1e-15).all()
    for gradient in torch.autograd.grad(draw.sum(), arguments(q)):
        assert torch.isfinite(gradient).all()
