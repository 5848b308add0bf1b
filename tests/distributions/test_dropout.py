"""BernoulliDropout: all its weights listed, its image, and what stands in for a divergence."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Laplace, Normal, StudentT, kl_divergence

from pyro_structvi.distributions import BernoulliDropout
from pyro_structvi.maps import ConvolutionMap, DenseMap
from pyro_structvi.testing.noise import assert_mean
from tests.lazy_weights import lazy
from tests.unit_noise import close

RATE = 0.3
LAYOUTS = [
    ((4, 3), {}),
    ((4, 3, 2, 2), {}),
    ((4, 3, 2), {"groups": 2}),
    ((4, 3, 2), {"input_dim": 2}),
]
layouts = pytest.mark.parametrize(("shape", "layout"), LAYOUTS, ids=str)


def make(shape, rate=RATE, **layout):
    return BernoulliDropout(torch.randn(shape), rate, **layout)


def every_weight(q):
    """Return all weights with their probabilities, channel by channel."""
    weights, probabilities = [], []
    out, before, after = len(q.loc), q.input_dim - 1, q.loc.dim() - 1 - q.input_dim
    for mask in itertools.product((0, 1), repeat=q.num_channels):
        of_outputs = torch.tensor(mask).reshape(q.groups, -1).repeat_interleave(out // q.groups, 0)
        kept = of_outputs.reshape(out, *[1] * before, -1, *[1] * after)
        weights.append(q.loc * kept / (1 - q.rate))
        probabilities.append(math.prod(1 - q.rate if bit else q.rate for bit in mask))
    return torch.stack(weights), torch.tensor(probabilities)


def moments(values, probabilities):
    flat = values.flatten(1)
    mean = probabilities @ flat
    return mean, ((flat - mean) * probabilities.unsqueeze(-1)).mT @ (flat - mean)


@layouts
def test_moments_densities_and_kl_are_those_of_all_weights(shape, layout):
    q = make(shape, **layout)
    weights, probabilities = every_weight(q)
    mean, covariance = moments(weights, probabilities)
    close(q.mean.flatten(), mean)
    close(q.covariance_matrix, covariance)
    close(q.variance.flatten(), covariance.diagonal())
    close(q.log_prob(weights), probabilities.log())
    close(q.entropy(), -(probabilities * probabilities.log()).sum())
    assert q.log_prob(q.loc) == -math.inf
    for kind in (Normal, Laplace):
        prior = kind(torch.randn(shape), torch.rand(shape) + 0.5)
        expected = -(probabilities * prior.log_prob(weights).flatten(1).sum(-1)).sum()
        close(kl_divergence(q, prior), expected - q.entropy())
    with pytest.raises(NotImplementedError):
        kl_divergence(q, StudentT(3.0, torch.zeros(shape), 1.0))


@layouts
def test_draws_have_the_probabilities_of_all_weights(shape, layout):
    q = make(shape, **layout)
    weights, probabilities = every_weight(q)
    draws = q.rsample((20_000,))
    drawn = (draws.flatten(1).unsqueeze(1) - weights.flatten(1)).abs().amax(-1) < 1e-12
    assert (drawn.sum(-1) == 1).all()
    assert_mean(drawn.double(), probabilities)


PADDED = ConvolutionMap(F.conv2d, (3, 2, 2), padding=1)
GROUPED = ConvolutionMap(F.conv2d, (3, 2, 2), stride=2, groups=2)
# The law's shape and groups, a map and the shape of its input.
MAPS = {
    "dense": ((4, 3), 1, DenseMap(), (2, 3)),
    "padding": ((4, 3, 2, 2), 1, PADDED, (2, 3, 3, 3)),
    "groups": ((4, 3, 2, 2), 1, GROUPED, (2, 6, 3, 3)),
    "groups with masks of their own": ((4, 3, 2, 2), 2, GROUPED, (2, 6, 3, 3)),
}


@pytest.mark.parametrize(("shape", "groups", "linear_map", "x_shape"), MAPS.values(), ids=MAPS)
def test_outputs_have_the_moments_of_all_outputs(shape, groups, linear_map, x_shape):
    q, x = make(shape, groups=groups), torch.randn(x_shape)
    weights, probabilities = every_weight(q)
    bias = torch.randn(4)
    outputs = torch.stack([linear_map(x, q.as_matrix(weight), bias) for weight in weights])
    image = q.image_under(linear_map, x, bias)
    for index in range(2):
        mean, covariance = moments(outputs[:, index], probabilities)
        close(image.mean[index].flatten(), mean)
        close(image.covariance_matrix[index], covariance)
        close(image.variance[index].flatten(), covariance.diagonal())


@pytest.mark.parametrize(("groups", "own_groups"), [(1, 1), (2, 1), (2, 2)])
def test_each_example_of_an_image_is_one_of_all_outputs_and_examples_differ(groups, own_groups):
    q = make((4, 3, 2, 2), groups=own_groups)
    x = torch.randn(1, 3 * groups, 3, 3).expand(4000, -1, -1, -1)
    linear_map = ConvolutionMap(F.conv2d, (3, 2, 2), groups=groups)
    draws = q.image_under(linear_map, x).rsample().flatten(1)
    weights, probabilities = every_weight(q)
    outputs = torch.stack([F.conv2d(x[:1], weight, groups=groups) for weight in weights]).flatten(1)
    drawn = (draws.unsqueeze(1) - outputs).abs().amax(-1) < 1e-12
    assert (drawn.sum(-1) == 1).all()
    assert_mean(drawn.double(), probabilities)


def test_positions_share_a_mask_and_examples_have_their_own():
    q, x = BernoulliDropout(torch.eye(3), RATE), torch.ones(10, 4, 3)
    draws = q.image_under(DenseMap(), x).rsample()
    assert torch.equal(draws, draws[:, :1].expand(draws.shape))
    assert len(draws[:, 0].unique(dim=0)) > 1
    assert q.image_under(DenseMap(), x).rsample((5, 2)).shape == (5, 2, 10, 4, 3)
    for local_reparam in ("exact", "flipout"):
        weight = lazy(BernoulliDropout(torch.eye(3), 0.5), local_reparam=local_reparam)
        outputs = F.linear(torch.ones(50, 2, 3), weight)
        assert not weight.is_drawn
        assert len(outputs.unique(dim=0)) > 2


def test_channels_of_zeros_do_not_show_whether_they_were_dropped():
    """They count with the mean over both, so that the mean of log_prob is minus the entropy."""
    q = make((4, 3))
    q.loc[:, 1] = 0
    weights, probabilities = every_weight(q)
    close((probabilities * q.log_prob(weights)).sum(), -q.entropy())
    point = BernoulliDropout(torch.zeros(2, 3), 0.0)
    assert point.log_prob(point.rsample()) == 0
    q = make((4, 3), rate=0.0)
    assert torch.equal(q.rsample(), q.loc)
    assert q.log_prob(q.loc) == q.entropy() == 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q = BernoulliDropout(torch.randn(5, 7, dtype=dtype), RATE)
        assert torch.isfinite(q.log_prob(q.rsample((20,)))).all()


def test_vectors_and_batches_are_refused():
    with pytest.raises(ValueError, match=r"`loc` must have shape \(out, in\) or .* but got \(3,\)"):
        make((3,))
    with pytest.raises(NotImplementedError, match="no batches"):
        make((4, 3)).expand((2,))


def test_flattened_filters_have_the_dense_variance_and_no_image():
    """One mask drops all inputs of a channel, which are several of a flattened filter."""
    q = BernoulliDropout(torch.randn(2, 3, 2), 0.4)
    x = torch.randn(5, 6)
    exact = torch.stack([x @ each @ x.mT for each in blocks_of_outputs(q)]).diagonal(dim1=1, dim2=2)
    found = q.image_variance(DenseMap(positions=False), x, x @ q.as_matrix(q.loc).mT)
    torch.testing.assert_close(found, exact.mT)
    with pytest.raises(ValueError, match=r"weight \(2, 3, 2\) .* 6 inputs in 1 groups"):
        q.image(x)


def blocks_of_outputs(q):
    """Return the covariance of each row of the weight as a matrix, ``(out, in, in)``."""
    out = q.event_shape[0]
    covariance = q.covariance_matrix.unflatten(0, (out, -1)).unflatten(-1, (out, -1))
    return torch.stack([covariance[i, :, i] for i in range(out)])
