"""Weights with inducing weights of every distribution, for their tests."""

from contextlib import contextmanager
from unittest.mock import patch

import torch

from pyro_structvi.distributions import InducingNormal, PointMixture
from tests.distributions.cases import (
    MATRIX,
    InducingOracle,
    make_full,
    make_joint,
    make_low_rank,
    make_matrix_normal,
    make_mean_field,
    positive,
)
from tests.distributions.subject import FLOAT64


def point_mixture(count):
    def make(batch_shape, event_shape, dtype):
        return PointMixture(make_full((*batch_shape, count), event_shape, dtype).loc, event_dim=2)

    return make


def nested(make_inducing):
    """Return a maker of inducing weights that have inducing weights of their own."""

    def make(batch_shape, event_shape, dtype):
        joint = make_joint(batch_shape, event_shape, dtype, inducing_shape=(2, 1))
        inner = make_inducing(batch_shape, (2, 1), dtype)
        return InducingNormal.from_inducing(joint, inner, positive(*batch_shape, dtype=dtype))

    return make


WITH_KL = {
    "diagonal": make_mean_field,
    "matrix normal": make_matrix_normal,
    "full": make_full,
    "low rank": make_low_rank(2),
}
NORMAL = WITH_KL | {"one point": point_mixture(1), "nested": nested(make_mean_field)}
MIXTURES = {"mixture": point_mixture(3), "nested mixture": nested(point_mixture(3))}
LAWS = NORMAL | MIXTURES

ORACLE = InducingOracle(lambda inducing: inducing.covariance_matrix)


def make(law, event_shape=MATRIX, batch_shape=(), conditional_scale=None, **options):
    joint = make_joint(batch_shape, event_shape, FLOAT64, **options)
    inducing = law(batch_shape, joint.inducing_shape, FLOAT64)
    if conditional_scale is None:
        conditional_scale = positive(*batch_shape, dtype=FLOAT64)
    return InducingNormal.from_inducing(joint, inducing, conditional_scale)


def member_of(q, number):
    """Return a weight of which inducing weights, or those of these, are one point of a mixture only."""
    inducing = q.inducing
    if isinstance(inducing, PointMixture):
        inducing = PointMixture(inducing.members[..., number : number + 1, :, :], event_dim=2)
    else:
        inducing = member_of(inducing, number)
    return InducingNormal.from_inducing(q.joint, inducing, q.conditional_scale)


@contextmanager
def choosing(number):
    """Let every draw from a mixture be the same member, so that draws are linear in their noise."""
    with patch("torch.randint", lambda high, shape, **options: torch.full(shape, number)):
        yield
