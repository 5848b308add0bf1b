"""What guides of weights with a covariance have in common, for their tests."""

import pyro
import torch

import pyro_structvi as ps
from pyro_structvi.weights.lazy import LazyWeight
from tests.models import make_regressor


def assert_starts_at_the_identity(make_guide):
    """Assert that a joined layer starts at the net's values, with 0.2^2 times the identity."""
    guide = make_guide(make_regressor(), join_bias=True, init_scale=0.2)
    net = guide.model.net
    q = guide["net.0.weight"]()
    torch.testing.assert_close(q.covariance_matrix, 0.2**2 * torch.eye(5 * 4))
    weight, bias = (net[0].initial_values[name] for name in ("weight", "bias"))
    assert torch.equal(q.mean, torch.cat([weight, bias.unsqueeze(-1)], -1))


def assert_trains_without_a_drawn_weight(guide, data, monkeypatch):
    model = guide.model
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 3e-2}), ps.StructuredELBO())
    svi.step(*data)
    drawn = []
    monkeypatch.setattr(LazyWeight, "draw", lambda self: drawn.append(self.use.name))
    losses = torch.tensor([svi.step(*data) for _ in range(60)])
    assert drawn == []
    assert losses[-20:].mean() < losses[:20].mean() - losses[-20:].std()
