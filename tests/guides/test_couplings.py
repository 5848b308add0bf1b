"""Couplings of sites, and layers of inducing weights that are drawn jointly."""

import math

import pyro.poutine as poutine
import pytest
import torch
from torch import nn

import pyro_structvi as ps
from pyro_structvi.families import (
    FullCovariance,
    InducingWeights,
    MatrixNormalFamily,
    MeanField,
    Members,
    Subnetwork,
)
from tests import dense_oracles as dense
from tests.distributions.cases import joint_covariance
from tests.guides.inducing_guides import (
    KINDS,
    SHAPE,
    assert_same_draws,
    draw,
    make_guide,
    randomize,
)
from tests.models import make_regressor, regression_data
from tests.unit_noise import assert_draws, close

COUPLED = {
    "shared": InducingWeights((3, 2), FullCovariance(), shared=True),
    "ensemble": Members(3),
    "inducing ensemble": InducingWeights((3, 2), Members(3)),
    "subnetwork": Subnetwork(),
}


def three_layers():
    layers = nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)
    return ps.Regressor(ps.bayesianize(nn.Sequential(*layers), prior=1.0), 12, 0.3)


@pytest.mark.parametrize("family", COUPLED.values(), ids=COUPLED)
def test_couplings_do_not_depend_on_the_place_of_patterns(family):
    model, field = three_layers(), MeanField()
    guide = ps.StructuredGuide(model, {"net.0.*": field, "*": family})
    others = {"net.0.bias": field, "net.0.weight": field, "net.[24].*": family}
    moved = ps.StructuredGuide(model, others)
    guide.initialize(*regression_data())
    randomize(guide)
    moved.load_state_dict(guide.state_dict())
    assert_same_draws(guide, moved)
    tied = ps.warm_start.k_tied_from_mean_field(guide)  # it prepends patterns
    together = draw(tied)
    before = {name: value.clone() for name, value in tied.state_dict().items()}
    for _ in range(2):
        tied.initialize(*regression_data())
        after, again = tied.state_dict(), draw(tied)
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        assert len(tied.couplings) == 1
        assert all(torch.equal(again[name], value) for name, value in together.items())


@pytest.mark.parametrize("name", ["shared", "subnetwork"])
def test_a_net_has_the_medians_of_sites_that_are_drawn_together(name):
    guide = ps.StructuredGuide(three_layers(), {"*": COUPLED[name]})
    values = dict(guide.to_net().named_parameters(prefix="net"))
    close(values, guide.median(), rtol=0, atol=0)


def test_a_layer_that_a_pass_skips_comes_back_with_its_part():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(3, n) for n in (3, 3, 1))
            self.skips = False

        def forward(self, x):
            x = torch.tanh(self.first(x))
            return self.third(x if self.skips else self.second(x))

    model, data = ps.Regressor(ps.bayesianize(Net(), prior=1.0), 12, 0.3), regression_data()
    guide = ps.StructuredGuide(model, {"*": COUPLED["shared"]})
    names = guide.site_names
    layers = {f"net.{layer}.weight+bias" for layer in ("first", "second", "third")}
    for skips in (False, True, True, False):
        model.net.skips = skips
        guide.initialize(*data)
        assert [*guide.draw()] == guide.site_names == names
        kl = ps.StructuredELBO().terms(model, guide, *data).kl
        assert {"inducing_weights of net.first.weight", *layers} == kl.keys()


LAYERS = "net.0.weight", "net.2.weight"


def members_of(posterior):
    if not hasattr(posterior, "inducing_members"):
        return posterior.members
    law = posterior()
    means = [law.condition(member).mean for member in posterior.inducing_members]
    return torch.stack(means)[..., :-1]  # without biases


def trace_values(guide):
    trace = poutine.trace(guide).get_trace(*regression_data())
    return {name: trace.nodes[name]["value"] for name in guide.site_names}


@pytest.mark.parametrize("draw", [lambda guide: guide.draw(), trace_values], ids=["draw", "trace"])
@pytest.mark.parametrize("kind", ["ensemble", "inducing ensemble"])
@torch.no_grad()
def test_a_pass_uses_one_member_in_all_layers_and_passes_use_all(kind, draw):
    """Each of three frequencies is a z-test; a false alarm has p = 1e-6."""
    families, count = (
        {"*.weight": COUPLED[kind], "*": MeanField()},
        300,
    )  # with biases or beside them
    guide = ps.StructuredGuide(make_regressor(), families, init_scale=1e-4)
    guide.initialize(*regression_data())
    for name in LAYERS:  # no order of elements makes members equal
        next(value for key, value in guide[name].named_parameters() if "members" in key).normal_()
    members, chosen = {name: members_of(guide[name]) for name in LAYERS}, []
    for _ in range(count):
        values = draw(guide)
        distances = [(values[name] - members[name]).flatten(1).norm(dim=1) for name in LAYERS]
        assert all(own.min() < 0.1 * own.sort().values[1] for own in distances)
        chosen.append([own.argmin().item() for own in distances])
    assert all(first == second for first, second in chosen)
    frequencies = torch.bincount(torch.tensor(chosen)[:, 0], minlength=3) / count
    assert ((frequencies - 1 / 3).abs() < 5.2 * math.sqrt(2 / 9 / count)).all()
    close(guide.median()[LAYERS[1]], members[LAYERS[1]].mean(0))


def joint_moments(guide):
    """Return mean and covariance of the stacked layers by stacked inducing weights."""
    names = ["net.0.weight", "net.2.weight"]
    laws = [guide[name]() for name in names]
    stacked = guide.couplings["net/0/weight"].posterior()
    index = torch.arange(stacked.event_shape.numel()).reshape(stacked.event_shape)
    gains, noises, first = [], [], 0
    for law in laws:
        gain, noise = dense.conditional_moments(
            joint_covariance(law.joint), law.event_shape.numel()
        )
        rows, columns = law.joint.inducing_shape
        own = index[first : first + rows, :columns].flatten()
        gains.append(torch.zeros(len(gain), stacked.event_shape.numel()))
        gains[-1][:, own] = gain
        noises.append(law.conditional_scale.square() * noise)
        first += rows
    gain = torch.cat(gains)
    covariance = gain @ stacked.covariance_matrix @ gain.mT + torch.block_diag(*noises)
    return gain @ stacked.mean.flatten(), covariance


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        pytest.param("nested, shared", SHAPE, marks=pytest.mark.slow),
        ("full, shared", (6, 7)),
    ],
)
def test_layers_are_correlated_as_their_shared_inducing_weights_say(kind, shape):
    """A layer with fewer columns of inducing weights than others uses the first of the matrix."""
    guide = make_guide(None, shape, **KINDS[kind])
    randomize(guide, 0.3)
    mean, covariance = joint_moments(guide)

    def flat(values):
        layers = [(values[f"net.{n}.weight"], values[f"net.{n}.bias"]) for n in (0, 2)]
        return torch.cat([torch.cat([w, b.unsqueeze(-1)], -1).flatten() for w, b in layers])

    close(flat(guide.median()), mean.detach())
    assert_draws(lambda: flat(guide.draw()), mean, covariance)
    deviation = covariance.diagonal().sqrt()
    correlation = covariance / deviation / deviation.unsqueeze(-1)
    assert correlation[:20, 20:].abs().max() > 0.02, "layers should vary together"


def test_layers_of_two_families_share_apart():
    model = make_regressor()
    first, rest = (
        InducingWeights((3, 2), family, shared=True)
        for family in (FullCovariance(), MatrixNormalFamily())
    )
    guide = ps.StructuredGuide(model, {"net.0.*": first, "*": rest})
    names = {f"net.{n}.weight+bias" for n in (0, 2)}
    names |= {f"inducing_weights of net.{n}.weight" for n in (0, 2)}
    assert set(ps.StructuredELBO().terms(model, guide, *regression_data()).kl) == names


@pytest.mark.parametrize("kind", ["full", "full, shared"])
def test_a_scale_of_model_and_guide_weighs_all_of_the_divergence(kind):
    guide = make_guide(**KINDS[kind])
    guide.initialize(*regression_data())
    elbo, data = ps.StructuredELBO(), regression_data()
    plain = elbo.terms(guide.model, guide, *data).kl
    scaled = (poutine.scale(program, scale=0.25) for program in (guide.model, guide))
    weighed = elbo.terms(*scaled, *data).kl
    assert weighed.keys() == plain.keys()
    assert ("shared" in kind) == (len(plain) == 3)
    for name, nats in plain.items():
        close(weighed[name], 0.25 * nats)


@pytest.mark.parametrize(
    "make",
    [
        ps.KTiedGuide,
        ps.GlobalInducingGuide,
        lambda model: ps.MixtureGuide(model, ps.MeanFieldGuide, size=2),
        *(
            lambda model, family=family: ps.StructuredGuide(model, {"*": family})
            for family in COUPLED.values()
        ),
    ],
)
def test_sites_that_share_a_draw_take_no_values_of_others(make):
    """The density would be given another draw than that of the values, or zero."""
    model, data = three_layers(), regression_data()
    guide = make(model)
    trace = poutine.trace(guide).get_trace(*data)
    values = {name: trace.nodes[name]["value"] for name in guide.site_names}
    message = r"drawn together.*no density at values of \['net.0.weight'"
    for given in (
        poutine.condition(guide, values),
        poutine.replay(guide, poutine.trace(model).get_trace(*data)),
    ):
        with pytest.raises(NotImplementedError, match=message):
            given(*data)


def test_a_whole_trace_of_joined_biases_and_of_apart_ones_has_its_density():
    data = regression_data()
    for options in ({"join_bias": True}, {"join_bias": False}):
        guide = ps.KTiedGuide(three_layers(), init_scale=0.3, **options)
        trace = poutine.trace(guide).get_trace(*data)
        again = poutine.trace(poutine.replay(guide, trace)).get_trace(*data)
        close(again.log_prob_sum(), trace.log_prob_sum())
