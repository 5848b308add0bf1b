"""A posterior over chosen elements: its law, its bound, the choosing, and what is refused."""

import math

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.nn import PyroModule
from torch import nn
from torch.distributions import MultivariateNormal, constraints

import pyro_structvi as ps
from pyro_structvi import element_scores
from pyro_structvi.distributions import WeightDistribution
from pyro_structvi.families import KTied, LowRank, MeanField, Members, PointEstimate, Subnetwork
from pyro_structvi.sites.finding import UnusedSiteWarning
from tests.models import linear_function, make_regressor, regression_data
from tests.unit_noise import assert_draws, close

NOISE, PRIOR, NUM_DATA = 0.3, 0.7, 30
CHOSEN = {
    "net.0.weight": torch.arange(15).reshape(5, 3) % 4 == 0,
    "net.2.weight": torch.tensor([[True, False, False, True, False]]),
}
SIZE = 6


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


def all_medians(guide):
    return torch.cat([value.flatten() for value in guide.median().values()]).detach()


def test_draws_have_the_joint_law_and_leave_the_rest():
    guide = make_guide()
    (q, index), median = joint(guide), all_medians(guide)
    close(median[index], q.mean.detach())
    covariance = torch.zeros(len(median), len(median))
    covariance[index[:, None], index] = q.covariance_matrix.detach()
    draw = lambda: torch.cat([v.flatten() for v in guide.draw().values()]).detach()  # noqa: E731
    assert_draws(draw, median, covariance)


def test_the_divergence_is_closed_and_that_of_two_normals_and_points():
    guide, data = make_guide(), regression_data(NUM_DATA)
    guide.initialize(*data)
    (q, index), median = joint(guide), all_medians(guide)
    rest = torch.ones(len(median), dtype=torch.bool)
    rest[index] = False
    prior = MultivariateNormal(torch.zeros(SIZE), PRIOR**2 * torch.eye(SIZE))
    posterior = MultivariateNormal(q.mean, q.covariance_matrix)
    expected = torch.distributions.kl_divergence(posterior, prior).detach()
    expected = expected - dist.Normal(0.0, PRIOR).log_prob(median[rest]).sum()
    for program, factor in (
        (guide.model, 1.0),
        (poutine.scale(guide.model, scale=0.25), 0.25),
        (poutine.mask(guide.model, mask=torch.tensor(False)), 0.0),
    ):
        kl = ps.StructuredELBO().terms(program, guide, *data).kl
        close(torch.as_tensor(sum(kl.values())).detach(), factor * expected)


def count(guide):
    return sum(parameter.numel() for parameter in guide.parameters())


def test_parameters_are_those_of_the_chosen_elements():
    assert count(make_guide()) == SIZE + SIZE * (SIZE + 1) // 2
    assert count(make_guide(posterior=MeanField())) == 2 * SIZE
    assert count(make_guide(posterior=LowRank(2))) == 4 * SIZE
    assert count(make_guide(train_rest=True)) == SIZE + SIZE * (SIZE + 1) // 2 + 26
    model = make_regressor()
    guide = ps.StructuredGuide(model, {"net.2.*": Subnetwork(), "*": PointEstimate()})
    assert guide.couplings["net/2/weight"].posterior().event_shape == (6,)
    assert count(guide) == 20 + 6 + 6 * 7 // 2
    first, second = guide.draw(), guide.draw()
    assert torch.equal(first["net.0.weight"], second["net.0.weight"])
    assert (first["net.2.weight"] != second["net.2.weight"]).all()
    center = ps.MAPGuide(model)
    ps.fit(model, center, regression_data(), num_steps=3, lr=0.05, progress=False)
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


@pytest.mark.filterwarnings("ignore::pyro_structvi.sites.finding.UnusedSiteWarning")
def test_sites_that_are_found_late():
    model, data, chosen = Late(), regression_data(), torch.tensor([True])
    center = ps.MAPGuide(model)
    with pytest.warns(UnusedSiteWarning, match=r"\['unused.weight', 'unused.bias'\]"):
        ps.fit(model, center, data, num_steps=3, progress=False)
    variances = element_scores.laplace_variances(model, center, data[0])
    assert set(variances) == set(center.site_names) - {"own"}
    torch.testing.assert_close(variances["unused.bias"], torch.ones(2))  # the prior's
    guide = ps.SubnetworkGuide(model, {"layer.bias": chosen}, center)
    ps.fit(model, guide, data, num_steps=5, lr=0.05, progress=False)
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
    guide.initialize(*data)
    assert len(guide.couplings["weight"].posterior().mean) == 2
    wrong = ps.SubnetworkGuide(linear_function, {**chosen, "wieght": chosen["weight"]})
    for _ in range(2):
        with pytest.raises(ValueError, match=r"has masks for \['wieght'\]"):
            wrong.initialize(*data)
        assert not wrong.is_initialized


def close_to_sampled(found, expected):
    """Compare with the error of 40,000 and more draws of y, some 0.6 %."""
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0)


def test_laplace_variances_of_a_linear_regression():
    """``1 / (sum x_j^2 / s^2 + 1 / p^2)``."""
    x = regression_data(30, 4)[0].repeat(1000, 1)
    model = ps.Regressor(ps.bayesianize(nn.Linear(4, 1), prior=PRIOR), NUM_DATA, NOISE)
    center, options = ps.MAPGuide(model), {"num_samples": 2, "batch_size": 7001}
    variances = element_scores.laplace_variances(model, center, x, **options)
    inputs = torch.cat([x, torch.ones(len(x), 1)], -1)
    expected = 1 / (inputs.square().sum(0) / NOISE**2 + 1 / PRIOR**2)
    close_to_sampled(torch.cat([variances["net.weight"][0], variances["net.bias"]]), expected)
    prior = dist.StudentT(1.0, 0.0, 1.0)  # without a variance
    net = ps.bayesianize(nn.Linear(4, 1, bias=False), prior=prior)
    model = ps.Regressor(net, NUM_DATA, NOISE)
    variances = element_scores.laplace_variances(model, ps.MAPGuide(model), x, **options)
    close_to_sampled(variances["net.weight"][0], NOISE**2 / x.square().sum(0))


def test_laplace_variances_of_a_classifier():
    """Against the Fisher information of a softmax: ``x_j^2 p_c (1 - p_c)``, summed over examples."""
    x = regression_data(20, 3)[0].repeat(1000, 1)
    model = ps.Classifier(ps.bayesianize(nn.Linear(3, 4, bias=False), prior=PRIOR), 20)
    center = ps.MAPGuide(model)
    variances = element_scores.laplace_variances(model, center, x, num_samples=2, batch_size=5000)
    p = (x @ center.median()["net.weight"].mT).softmax(-1)
    information = (p * (1 - p)).mT @ x.square()
    close_to_sampled(variances["net.weight"], 1 / (information + 1 / PRIOR**2))
    net = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5), nn.Linear(2, 1))
    model = ps.Regressor(ps.bayesianize(net), 12, dist.HalfNormal(1.0))
    variances = element_scores.laplace_variances(model, ps.MAPGuide(model), torch.randn(12, 3))
    assert model.training
    assert {*variances} == {f"net.{n}.{part}" for n in (0, 2) for part in ("weight", "bias")}


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


def test_masks_must_fit():
    mask, ones = CHOSEN["net.0.weight"], torch.ones(5, 3)
    for chosen, error, message in (
        ({"net.9": torch.ones(1).bool()}, ValueError, "at least one element|masks for"),
        ({**CHOSEN, "x": mask}, ValueError, r"`chosen` has masks for \['x'\]"),
        ({"net.0.weight": CHOSEN["net.2.weight"]}, ValueError, r"`chosen\['net.0.weight'\]` must"),
        ({"net.0.weight": ones}, TypeError, "must be a tensor of booleans"),
        ({"net.0.weight": ~ones.bool()}, ValueError, "at least one element"),
    ):
        with pytest.raises(error, match=message):
            ps.SubnetworkGuide(make_regressor(), chosen).initialize(*regression_data())


class LaplaceWeight(WeightDistribution):
    """Not normal, though a distribution over weights."""

    arg_constraints = dict.fromkeys(("loc", "scale"), constraints.real)
    variance = property(lambda q: 2 * q.scale.square())
    covariance_matrix = property(lambda q: torch.diag_embed(q.variance))

    def rsample(self, sample_shape=()):
        return dist.Laplace(self.loc, self.scale).rsample(sample_shape)

    def entropy(self):
        return dist.Laplace(self.loc, self.scale).entropy().sum()

    def ways_to_apply(self, linear_map, x):
        return ("weight",)


class LaplaceFamily(MeanField):
    def distribution(self, site, *, loc, log_scale):
        return LaplaceWeight({"loc": loc, "scale": log_scale.exp()}, event_dim=1)


def test_what_else_is_refused():
    model, other = make_regressor(), ps.Classifier(ps.bayesianize(nn.Linear(2, 2)), 3)
    for posterior, message in (
        (KTied(2), "a normal posterior of one vector"),
        (PointEstimate(), "need a normal posterior of one vector"),
        (Members(2), "need a normal posterior of one vector"),
        (LaplaceFamily(), "need a normal posterior of one vector, but got LaplaceFamily"),
    ):
        with pytest.raises(TypeError, match=message):
            ps.SubnetworkGuide(model, CHOSEN, posterior=posterior)
    with pytest.raises(ValueError, match="`center` must be a guide of the same model"):
        ps.SubnetworkGuide(model, CHOSEN, ps.MAPGuide(other))
    with pytest.raises(
        ValueError, match=r"`center` must have one .* such as `center\.members\[0\]`"
    ):
        ps.SubnetworkGuide(model, CHOSEN, ps.EnsembleGuide(model, 2))
    with pytest.raises(ValueError, match="one of `center` and `init_loc_fn`"):
        ps.SubnetworkGuide(model, CHOSEN, ps.MAPGuide(model), init_loc_fn=lambda site: None)
    large = ps.Classifier(ps.bayesianize(nn.Linear(1000, 1000)), 10)
    with pytest.raises(MemoryError, match=r"subnetwork of net\.weight"):
        ps.SubnetworkGuide(large, {"net.weight": torch.ones(1000, 1000, dtype=torch.bool)})
    with pytest.raises(ValueError, match="`size` must be"):
        element_scores.largest({"a": torch.rand(5)}, 6)
    with pytest.raises(ValueError, match="`variances` holds 1 NaN"):
        element_scores.largest({"a": torch.tensor([1.0, torch.nan])}, 1)


@pytest.mark.parametrize("train_rest", [False, True])
def test_training_moves_the_rest_only_if_asked(train_rest):
    guide, data = make_guide(train_rest=train_rest), regression_data(NUM_DATA)
    before = guide.median()
    ps.fit(guide.model, guide, data, num_steps=5, lr=0.02, progress=False)
    after = guide.median()
    assert torch.equal(before["net.0.bias"], after["net.0.bias"]) != train_rest
    assert not torch.equal(before["net.0.weight"], after["net.0.weight"])
    prediction = ps.predict(guide.model, guide, data[0], num_samples=10)
    assert (prediction.function_variance > 0).all()


def test_a_prior_given_another_chosen_site_takes_the_joint_draw():
    def model(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
        effects = pyro.sample("effects", dist.Normal(mean.expand(3), 0.5).to_event(1))
        pyro.sample("obs", dist.Normal(effects, 0.3).to_event(1), obs=y)

    y = torch.randn(3)
    guide = ps.StructuredGuide(model, {"*": Subnetwork()}, init_scale=0.5)
    guide.initialize(y)
    for parameter in guide.parameters():
        torch.nn.init.normal_(parameter)
    torch.manual_seed(0)
    terms = ps.StructuredELBO().terms(model, guide, y)
    torch.manual_seed(0)
    draw = guide(y)
    expected = -dist.Normal(draw["mean"], 0.5).log_prob(draw["effects"]).sum()
    torch.testing.assert_close(terms.kl["effects"], expected, rtol=1e-10, atol=0)
