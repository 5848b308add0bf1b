"""The guides that the tests of models and objectives run over; a new one is added here."""

import pytest

import pyro_structvi as ps

GUIDES = {
    "mean field": ps.MeanFieldGuide,
    "k-tied": ps.KTiedGuide,
    "k-tied, joined": lambda model, **options: ps.KTiedGuide(model, join_bias=True, **options),
    "matrix normal": ps.MatrixNormalGuide,
    "matrix normal, joined": lambda model, **options: ps.MatrixNormalGuide(
        model, join_bias=True, **options
    ),
    "rowwise": ps.RowwiseGuide,
    "rowwise, joined": lambda model, **options: ps.RowwiseGuide(model, join_bias=True, **options),
    "low rank": lambda model, **options: ps.AutoLowRankLRT(model, rank=2, **options),
    "low rank and full diagonal, joined": lambda model, **options: ps.AutoLowRankLRT(
        model, rank=2, diagonal="full", join_bias=True, **options
    ),
    "full covariance": ps.FullCovarianceGuide,
    "inducing weights": lambda model, **options: ps.InducingWeightGuide(model, (3, 2), **options),
    "inducing weights, full, not joined": lambda model, **options: ps.InducingWeightGuide(
        model, (3, 2), "full", join_bias=False, **options
    ),
    "inducing weights, ensemble": lambda model, **options: ps.InducingWeightGuide(
        model, (3, 2), "ensemble", ensemble_size=3, **options
    ),
}

# Without a density over weights, and so without the closed forms that the guides above have.
POINTS = {
    "points": ps.MAPGuide,
    "ensemble": lambda model, **options: ps.EnsembleGuide(model, 3, **options),
    "dropout": lambda model, **options: ps.MCDropoutGuide(model, rate=0.2, **options),
}

SLOW = ("inducing weights, full, not joined", "inducing weights, ensemble")

# For tests of some seconds each.
GUIDE_NAMES = [
    pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in GUIDES
]
