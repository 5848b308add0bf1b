"""Making a guide: the global random state, and the largest tensor."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pyro_structvi as ps
from pyro_structvi.weights.torch_distributions import median
from tests.guide_cases import GUIDES, POINTS
from tests.models import make_regressor


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that an operation returns."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.size = max(self.size, result.untyped_storage().nbytes() // result.element_size())
        return result


def hierarchical_net(prior):
    net = torch.nn.Linear(30, 1)
    scales = {"weight": ps.HierarchicalScale(prior), "bias": 1.0}
    return ps.Regressor(ps.bayesianize(net, prior=scales), 12, dist.Gamma(2.0, 1.0))


MODELS = {
    "regressor": make_regressor,
    "scales": lambda: hierarchical_net(dist.HalfCauchy(1.0)),
    "scales without a closed form": lambda: hierarchical_net(dist.Gamma(2.0, torch.ones(1, 30))),
}


@pytest.mark.parametrize(
    ("guide", "model"),
    [*((guide, "regressor") for guide in GUIDES | POINTS), *(("mean field", m) for m in MODELS)],
)
def test_the_global_random_state_stays(guide, model):
    size, model = 3 if model == "regressor" else 30, MODELS[model]()
    before = torch.get_rng_state()
    guide = (GUIDES | POINTS)[guide](model)
    assert torch.equal(torch.get_rng_state(), before)
    guide.initialize(torch.zeros(12, size), torch.zeros(12, 1))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_start_follows_the_seed_and_differs_from_what_is_drawn_next():
    model, starts = make_regressor(), []
    for seed in (1, 1, 2):
        pyro.set_rng_seed(seed)
        guide = ps.AutoLowRankLRT(model, diagonal="full")
        factors = guide["net.0.weight"].factors.detach()
        starts.append(factors / factors.norm())
        following = torch.randn_like(factors)
        assert not torch.allclose(starts[-1], following / following.norm())
    assert torch.equal(starts[0], starts[1])
    assert not torch.allclose(starts[0], starts[2])


@pytest.mark.parametrize("prior", [1.0, ps.HierarchicalScale(dist.HalfCauchy(1.0))], ids=str)
def test_nothing_larger_than_a_weight_is_formed(prior):
    net = torch.nn.Linear(300, 200)
    model = ps.Regressor(ps.bayesianize(net, prior=prior), 12, dist.HalfCauchy(1.0))
    with LargestTensor() as largest:
        ps.MeanFieldGuide(model)
    assert largest.size == 300 * 200


@pytest.mark.parametrize(
    ("make_prior", "expected"),
    [
        (lambda: dist.HalfCauchy(torch.tensor([1.0, 3.0])), [1.0, 3.0]),
        (lambda: dist.LogNormal(torch.zeros(2), 1.0), [1.0, 1.0]),
        (lambda: dist.Normal(torch.tensor([1.0, -1.0]), 1.0).to_event(1), [1.0, -1.0]),
        (lambda: dist.Exponential(torch.tensor([2.0])).expand([2]), [0.5 * math.log(2)] * 2),
        (lambda: dist.Uniform(torch.zeros(2), 3.0), [1.5, 1.5]),
    ],
    ids=["half-Cauchy", "log-normal", "normal", "exponential", "uniform"],
)
def test_medians_in_closed_form(make_prior, expected):
    torch.testing.assert_close(median(make_prior()), torch.tensor(expected))


def test_medians_without_a_closed_form_are_those_of_draws():
    """The median of 99 draws of a Gamma(2, 1), 1.678; its deviation is about 0.16."""
    value = median(dist.Gamma(torch.full((2, 3), 2.0), 1.0).to_event(2))
    assert value.shape == (2, 3)
    assert (value - 1.678).abs().max() < 5 * 0.16
