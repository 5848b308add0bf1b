"""Diagnostics of a fitted guide: noise of gradients, spectra, importance weights, coverage."""

from pyro_structvi.diagnostics.coverage import Coverage, expected_coverage
from pyro_structvi.diagnostics.gradient_noise import GradientNoise, gradient_snr
from pyro_structvi.diagnostics.importance import ImportanceDiagnosis, pareto_k
from pyro_structvi.diagnostics.spectra import Spectrum, spectra
from pyro_structvi.posterior.warm_start import k_tied_from_mean_field as compress_scales

__all__ = [
    # training
    "GradientNoise",
    "gradient_snr",
    # the guide itself
    "Spectrum",
    "compress_scales",
    "spectra",
    # how close it is to the posterior
    "ImportanceDiagnosis",
    "pareto_k",
    # its predictions
    "Coverage",
    "expected_coverage",
]
