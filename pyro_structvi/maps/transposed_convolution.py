"""The linear map of a transposed convolution."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pyro_structvi.maps.convolution import ConvolutionMap


@dataclass(frozen=True)
class TransposedConvolutionMap(ConvolutionMap):
    """The map of a transposed convolution without groups, for a weight seen as ``(out, in, *kernel)``.

    Torch keeps such weights as ``(in, out, *kernel)``.

    Attributes:
        function: ``F.conv_transpose1d``, ``F.conv_transpose2d`` or ``F.conv_transpose3d``.
        kernel_shape: ``(c_in, *kernel)``.
        output_padding: As in ``function``.

    Example:
        >>> import torch
        >>> linear_map = TransposedConvolutionMap(
        ...     torch.nn.functional.conv_transpose1d, (2, 3), stride=2
        ... )
        >>> linear_map(torch.ones(5, 2, 7), torch.ones(4, 6)).shape
        torch.Size([5, 4, 15])
    """

    output_padding: Any = 0

    def _convolve(self, x: Tensor, filters: Tensor, bias: Tensor | None) -> Tensor:
        settings = (self.stride, self.padding, self.output_padding, 1, self.dilation)
        filters = filters.transpose(0, 1).to(x.dtype)  # autocast on a CPU casts products alone
        return self.function(x, filters, bias, *settings)

    def _multiply_pointwise(self, hidden: Tensor, filters: Tensor, bias: Tensor | None) -> Tensor:
        return self.function(hidden, filters.transpose(0, 1), bias)

    def _multiplies_first(self, x: Tensor, matrix: Tensor) -> bool:
        """Return False: the parts of a transposed convolution are not shifted inputs."""
        return False
