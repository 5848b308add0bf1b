"""Steps compiled by inductor."""

import pytest
import torch

from pyro_structvi import _torch
from tests.infer.compiled_steps import GUIDE_CASES, compiles, image_model, make_k_tied, train
from tests.models import make_classifier


@pytest.fixture
def compiled_graphs(monkeypatch):
    """Return the graphs that inductor is given in a test."""
    graphs, original = [], _torch.by_inductor

    def compile_graph(graph, *args):
        graphs.append(graph)
        return original(graph, *args)

    monkeypatch.setattr(_torch, "by_inductor", compile_graph)
    return graphs


def make_with_images():
    data = torch.randn(6, 1, 4, 4), torch.randint(3, (6,))
    return lambda: make_k_tied(image_model), data


def make_guided(name):
    def make():
        model = make_classifier()
        return model, GUIDE_CASES[name](model)

    return make, (torch.randn(12, 3), torch.randint(4, (12,)))


BY_INDUCTOR = {
    **{
        name: lambda name=name: make_guided(name)
        for name in (
            "mean field",
            "k-tied",
            "low rank",
            "inducing weights",
            "inducing weights, ensemble",
        )
    },
    "images": make_with_images,
}


keeps_draws_in_order = pytest.mark.skipif(
    torch.__version__ < (2, 15), reason="inductor of torch 2.11 takes draws in another order"
)


@compiles
@keeps_draws_in_order
@pytest.mark.parametrize("name", BY_INDUCTOR)
def test_inductor_gives_the_same(name, compiled_graphs):
    """Up to rounding."""
    make, data = BY_INDUCTOR[name]()
    losses, state, _ = train(make, data, compiled=False)
    own_losses, own_state, _ = train(make, data, compiled=True, backend="inductor")
    torch.testing.assert_close(own_losses, losses, rtol=1e-10, atol=0)
    torch.testing.assert_close(own_state, state, rtol=1e-6, atol=1e-7)
    assert len(compiled_graphs) == 1
