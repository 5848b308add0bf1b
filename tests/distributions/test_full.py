"""What FullNormal has beyond the contract: inputs of zeros, gradients, and how shapes are read."""

import pytest
import torch

from pyro_structvi.distributions import FullNormal
from pyro_structvi.maps import DenseMap
from tests.distributions.cases import make_full


@pytest.mark.parametrize("shape", [(1, 3), (1, 2, 3)], ids=["one position", "two"])
def test_inputs_of_zeros_have_draws_and_moments_and_no_density(shape):
    image = make_full((), (4, 3), torch.float64).image_under(DenseMap(), torch.zeros(shape))
    assert torch.isnan(image.log_prob(torch.zeros(image.loc.shape))).all()
    assert torch.isnan(image.entropy()).all()
    assert image.rsample().eq(0).all()
    assert image.variance.eq(0).all()


def test_one_output_has_the_gradient_of_local_reparameterization():
    q, x = make_full((), (1, 3), torch.float64), torch.randn(50, 3)
    factor = q.scale_tril.clone().requires_grad_()
    image = FullNormal(q.loc, factor).image(x)
    drawn = image.rsample()
    noise = ((drawn - image.mean) / image.variance.sqrt()).detach()
    weights = torch.randn_like(drawn)
    (own,) = torch.autograd.grad((weights * drawn).sum(), factor)
    (expected,) = torch.autograd.grad((weights * noise * image.variance.sqrt()).sum(), factor)
    torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-12)


def test_the_dimensions_of_the_factor_tell_a_batch_from_a_weight():
    q = FullNormal(torch.zeros(5, 3), torch.eye(3).expand(5, 3, 3))
    assert (q.batch_shape, q.event_shape) == ((5,), (3,))
    q = FullNormal(torch.zeros(5, 3), torch.eye(15))
    assert (q.batch_shape, q.event_shape) == ((), (5, 3))
