"""The distributions of all sites, their joint samples, and biases joined to weights."""

import warnings
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import pyro
import torch
from torch import Tensor
from torch.nn import Parameter

from pyro_structvi.sites.family import Family, MatrixFamily
from pyro_structvi.sites.latent_site import LatentSite
from pyro_structvi.sites.site_posterior import Coupling, How, SharedPosterior, SitePosterior
from pyro_structvi.weights.lazy import LazyWeight
from pyro_structvi.weights.placeholders import LazySlice
from pyro_structvi.weights.site_distributions import PointMass, quantiles
from pyro_structvi.weights.site_role import SiteRole, SiteUse
from pyro_structvi.weights.torch_distributions import in_single
from pyro_structvi.weights.weight_distribution import FactoredWeight, WeightDistribution

T = TypeVar("T")


class JointPosterior:
    """The distributions of all sites of a guide at its current parameters.

    Each distribution is made once, so that all samples share its factors. An objective makes a new
    object after the parameters have changed.
    """

    def __init__(
        self,
        posteriors: Sequence[SitePosterior],
        couplings: Sequence[Coupling],
        uses: Mapping[str, SiteUse],
    ) -> None:
        self._posteriors, self._couplings, self._uses = posteriors, couplings, uses
        shared = [each.posterior for each in couplings if isinstance(each, SharedPosterior)]
        self._every = (*posteriors, *shared)
        self._at = {each.site.name: each() for each in self._every}
        self._draws_in_turn = False

    def factorize(self) -> None:
        """Compute the factors that samples share, before an objective maps over samples."""
        for distribution in self._at.values():
            if isinstance(distribution, FactoredWeight):
                distribution.factorize()

    def stacked(self, count: int) -> Tensor:
        """Return numbers of samples, to map over by vmap."""
        return torch.arange(count)

    def sample(
        self,
        plates: Mapping[str, Any],
        number: Tensor | int | None = None,
        left_out: Collection[str] = (),
    ) -> dict[str, Tensor]:
        """Sample the sites of a guide by ``pyro.sample``."""
        values: dict[str, Tensor] = {}
        at = self._at | {
            own.site.name: own.of_examples(plates)
            for own in self._posteriors
            if own.site.name not in left_out
            and any(plates[each.name].subsample_size != each.size for each in own.site.plates)
        }
        for site, distribution in self.conditionals("sample", True, number, at):
            if site.name in left_out:
                continue
            if site.bias is not None:
                values |= sample_joined(site, distribution, self._uses)
                continue
            with ExitStack() as stack:
                for plate in site.plates:
                    stack.enter_context(plates[plate.name])
                infer = SiteRole(self._uses[site.name]).as_infer()
                values[site.name] = pyro.sample(site.name, distribution, infer=infer)
        return values

    def draw(self, local: bool = False, number: Tensor | int | None = None) -> dict[str, Tensor]:
        """Draw all sites once, as ordinary tensors; see :meth:`StructuredGuide.draw`."""
        values: dict[str, Tensor] = {}
        for site, distribution in self.conditionals("draw", local, number):
            values |= site.split(distribution.rsample())
        return values

    def draw_many(self, numbers: Sequence[int], local: bool = False) -> dict[str, Tensor]:
        """Draw all sites once for each number, stacked; vectorized if torch supports that."""
        state = [value for own in self._every for value in (*own.parameters(), *own.buffers())]
        if len(numbers) > 1 and not self._draws_in_turn and are_plain(state):
            self.factorize()
            each = torch.tensor(numbers, device=state[0].device)
            draws = in_one_pass(partial(self.draw, local), each)
            if draws is not None:
                return draws
            self._draws_in_turn = True
        return stack_draws([self.draw(local, number) for number in numbers])

    def median(self) -> dict[str, Tensor]:
        """Return the median of each site; see :meth:`StructuredGuide.median`."""
        medians: dict[str, Tensor] = {}
        for site, distribution in self.conditionals("mean", True):
            medians |= site.split(median_of(distribution).clone())
        return medians

    def quantiles(self, probs: Sequence[float] | Tensor) -> dict[str, Tensor]:
        """Return quantiles of each site's elements; see :meth:`StructuredGuide.quantiles`."""
        asked = probabilities(probs)
        found: dict[str, Tensor] = {}
        for site, own in self.conditionals("marginals", True):
            distribution = in_single(own)
            mean = getattr(distribution, "base_dist", distribution).mean
            try:
                values = quantiles(distribution, asked.to(mean))
            except NotImplementedError as error:
                raise NotImplementedError(
                    f"The posterior of the site '{site.name}' has no quantiles in closed form. Take "
                    "those of draws: `guide.draw()`."
                ) from error
            found |= site.split(values)
        return found

    def conditionals(
        self,
        how: How,
        local: bool = False,
        number: Tensor | int | None = None,
        at: Mapping[str, Any] | None = None,
    ) -> Iterator[tuple[LatentSite, Any]]:
        """Yield each site and its distribution conditioned on the values that couplings share."""
        at = self._at if at is None else at
        conditioned: dict[str, Any] = {}
        for coupling in self._couplings:
            conditioned |= coupling.condition(how, at, number)
        for site in (posterior.site for posterior in self._posteriors):
            if local or not site.is_local:
                yield site, conditioned.get(site.name, at[site.name])


def probabilities(probs: Sequence[float] | Tensor) -> Tensor:
    """Return the argument ``quantiles`` in double precision, ``(num,)``."""
    asked = torch.as_tensor(probs, dtype=torch.float64).reshape(-1)
    if not bool(((asked >= 0) & (asked <= 1)).all()):
        raise ValueError(f"`quantiles` must be numbers from 0 to 1, but got {probs}.")
    return asked


def median_of(distribution: Any) -> Tensor:
    """Return the median of a posterior of this library, or the mean of a mixture."""
    value: Tensor = getattr(distribution, "base_dist", distribution).mean
    for transform in getattr(distribution, "transforms", ()):
        value = transform(value)
    return value


def are_plain(values: Iterable[Any]) -> bool:
    """Whether no value is a tensor subclass, such as a sharded tensor, which vmap may not support."""
    tensors = (value for value in values if isinstance(value, Tensor))
    return all(type(tensor) in (Tensor, Parameter) for tensor in tensors)


def in_one_pass(run: Callable[[Any], T], values: Any) -> T | None:
    """Map a function over stacked samples by vmap, each with separate random numbers.

    Validation is off, since values are not accessible under vmap.
    """
    with warnings.catch_warnings(), pyro.validation_enabled(False):
        warnings.filterwarnings("ignore", "There is a performance drop")
        try:
            results: T = torch.func.vmap(run, randomness="different")(values)
        except Exception:
            return None
    return results


def stack_draws(draws: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return draws by site in one dictionary, ``(len(draws), *shape)`` each."""
    if len(draws) == 1:
        return {name: value.unsqueeze(0) for name, value in draws[0].items()}
    return {name: torch.stack([draw[name] for draw in draws]) for name in draws[0]}


def joins_with(site: LatentSite, family: Family | None, sites: Mapping[str, LatentSite]) -> str:
    """Return the name of the bias to join with a weight, or "" for none.

    The bias of ``<name>weight<suffix>`` is ``<name>bias<suffix>``, real, of shape ``(out,)``. A family
    that does not fit the weight with a further column has none.
    """
    if not (isinstance(family, MatrixFamily) and family.join_bias and len(site.shape) >= 2):
        return ""
    module, _, attribute = site.name.rpartition(".")
    name = f"{module}.".lstrip(".") + attribute.replace("weight", "bias")
    bias = sites.get(name)
    if bias is None or not bias.is_real or bias.is_batch or bias.shape != site.shape[:1]:
        return ""
    return name if family.fits(site.join_bias(bias)) else ""


def sample_joined(
    site: LatentSite, distribution: WeightDistribution, uses: Mapping[str, SiteUse]
) -> dict[str, Tensor]:
    """Sample a weight and its bias in a guide, at an auxiliary site of their joint distribution.

    The two sites of the model are point masses at slices of the joint sample.
    """
    assert site.bias is not None
    counts = {uses[name].count for name in site.names}
    once = all(uses[name].allows_outputs for name in site.names)
    count = 1 if once else 0 if counts == {0} else None
    eager_reason = uses[site.names[0]].eager_reason or uses[site.names[1]].eager_reason
    use = SiteUse(site.name, uses[site.name].local_reparam, count, eager_reason)
    role = SiteRole(use, joins=site.names, is_auxiliary=True)
    joint = pyro.sample(joint_name(site), distribution, infer=role.as_infer())
    shapes = dict(zip(site.names, (site.bias.weight_shape, joint.shape[:1]), strict=True))
    parts: Mapping[str, Tensor]
    if isinstance(joint, LazyWeight):
        parts = {
            name: LazySlice(joint, shape, partial(_part, site, name), uses[name])
            for name, shape in shapes.items()
        }
    else:
        parts = site.split(joint)
    infer = SiteRole(is_slice=True).as_infer()
    return {
        name: pyro.sample(
            name, PointMass(part, len(shapes[name]), validate_args=False), infer=infer
        )
        for name, part in parts.items()
    }


def _part(site: LatentSite, name: str, value: Tensor) -> Tensor:
    return site.split(value)[name]


def joint_name(site: LatentSite) -> str:
    """Return the name ``<weight>+<bias>`` of a joint site in the trace of the guide."""
    weight, bias = site.names
    return f"{weight}+{bias.rpartition('.')[-1]}"


def check_joined(found: Container[str], weight_of: Mapping[str, str]) -> None:
    """Raise a ``ValueError`` if a model samples only one of a weight and its joined bias."""
    for bias, weight in weight_of.items():
        if (bias in found) != (weight in found):
            raise ValueError(
                f"The weight '{weight}' is joined with its bias '{bias}', but the model samples "
                f"only one of them. Give it a family with `join_bias=False`."
            )
