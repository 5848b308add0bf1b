"""Linear maps, and the calls of torch that are read as maps."""

from pyro_structvi.maps.calls import Arrangement
from pyro_structvi.maps.convolution import ConvolutionMap
from pyro_structvi.maps.linear_map import (
    BiasColumnMap,
    DenseMap,
    FactoredDraw,
    LinearMap,
    shape_per_example,
)

__all__ = [
    "Arrangement",
    "BiasColumnMap",
    "ConvolutionMap",
    "DenseMap",
    "FactoredDraw",
    "LinearMap",
    "shape_per_example",
]
