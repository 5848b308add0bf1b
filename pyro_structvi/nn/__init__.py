"""Nets with priors, and likelihoods around them."""

from pyro_structvi.nn.conversion import PointEstimateWarning, bayesianize
from pyro_structvi.nn.last_layer import LastLayer
from pyro_structvi.nn.layers.rank_one import (
    RankOne,
    RankOneConv1d,
    RankOneConv2d,
    RankOneConv3d,
    RankOneLinear,
)
from pyro_structvi.nn.layers.walsh_hadamard import (
    WalshHadamardConv1d,
    WalshHadamardConv2d,
    WalshHadamardConv3d,
    WalshHadamardLinear,
)
from pyro_structvi.nn.layers.walsh_hadamard_conversion import WalshHadamard
from pyro_structvi.nn.likelihoods import (
    BinaryClassifier,
    Classifier,
    PoissonRegressor,
    Regressor,
    TokenClassifier,
)
from pyro_structvi.nn.priors import FanIn, HierarchicalScale

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
