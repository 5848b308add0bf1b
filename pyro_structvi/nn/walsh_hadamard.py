"""Layers whose weight is a product of Walsh-Hadamard and diagonal matrices with a random diagonal."""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Size, Tensor, nn

from pyro_structvi._checks import (
    CheckedFields,
    Count,
    Positive,
    Whole,
    check_same_kind,
    check_shape,
    checked,
    naming,
)
from pyro_structvi.linalg.matrices import walsh_hadamard_transform
from pyro_structvi.maps.calls import drawn_per_example
from pyro_structvi.nn.priors import Prior, resolve_prior, sample_from
from pyro_structvi.nn.random_module import OwnParameters
from pyro_structvi.nn.rank_one import FactorLayer, geometry_of, is_plain

Sizes = Count | tuple[Count, ...]
Margins = Whole | tuple[Whole, ...] | Literal["same", "valid"]
PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


class WalshHadamardLayer(FactorLayer, OwnParameters):
    """Base of the Walsh-Hadamard layers; arguments as for :class:`WalshHadamardLinear`."""

    draws_per_example = True

    def __init__(
        self,
        weight_shape: tuple[int, ...],
        bias: bool,
        prior_scale: float,
        bias_prior_scale: float,
        device: Any,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.weight_shape = Size(weight_shape)
        self.channels, self.channel_dim = weight_shape[1], 1 - len(weight_shape)
        out, size = self.weight_shape[0], self.weight_shape[1:].numel()
        width = 2 ** (size - 1).bit_length()
        # With ones in S1 and S2 the blocks H diag(g) H would be symmetric.
        with naming("device", device):
            signs = torch.randint(2, (2, math.ceil(out / width), width), device=device) * 2 - 1
        diagonals = signs.to(dtype or torch.get_default_dtype())
        self.row_scale = nn.Parameter(diagonals[0].clone())
        self.column_scale = nn.Parameter(diagonals[1].clone())
        scale = prior_scale * math.sqrt(width)
        prior = dist.Normal(diagonals.new_zeros(()), diagonals.new_full((), scale))
        sample_from(self, "coefficients", prior, self.row_scale.shape)
        self.register_parameter("bias", None)
        self.initial_values: dict[str, Tensor] = {}
        self._start_like(diagonals.new_tensor(1 / (3 * size)))  # as torch initializes weights
        if bias:
            initial = diagonals.new_empty(out).uniform_(-1, 1) / math.sqrt(size)
            self._sample_bias(resolve_prior(bias_prior_scale, "bias", initial), initial)

    def weight(self, coefficients: Tensor) -> Tensor:
        """Return the dense weight ``(out, *rest)`` at ``coefficients (blocks, D)``.

        It has the leading rows and columns of S1 H diag(g) H S2.
        """
        check_shape("coefficients", coefficients, self.row_scale.shape, "(blocks, D)")
        check_same_kind("coefficients", coefficients, "row_scale", self.row_scale)
        width, device = self.row_scale.shape[-1], coefficients.device
        out, size = self.weight_shape[0], self.weight_shape[1:].numel()
        rows, columns = (torch.arange(count, device=device) for count in (out, size))
        start = rows // width * width
        # Entry (i, j) of H diag(g) H is entry "i exclusive or j" of H g, over sqrt(D).
        index = start.unsqueeze(-1) + ((rows - start).unsqueeze(-1) ^ columns)
        entries = walsh_hadamard_transform(coefficients).flatten() / math.sqrt(width)
        matrix = entries.index_select(0, index.flatten()).reshape(out, size)
        column_scale = self.column_scale[:, :size].repeat_interleave(width, 0)[:out]
        scaled = self.row_scale.flatten()[:out].unsqueeze(-1) * matrix * column_scale
        return scaled.reshape(self.weight_shape)

    def extra_repr(self) -> str:
        """Return the shapes of the weight and the coefficients."""
        blocks, width = self.row_scale.shape
        return f"weight {tuple(self.weight_shape)} of {blocks} x {width} coefficients"

    def _without_bias(self, x: Tensor) -> Tensor:
        if self.draws_per_example:
            return _apply_layer(x, self.coefficients, self)
        return self._outputs(x, self.coefficients)

    def _outputs(self, x: Tensor, coefficients: Tensor) -> Tensor:
        """Multiply ``x (batch, *positions, in)`` by a weight, or by a weight for each example."""
        blocks, width = self.row_scale.shape
        padded = F.pad(x, (0, width - x.shape[-1])).unsqueeze(-2)
        positions = (1,) * (x.dim() - 2)
        diagonal = coefficients.reshape(*coefficients.shape[:-2], *positions, blocks, width)
        hidden = diagonal * walsh_hadamard_transform(self.column_scale * padded)
        outputs = self.row_scale * walsh_hadamard_transform(hidden)
        return outputs.flatten(-2)[..., : self.weight_shape[0]]

    def _start_like(self, mean_square: Tensor) -> None:
        """Initialize means at random coefficients, so that the weights have a mean square."""
        # The closest coefficients to a weight W, the diagonal of H S1 W S2 H, keep 1/D of its norm.
        spread = (self.row_scale.shape[-1] * mean_square).sqrt().detach()
        self.initial_values["coefficients"] = spread * torch.randn_like(self.row_scale)

    def _sample_bias(self, prior: Any, initial: Tensor) -> None:
        sample_from(self, "bias", prior, initial.shape)
        self.initial_values["bias"] = initial


@drawn_per_example
def _apply_layer(x: Tensor, coefficients: Tensor, layer: WalshHadamardLayer) -> Tensor:
    return layer._outputs(x, coefficients)


class WalshHadamardLinear(WalshHadamardLayer):
    """A dense layer with the weight S1 H diag(g) H S2 and a random diagonal g.

    H is the orthonormal Walsh-Hadamard matrix of D rows, with D the number of inputs rounded up to a
    power of two. For more than D outputs, blocks are stacked, and the weight is cut from them. The
    diagonals S1 and S2 are point estimates. The sample site ``coefficients``, g, has any family and is
    sampled for each example.

    Args:
        in_features: Number of inputs.
        out_features: Number of outputs.
        bias: Whether there is a sample site ``bias``.
        prior_scale: Prior standard deviation of each weight while S1 and S2 are signs, as initialized;
            the coefficients have the prior N(0, prior_scale^2 D).
        bias_prior_scale: Prior standard deviation of the bias.
        device: The device of all tensors.
        dtype: The dtype of all tensors.

    Raises:
        ValueError: If a size or a scale is not positive.

    Example:
        >>> layer = WalshHadamardLinear(20, 50)
        >>> layer.coefficients.shape, layer(torch.zeros(5, 20)).shape
        (torch.Size([2, 32]), torch.Size([5, 50]))

    References:
        Rossi, Marmin and Filippone (2020), "Walsh-Hadamard variational inference for Bayesian deep
        learning".
    """

    @checked
    def __init__(
        self,
        in_features: Count,
        out_features: Count,
        bias: bool = True,
        prior_scale: Positive = 1.0,
        *,
        bias_prior_scale: Positive = 1.0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = (out_features, in_features)
        super().__init__(shape, bias, prior_scale, bias_prior_scale, device, dtype)


class WalshHadamardConv(WalshHadamardLayer):
    """A convolution whose filters, as a matrix ``(out, in)``, are S1 H diag(g) H S2.

    ``in`` is the number of channels times the size of the kernel. A batch shares the filters of one
    draw. With ``filters_per_example`` each example has separate filters under ``StructuredELBO``, at the
    cost of transforming its patches. Other arguments are as for torch's convolution and
    :class:`WalshHadamardLinear`.

    Raises:
        ValueError: If a size or a scale is not positive, or torch's convolution refuses an argument.
    """

    __constants__: ClassVar = ["stride", "dilation", "margins", "padding_mode"]
    _torch_layer: ClassVar[type[nn.Conv1d | nn.Conv2d | nn.Conv3d]]

    @checked
    def __init__(
        self,
        in_channels: Count,
        out_channels: Count,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Margins = 0,
        dilation: Sizes = 1,
        *,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        filters_per_example: bool = False,
        prior_scale: Positive = 1.0,
        bias_prior_scale: Positive = 1.0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = (in_channels, out_channels, kernel_size, stride, padding, dilation)
        kind: Any = self._torch_layer
        geometry = kind(*sizes, padding_mode=padding_mode, device="meta")
        shape = tuple(geometry.weight.shape)
        super().__init__(shape, bias, prior_scale, bias_prior_scale, device, dtype)
        self.stride, self.dilation = geometry.stride, geometry.dilation
        self.margins = geometry._reversed_padding_repeated_twice
        self.padding_mode = "constant" if padding_mode == "zeros" else padding_mode
        self.draws_per_example = filters_per_example

    def _outputs(self, x: Tensor, coefficients: Tensor) -> Tensor:
        if any(self.margins):
            x = F.pad(x, self.margins, self.padding_mode)
        if coefficients.dim() == 2:
            convolution = getattr(F, f"conv{len(self.stride)}d")
            filters = self.weight(coefficients)
            return convolution(x, filters, None, self.stride, 0, self.dilation)
        return super()._outputs(self._patches(x), coefficients).movedim(-1, 1)

    def _patches(self, x: Tensor) -> Tensor:
        """Cut the padded ``x (batch, channels, *space)`` into patches ``(batch, *positions, in)``."""
        geometry = zip(self.weight_shape[2:], self.stride, self.dilation, strict=True)
        for dim, (size, step, gap) in enumerate(geometry, start=2):
            x = x.unfold(dim, gap * (size - 1) + 1, step)[..., ::gap]
        return x.movedim(1, -len(self.stride) - 1).flatten(-len(self.stride) - 1)


class WalshHadamardConv1d(WalshHadamardConv):
    """The :class:`WalshHadamardConv` in one dimension."""

    _torch_layer = nn.Conv1d


class WalshHadamardConv2d(WalshHadamardConv):
    """The :class:`WalshHadamardConv` in two dimensions."""

    _torch_layer = nn.Conv2d


class WalshHadamardConv3d(WalshHadamardConv):
    """The :class:`WalshHadamardConv` in three dimensions."""

    _torch_layer = nn.Conv3d


_LAYERS: dict[type, Any] = {nn.Linear: WalshHadamardLinear} | {
    layer._torch_layer: layer
    for layer in (WalshHadamardConv1d, WalshHadamardConv2d, WalshHadamardConv3d)
}


@dataclass(frozen=True)
class WalshHadamard(CheckedFields):
    """Option for the ``layers`` of ``bayesianize``: Walsh-Hadamard layers in place of a net's layers.

    See :class:`WalshHadamardLinear`. The prior of a weight must be one normal around zero for all
    elements. The bias keeps its prior.

    Args:
        filters_per_example: As for :class:`WalshHadamardConv`; dense layers always sample for each
            example.

    Example:
        >>> from pyro_structvi import bayesianize
        >>> net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
        >>> bayes_net = bayesianize(net, prior=0.3, layers={"0": WalshHadamard()})
        >>> bayes_net[0]
        WalshHadamardLinear(weight (64, 4) of 16 x 4 coefficients)
    """

    filters_per_example: bool = field(default=False, repr=False)
    needs: ClassVar[str] = (
        "an nn.Linear or a convolution without groups, with nothing frozen, and without hooks or "
        "reparametrized weights"
    )

    def fits(self, module: nn.Module) -> bool:
        """Whether there is a Walsh-Hadamard layer for the module."""
        is_frozen = not all(parameter.requires_grad for parameter in module.parameters())
        one_group = getattr(module, "groups", 1) == 1
        return type(module) in _LAYERS and one_group and not is_frozen and is_plain(module)

    def convert(self, module: Any, name: str, prior: Prior) -> WalshHadamardLayer:
        """Return the Walsh-Hadamard layer of a module; its initial weights have the same mean square."""
        prefix = f"{name}." if name else ""
        options: dict[str, Any] = {
            "bias": False,
            "prior_scale": _one_scale(prior, f"{prefix}weight", module.weight),
            "device": module.weight.device,
            "dtype": module.weight.dtype,
        }
        if type(module) is not nn.Linear:
            options["filters_per_example"] = self.filters_per_example
        layer: WalshHadamardLayer = _LAYERS[type(module)](**geometry_of(module), **options)
        layer._start_like(module.weight.square().mean())
        if module.bias is not None:
            bias_prior = resolve_prior(prior, f"{prefix}bias", module.bias)
            layer._sample_bias(bias_prior, module.bias.detach())
        return layer


def _one_scale(prior: Prior, name: str, weight: Tensor) -> float:
    """Return the standard deviation of all elements of a weight."""
    resolved = resolve_prior(prior, name, weight, weight.shape[1:].numel())
    if isinstance(resolved, dist.Normal) and not resolved.loc.any():
        smallest, largest = resolved.scale.aminmax()
        if smallest == largest:
            return float(largest)
    raise ValueError(
        f"The prior for '{name}' must be one normal around zero for all elements, such as a number "
        f"or FanIn(), since the layer becomes WalshHadamard(), but got {resolved!r}."
    )
