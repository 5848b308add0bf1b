"""What the registry says of a structure, and of the guides that use it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.testing.definitions import kl_to_independent_normals, zero_covariance
from pyro_structvi.testing.random_weights import Make, Shape

Place = Literal["tests", "demo", "benchmarks"]

VECTOR, MATRIX, CONVOLUTION = (4,), (4, 3), (4, 3, 2, 2)
TESTS: tuple[Place, ...] = ("tests",)
DEMO: tuple[Place, ...] = ("demo",)
BENCHMARKS: tuple[Place, ...] = ("benchmarks",)
EVERYWHERE = TESTS + DEMO + BENCHMARKS


@dataclass(frozen=True)
class GuideVariant:
    """A guide with its options; calling it with a model, and further options, makes the guide.

    Args:
        name: The guide's name in tests and tables.
        guide: The guide's class.
        num_parameters: The number of variational parameters of a layer ``(out, in)`` without a bias.
        options: Its options.
        used_in: Where it is run.
    """

    name: str
    guide: Callable[..., StructuredGuide]
    num_parameters: Callable[[int, int], int]
    options: Mapping[str, Any] = field(default_factory=dict)
    used_in: tuple[Place, ...] = EVERYWHERE

    def __call__(self, model: Callable[..., Any], **options: Any) -> StructuredGuide:
        """Make the guide of a model."""
        return self.guide(model, **{**self.options, **options})


@dataclass(frozen=True)
class Structure:
    """A distribution over a weight, with its moments by definition and the guides that use it.

    Args:
        name: Its name in tests.
        make: A function of ``batch_shape, event_shape, dtype`` to a distribution with random
            arguments, all of them of that dtype.
        covariance: The dense covariance ``(*batch_shape, D, D)`` of row-major ``vec(W)``, computed from
            the distribution's arguments by the definition, not by the class.
        mean: The mean ``(*batch_shape, *event_shape)``, likewise.
        kl_with_inducing: For a KL that counts inducing weights too, an upper bound of the one over
            the weight: its dense value for a prior's ``loc`` and ``scale``, of the mean's shape.
        event_shapes: The shapes of weight it serves.
        shared_covariance: The part of the covariance whose noise all positions of an example share,
            ``(D, D)``; the rest of the noise is drawn independently at every position.
        has_convolution_image: Whether outputs of a convolution are drawn in the weight's place.
        serves_groups: Whether that holds for convolutions with groups too.
        has_forward_mode: Whether its KL has derivatives in forward mode.
        guides: The guides that put it on a model.
    """

    name: str
    make: Make
    covariance: Callable[[Any], Tensor]
    mean: Callable[[Any], Tensor] = lambda q: q.loc
    kl_with_inducing: Callable[[Any, Tensor, Tensor], Tensor] | None = None
    event_shapes: tuple[Shape, ...] = (MATRIX, CONVOLUTION)
    shared_covariance: Callable[[Any], Tensor] = zero_covariance
    has_convolution_image: bool = True
    serves_groups: bool = True
    has_forward_mode: bool = True
    guides: tuple[GuideVariant, ...] = ()

    def kl(self, q: Any, loc: Tensor, scale: Tensor) -> Tensor:
        """Return the dense KL to independent normals, whose arguments broadcast to the mean."""
        mean = self.mean(q)
        if self.kl_with_inducing is not None:
            return self.kl_with_inducing(q, loc.expand(mean.shape), scale.expand(mean.shape))
        return kl_to_independent_normals(mean, self.covariance(q), loc, scale, len(q.event_shape))
