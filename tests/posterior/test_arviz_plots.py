"""Every plot that ArviZ has, of either version, on a regressor, a classifier and counts."""

import sys
import warnings
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import pyro_structvi as ps
from pyro_structvi.posterior.inference_data import import_arviz
from tests.models import make_classifier, make_regressor

pytest.importorskip("matplotlib").use("agg")
az = import_arviz()
IS_OLD = hasattr(az, "psislw")

# What a plot needs beside the draws of a guide.
NEEDS = {
    "plot_bf": "draws of the prior",
    "plot_ecdf_pit": "a posterior of each of many simulated data sets",
    "plot_energy": "statistics of a sampler",
    "plot_parallel": "statistics of a sampler",
    "plot_ppc_censored": "times at which observations are censored",
    "plot_prior_posterior": "draws of the prior",
    "plot_psense_dist": "log densities of the prior",
    "plot_psense_quantities": "log densities of the prior",
}
NEEDS_IN_1 = {
    "plot_combine": "plots to combine",
    "plot_dgof_dist": "an xarray that makes a data set of a data set, which the newest does not",
    "plot_lm": "inputs, in a group `constant_data`",
    "plot_ppc_pava_residuals": "inputs, in a group `constant_data`",
    "plot_rank_dist": "an xarray that makes a data set of a data set, which the newest does not",
    "plot_trace_dist": "an xarray that makes a data set of a data set, which the newest does not",
}
COUNTS_ONLY = {"plot_ppc_rootogram"}
NO_PLOTS = {"plot_collection", "plot_matrix"}


def installed(version):
    """Return a module that makes data, and one that plots them, or skip."""
    if version == "0.23":
        return (az, az) if IS_OLD else pytest.skip("ArviZ 0.23 is not installed")
    if not IS_OLD:
        return az, az
    if find_spec("arviz_plots") is None:
        pytest.skip("neither ArviZ 1.x nor its part arviz-plots is installed")
    import arviz_base
    import arviz_plots
    import arviz_stats

    functions = SimpleNamespace(loo=arviz_stats.loo, compare=arviz_stats.compare)
    vars(functions).update(vars(arviz_plots))
    return arviz_base, functions


def make_counts(size):
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    return ps.PoissonRegressor(ps.bayesianize(net, prior=1.0), size)


MODELS = {
    "regressor": (make_regressor, lambda size: torch.randn(size, 1)),
    "classifier": (make_classifier, lambda size: torch.randint(3, (size,))),
    "counts": (make_counts, lambda size: torch.poisson(torch.full((size, 1), 3.0))),
}


def draw_plot(functions, name, data):
    plot = getattr(functions, name)
    if name == "plot_compare":
        return plot(functions.compare({"one": data, "other": data}))
    if name == "plot_khat":
        return plot(functions.loo(data, pointwise=True))
    if name == "plot_pair_focus":
        return plot(data, focus_var="focus")
    if not hasattr(functions, "psislw"):
        return plot(data)
    if name in {"plot_dist", "plot_dot", "plot_ecdf", "plot_kde"}:
        return plot(data["posterior"]["outputs"].values[0, :, 0].reshape(-1))
    if name == "plot_hdi":
        return plot(np.arange(6), data["posterior_predictive"]["obs"])
    if name == "plot_elpd":
        return plot({"one": data, "other": data})
    options = {
        "plot_lm": {"idata": data, "y": "obs"},
        "plot_loo_pit": {"y": "obs"},
        "plot_separation": {"y": "obs", "y_hat": "obs"},
        "plot_ts": {"y": "obs", "num_samples": 20},
    }
    options = options.get(name, {})
    return plot(**options) if "idata" in options else plot(data, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("version", ["0.23", "1.x"])
def test_every_plot(version, kind, monkeypatch):
    makes_data, functions = installed(version)
    plt = pytest.importorskip("matplotlib.pyplot")
    make_model, make_y = MODELS[kind]
    model = make_model(6)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "arviz", makes_data)
        guide = ps.MeanFieldGuide(model, init_scale=0.1)
        x = torch.randn(6, 3)
        data = ps.to_inference_data(
            model,
            guide,
            x,
            make_y(6),
            50,
            sites=(),
            functions={"focus": lambda draw: draw["net.0.bias"][0]},
            outputs=True,
        )
    needs = NEEDS | (NEEDS_IN_1 if version == "1.x" else {})
    skipped = {*needs, *NO_PLOTS, *(COUNTS_ONLY if kind == "regressor" else ())}
    names = [each for each in dir(functions) if each.startswith("plot_") and each not in skipped]
    assert len(names) > 20
    failed = {}
    for name in names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # few draws; ArviZ calls others in ways that they drop
            try:
                draw_plot(functions, name, data)
            except Exception as error:
                failed[name] = repr(error)
        plt.close("all")
    assert not failed, failed
