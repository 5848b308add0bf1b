"""All sites of a guide together, at one state of its parameters: their distributions and joint draws."""

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import pyro
import torch
from torch import Tensor
from torch.nn import Parameter

from pyro_structvi.sites.coupling import Coupling, How, SharedPosterior
from pyro_structvi.sites.joined_bias import sample_joined
from pyro_structvi.sites.latent_site import LatentSite
from pyro_structvi.sites.site_posterior import SitePosterior
from pyro_structvi.weights.quantiles import quantiles
from pyro_structvi.weights.site_role import SiteRole, SiteUse
from pyro_structvi.weights.torch_distributions import in_single
from pyro_structvi.weights.weight_distribution import WeightDistribution

T = TypeVar("T")


class JointPosterior:
    """The distributions of a guide's sites at its parameters as they stand, and what is drawn from them.

    Each distribution is made once, so that whatever it factors is shared by all draws. An objective
    takes one for a step, and a new one after the parameters have changed.

    Args:
        posteriors: The posteriors of the sites, in the order in which they are sampled.
        couplings: What sites draw together.
        uses: How the model uses each of its sites.
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
        """Factor what draws need, before an objective maps over draws."""
        for distribution in self._at.values():
            if isinstance(distribution, WeightDistribution):
                distribution.factorize()

    def sample(
        self,
        plates: Mapping[str, Any],
        number: Tensor | int | None = None,
        left_out: Collection[str] = (),
    ) -> dict[str, Tensor]:
        """Sample every site but those left out, as a guide does.

        Args:
            plates: Pyro's plates by name; of one that is subsampled its examples are sampled.
            number: As for :meth:`given`.
            left_out: The sites that are left to the model.
        """
        values: dict[str, Tensor] = {}
        drawn = {name for name, plate in plates.items() if plate.subsample_size != plate.size}
        at = self._at | {
            posterior.site.name: posterior.of_examples(plates)
            for posterior in self._posteriors
            if posterior.site.name not in left_out
            and drawn.intersection(plate.name for plate in posterior.site.plates)
        }
        for site, distribution in self.given("sample", True, number, at):
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
        for site, distribution in self.given("draw", local, number):
            values |= site.split(distribution.rsample())
        return values

    def draw_many(self, numbers: Sequence[int], local: bool = False) -> dict[str, Tensor]:
        """Draw all sites once for each number, stacked; together, where torch can vectorize that."""
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
        for site, distribution in self.given("mean", True):
            medians |= site.split(median_of(distribution).clone())
        return medians

    def quantiles(self, probs: Sequence[float] | Tensor) -> dict[str, Tensor]:
        """Return quantiles of each site's elements; see :meth:`StructuredGuide.quantiles`."""
        asked = torch.as_tensor(probs, dtype=torch.float64).reshape(-1)
        if not bool(((asked >= 0) & (asked <= 1)).all()):
            raise ValueError(f"`quantiles` must be numbers from 0 to 1, but got {probs}.")
        found: dict[str, Tensor] = {}
        for site, own in self.given("marginals", True):
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

    def given(
        self,
        how: How,
        local: bool = False,
        number: Tensor | int | None = None,
        at: Mapping[str, Any] | None = None,
    ) -> Iterator[tuple[LatentSite, Any]]:
        """Yield each site and its distribution given what sites draw together.

        Args:
            how: Whether that is sampled as a part of a guide, drawn, or averaged; or whether each site's
                distribution is by itself.
            local: Whether to yield the sites that belong to single examples too.
            number: Which of several passes it is: members of an ensemble take turns. None for any.
            at: The distributions, where they are not those of all examples.
        """
        at = self._at if at is None else at
        given: dict[str, Any] = {}
        for coupling in self._couplings:
            given |= coupling.given(how, at, number)
        for site in (posterior.site for posterior in self._posteriors):
            if local or not site.is_local:
                yield site, given.get(site.name, at[site.name])


def median_of(distribution: Any) -> Tensor:
    """Return the median of a posterior of this library; of a mixture its mean."""
    value: Tensor = getattr(distribution, "base_dist", distribution).mean
    for transform in getattr(distribution, "transforms", ()):
        value = transform(value)
    return value


def are_plain(values: Iterable[Any]) -> bool:
    """Whether no value is a tensor of a subclass, such as a sharded one, of which vmap may not know."""
    tensors = (value for value in values if isinstance(value, Tensor))
    return all(type(tensor) in (Tensor, Parameter) for tensor in tensors)


def in_one_pass(run: Callable[[Any], T], values: Any) -> T | None:
    """Run a function of a draw at several that are stacked, each with random numbers of its own.

    Operations that torch runs one after another do not warn: what it cannot map at all would not either.
    Nothing is validated, since nothing can look at values.

    Returns:
        What the function returns, stacked; None if it raises anything. What torch cannot map may raise
        any error, a user's own too, and what is wrong in any case a single draw says itself.
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
