"""Helpers for guides of weights with a covariance."""

import pyro
import torch

import pyro_structvi as ps
from pyro_structvi.weights.lazy import LazyWeight


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


def assert_trains_without_a_drawn_weight(guide, data, monkeypatch):
    model = guide.model
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 3e-2}), ps.StructuredELBO())
    svi.step(*data)
    drawn = []
    monkeypatch.setattr(LazyWeight, "draw", lambda self: drawn.append(self.use.name))
    svi.step(*data)
    assert drawn == []
