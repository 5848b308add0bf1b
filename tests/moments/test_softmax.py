"""Expectations of classes over normal logits, against the likelihood at all nodes at once."""

import copy

import pytest
import torch
from torch import nn

import pyro_structvi as ps
from pyro_structvi.infer import StructuredELBO
from pyro_structvi.moments import integration as softmax
from pyro_structvi.moments.integration import nodes_of
from pyro_structvi.moments.random_tensor import RandomTensor, Settings
from tests.moments.one_layer import SIZE, fitted, linear


class OwnClassifier(ps.Classifier):
    """The same likelihood in a class that overrides the method, so that it runs at the nodes."""

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
    torch.testing.assert_close(found.log_density, expected, rtol=1e-7, atol=1e-5)
    torch.testing.assert_close(found.entropy[1], torch.tensor(2.0).log(), rtol=1e-6, atol=1e-6)
    assert found.probabilities[1, 1] == 0
    large = RandomTensor(loc + 5000, logits.variance, Settings())
    shifted = softmax.class_expectations(large, None).probabilities
    torch.testing.assert_close(shifted, found.probabilities)


def test_narrow_logits_keep_the_relative_accuracy_of_variances():
    """By the tangent, in single precision: a difference of squares would have no digit."""
    scale, loc = 1e-4, torch.tensor([[0.3, -0.2, 1.0]], dtype=torch.float32)
    output = RandomTensor(loc, torch.full_like(loc, scale**2), Settings())
    p = loc.softmax(-1)
    tangent = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    nodes, _ = nodes_of(3, loc)
    second = nodes.mT @ nodes / len(nodes)  # the points' own, near the identity
    exact = scale**2 * (tangent @ second @ tangent).diagonal(dim1=-2, dim2=-1)
    found = softmax.class_expectations(output, None).variance
    torch.testing.assert_close(found, exact, rtol=5e-3, atol=0)


class Tempered(ps.Classifier):
    def observe(self, output, plates, y):
        return super().observe(0.1 * output, plates, y)


def test_a_class_with_another_likelihood_is_run_at_the_nodes(x):
    plain = ps.Classifier(linear(3), SIZE)
    tempered, guide = run_at_nodes(plain, Tempered), fitted(plain)
    means = [ps.predict_moments(model, guide, x).mean for model in (plain, tempered)]
    assert (means[0] - means[1]).abs().max() > 0.05
    with pytest.raises(ValueError, match="within the support"):
        ps.predict_moments(plain, guide, x, y=torch.full((SIZE,), 9))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        return self.inner(self.inner(x))


def test_a_step_by_moments_draws_no_weight(x):
    """Also if a pass uses a weight twice, which other objectives draw at once."""
    model = ps.Classifier(ps.bayesianize(Twice(), prior=1.0), SIZE)
    guide, y = ps.KTiedGuide(model), torch.arange(SIZE) % 3
    elbo = StructuredELBO(estimator="moments")
    first = elbo.loss(model, guide, x, y)  # counts the uses of weights
    state = torch.get_rng_state()
    assert elbo.loss(model, guide, x, y) == first
    assert torch.equal(torch.get_rng_state(), state)
