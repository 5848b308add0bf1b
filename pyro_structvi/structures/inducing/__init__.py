"""Inducing weights."""
