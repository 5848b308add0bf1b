"""What KTiedNormal has beyond the contract: its rank, and the costs it saves."""

import pytest
import torch
import torch.nn.functional as F
from pyro.distributions import Normal
from torch.distributions import kl_divergence

from pyro_structvi.distributions import KTiedNormal, MeanFieldNormal
from pyro_structvi.linalg.matrices import blocks_of_rows
from pyro_structvi.linalg.reductions import sum_of_logs
from pyro_structvi.maps import ConvolutionMap
from tests.distributions.cases import make_k_tied
from tests.recorded_sizes import RecordsSizes


def test_rank_one_is_mean_field_with_the_outer_product_of_the_factors():
    q = make_k_tied(1)((), (4, 3), torch.float64)
    outer = torch.outer(q.row_scale[:, 0], q.column_scale[:, 0])
    equal = MeanFieldNormal(q.loc, outer)
    value, x, prior = torch.randn(4, 3), torch.randn(7, 3), Normal(0.3, 0.7).expand((4, 3))
    torch.testing.assert_close(q.variance, equal.variance)
    torch.testing.assert_close(q.log_prob(value), equal.log_prob(value))
    torch.testing.assert_close(q.entropy(), equal.entropy())
    torch.testing.assert_close(kl_divergence(q, prior), kl_divergence(equal, prior))
    torch.testing.assert_close(q.image(x).mean, equal.image(x).mean)
    torch.testing.assert_close(q.image(x).variance, equal.image(x).variance)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_rank_is_the_rank_of_the_standard_deviations(rank):
    q = make_k_tied(rank)((), (6, 5), torch.float64)
    assert q.rank == torch.linalg.matrix_rank(q.stddev) == rank


def never(self):
    raise AssertionError("something of the size of the weight was formed")


@pytest.fixture
def without_full_size(monkeypatch):
    """Make it an error to ask for a quantity of the size of the weight."""
    for name in ("stddev", "variance", "covariance_matrix"):
        monkeypatch.setattr(KTiedNormal, name, property(never))


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_image_forms_nothing_of_the_size_of_the_weight(without_full_size, rank):
    q = make_k_tied(rank)((), (40, 30), torch.float64)
    with RecordsSizes(q.loc) as recorded:
        q.image(torch.randn(5, 30)).rsample()
    assert max(recorded.sizes) < 40 * 30 / 2


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_image_under_a_convolution_forms_nothing_of_the_size_of_the_weight(without_full_size, rank):
    q = make_k_tied(rank)((), (40, 16, 3, 3), torch.float64)
    linear_map = ConvolutionMap(F.conv2d, (16, 3, 3))
    with RecordsSizes(q.loc) as recorded:
        q.image_under(linear_map, torch.randn(1, 16, 4, 4)).rsample()
    assert max(recorded.sizes) < 40 * 16 * 9 / 2


def test_kl_to_a_uniform_prior_at_rank_one_forms_little_of_the_size_of_the_weight(
    without_full_size,
):
    """The means alone are of full size; the variances enter by thin products."""
    q = make_k_tied(1)((), (40, 30), torch.float64)
    assert torch.isfinite(kl_divergence(q, Normal(0.0, 1.0).expand((40, 30)).to_event(2)))


def arguments(row_scale=(4, 2), column_scale=(3, 2), loc=(4, 3)):
    return torch.zeros(loc), torch.ones(row_scale), torch.ones(column_scale)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            {"row_scale": (5, 2)},
            r"`row_scale` must have shape \(\*batch, out, k\) = \(4, 2\), but got \(5, 2\)",
        ),
        (
            {"column_scale": (4, 2)},
            r"`column_scale` must have shape \(\*batch, in, k\) = \(3, 2\), but got \(4, 2\)",
        ),
        (
            {"column_scale": (3, 1)},
            r"`column_scale` must have shape \(\*batch, in, k\) = \(3, 2\), but got \(3, 1\)",
        ),
        (
            {"column_scale": (3, 2), "loc": (4, 3, 2, 2)},
            r"`column_scale` must have shape \(\*batch, in, k\) = \(12, 2\), but got \(3, 2\)",
        ),
        ({"row_scale": (4,)}, r"`row_scale` \(\*batch, out, k\), but got \(4, 3\) and \(4,\)"),
        ({"row_scale": ()}, r"`row_scale` \(\*batch, out, k\), but got \(4, 3\) and \(\)"),
        ({"row_scale": (5, 4, 2)}, r"`row_scale` must have .* = \(4, 3, 2\), but got \(5, 4, 2\)"),
        (
            {"row_scale": (6, 5, 4, 2)},
            r"`loc` must have shape \(\*batch, out, \*rest\) and `row_scale` \(\*batch, out, k\), "
            r"but got \(4, 3\) and \(6, 5, 4, 2\)",
        ),
        ({"loc": (4,)}, r"`column_scale` must have shape .* = \(1, 2\), but got \(3, 2\)"),
        (
            {"loc": (5, 4, 3), "row_scale": (5, 4, 2)},
            r"`column_scale` must have shape \(\*batch, in, k\) = \(5, 3, 2\), but got \(3, 2\)",
        ),
        (
            {"loc": (5, 4, 3), "row_scale": (6, 4, 2), "column_scale": (5, 3, 2)},
            r"`row_scale` must have shape \(\*batch, out, k\) = \(5, 4, 2\), but got \(6, 4, 2\)",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, message):
    with pytest.raises(ValueError, match=message):
        KTiedNormal(*arguments(**shapes))


@pytest.mark.parametrize("name", ["row_scale", "column_scale"])
@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_factors_must_be_positive_and_finite(name, wrong):
    named = dict(zip(("loc", "row_scale", "column_scale"), arguments(), strict=True))
    named[name][1, 1] = wrong
    with pytest.raises(ValueError, match=f"`{name}` must be positive and finite everywhere"):
        KTiedNormal(**named)


@pytest.mark.parametrize("name", ["row_scale", "column_scale"])
def test_factors_of_another_dtype_are_refused(name):
    named = dict(zip(("loc", "row_scale", "column_scale"), arguments(), strict=True))
    named[name] = named[name].float()
    message = rf"`{name}` must have the dtype of `loc`, torch\.float64, but got torch\.float32"
    with pytest.raises(ValueError, match=message):
        KTiedNormal(**named)


def test_validation_can_be_switched_off():
    loc, row_scale, column_scale = arguments()
    q = KTiedNormal(loc, -row_scale, -column_scale, validate_args=False)
    assert q.variance.eq(4).all()


def test_the_kl_keeps_nothing_of_the_weights_size_but_the_means():
    q = KTiedNormal(
        torch.randn(40, 30).requires_grad_(),
        (torch.rand(40, 2) + 0.1).requires_grad_(),
        (torch.rand(30, 2) + 0.1).requires_grad_(),
    )
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        kl_divergence(q, Normal(torch.tensor(0.0), torch.tensor(1.0)).expand((40, 30)))
    large = [value for value in kept if value.numel() >= 1200]
    assert all(value.data_ptr() == q.loc.data_ptr() for value in large)


def test_the_sum_of_logs_has_first_and_second_derivatives():
    rows, columns = torch.rand(2, 4, 3) + 0.1, torch.rand(2, 5, 3) + 0.1
    arguments = rows.requires_grad_(), columns.requires_grad_()
    assert torch.autograd.gradcheck(sum_of_logs, arguments)
    assert torch.autograd.gradgradcheck(sum_of_logs, arguments)


def test_the_sum_of_logs_is_added_up_in_blocks_and_under_vmap():
    rows, columns = torch.rand(700, 2) + 0.1, torch.rand(900, 2) + 0.1
    assert len(blocks_of_rows(rows, 900)) > 1
    arguments = rows.requires_grad_(), columns.requires_grad_()
    plain = (rows @ columns.mT).log().sum()
    torch.testing.assert_close(sum_of_logs(*arguments), plain)
    own = torch.autograd.grad(sum_of_logs(*arguments), arguments)
    torch.testing.assert_close(own, torch.autograd.grad(plain, arguments))

    factors = torch.rand(3) + 0.5
    mapped = torch.func.vmap(lambda factor: sum_of_logs(factor * rows, columns))(factors).sum()
    looped = sum(sum_of_logs(factor * rows, columns) for factor in factors)
    torch.testing.assert_close(
        torch.autograd.grad(mapped, arguments), torch.autograd.grad(looped, arguments)
    )
