"""Moments of pooling: averages are exact, maxima take two elements at a time."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from pyro_structvi.linalg.matrices import floored_sqrt
from pyro_structvi.maps.convolution import for_each_dim
from pyro_structvi.moments.nonlinear import Moments, in_deviations, normal_cdf, normal_density
from pyro_structvi.moments.random_tensor import RandomTensor


def maximum_of_two(a: Moments, b: Moments) -> Moments:
    """Return the moments of the larger of two independent normals.

    References:
        Clark (1961), "The greatest of a finite set of random variables", Eqs. 4 and 5.
    """
    (ma, va), (mb, vb) = a, b
    theta = floored_sqrt(va + vb)
    alpha = in_deviations(ma - mb, theta)
    first, second = normal_cdf(alpha), normal_cdf(-alpha)
    density = theta * normal_density(alpha)
    loc = ma * first + mb * second + density
    # About the mean, without differences of large squares.
    da, db = ma - loc, mb - loc
    variance = (va + da.square()) * first + (vb + db.square()) * second + (da + db) * density
    return loc, variance.clamp_min(0)


def _max_pool(
    dims: int,
    input: RandomTensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> RandomTensor:
    """Return the moments of the maximum over windows; each maximum of two counts as normal."""
    kernel, padding, dilation = (
        for_each_dim(value, dims) for value in (kernel_size, padding, dilation)
    )
    stride = kernel if stride is None or stride == [] else for_each_dim(stride, dims)
    if ceil_mode or return_indices or any(d != 1 for d in dilation):
        raise NotImplementedError(
            "Max pooling with `ceil_mode`, `return_indices` or a dilation has no moments"
        )
    loc, variance = input.loc, input.variance
    if any(padding):
        low = (loc.min() - 40 * floored_sqrt(variance.max())).detach()
        width = [size for size in reversed(padding) for _ in range(2)]
        pads = F.pad(torch.zeros_like(loc), width, value=1.0).bool()
        loc, variance = torch.where(pads, low, F.pad(loc, width)), F.pad(variance, width)
    for axis, (size, step) in enumerate(zip(kernel, stride, strict=True), input.dim() - dims):
        loc, variance = (part.unfold(axis, size, step) for part in (loc, variance))
    columns = (part.flatten(-dims).unbind(-1) for part in (loc, variance))
    parts: list[Moments] = [*zip(*columns, strict=True)]
    while len(parts) > 1:  # in rounds of pairs
        pairs = zip(parts[::2], parts[1::2], strict=False)
        parts = [maximum_of_two(*pair) for pair in pairs] + parts[len(parts) // 2 * 2 :]
    return RandomTensor(*parts[0], input.settings)


def _average_pool(
    dims: int,
    input: RandomTensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> RandomTensor:
    """Return the moments of averages over windows."""
    if ceil_mode or divisor_override is not None or (not count_include_pad and padding):
        raise NotImplementedError(
            "Average pooling with `ceil_mode`, `divisor_override`, or padding that does not count, has "
            "no moments"
        )
    pool = getattr(F, f"avg_pool{dims}d")
    loc, variance = (
        pool(part, kernel_size, stride, padding) for part in (input.loc, input.variance)
    )
    count = torch.Size(for_each_dim(kernel_size, dims)).numel()
    return RandomTensor(loc, variance / count, input.settings)


def _adaptive_average_pool(dims: int, input: RandomTensor, output_size: Any) -> RandomTensor:
    """Return the moments of averages over windows that fill the input."""
    old = input.shape[-dims:]
    new = [own or size for own, size in zip(for_each_dim(output_size, dims), old, strict=True)]
    counts = input.loc.new_ones(())
    for size, parts in zip(old, new, strict=True):
        own = [-(-(i + 1) * size // parts) - i * size // parts for i in range(parts)]
        counts = counts.unsqueeze(-1) * counts.new_tensor(own)
    pool = getattr(F, f"adaptive_avg_pool{dims}d")
    return RandomTensor(pool(input.loc, new), pool(input.variance, new) / counts, input.settings)


POOLING_RULES: dict[str, Callable[..., Any]] = {
    f"{name}_pool{dims}d": partial(rule, dims)
    for name, rule in (
        ("max", _max_pool),
        ("avg", _average_pool),
        ("adaptive_avg", _adaptive_average_pool),
    )
    for dims in (1, 2, 3)
}
