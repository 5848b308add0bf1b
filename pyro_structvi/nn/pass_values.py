"""The values of a net's sites, for one pass and for what its backward pass computes again."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_structvi._torch import after_backward, inside_backward, inside_reentrant_backward
from pyro_structvi.nn.pass_effects import PassEffects


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
