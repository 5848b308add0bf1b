"""Recurrent layers in recorded steps, in single precision too, where torch has other operations."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

import pyro_structvi as ps
from pyro_structvi.infer.steps.recording import Record
from tests.infer.compiled_steps import assert_same, train
from tests.real_nets.sequence_nets import Recurrent

NETS = {"one layer": lambda: Last(), "two layers, both ways": lambda: Recurrent(nn.LSTM)}
EVERY_NET = pytest.mark.parametrize("make_net", NETS.values(), ids=NETS)


class Last(nn.Module):
    """A net of the last outputs of an LSTM."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def make_case(make_net, dtype, make_guide=ps.MeanFieldGuide):
    """Return what makes model and guide, and data for them."""

    def make():
        model = ps.Classifier(ps.bayesianize(make_net().to(dtype), prior=1.0), num_data=5)
        return model, make_guide(model)

    x = torch.randn(5, 4, 3, dtype=dtype)
    return make, (x, torch.randint(2, (5,)))


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float64], ids=str
)
@EVERY_NET
def test_steps_are_the_eager_ones(make_net, dtype):
    rtol = 1e-10 if dtype == torch.float64 else 1e-6
    assert_same(*make_case(make_net, dtype), rtol=rtol, steps=5)


def test_a_layer_is_compiled_on_request_only_with_an_error():
    make, data = make_case(NETS["one layer"], torch.float32)
    assert_same(make, data, rtol=1e-6, steps=5, backend="auto")
    with pytest.raises(RuntimeError, match="torch's LSTM layer on a CPU cannot be compiled"):
        train(make, data, True, 4, backend="inductor")


@pytest.mark.parametrize("trains", [False, True])
def test_a_record_is_the_layer(trains):
    lstm = nn.LSTM(3, 4).float().train(trains)

    def differentiate(x):
        return torch.autograd.grad(lstm(x)[0].square().sum(), [*lstm.parameters()])

    x, other = torch.randn(2, 5, 2, 3, dtype=torch.float32).unbind()
    record = Record(differentiate, [x])
    names = [str(operation) for operation in record.operations]
    assert "aten.mkldnn_rnn_layer.default" in names
    expected = differentiate(other)
    torch.testing.assert_close(record([other]), expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM, "padding"])
def test_lengths_of_packed_sequences_are_not_constants_of_a_record(kind):
    """Layers run over the lengths of 3, 3, 1, 1 where later ones are 3, 2, 2, 1."""
    layer = None if kind == "padding" else kind(3, 4)

    def run(data, sizes):
        packed = PackedSequence(data, sizes)
        return (pad_packed_sequence(packed)[0] if layer is None else layer(packed)[0].data,)

    with pytest.raises(RuntimeError, match="Python reads a tensor's value by "):
        Record(run, [torch.randn(8, 3), torch.tensor([4, 2, 2])])
