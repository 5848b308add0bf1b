"""The kit finds planted faults in a distribution that is not normal."""

import math
import re
from typing import Annotated

import pyro.distributions as dist
import pytest
import torch
from pyro.distributions import Normal
from torch.distributions import constraints

from pyro_structvi.extend import Argument, WeightDistribution, quantiles
from pyro_structvi.testing import check_distribution, random_weight
from pyro_structvi.weights.outputs import NormalOutputs
from pyro_structvi.weights.site_distributions import normal_cross_entropy
from tests.testing.test_planted_faults import fault, with_kl, with_wide_quantiles


def make(kind, batch_shape=()):
    return random_weight(kind)(batch_shape, (4, 3), torch.float64)


class LaplaceWeight(WeightDistribution):
    """Independent Laplace elements, without a distribution of outputs."""

    scale: Annotated[torch.Tensor, Argument("out, in", constraints.positive)]

    def __init__(self, loc, scale, validate_args=None):
        super().__init__({"loc": loc, "scale": scale}, validate_args=validate_args)

    @property
    def base(self):
        return dist.Laplace(self.loc, self.scale, validate_args=False).to_event(2)

    @property
    def variance(self):
        return self.base.variance

    @property
    def covariance_matrix(self):
        return torch.diag_embed(self.variance.flatten(-2))

    def rsample(self, sample_shape=()):
        return self.base.rsample(torch.Size(sample_shape))

    def log_prob(self, value):
        return self.base.log_prob(value)

    def entropy(self):
        return self.base.entropy()

    def ways_to_apply(self, linear_map, x):
        return ("weight",)


def of_normals(q):
    return dist.Normal(q.loc, q.variance.sqrt()).to_event(2)


def one_number(q, sample_shape=()):
    shape = *sample_shape, *q.batch_shape, 1, 1
    return q.loc + q.scale * dist.Laplace(0.0, 1.0).sample(shape)


def one_batch(q, sample_shape=()):
    noise = dist.Laplace(0.0, 1.0).sample((*sample_shape, *q.event_shape))
    noise = noise.reshape(*sample_shape, *(1 for _ in q.batch_shape), *q.event_shape)
    return q.loc + q.scale * noise


def without_normalizer(q, value):
    return q.base.log_prob(value) + (2 * q.scale).log().sum((-2, -1))


def zero_first(scale):
    return scale * (torch.arange(scale.shape[-1]) > 0)


def not_from_a_standard_normal(q, p):
    if bool((p.mean == 0).all() & (p.stddev == 1).all()):
        raise NotImplementedError
    return right_kl(q, p) + p.mean.square().sum((-2, -1))


def with_two_medians():
    """Return a class with right quantiles, and a median that is a third of a scale higher."""
    kind = fault(LaplaceWeight, icdf=lambda q, p: q.loc + q.scale / 3)
    quantiles.register(kind, lambda q, probs: q.base.base_dist.icdf(probs.reshape(-1, 1, 1)))
    return kind


NOT_NORMAL = {
    "`entropy` is E_q[-log q]": fault(LaplaceWeight, entropy=lambda q: q.base.entropy() + 1.0),
    "the derivative of `log_prob` by `scale` has mean zero over draws": fault(
        LaplaceWeight,
        log_prob=without_normalizer,
        entropy=lambda q: q.base.entropy() - (2 * q.scale).log().sum((-2, -1)),
    ),
    "`log_prob` is the log density of the draws": fault(
        LaplaceWeight,
        log_prob=lambda q, value: of_normals(q).log_prob(value),
        entropy=lambda q: of_normals(q).entropy(),
    ),
    "the gradient of `log_prob` is its derivative": fault(
        LaplaceWeight, log_prob=lambda q, value: q.base.log_prob(value).detach()
    ),
    "the gradient of `log_prob(value)` is its derivative": fault(
        LaplaceWeight, log_prob=lambda q, value: q.base.log_prob(value.detach())
    ),
    "Expected: a covariance with an inverse": fault(
        LaplaceWeight,
        rsample=lambda q, n=(): q.loc + zero_first(q.scale) * torch.randn(*n, *q.loc.shape),
        variance=property(lambda q: zero_first(q.scale).square()),
    ),
    "the gradient of `rsample` is its derivative": fault(
        LaplaceWeight, rsample=lambda q, n=(): q.loc + (q.base.rsample(n) - q.loc).detach()
    ),
    "`kl_divergence(q, p)` is E_q[log q - log p]": with_kl(
        lambda q, p: 1.001 * right_kl(q, p), Normal, torch.distributions.Normal, base=LaplaceWeight
    ),
    "log p], for a normal p of one scale": with_kl(
        not_from_a_standard_normal, Normal, torch.distributions.Normal, base=LaplaceWeight
    ),
    "`quantiles` have their shares of draws below them": with_wide_quantiles(LaplaceWeight),
    "the median, of `icdf` or the mean, is the quantile 1/2": with_two_medians(),
    "draws of `image(x)` have the marginal distributions of W x": fault(
        LaplaceWeight,
        image_under=lambda q, linear_map, x, bias=None: NormalOutputs(
            q.map_for_batch(linear_map),
            linear_map(x, q.loc, bias),
            linear_map(x.square(), q.variance),
        ),
        ways_to_apply=lambda q, linear_map, x: ("outputs", "weight"),
    ),
    "draws have their covariance": fault(
        LaplaceWeight, variance=property(lambda q: q.scale.square())
    ),
    ": draws have their covariance, and are independent": fault(LaplaceWeight, rsample=one_number),
    "several draws have their covariance, and are independent of each other": fault(
        LaplaceWeight, rsample=lambda q, n=(): q.base.rsample().expand(*n, *q.loc.shape)
    ),
}


@pytest.mark.parametrize("rule", NOT_NORMAL)
def test_a_wrong_distribution_that_is_not_normal_fails_by_the_rule(rule):
    with pytest.raises(AssertionError, match=re.escape(rule)):
        check_distribution(make(NOT_NORMAL[rule]))


class StudentWeight(LaplaceWeight):
    """With heavy tails, and a variance that reads values."""

    @property
    def base(self):
        return dist.StudentT(5.0, self.loc, self.scale, validate_args=False).to_event(2)


class TwoModes(LaplaceWeight):
    """All elements are three scales above or below their means, so that the mean has no density."""

    @property
    def parts(self):
        return [dist.Normal(self.loc + k * self.scale, self.scale).to_event(2) for k in (3, -3)]

    @property
    def covariance_matrix(self):
        scale = self.scale.flatten(-2)
        return 9 * scale[..., :, None] * scale[..., None, :] + torch.diag_embed(scale.square())

    @property
    def variance(self):
        return 10 * self.scale.square()

    def rsample(self, sample_shape=()):
        shape = *sample_shape, *self.batch_shape, 1, 1
        sign = (torch.rand(shape).to(self.loc) - 0.5).sign()
        noise = torch.randn(*sample_shape, *self.loc.shape, dtype=self.loc.dtype)
        return self.loc + self.scale * (3 * sign + noise)

    def log_prob(self, value):
        return torch.logaddexp(*(part.log_prob(value) for part in self.parts)) - math.log(2)

    def entropy(self):
        return self.parts[0].entropy() + math.log(2)  # up to 1e-12, with twelve elements


def right_kl(q, p):
    return normal_cross_entropy(q, p) - q.entropy()


WITH_KL = with_kl(right_kl, Normal, torch.distributions.Normal, base=LaplaceWeight)


@pytest.mark.parametrize(
    ("kind", "batch_shape"),
    [
        *((kind, ()) for kind in (LaplaceWeight, StudentWeight, TwoModes, WITH_KL)),
        (WITH_KL, (3,)),
        *(
            pytest.param(kind, (3,), marks=pytest.mark.slow)
            for kind in (LaplaceWeight, StudentWeight, TwoModes)
        ),
    ],
)
def test_a_right_distribution_that_is_not_normal_passes(kind, batch_shape):
    check_distribution(make(kind, batch_shape))


def test_one_draw_for_a_batch_fails():
    with pytest.raises(AssertionError, match="are independent of each other"):
        check_distribution(make(fault(LaplaceWeight, rsample=one_batch), (3,)))
