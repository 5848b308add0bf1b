"""What FullNormal has beyond the contract: one weight for all positions, the triangle, the costs."""

import pytest
import torch

from pyro_structvi.distributions import FullNormal
from pyro_structvi.maps import DenseMap
from tests.distributions.cases import make_full
from tests.recorded_sizes import RecordsSizes

OUT, IN = 4, 3


# ---- positions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, IN), (1, 2, IN)], ids=["one position", "two"])
def test_inputs_of_zeros_have_draws_and_moments_and_no_density(shape):
    image = make_full((), (OUT, IN), torch.float64).image_under(DenseMap(), torch.zeros(shape))
    assert torch.isnan(image.log_prob(torch.zeros(image.loc.shape))).all()
    assert torch.isnan(image.entropy()).all()
    assert image.rsample().eq(0).all()
    assert image.variance.eq(0).all()


# ---- costs ---------------------------------------------------------------------------------------


def test_a_draw_of_the_image_forms_the_noise_of_each_output_and_nothing_larger():
    q, x = make_full((), (OUT, IN), torch.float64), torch.randn(50, IN)
    with RecordsSizes() as recorded:
        q.image(x).rsample()
    assert max(recorded.sizes) == 50 * OUT * (OUT * IN)


@pytest.mark.parametrize(("inputs", "needs_gradients"), [(1, True), (IN, False)])
def test_outputs_are_one_weight_for_each_example_where_they_show_all_noise(inputs, needs_gradients):
    """And where no gradient is asked for; the values are the same."""
    q, x = make_full((), (OUT, inputs), torch.float64), torch.randn(50, inputs)
    torch.manual_seed(0)
    expected = q.image(x).rsample()
    torch.manual_seed(0)
    with RecordsSizes() as recorded, torch.set_grad_enabled(needs_gradients):
        drawn = q.image(x).rsample()
    assert max(recorded.sizes) == 50 * OUT * inputs
    torch.testing.assert_close(drawn, expected, rtol=1e-12, atol=1e-12)


def test_one_output_is_drawn_by_its_standard_deviation():
    """Its gradient is that of local reparameterization, though there is more noise than one number."""
    q, x = make_full((), (1, IN), torch.float64), torch.randn(50, IN)
    factor = q.scale_tril.clone().requires_grad_()
    image = FullNormal(q.loc, factor).image(x)
    drawn = image.rsample()
    noise = ((drawn - image.mean) / image.variance.sqrt()).detach()
    weights = torch.randn_like(drawn)
    (own,) = torch.autograd.grad((weights * drawn).sum(), factor)
    (expected,) = torch.autograd.grad((weights * noise * image.variance.sqrt()).sum(), factor)
    torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-12)


# ---- arguments -----------------------------------------------------------------------------------


def test_the_dimensions_of_the_factor_tell_a_batch_from_a_weight():
    q = FullNormal(torch.zeros(5, 3), torch.eye(3).expand(5, 3, 3))
    assert (q.batch_shape, q.event_shape) == ((5,), (3,))
    q = FullNormal(torch.zeros(5, 3), torch.eye(15))
    assert (q.batch_shape, q.event_shape) == ((), (5, 3))
