"""Steps compiled by inductor."""

import pyro
import pytest
import torch
from torch import nn

import pyro_structvi as ps
from pyro_structvi import _torch_steps
from tests.infer.compiled_steps import GUIDE_CASES, adam, image_model, make_k_tied, train
from tests.models import make_classifier
from tests.real_nets.sequence_nets import Recurrent


@pytest.fixture
def compiled_graphs(monkeypatch):
    """Return the graphs that inductor is given in a test."""
    graphs, original = [], _torch_steps.by_inductor

    def compile_graph(graph, inputs):
        graphs.append(graph)
        return original(graph, inputs)

    monkeypatch.setattr(_torch_steps, "by_inductor", compile_graph)
    return graphs


def make_with_images():
    data = torch.randn(6, 1, 4, 4), torch.randint(3, (6,))
    return lambda: make_k_tied(image_model), data, 1e-10, adam


def sgd():
    """Return an optimizer that does not enlarge the roundings of tiny gradients."""
    return pyro.optim.SGD({"lr": 1e-3})


def make_recurrent():
    """Return an LSTM in single precision, for which torch has another operation than in double."""

    def make():
        net = Recurrent(nn.LSTM).float()
        model = ps.Classifier(ps.bayesianize(net, prior=1.0), num_data=5)
        return model, ps.MeanFieldGuide(model)

    return make, (torch.randn(5, 4, 3, dtype=torch.float32), torch.randint(2, (5,))), 1e-5, sgd


def make_guided(name):
    def make():
        model = make_classifier()
        return model, GUIDE_CASES[name](model)

    return make, (torch.randn(12, 3), torch.randint(4, (12,))), 1e-10, adam


BY_INDUCTOR = {
    **{
        name: lambda name=name: make_guided(name)
        for name in ("mean field", "k-tied", "low rank", "inducing weights", "ensemble")
    },
    "images": make_with_images,
    "LSTM": make_recurrent,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning:torch._inductor")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", BY_INDUCTOR)
def test_inductor_gives_the_same(name, compiled_graphs):
    """Up to roundings, loss and update in one function."""
    make, data, rtol, optim = BY_INDUCTOR[name]()
    losses, state, _ = train(make, data, compiled=False, optim=optim)
    own_losses, own_state, _ = train(make, data, compiled=True, backend="inductor", optim=optim)
    torch.testing.assert_close(own_losses, losses, rtol=rtol, atol=0)
    torch.testing.assert_close(own_state, state, rtol=1e4 * rtol, atol=1e3 * rtol)
    assert len(compiled_graphs) == 1
