"""Log joint densities in the coordinates of a guide."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pyro
import pyro.poutine as poutine
import torch
from torch import Tensor

from pyro_structvi._torch import kernels_for_vmap, take_apart
from pyro_structvi.sites.finding import modules_of
from pyro_structvi.sites.latent_site import LatentSite, bijection_onto
from pyro_structvi.sites.site_posterior import in_one_pass
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.weights.site_role import sample_nodes
from pyro_structvi.weights.weight_distribution import GaussianWeight

MOST_FUNCTIONS = 500  # values whose convergence is judged
PILOT_DRAWS = 100  # of a guide, for the scales of sites without a Gaussian posterior


@dataclass(frozen=True)
class _Site:
    """Coordinates of the sites of one posterior of a guide.

    ``affine`` maps coordinates of a shape to unconstrained values, and ``start`` a draw of the guide to
    its coordinates. If some coordinates change no value, ``given`` is the log density of the coordinates
    given the values, up to a constant: without it the density of all coordinates has no integral.
    """

    site: LatentSite
    shape: torch.Size
    affine: Callable[[Tensor], Tensor]
    start: Callable[[Mapping[str, Tensor]], Tensor]
    given: Callable[[Tensor, Tensor], Tensor] | None = None

    def values_at(self, coordinates: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Return the values of the model's sites, the log Jacobian, and the density given the values."""
        unconstrained, zero = self.affine(coordinates), coordinates.new_zeros(())
        given = zero if self.given is None else self.given(coordinates, unconstrained)
        if self.site.is_real:
            return self.site.split(unconstrained), zero, given
        bijection = bijection_onto(self.site.support)
        value = bijection(unconstrained)
        jacobian: Tensor = bijection.log_abs_det_jacobian(unconstrained, value).sum()
        return {self.site.name: value}, jacobian, given


def _of_noise(site: LatentSite, q: GaussianWeight) -> _Site:
    """Take the noise of a Gaussian posterior as coordinates, drawn anew for a draw."""
    shape = q.batch_shape + q.noise_shape

    def given(noise: Tensor, value: Tensor) -> Tensor:
        log_prob: Tensor = q.log_prob(value).sum()
        return -0.5 * noise.square().sum() - log_prob

    # A coordinate of a pruned element changes no value.
    is_regular = shape.numel() == q.mean.numel() and bool((q.variance > 0).all())
    return _Site(
        site,
        shape,
        lambda noise: q.mean + q.scale_noise(noise),
        lambda draw: torch.randn(shape).to(q.mean),
        None if is_regular else given,
    )


def _of_values(site: LatentSite, prior: Any, pilot: Sequence[Mapping[str, Tensor]]) -> _Site:
    """Take values in units of the posterior's standard deviation, from ``pilot`` draws.

    Points have none, and the spread of a few members measures distances of basins, not their width: the
    unit is the prior's deviation, or the unit of the site if that is unknown.
    """
    inverse = bijection_onto(site.support).inv
    draws = torch.stack([inverse(draw[site.name]) for draw in pilot])
    loc, scale = draws.mean(0), draws.std(0)
    if 2 * len(draws.unique(dim=0)) <= len(draws):  # points
        loc = scale = torch.zeros_like(scale)
        if site.is_real:
            with suppress(NotImplementedError):
                scale = prior.variance.sqrt().to(scale)
    is_known = (scale > 0) & scale.isfinite()
    scale = torch.where(is_known, scale, site.unit).expand(draws.shape[1:])
    return _Site(
        site,
        scale.shape,
        lambda coordinates: loc + scale * coordinates,
        lambda draw: (inverse(draw[site.name]) - loc) / scale,
    )


def _check_plates(samples: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` if a plate takes a part of its examples."""
    for name, node in samples.items():
        for frame in node["cond_indep_stack"]:
            if frame.full_size is not None and frame.size != frame.full_size:
                raise ValueError(
                    f"`model` must have all {frame.full_size} examples of its plate '{frame.name}' in "
                    f"each pass, but takes {frame.size} at '{name}'. Sample a model without "
                    "`subsample_size`, and pass all data."
                )


def _check_supports(latent: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` if the support of a site differs between two runs of a model."""
    for name, node in latent.items():
        first, second = (bijection_onto(run[name]["fn"].support) for run in (latent, other))
        one = torch.ones_like(first.inv(node["value"]))
        if not torch.equal(first(one), second(one)):
            raise ValueError(
                f"The support of the site '{name}' of `model` must be the same in each pass, but "
                "depends on other sites. Sample it on a fixed support, such as a share from "
                "Uniform(0, 1), and compute the value from the share."
            )


class LogJoint:
    """The log joint density of a model in ``size`` coordinates of a guide, up to a constant."""

    def __init__(
        self, model: Callable[..., Any], guide: StructuredGuide, args: tuple[Any, ...]
    ) -> None:
        self._model, self._args = model, args
        with poutine.block():
            trace = poutine.trace(model).get_trace(*args)
        samples = sample_nodes(trace)
        _check_plates(samples)
        latent = {name: node for name, node in samples.items() if not node["is_observed"]}
        # Members of a mixture lie in several modes, and one linear map does not fit them all: the
        # coordinates are then values in the units of a member's deviations.
        is_mixture = guide.num_members > 1
        one: StructuredGuide = guide.get_submodule("members.0") if is_mixture else guide
        pilot = [one.draw(local=True, number=number) for number in range(PILOT_DRAWS)]
        self._sites: list[_Site] = []
        for posterior in one.all_posteriors():
            site, q = posterior.site, posterior()
            if not set(site.names) <= latent.keys():
                continue
            has_factor = getattr(type(q), "scale_noise", None) is not GaussianWeight.scale_noise
            if isinstance(q, GaussianWeight) and has_factor and not is_mixture:
                self._sites.append(_of_noise(site, q))
            else:
                for name in site.names:
                    prior = latent[name]["fn"]
                    part = replace(site, name=name, bias=None, support=prior.support)
                    self._sites.append(_of_values(part, prior, pilot))
        self._names = {name for each in self._sites for name in each.site.names}
        missing = latent.keys() - self._names
        if missing:
            raise ValueError(
                f"The sites {sorted(missing)} of `model` are missing in `guide`. Make the guide of the "
                "model without `hide` and `block`, and pass the observations in `data`."
            )
        _check_supports(latent, sample_nodes(self._trace(dict(pilot[0]))))
        self._lengths = [each.shape.numel() for each in self._sites]
        self.size = sum(self._lengths)
        if self.size < 2:
            raise ValueError(
                "`model` must have at least two latent numbers, since a velocity of unit length turns, "
                f"but has {self.size}. Sample it with `pyro.infer.NUTS`."
            )

    def start(self, draw: Mapping[str, Tensor]) -> Tensor:
        """Return the coordinates ``(D,)`` of a draw of the guide."""
        return torch.cat([each.start(draw).flatten() for each in self._sites])

    def values_at(self, coordinates: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Return the values of all sites, the log Jacobian, and the log density given the values."""
        values: dict[str, Tensor] = {}
        jacobian = given = coordinates.new_zeros(())
        for each, part in zip(self._sites, coordinates.split(self._lengths), strict=True):
            own, own_jacobian, own_given = each.values_at(part.reshape(each.shape))
            values |= own
            jacobian, given = jacobian + own_jacobian, given + own_given
        return values, jacobian, given

    def __call__(self, coordinates: Tensor) -> Tensor:
        """Return the log density at coordinates ``(D,)``."""
        values, jacobian, given = self.values_at(coordinates)
        with pyro.validation_enabled(False):
            log_joint: Tensor = self._trace(values).log_prob_sum()
        return log_joint + jacobian + given

    def functions_of(self, positions: Tensor) -> tuple[Tensor]:
        """Return a tuple of function values at several coordinates ``(C, D)``, ``(C, F)``."""
        with kernels_for_vmap(positions):
            found = in_one_pass(self.functions_at, positions, modules_of(self._model))
        # Recurrent layers run under vmap only where a gradient is taken.
        return (torch.stack([*map(self.functions_at, positions)]) if found is None else found,)

    def functions_at(self, coordinates: Tensor) -> Tensor:
        """Return some function values at the data, ``(F,)``: the numbers that the model returns.

        A model that returns no numbers, or its observations, has the log densities of observations in
        their place, and the values of its sites if it has none of these.
        """
        values = self.values_at(coordinates)[0]
        trace = self._trace(values)
        nodes = sample_nodes(trace)
        observed = [node for name, node in nodes.items() if name not in self._names]
        returned = take_apart(trace.nodes["_RETURN"]["value"])[0]
        found = [each for each in returned if isinstance(each, Tensor) and each.is_floating_point()]
        found = [each for each in found if all(each is not node["value"] for node in observed)]
        if not found and observed:
            with pyro.validation_enabled(False):
                trace.compute_log_prob(lambda name, _: name in nodes and name not in self._names)
            found = [node["log_prob"] for node in observed]
        found = found or [*values.values()]
        flat = torch.cat([each.flatten() for each in found])
        return flat[:: max(1, math.ceil(len(flat) / MOST_FUNCTIONS))]

    def _trace(self, values: dict[str, Tensor]) -> Any:
        with poutine.block(), pyro.validation_enabled(False):
            conditioned = poutine.condition(self._model, data=values)
            return poutine.trace(conditioned).get_trace(*self._args)
