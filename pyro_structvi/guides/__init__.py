"""Guides: which family goes on which site of a model."""

from pyro_structvi.guides import short_forms
from pyro_structvi.guides.global_inducing import GlobalInducingGuide
from pyro_structvi.guides.inducing_weights import InducingWeightGuide
from pyro_structvi.guides.local_latents import LocalLatentWarning
from pyro_structvi.guides.memory_estimate import MemoryEstimate, estimate_memory
from pyro_structvi.guides.points import EnsembleGuide, MAPGuide, MCDropoutGuide
from pyro_structvi.guides.pyro_autoguide import ModelStateWarning, NewParametersWarning
from pyro_structvi.guides.report import GuideReport, ParameterReport
from pyro_structvi.guides.short_forms import *  # noqa: F403  (a new short form is named there alone)
from pyro_structvi.guides.sites import OtherRowsWarning, UnusedSiteWarning
from pyro_structvi.guides.structured import StructuredGuide
from pyro_structvi.guides.subnetwork import SubnetworkGuide

__all__ = [
    "EnsembleGuide",
    "GlobalInducingGuide",
    "GuideReport",
    "InducingWeightGuide",
    "LocalLatentWarning",
    "MAPGuide",
    "MCDropoutGuide",
    "MemoryEstimate",
    "NewParametersWarning",
    "ModelStateWarning",
    "OtherRowsWarning",
    "ParameterReport",
    "StructuredGuide",
    "SubnetworkGuide",
    "UnusedSiteWarning",
    "estimate_memory",
]
__all__ += short_forms.__all__
