"""Point estimates, and mixtures of points at single sites, as for inducing weights."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from pyro_structvi._checks import Count, checked, shape_text, validates
from pyro_structvi.maps.linear_map import LinearMap
from pyro_structvi.sites.family import ContinuousFamily, GuideOptions
from pyro_structvi.sites.latent_site import LatentSite, bijection_onto
from pyro_structvi.sites.site_posterior import Coupling, SitePosterior, couple
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.weights.arguments import as_size, check_parameters
from pyro_structvi.weights.outputs import meet_channels
from pyro_structvi.weights.site_distributions import PointMass, quantiles
from pyro_structvi.weights.weight_distribution import WeightDistribution


@dataclass(frozen=True)
class PointEstimate(ContinuousFamily):
    """A point; the parameter is ``loc (*shape)``, unconstrained.

    The loss is the negative log posterior density of the site's value, or with ``kl_weight=0`` the
    negative log likelihood.

    Example:
        >>> from pyro_structvi import Classifier, StructuredGuide, bayesianize
        >>> model = Classifier(bayesianize(torch.nn.Linear(4, 3), prior=1.0), num_data=10)
        >>> guide = StructuredGuide(model, {"*": PointEstimate()})
        >>> sum(parameter.numel() for parameter in guide.parameters())
        15
    """

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        return {"loc": bijection_onto(site.support).inv(loc).clone()}

    def distribution(self, site: LatentSite, **parameters: Tensor) -> PointMass:
        value = bijection_onto(site.support)(parameters["loc"])
        return PointMass(value, site.event_dim, validate_args=False)


class MAPGuide(StructuredGuide):
    """A maximum a posteriori estimate of every site; with ``kl_weight=0`` maximum likelihood.

    Args:
        model: A ``PyroModule`` or any callable with latent sites.
        **options: ``init_scale``, ``init_loc_fn``, ``local_reparam``; see :class:`StructuredGuide`.

    Example:
        >>> from pyro_structvi import Classifier, bayesianize
        >>> model = Classifier(bayesianize(torch.nn.Linear(400, 400), prior=0.3), num_data=100)
        >>> sum(parameter.numel() for parameter in MAPGuide(model).parameters())
        160400
    """

    def __init__(self, model: Callable[..., Any], **options: Unpack[GuideOptions]) -> None:
        super().__init__(model, {"*": PointEstimate()}, **options)


def are_points(posteriors: Iterable[SitePosterior]) -> bool:
    """Whether all posteriors are points, and there is one."""
    families = [posterior.family for posterior in posteriors]
    return bool(families) and all(isinstance(each, PointEstimate) for each in families)


# ---- mixtures of points ---------------------------------------------------------------------------


class PointMixture(WeightDistribution):
    r"""A uniform mixture of K points; a point mass for K = 1.

    .. math:: W \sim \frac1K \sum_k \delta(W - W_k)

    It has no density: ``log_prob``, ``entropy`` and the KL to a normal raise a ``NotImplementedError``.
    A draw passes its gradient to the drawn member.

    Args:
        members: The weights, ``(*batch, K, out, *rest)``.
        event_dim: How many trailing dimensions are the weight; all but one when None.
        validate_args: Pyro's setting when None.

    Raises:
        ValueError: If ``members`` has no more than ``event_dim`` dimensions.

    Example:
        >>> q = PointMixture(torch.tensor([[[1.0, 0.0]], [[3.0, 0.0]]]))
        >>> q.mean, q.variance
        (tensor([[2., 0.]]), tensor([[1., 0.]]))

    References:
        Ritter et al. (2021), as for :class:`AugmentedMatrixNormal`, section 3.1.
    """

    arg_constraints: ClassVar = {"members": constraints.real}
    has_exact_positions = True
    members: Tensor

    @checked
    def __init__(
        self, members: Tensor, event_dim: int | None = None, validate_args: bool | None = None
    ) -> None:
        event_dim = members.dim() - 1 if event_dim is None else event_dim
        if members.dim() <= event_dim:
            raise ValueError(
                "`members` must have shape (*batch, K, *event) with an event of "
                f"{event_dim} dimensions, but got {shape_text(members.shape)}. Write "
                "`weight.unsqueeze(0)` for a single one, or pass another `event_dim`."
            )
        if validates(validate_args):
            check_parameters(self, {"members": members}, event_dim)
        self.members = members
        split = members.dim() - event_dim
        self._set_shapes(members.shape[: split - 1], members.shape[split:], validate_args)

    @property
    def is_mixture(self) -> bool:
        return self.members.shape[self._member_dim] > 1

    @property
    def loc(self) -> Tensor:  # type: ignore[override]
        return self.members.mean(self._member_dim)

    @property
    def variance(self) -> Tensor:
        return self.members.var(self._member_dim, correction=0)

    @property
    def covariance_matrix(self) -> Tensor:
        event_dim = len(self.event_shape)
        deviations = (self.members - self.loc.unsqueeze(self._member_dim)).flatten(-event_dim)
        return deviations.mT @ deviations / deviations.shape[-2]

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        sample = as_size("sample_shape", sample_shape)
        shape = self._extended_shape(sample)
        batch, count = self.batch_shape.numel(), self.members.shape[self._member_dim]
        if count == 1:
            draw = self.members.squeeze(self._member_dim)
            return draw.expand(shape) if sample else draw.clone()
        members = self.members.reshape(batch, count, *self.event_shape)
        chosen = torch.randint(count, (sample.numel(), batch), device=members.device)
        return members[torch.arange(batch, device=members.device), chosen].reshape(shape)

    def image_under(
        self, linear_map: LinearMap, x: Tensor, bias: Tensor | None = None
    ) -> TorchDistribution:
        """Return a mixture of the K outputs of each example, exact over positions."""
        linear_map = self.map_for_batch(linear_map)
        count, out = self.members.shape[self._member_dim], self.event_shape[0]
        images = linear_map.stack(x, self.members.reshape(*self.batch_shape, count, out, -1))
        if bias is not None:
            images = images + meet_channels(linear_map, bias)
        return PointMixture(images, linear_map.event_dim(images.flatten(0, 1)), False)

    @property
    def _member_dim(self) -> int:
        return -len(self.event_shape) - 1


@quantiles.register
def _(distribution: PointMixture, probs: Tensor) -> Tensor:
    members = distribution.members.movedim(-len(distribution.event_shape) - 1, 0)
    return torch.quantile(members.to(probs), probs, 0)


@dataclass(frozen=True)
class Members(ContinuousFamily):
    """A uniform mixture of K points; the parameter is ``members (K, *shape)``, unconstrained.

    All sites of this family have the same member in one pass of the model, and a training step trains
    one random member. For inducing weights it is Ensemble-U; see :class:`InducingWeights`. An ensemble
    of whole nets is an :class:`~pyro_structvi.EnsembleGuide`, whose steps train all members.

    Args:
        size: The number K of members, at least 1.

    Raises:
        ValueError: If the size is not a whole number of at least 1.
    """

    size: Count = 5

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        """Start one member at ``loc``, and all others at a random permutation plus N(0, scale^2)."""
        first = bijection_onto(site.support).inv(loc)
        members = first.new_empty(self.size, first.numel())
        members[0] = first.flatten()
        for number in range(1, self.size):
            order = torch.randperm(first.numel(), device=first.device)
            noise = first.new_empty(first.numel()).normal_()
            members[number] = members[0][order] + scale * noise
        return {"members": members.reshape(self.size, *first.shape)}

    def distribution(self, site: LatentSite, **parameters: Tensor) -> PointMixture:
        return _MembersOf(site, bijection_onto(site.support)(parameters["members"]))


class _MembersOf(PointMixture):
    """The members of a site with its plates."""

    def __init__(self, site: LatentSite, members: Tensor) -> None:
        super().__init__(members, members.dim() - 1, validate_args=False)
        self._event_dim = site.event_dim

    def condition(self, value: Tensor) -> PointMass:
        return PointMass(value, self._event_dim, validate_args=False)


class SameMember(Coupling):
    """One member for all sites, so that a member of an ensemble is a whole net."""

    def takes(self, posteriors: Mapping[str, SitePosterior]) -> bool:
        return True

    def draw(self, at: Mapping[str, Any], number: Tensor | int | None) -> dict[str, Tensor]:
        """Return the member of this number, modulo K, or a random one."""
        members = self._members(at)
        first = next(iter(members.values()))
        if number is None:
            number = torch.randint(len(first), (), device=first.device)
        # An index on the device needs no synchronization.
        row = torch.as_tensor(number, device=first.device).reshape(1)
        return {
            name: own.index_select(0, row % len(own)).squeeze(0) for name, own in members.items()
        }

    def mean(self, at: Mapping[str, Any], number: Tensor | int | None) -> dict[str, Tensor]:
        return {name: values.mean(0) for name, values in self._members(at).items()}

    def _members(self, at: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the members ``(K, ...)`` of each site in ``at``."""
        return {name: at[name].members for name in self.sites if name in at}


@couple.register
def _(family: Members, posteriors: Mapping[str, SitePosterior], scale: float) -> Coupling | None:
    return SameMember(posteriors)
