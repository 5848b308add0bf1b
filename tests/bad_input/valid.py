"""Valid arguments of public callables, of small models, guides, data and tensors."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from torch import nn

import pyro_structvi as ps
from pyro_structvi import distributions as d
from pyro_structvi import families as f
from pyro_structvi import infer
from tests.distributions.cases import make_joint
from tests.predictions import normal_prediction

SIZE = 6
FILES = tempfile.TemporaryDirectory()


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def regressor():
    return ps.Regressor(ps.bayesianize(net(), prior=1.0), SIZE, 0.3)


def normalized_regressor():
    parts = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    parts[1].weight.data = torch.tensor([[1.0, -1.0, 1.0]])  # infinite inputs have no sum
    return ps.Regressor(ps.bayesianize(parts, prior=1.0, normalization=False), SIZE, 0.3)


def classifier():
    return ps.Classifier(ps.bayesianize(nn.Linear(3, 2), prior=1.0), SIZE)


def inputs():
    return torch.randn(SIZE, 3)


def targets():
    return torch.randn(SIZE, 1)


def model_and(name="guide", guide=ps.MeanFieldGuide, make=regressor):
    """Return a model, and under a name a guide of it."""
    model = make()
    return {"model": model, name: guide(model)}


def mixture(model):
    return ps.MixtureGuide(model, ps.MeanFieldGuide, 2)


def positive(*shape):
    return torch.rand(shape) + 0.5


OPTIONS = {
    "init_scale": 0.01,
    "init_relative_scale": 0.1,
    "init_loc_fn": lambda site: None,
    "local_reparam": True,
    "create_plates": None,
}


def joint():
    return make_joint((), (4, 3), torch.float64)


def probabilities():
    return torch.randn(SIZE, 3).softmax(-1)


def axes():
    return Figure().subplots()


def passes(guide=ps.MeanFieldGuide):
    return {**model_and("guide", guide), "x": inputs(), "y": targets()}


def data():
    return inputs(), targets()


# Of arguments by these names.
USUAL: dict[str, Callable[[], Any]] = {
    "validate_args": lambda: True,
    "event_dim": lambda: 2,
    "device": lambda: "cpu",
    "dtype": lambda: torch.float64,
    "progress": lambda: False,
    "ax": axes,
    # data and options of passes
    "x": inputs,
    "y": targets,
    "data": data,
    "standardize": inputs,
    "batch_statistics": inputs,
    "batch_size": lambda: 3,
    "num_samples": lambda: 2,
    "num_warmup": lambda: 2,
    "site": lambda: "obs",
    "max_memory": lambda: 1.0,
    "covariance": lambda: "full",
    "linearize": lambda: True,
    "differentiable": lambda: True,
    # of weights (4, 3)
    "loc": lambda: torch.randn(4, 3),
    "scale": lambda: positive(4, 3),
    "max_scale": lambda: 0.5,
    "max_conditional_scale": lambda: 0.5,
    "max_inducing_scale": lambda: 0.5,
}
# Of arguments by these names, for the model that is given, if any.
USUAL_GUIDES = {"guide": ps.MeanFieldGuide, "posterior": ps.MeanFieldGuide, "center": ps.MAPGuide}


def of_likelihood(size, **options):
    return {
        "net": ps.bayesianize(nn.Linear(3, size)),
        "num_data": SIZE,
        "output": lambda result: result,
        **options,
    }


OF_MODELS: dict[str, Callable[[], dict[str, Any]]] = {
    "Classifier": lambda: of_likelihood(2, class_weights=torch.ones(2)),
    "TokenClassifier": lambda: of_likelihood(2),
    "Regressor": lambda: of_likelihood(1, noise_scale=0.3, noise=None, df=3.0, standardize=data()),
    "BinaryClassifier": lambda: of_likelihood(1),
    "PoissonRegressor": lambda: of_likelihood(1),
    "LastLayer": lambda: {"features": nn.Linear(3, 4), "head": nn.Linear(4, 2)},
    "FanIn": lambda: {"scale": 1.0, "fan_in": None},
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


OF_GUIDES: dict[str, Callable[[], dict[str, Any]]] = {
    "AutoLowRankLRT": lambda: {"diagonal": "constant", "diagonal_variance": 0.1, "alpha": 1.0},
    "GlobalInducingGuide": lambda: {
        "inputs": torch.randn(4, 3),
        "families": {"*.bias": f.MeanField()},
        "first_layer": f.MatrixNormalFamily(),
        "join_bias": False,
        "init_loc_fn": None,
        "local_reparam": False,
    },
    "InducingWeightGuide": lambda: {"inducing_shape": (2, 2), "ensemble_size": None},
    "MixtureGuide": lambda: {"make_guide": ps.MeanFieldGuide, "size": 2, "starts": None},
    "StructuredGuide": lambda: {"families": {"*": f.MeanField()}},
    "SubnetworkGuide": lambda: {
        "chosen": {"net.0.weight": torch.eye(4, 3, dtype=torch.bool)},
        "posterior": f.FullCovariance(),
        "init_loc_fn": None,
    },
    "estimate_memory": lambda: {"make_guide": ps.KTiedGuide, "rank": 2},
    "Dropout": lambda: {"input_dim": 1},
    "InducingWeights": lambda: {
        "shape": (2, 2),
        "posterior": f.MatrixNormalFamily(),
        "prior_scale": 1.0,
    },
    "LowRank": lambda: {"diagonal": "constant", "diagonal_variance": 0.1, "alpha": 1.0},
    "Subnetwork": lambda: {
        "chosen": {"w": torch.eye(4, 3, dtype=torch.bool)},
        "posterior": f.FullCovariance(),
    },
}


def initialized_parts():
    parts = model_and()
    parts["guide"].initialize(inputs(), targets())
    return parts


def saved_parts():
    parts = model_and()
    path = Path(tempfile.mkdtemp(dir=FILES.name)) / "posterior.safetensors"
    ps.save(path, **parts)
    return {"path": path, **parts}


OF_FITS: dict[str, Callable[[], dict[str, Any]]] = {
    "weigh_by_bound": lambda: {**passes(mixture), "num_particles": 2},
    "weigh_by_stacking": lambda: passes(mixture),
    "LinearAnnealing": lambda: {"num_steps": 10},
    "CosineDecay": lambda: {"num_steps": 10},
    "CompiledSVI": lambda: {
        "optim": pyro.optim.Adam({"lr": 0.01}),
        "loss": ps.StructuredELBO(),
        "backend": None,
    },
    "fit": lambda: {
        "num_epochs": None,
        "num_steps": 2,
        "lr": 0.01,
        "optimizer": torch.optim.SGD,
        "elbo": ps.StructuredELBO(),
        "kl_weight": 1.0,
        "checkpoint": ps.Checkpoint(Path(tempfile.mkdtemp(dir=FILES.name)) / "run.pt"),
        "validation": ps.Validation(data()),
    },
    "Checkpoint": lambda: {"path": "run.pt", "every": 5, "resume": True},
    "Validation": lambda: {"metric": lambda prediction, y: 0.0, "every": 2, "patience": 5},
    "StructuredAdam": lambda: {
        "guide": (guide := ps.MeanFieldGuide(regressor())),
        "parameters": [*guide.parameters()],
    },
    # using the posterior
    "save": saved_parts,
    "load": saved_parts,
    "predict": lambda: {
        **model_and("posterior", make=normalized_regressor),
        "x": inputs(),
    },
    "predict_moments": lambda: {"x": inputs()},
    "to_inference_data": lambda: {
        **model_and("posterior", make=normalized_regressor),
        "sites": ["net.*"],
        "functions": {"norm": lambda draw: draw["net.1.weight"].norm()},
        "outputs": True,
    },
    "prune_inducing_factors": lambda: {
        "guide": ps.InducingWeightGuide(regressor(), (2, 2)),
        "amount": 0.5,
    },
    "prune_mean_field": lambda: {"amount": 0.5},
    "largest": lambda: {"variances": {"w": positive(4, 3)}, "size": 2},
    "tie_scales": lambda: {"rank": 2, "steps": 5},
    "mclmc": lambda: {
        **initialized_parts(),
        "num_draws": 4,
        "num_chains": 2,
        "thinning": 1,
        "initial_energy_variance": 1e-2,
    },
    "nuts": lambda: {"num_samples": 4, "num_chains": 1},
}


OF_FIGURES: dict[str, Callable[[], dict[str, Any]]] = {
    **{
        name: lambda: {"probabilities": probabilities(), "y": torch.arange(SIZE) % 3}
        for name in ("classification_scores", "plot_reliability")
    },
    "predictive_distance": lambda: {"functions": torch.randn(5, 4), "reference": torch.randn(6, 4)},
    "wasserstein": lambda: {"draws": torch.randn(5, 4), "reference": torch.randn(6, 4)},
    **{
        name: lambda: {"probabilities": probabilities(), "reference": probabilities()}
        for name in ("agreement", "total_variation")
    },
    "regression_scores": lambda: {
        "prediction": normal_prediction(torch.zeros(SIZE), 1.0, torch.zeros(SIZE), draws=4),
        "y": torch.randn(SIZE),
    },
    "conformal_interval": lambda: {
        "prediction": normal_prediction(torch.zeros(4), 1.0, torch.zeros(4), draws=4),
        "calibration": normal_prediction(torch.zeros(SIZE), 1.0, torch.zeros(SIZE), draws=4),
        "y": torch.randn(SIZE),
        "level": 0.5,
    },
    "conformal_sets": lambda: {
        "probabilities": torch.full((4, 2), 0.5),
        "calibration": torch.full((SIZE, 2), 0.5),
        "y": torch.zeros(SIZE, dtype=torch.long),
        "level": 0.5,
    },
    "risk_coverage": lambda: {"uncertainty": torch.randn(SIZE), "loss": torch.rand(SIZE)},
    "detection_scores": lambda: {"inside": torch.randn(SIZE), "outside": torch.randn(4)},
    # diagnostics
    "gradient_snr": lambda: {**passes(), "objective": ps.StructuredELBO()},
    "spectra": lambda: {"guide": ps.KTiedGuide(regressor(), rank=2)},
    "pareto_k": lambda: {**passes(), "num_samples": 100},
    "expected_coverage": lambda: {
        "prediction": normal_prediction(torch.zeros(SIZE, 1), 1.0),
        "levels": [0.5, 0.9],
    },
    "plot_band": lambda: {
        "x": torch.linspace(-1, 1, SIZE),
        "mean": torch.randn(SIZE),
        "scale": positive(SIZE),
        "lower": None,
        "upper": None,
        "data_x": torch.randn(4),
        "data_y": torch.randn(4),
        "truth": torch.randn(SIZE),
    },
    "plot_coverage": lambda: {
        "levels": torch.linspace(0.1, 0.9, SIZE),
        "coverage": torch.rand(SIZE),
        "label": "mean field",
        "num_examples": 50,
    },
    "plot_elbo": lambda: {"history": infer.History(elbo=[-2.0, -1.0], kl=[1.0, 2.0])},
    "plot_importance": lambda: {"log_weights": torch.randn(SIZE)},
}


OF_DISTRIBUTIONS: dict[str, Callable[[], dict[str, Any]]] = {
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
    "BernoulliDropout": lambda: {"rate": 0.2},
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
    "IsotropicStudentT": lambda: {
        "df": positive(2),
        "scale": positive(2),
        "event_shape": (4, 3),
        "dim": 1,
    },
    "JoinedPrior": lambda: {
        "weight": dist.Normal(torch.zeros(4, 3), 1.0).to_event(2),
        "bias": dist.Normal(torch.zeros(4), 1.0).to_event(1),
    },
    "LogScaleNormal": lambda: {"log_scale": torch.randn(4, 3)},
    "LowRankNormal": lambda: {"factors": torch.randn(2, 4, 3), "alpha": 0.5},
    "PointMass": lambda: {
        "value": torch.randn(4, 3),
        "mean": torch.randn(4, 3),
        "variance": positive(4, 3),
    },
    "PointMixture": lambda: {"members": torch.randn(5, 4, 3)},
    "PrunedNormal": lambda: {"kept": torch.rand(4, 3) > 0.5},
    "ScaleMixtureNormal": lambda: {"scales": positive(2), "probs": positive(2)},
}
