"""Inducing weights: the joint prior, the distributions of a weight given it, Matheron's rule, the KL."""

from pyro_structvi.distributions.inducing import kl as kl  # registers the divergences
from pyro_structvi.distributions.inducing.augmented import AugmentedNormal
from pyro_structvi.distributions.inducing.conditional import ConditionalNormal
from pyro_structvi.distributions.inducing.joint import AugmentedMatrixNormal
from pyro_structvi.distributions.inducing.normal import InducingNormal
from pyro_structvi.distributions.inducing.prior import InducingSide

__all__ = [
    "AugmentedMatrixNormal",
    "AugmentedNormal",
    "ConditionalNormal",
    "InducingNormal",
    "InducingSide",
]
