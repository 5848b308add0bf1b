"""Groups of a convolution with RowwiseNormal."""

import pytest
import torch
import torch.nn.functional as F

from pyro_structvi.distributions import MeanFieldNormal
from pyro_structvi.maps import BiasColumnMap, ConvolutionMap
from tests import dense_oracles as dense
from tests.distributions.cases import make_rowwise, positive
from tests.unit_noise import assert_close


@pytest.mark.parametrize("join", [False, True], ids=["plain", "joined"])
def test_a_group_of_a_convolution_has_the_law_of_a_convolution_of_its_own(join):
    """The oracle joins a bias by a further entry 1 of every patch."""
    q, x = make_rowwise((), (4, 6 + join), torch.float64), torch.randn(2, 6, 3)
    linear_map = ConvolutionMap(F.conv1d, (3, 2), padding=1, groups=2)
    linear_map = BiasColumnMap(linear_map) if join else linear_map
    bias = MeanFieldNormal(torch.randn(4), positive(4, dtype=x.dtype))
    patches = F.pad(dense.patches(x, (2,), padding=1, groups=2), (0, int(join)), value=1.0)
    covariances = dense.full_covariance(q.scale_tril).unflatten(0, (2, -1))
    mean = torch.einsum("bgpi,goi->bgop", patches, q.loc.unflatten(0, (2, -1)))
    mean = mean.flatten(1, 2) + bias.mean.unsqueeze(-1)
    variance = torch.einsum("bgpi,goij,bgpj->bgop", patches, covariances, patches).flatten(1, 2)
    known, random = q.image_under(linear_map, x, bias.mean), q.image_under(linear_map, x, bias)
    assert_close(known.mean, mean)
    assert_close(known.variance, variance)
    assert_close(random.mean, mean)
    assert_close(random.variance, variance + bias.variance.unsqueeze(-1))
