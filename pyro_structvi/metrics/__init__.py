"""How good predictions are: scores of regressions, classes, detection, selection, and distances."""

from pyro_structvi.metrics.classification import (
    BinaryScores,
    ClassificationScores,
    accuracy,
    adaptive_calibration_error,
    binary_scores,
    brier_score,
    classification_scores,
    classwise_calibration_error,
    expected_calibration_error,
    nll,
)
from pyro_structvi.metrics.corruptions import CORRUPTIONS, corrupt
from pyro_structvi.metrics.detection import (
    DetectionScores,
    RiskCoverage,
    detect,
    detection_scores,
    entropy_score,
    max_probability_score,
    mutual_information_score,
    ood_scores,
    risk_coverage,
)
from pyro_structvi.metrics.distances import (
    PredictiveDistance,
    agreement,
    predictive_distance,
    total_variation,
    wasserstein,
)
from pyro_structvi.metrics.regression import (
    RegressionScores,
    crps,
    interval_coverage,
    interval_width,
    log_predictive_density,
    regression_scores,
    rmse,
)

__all__ = [
    # of regressions
    "RegressionScores",
    "crps",
    "interval_coverage",
    "interval_width",
    "log_predictive_density",
    "regression_scores",
    "rmse",
    # of classes
    "ClassificationScores",
    "accuracy",
    "adaptive_calibration_error",
    "brier_score",
    "classification_scores",
    "classwise_calibration_error",
    "expected_calibration_error",
    "nll",
    # of independent labels
    "BinaryScores",
    "binary_scores",
    # of uncertainty: examples from elsewhere, and examples that are left out
    "DetectionScores",
    "RiskCoverage",
    "detect",
    "detection_scores",
    "entropy_score",
    "max_probability_score",
    "mutual_information_score",
    "ood_scores",
    "risk_coverage",
    # images that are harder to classify
    "CORRUPTIONS",
    "corrupt",
    # between the predictions of two posteriors
    "PredictiveDistance",
    "agreement",
    "predictive_distance",
    "total_variation",
    "wasserstein",
]
