"""Inducing weights, the FFG-U and FCG-U of Ritter et al. (2021)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_structvi._checks import Count, Positive, Rule
from pyro_structvi.distributions import AugmentedMatrixNormal, InducingNormal, WeightDistribution
from pyro_structvi.distributions.inducing import InducingSide
from pyro_structvi.families.bounds import capped, uncapped
from pyro_structvi.families.family import Family, MatrixFamily
from pyro_structvi.families.mean_field import MeanField
from pyro_structvi.families.members import Members
from pyro_structvi.families.site import LatentSite

DIAGONAL = 1e-3

InducingShape = Annotated[
    tuple[Count, Count], Rule("(M_out, M_in), such as (64, 64)", lambda shape: True)
]


@dataclass(frozen=True)
class InducingWeights(MatrixFamily):
    r"""Weights that a small matrix of inducing weights knows about, the rest as in the prior.

    Parameters, for a weight ``(out, in)`` and inducing weights ``(M_out, M_in)``: ``row_factor (M_out,
    out)``, ``column_factor (M_in, in)``, ``log_row_diagonal (M_out,)``, ``log_column_diagonal
    (M_in,)``, ``log_conditional_scale ()``, and those of the posterior over the whitened inducing
    weights, with ``inducing_`` in front. None is of size ``out in``.

    The start is a low-rank approximation of the weight that the guide would start at, with the
    covariance ``init_scale^2`` times the identity exactly (for a joined bias, times the ratio of the
    prior variances).

    Args:
        shape: The inducing weights' ``(M_out, M_in)``. A weight that is smaller in both directions gets
            inducing weights of the weight's shape; one smaller in one direction gets what was asked
            for, as the paper counts.
        posterior: The family of their posterior: ``MeanField()`` is FFG-U, ``FullCovariance()`` FCG-U,
            ``Members(K)`` Ensemble-U, whose K nets share all but the inducing weights.
        shared: Whether the inducing weights of all sites of this family have one posterior, of the
            matrix in which they are stacked as rows, so that layers are correlated.
        max_conditional_scale: The most that the scale :math:`\lambda` of the conditional noise may be;
            no bound when None. The prior has 1.
        prior_scale: The standard deviation of the joint prior that the weight is drawn through; the
            model's own when None. The bound on the evidence is right for any; it is best for the
            model's own.
        join_bias: Whether a layer's bias is a further column of its weight.

    Raises:
        ValueError: If an option is out of its range; when a guide is made, if the model's prior has no
            standard deviation and ``prior_scale`` is None.

    Example:
        >>> from pyro_structvi import Classifier, bayesianize
        >>> from pyro_structvi.guides import StructuredGuide
        >>> model = Classifier(bayesianize(torch.nn.Linear(400, 300), prior=0.1), num_data=10)
        >>> guide = StructuredGuide(model, {"*.weight": InducingWeights((16, 16), join_bias=True)})
        >>> sum(parameter.numel() for parameter in guide.parameters())
        11761

    References:
        Ritter, Kukla, Zhang and Li (2021), "Sparse uncertainty representation in deep learning with
        inducing weights", section 3.
    """

    shape: InducingShape = (64, 64)
    posterior: Family = field(default_factory=MeanField)
    shared: bool = False
    max_conditional_scale: Positive | None = None
    prior_scale: Positive | None = None
    keeps_factors: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if self.shared and isinstance(self.posterior, (MeanField, Members)):
            raise ValueError(
                "`shared` is for a posterior with correlations, such as MatrixNormal(), but got "
                f"{self.posterior}. Leave `shared` out: independent inducing weights have nothing to "
                "share, and the members of an ensemble are whole nets anyway."
            )

    @property
    def constants(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of the priors' scales, those of nested inducing weights too."""
        return "prior_scale", *(f"inducing_{name}" for name in self.posterior.constants)

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        """Start at the best approximation of ``loc`` that the inducing weights can express."""
        prior_scale = self.prior_scales(site)
        matrix = loc.flatten(1) / prior_scale[0]
        matrix[:, -1] *= prior_scale[0] / prior_scale[-1]
        sizes = self._inducing_sizes(*matrix.shape)
        rows, columns = _leading_directions(matrix, *sizes)
        own = scale / prior_scale[0]
        inner = {"loc": _inducing_mean(matrix, rows, columns)}
        if not self.shared:
            inner = self.posterior.init(self._inducing_site(sizes), inner["loc"], own)
        return {
            "row_factor": rows,
            "column_factor": columns,
            "log_row_diagonal": loc.new_full((sizes[0],), math.log(DIAGONAL)),
            "log_column_diagonal": loc.new_full((sizes[1],), math.log(DIAGONAL)),
            "log_conditional_scale": loc.new_tensor(uncapped(own, self.max_conditional_scale)),
            "prior_scale": loc.new_tensor(prior_scale),
            **{f"inducing_{name}": value for name, value in inner.items()},
        }

    def distribution(self, site: LatentSite, **parameters: Tensor) -> InducingNormal:
        """Return the distribution of the weight."""
        joint = AugmentedMatrixNormal(
            parameters["row_factor"],
            parameters["column_factor"],
            parameters["log_row_diagonal"].exp(),
            parameters["log_column_diagonal"].exp(),
            *parameters["prior_scale"],
            event_shape=site.shape,
            validate_args=False,
        )
        inducing = None
        if not self.shared:
            inner = {
                name.removeprefix("inducing_"): value
                for name, value in parameters.items()
                if name.startswith("inducing_")
            }
            inducing = self.posterior.distribution(
                self._inducing_site(joint.inducing_shape), **inner
            )
            if not isinstance(inducing, WeightDistribution):
                raise TypeError(
                    f"Inducing weights need a posterior over weights, but got {self.posterior}. Use "
                    "`MeanField()`, `MatrixNormal()`, `FullCovariance()` or `Members(5)`."
                )
        scale = capped(parameters["log_conditional_scale"], self.max_conditional_scale)
        return InducingNormal.from_inducing(joint, inducing, scale, validate_args=False)

    def unit(self, site: LatentSite, name: str, value: Tensor) -> float:
        """Return the unit of rows of unit length, and of inducing weights.

        These have a standard prior. Their unit is at most 1, and less where the weight would then move
        by more than its own unit, as the root mean square over its elements.
        """
        if name.startswith("inducing_"):
            whole = site.shape[0], site.shape[1:].numel()
            sizes = self._inducing_sizes(*whole)
            reach = math.sqrt(math.prod(whole) / math.prod(map(min, whole, sizes)))
            unit = min(1.0, reach * site.unit / self.prior_scales(site)[0])
            inner = replace(self._inducing_site(sizes), fan_in=(2 / unit) ** 2)
            return self.posterior.unit(inner, name.removeprefix("inducing_"), value)
        factor = name in ("row_factor", "column_factor")
        return 1 / math.sqrt(value.shape[-1]) if factor else super().unit(site, name, value)

    def prior_scales(self, site: LatentSite) -> list[float]:
        """Return the prior's standard deviation, or those of weight and bias if they differ."""
        own = [site.prior_scale] + ([] if site.bias is None else [site.bias.prior_scale])
        scales = [value if self.prior_scale is None else self.prior_scale for value in own]
        found = [scale for scale in scales if scale is not None]
        if len(found) < len(scales):
            raise ValueError(
                f"The prior of {' and '.join(site.names)} has no finite standard deviation to build "
                "inducing weights on. Pass `prior_scale=` to InducingWeights."
            )
        return found[:1] if len(set(found)) == 1 else found

    def _inducing_sizes(self, out: int, size: int) -> tuple[int, int]:
        smaller = out < self.shape[0] and size < self.shape[1]
        return (out, size) if smaller else self.shape

    def _inducing_site(self, shape: Sequence[int]) -> LatentSite:
        return LatentSite("inducing", torch.Size(shape), 2, constraints.real, prior_scale=1.0)


def _leading_directions(matrix: Tensor, out: int, size: int) -> tuple[Tensor, Tensor]:
    """Return factors ``(out, m)`` and ``(size, n)`` that see the most of a ``matrix (m, n)``.

    Their rows are the leading singular vectors and then any others, orthonormal as far as there are
    that many. On a side that is seen whole they are the axes: independent inducing weights begin as
    independent weights, which is closer to a posterior than any other basis that is not learned.
    """
    u, _, v = torch.svd_lowrank(matrix, q=min(out, size, *matrix.shape), niter=4)
    factors = []
    for vectors, count in ((u, out), (v, size)):
        length, rank = vectors.shape
        others = vectors.new_empty(length, count - rank).normal_()
        basis, _ = torch.linalg.qr(torch.cat([vectors, others[:, : length - rank]], -1))
        if count >= length:  # a basis of the whole space
            basis = torch.eye(length).to(vectors)
        spare = others[:, length - rank :] / math.sqrt(length)
        factors.append(torch.cat([basis, spare], -1).mT.contiguous())
    return factors[0], factors[1]


def _inducing_mean(matrix: Tensor, *factors: Tensor) -> Tensor:
    """Return the whitened inducing weights whose conditional mean comes closest to a matrix."""
    sides = []
    for factor in factors:
        diagonal = factor.new_full(factor.shape[:1], DIAGONAL)
        sides.append(torch.linalg.pinv(InducingSide.of(factor, diagonal).basis.double()))
    mean: Tensor = sides[0].mT @ matrix.double() @ sides[1]
    return mean.to(matrix.dtype)
