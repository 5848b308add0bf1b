"""Checks of arguments against their annotations, and of tensors; warnings at the user's line."""

import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache, wraps
from inspect import Parameter, Signature, getfile, signature
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import pyro
import torch
from torch import Tensor
from torch.distributions import Distribution

T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True)
class Rule:
    """The rule of an annotation for an argument: in words, and as a test."""

    words: str
    holds: Callable[[Any], bool]

    def __repr__(self) -> str:
        return self.words


Count = Annotated[int, Rule("a whole number of at least 1", lambda value: value >= 1)]
Whole = Annotated[int, Rule("a whole number of at least 0", lambda value: value >= 0)]
Positive = Annotated[float, Rule("a positive number", lambda value: 0 < value < math.inf)]
NonNegative = Annotated[
    float, Rule("a finite number of at least 0", lambda value: 0 <= value < math.inf)
]
Share = Annotated[float, Rule("a number of at least 0 and below 1", lambda value: 0 <= value < 1)]
NO_CLASS = Rule("a function or a module", lambda value: not isinstance(value, type))
Program = Annotated[Callable[..., Any], NO_CLASS]


def checked(target: T) -> T:
    """Let a function check its arguments against its annotations.

    A function with ``validate_args`` checks them only if arguments are to be validated.
    """
    loose = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
    own = signature(target)
    parameters = own.parameters.items()
    names = [name for name, each in parameters if each.kind not in loose]
    positional = [name for name, each in parameters if each.kind < Parameter.VAR_POSITIONAL]
    asked = "validate_args" in names

    @cache
    def hints() -> dict[str, Any]:
        return get_type_hints(target, include_extras=True)

    @wraps(target)
    def checking(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("validate_args") is False:  # in a training step
            return target(*args, **kwargs)
        given = kwargs | dict(zip(positional, args, strict=False)) if args else kwargs
        if asked:
            check("validate_args", given.get("validate_args"), bool | None)
        if not asked or validates(given.get("validate_args")):
            for name in names:
                if name in given and name in hints():
                    check(name, given[name], hints()[name])
        return target(*args, **kwargs)

    checking.__signature__ = _of_types(target)  # type: ignore[attr-defined]
    return checking  # type: ignore[return-value]


def _of_types(target: Callable[..., Any]) -> Signature:
    """Return the signature of a function with types alone, which a help text shows."""
    own, given = signature(target), target.__annotations__.items()
    # What annotations in quotes name may be defined later.
    known = {name: each for name, each in given if not isinstance(each, str)}
    hints = get_type_hints(SimpleNamespace(__annotations__=known))
    return own.replace(
        parameters=[
            each.replace(annotation=hints.get(name, each.annotation))
            for name, each in own.parameters.items()
        ]
    )


class _PlainSignature:
    """The attribute ``__signature__`` of a class, with types alone."""

    def __get__(self, record: Any, kind: type) -> Signature:
        own = _of_types(kind.__init__)  # type: ignore[misc]
        return own.replace(parameters=[*own.parameters.values()][1:])


class CheckedFields:
    """A base of dataclasses that checks fields by their annotations; those in quotes are not read."""

    __signature__ = _PlainSignature()

    def __post_init__(self) -> None:
        """Check the fields."""
        for field in fields(self):  # type: ignore[arg-type]
            if not isinstance(field.type, str):
                check(field.name, getattr(self, field.name), field.type)


# As torch's default of `validate_args`: false, and unlike the False of a user, who wants no checks.
LATER: Any = 0


def validates(validate_args: Any) -> bool:
    """Whether arguments are to be validated: Pyro's own setting when None."""
    return bool(Distribution._validate_args if validate_args is None else validate_args)


def check(name: str, value: Any, hint: Any) -> None:
    """Raise an error that names the argument unless a value follows its annotation.

    It is a ``ValueError`` if a number, or one of several names, is expected, else a ``TypeError``.
    """
    if type(value) is hint or (hint is Tensor and isinstance(value, Tensor)):
        return
    if isinstance(value, Mapping):
        mappings = [each for each in _members(hint) if get_origin(each) is Mapping]
        for of_key, of_entry in map(get_args, mappings):
            for key, entry in value.items():
                check(f"{name}.keys()", key, of_key)
                check(f"{name}[{key!r}]", entry, of_entry)
    if _accepts(value, hint):
        return
    members = [each for each in _members(hint) if each is not NoneType]
    is_list = isinstance(value, (list, tuple)) and len(members) == 1
    if is_list and get_origin(members[0]) is Sequence:
        for number, entry in enumerate(value):
            check(f"{name}[{number}]", entry, get_args(members[0])[0])
    wrong_values = [_kind_of_values(each) for each in members]
    is_value = None not in wrong_values or any(
        isinstance(value, kind) and value is not True for kind in wrong_values if kind
    )
    words = [word for each in members for word in _words(each)]
    text = " or ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)
    remedy = _wrong_item(value, members) or f".{_remedy(name, value, members)}"
    message = f"`{name}` must be {text}, but got {brief(value)}{remedy}"
    raise ValueError(message) if is_value else TypeError(message)


def shape_text(shape: Iterable[Any]) -> str:
    """Return a shape as ``(3, 2)``, for any kind of sequence."""
    sizes = [str(size) for size in shape]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


def brief(value: Any) -> str:
    """Say what a value is without its data: numbers and short strings as they are."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, Tensor) or type(value).__name__ == "ndarray":
        return f"{_article(type(value))} of shape {shape_text(value.shape)} and dtype {value.dtype}"
    parts = value if isinstance(value, (tuple, list)) else (value,)
    if all(isinstance(part, (Real, str, NoneType)) for part in parts) and len(repr(value)) <= 60:
        return repr(value)
    keys = f" with the keys {[*value]}" if isinstance(value, Mapping) else ""
    return _article(type(value)) + keys * (len(keys) <= 80)


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _accepts(value: Any, hint: Any) -> bool:
    origin, members = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(_accepts(value, each) for each in members)
    if origin is Annotated:
        return _accepts(value, members[0]) and members[1].holds(value)
    if origin is Literal:
        return isinstance(value, (str, bool)) and value in members
    if hint in (int, float):
        is_number = isinstance(value, Integral if hint is int else Real)
        return is_number and value is not True and value is not False
    if origin is tuple and ... not in members:
        has_length = isinstance(value, tuple) and len(value) == len(members)
        return has_length and all(map(_accepts, value, members))
    if origin in (Sequence, tuple):
        is_sequence = isinstance(value, origin) and not isinstance(value, str)
        return is_sequence and all(_accepts(each, members[0]) for each in value)
    if origin is Callable:
        return callable(value)
    return isinstance(value, origin or hint)


def _kind_of_values(hint: Any) -> type | None:
    """Return the type whose values may be out of an annotation's range, or None."""
    base = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if get_origin(base) is Literal:
        return str
    return Real if base in (int, float) or get_origin(base) is tuple else None


def _words(hint: Any) -> list[str]:
    origin, members = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return [str(members[1])]
    if origin is Literal:
        return [f'"{each}"' if isinstance(each, str) else str(each) for each in members]
    if origin is tuple and ... not in members:
        return [f"({', '.join(word for each in members for word in _words(each))})"]
    if hint is bool:
        return ["True", "False"]
    simple = {int: "a whole number", float: "a number", str: "a string", Callable: "a function"}
    return [simple.get(origin or hint) or _article(origin or hint)]


def _article(kind: type) -> str:
    prefix = "torch.nn." if kind.__module__.startswith("torch.nn.modules") else ""
    name = "torch.Tensor" if kind is Tensor else prefix + kind.__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def _wrong_item(value: Any, members: Iterable[Any]) -> str:
    """Say which item of a list keeps it from being a sequence that is accepted."""
    kinds = [get_args(each)[0] for each in members if get_origin(each) is Sequence]
    for number, item in enumerate(value if kinds and isinstance(value, (list, tuple)) else ()):
        if not any(_accepts(item, kind) for kind in kinds):
            return f", whose item {number} is {brief(item)}."
    return ""


def _remedy(name: str, value: Any, members: Iterable[Any]) -> str:
    if isinstance(value, type) and any(
        isinstance(each, type) and issubclass(value, each) for each in members
    ):
        return f" Pass an instance of it, `{value.__name__}(...)`."
    if Tensor in members and (isinstance(value, (Real, Sequence)) or hasattr(value, "__array__")):
        return f" Convert it with {_conversion(name, value)}."
    return ""


def _conversion(name: str, value: Any) -> str:
    """Return code that makes a tensor; torch reads no rows of pandas or polars."""
    return f"`torch.as_tensor({name}{'.to_numpy()' * hasattr(value, 'to_numpy')})`"


def check_shape(
    name: str, tensor: Tensor, expected: Iterable[int], meaning: str, by: str = ""
) -> None:
    """Raise a ``ValueError`` unless a tensor has a shape, "(in, k)", that follows from ``by``."""
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
            f"mapping of tensors, but got {brief(values)}. Convert arrays with "
            f"{_conversion(name, values)}."
        )
    elif not values.dim() or not len(values):
        raise ValueError(
            f"`{name}` must hold at least one example, in its first dimension, but got the shape "
            f"{shape_text(values.shape)}."
        )


def check_real(name: str, tensor: Tensor, dim: int = 0, whole: bool = False) -> None:
    """Raise unless a tensor has real values, or ``whole`` ones, and at least so many dimensions."""
    check(name, tensor, Tensor)
    is_whole = whole and not tensor.is_complex() and tensor.dtype != torch.bool
    is_real = tensor.is_floating_point() or is_whole
    if not is_real or tensor.is_meta or tensor.dim() < dim:
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
    is_whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    classes = tensor.long()  # torch does not compare some unsigned integers
    if not is_whole or tensor.is_meta or not bool(((classes >= 0) & (classes < size)).all()):
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
    pairs = zip(reversed(tensor.shape), reversed(shape), strict=False)
    if tensor.dim() > len(shape) or not all(size in (1, full) for size, full in pairs):
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


_FOLDERS = (Path(__file__).parent, *(Path(getfile(each)).parent for each in (pyro, torch)))
_OURS = tuple(f"{folder}/" for folder in _FOLDERS)


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn, as of the first line on the stack that is not of this package, of Pyro or of torch."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
