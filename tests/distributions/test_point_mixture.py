"""A mixture of known weights: draws, moments, images over positions; no density."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Normal, kl_divergence

from pyro_structvi.distributions import PointMixture
from pyro_structvi.maps import ConvolutionMap, DenseMap
from tests.distributions.cases import CONVOLUTION, MATRIX


def make(batch_shape=(), count=3, event_shape=MATRIX):
    return PointMixture(torch.randn(*batch_shape, count, *event_shape), len(event_shape))


def frequencies(draws, members):
    """Return how often each of ``members (K, *event)`` was drawn; every draw must be one of them."""
    draws, members = draws.flatten(1), members.flatten(1)
    counts = torch.stack([(draws == member).all(-1).sum() for member in members])
    assert counts.sum() == len(draws), "a draw is none of the members"
    return counts / len(draws)


def test_members_are_drawn_equally_often_and_apart():
    """Each frequency is a z-test; six of them and nine pairs raise a false alarm at 1e-6."""
    q, count = make((2,), 3), 20_000
    draws = q.rsample((count,))
    assert draws.shape == (count, 2, *MATRIX)
    bound = 5.4
    for index in range(2):
        found = frequencies(draws[:, index], q.members[index])
        assert ((found - 1 / 3).abs() < bound * math.sqrt(2 / 9 / count)).all()
    pairs = torch.stack([
        torch.cat([first.flatten(), second.flatten()])
        for first in q.members[0]
        for second in q.members[1]
    ])
    assert (
        (frequencies(draws.flatten(1), pairs) - 1 / 9).abs() < bound * math.sqrt(8 / 81 / count)
    ).all()


@pytest.mark.parametrize("count", [1, 3])
def test_a_draw_is_not_the_member_itself(count):
    """Training moves the members in place; a draw stays what it was."""
    q = make((), count)
    draw = q.sample()
    before = draw.clone()
    q.members.add_(1.0)
    assert torch.equal(draw, before)


def test_the_gradient_of_a_draw_goes_to_its_member():
    members = torch.randn(3, *MATRIX, requires_grad=True)
    draw = PointMixture(members).rsample()
    (gradient,) = torch.autograd.grad((2 * draw).sum(), members)
    chosen = (members == draw).all(-1).all(-1)
    assert chosen.sum() == 1
    assert torch.equal(gradient, 2.0 * chosen[:, None, None].expand(gradient.shape))


def test_examples_draw_their_members_apart():
    q = PointMixture(torch.tensor([[[0.0]], [[1.0]]]))
    draws = q.image(torch.ones(20_000, 1)).rsample()
    assert abs(draws.mean().item() - 0.5) < 4.9 * 0.5 / math.sqrt(20_000)  # false alarm 1e-6


def test_it_has_no_density_and_a_weight_alone_is_refused():
    q, zeros = make(), torch.zeros(MATRIX)
    for ask in (lambda: q.log_prob(zeros), q.entropy, lambda: kl_divergence(q, Normal(zeros, 1.0))):
        with pytest.raises(NotImplementedError):
            ask()
    message = (
        r"`members` must have shape \(\*batch, K, \*event\) with an event of 2 dimensions, but"
    )
    with pytest.raises(
        ValueError, match=rf"{message} got \(4, 3\)\. Write `weight\.unsqueeze\(0\)"
    ):
        PointMixture(zeros, event_dim=2)


LINEAR_MAPS = {
    "dense": (DenseMap(), (5, 3), MATRIX, F.linear),
    "positions": (DenseMap(), (5, 2, 3), MATRIX, F.linear),
    "a grid": (DenseMap(), (5, 2, 6, 3), MATRIX, F.linear),
    "convolution": (ConvolutionMap(F.conv2d, (3, 2, 2)), (5, 3, 4, 5), CONVOLUTION, F.conv2d),
    "without batch": (ConvolutionMap(F.conv2d, (3, 2, 2)), (3, 4, 5), CONVOLUTION, F.conv2d),
    "groups": (
        ConvolutionMap(F.conv1d, (3, 2), groups=2),
        (5, 6, 4),
        (4, 3, 2),
        lambda x, weight, bias: F.conv1d(x, weight, bias, groups=2),
    ),
}


@pytest.mark.parametrize(
    ("linear_map", "x_shape", "event_shape", "function"), LINEAR_MAPS.values(), ids=LINEAR_MAPS
)
def test_one_member_serves_all_positions(linear_map, x_shape, event_shape, function):
    q, x = make((), 3, event_shape), torch.randn(x_shape)
    image = q.image_under(linear_map, x)
    points = torch.stack([function(x, member, None) for member in q.members])
    rest = (image.rsample() - points).movedim(linear_map.channel_dim, -1)
    rest = rest.reshape(3, *image.batch_shape, -1, 4)
    assert (rest.abs().amax((-2, -1)) < 1e-12).any(0).all()
