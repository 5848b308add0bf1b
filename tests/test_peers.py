"""Posteriors of other packages: the same model as NUTS samples, and the exact one where it is known."""

from types import SimpleNamespace

import pytest
import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector

import pyro_structvi as ps
from benchmarks import league, league_problems, pyro_peers
from benchmarks.laplace_peers import (
    LinearizedModel,
    each_layer,
    laplace,
    likelihood_of,
    prior_precisions,
)
from tests.statistics import assert_moments

OPTIONS = SimpleNamespace(steps=400, draws=4000, smoke=True)


def conjugate_posterior(problem):
    """Return the mean and the covariance of weights and bias, by the rule for conditional normals."""
    x = torch.cat([problem.x.double(), torch.ones(60, 1, dtype=torch.double)], 1)
    joint = x @ x.T + 0.25 * torch.eye(60, dtype=torch.double)
    gain = torch.linalg.solve(joint, x).T
    mean = (gain @ problem.y.double()).flatten()
    return mean, torch.eye(9, dtype=torch.double) - gain @ x


def small_net():
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))


# ---- the model -----------------------------------------------------------------------------------


def test_prior_precisions_are_those_of_the_model():
    """A weight of FanIn(3, 2) has the deviation 3 / sqrt(fan_in), a bias 2."""
    model = ps.Classifier(ps.bayesianize(small_net(), ps.FanIn(3.0, 2.0)), num_data=5)
    found = prior_precisions(model, torch.zeros(5, 2))
    expected = {
        "net.0.weight": torch.full((8,), 2 / 9),
        "net.0.bias": torch.full((4,), 1 / 4),
        "net.2.weight": torch.full((12,), 4 / 9),
        "net.2.bias": torch.full((3,), 1 / 4),
    }
    assert list(found) == list(expected)
    torch.testing.assert_close(found, expected)
    by_layer = each_layer(list(found.values()))
    torch.testing.assert_close(by_layer, torch.tensor([2 / 9, 1 / 4, 4 / 9, 1 / 4]))


def test_models_that_laplace_torch_cannot_have_are_refused():
    wide = ps.bayesianize(nn.Linear(2, 1), torch.distributions.Laplace(0.0, 1.0))
    with pytest.raises(ValueError, match=r"normal priors around zero only, unlike net\.weight"):
        prior_precisions(ps.Regressor(wide, 5, 0.1), torch.zeros(5, 2))
    with pytest.raises(ValueError, match="one prior precision for each parameter"):
        each_layer([torch.tensor([1.0, 2.0])])
    net = ps.bayesianize(nn.Linear(2, 2), 1.0)
    assert likelihood_of(ps.Classifier(net, 5)) == ("classification", 1.0)
    assert likelihood_of(ps.Regressor(net, 5, 0.3)) == ("regression", pytest.approx(0.3))
    with pytest.raises(ValueError, match="one given scale of normal noise"):
        likelihood_of(ps.Regressor(net, 5, noise="heteroscedastic"))


def test_a_linearized_net_has_the_first_two_terms():
    """Beside the Jacobian that reverse mode gives, and with several draws in one pass."""
    torch.manual_seed(0)
    net, x = small_net().double(), torch.randn(5, 2).double()
    model = ps.Classifier(ps.bayesianize(small_net().double(), 1.0), num_data=5)
    names, at = zip(*net.named_parameters(), strict=True)
    jacobian = torch.autograd.functional.jacobian(
        lambda *values: functional_call(net, dict(zip(names, values, strict=True)), (x,)), at
    )
    rows = torch.cat([own.flatten(2) for own in jacobian], 2)
    mode = parameters_to_vector(at).detach()
    draws = mode + torch.randn(7, len(mode)).double()
    expected = net(x) + torch.einsum("ncp,sp->snc", rows, draws - mode)
    found = ps.predict(LinearizedModel(model, net), {"weights": draws}, x).functions
    torch.testing.assert_close(found, expected)


# ---- laplace-torch -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def _laplace_torch():
    pytest.importorskip("laplace", reason="needs laplace-torch, which is no dependency")


@pytest.mark.usefixtures("_laplace_torch")
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_the_laplace_approximation_of_a_linear_regression_is_its_posterior(subset):
    torch.manual_seed(0)
    problem = league_problems.linear_regression()
    _, posterior, found = laplace(subset, "full", "glm", problem, OPTIONS)
    assert_moments(posterior["weights"].double(), *conjugate_posterior(problem))
    assert found.keys() == {"seconds"}


@pytest.mark.usefixtures("_laplace_torch")
@pytest.mark.parametrize(
    ("subset", "structure"), [("all", "full"), ("all", "kron"), ("last_layer", "full")]
)
def test_draws_of_functions_have_the_moments_that_the_package_predicts(
    subset, structure, monkeypatch
):
    import laplace as package

    made, make = [], package.Laplace
    monkeypatch.setattr(
        package, "Laplace", lambda *own, **more: made.append(make(*own, **more)) or made[0]
    )
    torch.manual_seed(0)
    problem = league_problems.two_moons()
    model, posterior, _ = laplace(subset, structure, "glm", problem, OPTIONS)
    x = problem.regions["away"][::40]
    mean, covariance = made[0]._glm_predictive_distribution(x)
    drawn = ps.predict(model, posterior, x, num_samples=OPTIONS.draws).functions
    for point in range(len(x)):
        assert_moments(drawn[:, point].double(), mean[point].double(), covariance[point].double())


# ---- Pyro ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_guide_with_the_better_bound_is_kept(monkeypatch):
    """Parameters of the worse one, which have the same names, are not read in its place."""
    monkeypatch.setattr(pyro_peers, "SETTINGS", ((0.01, 0.1), (20.0, 0.1)))
    torch.manual_seed(0)
    problem = league_problems.linear_regression()
    options = SimpleNamespace(steps=30, smoke=True)
    model, guide, found = pyro_peers.autoguide(AutoNormal, problem, options)
    with torch.no_grad():
        again = -Trace_ELBO(num_particles=200).loss(model, guide, problem.x, problem.y)
    assert again == pytest.approx(found["ELBO"], rel=0.1)
    assert found["gap to the evidence"] == pytest.approx(problem.evidence - found["ELBO"])


@pytest.mark.slow
def test_autonormal_finds_the_best_independent_normals(monkeypatch):
    """Of a normal posterior: its means, and the diagonal of its precision; so does mean field."""
    monkeypatch.setattr(pyro_peers, "SETTINGS", ((0.03, 0.01),))
    torch.manual_seed(0)
    problem = league_problems.linear_regression()
    mean, covariance = conjugate_posterior(problem)
    best = torch.linalg.inv(covariance).diagonal() ** -0.5
    _, guide, found = pyro_peers.autoguide(
        AutoNormal, problem, SimpleNamespace(steps=4000, smoke=0)
    )
    loc, scale = (
        torch.cat([
            getattr(getattr(guide, kind).net, name).flatten() for name in ("weight", "bias")
        ])
        for kind in ("locs", "scales")
    )
    assert ((loc - mean).abs() / best).max() < 0.5
    assert (scale / best).log().abs().max() < 0.2
    mean_field = ps.MeanFieldGuide(problem.model)
    theirs = league.train(
        problem, "MeanFieldGuide", mean_field, SimpleNamespace(steps=1000, smoke=0)
    )
    assert found["ELBO"] == pytest.approx(theirs["ELBO"], abs=0.5)
