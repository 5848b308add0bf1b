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


@pytest.mark.parametrize("model", [nn.Linear(3, 1), lambda x, y: None])
def test_a_model_of_another_kind_is_refused(model):
    with pytest.raises(TypeError, match=r"must be a Classifier, .* or Regressor, but got"):
        to_numpyro(model)


def test_a_model_that_standardizes_is_refused():
    data = torch.randn(5, 3), torch.randn(5, 1)
    model = Regressor(bayesianize(nn.Linear(3, 1)), 5, 0.3, standardize=data)
    with pytest.raises(NotImplementedError, match="`standardize` must be None"):
        to_numpyro(model)


def test_a_model_without_sites_is_refused():
    net = nn.Linear(3, 1).requires_grad_(False)
    with pytest.raises(ValueError, match=r"no latent site to sample.*bayesianize\(net"):
        to_numpyro(Regressor(net, NUM_DATA, 0.3))


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


def test_point_estimates_are_refused():
    net = bayesianize(nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5)), normalization=False)
    message = r"module 'net\.1' \(LayerNorm\) has point estimates, \['weight', 'bias'\].*freeze"
    with pytest.raises(NotImplementedError, match=message):
        to_numpyro(Regressor(net, NUM_DATA, 0.3))


def test_a_function_of_another_library_is_refused():
    def tanh(h):
        return torch.overrides.handle_torch_function(tanh, (h,), h)

    with pytest.raises(NotImplementedError, match=r"function `\S+\.tanh` in"):
        to_numpyro(make_regressor(Calls(tanh)))


def test_a_prior_of_unknown_kind_is_refused():
    model = make_regressor(nn.Linear(3, 1), dist.Gumbel(0.0, 1.0))
    message = r"site 'net\.weight' is a Gumbel, .* Supported are Beta, .*Uniform"
    with pytest.raises(NotImplementedError, match=message):
        to_numpyro(model)


def test_a_prior_that_may_depend_on_other_sites_is_refused():
    net = PyroModule[nn.Linear](3, 1)
    net.weight = PyroSample(lambda module: dist.Normal(0.0, 1.0).expand([1, 3]).to_event(2))
    with pytest.raises(NotImplementedError, match=r"site 'net\.weight' is a function of its modul"):
        to_numpyro(Regressor(net, NUM_DATA, 0.3))


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


def test_class_weights_are_refused():
    model = Classifier(bayesianize(nn.Linear(3, 2)), 4, class_weights=torch.ones(2))
    with pytest.raises(NotImplementedError, match="`class_weights` must be None"):
        to_numpyro(model)
