"""Every public callable with valid arguments, each stated once."""

import functools
import importlib
import inspect
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from torch import nn

import pyro_structvi as ps
from pyro_structvi import distributions as d
from pyro_structvi import families as f
from pyro_structvi import infer, reference
from pyro_structvi.maps import Arrangement
from pyro_structvi.reference import sampling
from pyro_structvi.testing.inducing import make_joint
from tests.predictions import normal_prediction

# ---- what is public ------------------------------------------------------------------------------

MODULES = [
    *("pyro_structvi", "pyro_structvi.distributions", "pyro_structvi.families"),
    *("pyro_structvi.guides", "pyro_structvi.nn", "pyro_structvi.infer"),
    *("pyro_structvi.posterior", "pyro_structvi.posterior.pruning"),
    *("pyro_structvi.posterior.element_scores", "pyro_structvi.posterior.warm_start"),
    *("pyro_structvi.reference", "pyro_structvi.metrics", "pyro_structvi.plots"),
    *("pyro_structvi.diagnostics", "pyro_structvi.moments"),
]

# Made by the library and handed to users; not called by them.
RECORDS = {
    *("ELBOTerms", "History", "MemoryEstimate", "NUTSDraws", "Prediction", "PruningReport"),
    *("ClassificationScores", "GuideReport", "ParameterReport", "PredictiveDistance"),
    *("BinaryScores", "DetectionScores", "RegressionScores", "RiskCoverage"),
    *("CalibrationRanks", "Coverage", "GradientNoise", "ImportanceDiagnosis", "ModelDraw"),
    *("RandomTensor", "Settings", "Spectrum"),
}
# Base classes without instances; their subclasses are called.
ABSTRACT = {"Family", "GaussianWeight", "MatrixFamily", "MemoryLimitedFamily", "WeightDistribution"}
# For authors of families: the library calls them in each step with what it has made itself.
BETWEEN_PARTS = {
    *("JoinedBias", "LatentSite", "Plate", "SitePosterior"),
    *(
        "bijection_at",
        "bijection_onto",
        "capped",
        "capped_log",
        "cholesky_factor",
        "initial_factor",
        "uncapped",
    ),
}
# Methods by which the parts of the library call each other, with what they have made themselves.
METHODS_BETWEEN_PARTS = {
    # of distributions, for lazy weights and divergences
    *("as_matrix", "as_weight", "draw_standard", "expected_neg_log_prob", "image_around"),
    *("image_under", "image_variance", "mahalanobis", "map_for_batch", "scale_noise"),
    *("split_noise", "spread", "ways_to_apply", "whiten"),
    # of likelihoods, for predictions and bounds by moments
    *("lower_bound", "observe", "run_net"),
    # of families, for guides
    *("check_memory", "distribution", "fits", "init", "prior_scales", "unit"),
    # of guides, for objectives
    *("begin_pass", "in_pass", "joint_posterior", "make_plates"),
    # of guides, with the model's arguments as `initialize` has them
    *("median", "call"),
    # of layers' descriptions, for `bayesianize`
    "convert",
}


# Methods that take nothing, or refuse every call.
WITHOUT_ARGUMENTS = {"BernoulliDropout.expand", "PointMass.__call__"}


def public_callables():
    """Return functions, classes and methods with arguments, by the names of the table."""
    found = {}
    for module in map(importlib.import_module, MODULES):
        names = getattr(module, "__all__", None) or [
            name
            for name, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
        ]
        for name in names:
            value = getattr(module, name)
            is_warning = inspect.isclass(value) and issubclass(value, Warning)
            if isinstance(value, ModuleType) or is_warning or not callable(value):
                continue
            if name in RECORDS | ABSTRACT | BETWEEN_PARTS:
                continue
            label = name
            if module.__name__.endswith("families") and name == "MatrixNormal":
                label = "families.MatrixNormal"
            if has_arguments(value):
                found[label] = value
            if inspect.isclass(value):
                found |= {f"{label}.{method}": own for method, own in user_methods(value).items()}
    return {name: value for name, value in found.items() if name not in WITHOUT_ARGUMENTS}


def user_methods(cls):
    """Return the public methods of a class that are the library's and have arguments."""
    names = [name for name in dir(cls) if not name.startswith("_") or name == "__call__"]
    methods = {name: getattr(cls, name) for name in names if name not in METHODS_BETWEEN_PARTS}
    return {
        name: method
        for name, method in methods.items()
        if inspect.isroutine(method)
        and getattr(method, "__module__", "").startswith("pyro_structvi")
        and has_arguments(method, skip=not inspect.ismethod(method))
    }


def has_arguments(function, skip=False):
    return len(inspect.signature(function).parameters) > skip


# ---- valid arguments -----------------------------------------------------------------------------

SIZE = 6
FILES = tempfile.TemporaryDirectory()


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def regressor():
    return ps.Regressor(ps.bayesianize(net(), prior=1.0), SIZE, 0.3)


def normalized_regressor():
    parts = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    return ps.Regressor(ps.bayesianize(parts, prior=1.0, normalization=False), SIZE, 0.3)


def classifier():
    return ps.Classifier(ps.bayesianize(nn.Linear(3, 2), prior=1.0), SIZE)


def inputs():
    return torch.randn(SIZE, 3)


def targets():
    return torch.randn(SIZE, 1)


def model_and_guide(guide=ps.MeanFieldGuide):
    model = regressor()
    return {"model": model, "guide": guide(model)}


def positive(*shape):
    return torch.rand(shape) + 0.5


def tril(*shape):
    return torch.randn(*shape, shape[-1]).tril(-1) + torch.diag_embed(positive(*shape))


def draws(model):
    guide = ps.MeanFieldGuide(model)
    guide.draw()
    each = [guide.draw() for _ in range(4)]
    return {name: torch.stack([draw[name] for draw in each]) for name in each[0]}


OPTIONS = {
    "init_scale": 0.01,
    "init_loc_fn": lambda site: None,
    "local_reparam": True,
    "create_plates": None,
}
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
PERIOD = {"num_steps": 10, "end": 0.5}


def joint():
    return make_joint((), (4, 3), torch.float64)


VALID: dict[str, Callable[[], dict[str, Any]]] = {
    # making a model
    "Classifier": lambda: {
        "net": ps.bayesianize(nn.Linear(3, 2)),
        "num_data": SIZE,
        "output": lambda result: result,
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
    # guides
    "AutoLowRankLRT": lambda: {
        "model": regressor(),
        "rank": 1,
        "diagonal": "constant",
        "diagonal_variance": 0.1,
        "alpha": 1.0,
        "join_bias": False,
        **OPTIONS,
    },
    "FullCovarianceGuide": lambda: {
        "model": regressor(),
        "join_bias": True,
        "max_memory": 1.0,
        **OPTIONS,
    },
    "RowwiseGuide": lambda: {
        "model": regressor(),
        "join_bias": True,
        "max_memory": 1.0,
        **OPTIONS,
    },
    "KTiedGuide": lambda: {"model": regressor(), "rank": 2, "join_bias": False, **OPTIONS},
    "MatrixNormalGuide": lambda: {"model": regressor(), "join_bias": False, **OPTIONS},
    "MeanFieldGuide": lambda: {"model": regressor(), **OPTIONS},
    "MAPGuide": lambda: {"model": regressor(), **OPTIONS},
    "EnsembleGuide": lambda: {"model": regressor(), "size": 2, "vectorize": True, **OPTIONS},
    "MCDropoutGuide": lambda: {"model": regressor(), "rate": 0.1, **OPTIONS},
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
    "FullCovariance": lambda: {"max_memory": 1.0, "join_bias": False},
    "Rowwise": lambda: {"max_memory": 1.0, "join_bias": False},
    "InducingWeights": lambda: {
        "shape": (2, 2),
        "posterior": f.MatrixNormal(),
        "shared": False,
        "max_conditional_scale": 0.5,
        "prior_scale": 1.0,
        "join_bias": False,
    },
    "KTied": lambda: {"rank": 2, "join_bias": False},
    "LowRank": lambda: {
        "rank": 2,
        "diagonal": "constant",
        "diagonal_variance": 0.1,
        "alpha": 1.0,
        "join_bias": False,
    },
    "families.MatrixNormal": lambda: {"join_bias": False},
    "MeanField": lambda: {"max_scale": 0.5},
    "PrunedMeanField": lambda: {"max_scale": 0.5},
    "Members": lambda: {"size": 2, "vectorize": True},
    "Subnetwork": lambda: {
        "chosen": {"w": torch.eye(4, 3, dtype=torch.bool)},
        "posterior": f.FullCovariance(),
        "train_rest": False,
    },
    # fitting
    "StructuredELBO": lambda: {
        "kl_weight": 1.0,
        "num_particles": 1,
        "vectorize_particles": False,
        "estimator": "draws",
    },
    "LinearAnnealing": lambda: {**PERIOD, "start": 0.0},
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
        "lr_schedule": infer.CosineDecay(10),
        "kl_weight": 1.0,
        "num_particles": 1,
        "vectorize_particles": False,
        "estimator": "draws",
        "optimizer": torch.optim.SGD,
        "compiled": "auto",
        "progress": False,
        "checkpoint": Path(tempfile.mkdtemp(dir=FILES.name)) / "run.pt",
        "every": 5,
        "resume": True,
        "validation": (inputs(), targets()),
        "metric": lambda prediction, y: 0.0,
        "validate_every": 2,
        "patience": 5,
        "callbacks": [lambda history: None],
    },
    "TensorBoard": lambda: {"folder": FILES.name, "every": 2},
    "StructuredAdam": lambda: {
        "guide": (guide := ps.MeanFieldGuide(regressor())),
        "parameters": [*guide.parameters()],
        "lr": 0.1,
        "betas": (0.9, 0.99),
        "eps": 1e-12,
        "posterior_lr": 3.0,
        "clip": 3.0,
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
        "method": "draws",
        "covariance": "diagonal",
        "linearize": False,
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
    **{
        name: lambda: {"probabilities": probabilities(), "y": torch.tensor([0, 1, 2, 0, 1, 2])}
        for name in ("accuracy", "brier_score", "nll")
    },
    **{
        name: lambda: {
            "probabilities": probabilities(),
            "y": torch.tensor([0, 1, 2, 0, 1, 2]),
            "num_bins": 10,
        }
        for name in (
            "adaptive_calibration_error",
            "classification_scores",
            "classwise_calibration_error",
            "expected_calibration_error",
        )
    },
    "predictive_distance": lambda: {
        "functions": torch.randn(5, 4),
        "reference": torch.randn(6, 4),
    },
    "wasserstein": lambda: {"draws": torch.randn(5, 4), "reference": torch.randn(6, 4)},
    **{
        name: lambda: {"probabilities": probabilities(), "reference": probabilities()}
        for name in ("agreement", "total_variation")
    },
    "binary_scores": lambda: {
        "probabilities": torch.rand(SIZE, 2),
        "y": torch.tensor([[0, 1], [1, 1], [0, 0]] * 2),
        "num_bins": 10,
    },
    "regression_scores": lambda: {
        "prediction": normal_prediction(torch.zeros(SIZE), 1.0, torch.zeros(SIZE), draws=4),
        "y": torch.randn(SIZE),
        "level": 0.9,
    },
    "rmse": lambda: {"mean": torch.randn(SIZE), "y": torch.randn(SIZE)},
    "log_predictive_density": lambda: {"log_density": torch.randn(SIZE)},
    "crps": lambda: {"draws": torch.randn(5, SIZE), "y": torch.randn(SIZE)},
    "interval_coverage": lambda: {
        "lower": torch.randn(SIZE),
        "upper": torch.randn(SIZE) + 9.0,
        "y": torch.randn(SIZE),
    },
    "interval_width": lambda: {"lower": torch.randn(SIZE), "upper": torch.randn(SIZE) + 9.0},
    "risk_coverage": lambda: {"uncertainty": torch.randn(SIZE), "loss": torch.rand(SIZE)},
    **{
        name: lambda: {"probabilities": probabilities()}
        for name in ("entropy_score", "max_probability_score")
    },
    "mutual_information_score": lambda: {"draws": torch.randn(4, SIZE, 3).softmax(-1)},
    "ood_scores": lambda: {"prediction": prediction_of_classes()},
    "detection_scores": lambda: {"inside": torch.randn(SIZE), "outside": torch.randn(4)},
    "detect": lambda: {
        "prediction_inside": prediction_of_classes(),
        "prediction_outside": prediction_of_classes(),
    },
    "corrupt": lambda: {
        "images": torch.rand(2, 3, 4, 4),
        "kind": "contrast",
        "severity": 2,
        "seed": 1,
    },
    "plot_regressions": lambda: {
        "predictions": {"mean field": prediction()},
        "grid": torch.linspace(-1, 1, SIZE),
        "x": torch.linspace(-1, 1, 4),
        "y": torch.randn(4),
        "truth": torch.randn(SIZE),
        "limits": (-1.0, 1.0),
    },
    # diagnostics
    "gradient_snr": lambda: {
        **passes(),
        "num_samples": 2,
        "objective": ps.StructuredELBO(),
    },
    "report": lambda: {
        **model_and_guide(),
        "data": (inputs(), targets()),
        "path": f"{FILES.name}/page.html",
        "test_data": (inputs(), targets()),
        "history": infer.History(elbo=[-2.0, -1.0], kl=[1.0, 2.0]),
        "num_samples": 2,
        "importance_samples": 100,
        "batch_size": 3,
    },
    "spectra": lambda: {"guide": ps.KTiedGuide(regressor(), rank=2)},
    "compress_scales": lambda: {"guide": ps.MeanFieldGuide(regressor()), "rank": 1},
    "pareto_k": lambda: {**passes(), "num_samples": 100},
    "simulation_based_calibration": lambda: {
        "make_model": regressor,
        "fit": lambda model, x, y: ps.MeanFieldGuide(model),
        "x": inputs(),
        "num_simulations": 10,
        "num_samples": 2,
        "functions": {"first": lambda draw: draw.function[0, 0]},
        "site": "obs",
    },
    "expected_coverage": lambda: {
        "prediction": normal_prediction(torch.zeros(SIZE, 1), 1.0),
        "y": targets(),
        "levels": [0.5, 0.9],
    },
    "plot_band": lambda: {
        "x": torch.linspace(-1, 1, SIZE),
        "mean": torch.randn(SIZE),
        "scale": positive(SIZE),
        "ax": axes(),
        "widths": (1.0, 2.0),
        "lower": None,
        "upper": None,
        "data_x": torch.randn(4),
        "data_y": torch.randn(4),
        "truth": torch.randn(SIZE),
        "label": "mean",
    },
    "plot_decision": lambda: {
        "grid_x": torch.linspace(-1, 1, 5),
        "grid_y": torch.linspace(-1, 1, 4),
        "values": torch.rand(4, 5),
        "x": torch.randn(SIZE, 2),
        "y": torch.tensor([0, 1, 2, 0, 1, 2]),
        "ax": axes(),
        "label": "probability",
    },
    "plot_reliability": lambda: {
        "probabilities": torch.randn(SIZE, 3).softmax(-1),
        "y": torch.tensor([0, 1, 2, 0, 1, 2]),
        "num_bins": 15,
        "ax": axes(),
    },
    "plot_risk_coverage": lambda: {
        "coverage": torch.linspace(0.1, 1, SIZE),
        "risk": positive(SIZE),
        "ax": axes(),
        "label": "mean field",
    },
    "plot_coverage": lambda: {
        "levels": torch.linspace(0.1, 0.9, SIZE),
        "coverage": torch.rand(SIZE),
        "ax": axes(),
        "label": "mean field",
        "num_examples": 50,
    },
    "plot_trace": lambda: {
        "values": {"loss": torch.randn(SIZE)},
        "ax": axes(),
        "smooth": 2,
        "start": 0.1,
        "label": "value",
    },
    "plot_elbo": lambda: {
        "history": infer.History(elbo=[-2.0, -1.0], kl=[1.0, 2.0]),
        "ax": axes(),
        "kl_by_site": {"net.0.weight": torch.randn(2)},
        "smooth": 2,
        "start": 0.1,
    },
    "plot_spectrum": lambda: {
        "singular_values": {"net.0": torch.tensor([3.0, 2.0, 1.0])},
        "ax": axes(),
        "quantity": "singular value",
        "label": None,
    },
    "plot_scale_matrix": lambda: {
        "scale": positive(4, 3),
        "ranks": (1, 2),
        "axes": [*Figure().subplots(1, 3)],
    },
    "plot_covariance": lambda: {
        "covariance": torch.eye(3) + 0.5,
        "ax": axes(),
        "correlation": False,
    },
    "plot_histograms": lambda: {
        "values": {"in": torch.rand(SIZE), "out": torch.rand(4)},
        "ax": axes(),
        "num_bins": 5,
        "label": "entropy (nats)",
    },
    "plot_distance_over_cost": lambda: {
        "rows": {"mean field": (1.0, 0.5), "k-tied": (2.0, 0.4)},
        "ax": axes(),
        "errors": {"mean field": 0.1},
        "floor": 0.1,
        "ceiling": 1.0,
        "unit": "s",
        "label": "distance",
    },
    # distributions
    "AugmentedMatrixNormal": lambda: {
        "row_factor": torch.randn(2, 4),
        "column_factor": torch.randn(2, 3),
        "row_diagonal": positive(2),
        "column_diagonal": positive(2),
        "scale": positive(),
        "bias_scale": positive(),
        "event_shape": (4, 3),
        "validate_args": True,
    },
    "Auxiliary": lambda: {
        "posterior": dist.Normal(0.0, 1.0),
        "prior": dist.Normal(0.0, 1.0),
    },
    "BernoulliDropout": lambda: {
        "loc": torch.randn(4, 3),
        "rate": 0.2,
        "input_dim": 1,
        "groups": 1,
        "validate_args": True,
    },
    "ConditionalNormal": lambda: {
        "joint": joint(),
        "whitened": torch.randn(3, 2),
        "conditional_scale": positive(),
        "validate_args": True,
    },
    "FullNormal": lambda: {
        "loc": torch.randn(4, 3),
        "scale_tril": tril(12),
        "validate_args": True,
    },
    "InducingNormal": lambda: {
        "joint": joint(),
        "inducing_loc": torch.randn(3, 2),
        "inducing_scale": positive(3, 2),
        "conditional_scale": positive(),
        "validate_args": True,
    },
    "InducingNormal.from_inducing": lambda: {
        "joint": joint(),
        "inducing": d.MeanFieldNormal(torch.randn(3, 2), positive(3, 2)),
        "conditional_scale": positive(),
        "validate_args": True,
    },
    "JoinedPrior": lambda: {
        "weight": dist.Normal(torch.zeros(4, 3), 1.0).to_event(2),
        "bias": dist.Normal(torch.zeros(4), 1.0).to_event(1),
    },
    "KTiedNormal": lambda: {
        "loc": torch.randn(4, 3),
        "row_scale": positive(4, 2),
        "column_scale": positive(3, 2),
        "validate_args": True,
    },
    "LogScaleNormal": lambda: {
        "loc": torch.randn(4, 3),
        "log_scale": torch.randn(4, 3),
        "event_dim": 2,
        "validate_args": True,
    },
    "LowRankNormal": lambda: {
        "loc": torch.randn(4, 3),
        "factors": torch.randn(2, 4, 3),
        "scale": positive(4, 3),
        "alpha": 0.5,
        "event_dim": 2,
        "validate_args": True,
    },
    "MatrixNormal": lambda: {
        "loc": torch.randn(4, 3),
        "scale_tril_row": tril(4),
        "scale_tril_column": tril(3),
        "validate_args": True,
    },
    "MeanFieldNormal": lambda: {
        "loc": torch.randn(4, 3),
        "scale": positive(4, 3),
        "event_dim": 2,
        "validate_args": True,
    },
    "PointMass": lambda: {
        "value": torch.randn(4, 3),
        "event_dim": 2,
        "mean": torch.randn(4, 3),
        "variance": positive(4, 3),
        "validate_args": True,
    },
    "PointMixture": lambda: {
        "members": torch.randn(5, 4, 3),
        "event_dim": 2,
        "validate_args": True,
    },
    "PrunedNormal": lambda: {
        "loc": torch.randn(4, 3),
        "scale": positive(4, 3),
        "kept": torch.rand(4, 3) > 0.5,
        "event_dim": 2,
        "validate_args": True,
    },
    "RowwiseNormal": lambda: {
        "loc": torch.randn(4, 3),
        "scale_tril": tril(4, 3),
        "validate_args": True,
    },
    "ScaleMixtureNormal": lambda: {
        "scales": positive(2),
        "probs": positive(2),
        "validate_args": True,
    },
}

GUIDES = [name for name in VALID if name.endswith("Guide") or name == "AutoLowRankLRT"]


def probabilities():
    return torch.randn(SIZE, 3).softmax(-1)


def prediction_of_classes():
    model = classifier()
    return ps.predict(model, ps.MeanFieldGuide(model), inputs(), 2)


def prediction():
    model = ps.Regressor(ps.bayesianize(nn.Linear(1, 1)), SIZE, 0.3)
    grid = torch.linspace(-1, 1, SIZE).unsqueeze(-1)
    return ps.predict(model, ps.MeanFieldGuide(model), grid, 2)


def axes():
    return Figure().subplots()


# Of methods: what owns them, by the name of its class, and their arguments.
OF_GUIDES = {
    "initialize": lambda: {"x": inputs(), "y": targets()},
    "report": lambda: {"x": inputs(), "y": targets()},
    "forward": lambda: {"x": inputs(), "y": targets()},
    "draw": lambda: {"local": False, "number": 0},
    "quantiles": lambda: {"quantiles": [0.1, 0.5]},
}
OF_DISTRIBUTIONS = {
    "log_prob": lambda q: {"value": q.rsample() if q.has_rsample else q.sample()},
    "rsample": lambda q: {"sample_shape": (2,)},
    "sample": lambda q: {"sample_shape": (2,)},
    "expand": lambda q: {"batch_shape": torch.Size([2])},
    "image": lambda q: {"x": torch.randn(5, q.event_shape[1:].numel())},
    "rows": lambda q: {"index": torch.tensor([[0, 1], [2, 3]])},
    "rearranged": lambda q: {
        "arrangement": Arrangement.of_dims(tuple(range(len(q.event_shape))), tuple(q.event_shape))
    },
    "condition": lambda q: {"u": torch.randn(2, 2), "conditional_scale": positive()},
    "given": lambda q: {"whitened": torch.randn(3, 2)},
}


def passes():
    return {**model_and_guide(), "x": inputs(), "y": targets()}


OF_OTHERS: dict[str, Callable[[], dict[str, Any]]] = {
    "JoinedPrior.log_prob": lambda: {"value": torch.randn(4, 4)},
    "Classifier.forward": lambda: {"x": inputs(), "y": torch.tensor([0, 1, 0, 1, 0, 1])},
    "TokenClassifier.forward": lambda: {
        "x": torch.randn(SIZE, 4, 3),
        "y": torch.randint(2, (SIZE, 4)),
    },
    "LastLayer.forward": lambda: {"x": inputs()},
    "NetMoments.forward": lambda: {"x": inputs()},
    "Regressor.forward": lambda: {"x": inputs(), "y": targets()},
    "BinaryClassifier.forward": lambda: {"x": inputs(), "y": torch.ones(SIZE, 1)},
    "PoissonRegressor.forward": lambda: {"x": inputs(), "y": torch.ones(SIZE, 1)},
    "FanIn.standard_deviation": lambda: {"parameter": torch.randn(4, 3), "fan_in": None},
    "LinearAnnealing.__call__": lambda: {"step": 3},
    "CosineDecay.__call__": lambda: {"step": 3},
    "TensorBoard.__call__": lambda: {"history": infer.History(*[[1.0]] * 5)},
    "StructuredAdam.step": lambda: {"closure": lambda: None},
    "CompiledSVI.step": lambda: {"x": inputs(), "y": targets()},
    "CompiledSVI.evaluate_loss": lambda: {"x": inputs(), "y": targets()},
    **{
        f"StructuredELBO.{name}": passes
        for name in ("differentiable_loss", "loss", "loss_and_grads", "terms")
    },
    "RankOneLinear.forward": lambda: {"x": torch.randn(5, 3)},
    "WalshHadamardLinear.forward": lambda: {"x": torch.randn(5, 3)},
    "WalshHadamardLinear.weight": lambda: {"coefficients": torch.randn(1, 4)},
    **{
        f"{kind}Conv{dim}d.forward": lambda dim=dim: {"x": torch.randn(5, 2, *[4] * dim)}
        for kind in ("RankOne", "WalshHadamard")
        for dim in (1, 2, 3)
    },
    **{
        f"WalshHadamardConv{dim}d.weight": lambda dim=dim: {
            "coefficients": torch.randn(1, 2 ** (dim + 1))
        }
        for dim in (1, 2, 3)
    },
}


@dataclass(frozen=True)
class Case:
    """A public callable with a function that makes valid arguments, new ones at each call."""

    name: str
    function: Callable[..., Any]
    arguments: Callable[[], dict[str, Any]]

    @property
    def parameters(self):
        return inspect.signature(self.function).parameters

    @property
    def named_parameters(self):
        """Return the parameters that a caller can name."""
        loose = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
        skipped = {"self", "_instance"}
        return [
            name
            for name, parameter in self.parameters.items()
            if parameter.kind not in loose and name not in skipped
        ]


def make(name):
    """Make an instance of a class of the table."""
    return CALLABLES[name](**VALID[name]())


class _Unsampled:
    """In the place of NumPyro's MCMC: the arguments have passed, and sampling would take seconds."""

    def __init__(self, *args, **kwargs):
        pass

    def run(self, *args):
        raise StopIteration


@functools.wraps(reference.nuts)
def nuts_without_sampling(**arguments):
    with mock.patch.object(sampling, "MCMC", _Unsampled), suppress(StopIteration):
        reference.nuts(**arguments)


def case_of(name):
    """Return the case of a public callable, or raise a KeyError."""
    function = CALLABLES[name]
    if name == "nuts":
        return Case(name, nuts_without_sampling, VALID[name])
    if name in VALID:
        return Case(name, function, VALID[name])
    owner, method = name.rsplit(".", 1)
    if name in OF_OTHERS:
        arguments = OF_OTHERS[name]
    elif owner in GUIDES and method == "load_state_dict":
        arguments = lambda: {  # noqa: E731
            "state_dict": make(owner).state_dict(),
            "strict": True,
            "assign": False,
        }
    elif owner in GUIDES:
        arguments = OF_GUIDES[method]
    else:
        of_distribution = OF_DISTRIBUTIONS[method]
        arguments = lambda: of_distribution(make(owner))  # noqa: E731

    def call(**given):
        return getattr(make(owner), method)(**given)

    call.__signature__ = inspect.signature(function)
    return Case(name, call, arguments)


CALLABLES = public_callables()
