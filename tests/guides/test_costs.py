"""Costs of guides: multiplications of a step and of predictions beside those of the net itself."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import pyro_structvi as ps
from pyro_structvi.testing import guides_for, points_for
from tests.recorded_sizes import RecordsSizes

SIZES, BATCH = (100, 100, 100, 10), 32
GUIDES = {**guides_for("benchmarks"), **points_for("benchmarks")}
# Multiplications of a step, of ten draws and of one pass, in units of the net's own. A matrix product
# too many for each unit of a layer is a factor of 100.
BOUNDS = {"eigenbasis": (15, 13, 16), "mixture of 5, k-tied": (8, 8, 20)}
BOUNDS |= dict.fromkeys(("inducing 64", "inducing 64, drawn"), (40, 30, 40))
BOUND = 8, 8, 12
MOST_ELEMENTS = 10**7
OF_SMALL_NETS = ("full covariance", "rowwise")  # matrices of a layer's inputs or of all its weights


def make_net():
    torch.manual_seed(0)
    layers = [nn.Linear(*sizes) for sizes in pairwise(SIZES)]
    net = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))
    return net[:-1], torch.randn(BATCH, SIZES[0]), torch.randint(SIZES[-1], (BATCH,))


class CountsMultiplications(TorchDispatchMode):
    """Counts the multiplications of matrix products and convolutions."""

    count = 0
    left = dict.fromkeys(("mm", "bmm"), 0) | dict.fromkeys(("addmm", "baddbmm"), 1)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        size = result.numel() if isinstance(result, torch.Tensor) else 0
        assert size < MOST_ELEMENTS, "a step has a dense covariance of a layer"
        place = self.left.get(func.overloadpacket.__name__)
        if place is not None:
            self.count += result.numel() * args[place].shape[-1]
        elif func is torch.ops.aten.convolution.default:
            self.count += result.numel() * args[1][0].numel()
        return result


def multiplications(compute):
    with CountsMultiplications() as counter:
        compute()
    return counter.count


RANKS = ("k-tied, k = 1", "low rank, K = 1", "low rank, K = 2")  # with another one beside them


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in RANKS else ())
        for name in GUIDES
        if name not in OF_SMALL_NETS
    ],
)
def test_multiplications(name):
    net, x, y = make_net()
    step = multiplications(lambda: F.cross_entropy(net(x), y).backward())
    forward = multiplications(lambda: net(x))
    model = ps.Classifier(ps.bayesianize(net, prior=ps.FanIn()), num_data=100)
    guide, elbo = GUIDES[name](model), ps.StructuredELBO()
    guide.initialize(x, y)
    elbo.differentiable_loss(model, guide, x, y)  # sites are sampled as for the first time
    found = (
        multiplications(lambda: elbo.differentiable_loss(model, guide, x, y).backward()) / step,
        multiplications(lambda: ps.predict(model, guide, x, num_samples=10)) / (10 * forward),
        multiplications(lambda: ps.predict_moments(model, guide, x)) / forward,
    )
    bounds = BOUNDS.get(name, BOUND)
    assert all(own < bound for own, bound in zip(found, bounds, strict=True)), found


def test_moments_of_dropout_apply_each_channel_once():
    """One pass for the means, and one for the variances."""
    net = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 5))
    x, y = torch.randn(4, 8, 6, 6), torch.randint(5, (4,))
    model = ps.Classifier(ps.bayesianize(net, prior=ps.FanIn()), num_data=4)
    guide = ps.MCDropoutGuide(model)
    guide.initialize(x, y)
    found = multiplications(lambda: ps.predict_moments(model, guide, x))
    assert found < 5 * multiplications(lambda: net(x))


def test_draws_of_independent_sites_share_their_factors(monkeypatch):
    """Under vmap a product of factors that are not mapped and noise repeats the factors."""
    net, x, y = make_net()
    model = ps.Classifier(ps.bayesianize(net, prior=ps.FanIn()), num_data=100)
    monkeypatch.setattr(torch.func, "vmap", None)
    for make in (ps.RowwiseGuide, lambda m: ps.MixtureGuide(m, ps.RowwiseGuide, 2)):
        guide = make(model)
        guide.initialize(x, y)
        with RecordsSizes() as recorded, torch.no_grad():
            draws = guide.joint_posterior().draw_many(range(20))
        assert draws["net.0.weight"].shape == (20, 100, 100)
        assert max(recorded.sizes) < 2 * 100 * 101 * 101


def test_moments_of_a_wide_layer_form_no_covariance_of_its_outputs():
    net = nn.Sequential(nn.Linear(2, 500), nn.ReLU(), nn.Linear(500, 1))
    model = ps.Regressor(ps.bayesianize(net, prior=1.0), num_data=10, noise_scale=0.1)
    guide, x = ps.LowRankGuide(model, join_bias=False), torch.randn(3, 2)
    guide.initialize(x, torch.randn(3, 1))
    with RecordsSizes() as recorded:
        ps.predict_moments(model, guide, x)
    assert max(recorded.sizes) < 500 * 500
