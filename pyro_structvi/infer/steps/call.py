"""The arguments of a call, with tensors separated from the structure that holds them."""

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor

from pyro_structvi._checks import brief
from pyro_structvi._torch import put_together, take_apart


class Call:
    """The arguments of one call, with tensors separated from the structure that holds them.

    Attributes:
        tensors: The tensors among the arguments.
        key: Equal for calls that can share one compiled step.

    Raises:
        TypeError: If an argument is neither a tensor nor hashable.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        leaves, self._structure = take_apart((args, kwargs))
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        kinds = [
            (value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
            for value in self.tensors
        ]
        types = [type(leaf) for leaf in leaves]
        self.key = (self._structure, *types, *self._leaves, *kinds)
        for leaf in self._leaves:
            by_value = isinstance(leaf, Hashable) and type(leaf).__hash__ is not object.__hash__
            if not (by_value or leaf is None or callable(leaf)):
                raise TypeError(
                    f"The arguments of a compiled step must be tensors or hashable, but got "
                    f"{brief(leaf)}. Pass arrays as tensors, and objects by their parts."
                )

    def with_tensors(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors."""
        given = iter(tensors)
        leaves = [
            next(given) if is_tensor else leaf
            for is_tensor, leaf in zip(self._is_tensor, self._leaves, strict=True)
        ]
        args, kwargs = put_together(leaves, self._structure)
        return args, kwargs
