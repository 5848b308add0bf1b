"""Predictions and bounds by moments, where they are exact: of nets with one random layer."""

import math

import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pyro_structvi as ps
from pyro_structvi.testing import guides_for, points_for
from tests.moments.one_layer import (
    SIZE,
    expected_log_likelihood,
    fitted,
    grid_of,
    linear,
    noise_posterior,
    output_moments,
    spread_out,
    variances,
)

GUIDES = {**guides_for("tests"), **points_for("tests")}


# ---- the moments of one random layer, under every guide ------------------------------------------


@pytest.mark.parametrize("name", [n for n in GUIDES if n not in ("ensemble", "dropout")])
def test_a_random_last_layer_has_exact_moments_under_every_guide(name, x):
    net = ps.bayesianize(nn.Sequential(nn.Tanh(), nn.Linear(3, 2)), prior=1.0)
    model, y = ps.Regressor(net, 7 * SIZE, 0.3), torch.randn(SIZE, 2)
    guide = spread_out(GUIDES[name].guide(model, **GUIDES[name].options), x)
    with torch.no_grad():
        loc, dense_covariance = output_moments(guide, x.tanh())
    own = variances(dense_covariance)
    density = dist.Normal(loc, (0.09 + own).sqrt()).log_prob(y).sum(-1)
    for covariance in ("diagonal", "full"):
        found = ps.predict_moments(model, guide, x, y=y, covariance=covariance)
        torch.testing.assert_close(found.mean, loc)
        torch.testing.assert_close(found.function_variance, own)
        torch.testing.assert_close(found.variance, own + 0.09)
        torch.testing.assert_close(found.log_density, density)
        torch.testing.assert_close(found.likelihood.log_prob(y), density.unsqueeze(0))
    expected = dist.Normal(loc, 0.3).log_prob(y) - own / (2 * 0.09)
    value = expected_log_likelihood(model, guide, x, y)
    torch.testing.assert_close(value, 7 * expected.sum())


# ---- likelihoods ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (2,)], ids=["shared", "of each output"])
def test_learned_noise_is_averaged_over_its_log_normal(shape, x):
    model = ps.Regressor(linear(), SIZE, noise=dist.LogNormal(torch.zeros(shape), 1.0))
    guide, y = fitted(model, scale=0.3), torch.randn(SIZE, 2)
    found = ps.predict_moments(model, guide, x, y=y)
    loc, covariance = output_moments(guide, x)
    variance = variances(covariance)
    m, s = noise_posterior(guide, x)
    square, precision = torch.exp(2 * m + 2 * s**2), torch.exp(-2 * m + 2 * s**2)
    torch.testing.assert_close(found.variance, variance + square)
    expected = -0.5 * math.log(2 * math.pi) - m - 0.5 * precision * ((y - loc).square() + variance)
    value = expected_log_likelihood(model, guide, x, y)
    torch.testing.assert_close(value, expected.sum())
    noise, weights = grid_of(m, s)
    noise = noise.exp().reshape(len(noise), 1, -1)
    each = dist.Normal(loc, (noise.square() + variance).sqrt()).log_prob(y)
    weights = weights.reshape(-1, 1).log()
    if shape:
        density = (weights.unsqueeze(-1) + each).logsumexp(0).sum(-1)
    else:
        density = (weights + each.sum(-1)).logsumexp(0)
    torch.testing.assert_close(found.log_density, density, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("df", [None, 5.0], ids=["normal", "Student"])
def test_heteroscedastic_noise_is_integrated_over_both_variables(df, x):
    model = ps.Regressor(linear(4), SIZE, noise="heteroscedastic", df=df)
    guide, y = fitted(model, scale=0.2), torch.randn(SIZE, 2)
    found = ps.predict_moments(model, guide, x, y=y)
    loc, covariance = output_moments(guide, x)
    scale = variances(covariance).sqrt()
    mean, weights = grid_of(loc[:, :2], scale[:, :2], 201)
    raw, _ = grid_of(loc[:, 2:], scale[:, 2:], 201)
    weights = (weights * weights.reshape(1, -1, 1)).unsqueeze(-1)
    noise = F.softplus(raw)
    made = (
        dist.Normal(mean.unsqueeze(1), noise)
        if df is None
        else dist.StudentT(df, mean.unsqueeze(1), noise)
    )
    log_probs = made.log_prob(y)
    torch.testing.assert_close(found.mean, loc[:, :2])
    expected_noise = (weights * made.variance).sum((0, 1))
    torch.testing.assert_close(
        found.variance, expected_noise + scale[:, :2].square(), rtol=1e-6, atol=1e-8
    )
    value = expected_log_likelihood(model, guide, x, y)
    expected = (weights * log_probs).sum()
    torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4)
    density = (weights.log() + log_probs).flatten(0, 1).logsumexp(0).sum(-1)
    bound = 1e-3 if df is None else 0.05
    assert (found.log_density - density).abs().max() < bound


ELEMENTS = {
    "Bernoulli": (
        lambda: ps.BinaryClassifier(linear(), SIZE),
        lambda f: dist.Bernoulli(logits=f),
        lambda: torch.tensor([[0.0, 1.0]] * 3 + [[1.0, 1.0]] * 2),
    ),
    "Poisson": (
        lambda: ps.PoissonRegressor(linear(), SIZE),
        lambda f: dist.Poisson(f.exp()),
        lambda: torch.tensor([[0.0, 1.0]] * 3 + [[4.0, 2.0]] * 2),
    ),
    "Student": (
        lambda: ps.Regressor(linear(), SIZE, 0.5, df=4),
        lambda f: dist.StudentT(4.0, f, 0.5),
        lambda: torch.tensor([[0.0, 1.0]] * 3 + [[-2.0, 0.3]] * 2),
    ),
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_likelihoods_of_single_outputs_are_integrated_over_each(name, x):
    """The outputs of an example are independent, in the predictive density too."""
    make, likelihood, targets = ELEMENTS[name]
    model, y = make(), targets()
    guide = fitted(model, scale=0.2)
    found = ps.predict_moments(model, guide, x, y=y)
    loc, covariance = output_moments(guide, x)
    outputs, weights = grid_of(loc, variances(covariance).sqrt())
    made = likelihood(outputs)
    log_probs = made.log_prob(y)
    mean = (weights * made.mean).sum(0)
    torch.testing.assert_close(found.mean, mean, rtol=1e-8, atol=1e-8)
    function = (weights * (made.mean - mean).square()).sum(0)
    noise = (weights * made.variance).sum(0)
    torch.testing.assert_close(found.function_variance, function, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found.variance, function + noise, rtol=1e-6, atol=1e-8)
    value = expected_log_likelihood(model, guide, x, y)
    expected = (weights * log_probs).sum()
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
    density = (weights.log() + log_probs).logsumexp(0).sum(-1)
    torch.testing.assert_close(found.log_density, density, rtol=1e-6, atol=1e-6)
    if name == "Bernoulli":
        p = made.mean
        within = (weights * (torch.special.entr(p) + torch.special.entr(1 - p))).sum(0)
        total = torch.special.entr(mean) + torch.special.entr(1 - mean)
        torch.testing.assert_close(found.entropy, total, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(found.mutual_information, total - within, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_two_classes_are_integrated_over_the_difference_of_their_logits(covariance, x):
    model, y = ps.Classifier(linear(), SIZE), torch.tensor([0, 1, 1, 0, 1])
    guide = spread_out(ps.MatrixNormalGuide(model, init_scale=0.3, join_bias=True), x)
    found = ps.predict_moments(model, guide, x, y=y, covariance=covariance)
    loc, dense_covariance = output_moments(guide, x)  # of a last layer it is known in any case
    difference = torch.tensor([-1.0, 1.0])
    scale = (difference @ dense_covariance @ difference).sqrt()
    logit, weights = grid_of(loc @ difference, scale)
    p = (weights * torch.sigmoid(logit)).sum(0)
    tolerance = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found.mean, torch.stack([1 - p, p], -1), **tolerance)
    density = torch.where(y == 1, p, 1 - p).log()
    torch.testing.assert_close(found.log_density, density, **tolerance)
    torch.testing.assert_close(
        found.entropy, torch.special.entr(p) + torch.special.entr(1 - p), **tolerance
    )
    if covariance == "diagonal":
        value = expected_log_likelihood(model, guide, x, y)
        expected = (weights * F.logsigmoid(torch.where(y == 1, logit, -logit))).sum()
        torch.testing.assert_close(value, expected, **tolerance)


def test_tokens_are_independent_given_the_weights_moments(x):
    """And padding does not count."""
    net = nn.Sequential(nn.Embedding(4, 3), ps.bayesianize(nn.Linear(3, 2), prior=1.0))
    net[0].weight.requires_grad_(False)
    model = ps.TokenClassifier(net, 2)
    tokens, y = torch.tensor([[0, 1, 2], [3, 3, 1]]), torch.tensor([[0, 1, -100], [1, 1, 0]])
    guide = ps.MeanFieldGuide(model, init_scale=0.5)
    found = ps.predict_moments(model, spread_out(guide, tokens), tokens, y=y)
    loc, covariance = output_moments(guide, net[0](tokens).flatten(0, 1))
    difference = torch.tensor([-1.0, 1.0])
    scale = (difference.square() * variances(covariance)).sum(-1).sqrt()
    logit, weights = grid_of(loc @ difference, scale)
    p = (weights * torch.sigmoid(logit)).sum(0).reshape(2, 3)
    torch.testing.assert_close(found.mean[..., 1], p, rtol=1e-5, atol=1e-5)
    each = torch.where(y == 1, p, 1 - p).log().masked_fill(y == -100, 0.0)
    torch.testing.assert_close(found.log_density, each.sum(-1), rtol=1e-4, atol=1e-4)
