"""Mixtures of posteriors in several basins, and mixtures of points: deep ensembles."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pyro_structvi._checks import Count, Program, brief, checked
from pyro_structvi._torch import inside_jit_trace
from pyro_structvi.linalg.matrices import at_least_single
from pyro_structvi.sites.autoguide import OwningAutoGuide, check_not_given, declare_parameters
from pyro_structvi.sites.family import GuideOptions, as_tensor
from pyro_structvi.sites.finding import separate_randomness, starting_at
from pyro_structvi.sites.latent_site import LatentSite, bijection_onto
from pyro_structvi.sites.report import GuideReport, report_on
from pyro_structvi.sites.site_posterior import (
    How,
    JointPosterior,
    SitePosterior,
    are_plain,
    check_no_plates_around,
    probabilities,
    stack_draws,
)
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.structures.points import MAPGuide, are_points
from pyro_structvi.weights.site_role import SiteUse


class MixtureGuide(StructuredGuide):
    r"""A mixture of K guides of the same model, each in a separate basin.

    .. math:: q(W) = \sum_k w_k q_k(W), \qquad
        \mathrm{ELBO}(q) \le \sum_k w_k \mathrm{ELBO}(q_k) - \sum_k w_k \log w_k

    The two sides are equal if the members do not overlap, as in separate basins of a net. Members are
    trained independently, at once: under :class:`~pyro_structvi.StructuredELBO`, and therefore in
    :func:`~pyro_structvi.fit`, a step trains all of them, and the loss is the mean of their losses.
    Other objectives train one random member in a step. The weights stay equal until
    :func:`~pyro_structvi.weigh_by_bound` or :func:`~pyro_structvi.weigh_by_stacking` sets them.
    Members of different families or options need ``vectorize=False``.

    Members start in different places: at the medians of ``starts`` if there are any; otherwise
    member 0 has the initial means of the model, and every other member has them in random order
    within each site, plus 1 % of noise. Members share parameters and buffers of the model that are not
    sites.

    Args:
        model: A ``PyroModule`` or any callable with latent sites.
        make_guide: A function from the model to a :class:`~pyro_structvi.guides.StructuredGuide`, such
            as ``KTiedGuide`` or ``lambda model: KTiedGuide(model, rank=3)``.
        size: The number K of members.
        vectorize: Whether a step runs all members in one pass, by :func:`torch.func.vmap`: faster for
            small nets, with K times the memory. It does not support layers that update running
            statistics.
        starts: A mixture of K guides whose medians the members start at, such as a fitted
            :class:`EnsembleGuide`.

    Attributes:
        members: The guides.
        weights: Their weights ``(K,)``, which sum to 1; draws and medians by other ones are an error.

    Raises:
        TypeError: If ``make_guide`` does not return a guide of this package, or ``starts`` is not a
            mixture.
        ValueError: If ``starts`` has another number of members; in training, if members of different
            families or options are to run in one pass.
        RuntimeError: In training, if the net cannot be vectorized.

    Example:
        >>> from pyro_structvi import KTiedGuide, Regressor, bayesianize, fit, predict, weigh_by_bound
        >>> x = torch.linspace(-1, 1, 32).unsqueeze(-1)
        >>> model = Regressor(bayesianize(nn.Linear(1, 1), prior=1.0), num_data=32, noise_scale=0.1)
        >>> guide = MixtureGuide(model, KTiedGuide, size=3)
        >>> history = fit(model, guide, (x, 2 * x), num_steps=50, progress=False)
        >>> weigh_by_bound(model, guide, x, 2 * x)
        >>> predict(model, guide, x).functions.shape
        torch.Size([100, 32, 1])

    References:
        Wilson and Izmailov (2020), "Bayesian deep learning and a probabilistic perspective of
        generalization", section 3.
    """

    members: Any  # an ``nn.ModuleList``
    weights: Tensor

    @checked
    def __init__(
        self,
        model: Program,
        make_guide: Callable[..., Any],
        size: Count = 5,
        *,
        vectorize: bool = True,
        starts: Any = None,
    ) -> None:
        OwningAutoGuide.__init__(self, model, None, None)
        if starts is not None and not isinstance(starts, MixtureGuide):
            raise TypeError(
                "`starts` must be a fitted mixture, one guide for each member, but got "
                f"{brief(starts)}. Fit an `EnsembleGuide(model, size={size})`."
            )
        if starts is not None and starts.num_members != size:
            raise ValueError(
                f"`starts` must be a mixture of {size} guides, one for each member, but got "
                f"{brief(starts)}. Pass `size={starts.num_members}`."
            )
        self.vectorize = vectorize
        self._starts = None if starts is None else [each.median() for each in starts.members]
        self.members = nn.ModuleList()
        for _ in self._in_separate_starts(range(size)):
            member = make_guide(model)
            if not isinstance(member, StructuredGuide) or isinstance(member, MixtureGuide):
                raise TypeError(
                    "`make_guide` must be a function from the model to a guide of this package with one "
                    f"posterior, such as `KTiedGuide`, but it returned {brief(member)}."
                )
            self.members.append(member)
        like = next((value for _, value in self.named_parameters()), torch.empty(0))
        self.register_buffer("weights", like.new_full((size,), 1 / size).detach())

    def options(self) -> dict[str, Any]:
        return {"members": tuple(self.members), "vectorize": self.vectorize}

    @classmethod
    def from_options(  # type: ignore[override]
        cls, model: Any, members: Sequence[StructuredGuide], vectorize: bool
    ) -> Self:
        guide, given = cls.__new__(cls), iter(members)
        MixtureGuide.__init__(
            guide, model, lambda _: next(given), len(members), vectorize=vectorize
        )
        return guide

    @property
    def num_members(self) -> int:
        return len(self.members)

    @property
    def is_of_points(self) -> bool:
        """Whether all members are points, so that one draw of each is the whole mixture."""
        return are_points(self.all_posteriors())

    @property
    def num_points(self) -> int:
        is_even = bool((self.weights == self.weights[0]).all())
        return self.num_members if self.is_of_points and is_even else 0

    @property
    def _uses(self) -> dict[str, SiteUse]:  # type: ignore[override]
        return self._first._uses

    @property
    def local_site_names(self) -> list[str]:
        return self._first.local_site_names

    @property
    def are_plates_given(self) -> bool:
        return self._first.are_plates_given

    @property
    def is_initialized(self) -> bool:
        return all(member.is_initialized for member in self.members)

    @property
    def best(self) -> StructuredGuide:
        """The member with the largest weight."""
        return self.members[int(self.weights.argmax())]

    @property
    def _first(self) -> StructuredGuide:
        return self.members[0]

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        with self.warning_of_new_parameters():
            for number in self._in_separate_starts(range(self.num_members)):
                self.members[number].initialize(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Sample every site from a random member, and return the values by name."""
        if inside_jit_trace():
            raise NotImplementedError(
                "A mixture draws a member in each call, which `torch.jit.trace` would do once. Take "
                "`StructuredELBO()`, whose steps train all members, or `Trace_ELBO()`."
            )
        self._initialize_if_needed(args, kwargs)
        check_no_plates_around([self.site_names])
        check_not_given([(self.site_names, None)])
        member = self.members[int(weights_of(self).multinomial(1))]
        return member(*args, **kwargs)

    def begin_pass(self, *args: Any, **kwargs: Any) -> "JointMixture":  # type: ignore[override]
        self._initialize_if_needed(args, kwargs)
        if not are_plain(self.parameters()):
            raise NotImplementedError(
                "A mixture stacks the parameters of its members, so they cannot be sharded. Train each "
                "member by itself, as by `StructuredELBO()(model, guide.members[0])`."
            )
        declare_parameters(self)
        return JointMixture(self)

    def joint_posterior(self, *args: Any, **kwargs: Any) -> "JointMixture":  # type: ignore[override]
        if args or kwargs:
            self._initialize_if_needed(args, kwargs)
        return JointMixture(self)

    def __getitem__(self, name: str) -> SitePosterior:
        raise TypeError(
            f"A mixture has a posterior of '{name}' for each member. Write "
            f"`guide.members[0]['{name}']`."
        )

    def __contains__(self, name: str) -> bool:
        return name in self._first

    def report(self, *args: Any, **kwargs: Any) -> GuideReport:
        """Report on the mixture as :meth:`StructuredGuide.report` on one member.

        ``drawn`` and ``why`` describe the first member, and ``parameters`` counts all members.
        """
        return report_on(self, self.members, weights_of(self).tolist(), args, kwargs)

    def _initialize_if_needed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.is_initialized:
            self.initialize(*args, **kwargs)

    def _in_separate_starts(self, numbers: Iterable[int]) -> Iterator[int]:
        """Yield the numbers of members, each with its initial means and random stream."""
        with separate_randomness():
            for number in numbers:
                torch.randint(2**62, ())  # guides restore the random state, so it moves on here
                values = {} if self._starts is None else self._starts[number]
                with starting_at(partial(_start_of_member, values, number)):
                    yield number


NOISE = 0.01  # of the root mean square of a start, so that scalars differ, too


def weights_of(guide: MixtureGuide) -> Tensor:
    """Return the weights of a mixture, or raise unless they are probabilities."""
    weights, eps = guide.weights, torch.finfo(guide.weights.dtype).eps
    error = abs(float(weights.double().sum()) - 1)
    if not (bool((weights >= 0).all()) and error <= max(1e-6, len(weights) * eps)):
        raise ValueError(
            "`guide.weights` must be at least 0 and sum to 1, but got "
            f"{[round(each, 6) for each in weights.tolist()]}. Write "
            "`guide.weights.copy_(weights / weights.sum())`."
        )
    return weights


def _members_of_draws(weights: Tensor, count: int) -> list[int]:
    """Return the members of the first draws; any number of successive draws follows the weights."""
    shares = weights.tolist()
    counts, chosen = [0] * len(shares), list[int]()
    for taken in range(1, count + 1):
        behind = [share * taken - own for share, own in zip(shares, counts, strict=True)]
        chosen.append(behind.index(max(behind)))
        counts[chosen[-1]] += 1
    return chosen


def _start_of_member(
    values: Mapping[str, Tensor], number: int, site: LatentSite, start: Tensor
) -> Tensor:
    """Return the value of a site if there is one, or the start, in random order after member 0."""
    if site.name in values:
        return values[site.name]
    if number == 0:
        return start
    bijection = bijection_onto(site.support)
    free = bijection.inv(start)
    order = torch.randperm(free.numel(), device=free.device)
    permuted = free.flatten()[order].reshape(free.shape)
    size = permuted.square().mean().sqrt()
    noise = NOISE * torch.where(size > 0, size, 1.0) * torch.randn_like(permuted)
    return bijection(permuted + noise)


def _are_of_one_kind(one: StructuredGuide, other: StructuredGuide) -> bool:
    """Whether two guides have the same sites, families and options, apart from parameters."""
    ours, theirs = ([*each.all_posteriors()] for each in (one, other))
    if len(ours) != len(theirs) or one.local_reparam != other.local_reparam:
        return False
    return all(
        own.site.names == their.site.names
        # A user's family may lack ``==``.
        and (
            own.family == their.family
            or torch.equal(as_tensor(own.family), as_tensor(their.family))
        )
        for own, their in zip(ours, theirs, strict=True)
    )


class JointMixture:
    """The distributions of the members of a mixture at their current parameters."""

    def __init__(self, guide: MixtureGuide) -> None:
        self._guide = guide
        self._joints: dict[int, JointPosterior] = {}

    def factorize(self) -> None:
        """Do nothing: no factors are shared between members."""

    def stacked(self, count: int) -> dict[str, Tensor]:
        """Return the parameters and buffers of members, ``(count, *shape)``, to map over by vmap.

        Raises:
            ValueError: If the members have different families or options.
        """
        first, *others = self._guide.members
        if not all(_are_of_one_kind(first, each) for each in others):
            raise ValueError(
                "Members of a mixture must have equal families and options to run in one pass, but "
                "these differ. Pass `vectorize=False` to the guide, and no `vectorize_particles=True` "
                "to the objective."
            )
        members, size = self._guide.members, self._guide.num_members
        states = ([*each.named_parameters(), *each.named_buffers()] for each in members)
        stacked = stack_draws([*map(dict, states)])
        if count == size:
            return stacked
        rows = torch.arange(count, device=self._guide.weights.device) % size
        return {name: value[rows] for name, value in stacked.items()}

    def _joint(self, number: int | None) -> JointPosterior:
        """Return the distributions of a member, with the number modulo K; None for a random one."""
        if number is None:
            number = int(weights_of(self._guide).multinomial(1))
        number %= self._guide.num_members
        if number not in self._joints:
            self._joints[number] = self._guide.members[number].joint_posterior()
        return self._joints[number]

    def program(
        self, number: int | Mapping[str, Tensor] | None = None
    ) -> Callable[..., dict[str, Tensor]]:
        """Return the program of a member, by its number or by its parameters and buffers."""
        if not isinstance(number, Mapping):
            return self._joint(number).program()
        state = {f"guide.{name}": value for name, value in number.items()}
        sample = _Sample(self._guide.members[0])
        return lambda *args, **kwargs: functional_call(sample, state, args, kwargs)

    def conditionals(
        self, how: How, local: bool = False, number: int | None = None
    ) -> Iterator[tuple[Any, Any]]:
        return self._joint(number).conditionals(how, local)

    def draw(self, local: bool = False, number: int | None = None) -> dict[str, Tensor]:
        """Draw all sites from one member; successive draws are spread over members by their weights."""
        if number is not None:
            number = _members_of_draws(weights_of(self._guide), number + 1)[-1]
        return self._joint(number).draw(local)

    def draw_many(self, numbers: Sequence[int], local: bool = False) -> dict[str, Tensor]:
        """Draw all sites once for each number, stacked; the draws of a member share its factors."""
        members = _members_of_draws(weights_of(self._guide), max(numbers) + 1)
        draws, places = list[dict[str, Tensor]](), list[int]()
        for member in dict.fromkeys(members[number] for number in numbers):
            own = [place for place, number in enumerate(numbers) if members[number] == member]
            counts = [members[: numbers[place]].count(member) for place in own]
            draws.append(self._joint(member).draw_many(counts, local))
            places += own
        order = torch.tensor(places, device=self._guide.weights.device).argsort()
        return {name: torch.cat([own[name] for own in draws])[order] for name in draws[0]}

    def median(self) -> dict[str, Tensor]:
        medians = stack_draws([each.median() for each in self._guide.members])
        weights = weights_of(self._guide)
        return {
            name: torch.tensordot(weights.to(value), value, 1) for name, value in medians.items()
        }

    def quantiles(self, probs: Sequence[float] | Tensor) -> dict[str, Tensor]:
        """Return quantiles of each site's elements for points with equal weights."""
        asked = probabilities(probs)
        if self._guide.num_points:
            medians = stack_draws([each.median() for each in self._guide.members])
            values = {name: at_least_single(value) for name, value in medians.items()}
            return {name: value.quantile(asked.to(value), 0) for name, value in values.items()}
        raise NotImplementedError(
            "A mixture has no quantiles in closed form. Take those of draws, `guide.draw()`, or of one "
            "member, `guide.members[0].quantiles(...)`."
        )


class _Sample(nn.Module):
    """Samples every site of a guide, whose parameters ``functional_call`` can replace."""

    def __init__(self, guide: StructuredGuide) -> None:
        super().__init__()
        self.guide = guide

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        return self.guide.joint_posterior().program()(*args, **kwargs)


class EnsembleGuide(MixtureGuide):
    """A deep ensemble: K point estimates of the whole net, a mixture of :class:`MAPGuide`.

    :func:`~pyro_structvi.predict` uses each member once. Members of unequal weights have their shares
    of 100 draws.

    Args:
        model: A ``PyroModule`` or any callable with latent sites.
        size: The number K of members.
        vectorize: See :class:`MixtureGuide`.
        **options: See :class:`~pyro_structvi.guides.StructuredGuide`.

    Example:
        >>> from pyro_structvi import Classifier, bayesianize
        >>> model = Classifier(bayesianize(nn.Linear(4, 3), prior=1.0), num_data=100)
        >>> EnsembleGuide(model, size=5).members[4].median()["net.weight"].shape
        torch.Size([3, 4])

    References:
        Lakshminarayanan, Pritzel and Blundell (2017), "Simple and scalable predictive uncertainty
        estimation using deep ensembles".
    """

    def __init__(
        self,
        model: Callable[..., Any],
        size: int = 5,
        *,
        vectorize: bool = True,
        **options: Unpack[GuideOptions],
    ) -> None:
        super().__init__(model, partial(MAPGuide, **options), size, vectorize=vectorize)
