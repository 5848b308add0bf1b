"""The rules that every distribution over a weight obeys: variances of outputs, and their covariance.

The oracles are sums over the dense covariance, row by row of the weight seen as ``(out, in)``.
"""

import pytest
import torch
import torch.nn.functional as F

from pyro_structvi.maps import ConvolutionMap, DenseMap
from tests import dense_oracles as dense
from tests.distributions.cases import CASES, CONVOLUTION, MATRIX
from tests.distributions.subject import FLOAT64, Subject

OUT, CHANNELS = 4, 2


def single(case, event_shape):
    return Subject(case, case.make((), event_shape, FLOAT64))


def second_moments(size, *batch):
    """Return symmetric matrices, one of which has no inverse."""
    root = torch.randn(*batch, size, size, dtype=FLOAT64)
    root[..., 0] = 0
    return root @ root.mT


def assert_gradients_close(subject, found, q, oracle, exact):
    """Compare the gradients of the sum of both, with the means, on which variances do not depend."""
    weights = torch.randn(found.shape, dtype=FLOAT64)
    values = (weights * found).sum() + q.mean.sum()
    oracles = (weights * oracle).sum() + subject.case.mean(exact).sum()
    subject.assert_gradients_close(values, q, oracles, exact)


def variance_of(q, linear_map, x):
    return q.image_variance(linear_map, x, linear_map(x, q.as_matrix(q.mean)))


def blocks(subject, exact):
    """Return the dense covariance as ``(out, in, out, in)``."""
    covariance = subject.case.covariance(exact)
    return covariance.reshape(subject.out, subject.size, subject.out, subject.size)


@pytest.mark.parametrize("event_shape", [MATRIX, CONVOLUTION], ids=["matrix", "filters"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_spread_is_the_dense_covariance_of_outputs_of_a_random_input(case, event_shape):
    subject = single(case, event_shape)
    q, exact = subject.with_leaves(), subject.exact()
    for batch in ((), (3,)):
        moment = second_moments(subject.size, *batch)
        found = q.spread(moment)
        oracle = torch.einsum("iajb,...ab->...ij", blocks(subject, exact), moment)
        subject.assert_close(found, oracle)
    assert_gradients_close(subject, found, q, oracle, exact)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_spread_at_a_known_input_is_the_covariance_of_its_image(case):
    subject = single(case, MATRIX)
    x = torch.randn(3, subject.size, dtype=FLOAT64)
    found = subject.q.spread(x.unsqueeze(-1) * x.unsqueeze(-2))
    subject.assert_close(found, subject.q.image(x).covariance_matrix)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_variances_of_a_dense_layer_are_the_dense_ones(case):
    subject = single(case, MATRIX)
    q, exact = subject.with_leaves(), subject.exact()
    x = torch.randn(3, subject.size, dtype=FLOAT64)
    found = variance_of(q, DenseMap(), x)
    covariance = dense.image_covariance(x, subject.case.covariance(exact), subject.out)
    oracle = covariance.diagonal(dim1=-2, dim2=-1)
    subject.assert_close(found, oracle)
    assert_gradients_close(subject, found, q, oracle, exact)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_variances_at_positions_are_those_of_each_position(case):
    subject = single(case, MATRIX)
    x = torch.randn(3, 5, subject.size, dtype=FLOAT64)
    found = variance_of(subject.q, DenseMap(positions=True), x)
    subject.assert_close(found, variance_of(subject.q, DenseMap(), x.flatten(0, 1)).view(3, 5, -1))


def convolution(groups):
    options = {"stride": 2, "padding": 1, "dilation": 1, "groups": groups}
    return ConvolutionMap(F.conv2d, (CHANNELS, 2, 2), **options), options


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_variances_of_a_convolution_are_the_dense_ones(case, groups):
    """Also where outputs are not drawn: a full covariance, and groups of some structures."""
    q = case.make((), (OUT, CHANNELS, 2, 2), FLOAT64)
    subject = Subject(case, q)
    q, exact = subject.with_leaves(), subject.exact()
    linear_map, options = convolution(groups)
    x = torch.randn(2, groups * CHANNELS, 3, 4, dtype=FLOAT64)
    found = variance_of(q, linear_map, x)
    loc = subject.case.mean(exact)
    _, oracle = dense.convolution_moments(x, loc, subject.case.covariance(exact), **options)
    subject.assert_close(found, oracle)
    assert_gradients_close(subject, found, q, oracle, exact)
