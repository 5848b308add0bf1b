"""The problems of the league: models whose exact posterior can be sampled, and where it is compared."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits, make_moons
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import pyro_structvi as ps
from benchmarks.problems import cosine, linear, standardized


class LeagueProblem(NamedTuple):
    """A model, its data, and the inputs at which posteriors are compared.

    Attributes:
        title: What it is.
        model: The model.
        x: Inputs.
        y: Observations.
        regions: Inputs at which predictions are compared, by name; the last one is where the posterior
            matters most, and orders the table.
        compares: What is compared there: the functions, the observations, or the classes.
        nuts: Options of the reference's sampler.
        batch_size: Examples in a training step; None for all.
        evidence: The log evidence in nats, where it is known.
        exact: Draws of the exact posterior by site, where there is a closed form: a function of their
            number.
        scored: Observations at some of the regions.
    """

    title: str
    model: Any
    x: Tensor
    y: Tensor
    regions: Mapping[str, Tensor]
    compares: str
    nuts: Mapping[str, Any] = {}
    batch_size: int | None = None
    evidence: float | None = None
    exact: Callable[[int], dict[str, Tensor]] | None = None
    scored: Mapping[str, Tensor] = {}


def cosine_regression() -> LeagueProblem:
    """The regression of Ritter et al. (2021), section 4.1: two clusters of inputs."""
    problem = cosine()
    grid = torch.linspace(-2, 2, 201).unsqueeze(-1)
    between = (grid > -0.7) & (grid < 0.5)
    outside = grid.abs() > 1
    regions = {"on data": ~between & ~outside, "outside": outside, "between": between}
    inputs = {name: grid[mask.flatten()] for name, mask in regions.items()}
    title = "1-D regression, 1-50-1 tanh, 100 examples"
    return LeagueProblem(title, problem.model, problem.x, problem.y, inputs, "functions")


def linear_regression() -> LeagueProblem:
    """Conjugate linear regression with correlated inputs, whose posterior is a normal."""
    problem = linear()
    x, y = problem.x.double(), problem.y.double().flatten()
    design = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    precision = design.T @ design / 0.5**2 + torch.eye(9, dtype=x.dtype)
    covariance = torch.linalg.inv(precision)
    posterior = MultivariateNormal(covariance @ design.T @ y / 0.5**2, covariance)

    def exact(count: int) -> dict[str, Tensor]:
        draws = posterior.sample((count,)).float()
        return {"net.weight": draws[:, None, :8], "net.bias": draws[:, 8:]}

    alike = torch.randn(50, 8) + 2 * torch.randn(50, 1)
    regions = {"inputs as in the data": alike, "inputs without correlation": torch.randn(50, 8)}
    return LeagueProblem(
        "conjugate linear regression, 8-1, 60 examples, correlated inputs",
        *(problem.model, problem.x, problem.y, regions, "functions"),
        evidence=problem.evidence,
        exact=exact,
    )


def two_moons() -> LeagueProblem:
    """Two classes in the plane."""
    points, classes = make_moons(200, noise=0.2, random_state=0)
    x = torch.tensor(standardized(points), dtype=torch.get_default_dtype())
    y = torch.tensor(classes, dtype=torch.long)
    net = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 2))
    model = ps.Classifier(ps.bayesianize(net, ps.FanIn(1.0, 1.0)), num_data=len(x))
    grid = torch.cartesian_prod(torch.linspace(-4, 4, 21), torch.linspace(-4, 4, 21))
    far = torch.cdist(grid, x).amin(1) > 0.7
    regions = {"on data": grid[~far], "away": grid[far]}
    title = "two moons, 2-20-20-2 tanh, 200 examples"
    return LeagueProblem(title, model, x, y, regions, "classes")


def two_spirals() -> LeagueProblem:
    """Two classes on spirals that wind around each other, by a net of two hidden layers."""
    y, along = torch.arange(200) % 2, torch.rand(200).sqrt()
    angle, radius = 2.5 * math.pi * along + math.pi * y, 2 * along
    x = radius.unsqueeze(-1) * torch.stack([angle.cos(), angle.sin()], -1)
    x = x + 0.05 * torch.randn(200, 2)
    net = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 2))
    model = ps.Classifier(ps.bayesianize(net, ps.FanIn(3.0, 1.0)), num_data=len(x))
    grid = torch.cartesian_prod(torch.linspace(-4, 4, 33), torch.linspace(-4, 4, 33))
    inside = grid.norm(dim=-1) < 2
    regions = {"among the spirals": grid[inside], "outside": grid[~inside]}
    title = "two spirals, 2-20-20-2 tanh, 200 examples"
    return LeagueProblem(title, model, x, y, regions, "classes")


def clusters() -> LeagueProblem:
    """A regression whose inputs lie in three clusters of the plane, by a net of two hidden layers."""
    centers = torch.tensor([[-1.0, -0.8], [1.0, -0.6], [0.0, 1.1]])
    x = centers.repeat_interleave(50, 0) + 0.25 * torch.randn(150, 2)
    y = torch.sin(2 * x[:, :1]) * torch.cos(1.5 * x[:, 1:]) + 0.1 * torch.randn(150, 1)
    net = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
    model = ps.Regressor(ps.bayesianize(net, ps.FanIn(2.0, 1.0)), len(x), 0.1)
    grid = torch.cartesian_prod(torch.linspace(-2, 2, 17), torch.linspace(-2, 2, 17))
    near = torch.cdist(grid, centers).amin(1)
    regions = {"on data": grid[near < 0.5], "between and outside": grid[near > 0.75]}
    title = "2-D regression in three clusters, 2-24-24-1 tanh, 150 examples"
    return LeagueProblem(title, model, x, y, regions, "functions")


def small_digits() -> LeagueProblem:
    """Digits of 4 x 4 pixels, a net of 982 weights; digits that were turned are away from the data."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    x = nn.functional.avg_pool2d(images, 2).flatten(1)
    x = (x - x.mean(0)) / x.std(0).clamp_min(0.1)
    y = torch.tensor(data.target, dtype=torch.long)
    order = torch.randperm(len(x))
    train, test = order[:500], order[500:700]
    turned = x[test].reshape(-1, 4, 4).rot90(1, (1, 2)).reshape(-1, 16)
    net = nn.Sequential(nn.Linear(16, 36), nn.ReLU(), nn.Linear(36, 10))
    model = ps.Classifier(ps.bayesianize(net, ps.FanIn(math.sqrt(2), 1.0)), num_data=len(train))
    title = "digits of 4 x 4 pixels, 16-36-10 ReLU, 500 examples"
    regions = {"test": x[test], "turned": turned}
    return LeagueProblem(
        *(title, model, x[train], y[train], regions, "classes"),
        batch_size=100,
        scored={"test": y[test]},
    )


def regression_gap(path: Path, column: int = 0) -> LeagueProblem:
    """A regression from a file without the middle third of an input's values, scored there.

    The net, the prior and the likelihood are those of the NeurIPS 2021 competition on approximate
    inference (Wilson et al. 2022): 50 ReLU units, mean and softplus scale, prior variance 1/30.
    """
    data = np.load(path)
    x, y = data["x"], data["y"].reshape(len(data["x"]), -1)
    low, high = np.quantile(x[:, column], [1 / 3, 2 / 3])
    inside = (x[:, column] > low) & (x[:, column] <= high)
    center, scale = y[~inside].mean(0), y[~inside].std(0)
    reference = x[~inside]
    spread = np.where(reference.std(0) > 0, reference.std(0), 1)
    x = torch.tensor((x - reference.mean(0)) / spread, dtype=torch.float32)
    y = torch.tensor((y - center) / scale, dtype=torch.float32)
    inside = torch.tensor(inside)
    net = nn.Sequential(nn.Linear(x.shape[1], 50), nn.ReLU(), nn.Linear(50, 2))
    net = ps.bayesianize(net, math.sqrt(1 / 30))
    model = ps.Regressor(net, num_data=int((~inside).sum()), noise="heteroscedastic")
    title = f"{path.stem} with a gap, {x.shape[1]}-50-2 ReLU, {int((~inside).sum())} examples"
    regions = {"on data": x[~inside], "gap": x[inside]}
    return LeagueProblem(
        *(title, model, x[~inside], y[~inside], regions, "observations"), scored={"gap": y[inside]}
    )


LEAGUE: dict[str, Callable[[], LeagueProblem]] = {
    "cosine": cosine_regression,
    "moons": two_moons,
    "digits": small_digits,
    "spirals": two_spirals,
    "clusters": clusters,
    "linear": linear_regression,
}
