"""A random parameter where no pass says which draw of it is meant: a shape without values."""

from collections.abc import Callable
from typing import Any, Never, Self

import torch
from torch import Tensor

from pyro_structvi._nested import nested_tensors
from pyro_structvi._torch import METADATA, without_storage


class UnsampledParameter(Tensor):
    """A tensor that has shape, dtype and device, and that raises where its values are asked for.

    Args:
        site: The name of its site.
        shape: Its shape.
        like: A tensor of its dtype and device.
    """

    site: str

    def __new__(cls, site: str, shape: torch.Size, like: Tensor) -> Self:
        """Make the tensor."""
        unsampled = without_storage(cls, shape, like)
        unsampled.site = site
        return unsampled

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        """Show what is known of it."""
        return f"UnsampledParameter(site='{self.site}', shape={tuple(self.shape)})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer what is known without values; for a state dict it is detached, and left out later."""
        if func in METADATA or func is Tensor.data_ptr:
            return super().__torch_function__(func, types, args, kwargs or {})
        if func in _DETACHING:
            return args[0]
        _refuse(args, kwargs)
        return None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Never:
        """Reached where ``__torch_function__`` is switched off."""
        _refuse(args, kwargs)


_DETACHING = {Tensor.detach, Tensor.data.__get__}  # type: ignore[attr-defined]


def _refuse(args: Any, kwargs: Any) -> Never:
    tensors = nested_tensors([args, kwargs])
    sites = [each.site for each in tensors if isinstance(each, UnsampledParameter)]
    refuse_outside_of_passes(sites[0] if sites else "")


def refuse_outside_of_passes(site: str) -> Never:
    """Raise the error about a random parameter whose values are asked for where it has none.

    Args:
        site: The name of its site.
    """
    raise RuntimeError(
        f"The parameter '{site}' is random, and no pass says which draw of it is meant. Predict by "
        "`predict(model, guide, x)`; take a plain net, which generates, merges and saves, by "
        "`guide.to_net()`; call the model inside of `with guide.sampled():` for one draw; for prior "
        "draws pass the model to `pyro.infer.Predictive`."
    )
