"""GlobalInducingGuide: each layer given the ones before, against dense Bayesian linear regressions.

With inputs X, targets V, precisions L and prior scales s the weight of a layer is the posterior of the
regression of V on X. If inducing points and targets are the data, with the precision of the likelihood,
the last layer has the exact posterior given all other layers, and the ELBO is their evidence.
"""

import copy
import math

import pyro.poutine as poutine
import pytest
import torch
import torch.nn.functional as F
from pyro.infer import Trace_ELBO
from torch import nn
from torch.distributions import MultivariateNormal

import pyro_structvi as ps
from pyro_structvi.families import MatrixNormalFamily, MeanField, PointEstimate
from pyro_structvi.structures.global_inducing.distribution import NormalGivenInputs
from tests.guides.layered import NOISE, dense_regression, make_model, make_net, scramble

FEW_AND_MANY = pytest.mark.parametrize("count", [3, 6])  # rows, of 4 inputs


@pytest.mark.parametrize("own", [False, True], ids=["one precision", "of each output"])
@FEW_AND_MANY
def test_a_weight_given_its_inputs_is_the_posterior_of_a_regression(count, own):
    rows, target, event_shape = torch.randn(count, 4), torch.randn(count, 3), (3, 2, 2)
    log_precision, log_scale = torch.randn(count, 3) if own else torch.randn(count), torch.randn(4)
    q = NormalGivenInputs(torch.Size(event_shape), target, log_precision, log_scale).condition(rows)
    mean, covariance = dense_regression(rows, target, log_precision.exp(), log_scale.exp())
    covariance = covariance.expand(3, 4, 4)
    dense = torch.block_diag(*covariance)
    torch.testing.assert_close(q.mean, mean.mT.reshape(event_shape))
    torch.testing.assert_close(q.covariance_matrix, dense)
    torch.testing.assert_close(q.variance, dense.diagonal().reshape(event_shape))
    torch.testing.assert_close(q.variance_sum, dense.trace())
    torch.testing.assert_close(q.log_det_covariance, torch.logdet(dense))
    value, x = torch.randn(2, *event_shape), torch.randn(5, 4)
    expected = MultivariateNormal(mean.mT.flatten(), dense).log_prob(value.flatten(1))
    torch.testing.assert_close(q.log_prob(value), expected)
    torch.testing.assert_close(q.image(x).mean, x @ mean)
    variance = torch.einsum("bi,oij,bj->bo", x, covariance, x)
    torch.testing.assert_close(q.image(x).variance, variance)


def test_a_mean_and_a_noise_scale_have_their_own_precisions():
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))
    model = ps.Regressor(ps.bayesianize(net, 1.0), 20, noise="heteroscedastic")
    guide = ps.GlobalInducingGuide(model, x)
    assert guide["net.2.weight"].log_precision.shape == (20, 2)
    ps.StructuredELBO().differentiable_loss(model, guide, x, y).backward()
    gradient = guide["net.2.weight"].log_precision.grad
    assert not torch.allclose(gradient[:, 0], gradient[:, 1])


@FEW_AND_MANY
def test_gradients_of_the_regression_are_exact(count):
    shapes = (count, 2), (count,), (3,), (count, 3)
    noise = torch.randn(2, 3)
    arguments = [torch.randn(*shape, requires_grad=True) for shape in shapes]

    def moments(target, log_precision, log_scale, rows):
        q = NormalGivenInputs(torch.Size([2, 3]), target, log_precision, log_scale).condition(rows)
        return q.mean, q.scale_noise(noise), q.variance, q.log_det_covariance

    assert torch.autograd.gradcheck(moments, arguments)


@FEW_AND_MANY
def test_precisions_over_many_orders_keep_single_precision(count):
    """Precisions of 1e9 and 1e-3 leave no correct digit in single precision."""
    rows, target = torch.randn(count, 4), torch.randn(count, 2)
    log_precision, noise = torch.linspace(-7, 21, count), torch.randn(2, 4)
    exact = NormalGivenInputs(torch.Size([2, 4]), target, log_precision, torch.zeros(4)).condition(
        rows
    )
    single = [value.float() for value in (target, log_precision, torch.zeros(4))]
    q = NormalGivenInputs(torch.Size([2, 4]), *single).condition(rows.float())
    torch.testing.assert_close(q.mean.double(), exact.mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(q.variance.double(), exact.variance, rtol=1e-4, atol=1e-9)
    drawn = q.scale_noise(noise.float()).double()
    torch.testing.assert_close(drawn, exact.scale_noise(noise), rtol=1e-4, atol=1e-5)


def test_the_last_layer_can_be_exact_and_the_elbo_the_evidence():
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    model = make_model(3, 4, 1)
    guide = ps.GlobalInducingGuide(model, x, first_layer=PointEstimate())
    last = guide["net.2.weight"]
    with torch.no_grad():
        last.target.copy_(y)
        last.log_precision.fill_(-2 * math.log(NOISE))
    points = guide.median()
    hidden = F.linear(x, points["net.0.weight"], points["net.0.bias"]).tanh()
    inputs = F.pad(hidden, (0, 1), value=1.0)
    marginal = 0.8**2 * inputs @ inputs.mT + NOISE**2 * torch.eye(20)
    evidence = MultivariateNormal(torch.zeros(20), marginal).log_prob(y.flatten())
    prior = poutine.trace(poutine.condition(model, points)).get_trace(x, y)
    prior.compute_log_prob()
    own = sum(prior.nodes[f"net.0.{name}"]["log_prob_sum"] for name in ("weight", "bias"))
    # Trace_ELBO's value has no variance at the exact posterior: each draw gives the evidence.
    for _ in range(3):
        drawn = -Trace_ELBO().differentiable_loss(model, guide, x, y)
        torch.testing.assert_close(drawn.detach() - own, evidence)


def assert_given(q, own, rows):
    """Assert that a weight is the regression of its layer's targets on the rows."""
    scales = own.log_precision.exp(), own.log_scale.exp()
    mean, covariance = dense_regression(rows, own.target, *scales)
    torch.testing.assert_close(q.mean, mean.mT)
    blocks = covariance.expand(len(q.mean), *covariance.shape[-2:])
    torch.testing.assert_close(q.covariance_matrix, torch.block_diag(*blocks))


def with_ones(rows):
    return F.pad(rows, (0, 1), value=1.0)


def test_each_layer_is_drawn_given_the_draws_before_it():
    x, data = torch.randn(9, 2), (torch.randn(20, 2), torch.randn(20, 1))
    guide = ps.GlobalInducingGuide(make_model(2, 4, 5, 1), x)
    guide.initialize(*data)
    scramble(guide)
    nodes, rows = poutine.trace(guide).get_trace(*data).nodes, x
    for layer in (0, 2, 4):
        site = nodes[f"net.{layer}.weight+bias"]
        value = site["value"]
        if layer:
            assert_given(site["fn"], guide[f"net.{layer}.weight"], with_ones(rows))
        weight = nodes[f"net.{layer}.weight"]["value"]
        torch.testing.assert_close(weight, value[:, :-1])
        rows = F.linear(rows, value[:, :-1], value[:, -1]).tanh()
    guide = ps.GlobalInducingGuide(make_model(2, 3, 1), x, join_bias=False, init_scale=0.5)
    scramble(guide)
    guide.initialize(*data)
    nodes = poutine.trace(guide).get_trace(*data).nodes
    first = nodes["net.0.weight"]["value"], nodes["net.0.bias"]["value"]
    assert_given(nodes["net.2.weight"]["fn"], guide["net.2.weight"], F.linear(x, *first).tanh())
    assert isinstance(guide["net.2.bias"].family, MeanField)
    assert guide.draw().keys() == {name for name in nodes if name.startswith("net.")}


def test_the_rows_of_a_convolution_are_its_patches():
    images, second = torch.randn(3, 2, 6, 6), nn.Conv2d(3, 4, 2, stride=2)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), second, nn.Flatten(), nn.Linear(16, 2))
    model = ps.Classifier(ps.bayesianize(net, prior=0.5), num_data=3)
    guide = ps.GlobalInducingGuide(model, images)
    scramble(guide)
    nodes = poutine.trace(guide).get_trace(images, torch.zeros(3, dtype=torch.long)).nodes
    first = nodes["net.0.weight"]["value"], nodes["net.0.bias"]["value"]
    hidden = F.conv2d(images, *first).tanh()
    patches = F.unfold(hidden, 2, stride=2).movedim(1, -1).reshape(-1, 12)
    assert_given(nodes["net.2.weight+bias"]["fn"], guide["net.2.weight"], with_ones(patches))


def test_it_begins_at_the_net_and_at_the_scale_asked_for():
    """With as many points as inputs the targets decide the weight."""
    net = make_net(2, 3, 2)
    prior = {"*.weight": 0.7, "*.bias": 1.5}
    model = ps.Regressor(ps.bayesianize(copy.deepcopy(net), prior=prior), 20, NOISE)
    x = torch.randn(12, 2)
    guide = ps.GlobalInducingGuide(model, x, init_scale=1e-4)
    median = guide.median()
    for name, value in net.named_parameters():
        torch.testing.assert_close(median[f"net.{name}"], value.detach(), atol=1e-4, rtol=1e-4)
    scales = guide["net.2.weight"].log_scale.detach().exp()
    torch.testing.assert_close(scales, torch.tensor([0.7, 0.7, 0.7, 1.5]))
    drawn = guide.draw()["net.2.weight"] - median["net.2.weight"]
    assert 0 < drawn.abs().max() < 0.02


@pytest.mark.parametrize("first", [None, MeanField()])
def test_layers_that_meet_the_inputs_have_a_family_of_their_own(first):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right, self.top = (nn.Linear(2, 3), nn.Linear(2, 3), nn.Linear(3, 1))

        def forward(self, x):
            return self.top(torch.tanh(self.left(x)) + self.right(x))

    model = ps.Regressor(ps.bayesianize(Branches(), prior=1.0), 20, NOISE)
    guide = ps.GlobalInducingGuide(model, torch.randn(5, 2), first_layer=first)
    families = [
        type(guide[f"net.{name}.weight"].family).__name__ for name in ("left", "right", "top")
    ]
    own = type(first or MatrixNormalFamily()).__name__
    assert families == [own, own, "GlobalInducing"]


def test_a_number_takes_the_first_inputs_of_the_first_call():
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    guide = ps.GlobalInducingGuide(make_model(3, 4, 1), 7)
    with pytest.raises(RuntimeError, match="has no posterior before"):
        guide.draw()
    guide(x, y)
    torch.testing.assert_close(guide.inducing_inputs, x[:7], rtol=0, atol=0)
    assert "inducing_inputs" not in dict(guide.named_parameters())
    assert guide["net.2.weight"].target.shape == (7, 1)
