"""One full covariance for all elements of a layer."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyro_structvi.distributions import FullNormal
from pyro_structvi.families.cholesky_parameters import (
    cholesky_factor,
    factor_of_rows,
    parameters_of_rows,
    unit_of_across,
)
from pyro_structvi.families.memory_limit import MemoryLimitedFamily
from pyro_structvi.families.site import LatentSite


@dataclass(frozen=True)
class FullCovariance(MemoryLimitedFamily):
    r"""Normals with any covariance over the D elements of a site, for small layers.

    Parameters are ``loc``, ``log_diagonal (D,)`` and the entries of the Cholesky factor below its
    diagonal, as multiples of the diagonal entry in their row of the factor, so that one learning rate
    serves rows of any size. Of a matrix with rows of n elements they are ``lower (out, n (n - 1) / 2)``
    within rows and ``across (out (out - 1) / 2, n, n)`` between two, which step in smaller units, since
    they are many; of a vector ``lower (D (D - 1) / 2,)``. These are D + D (D + 1) / 2 numbers, here P.

    In training a site takes

    .. math:: (4 P + 2 D^2) \times \text{bytes of a number}, \qquad P = D + D (D + 1) / 2,

    for the parameters, their gradients and Adam's two moments, and for the dense factor and its
    gradient; 16 D^2 bytes in float32. What a step forms on the way comes on top: about as much again,
    and some times batch x outputs x D numbers.

    Args:
        max_memory: The most that a site may take by this formula, in GiB.
        join_bias: Whether a layer's bias is a further column of its weight.

    Raises:
        ValueError: If ``max_memory`` is not a positive number.
        MemoryError: When a guide is made, if a site would take more than ``max_memory``.

    Example:
        >>> import torch
        >>> from pyro_structvi import Classifier, bayesianize
        >>> from pyro_structvi.guides import StructuredGuide
        >>> model = Classifier(bayesianize(torch.nn.Linear(4, 3), prior=1.0), num_data=10)
        >>> guide = StructuredGuide(model, {"*.weight": FullCovariance(join_bias=True)})
        >>> {name: tuple(value.shape) for name, value in guide["net.weight"].named_parameters()}
        {'loc': (3, 5), 'log_diagonal': (15,), 'lower': (3, 10), 'across': (3, 5, 5)}

    References:
        Ritter, Kukla, Zhang and Li (2021), "Sparse uncertainty representation in deep learning with
        inducing weights", the FCG-W of Figure 2.
    """

    delayed: ClassVar[tuple[str, ...]] = ("lower", "across")
    needs: ClassVar[str] = "a real site of at least one dimension, in no plate"

    def fits(self, site: LatentSite) -> bool:
        """Whether the site is a weight or a vector."""
        return site.is_real and not site.is_batch and len(site.shape) >= 1

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        """Start with the covariance ``scale^2`` times the identity.

        Raises:
            MemoryError: If training would take more than ``max_memory``; nothing large is allocated
                before that is known.
        """
        size = loc.numel()
        self.check_memory(site, f"the {size:,} elements of", 1, size, loc.element_size())
        factor = scale * torch.eye(size, dtype=loc.dtype, device=loc.device)
        return {"loc": loc.clone()} | parameters_of_rows(factor, loc)

    def unit(self, site: LatentSite, name: str, value: Tensor) -> float:
        """Return the size of a change that matters."""
        return unit_of_across(value) if name == "across" else super().unit(site, name, value)

    def distribution(self, site: LatentSite, **parameters: Tensor) -> FullNormal:
        """Return the Normal with the factor that the parameters hold."""
        factor = factor_of_rows if "across" in parameters else cholesky_factor
        scale_tril = factor(**{name: parameters[name] for name in parameters if name != "loc"})
        return FullNormal(parameters["loc"], scale_tril, validate_args=False)
