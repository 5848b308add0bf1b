"""Tests of the distributions over weights: one suite for all of them, and what each has alone."""
