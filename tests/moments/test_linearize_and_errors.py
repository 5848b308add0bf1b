"""Tangents in place of rules, and errors."""

from functools import partial

import pytest
import torch
from torch import nn

import pyro_structvi as ps
from pyro_structvi.infer import StructuredELBO
from pyro_structvi.moments import NetMoments, RandomTensor, Settings
from tests.models import HandWritten
from tests.moments.one_layer import Function
from tests.moments.signs import assert_tangent, random_input

SIZE = 5


def regressor(*layers, **options):
    net = ps.bayesianize(nn.Sequential(*layers), prior=1.0)
    return ps.Regressor(net, SIZE, 0.3, **options)


def predict(model, x=None, guide=ps.MeanFieldGuide, **options):
    guide = guide(model) if isinstance(guide, type) else guide
    x = torch.randn(SIZE, 3) if x is None else x
    return ps.predict_moments(model, guide, x, **options)


# ---- tangents ------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [False, True], ids=["diagonal", "full"])
def test_a_function_without_a_rule_has_the_moments_of_its_tangent(full):
    plain = random_input(2, 3, full=full)
    x = RandomTensor(plain.loc, plain.variance, Settings(full, True), plain.covariance)
    found = torch.cumprod(x, 1)
    assert (found.covariance is not None) == full
    assert_tangent(found, lambda value: torch.cumprod(value, 1), x)


def test_a_tangent_of_several_dimensions_and_one_without_variance():
    plain = random_input(2, 3, 4)
    x = RandomTensor(plain.loc, plain.variance, Settings(linearize=True))
    norm = partial(torch.linalg.vector_norm, dim=-1)
    assert_tangent(norm(x), norm, x)
    mean, variance = torch.randn(2, 3).requires_grad_(), torch.zeros(2, 3).requires_grad_()
    found = torch.sinh(RandomTensor(mean, variance, Settings(linearize=True)))
    torch.testing.assert_close(found.variance, torch.zeros(2, 3))
    slope = torch.autograd.grad(found.variance.sum(), variance)[0]
    torch.testing.assert_close(slope, mean.cosh().square())


NO_TANGENT = (
    (lambda x: torch.hypot(x, x + 1), "functions of one random tensor, their first argument"),
    (torch.sort, "functions that return one tensor with the examples first, which `sort`"),
    (torch.argmax, "functions that return one tensor with the examples first, which `argmax`"),
    (lambda x: torch.logsumexp(x, 0), "with the examples first, which `logsumexp` does not"),
)


def test_what_has_no_tangent_is_refused():
    plain = random_input(2, 3)
    x = RandomTensor(plain.loc, plain.variance, Settings(linearize=True))
    for function, message in NO_TANGENT:
        with pytest.raises(NotImplementedError, match=message):
            function(x)


# ---- errors --------------------------------------------------------------------------------------


def test_a_module_without_a_rule_is_named():
    without_rule = Function(lambda x: torch.cumsum(torch.sinh(x), -1))
    model = regressor(nn.Linear(3, 4), without_rule, nn.Linear(4, 1))
    message = (
        r"The function `sinh` has no rule for the moments of a random input, in the module 'net\.1' "
        r"\(Function\)\. Pass `linearize=True` to take its tangent at the mean, or predict with draws\.$"
    )
    with pytest.raises(NotImplementedError, match=message):
        predict(model)
    assert torch.isfinite(predict(model, linearize=True).variance).all()
    model = regressor(nn.Linear(3, 4), Function(lambda x: torch.cosine_similarity(x, x + 1)))
    message = r"`linearize` takes .* in the module 'net\.1' \(Function\)\. Predict with draws\.$"
    with pytest.raises(NotImplementedError, match=message):
        predict(model, linearize=True)


@pytest.mark.parametrize("guide", [ps.MeanFieldGuide, ps.MatrixNormalGuide, ps.EigenbasisGuide])
def test_a_layer_in_half_precision_takes_inputs_that_are_not_random(guide):
    x, half = torch.randn(SIZE, 3, dtype=torch.bfloat16), torch.bfloat16
    one = ps.Classifier(ps.bayesianize(nn.Linear(3, 2, dtype=half), prior=1.0), SIZE)
    own = guide(one, init_scale=0.5)
    diagonal, full = (predict(one, x, own, covariance=each).mean for each in ("diagonal", "full"))
    torch.testing.assert_close(diagonal, full, rtol=0, atol=0.02)
    two = regressor(nn.Linear(3, 4, dtype=half), nn.ReLU(), nn.Linear(4, 1, dtype=half))
    with pytest.raises(NotImplementedError, match=r"bfloat16 meets a random input.*`\.float\(\)`"):
        predict(two, x, guide)


def test_other_models_and_data_are_refused():
    model = HandWritten()
    guide, data = ps.MeanFieldGuide(model), (torch.zeros(SIZE, 3), torch.zeros(SIZE, 2))
    message = "`model` must be a Classifier, Regressor or another likelihood .* got a HandWritten"
    with pytest.raises(TypeError, match=message):
        predict(model, guide=guide)
    with pytest.raises(TypeError, match=message):
        StructuredELBO(estimator="moments").loss(model, guide, *data)
    with pytest.raises(TypeError, match=message):
        NetMoments(model, guide)
    model = regressor(nn.Linear(3, 1))
    with pytest.raises(ValueError, match="must be no mixture"):
        NetMoments(model, ps.EnsembleGuide(model, 3))
    with pytest.raises(NotImplementedError, match="no lower bound in closed form"):
        StructuredELBO(estimator="bound").terms(
            model, ps.MeanFieldGuide(model), data[0], data[1][:, :1]
        )
    with pytest.raises(TypeError, match=r"`inputs` must be the one input of the net, but got 2"):
        predict(model, (data[0], data[0]))
    with pytest.raises(ValueError, match=r"`y` must have .*shape"):
        predict(model, y=torch.zeros(SIZE))


def test_a_bound_by_moments_needs_observations_and_one_particle():
    model = regressor(nn.Linear(3, 1))
    elbo = StructuredELBO(estimator="moments")
    with pytest.raises(ValueError, match="`y` must be given, the observations, but got None"):
        elbo.loss(model, ps.MeanFieldGuide(model), torch.zeros(SIZE, 3))
    for estimator in ("moments", "bound"):
        with pytest.raises(ValueError, match=f'must be 1 with `estimator="{estimator}"`'):
            StructuredELBO(estimator=estimator, num_particles=2)


def test_the_loss_is_the_expected_log_likelihood_minus_the_kl_and_has_exact_gradients():
    model = regressor(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))
    guide = ps.MeanFieldGuide(model, init_scale=0.3)
    x, y = torch.randn(SIZE, 3), torch.randn(SIZE, 1)
    elbo = StructuredELBO(kl_weight=0.7, estimator="moments")
    terms = elbo.terms(model, guide, x, y)
    exact_kl = StructuredELBO().terms(model, guide, x, y).kl
    assert terms.kl.keys() == exact_kl.keys()
    for name, kl in exact_kl.items():
        torch.testing.assert_close(terms.kl[name], kl)
    loss = elbo.differentiable_loss(model, guide, x, y)
    torch.testing.assert_close(-loss, terms.log_likelihood["obs"] - 0.7 * sum(exact_kl.values()))
    loss.backward()
    for parameter in guide.parameters():
        direction, step = torch.randn_like(parameter), 1e-5
        slope = (parameter.grad * direction).sum()
        values = []
        with torch.no_grad():
            for sign in (1, -2):
                parameter.add_(sign * step * direction)
                values.append(elbo.loss(model, guide, x, y))
            parameter.add_(step * direction)
        found = torch.tensor((values[0] - values[1]) / (2 * step))
        torch.testing.assert_close(found, slope, rtol=1e-5, atol=1e-6)
