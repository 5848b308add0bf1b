"""Moments of functions that only move elements: means and variances move alike."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_structvi._torch import put_together, take_apart
from pyro_structvi.moments.random_tensor import RandomTensor, known, moments, random_among


def _rearrange(name: str, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply a method of tensors to mean and variance of its first argument."""
    args = tuple(arg.loc if isinstance(arg, RandomTensor) else arg for arg in args)
    if not isinstance(x, RandomTensor):
        return getattr(x, name)(*args, **kwargs)
    if name in _KEEPS_ORDER and getattr(x.loc, name)(*args, **kwargs).shape == x.shape:
        return x  # as `nn.Flatten` in a dense net
    return _moved(lambda part: getattr(part, name)(*args, **kwargs), x)


def _moved(move: Callable[[Tensor], Any], x: RandomTensor) -> Any:
    """Return what a function that only moves elements makes of a random tensor, or several of it."""
    locs, structure = take_apart(move(x.loc))
    variances = take_apart(move(x.variance))[0]
    covariances: list[Tensor | None] = [None for _ in locs]
    if x.covariance is not None:
        numbers = torch.arange(x.numel(), device=x.device).reshape(x.shape)
        covariances = [_covariance_at(x, part) for part in take_apart(move(numbers))[0]]
    moved = zip(locs, variances, covariances, strict=True)
    return put_together([RandomTensor(m, v, x.settings, own) for m, v, own in moved], structure)


def _covariance_at(x: RandomTensor, numbers: Tensor) -> Tensor | None:
    """Return the covariance between elements ``(batch, size)`` by number, if rows stay together."""
    if numbers.dim() != 2 or not numbers.numel() or x.dim() != 2 or x.covariance is None:
        return None
    rows, columns = numbers // x.shape[-1], numbers % x.shape[-1]
    if bool((rows != rows[:, :1]).any()):
        return None
    return x.covariance[rows[:, :1, None], columns.unsqueeze(-1), columns.unsqueeze(-2)]


def _attribute(name: str, x: RandomTensor) -> Any:
    return _moved(lambda part: getattr(part, name), x)


def _convert(name: str, x: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Convert, keeping the covariance too."""

    def convert(part: Tensor) -> Tensor:
        converted: Tensor = getattr(part, name)(*args, **kwargs)
        return converted

    if not isinstance(x, RandomTensor):
        args = tuple(arg.loc if isinstance(arg, RandomTensor) else arg for arg in args)
        return convert(x)
    covariance = None if x.covariance is None else convert(x.covariance)
    return RandomTensor(convert(x.loc), convert(x.variance), x.settings, covariance)


def _joined(function: Callable[..., Tensor], tensors: Any, dim: int = 0) -> RandomTensor:
    first = next(random_among([*tensors]))
    pairs = [moments(tensor) for tensor in tensors]
    variances = [known(loc, first) if v is None else v for loc, v in pairs]
    loc = function([loc for loc, _ in pairs], dim)
    return RandomTensor(loc, function(variances, dim), first.settings)


def _getitem(x: Any, index: Any) -> Any:
    if [*random_among(index)]:
        raise NotImplementedError("An index that is random has no moments")
    return _moved(lambda part: part[index], x)


def _pad(x: RandomTensor, pad: Any, mode: str = "constant", value: Any = None) -> RandomTensor:
    loc = F.pad(x.loc, pad, mode, value)
    variance = F.pad(x.variance, pad, mode, 0.0 if mode == "constant" else None)
    return RandomTensor(loc, variance, x.settings)


def _masked_fill(x: RandomTensor, mask: Tensor, value: Any) -> RandomTensor:
    loc, variance = x.loc.masked_fill(mask, value), x.variance.masked_fill(mask, 0.0)
    return RandomTensor(loc, variance, x.settings)


def _where(condition: Any, input: Any, other: Any) -> RandomTensor:
    if isinstance(condition, RandomTensor):  # `x.where(condition, other)`
        return _where(input, condition, other)
    first = next(random_among((input, other)))
    (a, va), (b, vb) = moments(input), moments(other)
    zero = first.variance.new_zeros(())
    variance = torch.where(condition, zero if va is None else va, zero if vb is None else vb)
    loc = torch.where(condition, a, b)
    return RandomTensor(loc, variance.expand(loc.shape), first.settings)


def _interpolate(
    x: RandomTensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    **kwargs: Any,
) -> RandomTensor:
    if mode not in ("nearest", "nearest-exact"):
        raise NotImplementedError(f"`interpolate` with `mode='{mode}'` has no moments")
    loc, variance = (
        F.interpolate(part, size, scale_factor, mode, **kwargs) for part in (x.loc, x.variance)
    )
    return RandomTensor(loc, variance, x.settings)


def _known_like(name: str, x: RandomTensor, *args: Any, **kwargs: Any) -> Tensor:
    make: Callable[..., Tensor] = getattr(torch, name, None) or getattr(Tensor, name)
    return make(x.loc, *args, **kwargs)


def _identity(x: RandomTensor, *args: Any, **kwargs: Any) -> RandomTensor:
    return x


_KEEPS_ORDER = {
    "reshape",
    "view",
    "flatten",
    "view_as",
    "reshape_as",
    "squeeze",
    "expand",
    "expand_as",
}
_METHODS = (
    *("reshape", "view", "flatten", "unflatten", "permute", "transpose", "swapaxes", "movedim"),
    *("squeeze", "unsqueeze", "expand", "expand_as", "repeat", "repeat_interleave", "tile", "roll"),
    *("chunk", "split", "unbind", "tensor_split", "narrow", "select", "index_select", "gather"),
    *("flip", "moveaxis", "swapdims", "broadcast_to", "ravel", "view_as", "reshape_as", "t"),
    "take_along_dim",
)
_CONVERSIONS = (
    *("to", "float", "double", "half", "bfloat16", "type_as"),
    *("contiguous", "clone", "detach"),
)
_LIKE = ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full")

REARRANGING_RULES: dict[str, Callable[..., Any]] = {
    **{name: partial(_rearrange, name) for name in _METHODS},
    **{name: partial(_attribute, name) for name in ("T", "mT")},
    **{name: partial(_convert, name) for name in _CONVERSIONS},
    **{name: partial(_known_like, name) for name in _LIKE},
    "pixel_shuffle": lambda x, n: _moved(lambda part: F.pixel_shuffle(part, n), x),
    "cat": partial(_joined, torch.cat),
    "concat": partial(_joined, torch.cat),
    "stack": partial(_joined, torch.stack),
    "getitem": _getitem,
    "identity": _identity,
    "interpolate": _interpolate,
    "masked_fill": _masked_fill,
    "pad": _pad,
    "where": _where,
}


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Return the moments of ``softmax(q k' / sqrt(d)) v``, with scores independent of the values."""
    if dropout_p:
        raise NotImplementedError("Attention with dropout has no moments")
    if enable_gqa:
        heads = query.shape[-3]
        key, value = (each.repeat_interleave(heads // each.shape[-3], -3) for each in (key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * factor) @ key.mT
    if is_causal:
        shape = (query.shape[-2], key.shape[-2])
        attn_mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1) @ value


ATTENTION_RULES: dict[str, Callable[..., Any]] = {"scaled_dot_product_attention": _attention}
