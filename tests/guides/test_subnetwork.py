"""A posterior over chosen elements: its optimum in a linear regression, its bound, the choosing."""

import copy
import math

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import Trace_ELBO
from pyro.nn import PyroModule
from torch import nn
from torch.distributions import MultivariateNormal

import pyro_structvi as ps
from pyro_structvi import subnetwork
from pyro_structvi.families import (
    FullCovariance,
    KTied,
    LowRank,
    MeanField,
    Members,
    PointEstimate,
    Subnetwork,
)
from pyro_structvi.guides.sites import UnusedSiteWarning
from tests.models import linear_function, make_classifier, make_regressor, regression_data
from tests.statistics import assert_mean, assert_moments

NOISE, PRIOR, NUM_DATA = 0.3, 0.7, 30
CHOSEN = {
    "net.0.weight": torch.arange(15).reshape(5, 3) % 4 == 0,
    "net.2.weight": torch.tensor([[True, False, False, True, False]]),
}
SIZE = 6


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def make_guide(**options):
    model = make_regressor(NUM_DATA, PRIOR, NOISE)
    guide = ps.SubnetworkGuide(model, CHOSEN, init_scale=0.2, **options)
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return guide


def joint(guide):
    """Return the law of the chosen elements, and where they are in all elements side by side."""
    masks, first = [], 0
    for name in guide.site_names:
        size = guide[name].site.shape.numel()
        masks.append(first + CHOSEN.get(name, torch.zeros(size)).flatten().nonzero().flatten())
        first += size
    return guide.couplings["net/0/weight"].posterior(), torch.cat(masks)


# ---- the law -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_draws_have_the_joint_law_and_leave_the_rest():
    guide = make_guide()
    q, index = joint(guide)
    draws = [torch.cat([v.flatten() for v in guide.draw().values()]) for _ in range(3000)]
    draws = torch.stack(draws).detach()
    assert_moments(draws[:, index], q.mean, q.covariance_matrix)
    rest = torch.ones(draws.shape[1], dtype=torch.bool)
    rest[index] = False
    assert len(index) == SIZE
    assert torch.equal(draws[:, rest], draws[:1, rest].expand(len(draws), -1))
    median = torch.cat([value.flatten() for value in guide.median().values()])
    close(median[index], q.mean.detach())
    assert torch.equal(median[rest], draws[0, rest])


@pytest.mark.slow
def test_it_finds_the_posterior_given_the_rest():
    """In a linear regression the chosen weights have a normal posterior given the others."""
    x, y = regression_data(NUM_DATA, 4)
    net = ps.bayesianize(nn.Linear(4, 1, bias=False), prior=PRIOR)
    model, index = ps.Regressor(net, NUM_DATA, NOISE), torch.tensor([0, 2, 3])
    chosen = {"net.weight": torch.tensor([[True, False, True, True]])}
    guide = ps.SubnetworkGuide(model, chosen, init_scale=0.1)
    rest = guide["net.weight"].rest[0, 1].clone()
    precision = x[:, index].mT @ x[:, index] / NOISE**2 + torch.eye(3) / PRIOR**2
    covariance = torch.linalg.inv(precision)
    mean = covariance @ x[:, index].mT @ (y[:, 0] - rest * x[:, 1]) / NOISE**2
    q = guide.couplings["net/weight"].posterior

    def bound():
        """The expectation of the log joint density, written out, plus the entropy."""
        law = q()
        residual = y[:, 0] - rest * x[:, 1] - x[:, index] @ law.mean
        spread = (x[:, index] @ law.covariance_matrix * x[:, index]).sum()
        second = law.mean.square().sum() + law.covariance_matrix.trace()
        fit = (residual.square().sum() + spread) / NOISE**2 + second / PRIOR**2
        return law.entropy() - fit / 2

    options = {"max_iter": 2000, "tolerance_grad": 1e-10, "tolerance_change": 1e-18}
    optimizer = torch.optim.LBFGS(guide.parameters(), line_search_fn="strong_wolfe", **options)

    def closure():
        optimizer.zero_grad()
        loss = -bound()
        loss.backward()
        return loss

    optimizer.step(closure)
    torch.testing.assert_close(q().mean, mean, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(q().covariance_matrix, covariance, rtol=1e-4, atol=1e-8)
    own = torch.tensor([[-ps.StructuredELBO().loss(model, guide, x, y)] for _ in range(1000)])
    constant = 3 * torch.tensor(2 * torch.pi * PRIOR**2).log() / 2
    constant = constant + NUM_DATA * torch.tensor(2 * torch.pi * NOISE**2).log() / 2
    constant = constant - dist.Normal(0.0, PRIOR).log_prob(rest)
    assert_mean(own, (bound() - constant).detach().reshape(1))
    residual = MultivariateNormal(
        rest * x[:, 1],
        PRIOR**2 * x[:, index] @ x[:, index].mT + NOISE**2 * torch.eye(NUM_DATA),
    )
    evidence = residual.log_prob(y[:, 0]) + dist.Normal(0.0, PRIOR).log_prob(rest)
    torch.testing.assert_close((bound() - constant).detach(), evidence, rtol=1e-7, atol=0)


def test_the_divergence_is_closed_and_that_of_two_normals_and_points():
    guide, data = make_guide(), regression_data(NUM_DATA)
    q, index = joint(guide)
    model = guide.model
    with torch.no_grad():
        kl = [sum(ps.StructuredELBO().terms(model, guide, *data).kl.values()) for _ in range(2)]
    assert kl[0] == kl[1]
    median = torch.cat([value.flatten() for value in guide.median().values()])
    rest = torch.ones(len(median), dtype=torch.bool)
    rest[index] = False
    prior = MultivariateNormal(torch.zeros(SIZE), PRIOR**2 * torch.eye(SIZE))
    posterior = MultivariateNormal(q.mean, q.covariance_matrix)
    expected = torch.distributions.kl_divergence(posterior, prior)
    expected = expected - dist.Normal(0.0, PRIOR).log_prob(median[rest]).sum()
    close(kl[0], expected.detach())


def test_scale_and_mask_of_the_model_weigh_all_of_the_divergence():
    guide, data = make_guide(), regression_data(NUM_DATA)
    guide.initialize(*data)
    total = {}
    for title, model in (
        ("plain", guide.model),
        ("scaled", poutine.scale(guide.model, scale=0.25)),
        ("masked", poutine.mask(guide.model, mask=torch.tensor(False))),
    ):
        total[title] = sum(ps.StructuredELBO().terms(model, guide, *data).kl.values())
    close(total["scaled"], 0.25 * total["plain"])
    assert total["masked"] == 0


@pytest.mark.slow
def test_objectives_agree():
    guide, data = make_guide(), regression_data(NUM_DATA)
    guide.initialize(*data)
    losses = [
        torch.tensor([[elbo.loss(guide.model, guide, *data)] for _ in range(600)])
        for elbo in (ps.StructuredELBO(), Trace_ELBO())
    ]
    assert_mean(losses[0] - losses[1], torch.zeros(1))


# ---- parameters ----------------------------------------------------------------------------------


def count(guide):
    return sum(parameter.numel() for parameter in guide.parameters())


def test_parameters_are_those_of_the_chosen_elements():
    assert count(make_guide()) == SIZE + SIZE * (SIZE + 1) // 2
    assert count(make_guide(posterior=MeanField())) == 2 * SIZE
    assert count(make_guide(posterior=LowRank(2))) == 3 * SIZE
    assert count(make_guide(train_rest=True)) == SIZE + SIZE * (SIZE + 1) // 2 + 26


@pytest.mark.parametrize("train_rest", [False, True])
def test_training_moves_the_rest_only_if_asked(train_rest):
    guide, data = make_guide(train_rest=train_rest), regression_data(NUM_DATA)
    before = guide.median()
    history = ps.fit(guide.model, guide, data, num_steps=60, lr=0.02, progress=False)
    assert sum(history.elbo[-10:]) > sum(history.elbo[:10])
    after = guide.median()
    assert torch.equal(before["net.0.bias"], after["net.0.bias"]) != train_rest
    assert not torch.equal(before["net.0.weight"], after["net.0.weight"])
    prediction = ps.predict(guide.model, guide, data[0], num_samples=10)
    assert (prediction.function_variance > 0).all()


def test_it_starts_at_the_medians_of_another_guide():
    model = make_regressor()
    center = ps.MAPGuide(model)
    ps.fit(model, center, regression_data(), num_steps=20, lr=0.05, progress=False)
    guide = ps.SubnetworkGuide(model, CHOSEN, center)
    for name, value in center.median().items():
        assert torch.equal(guide.median()[name], value)


class Late(PyroModule):
    """A layer, one that is not used, a site drawn in forward, and a latent for each example."""

    def __init__(self):
        super().__init__()
        self.layer = ps.bayesianize(nn.Linear(3, 1))
        self.unused = ps.bayesianize(nn.Linear(2, 2))

    def forward(self, x, y=None):
        shift = pyro.sample("shift", dist.Normal(torch.zeros(1), 1.0).to_event(1))
        mean = self.layer(x) + shift
        with pyro.plate("data", len(x)):
            own = pyro.sample("own", dist.Normal(0.0, torch.tensor(0.1)))
            mean = mean + own.unsqueeze(-1)
            options = {"obs": y, "infer": {"is_observation": True}}
            pyro.sample("obs", dist.Normal(mean, 0.5).to_event(1), **options)


@pytest.mark.filterwarnings("ignore::pyro_structvi.guides.sites.UnusedSiteWarning")
def test_sites_that_are_found_late():
    model, data, chosen = Late(), regression_data(), torch.tensor([True])
    center = ps.MAPGuide(model)
    with pytest.warns(UnusedSiteWarning, match=r"\['unused.weight', 'unused.bias'\]"):
        ps.fit(model, center, data, num_steps=3, progress=False)
    variances = subnetwork.laplace_variances(model, center, data[0])
    assert set(variances) == set(center.site_names) - {"own"}
    torch.testing.assert_close(variances["unused.bias"], torch.ones(2))  # the prior's
    guide = ps.SubnetworkGuide(model, {"layer.bias": chosen}, center)
    history = ps.fit(model, guide, data, num_steps=60, lr=0.05, progress=False)
    assert history.elbo[-1] > history.elbo[0]
    assert torch.equal(guide.median()["shift"], center.median()["shift"])
    late = ps.SubnetworkGuide(model, {"layer.bias": chosen, "shift": chosen})
    with pytest.raises(ValueError, match="found only now"):
        late.initialize(*data)
    unused = ps.SubnetworkGuide(model, {"unused.bias": torch.tensor([True, False])}, init_scale=0.5)
    terms = ps.StructuredELBO().terms(model, unused, *data)
    first, second = unused.median()["unused.bias"].tolist()
    chosen_one = math.log(1 / 0.5) + (0.5**2 + first**2 - 1) / 2
    fixed_one = (math.log(2 * math.pi) + second**2) / 2
    names = (f"subnetwork of {unused.site_names[0]}", "unused.bias")
    kl = sum(terms.kl[name].item() for name in names)
    assert kl == pytest.approx(chosen_one + fixed_one)


def test_a_plain_function():
    chosen = {"weight": torch.eye(2, 3, dtype=torch.bool)}
    guide = ps.SubnetworkGuide(linear_function, chosen, init_scale=0.1)
    data = torch.randn(12, 3), torch.randn(12, 2)
    history = ps.fit(linear_function, guide, data, num_steps=60, lr=0.05, progress=False)
    assert history.elbo[-1] > history.elbo[0]
    assert len(guide.couplings["weight"].posterior().mean) == 2
    wrong = ps.SubnetworkGuide(linear_function, {**chosen, "wieght": chosen["weight"]})
    with pytest.raises(ValueError, match=r"has masks for \['wieght'\]"):
        wrong.initialize(*data)


def test_whole_layers_by_pattern():
    guide = ps.StructuredGuide(
        make_regressor(), {"net.2.*": Subnetwork(), "*": PointEstimate()}, init_scale=0.1
    )
    assert guide.couplings["net/2/weight"].posterior().event_shape == (6,)
    assert count(guide) == 20 + 6 + 6 * 7 // 2
    draws = [guide.draw() for _ in range(2)]
    assert torch.equal(draws[0]["net.0.weight"], draws[1]["net.0.weight"])
    assert (draws[0]["net.2.weight"] != draws[1]["net.2.weight"]).all()


def test_it_survives_its_state_and_copies():
    guide, other = make_guide(), make_guide()
    other.load_state_dict(guide.state_dict())
    for twin in (other, copy.deepcopy(guide)):
        torch.manual_seed(3)
        own = guide.draw()
        torch.manual_seed(3)
        for name, value in twin.draw().items():
            assert torch.equal(own[name], value)


# ---- choosing ------------------------------------------------------------------------------------


def test_laplace_variances_of_a_linear_regression():
    """``1 / (sum x_j^2 / s^2 + 1 / p^2)``; with 60,000 draws of y the error is about 0.6 %."""
    x = regression_data(30, 4)[0].repeat(1000, 1)
    model = ps.Regressor(ps.bayesianize(nn.Linear(4, 1), prior=PRIOR), NUM_DATA, NOISE)
    center, options = ps.MAPGuide(model), {"num_samples": 2, "batch_size": 7001}
    variances = subnetwork.laplace_variances(model, center, x, **options)
    inputs = torch.cat([x, torch.ones(len(x), 1)], -1)
    expected = 1 / (inputs.square().sum(0) / NOISE**2 + 1 / PRIOR**2)
    found = torch.cat([variances["net.weight"][0], variances["net.bias"]])
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0)


def test_laplace_variances_of_a_classifier():
    """Against the Fisher information of a softmax: ``x_j^2 p_c (1 - p_c)``, summed over examples."""
    x = regression_data(20, 3)[0].repeat(1000, 1)
    model = ps.Classifier(ps.bayesianize(nn.Linear(3, 4, bias=False), prior=PRIOR), 20)
    center = ps.MAPGuide(model)
    variances = subnetwork.laplace_variances(model, center, x, num_samples=2, batch_size=5000)
    p = (x @ center.median()["net.weight"].mT).softmax(-1)
    information = (p * (1 - p)).mT @ x.square()
    torch.testing.assert_close(
        variances["net.weight"], 1 / (information + 1 / PRIOR**2), rtol=0.05, atol=0
    )


def test_laplace_leaves_the_model_in_its_mode_and_other_sites_out():
    net = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5), nn.Linear(2, 1))
    model = ps.Regressor(ps.bayesianize(net), 12, dist.HalfNormal(1.0))
    center = ps.MAPGuide(model)
    variances = subnetwork.laplace_variances(model, center, torch.randn(12, 3))
    assert model.training
    assert "noise_scale" not in variances
    assert len(variances) == 4


def test_marginal_variances_are_those_of_a_guide():
    guide = ps.KTiedGuide(make_regressor(), join_bias=True)
    variances = subnetwork.marginal_variances(guide)
    q = guide["net.0.weight"]()
    assert torch.equal(variances["net.0.weight"], q.variance[:, :-1])
    assert torch.equal(variances["net.0.bias"], q.variance[:, -1])
    guide = make_guide()
    law, index = joint(guide)
    variances = subnetwork.marginal_variances(guide)
    flat = torch.cat([variances[name].flatten() for name in guide.site_names])
    close(flat[index], law.variance.detach())
    assert (flat != 0).sum() == SIZE
    ensemble = ps.EnsembleGuide(make_regressor(), 3)
    assert subnetwork.marginal_variances(ensemble)["net.0.weight"].min() > 0
    shared = ps.InducingWeightGuide(make_regressor(), (3, 2), "full", shared=True)
    with pytest.raises(RuntimeError, match="have one posterior with those of others"):
        subnetwork.marginal_variances(shared)


def test_the_largest_of_all_sites_are_chosen():
    variances = {name: torch.rand(shape) for name, shape in (("a", (4, 3)), ("b", (5,)))}
    masks = subnetwork.largest(variances, 6)
    assert sum(mask.sum() for mask in masks.values()) == 6
    inside = torch.cat([variances[name][mask] for name, mask in masks.items()])
    outside = torch.cat([variances[name][~mask] for name, mask in masks.items()])
    assert inside.min() > outside.max()


# ---- errors --------------------------------------------------------------------------------------


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
        (3, "`posterior` must be a Family, but got 3"),
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


def test_a_center_is_of_the_same_model():
    other = ps.Classifier(ps.bayesianize(nn.Linear(2, 2)), 3)
    with pytest.raises(ValueError, match="`center` must be a guide of the same model"):
        ps.SubnetworkGuide(make_regressor(), CHOSEN, ps.MAPGuide(other))


def test_a_start_is_given_once():
    model = make_regressor()
    with pytest.raises(ValueError, match="one of `center` and `init_loc_fn`"):
        ps.SubnetworkGuide(model, CHOSEN, ps.MAPGuide(model), init_loc_fn=lambda site: None)


def test_too_many_elements_are_refused_before_anything_is_allocated():
    model = ps.Classifier(ps.bayesianize(nn.Linear(1000, 1000)), 10)
    chosen = {"net.weight": torch.ones(1000, 1000, dtype=torch.bool)}
    with pytest.raises(MemoryError, match=r"subnetwork of net\.weight"):
        ps.SubnetworkGuide(model, chosen)


@pytest.mark.parametrize("size", [0, 6, 1.5])
def test_a_size_is_within_the_elements(size):
    with pytest.raises(ValueError, match="`size` must be"):
        subnetwork.largest({"a": torch.rand(5)}, size)


def test_a_score_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="`variances` holds 1 NaN"):
        subnetwork.largest({"a": torch.tensor([1.0, torch.nan])}, 1)


def test_a_prior_without_a_variance_adds_no_precision():
    net = ps.bayesianize(nn.Linear(3, 1, bias=False), prior=dist.StudentT(1.0, 0.0, 1.0))
    model, x = ps.Regressor(net, NUM_DATA, NOISE), regression_data(20_000)[0]
    variances = subnetwork.laplace_variances(model, ps.MAPGuide(model), x, batch_size=5000)
    expected = NOISE**2 / x.square().sum(0)
    torch.testing.assert_close(variances["net.weight"][0], expected, rtol=0.05, atol=0)


def test_numbers_are_checked():
    model = make_classifier()
    with pytest.raises(TypeError, match=r"`x` must be a tensor, .* but got"):
        subnetwork.laplace_variances(model, ps.MAPGuide(model), [1.0])
    for name in ("num_samples", "batch_size"):
        with pytest.raises(ValueError, match=f"`{name}` must be a whole number"):
            subnetwork.laplace_variances(model, ps.MAPGuide(model), torch.ones(2, 3), **{name: 0})
