"""The modules of model and guide: what of them decides how a step runs, and what a step may change."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pyro.poutine as poutine
import torch
from torch import Tensor, nn

from pyro_structvi._torch import own_tensors
from pyro_structvi.families import SitePosterior
from pyro_structvi.guides import StructuredGuide
from pyro_structvi.nn.likelihoods import Likelihood


class Same:
    """A key that is equal only for one and the same object, which it keeps."""

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


class Modules:
    """The modules that model and guide are, are methods of, or close over.

    Args:
        parts: Model and guide.
    """

    def __init__(self, parts: Iterable[Callable[..., Any]]) -> None:
        self._roots = [root for part in parts for root in _modules_of(part)]
        self._changing: list[tuple[nn.Module, str]] | None = None  # buffers; None before a step

    def state(self) -> list[Hashable]:
        """Return what decides how they run: modes, numbers of ours, and which tensors they have."""
        state: list[Hashable] = []
        for module in self._all():
            state += [Same(module), module.training]
            if isinstance(module, SitePosterior):
                state.append(module.family)
            elif isinstance(module, StructuredGuide):
                state.append(Same(module.uses))
            elif isinstance(module, Likelihood):
                state.append(module.num_data)
            for tensor in own_tensors(module):
                state += [Same(tensor), tensor.requires_grad, tensor.data_ptr()]
        return state

    def tensors(self) -> set[int]:
        """Return the identities of all their parameters and buffers."""
        return {id(tensor) for module in self._all() for tensor in own_tensors(module)}

    @contextmanager
    def buffers_kept_on_error(self) -> Iterator[None]:
        """Put the buffers that steps change, such as running statistics, back where a block raises."""
        places = self._buffers() if self._changing is None else self._changing
        kept = [
            (place, buffer, buffer.clone())
            for place in places
            if (buffer := _at(place)) is not None
        ]
        try:
            yield
        except Exception:
            for (module, name), buffer, value in kept:
                setattr(module, name, buffer.copy_(value))
            raise
        if self._changing is None:  # torch's normalizations do not count versions
            self._changing = [
                place
                for place, buffer, value in kept
                if _at(place) is not buffer or not torch.equal(buffer, value)
            ]

    @contextmanager
    def unchanged_on_error(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Put buffers, and random generators of the parameters' devices, back where a block raises.

        Raises:
            RuntimeError: After the block, if it has replaced a buffer.
        """
        buffers = [
            (module, name, buffer, buffer.clone())
            for module, name in self._buffers()
            if (buffer := _at((module, name))) is not None
        ]
        states = [(each, each.get_state()) for each in _generators(parameters)]
        try:
            yield
            for module, name, buffer, _ in buffers:
                if getattr(module, name) is not buffer:
                    raise RuntimeError(
                        f"the model replaces its buffer `{name}`; change it in place"
                    )
        except Exception:
            for module, name, buffer, value in buffers:
                setattr(module, name, buffer.copy_(value))
            for generator, state in states:
                generator.set_state(state)
            raise

    def _buffers(self) -> list[tuple[nn.Module, str]]:
        return [
            (module, name)
            for module in self._all()
            for name, _ in module.named_buffers(recurse=False, remove_duplicate=False)
        ]

    def _all(self) -> Iterator[nn.Module]:
        for root in self._roots:
            yield from root.modules()


def _modules_of(part: Callable[..., Any]) -> Iterator[nn.Module]:
    function = poutine.unwrap(part)
    closed_over = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    for value in (function, getattr(function, "__self__", None), *closed_over):
        if isinstance(value, nn.Module):
            yield value


def _at(place: tuple[nn.Module, str]) -> Tensor | None:
    module, name = place
    buffer: Tensor | None = getattr(module, name, None)
    return buffer


def _generators(parameters: Iterable[Tensor]) -> list[torch.Generator]:
    indices = {value.device.index for value in parameters if value.device.type == "cuda"}
    return [torch.default_generator, *(torch.cuda.default_generators[i] for i in indices)]
