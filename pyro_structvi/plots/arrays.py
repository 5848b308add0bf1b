"""What users give to be drawn, as checked arrays of numpy."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyro_structvi._checks import brief, check_classes, shape_text

# What can be drawn: a list of numbers too, where one dimension is enough.
Values = Tensor | np.ndarray | Sequence[float]
Matrix = Tensor | np.ndarray
Array = NDArray[np.float64]


def real_array(name: str, values: Values, dim: int = 1) -> Array:
    """Return finite real numbers in so many dimensions as an array in double.

    Raises:
        ValueError: If they are no real numbers, not finite, none at all, or have another dimension.
    """
    if isinstance(values, Tensor):
        values = values.detach()
        readable = not (values.is_complex() or values.is_meta or values.dtype == torch.bool)
        array = values.cpu().double().numpy() if readable else np.array(None)
    else:
        array = np.asarray(values)
    if array.dtype.kind not in "iuf":
        raise ValueError(f"`{name}` must hold real numbers, but got {brief(values)}.")
    if array.ndim != dim or not array.size:
        raise ValueError(
            f"`{name}` must hold at least one number, in {dim} dimension{'s' * (dim > 1)}, but got the "
            f"shape {shape_text(array.shape)}."
        )
    if not np.isfinite(array).all():
        raise ValueError(f"`{name}` must be finite everywhere, but is not.")
    return array.astype(np.float64)


def class_array(name: str, values: Values, size: int) -> NDArray[np.int64]:
    """Return whole numbers from 0 to ``size - 1``, or raise a ``ValueError``."""
    tensor = values if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))
    check_classes(name, tensor, size)
    classes: NDArray[np.int64] = tensor.cpu().long().numpy()
    return classes


def check_as_many(name: str, values: Array, other: str, others: Array) -> None:
    """Raise a ``ValueError`` unless two arrays have equally many entries along their last dimension."""
    if values.shape[-1] != others.shape[-1]:
        raise ValueError(
            f"`{name}` and `{other}` must have as many values, but got {values.shape[-1]} and "
            f"{others.shape[-1]}."
        )


def check_not_negative(name: str, values: Array, meaning: str) -> None:
    """Raise a ``ValueError`` if an entry is below zero."""
    if (values < 0).any():
        raise ValueError(f"`{name}` must be {meaning}, so at least 0, but has an entry below 0.")


def check_shares(name: str, values: Array) -> None:
    """Raise a ``ValueError`` unless every entry is between 0 and 1."""
    if (values < 0).any() or (values > 1).any():
        raise ValueError(
            f"`{name}` must hold shares from 0 to 1, but has an entry outside. Divide "
            "percentages by 100."
        )


def by_label(
    name: str, values: Values | Mapping[str, Values], label: str | None
) -> dict[str | None, tuple[str, Array]]:
    """Return arrays by the label of their curve, each with the name that errors call it by.

    Args:
        name: The argument as the caller wrote it.
        values: One array, or several by label.
        label: The label of a single array.

    Raises:
        ValueError: If there is no array, or ``label`` is given beside a mapping.
    """
    if not isinstance(values, Mapping):
        return {label: (name, real_array(name, values))}
    if not values:
        raise ValueError(f"`{name}` must hold at least one entry, but is empty.")
    if label is not None:
        raise ValueError(
            f"`label` must be None where `{name}` is a mapping: its keys are the labels."
        )
    named = {key: f"{name}[{key!r}]" for key in values}
    return {key: (named[key], real_array(named[key], values[key])) for key in values}
