"""What every family keeps to: where it starts, on which device and dtype, what it trains and refuses.

The families are those of the registry's guides, and further options beside them.
"""

import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.distributions import constraints

import pyro_structvi as ps
from pyro_structvi import families
from pyro_structvi.extend import Family, LatentSite, MatrixFamily
from pyro_structvi.families import (
    Dropout,
    FullCovariance,
    InducingWeights,
    KTied,
    LowRank,
    MeanField,
    Members,
    PrunedMeanField,
    Rowwise,
    Subnetwork,
    TransformedMeanField,
)
from pyro_structvi.testing import guides_for, points_for
from tests.statistics import assert_mean
from tests.unit_noise import assert_close, unit_draws

SHAPE, SCALE = torch.Size([3, 4]), 0.3
SITE = LatentSite("net.weight", SHAPE, 2, constraints.real, prior_scale=1.0)
CHOSEN = torch.arange(12).reshape(SHAPE) % 2 == 0
FLOAT32, FLOAT64, META = torch.float32, torch.float64, torch.device("meta")


def linear_model(dtype=None):
    net = nn.Linear(SHAPE[1], SHAPE[0], bias=False, dtype=dtype)
    return ps.Regressor(ps.bayesianize(net, prior=1.0), num_data=20, noise_scale=0.5)


def in_registry():
    model, variants = linear_model(), guides_for("tests") | points_for("tests")
    return {name: make(model)["net.weight"].family for name, make in variants.items()}


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
    "subnetwork of some": Subnetwork({"net.weight": CHOSEN}, train_rest=True),
}

# What has no standard deviation to start with; members of an ensemble differ by permutations too.
POINTS = {"points", "dropout", "ensemble", "inducing weights, ensemble"}
# On average over the random starts of factors, and each by how much more variance.
ON_AVERAGE = {
    # exp of the sum of two N(0, 0.1^2), and of rank 2 the mean of two of them, squared
    "k-tied": (math.exp(0.04) + math.exp(0.02)) / 2,
    "k-tied, joined": (math.exp(0.04) + math.exp(0.02)) / 2,
    # a constant diagonal is added to the variance of the directions
    "low rank": 1 + 0.1**2 / SHAPE[1] / SCALE**2,
    "low rank and constant diagonal": 1 + 0.01 / SCALE**2,
    "low rank and full diagonal, joined": 1.0,
    "low rank and isotropic diagonal": 1.0,
    "low rank, alpha": 1.0,
    "inducing weights, low rank": 1.0,
}
EXACT = [name for name in FAMILIES if name not in POINTS and name not in ON_AVERAGE]

every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


CLASSES = [
    value
    for value in vars(families).values()
    if isinstance(value, type) and issubclass(value, Family) and value.init is not Family.init
]


def test_no_family_is_forgotten():
    assert {type(family) for family in FAMILIES.values()} == set(CLASSES)


# ---- where it starts -----------------------------------------------------------------------------


@every_family
def test_it_starts_on_the_meta_device_with_the_same_shapes(family):
    here = family.init(SITE, torch.randn(SHAPE), SCALE)
    there = family.init(SITE, torch.randn(SHAPE, device=META), SCALE)
    assert {name: (value.shape, value.dtype) for name, value in there.items()} == {
        name: (value.shape, value.dtype) for name, value in here.items()
    }
    assert all(value.device == META for value in there.values())


@every_family
@pytest.mark.parametrize("dtypes", [(FLOAT64, FLOAT32), (FLOAT32, FLOAT64)], ids=str)
def test_it_keeps_a_dtype_other_than_the_default(family, dtypes):
    default, own = dtypes
    torch.set_default_dtype(default)
    parameters = family.init(SITE, torch.randn(SHAPE, dtype=own), SCALE)
    assert {v.dtype for v in parameters.values() if v.is_floating_point()} == {own}
    torch.set_default_dtype(FLOAT64)
    model = linear_model(own)
    torch.set_default_dtype(default)
    guide = ps.StructuredGuide(model, {"*": family})
    assert {v.dtype for v in guide.parameters()} == {own}
    assert guide.draw()["net.weight"].dtype == own
    assert guide.median()["net.weight"].dtype == own


@every_family
def test_it_holds_nothing_that_was_passed_in(family):
    loc = torch.randn(SHAPE)
    before = loc.clone()
    parameters = family.init(SITE, loc, SCALE)
    storages = [value.untyped_storage().data_ptr() for value in (loc, *parameters.values())]
    assert len(set(storages)) == len(storages)
    assert torch.equal(loc, before)


@every_family
def test_no_parameter_is_the_value_that_init_loc_fn_gives(family):
    weight = torch.randn(SHAPE)
    before = weight.clone()
    guide = ps.StructuredGuide(linear_model(), {"*": family}, init_loc_fn=lambda site: weight)
    with torch.no_grad():
        for value in (*guide.parameters(), *guide.buffers()):
            value.zero_()
    assert torch.equal(weight, before)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("scale", [0.02, SCALE])
def test_each_element_starts_with_the_standard_deviation_asked_for(name, scale):
    guide = ps.StructuredGuide(linear_model(), {"*": FAMILIES[name]}, init_scale=scale)
    covariance = unit_draws(lambda: guide.draw()["net.weight"]).covariance
    is_random = (
        CHOSEN.flatten().double() if name == "subnetwork of some" else torch.ones(SHAPE.numel())
    )
    assert_close(covariance / scale**2, is_random.diag())


@pytest.mark.parametrize("name", ON_AVERAGE)
def test_elements_start_with_it_on_average_over_random_starts(name):
    family, loc = FAMILIES[name], torch.randn(SHAPE)
    starts = (family.init(SITE, loc, SCALE) for _ in range(300))
    variances = torch.stack([family.distribution(SITE, **start).variance for start in starts])
    assert_mean(variances / SCALE**2, torch.full(SHAPE, ON_AVERAGE[name]))


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


# ---- what it trains ------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::pyro_structvi.infer.elbo.SampledKLWarning")
@pytest.mark.parametrize("family_name", FAMILIES)
def test_a_gradient_reaches_every_element_of_every_parameter(family_name):
    """From KL and likelihood; what is drawn in its place is no parameter of a point."""
    model = linear_model()
    guide = ps.StructuredGuide(model, {"*": FAMILIES[family_name]}, init_scale=SCALE)
    passes = 20 if family_name == "inducing weights, ensemble" else 1  # of one member each
    elbo, x = ps.StructuredELBO(num_particles=passes), torch.randn(20, SHAPE[1])
    loss = elbo(model, guide)(x, torch.randn(20, SHAPE[0]))
    names, values = zip(*guide.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, values, allow_unused=True)
    for name, gradient in zip(names, found, strict=True):
        assert gradient is not None, name
        assert gradient.isfinite().all(), name
        idle = CHOSEN if name.endswith(".rest") else torch.zeros_like(gradient, dtype=torch.bool)
        assert torch.equal(gradient == 0, idle), name


# ---- what it refuses -----------------------------------------------------------------------------

REFUSED = [
    (MeanField, "max_scale", [0, -1.0, "wide"]),
    (PrunedMeanField, "max_scale", [0]),
    (KTied, "rank", [0, 1.5, True]),
    (LowRank, "rank", [0, 1.5]),
    (LowRank, "diagonal", ["half", None]),
    (LowRank, "diagonal_variance", [0.0]),
    (LowRank, "alpha", [0.0, float("nan")]),
    (FullCovariance, "max_memory", [0, None]),
    (Rowwise, "max_memory", [-1.0]),
    (Dropout, "rate", [1.0, -0.1]),
    (Members, "size", [0, 2.0]),
    (Members, "vectorize", ["no"]),
    (InducingWeights, "shape", [64, (3,), (0, 2)]),
    (InducingWeights, "posterior", ["diagonal"]),
    (InducingWeights, "shared", [True, 0]),  # True is for correlated inducing weights
    (InducingWeights, "max_conditional_scale", [0]),
    (InducingWeights, "prior_scale", [-1.0]),
    (Subnetwork, "chosen", [{"net.weight": [True]}, {"net.weight": torch.ones(SHAPE)}]),
    (Subnetwork, "posterior", ["full"]),
    (Subnetwork, "train_rest", ["no"]),
    *((family, "join_bias", ["no", 1]) for family in CLASSES if issubclass(family, MatrixFamily)),
]


REFUSED += [
    (family, own.name, [object()])
    for family in CLASSES
    for own in dataclasses.fields(family)
    if own.name != "chosen"
]


@pytest.mark.parametrize(
    ("family", "option", "value"),
    [(family, option, value) for family, option, values in REFUSED for value in values],
)
def test_a_bad_option_is_refused_by_name(family, option, value):
    with pytest.raises((TypeError, ValueError), match=f"^`{option}"):
        family(**{option: value})
