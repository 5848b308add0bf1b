"""Moments of a net's outputs in one pass, without draws of its weights."""

from pyro_structvi.moments.net import output_moments
from pyro_structvi.moments.random_tensor import RandomTensor, Settings

__all__ = ["RandomTensor", "Settings", "output_moments"]
