"""Quantiles of posteriors in single precision, far out."""

import pyro.distributions as dist
import pytest
import torch

from tests.guide_cases import GUIDES, once
from tests.models import make_regressor, regression_data

LEVELS = [1e-12, 1 - 1e-8]


@pytest.mark.parametrize("name", once(GUIDES))
def test_far_quantiles_in_single_precision_are_those_in_double(name):
    guide = GUIDES[name](make_regressor(noise_scale=dist.HalfNormal(1.0)))
    guide.initialize(*regression_data())
    with torch.no_grad():  # numbers of single precision
        for parameter in guide.parameters():
            parameter.copy_(parameter.float())
    try:
        double = guide.quantiles(LEVELS)
    except NotImplementedError:
        pytest.skip("no closed form")
    for site, values in guide.float().quantiles(LEVELS).items():
        assert values.dtype == torch.float32
        torch.testing.assert_close(values, double[site].float(), rtol=1e-4, atol=1e-4)
