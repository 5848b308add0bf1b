"""Arguments that are Cholesky factors: the lower triangle counts, and nothing above it."""

import pytest
import torch

from tests.distributions.cases import make_full, make_matrix_normal, make_rowwise

MAKE = {"full": make_full, "matrix normal": make_matrix_normal, "rowwise": make_rowwise}


def everything(q):
    """Return all that may look at a triangular argument."""
    torch.manual_seed(0)
    x, value = torch.randn(5, 3), torch.randn(4, 3)
    image = q.image(x)
    return [
        *(q.variance, q.variance_sum, q.covariance_matrix, q.log_det_covariance, q.rsample()),
        *(q.log_prob(value), q.entropy(), image.variance, image.covariance_matrix),
        *(image.rsample(), image.log_prob(torch.zeros(5, 4))),
    ]


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_only_the_lower_triangle_counts(make):
    q = make((), (4, 3), torch.float64)
    names = [name for name in q.argument_names if "tril" in name]
    above = (
        getattr(q, name) + torch.full_like(getattr(q, name), torch.nan).triu(1) for name in names
    )
    full = type(q)(q.loc, *above, validate_args=False)
    for actual, expected in zip(everything(full), everything(q), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_diagonals_must_be_positive_and_finite(make):
    q = make((), (4, 3), torch.float64)
    for index, name in enumerate(q.argument_names[1:]):
        factors = [getattr(q, each).clone() for each in q.argument_names[1:]]
        message = rf"`{name}\.diagonal\(\)` must be positive and finite"
        for wrong in (0.0, -1.0, float("nan"), float("inf")):
            factors[index][..., 1, 1] = wrong
            with pytest.raises(ValueError, match=message):
                type(q)(q.loc, *factors, validate_args=True)
        factors[index] = torch.ones_like(factors[index])
        with pytest.raises(ValueError, match=f"`{name}` must be lower triangular"):
            type(q)(q.loc, *factors, validate_args=True)
