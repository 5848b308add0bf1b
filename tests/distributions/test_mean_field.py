"""What MeanFieldNormal has beyond the contract."""

import pytest
import torch
from torch.distributions import Normal

from pyro_structvi.distributions import MeanFieldNormal
from pyro_structvi.linalg.matrices import floored_sqrt


def test_scale_broadcasts_to_loc():
    loc, scale = torch.randn(2, 4, 3), torch.rand(4, 1) + 0.1
    q = MeanFieldNormal(loc, scale, event_dim=2)
    assert (q.batch_shape, q.event_shape) == ((2,), (4, 3))
    torch.testing.assert_close(q.stddev, scale.expand(2, 4, 3), check_stride=False)
    assert MeanFieldNormal(torch.zeros(4, 3), torch.tensor(0.5)).variance_sum.item() == 3.0


@pytest.mark.parametrize(
    ("event_dim", "batch_shape"), [(None, ()), (3, ()), (2, (2,)), (1, (2, 4)), (0, (2, 4, 3))]
)
def test_event_dim_splits_the_shape(event_dim, batch_shape):
    q = MeanFieldNormal(torch.zeros(2, 4, 3), torch.tensor(1.0), event_dim)
    assert q.batch_shape == batch_shape
    assert q.log_prob(torch.zeros(2, 4, 3)).shape == batch_shape


def test_single_numbers_equal_a_normal():
    """A site of scalars, such as a bias in a plate, has no event dimension at all."""
    loc, scale, value = torch.randn(5), torch.rand(5) + 0.1, torch.randn(5)
    q, plain = MeanFieldNormal(loc, scale, event_dim=0), Normal(loc, scale)
    torch.testing.assert_close(q.log_prob(value), plain.log_prob(value))
    torch.testing.assert_close(q.entropy(), plain.entropy())
    torch.testing.assert_close(q.variance_sum, plain.variance)


def test_scales_that_would_enlarge_loc_are_refused():
    message = r"`scale` must broadcast to the shape of `loc` = \(4, 3\), but got shape \(2, 4, 3\)"
    with pytest.raises(ValueError, match=message):
        MeanFieldNormal(torch.zeros(4, 3), torch.ones(2, 4, 3))
    scale = torch.ones(4, 3)
    scale[1, 2] = float("inf")
    with pytest.raises(ValueError, match="`scale` must be positive and finite everywhere"):
        MeanFieldNormal(torch.zeros(4, 3), scale)


def test_validation_can_be_switched_off():
    q = MeanFieldNormal(torch.zeros(4, 3), torch.tensor(-1.0), validate_args=False)
    assert q.variance.eq(1).all()
    assert q.log_prob(torch.full((4, 3), float("nan"))).isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_roots_of_half_precision_are_single(dtype):
    variance = torch.tensor([0.0, 1e-6, 4.0], dtype=dtype, requires_grad=True)
    scale = floored_sqrt(variance)
    assert scale.dtype == torch.float32
    torch.testing.assert_close(scale, variance.float().sqrt(), rtol=1e-6, atol=1e-18)
    assert torch.isfinite(torch.autograd.grad(scale.sum(), variance)[0]).all()
