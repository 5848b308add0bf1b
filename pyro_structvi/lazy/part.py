"""A part of a weight that has not been drawn yet: a weight or a bias that are drawn together."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from pyro_structvi.lazy.site_use import SiteUse
from pyro_structvi.lazy.stand_in import WeightStandIn
from pyro_structvi.lazy.weight import LazyWeight
from pyro_structvi.maps import BiasColumnMap
from pyro_structvi.maps.readings import Application


class LazyPart(WeightStandIn):
    """A weight or its bias, as a part of a joint draw that has not been made yet.

    Where a linear map gets both parts of one draw, its outputs are drawn from the image of the joint
    distribution. Any other use takes the part out of an ordinary draw.

    Args:
        whole: The joint draw, ``(out, in + 1)``.
        shape: The shape of the part.
        take: Returns the part of a joint draw.
        use: The record of the part's own site.
    """

    whole: LazyWeight
    _take: Callable[[Tensor], Tensor]

    def __new__(
        cls, whole: LazyWeight, shape: torch.Size, take: Callable[[Tensor], Tensor], use: SiteUse
    ) -> Self:
        """Make the tensor that stands for the part."""
        part = cls._make(whole, shape, use)
        part.whole = whole
        part._take = take
        return part

    def draw(self) -> Tensor:
        """Return the part of the joint draw, which is made at the first call and kept."""
        return self._take(self.whole.draw())

    def _draw_outputs(self, application: Application) -> Tensor | None:
        bias, together = application.bias, application._replace(weight=self.whole, bias=None)
        linear_map, x = application.linear_map, application.x
        whole = bias.whole if isinstance(bias, LazyPart) else None
        is_other = whole is not self.whole or application.arrangement is not None
        if is_other or isinstance(x, WeightStandIn):
            return None
        if self.whole.distribution.takes_bias_column:
            linear_map = BiasColumnMap(linear_map)
        else:
            linear_map, x = linear_map.join_bias(x)
        return self.whole._draw_outputs(together._replace(linear_map=linear_map, x=x))
