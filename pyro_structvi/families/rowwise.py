"""The rowwise normal: one full covariance over the inputs of each output."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from pyro_structvi.distributions import RowwiseNormal
from pyro_structvi.families.cholesky_parameters import cholesky_factor, initial_factor
from pyro_structvi.families.memory_limit import MemoryLimitedFamily
from pyro_structvi.families.site import LatentSite


@dataclass(frozen=True)
class Rowwise(MemoryLimitedFamily):
    r"""Normals with independent rows, and any covariance within a row.

    Parameters are ``loc``, ``log_diagonal (out, in)`` and ``lower (out, in (in - 1) / 2)``, the
    entries of each row's Cholesky factor below its diagonal, as multiples of the diagonal entry in
    the same row of the factor: out in + out in (in + 1) / 2 numbers, here P.

    In training a site takes

    .. math:: (4 P + 2\,\text{out}\,\text{in}^2) \times \text{bytes of a number}

    for the parameters, their gradients and Adam's two moments, and for the dense factors and their
    gradients; 16 out in^2 bytes in float32. What a step forms on the way comes on top.

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
        >>> guide = StructuredGuide(model, {"*.weight": Rowwise(join_bias=True)})
        >>> {name: tuple(value.shape) for name, value in guide["net.weight"].named_parameters()}
        {'loc': (3, 5), 'log_diagonal': (3, 5), 'lower': (3, 10)}

    References:
        Rossi and Filippone, tutorial on variational inference, the "column-wise" posterior; layers
        are written x W there.
    """

    delayed: ClassVar[tuple[str, ...]] = ("lower",)

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        """Start with the covariance ``scale^2`` times the identity.

        Raises:
            MemoryError: If training would take more than ``max_memory``; nothing large is allocated
                before that is known.
        """
        out, size = loc.shape[0], loc[0].numel()
        elements = f"the {size:,} elements in each of the {out:,} rows of"
        self.check_memory(site, elements, out, size, loc.element_size())
        log_diagonal, lower = initial_factor(size, scale, loc, [out])
        return {"loc": loc.clone(), "log_diagonal": log_diagonal, "lower": lower}

    def distribution(self, site: LatentSite, **parameters: Tensor) -> RowwiseNormal:
        """Return the normal with the factors that the parameters hold."""
        scale_tril = cholesky_factor(parameters["log_diagonal"], parameters["lower"])
        return RowwiseNormal(parameters["loc"], scale_tril, validate_args=False)
