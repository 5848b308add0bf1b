"""Intervals, quantiles and draws of the predictive distribution."""

import pytest
import scipy.optimize
import scipy.stats
import torch
from torch import nn

import pyro_structvi as ps
from pyro_structvi.posterior.prediction import _streamed
from pyro_structvi.testing.noise import assert_mean
from tests.models import make_classifier, make_regressor, regression_data
from tests.posterior.passed_models import draws_of


def predicted(model, num_samples=7, size=5, **options):
    guide = ps.MeanFieldGuide(model, init_scale=0.3)
    return ps.predict(model, guide, torch.randn(size, 3), num_samples=num_samples, **options)


@pytest.mark.parametrize(
    ("noise", "batch_size"), [(0.3, None), ("heteroscedastic", 2), ("learned", None)]
)
def test_quantiles_of_normal_noise_are_those_of_the_mixture(noise, batch_size):
    outputs = 4 if noise == "heteroscedastic" else 2
    model = ps.Regressor(ps.bayesianize(nn.Linear(3, outputs)), 60, noise=noise)
    prediction = predicted(model, batch_size=batch_size)
    normal = prediction.likelihood.base_dist
    torch.testing.assert_close(normal.loc, prediction.functions)
    found = prediction.quantile(torch.tensor([0.025, 0.5, 0.9]))
    assert found.shape == (3, 5, 2)
    for row, level in zip(found, (0.025, 0.5, 0.9), strict=True):
        for n, target in ((0, 0), (3, 1), (4, 0)):
            parts = scipy.stats.norm(normal.loc[:, n, target], normal.scale[:, n, target])
            expected = scipy.optimize.brentq(lambda v: parts.cdf(v).mean() - level, -50, 50)  # noqa: B023
            assert row[n, target].item() == pytest.approx(expected, abs=1e-9)
    torch.testing.assert_close(prediction.quantile(0.9), found[2])
    lower, upper = prediction.interval(0.95)
    torch.testing.assert_close(lower, found[0])
    torch.testing.assert_close(upper, prediction.quantile(0.975))


def test_draws_of_observations_have_the_predictive_moments():
    model = ps.Regressor(ps.bayesianize(nn.Linear(3, 4)), 60, noise="heteroscedastic")
    prediction = predicted(model, num_samples=4, size=2)
    torch.manual_seed(1)
    drawn = prediction.sample_observations(50_000)
    assert drawn.shape == (200_000, 2, 2)
    # As often of each draw of the weights, so the errors are smaller than those of independent draws.
    assert_mean(drawn.flatten(1), prediction.mean.flatten())
    squares = (drawn - prediction.mean).square()
    assert_mean(squares.flatten(1), prediction.variance.flatten())


def test_quantiles_where_torch_knows_no_distribution_function():
    model = ps.Regressor(ps.bayesianize(nn.Linear(3, 1)), 60, 0.3, df=3)
    prediction = predicted(model, num_samples=1)
    torch.manual_seed(1)
    lower, upper = prediction.interval(0.8)
    student = scipy.stats.t(3, prediction.mean, 0.3)
    # The share of a distribution below the r-th of 2,000 draws has the distribution Beta(r, 2001 - r).
    ends = [scipy.stats.beta(r, 2001 - r) for r in (200, 1801)]
    for share, exact in zip((student.cdf(lower), student.cdf(upper)), ends, strict=True):
        assert (exact.cdf(share) > 1e-7).all()
        assert (exact.sf(share) > 1e-7).all()


def test_quantiles_of_counts_are_order_statistics_rounded_outwards():
    model = ps.PoissonRegressor(ps.bayesianize(nn.Linear(3, 1)), 60)
    prediction = predicted(model, num_samples=50)
    torch.manual_seed(1)
    drawn = prediction.sample_observations(40).sort(0).values
    torch.manual_seed(1)
    lower, upper = prediction.interval(0.9)
    assert torch.equal(lower, drawn[99])  # of 0.05 * 2001 = 100.05
    assert torch.equal(upper, drawn[1900])


def test_labels_have_entropies_one_by_one_and_a_density_in_any_dtype():
    model = ps.BinaryClassifier(ps.bayesianize(nn.Linear(3, 2)), 60)
    y = torch.tensor([[0, 1], [1, 1], [0, 0], [1, 0], [0, 1]])
    prediction = predicted(model)
    p = prediction.functions.sigmoid()
    mean = p.mean(0)
    torch.testing.assert_close(prediction.mean, mean)
    torch.testing.assert_close(prediction.variance, mean * (1 - mean))
    entropy = torch.distributions.Bernoulli(mean).entropy()
    torch.testing.assert_close(prediction.entropy, entropy)
    of_draws = torch.distributions.Bernoulli(p).entropy().mean(0)
    torch.testing.assert_close(prediction.mutual_information, entropy - of_draws)
    for dtype in (torch.long, torch.bool):
        single = predicted(model, num_samples=1, y=y.to(dtype))
        right = torch.where(y == 1, single.mean, 1 - single.mean).log().sum(-1)
        torch.testing.assert_close(single.log_density, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_have_entropies_one_by_one_and_are_not_kept_while_streaming(stream):
    """Each draw has a probability for each word of the vocabulary and each token."""
    net = nn.Sequential(nn.Unflatten(1, (3, 1)), nn.Linear(1, 4))  # three tokens of an example
    model = ps.TokenClassifier(ps.bayesianize(net), 60)
    torch.manual_seed(1)
    prediction = predicted(model, stream=stream)
    assert prediction.entropy.shape == (5, 3)
    entropy = torch.distributions.Categorical(prediction.mean).entropy()
    torch.testing.assert_close(prediction.entropy, entropy)
    assert (prediction.likelihood is None) == stream
    torch.manual_seed(1)
    probabilities = predicted(model).functions.softmax(-1)
    of_draws = torch.distributions.Categorical(probabilities).entropy().mean(0)
    torch.testing.assert_close(prediction.mutual_information, entropy - of_draws)


class Returning(nn.Module):
    """A model that returns what a function makes of its likelihood's mean."""

    def __init__(self, made):
        super().__init__()
        self.model, self.made = make_regressor(), made

    def forward(self, x, y=None):
        return self.made(self.model(x, y))


@pytest.mark.parametrize("batch_size", [None, 5])
def test_functions_are_nested_as_the_model_returns_them(batch_size):
    model = Returning(lambda mean: {"mean": mean, "both": (mean.exp(), -mean)})
    x, y = regression_data()
    options = {"num_samples": 6, "batch_size": batch_size}
    prediction = ps.predict(model, ps.KTiedGuide(model), x, y=y, **options)
    mean = prediction.functions["mean"]
    assert mean.shape == (6, 12, 1)
    torch.testing.assert_close(mean, prediction.likelihood.mean)
    torch.testing.assert_close(prediction.functions["both"][0], mean.exp())
    torch.testing.assert_close(prediction.functions["both"][1], -mean)
    densities = prediction.likelihood.log_prob(y).logsumexp(0) - torch.tensor(6.0).log()
    torch.testing.assert_close(densities, prediction.log_density)
    model = Returning(lambda mean: None)
    prediction = ps.predict(model, ps.KTiedGuide(model), x, **options)
    torch.testing.assert_close(prediction.functions, prediction.likelihood.mean)


def test_what_has_no_examples_is_stacked_and_refused_in_mini_batches():
    model, (x, _) = Returning(lambda mean: mean.sum()), regression_data()
    guide = ps.KTiedGuide(model)
    prediction = ps.predict(model, guide, x, num_samples=6)
    torch.testing.assert_close(prediction.functions, prediction.likelihood.mean.sum((1, 2)))
    message = r"With mini-batches, observations .* must have the examples"
    with pytest.raises(ValueError, match=message):
        ps.predict(model, guide, x, num_samples=6, batch_size=5)
    streamed = ps.predict(model, guide, x, num_samples=6, batch_size=5, stream=True)
    assert streamed.mean.shape == (12, 1)
    model = Returning(lambda mean: (mean, "text"))
    with pytest.raises(TypeError, match=r"must return a tensor, .* but returns Tensor, str"):
        ps.predict(model, ps.KTiedGuide(model), x, num_samples=6)


@pytest.mark.parametrize(
    ("count", "stride", "batch_size"),
    [(80, 1, None), (250, 3, 5)],
)
def test_a_streamed_prediction_has_intervals_of_some_draws(count, stride, batch_size):
    """One of each ``stride`` successive draws."""
    model, (x, _) = make_regressor(), regression_data()
    draws = draws_of(ps.MeanFieldGuide(model, init_scale=0.3), count)
    options = {"batch_size": batch_size, "max_memory": 1e-6}
    streamed = ps.predict(model, draws, x, stream=True, **options)
    kept = _streamed(count)
    assert [number // stride for number in kept] == [*range(-(-count // stride))]
    some = {name: value[kept] for name, value in draws.items()}
    assert streamed.functions is None
    levels = torch.tensor([0.1, 0.9])
    expected = ps.predict(model, some, x).quantile(levels)
    torch.testing.assert_close(streamed.quantile(levels), expected)
    torch.testing.assert_close(streamed.mean, ps.predict(model, draws, x).mean)


def test_gradients_of_quantiles_are_those_of_the_root():
    """Of F(q; x) = level: means ``w x`` of draws move q by the average of w, weighed by densities."""
    model = ps.Regressor(ps.bayesianize(nn.Linear(1, 1, bias=False)), 10, 0.5)
    draws, x = {"net.weight": torch.randn(6, 1, 1)}, torch.randn(5, 1).requires_grad_()
    prediction = ps.predict(model, draws, x, differentiable=True)
    found = prediction.quantile(torch.tensor([0.1, 0.9]))
    for each in found:
        (gradient,) = torch.autograd.grad(each.sum(), x, retain_graph=True)
        weights = prediction.likelihood.base_dist.log_prob(each.detach()).softmax(0)
        expected = (weights * draws["net.weight"]).sum(0)
        torch.testing.assert_close(gradient, expected.detach(), rtol=1e-9, atol=1e-12)
    plain = ps.predict(model, draws, x.detach()).quantile(torch.tensor([0.1, 0.9]))
    torch.testing.assert_close(found.detach(), plain, rtol=0, atol=0)


def test_functions_of_several_mini_batches_have_gradients():
    """The functions ``w x`` are copied to their places, a pass and mini-batch at a time."""
    model = ps.Regressor(ps.bayesianize(nn.Linear(1, 1, bias=False)), 10, 0.5)
    draws, x = {"net.weight": torch.randn(6, 1, 1)}, torch.randn(5, 1).requires_grad_()
    options = {"batch_size": 2, "max_memory": 1e-9, "differentiable": True}
    functions = ps.predict(model, draws, x, **options).functions
    factor = torch.randn(6, 5, 1)
    (gradient,) = torch.autograd.grad((factor * functions).sum(), x)
    expected = (factor * draws["net.weight"]).sum(0)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("size", "count"), [(2, 200), (5, 1000), (4, 600)])
def test_a_streamed_prediction_keeps_draws_of_every_member(size, count):
    """Draws take the members in turn; every fifth one of five members would be of one member."""
    model, (x, y) = make_regressor(), regression_data()
    guide = ps.MixtureGuide(model, ps.MeanFieldGuide, size)
    guide.initialize(x, y)
    shares = torch.tensor(_streamed(count)).remainder(size).bincount(minlength=size) / 100
    torch.testing.assert_close(shares, torch.full((size,), 1 / size), rtol=0, atol=0.05)
    with torch.no_grad():
        for number, member in enumerate(guide.members):
            member["net.2.bias"].loc.fill_(100.0 * number)
    streamed = ps.predict(model, guide, x, num_samples=count, stream=True)
    lower, upper = streamed.interval(0.9)
    assert bool((upper - lower > 100 * (size - 1) - 50).all())


def test_quantiles_that_are_refused():
    streamed = predicted(make_classifier(), stream=True)
    assert streamed.likelihood is None
    for ask in (streamed.interval, streamed.sample_observations, lambda: streamed.quantile(0.5)):
        with pytest.raises(ValueError, match=r"`stream=False`"):
            ask()
    with pytest.raises(ValueError, match=r"Classes have no order.*`prediction.mean`"):
        predicted(make_classifier()).interval()
    prediction = predicted(make_regressor())
    for q in (0.0, float("nan"), torch.tensor([0.5, 2.0])):
        with pytest.raises(ValueError, match=r"`q` must be a number.* strictly between 0 and 1"):
            prediction.quantile(q)
    for level in (1.0, float("nan")):
        with pytest.raises(ValueError, match="`level` must be strictly between 0 and 1"):
            prediction.interval(level)
