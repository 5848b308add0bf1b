"""The modules of model and guide: the state that a step depends on, and the state that it changes."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pyro.poutine as poutine
import torch
from torch import Tensor, nn

from pyro_structvi._torch import all_modules, made_by_hooks, own_tensors, take_apart
from pyro_structvi.nn.random_module import buffers_that_change
from pyro_structvi.sites.site_posterior import SitePosterior
from pyro_structvi.sites.structured import StructuredGuide

PLAIN = frozenset({bool, int, float, str, type(None)})
_OF_TORCH = {*vars(nn.Module())} - {"training"} | {"_flat_weights"}  # lists of named tensors


class Modules:
    """The modules of model and guide, as callables, owners of methods or closed-over variables.

    Args:
        parts: Model and guide.
    """

    def __init__(self, parts: Iterable[Callable[..., Any]]) -> None:
        self._functions = [poutine.unwrap(part) for part in parts]
        self._roots = [root for function in self._functions for root in _modules_of(function)]
        self._changing: list[tuple[nn.Module, str]] | None = None  # buffers; None before a step

    def __iter__(self) -> Iterator[nn.Module]:
        """Iterate over all modules."""
        for root in self._roots:
            yield from all_modules(root)

    def state(self) -> list[Hashable]:
        """Return the state that a pass depends on: modules, tensors and plain values.

        Objects are identified by ``id`` as long as they are alive, which :meth:`parts` is for.
        """
        state: list[Hashable] = [value for _, value in self._known_to_functions()]
        for module in self:
            state.append(id(module))
            state += [value for value in vars(module).values() if type(value) in PLAIN]
            if isinstance(module, SitePosterior):
                state.append(module.family)
            elif isinstance(module, StructuredGuide):
                state.append(id(module.uses))
            for tensor in own_tensors(module):
                state += [id(tensor), tensor.requires_grad, tensor.data_ptr()]
        return state

    def parts(self) -> list[object]:
        """Return the objects that a state identifies by ``id``."""
        uses = [module.uses for module in self if isinstance(module, StructuredGuide)]
        return [*self, *uses, *self.tensors()]

    def tensors(self) -> list[Tensor]:
        """Return all their parameters and buffers."""
        return [tensor for module in self for tensor in own_tensors(module)]

    @contextmanager
    def plain_changes(self) -> Iterator[list[str]]:
        """Yield a list that has the names of all changed values after the block."""
        before, changed = self._plain_values(), list[str]()
        yield changed
        after = self._plain_values()
        changed += [name for name, value in after.items() if before.get(name) != value]

    def _plain_values(self) -> dict[str, Hashable]:
        """Return numbers, strings, flags and sets of tensors, by name."""
        values = dict(self._known_to_functions())
        for number, module in enumerate(self):
            # Guides cache functions of their parameters.
            is_others = not isinstance(module, (SitePosterior, StructuredGuide))
            known = _OF_TORCH | made_by_hooks(module)
            own = [(name, value) for name, value in vars(module).items() if name not in known]
            for name, value in (*own, *module.named_buffers(recurse=False)):
                leaves = take_apart(value)[0] if is_others else ()
                tensors = frozenset(leaf for leaf in leaves if isinstance(leaf, Tensor))
                if type(value) in PLAIN or tensors:
                    place = f"`{name}` of module {number}, a {type(module).__name__}"
                    values[place] = tensors or value
        return values

    def _known_to_functions(self) -> Iterator[tuple[str, Hashable]]:
        """Yield the plain globals and closed-over variables of model and guide, with their names."""
        for function in self._functions:
            code = getattr(function, "__code__", None)
            if code is not None:
                cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
                known = {name: function.__globals__.get(name) for name in code.co_names}
                known |= {name: _content(cell) for name, cell in cells}
                for name, value in known.items():
                    if type(value) in PLAIN:
                        yield f"`{name}` outside of `{function.__name__}`", value

    @contextmanager
    def buffers_kept_on_error(self) -> Iterator[None]:
        """Restore the buffers that steps change, such as running statistics, if a block raises."""
        places = self._buffers() if self._changing is None else self._changing
        with _restored_on_error(places) as kept:
            yield
        if self._changing is None:  # torch's normalizations do not count versions
            self._changing = [
                (module, name)
                for module, name, buffer, value in kept
                if getattr(module, name, None) is not buffer or not torch.equal(buffer, value)
            ]

    @contextmanager
    def unchanged_on_error(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Restore buffers and the random generators of the parameters' devices if a block raises."""
        states = [(each, each.get_state()) for each in generators_of(parameters)]
        try:
            with _restored_on_error(self._buffers()):
                yield
        except Exception:
            for generator, state in states:
                generator.set_state(state)
            raise

    def _buffers(self) -> list[tuple[nn.Module, str]]:
        return [(module, name) for module in self for name, _ in buffers_that_change(module)]


@contextmanager
def _restored_on_error(
    places: Iterable[tuple[nn.Module, str]],
) -> Iterator[list[tuple[nn.Module, str, Tensor, Tensor]]]:
    """Put buffers and their values back if a block raises; yield them with copies."""
    found = [(module, name, getattr(module, name, None)) for module, name in places]
    kept = [(*place, each, each.clone()) for *place, each in found if each is not None]
    try:
        yield kept
    except Exception:
        for module, name, buffer, value in kept:
            setattr(module, name, buffer.copy_(value))
        raise


def _modules_of(function: Any) -> Iterator[nn.Module]:
    closed_over = [_content(cell) for cell in getattr(function, "__closure__", None) or ()]
    for value in (function, getattr(function, "__self__", None), *closed_over):
        if isinstance(value, nn.Module):
            yield value


def _content(cell: Any) -> Any:
    """Return the content of a closure's cell, or None before it has one."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def generators_of(parameters: Iterable[Tensor]) -> list[torch.Generator]:
    """Return the random generators of the host and of the parameters' devices."""
    indices = {value.device.index for value in parameters if value.device.type == "cuda"}
    return [torch.default_generator, *(torch.cuda.default_generators[i] for i in indices)]
