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


def chosen_members(guide, values):
    """Return which member each layer's weight comes from: the one whose mean is nearest."""
    chosen = []
    for name in ("net.0.weight", "net.2.weight"):
        posterior = guide[name]
        means = [posterior().condition(member).mean for member in posterior.inducing_members]
        value = torch.cat([values[name], values[name.replace("weight", "bias")].unsqueeze(-1)], -1)
        distances = torch.stack([(value - mean).norm() for mean in means])
        assert distances.min() < 0.1 * distances.sort().values[1]
        chosen.append(distances.argmin().item())
    return chosen


def trace_values(guide):
    trace = poutine.trace(guide).get_trace(*regression_data())
    return {name: trace.nodes[name]["value"] for name in guide.site_names}


@pytest.mark.parametrize("draw", [lambda guide: guide.draw(), trace_values], ids=["draw", "trace"])
def test_a_pass_uses_one_member_in_all_layers_and_passes_use_all(draw):
    """Each of three frequencies is a z-test; a false alarm has p = 1e-6."""
    guide, count = make_guide(init_scale=1e-4, **KINDS["ensemble"]), 300
    guide.initialize(*regression_data())
    with torch.no_grad():
        for name in ("net.0.weight", "net.2.weight"):  # no order of elements makes members equal
            guide[name].inducing_members.normal_()
        chosen = torch.tensor([chosen_members(guide, draw(guide)) for _ in range(count)])
    assert torch.equal(chosen[:, 0], chosen[:, 1])
    frequencies = torch.bincount(chosen[:, 0], minlength=3) / count
    assert ((frequencies - 1 / 3).abs() < 5.2 * math.sqrt(2 / 9 / count)).all()
    weight = guide["net.2.weight"]
    means = [weight().condition(member).mean for member in weight.inducing_members]
    close(guide.median()["net.2.weight"], sum(means)[:, :-1].detach() / 3)


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


@pytest.mark.parametrize(("kind", "shape"), [("nested, shared", SHAPE), ("full, shared", (6, 7))])
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
