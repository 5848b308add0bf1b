"""The posteriors, the prior and the bound of the tables for the low-rank paper."""

import math

import pyro.poutine as poutine
import pytest
import torch

import pyro_structvi as ps
from examples.papers.tomczak2020 import images, posteriors
from tests.models import make_regressor, regression_data


def test_the_prior_of_the_mlp_has_a_precision_of_a_hundredth_of_its_outputs():
    net = ps.bayesianize(images.make_mlp(), images.by_outputs)
    sites = poutine.trace(net).get_trace(torch.zeros(1, 1, 28, 28)).nodes
    for name, outputs in (("1", 400), ("3", 400), ("5", 10)):
        for site in (f"{name}.weight", f"{name}.bias"):
            variance = sites[site]["fn"].variance
            assert len(variance) == outputs
            torch.testing.assert_close(variance, torch.full_like(variance, 100 / outputs))


def test_without_directions_a_constant_diagonal_stays_and_means_move():
    model, data = make_regressor(), regression_data()
    guide = posteriors.GUIDES["ELRG, K = 0"](model)
    guide.initialize(*data)
    before = {name: value.detach().clone() for name, value in guide.named_parameters()}
    ps.fit(model, guide, data, num_steps=3, progress=False)
    scales = [value for name, value in guide.named_parameters() if name.endswith("log_scale")]
    assert scales
    assert all(bool((scale == -5).all()) for scale in scales)
    moved = [not torch.equal(before[name], value) for name, value in guide.named_parameters()]
    assert sum(moved) == len(before) - len(scales)


def test_each_posterior_has_the_rank_and_the_diagonal_of_its_name():
    for name in (own for own in posteriors.GUIDES if "K = " in own and "K = 0" not in own):
        guide = posteriors.GUIDES[name](make_regressor())
        family = guide[guide.site_names[0]].family
        assert f"K = {family.rank}" in name
        assert family.join_bias
        diagonals = {"ELRG-D": "full", "isotropic": "isotropic", "ELRG,": "constant"}
        expected = [value for start, value in diagonals.items() if name.startswith(start)]
        assert family.diagonal == (expected or ["constant"])[0]
        assert family.diagonal_variance == (math.exp(-10) if name.startswith("ELRG,") else None)


def test_the_bound_over_uneven_batches_is_that_of_all_data():
    """Of points the expected log likelihood has no noise, so the two must agree to rounding."""
    model, data = make_regressor(), regression_data()
    guide = ps.MAPGuide(model)
    guide.initialize(*data)
    with torch.no_grad():
        terms = ps.StructuredELBO().terms(model, guide, *data)
    expected = float(terms.elbo), float(sum(terms.kl.values()))
    size = len(data[0]) // 2 + 1
    found = posteriors.expected_bound(model, guide, data, size, passes=2)
    assert found == pytest.approx(expected, rel=1e-12)
