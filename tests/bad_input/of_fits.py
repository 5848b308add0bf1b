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


def saved_parts():
    parts = model_and_guide()
    path = Path(tempfile.mkdtemp(dir=FILES.name)) / "posterior.safetensors"
    ps.save(path, **parts)
    return {"path": path, **parts}


VALID: dict[str, Callable[[], dict[str, Any]]] = {
    "weigh_by_bound": lambda: {
        **model_and_guide(lambda model: ps.MixtureGuide(model, ps.MeanFieldGuide, 2)),
        "x": inputs(),
        "y": targets(),
        "num_particles": 2,
    },
    "weigh_by_stacking": lambda: {
        **model_and_guide(lambda model: ps.MixtureGuide(model, ps.MeanFieldGuide, 2)),
        "x": inputs(),
        "y": targets(),
        "num_samples": 2,
    },
    "LinearAnnealing": lambda: {"num_steps": 10},
    "CosineDecay": lambda: {"num_steps": 10},
    "CompiledSVI": lambda: {
        **model_and_guide(),
        "optim": pyro.optim.Adam({"lr": 0.01}),
        "loss": ps.StructuredELBO(),
        "backend": None,
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
    },
    # using the posterior
    "save": saved_parts,
    "load": saved_parts,
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
        "site": "obs",
        "max_memory": 1.0,
        "batch_statistics": inputs(),
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
        "num_draws": 4,
        "num_chains": 2,
        "thinning": 1,
        "energy_variance": 1e-3,
    },
    "nuts": lambda: {
        "model": regressor(),
        "x": inputs(),
        "y": targets(),
        "num_warmup": 2,
        "num_samples": 4,
        "num_chains": 1,
        "max_tree_depth": 2,
    },
}
