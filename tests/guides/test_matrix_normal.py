"""MatrixNormalGuide: the optimum for a linear regression with several outputs, parameters, start.

With weights W (out, in), inputs as rows of X, noise covariance S and prior variance p^2, the posterior
of vec(W) is normal with precision ``P = S^-1 kron X'X + I / p^2``. For ``S = s^2 I`` that is the matrix
normal ``A = I, B = (X'X / s^2 + I / p^2)^-1``. For any S, the matrix normal nearest to the posterior in
KL(q || posterior) satisfies, since ``tr(P (A kron B)) = tr(S^-1 A) tr(X'X B) + tr(A) tr(B) / p^2``,

    A^-1 = (S^-1 tr(X'X B) + I tr(B) / p^2) / in,    B^-1 = (X'X tr(S^-1 A) + I tr(A) / p^2) / out.
"""

from collections import namedtuple

import torch
from torch import kron, nn
from torch.distributions import Independent, MultivariateNormal, Normal, kl_divergence

import pyro_structvi as ps
from pyro_structvi.families import MatrixNormalFamily, MeanField
from tests.guides.matrix_guides import (
    assert_trains_without_a_drawn_weight,
    minimize,
)
from tests.models import make_regressor

OUT, IN, NUM_DATA, PRIOR, NOISE = 3, 4, 30, 0.7, 0.3
EQUAL = NOISE**2 * torch.eye(OUT, dtype=torch.float64)
CORRELATED = torch.tensor([[1, 0.8, 0.3], [0.8, 2, 0.5], [0.3, 0.5, 4]], dtype=torch.float64)

Regression = namedtuple("Regression", ["x", "y", "noise", "mean", "covariance", "log_evidence"])


def make_regression(noise):
    """Return data with correlated inputs, and their exact posterior over vec(W)."""
    x = torch.randn(NUM_DATA, IN) @ (torch.eye(IN) + 0.5)
    y = x @ torch.randn(IN, OUT) + MultivariateNormal(torch.zeros(OUT), noise).sample((NUM_DATA,))
    precision = noise.inverse().contiguous()
    covariance = torch.linalg.inv(kron(precision, x.mT @ x) + torch.eye(OUT * IN) / PRIOR**2)
    mean = covariance @ (precision @ y.mT @ x).flatten()
    marginal = kron(PRIOR**2 * torch.eye(OUT), x @ x.mT) + kron(noise, torch.eye(NUM_DATA))
    evidence = MultivariateNormal(torch.zeros(OUT * NUM_DATA), marginal)
    return Regression(x, y, noise, mean, covariance, evidence.log_prob(y.mT.flatten()))


def make_guide():
    net = ps.bayesianize(nn.Linear(IN, OUT, bias=False), prior=PRIOR)
    model = ps.Regressor(net, num_data=NUM_DATA, noise_scale=NOISE)
    return model, ps.MatrixNormalGuide(model, init_scale=0.1)


def exact_elbo(q, regression):
    """Return the bound: a normal's log density needs the moments of its mean only."""
    image, precision = q.image(regression.x), regression.noise.inverse()
    fit_of_mean = MultivariateNormal(image.mean, regression.noise).log_prob(regression.y).sum()
    spread = (precision * image.covariance_matrix.sum(0)).sum()
    prior = Independent(Normal(torch.zeros(OUT, IN), PRIOR), 2)
    return fit_of_mean - spread / 2 - kl_divergence(q, prior)


def fit_exactly(guide, regression):
    minimize(guide, lambda: -exact_elbo(guide["net.weight"](), regression))
    return guide["net.weight"]()


def nearest_matrix_normal(regression):
    """Solve the two equations in turn, and return A kron B."""
    precision, gram = regression.noise.inverse(), regression.x.mT @ regression.x
    A, B = torch.eye(OUT), torch.eye(IN)
    for _ in range(200):
        A = IN * torch.linalg.inv(
            precision * (gram * B).sum() + torch.eye(OUT) * B.trace() / PRIOR**2
        )
        B = OUT * torch.linalg.inv(
            gram * (precision * A).sum() + torch.eye(IN) * A.trace() / PRIOR**2
        )
    return kron(A.contiguous(), B.contiguous())


def assert_near(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-8)


def test_it_finds_the_exact_posterior_where_outputs_have_equal_noise():
    regression = make_regression(EQUAL)
    q = fit_exactly(make_guide()[1], regression)
    columns = regression.x.mT @ regression.x / NOISE**2 + torch.eye(IN) / PRIOR**2
    assert_near(q.mean.flatten(), regression.mean)
    assert_near(q.covariance_matrix, kron(torch.eye(OUT), columns.inverse().contiguous()))
    elbo = exact_elbo(q, regression)
    torch.testing.assert_close(elbo, regression.log_evidence, rtol=1e-9, atol=0)


def test_it_finds_the_nearest_matrix_normal_where_outputs_have_correlated_noise():
    regression = make_regression(CORRELATED)
    q = fit_exactly(make_guide()[1], regression)
    rows = q.covariance_matrix[::IN, ::IN]
    assert rows[0, 1].abs() > 0.3 * (rows[0, 0] * rows[1, 1]).sqrt(), "rows should vary together"
    assert_near(q.mean.flatten(), regression.mean)
    assert_near(q.covariance_matrix, nearest_matrix_normal(regression))
    posterior = MultivariateNormal(regression.mean, regression.covariance)
    left_over = kl_divergence(MultivariateNormal(q.mean.flatten(), q.covariance_matrix), posterior)
    gap = regression.log_evidence - exact_elbo(q, regression)
    torch.testing.assert_close(gap, left_over, rtol=1e-6, atol=0)
    assert left_over > 1e-3


# ---- parameters ----------------------------------------------------------------------------------


def test_vectors_get_mean_field():
    guide = ps.MatrixNormalGuide(make_regressor())
    assert guide["net.0.weight"].family == MatrixNormalFamily()
    assert guide["net.0.bias"].family == MeanField()


# ---- convolutions --------------------------------------------------------------------------------


def test_a_net_with_convolutions_trains_without_a_drawn_weight(monkeypatch):
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(2 * 4 * 4, 3))
    model = ps.Classifier(ps.bayesianize(net, prior=1.0), num_data=12)
    guide, data = (
        ps.MatrixNormalGuide(model, join_bias=True),
        (torch.randn(12, 1, 6, 6), torch.randint(3, (12,))),
    )
    assert_trains_without_a_drawn_weight(guide, data, monkeypatch)
    for name in ("net.0.weight", "net.3.weight"):
        assert (guide[name].row_lower != 0).all()
        assert (guide[name].column_lower != 0).all()
