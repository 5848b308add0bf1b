"""Uses of a posterior: draws, predictions, files, inference data, scores, pruning, warm starts."""

from pyro_structvi.posterior import element_scores, pruning, warm_start
from pyro_structvi.posterior.files import load, save
from pyro_structvi.posterior.inference_data import to_inference_data
from pyro_structvi.posterior.one_pass import predict_moments
from pyro_structvi.posterior.prediction import Prediction, predict
from pyro_structvi.posterior.runs import SharedStatisticsWarning

__all__ = [
    "Prediction",
    "SharedStatisticsWarning",
    "element_scores",
    "load",
    "predict",
    "predict_moments",
    "pruning",
    "save",
    "to_inference_data",
    "warm_start",
]
