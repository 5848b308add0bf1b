"""What a pass leaves in the attributes of modules, such as caches of functions of weights."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from pyro_structvi._nested import nested_tensors
from pyro_structvi._pyro import one_draw_around, plain_class

_MISSING = object()

Contents = list[tuple[dict[Any, Any], dict[Any, Any]]]


class PassEffects:
    """Tensors that a pass in evaluation mode has bound to modules, to be taken back before the next.

    A net in evaluation mode may keep what it computes of its weights: they do not change there, but
    draws do. What a pass leaves stays readable until the next pass, and in a block with one draw for
    the whole block. A module's numbers and texts go back along with its tensors, since they may say what
    these are of.
    """

    def __init__(self) -> None:
        self._root: nn.Module | None = None
        self._block: Any = None
        self._before: list[Contents] = []
        self._left: dict[tuple[int, Any], tuple[dict[Any, Any], Any, Any]] = {}

    def begin(self, root: nn.Module) -> None:
        """Take back what the pass before has left, and look at what there is."""
        if self._root is not None:
            return
        block = one_draw_around()
        if block is None or block is not self._block:
            self.undo()
        self._root, self._block = root, block
        self._before = [_contents(part) for part in root.modules() if _may_keep(part)]

    def end(self, root: nn.Module) -> None:
        """Note what the pass that began at a module has left."""
        if self._root is not root:
            return
        for contents in self._before:
            changes = [*_changes(contents)]
            holds_tensor = any(True for _ in nested_tensors([new for *_, new in changes]))
            for container, key, old, new in changes if holds_tensor else ():
                _, first, _ = self._left.get((id(container), key), (None, old, None))
                self._left[id(container), key] = container, first, new
        self._root, self._before = None, []

    def undo(self) -> None:
        """Take back what passes have left, where it is still there."""
        for (_, key), (container, old, new) in self._left.items():
            if container.get(key, _MISSING) is not new:
                continue
            if old is _MISSING:
                container.pop(key, None)
            else:
                container[key] = old
        self._left = {}


def _may_keep(module: nn.Module) -> bool:
    """Whether a module is in evaluation mode and not one of torch's, which keep nothing."""
    return not module.training and not plain_class(module).__module__.startswith("torch.nn.")


def _contents(module: nn.Module) -> Contents:
    own = vars(module)
    return [(each, dict(each)) for each in (own, *own.values()) if isinstance(each, dict)]


def _changes(contents: Contents) -> Iterator[tuple[dict[Any, Any], Any, Any, Any]]:
    for container, before in contents:
        for key in {**before, **container}:
            old, new = before.get(key, _MISSING), container.get(key, _MISSING)
            if old is not new:
                yield container, key, old, new
