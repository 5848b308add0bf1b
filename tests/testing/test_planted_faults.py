"""The kit finds planted faults, and its message names the violated rule."""

import re
from dataclasses import dataclass, field

import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro.distributions import Normal
from torch.distributions import (
    Independent,
    MultivariateNormal,
    kl_divergence,
    register_kl,
)

from pyro_structvi.distributions import (
    FullNormal,
    JoinedPrior,
    KTiedNormal,
    LowRankNormal,
    MatrixNormal,
    MeanFieldNormal,
    RowwiseNormal,
)
from pyro_structvi.families import KTied, MeanField
from pyro_structvi.maps import ConvolutionMap, DenseMap
from pyro_structvi.maps.convolution import TransposedConvolutionMap
from pyro_structvi.testing import check_distribution, check_family, random_weight
from pyro_structvi.weights.outputs import NormalOutputs
from pyro_structvi.weights.site_distributions import normal_cross_entropy, quantiles

MATRIX, FILTERS, FLOAT64 = (4, 3), (4, 2, 2), torch.float64


def fault(base, **members):
    return type("Faulty", (base,), members)


def make(kind, batch_shape=(), event_shape=MATRIX):
    if issubclass(kind, MeanFieldNormal):
        return kind(torch.randn(event_shape), torch.rand(event_shape) + 0.2)
    sizes = {"k": 2} if issubclass(kind, KTiedNormal) else {}
    return random_weight(kind, **sizes)(batch_shape, event_shape, FLOAT64)


DRAWN_WIDE = fault(  # twice as wide as they are scored
    NormalOutputs,
    rsample=lambda y, n=(): y.loc + 2 * y.scale * torch.randn(y._extended_shape(torch.Size(n))),
)


def drawn_wide(q, mean, linear_map, x):
    kind = NormalOutputs if linear_map.is_dense else DRAWN_WIDE
    return kind(linear_map, mean, q.output_variance(linear_map, x))


def one_draw_for_a_batch(q, sample_shape=()):
    shape = (*sample_shape, *(1 for _ in q.batch_shape), *q.event_shape)
    return q.loc + q.scale_noise(torch.randn(shape).expand(*sample_shape, *q.loc.shape))


def variance_as_scale(q, sample_shape=()):
    return q.loc + q.variance * torch.randn(*sample_shape, *q.loc.shape)


ONE_ROW = fault(  # of samples of two dimensions
    NormalOutputs,
    rsample=lambda y, n=(): NormalOutputs.rsample(y, n[-1:]).expand(*n, *y.loc.shape),
)


def outputs_of_one_row(q, mean, linear_map, x):
    return ONE_ROW(linear_map, mean, linear_map(x.square(), q.as_matrix(q.variance)))


def scale_as_variance(q, mean, linear_map, x):
    variance = linear_map(x.square(), q.as_matrix(q.stddev))
    return NormalOutputs(linear_map, mean, variance)


def each_factor_once(q):
    factors = q.scale_tril_row, q.scale_tril_column
    return sum(2 * f.diagonal(dim1=-2, dim2=-1).log().sum(-1) for f in factors)


def other_batch(q, batch_shape, _instance=None):
    new = MeanFieldNormal.expand(q, batch_shape, _instance)
    new.scale = torch.ones(new.loc.shape)
    return new


def in_default_dtype(q):
    return MeanFieldNormal.variance_sum.__get__(q).to(torch.get_default_dtype())


def with_kl(divergence, *priors, base=MatrixNormal):
    """Return a class with a divergence from priors of some types, or from its own."""
    kind = fault(base)
    for prior in priors or (kind,):
        register_kl(kind, prior)(divergence)
    return kind


def reversed_kl(q, p):
    own = MultivariateNormal(q.loc.flatten(-2), q.covariance_matrix)
    loc, scale = (value.expand(q.loc.shape).flatten(-2) for value in (p.mean, p.stddev))
    return kl_divergence(MultivariateNormal(loc, torch.diag_embed(scale.square())), own)


def without_trace(q, p):
    log_dets = p.log_det_covariance - q.log_det_covariance
    return 0.5 * (p.mahalanobis(q.mean - p.mean) + log_dets)


def with_wide_quantiles(base):
    """Return a class whose quantiles take variances for standard deviations."""
    kind = fault(base)
    by_variances = lambda q, probs: Normal(q.loc, q.variance).icdf(probs.reshape(-1, 1, 1))  # noqa: E731
    quantiles.register(kind, by_variances)
    return kind


class Powered(RowwiseNormal):
    """Has an option, and keeps it."""

    power = 1.0

    def __init__(self, loc, scale_tril, power=2.0, validate_args=None):
        super().__init__(loc, scale_tril, validate_args)
        self.power = power


def forgetful(q, batch_shape, _instance=None):
    new = Powered.expand(q, batch_shape, _instance)
    del new.power
    return new


def constant_input(q, linear_map, x):
    return RowwiseNormal.output_variance(q, linear_map, x.detach())


def doubled_sample(q, sample_shape=()):
    return 2 * RowwiseNormal.rsample(q, sample_shape).detach()


SHARED_ROWS = fault(
    NormalOutputs, rsample=lambda y, n=(): y.loc + y.scale * torch.randn(y.loc.shape[-1])
)


def density_of_a_stack(q, value):
    """Takes a sample shape of at most one dimension."""
    each = torch.distributions.Normal(q.loc, q.scale).log_prob(value)
    return each.flatten(1).sum(-1) if each.dim() > len(MATRIX) else each.sum()


def rows_of_one_noise(q, index):
    loc, variance = (F.embedding(index, table) for table in (q.loc, q.variance))
    return SHARED_ROWS(DenseMap(), loc, variance)


def same_factors(q, arrangement):
    if arrangement.stack:
        return None
    scales = q.row_scale, q.column_scale.flip(0)
    return KTiedNormal(arrangement(q.loc), scales[1], scales[0], validate_args=False)


def narrow_where(is_seen):
    def output_variance(q, linear_map, x):
        variance = RowwiseNormal.output_variance(q, linear_map, x)
        return variance / 4 if is_seen(linear_map) else variance

    return fault(RowwiseNormal, output_variance=output_variance)


def double_for_convolutions(q, linear_map, x):
    variance = RowwiseNormal.output_variance(q, linear_map, x)
    return variance if linear_map.is_dense else variance.double()


def without_gradient_of_bias(q, linear_map, x, bias=None):
    return RowwiseNormal.image_under(q, linear_map, x, None if bias is None else bias.detach())


def rounded_noise(q, noise):
    rounded = noise.bfloat16().to(noise) if noise.dtype == torch.float32 else noise
    return MatrixNormal.scale_noise(q, rounded)


def kl_of_a_constant_scale(q, p):
    prior = Normal(p.mean, p.stddev.detach())
    return normal_cross_entropy(q, prior) - q.entropy()


# The rule that a fault violates, and the shapes that show it.
FAULTS = {
    "`image_variance` is the variance of a convolution": (
        *(narrow_where(lambda each: isinstance(each, ConvolutionMap)), (), FILTERS),
    ),
    "`image_variance` is the variance of a dilated convolution": (
        *(narrow_where(lambda each: getattr(each, "dilation", 1) != 1), (), FILTERS),
    ),
    "`image_variance` is the variance of a transposed convolution": (
        *(narrow_where(lambda each: isinstance(each, TransposedConvolutionMap)), (), FILTERS),
    ),
    "`variance of a convolution` keeps the dtype of the arguments": (
        *(fault(RowwiseNormal, output_variance=double_for_convolutions), (), FILTERS),
    ),
    "`rsample` in single precision is close to double": (
        fault(MatrixNormal, scale_noise=rounded_noise),
    ),
    "agrees with the weight; gradient with respect to `bias`": (
        fault(RowwiseNormal, image_under=without_gradient_of_bias),
    ),
    "`log_prob` agrees with the draws; gradient with respect to `value`": (
        fault(MatrixNormal, log_prob=lambda q, value: MatrixNormal.log_prob(q, value.detach())),
    ),
    "`loc` is the mean": (
        fault(
            MeanFieldNormal,
            mean=property(lambda q: 2 * q.loc),
            rsample=lambda q, n=(): MeanFieldNormal.rsample(q, n) + q.loc,
        ),
    ),
    "for a normal p with a mean; gradient with respect to `scale of p`": (
        with_kl(kl_of_a_constant_scale, Independent, Normal, torch.distributions.Normal),
    ),
    "drawn outputs of a convolution have their covariance, A A' for mean + A e": (
        *(fault(RowwiseNormal, image_around=drawn_wide), (), FILTERS),
    ),
    "weights of a batch are drawn independently of each other": (
        *(fault(MatrixNormal, rsample=one_draw_for_a_batch), (3,)),
    ),
    "several draws are independent": (
        fault(MatrixNormal, rsample=lambda q, n=(): MatrixNormal.rsample(q).expand(*n, *MATRIX)),
    ),
    "several draws of `image(x)` are independent": (
        fault(MeanFieldNormal, image_around=outputs_of_one_row),
    ),
    "`spread(S)` keeps the dtype of the arguments": (
        fault(MatrixNormal, spread=lambda q, moment: MatrixNormal.spread(q, moment).double()),
    ),
    "`kl_divergence(q, p)` is E_q[log q - log p]": (
        with_kl(reversed_kl, Independent, Normal, torch.distributions.Normal),
    ),
    "`variance` agrees with the draws": (fault(MeanFieldNormal, rsample=variance_as_scale),),
    "`variance` of `image(x)` agrees with W x": (
        fault(MeanFieldNormal, image_around=scale_as_variance),
    ),
    "`log_det_covariance` is the log determinant": (
        fault(MatrixNormal, log_det_covariance=property(each_factor_once)),
    ),
    "`mahalanobis(d)` is d' Sigma^-1 d": (
        fault(MatrixNormal, whiten=lambda q, d: MatrixNormal.whiten(q, d) @ q.scale_tril_column.mT),
    ),
    "`entropy` agrees with the draws; gradient with respect to `scale_tril_row`": (
        fault(MatrixNormal, entropy=lambda q: MatrixNormal.entropy(q).detach() + 0 * q.loc.sum()),
    ),
    "`variance_sum` keeps the dtype of the arguments": (
        fault(MeanFieldNormal, variance_sum=property(in_default_dtype)),
    ),
    "`log_prob` agrees with the draws": (fault(MeanFieldNormal, log_prob=density_of_a_stack),),
    "`expand` repeats `scale`": (fault(MeanFieldNormal, expand=other_batch),),
    "`expand` keeps the option `power`": (fault(Powered, expand=forgetful),),
    "`sample` draws as `rsample`": (fault(RowwiseNormal, sample=doubled_sample),),
    "of `image(x)` agrees with W x; gradient with respect to `x`, which is": (
        fault(RowwiseNormal, output_variance=constant_input),
    ),
    "a joined prior has the KL of the priors of weight and bias": (
        with_kl(lambda q, p: 2 * kl_divergence(q, p.as_normal()), JoinedPrior),
    ),
    "the KL between two of the class is the KL of dense normals": (with_kl(without_trace),),
    "`quantiles` agree with the draws": (with_wide_quantiles(MatrixNormal),),
    "draws of `rows(index)` are independent": (fault(MeanFieldNormal, rows=rows_of_one_noise),),
    "stack=0))` has the covariance in another order": (
        fault(KTiedNormal, rearranged=same_factors),
    ),
}


@pytest.mark.parametrize("rule", FAULTS)
def test_a_wrong_distribution_fails_by_the_rule(rule):
    q = make(*FAULTS[rule])
    with pytest.raises(AssertionError, match=re.escape(rule)) as caught:
        check_distribution(q)
    text = str(caught.value)
    assert text.startswith(f"{type(q).__name__}: ")
    assert "\nExpected: " in text
    assert "\nGot: " in text


RIGHT = {
    "one scale": lambda: MeanFieldNormal(torch.randn(MATRIX), 0.5),
    "a scale for each row": lambda: MeanFieldNormal(torch.randn(MATRIX), torch.rand(4, 1) + 0.2),
    "a low rank with one scale": lambda: LowRankNormal(
        torch.randn(2, 3), torch.randn(2, 2, 3), 0.5
    ),
    "2 x 2": lambda: make(MeanFieldNormal, event_shape=(2, 2)),
    "one input": lambda: make(FullNormal, event_shape=(3, 1)),
    "a kernel of size 1": lambda: make(FullNormal, event_shape=(3, 2, 1)),
}


@pytest.mark.parametrize("shape", RIGHT)
def test_a_right_distribution_of_any_shape_passes(shape):
    check_distribution(RIGHT[shape]())


@pytest.mark.parametrize(
    ("kind", "batch_shape"),
    [
        *((MatrixNormal, ()), (Powered, (3,))),
        pytest.param(MatrixNormal, (3,), marks=pytest.mark.slow),
    ],
)
def test_a_right_distribution_passes_and_leaves_the_random_state(kind, batch_shape):
    q = make(kind, batch_shape)
    before = torch.get_rng_state()
    check_distribution(q)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.get_default_dtype() == FLOAT64


def test_moments_that_are_given_are_compared_with_the_draws():
    with pytest.raises(AssertionError, match="agrees with the draws"):
        check_distribution(make(MeanFieldNormal), covariance=lambda q: torch.eye(12))


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


def family(base=MeanField, **members):
    return dataclass(frozen=True, eq="__eq__" not in members)(type("Faulty", (base,), members))


def init_in_default_dtype(own, site, loc, scale):
    start, dtype = MeanField.init(own, site, loc, scale), torch.get_default_dtype()
    return {name: torch.zeros_like(value).to(dtype) + value for name, value in start.items()}


def half_trained(own, site, *, loc, log_scale):
    return MeanField.distribution(own, site, loc=(loc + loc.detach()) / 2, log_scale=log_scale)


def squared_start(base):
    return lambda own, site, loc, scale: base.init(own, site, loc, scale**2)


class WithoutJacobian(dist.transforms.AffineTransform):
    def log_abs_det_jacobian(self, x, y):
        return torch.zeros_like(x)


def doubled(own, site, *, loc, log_scale):
    base = dist.Normal(loc / 2, log_scale.exp() / 2, validate_args=False).to_event(site.event_dim)
    return dist.TransformedDistribution(base, [WithoutJacobian(0.0, 2.0)], validate_args=False)


def of_any_matrix(own, site):
    return not site.support.is_discrete and len(site.shape) >= 2


def of_any_weight(own, site):
    return site.is_real and not site.is_batch and len(site.shape) >= 2


def of_two_dimensions(own, site, *, loc, log_scale):
    return MeanFieldNormal(loc, log_scale.exp(), 2)


def of_one_row(own, site, loc, scale):
    start = MeanField.init(own, site, loc, scale)
    return start | {"log_scale": start["log_scale"][:1].expand_as(loc)}


FAMILIES = {
    "a family of vectors is checked as `Subnetwork(posterior=...)`": family(
        fits=lambda own, site: len(site.shape) == 1
    ),
    "`log_prob` is the log density of the draws": family(distribution=doubled),
    "`fits` accepts a batch of numbers, so `distribution` has its event dimensions": (
        family(
            fits=of_any_matrix,
            distribution=lambda own, site, loc, log_scale: MeanFieldNormal(
                loc, log_scale.exp(), loc.dim()
            ),
        )
    ),
    "`fits` accepts a positive matrix, so draws are in its support": (
        family(fits=lambda own, site: of_any_matrix(own, site) and not site.is_batch)
    ),
    "`fits` accepts filters, so `distribution` has its event dimensions": (
        family(fits=of_any_weight, distribution=of_two_dimensions)
    ),
    "elements of `log_scale` share no memory, as after `expand`": family(init=of_one_row),
    "a state dict restores the posterior in a new guide: draws that differ": Hidden,
    "at the start of a vector elements are independent with the variance `init_scale` ** 2": (
        family(init=squared_start(MeanField))
    ),
    "at the start of filters the variance of an element is `init_scale` ** 2 on average": (
        family(KTied, init=squared_start(KTied))
    ),
    "`init` centers the posterior of a vector at `loc`": family(
        init=lambda own, site, loc, scale: MeanField.init(own, site, loc / 2, scale)
    ),
    "tensors of `init` share no memory with `loc` or each other": family(
        init=lambda own, site, loc, scale: MeanField.init(own, site, loc, scale) | {"loc": loc}
    ),
    "parameters, draws and medians keep the dtype torch.float32": (
        family(init=init_in_default_dtype)
    ),
    "the gradient of `loc` is its derivative": family(distribution=half_trained),
    "a family equals a copy with the same options": (
        family(__eq__=object.__eq__, __hash__=object.__hash__)
    ),
    "a bad value of the option `max_scale` is refused by name": (
        family(__post_init__=lambda own: None)
    ),
}


@pytest.mark.parametrize("rule", FAMILIES)
def test_a_wrong_family_fails_by_the_rule(rule):
    with pytest.raises(AssertionError, match=re.escape(rule)) as caught:
        check_family(FAMILIES[rule]())
    assert str(caught.value).startswith(f"{FAMILIES[rule].__name__}(")
