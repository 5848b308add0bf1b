"""Weights that take their bias along, as one more column of one joint posterior."""

from collections.abc import Container, Mapping
from functools import partial

import pyro
import torch
from torch import Tensor

from pyro_structvi.sites.family import Family, MatrixFamily
from pyro_structvi.sites.latent_site import LatentSite
from pyro_structvi.weights.lazy import LazyPart, LazyWeight
from pyro_structvi.weights.point_mass import PointMass
from pyro_structvi.weights.site_role import SiteRole, SiteUse
from pyro_structvi.weights.weight_distribution import WeightDistribution


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
    fits = bias is not None and bias.is_real and not bias.is_batch and bias.shape == site.shape[:1]
    return name if fits else ""


def sample_joined(
    site: LatentSite, distribution: WeightDistribution, uses: Mapping[str, SiteUse]
) -> dict[str, Tensor]:
    """Sample a weight and its bias in a guide: their joint distribution at a separate site.

    The joint site is auxiliary, as Pyro calls one that the model does not have; the model's two sites
    hold its parts. The ``joins`` of its role names them for the objective.

    Args:
        site: The joint site.
        distribution: The distribution of ``(out, in + 1)``.
        uses: How the model uses its sites.

    Returns:
        The two values, by the names of the model's sites.
    """
    assert site.bias is not None
    counts = {uses[name].count for name in site.names}
    once = all(uses[name].gives_outputs for name in site.names)
    count = 1 if once else 0 if counts == {0} else None
    drawn_first = uses[site.names[0]].drawn_first or uses[site.names[1]].drawn_first
    use = SiteUse(site.name, uses[site.name].local_reparam, count, drawn_first)
    role = SiteRole(use, joins=site.names, is_auxiliary=True)
    joint = pyro.sample(joint_name(site), distribution, infer=role.as_infer())
    is_lazy = isinstance(joint, LazyWeight)
    parts: Mapping[str, Tensor] = _lazy_parts(site, joint, uses) if is_lazy else site.split(joint)
    event_dims = (len(site.bias.weight_shape), 1)
    return {
        name: pyro.sample(
            name, PointMass(part, dim, validate_args=False), infer=SiteRole(is_part=True).as_infer()
        )
        for (name, part), dim in zip(parts.items(), event_dims, strict=True)
    }


def _lazy_parts(
    site: LatentSite, joint: LazyWeight, uses: Mapping[str, SiteUse]
) -> dict[str, LazyPart]:
    assert site.bias is not None
    shapes = zip(site.names, (site.bias.weight_shape, joint.shape[:1]), strict=True)

    def take(name: str, value: Tensor) -> Tensor:
        return site.split(value)[name]

    return {name: LazyPart(joint, shape, partial(take, name), uses[name]) for name, shape in shapes}


def joint_name(site: LatentSite) -> str:
    """Return the name of a joint site in the guide's trace, ``<weight>+<bias>``."""
    weight, bias = site.names
    return f"{weight}+{bias.rpartition('.')[-1]}"


def join_values(weight: Tensor, bias: Tensor) -> Tensor:
    """Return ``(out, in + 1)``, the weight as a matrix with the bias as its last column."""
    return torch.cat([weight.flatten(1), bias.unsqueeze(-1)], -1)


def check_joined(found: Container[str], weight_of: Mapping[str, str]) -> None:
    """Raise a ``ValueError`` if a model samples only one of a weight and the bias joined to it.

    Args:
        found: The names of the sites that the model samples.
        weight_of: The weight of each joined bias.
    """
    for bias, weight in weight_of.items():
        if (bias in found) != (weight in found):
            raise ValueError(
                f"The weight '{weight}' is joined with its bias '{bias}', but the model samples "
                f"only one of them. Give it a family with `join_bias=False`."
            )
