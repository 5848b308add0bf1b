"""Values of many draws by name, collected as the draws come, and which of them are asked for."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from torch import Tensor

from pyro_structvi._checks import check, shape_text
from pyro_structvi._patterns import matches
from pyro_structvi.linalg.precision import at_least_single


class Columns:
    """Values by name, which come some draws at a time."""

    def __init__(self) -> None:
        self.parts: dict[str, list[Any]] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add values of several draws, ``(draws, *shape)`` by name."""
        for name, value in values.items():
            self.parts.setdefault(name, []).append(as_array(value))

    def joined(self) -> dict[str, Any]:
        """Return arrays of all draws by name."""
        return {name: np.concatenate(parts) for name, parts in self.parts.items()}


class PosteriorGroup(Columns):
    """Chosen sites, functions of all sites, and what the model returns.

    Args:
        sites: Names or patterns of the sites; None for all.
        functions: Functions of a draw, by name.

    Attributes:
        outputs: The names of what the model returns.
    """

    def __init__(self, sites: Sequence[str] | None, functions: Mapping[str, Any]) -> None:
        super().__init__()
        self.sites, self.functions = sites, functions
        self.outputs: list[str] = []

    def add_draws(
        self, values: Mapping[str, Tensor], outputs: Mapping[str, Tensor], observed: str
    ) -> None:
        """Add what is asked for of several draws.

        Args:
            values: All sites' values, ``(draws, *shape)``.
            outputs: What the model returned, ``(draws, N, ...)`` by name.
            observed: The observed site.

        Raises:
            TypeError: If a function returns no tensor.
            ValueError: If a pattern matches no site, a name is taken, or the shape of a function's
                values changes.
        """
        self._check_names([*values], [*outputs], observed)
        self.outputs = [*outputs]
        self.add({name: value for name, value in values.items() if self._is_chosen(name)})
        self.add(outputs)
        count = len(next(iter(values.values())))
        for number in range(count if self.functions else 0):
            draw = {name: value[number] for name, value in values.items()}
            for name in self.functions:
                self._add_function(name, draw)

    def _is_chosen(self, name: str) -> bool:
        return self.sites is None or any(matches(name, pattern) for pattern in self.sites)

    def _check_names(self, sites: list[str], outputs: list[str], observed: str) -> None:
        for pattern in self.sites or ():
            if not any(matches(name, pattern) for name in sites):
                raise ValueError(
                    f"`sites` must be names or patterns of the sites {sites}, but '{pattern}' matches "
                    "none of them."
                )
        for name in outputs:
            if name in [*sites, observed]:
                raise ValueError(
                    f"The model has a site '{name}', so `outputs` must be False. Take `predict`'s "
                    "`functions` in its place."
                )
        for name in self.functions:
            if name in [*sites, *outputs, observed]:
                raise ValueError(
                    f"`functions` must have names of their own, but '{name}' is a site of the model, or "
                    "its outputs."
                )

    def _add_function(self, name: str, draw: dict[str, Tensor]) -> None:
        try:
            value = self.functions[name](draw)
        except Exception as error:
            error.add_note(f"`functions[{name!r}]` was called with a draw of the sites {[*draw]}.")
            raise
        check(f"functions[{name!r}](draw)", value, Tensor)
        before = self.parts.get(name)
        if before and value.shape != before[0].shape[1:]:
            raise ValueError(
                f"`functions[{name!r}]` must return the same shape for each draw, but got "
                f"{shape_text(before[0].shape[1:])} and {shape_text(value.shape)}."
            )
        self.add({name: value.unsqueeze(0)})


def as_array(values: Tensor) -> Any:
    """Return an array on the host with memory of its own, in float64 if values are real."""
    array = at_least_single(values.detach()).cpu().numpy()
    return array.astype(np.float64 if np.issubdtype(array.dtype, np.floating) else array.dtype)


def one_by_one(values: Any, lead: int) -> Any:
    """Return an array without the dimensions behind the first ``lead`` where they have one element."""
    return values.reshape(values.shape[:lead] if prod(values.shape[lead:]) == 1 else values.shape)
