"""Valid arguments of metrics, figures and diagnostics."""

from collections.abc import Callable
from typing import Any

import torch

import pyro_structvi as ps
from pyro_structvi import infer
from tests.bad_input.samples import SIZE, passes, positive, probabilities, regressor, targets
from tests.predictions import normal_prediction

VALID: dict[str, Callable[[], dict[str, Any]]] = {
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
    "gradient_snr": lambda: {**passes(), "num_samples": 2, "objective": ps.StructuredELBO()},
    "spectra": lambda: {"guide": ps.KTiedGuide(regressor(), rank=2)},
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
    "plot_elbo": lambda: {
        "history": infer.History(elbo=[-2.0, -1.0], kl=[1.0, 2.0]),
    },
    "plot_importance": lambda: {"log_weights": torch.randn(SIZE)},
    "plot_scale_matrix": lambda: {"scale": positive(4, 3)},
}
