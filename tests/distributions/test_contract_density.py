"""The rules that every distribution over a weight obeys: densities, entropies and KL divergences."""

import pyro.distributions as dist
import pytest
import torch
from torch.distributions import kl_divergence

from pyro_structvi.distributions import MeanFieldNormal
from tests import dense_oracles as dense
from tests.distributions.cases import CASES, CONVOLUTION, MATRIX, positive
from tests.distributions.subject import FLOAT64, Subject, uniform_prior


def test_log_prob_and_its_gradients_are_the_dense_ones(subject):
    q, exact = subject.with_leaves(), subject.exact()
    covariance, mean = subject.case.covariance(exact), subject.case.mean(exact)
    for sample_shape in ((), (5,)):
        value = subject.randn(*sample_shape, *q.batch_shape, *q.event_shape)
        oracle = dense.log_prob(value, mean, covariance, subject.event_dim)
        assert q.log_prob(value).shape == (*sample_shape, *q.batch_shape)
        subject.assert_close(q.log_prob(value), oracle)
    subject.assert_gradients_close(q.log_prob(value), q, oracle, exact)


def test_entropy_is_the_dense_one(subject):
    assert subject.q.entropy().shape == subject.q.batch_shape
    subject.assert_close(
        subject.q.entropy(), dense.entropy(subject.case.covariance(subject.exact()))
    )


def uniform_prior_for_each_weight_of_a_batch(shape, event_dim, dtype):
    batch = shape[: len(shape) - event_dim]
    scale = positive(*batch, *(1 for _ in range(event_dim)), dtype=dtype)
    return dist.Normal(torch.zeros_like(scale), scale).expand(shape).to_event(event_dim)


def prior_without_batch(shape, event_dim, dtype):
    scale = positive(*shape[len(shape) - event_dim :], dtype=dtype)
    return dist.Normal(torch.zeros_like(scale), scale).to_event(event_dim)


def prior_with_a_scale_for_each_output(shape, event_dim, dtype):
    scale = positive(*shape[len(shape) - event_dim :][:1], *(1,) * (event_dim - 1), dtype=dtype)
    return dist.Normal(torch.zeros_like(scale), scale).expand(shape).to_event(event_dim)


def prior_with_a_loc(shape, event_dim, dtype):
    loc, scale = torch.randn(shape, dtype=dtype), positive(*shape, dtype=dtype)
    return dist.Normal(loc, scale).to_event(event_dim)


def plain_normal(shape, event_dim, dtype):
    return dist.Normal(torch.randn(shape, dtype=dtype), positive(*shape, dtype=dtype))


def torch_normal(shape, event_dim, dtype):
    base = torch.distributions.Normal(
        torch.randn(shape, dtype=dtype), positive(*shape, dtype=dtype)
    )
    return torch.distributions.Independent(base, event_dim)


def mean_field_prior(shape, event_dim, dtype):
    return MeanFieldNormal(
        torch.randn(shape, dtype=dtype), positive(*shape, dtype=dtype), event_dim
    )


PRIORS = [  # the first two take separate ways through a structure's moments
    uniform_prior,
    prior_with_a_loc,
    uniform_prior_for_each_weight_of_a_batch,
    prior_without_batch,
    prior_with_a_scale_for_each_output,
    plain_normal,
    torch_normal,
    mean_field_prior,
]


def assert_dense_kl(subject, make_prior):
    q, exact = subject.with_leaves(), subject.exact()
    prior = make_prior(q.batch_shape + q.event_shape, subject.event_dim, subject.dtype)
    kl = kl_divergence(q, prior)
    oracle = subject.case.kl(exact, prior.mean, prior.stddev)
    assert kl.shape == q.batch_shape
    subject.assert_close(kl, oracle)
    subject.assert_gradients_close(kl, q, oracle, exact)


@pytest.mark.parametrize("make_prior", PRIORS[:2], ids=lambda make: make.__name__)
def test_kl_and_its_gradients_are_the_dense_ones(subject, make_prior):
    assert_dense_kl(subject, make_prior)


KINDS = [  # of divergences: from independent elements, from moments, with inducing weights
    case
    for case in CASES
    if case.name in {"mean field", "low rank 3, isotropic", "matrix normal"}
    or case.name == "inducing weights, matrix normal, a bias"
]


@pytest.mark.parametrize("make_prior", PRIORS[2:], ids=lambda make: make.__name__)
@pytest.mark.parametrize("case", KINDS, ids=lambda case: case.name)
def test_every_prior_has_the_dense_kl_to_a_batch(case, make_prior):
    assert_dense_kl(Subject(case, case.make((2,), CONVOLUTION, FLOAT64)), make_prior)


def test_kl_to_normals_of_the_same_moments_is_what_correlations_are_worth(subject):
    q, exact = subject.q, subject.exact()
    covariance = subject.case.covariance(exact)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    oracle = (variance.log().sum(-1) - torch.linalg.slogdet(covariance).logabsdet) / 2
    kl = kl_divergence(q, dist.Normal(q.mean, q.stddev).to_event(subject.event_dim))
    if subject.case.kl_with_inducing is None:
        subject.assert_close(kl, oracle)
    else:  # an upper bound
        assert (kl > oracle).all()


@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "to_event"])
def test_kl_without_closed_form_is_refused(plain_subject, wrap):
    prior = dist.StudentT(3.0, torch.zeros(MATRIX), 1.0)
    with pytest.raises(NotImplementedError, match="No KL"):
        kl_divergence(plain_subject.q, prior.to_event(2) if wrap else prior)


def test_log_prob_refuses_a_value_of_another_shape(plain_subject):
    with pytest.raises(ValueError, match=r"^`value` must have shape"):
        plain_subject.q.log_prob(torch.zeros(*MATRIX, 2))


def test_log_prob_refuses_nan(plain_subject):
    with pytest.raises(ValueError, match=r"^`value` holds .* NaN"):
        plain_subject.q.log_prob(torch.full(MATRIX, float("nan")))
