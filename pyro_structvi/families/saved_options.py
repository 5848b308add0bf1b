"""The options of families in state dicts: a posterior is its parameters and what reads them."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

from pyro_structvi.families.family import Family

KEY = "_extra_state"  # torch's own, for what `get_extra_state` returns
MOST_NAMED = 5


def as_tensor(family: Family) -> Tensor:
    """Return a family's class and options as the bytes of a JSON text, uint8.

    A state dict then holds tensors only: ``torch.load(..., weights_only=True)`` reads it, and so do
    formats that know nothing else, such as safetensors.
    """
    text = json.dumps(_options_of(family), default=_plain)
    return torch.tensor([*text.encode()], dtype=torch.uint8, device="cpu")


def check_options(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Raise unless the families of a module, and their options, are those of a state dict.

    What the state does not have is not compared: whether it may be missing is torch's question. As a
    hook before loading it runs before anything of the module has changed.

    Args:
        module: What the state is to be loaded into.
        state: The state.
        prefix: What the module's names begin with there.

    Raises:
        RuntimeError: If they differ, or cannot be read.
    """
    found = []
    for name, part in module.named_modules():
        family, site = getattr(part, "family", None), getattr(part, "site", None)
        key = f"{prefix}{name}.{KEY}" if name else f"{prefix}{KEY}"
        if isinstance(family, Family) and site is not None and key in state:
            own, given = _read(key, as_tensor(family)), _read(key, state[key])
            found += [f"{each} at the site '{site.name}'" for each in _differences(given, own)]
    if found:
        more = f", and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        raise RuntimeError(
            "`state_dict` must be that of a guide with the same families and options, but it has "
            f"{'; '.join(found[:MOST_NAMED])}{more}. Make the guide with the options of the state dict. "
            "Nothing was loaded."
        )


def _options_of(family: Family) -> dict[str, Any]:
    """Return the class and the options that decide what the parameters mean."""
    options = {field.name: getattr(family, field.name) for field in fields(family) if field.compare}
    return {"family": type(family).__name__, **options}


def _plain(value: Any) -> Any:
    """Return what JSON has in the place of a value that it does not know."""
    if isinstance(value, Family):
        return _options_of(value)
    if isinstance(value, (Integral, Real)):  # of NumPy
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, Tensor):
        return value.tolist()
    return type(value).__name__  # a function has no value that a file could hold


def _read(key: str, value: Any) -> dict[str, Any]:
    """Read what ``as_tensor`` wrote, also where arithmetic on a whole state dict went over it."""
    try:
        codes = value.double().round().to(torch.uint8).tolist()
        options: dict[str, Any] = dict(json.loads(bytes(codes)))
    except (AttributeError, TypeError, ValueError) as error:
        raise RuntimeError(
            f"`state_dict['{key}']` must be the options of a family as `guide.state_dict()` has them, "
            "but they cannot be read. Leave the entry as it is, or drop it and pass `strict=False`."
        ) from error
    return options


def _differences(given: Any, own: Any, name: str = "") -> Iterator[str]:
    """Say where the options of a state and of a family differ, with both values."""
    if isinstance(given, dict) and isinstance(own, dict):
        families = given.get("family"), own.get("family")
        if families[0] != families[1]:
            yield f"{name or 'family'} = {families[0]} instead of {families[1]}"
            return
        for each in dict.fromkeys([*given, *own]):
            if given.get(each) != own.get(each) or (each in given) != (each in own):
                yield from _differences(
                    given.get(each, "nothing"),
                    own.get(each, "nothing"),
                    f"{name}.{each}".lstrip("."),
                )
    elif given != own:
        yield f"{name} = {_text(given)} instead of {_text(own)}"


def _text(value: Any) -> str:
    text = str(value["family"]) if isinstance(value, dict) and "family" in value else str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
