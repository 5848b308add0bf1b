"""Every structure obeys the contract of distributions, in the shapes that it tells apart."""

import pytest
import torch

from pyro_structvi.distributions import PointMixture
from pyro_structvi.testing import check_distribution
from pyro_structvi.weights.weight_distribution import IndependentWeight
from tests.distributions.cases import (
    CASES,
    MATRIX,
    OF_CLASSES,
    VECTOR,
    cases_of_registry,
)
from tests.distributions.subject import FLOAT64, with_arguments
from tests.unit_noise import assert_close

FILTERS = (4, 2, 2)
REPEATED = [(MATRIX, (2,)), (FILTERS, (2,)), (VECTOR, ())]  # forms of event or batch
LAST_OF_CLASS = {type(case.make((), MATRIX, FLOAT64)): case for case in CASES}
BATCHED_AS_VECTORS = {"mean field by logarithms", "3-tied", "low rank 3, isotropic", "rowwise"}
# Others of the class are between these in rank, or have one of their options each.
BETWEEN = {"2-tied", "low rank 1, isotropic", "inducing weights, diagonal"}
# Inducing weights that are given are those of a point, whose filters and batches are those of all laws.
LIKE_INDUCING = {"given inducing weights"}


def settings():
    """Give one weight of every kind to each structure, a batch of matrices and one of vectors."""
    for case in CASES:
        shapes = [((), MATRIX), ((1, 2), MATRIX), ((), FILTERS)]
        if case.serves_vectors:
            shapes += [((), VECTOR), ((3, 2), VECTOR)]
        for shape in shapes:
            # Settings of one class differ in matrices; the last one has all shapes.
            is_main = shape == ((), MATRIX)
            has_all = case in LAST_OF_CLASS.values() and case.name not in LIKE_INDUCING
            is_repeated = case.name in BETWEEN or not (is_main or has_all)
            # A batch of vectors shows what vectors do, and where the batch is.
            is_repeated |= shape == ((), VECTOR)
            is_repeated |= shape == ((1, 2), MATRIX) and case.name in BATCHED_AS_VECTORS
            marks = [pytest.mark.slow] if is_repeated else []
            yield pytest.param(case, *shape, id=f"{case.name}, {shape}", marks=marks)


@pytest.mark.parametrize(("case", "batch_shape", "event_shape"), list(settings()))
def test_contract(case, batch_shape, event_shape):
    check_distribution(
        case.make(batch_shape, event_shape, FLOAT64),
        covariance=case.covariance,
        mean=case.mean,
        kl=case.kl,
        shared_covariance=case.shared_covariance,
    )


def test_independence_is_declared():
    for case in CASES:
        q = case.make((), MATRIX, FLOAT64)
        covariance = case.covariance(q)
        is_diagonal = torch.equal(covariance, torch.diag_embed(covariance.diagonal()))
        assert isinstance(q, IndependentWeight) == is_diagonal, case.name


def test_a_structure_without_a_case_of_its_own_has_one_by_the_registry():
    found = cases_of_registry()
    assert len(found) > 4
    for kind, case in found.items():
        q, own = case.make((2,), MATRIX, FLOAT64), OF_CLASSES[kind]
        assert_close(case.covariance(q), own.covariance(q))
        assert case.has_convolution_image == own.has_convolution_image
        assert case.serves_groups == (own.serves_groups and own.has_convolution_image)


def mean_of_members(q):
    return q.members.mean(-1 - len(q.event_shape))


def covariance_of_members(q):
    members = q.members.flatten(-len(q.event_shape))
    away = members - members.mean(-2, keepdim=True)
    return away.mT @ away / members.shape[-2]


@pytest.mark.parametrize(
    ("event_shape", "batch_shape"),
    [
        *((MATRIX, ()), (FILTERS, ()), (VECTOR, (2,))),
        *(pytest.param(*shapes, marks=pytest.mark.slow) for shapes in REPEATED),
    ],
    ids=str,
)
def test_contract_of_a_mixture_of_points(batch_shape, event_shape):
    q = PointMixture(torch.randn(*batch_shape, 3, *event_shape), event_dim=len(event_shape))
    check_distribution(q, mean=mean_of_members, covariance=covariance_of_members)


@pytest.mark.gpu
def test_draws_stay_on_a_gpu():
    for case in CASES:
        q = with_arguments(case.make((), MATRIX, FLOAT64), lambda value: value.detach().cuda())
        x = torch.randn(7, MATRIX[1], device="cuda")
        results = q.mean, q.variance, q.rsample(), q.image(x).rsample(), q.log_prob(q.mean)
        assert {result.device.type for result in results} == {"cuda"}, case.name
