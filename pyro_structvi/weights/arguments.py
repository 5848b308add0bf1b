"""Checks of the tensor arguments and the required members of distributions."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_structvi._checks import (
    Whole,
    brief,
    check,
    check_cholesky_factor,
    check_finite,
    check_no_nan,
    check_positive,
    check_real,
    check_same_kind,
    check_shape,
    shape_text,
)
from pyro_structvi._torch import inside_jit_trace
from pyro_structvi.linalg.matrices import identity_like


class _Orthogonal(constraints.Constraint):
    """Square matrices whose columns are orthonormal."""

    event_dim = 2

    def check(self, value: Tensor) -> Tensor:
        error = (value.mT @ value - identity_like(value)).abs().amax((-2, -1))
        return error <= value.shape[-1] * torch.finfo(value.dtype).eps ** 0.5


orthogonal = _Orthogonal()


@dataclass(frozen=True)
class Argument:
    """The shape and the constraint of a tensor argument, for its annotation.

    Args:
        shape: The dimensions behind the batch, such as ``"out, in, in"``: ``out`` and ``in`` are
            those of the weight as a matrix, ``D`` is their product, ``in / g`` a quotient, and
            another letter a free size, the same in all arguments. ``""`` is one number.
        constraint: The constraint of its values.
    """

    shape: str
    constraint: Any = constraints.real

    @property
    def letters(self) -> tuple[str, ...]:
        """The dimensions one by one."""
        parts = self.shape.split(",") if self.shape else []
        return tuple(" / ".join(each.strip() for each in part.split("/")) for part in parts)

    @property
    def text(self) -> str:
        """The shape for errors, such as ``(*batch, out, in)``."""
        return shape_text(("*batch", *self.letters))


def declared(cls: type) -> dict[str, Argument]:
    """Return the annotated arguments of a class, without inherited ones, by name."""
    annotations = inspect.get_annotations(cls)
    if any(
        isinstance(hint, str) and f"{Argument.__name__}(" in hint for hint in annotations.values()
    ):
        annotations = inspect.get_annotations(cls, eval_str=True)
    found = {name: getattr(hint, "__metadata__", ()) for name, hint in annotations.items()}
    return {
        name: metadata[0]
        for name, metadata in found.items()
        if metadata and isinstance(metadata[0], Argument)
    }


def check_event_dim(parameters: Mapping[str, Tensor], name: str, argument: Argument) -> None:
    """Raise unless ``loc`` and an argument have dimensions enough."""
    for each in ("loc", name):
        check(each, parameters[each], Tensor)
    loc, other = parameters["loc"], parameters[name]
    batch_dim = other.dim() - len(argument.letters)
    if batch_dim < 0 or loc.dim() <= batch_dim:
        raise ValueError(
            f"`loc` must have shape (*batch, out, *rest) and `{name}` {argument.text}, "
            f"but got {shape_text(loc.shape)} and {shape_text(other.shape)}."
        )


def check_declared(q: Any, arguments: Mapping[str, Argument]) -> None:
    """Raise unless the arguments of a distribution over weights fit its annotations."""
    out, size = q.as_matrix(q.loc).shape[-2:]
    sizes = {"out": out, "in": size, "D": out * size}
    owners = dict.fromkeys(sizes, "loc")
    values = {name: getattr(q, name) for name in arguments}
    for name, argument in arguments.items():
        for letter, own in zip(argument.letters[::-1], values[name].shape[::-1], strict=False):
            sizes.setdefault(letter, own)
            owners.setdefault(letter, name)

    def size_of(letter: str) -> Any:
        whole, _, part = letter.partition(" / ")
        if part in sizes:
            return Fraction(sizes[whole], sizes[part] or 1)
        return sizes.get(letter, 1)

    for name, argument in arguments.items():
        expected = (*q.batch_shape, *map(size_of, argument.letters))
        others = {owners.get(letter, name) for letter in argument.letters} - {"loc", name}
        by = " and ".join(["loc", *sorted(others)])
        check_shape(name, values[name], expected, argument.text, by=by)
    for name, argument in arguments.items():
        constraint, value = argument.constraint, values[name]
        if constraint is constraints.positive:
            check_positive(name, value)
        elif constraint is constraints.lower_cholesky:
            check_cholesky_factor(name, value)
        elif constraint is orthogonal and not bool(orthogonal.check(value).all()):
            raise ValueError(
                f"`{name}` must have orthonormal columns, but `{name}.mT @ {name}` is not the identity. "
                f"Pass `torch.linalg.qr({name}).Q`."
            )
        elif not bool(constraint.check(value).all()):
            raise ValueError(f"`{name}` must satisfy the constraint {constraint}, but does not.")


def check_parameters(q: Any, parameters: Mapping[str, Tensor], event_dim: int) -> None:
    """Raise unless all tensors have one real dtype and device, and real arguments are finite."""
    reference_name, reference = next(iter(parameters.items()))
    if not reference.numel():
        raise ValueError(f"`{reference_name}` must have elements, but got {brief(reference)}.")
    if not 0 <= event_dim <= reference.dim():
        raise ValueError(
            f"`event_dim` must be at least 0 and at most the {reference.dim()} dimensions of "
            f"`{reference_name}`, but got {event_dim!r}."
        )
    for name, value in parameters.items():
        check_same_kind(name, value, reference_name, reference)
        check_real(name, value)
        if q.arg_constraints.get(name) is constraints.real:
            check_finite(name, value)


def check_input(q: Any, x: Tensor) -> None:
    """Raise unless ``x`` is an input ``(*batch, in)`` of a weight."""
    check("x", x, Tensor)
    size = q.event_shape[1:].numel()
    if x.dim() < 1 or x.shape[-1] != size:
        raise ValueError(
            f"`x` must have shape (*batch, in) with in = {size}, but got {tuple(x.shape)}."
        )
    check_same_kind("x", x, q.argument_names[0], q._first_parameter)


def check_value(
    value: Tensor, name: str, parameter: Tensor, batch_shape: torch.Size, event_shape: torch.Size
) -> None:
    """Raise unless ``value`` has the dtype and device of a parameter, and fits the shapes."""
    check("value", value, Tensor)
    check_same_kind("value", value, name, parameter)
    check_no_nan("value", value)
    shape, event_dim = batch_shape + event_shape, len(event_shape)
    pairs = enumerate(zip(reversed(value.shape), reversed(shape), strict=False))
    fits = all(one == own or (dim >= event_dim and 1 in (one, own)) for dim, (one, own) in pairs)
    if not fits or value.dim() < event_dim:
        raise ValueError(
            "`value` must have shape (*sample, *batch, *event), where (*batch, *event) is "
            f"{shape_text(shape)}, but got {shape_text(value.shape)}."
        )


def as_size(name: str, shape: Any) -> torch.Size:
    """Return a shape, or raise unless it is a sequence of sizes, or of tensors in a tracer."""
    if not inside_jit_trace() and (not isinstance(shape, tuple) or shape):
        check(name, shape, Sequence[Whole])
    return torch.Size(shape)


def as_expanded(shape: Any, own: torch.Size) -> torch.Size:
    """Return a ``batch_shape``, or raise unless the shape ``own`` expands to it."""
    size = as_size("batch_shape", shape)
    pairs = zip(reversed(own), reversed(size), strict=False)
    if len(size) < len(own) or not all(mine in (1, new) for mine, new in pairs):
        raise ValueError(
            f"`batch_shape` must be a shape to which {shape_text(own)} can be expanded, but got "
            f"{shape_text(size)}."
        )
    return size
