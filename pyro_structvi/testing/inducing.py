"""Inducing weights in the registry: random arguments, dense moments, guides."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_structvi.structures.inducing.augmented import AugmentedMatrixNormal, ConditionalNormal
from pyro_structvi.structures.inducing.family import InducingWeightGuide
from pyro_structvi.structures.inducing.normal import InducingNormal
from pyro_structvi.structures.mean_field import MeanFieldNormal
from pyro_structvi.testing.entry import (
    GuideVariant,
    Make,
    Place,
    Shape,
    Structure,
    augmented_covariance,
    conditional_moments,
    kl_with_inducing_weights,
    positive,
)
from pyro_structvi.weights.weight_distribution import WeightDistribution

INDUCING = (3, 2)


def make_joint(
    batch_shape: Shape,
    event_shape: Shape,
    dtype: torch.dtype,
    bias_scale: bool = False,
    inducing_shape: tuple[int, int] = INDUCING,
) -> AugmentedMatrixNormal:
    """Return a joint prior with random arguments."""
    sizes = event_shape[0], torch.Size(event_shape[1:]).numel()
    factors = (
        torch.randn(*batch_shape, *shape, dtype=dtype) / size**0.5
        for size, *shape in zip(sizes, inducing_shape, sizes, strict=True)
    )
    diagonals = (positive(*batch_shape, size, dtype=dtype) for size in inducing_shape)
    scales = (positive(*batch_shape, dtype=dtype) for _ in range(1 + bias_scale))
    return AugmentedMatrixNormal(*factors, *diagonals, *scales, event_shape=event_shape)


def make_conditional(
    batch_shape: Shape, event_shape: Shape, dtype: torch.dtype
) -> ConditionalNormal:
    """Return a weight given random inducing weights."""
    joint = make_joint(batch_shape, event_shape, dtype, bias_scale=True)
    whitened = torch.randn(*batch_shape, *INDUCING, dtype=dtype)
    return ConditionalNormal(joint, whitened, positive(*batch_shape, dtype=dtype))


def make_inducing(make_posterior: Make, bias_scale: bool) -> Make:
    """Return what makes a weight from a posterior of its inducing weights."""

    def make(batch_shape: Shape, event_shape: Shape, dtype: torch.dtype) -> WeightDistribution:
        joint = make_joint(batch_shape, event_shape, dtype, bias_scale)
        inducing = make_posterior(batch_shape, INDUCING, dtype)
        scale = positive(*batch_shape, dtype=dtype)
        if isinstance(inducing, MeanFieldNormal):
            return InducingNormal(joint, inducing.loc, inducing.scale, scale)
        return InducingNormal.from_inducing(joint, inducing, scale)

    return make


def prior_scale(joint: AugmentedMatrixNormal) -> Tensor:
    """Return the standard deviation of each column, ``(*batch_shape, in)``."""
    columns = [joint.scale for _ in range(joint.column_factor.shape[-1])]
    if joint.bias_scale is not None:
        columns[-1] = joint.bias_scale
    return torch.stack(columns, -1)


def joint_covariance(joint: AugmentedMatrixNormal) -> Tensor:
    """Return the covariance of ``vec(W)`` followed by ``vec(U)``."""
    return augmented_covariance(
        joint.row_factor,
        joint.column_factor,
        joint.row_diagonal,
        joint.column_diagonal,
        prior_scale(joint),
    )


class InducingOracle:
    """The moments of a weight whose inducing weights have a known covariance.

    Args:
        covariance: The covariance of row-major whitened inducing weights, from their distribution.
    """

    def __init__(self, covariance: Callable[[Any], Tensor]) -> None:
        self._of_inducing = covariance

    def _parts(self, q: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return gain and noise of the weight given u, and the moments of u."""
        gain, noise = conditional_moments(joint_covariance(q.joint), q.event_shape.numel())
        noise = noise * q.conditional_scale.square()[..., None, None]
        return gain, noise, q.inducing.mean.flatten(-2), self._of_inducing(q.inducing)

    def mean(self, q: Any) -> Tensor:
        """Return the mean ``(*batch_shape, *event_shape)``."""
        gain, _, mean, _ = self._parts(q)
        return (gain @ mean.unsqueeze(-1)).reshape(q.batch_shape + q.event_shape)

    def shared_covariance(self, q: Any) -> Tensor:
        """Return the part of the covariance that comes from the inducing weights."""
        gain, _, _, covariance = self._parts(q)
        return gain @ covariance @ gain.mT

    def covariance(self, q: Any) -> Tensor:
        """Return the covariance ``(*batch_shape, D, D)``."""
        return self.shared_covariance(q) + self._parts(q)[1]

    def kl(self, q: Any, loc: Tensor, scale: Tensor) -> Tensor:
        """Return the KL over weight and inducing weights, for a prior's ``loc`` and ``scale``."""
        gain, noise, mean, covariance = self._parts(q)
        own = prior_scale(q.joint).unsqueeze(-2)
        own = own.expand(*q.batch_shape, q.event_shape[0], own.shape[-1]).flatten(-2)
        loc, scale = (value.flatten(-len(q.event_shape)) for value in (loc, scale))
        return kl_with_inducing_weights(mean, covariance, gain, noise, own, loc, scale)


# ---- entries of the registry ---------------------------------------------------------------------


def inducing_structure(
    name: str,
    make: Make,
    covariance: Callable[[Any], Tensor],
    guides: tuple[GuideVariant, ...] = (),
    kl_is_dense: bool = False,
) -> Structure:
    """Return the entry for a posterior of inducing weights with a covariance."""
    oracle = InducingOracle(covariance)
    return Structure(
        name,
        make,
        oracle.covariance,
        mean=oracle.mean,
        kl_with_inducing=None if kl_is_dense else oracle.kl,
        shared_covariance=oracle.shared_covariance,
        serves_groups=False,
        has_forward_mode=not kl_is_dense,
        guides=guides,
    )


def inducing_guide(
    name: str,
    used_in: tuple[Place, ...],
    inducing_shape: tuple[int, int],
    of_posterior: Callable[[int, int], int] = lambda m, n: 2 * m * n,
    **options: Any,
) -> GuideVariant:
    """Return a guide with the parameters of Table 1 of Ritter et al. (2021).

    The two diagonals of Z and the scale of the noise are added to the table.
    """

    def num_parameters(out: int, size: int) -> int:
        is_small = out <= inducing_shape[0] and size <= inducing_shape[1]
        rows, columns = (out, size) if is_small else inducing_shape
        return rows * (out + 1) + columns * (size + 1) + of_posterior(rows, columns) + 1

    options = {"inducing_shape": inducing_shape, **options}
    return GuideVariant(name, InducingWeightGuide, num_parameters, options, used_in)
