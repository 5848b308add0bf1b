"""RowwiseGuide and MatrixNormalGuide: the exact posterior of a linear regression, parameters, memory.

With weights W (out, in), inputs as rows of X, noise s_i of output i and prior variance p^2, the rows of
W are independent in the posterior, row i with the covariance

    Sigma_i = (X'X / s_i^2 + I / p^2)^-1,

which is a matrix normal where all s_i are equal.
"""

from collections import namedtuple

import pyro
import pytest
import torch
from torch import nn
from torch.distributions import Independent, MultivariateNormal, Normal, kl_divergence

import pyro_structvi as ps
from pyro_structvi.families import LowRank, Rowwise
from pyro_structvi.sites.parameterization import cholesky_factor
from pyro_structvi.weights.lazy import LazyWeight
from tests.guides.matrix_guides import minimize

OUT, IN, NUM_DATA, PRIOR = 3, 4, 30, 0.7
EQUAL, DIFFERENT = (torch.tensor(noise).double() for noise in ([0.4] * 3, [0.3, 0.5, 0.8]))

Regression = namedtuple("Regression", ["x", "y", "mean", "covariances", "log_evidence"])


def make_regression(noise):
    """Return data with correlated inputs; means and covariances of the rows in the exact posterior."""
    x = torch.randn(NUM_DATA, IN) @ (torch.eye(IN) + 0.5)
    y = x @ torch.randn(IN, OUT) + noise * torch.randn(NUM_DATA, OUT)
    precisions = x.mT @ x / noise[:, None, None] ** 2 + torch.eye(IN) / PRIOR**2
    covariances = precisions.inverse()
    mean = (covariances @ (x.mT @ y / noise**2).mT.unsqueeze(-1)).squeeze(-1)
    marginals = PRIOR**2 * x @ x.mT + noise[:, None, None] ** 2 * torch.eye(NUM_DATA)
    evidence = MultivariateNormal(torch.zeros(NUM_DATA), marginals).log_prob(y.mT).sum()
    return Regression(x, y, mean, covariances, evidence)


def exact_elbo(q, regression, noise):
    """Return the bound: a normal's log density needs the moments of its mean only."""
    image = q.image(regression.x)
    log_likelihood = Normal(image.mean, noise).log_prob(regression.y).sum()
    prior = Independent(Normal(torch.zeros(OUT, IN), PRIOR), 2)
    return log_likelihood - (image.variance / noise**2).sum() / 2 - kl_divergence(q, prior)


@pytest.mark.parametrize(
    ("make_guide", "noise"), [(ps.RowwiseGuide, DIFFERENT), (ps.MatrixNormalGuide, EQUAL)]
)
def test_it_finds_the_exact_posterior(make_guide, noise):
    """The bound is scaled, since torch's LBFGS ignores products below 1e-10."""
    regression = make_regression(noise)
    net = ps.bayesianize(nn.Linear(IN, OUT, bias=False), prior=PRIOR)
    guide = make_guide(ps.Regressor(net, NUM_DATA, noise_scale=noise), init_scale=0.1)
    minimize(
        guide,
        lambda: -1e6 * exact_elbo(guide["net.weight"](), regression, noise),
        max_iter=1000,
        tolerance_grad=1e-7,
        tolerance_change=0,
    )
    q = guide["net.weight"]()
    expected = torch.block_diag(*regression.covariances)
    torch.testing.assert_close(q.mean, regression.mean, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(q.covariance_matrix, expected, rtol=1e-5, atol=1e-8)
    elbo = exact_elbo(q, regression, noise)
    torch.testing.assert_close(elbo, regression.log_evidence, rtol=1e-9, atol=0)


# ---- parameters ----------------------------------------------------------------------------------


def test_each_row_has_the_factor_of_its_parameters():
    log_diagonal, lower = torch.randn(2, 3, 4), torch.randn(2, 3, 6)
    factors = cholesky_factor(log_diagonal, lower)
    assert factors.shape == (2, 3, 4, 4)
    for index in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
        own = tuple(index)
        assert torch.equal(factors[own], cholesky_factor(log_diagonal[own], lower[own]))


# ---- convolutions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make_guide", "groups", "parts"),
    [(ps.RowwiseGuide, 2, ("lower",)), (ps.MatrixNormalGuide, 1, ("row_lower", "column_lower"))],
)
def test_a_net_with_convolutions_trains_without_a_drawn_weight(
    make_guide, groups, parts, monkeypatch
):
    convolution = nn.Conv2d(2, 4, 3, groups=groups)
    net = nn.Sequential(convolution, nn.Tanh(), nn.Flatten(), nn.Linear(4 * 4 * 4, 3))
    model = ps.Classifier(ps.bayesianize(net, prior=1.0), num_data=12)
    guide = make_guide(model, join_bias=True)
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 3e-2}), ps.StructuredELBO())
    data = torch.randn(12, 2, 6, 6), torch.randint(3, (12,))
    svi.step(*data)
    drawn = []
    monkeypatch.setattr(LazyWeight, "draw", lambda self: drawn.append(self.use.name))
    svi.step(*data)
    assert drawn == []
    for name in ("net.0.weight", "net.3.weight"):
        assert all((getattr(guide[name], part) != 0).all() for part in parts)


# ---- memory --------------------------------------------------------------------------------------


def classifier(*sizes):
    return ps.Classifier(ps.bayesianize(nn.Linear(*sizes), prior=1.0), num_data=10)


def test_a_layer_that_takes_too_much_is_refused_before_anything_large_is_allocated():
    model = classifier(30_000, 400).float()
    message = (
        r"A full covariance of the 30,001 elements in each of the 400 rows of net\.weight and "
        r"net\.bias would take 5\.24 TiB in training, and `max_memory` allows 8 GiB\. Use "
        r"AutoLowRankLRT, or .*\{'net\.weight': LowRank\(rank=2\), '\*': Rowwise\(\)\}; or pass a "
        r"larger `max_memory`"
    )
    with pytest.raises(MemoryError, match=message):  # where there is no 5 TiB, by no other error
        ps.RowwiseGuide(model, join_bias=True)


def test_the_memory_counts_parameters_moments_gradients_and_the_factors():
    out, size = 3, 5
    gibibytes = out * (4 * (size + size * (size + 1) / 2) + 2 * size**2) * 4 / 2**30
    model = classifier(size, out).float()
    ps.RowwiseGuide(model, max_memory=gibibytes * 1.001, join_bias=False)
    with pytest.raises(MemoryError, match=r"5 elements in each of the 3 rows of net\.weight would"):
        ps.RowwiseGuide(model, max_memory=gibibytes * 0.999, join_bias=False)
    families = {"net.weight": LowRank(rank=2), "*": Rowwise(max_memory=gibibytes * 0.999)}
    ps.StructuredGuide(model, families)
