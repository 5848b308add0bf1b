"""A random parameter where no pass says which draw of it is meant: a shape without values."""

from collections.abc import Callable
from typing import Any, Never, Self

import torch
from torch import Tensor

from pyro_structvi._nested import nested_tensors
from pyro_structvi._torch import METADATA, without_storage


class UnsampledParameter(Tensor):
    """A tensor that has shape, dtype and device, and that raises where its values are asked for."""

    site: str

    def __new__(cls, site: str, shape: torch.Size, like: Tensor) -> Self:
        """Make the tensor for a site, with the dtype and the device of ``like``."""
        unsampled = without_storage(cls, shape, like)
        unsampled.site = site
        return unsampled

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        """Show what is known of it."""
        return f"UnsampledParameter(site='{self.site}', shape={tuple(self.shape)})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Answer what is known without values; a detached one is one still."""
        if func in METADATA or func is Tensor.data_ptr:
            return super().__torch_function__(func, types, args, kwargs or {})
        return args[0] if func in _DETACHING else cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Never:
        """Say what to do in place of asking for values."""
        refuse(next(each.site for each in nested_tensors([args, kwargs]) if isinstance(each, cls)))


_DETACHING = {Tensor.detach, Tensor.data.__get__}  # type: ignore[attr-defined]


def refuse(site: str) -> Never:
    """Raise the error about values that are asked for outside of passes."""
    raise RuntimeError(
        f"The parameter '{site}' is random, and no pass says which draw of it is meant. Predict by "
        "`predict(model, guide, x)`; take a plain net, which generates, merges and saves, by "
        "`guide.to_net()`; call the model inside of `with guide.sampled():` for one draw; for prior "
        "draws pass the model to `pyro.infer.Predictive`."
    )
