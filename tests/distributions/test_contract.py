"""The rules that every distribution over a weight obeys: shapes, moments, batches, dtypes, copies.

Structures are listed in ``cases.py``. Oracles are dense and in float64, from the same arguments. Draws,
densities and images have separate files.
"""

import copy
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import kl_divergence

from pyro_structvi.weights.weight_distribution import IndependentWeight
from tests.distributions.cases import MATRIX
from tests.distributions.subject import arguments, uniform_prior, with_arguments


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
    trace = variance.flatten(-subject.event_dim).sum(-1)
    log_det = torch.linalg.slogdet(covariance).logabsdet
    subject.assert_close(q.mean, subject.case.mean(exact))
    subject.assert_close(q.covariance_matrix, covariance)
    subject.assert_close(q.variance, variance)
    subject.assert_close(q.stddev, variance.sqrt())
    subject.assert_close(q.variance_sum, trace)
    subject.assert_close(q.log_det_covariance, log_det)


def test_gradients_of_moments_are_the_dense_ones(subject):
    q, exact = subject.with_leaves(), subject.exact()
    covariance, mean = subject.case.covariance(exact), subject.case.mean(exact)
    linear, weights = torch.randn_like(mean), torch.rand_like(mean)
    oracle = (linear * mean).sum() + torch.linalg.slogdet(covariance).logabsdet.sum()
    oracle = oracle + (weights.flatten() * covariance.diagonal(dim1=-2, dim2=-1).flatten()).sum()
    value = (linear * q.mean).sum() + q.log_det_covariance.sum() + (weights * q.variance).sum()
    subject.assert_gradients_close(value, q, oracle, exact)


def test_independent_elements_are_declared(plain_subject):
    covariance = plain_subject.case.covariance(plain_subject.q)
    is_diagonal = torch.equal(covariance, torch.diag_embed(covariance.diagonal()))
    assert isinstance(plain_subject.q, IndependentWeight) == is_diagonal


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
    subject.assert_close(expanded.log_prob(value), q.log_prob(value))
    subject.assert_close(expanded.entropy(), q.entropy().expand(batch))
    subject.assert_close(kl_divergence(expanded, prior), kl.expand(batch))
    shape = (7, *batch, subject.out)
    subject.assert_close(expanded.image(x).mean, image.mean.expand(shape))
    subject.assert_close(expanded.image(x).variance, image.variance.expand(shape))


def test_expand_enlarges_batch_dimensions_of_size_one(plain_subject):
    q = plain_subject.q
    expanded = q.expand((2, 1)).expand((2, 3))
    assert expanded.rsample().shape == (2, 3, *MATRIX)
    plain_subject.assert_close(expanded.variance, q.variance.expand(2, 3, *MATRIX))


def test_one_weight_is_seen_as_a_matrix_in_any_sample_shape(subject):
    """The rows of the matrix are the outputs, and its columns are in the order of the weight."""
    q = subject.q
    for sample_shape in ((), (5,), (5, 1)):
        weight = subject.randn(*sample_shape, *q.batch_shape, *q.event_shape)
        matrix = q.as_matrix(weight)
        assert matrix.shape == (*sample_shape, *q.batch_shape, subject.out, subject.size)
        assert torch.equal(matrix.flatten(-2), weight.flatten(-subject.event_dim))
        assert torch.equal(q.as_weight(matrix), weight)


# ---- as an object --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda q: pickle.loads(pickle.dumps(q))], ids=["copy", "pickle"]
)
def test_copies_are_equal_and_apart(plain_subject, duplicate):
    q, twin = plain_subject.q, duplicate(plain_subject.q)
    value = q.rsample()
    assert (twin.batch_shape, twin.event_shape) == (q.batch_shape, q.event_shape)
    assert torch.equal(twin.log_prob(value), q.log_prob(value))
    before = [argument.clone() for argument in arguments(q)]
    for argument in arguments(twin):
        argument.add_(1.0)
    assert all(map(torch.equal, arguments(q), before))


def numbers(q, prior, x, value):
    """Return all that a distribution computes without a draw."""
    image = q.image(x)
    return [
        *(q.mean, q.variance, q.stddev, q.covariance_matrix, q.variance_sum, q.entropy()),
        *(q.log_det_covariance, q.log_prob(value), kl_divergence(q, prior)),
        *(image.mean, image.variance, image.covariance_matrix),
    ]


def everything(q, prior, x):
    return [*numbers(q, prior, x, q.rsample()), q.image(x).rsample()]


def test_everything_keeps_the_dtype(single_subject):
    q = single_subject.q
    prior = uniform_prior(q.loc.shape, 2, single_subject.dtype)
    x = single_subject.randn(7, 1, single_subject.size)
    assert {result.dtype for result in everything(q, prior, x)} == {single_subject.dtype}


def test_single_precision_is_close_to_double(single_subject):
    q, exact = single_subject.q, single_subject.exact()
    x, value = single_subject.randn(7, 1, single_subject.size), single_subject.randn(5, 2, *MATRIX)
    single = numbers(q, uniform_prior(q.loc.shape, 2, single_subject.dtype), x, value)
    prior = uniform_prior(q.loc.shape, 2, torch.float64)
    for actual, expected in zip(
        single, numbers(exact, prior, x.double(), value.double()), strict=True
    ):
        single_subject.assert_close(actual, expected)


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_everything_stays_on_its_device(plain_subject, device):
    """The device ``meta`` has shapes and no numbers, and is there on every machine."""
    q = with_arguments(plain_subject.q, lambda value: value.detach().to(device))
    q._validate_args = False  # looks at numbers
    prior = dist.Normal(torch.zeros((), device=device), 1.0, validate_args=False).expand(MATRIX)
    results = everything(q, prior, torch.ones(7, plain_subject.size, device=device))
    assert {result.device.type for result in results} == {device}


# ---- in Pyro -------------------------------------------------------------------------------------


def test_draws_have_the_shape(subject):
    q = subject.q
    for sample_shape in ((), (5,), (2, 5)):
        shape = (*sample_shape, *q.batch_shape, *q.event_shape)
        assert q.rsample(sample_shape).shape == q.sample(sample_shape).shape == shape


def test_draws_pass_gradients_on_and_samples_do_not(plain_subject):
    q = plain_subject.with_leaves()
    assert q.rsample().requires_grad
    assert not q.sample().requires_grad


def test_a_draw_at_a_sample_site_is_an_ordinary_tensor(plain_subject):
    value = pyro.sample("weight", plain_subject.q)
    assert type(value) is torch.Tensor
    assert value.shape == MATRIX


def test_a_plate_expands_it(plain_subject):
    with pyro.plate("members", 3):
        value = pyro.sample("weight", plain_subject.q)
    assert value.shape == (3, *MATRIX)
    assert (value[0] != value[1]).all()
