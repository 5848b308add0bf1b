"""The guides that the tests of models and objectives run over; a new one is added here."""

import pyro_structvi as ps

GUIDES = {
    "mean field": ps.MeanFieldGuide,
    "k-tied": ps.KTiedGuide,
    "k-tied, joined": lambda model, **options: ps.KTiedGuide(model, join_bias=True, **options),
    "matrix normal": ps.MatrixNormalGuide,
    "matrix normal, joined": lambda model, **options: ps.MatrixNormalGuide(
        model, join_bias=True, **options
    ),
    "low rank": lambda model, **options: ps.AutoLowRankLRT(model, rank=2, **options),
    "low rank and full diagonal, joined": lambda model, **options: ps.AutoLowRankLRT(
        model, rank=2, diagonal="full", join_bias=True, **options
    ),
    "full covariance": ps.FullCovarianceGuide,
}
