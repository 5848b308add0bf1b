"""The kit finds planted faults, and its message names the violated rule."""

import re
from dataclasses import dataclass, field

import pytest
import torch
from pyro.distributions import Normal
from torch.distributions import Independent, kl_divergence, register_kl

import pyro_structvi as ps
from pyro_structvi.distributions import MatrixNormal, MeanFieldNormal, RowwiseNormal
from pyro_structvi.families import KTied, MeanField
from pyro_structvi.maps import ConvolutionMap
from pyro_structvi.testing import check_distribution, check_family, check_guide
from pyro_structvi.weights.outputs import NormalOutputs
from tests.distributions.cases import make_matrix_normal, make_rowwise
from tests.models import linear_function

MATRIX, FILTERS, FLOAT64 = (4, 3), (4, 2, 2), torch.float64


def matrix_normal(kind, batch_shape=(), event_shape=MATRIX):
    q = make_matrix_normal(batch_shape, event_shape, FLOAT64)
    return kind(q.loc, q.scale_tril_row, q.scale_tril_column)


def rowwise(kind, event_shape=MATRIX):
    q = make_rowwise((), event_shape, FLOAT64)
    return kind(q.loc, q.scale_tril)


def mean_field(kind, *batch_shape):
    shape = (*batch_shape, *MATRIX)
    return kind(torch.randn(shape), torch.rand(shape) + 0.2, event_dim=2)


# ---- distributions -------------------------------------------------------------------------------


class IndependentPositions(RowwiseNormal):
    """Scores outputs of a convolution as half as wide as it draws them."""

    def output_variance(self, linear_map, x):
        variance = super().output_variance(linear_map, x)
        return variance / 4 if isinstance(linear_map, ConvolutionMap) else variance


class ScoredByAnother(NormalOutputs):
    """Draws outputs with one distribution and scores them with another."""

    def rsample(self, sample_shape=()):
        noise = torch.randn(self._extended_shape(torch.Size(sample_shape)))
        return self.loc + 2 * self.scale * noise


class DrawnByAnother(RowwiseNormal):
    """Convolutions draw outputs by another distribution than the one of the score."""

    def image_around(self, mean, linear_map, x, bias_variance):
        kind = NormalOutputs if linear_map.is_dense else ScoredByAnother
        return kind(linear_map, mean, self.output_variance(linear_map, x), bias_variance)


class OneDrawForABatch(MatrixNormal):
    """All weights of a batch have the same noise."""

    def rsample(self, sample_shape=()):
        shape = (*sample_shape, *(1 for _ in self.batch_shape), *self.event_shape)
        return self.loc + self.scale_noise(
            torch.randn(shape).expand(*sample_shape, *self.loc.shape)
        )


class OneDrawForSeveral(MatrixNormal):
    """All draws of one call have the same noise."""

    def rsample(self, sample_shape=()):
        return super().rsample().expand(*sample_shape, *self.loc.shape)


class ReversedKL(MatrixNormal):
    """The divergence from the prior to the weight."""


@register_kl(ReversedKL, Independent)
def _reversed_independent(q, p):
    return _reversed(q, p.base_dist)


@register_kl(ReversedKL, Normal)
@register_kl(ReversedKL, torch.distributions.Normal)
def _reversed(q, p):
    own = torch.distributions.MultivariateNormal(q.loc.flatten(-2), q.covariance_matrix)
    shape = q.loc.shape
    covariance = torch.diag_embed(p.stddev.expand(shape).flatten(-2).square())
    prior = torch.distributions.MultivariateNormal(p.mean.expand(shape).flatten(-2), covariance)
    return kl_divergence(prior, own)


class VarianceAsScale(MeanFieldNormal):
    """The square of the scale multiplies the noise, by its own draws."""

    def rsample(self, sample_shape=()):
        noise = torch.randn(*sample_shape, *self.loc.shape)
        return self.loc + self.variance * noise


class ScaleAsVariance(MeanFieldNormal):
    """The variance of outputs is a sum of standard deviations."""

    def image_around(self, mean, linear_map, x, bias_variance):
        variance = linear_map(x.square(), self.as_matrix(self.stddev))
        return NormalOutputs(linear_map, mean, variance, bias_variance)


class WrongDeterminant(MatrixNormal):
    """The log determinant counts each factor once."""

    @property
    def log_det_covariance(self):
        factors = self.scale_tril_row, self.scale_tril_column
        return sum(2 * f.diagonal(dim1=-2, dim2=-1).log().sum(-1) for f in factors)


class Transposed(MatrixNormal):
    """The inverse takes the factor of the columns from the wrong side."""

    def whiten(self, difference):
        return super().whiten(difference) @ self.scale_tril_column.mT


class Detached(MatrixNormal):
    """The entropy has the right value and no gradient."""

    def entropy(self):
        return super().entropy().detach() + 0 * self.loc.sum()


class DefaultDtype(MeanFieldNormal):
    """The sum of the variances is computed in the default dtype."""

    @property
    def variance_sum(self):
        return super().variance_sum.to(torch.get_default_dtype())


class Forgetful(MeanFieldNormal):
    """A larger batch has other weights."""

    def expand(self, batch_shape, _instance=None):
        new = super().expand(batch_shape, _instance)
        new.scale = torch.ones(new.loc.shape)
        return new


FAULTS = {
    "a convolution that is scored too narrow": (
        lambda: rowwise(IndependentPositions, FILTERS),
        "`image_variance` is the variance of a convolution",
    ),
    "a convolution drawn by another distribution": (
        lambda: rowwise(DrawnByAnother, FILTERS),
        "drawn outputs of a convolution have their covariance, A A' for mean + A e",
    ),
    "one draw for a batch": (
        lambda: matrix_normal(OneDrawForABatch, (3,)),
        "weights of a batch are drawn independently of each other",
    ),
    "one draw for several": (
        lambda: matrix_normal(OneDrawForSeveral),
        "several draws are independent",
    ),
    "the KL the wrong way round": (
        lambda: matrix_normal(ReversedKL),
        "`kl_divergence(q, p)` is E_q[log q - log p]",
    ),
    "a variance for a scale": (
        lambda: mean_field(VarianceAsScale),
        "`covariance_matrix` is the covariance of draws",
    ),
    "a scale for a variance": (
        lambda: mean_field(ScaleAsVariance),
        "`image(x)` has the variance of W x",
    ),
    "a wrong determinant": (
        lambda: matrix_normal(WrongDeterminant),
        "`log_det_covariance` is the log determinant",
    ),
    "a wrong inverse": (lambda: matrix_normal(Transposed), "`mahalanobis(d)` is d' Sigma^-1 d"),
    "a missing gradient": (
        lambda: matrix_normal(Detached),
        "`entropy` has the value of the dense normal; gradient with respect to `scale_tril_row`",
    ),
    "the default dtype": (
        lambda: mean_field(DefaultDtype),
        "`variance_sum` keeps the dtype of the arguments",
    ),
    "a batch of other weights": (lambda: mean_field(Forgetful), "`expand` repeats `scale`"),
}


@pytest.mark.parametrize(("make", "rule"), FAULTS.values(), ids=FAULTS)
def test_a_wrong_distribution_fails_by_the_rule(make, rule):
    q = make()
    with pytest.raises(AssertionError, match=re.escape(rule)) as caught:
        check_distribution(q)
    text = str(caught.value)
    assert text.startswith(f"{type(q).__name__}: ")
    assert "\nExpected: " in text
    assert "\nGot: " in text


@pytest.mark.parametrize(
    "make", [matrix_normal, lambda kind: matrix_normal(kind, (3,))], ids=["plain", "batch"]
)
def test_a_right_distribution_passes_and_leaves_the_random_state(make):
    q = make(MatrixNormal)
    before = torch.get_rng_state()
    check_distribution(q)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.get_default_dtype() == FLOAT64


def test_a_wrong_definition_of_the_covariance_is_found():
    with pytest.raises(AssertionError, match="covariance of draws"):
        check_distribution(mean_field(MeanFieldNormal), covariance=lambda q: torch.eye(12))


# ---- families ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hidden(MeanField):
    """Keeps a part of the posterior outside of the parameters."""

    shifts: dict = field(default_factory=dict, compare=False, repr=False)

    def init(self, site, loc, scale):
        if not loc.is_meta:
            self.shifts["loc"] = loc.clone()
        start = super().init(site, loc, scale)
        return start | {"loc": torch.zeros_like(loc)}

    def distribution(self, site, **parameters):
        shift = self.shifts["loc"].to(parameters["loc"])
        return super().distribution(site, **parameters | {"loc": parameters["loc"] + shift})


@dataclass(frozen=True)
class VarianceAtTheStart(MeanField):
    def init(self, site, loc, scale):
        return super().init(site, loc, scale**2)


@dataclass(frozen=True)
class RandomVarianceAtTheStart(KTied):
    def init(self, site, loc, scale):
        return super().init(site, loc, scale**2)


@dataclass(frozen=True)
class SharesMemory(MeanField):
    def init(self, site, loc, scale):
        return super().init(site, loc, scale) | {"loc": loc}


@dataclass(frozen=True)
class InDefaultDtype(MeanField):
    def init(self, site, loc, scale):
        start = super().init(site, loc, scale)
        return {
            name: torch.zeros_like(v).to(torch.get_default_dtype()) + v for name, v in start.items()
        }


@dataclass(frozen=True)
class Untrained(MeanField):
    def distribution(self, site, **parameters):
        return super().distribution(site, **parameters | {"loc": parameters["loc"].detach()})


@dataclass(frozen=True, eq=False)
class Unequal(MeanField):
    __eq__, __hash__ = object.__eq__, object.__hash__


@dataclass(frozen=True)
class Unchecked(MeanField):
    def __post_init__(self):
        pass


FAMILIES = {
    Hidden: "a state dict restores the posterior in a new guide: draws that differ",
    VarianceAtTheStart: "elements are independent with the variance `init_scale` ** 2",
    RandomVarianceAtTheStart: "on average over starts the variance of an element",
    SharesMemory: "tensors of `init` share no memory with `loc` or each other",
    InDefaultDtype: "parameters, draws and medians keep the dtype torch.float32",
    Untrained: "the ELBO has a finite gradient for `posteriors.net/weight.loc`",
    Unequal: "a family equals a copy with the same options",
    Unchecked: "a bad value of the option `max_scale` is refused by name",
}


@pytest.mark.parametrize(("family", "rule"), FAMILIES.items())
def test_a_wrong_family_fails_by_the_rule(family, rule):
    with pytest.raises(AssertionError, match=re.escape(rule)) as caught:
        check_family(family())
    assert str(caught.value).startswith(f"{family.__name__}(")


# ---- guides --------------------------------------------------------------------------------------


def check_linear(kind, **options):
    data = torch.randn(6, 3), torch.randn(6, 2)
    check_guide(lambda model: kind(model, init_scale=0.3, **options), linear_function, *data)


@dataclass(frozen=True)
class Overconfident(MeanField):
    """Its KL is that of another distribution."""

    def distribution(self, site, **parameters):
        q = super().distribution(site, **parameters)
        return Narrow(q.loc, q.scale, q.event_dim, validate_args=False)


class Narrow(MeanFieldNormal):
    """Outputs are drawn without noise."""

    def image_around(self, mean, linear_map, x, bias_variance):
        return NormalOutputs(linear_map, mean, 0 * mean, bias_variance)


class Missing(ps.MeanFieldGuide):
    """Its state misses what a state dict has."""

    def load_state_dict(self, state_dict, strict=True, assign=False):
        return super().load_state_dict(self.state_dict(), strict, assign)


class MovesTheSeed(ps.MeanFieldGuide):
    def __init__(self, model, **options):
        super().__init__(model, **options)
        torch.randn(1)


def overconfident(model, **options):
    return ps.StructuredGuide(model, {"*": Overconfident()}, **options)


GUIDES = {
    overconfident: "the mean loss of `StructuredELBO` equals the mean loss of `Trace_ELBO`",
    Missing: "a state dict restores the guide: draws that differ",
    MovesTheSeed: "making a guide leaves the random state as it is",
}


@pytest.mark.parametrize(("kind", "rule"), GUIDES.items())
def test_a_wrong_guide_fails_by_the_rule(kind, rule):
    with pytest.raises(AssertionError, match=re.escape(rule)):
        check_linear(kind)
