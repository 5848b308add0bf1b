"""Weights with inducing weights: conditional, joint and marginal distributions."""

import math

import torch
from torch import Tensor
from torch.special import ndtr

from pyro_structvi._checks import (
    check_broadcastable,
    check_positive,
    check_same_kind,
    checked,
    validates,
)
from pyro_structvi.linalg.matrices import identity_like
from pyro_structvi.linalg.precision import grad_cached_property
from pyro_structvi.linalg.quadrature import bisect
from pyro_structvi.structures.ensemble import PointMixture
from pyro_structvi.structures.inducing.augmented import (
    AugmentedNormal,
    ConditionalNormal,
    check_inducing,
)
from pyro_structvi.structures.inducing.prior import InducingPrior, kronecker
from pyro_structvi.structures.mean_field import MeanFieldNormal
from pyro_structvi.weights.site_distributions import in_front, normal_quantiles, quantiles
from pyro_structvi.weights.weight_distribution import WeightDistribution


# Of one output, in multiplications. By time alone it is about 700, but gradients are the less noisy
# where outputs are drawn; docs/scripts/inducing_layers.py measures both.
class InducingNormal(AugmentedNormal):
    r"""A weight with its inducing weights integrated out.

    .. math:: q(W) = \int N(W; \mu_{W|U}, \lambda^2 \Sigma_{W|U})\, q(\tilde U)\, d\tilde U, \qquad
        \tilde U_{ab} \sim N(m_{ab}, s_{ab}^2)

    The whitened :math:`\tilde U` may have another distribution, too; see :meth:`from_inducing`.

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

    @checked
    def __init__(
        self,
        joint: InducingPrior,
        inducing_loc: Tensor,
        inducing_scale: Tensor | float,
        conditional_scale: Tensor | float,
        validate_args: bool | None = None,
    ) -> None:
        check_inducing("inducing_loc", inducing_loc, joint, validate_args)
        if validates(validate_args) and isinstance(inducing_scale, Tensor):
            shape = (*joint.batch_shape, *joint.inducing_shape)
            check_broadcastable("inducing_scale", inducing_scale, shape, "(*batch, M_out, M_in)")
            check_same_kind("inducing_scale", inducing_scale, "inducing_loc", inducing_loc)
        if validates(validate_args):
            check_positive("inducing_scale", torch.as_tensor(inducing_scale).to(inducing_loc))
        inducing = MeanFieldNormal(inducing_loc, inducing_scale, 2, validate_args)
        super().__init__(joint, inducing, conditional_scale, validate_args)

    @classmethod
    @checked
    def from_inducing(
        cls,
        joint: InducingPrior,
        inducing: WeightDistribution | None,
        conditional_scale: Tensor | float,
        validate_args: bool | None = None,
    ) -> "InducingNormal":
        """Return the distribution of the weight for any of its whitened inducing weights.

        Args:
            joint: The joint prior of W and U.
            inducing: A distribution over ``(M_out, M_in)``: independent normals, a matrix normal, one
                full covariance, or a :class:`PointMixture`, whose own KL is left out of the weight's,
                as for ensembles. None where a guide draws them elsewhere; see :meth:`condition`.
            conditional_scale: The scale of the conditional noise.
            validate_args: As for the class.

        Returns:
            The distribution of W.
        """
        if inducing is not None:
            check_inducing("inducing", inducing.mean, joint, validate_args)
        new = cls.__new__(cls)
        AugmentedNormal.__init__(new, joint, inducing, conditional_scale, validate_args)
        return new

    def condition(self, whitened: Tensor) -> "GivenInducing":
        """Return the distribution of the weight for whitened inducing weights drawn elsewhere.

        Args:
            whitened: Their draw, ``(*batch, M_out, M_in)``.

        Returns:
            The conditional distribution, whose KL and density count the weight alone.
        """
        if self._validate_args:
            check_inducing("whitened", whitened, self.joint, True)
        return GivenInducing(self.joint, whitened, self.conditional_scale)

    # ---- density of W alone ----------------------------------------------------------------------

    @property
    def log_det_covariance(self) -> Tensor:
        """The log determinant of the covariance, ``(*batch_shape,)``, in nats."""
        log_det: Tensor = torch.linalg.slogdet(self._seen_covariance).logabsdet
        return self._around_zero.log_det_covariance + log_det.to(self.conditional_scale.dtype)

    def mahalanobis(self, difference: Tensor) -> Tensor:
        """Return ``d' Sigma^-1 d`` for ``d (*sample_shape, *batch_shape, *event_shape)``."""
        v, seen = self._seen(difference)
        k = torch.linalg.solve(self._residual, seen.flatten(-2).unsqueeze(-1))
        covariance = self.inducing.covariance_matrix.double()
        gain = torch.linalg.solve(self._seen_covariance, covariance)
        explained = (k.mT @ gain @ k / self.bases.squared_scale.double().square())[..., 0, 0]
        distance: Tensor = self._around_zero.mahalanobis(difference) - explained.to(v.dtype)
        return distance

    @grad_cached_property
    def _around_zero(self) -> ConditionalNormal:
        """The distribution given inducing weights of zero, with the covariance given any others."""
        zeros = torch.zeros_like(self.inducing.mean)
        return ConditionalNormal(self.joint, zeros, self.conditional_scale, validate_args=False)

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
        seen: Tensor = identity + covariance @ information / self.bases.squared_scale.double()
        return seen

    @property
    def members(self) -> Tensor:
        """The members of the inducing weights ``(*batch, K, M_out, M_in)``, of an ensemble."""
        members: Tensor = self.inducing.members
        return members

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of weights, in nats, with shape ``(*sample, *batch_shape)``.

        Raises:
            NotImplementedError: Where the inducing weights' own inducing weights are several points.
        """
        if not isinstance(self.inducing, PointMixture):
            if self.is_mixture:
                raise NotImplementedError(
                    "A mixture of normals as inducing weights has no density."
                )
            return super().log_prob(value)
        if self._validate_args:
            self._validate_sample(value)
        members = self.inducing.members.movedim(-3, 0)
        densities = [
            ConditionalNormal(self.joint, member, self.conditional_scale, False).log_prob(value)
            for member in members
        ]
        return torch.stack(densities).logsumexp(0) - math.log(len(members))

    def entropy(self) -> Tensor:
        """Return the differential entropy of W ``(*batch_shape,)``, in nats.

        Raises:
            NotImplementedError: For a mixture of several points, which has no closed form.
        """
        if self.is_mixture:
            raise NotImplementedError("A mixture of normals has no entropy in closed form.")
        return super().entropy()


class GivenInducing(InducingNormal):
    r"""A weight whose inducing weights were drawn elsewhere, with several others or as a member.

    Draws come from the conditional distribution, and the KL is the KL of the conditional noise. Its
    ``log_prob`` is what the bound asks of it, :math:`\log p(W) + \log q(W \mid U) - \log p(W \mid U)`,
    not a density of W; see :class:`Auxiliary`, by which U itself is scored.

    Args:
        joint: The joint prior of W and U.
        whitened: The whitened inducing weights, ``(*batch, M_out, M_in)``.
        conditional_scale: The scale of the conditional noise.
    """

    def __init__(
        self, joint: InducingPrior, whitened: Tensor, conditional_scale: Tensor | float
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


@quantiles.register
def _(distribution: InducingNormal, probs: Tensor) -> Tensor:
    """Of a normal, or of the mixture of normals of one variance that an ensemble makes."""
    inducing = distribution.inducing
    if not isinstance(inducing, PointMixture):
        if distribution.is_mixture:
            raise NotImplementedError("There is no rule for the quantiles of nested ensembles.")
        return normal_quantiles(distribution.mean, distribution.variance.sqrt(), probs)
    given = [distribution.condition(member) for member in inducing.members.movedim(-3, 0)]
    means, stddev = torch.stack([each.mean for each in given]), given[0].variance.sqrt()
    ends = normal_quantiles(means, stddev, probs)
    wanted = in_front(probs, stddev)

    def is_below(values: Tensor) -> Tensor:
        found: Tensor = ndtr((values.unsqueeze(1) - means) / stddev).mean(1) < wanted
        return found

    return bisect(is_below, ends.amin(1), ends.amax(1))
