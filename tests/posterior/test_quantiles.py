"""Quantiles of mixtures."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions import StudentT
from scipy.optimize import brentq
from scipy.stats import gumbel_r, norm, pareto, poisson, t, weibull_min

import pyro_structvi as ps
from pyro_structvi.linalg.quadrature import find_root
from pyro_structvi.posterior import quantiles
from pyro_structvi.posterior.quantiles import mixture_quantile, student_t_cdf
from tests.predictions import normal_prediction

LEVELS = torch.tensor([1e-3, 0.05, 0.5, 0.9, 0.9999])


@pytest.mark.parametrize("df", [1, 2, 3, 4, 5, 30, 0.3, 1.5, 4.7, 60.5])
def test_students_t_has_a_closed_form(df):
    values = torch.linspace(-40, 40, 101).requires_grad_(True)
    found = student_t_cdf(torch.tensor(float(df)))(values)
    own = values.detach().numpy()
    atol = 1e-13 if df % 1 else 1e-14
    torch.testing.assert_close(found, torch.from_numpy(t.cdf(own, df)), rtol=0, atol=atol)
    (density,) = torch.autograd.grad(found.sum(), values)
    torch.testing.assert_close(density, torch.from_numpy(t.pdf(own, df)), rtol=0, atol=1e-13)
    far = torch.tensor([-1e12, 1e12])
    torch.testing.assert_close(
        student_t_cdf(torch.tensor(float(df)))(far), torch.from_numpy(t.cdf(far.numpy(), df))
    )


@pytest.mark.parametrize("df", [1, 2, 5, 1.5, 199.5, [1.5, 2.0, 30.7, 199.5]])
def test_quantiles_of_a_mixture_are_those_of_its_distribution_function(df):
    """Also of draws with degrees of freedom of their own."""
    loc, scale = torch.randn(4, 3), 0.2 + torch.rand(4, 3)
    df = torch.tensor(df, dtype=torch.float64)
    of_draws = df.unsqueeze(-1) if df.dim() else df
    found = mixture_quantile(StudentT(of_draws, loc, scale), LEVELS)
    for column in range(3):
        own = loc[:, column].numpy(), scale[:, column].numpy()
        for row, level in enumerate(LEVELS.tolist()):

            def excess(value, own=own, level=level):
                return t.cdf(value, df.numpy(), *own).mean() - level

            expected = brentq(excess, -1e6, 1e6, xtol=1e-12, rtol=1e-14)
            assert found[row, column].item() == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("df", [None, 3.0])
def test_some_levels_are_searched_at_a_time(df, monkeypatch):
    """Memory does not grow with their number; quantiles and their derivatives do not change."""
    loc, scale = torch.randn(4, 3), (0.2 + torch.rand(4, 3)).requires_grad_(df is None)
    noise = dist.Normal(loc, scale) if df is None else StudentT(df, loc, scale)
    at_once = mixture_quantile(noise, LEVELS)
    sizes = []

    def find(function, low, high):
        found = find_root(function, low, high)
        sizes.extend([len(low)] * (low.shape[1:] == (3,)))  # and not of a single distribution
        return found

    monkeypatch.setattr(quantiles, "find_root", find)
    for limit, expected in ((24, [2, 2, 1]), (5, [1] * 5)):
        monkeypatch.setattr(quantiles, "VALUES_AT_A_TIME", limit)
        found = mixture_quantile(noise, LEVELS)
        torch.testing.assert_close(found, at_once, rtol=1e-9, atol=1e-9)
        assert sizes == expected
        sizes.clear()
        if df is None:
            own, other = (
                torch.autograd.grad(q.sum(), scale, retain_graph=True) for q in (found, at_once)
            )
            torch.testing.assert_close(own, other, rtol=1e-8, atol=1e-8)


def test_quantiles_lie_between_the_supports_of_draws():
    """The mixture has two uniforms, (-1, 0) and (2, 4)."""
    low, high = torch.tensor([[-1.0], [2.0]]), torch.tensor([[0.0], [4.0]])
    found = mixture_quantile(dist.Uniform(low, high), torch.tensor([0.2, 0.4, 0.75]))
    torch.testing.assert_close(found, torch.tensor([[-0.6], [-0.2], [3.0]]))


def test_ends_of_an_interval_have_levels_in_double_precision():
    lower, upper = normal_prediction(torch.zeros(1), 1.0).interval(0.9)
    expected = norm.ppf([0.05, 0.95])
    np.testing.assert_allclose([lower.item(), upper.item()], expected, rtol=1e-14)
    one = normal_prediction(torch.zeros(1), 1.0).quantile(0.05)
    assert one.item() == pytest.approx(expected[0], rel=1e-14)


@pytest.mark.parametrize("level", [1e-9, 1e-6, 0.3, 1 - 1e-6, 1 - 1e-9])
@pytest.mark.parametrize("df", [None, 3.0, 4.5])
def test_far_quantiles_of_single_precision_are_finite_and_right(df, level):
    loc, scale = torch.tensor([[-1.0], [2.0]], dtype=torch.float32), torch.tensor(0.5).float()
    noise = (
        dist.Normal(loc, scale) if df is None else StudentT(torch.tensor(df).float(), loc, scale)
    )
    found = mixture_quantile(noise, torch.tensor([level]))
    own = norm(loc.numpy(), 0.5) if df is None else t(df, loc.numpy(), 0.5)
    expected = brentq(lambda value: own.cdf(value).mean() - level, -1e6, 1e6, xtol=1e-10)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_quantiles_are_differentiable_with_respect_to_degrees_of_freedom():
    loc, scale = torch.tensor([[-1.0], [2.0]]), torch.tensor([[0.5], [1.0]])
    df = torch.tensor([[2.5], [7.3]], requires_grad=True)
    torch.autograd.gradcheck(
        lambda df: mixture_quantile(StudentT(df, loc, scale), LEVELS), df, eps=1e-3, atol=1e-4
    )


def test_many_degrees_of_freedom_have_quantiles_of_samples():
    """The standard error of the median of 2,000 draws is below 0.03; five of them."""
    torch.manual_seed(0)
    found = mixture_quantile(StudentT(1e6, torch.zeros(4, 1), 1.0), torch.tensor([0.5]))
    assert np.abs(found.item()) < 0.15


def predict_of(noise, y):
    def model(x, y=None):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            return pyro.sample("obs", noise(x @ weight), obs=y)

    x, guide = torch.randn(5, 3), ps.MeanFieldGuide(model, init_scale=0.5)
    guide.initialize(x, y)
    torch.manual_seed(0)
    return ps.predict(model, guide, x, num_samples=7)


def test_log_normal_observations_are_exponentials_of_normal_ones():
    torch.manual_seed(1)
    normal = predict_of(lambda mean: dist.Normal(mean, 0.3), torch.zeros(5))
    torch.manual_seed(1)
    found = predict_of(lambda mean: dist.LogNormal(mean, 0.3), torch.ones(5))
    torch.testing.assert_close(found.quantile(0.2), normal.quantile(0.2).exp(), rtol=1e-9, atol=0)
    assert found.sample_observations(2).shape == (14, 5)


@pytest.mark.parametrize(
    ("noise", "own"),
    [
        (lambda f: dist.Weibull(f.exp(), 2.0), lambda f: weibull_min(2, scale=np.exp(f))),
        (lambda f: dist.Gumbel(f, 0.5), lambda f: gumbel_r(f, 0.5)),
        (lambda f: dist.Pareto(f.exp(), 3.0), lambda f: pareto(3, scale=np.exp(f))),
    ],
    ids=["Weibull", "Gumbel", "Pareto"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_likelihoods_of_transforms_have_quantiles(noise, own, dtype):
    """Their tensors are those of transforms, some inverted, and supports of draws may differ."""
    torch.manual_seed(1)
    mean = predict_of(lambda mean: dist.Normal(mean, 0.3), torch.zeros(5)).likelihood.mean
    torch.manual_seed(1)
    found = predict_of(lambda mean: noise(mean.to(dtype)), torch.full((5,), 1e3, dtype=dtype))
    level = own(mean.numpy()).cdf(found.quantile(0.7).numpy()).mean(0)
    np.testing.assert_allclose(level, 0.7, rtol=1e-8 if dtype == torch.float64 else 1e-5)
    assert found.mean.dtype == dtype
    assert found.sample_observations(2).shape == (14, 5)


def test_derivatives_of_quantiles_leave_out_draws_whose_support_is_elsewhere():
    scale = torch.tensor([[1.0], [1.2], [9.0]], requires_grad=True)

    def at(scale):
        return mixture_quantile(dist.Pareto(scale, 2.0), torch.tensor([0.4]))

    (found,) = torch.autograd.grad(at(scale).sum(), scale)
    steps = 1e-5 * torch.eye(3).unsqueeze(-1)
    numeric = torch.stack([at(scale.detach() + step) - at(scale.detach() - step) for step in steps])
    torch.testing.assert_close(found, numeric.reshape(3, 1) / 2e-5, rtol=1e-6, atol=1e-9)
    assert found[2] == 0


def test_observations_without_a_mean_are_refused_in_words():
    with pytest.raises(NotImplementedError, match="A FoldedDistribution has no mean and variance"):
        predict_of(lambda mean: dist.FoldedDistribution(dist.Normal(mean, 0.3)), torch.ones(5))


def test_a_count_without_a_distribution_function_has_quantiles_of_samples():
    """Geometric keeps its logits under no other name, and computes probabilities from them."""
    found = predict_of(lambda mean: dist.Geometric(logits=mean), torch.ones(5))
    mean = (-found.likelihood.logits).exp()  # failures before a success
    torch.testing.assert_close(found.mean, mean.mean(0))
    torch.testing.assert_close(found.likelihood.mean, mean)
    probability = 1 - found.likelihood.probs
    level = 1 - (probability ** (found.quantile(0.7) + 1)).mean(0)  # of the mixture at the quantile
    assert ((level > 0.65) & (level < 1)).all()


def test_ordered_classes_have_quantiles_of_samples():
    cuts = torch.tensor([-1.0, 0.5, 2.0])
    found = predict_of(lambda mean: dist.OrderedLogistic(mean, cuts), torch.ones(5).long())
    below = found.mean.cumsum(-1)  # of probabilities of the classes, of each example
    for level in (0.2, 0.9):
        at = found.quantile(level).long().unsqueeze(-1)
        assert (below.gather(-1, at) > level - 0.05).all()
        assert ((below - found.mean).gather(-1, at) < level + 0.05).all()


def test_likelihoods_that_keep_tuples_of_numbers_have_samples_and_quantiles():
    """Zero-inflated counts keep their batch shape as a tuple, continuous Bernoulli its limits."""
    found = predict_of(
        lambda mean: dist.ZeroInflatedPoisson(mean.exp(), gate=mean.sigmoid()), torch.ones(5)
    )
    gate, rate = found.likelihood.gate.numpy(), found.likelihood.base_dist.rate.numpy()
    assert gate.shape == (7, 5)
    np.testing.assert_allclose(found.mean, ((1 - gate) * rate).mean(0))
    level = (gate + (1 - gate) * poisson.cdf(found.quantile(0.8).numpy(), rate)).mean(0)
    assert (level > 0.75).all()
    assert found.sample_observations(2).shape == (14, 5)
    half = torch.full((5,), 0.5)
    found = predict_of(lambda mean: dist.ContinuousBernoulli(logits=mean), half)
    level = found.likelihood.cdf(found.quantile(0.3)).mean(0)
    torch.testing.assert_close(level, torch.full_like(level, 0.3))
