"""Monte Carlo dropout."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, Unpack

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import Laplace, Normal, constraints, register_kl

from pyro_structvi._checks import Count, Share, Whole, checked
from pyro_structvi.maps.convolution import ConvolutionMap
from pyro_structvi.maps.linear_map import LinearMap, shape_per_example
from pyro_structvi.sites.family import ContinuousFamily, GuideOptions
from pyro_structvi.sites.latent_site import LatentSite, bijection_onto
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.weights.arguments import as_size
from pyro_structvi.weights.outputs import OutputDistribution
from pyro_structvi.weights.site_distributions import (
    JoinedPrior,
    PointMass,
    in_front,
    normal_cross_entropy,
    quantiles,
)
from pyro_structvi.weights.weight_distribution import Way, WeightDistribution


class BernoulliDropout(WeightDistribution):
    r"""A constant weight with input channels that are dropped with probability p.

    .. math:: W_{oc} = M_{oc}\, \frac{z_c}{1 - p}, \qquad z_c \sim \mathrm{Bernoulli}(1 - p)

    with one z for all outputs and the whole kernel of a channel. Its image under x is dropout: a mask
    on the channels of each example, the same at all positions.

    The distribution is discrete. ``log_prob`` is the log probability of a draw, and ``entropy`` the
    entropy of the masks. The KL to independent normal or Laplace priors is :math:`E[-\log p(W)] -
    H(z)`, the paper's approximation without a constant that depends on the width of its normals.

    Args:
        loc: The mean M, ``(out, in)`` or ``(out, channels, *kernel)``.
        rate: The probability p, at least 0 and below 1.
        input_dim: The dimension of the input channels; 0 for a weight ``(in, out)`` of an embedding or
            a transposed convolution, which is drawn and has no image.
        groups: The number of groups of outputs, in the first dimension, with separate masks of their
            input channels, as in a grouped convolution. With 1, groups share masks.
        validate_args: Pyro's setting when None.

    Raises:
        ValueError: If ``loc`` has fewer than two dimensions or no dimension ``input_dim``, if groups do
            not divide its outputs, or if the rate is out of range.

    Example:
        >>> q = BernoulliDropout(torch.ones(2, 3), rate=0.5)
        >>> q.mean[0], q.variance[0]
        (tensor([1., 1., 1.]), tensor([1., 1., 1.]))
        >>> q.rsample().unique().tolist() in ([0.0, 2.0], [0.0], [2.0])
        True

    References:
        Gal and Ghahramani (2016), "Dropout as a Bayesian approximation: representing model
        uncertainty in deep learning", section 3 and appendix 4.
    """

    arg_constraints: ClassVar = {"loc": constraints.real}
    has_exact_positions = True

    @checked
    def __init__(
        self,
        loc: Tensor,
        rate: Share,
        input_dim: Whole = 1,
        groups: Count = 1,
        validate_args: bool | None = None,
    ) -> None:
        if loc.dim() < 2:
            raise ValueError(
                "`loc` must have shape (out, in) or (out, channels, *kernel), but got "
                f"{tuple(loc.shape)}."
            )
        if not 0 <= input_dim < loc.dim():
            raise ValueError(
                f"`input_dim` must be a dimension of `loc`, at least 0 and below {loc.dim()}, but got "
                f"{input_dim}."
            )
        if groups < 1 or loc.movedim(input_dim, 1).shape[0] % groups:
            raise ValueError(
                f"`groups` must divide the outputs of `loc` {tuple(loc.shape)}, but got {groups}."
            )
        self.rate = float(rate)
        self.input_dim, self.groups = int(input_dim), int(groups)
        super().__init__({"loc": loc}, loc.dim(), validate_args)

    @property
    def _odds(self) -> float:
        return self.rate / (1 - self.rate)

    @property
    def num_channels(self) -> int:
        size: int = self.event_shape[self.input_dim]
        return self.groups * size

    def _spread(self, of_channels: Tensor) -> Tensor:
        """Assign values of channels ``(*sample_shape, channels)`` to weights; the result broadcasts."""
        lead, event_dim = of_channels.dim() - 1, len(self.event_shape)
        outputs = self.loc.movedim(self.input_dim, 1).shape[0] if self.groups > 1 else 1
        values: Tensor = of_channels.unflatten(-1, (self.groups, -1))
        values = values.repeat_interleave(outputs // self.groups or 1, -2)
        values = values.reshape(*values.shape, *(1 for _ in range(event_dim - 2)))
        return values.movedim(lead + 1, lead + self.input_dim)

    def _are_there(self, weight: Tensor) -> Tensor:
        """Return which input channels have any nonzero weight, ``(*sample_shape, channels)``."""
        lead = weight.dim() - len(self.event_shape)
        there: Tensor = (weight != 0).movedim(lead + self.input_dim, lead + 1)
        there = there.unflatten(lead, (self.groups, -1)).movedim(lead + 2, lead + 1)
        return there.flatten(lead + 2).any(-1).flatten(lead)

    def ways_to_apply(self, linear_map: LinearMap, x: Tensor) -> tuple[Way, ...]:
        """Draw outputs, or the weight if its input channels differ from the map's."""
        fits = self.input_dim == 1 and self.groups in (1, linear_map.groups)
        # Flattened filters have several inputs for each channel.
        fits = fits and x.shape[linear_map.channel_dim] == self.event_shape[1] * linear_map.groups
        return ("outputs", "weight") if fits else ("weight",)

    @property
    def variance(self) -> Tensor:
        return self._odds * self.loc.square()

    @property
    def covariance_matrix(self) -> Tensor:
        channels = torch.arange(self.num_channels, device=self.loc.device)
        of = self._spread(channels).expand(self.event_shape)
        same = of.flatten() == of.flatten().unsqueeze(-1)
        flat = self.loc.flatten()
        return self._odds * same * flat * flat.unsqueeze(-1)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        sample = as_size("sample_shape", sample_shape)
        masks = _masks([*sample, self.num_channels], self.rate, self.loc)
        return self.loc * self._spread(masks)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log probability of draws, in nats; minus infinity for impossible values.

        A channel with zero weights counts with its mean over both states.
        """
        if self._validate_args:
            self._validate_sample(value)
        event_dim = len(self.event_shape)
        kept, known = self._are_there(value), self._are_there(self.loc)
        expected = self.loc * self._spread(kept.to(self.loc) / (1 - self.rate))
        tolerance = 4 * torch.finfo(self.loc.dtype).eps
        agrees = torch.isclose(value, expected, rtol=tolerance, atol=0)
        count, total = kept.sum(-1), known.sum(-1)
        dropped = torch.xlogy(total - count, self.loc.new_tensor(self.rate))
        unknown = (self.num_channels - total) / self.num_channels * self.entropy()
        nats = count * math.log1p(-self.rate) + dropped - unknown
        return torch.where(agrees.flatten(-event_dim).all(-1), nats, -math.inf)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "BernoulliDropout":
        raise NotImplementedError(
            "Weights with dropout have no batches, so they do not support the plates of Pyro's "
            "`vectorize_particles=True` or `parallel=True`. Draw several with `rsample`, or use "
            "`StructuredELBO(vectorize_particles=True)` and `pyro_structvi.predict`."
        )

    def entropy(self) -> Tensor:
        of_one: Tensor = torch.special.entr(self.loc.new_tensor([self.rate, 1 - self.rate]))
        return of_one.sum() * self.num_channels

    def image_under(
        self, linear_map: LinearMap, x: Tensor, bias: Tensor | None = None
    ) -> TorchDistribution:
        """Return the outputs, exact over positions; a ``ValueError`` if the map has other inputs."""
        if "outputs" not in self.ways_to_apply(linear_map, x):
            raise ValueError(
                f"The map must have dimension 1 of the weight as inputs and {self.groups} groups, but "
                f"the weight {tuple(self.event_shape)} drops dimension {self.input_dim}, and the map "
                f"has {x.shape[linear_map.channel_dim]} inputs in {linear_map.groups} groups. Apply a "
                "draw of the weight, from `rsample()`."
            )
        return _DropoutOutputs(self, linear_map, x, bias)


class _DropoutOutputs(OutputDistribution):
    """The outputs of a map with dropped input channels, independently for each example."""

    def __init__(
        self, weight: BernoulliDropout, linear_map: LinearMap, x: Tensor, bias_loc: Tensor | None
    ) -> None:
        self._weight, self._map, self._x, self._bias_loc = weight, linear_map, x, bias_loc
        self._set_shapes(x.shape[: x.dim() - linear_map.event_dim(x)], event_dim=0)

    @property
    def event_shape(self) -> torch.Size:
        return self.loc.shape[len(self.batch_shape) :]

    @property
    def loc(self) -> Tensor:  # type: ignore[override]
        return self._apply(self._x)

    def _apply(self, x: Tensor) -> Tensor:
        return self._map(x, self._matrix, self._bias_loc)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        if sample_shape:
            count = torch.Size(sample_shape).numel()
            draws = torch.stack([self.rsample() for _ in range(count)])
            return draws.reshape(*sample_shape, *draws.shape[1:])
        channels = shape_per_example(self._map, self._x, self._weight.num_channels)
        return self._apply(self._masked(_masks(channels, self._weight.rate, self._x)))

    def _masked(self, masks: Tensor) -> Tensor:
        """Multiply the input by masks of the weight's channels; groups may share them."""
        groups = [1 for _ in masks.shape]
        groups[self._map.channel_dim] = self._map.groups // self._weight.groups
        return self._x * masks.repeat(groups)

    @property
    def variance(self) -> Tensor:
        if isinstance(self._map, ConvolutionMap):
            parts = self._map.by_channel(self._x, self._matrix)
            total = reduce(torch.add, (part.square() for part in parts))
        else:  # a channel is one input
            total = self._map(self._x.square(), self._matrix.square())
        return self._weight._odds * total

    @property
    def covariance_matrix(self) -> Tensor:
        columns = self._columns.flatten(-len(self.event_shape)).movedim(0, -2)
        return self._weight._odds * columns.mT @ columns

    @property
    def _columns(self) -> Tensor:
        """Outputs from each channel alone, ``(channels, *batch, *event)``."""
        if not isinstance(self._map, ConvolutionMap):
            ones = [1 for _ in self._x.shape[1:]]
            filters = self._matrix.mT.reshape(-1, *ones, len(self._matrix))
            return self._x.movedim(-1, 0).unsqueeze(-1) * filters
        size = self._weight.num_channels
        units = torch.eye(size).to(self._x)
        shape = shape_per_example(self._map, self._x, size)
        masks = [unit.reshape(shape[self._map.channel_dim :]).expand(shape) for unit in units]
        return torch.stack([self._map(self._masked(own), self._matrix) for own in masks])

    @property
    def _matrix(self) -> Tensor:
        return self._weight.as_matrix(self._weight.loc)


def _masks(shape: list[int], rate: float, like: Tensor) -> Tensor:
    """Return ``1 / (1 - rate)`` with the probability 1 - rate, else zero."""
    kept = torch.rand(shape, device=like.device) >= rate
    return kept.to(like.dtype) / (1 - rate)


@register_kl(BernoulliDropout, Normal)
def _kl_dropout_normal(q: BernoulliDropout, p: Any) -> Tensor:
    return normal_cross_entropy(q, p) - q.entropy()


@register_kl(BernoulliDropout, JoinedPrior)
@register_kl(BernoulliDropout, Laplace)
def _kl_dropout(q: BernoulliDropout, p: Any) -> Tensor:
    """KL to other priors, by their density at both values of each element."""
    dropped, kept = torch.zeros_like(q.loc), q.loc / (1 - q.rate)
    log_prob = q.rate * p.log_prob(dropped).sum() + (1 - q.rate) * p.log_prob(kept).sum()
    return -log_prob - q.entropy()


@quantiles.register
def _(distribution: BernoulliDropout, probs: Tensor) -> Tensor:
    """Return quantiles of weights with two values."""
    probs, kept = in_front(probs, distribution.loc), distribution.loc / (1 - distribution.rate)
    is_upper = probs > torch.where(kept > 0, distribution.rate, 1 - distribution.rate)
    return torch.where(is_upper, kept.clamp(min=0), kept.clamp(max=0))


@dataclass(frozen=True)
class Dropout(ContinuousFamily):
    """Weights with randomly dropped input channels; points for all other sites.

    The parameter is ``loc``, the mean, unconstrained.

    Args:
        rate: The probability that an input channel is dropped. It is not learned.
        input_dim: The dimension of the weights' input channels. When None, it is inferred for layers of
            torch, for ``Conv1D``, and for weights ``(out, in, *kernel)`` outside of modules. Other
            weights, such as stacked experts, need it: ``{"*.experts": Dropout(0.1, input_dim=2), "*":
            Dropout(0.1)}``.

    Raises:
        ValueError: If the rate is not at least 0 and below 1, or when a site's input channels are not
            known.

    Example:
        >>> from pyro_structvi import Classifier, StructuredGuide, bayesianize
        >>> model = Classifier(bayesianize(torch.nn.Linear(4, 3), prior=1.0), num_data=10)
        >>> guide = StructuredGuide(model, {"*": Dropout(rate=0.5)})
        >>> len(guide.draw()["net.weight"].unique()) <= 13
        True
    """

    rate: Share = 0.1
    input_dim: Whole | None = None
    needs: ClassVar[str] = "a continuous site, and `input_dim` where that of a weight is not known"

    def fits(self, site: LatentSite) -> bool:
        is_known = self.input_dim is not None or site.input_dim is not None
        return super().fits(site) and (is_known or not _has_inputs(site))

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        return {"loc": bijection_onto(site.support).inv(loc).clone()}

    def distribution(self, site: LatentSite, **parameters: Tensor) -> TorchDistribution:
        loc = parameters["loc"]
        if not _has_inputs(site):
            value = bijection_onto(site.support)(loc)
            return PointMass(value, site.event_dim, validate_args=False)
        input_dim = site.input_dim if self.input_dim is None else self.input_dim
        assert input_dim is not None  # as `fits` has made sure
        groups = site.groups if input_dim == site.input_dim else 1
        return BernoulliDropout(loc, self.rate, input_dim, groups, validate_args=False)


def _has_inputs(site: LatentSite) -> bool:
    return site.is_real and not site.is_batch and len(site.shape) >= 2 and site.fan_in != 0


class MCDropoutGuide(StructuredGuide):
    """Monte Carlo dropout (Gal and Ghahramani, 2016): random masks of every weight's input channels.

    In training each example has a separate mask. In a draw, as by :func:`~pyro_structvi.predict`, all
    inputs share a mask. Vectors and scalars are points.

    Args:
        model: A ``PyroModule`` or any callable with latent sites.
        rate: The probability that an input channel is dropped, including inputs of the net. To keep
            these, use :class:`StructuredGuide` with another family for the first layer.
        **options: ``init_scale``, ``init_loc_fn``, ``local_reparam``; see :class:`StructuredGuide`.

    Example:
        >>> from pyro_structvi import Classifier, bayesianize
        >>> model = Classifier(bayesianize(torch.nn.Linear(400, 400), prior=0.3), num_data=100)
        >>> sum(parameter.numel() for parameter in MCDropoutGuide(model).parameters())
        160400
    """

    def __init__(
        self, model: Callable[..., Any], rate: float = 0.1, **options: Unpack[GuideOptions]
    ) -> None:
        super().__init__(model, {"*": Dropout(rate)}, **options)
