"""Inducing weights."""

from pyro_structvi.structures.inducing import kl as kl  # registers the divergences
