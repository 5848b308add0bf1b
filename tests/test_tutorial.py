"""The covariance of products of mean-field layers, for the figure of the tutorial's folder."""

import itertools

import pytest
import torch
from torch import nn

import pyro_structvi as ps
from examples.papers.tutorial import depth


def random_layers(*widths):
    """Return means and variances of layers with these widths."""
    shapes = [(outputs, inputs) for inputs, outputs in itertools.pairwise(widths)]
    return [torch.randn(shape) for shape in shapes], [torch.rand(shape) + 0.1 for shape in shapes]


def all_signs(means, variances):
    """Return every draw of elements that are a standard deviation above or below their mean."""
    sizes = [mean.numel() for mean in means]
    signs = torch.tensor([*itertools.product([-1.0, 1.0], repeat=sum(sizes))])
    return [
        mean + variance.sqrt() * sign.reshape(-1, *mean.shape)
        for mean, variance, sign in zip(means, variances, signs.split(sizes, 1), strict=True)
    ]


@pytest.mark.parametrize("widths", [(3, 2), (2, 3, 1), (3, 2, 2), (2, 1, 2, 2), (1, 2, 2, 2)])
def test_the_covariance_of_a_product_is_exact(widths):
    """It needs two moments of each element, so two values for each, all combined, are an oracle."""
    torch.manual_seed(0)
    means, variances = random_layers(*widths)
    exact = depth.products(all_signs(means, variances), torch.ones(widths[0])).flatten(1)
    expected = exact.T.cov(correction=0).reshape(exact.shape[1], -1)
    found = depth.product_covariance(means, variances)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_the_mean_of_absolute_correlations():
    covariance = torch.tensor([[4.0, -1.0, 0.0], [-1.0, 1.0, 0.5], [0.0, 0.5, 1.0]])
    assert depth.mean_correlation(covariance) == pytest.approx((0.5 + 0.5) / 3)


@pytest.mark.parametrize(
    "name", ["5 layers, leaky ReLU, mean field", "5 linear layers, mean field"]
)
def test_the_product_at_an_input_is_the_derivative_of_the_net(name):
    torch.manual_seed(0)
    posterior = depth.POSTERIORS[name]
    model = ps.Classifier(ps.bayesianize(depth.make_net(posterior), 1.0), num_data=1)
    guide = posterior.guide(model)
    x, weights = torch.randn(depth.PIXELS**2), [guide[name]().mean for name in guide.site_names]
    layers = [nn.Linear(*weight.shape[::-1], bias=False) for weight in weights]
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight = nn.Parameter(weight)
    between = [posterior.activation() for _ in layers[1:]]
    net = nn.Sequential(layers[0], *itertools.chain(*zip(between, layers[1:], strict=True)))
    slope = 1.0 if posterior.is_linear else depth.SLOPE
    product = depth.products([weight[None] for weight in weights], x, slope)[0]
    torch.testing.assert_close(product, torch.autograd.functional.jacobian(net, x))
