"""What a fitted guide is like: noise of gradients, spectra, distance to the posterior, calibration."""

from pyro_structvi.diagnostics.coverage import Coverage, expected_coverage
from pyro_structvi.diagnostics.fit_report import report
from pyro_structvi.diagnostics.gradient_noise import GradientNoise, gradient_snr
from pyro_structvi.diagnostics.importance import ImportanceDiagnosis, pareto_k
from pyro_structvi.diagnostics.simulation_calibration import (
    CalibrationRanks,
    ModelDraw,
    simulation_based_calibration,
)
from pyro_structvi.diagnostics.spectra import Spectrum, spectra
from pyro_structvi.posterior.warm_start import k_tied_from_mean_field as compress_scales

__all__ = [
    # all of it on one page
    "report",
    # training
    "GradientNoise",
    "gradient_snr",
    # the guide itself
    "Spectrum",
    "compress_scales",
    "spectra",
    # how close it is to the posterior
    "CalibrationRanks",
    "ImportanceDiagnosis",
    "ModelDraw",
    "pareto_k",
    "simulation_based_calibration",
    # its predictions
    "Coverage",
    "expected_coverage",
]
