"""Weights that take their bias along, as one more column of one joint posterior."""

from collections.abc import Mapping
from typing import Self

import pyro
import torch
from torch import Tensor

from pyro_structvi.distributions import PointMass, WeightDistribution
from pyro_structvi.families import Family, LatentSite, MatrixFamily
from pyro_structvi.lazy.site_role import SiteRole
from pyro_structvi.lazy.weight import LazyWeight, SiteUse, WeightStandIn
from pyro_structvi.maps import BiasColumnMap
from pyro_structvi.maps.calls import Application


def joins_with(site: LatentSite, family: Family | None, sites: Mapping[str, LatentSite]) -> str:
    """Return the name of the bias that a weight takes along, or "" if it stays by itself.

    Args:
        site: The weight's site.
        family: The family chosen for it.
        sites: All latent sites of the model.

    Returns:
        The bias of ``<name>weight<suffix>`` is ``<name>bias<suffix>``, real, of shape ``(out,)``.
    """
    if not (isinstance(family, MatrixFamily) and family.join_bias and len(site.shape) >= 2):
        return ""
    module, _, attribute = site.name.rpartition(".")
    name = f"{module}.".lstrip(".") + attribute.replace("weight", "bias")
    bias = sites.get(name)
    fits = bias is not None and bias.is_real and not bias.plates and bias.shape == site.shape[:1]
    return name if fits else ""


def sample_joined(
    site: LatentSite, distribution: WeightDistribution, uses: Mapping[str, SiteUse]
) -> dict[str, Tensor]:
    """Sample a weight and its bias in a guide: their joint law at a site of its own.

    The joint site is auxiliary, as Pyro calls one that the model does not have; the model's two sites
    hold its parts. ``infer["joins"]`` names them for the objective.

    Args:
        site: The joint site.
        distribution: The law of ``(out, in + 1)``.
        uses: How the model uses its sites.

    Returns:
        The two values, by the names of the model's sites.
    """
    assert site.bias is not None
    once = all(uses[name].may_wait for name in site.names)
    use = SiteUse(site.name, uses[site.name].local_reparam, count=1 if once else None)
    role = SiteRole(use, joins=site.names, is_auxiliary=True)
    joint = pyro.sample(joint_name(site), distribution, infer=role.as_infer())
    parts: Mapping[str, Tensor]
    if isinstance(joint, LazyWeight):
        parts = {name: LazyPart(joint, site, uses[name]) for name in site.names}
    else:
        parts = site.split(joint)
    event_dims = (len(site.bias.weight_shape), 1)
    return {
        name: pyro.sample(name, PointMass(part, event_dim))
        for (name, part), event_dim in zip(parts.items(), event_dims, strict=True)
    }


def joint_name(site: LatentSite) -> str:
    """Return the name of a joint site in the guide's trace, ``<weight>+<bias>``."""
    weight, bias = site.names
    return f"{weight}+{bias.rpartition('.')[-1]}"


class LazyPart(WeightStandIn):
    """A weight or its bias, as a part of a joint draw that has not been made yet.

    Where a linear map gets both parts of one draw, its outputs are drawn from the joint law's image.
    Any other use takes the part out of an ordinary draw.

    Args:
        whole: The joint draw, ``(out, in + 1)``.
        site: The joint site.
        use: The record of the part's own site.
    """

    whole: LazyWeight
    site: LatentSite

    def __new__(cls, whole: LazyWeight, site: LatentSite, use: SiteUse) -> Self:
        """Make the tensor that stands for the part."""
        assert site.bias is not None
        shape = site.bias.weight_shape if use.name == site.name else whole.shape[:1]
        part = cls._make(whole, shape, use)
        part.whole = whole
        part.site = site
        return part

    def draw(self) -> Tensor:
        """Return the part of the joint draw, which is made at the first call and kept."""
        return self.site.split(self.whole.draw())[self.use.name]

    def _draw_outputs(self, application: Application) -> Tensor | None:
        bias, together = application.bias, application._replace(weight=self.whole, bias=None)
        linear_map, x = application.linear_map, application.x
        whole = bias.whole if isinstance(bias, LazyPart) else None
        if whole is not self.whole or isinstance(x, WeightStandIn):
            return None
        assert not isinstance(linear_map, BiasColumnMap)
        if self.whole.distribution.takes_bias_column:
            linear_map = BiasColumnMap(linear_map)
        else:
            linear_map, x = linear_map.join_bias(x)
        return self.whole._draw_outputs(together._replace(linear_map=linear_map, x=x))


def join_values(weight: Tensor, bias: Tensor) -> Tensor:
    """Return ``(out, in + 1)``, the weight as a matrix with the bias as its last column."""
    return torch.cat([weight.flatten(1), bias.unsqueeze(-1)], -1)
