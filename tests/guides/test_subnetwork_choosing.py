"""How the random weights of a subnetwork are chosen, and what is refused."""

import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_structvi as ps
from pyro_structvi import element_scores
from pyro_structvi.families import FullCovariance, KTied, Members, PointEstimate
from tests.guides.subnetworks import CHOSEN, NOISE, NUM_DATA, PRIOR, SIZE, close, joint, make_guide
from tests.models import make_regressor, regression_data


def test_laplace_variances_of_a_linear_regression():
    """``1 / (sum x_j^2 / s^2 + 1 / p^2)``; with 60,000 draws of y the error is about 0.6 %."""
    x = regression_data(30, 4)[0].repeat(1000, 1)
    model = ps.Regressor(ps.bayesianize(nn.Linear(4, 1), prior=PRIOR), NUM_DATA, NOISE)
    center, options = ps.MAPGuide(model), {"num_samples": 2, "batch_size": 7001}
    variances = element_scores.laplace_variances(model, center, x, **options)
    inputs = torch.cat([x, torch.ones(len(x), 1)], -1)
    expected = 1 / (inputs.square().sum(0) / NOISE**2 + 1 / PRIOR**2)
    found = torch.cat([variances["net.weight"][0], variances["net.bias"]])
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0)


def test_laplace_variances_of_a_classifier():
    """Against the Fisher information of a softmax: ``x_j^2 p_c (1 - p_c)``, summed over examples."""
    x = regression_data(20, 3)[0].repeat(1000, 1)
    model = ps.Classifier(ps.bayesianize(nn.Linear(3, 4, bias=False), prior=PRIOR), 20)
    center = ps.MAPGuide(model)
    variances = element_scores.laplace_variances(model, center, x, num_samples=2, batch_size=5000)
    p = (x @ center.median()["net.weight"].mT).softmax(-1)
    information = (p * (1 - p)).mT @ x.square()
    torch.testing.assert_close(
        variances["net.weight"], 1 / (information + 1 / PRIOR**2), rtol=0.05, atol=0
    )


def test_laplace_leaves_the_model_in_its_mode_and_other_sites_out():
    net = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5), nn.Linear(2, 1))
    model = ps.Regressor(ps.bayesianize(net), 12, dist.HalfNormal(1.0))
    center = ps.MAPGuide(model)
    variances = element_scores.laplace_variances(model, center, torch.randn(12, 3))
    assert model.training
    assert "noise_scale" not in variances
    assert len(variances) == 4


def test_marginal_variances_are_those_of_a_guide():
    guide = ps.KTiedGuide(make_regressor(), join_bias=True)
    variances = element_scores.marginal_variances(guide)
    q = guide["net.0.weight"]()
    assert torch.equal(variances["net.0.weight"], q.variance[:, :-1])
    assert torch.equal(variances["net.0.bias"], q.variance[:, -1])
    guide = make_guide()
    law, index = joint(guide)
    variances = element_scores.marginal_variances(guide)
    flat = torch.cat([variances[name].flatten() for name in guide.site_names])
    close(flat[index], law.variance.detach())
    assert (flat != 0).sum() == SIZE
    with pytest.raises(TypeError, match=r"has a posterior of '.*' for each member"):
        element_scores.marginal_variances(ps.EnsembleGuide(make_regressor(), 3))
    shared = ps.InducingWeightGuide(make_regressor(), (3, 2), "full", shared=True)
    with pytest.raises(RuntimeError, match="have one joint posterior"):
        element_scores.marginal_variances(shared)


def test_the_largest_of_all_sites_are_chosen():
    variances = {name: torch.rand(shape) for name, shape in (("a", (4, 3)), ("b", (5,)))}
    masks = element_scores.largest(variances, 6)
    assert sum(mask.sum() for mask in masks.values()) == 6
    inside = torch.cat([variances[name][mask] for name, mask in masks.items()])
    outside = torch.cat([variances[name][~mask] for name, mask in masks.items()])
    assert inside.min() > outside.max()


@pytest.mark.parametrize(
    ("chosen", "error", "message"),
    [
        ({"net.9": torch.ones(1, dtype=torch.bool)}, ValueError, "at least one element|masks for"),
        ({**CHOSEN, "x": CHOSEN["net.0.weight"]}, ValueError, r"`chosen` has masks for \['x'\]"),
        ({"net.0.weight": CHOSEN["net.2.weight"]}, ValueError, r"`chosen\['net.0.weight'\]` must"),
        ({"net.0.weight": torch.ones(5, 3)}, TypeError, "must be a tensor of booleans"),
        ({"net.0.weight": ~torch.ones(5, 3, dtype=torch.bool)}, ValueError, "at least one element"),
    ],
)
def test_masks_must_fit(chosen, error, message):
    with pytest.raises(error, match=message):
        ps.SubnetworkGuide(make_regressor(), chosen).initialize(*regression_data())


@pytest.mark.parametrize(
    ("posterior", "message"),
    [
        (FullCovariance, r"`posterior` must be a Family.* Pass an instance of it"),
        (KTied(2), "the chosen elements are one vector"),
        (PointEstimate(), "need a posterior with a density"),
        (Members(2), "need a posterior with a density"),
    ],
    ids=str,
)
def test_posteriors_of_a_vector(posterior, message):
    with pytest.raises(TypeError, match=message):
        ps.SubnetworkGuide(make_regressor(), CHOSEN, posterior=posterior)


def test_what_else_is_refused():
    model, other = make_regressor(), ps.Classifier(ps.bayesianize(nn.Linear(2, 2)), 3)
    with pytest.raises(ValueError, match="`center` must be a guide of the same model"):
        ps.SubnetworkGuide(model, CHOSEN, ps.MAPGuide(other))
    with pytest.raises(ValueError, match="one of `center` and `init_loc_fn`"):
        ps.SubnetworkGuide(model, CHOSEN, ps.MAPGuide(model), init_loc_fn=lambda site: None)
    large = ps.Classifier(ps.bayesianize(nn.Linear(1000, 1000)), 10)
    with pytest.raises(MemoryError, match=r"subnetwork of net\.weight"):
        ps.SubnetworkGuide(large, {"net.weight": torch.ones(1000, 1000, dtype=torch.bool)})
    for size in (0, 6):
        with pytest.raises(ValueError, match="`size` must be"):
            element_scores.largest({"a": torch.rand(5)}, size)
    with pytest.raises(ValueError, match="`variances` holds 1 NaN"):
        element_scores.largest({"a": torch.tensor([1.0, torch.nan])}, 1)


def test_a_prior_without_a_variance_adds_no_precision():
    net = ps.bayesianize(nn.Linear(3, 1, bias=False), prior=dist.StudentT(1.0, 0.0, 1.0))
    model, x = ps.Regressor(net, NUM_DATA, NOISE), regression_data(20_000)[0]
    variances = element_scores.laplace_variances(model, ps.MAPGuide(model), x, batch_size=5000)
    expected = NOISE**2 / x.square().sum(0)
    torch.testing.assert_close(variances["net.weight"][0], expected, rtol=0.05, atol=0)
