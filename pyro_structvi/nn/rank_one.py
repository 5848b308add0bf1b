"""Layers whose weight is a point estimate scaled by random numbers for inputs and outputs."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Size, Tensor, nn

from pyro_structvi._checks import CheckedFields, Positive, check, checked, naming, shape_text
from pyro_structvi._torch import forward_hooks
from pyro_structvi.maps.calls import drawn_per_example
from pyro_structvi.nn.priors import Prior, sample_from
from pyro_structvi.nn.random_module import OwnParameters

Start = Literal["ones", "signs"]


@drawn_per_example
def scale_channels(x: Tensor, scale: Tensor, channel_dim: int) -> Tensor:
    """Multiply each channel by a number; ``scale`` is ``(channels,)``, or ``(batch, channels)``."""
    return x * _to_channels(scale, x, channel_dim)


@drawn_per_example
def shift_channels(x: Tensor, shift: Tensor, channel_dim: int) -> Tensor:
    """Add a number to each channel; see :func:`scale_channels`."""
    return x + _to_channels(shift, x, channel_dim)


def _to_channels(factor: Tensor, x: Tensor, channel_dim: int) -> Tensor:
    """Reshape ``factor (*batch, channels)`` so that it broadcasts with ``x``."""
    before, after = (1,) * (x.dim() + channel_dim - 1), (1,) * (-channel_dim - 1)
    return factor.reshape(*factor.shape[:-1], *before, factor.shape[-1], *after)


class FactorLayer:
    """Base of the layers with factored weights, which take a batch of inputs or a single one."""

    bias: Any
    channels: int
    channel_dim: int

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to a batch of inputs, or to a single one."""
        check("x", x, Tensor)
        if x.dim() < -self.channel_dim or x.shape[self.channel_dim] != self.channels:
            raise ValueError(
                f"`x` must have {self.channels} channels in its dimension {self.channel_dim}, but got "
                f"the shape {shape_text(x.shape)}."
            )
        is_single = x.dim() == -self.channel_dim
        with naming("x", x):
            outputs = self._without_bias(x.unsqueeze(0) if is_single else x)
            if self.bias is not None:
                outputs = shift_channels(outputs, self.bias, self.channel_dim)
        return outputs.squeeze(0) if is_single else outputs

    def _without_bias(self, x: Tensor) -> Tensor:
        """Apply the weight to a batch."""
        raise NotImplementedError


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer has no hooks or extra parameters, so that it can be replaced."""
    names = {name for name, _ in layer.named_parameters(recurse=False)}
    return "weight" in names <= {"weight", "bias"} and not forward_hooks(layer)


def geometry_of(layer: Any) -> dict[str, Any]:
    """Return the arguments of a dense layer or a convolution, without groups and bias."""
    names: tuple[str, ...] = ("in_features", "out_features")
    if not isinstance(layer, nn.Linear):
        names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation")
        names += ("padding_mode",)
    return {name: getattr(layer, name) for name in names}


class RankOneLayer(FactorLayer):
    """Base of the rank-1 layers.

    Attributes:
        weight: The parameter W0, ``(out, *rest)``.
        bias: A parameter ``(out,)``, or None.
        input_scale: The sample site s, with a number for each input channel.
        output_scale: The sample site r, ``(out,)``.
    """

    weight: Any
    input_scale: Any
    output_scale: Any
    _conv_forward: Any
    _torch_layer: ClassVar[type[nn.Module]]

    @checked
    def __init__(self, layer: Any, prior_scale: Positive = 0.1, start: Start = "ones") -> None:
        check("layer", layer, self._torch_layer)
        groups = {"groups": layer.groups} if hasattr(layer, "groups") else {}
        options: dict[str, Any] = {**geometry_of(layer), **groups, "device": "meta"}
        super().__init__(**options)
        self.bias = None
        for name, value in layer.named_parameters(recurse=False):
            copied = nn.Parameter(value.detach().clone(), requires_grad=value.requires_grad)
            setattr(self, name, copied)
        self.channels = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
        self.channel_dim = 1 - layer.weight.dim()
        one = layer.weight.new_ones(())
        prior = dist.Normal(one, one * prior_scale)
        self.initial_values: dict[str, Tensor] = {}
        for name, size in (("input_scale", self.channels), ("output_scale", len(layer.weight))):
            sample_from(self, name, prior, Size([size]))
            initial = layer.weight.new_ones(size)
            if start == "signs":
                initial = torch.where(torch.rand_like(initial) < 0.5, initial, -initial)
            self.initial_values[name] = initial

    def _without_bias(self, x: Tensor) -> Tensor:
        apply = F.linear if self.channel_dim == -1 else self._conv_forward
        hidden = apply(scale_channels(x, self.input_scale, self.channel_dim), self.weight, None)
        return scale_channels(hidden, self.output_scale, self.channel_dim)


class RankOneLinear(RankOneLayer, nn.Linear, OwnParameters):
    """A dense layer with the weight W0 * (r s') and random r and s.

    The outputs are ``(W0 (s * x)) * r + b``. The parameters ``weight`` and ``bias``, W0 and b, are point
    estimates. The sample sites ``output_scale`` and ``input_scale``, r and s, have independent priors
    N(1, prior_scale^2) and any family. They are sampled for each example.

    Args:
        layer: The layer whose weight and bias are copied; frozen parameters stay frozen.
        prior_scale: Prior standard deviation of the scales.
        start: Initial means of a guide: "ones", or random "signs", which separate members of an
            ensemble.

    Example:
        >>> layer = RankOneLinear(nn.Linear(20, 50), prior_scale=0.1)
        >>> layer.input_scale.shape, layer.output_scale.shape, layer(torch.zeros(5, 20)).shape
        (torch.Size([20]), torch.Size([50]), torch.Size([5, 50]))

    References:
        Dusenberry et al. (2020), "Efficient and scalable Bayesian neural nets with rank-1 factors";
        Wen, Tran and Ba (2020), "BatchEnsemble: an alternative approach to efficient ensemble and
        lifelong learning".
    """

    _torch_layer = nn.Linear


class RankOneConv(RankOneLayer):
    """A convolution with a random scale for each input and each output channel.

    It takes the arguments of :class:`RankOneLinear`. With groups, ``input_scale`` still has a number
    for each input channel.
    """


class RankOneConv1d(RankOneConv, nn.Conv1d, OwnParameters):
    """The :class:`RankOneConv` in one dimension."""

    _torch_layer = nn.Conv1d


class RankOneConv2d(RankOneConv, nn.Conv2d, OwnParameters):
    """The :class:`RankOneConv` in two dimensions."""

    _torch_layer = nn.Conv2d


class RankOneConv3d(RankOneConv, nn.Conv3d, OwnParameters):
    """The :class:`RankOneConv` in three dimensions."""

    _torch_layer = nn.Conv3d


_LAYERS: dict[type, type[RankOneLayer]] = {
    layer._torch_layer: layer
    for layer in (RankOneLinear, RankOneConv1d, RankOneConv2d, RankOneConv3d)
}


@dataclass(frozen=True)
class RankOne(CheckedFields):
    """Option for the ``layers`` of ``bayesianize``: rank-1 layers in place of a net's layers.

    See :class:`RankOneLinear`. Weight and bias start at their values in the net and take no prior.

    Args:
        prior_scale: Prior standard deviation of the scales.
        start: Initial means of a guide, "ones" or random "signs".

    Example:
        >>> from pyro_structvi import bayesianize
        >>> net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
        >>> bayes_net = bayesianize(net, layers={"*": RankOne(prior_scale=0.2)})
        >>> [name for name, _ in bayes_net.named_parameters()]
        ['0.weight', '0.bias', '2.weight', '2.bias']
    """

    prior_scale: Positive = 0.1
    start: Start = "ones"
    needs: ClassVar[str] = "an nn.Linear or a convolution, without hooks or reparametrized weights"

    def fits(self, module: nn.Module) -> bool:
        """Whether there is a rank-1 layer for the module."""
        return type(module) in _LAYERS and is_plain(module)

    def convert(self, module: Any, name: str, prior: Prior) -> Any:
        """Return the rank-1 layer of a module; its name and the net's prior are not used."""
        return _LAYERS[type(module)](module, self.prior_scale, self.start)
