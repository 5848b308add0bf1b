"""Optima of guides on linear regressions against closed forms.

With noise s_i of output i and prior deviations p, the posterior has independent rows of weights, row i
with the covariance ``(X'X / s_i^2 + diag(p)^-2)^-1``: a matrix normal where all s_i are equal.

For a posterior covariance with eigenpairs ``(l_i, u_i)``, ``l_1 >= ... >= l_D``, the covariance of rank
K plus ``s^2 I`` that is nearest in KL(q || posterior) keeps the first K eigenpairs and has the harmonic
mean of the other eigenvalues as ``s^2`` (Lemma 3 of Tomczak et al.). The KL left over is
``(D - K)/2 [log mean(1 / l_i) - mean log(1 / l_i)]`` over ``i > K``.
"""

from collections import namedtuple
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Independent, MultivariateNormal, Normal, kl_divergence

import pyro_structvi as ps

SIZE, NUM_DATA, PRIOR, NOISE = 7, 20, 2.0, 0.3
SPECTRUM = torch.tensor([2.0, 1.0, 0.5, 0.2, 0.12, 0.06, 0.03], dtype=torch.double)
Regression = namedtuple("Regression", "x y noise scales mean covariance evidence")
assert_near = partial(torch.testing.assert_close, rtol=0, atol=1e-6)


def solved(x, y, noise, scales):
    """Return a regression with its exact posterior and log evidence, for noise of each output."""
    precisions = 1 / noise[:, None, None] ** 2
    covariances = torch.linalg.inv(x.mT @ x * precisions + torch.diag(scales**-2))
    mean = (covariances @ (x.mT @ y / noise**2).mT.unsqueeze(-1)).squeeze(-1)
    marginals = x * scales**2 @ x.mT + torch.eye(len(x)) / precisions
    evidence = MultivariateNormal(torch.zeros(len(x)), marginals).log_prob(y.mT).sum()
    return Regression(x, y, noise, scales, mean, torch.block_diag(*covariances), evidence)


def gap(guide, problem):
    """Return log evidence - ELBO; a normal's log density needs the outputs' mean and variance only."""
    q = guide["net.weight"]()
    image = q.image(problem.x)
    log_likelihood = Normal(image.mean, problem.noise).log_prob(problem.y).sum()
    prior = Independent(Normal(torch.zeros_like(q.mean), problem.scales.expand_as(q.mean)), 2)
    elbo = log_likelihood - (image.variance / problem.noise**2).sum() / 2 - kl_divergence(q, prior)
    return problem.evidence - elbo


def fit_exactly(guide, problem):
    """Minimize the gap, scaled since torch's LBFGS ignores small products."""
    options = {"history_size": 50, "max_iter": 5000, "tolerance_grad": 1e-7, "tolerance_change": 0}
    optimizer = torch.optim.LBFGS(guide.parameters(), line_search_fn="strong_wolfe", **options)

    def closure():
        optimizer.zero_grad()
        loss = 1e6 * gap(guide, problem)
        loss.backward()
        return loss

    optimizer.step(closure)
    return guide["net.weight"]()


def orthonormal(rows, columns):
    return torch.linalg.qr(torch.randn(rows, columns)).Q


def with_posterior(covariance):
    """Choose X so that ``X'X / noise^2 + I / prior^2 = covariance^-1``."""
    root = torch.linalg.cholesky(covariance.inverse() - torch.eye(SIZE) / PRIOR**2).mT
    x = NOISE * orthonormal(NUM_DATA, SIZE) @ root
    y = x @ torch.randn(SIZE, 1) + NOISE * torch.randn(NUM_DATA, 1)
    problem = solved(x, y, torch.tensor([NOISE]), torch.full((SIZE,), PRIOR))
    torch.testing.assert_close(problem.covariance, covariance)
    return problem


def low_rank_guide(rank, **options):
    net = ps.bayesianize(nn.Linear(SIZE, 1, bias=False), prior=PRIOR)
    return ps.AutoLowRankLRT(ps.Regressor(net, NUM_DATA, NOISE), rank, init_scale=0.1, **options)


@pytest.mark.parametrize("rank", [1, 4])
def test_isotropic_optimum_is_that_of_lemma_3(rank):
    vectors, precisions = orthonormal(SIZE, SIZE), 1 / SPECTRUM[rank:]
    problem = with_posterior(vectors * SPECTRUM @ vectors.mT)
    variance = 1 / precisions.mean()  # the harmonic mean
    spectrum = torch.cat([SPECTRUM[:rank], variance.expand(SIZE - rank)])
    guide = low_rank_guide(rank, diagonal="isotropic")
    q = fit_exactly(guide, problem)
    assert_near(q.mean, problem.mean)
    assert_near(q.covariance_matrix, vectors * spectrum @ vectors.mT)
    assert_near(q.scale.square().squeeze(), variance)
    left_over = (SIZE - rank) / 2 * (precisions.mean().log() - precisions.log().mean())
    assert_near(gap(guide, problem), left_over)


def test_full_optimum_has_no_gap_where_the_posterior_is_low_rank_plus_diagonal():
    factors, diagonal = orthonormal(SIZE, 2), torch.linspace(0.05, 0.6, SIZE)
    problem = with_posterior(factors @ factors.mT + torch.diag(diagonal))
    isotropic, full = (low_rank_guide(2, diagonal=kind) for kind in ("isotropic", "full"))
    fit_exactly(isotropic, problem)
    assert_near(fit_exactly(full, problem).covariance_matrix, problem.covariance)
    assert abs(gap(full, problem)) < 1e-6 < 0.1 < gap(isotropic, problem)


@pytest.mark.parametrize(
    ("make_guide", "noise"),
    [
        (ps.RowwiseGuide, [0.3, 0.5, 0.8]),
        (ps.MatrixNormalGuide, [0.4] * 3),
        pytest.param(ps.FullCovarianceGuide, [0.4] * 3, marks=pytest.mark.slow),
    ],
)
def test_factors_find_the_exact_posterior_of_weights_and_biases(make_guide, noise):
    """Inputs are far from zero, so that weights and biases are correlated."""
    noise = torch.tensor(noise)
    x = torch.randn(30, 4) @ (torch.eye(4) + 0.5) + torch.linspace(-1, 1, 4)
    y = x @ torch.randn(4, 3) + 0.5 + noise * torch.randn(30, 3)
    problem = solved(F.pad(x, (0, 1), value=1.0), y, noise, torch.tensor([0.7] * 4 + [1.5]))
    net = ps.bayesianize(nn.Linear(4, 3), prior={"weight": 0.7, "bias": 1.5})
    guide = make_guide(ps.Regressor(net, 30, noise_scale=noise), init_scale=0.1, join_bias=True)
    q = fit_exactly(guide, problem)
    torch.testing.assert_close(q.mean, problem.mean, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(q.covariance_matrix, problem.covariance, rtol=1e-5, atol=1e-8)
    assert abs(gap(guide, problem)) < 1e-6
