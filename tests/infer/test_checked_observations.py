"""Observations and weights of replayed steps: those that Python refuses are refused by its errors."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.nn.functional import linear

import pyro_structvi as ps
from tests.infer.compiled_steps import assert_same, steps_of

GOOD = torch.tensor([0, 1, 1, 0, 1, 0])
X = torch.linspace(-1, 1, 18).reshape(6, 3).double()


def net(outputs):
    torch.manual_seed(0)
    return ps.bayesianize(nn.Linear(3, outputs), 1.0)


def function(make, mask=True):
    """Return a model function with a likelihood of linear outputs."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2, 3), 1.0).to_event(2))
        with pyro.plate("data", 6, subsample=x), pyro.poutine.mask(mask=mask):
            pyro.sample("obs", make(linear(x, w)), obs=y)

    return model


def pairs(logits):
    return dist.Independent(dist.Bernoulli(logits=logits), 1)


def labels(logits, **options):
    return dist.Bernoulli(logits=logits[:, 0], **options)


def masked(logits):
    return labels(logits).mask(torch.arange(6) > 3)


def one_hot(logits):
    return dist.OneHotCategorical(logits=logits)


def mixture(logits):
    parts = dist.Exponential(logits.exp())
    return dist.MixtureSameFamily(dist.Categorical(logits=logits), parts)


MASK = torch.arange(6) > 3
COLUMN = GOOD.unsqueeze(-1).double()
MODELS = {
    "classes": (lambda: ps.Classifier(net(3), 6), GOOD, 3, "`y` must be in IntegerInterval"),
    "classes below": (lambda: ps.Classifier(net(3), 6), GOOD, -1, "`y` must be in IntegerInterval"),
    "labels": (lambda: ps.BinaryClassifier(net(1), 6), COLUMN, -3, "`y` must be in Boolean"),
    "counts": (lambda: ps.PoissonRegressor(net(1), 6), COLUMN, 0.5, "`y` must be in IntegerGr"),
    "tokens": (
        lambda: ps.TokenClassifier(nn.Sequential(net(4), nn.Unflatten(1, (2, 2))), 6),
        *(GOOD.unsqueeze(-1).expand(6, 2).clone(), 2, "`y` must be in ClassOr"),
    ),
    "function": (lambda: function(labels), GOOD.double(), -3, "within the support .Boolean"),
    "event": (
        lambda: function(pairs),
        torch.eye(6, 2).double(),
        0.5,
        "within the support .Boolean",
    ),
    "mask": (lambda: function(masked), GOOD.double(), 2, "within the support .Boolean"),
    "handler": (lambda: function(labels, MASK), GOOD.double(), 2, "within the support"),
    "one hot": (
        lambda: function(one_hot),
        torch.eye(2).repeat(3, 1).double(),
        0.5,
        "within the support .One",
    ),
    "mixture": (lambda: function(mixture), GOOD.double(), -1, "within the support"),
}
ESTIMATORS = {"classes": ("moments", "bound"), "labels": ("moments",), "counts": ("moments",)}
CASES = [(name, "draws") for name in MODELS]
CASES += [
    pytest.param(name, each, marks=() if name == "classes" else pytest.mark.slow)
    for name, own in ESTIMATORS.items()
    for each in own
]


def replayed(model, data, **options):
    """Return steps that are replayed from now on, and the guide."""
    torch.manual_seed(1)
    guide = ps.MeanFieldGuide(model)
    optim = pyro.optim.Adam({"lr": 0.01})
    svi = ps.CompiledSVI(model, guide, optim, ps.StructuredELBO(**options), backend=None)
    for _ in range(5):
        svi.step(*data)
    assert all(not step.to_come for step in steps_of(svi))
    return svi, guide


def state(guide):
    return {name: value.clone() for name, value in guide.state_dict().items()}


@pytest.mark.parametrize(("name", "estimator"), CASES)
def test_an_observation_outside_of_the_support_is_refused_as_by_python(name, estimator):
    make, y, wrong, message = MODELS[name]
    bad = y.clone()
    bad.view(-1)[0] = wrong
    svi, guide = replayed(make(), (X, y), estimator=estimator)
    before = state(guide)
    with pytest.raises(ValueError, match=f"At step 5: [^$]*{message}"):
        svi.step(X, bad)
    torch.testing.assert_close(state(guide), before, rtol=0, atol=0)
    torch.manual_seed(2)
    loss = svi.step(X, y)
    whole, _ = replayed(make(), (X, y), estimator=estimator)
    torch.manual_seed(2)
    assert whole.step(X, y) == loss


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (-1.0, ValueError, "`weights` must not be negative or infinite"),
        (math.inf, FloatingPointError, r"the data \['argument 2'\] is not finite"),
    ],
)
def test_a_weight_that_is_negative_or_infinite_is_refused_as_by_python(wrong, error, message):
    weights = torch.ones(6)
    data = X, torch.zeros(6, 1)
    svi, guide = replayed(ps.Regressor(net(1), 6, 0.3), (*data, weights))
    before = state(guide)
    with pytest.raises(error, match=f"At step 5[:,] {message}"):
        svi.step(*data, weights.index_fill(0, torch.tensor(1), wrong))
    torch.testing.assert_close(state(guide), before, rtol=0, atol=0)
    assert math.isfinite(svi.step(*data, weights))


@pytest.mark.parametrize("wrong", ["label", "weight"])
def test_a_fit_ends_at_the_same_step_as_by_python(wrong):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, 3, generator=generator)
    y, weights, errors = (x[:, :1] > 0).double(), torch.ones(100), []
    batches = [(x[i : i + 20], y[i : i + 20], weights[i : i + 20]) for i in range(0, 100, 20)] * 30
    x, bad, weights = batches[0][0], batches[0][1].clone(), weights[:20].clone()
    (bad if wrong == "label" else weights)[3] = -3.0
    batches[20] = x, bad, weights
    for compiled in (False, "traced"):
        model = ps.BinaryClassifier(net(1), 100)
        with pytest.raises(ValueError, match="At step 20: ") as raised:
            ps.fit(
                model,
                ps.MeanFieldGuide(model),
                batches,
                num_epochs=1,
                compiled=compiled,
                progress=False,
            )
        errors.append(str(raised.value))
    assert errors[0] == errors[1]


# ---- without checks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda each: each, lambda each: each.mask(MASK)])
def test_a_likelihood_that_checks_nothing_takes_all_values(wrap):
    """Such as labels between zero and one; a plate makes a copy of the likelihood."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2, 3), 1.0).to_event(2))
        bias = pyro.sample("b", dist.Normal(torch.tensor(0.0), 1.0))
        with pyro.plate("data", 6, subsample=x):
            pyro.sample("shared", dist.Bernoulli(logits=bias, validate_args=False), obs=y)
            pyro.sample("obs", wrap(labels(linear(x, w), validate_args=False)), obs=y)

    data = X, torch.linspace(0, 1, 6)
    assert_same(lambda: (model, ps.MeanFieldGuide(model)), data)


def test_pyros_switch_of_validation_counts():
    model, y = function(labels), GOOD.double()
    bad = y.index_fill(0, torch.tensor(0), -3.0)
    with pyro.validation_enabled(False):
        svi, guide = replayed(model, (X, y))
        torch.manual_seed(2)
        expected = ps.StructuredELBO().loss(model, guide, X, bad)
        torch.manual_seed(2)
        assert svi.step(X, bad) == pytest.approx(expected, rel=1e-12)
    for _ in range(5):
        svi.step(X, y)
    with pytest.raises(ValueError, match="within the support"):
        svi.step(X, bad)


def test_real_numbers_cost_nothing():
    """Records with and without validation are the same."""
    found, data = [], (X, torch.zeros(6, 1))
    for is_validated in (True, False):
        with pyro.validation_enabled(is_validated):
            svi, _ = replayed(ps.Regressor(net(1), 6, 0.3), data)
        found += [step.num_operations for step in steps_of(svi)]
    assert found[0] == found[1]


def test_particles_in_one_pass_are_those_of_python():
    def make():
        model = ps.BinaryClassifier(net(1), 6)
        return model, ps.MeanFieldGuide(model)

    def loss():
        return ps.StructuredELBO(num_particles=2, vectorize_particles=True)

    bad = COLUMN.index_fill(0, torch.tensor(0), -3.0)
    assert_same(make, (X, COLUMN), loss=loss)
    assert_same(make, (X, bad), loss=loss)  # Python looks at no values there
