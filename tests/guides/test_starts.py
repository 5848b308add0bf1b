"""Making a guide: the global random state, and the largest tensor."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_structvi as ps
from pyro_structvi.weights.torch_distributions import median
from tests.models import make_regressor
from tests.recorded_sizes import RecordsSizes


def hierarchical_net(prior):
    net = torch.nn.Linear(30, 1)
    scales = {"weight": ps.HierarchicalScale(prior), "bias": 1.0}
    return ps.Regressor(ps.bayesianize(net, prior=scales), 12, dist.Gamma(2.0, 1.0))


MODELS = {
    "regressor": make_regressor,
    "scales": lambda: hierarchical_net(dist.HalfCauchy(1.0)),
    "scales without a closed form": lambda: hierarchical_net(dist.Gamma(2.0, torch.ones(1, 30))),
}


@pytest.mark.parametrize("model", MODELS)
def test_the_global_random_state_stays(model):
    """The contract of guides checks it for every structure."""
    size, model = 3 if model == "regressor" else 30, MODELS[model]()
    before = torch.get_rng_state()
    guide = ps.MeanFieldGuide(model)
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
    with RecordsSizes() as recorded:
        ps.MeanFieldGuide(model)
    assert max(recorded.stored) == 300 * 200


def test_medians_in_closed_form_or_of_draws():
    """The median of a Gamma(2, 1) is 1.678, and that of 99 draws has the deviation 0.16."""
    for prior, expected in (
        (dist.HalfCauchy(torch.tensor([1.0, 3.0])), [1.0, 3.0]),
        (dist.LogNormal(torch.zeros(2), 1.0), [1.0, 1.0]),
        (dist.Normal(torch.tensor([1.0, -1.0]), 1.0).to_event(1), [1.0, -1.0]),
        (dist.Exponential(torch.tensor([2.0])).expand([2]), [0.5 * math.log(2)] * 2),
        (dist.Uniform(torch.zeros(2), 3.0), [1.5, 1.5]),
    ):
        torch.testing.assert_close(median(prior), torch.tensor(expected))
    value = median(dist.Gamma(torch.full((2, 3), 2.0), 1.0).to_event(2))
    assert value.shape == (2, 3)
    assert (value - 1.678).abs().max() < 5 * 0.16
