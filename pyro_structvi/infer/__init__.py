"""The objective and its optimization."""

from pyro_structvi.infer.elbo import ELBOTerms, SampledKLWarning, StructuredELBO
from pyro_structvi.infer.schedules import CosineDecay, LinearAnnealing

__all__ = [
    "CosineDecay",
    "ELBOTerms",
    "LinearAnnealing",
    "SampledKLWarning",
    "StructuredELBO",
]
