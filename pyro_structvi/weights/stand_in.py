"""A tensor that stands for a weight which may not have been drawn yet, and its views."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from pyro_structvi._torch import METADATA, tree_map, without_storage
from pyro_structvi.maps.calls import parse_application
from pyro_structvi.maps.readings import Application, Arrangement, FactorApplication, Lookup, Rewrite
from pyro_structvi.weights.outputs import autocasts
from pyro_structvi.weights.site_role import SiteUse


class WeightStandIn(Tensor):
    """A tensor without storage that has shape, dtype and device; a value replaces it when it is used."""

    use: SiteUse

    @classmethod
    def _make(cls, like: Tensor, shape: torch.Size, use: SiteUse) -> Self:
        stand_in = without_storage(cls, shape, like)
        stand_in.use = use
        return stand_in

    def draw(self) -> Tensor:
        """Return the ordinary tensor that this one stands for."""
        raise NotImplementedError

    def take_out(self) -> Tensor:
        """Return the ordinary tensor to code that torch does not tell what it is used for."""
        return self.draw()

    def _draw_outputs(self, application: Application) -> Tensor | None:
        """Draw the outputs of a linear map without drawing the weight, where that is allowed."""
        return None

    def _draw_rows(self, lookup: Lookup) -> Tensor | None:
        """Draw the rows that are looked up without drawing the weight, where that is allowed."""
        return None

    def _draw_per_example(self, application: FactorApplication) -> Tensor | None:
        """Draw a factor for each example, where that is allowed."""
        return None

    def member(self, index: int) -> "WeightStandIn | None":
        """Return the stand-in for one weight of a stack, or None where the stack is drawn."""
        return None

    def _check_input(self, application: Application | Lookup | FactorApplication) -> None:
        """Explain an input that does not fit the weight, in place of an error from the kernel."""
        x = application.x
        attributes = ("device",) if isinstance(application, Lookup) else ("device", "dtype")
        for attribute in attributes:
            expected, got = getattr(self, attribute), getattr(x, attribute)
            if expected != got and not (attribute == "dtype" and autocasts(x)):
                target = repr(expected) if attribute == "dtype" else repr(str(expected))
                raise ValueError(
                    f"The input that meets the weight at site '{self.use.name}' must have "
                    f"{attribute} {expected}, but got {got}. Convert the data with "
                    f"`x.to({target})`, or move model and guide with `.to(...)` alike."
                )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call ``func`` with ordinary tensors, unless there is a better answer.

        Shape, dtype and the like are known; the outputs of a linear map, and rows that are looked
        up, may be drawn directly.
        """
        kwargs = kwargs or {}
        if func in METADATA:
            return super().__torch_function__(func, types, args, kwargs)
        view = _read_view(func, args, kwargs)
        if view is not None:
            return view
        application = parse_application(func, args, kwargs)
        if isinstance(application, Rewrite):
            return application.compute()
        if application is not None and isinstance(application.weight, WeightStandIn):
            weight = application.weight
            weight._check_input(application)
            if isinstance(application, Lookup):
                outputs = weight._draw_rows(application)
            elif isinstance(application, FactorApplication):
                outputs = weight._draw_per_example(application)
            else:
                outputs = weight._draw_outputs(application)
            if outputs is not None:
                return outputs
        return func(*tree_map(as_drawn, args), **tree_map(as_drawn, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Reached where ``__torch_function__`` is switched off; the same without the exception."""
        return func(*tree_map(as_drawn, args), **tree_map(as_drawn, kwargs or {}))


class ArrangedView(WeightStandIn):
    """A weight with its dimensions in another order, such as a transpose, that is not drawn by that.

    Args:
        base: The weight.
        dims: Its dimensions in the order of the view.
    """

    base: WeightStandIn
    _dims: tuple[int, ...]

    def __new__(cls, base: WeightStandIn, dims: tuple[int, ...]) -> Self:
        """Make the tensor that stands for the view."""
        view = cls._make(base, torch.Size(base.shape[d] for d in dims), base.use)
        view.base, view._dims = base, dims
        return view

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        """Show the weight, which is not drawn for it, and the order."""
        return f"ArrangedView({self.base!r}, dims={self._dims})"

    def draw(self) -> Tensor:
        """Return the weight in this order."""
        return self.base.draw().permute(self._dims)

    def member(self, index: int) -> WeightStandIn | None:
        """Return a view of one weight of a stack."""
        member = self.base.member(index) if self._dims[0] == 0 else None
        if member is None:
            return None
        return ArrangedView(member, tuple(d - 1 for d in self._dims[1:]))

    def _draw_outputs(self, application: Application) -> Tensor | None:
        plain = Arrangement.of_dims(tuple(range(self.dim())), tuple(self.shape))
        arrangement = (application.arrangement or plain).after(self._dims)
        return self.base._draw_outputs(
            application._replace(weight=self.base, arrangement=arrangement)
        )


def as_drawn(value: Any) -> Any:
    """Return the ordinary tensor for a stand-in; any other value unchanged."""
    return value.draw() if isinstance(value, WeightStandIn) else value


def _read_view(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> WeightStandIn | None:
    """Return the stand-in for a view of a stand-in, or None for any other call."""
    base = args[0] if args else None
    if not isinstance(base, WeightStandIn):
        return None
    if func in _REORDERINGS and base.dim() > 1:
        # Seen by a tensor whose sizes all differ.
        seen = func(torch.empty(*range(base.dim()), device="meta"), *args[1:], **kwargs)
        return ArrangedView(base, tuple(seen.shape))
    if func is Tensor.__getitem__ and base.dim() > 2:
        index = args[1]
        is_scalar = isinstance(index, Tensor) and not index.dim() and not index.is_floating_point()
        if type(index) is int or (is_scalar and index.dtype != torch.bool):
            return base.member(range(len(base))[int(index)])
    return None


_REORDERINGS = {
    *(getattr(Tensor, name).__get__ for name in ("T", "mT")),
    *(Tensor.t, torch.t, Tensor.permute, torch.permute),
    *(Tensor.transpose, torch.transpose, Tensor.swapaxes, torch.swapaxes),
}
