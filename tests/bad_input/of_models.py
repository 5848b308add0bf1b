"""Valid arguments of what makes a model: likelihoods, priors and layers."""

from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
import torch
from torch import nn

import pyro_structvi as ps
from tests.bad_input.samples import SIZE, inputs, net, targets


def of_likelihood(size, **options):
    return {
        "net": ps.bayesianize(nn.Linear(3, size)),
        "num_data": SIZE,
        "output": lambda result: result,
        **options,
    }


VALID: dict[str, Callable[[], dict[str, Any]]] = {
    "Classifier": lambda: of_likelihood(2, class_weights=torch.ones(2), standardize=inputs()),
    "TokenClassifier": lambda: of_likelihood(2),
    "Regressor": lambda: of_likelihood(
        1, noise_scale=0.3, noise=None, df=3.0, standardize=(inputs(), targets())
    ),
    "BinaryClassifier": lambda: of_likelihood(1, standardize=inputs()),
    "PoissonRegressor": lambda: of_likelihood(1, standardize=inputs()),
    "LastLayer": lambda: {"features": nn.Linear(3, 4), "head": nn.Linear(4, 2)},
    "FanIn": lambda: {"fan_in": None},
    "HierarchicalScale": lambda: {"prior": dist.HalfNormal(1.0)},
    "bayesianize": lambda: {"net": net(), "normalization": False, "layers": {"0": ps.RankOne()}},
    "RankOneLinear": lambda: {"layer": nn.Linear(3, 2)},
    **{
        f"RankOneConv{dim}d": lambda dim=dim: {"layer": getattr(nn, f"Conv{dim}d")(2, 3, 2)}
        for dim in (1, 2, 3)
    },
    "WalshHadamardLinear": lambda: {"in_features": 3, "out_features": 2},
    **{
        f"WalshHadamardConv{dim}d": lambda: {"in_channels": 2, "out_channels": 3, "kernel_size": 2}
        for dim in (1, 2, 3)
    },
}
