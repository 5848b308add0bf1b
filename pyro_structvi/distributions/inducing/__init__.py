"""Inducing weights: the joint prior, the distributions given it, Matheron's rule, the KL."""
