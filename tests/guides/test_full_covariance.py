"""FullCovarianceGuide: parameters, sites in plates, and convolutions."""

import torch

import pyro_structvi as ps
from pyro_structvi.families import FullCovariance, MeanField
from pyro_structvi.sites.parameterization import parameters_of_rows
from tests.models import local_latent_function


def test_a_factor_of_a_matrix_has_its_parameters_within_rows_and_between_them():
    """Two rows of two elements by hand; four of three by what the parameters of a factor give back."""
    entries = {
        "log_diagonal": torch.tensor([1.0, 2.0, 3.0, 4.0]).log(),
        "lower": torch.tensor([[10.0], [11.0]]),
        "across": torch.tensor([[[20.0, 21.0], [30.0, 31.0]]]),
    }
    expected = [[1.0, 0, 0, 0], [20, 2, 0, 0], [60, 63, 3, 0], [120, 124, 44, 4]]
    family = FullCovariance()
    q = family.distribution(None, loc=torch.zeros(2, 2), **entries)
    torch.testing.assert_close(q.scale_tril, torch.tensor(expected))
    factor = torch.randn(12, 12).tril(-1) + torch.rand(12).add(0.5).diag()
    loc = torch.zeros(4, 3)
    own = parameters_of_rows(factor, loc)
    torch.testing.assert_close(family.distribution(None, loc=loc, **own).scale_tril, factor)


def test_a_site_in_a_plate_gets_the_default():
    guide = ps.FullCovarianceGuide(local_latent_function)
    guide.initialize(torch.randn(6, 3), torch.randn(6))
    assert isinstance(guide["weight"].family, FullCovariance)
    assert guide["shift"].family == MeanField()
