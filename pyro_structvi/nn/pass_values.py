"""What a pass leaves in the attributes of modules, such as caches of functions of weights."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pyro_structvi._nested import nested_tensors
from pyro_structvi._pyro import fixed_draw_around, plain_class
from pyro_structvi._torch import after_backward, inside_backward, inside_reentrant_backward

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
        block = fixed_draw_around()
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


class PassValues(dict[str, Tensor]):
    """The values of a net's sites in the pass that is running; in a backward pass, those of its pass.

    Activation checkpointing calls layers again in the backward pass, when the net itself is not running.
    Which pass they belong to, the gradient of the net's output tells, since it is computed first.
    """

    _differentiated: dict[str, Tensor] | None = None

    def __init__(self, values: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(values or {})
        self.effects = PassEffects()

    def __reduce__(self) -> Any:
        """Copy nothing: values belong to a pass of the modules that have them."""
        return PassValues, ()

    def keep_for_backward(self, output: Tensor) -> None:
        """Keep the present values for as long as an output of this pass can be differentiated."""
        values = dict(self)

        def begin(gradient: Tensor) -> None:
            self._differentiated = values
            after_backward(self._end)

        output.register_hook(begin)

    def _end(self) -> None:
        self._differentiated = None

    def get(self, name: str, default: Tensor | None = None) -> Tensor | None:  # type: ignore[override]
        """Return the value at a site, or the default where it has not been sampled in this pass.

        Raises:
            RuntimeError: In a backward pass, if it cannot be told which pass is computed again.
        """
        value = super().get(name)
        if value is not None or not inside_backward():
            return default if value is None else value
        if self._differentiated is None or name not in self._differentiated:
            raise RuntimeError(
                f"The weight at site '{name}' is needed again in a backward pass, and the pass that it "
                "belongs to is not known. Checkpoint parts of the net, not the whole net, and pass "
                "`use_reentrant=False` to `torch.utils.checkpoint.checkpoint`."
            )
        value = self._differentiated[name]
        return _as_leaf(value) if inside_reentrant_backward() else value


def _as_leaf(value: Tensor) -> Tensor:
    """Return a value whose gradient goes on to where it was drawn.

    A reentrant checkpoint differentiates what it has computed again by itself, and frees what it passes;
    the way from a draw to its parameters is shared with the KL.
    """
    if not value.requires_grad:
        return value
    leaf = value.detach().requires_grad_()

    def go_on(leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        torch.autograd.backward(value, gradient, retain_graph=True)

    leaf.register_post_accumulate_grad_hook(go_on)
    return leaf
