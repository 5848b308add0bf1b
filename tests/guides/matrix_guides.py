"""Helpers for guides of weights with a covariance."""

import pyro
import torch

import pyro_structvi as ps
from pyro_structvi.weights.lazy import LazyWeight
from tests.models import make_regressor


def minimize(guide, loss, max_iter=5000, tolerance_grad=1e-10, tolerance_change=1e-18):
    """Minimize a deterministic loss of a guide's parameters by L-BFGS."""
    optimizer = torch.optim.LBFGS(
        guide.parameters(),
        line_search_fn="strong_wolfe",
        history_size=50,
        max_iter=max_iter,
        tolerance_grad=tolerance_grad,
        tolerance_change=tolerance_change,
    )

    def closure():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    optimizer.step(closure)


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
    svi.step(*data)
    assert drawn == []
