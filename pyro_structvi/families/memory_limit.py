"""A limit to the memory that dense covariances take in training."""

from dataclasses import dataclass, field

from pyro_structvi._checks import Positive
from pyro_structvi.families.family import MatrixFamily
from pyro_structvi.families.site import LatentSite


@dataclass(frozen=True)
class MemoryLimitedFamily(MatrixFamily):
    """A family with dense covariances, which refuses a site where they would take too much.

    Args:
        max_memory: The most that a site may take by the formula of :meth:`check_memory`, in GiB.
        join_bias: As for :class:`MatrixFamily`.

    Raises:
        ValueError: If ``max_memory`` is not a positive number.
    """

    max_memory: Positive = field(default=8.0, compare=False)  # no part of what a posterior is

    def check_memory(
        self, site: LatentSite, elements: str, factors: int, size: int, bytes_each: int
    ) -> None:
        """Raise a ``MemoryError`` if training the site would take more than ``max_memory``.

        With P parameters, counted are 4 P numbers for these, their gradients and Adam's two moments,
        and twice the dense factors, for their gradients too.

        Args:
            site: The site.
            elements: What has one covariance, in words that go before the site's names.
            factors: How many covariances there are.
            size: The elements of each.
            bytes_each: The bytes of a number.

        Raises:
            MemoryError: If it would.
        """
        parameters = size + size * (size + 1) // 2
        gibibytes = factors * (4 * parameters + 2 * size**2) * bytes_each / 2**30
        if gibibytes > self.max_memory:
            raise MemoryError(
                f"A full covariance of {elements} {' and '.join(site.names)} would take "
                f"{_memory_text(gibibytes)} in training, and `max_memory` allows "
                f"{_memory_text(self.max_memory)}. Use AutoLowRankLRT, or a StructuredGuide with "
                f"another family for this site, such as {{'{site.name}': LowRank(rank=2), '*': "
                f"{type(self).__name__}()}}; or pass a larger `max_memory`."
            )


def _memory_text(gibibytes: float) -> str:
    if gibibytes >= 1024:
        return f"{gibibytes / 1024:.3g} TiB"
    return f"{gibibytes:.3g} GiB"
