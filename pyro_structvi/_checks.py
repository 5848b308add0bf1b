"""The one place that words errors about shapes, signs, types, devices and dtypes."""

from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor


def shape_text(shape: Iterable[Any]) -> str:
    """Return a shape as ``(3, 2)``, for any kind of sequence."""
    sizes = [str(size) for size in shape]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


def check_shape(name: str, tensor: Tensor, expected: Iterable[int], meaning: str) -> None:
    """Raise a ``ValueError`` unless ``tensor`` has exactly the expected shape.

    Args:
        name: The argument as the caller wrote it.
        tensor: What was given.
        expected: The shape it must have.
        meaning: That shape in letters, such as ``"(in, k)"``.

    Raises:
        ValueError: If the shapes differ.
    """
    expected = tuple(expected)
    if tuple(tensor.shape) != expected:
        raise ValueError(
            f"`{name}` must have shape {meaning} = {shape_text(expected)}, "
            f"but got {shape_text(tensor.shape)}."
        )


def check_broadcastable(name: str, tensor: Tensor, shape: Iterable[int], meaning: str) -> None:
    """Raise a ``ValueError`` unless ``tensor`` broadcasts to ``shape`` without enlarging it."""
    shape = tuple(shape)
    trailing = shape[len(shape) - tensor.dim() :] if tensor.dim() else ()
    fits = tensor.dim() <= len(shape) and all(
        size in (1, full) for size, full in zip(tensor.shape, trailing, strict=True)
    )
    if not fits:
        raise ValueError(
            f"`{name}` must broadcast to {meaning} = {shape_text(shape)}, "
            f"but got shape {shape_text(tensor.shape)}."
        )


def check_positive(name: str, tensor: Tensor) -> None:
    """Raise a ``ValueError`` unless every entry of ``tensor`` is finite and above zero."""
    valid = (tensor > 0) & torch.isfinite(tensor)
    if not bool(valid.all()):
        worst = tensor.detach()[~valid].min().item()
        raise ValueError(
            f"`{name}` must be positive and finite everywhere, but it has an entry {worst}. "
            f"Pass a standard deviation, for instance `{name}.exp()` of an unconstrained tensor."
        )


def check_cholesky_factor(name: str, tensor: Tensor) -> None:
    """Raise a ``ValueError`` unless ``tensor`` is lower triangular with a positive diagonal."""
    check_positive(f"{name}.diagonal()", tensor.diagonal(dim1=-2, dim2=-1))
    above = tensor.detach().triu(1)
    if bool(above.any()):
        raise ValueError(
            f"`{name}` must be lower triangular, but it has an entry "
            f"{above[above != 0][0].item()} above the diagonal. Pass "
            f"`torch.linalg.cholesky(covariance)`, or `{name}.tril()`."
        )


def check_positive_number(name: str, value: Any) -> float:
    """Return ``value`` as a float, or raise unless it is one finite number above zero."""
    valid = isinstance(value, Real) and not isinstance(value, bool)
    if not valid or not 0 < value < float("inf"):
        raise ValueError(f"`{name}` must be a positive number, but got {value!r}.")
    return float(value)


def check_boolean(name: str, value: Any) -> None:
    """Raise a ``TypeError`` unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False, but got {value!r}.")


def check_fraction(name: str, value: Any) -> float:
    """Return ``value`` as a float, or raise unless it is a number of at least 0 and below 1."""
    valid = isinstance(value, Real) and not isinstance(value, bool)
    if not valid or not 0 <= value < 1:
        raise ValueError(f"`{name}` must be a number of at least 0 and below 1, but got {value!r}.")
    return float(value)


def check_positive_integer(name: str, value: Any) -> int:
    """Return ``value``, or raise unless it is a whole number of at least 1."""
    is_whole = isinstance(value, Integral) and value is not True and value is not False
    if not is_whole or value < 1:
        raise ValueError(f"`{name}` must be a whole number of at least 1, but got {value!r}.")
    return int(value)


def check_event_dim(event_dim: Any, name: str, tensor: Tensor) -> int:
    """Return ``event_dim``, or raise unless a tensor has that many dimensions, none or more."""
    is_whole = isinstance(event_dim, Integral) and not isinstance(event_dim, bool)
    if not is_whole or not 0 <= event_dim <= tensor.dim():
        raise ValueError(
            f"`event_dim` must be a whole number from 0 to the {tensor.dim()} dimensions of `{name}`, "
            f"but got {event_dim!r}. A matrix has event_dim=2."
        )
    return int(event_dim)


def check_same_kind(name: str, tensor: Tensor, reference_name: str, reference: Tensor) -> None:
    """Raise a ``ValueError`` unless both tensors share device and dtype."""
    for attribute in ("device", "dtype"):
        expected, got = getattr(reference, attribute), getattr(tensor, attribute)
        if expected != got:
            raise ValueError(
                f"`{name}` must have the {attribute} of `{reference_name}`, {expected}, but got "
                f"{got}. Convert it with `{name}.to({reference_name})`."
            )


def check_no_nan(name: str, tensor: Tensor) -> None:
    """Raise a ``ValueError`` if a floating-point tensor holds a NaN."""
    if tensor.is_floating_point() and bool(torch.isnan(tensor).any()):
        count = int(torch.isnan(tensor).sum())
        raise ValueError(
            f"`{name}` holds {count} NaN of {tensor.numel()} values. Drop those rows or fill them "
            f"in first, for instance with `torch.nan_to_num({name})`."
        )
