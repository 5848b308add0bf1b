"""The laws that every distribution over a weight obeys; structures are listed in ``cases.py``.

Oracles are dense and in float64, from the same numbers. Where a law is about draws, the test is
statistical, with a fixed seed and a false-alarm rate of 1e-6. Densities and images have files of
their own.
"""

import copy
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import kl_divergence

from tests.distributions.cases import MATRIX
from tests.distributions.subject import (
    arguments,
    assert_gradients_of_draws,
    independent_copies,
    name_of,
    uniform_prior,
    with_arguments,
)
from tests.statistics import assert_moments


def test_shapes(subject):
    q = subject.q
    shape, length = q.batch_shape + q.event_shape, q.event_shape.numel()
    assert q.mean.shape == q.variance.shape == q.stddev.shape == shape
    assert q.covariance_matrix.shape == (*q.batch_shape, length, length)
    assert q.variance_sum.shape == q.log_det_covariance.shape == q.batch_shape


def test_moments_are_those_of_the_dense_covariance(subject):
    q, exact = subject.q, subject.exact()
    covariance = subject.case.covariance(exact)
    variance = covariance.diagonal(dim1=-2, dim2=-1).reshape(q.variance.shape)
    subject.assert_close(q.mean, subject.case.mean(exact))
    subject.assert_close(q.covariance_matrix, covariance)
    subject.assert_close(q.variance, variance)
    subject.assert_close(q.stddev, variance.sqrt())
    subject.assert_close(q.variance_sum, variance.flatten(-subject.event_dim).sum(-1))
    subject.assert_close(q.log_det_covariance, torch.linalg.slogdet(covariance).logabsdet)


def test_draws_have_the_moments(subject):
    q, exact = subject.q, subject.exact()
    draws = q.rsample((20_000,))
    blocks = subject.case.covariance(exact).reshape(-1, *2 * (q.event_shape.numel(),))
    assert_moments(draws, subject.case.mean(exact), torch.block_diag(*blocks))


def test_independent_noise_and_the_rest_add_up(subject):
    q, exact, count = subject.q, subject.exact(), 20_000
    independent, rest = q.split_noise(torch.Size([count]))
    draws = 0 if rest is None else rest
    if independent is not None:
        covariance = independent.covariance_matrix
        assert torch.equal(covariance, torch.diag_embed(covariance.diagonal(dim1=-2, dim2=-1)))
        draws = draws + independent.rsample((count,))
    assert draws.shape == (count, *q.batch_shape, *q.event_shape)
    blocks = subject.case.covariance(exact).reshape(-1, *2 * (q.event_shape.numel(),))
    assert_moments(draws, subject.case.mean(exact), torch.block_diag(*blocks))


@pytest.mark.parametrize("sample_shape", [(), (5,), (2, 5)], ids=name_of)
def test_draws_have_the_shape(subject, sample_shape):
    q = subject.q
    shape = (*sample_shape, *q.batch_shape, *q.event_shape)
    assert q.rsample(sample_shape).shape == q.sample(sample_shape).shape == shape


def test_draws_pass_gradients_on_and_samples_do_not(plain_subject):
    q = plain_subject.with_leaves()
    assert q.rsample().requires_grad
    assert not q.sample().requires_grad


def test_gradients_of_draws_are_unbiased(subject):
    copies = independent_copies(subject.q)
    assert_gradients_of_draws(
        subject,
        copies.rsample(),
        copies,
        lambda exact: (
            subject.case.mean(exact).flatten(-subject.event_dim),
            subject.case.covariance(exact),
        ),
    )


# ---- batches -------------------------------------------------------------------------------------


def test_expand_equals_repeating_and_shares_memory(subject):
    q = subject.q
    expanded = q.expand((5, *q.batch_shape))
    assert type(expanded) is type(q)
    assert (expanded.batch_shape, expanded.event_shape) == ((5, *q.batch_shape), q.event_shape)
    for before, after in zip(arguments(q), arguments(expanded), strict=True):
        assert torch.equal(after, before.expand(5, *before.shape))
        assert after.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
    covariance = subject.case.covariance(subject.exact())
    subject.assert_close(expanded.covariance_matrix, covariance.expand(5, *covariance.shape))


def test_expand_commutes_with_all_that_is_computed(subject):
    q = subject.q
    batch = (5, *q.batch_shape)
    expanded = q.expand(batch)
    prior = uniform_prior(batch + q.event_shape, subject.event_dim, subject.dtype)
    value = subject.randn(*batch, *q.event_shape)
    x = subject.randn(7, *(1 for _ in batch), subject.size)
    own_prior = uniform_prior(q.loc.shape, subject.event_dim, subject.dtype)
    kl, image = kl_divergence(q, own_prior), q.image(x)
    subject.assert_close(expanded.log_prob(value), q.log_prob(value).double())
    subject.assert_close(expanded.entropy(), q.entropy().double().expand(batch))
    subject.assert_close(kl_divergence(expanded, prior), kl.double().expand(batch))
    shape = (7, *batch, subject.out)
    subject.assert_close(expanded.image(x).mean, image.mean.double().expand(shape))
    subject.assert_close(expanded.image(x).variance, image.variance.double().expand(shape))


def test_expand_enlarges_batch_dimensions_of_size_one(plain_subject):
    q = plain_subject.q
    expanded = q.expand((2, 1)).expand((2, 3))
    assert expanded.rsample().shape == (2, 3, *MATRIX)
    plain_subject.assert_close(expanded.variance, q.variance.expand(2, 3, *MATRIX))


def test_draws_of_an_expanded_distribution_are_independent(plain_subject):
    first, second = plain_subject.q.expand((2,)).rsample()
    assert (first != second).all()


# ---- as an object --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda q: pickle.loads(pickle.dumps(q))], ids=["copy", "pickle"]
)
def test_copies_are_equal_and_apart(subject, duplicate):
    q, twin = subject.q, duplicate(subject.q)
    value = q.rsample()
    assert (twin.batch_shape, twin.event_shape) == (q.batch_shape, q.event_shape)
    assert torch.equal(twin.log_prob(value), q.log_prob(value))
    before = [argument.clone() for argument in arguments(q)]
    for argument in arguments(twin):
        argument.add_(1.0)
    assert all(map(torch.equal, arguments(q), before))


def everything(q, prior, x):
    """Return all that a distribution computes."""
    image, value = q.image(x), q.rsample()
    return [
        *(q.mean, q.variance, q.stddev, q.covariance_matrix, q.variance_sum, q.entropy()),
        *(value, q.log_prob(value), kl_divergence(q, prior)),
        *(image.mean, image.variance, image.covariance_matrix, image.rsample()),
    ]


def test_everything_keeps_the_dtype(subject):
    q = subject.q
    prior = uniform_prior(q.loc.shape, subject.event_dim, subject.dtype)
    x = subject.randn(7, *(1 for _ in q.batch_shape), subject.size)
    assert {result.dtype for result in everything(q, prior, x)} == {subject.dtype}


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_everything_stays_on_its_device(plain_subject, device):
    """The device ``meta`` has shapes and no numbers, and is there on every machine."""
    q = with_arguments(plain_subject.q, lambda value: value.detach().to(device))
    q._validate_args = False  # looks at numbers
    prior = dist.Normal(torch.zeros((), device=device), 1.0, validate_args=False).expand(MATRIX)
    results = everything(q, prior, torch.ones(7, plain_subject.size, device=device))
    assert {result.device.type for result in results} == {device}


def test_a_draw_at_a_sample_site_is_an_ordinary_tensor(subject):
    value = pyro.sample("weight", subject.q)
    assert type(value) is torch.Tensor
    assert value.shape == subject.q.batch_shape + subject.q.event_shape


def test_a_plate_expands_it(plain_subject):
    with pyro.plate("members", 3):
        value = pyro.sample("weight", plain_subject.q)
    assert value.shape == (3, *MATRIX)
    assert (value[0] != value[1]).all()
