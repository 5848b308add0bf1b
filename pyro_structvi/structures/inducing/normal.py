"""Weights with their inducing weights integrated out, and KL divergences over both."""

import math
from operator import methodcaller
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributions import Laplace, Normal, kl_divergence, register_kl
from torch.special import ndtr

from pyro_structvi._checks import (
    check_broadcastable,
    check_positive,
    check_same_kind,
    checked,
    validates,
)
from pyro_structvi._torch import can_read
from pyro_structvi.linalg.matrices import (
    event_sum,
    grad_cached_property,
    identity_like,
    kronecker,
    shrink,
)
from pyro_structvi.linalg.quadrature import find_root
from pyro_structvi.structures.inducing.augmented import (
    AugmentedMatrixNormal,
    AugmentedNormal,
    ConditionalNormal,
    check_inducing,
)
from pyro_structvi.structures.kl_between import no_closed_form
from pyro_structvi.structures.matrix_normal import MatrixNormal
from pyro_structvi.structures.mean_field import MeanFieldNormal
from pyro_structvi.structures.points import PointMixture
from pyro_structvi.weights.site_distributions import (
    JoinedPrior,
    expected_neg_log_prob,
    in_batch_of,
    in_front,
    kl_to_independent,
    normal_quantiles,
    quantiles,
)
from pyro_structvi.weights.torch_distributions import map_tensors
from pyro_structvi.weights.weight_distribution import (
    GaussianWeight,
    IndependentWeight,
    WeightDistribution,
)


class InducingNormal(AugmentedNormal):
    r"""A weight with its inducing weights integrated out.

    .. math:: q(W) = \int N(W; \mu_{W|U}, \lambda^2 \Sigma_{W|U})\, q(\tilde U)\, d\tilde U, \qquad
        \tilde U_{ab} \sim N(m_{ab}, s_{ab}^2)

    See :meth:`from_inducing` for other distributions of the whitened :math:`\tilde U`.

    ``kl_divergence`` to independent normal or Laplace priors is the divergence over W and U,

    .. math:: D \left( \tfrac{\lambda^2}{2} - \log \lambda - \tfrac12 \right) +
        \mathrm{KL}(q(\tilde U) \| N(0, I)) + E_q[\log p_\sigma(W) - \log p(W)],

    an upper bound of the divergence over W, so the ELBO remains a lower bound of the evidence. Here p
    is the given prior and :math:`p_\sigma` the joint prior's marginal of W; if they are equal, the last
    term is zero. ``log_prob`` and ``entropy`` are marginal over U. They factor matrices of
    ``M_out M_in`` rows, for small sizes.

    Args:
        joint: The joint prior of W and U.
        inducing_loc: Means of the whitened inducing weights, ``(*batch, M_out, M_in)``.
        inducing_scale: Their standard deviations, positive, broadcastable to the means.
        conditional_scale: The :math:`\lambda`, positive, a number or ``(*batch,)``.
        validate_args: Whether to check arguments and values; Pyro's setting when None.

    Raises:
        ValueError: If shapes do not fit each other, or a scale is not positive.

    Example:
        >>> from pyro_structvi.distributions import AugmentedMatrixNormal
        >>> one = torch.ones(1)
        >>> joint = AugmentedMatrixNormal(torch.ones(1, 2), torch.ones(1, 3), one, one, scale=0.5)
        >>> q = InducingNormal(joint, torch.zeros(1, 1), torch.ones(1, 1), conditional_scale=1.0)
        >>> q.variance  # equal to the prior
        tensor([[0.2500, 0.2500, 0.2500],
                [0.2500, 0.2500, 0.2500]])
        >>> q.image(torch.ones(3)).covariance_matrix
        tensor([[0.7500, 0.0000],
                [0.0000, 0.7500]])

    References:
        Ritter et al. (2021), as for :class:`AugmentedMatrixNormal`, Eq. 7-9.
    """

    @checked
    def __init__(
        self,
        joint: AugmentedMatrixNormal,
        inducing_loc: Tensor,
        inducing_scale: Tensor | float,
        conditional_scale: Tensor | float,
        validate_args: bool | None = None,
    ) -> None:
        inducing_scale = joint._tensor(inducing_scale)
        if validates(validate_args):
            check_inducing("inducing_loc", inducing_loc, joint)
            name, shape = "inducing_scale", inducing_loc.shape
            check_broadcastable(name, inducing_scale, shape, "(*batch, M_out, M_in)")
            check_same_kind(name, inducing_scale, "inducing_loc", inducing_loc)
            check_positive(name, inducing_scale)
        inducing = MeanFieldNormal(inducing_loc, inducing_scale, 2, False)
        super().__init__(joint, inducing, conditional_scale, validate_args)

    @classmethod
    @checked
    def from_inducing(
        cls,
        joint: AugmentedMatrixNormal,
        inducing: WeightDistribution | None,
        conditional_scale: Tensor | float,
        validate_args: bool | None = None,
    ) -> Self:
        """Return the distribution of W for a distribution of whitened inducing weights.

        ``inducing`` is over ``(M_out, M_in)``: independent normals, a matrix normal, a full
        covariance, or a :class:`PointMixture`, whose KL is omitted, as for ensembles; None if a guide
        draws them separately, see :meth:`condition`. Other arguments are as for the class.
        """
        if inducing is not None and validates(validate_args):
            check_inducing("inducing", inducing.mean, joint)
        new = cls.__new__(cls)
        AugmentedNormal.__init__(new, joint, inducing, conditional_scale, validate_args)
        return new

    def condition(self, whitened: Tensor) -> "GivenInducing":
        """Return the distribution of W given whitened U, whose KL and density do not count U."""
        if self._validate_args:
            check_inducing("whitened", whitened, self.joint)
        point = PointMixture(whitened.unsqueeze(-3), event_dim=2, validate_args=False)
        return GivenInducing.from_inducing(self.joint, point, self.conditional_scale, False)

    # ---- marginal density of W -------------------------------------------------------------------

    @grad_cached_property
    def _in_double(self) -> Self:
        """The distribution in double precision: factors of small weights cancel in its density."""
        return map_tensors(self, methodcaller("double"))

    @property
    def log_det_covariance(self) -> Tensor:
        log_det: Tensor = torch.linalg.slogdet(self._seen_covariance).logabsdet
        return super().log_det_covariance + log_det.to(self.conditional_scale.dtype)

    def mahalanobis(self, difference: Tensor) -> Tensor:
        v, seen = self._seen(difference)
        k = torch.linalg.solve(self._residual, seen.flatten(-2).unsqueeze(-1))
        covariance = self.inducing.covariance_matrix.double()
        gain = torch.linalg.solve(self._seen_covariance, covariance)
        explained: Tensor = k.mT @ gain @ k / self.bases.squared_scale.double().square()
        return super().mahalanobis(difference) - explained[..., 0, 0].to(v.dtype)

    @grad_cached_property
    def _residual(self) -> Tensor:
        """The matrix ``I - B_r B_r' (x) B_c B_c'`` in double, ``(*batch, M_out M_in, M_out M_in)``."""
        g, f = (side.complement.double() for side in (self.joint.rows, self.joint.columns))
        return kronecker(g, identity_like(f)) + kronecker(identity_like(g) - g, f)

    @grad_cached_property
    def _seen_covariance(self) -> Tensor:
        r"""The matrix ``I + C Q``, ``Q = ((I - T)^-1 - I) / lambda^2``, C the inducing covariance."""
        identity = identity_like(self._residual)
        information = torch.linalg.solve(self._residual, identity - self._residual)
        covariance = self.inducing.covariance_matrix.double()
        return identity + covariance @ information / self.bases.squared_scale.double()

    @property
    def members(self) -> Tensor:
        return self.inducing.members

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        if isinstance(self.inducing, PointMixture):
            members = self.inducing.members.movedim(-3, 0)
            densities = [
                ConditionalNormal(self.joint, member, self.conditional_scale, False).log_prob(value)
                for member in members
            ]
            return torch.stack(densities).logsumexp(0) - math.log(len(members))
        if self.is_mixture:
            raise NotImplementedError("A mixture of normals as inducing weights has no density.")
        if self.conditional_scale.dtype == torch.double:
            return super().log_prob(value)
        density: Tensor = self._in_double.log_prob(value.double())
        return density.to(value.dtype)

    def entropy(self) -> Tensor:
        if self.is_mixture:
            raise NotImplementedError("A mixture of normals has no entropy in closed form.")
        return super().entropy()


class GivenInducing(InducingNormal):
    r"""A weight given inducing weights that are drawn at another site, with the conditional KL.

    ``log_prob`` is the weight's term of the ELBO, :math:`\log p(W) + \log q(W \mid U) - \log p(W \mid
    U)`, which is not a density; :class:`Auxiliary` has the term of U.
    """

    def log_prob(self, value: Tensor) -> Tensor:
        scale = self.conditional_scale
        distance = AugmentedNormal.mahalanobis(self, value - self.loc)
        ratio = 0.5 * distance * (scale.square() - 1)
        prior = self.joint.weight_prior().log_prob(value)
        return prior + ratio - self.event_shape.numel() * scale.log()


@quantiles.register
def _(distribution: InducingNormal, probs: Tensor) -> Tensor:
    """Return quantiles of a normal, or of an ensemble's mixture of normals of one variance."""
    inducing = distribution.inducing
    if not isinstance(inducing, PointMixture):
        if distribution.is_mixture:
            raise NotImplementedError("There is no rule for the quantiles of nested ensembles.")
        return normal_quantiles(distribution.mean, distribution.variance.sqrt(), probs)
    given = [distribution.condition(member) for member in inducing.members.movedim(-3, 0)]
    # A root is exact to the rounding of probabilities, which in single is larger than those of tails.
    probs, stddev = probs.double(), given[0].variance.sqrt().double()
    means = torch.stack([each.mean for each in given]).double()
    ends = normal_quantiles(means, stddev, probs)
    wanted = in_front(probs, stddev)

    def excess(values: Tensor) -> Tensor:
        return ndtr((values.unsqueeze(1) - means) / stddev).mean(1) - wanted

    return find_root(excess, ends.amin(1), ends.amax(1)).to(distribution.mean)


# ---- KL divergences ------------------------------------------------------------------------------


register_kl(AugmentedNormal, IndependentWeight)(kl_to_independent)
for pair in (
    (AugmentedNormal, GaussianWeight),
    (GaussianWeight, AugmentedNormal),
    (AugmentedNormal,) * 2,
):
    register_kl(*pair)(no_closed_form)  # `log_prob` is marginal, and may be a mixture's


@register_kl(InducingNormal, Normal)
def _kl_to_normals(q: InducingNormal, p: Any) -> Tensor:
    q = in_batch_of(q, p.loc)
    loc, scale = (_rows_and_columns(q, value) for value in (p.loc, p.scale))
    own, (out, size) = q.joint.column_scale, q.joint.matrix_shape
    if scale.shape[-2] == loc.shape[-2] == 1:  # the same prior in every row
        if _is_own(loc, scale, own):
            return _kl(q)
        first, second = (moment.unsqueeze(-2) for moment in _column_moments(q))
        gap = _gap(out, first, second, loc, scale, own)
    else:
        mean, variance = (m.reshape(*q.batch_shape, out, size) for m in (q.mean, q.variance))
        gap = _gap(1, mean, variance + mean.square(), loc, scale, own)
    return _kl(q, gap.sum((-2, -1)))


@register_kl(InducingNormal, Laplace)
def _kl_from_moments(q: InducingNormal, p: Any) -> Tensor:
    """KL to independent priors that are not all normal."""
    if q.is_mixture:
        raise NotImplementedError
    mean, variance, joint = q.mean, q.variance, q.joint.weight_prior()
    own = Normal(joint.loc, joint.scale, validate_args=False)
    of_prior, of_own = (expected_neg_log_prob(mean, variance, prior) for prior in (p, own))
    return _kl(q, event_sum(of_prior - of_own, len(q.event_shape)))


@register_kl(InducingNormal, JoinedPrior)
def _kl_to_joined_priors(q: InducingNormal, p: JoinedPrior) -> Tensor:
    normal = p.as_normal()
    return _kl_from_moments(q, p) if normal is None else kl_divergence(q, normal)


def _is_own(loc: Tensor, scale: Tensor, own: Tensor) -> bool:
    """Whether a normal prior is known to equal the joint prior's marginal, so that the gap is zero."""
    if not all(map(can_read, (loc, scale, own))):
        return False
    return not bool(loc.any()) and bool((scale == own).all())


def _kl(q: InducingNormal, gap: Tensor | float = 0.0) -> Tensor:
    """Return the KL given the mean under q of ``log p_joint(W) - log p(W)``."""
    scale = q.conditional_scale
    conditional = q.event_shape.numel() * (scale.square() / 2 - scale.log() - 0.5)
    if isinstance(q.inducing, PointMixture):
        return conditional + gap
    standard = Normal(scale.new_zeros(()), scale.new_ones(()), validate_args=False)
    return conditional + gap + kl_divergence(q.inducing, standard)


def _gap(
    count: int, first: Tensor, second: Tensor, loc: Tensor, scale: Tensor, own: Tensor
) -> Tensor:
    """Return the mean of ``log p_joint - log p`` of weights, from sums of their moments."""
    precision = scale.square().reciprocal()
    return 0.5 * (
        second * (precision - own.square().reciprocal())
        + (count * loc - 2 * first) * loc * precision
        + 2 * count * (scale.log() - own.log())
    )


def _rows_and_columns(q: InducingNormal, value: Tensor) -> Tensor:
    """View a prior's argument as ``(*batch, 1 or out, 1 or in)``."""
    event_dim = len(q.event_shape)
    value = shrink(value.expand(*q.batch_shape, *q.event_shape), event_dim)
    rows, *rest = value.shape[value.dim() - event_dim :]
    if any(size > 1 for size in rest):
        value = value.expand(*q.batch_shape, rows, *q.event_shape[1:])
    return value.reshape(*q.batch_shape, rows, -1)


def _column_moments(q: InducingNormal) -> tuple[Tensor, Tensor]:
    """Return the sums over rows of ``E[W]`` and of ``E[W^2]``, ``(*batch, in)`` each."""
    rows, columns, complement = q.joint.rows.basis, q.joint.columns.basis, q.joint.rows.complement
    gram = identity_like(complement) - complement
    scale, squared = q.joint.column_scale.squeeze(-2), q.conditional_scale.square().unsqueeze(-1)
    mean = q.inducing.mean
    first = (rows.sum(-1).unsqueeze(-2) @ mean @ columns).squeeze(-2)
    second = mean.mT @ gram @ mean + _spread(q.inducing, gram)
    seen = (columns * (second @ columns)).sum(-2)
    kept = q.event_shape[0] - _trace(gram).unsqueeze(-1) * columns.square().sum(-2)
    return scale * first, scale.square() * (seen + squared * kept)


def _spread(inducing: WeightDistribution, gram: Tensor) -> Tensor:
    """Return ``E[D' G D]`` for the deviation D of the inducing weights from their mean."""
    if isinstance(inducing, IndependentWeight):
        diagonal = gram.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
        return torch.diag_embed((diagonal @ inducing.variance).squeeze(-2))
    if isinstance(inducing, MatrixNormal):
        rows, columns = inducing.scale_tril_row, inducing.scale_tril_column
        return _trace(rows.mT @ gram @ rows)[..., None, None] * (columns @ columns.mT)
    shape = inducing.event_shape
    covariance = inducing.covariance_matrix.unflatten(-1, shape).unflatten(-3, shape)
    return torch.einsum("...abcd,...ac->...bd", covariance, gram)


def _trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
