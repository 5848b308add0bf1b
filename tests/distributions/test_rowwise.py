"""What RowwiseNormal has beyond the contract: groups, costs."""

import pytest
import torch
import torch.nn.functional as F

from pyro_structvi.distributions import MeanFieldNormal
from pyro_structvi.maps import BiasColumnMap, ConvolutionMap, DenseMap
from tests import dense_oracles as dense
from tests.distributions.cases import make_rowwise, positive
from tests.recorded_sizes import RecordsSizes

OUT, IN = 4, 3


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12, check_stride=False)


def make(*event_shape):
    return make_rowwise((), event_shape or (OUT, IN), torch.float64)


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
