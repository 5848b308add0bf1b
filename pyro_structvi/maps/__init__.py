"""Linear maps, and the calls of torch that are read as maps."""

from pyro_structvi.maps.arrangement import Arrangement
from pyro_structvi.maps.bias_column import BiasColumnMap
from pyro_structvi.maps.convolution import ConvolutionMap
from pyro_structvi.maps.dense import DenseMap
from pyro_structvi.maps.linear_map import FactoredDraw, LinearMap, shape_per_example

__all__ = [
    "Arrangement",
    "BiasColumnMap",
    "ConvolutionMap",
    "DenseMap",
    "FactoredDraw",
    "LinearMap",
    "shape_per_example",
]
