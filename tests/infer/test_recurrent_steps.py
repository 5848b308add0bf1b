"""LSTMs in recorded steps, in single precision too, where torch has another operation for them."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import pyro_structvi as ps
from pyro_structvi.infer.steps.traced import Traced
from tests.infer.compiled_steps import assert_same

OPTIONS = {"one layer": {}, "two layers, both ways": {"num_layers": 2, "bidirectional": True}}
EVERY_LSTM = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


class Last(nn.Module):
    """A net of the last outputs of an LSTM."""

    def __init__(self, **options):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True, **options), nn.LazyLinear(2)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@EVERY_LSTM
def test_steps_are_the_eager_ones(options, dtype):
    x, y = torch.randn(5, 6, 3, dtype=dtype), torch.randint(2, (5,))

    def make():
        net = Last(**options).to(dtype)
        net(x)
        model = ps.Classifier(ps.bayesianize(net, prior=1.0), num_data=5)
        return model, ps.MeanFieldGuide(model)

    assert_same(make, (x, y), rtol=1e-10 if dtype == torch.float64 else 1e-6, steps=4)


@pytest.mark.parametrize("trains", [False, True])
def test_a_record_runs_with_and_without_gradients_around_it(trains):
    lstm = nn.LSTM(3, 4).float().train(trains)

    def differentiate(x):
        return torch.autograd.grad(lstm(x)[0].square().sum(), [*lstm.parameters()])

    x, other = torch.randn(2, 5, 2, 3, dtype=torch.float32).unbind()
    traced = Traced(differentiate, [x])
    names = [str(node.target) for node in traced.graph.graph.nodes]
    assert "pyro_structvi.lstm_layer.default" in names
    expected = differentiate(other)
    for run in (lambda: traced([other]), lambda: traced.graph(other, *traced.found)):
        traced.interpret()
        with torch.set_grad_enabled(False):
            torch.testing.assert_close(run(), expected, rtol=0, atol=0)


def test_inductor_is_refused():
    """It gets the gradient of a first layer's input weights wrong."""
    lstm, x = nn.LSTM(3, 4).float(), torch.randn(5, 2, 3, dtype=torch.float32)
    traced = Traced(lambda x: (lstm(x)[0].detach(),), [x])
    with pytest.raises(RuntimeError, match=r'inductor.*LSTMs in single precision.*"traced"'):
        traced.compile("inductor", [x])


@pytest.mark.parametrize("trains", [False, True])
def test_the_operation_is_what_compilers_are_told(trains):
    x = torch.randn(5, 2, 3, dtype=torch.float32)
    state = [torch.zeros(2, 4, dtype=torch.float32)] * 2
    weights = [value.detach().float() for value in nn.LSTM(3, 4).parameters()]
    numbers = (False, [], 2, 4, 1, True, False, False, trains)
    tests = ("test_schema", "test_autograd_registration")
    operation = torch.ops.pyro_structvi.lstm_layer.default
    torch.library.opcheck(operation, (x, *weights, *state, *numbers), test_utils=tests)
    real = operation(x, *weights, *state, *numbers)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = operation(x, *weights, *state, *numbers)
    layouts = [[(value.shape, value.stride()) for value in each[:3]] for each in (real, fake)]
    assert layouts[0] == layouts[1]  # of the workspace torch does not say the size
