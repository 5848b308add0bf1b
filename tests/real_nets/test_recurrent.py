"""Recurrent layers use one draw of a weight for all steps and the whole batch."""

import pyro.poutine as poutine
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils.rnn import pack_padded_sequence

import pyro_structvi as ps
from pyro_structvi.sites.finding import UnusedSiteWarning
from pyro_structvi.weights.lazy import DelayDraws
from tests.guide_cases import GUIDES, POINTS

SIZES = {"input_size": 2, "hidden_size": 3, "num_layers": 2, "bidirectional": True}


class Loop(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        states = [None]
        for step in x.unbind(1):
            states.append(self.cell(step, states[-1]))
        last = states[-1]
        return last if isinstance(last, tuple) else (last,)


class DenseCell(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs, self.state = nn.Linear(2, 3), nn.Linear(3, 3)

    def forward(self, x, state=None):
        return self.inputs(x) if state is None else torch.tanh(self.inputs(x) + self.state(state))


LAYERS = {
    "RNN": lambda: nn.RNN(**SIZES, batch_first=True),
    "GRU": lambda: nn.GRU(**SIZES, batch_first=True),
    "LSTM": lambda: nn.LSTM(**SIZES, batch_first=True),
    "LSTM, projected": lambda: nn.LSTM(**SIZES, batch_first=True, proj_size=2),
    "LSTM, time first": lambda: nn.LSTM(**SIZES),
    "RNN cell": lambda: Loop(nn.RNNCell(2, 3)),
    "GRU cell": lambda: Loop(nn.GRUCell(2, 3)),
    "LSTM cell": lambda: Loop(nn.LSTMCell(2, 3)),
    "dense cell": lambda: Loop(DenseCell()),
}


def replay(model, guide, x):
    """Run the model on what the guide hands it in training; return its outputs and the values."""
    guide.initialize(x)
    with DelayDraws():  # as StructuredELBO does
        trace = poutine.trace(guide).get_trace(x)
    outputs = poutine.replay(model, trace)(x)
    values = {name: trace.nodes[name]["value"] for name in guide.site_names}
    return outputs, {
        name: getattr(value, "draw", lambda v=value: v)() for name, value in values.items()
    }


def assert_is_one_function(layer, make_guide, x):
    model = ps.bayesianize(layer)
    with torch.no_grad():
        outputs, values = replay(model, make_guide(model), x)
        expected = functional_call(layer, values, (x,))
    for ours, torchs in zip(outputs, expected, strict=True):
        torch.testing.assert_close(ours, torchs)


PAIRS = [
    *((layer, "low rank") for layer in LAYERS),
    *(
        (layer, guide)
        for layer in ("LSTM", "dense cell")
        for guide in ("matrix normal, joined", "inducing weights", "dropout")
    ),
]


@pytest.mark.parametrize(("layer_name", "guide_name"), PAIRS)
def test_outputs_in_training_are_those_of_one_draw(layer_name, guide_name):
    make_guide = (GUIDES | POINTS)[guide_name]
    assert_is_one_function(LAYERS[layer_name](), make_guide, torch.randn(4, 5, 2))


def test_packed_sequences_share_the_draw():
    lengths = torch.tensor([5, 2, 4])
    x = pack_padded_sequence(torch.randn(3, 5, 2), lengths, batch_first=True, enforce_sorted=False)
    assert_is_one_function(LAYERS["GRU"](), GUIDES["mean field"], x)


def test_a_loop_that_was_first_seen_at_one_step_says_so():
    model = ps.Regressor(ps.bayesianize(FirstOutput(DenseCell())), num_data=4, noise_scale=1.0)
    guide = ps.MeanFieldGuide(model)
    y = torch.zeros(4, 3)
    with pytest.warns(UnusedSiteWarning, match=r"\['net.cell.state.weight', "):
        guide.initialize(torch.randn(4, 1, 2), y)
    with pytest.raises(RuntimeError, match=r"more often in this pass.*`guide.initialize\(...\)`"):
        ps.StructuredELBO().terms(model, guide, torch.randn(4, 3, 2), y)
    guide.initialize(torch.randn(4, 3, 2), y)
    ps.StructuredELBO().terms(model, guide, torch.randn(4, 5, 2), y)


class FirstOutput(Loop):
    def forward(self, x):
        return super().forward(x)[0]
