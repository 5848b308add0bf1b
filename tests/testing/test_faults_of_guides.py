"""The kit finds planted faults in guides."""

import re
from dataclasses import dataclass

import pyro.distributions as dist
import pytest
import torch

import pyro_structvi as ps
from pyro_structvi.distributions import MeanFieldNormal
from pyro_structvi.extend import couple
from pyro_structvi.families import MeanField, Subnetwork
from pyro_structvi.structures.subnetwork import JointSubnetwork
from pyro_structvi.testing import check_guide
from pyro_structvi.weights.outputs import NormalOutputs
from tests.testing.test_planted_faults import family, fault

NARROW = fault(
    MeanFieldNormal,
    image_around=lambda q, mean, linear_map, x: NormalOutputs(linear_map, mean, 0 * mean),
)


def narrow(own, site, **parameters):
    q = MeanField.distribution(own, site, **parameters)
    return NARROW(q.loc, q.scale, q.event_dim, validate_args=False)


class Missing(ps.MeanFieldGuide):
    """Its state misses what a state dict has."""

    def load_state_dict(self, state_dict, strict=True, assign=False):
        return super().load_state_dict(self.state_dict(), strict, assign)


class Unused(ps.MeanFieldGuide):
    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.unused = torch.nn.Parameter(torch.zeros(1))


class MovesTheSeed(ps.MeanFieldGuide):
    def __init__(self, model, **options):
        super().__init__(model, **options)
        torch.randn(1)


KIND = ps.FullCovarianceGuide


def a_third_too_high(guide):
    lower, upper = (guide.quantiles([level]) for level in (0.5, 0.6306))  # a third of a deviation
    return {
        name: value + upper[name][0] - lower[name][0] for name, value in KIND.median(guide).items()
    }


def of_other_levels(guide, levels):
    return KIND.quantiles(guide, [0.1 + 0.8 * level for level in levels])


def two_draws(guide, local=False, number=None):
    return KIND.draw(guide) | {"net.bias": KIND.draw(guide)["net.bias"]}


def of_the_medians(guide, draw=None):
    return KIND.to_net(guide)


CHANGES = {  # of value, mean and variance
    "draw": lambda value, mean, variance: (2 * value - mean, mean, variance),
    "mean": lambda value, mean, variance: (3 * value, 3 * mean, variance),
    "marginals": lambda value, mean, variance: (value, mean, 9 * variance),
}


@dataclass(frozen=True)
class Planted(Subnetwork):
    """The elements of all sites have a joint posterior, of which one method is wrong."""

    fault: str = "draw"


class WronglyJoint(JointSubnetwork):
    by_marginals = ()  # so that the KL takes values of draws


@couple.register
def _wrongly_joint(family: Planted, posteriors, scale):
    coupling = WronglyJoint(MeanField(), posteriors, scale)
    coupling.marginals = coupling.mean
    right, change = getattr(coupling, family.fault), CHANGES[family.fault]
    wrong = lambda *at: {name: change(*parts) for name, parts in right(*at).items()}  # noqa: E731
    setattr(coupling, family.fault, wrong)
    return coupling


def coupled(fault):
    return lambda model, **options: ps.StructuredGuide(
        model, {"*": Planted(fault=fault)}, **options
    )


def overconfident(model, **options):
    return ps.StructuredGuide(model, {"*": family(distribution=narrow)()}, **options)


def of_torch(own, site, *, loc, log_scale):  # with noise that fills tensors in place
    laplace = dist.Laplace(loc, log_scale.exp(), validate_args=False)
    return laplace.to_event(len(site.shape))


class Branching(MeanFieldNormal):
    def rsample(self, sample_shape=()):
        draw = super().rsample(sample_shape)
        return draw if bool((draw < 100).all()) else -draw


def branching(own, site, *, loc, log_scale):
    return Branching(loc, log_scale.exp(), len(site.shape), validate_args=False)


def of_weights(distribution):
    return lambda model, **options: ps.StructuredGuide(
        model,
        {"*.weight": family(distribution=distribution)(), "*": MeanField()},
        local_reparam=False,
        **options,
    )


GUIDES = {
    of_weights(of_torch): "`torch.func.vmap`.\nExpected: noise of `torch.randn` or `torch.rand`",
    of_weights(branching): "`torch.func.vmap`.\nExpected: no error\nGot: ",
    overconfident: "the mean loss of `StructuredELBO` equals the mean loss of `Trace_ELBO`",
    Missing: "a state dict restores the posterior in a new guide: tensors that differ",
    Unused: "the ELBO has a finite gradient for `unused`",
    MovesTheSeed: "making a guide leaves the random state as it is",
    coupled("draw"): "`draw` has the covariance of the values in a call of the guide",
    coupled("mean"): "`median` of 'net.weight' is that of its draws",
    coupled("marginals"): "`quantiles` of 'net.weight' are those of its draws",
    fault(KIND, median=a_third_too_high): "`median` of 'net.weight' is that of its draws",
    fault(KIND, quantiles=of_other_levels): "`quantiles` of 'net.weight' are those of its draws",
    fault(KIND, draw=two_draws): "`draw` has the covariance of the values in a call of the guide",
    fault(KIND, to_net=of_the_medians): "`to_net(draw)` has its values of all sites",
    fault(KIND, sampled=lambda guide, draw: KIND.sampled(guide)): "`sampled` has its values",
    fault(KIND, __deepcopy__=lambda guide, memo: type(guide)(guide.model)): "a deep copy has the",
}


# The last rule of a check, as the rule of noise that fills tensors is.
LAST = "`torch.func.vmap`.\nExpected: no error\nGot: "


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        pytest.param(kind, rule, marks=pytest.mark.slow if rule == LAST else ())
        for kind, rule in GUIDES.items()
    ],
)
def test_a_wrong_guide_fails_by_the_rule(kind, rule):
    check_fails(kind, rule)


def test_options_without_an_attribute_fail_by_the_rule(monkeypatch):
    right = ps.StructuredGuide.options
    without = lambda guide: {n: v for n, v in right(guide).items() if n != "init_scale"}  # noqa: E731
    monkeypatch.setattr(ps.StructuredGuide, "options", without)
    check_fails(KIND, "`options` and a file restore the guide: `init_scale`")


def check_fails(kind, rule):
    model = ps.Regressor(ps.bayesianize(torch.nn.Linear(3, 2), prior=1.0), 6, noise_scale=0.5)
    data = torch.randn(6, 3), torch.randn(6, 2)
    with pytest.raises(AssertionError, match=re.escape(rule)):
        check_guide(lambda model: kind(model, init_scale=0.3), model, *data)
