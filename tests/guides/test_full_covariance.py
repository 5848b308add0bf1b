"""FullCovarianceGuide: parameters, sites in plates, and convolutions."""

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F

import pyro_structvi as ps
from pyro_structvi.extend import LatentSite
from pyro_structvi.families import FullCovariance, MeanField
from pyro_structvi.sites.parameterization import parameters_of_rows
from tests.models import local_latent_function


def vector_site(size):
    return LatentSite("vector", torch.Size([size]), 1, torch.distributions.constraints.real)


def test_the_factor_has_the_parameters_row_by_row():
    family, site = FullCovariance(), vector_site(4)
    q = family.distribution(
        site,
        loc=torch.zeros(4),
        log_diagonal=torch.tensor([1.0, 2.0, 3.0, 4.0]).log(),
        lower=torch.tensor([10.0, 20.0, 21.0, 30.0, 31.0, 32.0]),
    )
    expected = [[1.0, 0, 0, 0], [20, 2, 0, 0], [60, 63, 3, 0], [120, 124, 128, 4]]
    torch.testing.assert_close(q.scale_tril, torch.tensor(expected))


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


def test_an_image_without_a_batch_dimension():
    def model(x, y):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(2, 1, 3, 3), 1.0).to_event(4))
        bias = pyro.sample("bias", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        mean = F.conv2d(x, weight, bias, padding=1)
        pyro.sample("obs", dist.Normal(mean, 0.1).to_event(3), obs=y)

    data, guide = (torch.randn(1, 6, 6), torch.randn(2, 6, 6)), ps.FullCovarianceGuide(model)
    guide.initialize(*data)
    ps.StructuredELBO().loss_and_grads(model, guide, *data)
    assert (guide["weight"].lower.grad != 0).all()
