"""The objective and its optimization."""

from pyro_structvi.infer.compiled_svi import CompiledSVI
from pyro_structvi.infer.data.data_size import NumDataWarning
from pyro_structvi.infer.data.first_batch import DataScaleWarning, SlowFamilyWarning
from pyro_structvi.infer.elbo import SampledKLWarning, StructuredELBO
from pyro_structvi.infer.history import History
from pyro_structvi.infer.schedules import CosineDecay, LinearAnnealing
from pyro_structvi.infer.steps.compiled import CompileFallbackWarning
from pyro_structvi.infer.structured_adam import StructuredAdam
from pyro_structvi.infer.tensorboard import TensorBoard
from pyro_structvi.infer.terms import ELBOTerms
from pyro_structvi.infer.training import fit

__all__ = [
    "CompileFallbackWarning",
    "CompiledSVI",
    "CosineDecay",
    "DataScaleWarning",
    "ELBOTerms",
    "History",
    "LinearAnnealing",
    "NumDataWarning",
    "SampledKLWarning",
    "SlowFamilyWarning",
    "StructuredELBO",
    "StructuredAdam",
    "TensorBoard",
    "fit",
]
