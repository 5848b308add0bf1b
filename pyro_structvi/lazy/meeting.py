"""A weight that is drawn once it is known which inputs it meets."""

from collections.abc import Callable
from typing import Self

from torch import Tensor

from pyro_structvi.lazy.site_use import SiteUse
from pyro_structvi.lazy.stand_in import WeightStandIn
from pyro_structvi.maps.readings import Application


class Meeting:
    """What becomes of a weight, and of the bias that is drawn with it, at its first linear map.

    Args:
        name: The weight's site.
        draw: Returns the values of the sites, by name, for the call that applies the weight.
    """

    def __init__(self, name: str, draw: Callable[[Application], dict[str, Tensor]]) -> None:
        self.name, self._draw = name, draw
        self._values: dict[str, Tensor] | None = None
        self.has_failed = False

    def happen(self, application: Application) -> None:
        """Draw the weight, unless it was drawn before."""
        if self._values is None:
            self.has_failed = True
            self._values = self._draw(application)
            self.has_failed = False

    def value(self, name: str) -> Tensor:
        """Return the value of a site.

        Raises:
            RuntimeError: If the weight has met no input so far.
        """
        if self._values is None:
            self.has_failed = True
            raise RuntimeError(
                f"The weight at site '{self.name}' is drawn given the inputs of a linear layer or "
                f"convolution, but the net uses '{name}' in another way first. Give it another family, "
                f"as by `families={{'{self.name}': MeanField()}}`."
            )
        return self._values[name]


class MeetingWeight(WeightStandIn):
    """A weight or a bias that waits for the first input of the weight.

    Args:
        meeting: What happens then.
        name: The site that this stands for.
        value: A tensor of its shape, dtype and device.
    """

    meeting: Meeting
    _name: str

    def __new__(cls, meeting: Meeting, name: str, value: Tensor) -> Self:
        """Make the tensor that stands for a draw."""
        weight = cls._make(value, value.shape, SiteUse(name))
        weight.meeting, weight._name = meeting, name
        return weight

    def __repr__(self, **options: object) -> str:  # type: ignore[override]
        """Show the site and the shape."""
        return f"MeetingWeight(site='{self._name}', shape={tuple(self.shape)})"

    def draw(self) -> Tensor:
        """Return the ordinary tensor."""
        return self.meeting.value(self._name)

    def _draw_outputs(self, application: Application) -> Tensor | None:
        """Draw the weight, by which the call is then an ordinary one."""
        self.meeting.happen(application)
        return None
