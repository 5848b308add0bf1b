"""Moments of a net's output in one pass, without draws of its weights."""

from pyro_structvi.moments.net import NetMoments
from pyro_structvi.moments.random_tensor import RandomTensor, Settings

__all__ = ["NetMoments", "RandomTensor", "Settings"]
