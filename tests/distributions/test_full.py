"""What FullNormal has beyond the contract: one weight for all positions, the triangle, the costs."""

import pytest
import torch
import torch.nn.functional as F

from pyro_structvi.distributions import FullNormal
from pyro_structvi.maps import DenseMap
from tests import dense_oracles as dense
from tests.distributions.cases import make_full
from tests.lazy_weights import lazy
from tests.recorded_sizes import RecordsSizes
from tests.unit_noise import assert_draws

OUT, IN = 4, 3


# ---- positions -----------------------------------------------------------------------------------


def operator(x):
    """Return the matrix from ``vec(W)`` to the outputs of one example, position by position."""
    return torch.cat([torch.kron(torch.eye(OUT), row.unsqueeze(0)) for row in x.reshape(-1, IN)])


@pytest.mark.parametrize("positions", [(2,), (1, 2)], ids=["sequence", "grid"])
def test_a_layer_with_positions_draws_one_weight_for_each_example(positions):
    q, x = make_full((), (OUT, IN), torch.float64), torch.randn(2, *positions, IN)
    applied = torch.stack([operator(example) for example in x])
    covariance = applied @ dense.full_covariance(q.scale_tril) @ applied.mT
    assert_draws(lambda: F.linear(x, lazy(q)), F.linear(x, q.loc), covariance)


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


def everything(q):
    """Return all that may look at the triangular argument."""
    torch.manual_seed(0)
    x, value = torch.randn(5, IN), torch.randn(OUT, IN)
    image = q.image(x)
    return [
        *(q.variance, q.variance_sum, q.covariance_matrix, q.log_det_covariance, q.rsample()),
        *(q.log_prob(value), q.entropy(), image.variance, image.covariance_matrix),
        *(image.rsample(), image.log_prob(torch.zeros(5, OUT))),
    ]


def test_only_the_lower_triangle_counts():
    q = make_full((), (OUT, IN), torch.float64)
    above = torch.full((OUT * IN, OUT * IN), torch.nan).triu(1)
    full = FullNormal(q.loc, q.scale_tril + above, validate_args=False)
    assert torch.isnan(full.scale_tril).any()
    for actual, expected in zip(everything(full), everything(q), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("loc", "scale_tril", "message"),
    [
        ((4, 3), (4, 4), r"`scale_tril` must have shape \(\*batch, D, D\) = \(12, 12\).* \(4, 4\)"),
        ((4, 3), (12, 4), r"`scale_tril` must have shape .* = \(12, 12\), but got \(12, 4\)"),
        ((5, 4), (6, 4, 4), r"`scale_tril` must have shape .* = \(5, 4, 4\), but got \(6, 4, 4\)"),
        (
            (4,),
            (4,),
            r"`loc` must have shape .* `scale_tril` \(\*batch, D, D\).* \(4,\) and \(4,\)",
        ),
        (
            (4,),
            (5, 4, 4),
            r"`loc` must have shape \(\*batch, out, \*rest\).* \(4,\) and \(5, 4, 4\)",
        ),
        ((), (1, 1), r"`loc` must have shape .* but got \(\) and \(1, 1\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(loc, scale_tril, message):
    with pytest.raises(ValueError, match=message):
        FullNormal(torch.zeros(loc), torch.zeros(scale_tril))


def test_an_entry_above_the_diagonal_is_refused():
    tril = torch.eye(3)
    tril[0, 2] = 0.25
    message = r"`scale_tril` must be lower triangular, but it has an entry 0\.25 .*linalg\.cholesky"
    with pytest.raises(ValueError, match=message):
        FullNormal(torch.zeros(3), tril)


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_the_diagonal_must_be_positive_and_finite(wrong):
    tril = torch.eye(3)
    tril[1, 1] = wrong
    message = r"`scale_tril\.diagonal\(\)` must be positive and finite everywhere"
    with pytest.raises(ValueError, match=message):
        FullNormal(torch.zeros(3), tril)


def test_a_factor_of_another_dtype_is_refused():
    message = r"`scale_tril` must have the dtype of `loc`, torch\.float64, but got torch\.float32"
    with pytest.raises(ValueError, match=message):
        FullNormal(torch.zeros(3), torch.eye(3, dtype=torch.float32))


def test_the_dimensions_of_the_factor_tell_a_batch_from_a_weight():
    q = FullNormal(torch.zeros(5, 3), torch.eye(3).expand(5, 3, 3))
    assert (q.batch_shape, q.event_shape) == ((5,), (3,))
    q = FullNormal(torch.zeros(5, 3), torch.eye(15))
    assert (q.batch_shape, q.event_shape) == ((), (5, 3))
