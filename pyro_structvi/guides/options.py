"""The options that every guide takes."""

from collections.abc import Callable, Iterable
from typing import Any, TypedDict

import pyro
from torch import Tensor

from pyro_structvi.lazy.site_use import LocalReparam

InitLocFn = Callable[[dict[str, Any]], Tensor | None]
CreatePlates = Callable[..., "pyro.plate | Iterable[pyro.plate]"]


class GuideOptions(TypedDict, total=False):
    """Options that every guide takes; see :class:`StructuredGuide`."""

    init_scale: float
    init_loc_fn: InitLocFn | None
    local_reparam: LocalReparam
    create_plates: CreatePlates | None
