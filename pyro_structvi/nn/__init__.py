"""Nets with priors, and likelihoods around them."""

from pyro_structvi.nn.conversion import LastLayer, PointEstimateWarning, bayesianize
from pyro_structvi.nn.likelihood import BinaryClassifier, Classifier
from pyro_structvi.nn.priors import FanIn, HierarchicalScale
from pyro_structvi.nn.rank_one import (
    RankOne,
    RankOneConv1d,
    RankOneConv2d,
    RankOneConv3d,
    RankOneLinear,
)
from pyro_structvi.nn.regressors import PoissonRegressor, Regressor
from pyro_structvi.nn.tokens import TokenClassifier
from pyro_structvi.nn.walsh_hadamard import (
    WalshHadamard,
    WalshHadamardConv1d,
    WalshHadamardConv2d,
    WalshHadamardConv3d,
    WalshHadamardLinear,
)

__all__ = [
    "BinaryClassifier",
    "Classifier",
    "FanIn",
    "HierarchicalScale",
    "LastLayer",
    "PointEstimateWarning",
    "PoissonRegressor",
    "RankOne",
    "RankOneConv1d",
    "RankOneConv2d",
    "RankOneConv3d",
    "RankOneLinear",
    "Regressor",
    "TokenClassifier",
    "WalshHadamard",
    "WalshHadamardConv1d",
    "WalshHadamardConv2d",
    "WalshHadamardConv3d",
    "WalshHadamardLinear",
    "bayesianize",
]
