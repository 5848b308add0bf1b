"""Predictions of nets in half precision, and under autocast, are accumulated in float32."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_structvi as ps

HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def single_precision(fresh_state):
    torch.set_default_dtype(torch.float32)


def net_of(outputs, dtype):
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs))
    return ps.bayesianize(net.to(dtype), prior=1.0)


@pytest.mark.parametrize("autocast", [True, False])
def test_probabilities_and_information(autocast):
    dtype = torch.float32 if autocast else HALF
    model, x = ps.Classifier(net_of(4, dtype), 20), torch.randn(20, 3).to(dtype)
    guide = ps.MeanFieldGuide(model, init_scale=0.1)
    with torch.autocast("cpu", HALF, enabled=autocast):
        prediction = ps.predict(model, guide, x, num_samples=300, y=torch.randint(4, (20,)))
    probabilities = prediction.functions.double().softmax(-1)
    torch.testing.assert_close(prediction.mean.double(), probabilities.mean(0), rtol=0, atol=1e-6)
    entropies = torch.special.entr(probabilities).sum(-1).mean(0)
    expected = torch.special.entr(probabilities.mean(0)).sum(-1) - entropies
    torch.testing.assert_close(prediction.mutual_information.double(), expected, rtol=0, atol=2e-6)


def test_mutual_information_is_never_negative():
    """Draws that hardly differ have next to none; rounding would make it negative for some."""
    model, x = ps.Classifier(net_of(7, torch.float32), 200), torch.randn(200, 3)
    draw = ps.MeanFieldGuide(model).draw()
    draws = {
        name: value.detach() + 1e-5 * torch.randn(50, *value.shape) for name, value in draw.items()
    }
    information = ps.predict(model, draws, x).mutual_information
    assert (information >= 0).all()
    assert information.max() < 1e-6


@pytest.mark.parametrize("by", ["logits", "probs"])
def test_a_users_own_likelihood_in_half_precision(by):
    """Probabilities rounded to 8 bits do not sum to one; those predicted do."""
    net = net_of(9, HALF)

    def model(x, y=None):
        logits = net(x)
        values = {by: logits if by == "logits" else logits.softmax(-1)}
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Categorical(**values, validate_args=False), obs=y)

    guide = ps.MeanFieldGuide(model)
    x = torch.randn(20, 3).to(HALF)
    guide.initialize(x, torch.zeros(20).long())
    prediction = ps.predict(model, guide, x, num_samples=10, y=torch.arange(20) % 9)
    assert prediction.mean.dtype == torch.float32
    torch.testing.assert_close(prediction.mean.sum(-1), torch.ones(20), rtol=0, atol=1e-6)
    density = prediction.mean[torch.arange(20), torch.arange(20) % 9].log()
    assert prediction.log_density.dtype == torch.float32
    torch.testing.assert_close(prediction.log_density, density, rtol=0, atol=0.01)


def test_inference_data_of_a_net_in_half_precision():
    model = ps.Regressor(net_of(1, HALF), 20, 0.5)
    x, y = torch.randn(20, 3).to(HALF), torch.randn(20, 1)
    data = ps.to_inference_data(model, ps.MeanFieldGuide(model), x, y.to(HALF), 5)
    nats = torch.from_numpy(data.log_likelihood["obs"].values)
    assert not torch.equal(nats, nats.to(HALF).double())
    assert data.posterior["net.0.weight"].shape == (1, 5, 5, 3)
    assert data.observed_data["obs"].values.tolist() == y.to(HALF).float().flatten().tolist()
