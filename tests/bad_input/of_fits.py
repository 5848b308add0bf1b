"""Valid arguments of objectives, fits, predictions, and what else is done with a posterior."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import torch

import pyro_structvi as ps
from tests.bad_input.samples import (
    FILES,
    inputs,
    model_and_guide,
    normalized_regressor,
    positive,
    regressor,
    targets,
)


def initialized_parts():
    parts = model_and_guide()
    parts["guide"].initialize(inputs(), targets())
    return parts


PERIOD = {"num_steps": 10, "start": 0.0, "end": 0.5}

VALID: dict[str, Callable[[], dict[str, Any]]] = {
    "weigh_by_bound": lambda: {
        "model": (model := regressor()),
        "guide": ps.MixtureGuide(model, ps.MeanFieldGuide, 2),
        "x": inputs(),
        "y": targets(),
        "num_particles": 2,
    },
    "weigh_by_stacking": lambda: {
        "model": (model := regressor()),
        "guide": ps.MixtureGuide(model, ps.MeanFieldGuide, 2),
        "x": inputs(),
        "y": targets(),
        "num_samples": 2,
    },
    "StructuredELBO": lambda: {
        "kl_weight": 1.0,
        "num_particles": 1,
        "vectorize_particles": False,
        "estimator": "draws",
    },
    "LinearAnnealing": lambda: dict(PERIOD),
    "CosineDecay": lambda: dict(PERIOD),
    "CompiledSVI": lambda: {
        **model_and_guide(),
        "optim": pyro.optim.Adam({"lr": 0.01}),
        "loss": ps.StructuredELBO(),
        "backend": None,
        "fallback": False,
        "check_finite": True,
    },
    "fit": lambda: {
        **model_and_guide(),
        "data": (inputs(), targets()),
        "num_epochs": None,
        "num_steps": 2,
        "batch_size": 3,
        "lr": 0.01,
        "optimizer": torch.optim.SGD,
        "elbo": ps.StructuredELBO(),
        "kl_weight": 1.0,
        "compiled": "auto",
        "progress": False,
        "checkpoint": ps.Checkpoint(Path(tempfile.mkdtemp(dir=FILES.name)) / "run.pt"),
        "validation": ps.Validation((inputs(), targets())),
    },
    "Checkpoint": lambda: {"path": "run.pt", "every": 5, "resume": True},
    "Validation": lambda: {
        "data": (inputs(), targets()),
        "metric": lambda prediction, y: 0.0,
        "every": 2,
        "patience": 5,
    },
    "StructuredAdam": lambda: {
        "guide": (guide := ps.MeanFieldGuide(regressor())),
        "parameters": [*guide.parameters()],
        "lr": 0.1,
        "betas": (0.9, 0.99),
        "eps": 1e-12,
        "posterior_lr": 3.0,
        "clip": 3.0,
        "warm_up": 100,
    },
    # using the posterior
    "NetMoments": lambda: {
        "model": (model := regressor()),
        "guide": ps.MeanFieldGuide(model),
        "covariance": "full",
        "linearize": True,
    },
    "predict": lambda: {
        "model": (model := normalized_regressor()),
        "posterior": ps.MeanFieldGuide(model),
        "x": inputs(),
        "num_samples": 2,
        "y": targets(),
        "batch_size": 3,
        "stream": False,
        "site": "obs",
        "max_memory": 1.0,
        "batch_statistics": inputs(),
        "progress": False,
        "differentiable": True,
    },
    "predict_moments": lambda: {
        "model": (model := regressor()),
        "guide": ps.MeanFieldGuide(model),
        "x": inputs(),
        "y": targets(),
        "batch_size": 3,
        "covariance": "full",
        "linearize": True,
        "differentiable": True,
    },
    "to_inference_data": lambda: {
        "model": (model := normalized_regressor()),
        "posterior": ps.MeanFieldGuide(model),
        "x": inputs(),
        "y": targets(),
        "num_samples": 2,
        "sites": ["net.*"],
        "functions": {"norm": lambda draw: draw["net.1.weight"].norm()},
        "outputs": True,
        "site": "obs",
        "max_memory": 1.0,
        "batch_statistics": inputs(),
    },
    "prune_inducing_factors": lambda: {
        "guide": ps.InducingWeightGuide(regressor(), (2, 2)),
        "amount": 0.5,
    },
    "prune_mean_field": lambda: {"guide": ps.MeanFieldGuide(regressor()), "amount": 0.5},
    "marginal_variances": lambda: {"guide": ps.MeanFieldGuide(regressor())},
    "laplace_variances": lambda: {
        "model": (model := regressor()),
        "center": ps.MAPGuide(model),
        "x": inputs(),
        "num_samples": 1,
        "batch_size": 3,
        "site": "obs",
    },
    "largest": lambda: {"variances": {"w": positive(4, 3)}, "size": 2},
    "k_tied_from_mean_field": lambda: {"guide": ps.MeanFieldGuide(regressor()), "rank": 1},
    "full_covariance_from": lambda: {"guide": ps.MeanFieldGuide(regressor()), "max_memory": 1.0},
    "tie_scales": lambda: {"scale": positive(4, 3), "rank": 2, "steps": 5},
    "to_numpyro": lambda: {"model": regressor()},
    "mclmc": lambda: {
        **initialized_parts(),
        "data": (inputs(), targets()),
        "num_warmup": 2,
        "num_samples": 4,
        "num_chains": 2,
        "thinning": 1,
        "energy_variance": 1e-3,
        "adjusted": False,
        "seed": 0,
        "progress": False,
    },
    "nuts": lambda: {
        "model": regressor(),
        "x": inputs(),
        "y": targets(),
        "num_warmup": 2,
        "num_samples": 4,
        "num_chains": 1,
        "target_accept_prob": 0.8,
        "max_tree_depth": 2,
        "seed": 0,
        "progress": False,
    },
}
