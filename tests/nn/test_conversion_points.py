"""Parameters that stay point estimates when a net becomes a model."""

import pickle

import pytest
import torch
from torch import nn

import pyro_structvi as ps
from pyro_structvi.nn import PointEstimateWarning
from tests.models import regression_data
from tests.nn.test_conversion import sites_of


def normalized_net():
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def test_normalization_layers_stay_and_that_is_said():
    net = normalized_net()
    names = ["1.weight", "1.bias", "2.weight", "2.bias"]
    with pytest.warns(
        PointEstimateWarning, match=r"\['1.weight', '1.bias', '2.weight', '2.bias'\]"
    ):
        bayes_net = ps.bayesianize(net)
    assert set(sites_of(bayes_net)) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert [name for name, _ in bayes_net.named_parameters()] == names
    model = ps.Regressor(bayes_net, num_data=12, noise_scale=0.3)
    ps.fit(model, ps.MeanFieldGuide(model), regression_data(), num_steps=2, progress=False)
    assert torch.equal(net[1].weight, torch.ones(4)), "they are copies"
    assert not torch.equal(model.net[1].weight, torch.ones(4))


def test_frozen_parameters_stay_frozen_without_a_copy_and_keep_their_class():
    net = nn.Sequential(Quantized(3, 4), nn.Linear(4, 1))
    net[0].requires_grad_(False)
    bayes_net = ps.bayesianize(net)
    assert bayes_net[0].weight is net[0].weight
    assert set(sites_of(bayes_net)) == {"1.weight", "1.bias"}
    model = ps.Regressor(bayes_net, num_data=12, noise_scale=0.3)
    before = net[0].weight.clone()
    ps.fit(model, ps.MeanFieldGuide(model), regression_data(), num_steps=3, progress=False)
    assert not list(model.parameters())
    assert torch.equal(model.net[0].weight, before)
    assert not net[0].weight.requires_grad


class Redirecting(nn.Module):
    """Looks up in a child what it has not, as the wrappers of adapters do."""

    def __init__(self):
        super().__init__()
        self.inside = nn.ModuleDict({"own": nn.Linear(3, 1)})

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "inside":
                raise KeyError(name) from None
            return getattr(self._modules["inside"]["own"], name)

    def forward(self, x):
        return self.inside["own"](x) + self.in_features


class FourBits(nn.Parameter):
    """A parameter that is read by its class, as in bitsandbytes."""

    def __new__(cls, data, factor):
        self = torch.Tensor._make_subclass(cls, data, False)
        self.factor = factor
        return self


class Quantized(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.weight = FourBits(self.weight.detach(), 2.0)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.factor * self.weight.detach(), self.bias)


def test_weights_that_cannot_be_random_are_named():
    with pytest.raises(
        ValueError, match=r"for weight` must be None for a complex .*view_as_complex"
    ):
        ps.bayesianize(nn.Linear(3, 2, dtype=torch.complex128))
    with pytest.raises(ValueError, match=r"\['0.weight', '0.bias'\] wait for their first input"):
        ps.bayesianize(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1)))


def test_nets_that_redirect_attributes_become_bayesian():
    net = nn.Sequential(Redirecting(), nn.Linear(1, 1))
    bayes_net = ps.bayesianize(net, 1.0)
    assert isinstance(bayes_net[0], Redirecting)
    x, y = regression_data()
    model = ps.Regressor(bayes_net, num_data=12, noise_scale=0.3)
    guide = ps.MeanFieldGuide(model, init_scale=1e-9)
    guide.initialize(x, y)
    assert len(guide.site_names) == 4
    torch.testing.assert_close(
        ps.predict(model, guide, x, num_samples=1).mean, net(x).detach(), rtol=1e-6, atol=1e-6
    )
    again = pickle.loads(pickle.dumps(bayes_net))
    assert type(again[0]) is type(bayes_net[0])
    assert sites_of(again).keys() == sites_of(bayes_net).keys()


def test_a_compiled_net_is_taken_out_of_its_compiler():
    net = nn.Sequential(torch.compile(nn.Linear(3, 4)), nn.ReLU(), nn.Linear(4, 1))
    names = {"0.weight", "0.bias", "2.weight", "2.bias"}
    inside = ps.bayesianize(net, {"0.weight": 1.0, "*": 2.0})
    assert set(sites_of(inside)) == names
    assert inside[0].bias.shape == (4,)
    assert set(sites_of(ps.bayesianize(torch.compile(net)))) == names


def test_a_prior_of_none_leaves_parameters_as_they_are():
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    net[0].bias.requires_grad_(False)
    bayes_net = ps.bayesianize(net, {"2.*": 1.0, "*": None})
    assert set(sites_of(bayes_net)) == {"2.weight", "2.bias"}
    assert set(dict(bayes_net.named_parameters())) == {"0.weight", "1.weight", "1.bias"}
    assert bayes_net[0].weight is not net[0].weight  # it is trained, and the net's own is not
    by_function = ps.bayesianize(
        net, lambda name, value: 1.0 if name == "2.weight" else None, False
    )
    assert set(sites_of(by_function)) == {"2.weight"}
    with pytest.raises(ValueError, match="a `prior` that is not None"):
        ps.bayesianize(net, None)
