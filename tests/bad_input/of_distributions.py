"""Valid arguments of distributions that are not declared by annotations."""

from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
import torch

from pyro_structvi import distributions as d
from tests.bad_input.samples import joint, positive

VALID: dict[str, Callable[[], dict[str, Any]]] = {
    "AugmentedMatrixNormal": lambda: {
        "row_factor": torch.randn(2, 4),
        "column_factor": torch.randn(2, 3),
        "row_diagonal": positive(2),
        "column_diagonal": positive(2),
        "scale": positive(),
        "bias_scale": positive(),
        "event_shape": (4, 3),
    },
    "Auxiliary": lambda: {"posterior": dist.Normal(0.0, 1.0), "prior": dist.Normal(0.0, 1.0)},
    "BernoulliDropout": lambda: {"loc": torch.randn(4, 3), "rate": 0.2},
    "ConditionalNormal": lambda: {
        "joint": joint(),
        "whitened": torch.randn(3, 2),
        "conditional_scale": positive(),
    },
    "InducingNormal": lambda: {
        "joint": joint(),
        "inducing_loc": torch.randn(3, 2),
        "inducing_scale": positive(3, 2),
        "conditional_scale": positive(),
    },
    "InducingNormal.from_inducing": lambda: {
        "joint": joint(),
        "inducing": d.MeanFieldNormal(torch.randn(3, 2), positive(3, 2)),
        "conditional_scale": positive(),
    },
    "JoinedPrior": lambda: {
        "weight": dist.Normal(torch.zeros(4, 3), 1.0).to_event(2),
        "bias": dist.Normal(torch.zeros(4), 1.0).to_event(1),
    },
    "LogScaleNormal": lambda: {"loc": torch.randn(4, 3), "log_scale": torch.randn(4, 3)},
    "LowRankNormal": lambda: {
        "loc": torch.randn(4, 3),
        "factors": torch.randn(2, 4, 3),
        "scale": positive(4, 3),
        "alpha": 0.5,
    },
    "MeanFieldNormal": lambda: {"loc": torch.randn(4, 3), "scale": positive(4, 3)},
    "PointMass": lambda: {
        "value": torch.randn(4, 3),
        "mean": torch.randn(4, 3),
        "variance": positive(4, 3),
    },
    "PointMixture": lambda: {"members": torch.randn(5, 4, 3)},
    "PrunedNormal": lambda: {
        "loc": torch.randn(4, 3),
        "scale": positive(4, 3),
        "kept": torch.rand(4, 3) > 0.5,
    },
    "ScaleMixtureNormal": lambda: {"scales": positive(2), "probs": positive(2)},
}
