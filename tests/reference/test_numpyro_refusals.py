"""Models without a translation to NumPyro raise errors with a reason."""

import importlib
import sys

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule, PyroSample
from torch import nn

import pyro_structvi.reference
from pyro_structvi import (
    Classifier,
    Regressor,
    bayesianize,
)
from pyro_structvi.moments.nonlinear import NONLINEARITIES
from pyro_structvi.moments.rules import RULES
from pyro_structvi.reference import jax_net, to_numpyro
from tests.reference.translated_models import NUM_DATA, Calls, make_regressor


def choose_by_value(h):
    return h if h.sum() > 0 else -h


def sample_inside(h):
    return h + pyro.sample("z", dist.Normal(0.0, 1.0))


# ---- what cannot be translated -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (nn.Conv1d(3, 1, 1), r"module 'net' \(Conv1d\) has no translation .*Supported.* ELU.*cat"),
        (
            nn.Sequential(nn.Linear(3, 5), nn.Sequential(nn.LayerNorm(5))),
            r"module 'net\.1\.0' \(LayerNorm\) has no translation",
        ),
        (Calls(torch.erf), r"function `erf` in .* 'net' \(Calls\) has no translation"),
        (Calls(lambda h: h.cumsum(0)), r"function `cumsum` in .* 'net' \(Calls\) has no"),
        (
            nn.Sequential(Calls(lambda h: torch.div(h, 2, rounding_mode="floor"))),
            r"function `div` in .* 'net\.0' \(Calls\) has arguments without.*rounding_mode",
        ),
        (Calls(lambda h: h.new_zeros(h.ndim)), r"attribute `ndim` of a tensor in .* 'net' \(Calls"),
        (
            nn.Sequential(Calls(choose_by_value)),
            r"module 'net\.0' \(Calls\) cannot be traced \(.*control flow",
        ),
        (Calls(sample_inside), r"draws the site 'z' inside a forward pass"),
        (nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)), r"'net\.1' \(Dropout\) is active.*eval"),
    ],
)
def test_a_net_without_translation_is_refused(net, message):
    with pytest.raises(NotImplementedError, match=f"(?s){message}"):
        to_numpyro(make_regressor(net))


def test_models_without_translation_are_refused():
    by_hand = PyroModule[nn.Linear](3, 1)
    by_hand.weight = PyroSample(lambda module: dist.Normal(0.0, 1.0).expand([1, 3]).to_event(2))
    points = bayesianize(nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5)), normalization=False)
    net, data = bayesianize(nn.Linear(3, 1)), (torch.randn(5, 3), torch.randn(5, 1))
    frozen = nn.Linear(3, 1).requires_grad_(False)
    for model, error, message in (
        (nn.Linear(3, 1), TypeError, r"must be a Classifier, .* or Regressor, but got"),
        (Regressor(frozen, 5, 0.3), ValueError, r"no latent site to sample.*bayesianize\(net"),
        (
            Regressor(net, 5, 0.3, standardize=data),
            NotImplementedError,
            "`standardize` must be None",
        ),
        (
            Classifier(net, 5, class_weights=torch.ones(1)),
            NotImplementedError,
            "`class_weights` must be None",
        ),
        (
            make_regressor(nn.Linear(3, 1), dist.Gumbel(0.0, 1.0)),
            NotImplementedError,
            r"site 'net\.weight' is a Gumbel, .* Supported are Beta, .*Uniform",
        ),
        (
            Regressor(by_hand, NUM_DATA, 0.3),
            NotImplementedError,
            r"site 'net\.weight' is a function of its modul",
        ),
        (
            Regressor(points, NUM_DATA, 0.3),
            NotImplementedError,
            r"module 'net\.1' \(LayerNorm\) has point estimates, \['weight', 'bias'\].*freeze",
        ),
    ):
        with pytest.raises(error, match=message):
            to_numpyro(model)


@pytest.mark.parametrize("missing", ["numpyro", "jax"])
def test_a_missing_library_is_named_with_its_extra(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    message = r'cannot be imported.*pip install "pyro-structvi\[reference\]"'
    monkeypatch.delattr(pyro_structvi.reference, "nuts")
    importlib.reload(pyro_structvi.reference)
    with pytest.raises(ImportError, match=message):
        _ = pyro_structvi.reference.nuts


def test_what_is_translated_has_moments_too():
    """The two tables have nothing in common but names: a function is added to both."""
    inside_of_graphs = {"getattr", "size", "linear"}  # attributes, and what is read as a map
    assert {*jax_net._FUNCTIONS} - {*RULES, *NONLINEARITIES} == inside_of_graphs
