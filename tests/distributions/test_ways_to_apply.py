"""Which way a structure offers a linear map its weight: as outputs, in factors, or drawn and formed."""

import pytest
import torch
import torch.nn.functional as F

from pyro_structvi.distributions import BernoulliDropout, ConditionalNormal, PointMixture
from pyro_structvi.maps import BiasColumnMap, ConvolutionMap, DenseMap
from tests.distributions.cases import (
    CASES,
    MATRIX,
    make_inducing,
    make_joint,
    make_mean_field,
)

BOTH, DRAWN = ("outputs", "weight"), ("weight",)
EXAMPLES, SEQUENCE, IMAGES = torch.zeros(5, 3), torch.zeros(5, 2, 3), torch.zeros(5, 6, 4)


def convolution(groups=1):
    return ConvolutionMap(F.conv1d, (6 // groups, 2), groups=groups)


MAPS = {
    "dense": (DenseMap(), EXAMPLES),
    "positions": (DenseMap(), SEQUENCE),
    "convolution": (convolution(), IMAGES),
    "groups": (convolution(2), IMAGES),
}


def expected_ways(case, kind):
    is_refused = kind in {"convolution", "groups"} and not case.has_convolution_image
    is_refused = is_refused or (kind == "groups" and not case.serves_groups)
    return DRAWN if is_refused else BOTH


@pytest.mark.parametrize("kind", MAPS)
def test_outputs_come_first_wherever_they_can_be_drawn(kind):
    linear_map, x = MAPS[kind]
    for case in CASES:
        if "inducing" not in case.name:
            q, expected = case.make((), MATRIX, torch.float64), expected_ways(case, kind)
            assert q.ways_to_apply(linear_map, x) == expected, case.name
            assert q.ways_to_apply(*linear_map.join_bias(x)) == expected, case.name
    shape = MATRIX if isinstance(linear_map, DenseMap) else (4, 6 // linear_map.groups, 2)
    for q in (BernoulliDropout(torch.ones(shape), 0.5), PointMixture(torch.ones(2, *shape))):
        assert q.ways_to_apply(linear_map, x) == BOTH


def conditional(shape):
    joint = make_joint((), shape, torch.float64)
    return ConditionalNormal(joint, torch.randn(3, 2), 0.5)


@pytest.mark.parametrize(
    ("shape", "alone", "over_positions"),
    [
        ((4, 3), BOTH, BOTH[::-1]),
        ((64, 64), ("outputs", "factors", "weight"), ("factors", "weight", "outputs")),
        ((8, 1024), ("outputs", "factors", "weight"), ("outputs", "factors", "weight")),
    ],
)
def test_inducing_weights_count_multiplications(shape, alone, over_positions):
    """For an example's outputs, with M = (3, 2) inducing weights.

    In factors they are 2 in + 6 + 3 out, for drawn outputs with 403 out, for a drawn weight out x in.
    """
    q, x = conditional(shape), torch.zeros(1, 2, shape[1])
    assert q.ways_to_apply(DenseMap(), x[0]) == alone
    assert q.ways_to_apply(DenseMap(positions=False), x) == alone
    assert q.ways_to_apply(DenseMap(), x) == over_positions


@pytest.mark.parametrize("join", [lambda layer: layer, BiasColumnMap], ids=["plain", "joined"])
def test_inducing_weights_of_groups_are_drawn_and_formed(join):
    linear_map = join(convolution(2))
    for q in (
        conditional((4, 12)),
        make_inducing(make_mean_field, False)((), (4, 12), torch.float64),
    ):
        assert q.ways_to_apply(linear_map, IMAGES) == DRAWN
