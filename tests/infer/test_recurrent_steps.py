"""LSTMs in recorded steps, in single precision too, where torch has another operation for them."""

import pyro
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import pyro_structvi as ps
from pyro_structvi.infer.steps.recording import Traced
from tests.infer.compiled_steps import assert_same, compiles, train
from tests.real_nets.sequence_nets import Recurrent

NETS = {"one layer": lambda: Last(), "two layers, both ways": lambda: Recurrent(nn.LSTM)}
EVERY_NET = pytest.mark.parametrize("make_net", NETS.values(), ids=NETS)


def by_gradients():
    return pyro.optim.SGD({"lr": 1e-3})


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@EVERY_NET
def test_steps_are_the_eager_ones(make_net, dtype):
    rtol = 1e-10 if dtype == torch.float64 else 1e-6
    assert_same(*make_case(make_net, dtype), rtol=rtol, steps=4)


@compiles
@EVERY_NET
def test_inductor_gives_the_same(make_net):
    """In single precision, so by plain gradients, of which each move shows the error.

    And for points, so with torch 2.11 too, whose inductor takes draws in another order.
    """
    make, data = make_case(make_net, torch.float32, ps.MAPGuide)
    start, once = (train(make, data, False, steps, optim=by_gradients)[1] for steps in (1, 2))
    losses, state, _ = train(make, data, False, 4, optim=by_gradients)
    own_losses, own_state, _ = train(make, data, True, 4, optim=by_gradients, backend="inductor")
    torch.testing.assert_close(own_losses, losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(own_state, state, rtol=1e-6, atol=2e-6)
    assert max((once[name] - start[name]).abs().max() for name in start) > 5e-4


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


@pytest.fixture(params=[False, True], ids=["evaluates", "trains"])
def layer_and_gradient(request):
    """Return a layer's operation with its arguments, and likewise the operation of its gradient."""
    x = torch.randn(5, 2, 3, dtype=torch.float32)
    state = [torch.zeros(2, 4, dtype=torch.float32)] * 2
    weights = [value.detach().float() for value in nn.LSTM(3, 4).parameters()]
    layer = torch.ops.pyro_structvi.lstm_layer.default
    args = x, *weights, *state, False, [], 2, 4, 1, True, False, False, request.param
    *outputs, workspace = layer(*args)
    own = False, 2, 4, 1, True, True, False, [], False, workspace
    gradients = torch.randn_like(outputs[0]), None, None
    backward = torch.ops.pyro_structvi.lstm_layer_backward.default
    return (layer, args), (backward, (x, *weights, *state, *outputs, *gradients, *own))


def test_the_memory_layout_of_inputs_does_not_matter(layer_and_gradient):
    """It does to torch's own operations, and inductor chooses layouts."""
    for operation, args in layer_and_gradient:
        as_columns = [
            value.mT.contiguous().mT if torch.is_tensor(value) and value.ndim > 1 else value
            for value in args
        ]
        assert not as_columns[0].is_contiguous()
        expected = operation(*args)[:-1]  # the last of a layer is its workspace
        torch.testing.assert_close(operation(*as_columns)[:-1], expected, rtol=0, atol=0)


def test_operations_are_what_compilers_are_told(layer_and_gradient):
    tests = ("test_schema", "test_autograd_registration")
    torch.library.opcheck(*layer_and_gradient[0], test_utils=tests)
    for operation, args in layer_and_gradient:  # gradients write into their layer's workspace
        real = operation(*args)
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake = operation(*args)
        layouts = [[(value.shape, value.stride()) for value in each[:3]] for each in (real, fake)]
        assert layouts[0] == layouts[1]  # of a workspace torch does not say the size
