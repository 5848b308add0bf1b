"""The rules that every distribution over a weight obeys: ``image(x)`` is the distribution of ``W x``."""

import pytest
import torch

from tests import dense_oracles as dense
from tests.distributions.subject import (
    FLOAT32,
    arguments,
    assert_gradients_of_draws_are_exact,
    image_oracle,
)
from tests.unit_noise import assert_draws


def leading_shapes(batch):
    """Give the leading shapes of inputs: one for all weights of a batch, and one for each of them."""
    return [(), (2, 1, *batch)] if batch else [(3,)]


def test_image_has_the_dense_moments_density_and_entropy(subject):
    q, exact = subject.with_leaves(), subject.exact()
    for lead in leading_shapes(q.batch_shape):
        x = subject.randn(*lead, subject.size)
        mean, covariance = image_oracle(subject, exact, x)
        image, y = q.image(x), subject.randn(*mean.shape)
        assert image.batch_shape + image.event_shape == mean.shape
        assert image.event_shape == (subject.out,)
        subject.assert_close(image.mean, mean)
        subject.assert_close(image.variance, covariance.diagonal(dim1=-2, dim2=-1))
        subject.assert_close(image.covariance_matrix, covariance)
        subject.assert_close(image.entropy(), dense.entropy(covariance))
        density, oracle = image.log_prob(y), dense.log_prob(y, mean, covariance, 1)
        subject.assert_close(density, oracle)
    subject.assert_gradients_close(density, q, oracle, exact)


def test_draws_of_the_image_are_exact_and_independent_over_the_batch(subject):
    q, batch = subject.with_leaves(), subject.q.batch_shape
    x = subject.randn(2, *(1 for _ in batch), subject.size).requires_grad_()
    mean, covariance = image_oracle(subject, subject.exact(), x)
    found = assert_draws(lambda: q.image(x).rsample(), mean, covariance)
    assert_gradients_of_draws_are_exact(
        subject, found, q, lambda exact: image_oracle(subject, exact, x), [x]
    )


def test_several_draws_of_the_image_are_independent(plain_subject):
    q, x = plain_subject.q, torch.randn(2, plain_subject.size)
    mean, covariance = image_oracle(plain_subject, plain_subject.exact(), x)
    several = covariance.expand(2, *covariance.shape)
    assert_draws(lambda: q.image(x).rsample((2,)), mean, several)


def test_draws_of_the_image_have_the_shape(subject):
    batch = subject.q.batch_shape
    image = subject.q.image(subject.randn(7, *(1 for _ in batch), subject.size))
    for sample_shape in ((), (5,), (2, 5)):
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


def test_image_refuses_an_input_of_another_size(plain_subject):
    size = plain_subject.size
    message = rf"`x` must have shape \(\*batch, in\) with in = {size}, but got \(7, {size + 1}\)"
    with pytest.raises(ValueError, match=message):
        plain_subject.q.image(torch.zeros(7, size + 1))


def test_image_refuses_a_single_number(plain_subject):
    with pytest.raises(ValueError, match=r"`x` must have shape \(\*batch, in\).*but got \(\)"):
        plain_subject.q.image(torch.tensor(1.0))


def test_image_refuses_another_dtype(plain_subject):
    name, x = plain_subject.q.argument_names[0], torch.zeros(plain_subject.size, dtype=FLOAT32)
    message = (
        rf"`x` must have the dtype of `{name}`, {torch.float64}, .*{FLOAT32}.*`x.to\({name}\)`"
    )
    with pytest.raises(ValueError, match=message):
        plain_subject.q.image(x)
