"""The options that every guide takes."""

from collections.abc import Callable
from typing import Annotated, Any, TypedDict

from torch import Tensor

from pyro_structvi._checks import NO_CLASS
from pyro_structvi.lazy.site_use import LocalReparam

InitLocFn = Annotated[Callable[[dict[str, Any]], Tensor | None], NO_CLASS]
CreatePlates = Annotated[Callable[..., Any], NO_CLASS]  # to plates


class GuideOptions(TypedDict, total=False):
    """Options that every guide takes; see :class:`StructuredGuide`."""

    init_scale: float
    init_loc_fn: InitLocFn | None
    local_reparam: LocalReparam
    create_plates: CreatePlates | None
