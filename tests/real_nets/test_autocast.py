"""Training in mixed precision: outputs in bfloat16; densities, KL and parameters in float32."""

import pytest
import torch
from torch import nn

import pyro_structvi as ps
from tests.guide_cases import GUIDES, once
from tests.real_nets.nets import classifier, images, table
from tests.real_nets.sequence_nets import Transformer, sequences


def perceptron():
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))


def convolutions(bias=True):
    """Return a net with a transposed convolution, which autocast leaves alone on a CPU."""
    layers = nn.Conv2d(1, 3, 3, bias=bias), nn.ReLU(), nn.ConvTranspose2d(3, 1, 1, bias=bias)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(36, 2, bias))


NETS = {
    "perceptron": (perceptron, table),
    "convolutions": (convolutions, images),
    "transformer": (Transformer, sequences),
}


def recorded_dtypes(model):
    """Return a set that gets the dtypes of outputs of dense layers and convolutions."""
    dtypes = set()
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            module.register_forward_hook(lambda *args: dtypes.add(args[-1].dtype))
    return dtypes


@pytest.fixture(autouse=True)
def single_precision(fresh_state):
    torch.set_default_dtype(torch.float32)


PAIRS = [("perceptron", "k-tied"), ("transformer", "matrix normal")]


@pytest.mark.parametrize(
    ("net_name", "guide_name"),
    [
        *(pytest.param("convolutions", *name.values, marks=name.marks) for name in once(GUIDES)),
        *PAIRS,
    ],
)
def test_a_step_under_autocast_has_gradients_and_terms_in_float32(net_name, guide_name):
    make, make_data = NETS[net_name]
    model, data = classifier(make(), *make_data())
    guide = GUIDES[guide_name](model)
    dtypes = recorded_dtypes(model)
    with torch.autocast("cpu", torch.bfloat16):
        guide.initialize(*data)
        (-ps.StructuredELBO().terms(model, guide, *data).elbo).backward()
        torch.manual_seed(1)
        kl = ps.StructuredELBO().terms(model, guide, *data).kl
    assert dtypes == {torch.bfloat16}
    for parameter in guide.parameters():
        assert parameter.dtype == torch.float32
        assert torch.isfinite(parameter.grad).all()
    torch.manual_seed(1)
    expected = ps.StructuredELBO().terms(model, guide, *data).kl
    for name, nats in kl.items():
        assert nats.dtype == torch.float32
        torch.testing.assert_close(nats, expected[name], rtol=1e-5, atol=1e-5)
    if net_name != "convolutions":
        return
    x, y = images()
    model, data = classifier(convolutions(bias=False), torch.zeros_like(x), y)
    guide = GUIDES[guide_name](model)
    with torch.autocast("cpu", torch.bfloat16):
        (-ps.StructuredELBO().terms(model, guide, *data).elbo).backward()
    for parameter in guide.parameters():
        assert torch.isfinite(parameter.grad).all(), "of outputs without variance"


@pytest.mark.parametrize("guide_name", ["mean field", "k-tied", "low rank"])
def test_variances_are_in_single_precision(guide_name):
    """Under autocast the variance of an image is that outside it, to float32's rounding."""
    q = GUIDES[guide_name](classifier(perceptron(), *table())[0])["net.0.weight"]()
    x = torch.randn(40, 3)
    expected = q.image(x).variance
    with torch.autocast("cpu", torch.bfloat16):
        image = q.image(x)
    assert image.mean.dtype == torch.bfloat16
    assert image.variance.dtype == torch.float32
    torch.testing.assert_close(image.variance, expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("guide_name", ["k-tied", "matrix normal", "eigenbasis"])
def test_a_net_in_bfloat16_stays_in_it(guide_name):
    x, y = table()
    model, data = classifier(perceptron().bfloat16(), x.bfloat16(), y)
    guide = GUIDES[guide_name](model)
    dtypes = recorded_dtypes(model)
    (-ps.StructuredELBO().terms(model, guide, *data).elbo).backward()
    assert dtypes == {torch.bfloat16}
    for parameter in guide.parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.isfinite(parameter.grad).all()
