"""Valid arguments of guides and families, where their defaults are none."""

from collections.abc import Callable
from typing import Any

import torch

import pyro_structvi as ps
from pyro_structvi import families as f
from tests.bad_input.samples import (
    OPTIONS,
    regressor,
)

VALID: dict[str, Callable[[], dict[str, Any]]] = {
    "AutoLowRankLRT": lambda: {
        "model": regressor(),
        "rank": 1,
        "diagonal": "constant",
        "diagonal_variance": 0.1,
        "alpha": 1.0,
        "join_bias": False,
        **OPTIONS,
    },
    "GlobalInducingGuide": lambda: {
        "model": regressor(),
        "inputs": torch.randn(4, 3),
        "families": {"*.bias": f.MeanField()},
        "first_layer": f.MatrixNormalFamily(),
        "train_inputs": False,
        "join_bias": False,
        "init_scale": 0.01,
        "init_loc_fn": None,
        "local_reparam": False,
        "create_plates": None,
    },
    "InducingWeightGuide": lambda: {
        "model": regressor(),
        "inducing_shape": (2, 2),
        "inducing_posterior": "diagonal",
        "ensemble_size": None,
        "shared": False,
        "max_conditional_scale": 0.5,
        "max_inducing_scale": 0.5,
        "join_bias": True,
        **OPTIONS,
    },
    "MixtureGuide": lambda: {
        "model": regressor(),
        "make_guide": ps.MeanFieldGuide,
        "size": 2,
        "vectorize": True,
        "starts": None,
    },
    "StructuredGuide": lambda: {
        "model": regressor(),
        "families": {"*": f.MeanField()},
        **OPTIONS,
    },
    "SubnetworkGuide": lambda: {
        "model": (model := regressor()),
        "chosen": {"net.0.weight": torch.eye(4, 3, dtype=torch.bool)},
        "center": ps.MAPGuide(model),
        "posterior": f.FullCovariance(),
        "train_rest": False,
        "init_scale": 0.01,
        "init_loc_fn": None,
        "local_reparam": True,
        "create_plates": None,
    },
    "estimate_memory": lambda: {"make_guide": ps.KTiedGuide, "model": regressor(), "rank": 2},
    # families
    "Dropout": lambda: {"rate": 0.1, "input_dim": 1},
    "InducingWeights": lambda: {
        "shape": (2, 2),
        "posterior": f.MatrixNormalFamily(),
        "shared": False,
        "max_conditional_scale": 0.5,
        "prior_scale": 1.0,
        "join_bias": False,
    },
    "LowRank": lambda: {
        "rank": 2,
        "diagonal": "constant",
        "diagonal_variance": 0.1,
        "alpha": 1.0,
        "join_bias": False,
    },
    "MeanField": lambda: {"max_scale": 0.5},
    "PrunedMeanField": lambda: {"max_scale": 0.5},
    "Subnetwork": lambda: {
        "chosen": {"w": torch.eye(4, 3, dtype=torch.bool)},
        "posterior": f.FullCovariance(),
        "train_rest": False,
    },
}
