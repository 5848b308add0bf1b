"""Mean field with elements that are fixed at zero."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Normal, constraints, kl_divergence, register_kl

from pyro_structvi._checks import check_broadcastable, check_mask, checked
from pyro_structvi.sites.latent_site import LatentSite
from pyro_structvi.structures.mean_field import MeanField, MeanFieldNormal


class PrunedNormal(MeanFieldNormal):
    """Independent normals with pruned elements that are constant zeros.

    ``log_prob``, ``entropy`` and the KL to independent priors count kept elements only. Draws, moments
    and the image are of the whole weight.

    Args:
        loc: Means, ``(*batch, out, *rest)``.
        scale: Standard deviations, positive, broadcastable to ``loc``.
        kept: A boolean mask of kept elements, broadcastable to ``loc``.
        event_dim: How many trailing dimensions are the weight; all of them when None.
        validate_args: Whether to check arguments and values; Pyro's setting when None.

    Raises:
        ValueError: If ``scale`` or ``kept`` does not broadcast to ``loc``, or ``scale`` is not positive.

    Example:
        >>> q = PrunedNormal(torch.ones(3), torch.tensor(0.5), torch.tensor([True, False, True]))
        >>> q.mean, q.variance
        (tensor([1., 0., 1.]), tensor([0.2500, 0.0000, 0.2500]))

    References:
        Graves (2011), "Practical variational inference for neural networks".
    """

    arg_constraints: ClassVar = {"loc": constraints.real, "scale": constraints.nonnegative}

    @checked
    def __init__(
        self,
        loc: Tensor,
        scale: Tensor | float,
        kept: Tensor,
        event_dim: int | None = None,
        validate_args: bool | None = None,
    ) -> None:
        super().__init__(loc, scale, event_dim, validate_args)
        if self._validate_args:
            check_broadcastable("kept", kept, loc.shape, "the shape of `loc`")
            check_mask("kept", kept)
        self.loc, self.scale = (torch.where(kept, value, 0.0) for value in (loc, self.scale))

    @property
    def kept(self) -> Tensor:
        """The mask of kept elements, ``(*batch_shape, *event_shape)``."""
        return self.scale > 0

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        return self._event_sum(self._normal.log_prob(value))

    def entropy(self) -> Tensor:
        return self._event_sum(self._normal.entropy())

    @property
    def _normal(self) -> Normal:
        """The elements as torch's normals, with scale 1 for pruned ones."""
        return Normal(self.loc, torch.where(self.kept, self.scale, 1.0), validate_args=False)

    def _event_sum(self, tensor: Tensor) -> Tensor:
        """Sum over the kept elements."""
        return super()._event_sum(torch.where(self.kept, tensor, 0.0))


@register_kl(PrunedNormal, Normal)
def _kl_pruned_normal(q: PrunedNormal, p: Any) -> Tensor:
    """KL of the kept elements."""
    return q._event_sum(kl_divergence(q._normal, p))


@dataclass(frozen=True)
class PrunedMeanField(MeanField):
    """Independent normals with pruned elements that are constant zeros.

    In addition to the parameters of :class:`MeanField` it has the constant ``kept``, initially true
    everywhere, which :func:`pyro_structvi.pruning.prune_mean_field` sets.

    Args:
        max_scale: As for :class:`MeanField`.
    """

    constants: ClassVar[tuple[str, ...]] = ("kept",)

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        return {**super().init(site, loc, scale), "kept": torch.ones_like(loc, dtype=torch.bool)}

    def distribution(self, site: LatentSite, **parameters: Tensor) -> PrunedNormal:
        normal = super().distribution(site, **parameters)
        return PrunedNormal(
            normal.loc, normal.scale, parameters["kept"], site.event_dim, validate_args=False
        )
