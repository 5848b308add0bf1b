"""Couplings of sites do not depend on the order of patterns."""

import pytest
import torch

import pyro_structvi as ps
from pyro_structvi.families import FullCovariance, InducingWeights, MeanField, Members, Subnetwork
from tests.guides.inducing_guides import assert_same_draws, draw, randomize
from tests.models import regression_data

COUPLED = {
    "shared": InducingWeights((3, 2), FullCovariance(), shared=True),
    "ensemble": Members(3),
    "inducing ensemble": InducingWeights((3, 2), Members(3)),
    "subnetwork": Subnetwork(),
}
EVERY_COUPLING = pytest.mark.parametrize("family", COUPLED.values(), ids=COUPLED)


def three_layers():
    linear, tanh = torch.nn.Linear, torch.nn.Tanh
    net = torch.nn.Sequential(linear(3, 5), tanh(), linear(5, 4), tanh(), linear(4, 1))
    return ps.Regressor(ps.bayesianize(net, prior=1.0), 12, 0.3)


@EVERY_COUPLING
def test_state_dicts_load_wherever_the_pattern_stands(family):
    model = three_layers()
    guide = ps.StructuredGuide(model, {"net.0.*": MeanField(), "*": family})
    moved = ps.StructuredGuide(
        model, {"net.0.bias": MeanField(), "net.0.weight": MeanField(), "net.[24].*": family}
    )
    randomize(guide)
    moved.load_state_dict(guide.state_dict())
    assert_same_draws(guide, moved)


@EVERY_COUPLING
def test_a_pattern_that_is_prepended_leaves_what_there_is(family):
    guide = ps.StructuredGuide(three_layers(), {"net.0.*": MeanField(), "*": family})
    guide.initialize(*regression_data())
    randomize(guide)
    tied = ps.warm_start.k_tied_from_mean_field(guide)
    together = draw(tied)
    before = {name: value.clone() for name, value in tied.state_dict().items()}
    for _ in range(2):
        tied.initialize(*regression_data())
        after = tied.state_dict()
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        assert len(tied.couplings) == 1
        again = draw(tied)
        assert all(torch.equal(again[name], value) for name, value in together.items())


def test_a_layer_that_a_pass_skips_comes_back_with_its_part():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = (torch.nn.Linear(3, n) for n in (3, 3, 1))
            self.skips = False

        def forward(self, x):
            x = torch.tanh(self.first(x))
            return self.third(x if self.skips else self.second(x))

    model = ps.Regressor(ps.bayesianize(Net(), prior=1.0), 12, 0.3)
    guide = ps.StructuredGuide(model, {"*": COUPLED["shared"]})
    names = guide.site_names
    layers = {f"net.{layer}.weight+bias" for layer in ("first", "second", "third")}
    for skips in (False, True, True, False):
        model.net.skips = skips
        guide.initialize(*regression_data())
        assert guide.site_names == names
        assert guide.draw().keys() == set(names)
        terms = ps.StructuredELBO().terms(model, guide, *regression_data())
        assert {"inducing_weights of net.first.weight", *layers} == terms.kl.keys()
