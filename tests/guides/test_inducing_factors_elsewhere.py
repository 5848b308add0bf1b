"""Inducing factors in other models, and options."""

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pyro_structvi as ps
from pyro_structvi.families import InducingWeights
from tests.guides.inducing_guides import KINDS, assert_same_draws, draw, make_guide, randomize
from tests.models import regression_data


def function_model(x, y=None, prior=None):
    """Two layers drawn in a function."""
    prior = dist.Normal(0.0, 1.0) if prior is None else prior
    first = pyro.sample("first", prior.expand([4, 3]).to_event(2))
    second = pyro.sample("second", prior.expand([1, 4]).to_event(2))
    mean = F.linear(torch.tanh(F.linear(x, first)), second)
    with pyro.plate("data", len(x)):
        pyro.sample("obs", dist.Normal(mean, 0.3).to_event(1), obs=y)


@pytest.mark.parametrize("kind", ["full, shared", "ensemble"])
def test_layers_of_a_function_draw_together(kind):
    guide = make_guide(function_model, **KINDS[kind])
    guide.initialize(*regression_data())
    new = make_guide(function_model, **KINDS[kind])
    new.initialize(*regression_data())
    randomize(guide)
    new.load_state_dict(guide.state_dict())
    assert_same_draws(guide, new)
    assert list(draw(guide)) == ["first", "second"]


def half_declared():
    """Return a module that declares one layer and draws another in forward."""

    class Model(pyro.nn.PyroModule):
        def __init__(self):
            super().__init__()
            self.layer = ps.bayesianize(nn.Linear(3, 4), prior=1.0)

        def forward(self, x, y=None):
            weight = pyro.sample("late", dist.Normal(torch.zeros(1, 4), 1.0).to_event(2))
            mean = F.linear(torch.tanh(self.layer(x)), weight)
            with pyro.plate("data", len(x)):
                pyro.sample("obs", dist.Normal(mean, 0.3).to_event(1), obs=y)

    return Model()


def test_a_layer_that_is_found_late_cannot_draw_with_the_others_but_takes_their_member():
    guide = make_guide(half_declared())
    guide.initialize(*regression_data())
    assert guide["late"]().event_shape == (1, 4)
    guide = make_guide(half_declared(), **KINDS["full, shared"])
    message = r"\['layer\.weight'\] are drawn together, and \['late'\] were found"
    with pytest.raises(ValueError, match=message):
        guide.initialize(*regression_data())
    guide = make_guide(half_declared(), init_scale=1e-6, **KINDS["ensemble"])
    guide.initialize(*regression_data())
    values = guide.draw(number=1)
    for name in ("layer.weight", "late"):
        expected = guide[name]().condition(guide[name].inducing_members[1]).mean
        parts = [values[part].reshape(len(expected), -1) for part in guide[name].site.names]
        torch.testing.assert_close(torch.cat(parts, -1), expected, rtol=0, atol=1e-4)


def test_a_prior_without_a_standard_deviation_asks_for_one():
    def heavy_tailed(x, y=None):
        function_model(x, y, dist.Cauchy(torch.tensor(0.0), 1.0))

    data = regression_data()
    message = r"The prior of first has no finite standard deviation.*Pass `prior_scale=`"
    with pytest.raises(ValueError, match=message):
        make_guide(heavy_tailed).initialize(*data)
    guide = ps.StructuredGuide(heavy_tailed, {"*": InducingWeights((3, 2), prior_scale=0.5)})
    guide.initialize(*data)
    assert guide["first"].prior_scale.tolist() == [0.5]
    with pytest.warns(ps.infer.SampledKLWarning):
        assert torch.isfinite(ps.StructuredELBO().terms(heavy_tailed, guide, *data).elbo)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inducing_posterior": "dense"}, r'must be "diagonal", .* \'dense\''),
        ({"inducing_posterior": 3}, r"`inducing_posterior` must be .* a Family, but got 3"),
        ({"ensemble_size": 3}, r'is for inducing_posterior="ensemble", .* \'diagonal\''),
        (
            {"max_inducing_scale": 0.1, "inducing_posterior": "full"},
            r'is for inducing_posterior="diagonal", but got \'full\'',
        ),
        ({"max_conditional_scale": 0}, "must be a positive number, but got 0"),
        ({"shape": (64, 1.5)}, r"must be \(M_out, M_in\), .* but got \(64, 1.5\)"),
        (
            {"shared": True, "inducing_posterior": "ensemble"},
            r"is for a posterior with correlations.* got Members\(size=5\)",
        ),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make_guide(**options)
