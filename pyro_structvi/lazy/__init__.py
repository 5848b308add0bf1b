"""Weights that are drawn when, and as what, they are used."""
