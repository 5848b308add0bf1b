"""Nets with priors, and likelihoods around them."""

from pyro_structvi.nn.bayesianize import PointEstimateWarning, bayesianize
from pyro_structvi.nn.likelihoods import Classifier, Regressor
from pyro_structvi.nn.priors import FanIn, HierarchicalScale
from pyro_structvi.nn.rank_one import (
    RankOne,
    RankOneConv1d,
    RankOneConv2d,
    RankOneConv3d,
    RankOneLinear,
)
from pyro_structvi.nn.walsh_hadamard import (
    WalshHadamard,
    WalshHadamardConv1d,
    WalshHadamardConv2d,
    WalshHadamardConv3d,
    WalshHadamardLinear,
)

__all__ = [
    "Classifier",
    "FanIn",
    "HierarchicalScale",
    "PointEstimateWarning",
    "RankOne",
    "RankOneConv1d",
    "RankOneConv2d",
    "RankOneConv3d",
    "RankOneLinear",
    "Regressor",
    "WalshHadamard",
    "WalshHadamardConv1d",
    "WalshHadamardConv2d",
    "WalshHadamardConv3d",
    "WalshHadamardLinear",
    "bayesianize",
]
