"""Distributions over weights, and lazily sampled weights."""
