"""Valid arguments of metrics, figures and diagnostics."""

from collections.abc import Callable
from typing import Any

import torch
from matplotlib.figure import Figure

import pyro_structvi as ps
from pyro_structvi import infer
from tests.bad_input.samples import (
    SIZE,
    axes,
    passes,
    positive,
    prediction,
    prediction_of_classes,
    probabilities,
    regressor,
    targets,
)
from tests.predictions import normal_prediction

VALID: dict[str, Callable[[], dict[str, Any]]] = {
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
    "spectra": lambda: {"guide": ps.KTiedGuide(regressor(), rank=2)},
    "compress_scales": lambda: {"guide": ps.MeanFieldGuide(regressor()), "rank": 1},
    "pareto_k": lambda: {**passes(), "num_samples": 100},
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
}
