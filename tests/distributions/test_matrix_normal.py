"""What MatrixNormal has beyond the contract: its relatives, positions, groups, the triangles, costs."""

import pytest
import torch
import torch.nn.functional as F
from pyro.distributions import Normal
from scipy import stats
from torch.distributions import kl_divergence

from pyro_structvi.distributions import KTiedNormal, MatrixNormal, MeanFieldNormal
from pyro_structvi.maps import DenseMap
from tests import dense_oracles as dense
from tests.distributions.cases import make_matrix_normal, positive
from tests.lazy_weights import lazy
from tests.recorded_sizes import RecordsSizes

OUT, IN = 4, 3
CONVOLUTION = (OUT, IN, 2, 2)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12, check_stride=False)


def make(*event_shape):
    return make_matrix_normal((), event_shape or (OUT, IN), torch.float64)


# ---- its relatives -------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(OUT, IN), CONVOLUTION], ids=["matrix", "convolution"])
def test_with_diagonal_factors_it_is_one_tied(shape):
    loc, size = torch.randn(shape), torch.Size(shape[1:]).numel()
    rows, columns = (positive(number, dtype=loc.dtype) for number in (OUT, size))
    q = MatrixNormal(loc, torch.diag(rows), torch.diag(columns))
    tied = KTiedNormal(loc, rows.unsqueeze(-1), columns.unsqueeze(-1))
    value, x, prior = torch.randn(shape), torch.randn(7, size), Normal(0.3, 0.7).expand(shape)
    image, tied_image = q.image(x), tied.image(x)
    close(q.mean, tied.mean)
    close(q.covariance_matrix, tied.covariance_matrix)
    close(q.log_prob(value), tied.log_prob(value))
    close(q.entropy(), tied.entropy())
    close(kl_divergence(q, prior), kl_divergence(tied, prior))
    close(image.mean, tied_image.mean)
    close(image.covariance_matrix, tied_image.covariance_matrix)


def test_its_density_is_that_of_scipy():
    q, value = make(), torch.randn(5, OUT, IN)
    rows, columns = (
        dense.full_covariance(f).numpy() for f in (q.scale_tril_row, q.scale_tril_column)
    )
    density = stats.matrix_normal.logpdf(value.numpy(), q.loc.numpy(), rows, columns)
    close(q.log_prob(value), torch.from_numpy(density))


def test_scale_may_move_from_one_factor_to_the_other():
    q = make()
    moved = MatrixNormal(q.loc, 2 * q.scale_tril_row, q.scale_tril_column / 2)
    close(moved.covariance_matrix, q.covariance_matrix)


# ---- the image -----------------------------------------------------------------------------------


def test_the_covariance_of_an_image_is_a_multiple_of_that_of_the_rows():
    q, x = make(), torch.randn(7, IN)
    rows, columns = map(dense.full_covariance, (q.scale_tril_row, q.scale_tril_column))
    size = torch.stack([row @ columns @ row for row in x])
    close(q.image(x).covariance_matrix, size[:, None, None] * rows)


def test_a_convolution_with_groups_uses_one_drawn_weight():
    weight, x = lazy(make(OUT, 2, 2, 2)), torch.randn(5, 4, 3, 3)
    outputs = F.conv2d(x, weight, groups=2)
    assert weight.is_drawn
    assert torch.equal(outputs, F.conv2d(x, weight.draw(), groups=2))


# ---- costs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("random_bias", [False, True])
def test_a_draw_of_the_image_forms_nothing_larger_than_inputs_outputs_and_factors(random_bias):
    q, x = make(20, 30), torch.randn(50, 30)
    bias = MeanFieldNormal(torch.randn(20), torch.rand(20)) if random_bias else None
    with RecordsSizes() as recorded:
        q.image_under(DenseMap(), x, bias).rsample()
    assert max(recorded.sizes) == 50 * 30


# ---- arguments -----------------------------------------------------------------------------------


def everything(q):
    """Return all that may look at the triangular arguments."""
    torch.manual_seed(0)
    x, value = torch.randn(5, IN), torch.randn(OUT, IN)
    image = q.image(x)
    return [
        *(q.variance, q.variance_sum, q.covariance_matrix, q.log_det_covariance, q.rsample()),
        *(q.log_prob(value), q.entropy(), image.variance, image.covariance_matrix),
        *(image.rsample(), image.log_prob(torch.zeros(5, OUT))),
    ]


def test_only_the_lower_triangles_count():
    q = make()
    row, column = (
        factor + torch.full_like(factor, torch.nan).triu(1)
        for factor in (q.scale_tril_row, q.scale_tril_column)
    )
    full = MatrixNormal(q.loc, row, column, validate_args=False)
    for actual, expected in zip(everything(full), everything(q), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("loc", "row", "column", "message"),
    [
        (
            (4, 3),
            (5, 5),
            (3, 3),
            r"`scale_tril_row` must have shape \(\*batch, out, out\) = \(4, 4\), but got \(5, 5\)",
        ),
        (
            (4, 3),
            (4, 4),
            (4, 4),
            r"`scale_tril_column` must have shape \(\*batch, in, in\) = \(3, 3\), but got \(4, 4\)",
        ),
        (
            (4, 3, 2, 2),
            (4, 4),
            (3, 3),
            r"`scale_tril_column` must have shape .* = \(12, 12\), but got \(3, 3\)",
        ),
        ((4, 3), (4, 3), (3, 3), r"`scale_tril_row` must have shape .* but got \(4, 3\)"),
        ((4, 3), (4, 4), (3,), r"`scale_tril_column` must have shape .* but got \(3,\)"),
        (
            (4, 3),
            (4,),
            (3, 3),
            r"`loc` must have shape \(\*batch, out, \*rest\) and `scale_tril_row` \(\*batch, out, "
            r"out\), but got \(4, 3\) and \(4,\)",
        ),
        ((), (4, 4), (1, 1), r"`loc` must have shape .* got \(\) and \(4, 4\)"),
        ((4, 3), (5, 4, 4), (5, 3, 3), r"`scale_tril_row` must have shape .* got \(5, 4, 4\)"),
        (
            (5, 4, 3),
            (5, 4, 4),
            (3, 3),
            r"`scale_tril_column` must have shape .* = \(5, 3, 3\), but got \(3, 3\)",
        ),
        (
            (5, 4, 3),
            (6, 4, 4),
            (5, 3, 3),
            r"`scale_tril_row` must have shape .* = \(5, 4, 4\), but got \(6, 4, 4\)",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused(loc, row, column, message):
    with pytest.raises(ValueError, match=message):
        MatrixNormal(torch.zeros(loc), torch.zeros(row), torch.zeros(column))


def arguments(**factors):
    identities = {"scale_tril_row": torch.eye(OUT), "scale_tril_column": torch.eye(IN)}
    return {"loc": torch.zeros(OUT, IN), **identities, **factors}


FACTORS = pytest.mark.parametrize(
    ("name", "size"), [("scale_tril_row", OUT), ("scale_tril_column", IN)]
)


@FACTORS
def test_an_entry_above_the_diagonal_is_refused(name, size):
    factor = torch.eye(size)
    factor[0, 2] = 0.25
    message = rf"`{name}` must be lower triangular, but it has an entry 0\.25 .*`{name}\.tril\(\)`"
    with pytest.raises(ValueError, match=message):
        MatrixNormal(**arguments(**{name: factor}))


@FACTORS
@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_diagonals_must_be_positive_and_finite(name, size, wrong):
    factor = torch.eye(size)
    factor[1, 1] = wrong
    message = rf"`{name}\.diagonal\(\)` must be positive and finite everywhere"
    with pytest.raises(ValueError, match=message):
        MatrixNormal(**arguments(**{name: factor}))


@FACTORS
def test_factors_of_another_dtype_are_refused(name, size):
    message = rf"`{name}` must have the dtype of `loc`, torch\.float64, but got torch\.float32"
    with pytest.raises(ValueError, match=message):
        MatrixNormal(**arguments(**{name: torch.eye(size, dtype=torch.float32)}))


def test_validation_can_be_switched_off():
    q = MatrixNormal(**arguments(scale_tril_row=-torch.eye(OUT)), validate_args=False)
    assert q.variance.eq(1).all()
