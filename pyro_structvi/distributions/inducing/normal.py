"""A weight whose inducing weights are random: the posterior of Ritter et al. (2021)."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributions import Laplace, Normal, kl_divergence, register_kl

from pyro_structvi.distributions.expected_log_prob import expected_neg_log_prob
from pyro_structvi.distributions.inducing.augmented import AugmentedNormal, check_inducing
from pyro_structvi.distributions.inducing.conditional import ConditionalNormal
from pyro_structvi.distributions.kl_to_normals import JoinedPrior, kl_weight_joined
from pyro_structvi.distributions.matrix_normal import MatrixNormal
from pyro_structvi.distributions.mean_field import MeanFieldNormal
from pyro_structvi.distributions.point_mixture import PointMixture
from pyro_structvi.distributions.weight_distribution import WeightDistribution
from pyro_structvi.linalg.shapes import shrink

if TYPE_CHECKING:
    from pyro_structvi.distributions.inducing.joint import AugmentedMatrixNormal


class InducingNormal(AugmentedNormal):
    r"""A weight with its inducing weights integrated out.

    .. math:: q(W) = \int N(W; \mu_{W|U}, \lambda^2 \Sigma_{W|U})\, q(\tilde U)\, d\tilde U, \qquad
        \tilde U_{ab} \sim N(m_{ab}, s_{ab}^2)

    The whitened :math:`\tilde U` may have another law, too; see :meth:`from_inducing`.

    ``kl_divergence`` from this to independent normal or Laplace priors is the divergence over W and U
    together,

    .. math:: D \left( \tfrac{\lambda^2}{2} - \log \lambda - \tfrac12 \right) +
        \mathrm{KL}(q(\tilde U) \| N(0, I)) + E_q[\log p_\sigma(W) - \log p(W)],

    an upper bound of the one over W, so that the evidence bound stays one. Here :math:`p_\sigma` is the
    joint's own prior of W; the last term is zero where it is p, the prior asked for. ``log_prob`` and
    ``entropy`` are those of W alone; they factor matrices of ``M_out M_in`` rows, for small sizes.

    Args:
        joint: The joint prior of W and U.
        inducing_loc: Means of the whitened inducing weights, ``(*batch, M_out, M_in)``.
        inducing_scale: Their standard deviations, positive, broadcastable to the means.
        conditional_scale: The :math:`\lambda`, positive, a number or ``(*batch,)``.
        validate_args: Whether to check arguments and the values given to ``log_prob``; Pyro's own
            setting when None.

    Raises:
        ValueError: If shapes do not fit each other, or a scale is not positive.

    Example:
        >>> from pyro_structvi.distributions import AugmentedMatrixNormal
        >>> one = torch.ones(1)
        >>> joint = AugmentedMatrixNormal(torch.ones(1, 2), torch.ones(1, 3), one, one, scale=0.5)
        >>> q = InducingNormal(joint, torch.zeros(1, 1), torch.ones(1, 1), conditional_scale=1.0)
        >>> q.variance  # this one is the prior
        tensor([[0.2500, 0.2500, 0.2500],
                [0.2500, 0.2500, 0.2500]])
        >>> q.image(torch.ones(3)).covariance_matrix
        tensor([[0.7500, 0.0000],
                [0.0000, 0.7500]])

    References:
        Ritter, Kukla, Zhang and Li (2021), "Sparse uncertainty representation in deep learning with
        inducing weights", Eq. 7-9.
    """

    def __init__(
        self,
        joint: "AugmentedMatrixNormal",
        inducing_loc: Tensor,
        inducing_scale: Tensor | float,
        conditional_scale: Tensor | float,
        validate_args: bool | None = None,
    ) -> None:
        check_inducing("inducing_loc", inducing_loc, joint, validate_args)
        inducing = MeanFieldNormal(inducing_loc, inducing_scale, 2, validate_args)
        super().__init__(joint, inducing, conditional_scale, validate_args)

    @classmethod
    def from_inducing(
        cls,
        joint: "AugmentedMatrixNormal",
        inducing: WeightDistribution | None,
        conditional_scale: Tensor | float,
        validate_args: bool | None = None,
    ) -> "InducingNormal":
        """Return the law of the weight for any law of its whitened inducing weights.

        Args:
            joint: The joint prior of W and U.
            inducing: A distribution over ``(M_out, M_in)``: independent normals, a matrix normal, one
                full covariance, or a :class:`PointMixture`, whose own KL is left out of the weight's,
                as for ensembles. None where a guide draws them elsewhere; see :meth:`given`.
            conditional_scale: The scale of the conditional noise.
            validate_args: As for the class.

        Returns:
            The law of W.
        """
        if inducing is not None:
            check_inducing("inducing", inducing.mean, joint, validate_args)
        new = cls.__new__(cls)
        AugmentedNormal.__init__(new, joint, inducing, conditional_scale, validate_args)
        return new

    def given(self, whitened: Tensor) -> "GivenInducing":
        """Return the law of the weight for whitened inducing weights that were drawn elsewhere.

        Args:
            whitened: Their draw, ``(*batch, M_out, M_in)``.

        Returns:
            The conditional law, whose KL and density count the weight alone.
        """
        return GivenInducing(self.joint, whitened, self.conditional_scale)

    @property
    def log_det_covariance(self) -> Tensor:
        """The log determinant of the covariance, ``(*batch_shape,)``, in nats."""
        log_det: Tensor = torch.linalg.slogdet(self._seen_covariance()).logabsdet
        return self._given().log_det_covariance + log_det.to(self.conditional_scale.dtype)

    def mahalanobis(self, difference: Tensor) -> Tensor:
        """Return ``d' Sigma^-1 d`` for ``d (*sample_shape, *batch_shape, *event_shape)``."""
        v, seen = self._seen(difference)
        k = torch.linalg.solve(self._residual(), seen.flatten(-2).unsqueeze(-1))
        covariance = self.inducing.covariance_matrix.double()
        gain = torch.linalg.solve(self._seen_covariance(), covariance)
        explained = (k.mT @ gain @ k)[..., 0, 0] / self._squared_lambda(0).double().square()
        distance: Tensor = self._given().mahalanobis(difference) - explained.to(v.dtype)
        return distance

    def _given(self) -> ConditionalNormal:
        """Return the law given inducing weights of zero; the spread is that of any others."""
        zeros = torch.zeros_like(self.inducing.mean)
        return ConditionalNormal(self.joint, zeros, self.conditional_scale, validate_args=False)

    def _residual(self) -> Tensor:
        """Return ``I - B_r B_r' (x) B_c B_c'`` in double, ``(*batch, M_out M_in, M_out M_in)``."""
        g, f = (side.complement.double() for side in (self.joint.rows, self.joint.columns))
        one, other = (
            torch.eye(matrix.shape[-1], dtype=g.dtype, device=g.device) for matrix in (g, f)
        )
        product = torch.einsum("...ac,...bd->...abcd", g, other) + torch.einsum(
            "...ac,...bd->...abcd", one - g, f
        )
        return product.flatten(-4, -3).flatten(-2)

    def _seen_covariance(self) -> Tensor:
        r"""Return ``I + C Q`` with ``Q = ((I - T)^-1 - I) / lambda^2`` and C the inducing covariance."""
        residual = self._residual()
        identity = torch.eye(residual.shape[-1], dtype=residual.dtype, device=residual.device)
        information = torch.linalg.solve(residual, identity - residual)
        covariance = self.inducing.covariance_matrix.double()
        seen: Tensor = identity + covariance @ information / self._squared_lambda(2).double()
        return seen

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of weights, in nats, with shape ``(*sample, *batch_shape)``.

        Raises:
            NotImplementedError: Where the inducing weights' own inducing weights are several points.
        """
        if not isinstance(self.inducing, PointMixture):
            if self._is_mixture:
                raise NotImplementedError(
                    "A mixture of normals as inducing weights has no density."
                )
            return super().log_prob(value)
        if self._validate_args:
            self._validate_sample(value)
        members = self.inducing.members.movedim(-3, 0)
        densities = []
        for member in members:
            given = ConditionalNormal(self.joint, member, self.conditional_scale, False)
            densities.append(given.log_prob(value))
        return torch.stack(densities).logsumexp(0) - math.log(len(members))

    def entropy(self) -> Tensor:
        """Return the differential entropy of W ``(*batch_shape,)``, in nats.

        Raises:
            NotImplementedError: For a mixture of several points, which has no closed form.
        """
        if self._is_mixture:
            raise NotImplementedError("A mixture of normals has no entropy in closed form.")
        return super().entropy()


class GivenInducing(InducingNormal):
    r"""A weight whose inducing weights were drawn elsewhere, with several others or as a member.

    Draws are those of the conditional law. Its KL is that of the conditional noise. Its ``log_prob`` is
    what the bound asks of it, :math:`\log p(W) + \log q(W \mid U) - \log p(W \mid U)`, and no density of
    W; see :class:`Auxiliary`, by which U itself is scored.

    Args:
        joint: The joint prior of W and U.
        whitened: The whitened inducing weights, ``(*batch, M_out, M_in)``.
        conditional_scale: The scale of the conditional noise.
    """

    def __init__(
        self, joint: "AugmentedMatrixNormal", whitened: Tensor, conditional_scale: Tensor | float
    ) -> None:
        inducing = PointMixture(whitened.unsqueeze(-3), event_dim=2, validate_args=False)
        AugmentedNormal.__init__(self, joint, inducing, conditional_scale, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the weight's part of the bound, in nats, ``(*sample, *batch_shape)``."""
        scale, whitened = self.conditional_scale, self.inducing.mean
        unscaled = ConditionalNormal(self.joint, whitened, torch.ones_like(scale), False)
        distance = unscaled.mahalanobis(value - self.loc)
        ratio = 0.5 * distance * (1 - scale.square().reciprocal())
        prior = self.joint.weight_prior().log_prob(value)
        part: Tensor = prior + ratio - self.event_shape.numel() * scale.log()
        return part


@register_kl(InducingNormal, Normal)
def _kl_inducing_normal(q: InducingNormal, p: Any) -> Tensor:
    """KL over the weight and its inducing weights, in nats, ``(*batch_shape,)``."""
    loc, scale = (_rows_and_columns(q, value) for value in (p.loc, p.scale))
    own = q._scales
    if loc.shape[-2:] == scale.shape[-2:] == own.shape[-2:] == (1, 1):  # one prior for all
        group = q.joint.columns.basis.sum(-1), q.joint.columns.gram, q._size
        return _kl(q, _gap_of_columns(q, group, loc[..., 0, 0], scale[..., 0, 0], q.joint.scale))
    if scale.shape[-2] == loc.shape[-2] == 1:  # the same prior in every row
        first, second = (moment.unsqueeze(-2) for moment in _column_moments(q))
        gap = _gap(q.event_shape[0], first, second, loc, scale, own)
    else:
        matrix = (*q.batch_shape, q.event_shape[0], -1)
        mean = q.mean.reshape(matrix)
        gap = _gap(1, mean, q.variance.reshape(matrix) + mean.square(), loc, scale, own)
    return _kl(q, gap.sum((-2, -1)))


@register_kl(InducingNormal, Laplace)
def _kl_inducing_from_moments(q: InducingNormal, p: Any) -> Tensor:
    """The same, to independent priors that are not all normal.

    Raises:
        NotImplementedError: If the mean log density of a prior is not known, for any normal or for this
            mixture of several.
    """
    if q._is_mixture:
        raise NotImplementedError
    mean, variance, joint = q.mean, q.variance, q.joint.weight_prior()
    own = Normal(joint.loc, joint.scale, validate_args=False)
    of_prior, of_own = (expected_neg_log_prob(mean, variance, prior) for prior in (p, own))
    return _kl(q, q._event_sum(of_prior - of_own))


@register_kl(InducingNormal, JoinedPrior)
def _kl_inducing_joined(q: InducingNormal, p: JoinedPrior) -> Tensor:
    """The same, to priors of a weight and its bias, of one number each in the usual case."""
    divergence: Tensor
    if p.normals() is None:
        divergence = _kl_inducing_from_moments(q, p)
        return divergence
    scalars = p.scalars()
    if scalars is None or q.batch_shape:
        divergence = kl_weight_joined(q, p)
        return divergence
    columns, joint = q.joint.columns, q.joint
    last = columns.basis[:, -1]
    outer = torch.outer(last, last)
    weight = columns.basis.sum(-1) - last, columns.gram - outer, q._size - 1
    own = joint.scale if joint.bias_scale is None else joint.bias_scale
    return _kl(
        q,
        _gap_of_columns(q, weight, *scalars[0], joint.scale)
        + _gap_of_columns(q, (last, outer, 1), *scalars[1], own),
    )


def _kl(q: InducingNormal, gap: Tensor) -> Tensor:
    """Return the KL given the mean under q of ``log p_joint(W) - log p(W)``."""
    scale = q.conditional_scale
    conditional = q.event_shape.numel() * (scale.square() / 2 - scale.log() - 0.5)
    divergence: Tensor = conditional + gap
    if isinstance(q.inducing, PointMixture):
        return divergence
    standard = Normal(scale.new_zeros(()), scale.new_ones(()), validate_args=False)
    of_inducing: Tensor = kl_divergence(q.inducing, standard)
    return divergence + of_inducing


def _gap_of_columns(
    q: InducingNormal,
    group: tuple[Tensor, Tensor, int],
    loc: Tensor,
    scale: Tensor,
    own: Tensor,
) -> Tensor:
    """Return the gap of columns with one prior, from the sum, the Gram matrix and the number of them."""
    total, outer, count = group
    rows, gram, out = q.joint.rows.basis, q.joint.rows.gram, q.event_shape[0]
    first = (rows.sum(-1).unsqueeze(-2) @ q.inducing.mean @ total.unsqueeze(-1))[..., 0, 0]
    seen = (_second_moment(q.inducing, gram) * outer).sum((-2, -1))
    second = seen + q._squared_lambda(0) * (out * count - _trace(gram) * _trace(outer))
    return _gap(out * count, own * first, own.square() * second, loc, scale, own)


def _gap(
    count: int, first: Tensor, second: Tensor, loc: Tensor, scale: Tensor, own: Tensor
) -> Tensor:
    """Return the mean of ``log p_joint - log p`` over so many weights, from their moments.

    Zero where the two priors are one.
    """
    precision = scale.square().reciprocal()
    gap: Tensor = (
        second * (precision - own.square().reciprocal())
        + (count * loc - 2 * first) * loc * precision
        + 2 * count * (scale.log() - own.log())
    )
    return 0.5 * gap


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
    (rows, columns), mean, scale = q._bases, q.inducing.mean, q.joint.column_scale
    gram = q.joint.rows.gram
    first = (rows.sum(-1).unsqueeze(-2) @ mean @ columns).squeeze(-2)
    seen = (columns * (_second_moment(q.inducing, gram) @ columns)).sum(-2)
    kept = q.event_shape[0] - _trace(gram).unsqueeze(-1) * columns.square().sum(-2)
    return scale * first, scale.square() * (seen + q._squared_lambda(1) * kept)


def _second_moment(inducing: WeightDistribution, gram: Tensor) -> Tensor:
    """Return ``E[U' G U]`` for the inducing weights U, ``(*batch, M_in, M_in)``."""
    return inducing.mean.mT @ gram @ inducing.mean + _spread(inducing, gram)


def _spread(inducing: WeightDistribution, gram: Tensor) -> Tensor:
    """Return ``E[D' G D]`` for the deviation D of the inducing weights from their mean."""
    if inducing.has_independent_elements:
        diagonal = gram.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
        return torch.diag_embed((diagonal @ inducing.variance).squeeze(-2))
    if isinstance(inducing, MatrixNormal):
        rows, columns = inducing.scale_tril_row.tril(), inducing.scale_tril_column.tril()
        return _trace(rows.mT @ gram @ rows)[..., None, None] * (columns @ columns.mT)
    shape = inducing.event_shape
    covariance = inducing.covariance_matrix.unflatten(-1, shape).unflatten(-3, shape)
    return torch.einsum("...abcd,...ac->...bd", covariance, gram)


def _trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
