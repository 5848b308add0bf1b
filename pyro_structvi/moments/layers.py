"""Moments of normalization, dropout and softmax."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_structvi.moments.random_tensor import RandomTensor
from pyro_structvi.moments.sums import RULES as SUMS


def _batch_norm(
    input: RandomTensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> RandomTensor:
    """Scale and shift by running statistics, which is exact."""
    if training or running_mean is None or running_var is None:
        raise NotImplementedError(
            "Batch normalization by the statistics of a batch has no moments; call `model.eval()`"
        )
    ones = [1 for _ in range(input.dim() - 2)]
    centered = SUMS["sub"](input, running_mean.reshape(-1, *ones))
    found = SUMS["mul"](centered, (running_var + eps).rsqrt().reshape(-1, *ones))
    return _affine(found, weight, bias, ones)


def _affine(x: RandomTensor, weight: Any, bias: Any, ones: list[int]) -> RandomTensor:
    if weight is not None:
        x = SUMS["mul"](x, weight.reshape(*weight.shape, *ones))
    return x if bias is None else SUMS["add"](x, bias.reshape(*bias.shape, *ones))


def _standardized(x: RandomTensor, dims: list[int], eps: float) -> RandomTensor:
    """Center and scale by the statistics of many elements, whose own spread is left out.

    The expected square about the mean is exact; its root stands for the standard deviation, which is
    good where many elements enter it.
    """
    count = x.shape[dims[0] :].numel() if len(dims) > 1 else x.shape[dims[0]]
    center = x.loc.mean(dims, keepdim=True)
    mean_variance = x.variance.mean(dims, keepdim=True)
    about = x.loc - center
    square = about.square().mean(dims, keepdim=True) + (1 - 1 / count) * mean_variance
    own = (1 - 2 / count) * x.variance + mean_variance / count
    return RandomTensor(about * (square + eps).rsqrt(), own / (square + eps), x.settings)


def _layer_norm(
    input: RandomTensor,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> RandomTensor:
    dims = [*range(-len(normalized_shape), 0)]
    return _affine(_standardized(input, dims, eps), weight, bias, [])


def _group_norm(
    input: RandomTensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> RandomTensor:
    loc, variance = (
        part.reshape(len(part), num_groups, -1) for part in (input.loc, input.variance)
    )
    found = _standardized(RandomTensor(loc, variance, input.settings), [-1], eps)
    shaped = RandomTensor(
        found.loc.reshape(input.shape), found.variance.reshape(input.shape), input.settings
    )
    return _affine(shaped, weight, bias, [1 for _ in range(input.dim() - 2)])


def _rms_norm(
    input: RandomTensor, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> RandomTensor:
    dims = [*range(-len(normalized_shape), 0)]
    least = torch.finfo(input.dtype).eps if eps is None else eps
    square = (input.loc.square() + input.variance).mean(dims, keepdim=True) + least
    found = RandomTensor(input.loc * square.rsqrt(), input.variance / square, input.settings)
    return _affine(found, weight, None, [])


def _dropout(
    input: RandomTensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> RandomTensor:
    """Return the moments over the dropped elements, exact but for covariances between them."""
    if not training or p == 0:
        return input
    variance = (input.variance + p * input.loc.square()) / (1 - p)
    return RandomTensor(input.loc, variance, input.settings)


def _dropout_by_values(
    input: RandomTensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> RandomTensor:
    if training and p > 0:
        raise NotImplementedError("Alpha dropout has no moments; call `model.eval()`")
    return input


def _softmax(input: RandomTensor, dim: int, *args: Any, **kwargs: Any) -> RandomTensor:
    """Return the softmax of the means, and the variance of its tangent there."""
    p = input.loc.softmax(dim)
    own = (1 - 2 * p) * input.variance + (p.square() * input.variance).sum(dim, keepdim=True)
    return RandomTensor(p, (p.square() * own).clamp_min(0), input.settings)


def _log_softmax(input: RandomTensor, dim: int, *args: Any, **kwargs: Any) -> RandomTensor:
    p = input.loc.softmax(dim)
    variance = (1 - 2 * p) * input.variance + (p.square() * input.variance).sum(dim, keepdim=True)
    return RandomTensor(input.loc.log_softmax(dim), variance.clamp_min(0), input.settings)


RULES: dict[str, Callable[..., Any]] = {
    "batch_norm": _batch_norm,
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d"), _dropout),
    **dict.fromkeys(("alpha_dropout", "feature_alpha_dropout"), _dropout_by_values),
    "group_norm": _group_norm,
    "layer_norm": _layer_norm,
    "log_softmax": _log_softmax,
    "rms_norm": _rms_norm,
    "softmax": _softmax,
}
