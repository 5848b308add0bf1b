"""Recurrent layers by moments: torch's own values without variance, and the same steps by hand."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pyro_structvi as ps
from pyro_structvi.moments.random_tensor import RandomTensor, Settings
from pyro_structvi.posterior.one_pass import MomentsWarning

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
@pytest.mark.parametrize("gives_state", [False, True])
def test_without_variance_outputs_and_states_are_torchs(name, gives_state):
    """All that a layer returns, of inputs in a batch and of one sequence."""
    layer = make(name)
    ways = 1 + layer.bidirectional
    shape = (layer.num_layers * ways, 2)
    hx = torch.randn(*shape, layer.proj_size or 4)
    hx = (hx, torch.randn(*shape, 4)) if isinstance(layer, nn.LSTM) else hx
    states = (hx,) if gives_state else ()
    x = torch.randn(2, STEPS, 3) if layer.batch_first else torch.randn(STEPS, 2, 3)
    torch.testing.assert_close(locs(layer(known(x), *states)), locs(layer(x, *states)))
    one = x.select(0 if layer.batch_first else 1, 0)
    torch.testing.assert_close(locs(layer(known(one))), locs(layer(one)))


def locs(values):
    if isinstance(values, tuple):
        return tuple(locs(value) for value in values)
    return values.loc if isinstance(values, RandomTensor) else values


@pytest.mark.parametrize("cell", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("bias", [False, True])
def test_cells_without_variance_are_torchs(cell, bias):
    layer, x = cell(3, 4, bias=bias), torch.randn(2, 3)
    torch.testing.assert_close(locs(layer(known(x))), locs(layer(x)))


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


@pytest.mark.parametrize("join_bias", [False, True])
@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
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


def test_one_step_is_the_function_of_a_normal():
    """A plain layer from a state of zero is exact: by adaptive quadrature."""
    from scipy.integrate import quad

    model = ps.Regressor(ps.bayesianize(Last("RNN"), prior=1.0), 2, 0.1)
    guide = ps.MeanFieldGuide(model, init_scale=0.3)
    x = torch.randn(2, 1, 3)
    found = ps.predict_moments(model, guide, x)
    sites = {site.name: q for site, q in guide.joint_posterior().conditionals("marginals")}
    name = "net.layer.{}_l0"
    w, b, own = (sites[name.format(part)] for part in ("weight_ih", "bias_ih", "bias_hh"))
    m = F.linear(x[:, 0], w.mean, b.mean + own.mean)
    s = F.linear(x[:, 0] ** 2, w.variance, b.variance + own.variance).sqrt()
    for index in np.ndindex(*m.shape):
        at = [part[index].item() for part in (m, s)]
        first, second = (_expectation(quad, power, *at) for power in (1, 2))
        assert found.mean[index].item() == pytest.approx(first, abs=1e-7)
        variance = second - first**2
        assert found.function_variance[index].item() == pytest.approx(variance, abs=1e-6)


def _expectation(quad, power, m, s):
    def weighed(z):
        return np.tanh(m + s * z) ** power * np.exp(-0.5 * z**2) / (2 * np.pi) ** 0.5

    return quad(weighed, -12, 12, epsabs=1e-12)[0]


def test_an_interpolation_of_independent_normals_is_exact():
    """A polynomial of degree one in each: by five nodes for each of three variables."""
    nodes, weights = (torch.tensor(part) for part in np.polynomial.hermite_e.hermegauss(5))
    weights = weights / weights.sum()
    m, v = torch.tensor([0.3, -1.2, 0.7]), torch.tensor([0.5, 1.5, 0.2])
    parts = [RandomTensor(m[k : k + 1], v[k : k + 1], Settings()) for k in range(3)]
    grid = [
        m[k] + v[k].sqrt() * part
        for k, part in enumerate(torch.meshgrid(*[nodes] * 3, indexing="ij"))
    ]
    joint = torch.einsum("i,j,k->ijk", weights, weights, weights)
    for known_ones in [(), (0,), (1,), (2,), (0, 1), (1, 2), (0, 2)]:
        at = [m[k] if k in known_ones else grid[k] for k in range(3)]
        values = torch.lerp(*(part.expand(5, 5, 5) for part in at))
        mean = (joint * values).sum()
        variance = (joint * (values - mean) ** 2).sum()
        found = torch.lerp(*(m[k : k + 1] if k in known_ones else parts[k] for k in range(3)))
        torch.testing.assert_close(found.loc, mean[None], rtol=1e-12, atol=0)
        torch.testing.assert_close(found.variance, variance[None], rtol=1e-12, atol=0)


def test_dropout_between_layers_is_that_of_a_dense_net():
    """In training, between two layers and not behind the last."""
    layer = nn.RNN(3, 4, num_layers=2, dropout=0.5)
    x = torch.randn(STEPS, 2, 3)
    output, _ = layer(known(x))
    first, second = nn.RNN(3, 4), nn.RNN(4, 4)
    for number, part in enumerate((first, second)):
        for name, value in part.named_parameters():
            own = getattr(layer, name.replace("l0", f"l{number}"))
            value.data = own.data
    expected, _ = second(F.dropout(first(known(x))[0], 0.5, True))
    torch.testing.assert_close(output.loc, expected.loc)
    torch.testing.assert_close(output.variance, expected.variance)
    assert expected.variance.min() > 0


def test_a_packed_sequence_is_refused():
    class Packed(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.layer = getattr(nn, kind)(3, 4, batch_first=True)

        def forward(self, x):
            lengths = torch.full((len(x),), x.shape[1])
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return self.layer(packed)[1][0]

    x = torch.randn(2, STEPS, 3)
    for kind in ("LSTM", "GRU"):
        model = ps.Regressor(ps.bayesianize(Packed(kind), prior=1.0), 2, 0.1)
        guide = ps.MeanFieldGuide(model)
        with pytest.raises(
            NotImplementedError, match=r"A packed sequence has no moments.*net\.layer"
        ):
            ps.predict_moments(model, guide, x)


@pytest.mark.filterwarnings("default")
def test_a_recurrent_layer_is_told_of_as_used_at_each_step():
    model = ps.Regressor(ps.bayesianize(Last("GRU"), prior=1.0), 2, 0.1)
    with pytest.warns(MomentsWarning, match=r"net\.layer\.weight_hh_l0.*as recurrent layers do"):
        ps.predict_moments(model, ps.MeanFieldGuide(model), torch.randn(2, STEPS, 3))
