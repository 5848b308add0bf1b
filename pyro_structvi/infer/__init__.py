"""The objective and its optimization."""

from pyro_structvi.infer.checkpoint import Checkpoint
from pyro_structvi.infer.compiled_svi import CompiledSVI
from pyro_structvi.infer.data_warnings import (
    DataScaleWarning,
    NumDataWarning,
    SharedParametersWarning,
    SlowFamilyWarning,
    VanishingNoiseWarning,
)
from pyro_structvi.infer.elbo import (
    CosineDecay,
    LinearAnnealing,
    SampledKLWarning,
    StructuredELBO,
)
from pyro_structvi.infer.history import History
from pyro_structvi.infer.mixture_weights import weigh_by_bound, weigh_by_stacking
from pyro_structvi.infer.steps.compiled import CompileFallbackWarning
from pyro_structvi.infer.structured_adam import StructuredAdam
from pyro_structvi.infer.terms import ELBOTerms
from pyro_structvi.infer.training import fit
from pyro_structvi.infer.validation import Validation

__all__ = [
    "Checkpoint",
    "CompileFallbackWarning",
    "CompiledSVI",
    "CosineDecay",
    "DataScaleWarning",
    "ELBOTerms",
    "History",
    "LinearAnnealing",
    "NumDataWarning",
    "SampledKLWarning",
    "SharedParametersWarning",
    "SlowFamilyWarning",
    "StructuredELBO",
    "StructuredAdam",
    "Validation",
    "VanishingNoiseWarning",
    "fit",
    "weigh_by_bound",
    "weigh_by_stacking",
]
