"""Guides to prune."""

import pyro_structvi as ps
from tests.models import make_regressor, regression_data


def make_guide(kind, model=None):
    model = make_regressor() if model is None else model
    if kind == "mean field":
        return ps.MeanFieldGuide(model, init_scale=0.1)
    return ps.InducingWeightGuide(model, inducing_shape=(2, 2), init_scale=0.1)


def fit(model, guide, num_steps=5):
    data = regression_data()
    return ps.fit(model, guide, data, num_steps=num_steps, lr=0.02, progress=False)
