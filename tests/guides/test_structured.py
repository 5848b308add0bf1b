"""StructuredGuide: choosing families, starting values, uses, Pyro's interfaces, saving."""

import copy
import gc
import io
import pickle
import weakref

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
import torch.nn.functional as F
from pyro.infer import SVI, Importance, Predictive, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide.initialization import init_to_mean, init_to_value
from torch import nn

import pyro_structvi as ps
from pyro_structvi.families import KTied, MeanField, TransformedMeanField
from pyro_structvi.guides.local_latents import LocalLatentWarning
from pyro_structvi.lazy.messenger import DelayDraws
from pyro_structvi.lazy.weight import LazyWeight
from tests.guide_cases import GUIDE_NAMES, GUIDES, POINTS
from tests.models import (
    HandWritten,
    convolution_function,
    linear_function,
    local_latent_function,
    make_classifier,
    make_regressor,
    recurrent_function,
    regression_data,
)

ELBOS = [ps.StructuredELBO, TraceMeanField_ELBO, Trace_ELBO]


def make_svi(model, guide, elbo=None, lr=1e-2):
    return SVI(model, guide, pyro.optim.Adam({"lr": lr}), loss=elbo or ps.StructuredELBO())


def function_cases():
    x = torch.randn(6, 3)
    return {
        "linear": (linear_function, (x, torch.randn(6, 2))),
        "convolution": (convolution_function, (x.unsqueeze(1), torch.randn(6))),
        "recurrent": (recurrent_function, (x, torch.randn(6))),
        "local latent": (local_latent_function, (x, torch.randn(6))),
        "hand-written": (HandWritten(), (x, torch.randn(6, 2))),
        "classifier": (make_classifier(), (x, torch.randint(4, (6,)))),
        "regressor": (make_regressor(), (x, torch.randn(6, 1))),
    }


# ---- choosing families ---------------------------------------------------------------------------


def test_the_first_matching_pattern_wins():
    guide = ps.StructuredGuide(
        make_regressor(), {"net.0.*": KTied(3), "*.weight": KTied(1), "*": MeanField()}
    )
    families = {name: guide[name].family for name in guide.site_names}
    assert families == {
        "net.0.weight": KTied(3),
        "net.0.bias": MeanField(),  # KTied(3) cannot serve a vector; the next match does
        "net.2.weight": KTied(1),
        "net.2.bias": MeanField(),
    }


def test_vectors_and_constrained_sites_get_defaults():
    guide = ps.StructuredGuide(make_regressor(noise_scale=dist.HalfNormal(1.0)), {"*": KTied(2)})
    assert guide["net.0.bias"].family == MeanField()
    assert guide["noise_scale"].family == TransformedMeanField()


def test_an_unserved_weight_is_an_error_that_lists_sites():
    with pytest.raises(ValueError, match=r"weights \['net.2.weight'\].*'net.2.bias'"):
        ps.StructuredGuide(make_regressor(), {"net.0.*": KTied(2)})


def test_a_family_named_outright_must_serve_the_site():
    with pytest.raises(ValueError, match=r"KTied\(rank=2\) needs a real weight of at least two"):
        ps.StructuredGuide(make_regressor(), {"net.0.bias": KTied(2), "*": MeanField()})


def test_a_pattern_without_a_site_is_an_error_before_the_first_step():
    guide = ps.StructuredGuide(make_regressor(), {"nothing.*": KTied(2), "*": MeanField()})
    before = copy.deepcopy(guide.state_dict())
    with pytest.raises(
        ValueError, match=r"'nothing.\*' of `families` matches none of .*net.0.weight"
    ):
        make_svi(make_regressor(), guide).step(*regression_data())
    assert all(torch.equal(before[key], value) for key, value in guide.state_dict().items())


def test_a_model_without_latent_sites_is_an_error():
    model = ps.Regressor(nn.Linear(3, 1), num_data=12, noise_scale=0.1)
    with pytest.raises(ValueError, match=r"no latent site.*bayesianize\(net, prior=1.0\)"):
        ps.KTiedGuide(model).initialize(*regression_data())


def test_a_discrete_latent_is_an_error_that_says_what_to_write():
    def model():
        pyro.sample("coin", dist.Bernoulli(0.5))

    with pytest.raises(ValueError, match=r"'coin' is discrete.*hide=\['coin'\]"):
        ps.MeanFieldGuide(model).initialize()


@pytest.mark.parametrize("rank", [0, -1, 1.5, True])
def test_rank_must_be_a_whole_number(rank):
    with pytest.raises(ValueError, match=r"`rank` must be a whole number of at least 1"):
        ps.KTiedGuide(make_regressor(), rank=rank)


@pytest.mark.parametrize("init_scale", [0, -1.0, float("inf"), "small"])
def test_init_scale_must_be_positive(init_scale):
    with pytest.raises(ValueError, match="`init_scale` must be a positive number"):
        ps.KTiedGuide(make_regressor(), init_scale=init_scale)


def test_local_reparam_must_be_known():
    with pytest.raises(ValueError, match='`local_reparam` must be True, False, "exact" or'):
        ps.KTiedGuide(make_regressor(), local_reparam="sometimes")


def test_a_family_must_be_a_family():
    with pytest.raises(TypeError, match=r"`families\['\*'\]` must be a Family, but got the class"):
        ps.StructuredGuide(make_regressor(), {"*": ps.KTiedGuide})


# ---- starting values -----------------------------------------------------------------------------


def test_means_start_at_the_nets_own_weights():
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    model = ps.Regressor(ps.bayesianize(net), num_data=12, noise_scale=0.1)
    guide = ps.KTiedGuide(model)
    for name, parameter in net.named_parameters():
        assert torch.equal(guide[f"net.{name}"].loc, parameter)
    make_svi(model, guide).step(*regression_data())
    assert not torch.equal(guide["net.0.weight"].loc, net[0].weight)


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
    assert torch.equal(guide["net.0.weight"].loc, values["net.0.weight"])
    assert torch.equal(
        ps.MeanFieldGuide(make_regressor(), init_loc_fn=init_to_mean)["net.2.weight"].loc,
        torch.zeros(1, 5),
    )


def test_init_loc_fn_must_return_the_sites_shape():
    with pytest.raises(
        ValueError, match=r"shape \(5, 3\) for the site 'net.0.weight', but got \(2,\)"
    ):
        ps.KTiedGuide(make_regressor(), init_loc_fn=lambda site: torch.zeros(2))


# ---- under Pyro's and our ELBOs ------------------------------------------------------------------


# Pyro's objectives draw every weight at once, whatever the layer.
ON_DRAWN_WEIGHTS = ("linear", "local latent", "hand-written")


@pytest.mark.parametrize(
    ("elbo", "case"),
    [
        (elbo, case)
        for elbo in ELBOS
        for case in function_cases()
        if elbo is ps.StructuredELBO or case in ON_DRAWN_WEIGHTS
    ],
)
@pytest.mark.parametrize("guide_name", [*GUIDE_NAMES, *POINTS])
@pytest.mark.filterwarnings("ignore::pyro_structvi.infer.SampledKLWarning")
def test_a_step_gives_every_parameter_a_finite_gradient(case, elbo, guide_name):
    model, args = function_cases()[case]
    guide = (GUIDES | POINTS)[guide_name](model)
    guide.initialize(*args)
    elbo(num_particles=2).loss_and_grads(model, guide, *args)
    gradients = {name: parameter.grad for name, parameter in guide.named_parameters()}
    assert [name for name, value in gradients.items() if value is None] == []
    assert [name for name, value in gradients.items() if not value.isfinite().all()] == []


@pytest.mark.parametrize("module_local", [True, False])
def test_two_guides_of_one_class_both_train(module_local):
    with pyro.settings.context(module_local_params=module_local):
        for _ in range(2):
            model = make_regressor()
            guide = ps.KTiedGuide(model)
            before = copy.deepcopy(dict(guide.named_parameters()))
            svi = make_svi(model, guide)
            svi.step(*regression_data())
            svi.step(*regression_data())
            assert all(not torch.equal(before[k], v) for k, v in guide.named_parameters())


def test_the_param_store_mirrors_the_parameters():
    model = make_regressor()
    guide = ps.KTiedGuide(model)
    make_svi(model, guide).step(*regression_data())
    store = pyro.get_param_store()
    assert store["KTiedGuide.posteriors.net/0/weight.loc"] is guide["net.0.weight"].loc


def test_guides_of_one_class_have_separate_names_and_leave_the_store_when_they_go():
    model, (x, y) = make_regressor(), regression_data()
    guides = [ps.KTiedGuide(model) for _ in range(2)]
    optim = pyro.optim.Adam({"lr": 0.01})
    for guide in guides:
        SVI(model, guide, optim, ps.StructuredELBO()).step(x, y)
    names = [name for guide in guides for name, _ in guide.named_parameters()]
    assert len(optim.get_state()) == len(names) == 20  # none shares another's state
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


@pytest.mark.parametrize("guide_class", [*GUIDES.values(), *POINTS.values()], ids=GUIDES | POINTS)
@pytest.mark.parametrize("make_model", [make_regressor, make_classifier])
def test_no_weight_is_drawn_in_a_training_step(guide_class, make_model, monkeypatch):
    model = make_model()
    x, y = regression_data()
    y = y if make_model is make_regressor else torch.randint(4, (12,))
    guide = guide_class(model)
    guide.initialize(x, y)
    drawn = []
    monkeypatch.setattr(LazyWeight, "draw", lambda self: drawn.append(self.use.name))
    make_svi(model, guide).step(x, y)
    assert drawn == []


def test_local_reparam_false_draws_every_weight_once():
    model = make_regressor()
    guide = ps.KTiedGuide(model, local_reparam=False)
    x, y = regression_data()
    with DelayDraws():
        trace = poutine.trace(guide).get_trace(x, y)
    output = poutine.replay(model, trace=trace)(x, y)
    assert all(type(trace.nodes[name]["value"]) is torch.Tensor for name in guide.site_names)
    w0, b0, w2, b2 = (trace.nodes[name]["value"] for name in guide.site_names)
    torch.testing.assert_close(output, F.linear(torch.tanh(F.linear(x, w0, b0)), w2, b2))


def test_frozen_variational_parameters_stay():
    model = make_regressor()
    guide = ps.KTiedGuide(model)
    guide["net.0.weight"].loc.requires_grad_(False)
    before = guide["net.0.weight"].loc.clone()
    make_svi(model, guide).step(*regression_data())
    assert torch.equal(guide["net.0.weight"].loc, before)


# ---- uses ----------------------------------------------------------------------------------------


def test_a_weight_used_twice_is_one_weight():
    guide = ps.MeanFieldGuide(recurrent_function, init_scale=1.0)
    x = torch.randn(5, 3)
    guide.initialize(x, torch.zeros(5))
    with DelayDraws():
        trace = poutine.trace(guide).get_trace(x, torch.zeros(5))
    mean = poutine.replay(recurrent_function, trace=trace)(x, torch.zeros(5))
    weight = trace.nodes["weight"]["value"]
    torch.testing.assert_close(mean, F.linear(torch.tanh(F.linear(x, weight)), weight).sum(-1))


def test_one_use_more_than_was_counted_is_an_error():
    def model(x, times):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(3, 3), 1.0).to_event(2))
        for _ in range(times):
            x = F.linear(x, weight)
        return x

    guide = ps.MeanFieldGuide(model)
    svi = make_svi(model, guide)
    svi.step(torch.ones(2, 3), 1)
    with pytest.raises(RuntimeError, match=r"'weight' more often in this pass.*guide.initialize"):
        svi.step(torch.ones(2, 3), 2)
    guide.initialize(torch.ones(2, 3), 2)
    svi.step(torch.ones(2, 3), 2)


def test_another_use_after_the_outputs_were_drawn_is_an_error():
    def model(x, penalized):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(3, 3), 1.0).to_event(2))
        pyro.factor("outputs", -F.linear(x, weight).square().sum())
        if penalized:
            pyro.factor("penalty", -weight.abs().sum())

    guide = ps.MeanFieldGuide(model)
    svi = make_svi(model, guide)
    svi.step(torch.ones(2, 3), False)
    with pytest.raises(RuntimeError, match="'weight' more often"):
        svi.step(torch.ones(2, 3), True)


def test_counting_leaves_running_statistics_alone():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    bayes_net = ps.bayesianize(net, normalization=False)
    model = ps.Regressor(bayes_net, num_data=12, noise_scale=0.1)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    ps.MeanFieldGuide(model).initialize(*regression_data())
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())


def test_data_of_another_dtype_is_an_error_that_names_the_site():
    model = make_regressor()
    x, y = regression_data()
    svi = make_svi(model, ps.MeanFieldGuide(model))
    for _ in range(2):  # in the run that counts uses, and in a step
        if True:
            with pytest.raises(
                ValueError, match=r"site 'net.0.weight' must have dtype torch.float64"
            ):
                svi.step(x.float(), y)
            svi.step(x, y)


# ---- prediction, saving, copying -----------------------------------------------------------------


@pytest.mark.parametrize("trained", [True, False])
def test_predictive_draws_consistent_functions(trained):
    model = make_regressor()
    x, y = regression_data()
    guide = ps.KTiedGuide(model, init_scale=0.5)
    if trained:
        make_svi(model, guide).step(x, y)
    sites = [*guide.site_names, "_RETURN"]
    draws = Predictive(model, guide=guide, num_samples=4, return_sites=sites)(x)
    for index in range(4):
        w0, b0, w2, b2 = (draws[name][index].squeeze(0) for name in guide.site_names)
        expected = F.linear(torch.tanh(F.linear(x, w0, b0)), w2, b2)
        torch.testing.assert_close(draws["_RETURN"][index], expected)


def test_predictive_on_another_number_of_examples():
    guide = ps.MeanFieldGuide(local_latent_function)
    make_svi(local_latent_function, guide).step(torch.randn(6, 3), torch.randn(6))
    with pytest.warns(LocalLatentWarning, match="drawn from the model"):
        draws = Predictive(local_latent_function, guide=guide, num_samples=3)(torch.randn(11, 3))
    assert draws["shift"].shape == draws["obs"].shape == (3, 11)


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


def test_a_state_dict_loads_before_any_data_was_seen():
    model = make_regressor()
    guide = ps.KTiedGuide(model)
    make_svi(model, guide).step(*regression_data())
    fresh = ps.KTiedGuide(make_regressor())
    fresh.load_state_dict(guide.state_dict())
    for name in guide.site_names:
        assert torch.equal(fresh[name]().mean, guide[name]().mean)
        assert torch.equal(fresh[name]().variance, guide[name]().variance)


def test_a_state_dict_loads_into_the_guide_of_a_function():
    x = torch.zeros(2, 3)
    guide, fresh = (ps.KTiedGuide(linear_function) for _ in range(2))
    guide.initialize(x, torch.zeros(2, 2))
    fresh.initialize(x, torch.zeros(2, 2))
    fresh.load_state_dict(guide.state_dict())
    assert torch.equal(fresh["weight"].loc, guide["weight"].loc)


def test_a_pickle_carries_no_data_and_no_model():
    model = make_regressor(size=10_000)
    guide = ps.KTiedGuide(model)
    make_svi(model, guide).step(*regression_data(size=10_000))
    payload = pickle.dumps(guide)
    assert len(payload) < 20_000
    loaded = pickle.loads(payload)
    assert loaded.model is None
    assert guide.model is model
    assert loaded.draw().keys() == guide.draw().keys()
    make_svi(model, loaded).step(*regression_data(size=10_000))


def test_a_guide_with_a_local_init_loc_fn_pickles_and_copies():
    guide = ps.KTiedGuide(
        make_regressor(), init_loc_fn=lambda site: torch.zeros(site["fn"].shape())
    )
    assert pickle.loads(pickle.dumps(guide)).init_loc_fn is None
    assert copy.deepcopy(guide).init_loc_fn is guide.init_loc_fn


def test_an_unpickled_guide_says_that_it_has_no_model():
    guide = pickle.loads(pickle.dumps(ps.KTiedGuide(make_regressor())))
    with pytest.raises(RuntimeError, match="unpickled without its model"):
        guide.initialize(*regression_data())


def test_torch_save_and_load_of_a_state_dict():
    guide = ps.KTiedGuide(make_regressor())
    buffer = io.BytesIO()
    torch.save(guide.state_dict(), buffer)
    buffer.seek(0)
    fresh = ps.KTiedGuide(make_regressor())
    fresh.load_state_dict(torch.load(buffer))
    assert torch.equal(fresh["net.0.weight"].loc, guide["net.0.weight"].loc)


def test_a_deep_copy_is_another_guide_of_the_same_model():
    model = make_regressor()
    guide = ps.KTiedGuide(model)
    make_svi(model, guide).step(*regression_data())
    twin = copy.deepcopy(guide)
    assert twin.model is model
    make_svi(model, twin).step(*regression_data())
    assert not torch.equal(twin["net.0.weight"].loc, guide["net.0.weight"].loc)


def test_draw_and_median_need_no_data():
    guide = ps.StructuredGuide(
        make_regressor(noise_scale=dist.HalfNormal(1.0)), {"*": KTied(2)}, init_scale=0.5
    )
    draw, median = guide.draw(), guide.median()
    assert draw.keys() == median.keys() == set(guide.site_names)
    assert torch.equal(median["net.0.weight"], guide["net.0.weight"].loc)
    torch.testing.assert_close(median["noise_scale"], guide["noise_scale"].loc.exp())


def test_sites_of_functions_come_in_the_order_of_execution():
    def model():
        for name in ("last", "first"):
            pyro.sample(name, dist.Normal(torch.zeros(2), 1.0).to_event(1))

    guide = ps.MeanFieldGuide(model)
    guide.initialize()
    assert guide.site_names == ["last", "first"]


def test_unknown_site_is_a_key_error():
    with pytest.raises(KeyError, match=r"'net.9.weight' is none of the sites"):
        ps.KTiedGuide(make_regressor())["net.9.weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_guides_take_the_models_dtype(dtype):
    model = make_regressor().to(dtype)
    guide = ps.KTiedGuide(model)
    assert {parameter.dtype for parameter in guide.parameters()} == {dtype}
    x, y = (value.to(dtype) for value in regression_data())
    make_svi(model, guide).step(x, y)


def test_parameter_counts():
    net = nn.Sequential(nn.Linear(784, 400), nn.Linear(400, 400), nn.Linear(400, 10))
    model = ps.Classifier(ps.bayesianize(net), num_data=10)

    def count(guide):
        return sum(parameter.numel() for parameter in guide.parameters())

    # Swiatkowski et al. (2020), figure 4: 957, 482, 484 and 486 thousand.
    assert count(ps.MeanFieldGuide(model)) == 956_820
    assert [count(ps.KTiedGuide(model, rank=k)) for k in (1, 2, 3)] == [481_614, 484_008, 486_402]


@pytest.mark.gpu
@pytest.mark.parametrize("elbo", ELBOS)
def test_training_on_a_gpu(elbo):
    model = make_regressor().to("cuda")
    guide = ps.KTiedGuide(model)
    x, y = (value.to("cuda") for value in regression_data())
    svi = make_svi(model, guide, elbo())
    svi.step(x, y)
    assert {parameter.device.type for parameter in guide.parameters()} == {"cuda"}


@pytest.mark.slow
def test_group_effects_are_drawn_and_local_latents_left_to_the_model():
    group = torch.arange(40) % 4
    y = torch.tensor([-3.0, -1.0, 1.0, 3.0])[group]

    def model(group, y=None):
        with pyro.plate("groups", 4):
            offset = pyro.sample("offset", dist.Normal(0.0, 3.0))
            pyro.sample("unused", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(group)):
            local = pyro.sample("local", dist.Normal(0.0, 0.1))
            pyro.sample("obs", dist.Normal(offset[group] + local, 0.1), obs=y)

    guide = ps.MeanFieldGuide(model)
    ps.fit(model, guide, (group, y), num_steps=800, lr=0.05, progress=False)
    assert guide.local_site_names == ["local"]
    with pytest.warns(LocalLatentWarning, match=r"\['local'\] of single examples are drawn"):
        prediction = ps.predict(model, guide, torch.arange(4).repeat(3), 100)
    assert (prediction.mean - torch.tensor([-3.0, -1.0, 1.0, 3.0]).repeat(3)).abs().max() < 0.3
    assert guide.draw(local=True)["local"].shape == (40,)
    with pytest.raises(ValueError, match=r"sites \['local'\] belong to single examples"):
        ps.fit(model, guide, (group, y), num_steps=2, batch_size=10, progress=False)


def test_site_names_do_not_collide_with_each_other_or_with_torch():
    def model():
        for name in ("a.b", "a/b", "values", "training"):
            pyro.sample(name, dist.Normal(0.0, 1.0))

    guide = ps.MeanFieldGuide(model)
    guide.initialize()
    assert len(list(guide.parameters())) == 8
    assert guide.draw().keys() == {"a.b", "a/b", "values", "training"}


def test_a_guide_that_was_replaced_is_let_go():
    import gc
    import weakref

    def train():
        model = make_regressor()
        guide = ps.KTiedGuide(model)
        make_svi(model, guide).step(*regression_data())
        return weakref.ref(guide["net.0.weight"].loc)

    first = train()
    train()
    gc.collect()
    assert first() is None


def test_a_net_that_differentiates_itself_gets_drawn_weights():
    class Derivative(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x):
            with torch.enable_grad():
                x = x.clone().requires_grad_()
                output = torch.tanh(self.layer(x))
                (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            return torch.cat([output, slope], 1)

    model = ps.Regressor(ps.bayesianize(Derivative()), num_data=5, noise_scale=1.0)
    guide = ps.MeanFieldGuide(model)
    x = torch.randn(5, 3)
    guide.initialize(x, torch.zeros(5, 4))
    with DelayDraws():
        value = poutine.trace(guide).get_trace(x).nodes["net.layer.weight"]["value"]
    assert type(value) is torch.Tensor


@pytest.mark.slow
def test_importance_weights_are_those_of_drawn_weights():
    x = torch.randn(6, 3)
    y = x @ torch.tensor([[1.0, -1.0], [0.5, 0.0], [0.0, 2.0]]) + 0.5 * torch.randn(6, 2)
    covariance = x @ x.T + 0.25 * torch.eye(6)
    exact = dist.MultivariateNormal(torch.zeros(6), covariance).log_prob(y.T).sum()
    precision = x.T @ x / 0.25 + torch.eye(3)
    guide = ps.MeanFieldGuide(linear_function)
    guide.initialize(x, y)
    with torch.no_grad():
        guide["weight"].loc.copy_(torch.linalg.solve(precision, x.T @ y / 0.25).T)
        scale = torch.linalg.inv(precision).diagonal().sqrt()  # wide enough for every direction
        guide["weight"].log_scale.copy_(scale.log().expand(2, 3))
    importance = Importance(linear_function, guide, num_samples=4000)
    with torch.no_grad():
        importance.run(x, y)
        assert abs(importance.get_log_normalizer() - exact) < 0.25
        assert importance.get_ESS() > 200
