"""What RowwiseNormal has beyond the contract: its relatives, positions, groups, the triangles, costs."""

import pytest
import torch
import torch.nn.functional as F
from pyro.distributions import Normal
from torch.distributions import kl_divergence

from pyro_structvi.distributions import FullNormal, MatrixNormal, MeanFieldNormal, RowwiseNormal
from pyro_structvi.maps import BiasColumnMap, ConvolutionMap, DenseMap
from tests import dense_oracles as dense
from tests.distributions.cases import cholesky_factor, make_rowwise, positive
from tests.recorded_sizes import RecordsSizes

OUT, IN = 4, 3


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12, check_stride=False)


def make(*event_shape):
    return make_rowwise((), event_shape or (OUT, IN), torch.float64)


# ---- its relatives -------------------------------------------------------------------------------


def with_diagonal_factors(shape):
    scale = positive(*shape, dtype=torch.float64)
    loc, factors = torch.randn(shape), torch.diag_embed(scale.reshape(OUT, -1))
    return RowwiseNormal(loc, factors), MeanFieldNormal(loc, scale)


def with_one_factor_for_all_rows(shape):
    loc = torch.randn(shape)
    factor = cholesky_factor((), loc[0].numel(), loc.dtype)
    factors = factor.expand(OUT, *factor.shape)
    return RowwiseNormal(loc, factors), MatrixNormal(loc, torch.eye(OUT), factor)


def with_factors_of_blocks(shape):
    q = make(*shape)
    return q, FullNormal(q.loc, torch.block_diag(*q.scale_tril))


@pytest.mark.parametrize("shape", [(OUT, IN), (OUT, IN, 2, 2)], ids=["matrix", "convolution"])
@pytest.mark.parametrize(
    "make_both", [with_diagonal_factors, with_one_factor_for_all_rows, with_factors_of_blocks]
)
def test_it_equals_its_relatives(make_both, shape):
    q, relative = make_both(shape)
    value, x, prior = torch.randn(shape), torch.randn(7, q.loc[0].numel()), Normal(0.3, 0.7)
    image, relative_image = q.image(x), relative.image(x)
    close(q.mean, relative.mean)
    close(q.variance, relative.variance)
    close(q.covariance_matrix, relative.covariance_matrix)
    close(q.log_prob(value), relative.log_prob(value))
    close(q.entropy(), relative.entropy())
    close(*(kl_divergence(law, prior.expand(shape)) for law in (q, relative)))
    close(image.mean, relative_image.mean)
    close(image.covariance_matrix, relative_image.covariance_matrix)


# ---- the image -----------------------------------------------------------------------------------


@pytest.mark.parametrize("random_bias", [False, True])
@pytest.mark.parametrize("join", [False, True], ids=["plain", "joined"])
def test_a_group_of_a_convolution_has_the_law_of_a_convolution_of_its_own(join, random_bias):
    """The oracle joins a bias by a further entry 1 of every patch."""
    q, x = make(OUT, 2 * IN + join), torch.randn(2, 2 * IN, 3)
    linear_map = ConvolutionMap(F.conv1d, (IN, 2), padding=1, groups=2)
    bias = MeanFieldNormal(torch.randn(OUT), positive(OUT, dtype=x.dtype))
    image = q.image_under(
        BiasColumnMap(linear_map) if join else linear_map, x, bias if random_bias else bias.mean
    )
    patches = F.pad(dense.patches(x, (2,), padding=1, groups=2), (0, int(join)), value=1.0)
    covariances = dense.full_covariance(q.scale_tril).unflatten(0, (2, -1))
    mean = torch.einsum("bgpi,goi->bgop", patches, q.loc.unflatten(0, (2, -1)))
    variance = torch.einsum("bgpi,goij,bgpj->bgop", patches, covariances, patches)
    close(image.mean, mean.flatten(1, 2) + bias.mean.unsqueeze(-1))
    close(image.variance, variance.flatten(1, 2) + random_bias * bias.variance.unsqueeze(-1))


def test_a_draw_of_the_image_forms_nothing_larger_than_what_whitens_its_inputs():
    q, x = make(20, 30), torch.randn(50, 30)
    with RecordsSizes() as recorded:
        q.image_under(DenseMap(), x).rsample()
    assert max(recorded.sizes) == 50 * 20 * 30


# ---- arguments -----------------------------------------------------------------------------------
