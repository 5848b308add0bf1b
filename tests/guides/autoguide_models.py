"""Models that Pyro's guides and ours are compared on."""

import pyro
import pytest
from pyro.infer import SVI

import pyro_structvi as ps

NORMAL = {
    "mean field": ps.MeanFieldGuide,
    "k-tied": lambda model, **options: ps.KTiedGuide(model, rank=2, **options),
    "low rank": lambda model, **options: ps.AutoLowRankLRT(model, rank=2, **options),
    "full": ps.FullCovarianceGuide,
    "matrix normal": ps.MatrixNormalGuide,
    "rowwise": ps.RowwiseGuide,
    "inducing weights": lambda model, **options: ps.InducingWeightGuide(model, (2, 2), **options),
}
GUIDES = NORMAL | {
    "points": ps.MAPGuide,
    "ensemble": lambda model, **options: ps.EnsembleGuide(model, 3, **options),
    "dropout": ps.MCDropoutGuide,
}
PROBS = [0.1, 0.5, 0.9]

every_guide = pytest.mark.parametrize("make_guide", GUIDES.values(), ids=GUIDES)


def train(model, guide, loss, data, steps=3):
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 1e-3}), loss)
    return [svi.step(*data) for _ in range(steps)]
