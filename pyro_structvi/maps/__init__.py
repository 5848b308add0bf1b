"""Linear maps, and the calls of torch that are read as maps."""

from pyro_structvi.maps.convolution import ConvolutionMap
from pyro_structvi.maps.dense import BiasColumnMap, DenseMap
from pyro_structvi.maps.linear_map import FactoredDraw, LinearMap, shape_per_example
from pyro_structvi.maps.readings import Arrangement

__all__ = [
    "Arrangement",
    "BiasColumnMap",
    "ConvolutionMap",
    "DenseMap",
    "FactoredDraw",
    "LinearMap",
    "shape_per_example",
]
