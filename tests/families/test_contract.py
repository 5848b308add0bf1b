"""Every family and every guide of the registry obeys its contract."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import pyro_structvi as ps
from pyro_structvi import families
from pyro_structvi.distributions import PointMixture
from pyro_structvi.extend import Family
from pyro_structvi.families import (
    FullCovariance,
    InducingWeights,
    KTied,
    LowRank,
    MeanField,
    Members,
    PrunedMeanField,
    Subnetwork,
    TransformedMeanField,
)
from pyro_structvi.guides import GlobalInducingGuide
from pyro_structvi.structures.inducing.normal import InducingNormal
from pyro_structvi.testing import check_family, check_guide
from tests.guide_cases import GUIDES, POINTS
from tests.models import linear_function, make_regressor
from tests.unit_noise import assert_close, unit_draws

GUIDES = GUIDES | POINTS
SHAPE, SCALE = torch.Size([3, 4]), 0.3
CHOSEN = torch.arange(12).reshape(SHAPE) % 2 == 0


def linear_model():
    net = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    return ps.Regressor(ps.bayesianize(net, prior=1.0), num_data=20, noise_scale=0.5)


def in_registry():
    """Give the families of the registry once, with biases joined or not."""
    model, found = linear_model(), {}
    for name, make in GUIDES.items():
        family = make(model)["net.weight"].family
        if family not in found.values():
            found[name] = family
    return found


FAMILIES = in_registry() | {
    "mean field, capped": MeanField(max_scale=2.0),
    "mean field, pruned": PrunedMeanField(),
    "mean field, transformed": TransformedMeanField(),
    "low rank and isotropic diagonal": LowRank(2, "isotropic"),
    "low rank and constant diagonal": LowRank(2, "constant", 0.01),
    "low rank, alpha": LowRank(3, "full", alpha=2.0),
    "inducing weights, a scale of their own": InducingWeights((3, 2), prior_scale=0.7),
    "inducing weights, capped": InducingWeights((3, 2), max_conditional_scale=2.0),
    "inducing weights, shared": InducingWeights((3, 2), FullCovariance(), shared=True),
    "inducing weights, as many": InducingWeights((9, 9)),
    "inducing weights, low rank": InducingWeights((3, 2), LowRank(2, "full")),
    "subnetwork": Subnetwork(),
    "members": Members(3),
}

CLASSES = [
    value
    for value in vars(families).values()
    if isinstance(value, type) and issubclass(value, Family) and value.init is not Family.init
]


def test_no_family_is_forgotten():
    assert {type(family) for family in FAMILIES.values()} == set(CLASSES)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_families_are_equal_where_their_texts_are(family):
    names = {each.__name__: each for each in CLASSES}
    assert eval(repr(family), names) == family
    assert repr(MeanField()) == "MeanField()"
    assert repr(MeanField(max_scale=2.0)) == "MeanField(max_scale=2.0)"
    assert repr(KTied(3, join_bias=False)) == "KTied(join_bias=False, rank=3)"


@dataclass(frozen=True)
class Own(MeanField):
    """A user's family, with a text of its own."""

    def __repr__(self):
        return "mine"


def test_families_of_users_keep_their_texts():
    @dataclass(frozen=True)
    class Further(Own):
        option: int = 1

    assert repr(Own()) == repr(Further()) == "mine"


# Its parts are in the contracts of families and of distributions.
COMPOSED = "inducing weights, low rank"


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, id=name, marks=pytest.mark.slow if name == COMPOSED else ())
        for name, family in FAMILIES.items()
    ],
)
def test_contract(family):
    has_members = Members(3) in (family, getattr(family, "posterior", None))  # a pass draws one
    check_family(family, SHAPE, num_particles=20 if has_members else 1)


def test_contract_of_a_subnetwork_of_some_elements():
    family = Subnetwork({"net.weight": CHOSEN}, train_rest=True)
    check_family(family, SHAPE, points=~CHOSEN, idle={"rest": CHOSEN})


@pytest.mark.parametrize(
    "family",
    [
        MeanField(max_scale=0.4),
        PrunedMeanField(max_scale=0.4),
        InducingWeights((3, 2), MeanField(0.4), max_conditional_scale=0.4),
    ],
    ids=str,
)
def test_it_starts_at_half_of_a_bound_that_is_smaller(family):
    guide = ps.StructuredGuide(linear_model(), {"*": family}, init_scale=SCALE)
    covariance = unit_draws(lambda: guide.draw()["net.weight"]).covariance
    assert_close(covariance, 0.2**2 * torch.eye(SHAPE.numel()))


def test_bad_options_are_refused_by_name():
    """Values of wrong kinds and signs are in the tests of bad input."""
    for family, option, values in (
        (InducingWeights, "shape", [64, (3,), (0, 2)]),
        (InducingWeights, "shared", [True, 0]),  # True is for correlated inducing weights
        (Subnetwork, "chosen", [{"net.weight": [True]}, {"net.weight": torch.ones(SHAPE)}]),
        (LowRank, "diagonal", ["half"]),
        (KTied, "rank", [1.5, True]),
    ):
        for value in values:
            with pytest.raises((TypeError, ValueError), match=f"^`{option}"):
                family(**{option: value})


def counts_inducing_weights(guide):
    """Whether the KL of some site is an upper bound."""
    laws = [guide[name]() for name in guide.site_names]
    return any(
        isinstance(q, InducingNormal) and not isinstance(q.inducing, PointMixture) for q in laws
    )


def check(name, model, *data):
    def make(model):
        return GUIDES[name](model, init_scale=0.3)

    guide = make(model)
    guide.initialize(*data)
    check_guide(make, model, *data, is_bound=counts_inducing_weights(guide))


# One of each kind of posterior: independent, joined, with auxiliary variables, and without noise. Their
# families differ from those of the others, whose own contract is above.
KINDS = {"mean field", "matrix normal, joined", "inducing weights", "points"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in KINDS else pytest.mark.slow) for n in GUIDES]
)
def test_contract_of_guides(name):
    check(name, linear_function, torch.randn(6, 3), torch.randn(6, 2))


@pytest.mark.parametrize(
    "name", ["k-tied, joined", pytest.param("dropout", marks=pytest.mark.slow)]
)
def test_contract_of_guides_on_a_net(name):
    check(name, make_regressor(6), torch.randn(6, 3), torch.randn(6, 1))


def test_contract_of_guides_of_layers_given_the_ones_before():
    x, y = torch.randn(6, 3), torch.randn(6, 1)
    make = lambda model: GlobalInducingGuide(model, x[:4], init_scale=0.3)  # noqa: E731
    check_guide(make, make_regressor(6), x, y)
