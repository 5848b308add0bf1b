"""Predictions and bounds by moments: exact of one random layer, near draws of whole nets."""

import copy
import math
from functools import partial
from itertools import pairwise

import numpy as np
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from scipy.integrate import quad
from scipy.stats import norm, poisson, t
from torch import nn

import pyro_structvi as ps
from pyro_structvi.infer import StructuredELBO
from pyro_structvi.moments import integration as softmax
from pyro_structvi.moments.integration import nodes_of
from pyro_structvi.moments.random_tensor import RandomTensor, Settings
from pyro_structvi.posterior.one_pass import (
    MomentsWarning,
    poisson_log_normal_log_prob,
    student_t_plus_normal_log_prob,
)
from pyro_structvi.testing import guides_for, points_for
from pyro_structvi.weights.torch_distributions import base_of
from tests.guide_cases import once
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
NODES, WEIGHTS = np.polynomial.legendre.leggauss(60)  # of numerical integrals


@pytest.fixture
def x():
    return torch.randn(SIZE, 3)


# ---- the moments of one random layer, under every guide ------------------------------------------


def joint_density(loc, covariance, y, noise=0.3):
    covariance = covariance + noise**2 * torch.eye(y.shape[-1])
    return dist.MultivariateNormal(loc, covariance).log_prob(y)


@pytest.mark.parametrize("name", once(n for n in GUIDES if n not in ("ensemble", "dropout")))
def test_a_random_last_layer_has_exact_moments_under_every_guide(name, x):
    net = ps.bayesianize(nn.Sequential(nn.Tanh(), nn.Linear(3, 2)), prior=1.0)
    model, y = ps.Regressor(net, 7 * SIZE, 0.3), torch.randn(SIZE, 2)
    guide = spread_out(GUIDES[name].guide(model, **GUIDES[name].options), x)
    with torch.no_grad():
        loc, dense_covariance = output_moments(guide, x.tanh())
    own = variances(dense_covariance)
    density = joint_density(loc, dense_covariance, y)
    marginal = dist.Normal(loc, (0.09 + own).sqrt()).log_prob(y).sum(-1)
    for covariance in ("diagonal", "full"):
        found = ps.predict_moments(model, guide, x, y=y, covariance=covariance)
        torch.testing.assert_close(found.mean, loc)
        torch.testing.assert_close(found.function_variance, own)
        torch.testing.assert_close(found.variance, own + 0.09)
        torch.testing.assert_close(found.log_density, density)
        torch.testing.assert_close(found.likelihood.log_prob(y), marginal.unsqueeze(0))
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
    noise = dist.Normal if df is None else partial(dist.StudentT, df)
    made = noise(mean.unsqueeze(1), F.softplus(raw))
    log_probs = made.log_prob(y)
    torch.testing.assert_close(found.mean, loc[:, :2])
    variance = (weights * made.variance).sum((0, 1)) + scale[:, :2].square()
    torch.testing.assert_close(found.variance, variance, rtol=1e-6, atol=1e-8)
    value = expected_log_likelihood(model, guide, x, y)
    torch.testing.assert_close(value, (weights * log_probs).sum(), rtol=1e-4, atol=1e-4)
    density = (weights.log() + log_probs).flatten(0, 1).logsumexp(0).sum(-1)
    assert (found.log_density - density).abs().max() < 1e-3


def test_learned_degrees_of_freedom_are_integrated_over():
    model = ps.Regressor(linear(2), SIZE, 0.1, df="learned")
    guide, x = fitted(model, scale=0.03), torch.randn(SIZE, 3)
    y = x @ guide.median()["net.weight"].mT + 0.2 * torch.randn(SIZE, 2)
    found = ps.predict_moments(model, guide, x, y=y).log_density
    loc, covariance = output_moments(guide, x)
    base = base_of(guide["df_minus_one"]())
    nodes = torch.linspace(-7, 7, 301)
    df = 1 + base.at(nodes).reshape(-1, 1, 1)
    each = student_t_plus_normal_log_prob(y - loc, df, torch.tensor(0.1), variances(covariance))
    weights = torch.distributions.Normal(0.0, 1.0).log_prob(nodes).unsqueeze(-1)
    density = (weights + each.sum(-1)).logsumexp(0) + (nodes[1] - nodes[0]).log()
    torch.testing.assert_close(found, density, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("df", [1.5, 4.0, 100.0])
@pytest.mark.parametrize("width", [0.1, 30.0])
def test_students_t_noise_of_any_width_has_its_density(width, df):
    """A function that is uncertain by many noise scales or by few, beside numerical integrals."""
    model = ps.Regressor(linear(1), SIZE, 0.1, df=df)
    guide, x = fitted(model, scale=width * 0.1), torch.tensor([[1.0, 0.0, 0.0]]).expand(SIZE, 3)
    y = guide.median()["net.weight"][0, 0] + torch.linspace(-5, 5, SIZE).unsqueeze(-1)
    found = ps.predict_moments(model, guide, x, y=y).log_density
    loc, covariance = output_moments(guide, x)
    scale = variances(covariance).sqrt()
    for each, mean, deviation, target in zip(found, loc, scale, y, strict=True):
        normal, noise = norm(mean.item(), deviation.item()), t(df, target.item(), 0.1)
        low, high = normal.ppf([1e-15, 1 - 1e-15])
        near = np.clip(target.item() + np.linspace(-3, 3, 61), low, high)
        ends = np.unique([*np.linspace(low, high, 61), *near])
        half = np.diff(ends)[:, None] / 2
        f = ends[:-1, None] + half * (1 + NODES)
        density = (half * WEIGHTS * normal.pdf(f) * noise.pdf(f)).sum()
        assert each.item() == pytest.approx(math.log(density), abs=1e-7)


@pytest.mark.parametrize("predict", [ps.predict, ps.predict_moments])
def test_counts_are_whole_numbers(predict, x):
    model = ps.PoissonRegressor(linear(1), SIZE)
    guide, y = fitted(model), torch.tensor([[0.0], [3.0], [-1.0], [0.5], [2.0]])
    with pytest.raises(
        ValueError, match=r"`y` must be in IntegerGreaterThan.* 2 of 5 observations"
    ):
        predict(model, guide, x, y=y)


@pytest.mark.parametrize("width", [0.0, 0.1, pytest.param(2.0, marks=pytest.mark.slow)])
def test_counts_of_any_size_have_their_density(width):
    """The rate is known much better after a large count than before it, or not random at all."""
    model = ps.PoissonRegressor(linear(1), SIZE)
    y = torch.tensor([[0.0], [3.0], [40.0], [500.0], [5000.0]])
    x = torch.zeros(SIZE, 3)
    guide = ps.MAPGuide(model) if width == 0 else fitted(model, scale=width)
    guide.initialize(x, y)
    found = ps.predict_moments(model, guide, x, y=y).log_density
    loc = guide.median()["net.bias"].item()
    if width == 0:
        torch.testing.assert_close(found, dist.Poisson(math.exp(loc)).log_prob(y[:, 0]))
        return
    normal = norm(loc, guide["net.bias"]().variance.sqrt().item())
    low, high = normal.ppf([1e-15, 1 - 1e-15])
    for each, count in zip(found, y[:, 0].tolist(), strict=True):
        middle = math.log(count + 1)
        parts = sorted({low, high, *np.clip(middle + np.linspace(-1, 1, 41), low, high)})

        def product(f, count=count):
            return normal.pdf(f) * poisson.pmf(count, math.exp(f))

        density = sum(quad(product, *ends, epsabs=0, epsrel=1e-10)[0] for ends in pairwise(parts))
        if density > 1e-12:  # for less the integral needs the tails
            assert each.item() == pytest.approx(math.log(density), abs=1e-6)


def test_large_counts_have_their_density_in_single_precision():
    """Also under a wide log rate, of which nodes have infinite rates."""
    y, loc, variance = (torch.tensor([each]).float() for each in (1e8, 18.42, 1e-30))
    found = poisson_log_normal_log_prob(y, loc, variance)
    expected = poisson.logpmf(1e8, math.exp(loc.item()))
    assert found.item() == pytest.approx(expected, rel=1e-6)
    model = ps.PoissonRegressor(linear(1), SIZE)
    x, counts = torch.zeros(SIZE, 3), torch.ones(SIZE, 1)
    found = ps.predict_moments(model, fitted(model, scale=80.0), x, y=counts).log_density
    assert found.isfinite().all()


def test_correlated_targets_have_a_joint_density_under_learned_noise(x):
    model = ps.Regressor(linear(), SIZE, noise=dist.LogNormal(0.0, 1.0))
    guide, y = fitted(model, ps.FullCovarianceGuide), torch.randn(SIZE, 2)
    found = ps.predict_moments(model, guide, x, y=y)
    loc, covariance = output_moments(guide, x)
    noise, weights = grid_of(*noise_posterior(guide, x), count=401)
    each = joint_density(loc, covariance, y, noise.exp().reshape(-1, 1, 1, 1))
    density = (weights.reshape(-1, 1).log() + each).logsumexp(0)
    torch.testing.assert_close(found.log_density, density, rtol=1e-6, atol=1e-6)


def test_a_noise_scale_that_is_correlated_with_its_mean(x):
    """Given the scale's output, the mean is normal by the rule of conditional normals."""
    model = ps.Regressor(linear(2), SIZE, noise="heteroscedastic")
    guide, y = fitted(model, ps.FullCovarianceGuide, init_scale=0.3), torch.randn(SIZE, 1)
    found = ps.predict_moments(model, guide, x, y=y)
    loc, covariance = output_moments(guide, x)
    raw, weights = grid_of(loc[:, 1], covariance[:, 1, 1].sqrt())
    slope = covariance[:, 0, 1] / covariance[:, 1, 1]
    mean = loc[:, 0] + slope * (raw - loc[:, 1])
    rest = covariance[:, 0, 0] - slope * covariance[:, 0, 1]
    made = dist.Normal(mean, (rest + F.softplus(raw).square()).sqrt())
    density = (weights.log() + made.log_prob(y[:, 0])).logsumexp(0)
    assert (found.log_density - density).abs().max() < 1e-3


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


def second_of_two_classes(loc, covariance):
    """Return the logit of the second class on a grid, weights, and its probability."""
    difference = torch.tensor([-1.0, 1.0])
    scale = (difference @ covariance @ difference).sqrt()
    logit, weights = grid_of(loc @ difference, scale)
    return logit, weights, (weights * torch.sigmoid(logit)).sum(0)


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_two_classes_are_integrated_over_the_difference_of_their_logits(covariance, x):
    model, y = ps.Classifier(linear(), SIZE), torch.tensor([0, 1, 1, 0, 1])
    guide = spread_out(ps.MatrixNormalGuide(model, init_scale=0.3, join_bias=True), x)
    found = ps.predict_moments(model, guide, x, y=y, covariance=covariance)
    # The covariance of a last layer is known in any case.
    logit, weights, p = second_of_two_classes(*output_moments(guide, x))
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
    p = second_of_two_classes(*output_moments(guide, net[0](tokens).flatten(0, 1)))[-1]
    p = p.reshape(2, 3)
    torch.testing.assert_close(found.mean[..., 1], p, rtol=1e-5, atol=1e-5)
    each = torch.where(y == 1, p, 1 - p).log().masked_fill(y == -100, 0.0)
    torch.testing.assert_close(found.log_density, each.sum(-1), rtol=1e-4, atol=1e-4)


# ---- ensembles, mini-batches ---------------------------------------------------------------------


def test_an_ensemble_is_the_mixture_of_its_members(x):
    """As with draws of all members, each once."""
    net = ps.bayesianize(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)), prior=1.0)
    model, y = ps.Classifier(net, SIZE), torch.tensor([0, 1, 2, 0, 1])
    guide = spread_out(ps.EnsembleGuide(model, size=3), x, y)
    found = ps.predict_moments(model, guide, x, y=y)
    expected = ps.predict(model, guide, x, num_samples=3, y=y)
    fields = ("mean", "variance", "function_variance", "entropy", "mutual_information")
    for name in (*fields, "log_density"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), msg=name)


def test_mini_batches_and_parts_of_them_change_nothing(x, monkeypatch):
    model, y = ps.Regressor(linear(), SIZE, noise="learned"), torch.randn(SIZE, 2)
    guide = fitted(model)
    whole = ps.predict_moments(model, guide, x, y=y, covariance="full")
    monkeypatch.setattr("pyro_structvi.posterior.one_pass.LARGEST", 4)
    parts = ps.predict_moments(model, guide, x, y=y, covariance="full", batch_size=3)
    for name in ("mean", "variance", "function_variance", "log_density"):
        torch.testing.assert_close(getattr(whole, name), getattr(parts, name))
    assert (whole.num_samples, whole.functions) == (0, None)


# ---- whole nets against draws --------------------------------------------------------------------


def mlp():
    layers = [nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 2)]
    return ps.bayesianize(nn.Sequential(*layers), prior=1.0)


def lenet():
    layers = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3), nn.ReLU()]
    layers += [nn.AvgPool2d(2), nn.Flatten(), nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 2)]
    return ps.bayesianize(nn.Sequential(*layers), prior=1.0)


@pytest.mark.parametrize(
    ("make", "shape", "covariance"),
    [(mlp, (3,), "diagonal"), (mlp, (3,), "full"), (lenet, (1, 10, 10), "diagonal")],
)
def test_moments_of_whole_nets_are_near_those_of_draws(make, shape, covariance):
    """Means to a fifth of a standard deviation, and standard deviations to a third.

    An approximation: outputs of a layer count as normal, and as independent if only variances are kept.
    """
    model, x = ps.Regressor(make(), SIZE, 0.1), torch.randn(SIZE, *shape)
    guide = ps.MeanFieldGuide(model, init_scale=0.1)
    guide(x)
    found = ps.predict_moments(model, guide, x, covariance=covariance)
    drawn = ps.predict(model, guide, x, num_samples=1000)
    scale = drawn.function_variance.sqrt()
    assert ((found.mean - drawn.mean).abs() / scale).max() < 0.2
    assert (found.function_variance.sqrt() / scale - 1).abs().max() < 0.33


# ---- classes -------------------------------------------------------------------------------------


class OwnClassifier(ps.Classifier):
    def observe(self, output, plates, y):
        return super().observe(output, plates, y)


def run_at_nodes(model, kind=OwnClassifier):
    own = copy.deepcopy(model)
    own.__class__ = kind
    return own


@pytest.mark.parametrize(("classes", "covariance"), [(2, "full"), (3, "diagonal"), (7, "full")])
def test_blocks_are_the_likelihood_at_all_nodes(x, classes, covariance, monkeypatch):
    """For several blocks, of which the last is smaller, and with gradients of every field."""
    monkeypatch.setattr(softmax, "BLOCK", 2 * 256 * classes)
    y = torch.arange(SIZE) % classes
    known = ps.Classifier(linear(classes), 3 * SIZE)
    own, guide = run_at_nodes(known), fitted(known)
    names = ("mean", "function_variance", "entropy", "mutual_information", "log_density")
    found, gradients = [], []
    for model in (known, own):
        prediction = ps.predict_moments(
            model, guide, x, y=y, covariance=covariance, differentiable=True
        )
        fields = [getattr(prediction, name) for name in names]
        elbo = StructuredELBO(estimator="moments")
        fields.append(elbo.differentiable_loss(model, guide, x, y))
        total = sum((k + 1) * field.square().sum() for k, field in enumerate(fields))
        gradients.append(torch.autograd.grad(total, [*guide.parameters()]))
        found.append(fields)
    torch.testing.assert_close(found[0], found[1], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-8, atol=1e-10)


def test_quasi_random_points_have_exact_first_and_second_moments():
    for size in (3, 10):
        points, weights = nodes_of(size, torch.zeros(()))
        torch.testing.assert_close(weights @ points, torch.zeros(size), atol=1e-14, rtol=0)
        correlations = points.mT @ (weights.unsqueeze(-1) * points)
        torch.testing.assert_close(correlations.diagonal(), torch.ones(size))
        assert (correlations - torch.eye(size)).abs().max() < 0.1


def test_improbable_classes_keep_their_density():
    """What is below the smallest number has a logarithm, and impossible classes add no entropy."""
    loc = torch.tensor([[0.0, -2000.0, 3.0], [0.0, -torch.inf, 0.0]])
    logits = RandomTensor(loc, torch.full((2, 3), 1e-12), Settings())
    found = softmax.class_expectations(logits, torch.tensor([1, 2]))
    expected = torch.stack([-2000 - torch.logaddexp(loc[0, 0], loc[0, 2]), torch.tensor(0.5).log()])
    torch.testing.assert_close(found["log_density"], expected, rtol=1e-7, atol=1e-5)
    torch.testing.assert_close(found["entropy"][1], torch.tensor(2.0).log(), rtol=1e-6, atol=1e-6)
    assert found["mean"][1, 1] == 0
    large = RandomTensor(loc + 5000, logits.variance, Settings())
    shifted = softmax.class_expectations(large, None)["mean"]
    torch.testing.assert_close(shifted, found["mean"])


def test_narrow_logits_keep_the_relative_accuracy_of_variances():
    """By the tangent, in single precision: a difference of squares would have no digit."""
    scale, loc = 1e-4, torch.tensor([[0.3, -0.2, 1.0]], dtype=torch.float32)
    output = RandomTensor(loc, torch.full_like(loc, scale**2), Settings())
    p = loc.softmax(-1)
    tangent = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    nodes, _ = nodes_of(3, loc)
    second = nodes.mT @ nodes / len(nodes)  # the points' own, near the identity
    exact = scale**2 * (tangent @ second @ tangent).diagonal(dim1=-2, dim2=-1)
    found = softmax.class_expectations(output, None)["function_variance"]
    torch.testing.assert_close(found, exact, rtol=5e-3, atol=0)


class Tempered(ps.Classifier):
    def observe(self, output, plates, y):
        return super().observe(0.1 * output, plates, y)


def test_a_class_with_another_likelihood_is_run_at_the_nodes(x):
    plain = ps.Classifier(linear(3), SIZE)
    tempered, guide = run_at_nodes(plain, Tempered), fitted(plain)
    means = [ps.predict_moments(model, guide, x).mean for model in (plain, tempered)]
    assert (means[0] - means[1]).abs().max() > 0.05
    y = torch.arange(SIZE) % 3
    found = [ps.predict_moments(plain, guide, x, y=own).log_density for own in (y, y.byte())]
    assert torch.equal(*found)
    with pytest.raises(ValueError, match=r"`y` must be in IntegerInterval.* 5 of 5 observations"):
        ps.predict_moments(plain, guide, x, y=torch.full((SIZE,), 9))


def test_a_step_by_moments_draws_no_weight(x):
    """Also if a pass uses a weight twice, which predictions warn of."""
    layer = nn.Linear(3, 3)
    model = ps.Classifier(ps.bayesianize(nn.Sequential(layer, layer), prior=1.0), SIZE)
    guide, y = ps.KTiedGuide(model), torch.arange(SIZE) % 3
    elbo = StructuredELBO(estimator="moments")
    first = elbo.loss(model, guide, x, y)  # counts the uses of weights
    state = torch.get_rng_state()
    assert elbo.loss(model, guide, x, y) == first
    assert torch.equal(torch.get_rng_state(), state)
    message = r"A pass uses the weights .*net\.1\.weight.* more than once, .*moments count each use"
    with pytest.warns(MomentsWarning, match=message):
        ps.predict_moments(model, guide, x)


def test_classes_without_variance_have_their_probabilities():
    net = ps.bayesianize(torch.nn.Linear(2, 3, bias=False), prior=1.0)
    model = ps.Classifier(net, 2)
    guide = ps.MeanFieldGuide(model)
    x, y = torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1])
    prediction = ps.predict_moments(model, guide, x, y=y)
    torch.testing.assert_close(prediction.mean[0], torch.full((3,), 1 / 3))
    assert prediction.log_density.isfinite().all()
    ps.StructuredELBO(estimator="moments").differentiable_loss(model, guide, x, y).backward()
    assert all(value.grad.isfinite().all() for value in guide.parameters())
