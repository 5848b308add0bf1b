"""Subsamples of plates, drawn before a step rather than in it."""

from collections.abc import Callable, Sequence
from typing import Any

from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_structvi._pyro import random_subsample
from pyro_structvi._torch import inside_transform


class SubsampleRecorder(Messenger):
    """Records how plates draw their subsamples, in the order in which they do."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[Callable[[], Tensor]] = []

    def _pyro_sample(self, message: dict[str, Any]) -> None:
        draw = random_subsample(message)
        if draw is not None:
            self.draws.append(draw)


class SubsamplePlayer(Messenger):
    """Hands plates subsamples that were drawn beforehand, in the recorded order."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        super().__init__()
        self._values = iter(values)

    def _pyro_sample(self, message: dict[str, Any]) -> None:
        if random_subsample(message) is not None:
            if inside_transform():
                raise RuntimeError("particles in one pass share a plate's subsample in a graph")
            message["value"] = next(self._values, None)  # None: the plate draws itself
