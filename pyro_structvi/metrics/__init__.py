"""Scores of predictions, conformal intervals, and distances between posteriors."""

from pyro_structvi.metrics.conformal import conformal_interval, conformal_sets
from pyro_structvi.metrics.distances import (
    PredictiveDistance,
    agreement,
    predictive_distance,
    total_variation,
    wasserstein,
)
from pyro_structvi.metrics.scores import (
    ClassificationScores,
    DetectionScores,
    RegressionScores,
    RiskCoverage,
    classification_scores,
    detection_scores,
    regression_scores,
    risk_coverage,
)

__all__ = [
    # predictions
    "ClassificationScores",
    "RegressionScores",
    "classification_scores",
    "regression_scores",
    # uncertainties
    "DetectionScores",
    "RiskCoverage",
    "detection_scores",
    "risk_coverage",
    # coverage on other data
    "conformal_interval",
    "conformal_sets",
    # predictions of two posteriors
    "PredictiveDistance",
    "agreement",
    "predictive_distance",
    "total_variation",
    "wasserstein",
]
