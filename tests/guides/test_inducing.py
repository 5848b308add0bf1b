"""InducingWeightGuide: parameters, starts, bounds on scales, copies, fresh factors, options."""

import copy
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pyro_structvi as ps
from pyro_structvi.families import InducingWeights
from pyro_structvi.sites.parameterization import capped, uncapped
from tests.guides.inducing_guides import (
    EVERY_KIND,
    KINDS,
    SHAPE,
    assert_same_draws,
    draw,
    make_guide,
    randomize,
)
from tests.models import make_regressor, regression_data
from tests.unit_noise import close


def test_only_a_weight_that_is_smaller_in_both_directions_has_fewer():
    for layer, expected in (
        (nn.Linear(9, 8), (3, 3)),
        (nn.Linear(1, 2), (2, 2)),
        (nn.Linear(2, 2), (3, 3)),  # with its bias as large in one direction
        (nn.Linear(1, 8, bias=False), (3, 3)),
    ):
        guide = make_guide(ps.Classifier(ps.bayesianize(layer), num_data=8), (3, 3))
        assert guide["net.weight"]().inducing.event_shape == expected


@pytest.mark.parametrize("kind", ["nested", "nested, shared"])
def test_prior_scales_are_no_parameters(kind):
    guide = make_guide(**KINDS[kind])
    assert not [name for name, _ in guide.named_parameters() if name.endswith("prior_scale")]
    ends = "inducing_prior_scale", "posterior.prior_scale"
    inner = [name for name in guide.state_dict() if name.endswith(ends)]
    assert len(inner) == (1 if "shared" in kind else 2)


def biased_model(out=6, inputs=5, **priors):
    net = nn.Linear(inputs, out)
    priors = {"weight": 0.7, "bias": 1.5} | priors
    return ps.Classifier(ps.bayesianize(net, prior=priors), num_data=8), net


@pytest.mark.parametrize(
    ("posterior", "shape"), [("diagonal", (3, 2)), ("matrix", (2, 3)), ("full", (1, 4))]
)
def test_the_start_is_the_best_approximation_of_low_rank(posterior, shape):
    """Best in units of the priors; the singular values fall off, as those that matter should."""
    model, _ = biased_model()
    columns = torch.tensor([0.7] * 5 + [1.5])
    u, _, v = torch.linalg.svd(torch.randn(6, 6))
    matrix = (u * torch.logspace(0, -5, 6)) @ v * columns
    model.net.initial_values["weight"], model.net.initial_values["bias"] = (
        matrix[:, :-1].contiguous(),
        matrix[:, -1].contiguous(),
    )
    median = make_guide(model, shape, inducing_posterior=posterior).median()
    found = torch.cat([median["net.weight"], median["net.bias"].unsqueeze(-1)], -1) / columns
    u, s, v = torch.linalg.svd(matrix / columns)
    rank = min(shape)
    best = (u[:, :rank] * s[:rank]) @ v[:rank]
    error = (found - matrix / columns).norm()
    assert error < (1 + 1e-6) * (best - matrix / columns).norm()
    close(found, best, atol=1e-4)


@pytest.mark.parametrize("shape", [(64, 64), (6, 64), (3, 8)], ids=str)
def test_a_side_that_is_seen_whole_starts_along_its_axes_and_at_the_net(shape):
    model, net = biased_model()
    guide = make_guide(model, shape)
    rows, columns = guide["net.weight"].row_factor, guide["net.weight"].column_factor
    close(columns[:6], torch.eye(6))
    if shape == (3, 8):
        close(rows @ rows.mT, torch.eye(3), atol=1e-6)
        return
    close(rows, torch.eye(6))
    close(guide.median()["net.weight"], net.weight.detach(), atol=1e-8)
    close(guide.median()["net.bias"], net.bias.detach(), atol=1e-8)


@pytest.mark.parametrize(
    ("posterior", "shape"), [("diagonal", (64, 64)), ("matrix", (3, 64)), ("full", (3, 2))]
)
def test_the_start_has_the_covariance_of_mean_field(posterior, shape):
    """``init_scale^2`` times the identity, and for the bias the ratio of prior variances."""
    model, _ = biased_model()
    q = make_guide(model, shape, inducing_posterior=posterior, init_scale=0.2)["net.weight"]()
    variance = torch.tensor([0.04] * 5 + [0.04 * (1.5 / 0.7) ** 2]).expand(6, 6)
    close(q.covariance_matrix, torch.diag(variance.flatten()))


def test_prior_scales_are_those_of_weight_and_bias():
    net = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 2), nn.Linear(2, 2, bias=False))
    prior = ps.FanIn(1.4, vector_scale=0.3)
    guide = make_guide(ps.Regressor(ps.bayesianize(net, prior=prior), 12, noise_scale=0.3))
    for layer, expected in (
        (0, [1.4 / 8**0.5, 0.3]),
        (1, [1.4 / 5**0.5, 0.3]),
        (2, [1.4 / 2**0.5]),
    ):
        close(guide[f"net.{layer}.weight"].prior_scale, torch.tensor(expected))


def test_a_bound_keeps_a_value_of_up_to_half_of_it_and_leaves_gradients():
    for value, most in ((10.0, None), (0.1, 0.3), (0.2, 0.3), (10.0, 100.0)):
        expected = value if most is None else min(value, most / 2)
        close(capped(torch.tensor(uncapped(value, most)), most), torch.tensor(expected))
    x = torch.linspace(-30.0, 30.0, 61, requires_grad=True)
    values = capped(x, 0.3)
    assert ((values > 0) & (values <= 0.3)).all()
    assert (values.diff() > 0)[:45].all()
    (gradient,) = torch.autograd.grad(values.sum(), x)
    assert (gradient > 0).all()
    close(values[:10], x[:10].exp(), rtol=1e-8)


def test_scales_start_at_the_bounds_half_at_most_and_stay_below():
    """The prior has 0.7: the start would be 0.2 / 0.7 for both."""
    bounds = {"max_conditional_scale": 0.03, "max_inducing_scale": 0.1}
    guide = make_guide(biased_model()[0], init_scale=0.2, **bounds)
    q = guide["net.weight"]()
    close(q.conditional_scale, torch.tensor(0.015))
    close(q.inducing.scale, torch.full(SHAPE, 0.05))
    with torch.no_grad():
        for name in ("log_conditional_scale", "inducing_log_scale"):
            guide["net.weight"].value(name).fill_(20.0)
    q = guide["net.weight"]()
    close(q.conditional_scale, torch.tensor(0.03), rtol=1e-6)
    close(q.inducing.scale, torch.full(SHAPE, 0.1), rtol=1e-6)


SOME_KINDS = pytest.mark.parametrize("kind", ["diagonal", "full, shared", "ensemble", "nested"])


def load_into_a_new_guide(guide, options):
    new = make_guide(guide.model, **options)
    new.load_state_dict(guide.state_dict())
    return new


@SOME_KINDS
def test_a_copy_is_the_same_and_apart(kind):
    guide = make_guide(**KINDS[kind])
    randomize(guide)
    before = draw(guide)  # so that there are factors to copy
    copies = copy.deepcopy(guide), pickle.loads(pickle.dumps(guide))
    for twin in (*copies, load_into_a_new_guide(guide, KINDS[kind])):
        assert_same_draws(guide, twin)
        randomize(twin)
        after, theirs = draw(guide), draw(twin)
        for name, value in before.items():
            assert torch.equal(after[name], value)
            assert not torch.equal(theirs[name], value)


@SOME_KINDS
def test_a_step_factors_each_side_of_each_layer_once_and_predictions_once_in_all(
    kind, factorizations
):
    guide, data = make_guide(**KINDS[kind]), regression_data()
    guide.initialize(*data)
    elbo, sides = ps.StructuredELBO(num_particles=3), 8 if kind == "nested" else 4
    factorizations.clear()
    for steps in range(1, 4):
        elbo.differentiable_loss(guide.model, guide, *data).backward()
        assert len(factorizations) == steps * sides
    factorizations.clear()
    for _ in range(3):
        ps.predict(guide.model, guide, data[0], num_samples=4)
        guide.median()
        draw(guide)
    assert len(factorizations) <= sides


def take_a_step(guide):
    optimizer = torch.optim.SGD(guide.parameters(), lr=1e-3)
    ps.StructuredELBO().differentiable_loss(guide.model, guide, *regression_data()).backward()
    optimizer.step()


def each_parameter(change):
    def apply(guide):
        with torch.no_grad():
            for parameter in guide.parameters():
                change(parameter)

    return apply


CHANGES = {
    "step": take_a_step,
    "assignment of data": each_parameter(lambda p: setattr(p, "data", p.data + 0.1)),
    "data written to": each_parameter(lambda p: p.data.mul_(1.1)),
    "one entry written without gradients": each_parameter(lambda p: p.view(-1)[-1].add_(0.1)),
    "state dict": lambda guide: guide.load_state_dict({
        name: value + 0.1 for name, value in guide.state_dict().items()
    }),
}


@pytest.mark.parametrize("kind", ["full, shared", pytest.param("nested", marks=pytest.mark.slow)])
def test_kept_factors_are_never_stale(kind):
    for name, change in CHANGES.items():
        guide = make_guide(**KINDS[kind])
        guide.initialize(*regression_data())
        before = draw(guide)
        change(guide)
        fresh = load_into_a_new_guide(guide, KINDS[kind])
        assert_same_draws(guide, fresh)
        after = draw(guide)
        assert all(not torch.equal(after[site], value) for site, value in before.items()), name
        median, expected = guide.median(), fresh.median()
        assert all(torch.equal(median[site], expected[site]) for site in median), name
    guide = make_guide(make_regressor().float(), **KINDS[kind])
    assert {value.dtype for value in draw(guide).values()} == {torch.float32}
    guide = guide.double()
    fresh = load_into_a_new_guide(guide, KINDS[kind]).double()
    fresh.load_state_dict(guide.state_dict())
    assert_same_draws(guide, fresh)


@EVERY_KIND
def test_gradients_reach_the_parameters_after_a_pass_without(options):
    guide = make_guide(**options)
    guide.initialize(*regression_data())
    draw(guide)
    ps.StructuredELBO().differentiable_loss(guide.model, guide, *regression_data()).backward()
    for name, parameter in guide.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.ne(0).any(), name


def test_a_law_without_gradients_stays_what_it_was():
    guide = make_guide()
    with torch.no_grad():
        law = guide["net.0.weight"]()
        before = law.mean.clone()
        randomize(guide)
        assert torch.equal(law.mean, before)
        assert not torch.equal(guide["net.0.weight"]().mean, before)


class HalfDeclared(pyro.nn.PyroModule):
    """Declares one layer and draws another in forward."""

    def __init__(self):
        super().__init__()
        self.layer = ps.bayesianize(nn.Linear(3, 4), prior=1.0)

    def forward(self, x, y=None):
        weight = pyro.sample("late", dist.Normal(torch.zeros(1, 4), 1.0).to_event(2))
        mean = F.linear(torch.tanh(self.layer(x)), weight)
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(mean, 0.3).to_event(1), obs=y)


def test_a_layer_that_is_found_late_cannot_draw_with_the_others_but_takes_their_member():
    guide = make_guide(HalfDeclared())
    guide.initialize(*regression_data())
    assert guide["late"]().event_shape == (1, 4)
    guide = make_guide(HalfDeclared(), **KINDS["full, shared"])
    message = r"\['layer\.weight'\] are drawn together, and \['late'\] were found"
    with pytest.raises(ValueError, match=message):
        guide.initialize(*regression_data())
    guide = make_guide(HalfDeclared(), init_scale=1e-6, **KINDS["ensemble"])
    guide.initialize(*regression_data())
    values = guide.draw(number=1)
    for name in ("layer.weight", "late"):
        expected = guide[name]().condition(guide[name].inducing_members[1]).mean
        parts = [values[part].reshape(len(expected), -1) for part in guide[name].site.names]
        torch.testing.assert_close(torch.cat(parts, -1), expected, rtol=0, atol=1e-4)


def test_far_quantiles_of_an_ensemble_in_single_precision_are_those_in_double():
    guide = make_guide(init_scale=0.3, **KINDS["ensemble"])
    with torch.no_grad():  # numbers of single precision
        for parameter in guide.parameters():
            parameter.copy_(parameter.float())
    levels = [1e-12, 1e-7, 1 - 2**-20]
    double, single = guide.quantiles(levels), guide.float().quantiles(levels)
    for name, values in single.items():
        torch.testing.assert_close(values, double[name].float(), rtol=1e-4, atol=1e-4)


def test_a_prior_without_a_standard_deviation_asks_for_one():
    net = ps.bayesianize(nn.Linear(3, 1, bias=False), dist.Cauchy(0.0, 1.0))
    model, data = ps.Regressor(net, 12, 0.3), regression_data()
    message = r"The prior of net.weight has no finite standard deviation.*Pass `prior_scale=`"
    with pytest.raises(ValueError, match=message):
        make_guide(model).initialize(*data)
    guide = ps.StructuredGuide(model, {"*": InducingWeights((3, 2), prior_scale=0.5)})
    assert guide["net.weight"].prior_scale.tolist() == [0.5]
    with pytest.warns(ps.infer.SampledKLWarning):
        assert torch.isfinite(ps.StructuredELBO().terms(model, guide, *data).elbo)


def test_options_out_of_range_are_refused():
    for options, message in (
        ({"inducing_posterior": "dense"}, r'must be "diagonal", .* \'dense\''),
        ({"ensemble_size": 3}, r'is for inducing_posterior="ensemble", .* \'diagonal\''),
        (
            {"max_inducing_scale": 0.1, **KINDS["full"]},
            r'is for inducing_posterior="diagonal", but',
        ),
        ({"shape": (64, 1.5)}, r"must be \(M_out, M_in\), .* but got \(64, 1.5\)"),
        (
            {"shared": True, "inducing_posterior": "ensemble"},
            r"correlations.* got Members\(size=5\)",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            make_guide(**options)
