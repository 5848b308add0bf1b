"""The warning of point estimates whose learned noise has nearly vanished."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_structvi as ps
from pyro_structvi.infer import Validation, VanishingNoiseWarning

X = torch.linspace(-1, 1, 20, dtype=torch.float64).unsqueeze(-1)
Y = X.square()
SPREAD = float(Y.std())


def fitted(model, values, make=ps.MAPGuide, **options):
    """Take a step of a rate of nearly nothing, from given values by site."""

    def start(site):
        value = torch.as_tensor(values.get(site["name"], 0.1), dtype=torch.float64)
        return value.expand(site["fn"].shape())

    guide = make(model, init_loc_fn=start)
    ps.fit(model, guide, (X, Y), num_steps=1, lr=1e-9, progress=False, **options)


def regressor(outputs=1, **noise):
    net = nn.Linear(1, outputs, dtype=torch.float64)
    return ps.Regressor(ps.bayesianize(net, 1.0), **noise)


@pytest.mark.parametrize("df", [None, 5.0])
@pytest.mark.parametrize("make", [ps.MAPGuide, ps.EnsembleGuide])
def test_learned_noise_below_a_hundredth_of_the_spread(make, df):
    model = regressor(noise="learned", df=df)
    message = r"noise of 'obs' has fallen below 1% of .* at 100% of them.*`validation=Validation"
    with pytest.warns(VanishingNoiseWarning, match=message):
        fitted(model, {"noise_scale": 0.009 * SPREAD}, make)
    fitted(model, {"noise_scale": 0.011 * SPREAD}, make)  # warnings are errors


def test_noise_by_the_net_at_a_part_of_the_examples():
    model = regressor(2, noise="heteroscedastic")
    weights = {"net.weight": [[0.0], [12.0]], "net.bias": 0.0}
    with pytest.warns(VanishingNoiseWarning, match=r"1% of .* at 25% of them"):
        fitted(model, weights)
    fitted(model, weights | {"net.bias": 7.0})


def test_noise_that_is_given_or_uncertain_and_held_out_data_are_no_reason():
    fitted(regressor(noise_scale=0.001), {})  # warnings are errors
    small = {"noise_scale": 0.001}
    fitted(regressor(noise="learned"), small, ps.MeanFieldGuide)
    with pytest.warns(VanishingNoiseWarning):
        fitted(regressor(noise="learned"), small, validation=Validation((X, Y)))
    fitted(regressor(noise="learned"), small, validation=Validation((X, Y), patience=5))


@pytest.mark.parametrize("y", [torch.tensor(1.0), torch.ones(1)])
def test_one_observation_has_no_spread(y):
    def model(x):
        scale = pyro.sample("noise_scale", dist.LogNormal(-9.0, 1.0))
        return pyro.sample("obs", dist.Normal(x, scale), obs=y)

    guide = ps.MAPGuide(model)
    ps.fit(model, guide, torch.ones(1), num_steps=1, progress=False)
