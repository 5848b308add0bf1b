"""Whether tensors have the shapes, signs, devices and dtypes that they must have."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pyro_structvi._checks.types import Positive, brief, check, shape_text


def check_shape(
    name: str, tensor: Tensor, expected: Iterable[int], meaning: str, by: str = ""
) -> None:
    """Raise a ``ValueError`` unless ``tensor`` has exactly the expected shape.

    Args:
        name: The argument as the caller wrote it.
        tensor: What was given.
        expected: The shape it must have.
        meaning: That shape in letters, such as ``"(in, k)"``.
        by: The argument that this shape follows from.

    Raises:
        ValueError: If the shapes differ.
    """
    check(name, tensor, Tensor)
    expected = tuple(expected)
    if tuple(tensor.shape) != expected:
        raise ValueError(
            f"`{name}` must have shape {meaning} = {shape_text(expected)}, "
            f"but got {shape_text(tensor.shape)}{f', beside `{by}`' if by else ''}."
        )


def check_tensors(name: str, values: Any) -> None:
    """Raise unless it is a tensor, or a tuple or mapping of at least one, each with examples."""
    if isinstance(values, (tuple, Mapping)) and values:
        for key, value in values.items() if isinstance(values, Mapping) else enumerate(values):
            check_tensors(f"{name}[{key!r}]", value)
    elif not isinstance(values, Tensor):
        raise TypeError(
            f"`{name}` must be a tensor, or a tuple for a model that takes the tensors one by one, or a "
            f"mapping of tensors by keyword, but got {brief(values)}. Convert arrays with "
            f"`torch.as_tensor({name})`."
        )
    elif not values.dim() or not len(values):
        raise ValueError(
            f"`{name}` must hold at least one example, in its first dimension, but got the shape "
            f"{shape_text(values.shape)}."
        )


def check_elements(name: str, parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Raise a ``ValueError`` if one of the parameters of a net has no elements."""
    for each, parameter in parameters:
        if not parameter.numel():
            raise ValueError(
                f"`{name}` must have elements in all its parameters, but '{each}' has the shape "
                f"{shape_text(parameter.shape)}. Leave that layer out."
            )


def check_real(name: str, tensor: Tensor, dim: int = 0) -> None:
    """Raise unless a tensor has real values, and at least so many dimensions."""
    check(name, tensor, Tensor)
    if not tensor.is_floating_point() or tensor.is_meta or tensor.dim() < dim:
        least = f" in at least {dim} dimensions" if dim else ""
        raise ValueError(f"`{name}` must hold real numbers{least}, but got {brief(tensor)}.")


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise a ``ValueError`` unless every entry of a tensor is finite."""
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"`{name}` must be finite everywhere, but is not.")


def check_mask(name: str, tensor: Tensor) -> None:
    """Raise a ``TypeError`` unless a tensor holds booleans."""
    check(name, tensor, Tensor)
    if tensor.dtype != torch.bool or tensor.is_meta:
        raise TypeError(f"`{name}` must be a tensor of booleans, but got {brief(tensor)}.")


def check_classes(name: str, tensor: Tensor, size: int) -> None:
    """Raise unless a tensor holds whole numbers from 0 to ``size - 1``."""
    is_whole = tensor.dtype in (torch.int64, torch.int32) and not tensor.is_meta
    if not is_whole or not bool(((tensor >= 0) & (tensor < size)).all()):
        raise ValueError(
            f"`{name}` must hold whole numbers of at least 0 and below {size}, but got {brief(tensor)} "
            "that does not."
        )


def check_support(name: str, tensor: Tensor, support: Any) -> None:
    """Raise a ``ValueError`` unless a distribution of that support can give each value."""
    wrong = ~support.check(tensor)
    if bool(wrong.any()):
        raise ValueError(
            f"`{name}` must be in {getattr(support, 'base_constraint', support)}, as the likelihood is, "
            f"but {int(wrong.sum())} of {wrong.numel()} observations are not. Mend or drop them; "
            "classes count from 0, and the net needs an output for each."
        )


def check_broadcastable(name: str, tensor: Tensor, shape: Iterable[int], meaning: str) -> None:
    """Raise a ``ValueError`` unless ``tensor`` broadcasts to ``shape`` without enlarging it."""
    check(name, tensor, Tensor)
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
    check_real(name, tensor)
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
    check_no_nan(name, tensor)
    above = tensor.detach().triu(1)
    if bool(above.any()):
        raise ValueError(
            f"`{name}` must be lower triangular, but it has an entry "
            f"{above[above != 0][0].item()} above the diagonal. Pass "
            f"`torch.linalg.cholesky(covariance)`, or `{name}.tril()`."
        )


def check_positive_number(name: str, value: Any) -> float:
    """Return ``value`` as a float, or raise unless it is one finite number above zero."""
    check(name, value, Positive)
    return float(value)


def check_same_kind(name: str, tensor: Tensor, reference_name: str, reference: Tensor) -> None:
    """Raise a ``ValueError`` unless both tensors share device and dtype."""
    check(name, tensor, Tensor)
    for attribute in ("device", "dtype"):
        expected, got = getattr(reference, attribute), getattr(tensor, attribute)
        if expected != got:
            raise ValueError(
                f"`{name}` must have the {attribute} of `{reference_name}`, {expected}, but got "
                f"{got}. Convert it with `{name}.to({reference_name})`."
            )


def check_no_nan(name: str, tensor: Tensor) -> None:
    """Raise a ``ValueError`` if a floating-point tensor holds a NaN."""
    if tensor.is_floating_point() and tensor.is_meta:
        raise ValueError(f"`{name}` must hold values, but is on the meta device.")
    if tensor.is_floating_point() and bool(torch.isnan(tensor).any()):
        count = int(torch.isnan(tensor).sum())
        raise ValueError(
            f"`{name}` holds {count} NaN of {tensor.numel()} values. Drop those rows or fill them "
            f"in first, for instance with `torch.nan_to_num({name})`."
        )


@contextmanager
def naming(name: str, value: Any) -> Iterator[None]:
    """Let errors from inside torch, or from a user's net, say what the argument was."""
    try:
        yield
    except Exception as error:
        error.add_note(f"The argument `{name}` was {brief(value)}.")
        raise
