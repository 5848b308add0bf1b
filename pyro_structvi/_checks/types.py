"""Whether arguments are what annotations say.

:func:`checked` holds the arguments of a function against its annotations, which may state a
:class:`Rule` beside a type, such as :data:`Count`. No message prints a user's data: types and shapes
stand for them.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, wraps
from inspect import Parameter, signature
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from torch import Tensor
from torch.distributions import Distribution

T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True)
class Rule:
    """What an annotation says of an argument beside its type: in words, and as a test."""

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

    Where it takes ``validate_args``, it does so only if arguments are to be validated.
    """
    return checked_as()(target)


def checked_as(**rules: Any) -> Callable[[T], T]:
    """Let a function check its arguments as :func:`checked` does, some by rules in place of their types.

    Args:
        **rules: Annotations with rules by the name of the argument; the signature keeps plain types.
    """
    return lambda target: _checking(target, rules)


def _checking(target: T, rules: Mapping[str, Any]) -> T:
    loose = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
    parameters = signature(target).parameters.items()
    names = [name for name, own in parameters if own.kind not in loose]
    positional = [name for name, own in parameters if own.kind < Parameter.VAR_POSITIONAL]
    asked = "validate_args" in names

    @cache
    def hints() -> dict[str, Any]:
        return get_type_hints(target, include_extras=True) | dict(rules)

    @wraps(target)
    def checking(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("validate_args") is False:  # in a training step
            return target(*args, **kwargs)
        given = dict(zip(positional, args, strict=False), **kwargs) if args else kwargs
        if asked:
            check("validate_args", given.get("validate_args"), bool | None)
        if not asked or validates(given.get("validate_args")):
            for name in names:
                if name in given and name in hints():
                    check(name, given[name], hints()[name])
        return target(*args, **kwargs)

    return checking  # type: ignore[return-value]


def check_fields(record: Any) -> None:
    """Check the fields of a dataclass against their annotations; those in quotes are not read."""
    for field in fields(record):
        if not isinstance(field.type, str):
            check(field.name, getattr(record, field.name), field.type)


def validates(validate_args: Any) -> bool:
    """Whether arguments are to be validated: Pyro's own setting when None."""
    return bool(Distribution._validate_args if validate_args is None else validate_args)


def check(name: str, value: Any, hint: Any) -> None:
    """Raise an error that names the argument unless a value is what an annotation says.

    Raises:
        TypeError: If the value is of another kind.
        ValueError: If a number, or one of several names, is expected.
    """
    if type(value) is hint or (hint is Tensor and isinstance(value, Tensor)):
        return
    if isinstance(value, Mapping):
        for of_key, of_entry in map(get_args, filter(_is_mapping, _members(hint))):
            for key, entry in value.items():
                check(f"{name}.keys()", key, of_key)
                check(f"{name}[{key!r}]", entry, of_entry)
    if _accepts(value, hint):
        return
    members = [each for each in _members(hint) if each is not NoneType]
    wrong_values = [_kind_of_values(each) for each in members]
    is_value = None not in wrong_values or any(
        isinstance(value, kind) and value is not True for kind in wrong_values if kind
    )
    words = [word for each in members for word in _words(each)]
    text = " or ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)
    message = f"`{name}` must be {text}, but got {brief(value)}.{_remedy(name, value, members)}"
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
    return _article(type(value))


def _is_mapping(hint: Any) -> bool:
    return get_origin(hint) is Mapping


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
        return (
            isinstance(value, tuple)
            and len(value) == len(members)
            and all(map(_accepts, value, members))
        )
    if origin in (Sequence, tuple):
        return (
            isinstance(value, origin)
            and not isinstance(value, str)
            and all(_accepts(each, members[0]) for each in value)
        )
    if origin is Callable:
        return callable(value)
    return isinstance(value, origin or hint)


def _kind_of_values(hint: Any) -> type | None:
    """Return the type whose values may be out of an annotation's range; None where it says a type."""
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
    simple = {
        int: "a whole number",
        float: "a number",
        str: "a string",
        Callable: "a function",
    }
    return [simple.get(origin or hint) or _article(origin or hint)]


def _article(kind: type) -> str:
    prefix = "torch.nn." if kind.__module__.startswith("torch.nn.modules") else ""
    name = "torch.Tensor" if kind is Tensor else prefix + kind.__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def _remedy(name: str, value: Any, members: Iterable[Any]) -> str:
    if isinstance(value, type) and any(
        isinstance(each, type) and issubclass(value, each) for each in members
    ):
        return f" Pass an instance of it, `{value.__name__}(...)`."
    if Tensor in members and (isinstance(value, (Real, Sequence)) or hasattr(value, "__array__")):
        return f" Convert it with `torch.as_tensor({name})`."
    return ""
