"""Independent normals, some of which are pruned to zero."""

import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from pyro_structvi.distributions import PrunedNormal

LOC = torch.tensor([[0.3, -1.2, 0.5], [2.0, 0.1, -0.4]], dtype=torch.float64)
SCALE = torch.tensor([[0.5, 0.7, 1.1], [0.2, 0.9, 0.6]], dtype=torch.float64)
KEPT = torch.tensor([[True, False, True], [True, True, False]])


def test_values_are_refused_only_where_validation_is_on():
    nan = torch.full_like(LOC, math.nan)
    with pytest.raises(ValueError, match=r"^`value` holds .* NaN"):
        PrunedNormal(LOC, SCALE, KEPT, validate_args=True).log_prob(nan)
    assert PrunedNormal(LOC, SCALE, KEPT, validate_args=False).log_prob(nan).isnan()


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="`kept` must broadcast to the shape of `loc`"):
        PrunedNormal(LOC, SCALE, torch.ones(4, dtype=torch.bool), validate_args=True)


def test_density_entropy_and_kl_are_those_of_the_kept_elements():
    q, value = PrunedNormal(LOC, SCALE, KEPT), torch.randn(5, *LOC.shape, dtype=torch.float64)
    own, prior = Normal(LOC[KEPT], SCALE[KEPT]), Normal(LOC.new_zeros(()), LOC.new_ones(()))
    torch.testing.assert_close(q.log_prob(value), own.log_prob(value[:, KEPT]).sum(-1))
    torch.testing.assert_close(q.entropy(), own.entropy().sum())
    expected = kl_divergence(own, prior.expand(own.batch_shape)).sum()
    torch.testing.assert_close(kl_divergence(q, prior.expand(LOC.shape)), expected)
