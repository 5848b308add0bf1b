"""Layers whose weight is a function of a small random factor."""
