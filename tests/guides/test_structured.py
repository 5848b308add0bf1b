"""StructuredGuide: families, starts, random state, predictions, copies, steps, names of parameters."""

import copy
import gc
import math
import pickle
import weakref
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro.infer import SVI, Predictive
from pyro.infer.autoguide.initialization import init_to_mean, init_to_value
from torch import nn

import pyro_structvi as ps
from pyro_structvi.distributions import WeightDistribution
from pyro_structvi.extend import Family
from pyro_structvi.families import KTied, MeanField, TransformedMeanField
from pyro_structvi.maps import ConvolutionMap
from pyro_structvi.weights.lazy import LazyWeight
from pyro_structvi.weights.torch_distributions import median
from tests.guide_cases import GUIDE_NAMES, GUIDES, POINTS, once
from tests.models import (
    HandWritten,
    linear_function,
    local_latent_function,
    make_classifier,
    make_image_classifier,
    make_regressor,
    recurrent_function,
    regression_data,
)
from tests.recorded_sizes import RecordsSizes


def make_svi(model, guide, elbo=None, lr=1e-2):
    return SVI(model, guide, pyro.optim.Adam({"lr": lr}), loss=elbo or ps.StructuredELBO())


def test_the_first_matching_pattern_wins():
    model = make_regressor(noise_scale=dist.HalfNormal(1.0))
    own = {"net.0.*": KTied(3, join_bias=False), "*.weight": KTied(1, join_bias=False)}
    guide = ps.StructuredGuide(model, {**own, "*": MeanField()})
    families = {name: guide[name].family for name in guide.site_names}
    assert families == {
        "net.0.weight": KTied(3, join_bias=False),
        "net.0.bias": MeanField(),  # KTied(3) cannot serve a vector; the next match does
        "net.2.weight": KTied(1, join_bias=False),
        "net.2.bias": MeanField(),
        "noise_scale": TransformedMeanField(),
    }


class Nowhere(Family):
    """A family that serves no site, and does not say which it needs."""

    def fits(self, site):
        return False


@dataclass(frozen=True)
class Named(MeanField):
    """With an option, and a parameter, of any name."""

    option: Any = None
    name: str = "half"

    def init(self, site, loc, scale):
        return {self.name: loc.clone()}


def test_wrong_families_and_options_are_refused():
    short = {"init_loc_fn": lambda site: torch.zeros(2)}
    for families, options, message in (
        ({"net.0.*": KTied(2)}, {}, r"weights \['net.2.weight'\].*'net.2.bias'"),
        ({"net.0.bias": KTied(2), "*": MeanField()}, {}, r"KTied\(rank=2\) needs a real weight of"),
        ({"net.0.bias": Nowhere(), "*": MeanField()}, {}, "needs a site that its `fits` accepts"),
        ({"*": Named()}, {}, r"`init` of Named\(.*\) must return .* but one is 'half'"),
        (
            {"*": Named(option={}, name="own")},
            {},
            r"^`option` of Named\(.*\) must be hashable.*'dict'. Write",
        ),
        ({"*": MeanField()}, short, r"shape \(5, 3\) for the site 'net.0.weight', but got \(2,\)"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            ps.StructuredGuide(make_regressor(), families, **options)


def test_a_pattern_without_a_site_is_an_error_before_the_first_step():
    guide = ps.StructuredGuide(make_regressor(), {"nothing.*": KTied(2), "*": MeanField()})
    before = copy.deepcopy(guide.state_dict())
    with pytest.raises(
        ValueError, match=r"'nothing.\*' of `families` matches none of .*net.0.weight"
    ):
        make_svi(make_regressor(), guide).step(*regression_data())
    assert all(torch.equal(before[key], value) for key, value in guide.state_dict().items())


def test_a_model_without_latent_sites_or_with_a_discrete_one_is_an_error():
    model = ps.Regressor(nn.Linear(3, 1), num_data=12, noise_scale=0.1)
    with pytest.raises(ValueError, match=r"no latent site.*bayesianize\(net, prior=1.0\)"):
        ps.KTiedGuide(model).initialize(*regression_data())
    coin = lambda: pyro.sample("coin", dist.Bernoulli(0.5))  # noqa: E731
    with pytest.raises(ValueError, match=r"'coin' is discrete.*hide=\['coin'\].*enumeration"):
        ps.MeanFieldGuide(coin).initialize()


def test_k_tied_starts_at_the_papers_values():
    model = ps.Regressor(ps.bayesianize(nn.Linear(400, 300)), num_data=12, noise_scale=0.1)
    posterior = ps.KTiedGuide(model, rank=2, init_scale=0.01)["net.weight"]
    start = (torch.tensor(0.01).log() - torch.tensor(2.0).log()) / 2
    for parameter in (posterior.log_row_scale, posterior.log_column_scale):
        assert abs(parameter.mean() - start) < 5 * 0.1 / parameter.numel() ** 0.5
        assert abs(parameter.std() / 0.1 - 1) < 5 / (2 * parameter.numel()) ** 0.5
    assert abs(posterior().stddev.mean() / 0.01 - 1) < 0.05


def test_weights_that_were_never_in_a_net_start_at_he_draws():
    def model():
        pyro.sample("weight", dist.Normal(torch.zeros(300, 200), 1.0).to_event(2))

    guide = ps.MeanFieldGuide(model)
    guide.initialize()
    loc = guide["weight"].loc
    assert abs(loc.std() / (2 / 200) ** 0.5 - 1) < 5 / (2 * loc.numel()) ** 0.5


def test_init_loc_fn_is_pyros():
    values = {"net.0.weight": torch.full((5, 3), 0.25)}
    guide = ps.KTiedGuide(make_regressor(), init_loc_fn=init_to_value(values=values))
    assert torch.equal(guide.median()["net.0.weight"], values["net.0.weight"])
    guide = ps.MeanFieldGuide(make_regressor(), init_loc_fn=init_to_mean)
    assert torch.equal(guide["net.2.weight"].loc, torch.zeros(1, 5))


def test_predicting_from_a_guide_that_knows_no_site_is_an_error():
    guide, x = ps.MeanFieldGuide(linear_function), torch.zeros(2, 3)
    message = r"knows no latent site yet.*call `guide.initialize\(...\)`"
    for attempt in (
        lambda: Predictive(linear_function, guide=guide, num_samples=2)(x),
        lambda: ps.predict(linear_function, guide, x),
        guide.draw,
    ):
        with pytest.raises(RuntimeError, match=message):
            attempt()


def test_a_pickle_carries_no_data_and_no_model():
    model, data = make_regressor(size=10_000), regression_data(size=10_000)
    guide = ps.KTiedGuide(model, init_loc_fn=lambda site: torch.zeros(site["fn"].shape()))
    make_svi(model, guide).step(*data)
    payload = pickle.dumps(guide)
    assert len(payload) < 20_000
    loaded = pickle.loads(payload)
    assert (loaded.model, loaded.init_loc_fn) == (None, None)
    assert copy.deepcopy(guide).init_loc_fn is guide.init_loc_fn
    assert guide.model is model
    assert loaded.draw().keys() == guide.draw().keys()
    with pytest.raises(RuntimeError, match="unpickled without its model"):
        pickle.loads(payload).initialize(*data)
    make_svi(model, loaded).step(*data)


def test_an_unpickled_mixture_is_trained():
    model, data = make_regressor(), regression_data()
    guide = ps.MixtureGuide(model, ps.KTiedGuide, 2)
    loaded = pickle.loads(pickle.dumps(guide))
    ps.fit(model, loaded, data, num_steps=2, progress=False, compiled=False)
    assert all(member.model is model for member in (loaded, *loaded.members))


def test_sites_of_functions_come_in_the_order_of_execution_whatever_their_names():
    names = ["last", "first", "a.b", "a/b", "a/.b", "a./b", "a..b", "a~1b", "values", "values~"]
    names += ["training"]

    def model():
        for name in names:
            pyro.sample(name, dist.Normal(0.0, 1.0))

    guide = ps.MeanFieldGuide(model)
    guide.initialize()
    assert guide.site_names == [*guide.draw()] == names
    assert len(list(guide.parameters())) == 2 * len(names)
    with pytest.raises(KeyError, match=r"'net.9.weight' is none of the sites"):
        guide["net.9.weight"]
    mixture = ps.MixtureGuide(model, ps.MeanFieldGuide, 2)
    mixture.initialize()
    for each in (guide, mixture):
        assert all(name in each for name in names)
        assert "net.9.weight" not in each


# ---- the random state and the memory of a start --------------------------------------------------


def hierarchical_net(prior, *sizes):
    scales = {"weight": ps.HierarchicalScale(prior), "bias": 1.0}
    net = nn.Linear(*(sizes or (30, 1)))
    return ps.Regressor(ps.bayesianize(net, prior=scales), 12, dist.Gamma(2.0, 1.0))


def test_the_global_random_state_stays():
    """For priors of scales; the contract of guides checks it for every structure."""
    for prior in (dist.HalfCauchy(1.0), dist.Gamma(2.0, torch.ones(1, 30))):  # of no closed form
        model, before = hierarchical_net(prior), torch.get_rng_state()
        guide = ps.MeanFieldGuide(model)
        assert torch.equal(torch.get_rng_state(), before)
        guide.initialize(torch.zeros(12, 30), torch.zeros(12, 1))
        assert torch.equal(torch.get_rng_state(), before)


class Counting(nn.Linear):
    def __init__(self):
        super().__init__(3, 1)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def test_runs_that_look_at_a_model_are_no_steps_of_it():
    """A net counts the steps of its training, as one that anneals does."""
    model = ps.Regressor(ps.bayesianize(Counting(), 1.0), num_data=12, noise=0.5)
    guide, data = ps.MeanFieldGuide(model), regression_data()
    guide.initialize(*data)
    guide.report(*data)
    assert model.net.calls == 0
    ps.fit(model, guide, data, num_steps=7, progress=False)
    assert model.net.calls == 7


def test_the_start_follows_the_seed_and_differs_from_what_is_drawn_next():
    model, starts = make_regressor(), []
    for seed in (1, 1, 2):
        pyro.set_rng_seed(seed)
        guide = ps.AutoLowRankLRT(model, diagonal="full")
        factors = guide["net.0.weight"].factors.detach()
        starts.append(factors / factors.norm())
        following = torch.randn_like(factors)
        assert not torch.allclose(starts[-1], following / following.norm())
    assert torch.equal(starts[0], starts[1])
    assert not torch.allclose(starts[0], starts[2])


def test_nothing_larger_than_a_weight_is_formed():
    model = hierarchical_net(dist.HalfCauchy(1.0), 300, 200)
    with RecordsSizes() as recorded:
        ps.MeanFieldGuide(model)
    assert max(recorded.stored) == 300 * 200


def test_medians_in_closed_form_or_of_draws():
    """The median of a Gamma(2, 1) is 1.678, and that of 99 draws has the deviation 0.16."""
    for prior, expected in (
        (dist.HalfCauchy(torch.tensor([1.0, 3.0])), [1.0, 3.0]),
        (dist.LogNormal(torch.zeros(2), 1.0), [1.0, 1.0]),
        (dist.Normal(torch.tensor([1.0, -1.0]), 1.0).to_event(1), [1.0, -1.0]),
        (dist.Exponential(torch.tensor([2.0])).expand([2]), [0.5 * math.log(2)] * 2),
        (dist.Uniform(torch.zeros(2), 3.0), [1.5, 1.5]),
    ):
        torch.testing.assert_close(median(prior), torch.tensor(expected))
    prior = dist.Gamma(torch.full((2, 3), 2.0), 1.0).to_event(2)
    value, torch_state = median(prior), torch.get_rng_state()
    assert torch.equal(median(prior), value)  # whatever was drawn
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert value.shape == (2, 3)
    assert (value - 1.678).abs().max() < 5 * 0.16


def test_two_guides_of_one_class_train_with_parameters_of_their_modules():
    with pyro.settings.context(module_local_params=True):
        for _ in range(2):
            model = make_regressor()
            guide = ps.KTiedGuide(model)
            before = copy.deepcopy(dict(guide.named_parameters()))
            svi = make_svi(model, guide)
            for _ in range(2):
                svi.step(*regression_data())
            assert all(not torch.equal(before[k], v) for k, v in guide.named_parameters())


def test_guides_of_one_class_have_separate_names_and_leave_the_store_when_they_go():
    model, (x, y) = make_regressor(), regression_data()
    guides = [ps.KTiedGuide(model) for _ in range(2)]
    optim = pyro.optim.Adam({"lr": 0.01})
    for guide in guides:
        before = copy.deepcopy(dict(guide.named_parameters()))
        for _ in range(2):
            SVI(model, guide, optim, ps.StructuredELBO()).step(x, y)
        assert all(not torch.equal(before[k], v) for k, v in guide.named_parameters())
    names = [name for guide in guides for name, _ in guide.named_parameters()]
    assert len(optim.get_state()) == len(names) == 12  # none shares another's state
    store = pyro.get_param_store()
    for guide, prefix in zip(guides, ("KTiedGuide", "KTiedGuide_2"), strict=True):
        assert store[f"{prefix}.posteriors.net/0/weight.loc"] is guide["net.0.weight"].loc
    del guides[1], guide, optim
    gc.collect()
    assert {name.partition(".")[0] for name in store} == {"KTiedGuide"}
    ps.fit(model, guides[0], (x, y), num_steps=1, progress=False)
    kept = weakref.ref(guides[0]["net.0.weight"].loc)
    guides.clear()
    gc.collect()
    assert kept() is None
    assert not [*store]


FILTERS = ConvolutionMap(F.conv2d, (1, 2, 2)), torch.zeros(6, 1, 3, 3)


@pytest.mark.parametrize("name", once(GUIDES | POINTS))
def test_no_weight_of_a_linear_map_is_drawn_in_a_training_step(name, monkeypatch):
    """Small filters of some structures are drawn, as the tests of ways to apply them say."""
    drawn, draw = [], LazyWeight.draw
    model, data = make_image_classifier()
    guide = (GUIDES | POINTS)[name](model)
    filters = guide["net.0.weight"]()
    if isinstance(filters, WeightDistribution) and filters.ways_to_apply(*FILTERS)[0] != "outputs":
        model, data = make_classifier(), (torch.randn(12, 3), torch.randint(4, (12,)))
        guide = (GUIDES | POINTS)[name](model)
    guide.initialize(*data)
    monkeypatch.setattr(LazyWeight, "draw", lambda w: (drawn.append(w.use.name), draw(w))[1])
    make_svi(model, guide).step(*data)
    assert set(drawn) <= {"net.4.weight", "net.4.bias"}  # of the normalization


@pytest.mark.parametrize("name", [*GUIDE_NAMES, *POINTS])
@pytest.mark.filterwarnings("ignore::pyro_structvi.infer.SampledKLWarning")
def test_every_parameter_has_a_gradient_whatever_a_model_does_with_its_sites(name):
    """With a weight that is drawn, since it is used twice, latents of examples, a scale of noise."""
    for model, outputs in (
        (recurrent_function, (6,)),
        (local_latent_function, (6,)),
        (HandWritten(), (6, 2)),
    ):
        guide, data = (GUIDES | POINTS)[name](model), (torch.randn(6, 3), torch.randn(outputs))
        guide.initialize(*data)
        ps.StructuredELBO(num_particles=2).differentiable_loss(model, guide, *data).backward()
        gradients = {name: parameter.grad for name, parameter in guide.named_parameters()}
        assert [n for n, own in gradients.items() if own is None or not own.isfinite().all()] == []


def test_one_use_more_than_was_counted_is_an_error():
    def model(x, times):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(3, 3), 1.0).to_event(2))
        for _ in range(times):
            x = F.linear(x, weight)
        pyro.factor("obs", -x.square().sum())

    guide = ps.MeanFieldGuide(model)
    svi = make_svi(model, guide)
    svi.step(torch.ones(2, 3), 1)
    with pytest.raises(RuntimeError, match=r"'weight' more often in this pass.*guide.initialize"):
        svi.step(torch.ones(2, 3), 2)
    guide.initialize(torch.ones(2, 3), 2)
    svi.step(torch.ones(2, 3), 2)


def test_a_model_that_differentiates_enables_gradients():
    """It runs without them where its sites are found, and in predictions."""
    model = make_regressor()
    guide, (x, y) = ps.MeanFieldGuide(model), regression_data()

    def differentiate(module, args, outputs):
        torch.autograd.grad(outputs.sum(), args[0])

    model.net.register_forward_hook(differentiate)
    data = x.requires_grad_(), y
    for run in (lambda: guide.initialize(*data), lambda: ps.predict(model, guide, x)):
        with pytest.raises(
            RuntimeError, match=r"takes derivatives, .*`with torch.enable_grad\(\):`"
        ):
            run()


def test_sites_of_another_size_need_a_new_guide():
    def model(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            effect = pyro.sample("effect", dist.Normal(mean, 1.0))
            pyro.sample("obs", dist.Normal(effect, 0.5), obs=y)

    guide = ps.MeanFieldGuide(model)
    guide.initialize(torch.zeros(5))
    with pytest.raises(ValueError, match=r"'effect' has shape \(7,\) .* posterior \(5,\)"):
        guide.initialize(torch.zeros(7))
    assert torch.isfinite(ps.StructuredELBO().terms(model, guide, torch.zeros(5)).elbo)


def test_data_of_another_dtype_is_an_error_that_names_the_site():
    model = make_regressor()
    x, y = regression_data()
    svi = make_svi(model, ps.MeanFieldGuide(model))
    for _ in range(2):  # in the run that counts uses, and in a step
        with pytest.raises(ValueError, match=r"site 'net.0.weight' must have dtype torch.float64"):
            svi.step(x.float(), y)
        svi.step(x, y)


# ---- starts relative to the prior ----------------------------------------------------------------


def test_posteriors_start_at_a_share_of_their_priors_scale():
    """Where that is known and the site is real; elsewhere with the other number."""
    priors = {"0.weight": ps.FanIn(1.5), "0.bias": dist.Cauchy(0.0, 1.0), "*": 0.7}
    net = nn.Sequential(nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 2))
    model = ps.Regressor(ps.bayesianize(net, priors), 6, noise=dist.LogNormal(0.0, 0.5))
    guide = ps.MeanFieldGuide(model, init_scale=0.03, init_relative_scale=0.2)
    expected = {"net.0.weight": 0.1, "net.0.bias": 0.03, "net.2.weight": 0.14, "net.2.bias": 0.14}
    for name, value in expected.items():
        found = guide[name]().stddev
        torch.testing.assert_close(found, torch.full_like(found, value))
    noise = guide["noise_scale"].value("log_scale").exp()
    torch.testing.assert_close(noise, torch.full_like(noise, 0.03))


def test_inducing_weights_of_all_layers_start_at_the_share():
    """In units of the prior, in which the joint posterior of layers with two priors has one scale."""
    net = nn.Sequential(nn.Linear(9, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False))
    model = ps.Regressor(ps.bayesianize(net, {"0.*": 3.0, "*": 0.5}), 6, noise_scale=0.1)
    guide = ps.InducingWeightGuide(model, (2, 2), "full", shared=True, init_relative_scale=0.2)
    (coupling,) = guide.couplings.values()
    scales = coupling.posterior().stddev
    torch.testing.assert_close(scales, torch.full_like(scales, 0.2))


def test_the_first_layer_of_a_global_inducing_guide_starts_at_the_share():
    net = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False))
    model = ps.Regressor(ps.bayesianize(net, {"0.*": 3.0, "*": 0.5}), 6, noise_scale=0.1)
    options = {"first_layer": MeanField(), "init_scale": 0.1, "init_relative_scale": 0.2}
    guide = ps.GlobalInducingGuide(model, torch.randn(5, 3), **options)
    scales = guide["net.0.weight"]().stddev
    torch.testing.assert_close(scales, torch.full_like(scales, 0.6))
    logs = guide["net.2.weight"].value("log_precision")  # of pseudo-outputs, which are no weights
    torch.testing.assert_close(logs, torch.full_like(logs, -2 * math.log(0.1)))
