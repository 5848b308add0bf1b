"""The rules that every distribution over a weight obeys: draws are ``loc + A e``, exactly.

Unit vectors take the place of the noise, so that ``A A'`` is the covariance without a sampling error.
"""

import pytest
import torch

from pyro_structvi.weights.weight_distribution import GaussianWeight
from tests.distributions.cases import CASES, MATRIX
from tests.distributions.subject import FLOAT64, assert_gradients_of_draws_are_exact
from tests.unit_noise import assert_draws, draw_with_noise


def dense_moments(subject, exact):
    return subject.case.mean(exact), subject.case.covariance(exact)


def test_draws_have_the_dense_covariance_and_its_gradients(subject):
    q = subject.with_leaves()
    mean, covariance = dense_moments(subject, subject.exact())
    found = assert_draws(q.rsample, mean, covariance)
    assert_gradients_of_draws_are_exact(subject, found, q, lambda e: dense_moments(subject, e))


def test_draws_of_one_call_and_of_two_are_independent(plain_subject):
    q = plain_subject.q
    mean, covariance = dense_moments(plain_subject, plain_subject.exact())
    thrice = covariance.expand(3, *covariance.shape)
    assert_draws(lambda: torch.cat([q.rsample((2,)), q.rsample((1,))]), mean, thrice)


# ---- A and its inverse ---------------------------------------------------------------------------

SCALING = [
    case
    for case in CASES
    if type(case.make((), MATRIX, FLOAT64)).scale_noise is not GaussianWeight.scale_noise
]
WHITENING = [
    case
    for case in SCALING
    if type(case.make((), MATRIX, FLOAT64)).whiten is not GaussianWeight.whiten
]
SHAPES = pytest.mark.parametrize("sample_shape", [(), (5,), (5, 2)], ids=str)


def weights(case):
    for event_shape in case.event_shapes:
        yield case.make((2, 3), event_shape, FLOAT64)


@SHAPES
@pytest.mark.parametrize("case", SCALING, ids=lambda case: case.name)
def test_a_draw_is_its_noise_scaled(case, sample_shape):
    for q in weights(case):
        noise = torch.randn(*sample_shape, *q.batch_shape, *q.noise_shape)
        draw, size = draw_with_noise(lambda q=q: q.rsample(sample_shape), noise.flatten())
        assert size == noise.numel()
        torch.testing.assert_close(draw, q.loc + q.scale_noise(noise), rtol=0, atol=1e-12)


@SHAPES
@pytest.mark.parametrize("case", WHITENING, ids=lambda case: case.name)
def test_whitening_is_the_inverse_of_scaling(case, sample_shape):
    for q in weights(case):
        noise = torch.randn(*sample_shape, *q.batch_shape, *q.noise_shape)
        whitened = q.whiten(q.scale_noise(noise))
        torch.testing.assert_close(whitened, noise, rtol=0, atol=1e-10)
        torch.testing.assert_close(
            q.mahalanobis(q.scale_noise(noise)),
            noise.square().flatten(-len(q.noise_shape)).sum(-1),
        )


def test_what_does_not_scale_noise_is_drawn_by_matheron_s_rule():
    assert {case.name for case in CASES} - {case.name for case in SCALING} == {
        case.name for case in CASES if "inducing" in case.name
    }
