"""What MatrixNormal has beyond the contract: its relatives, positions, groups, the triangles, costs."""

import pytest
import torch
import torch.nn.functional as F
from pyro.distributions import Normal
from torch.distributions import kl_divergence

from pyro_structvi.distributions import KTiedNormal, MatrixNormal, MeanFieldNormal
from pyro_structvi.maps import DenseMap
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


# ---- the image -----------------------------------------------------------------------------------


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


FACTORS = pytest.mark.parametrize(
    ("name", "size"), [("scale_tril_row", OUT), ("scale_tril_column", IN)]
)
