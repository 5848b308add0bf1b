"""Rank-1 layers: torch's layers with the weight W0 * (r s')."""

import copy
import pickle

import pytest
import torch
from pyro import poutine
from torch import nn

import pyro_structvi as ps
from pyro_structvi.nn import RankOneConv1d, RankOneConv2d, RankOneConv3d, RankOneLinear
from pyro_structvi.sites.finding import find_declared_sites
from tests.lazy_weights import run_lazily

LAYERS = [
    (lambda: nn.Linear(4, 3), (4,)),
    (lambda: nn.Linear(4, 3, bias=False), (2, 4)),
    (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (4, 5)),
    (lambda: nn.Conv2d(4, 3, (2, 3), padding="same", padding_mode="circular"), (4, 3, 3)),
    (lambda: nn.Conv3d(4, 3, 2, dilation=(1, 2, 1), bias=False), (4, 2, 3, 2)),
]
RANK_ONE = {
    nn.Linear: RankOneLinear,
    nn.Conv1d: RankOneConv1d,
    nn.Conv2d: RankOneConv2d,
    nn.Conv3d: RankOneConv3d,
}


def rank_one(layer, **options):
    return RANK_ONE[type(layer)](layer, **options)


def with_scales(layer, input_scale, output_scale):
    """Return torch's layer with the scaled weight, element by element."""
    scaled = copy.deepcopy(layer)
    groups = getattr(layer, "groups", 1)
    out, size = layer.weight.shape[:2]
    for o in range(out):
        first = (o // (out // groups)) * size
        for c in range(size):
            scaled.weight.data[o, c] *= output_scale[o] * input_scale[first + c]
    return scaled


@pytest.mark.parametrize(
    ("make", "shape"), [*((make, (3, *shape)) for make, shape in LAYERS), (LAYERS[3][0], (4, 3, 3))]
)
def test_the_weight_is_scaled_by_an_outer_product(make, shape):
    layer, x = make(), torch.randn(shape)
    before = copy.deepcopy(layer.state_dict())
    ours = rank_one(layer, prior_scale=0.5)
    trace = poutine.trace(ours).get_trace(x)
    r, s = (trace.nodes[f"{name}_scale"]["value"] for name in ("output", "input"))
    expected = with_scales(layer, s, r)(x)
    torch.testing.assert_close(trace.nodes["_RETURN"]["value"], expected)
    ours.weight.data.zero_()
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())


@pytest.mark.parametrize(("make", "shape"), LAYERS[1:4])
def test_scales_for_each_example_are_a_loop(make, shape):
    layer, x = rank_one(make()), torch.randn(3, *shape)
    scales = {"input_scale": torch.randn(3, 4), "output_scale": torch.randn(3, len(layer.weight))}
    loop = [
        poutine.condition(layer, {name: value[n] for name, value in scales.items()})(x[n : n + 1])
        for n in range(3)
    ]
    torch.testing.assert_close(poutine.condition(layer, scales)(x), torch.cat(loop))


def test_one_draw_serves_the_batch_elsewhere():
    layer, x = RankOneLinear(nn.Linear(3, 6)), torch.randn(1, 3).expand(4, 3)
    guide = ps.MeanFieldGuide(layer, init_scale=1.0)
    trace = poutine.trace(guide).get_trace(x)
    outputs = poutine.replay(layer, trace)(x)
    assert torch.equal(outputs[:-1], outputs[1:])
    lazy = run_lazily(layer, guide, x)
    assert not torch.isclose(lazy[:-1], lazy[1:]).any()


def test_priors_and_starts():
    layer = RankOneLinear(nn.Linear(100, 60), prior_scale=0.3)
    for name, found in find_declared_sites(layer).items():
        assert torch.equal(found.prior.mean, torch.ones(found.prior.shape()))
        assert torch.equal(found.prior.stddev, torch.full(found.prior.shape(), 0.3))
        assert torch.equal(ps.MeanFieldGuide(layer)[name].loc, torch.ones(found.prior.shape()))
    guide = ps.MeanFieldGuide(RankOneLinear(nn.Linear(100, 60), start="signs"))
    for name in ("input_scale", "output_scale"):
        assert set(guide[name].loc.tolist()) == {-1.0, 1.0}


def make_regressor():
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    layers = [part if i == 1 else RankOneLinear(part) for i, part in enumerate(net)]
    return ps.Regressor(ps.bayesianize(nn.Sequential(*layers)), num_data=12, noise_scale=0.3)


def test_copies_and_state_dicts():
    source, target, x = make_regressor(), make_regressor(), torch.randn(4, 3)
    values = ps.MeanFieldGuide(source).draw()
    expected = poutine.condition(source.net, values)(x)
    target.load_state_dict(source.state_dict())
    for same in (target, pickle.loads(pickle.dumps(source))):
        assert isinstance(same.net[0], RankOneLinear)
        torch.testing.assert_close(poutine.condition(same.net, values)(x), expected)


def test_other_layers_and_inputs_are_refused():
    with pytest.raises(TypeError, match=r"must be a torch.nn.Conv2d, but got a torch.nn.Conv1d"):
        RankOneConv2d(nn.Conv1d(1, 1, 1))
    with pytest.raises(ValueError, match="3 channels"):
        RankOneLinear(nn.Linear(3, 2))(torch.zeros(4, 2))
