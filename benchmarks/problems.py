"""The problems on which training is measured: models with their data."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import pyro_structvi as ps


class Problem(NamedTuple):
    """A model and the data that it is fitted to.

    Attributes:
        title: What it is.
        model: The model.
        x: Inputs.
        y: Observations.
        batch_size: Examples a step; None for all.
        evidence: Where it is known, the log evidence in nats, which no ELBO exceeds.
    """

    title: str
    model: Any
    x: Tensor
    y: Tensor
    batch_size: int | None = None
    evidence: float | None = None


def cosine() -> Problem:
    """The regression of ``examples/demo.py``, after Ritter et al. (2021), section 4.1."""
    left, right = -1 + 0.3 * torch.rand(50, 1), 0.5 + 0.5 * torch.rand(50, 1)
    x = torch.cat([left, right])
    y = torch.cos(4 * x + 0.8) + 0.1 * torch.randn_like(x)
    net = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
    model = regressor(net, ps.FanIn(4.0, 1.0), 0.1)
    return Problem("the demo's regression, 1-50-1 tanh, 100 examples", model, x, y)


def waves() -> Problem:
    """Another function, of two inputs, and a deeper net."""
    x = 2 * torch.rand(200, 2) - 1
    y = torch.sin(3 * x[:, :1]) * torch.cos(2 * x[:, 1:]) + 0.1 * torch.randn(200, 1)
    net = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))
    model = regressor(net, ps.FanIn(2.0, 1.0), 0.1)
    return Problem("another regression, 2-20-20-1 tanh, 200 examples", model, x, y)


def linear() -> Problem:
    """Conjugate linear regression with inputs that are correlated."""
    x = torch.randn(60, 8) + 2 * torch.randn(60, 1)
    y = x @ torch.randn(8, 1) + 0.5 * torch.randn(60, 1)
    model = regressor(nn.Linear(8, 1), 1.0, 0.5)
    covariance = 0.5**2 * torch.eye(60) + x @ x.T + 1.0  # the prior of weights and bias is N(0, 1)
    marginal = MultivariateNormal(torch.zeros(60, dtype=torch.double), covariance.double())
    evidence = float(marginal.log_prob(y.flatten().double()))
    return Problem("conjugate linear regression, 8-1, 60 examples", model, x, y, None, evidence)


def digits() -> Problem:
    """Handwritten digits, as in ``examples/demo.py``."""
    data = load_digits()
    x = torch.tensor(data.data, dtype=torch.float32) / 16
    y = torch.tensor(data.target, dtype=torch.long)
    train = torch.randperm(len(x))[360:]
    net = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))
    model = ps.Classifier(ps.bayesianize(net, ps.FanIn(5.0)), num_data=len(train))
    title = f"digits, 64-50-10 ReLU, {len(train)} examples in batches of 128"
    return Problem(title, model, x[train], y[train], 128)


def three_hidden() -> Problem:
    """A regression with three hidden layers."""
    x = 2 * torch.rand(200, 3) - 1
    function = torch.sin(3 * x[:, :1] * x[:, 1:2]) + x[:, 2:] ** 2
    y = 2 * function - 0.7 + 0.2 * torch.randn(200, 1)
    layers = [
        nn.Linear(3, 20),
        nn.Tanh(),
        nn.Linear(20, 20),
        nn.Tanh(),
        nn.Linear(20, 20),
        nn.Tanh(),
    ]
    model = regressor(nn.Sequential(*layers, nn.Linear(20, 1)), ps.FanIn(1.5, 1.0), "learned")
    return Problem("a deep regression, 3-20-20-20-1 tanh, 200 examples", model, 1.7 * x, y)


def four_hidden() -> Problem:
    """Rings around the origin, which three classes take in turn, with four hidden layers."""
    x = 4 * torch.rand(300, 2) - 2
    y = (1.5 * x.norm(dim=1)).floor().long().remainder(3)
    layers: list[nn.Module] = [nn.Linear(2, 20), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Linear(20, 20), nn.ReLU()]
    net = ps.bayesianize(nn.Sequential(*layers, nn.Linear(20, 3)), ps.FanIn(math.sqrt(2), 1.0))
    model = ps.Classifier(net, num_data=300)
    return Problem("rings, 2-20-20-20-20-3 ReLU, 300 examples", model, x, y)


def from_file(path: Path) -> Problem:
    """The first split of a file with ``x``, ``y`` and ``train_idx (splits, examples)``."""
    data = np.load(path)
    train = data["train_idx"][0]
    x, y = (
        torch.tensor(standardized(data[name][train].reshape(len(train), -1)), dtype=torch.float32)
        for name in "xy"
    )
    inputs = x.shape[1]
    net = nn.Sequential(nn.Linear(inputs, 50), nn.ReLU(), nn.Linear(50, 1))
    model = regressor(net, ps.FanIn(math.sqrt(2), 1.0), 0.2)
    title = f"{path.stem}, {inputs}-50-1 ReLU, {len(x)} examples in batches of 128"
    return Problem(title, model, x, y, 128)


def regressor(net: nn.Module, prior: Any, noise: Any) -> ps.Regressor:
    return ps.Regressor(ps.bayesianize(net, prior), noise=noise)


def standardized(values: np.ndarray) -> np.ndarray:
    scale = values.std(0)
    return (values - values.mean(0)) / np.where(scale > 0, scale, 1)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "cosine": cosine,
    "digits": digits,
    "linear": linear,
    "rings": four_hidden,
    "three hidden layers": three_hidden,
    "waves": waves,
}
