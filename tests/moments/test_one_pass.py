"""Predictions and bounds by moments, where they are exact: of nets with one random layer."""

import math

import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pyro_structvi as ps
from pyro_structvi.infer import StructuredELBO
from pyro_structvi.linalg.quadrature import normal_points
from pyro_structvi.moments.weights import posteriors_of
from pyro_structvi.testing.structures import guides_for, points_for
from tests import dense_oracles as dense

GUIDES = {**guides_for("tests"), **points_for("tests")}
SIZE = 5


def linear(size=2, inputs=3):
    return ps.bayesianize(nn.Linear(inputs, size), prior=1.0)


def spread_out(guide, *args):
    """Move every parameter of a guide away from its start, in particular scales."""
    guide(*args)
    for parameter in guide.parameters():
        with torch.no_grad():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return guide


def fitted(model, guide=ps.MeanFieldGuide, scale=0.4, **options):
    if guide is ps.MeanFieldGuide:
        options = {"init_scale": scale} | options
    return spread_out(guide(model, **options), torch.zeros(SIZE, 3))


def output_moments(guide, x):
    """Return mean and covariance ``(N, out), (N, out, out)`` of a dense layer, by dense covariances."""
    loc = covariance = 0.0
    for site, q in posteriors_of(guide.joint_posterior(x)):
        if "noise_scale" in site.name:
            continue
        size = q.event_shape[0]
        inputs = x if q.event_shape[1:].numel() == x.shape[-1] else F.pad(x, (0, 1), value=1.0)
        inputs = inputs if len(q.event_shape) > 1 else torch.ones(len(x), 1)
        matrix = q.covariance_matrix if hasattr(q, "covariance_matrix") else torch.zeros(())
        matrix = matrix.expand(q.event_shape.numel(), q.event_shape.numel())
        loc = loc + inputs @ q.mean.reshape(size, -1).mT
        covariance = covariance + dense.image_covariance(inputs, matrix, size)
    return loc, covariance


def variances(covariance):
    return covariance.diagonal(dim1=-2, dim2=-1)


def noise_posterior(guide, x):
    q = next(q for site, q in posteriors_of(guide.joint_posterior(x)) if "noise" in site.name)
    while not hasattr(q, "transforms"):
        q = q.base_dist
    return q.base_dist.mean, q.base_dist.stddev


def grid_of(mean, scale, count=2001, reach=9.0):
    """Return points of normals along a first dimension, and weights of the trapezoid's rule."""
    z = torch.linspace(-reach, reach, count)
    weights = torch.exp(-0.5 * z.square())
    shape = (count, *(1 for _ in mean.shape))
    return mean + scale * z.reshape(shape), (weights / weights.sum()).reshape(shape)


def expected_log_likelihood(model, guide, x, y):
    """Return what the bound by moments has for it, with its graph left behind."""
    terms = StructuredELBO(estimator="moments").terms(model, guide, x, y)
    return terms.log_likelihood["obs"].detach()


@pytest.fixture
def x():
    return torch.randn(SIZE, 3)


# ---- the moments of one random layer, under every guide ------------------------------------------


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
@pytest.mark.parametrize("name", [n for n in GUIDES if n not in ("ensemble", "dropout")])
def test_a_random_last_layer_has_exact_moments_under_every_guide(name, covariance, x):
    net = ps.bayesianize(nn.Sequential(nn.Tanh(), nn.Linear(3, 2)), prior=1.0)
    model = ps.Regressor(net, SIZE, 0.3)
    guide = spread_out(GUIDES[name].guide(model, **GUIDES[name].options), x)
    found = ps.predict(model, guide, x, method="moments", covariance=covariance)
    with torch.no_grad():
        hidden = x.tanh()
        if not hasattr(next(iter(posteriors_of(guide.joint_posterior(x))))[1], "covariance_matrix"):
            assert (found.function_variance < 1e-20).all()
            return
        loc, dense_covariance = output_moments(guide, hidden)
    torch.testing.assert_close(found.mean, loc)
    torch.testing.assert_close(found.function_variance, variances(dense_covariance))
    torch.testing.assert_close(found.variance, variances(dense_covariance) + 0.09)


# ---- likelihoods ---------------------------------------------------------------------------------


def test_normal_noise_has_closed_forms(x):
    model, y = ps.Regressor(linear(), 7 * SIZE, 0.3), torch.randn(SIZE, 2)
    guide = fitted(model)
    found = ps.predict(model, guide, x, y=y, method="moments")
    loc, covariance = output_moments(guide, x)
    scale = (0.09 + variances(covariance)).sqrt()
    torch.testing.assert_close(found.mean, loc)
    torch.testing.assert_close(found.variance, scale.square())
    density = dist.Normal(loc, scale).log_prob(y)
    torch.testing.assert_close(found.log_density, density.sum(-1))
    expected = dist.Normal(loc, 0.3).log_prob(y) - variances(covariance) / (2 * 0.09)
    log_probs = found.likelihood.log_prob(y)
    torch.testing.assert_close(log_probs, density.sum(-1).unsqueeze(0))
    value = expected_log_likelihood(model, guide, x, y)
    torch.testing.assert_close(value, 7 * expected.sum())


@pytest.mark.parametrize("shape", [(), (2,)], ids=["shared", "of each output"])
def test_learned_noise_is_averaged_over_its_log_normal(shape, x):
    model = ps.Regressor(linear(), SIZE, noise=dist.LogNormal(torch.zeros(shape), 1.0))
    guide, y = fitted(model, scale=0.3), torch.randn(SIZE, 2)
    found = ps.predict(model, guide, x, y=y, method="moments")
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
    found = ps.predict(model, guide, x, y=y, method="moments")
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
    found = ps.predict(model, guide, x, y=y, method="moments")
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
    found = ps.predict(model, guide, x, y=y, method="moments", covariance=covariance)
    loc, dense_covariance = output_moments(guide, x)
    if covariance == "diagonal":
        dense_covariance = torch.diag_embed(variances(dense_covariance))
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


def test_more_classes_are_integrated_by_quasi_random_points(x):
    """With an error of a few thousandths, against a hundred thousand draws of the exact logits."""
    model, y = ps.Classifier(linear(5), SIZE), torch.tensor([0, 1, 4, 3, 2])
    guide = spread_out(ps.FullCovarianceGuide(model, init_scale=0.3), x)
    found = ps.predict(model, guide, x, y=y, method="moments", covariance="full")
    loc, covariance = output_moments(guide, x)
    logits = dist.MultivariateNormal(loc, covariance).sample((100_000,))
    probs = logits.softmax(-1)
    assert (found.mean - probs.mean(0)).abs().max() < 5e-3
    density = probs.mean(0)[torch.arange(SIZE), y].log()
    assert (found.log_density - density).abs().max() < 0.03
    torch.testing.assert_close(found.mean.sum(-1), torch.ones(SIZE))


def test_quasi_random_points_have_exact_first_and_second_moments():
    for size in (3, 10):
        points, weights = normal_points(256, size, torch.zeros(()))
        torch.testing.assert_close(weights @ points, torch.zeros(size), atol=1e-14, rtol=0)
        torch.testing.assert_close(weights @ points.square(), torch.ones(size))
        correlations = points.mT @ (weights.unsqueeze(-1) * points) - torch.eye(size)
        assert correlations.abs().max() < 0.1


def test_tokens_are_independent_given_the_weights_moments(x):
    """And padding does not count."""
    net = nn.Sequential(nn.Embedding(4, 3), ps.bayesianize(nn.Linear(3, 2), prior=1.0))
    net[0].weight.requires_grad_(False)
    model = ps.TokenClassifier(net, 2)
    tokens, y = torch.tensor([[0, 1, 2], [3, 3, 1]]), torch.tensor([[0, 1, -100], [1, 1, 0]])
    guide = ps.MeanFieldGuide(model, init_scale=0.5)
    found = ps.predict(model, spread_out(guide, tokens), tokens, y=y, method="moments")
    loc, covariance = output_moments(guide, net[0](tokens).flatten(0, 1))
    difference = torch.tensor([-1.0, 1.0])
    scale = (difference.square() * variances(covariance)).sum(-1).sqrt()
    logit, weights = grid_of(loc @ difference, scale)
    p = (weights * torch.sigmoid(logit)).sum(0).reshape(2, 3)
    torch.testing.assert_close(found.mean[..., 1], p, rtol=1e-5, atol=1e-5)
    each = torch.where(y == 1, p, 1 - p).log().masked_fill(y == -100, 0.0)
    torch.testing.assert_close(found.log_density, each.sum(-1), rtol=1e-4, atol=1e-4)


# ---- ensembles, mini-batches, training -----------------------------------------------------------


def test_an_ensemble_is_the_mixture_of_its_members(x):
    """As with draws of all members, each once."""
    net = ps.bayesianize(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)), prior=1.0)
    model, y = ps.Classifier(net, SIZE), torch.tensor([0, 1, 2, 0, 1])
    guide = spread_out(ps.EnsembleGuide(model, size=3), x, y)
    found = ps.predict(model, guide, x, y=y, method="moments")
    expected = ps.predict(model, guide, x, 3, y=y)
    for name in ("mean", "variance", "function_variance", "entropy", "log_density"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), msg=name)
    torch.testing.assert_close(found.mutual_information, expected.mutual_information)


def test_mini_batches_and_parts_of_them_change_nothing(x, monkeypatch):
    model, y = ps.Regressor(linear(), SIZE, noise="learned"), torch.randn(SIZE, 2)
    guide = fitted(model)
    whole = ps.predict(model, guide, x, y=y, method="moments", covariance="full")
    monkeypatch.setattr("pyro_structvi.posterior.one_pass.LARGEST", 4)
    parts = ps.predict(model, guide, x, y=y, method="moments", covariance="full", batch_size=3)
    for name in ("mean", "variance", "function_variance", "log_density"):
        torch.testing.assert_close(getattr(whole, name), getattr(parts, name))
    assert (whole.num_samples, whole.functions) == (0, None)


def test_the_bound_is_the_limit_of_bounds_by_draws(x):
    """A z-test with 200 draws, with false alarms of one in a million beside the error of the points."""
    model, y = ps.Classifier(linear(3), SIZE), torch.tensor([0, 1, 2, 0, 1])
    guide = fitted(model)
    exact = StructuredELBO(estimator="moments").loss(model, guide, x, y)
    assert StructuredELBO(estimator="moments").loss(model, guide, x, y) == exact
    elbo = StructuredELBO()
    with torch.no_grad():
        draws = torch.tensor([elbo.loss(model, guide, x, y) for _ in range(200)])
    assert abs(draws.mean() - exact) < 4.9 * draws.std() / 200**0.5 + 2e-3 * abs(exact)


def test_fit_goes_to_the_exact_posterior_of_a_linear_model():
    """Without noise in the gradient the bound reaches the evidence under a full covariance."""
    x = torch.randn(12, 2)
    y = x @ torch.tensor([[1.0], [-0.5]]) + 0.3 * torch.randn(12, 1)
    net = ps.bayesianize(nn.Linear(2, 1), prior=1.0)
    model = ps.Regressor(net, 12, 0.3)
    guide = ps.FullCovarianceGuide(model)
    history = ps.fit(
        model, guide, (x, y), num_steps=100, lr=0.1, estimator="moments", progress=False
    )
    design = F.pad(x, (0, 1), value=1.0)
    evidence = dist.MultivariateNormal(
        torch.zeros(12), design @ design.mT + 0.09 * torch.eye(12)
    ).log_prob(y.squeeze())
    assert history.elbo[-1] <= evidence + 1e-6
    found = ps.predict(model, guide, x, method="moments")
    precision = torch.linalg.inv(design.mT @ design / 0.09 + torch.eye(3))
    exact = design @ precision @ design.mT @ y / 0.09
    assert (found.mean - exact).abs().max() < 0.05


# ---- whole nets against draws --------------------------------------------------------------------


def mlp(activation):
    layers = [nn.Linear(3, 20), activation, nn.Linear(20, 20), activation, nn.Linear(20, 2)]
    return ps.bayesianize(nn.Sequential(*layers), prior=1.0)


def lenet():
    layers = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3), nn.ReLU()]
    layers += [nn.AvgPool2d(2), nn.Flatten(), nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 2)]
    return ps.bayesianize(nn.Sequential(*layers), prior=1.0)


NETS = {
    "relu": (lambda: mlp(nn.ReLU()), (3,)),
    "tanh": (lambda: mlp(nn.Tanh()), (3,)),
    "LeNet": (lenet, (1, 10, 10)),
}


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
@pytest.mark.parametrize("name", NETS)
def test_moments_of_whole_nets_are_near_those_of_draws(name, covariance):
    """Means to a fifth of a standard deviation, and standard deviations to a third.

    An approximation: outputs of a layer count as normal, and as independent if only variances are kept.
    """
    make, shape = NETS[name]
    model, x = ps.Regressor(make(), SIZE, 0.1), torch.randn(SIZE, *shape)
    guide = ps.MeanFieldGuide(model, init_scale=0.1)
    guide(x)
    found = ps.predict(model, guide, x, method="moments", covariance=covariance)
    drawn = ps.predict(model, guide, x, 1500)
    scale = drawn.function_variance.sqrt()
    assert ((found.mean - drawn.mean).abs() / scale).max() < 0.2
    assert (found.function_variance.sqrt() / scale - 1).abs().max() < 0.33
