"""What only the low-rank Normal does: reading shapes, and staying precise."""

import pytest
import torch

from pyro_structvi.distributions import LowRankNormal, MeanFieldNormal
from pyro_structvi.maps import DenseMap
from tests.distributions.cases import make_low_rank


@pytest.mark.parametrize(
    ("loc", "factors", "event_dim", "batch", "rank"),
    [
        ((4, 3), (2, 4, 3), None, (), 2),
        ((4, 3), (4, 4, 3), None, (), 4),  # as a matrix, not as four vectors
        ((5, 4, 3), (5, 2, 4, 3), None, (5,), 2),
        ((5, 4, 3), (2, 5, 4, 3), None, (), 2),
        ((2, 4, 3), (2, 2, 4, 3), 2, (2,), 2),
        ((2, 4, 3), (2, 2, 4, 3), 3, (), 2),
        ((4,), (4, 4), None, (), 4),
    ],
)
def test_batch_and_rank_are_read_from_the_shapes(loc, factors, event_dim, batch, rank):
    q = LowRankNormal(torch.zeros(loc), torch.zeros(factors), 1.0, event_dim=event_dim)
    assert (q.batch_shape, q.rank) == (batch, rank)


@pytest.mark.parametrize(
    ("factors", "event_dim"), [((4, 3), None), ((2, 4, 2), None), ((0, 4, 3), None), ((2, 4, 3), 1)]
)
def test_shapes_that_do_not_fit_are_an_error(factors, event_dim):
    message = r"`factors` must have shape \(\*batch, K, out, \*rest\).*for \(4, 3\)"
    with pytest.raises(ValueError, match=message):
        LowRankNormal(torch.zeros(4, 3), torch.zeros(factors), 1.0, event_dim=event_dim)
    with pytest.raises(ValueError, match=r"`event_dim` must be given, one of \[3, 2\]"):
        LowRankNormal(torch.zeros(2, 4, 3), torch.zeros(2, 2, 4, 3), 1.0)


def test_scale_and_alpha_may_be_numbers():
    loc, factors = torch.zeros(2, 3).float(), torch.randn(4, 2, 3).float()
    for kind in (MeanFieldNormal, lambda loc, s: LowRankNormal(loc, loc[None], s)):
        assert kind(loc, 2).variance.eq(4).all()
        assert kind(loc, 2.0).variance.dtype == torch.float32
    default = LowRankNormal(loc, factors, 0.5)  # with one over the rank
    given = LowRankNormal(loc, factors, 0.5, alpha=0.25)
    assert torch.equal(default.variance, given.variance)
    assert default.expand((2,)).alpha == 0.25


def test_a_look_without_gradients_leaves_the_image_its_gradients():
    q = make_low_rank(2)((), (4, 3), torch.float64)
    factors = q.factors.requires_grad_()
    image = q.image(torch.randn(5, 3))
    with torch.no_grad():
        assert not image.variance.requires_grad
    image.variance.sum().backward()
    assert factors.grad.abs().sum() > 0
    assert q.image_under(DenseMap(), torch.zeros(0, 3)).rsample().shape == (0, 4)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("shape", [(1,), (2,), (100, 100)], ids=str)
def test_the_determinant_is_precise_in_single_and_mixed_precision(shape, autocast):
    """More factors than elements, too, under a diagonal as small as exp(-10)."""
    scale = torch.tensor(0.0067, dtype=torch.float32)
    for factors in torch.randn(50 if len(shape) == 1 else 1, 3, *shape):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            single = LowRankNormal(torch.zeros(shape).float(), factors.float(), scale)
            found = single.log_det_covariance
        exact = LowRankNormal(torch.zeros(shape), factors, scale.double()).log_det_covariance
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)
