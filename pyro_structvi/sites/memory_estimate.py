"""What a guide will take, asked before anything is allocated."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyro_structvi._checks import Program, checked
from pyro_structvi.sites.finding import shapes_only
from pyro_structvi.sites.structured import StructuredGuide


@dataclass(frozen=True)
class MemoryEstimate:
    """The parameters of a guide, and the memory of training them.

    Attributes:
        parameters: The number of trained parameters of each site, by name; a joined bias counts with its
            weight, and what sites draw together under a separate name.
        parameter_bytes: The bytes of all parameters and constants.
        training_bytes: The bytes of parameters and constants, gradients and Adam's two moments. What a
            step forms on the way, activations above all, comes on top; so do the two further moments of
            ``StructuredAdam`` for each number of the noise of a posterior with correlations whose family
            has ``moves_in_own_coordinates``.
    """

    parameters: dict[str, int]
    parameter_bytes: int
    training_bytes: int

    @property
    def total(self) -> int:
        """The number of all trained parameters."""
        return sum(self.parameters.values())


@checked
def estimate_memory(
    make_guide: Callable[..., StructuredGuide],
    model: Program,
    *args: Any,
    **options: Any,
) -> MemoryEstimate:
    """Count the parameters that a guide of a model would have, without making them.

    Args:
        make_guide: A guide's class, or a function that returns a guide.
        model: A model that declares its sites, as any that ``bayesianize`` makes.
        *args: Passed on to ``make_guide``, as the families of a ``StructuredGuide``.
        **options: Likewise.

    Returns:
        The estimate.

    Raises:
        ValueError: If the model declares no sites; those of a function are known only when it has run.
        MemoryError: If a site would take more than its family's ``max_memory``.

    Example:
        >>> import torch
        >>> from pyro_structvi import Classifier, KTiedGuide, bayesianize
        >>> net = bayesianize(torch.nn.Linear(4096, 4096), prior=0.02)
        >>> estimate = estimate_memory(KTiedGuide, Classifier(net, num_data=100), rank=2)
        >>> estimate.total, estimate.training_bytes
        (16801792, 268828672)
    """
    with shapes_only():
        guide = make_guide(model, *args, **options)
    if not guide.site_names:
        raise ValueError(
            "`model` must declare its sample sites, as `bayesianize` does, but none is known before it "
            "runs. Make the guide, call `guide.initialize(...)`, and count its parameters."
        )
    parameters = {
        posterior.site.name: sum(value.numel() for value in posterior.parameters())
        for posterior in guide.all_posteriors()
    }
    trained = sum(value.numel() * value.element_size() for value in guide.parameters())
    constant = sum(value.numel() * value.element_size() for value in guide.buffers())
    return MemoryEstimate(parameters, trained + constant, 4 * trained + constant)
