"""The laws that every distribution over a weight obeys: its image under a linear map."""

import pytest
import torch

from tests import dense_oracles as dense
from tests.distributions.subject import (
    FLOAT32,
    FLOAT64,
    arguments,
    assert_gradients_of_draws,
    image_oracle,
    independent_copies,
    name_of,
)
from tests.statistics import assert_moments

LEADING = {
    "one x": lambda batch: (),
    "a batch of x": lambda batch: (7, *(1 for _ in batch)),
    "an x for each weight": lambda batch: (2, 7, *batch),
}


@pytest.fixture(params=LEADING.values(), ids=LEADING.keys())
def x(subject, request):
    return subject.randn(*request.param(subject.q.batch_shape), subject.size)


def test_image_has_the_dense_moments(subject, x):
    mean, covariance = image_oracle(subject, subject.exact(), x)
    image = subject.q.image(x)
    assert image.batch_shape + image.event_shape == mean.shape
    assert image.event_shape == (subject.out,)
    subject.assert_close(image.mean, mean)
    subject.assert_close(image.variance, covariance.diagonal(dim1=-2, dim2=-1))
    subject.assert_close(image.covariance_matrix, covariance)


def test_image_has_the_dense_density(subject, x):
    q, exact = subject.with_leaves(), subject.exact()
    mean, covariance = image_oracle(subject, exact, x)
    y = subject.randn(*mean.shape)
    density = q.image(x).log_prob(y)
    oracle = dense.log_prob(y.double(), mean, covariance, 1)
    subject.assert_close(density, oracle)
    subject.assert_gradients_close(density, q, oracle, exact)


def test_draws_of_the_image_have_its_moments_and_are_independent_over_the_batch(subject):
    x = subject.randn(2, *(1 for _ in subject.q.batch_shape), subject.size)
    mean, covariance = image_oracle(subject, subject.exact(), x)
    draws = subject.q.image(x).rsample((20_000,))
    blocks = covariance.reshape(-1, subject.out, subject.out)
    assert_moments(draws, mean, torch.block_diag(*blocks))


@pytest.mark.parametrize("sample_shape", [(), (5,)], ids=name_of)
def test_draws_of_the_image_have_the_shape(subject, sample_shape):
    batch = subject.q.batch_shape
    image = subject.q.image(subject.randn(7, *(1 for _ in batch), subject.size))
    assert image.rsample(sample_shape).shape == (*sample_shape, 7, *batch, subject.out)


def test_an_input_of_zeros_has_finite_gradients(subject):
    q = subject.with_leaves()
    batch = subject.q.batch_shape
    x = subject.randn(2, *(1 for _ in batch), subject.size)
    x[0] = 0
    x.requires_grad_()
    draw = q.image(x).rsample()
    assert (draw[0].abs() < 1e-4).all()
    for gradient in torch.autograd.grad(draw.sum(), [*arguments(q), x]):
        assert torch.isfinite(gradient).all()


def test_gradients_of_draws_of_the_image_are_unbiased(subject):
    copies = independent_copies(subject.q)
    x = subject.randn(subject.size)
    assert_gradients_of_draws(
        subject,
        copies.image(x).rsample(),
        copies,
        lambda exact: image_oracle(subject, exact, x),
    )


def test_image_refuses_an_input_of_another_size(subject):
    size = subject.size
    message = rf"`x` must have shape \(\*batch, in\) with in = {size}, but got \(7, {size + 1}\)"
    with pytest.raises(ValueError, match=message):
        subject.q.image(subject.randn(7, size + 1))


def test_image_refuses_a_single_number(plain_subject):
    with pytest.raises(ValueError, match=r"`x` must have shape \(\*batch, in\).*but got \(\)"):
        plain_subject.q.image(torch.tensor(1.0))


def test_image_refuses_another_dtype(subject):
    other = FLOAT32 if subject.dtype == FLOAT64 else FLOAT64
    name = subject.q._parameters[0]
    message = rf"`x` must have the dtype of `{name}`, {subject.dtype}, .* {other}.*`x.to\({name}\)`"
    with pytest.raises(ValueError, match=message):
        subject.q.image(subject.randn(subject.size).to(other))
