"""Structured posteriors, one to a file: distribution, family, guide."""
