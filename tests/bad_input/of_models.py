"""Valid arguments of what makes a model: likelihoods, priors and layers."""

from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
import torch
from torch import nn

import pyro_structvi as ps
from tests.bad_input.samples import (
    SIZE,
    net,
)

CONVOLUTION = {
    "in_channels": 2,
    "out_channels": 3,
    "kernel_size": 2,
    "stride": 1,
    "padding": 0,
    "dilation": 1,
    "bias": True,
    "padding_mode": "zeros",
    "filters_per_example": False,
    "prior_scale": 1.0,
    "bias_prior_scale": 1.0,
    "device": "cpu",
    "dtype": torch.float64,
}

VALID: dict[str, Callable[[], dict[str, Any]]] = {
    "Classifier": lambda: {
        "net": ps.bayesianize(nn.Linear(3, 2)),
        "num_data": SIZE,
        "output": lambda result: result,
        "class_weights": torch.ones(2),
    },
    "TokenClassifier": lambda: {
        "net": ps.bayesianize(nn.Linear(3, 2)),
        "num_data": SIZE,
        "ignore_index": -100,
        "shift": False,
        "output": lambda result: result,
    },
    "Regressor": lambda: {
        "net": ps.bayesianize(nn.Linear(3, 1)),
        "num_data": SIZE,
        "output": lambda result: result,
        "noise_scale": 0.3,
        "noise": None,
        "df": 3.0,
    },
    "BinaryClassifier": lambda: {
        "net": ps.bayesianize(nn.Linear(3, 1)),
        "num_data": SIZE,
        "output": lambda result: result,
    },
    "PoissonRegressor": lambda: {
        "net": ps.bayesianize(nn.Linear(3, 1)),
        "num_data": SIZE,
        "output": lambda result: result,
    },
    "LastLayer": lambda: {
        "features": nn.Linear(3, 4),
        "head": nn.Linear(4, 2),
        "prior": 1.0,
        "frozen": False,
    },
    "FanIn": lambda: {"scale": 1.0, "vector_scale": 1.0, "fan_in": None},
    "HierarchicalScale": lambda: {"prior": dist.HalfNormal(1.0), "fan_in": False},
    "RankOne": lambda: {"prior_scale": 0.1, "start": "ones"},
    "WalshHadamard": lambda: {"filters_per_example": False},
    "bayesianize": lambda: {
        "net": net(),
        "prior": 1.0,
        "normalization": False,
        "layers": {"0": ps.RankOne()},
    },
    "RankOneLinear": lambda: {"layer": nn.Linear(3, 2), "prior_scale": 0.1, "start": "ones"},
    **{
        f"RankOneConv{dim}d": lambda dim=dim: {
            "layer": getattr(nn, f"Conv{dim}d")(2, 3, 2),
            "prior_scale": 0.1,
            "start": "ones",
        }
        for dim in (1, 2, 3)
    },
    "WalshHadamardLinear": lambda: {
        "in_features": 3,
        "out_features": 2,
        "bias": True,
        "prior_scale": 1.0,
        "bias_prior_scale": 1.0,
        "device": "cpu",
        "dtype": torch.float64,
    },
    **{f"WalshHadamardConv{dim}d": lambda: dict(CONVOLUTION) for dim in (1, 2, 3)},
}
