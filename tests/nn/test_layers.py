"""Rank-1 layers, and those and Walsh-Hadamard layers by the `layers` of bayesianize."""

import copy
import pickle

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import nn
from torch.nn.utils import prune

import pyro_structvi as ps
from pyro_structvi.nn import RankOneConv2d, RankOneLinear, WalshHadamardConv2d
from tests.lazy_weights import run_lazily
from tests.nn.test_conversion import TiedNet, shared_net, sites_of

KINDS = [ps.WalshHadamard(), ps.RankOne()]


def make_net():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding="same", padding_mode="reflect"),
        nn.Conv2d(4, 4, 3, stride=2, groups=2),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def scale_of(module, name):
    return sites_of(module)[name].stddev.unique().item()


# ---- where layers are placed ---------------------------------------------------------------------


def test_the_first_pattern_that_fits_wins():
    net = make_net()
    kinds = [type(module) for module in net]
    bayes_net = ps.bayesianize(net, layers={"3": ps.RankOne(), "*": ps.WalshHadamard()})
    assert isinstance(bayes_net[0], WalshHadamardConv2d)
    assert isinstance(bayes_net[1], nn.Conv2d)  # it has groups
    assert isinstance(bayes_net[3], RankOneLinear)
    assert set(sites_of(bayes_net)) == {
        *("0.coefficients", "0.bias", "1.weight", "1.bias"),
        *("3.input_scale", "3.output_scale"),
    }
    assert [type(module) for module in net] == kinds
    later = ps.bayesianize(net, layers={"*": ps.WalshHadamard(), "1": ps.RankOne()})
    assert isinstance(later[1], RankOneConv2d)


@pytest.mark.parametrize("name", ["second", "first.*"])
def test_a_layer_in_two_places_stays_one(name):
    net, x = shared_net(), torch.randn(5, 3)
    bayes_net = ps.bayesianize(net, layers={name: ps.RankOne()})
    assert bayes_net.second is bayes_net.first[0]
    assert len(sites_of(bayes_net)) == 2
    ones = {name: torch.ones(3) for name in sites_of(bayes_net)}
    torch.testing.assert_close(poutine.condition(bayes_net, ones)(x), net(x))


@pytest.mark.parametrize("layer", KINDS)
def test_the_convolution_keeps_its_geometry(layer):
    net, x = make_net()[:1], torch.randn(3, 2, 5, 6)
    bayes_net = ps.bayesianize(net, layers={"0": layer})
    values = ps.MeanFieldGuide(bayes_net).median()
    oracle = copy.deepcopy(net)
    if layer == ps.WalshHadamard():
        oracle[0].weight.data = bayes_net[0].weight(values["0.coefficients"]).detach()
    torch.testing.assert_close(poutine.condition(bayes_net, values)(x), oracle(x))


@pytest.mark.parametrize("layer", KINDS)
def test_an_encoder_calls_its_layers_in_evaluation_too(layer):
    encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    net, x = nn.TransformerEncoder(encoder, 1), torch.randn(3, 5, 4)
    bayes_net = ps.bayesianize(net, normalization=True, layers={"*.linear?": layer})
    values = {name: prior.sample() for name, prior in sites_of(bayes_net).items()}
    mask = torch.arange(5) >= torch.tensor([[5], [3], [4]])
    with torch.no_grad():
        trained, evaluated = (
            poutine.condition(bayes_net.train(mode), values)(x, src_key_padding_mask=mask)[~mask]
            for mode in (True, False)
        )
    torch.testing.assert_close(evaluated, trained)


# ---- priors and starts ---------------------------------------------------------------------------


def test_priors_are_those_of_the_names():
    prior = {"3.weight": ps.FanIn(2.0), "*.weight": 0.5, "0.bias": dist.Laplace(0.0, 2.0), "*": 3.0}
    bayes_net = ps.bayesianize(make_net(), prior, layers={"0": KINDS[0], "3": KINDS[0]})
    assert scale_of(bayes_net, "0.coefficients") == pytest.approx(0.5 * 32**0.5)  # in = 18
    assert scale_of(bayes_net, "3.coefficients") == pytest.approx(2.0 / 4 * 16**0.5)
    assert scale_of(bayes_net, "1.weight") == 0.5
    assert scale_of(bayes_net, "3.bias") == 3.0
    assert isinstance(sites_of(bayes_net)["0.bias"].base_dist, dist.Laplace)


def test_means_start_at_the_mean_square_and_the_bias_of_the_net():
    net = nn.Linear(300, 4000)
    net.weight.data.mul_(7.0)
    bayes_net = ps.bayesianize(net, layers={"": ps.WalshHadamard()})
    median = ps.MeanFieldGuide(bayes_net).median()
    weight = bayes_net.weight(median["coefficients"])
    torch.testing.assert_close(weight.square().mean(), net.weight.square().mean(), rtol=0.1, atol=0)
    assert torch.equal(median["bias"], net.bias)


def test_rank_one_takes_over_the_weight():
    net, x = make_net(), torch.randn(3, 2, 5, 5)
    bayes_net = ps.bayesianize(net, layers={"*": ps.RankOne(prior_scale=0.3)})
    for name in ("0.input_scale", "3.output_scale"):
        assert scale_of(bayes_net, name) == 0.3
        assert set(ps.MeanFieldGuide(bayes_net)[name].loc.tolist()) == {1.0}
        assert set(sites_of(bayes_net)[name].mean.tolist()) == {1.0}
    ones = {name: torch.ones(prior.shape()) for name, prior in sites_of(bayes_net).items()}
    torch.testing.assert_close(poutine.condition(bayes_net, ones)(x), net(x))
    signs = ps.bayesianize(net, layers={"*": ps.RankOne(start="signs")})
    for name in ("3.input_scale", "1.output_scale"):
        assert set(ps.MeanFieldGuide(signs)[name].loc.tolist()) == {-1.0, 1.0}


# ---- what is a point estimate --------------------------------------------------------------------


@pytest.mark.parametrize("layer", KINDS)
def test_the_layers_own_parameters_are_not_warned_of(layer):
    """Warnings are errors here."""
    by_hand = ps.bayesianize(nn.Linear(3, 2), layers={"": layer})
    own = [name for name, _ in by_hand.named_parameters()]
    assert sorted(own) in (["bias", "weight"], ["column_scale", "row_scale"])
    again = ps.bayesianize(nn.Sequential(by_hand, nn.Linear(2, 1)))
    assert [name for name, _ in again.named_parameters()] == [f"0.{name}" for name in own]
    assert {"1.weight", "1.bias"} < set(sites_of(again))
    net = make_net()
    net[3].requires_grad_(False)
    is_rank_one = layer == KINDS[1]
    frozen = ps.bayesianize(net, layers={"3" if is_rank_one else "*": layer})
    assert isinstance(frozen[3], RankOneLinear if is_rank_one else nn.Linear)
    assert torch.equal(frozen[3].weight, net[3].weight)
    assert not list(frozen[3].parameters()) or not frozen[3].weight.requires_grad


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "error", "message"),
    [
        (
            {"1": KINDS[0]},
            ValueError,
            r"WalshHadamard\(\) needs an nn.Linear or a convolution with",
        ),
        ({"2": KINDS[1]}, ValueError, r"RankOne.* needs .* matches only {'2': 'Flatten'}"),
        ({"4": KINDS[0]}, ValueError, r"'4' of `layers` matches none of the modules \['', '0'"),
        ({"0": "rank one"}, TypeError, r"`layers\['0'\]` must be a RankOne or a WalshHadamard"),
        ({"0": ps.WalshHadamard}, TypeError, r"`layers\['0'\]` must .* an instance of it, `WalshH"),
    ],
)
def test_layers_that_do_not_fit(layers, error, message):
    with pytest.raises(error, match=message):
        ps.bayesianize(make_net(), layers=layers)


@pytest.mark.parametrize("layer", KINDS)
def test_a_layer_that_does_more_than_its_class_is_not_replaced(layer):
    pruned, hooked = nn.Linear(3, 2), nn.Linear(3, 2)
    prune.l1_unstructured(pruned, "weight", 3)
    hooked.register_forward_hook(lambda module, x, y: 2 * y)
    for special in (pruned, hooked):
        with pytest.raises(ValueError, match="hooks or reparametrized weights, but the pattern ''"):
            ps.bayesianize(special, layers={"": layer})
    with pytest.raises(ValueError, match="'decoder' shares a parameter with another one"):
        ps.bayesianize(TiedNet(), layers={"*": layer})


def test_a_prior_that_is_not_one_normal():
    net = nn.Sequential(nn.Linear(3, 2))
    for prior in (dist.Laplace(0.0, 1.0), dist.Normal(1.0, 1.0), torch.rand(2, 3) + 0.1):
        with pytest.raises(ValueError, match=r"for '0\.weight' must be one normal around zero"):
            ps.bayesianize(net, {"*.bias": 1.0, "*": prior}, layers={"0": KINDS[0]})


# ---- rank-1 layers -------------------------------------------------------------------------------


LAYERS = [
    (lambda: nn.Linear(4, 3), (4,)),
    (lambda: nn.Linear(4, 3, bias=False), (2, 4)),
    (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (4, 5)),
    (lambda: nn.Conv2d(4, 3, (2, 3), padding="same", padding_mode="circular"), (4, 3, 3)),
    (lambda: nn.Conv3d(4, 3, 2, dilation=(1, 2, 1), bias=False), (4, 2, 3, 2)),
]


def rank_one(layer, **options):
    return getattr(ps.nn, f"RankOne{type(layer).__name__}")(layer, **options)


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


@pytest.mark.parametrize(("make", "shape"), LAYERS)
def test_the_weight_is_scaled_by_an_outer_product(make, shape):
    """For a batch, for one input, and for each example of a batch."""
    layer, batch = make(), torch.randn(3, *shape)
    before = copy.deepcopy(layer.state_dict())
    ours = rank_one(layer, prior_scale=0.5)
    for x in (batch, batch[0]):
        trace = poutine.trace(ours).get_trace(x)
        scales = (trace.nodes[f"{name}_scale"]["value"] for name in ("input", "output"))
        expected = with_scales(layer, *scales)(x)
        torch.testing.assert_close(trace.nodes["_RETURN"]["value"], expected)
    scales = {"input_scale": torch.randn(3, 4), "output_scale": torch.randn(3, len(layer.weight))}
    examples = zip(batch, *scales.values(), strict=True)
    expected = torch.stack([with_scales(layer, s, r)(x) for x, s, r in examples])
    torch.testing.assert_close(poutine.condition(ours, scales)(batch), expected)
    ours.weight.data.zero_()
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())


def test_one_draw_serves_the_batch_elsewhere():
    layer, x = RankOneLinear(nn.Linear(3, 6)), torch.randn(1, 3).expand(4, 3)
    guide = ps.MeanFieldGuide(layer, init_scale=1.0)
    trace = poutine.trace(guide).get_trace(x)
    outputs = poutine.replay(layer, trace)(x)
    assert torch.equal(outputs[:-1], outputs[1:])
    lazy = run_lazily(layer, guide, x)
    assert not torch.isclose(lazy[:-1], lazy[1:]).any()


def test_copies_and_state_dicts():
    make = lambda: ps.bayesianize(nn.Linear(3, 6), layers={"": ps.RankOne()})  # noqa: E731
    source, target, x = make(), make(), torch.randn(4, 3)
    values = ps.MeanFieldGuide(source).draw()
    expected = poutine.condition(source, values)(x)
    target.load_state_dict(source.state_dict())
    for same in (target, pickle.loads(pickle.dumps(source))):
        assert isinstance(same, RankOneLinear)
        torch.testing.assert_close(poutine.condition(same, values)(x), expected)


def test_other_layers_and_inputs_are_refused():
    with pytest.raises(TypeError, match=r"must be a torch.nn.Conv2d, but got a torch.nn.Conv1d"):
        RankOneConv2d(nn.Conv1d(1, 1, 1))
    with pytest.raises(ValueError, match="3 channels"):
        RankOneLinear(nn.Linear(3, 2))(torch.zeros(4, 2))
