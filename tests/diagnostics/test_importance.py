"""Importance weights of a guide: constant at the exact posterior, with a heavy tail beside it."""

import math
import sys

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_structvi as ps
from pyro_structvi.diagnostics import importance, pareto_k
from pyro_structvi.diagnostics.importance import _diagnosis
from pyro_structvi.posterior.inference_data import pareto_smoothed
from pyro_structvi.testing import guides_for
from tests.conjugate import exact, full_guide, make_model
from tests.models import (
    hierarchical_function,
    local_latent_function,
    make_regressor,
    regression_data,
)


def conjugate():
    x, y = regression_data(size=10)
    return make_model(10, 3), (x, y), exact(x, y)


def test_at_the_exact_posterior_every_weight_is_the_evidence():
    model, data, known = conjugate()
    guide = full_guide(model, known.mean, known.covariance)
    diagnosis = pareto_k(model, guide, *data, num_samples=200)
    evidence = pytest.approx(float(known.log_evidence), abs=1e-9)
    assert (diagnosis.k_hat, diagnosis.effective_sample_size) == (-math.inf, 200)
    assert (diagnosis.elbo, diagnosis.importance_weighted_bound) == (evidence, evidence)
    assert diagnosis.log_weights.tolist() == [evidence] * 200


GUIDES = guides_for("tests")


@pytest.mark.parametrize("name", ["k-tied", pytest.param("low rank", marks=pytest.mark.slow)])
def test_the_average_log_weight_is_the_elbo_of_every_guide(name):
    """Two unbiased estimates of one number; P = 1e-6 by the spread of both."""
    model, data = make_regressor(), regression_data()
    guide = GUIDES[name](model, init_scale=0.05)
    diagnosis = pareto_k(model, guide, *data, num_samples=150)
    weights, elbo = diagnosis.log_weights, ps.StructuredELBO()
    with torch.no_grad():
        bounds = torch.stack([elbo.terms(model, guide, *data).elbo for _ in range(40)])
    error = (weights.var() / len(weights) + bounds.var() / len(bounds)).sqrt()
    assert (weights.mean() - bounds.mean()).abs() < 5 * error + 1e-9
    assert weights.std() > 1e-3
    assert diagnosis.elbo == pytest.approx(float(weights.mean()), rel=1e-12)


def refused(*_, **options):
    raise RuntimeError("no batching rule")


def test_a_small_memory_takes_more_passes_and_other_functions_run_draw_by_draw(monkeypatch):
    model, data, known = conjugate()
    guide = full_guide(model, known.mean, known.covariance)
    sizes, own = [], importance.in_one_pass

    def in_one_pass(run, values, modules):
        sizes.append(len(values))
        return own(run, values, modules)

    monkeypatch.setattr(importance, "in_one_pass", in_one_pass)
    # For each draw 3 weights, and 10 outputs of net and model.
    monkeypatch.setattr(importance, "MAX_BYTES", 7 * 8 * 23)
    evidence = pytest.approx(float(known.log_evidence), abs=1e-9)
    assert pareto_k(model, guide, *data, num_samples=100).elbo == evidence
    assert sizes == [*[7] * 14, 1]
    monkeypatch.setattr(torch.func, "vmap", refused)
    assert pareto_k(model, guide, *data, num_samples=100).elbo == evidence


def normal(value, loc, scale):
    return dist.Normal(loc, scale).log_prob(value).sum()


def of_hierarchy(x, y, scale, weight, noise):
    prior = dist.HalfNormal(1.0).log_prob(scale) + dist.LogNormal(-1.0, 0.5).log_prob(noise)
    return prior + normal(weight, 0.0, scale) + normal(y, x @ weight.mT, noise)


def of_local_latents(x, y, weight, shift):
    mean = (x @ weight.mT).squeeze(-1) + shift
    return normal(weight, 0.0, 1.0) + normal(shift, 0.0, 0.5) + normal(y, mean, 0.1)


@pytest.mark.parametrize(
    ("function", "density", "shape"),
    [
        (hierarchical_function, of_hierarchy, (6, 1)),
        (local_latent_function, of_local_latents, (6,)),
    ],
)
def test_the_weight_of_a_draw_by_densities_written_out(function, density, shape):
    data = torch.randn(6, 3), torch.randn(shape)
    guide = ps.MeanFieldGuide(function, init_scale=0.1)
    guide.initialize(*data)
    torch.manual_seed(3)
    values = guide.begin_pass(*data).program()(*data)
    of_guide = sum(guide[name]().log_prob(value).sum() for name, value in values.items())
    torch.manual_seed(3)
    diagnosis = pareto_k(function, guide, *data, num_samples=100)
    expected = density(*data, **values) - of_guide
    torch.testing.assert_close(diagnosis.log_weights[0], expected, rtol=1e-12, atol=1e-12)
    assert math.isfinite(diagnosis.k_hat)


def test_guides_without_a_density_are_refused():
    """Also those that are points in part."""
    model, data = make_regressor(), regression_data()
    with pytest.raises(ValueError, match="but is a mixture"):
        pareto_k(model, ps.EnsembleGuide(model), *data)
    pruned = ps.MeanFieldGuide(model)
    ps.pruning.prune_mean_field(pruned, 0.5)
    chosen = {"net.0.weight": torch.ones(5, 3, dtype=torch.bool)}
    for guide in (
        ps.MAPGuide(model),
        ps.MCDropoutGuide(model),
        pruned,
        ps.InducingWeightGuide(model, (2, 2), inducing_posterior="ensemble"),
        ps.SubnetworkGuide(model, chosen, center=ps.MAPGuide(model)),
    ):
        with pytest.raises(
            ValueError, match=r"`guide` must have a density .* 'net.0.weight', \w+\("
        ):
            pareto_k(model, guide, *data)


def test_the_sites_must_be_those_of_the_model():
    data = regression_data()
    other = ps.MeanFieldGuide(make_model(12, 3))
    with pytest.raises(ValueError, match=r"missing in it: \['net.0.weight'.*the model: \['net.wei"):
        pareto_k(make_regressor(), other, *data)
    model = make_regressor()
    with pytest.raises(ValueError, match=r"`num_samples` must be at least 100, .* but got 99"):
        pareto_k(model, ps.MeanFieldGuide(model), *data, num_samples=99)
    with pytest.raises(ValueError, match=r"missing in it: \['obs'\].*and the observations too"):
        pareto_k(model, ps.MeanFieldGuide(model), data[0])


def test_a_part_of_the_data_is_refused():
    """A scaled likelihood of a part of the data has another posterior, and a random part changes."""
    x, y = regression_data(size=10)

    def in_parts(x, y):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("examples", 10, subsample_size=5) as index:
            pyro.sample("obs", dist.Normal(x[index] @ weight, 0.5), obs=y[index, 0])

    whole = make_model(10, 3)
    assert pareto_k(whole, ps.MeanFieldGuide(whole), x, y, num_samples=100).elbo < 0
    for model, size in ((in_parts, 10), (whole, 5)):
        guide = ps.MeanFieldGuide(model)
        guide.initialize(x, y)
        with pytest.raises(ValueError, match="'obs' must be all 10 training examples, but are 5"):
            pareto_k(model, guide, x[:size], y[:size], num_samples=100)


# ---- of given log weights --------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0.3, 0.9])
def test_k_of_pareto_weights(k):
    """Weights that are a generalized Pareto distribution's quantiles, in any order and unit."""
    probs = (torch.arange(20_000) + 0.5) / 20_000
    weights = ((1 - probs) ** -k)[torch.randperm(20_000)]
    diagnosis = _diagnosis(weights.log() - 1234.5)
    assert diagnosis.k_hat == pytest.approx(k, abs=0.02)
    assert diagnosis.elbo == pytest.approx(k - 1234.5, abs=1e-3)
    assert diagnosis.importance_weighted_bound == pytest.approx(
        float(weights.mean().log()) - 1234.5, abs=1e-9
    )


def test_the_effective_sample_size_is_of_the_smoothed_weights():
    log_weights = 2 * torch.randn(500)
    smoothed, k_hat = pareto_smoothed(log_weights.numpy())
    diagnosis = _diagnosis(log_weights)
    assert diagnosis.k_hat == pytest.approx(float(k_hat))
    weights = np.exp(smoothed)
    assert diagnosis.effective_sample_size == pytest.approx(1 / np.square(weights).sum())
    log_weights[7] = torch.nan
    with pytest.raises(ValueError, match=r"`log p\(y, w\) - log q\(w\)` holds 1 NaN of 500"):
        _diagnosis(log_weights)


def test_zero_weights_count_as_such():
    """Beyond a constraint of the model: the other weights keep their tail, and are all that counts."""
    log_weights = 2 * torch.randn(500)
    log_weights[::2] = -torch.inf
    smoothed, k_hat = pareto_smoothed(log_weights.numpy())
    diagnosis = _diagnosis(log_weights)
    assert diagnosis.k_hat == pytest.approx(float(k_hat))
    size = 1 / np.square(np.exp(smoothed)).sum()
    assert diagnosis.effective_sample_size == pytest.approx(size)
    assert size < 250
    equal = torch.where(log_weights.isinf(), log_weights, -3.0)
    diagnosis = _diagnosis(equal)
    assert (diagnosis.k_hat, diagnosis.effective_sample_size) == (-math.inf, 250)
    assert diagnosis.importance_weighted_bound == pytest.approx(-3 - math.log(2))
    for wrong in (torch.full((100,), -torch.inf), torch.tensor([0.0, torch.inf])):
        with pytest.raises(
            ValueError, match=r"must be below infinity, and above minus infinity at"
        ):
            _diagnosis(wrong)


def test_without_arviz_an_error_says_what_to_install_before_the_draws(monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz", None)
    monkeypatch.setattr(importance, "_of_draws", None)
    model = make_regressor()
    with pytest.raises(ImportError, match=r"ArviZ is needed: `pip install"):
        pareto_k(model, ps.MeanFieldGuide(model), *regression_data())


@pytest.mark.slow
def test_shared_inducing_weights_are_weighed_together_with_the_weights():
    """Then the average log weight is the bound; P = 1e-6 by the standard deviation of both, about 10."""
    model, data = make_regressor(), regression_data()
    options = {"inducing_posterior": "full", "shared": True, "init_scale": 0.05}
    guide, elbo = ps.InducingWeightGuide(model, (2, 2), **options), ps.StructuredELBO()
    with torch.no_grad():
        bounds = torch.stack([elbo.terms(model, guide, *data).elbo for _ in range(100)])
    found = pareto_k(model, guide, *data, num_samples=200)
    error = bounds.std() * (1 / 100 + 4 / 200) ** 0.5  # weights vary more than bounds do
    assert found.elbo == pytest.approx(float(bounds.mean()), abs=5 * float(error))
