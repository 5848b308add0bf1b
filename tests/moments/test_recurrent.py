"""Recurrent layers by moments: torch's own values without variance, and the same steps by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pyro_structvi as ps
from pyro_structvi.moments.random_tensor import RandomTensor, Settings
from pyro_structvi.posterior.one_pass import MomentsWarning
from tests.moments.signs import assert_exact, part_of, random_input

pytestmark = pytest.mark.filterwarnings(f"ignore::{MomentsWarning.__module__}.MomentsWarning")

STEPS = 4
LAYERS = {
    "RNN": {},
    "RNN, relu": {"nonlinearity": "relu"},
    "LSTM": {},
    "GRU": {},
    "LSTM, all options": {
        "num_layers": 2,
        "bidirectional": True,
        "proj_size": 2,
        "batch_first": True,
    },
    "GRU, all options": {"num_layers": 2, "bidirectional": True, "bias": False},
}


def make(name):
    kind = name.partition(",")[0]
    return getattr(nn, kind)(3, 4, **LAYERS[name])


def known(value):
    return RandomTensor(value, torch.zeros_like(value), Settings())


@pytest.mark.parametrize("name", LAYERS)
def test_without_variance_outputs_and_states_are_torchs(name):
    """All that a layer returns, of inputs in a batch and of one sequence."""
    layer = make(name)
    ways = 1 + layer.bidirectional
    shape = (layer.num_layers * ways, 2)
    hx = torch.randn(*shape, layer.proj_size or 4)
    hx = (hx, torch.randn(*shape, 4)) if isinstance(layer, nn.LSTM) else hx
    x = torch.randn(2, STEPS, 3) if layer.batch_first else torch.randn(STEPS, 2, 3)
    for states in ((), (hx,)):
        torch.testing.assert_close(locs(layer(known(x), *states)), locs(layer(x, *states)))
    one = x.select(0 if layer.batch_first else 1, 0)
    torch.testing.assert_close(locs(layer(known(one))), locs(layer(one)))
    cell = getattr(nn, f"{type(layer).__name__}Cell")(3, 4, bias="options" not in name)
    torch.testing.assert_close(locs(cell(known(one))), locs(cell(one)))


def locs(values):
    if isinstance(values, tuple):
        return tuple(locs(value) for value in values)
    return values.loc if isinstance(values, RandomTensor) else values


class ByHand(nn.Module):
    """A cell's equations as PyTorch's documentation states them, step by step."""

    def __init__(self, kind):
        super().__init__()
        self.kind, gates = kind, {"RNN": 1, "LSTM": 4, "GRU": 3}[kind]
        self.inner, self.own = nn.Linear(3, 4 * gates), nn.Linear(4, 4 * gates)

    def forward(self, x):
        h = c = torch.zeros(len(x), 4)
        for step in x.unbind(1):
            a, b = self.inner(step), self.own(h)
            if self.kind == "RNN":
                h = torch.tanh(a + b)
            elif self.kind == "LSTM":
                i, f, g, o = (a + b).split(4, -1)
                c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(o) * torch.tanh(c)
            else:
                (ar, az, an), (br, bz, bn) = a.split(4, -1), b.split(4, -1)
                n = torch.tanh(an + torch.sigmoid(ar + br) * bn)
                h = torch.lerp(n, h, torch.sigmoid(az + bz))
        return h


SITES = {
    "layer.weight_ih_l0": "inner.weight",
    "layer.weight_hh_l0": "own.weight",
    "layer.bias_ih_l0": "inner.bias",
    "layer.bias_hh_l0": "own.bias",
}


class Last(nn.Module):
    """A recurrent layer's last output."""

    def __init__(self, kind):
        super().__init__()
        self.layer = getattr(nn, kind)(3, 4, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0][:, -1]


@pytest.mark.parametrize(
    ("kind", "join_bias"), [("RNN", False), ("LSTM", True), ("GRU", False), ("GRU", True)]
)
def test_a_layer_has_the_moments_of_its_equations(kind, join_bias):
    """Also where a weight and its bias have a joint posterior."""
    x, guides, found = torch.randn(2, STEPS, 3), [], []
    for net in (Last(kind), ByHand(kind)):
        model = ps.Regressor(ps.bayesianize(net, prior=1.0), 2, 0.1)
        guides.append(ps.MatrixNormalGuide(model, join_bias=join_bias))
        guides[-1].initialize(x, torch.zeros(2, 4))
    for own, by_hand in SITES.items():
        parts = (guide[f"net.{name}"] for guide, name in zip(guides, (own, by_hand), strict=True))
        for value, other in zip(*(part.parameters() for part in parts), strict=True):
            value.data = other.data = 0.3 * torch.randn_like(value)
    for guide in guides:
        prediction = ps.predict_moments(guide.model, guide, x)
        found.append((prediction.mean, prediction.function_variance))
    assert found[0][1].min() > 1e-3
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)


def test_an_interpolation_of_independent_normals_is_exact():
    """A polynomial of degree one in each argument."""
    parts = [random_input(2) for _ in range(3)]
    for known_ones in [(), (0,), (1,), (2,), (0, 1), (1, 2), (0, 2)]:
        given = [part.loc if k in known_ones else part for k, part in enumerate(parts)]
        exact = [
            (part.loc, torch.zeros(2, 2)) if k in known_ones else part_of(part)
            for k, part in enumerate(parts)
        ]
        assert_exact(torch.lerp(*given), torch.lerp, *exact)


def test_dropout_between_layers_is_that_of_a_dense_net():
    """In training, between two layers and not after the last."""
    layer, x = nn.RNN(3, 4, num_layers=2, dropout=0.5), torch.randn(STEPS, 2, 3)
    parts = nn.RNN(3, 4), nn.RNN(4, 4)
    for number, part in enumerate(parts):
        own = {name: getattr(layer, f"{name[:-1]}{number}") for name, _ in part.named_parameters()}
        part.load_state_dict(own)
    expected, _ = parts[1](F.dropout(parts[0](known(x))[0], 0.5, True))
    output, _ = layer(known(x))
    torch.testing.assert_close(output.loc, expected.loc)
    torch.testing.assert_close(output.variance, expected.variance)
    assert expected.variance.min() > 0


class Packed(Last):
    def forward(self, x):
        lengths = torch.full((len(x),), x.shape[1])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return self.layer(packed)[1][0]


@pytest.mark.filterwarnings("default")
def test_uses_at_each_step_are_told_of_and_packed_sequences_refused():
    x = torch.randn(2, STEPS, 3)
    model = ps.Regressor(ps.bayesianize(Packed("LSTM"), prior=1.0), 2, 0.1)
    message = r"A packed sequence has no moments.*net\.layer"
    with pytest.raises(NotImplementedError, match=message):
        ps.predict_moments(model, ps.MeanFieldGuide(model), x)
    model = ps.Regressor(ps.bayesianize(Last("GRU"), prior=1.0), 2, 0.1)
    with pytest.warns(MomentsWarning, match=r"net\.layer\.weight_hh_l0.*as recurrent layers do"):
        ps.predict_moments(model, ps.MeanFieldGuide(model), x)
