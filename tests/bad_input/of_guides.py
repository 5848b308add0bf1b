"""Valid arguments of guides and families, where their defaults are none."""

from collections.abc import Callable
from typing import Any

import torch

import pyro_structvi as ps
from pyro_structvi import families as f
from tests.bad_input.samples import regressor

VALID: dict[str, Callable[[], dict[str, Any]]] = {
    "AutoLowRankLRT": lambda: {"diagonal": "constant", "diagonal_variance": 0.1, "alpha": 1.0},
    "GlobalInducingGuide": lambda: {
        "inputs": torch.randn(4, 3),
        "families": {"*.bias": f.MeanField()},
        "first_layer": f.MatrixNormalFamily(),
        "join_bias": False,
        "init_loc_fn": None,
        "local_reparam": False,
    },
    "InducingWeightGuide": lambda: {
        "inducing_shape": (2, 2),
        "ensemble_size": None,
        "max_conditional_scale": 0.5,
        "max_inducing_scale": 0.5,
    },
    "MixtureGuide": lambda: {
        "model": regressor(),
        "make_guide": ps.MeanFieldGuide,
        "size": 2,
        "vectorize": True,
        "starts": None,
    },
    "StructuredGuide": lambda: {"families": {"*": f.MeanField()}},
    "SubnetworkGuide": lambda: {
        "model": (model := regressor()),
        "chosen": {"net.0.weight": torch.eye(4, 3, dtype=torch.bool)},
        "center": ps.MAPGuide(model),
        "posterior": f.FullCovariance(),
        "init_loc_fn": None,
    },
    "estimate_memory": lambda: {"make_guide": ps.KTiedGuide, "model": regressor(), "rank": 2},
    "Dropout": lambda: {"input_dim": 1},
    "InducingWeights": lambda: {
        "shape": (2, 2),
        "posterior": f.MatrixNormalFamily(),
        "max_conditional_scale": 0.5,
        "prior_scale": 1.0,
    },
    "LowRank": lambda: {"diagonal": "constant", "diagonal_variance": 0.1, "alpha": 1.0},
    "MeanField": lambda: {"max_scale": 0.5},
    "PrunedMeanField": lambda: {"max_scale": 0.5},
    "Subnetwork": lambda: {
        "chosen": {"w": torch.eye(4, 3, dtype=torch.bool)},
        "posterior": f.FullCovariance(),
    },
}
