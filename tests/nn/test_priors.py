"""Priors with a scale that is a site, of torch, and over all elements of a parameter together."""

import copy
import math
import pickle
import warnings

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import Predictive
from torch import nn
from torch.distributions import kl_divergence

import pyro_structvi as ps
from pyro_structvi.infer import SampledKLWarning
from pyro_structvi.nn.random_module import prior_of
from pyro_structvi.sites.finding import find_declared_sites
from tests.distributions.cases import (
    CASES,
    make_full,
    make_k_tied,
    make_log_scale,
    make_matrix_normal,
)
from tests.guide_cases import GUIDES, POINTS
from tests.models import regression_data
from tests.nn.test_conversion import TiedNet
from tests.unit_noise import draw_with_noise, exact_mean

HALF_CAUCHY = ps.HierarchicalScale(dist.HalfCauchy(1.0))

unsaid = pytest.mark.filterwarnings("ignore::pyro_structvi.infer.SampledKLWarning")


def make_model(prior, net=None):
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)) if net is None else net
    return ps.Regressor(ps.bayesianize(net, prior=prior), num_data=12, noise_scale=0.3)


def trace_of(module, *args):
    return poutine.trace(module).get_trace(*args).nodes


# ---- the model -----------------------------------------------------------------------------------


def test_each_parameter_has_a_scale_of_its_own_divided_by_the_root_of_the_fan_in():
    by_fan_in = ps.HierarchicalScale(torch.distributions.HalfNormal(2.0), fan_in=True)
    net = TiedNet()
    net.last = nn.Linear(4, 2)
    net = ps.bayesianize(net, {"last.*": by_fan_in, "*.bias": 1.0, "*": HALF_CAUCHY})
    names = ["decoder.weight_scale", "decoder.weight", "decoder.bias", "encoder.bias"]
    names += ["last.weight_scale", "last.weight", "last.bias_scale", "last.bias"]
    assert sorted(find_declared_sites(net)) == sorted(names), "a tied weight has one scale"
    nodes = trace_of(net.last, torch.randn(1, 4)) | trace_of(net, torch.randn(1, 3))
    for name, factor in (("last.weight", 0.5), ("last.bias", 1.0), ("decoder.weight", 1.0)):
        scale = factor * nodes[f"{name}_scale"]["value"]
        torch.testing.assert_close(nodes[name]["fn"].stddev, scale.expand_as(nodes[name]["value"]))
        assert not nodes[name]["fn"].mean.any()
    assert isinstance(nodes["decoder.weight_scale"]["fn"], dist.HalfCauchy)


@unsaid
def test_a_prior_with_a_batch_has_several_scales():
    prior = ps.HierarchicalScale(dist.HalfCauchy(torch.ones(5, 1)))
    model = make_model({"0.weight": prior, "*": 1.0})
    node = trace_of(model, torch.randn(12, 3))
    scale = node["net.0.weight_scale"]["value"]
    assert scale.unique().shape == (5,)
    torch.testing.assert_close(node["net.0.weight"]["fn"].stddev, scale.expand(5, 3))
    for guide in (ps.KTiedGuide, ps.AutoLowRankLRT):
        assert ps.StructuredELBO().loss(model, guide(model), *regression_data()) > 0
    with pytest.raises(ValueError, match=r"0.weight_scale: scale` must broadcast to .* \(5, 3\)"):
        make_model({"0.weight": ps.HierarchicalScale(dist.HalfCauchy(torch.ones(2))), "*": 1.0})


def test_the_bias_of_a_walsh_hadamard_layer_may_have_one():
    net, layers = nn.Sequential(nn.Linear(4, 8)), {"*": ps.WalshHadamard()}
    bayes_net = ps.bayesianize(net, prior={"*.bias": HALF_CAUCHY, "*": 1.0}, layers=layers)
    names = ["0.coefficients", "0.bias_scale", "0.bias"]
    assert list(find_declared_sites(bayes_net)) == names
    with pytest.raises(ValueError, match=r"one normal around zero .* got HierarchicalScale"):
        ps.bayesianize(net, prior=HALF_CAUCHY, layers=layers)


def test_a_name_that_is_taken_is_an_error():
    net = nn.Linear(3, 1)
    net.weight_scale = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match="Linear has already an attribute `weight_scale`"):
        ps.bayesianize(net, prior=HALF_CAUCHY)
    ps.bayesianize(net, prior={"weight": 1.0, "*": HALF_CAUCHY})


def test_a_prior_that_is_not_over_positive_numbers():
    for prior in (dist.Uniform(-1.0, 1.0), dist.Poisson(1.0)):
        with pytest.raises(TypeError, match="`prior` must be a distribution over positive numb"):
            ps.HierarchicalScale(prior)


# ---- guides --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "guide_name", ["k-tied", "matrix normal, joined", "low rank", "inducing weights", *POINTS]
)
def test_every_guide_serves_it(guide_name):
    model, (x, y) = make_model({"*.weight": HALF_CAUCHY, "*": 1.0}), regression_data()
    guide, elbo = (GUIDES | POINTS)[guide_name](model), ps.StructuredELBO()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert math.isfinite(elbo.loss_and_grads(model, guide, x, y))
    scales = {"net.0.weight_scale", "net.2.weight_scale"}
    is_point = guide_name in POINTS
    assert caught == []
    assert all(torch.isfinite(p.grad).all() for p in guide.parameters() if p.grad is not None)
    assert is_point or "TransformedMeanField" in str(guide["net.0.weight_scale"])
    assert all(guide.median()[name] > 0 for name in scales)
    prediction = ps.predict(model, guide, x, num_samples=3)
    assert prediction.mean.shape == y.shape
    assert scales < set(Predictive(model, guide=guide, num_samples=2)(x))


def test_means_start_at_the_weights_of_the_net_and_scales_near_their_median():
    net = nn.Linear(3, 2)
    model = make_model(
        {"weight": HALF_CAUCHY, "bias": ps.HierarchicalScale(dist.Gamma(2.0, 3.0))}, net
    )
    medians = ps.MeanFieldGuide(model).median()
    torch.testing.assert_close(medians["net.weight"], net.weight.detach())
    torch.testing.assert_close(medians["net.bias"], net.bias.detach())
    sites = find_declared_sites(model)
    assert sites["net.weight"].site.prior_scale == pytest.approx(1.0, rel=0.25)
    assert sites["net.bias"].site.prior_scale == pytest.approx(0.559, rel=0.25)


def scaled_function(x, y=None):
    scale = pyro.sample("scale", dist.LogNormal(math.log(0.3), 1.0))
    weight = pyro.sample("weight", dist.Normal(0.0, 2 * scale).expand([2]).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("obs", dist.Normal(x @ weight, 0.5), obs=y)


def test_units_of_weights_are_those_at_the_median_of_their_scale():
    prior = ps.HierarchicalScale(dist.LogNormal(math.log(0.6), 1.0))
    net = make_model({"weight": prior, "*": 1.0}, nn.Linear(2, 1))
    for model, site, y in ((net, "net.weight", (4, 1)), (scaled_function, "weight", (4,))):
        guide = ps.MeanFieldGuide(model)
        guide.initialize(torch.randn(4, 2), torch.randn(y))
        assert guide[site].site.prior_scale == pytest.approx(0.6, rel=1e-9)


# ---- the bound -----------------------------------------------------------------------------------


@unsaid
@pytest.mark.parametrize(
    ("prior", "fan_in"), [(dist.LogNormal(-0.5, 0.7), True), (dist.HalfCauchy(1.0), False)]
)
def test_the_kl_of_a_weight_is_that_given_a_draw_of_its_scale(prior, fan_in):
    layer, data = nn.Linear(3, 2, bias=False), (torch.randn(3, 3), torch.randn(3, 2))
    prior = ps.HierarchicalScale(prior, fan_in)
    model = ps.Regressor(ps.bayesianize(layer, prior=prior), 3, 0.5)
    guide = ps.MeanFieldGuide(model, init_scale=0.2)
    guide.initialize(*data)
    scale, q = guide["net.weight_scale"], guide["net.weight"]()
    draw = torch.exp(scale.loc + 0.7 * scale.log_scale.exp()) / (3**0.5 if fan_in else 1.0)

    def weight_kl():
        return ps.StructuredELBO().terms(model, guide, *data).kl["net.weight"]

    size = draw_with_noise(weight_kl, None)[1]
    found, _ = draw_with_noise(weight_kl, 0.7 * torch.eye(size)[0])
    torch.testing.assert_close(found, kl_divergence(q, dist.Normal(0.0, draw).expand((2, 3))))


# ---- over all elements of a parameter together ---------------------------------------------------


SHAPE = (5, 3)
PRIORS = {
    "2-tied": lambda: make_k_tied(2)((), SHAPE, torch.float64),
    "matrix normal": lambda: make_matrix_normal((), SHAPE, torch.float64),
    "full": lambda: make_full((), SHAPE, torch.float64),
    "log scale": lambda: make_log_scale((), SHAPE, torch.float64),
    "multivariate": lambda: dist.TransformedDistribution(
        dist.MultivariateNormal(torch.zeros(15), torch.eye(15).double() + 0.2),
        [dist.transforms.ReshapeTransform((15,), SHAPE)],
    ),
    "rows": lambda: dist.MultivariateNormal(torch.zeros(SHAPE), torch.eye(3) + 0.2).to_event(1),
}


def with_whole_prior(prior):
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    net = ps.bayesianize(net, {"0.weight": prior, "*": 1.0})
    return ps.Regressor(net, 12, 0.3)


@pytest.mark.parametrize("name", PRIORS)
def test_the_site_has_the_prior(name):
    prior, data = PRIORS[name](), regression_data()
    model = with_whole_prior(prior)
    draw = prior.sample()
    nodes = trace_of(poutine.condition(model, {"net.0.weight": draw}), data[0])
    found = nodes["net.0.weight"]["fn"]
    torch.testing.assert_close(found.log_prob(draw), prior.log_prob(draw))
    guide = ps.MatrixNormalGuide(model, join_bias=False)
    for options in ({}, {"num_particles": 2, "vectorize_particles": True}):
        terms = ps.StructuredELBO(**options).terms(model, guide, *data)
        assert not terms.sampled
        expected = kl_divergence(guide["net.0.weight"](), prior)
        torch.testing.assert_close(terms.kl["net.0.weight"], expected)
    start = ps.MAPGuide(model).median()["net.0.weight"]
    assert torch.equal(start, model.net.get_submodule("0").initial_values["weight"])


@pytest.mark.parametrize("name", ["matrix normal", pytest.param("rows", marks=pytest.mark.slow)])
def test_the_kl_of_a_joined_weight_is_on_average_over_draws_that_of_parts(name):
    prior, data = PRIORS[name](), regression_data()
    model = with_whole_prior(prior)
    apart, joined = (
        ps.MatrixNormalGuide(model, join_bias=join_bias) for join_bias in (False, True)
    )
    with torch.no_grad():
        for guide in (apart, joined):
            for posterior in guide.all_posteriors():
                nn.init.zeros_(posterior.loc)
    expected = sum(ps.StructuredELBO().terms(model, apart, *data).kl.values())
    elbo = ps.StructuredELBO()
    with pytest.warns(SampledKLWarning, match="net.0.weight\\+bias"):
        elbo.terms(model, joined, *data)
    found = exact_mean(lambda: sum(elbo.terms(model, joined, *data).kl.values()))
    torch.testing.assert_close(found, expected.detach())


OTHERS = {  # of torch, which become Pyro's; transforms and mixtures over all elements
    "hierarchical": lambda: ps.HierarchicalScale(torch.distributions.HalfCauchy(torch.rand(()))),
    "Laplace": lambda: torch.distributions.Laplace(torch.zeros(SHAPE), torch.ones(SHAPE)),
    "Student": lambda: torch.distributions.Independent(
        torch.distributions.StudentT(torch.full(SHAPE, 3.0)), 1
    ),
    "affine": lambda: dist.TransformedDistribution(
        dist.StudentT(5.0, torch.zeros(SHAPE), 1.0).to_event(2),
        [dist.transforms.AffineTransform(torch.randn(SHAPE), 2 * torch.rand(SHAPE) + 0.1, 2)],
    ),
    "mixture": lambda: dist.MixtureSameFamily(
        dist.Categorical(torch.ones(5, 2)),
        dist.Normal(torch.zeros(5, 2, 3), torch.tensor([[0.1], [1.0]])).to_event(1),
    ).to_event(1),
}


@pytest.mark.parametrize("name", ["2-tied", "multivariate", "rows", *OTHERS])
def test_it_moves_converts_and_is_copied_with_the_model(name):
    prior = (PRIORS | OTHERS)[name]()
    model = with_whole_prior(prior)
    values = {"net.0.weight": torch.randn(SHAPE), "net.0.weight_scale": torch.rand(())}
    draw, scale = values.values()

    def density(model, dtype=torch.float64):
        given = {site: value.to(dtype) for site, value in values.items()}
        nodes = trace_of(poutine.condition(model, given), torch.zeros(2, 3, dtype=dtype))
        assert nodes["net.0.bias"]["value"].dtype == nodes["obs"]["value"].dtype == dtype
        own = [nodes[site] for site in values if site in nodes]
        assert {node["fn"].sample().dtype for node in own} == {dtype}
        return sum(node["fn"].log_prob(node["value"]) for node in own).double()

    if name == "hierarchical":
        expected = prior.prior.log_prob(scale) + dist.Normal(0.0, scale).log_prob(draw).sum()
    else:
        expected = prior.log_prob(draw).sum()
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(density(other), expected)
    fresh = with_whole_prior((PRIORS | OTHERS)[name]())
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(density(fresh), expected)
    single = density(model.float(), torch.float32)
    torch.testing.assert_close(single, expected, rtol=1e-4, atol=1e-4)
    if name in ("Laplace", "hierarchical"):
        sites = find_declared_sites(model.to("meta"))
        for site in ("net.0.weight", "net.0.bias"):
            assert sites[site].prior.mean.device.type == "meta"


DERIVED = {  # distributions with tensors that they compute from their arguments
    "Weibull": lambda number: dist.Weibull(torch.tensor(2.0), number),
    "Beta": lambda number: dist.Beta(number, 2.0),
    "StudentT": lambda number: dist.StudentT(number, 0.0, 1.0),
}


@pytest.mark.parametrize("name", DERIVED)
def test_tensors_that_a_prior_computes_follow_its_buffers(name):
    priors = (DERIVED[name](torch.tensor(number)) for number in (3.0, 4.0))
    models = [make_model({"0.bias": prior, "*": 1.0}) for prior in priors]
    value, found = torch.full((5,), 0.4), []
    prior_of(models[0].net[0], "bias").log_prob(value)
    models[0].load_state_dict(models[1].state_dict())
    for model in models:
        prior = prior_of(model.net[0], "bias")
        torch.manual_seed(0)
        found.append(torch.cat([prior.sample(), prior.variance, prior.log_prob(value).reshape(1)]))
    assert torch.equal(*found)
    assert prior_of(models[0].net[0], "bias") is prior_of(models[0].net[0], "bias")


@pytest.mark.parametrize("guide_name", ["k-tied", "rowwise"])
def test_yesterdays_posterior_is_todays_prior(guide_name):
    data = regression_data()
    yesterday = GUIDES[guide_name](with_whole_prior(1.0))
    found = {name: yesterday[name]() for name in yesterday.site_names}
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    net = ps.bayesianize(net, lambda name, _: found[f"net.{name}"])
    model = ps.Regressor(net, 12, 0.3)
    today = GUIDES[guide_name](model)
    terms = ps.StructuredELBO().terms(model, today, *data)
    assert not terms.sampled
    terms.elbo.backward()
    assert all(value.grad is None for value in yesterday.parameters())
    for name, q in found.items():
        torch.testing.assert_close(terms.kl[name], kl_divergence(today[name](), q))
        assert terms.kl[name] > 0
    today.load_state_dict(yesterday.state_dict())
    for nats in ps.StructuredELBO().terms(model, today, *data).kl.values():
        torch.testing.assert_close(nats, torch.zeros(()), rtol=0, atol=1e-9)


def test_yesterdays_posterior_of_a_scale_is_a_log_normal_prior():
    def model_of(prior):
        return ps.Regressor(ps.bayesianize(nn.Linear(3, 1)), 12, noise=prior)

    yesterday = ps.MeanFieldGuide(model_of("learned"))
    q = yesterday["noise_scale"]().base_dist
    model = model_of(dist.LogNormal(q.mean.detach(), q.stddev.detach()))
    today = ps.MeanFieldGuide(model)
    today.load_state_dict(yesterday.state_dict())
    kl = ps.StructuredELBO().terms(model, today, *regression_data()).kl["noise_scale"]
    torch.testing.assert_close(kl, torch.zeros(()), rtol=0, atol=1e-9)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"'0.weight' must be over single elements, or .*\(5, 3\)"):
        with_whole_prior(make_k_tied(2)((), (3, 5), torch.float64))
    with pytest.raises(ValueError, match=r"got batch shape \(5,\) and event shape \(3,\)"):
        with_whole_prior(dist.MultivariateNormal(torch.zeros(SHAPE), torch.eye(3)))
    inducing = next(case for case in CASES if case.kl_with_inducing is not None)
    with pytest.raises(TypeError, match="must be a distribution that its own tensors define"):
        with_whole_prior(inducing.make((), SHAPE, torch.float64))
    for point in (dist.Delta(torch.tensor(0.0)), dist.Delta(torch.zeros(SHAPE), event_dim=2)):
        with pytest.raises(ValueError, match=r"prior for 0\.weight` must have a density"):
            with_whole_prior(point)
    model = with_whole_prior(1.0)
    later = ps.GlobalInducingGuide(model, torch.randn(4, 3), join_bias=False)["net.2.weight"]()
    with pytest.raises(ValueError, match="must have a density, but got a NormalGivenInputs"):
        ps.bayesianize(nn.Linear(5, 1), {"weight": later, "*": 1.0})


def test_a_prior_that_requires_a_gradient_is_refused():
    """Its tensors would be constant buffers, and stay as they are in training."""
    scale = nn.Parameter(torch.tensor(0.7))
    for prior in (scale, dist.Normal(0.0, scale), dist.Laplace(scale, 1.0).expand([3])):
        with pytest.raises(ValueError, match=r"must be constant.*HierarchicalScale"):
            make_model(prior)
    net = ps.bayesianize(nn.Linear(3, 1))
    for noise in (scale, dist.HalfNormal(scale)):
        with pytest.raises(ValueError, match="must be constant"):
            ps.Regressor(net, noise=noise)
    assert make_model(dist.Normal(0.0, scale.detach())) is not None


def test_the_scale_of_a_prior_that_a_model_learns_is_read_without_a_warning():
    class Own(pyro.nn.PyroModule):
        def __init__(self):
            super().__init__()
            self.scale = pyro.nn.PyroParam(torch.tensor(0.7), dist.constraints.positive)
            self.weight = pyro.nn.PyroSample(
                lambda own: dist.Normal(0.0, own.scale).expand([1, 3]).to_event(2)
            )

        def forward(self, x, y=None):
            mean = nn.functional.linear(x, self.weight)
            with pyro.plate("data", len(x)):
                pyro.sample("obs", dist.Normal(mean, 0.5).to_event(1), obs=y)

    model = Own()
    assert ps.MeanFieldGuide(model)["weight"].site.prior_scale == pytest.approx(0.7)
