"""FullCovarianceGuide: the exact posterior of a linear regression, memory, parameters, convolutions.

With weights and bias w, inputs with a further 1 as rows of Phi, noise s and prior N(0, diag(p^2)),
the posterior is normal with precision ``Phi'Phi / s^2 + diag(p^-2)``, and no bound is left at it.
"""

from collections import namedtuple

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import MultivariateNormal, Normal, kl_divergence

import pyro_structvi as ps
from pyro_structvi.distributions import JoinedPrior
from pyro_structvi.extend import LatentSite
from pyro_structvi.families import FullCovariance, MeanField
from pyro_structvi.maps import DenseMap
from pyro_structvi.sites.parameterization import parameters_of_rows
from tests.guides.matrix_guides import minimize
from tests.models import local_latent_function

SIZE, NUM_DATA, NOISE = 4, 30, 0.3
PRIOR = {"weight": 0.7, "bias": 1.5}

Regression = namedtuple("Regression", ["x", "y", "mean", "covariance", "log_evidence"])


@pytest.fixture
def regression():
    """Inputs far from zero and correlated, so that weights and bias are too."""
    x = torch.randn(NUM_DATA, SIZE) @ (torch.eye(SIZE) + 0.5) + torch.linspace(-1, 1, SIZE)
    y = x.sum(-1) + 0.5 + NOISE * torch.randn(NUM_DATA)
    inputs = F.pad(x, (0, 1), value=1.0)
    prior = torch.tensor([*SIZE * [PRIOR["weight"]], PRIOR["bias"]]).square().diag()
    covariance = torch.linalg.inv(inputs.mT @ inputs / NOISE**2 + prior.inverse())
    marginal = inputs @ prior @ inputs.mT + NOISE**2 * torch.eye(NUM_DATA)
    evidence = MultivariateNormal(torch.zeros(NUM_DATA), marginal).log_prob(y)
    mean = covariance @ inputs.mT @ y / NOISE**2
    return Regression(x, y.unsqueeze(-1), mean, covariance, evidence)


@pytest.fixture
def model():
    net = ps.bayesianize(nn.Linear(SIZE, 1), prior=PRIOR)
    return ps.Regressor(net, num_data=NUM_DATA, noise_scale=NOISE)


def exact_elbo(q, image, y):
    """Return the bound: a normal's log density needs the moments of its mean only."""
    log_likelihood = Normal(image.mean, NOISE).log_prob(y).sum()
    prior = JoinedPrior(
        dist.Normal(torch.zeros(1, SIZE), PRIOR["weight"]).to_event(2),
        dist.Normal(torch.zeros(1), PRIOR["bias"]).to_event(1),
    )
    return log_likelihood - image.variance.sum() / (2 * NOISE**2) - kl_divergence(q, prior)


def test_it_finds_the_exact_posterior_of_a_linear_regression(model, regression):
    guide = ps.FullCovarianceGuide(model)

    def elbo():
        q = guide["net.weight"]()
        image = q.image_under(*DenseMap().join_bias(regression.x))
        return exact_elbo(q, image, regression.y)

    minimize(guide, lambda: -elbo())
    q = guide["net.weight"]()
    between = regression.covariance[:-1, -1].abs()
    assert (between > 0.1 * regression.covariance[-1, -1]).any(), (
        "weights and bias should vary together"
    )
    torch.testing.assert_close(q.mean.flatten(), regression.mean, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(q.covariance_matrix, regression.covariance, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(elbo(), regression.log_evidence, rtol=1e-9, atol=0)


# ---- parameters ----------------------------------------------------------------------------------


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


# ---- memory --------------------------------------------------------------------------------------


def classifier(*sizes):
    return ps.Classifier(ps.bayesianize(nn.Linear(*sizes), prior=1.0), num_data=10)


def test_a_layer_that_takes_too_much_is_refused_before_anything_large_is_allocated():
    model = classifier(784, 400).float()
    message = (
        r"A full covariance of the 314,000 elements of net\.weight and net\.bias would take "
        r"1\.43 TiB in training, and `max_memory` allows 8 GiB\. Use AutoLowRankLRT, or .*"
        r"\{'net\.weight': LowRank\(rank=2\), .* larger `max_memory`"
    )
    with pytest.raises(MemoryError, match=message):  # where there is no 1.4 TiB, by no other error
        ps.FullCovarianceGuide(model)


def test_the_memory_counts_parameters_moments_gradients_and_the_factor():
    """Parameters, gradients and two moments are 4 (D + D (D + 1) / 2) numbers, factors 2 D^2."""
    size = 3 * 5
    gibibytes = (4 * (size + size * (size + 1) / 2) + 2 * size**2) * 4 / 2**30
    model = classifier(4, 3).float()
    ps.FullCovarianceGuide(model, max_memory=gibibytes * 1.001)
    with pytest.raises(MemoryError, match=r"15 elements of net\.weight and net\.bias .* GiB"):
        ps.FullCovarianceGuide(model, max_memory=gibibytes * 0.999)


# ---- convolutions --------------------------------------------------------------------------------


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
