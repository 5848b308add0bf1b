"""Multivariate t distributions: normals around zero with common, unknown scales."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Chi2, constraints

from pyro_structvi._checks import (
    Positive,
    check_positive,
    check_same_kind,
    checked,
    shape_text,
    validates,
)
from pyro_structvi.linalg.matrices import event_sum, log_gamma_ratio
from pyro_structvi.weights.arguments import as_size
from pyro_structvi.weights.weight_distribution import TensorDistribution


class IsotropicStudentT(TensorDistribution):
    r"""The multivariate t distribution over the elements of a parameter that share a scale.

    .. math:: p(W) \propto \Bigl(1 + \frac{\lVert W \rVert^2}{\nu s^2}\Bigr)^{-(\nu + D) / 2}

    This is the marginal distribution of independent normals with a common standard deviation
    :math:`\sigma`, where :math:`\nu s^2 / \sigma^2` has a chi-squared distribution with :math:`\nu`
    degrees of freedom, and D is the number of elements. As the prior of each parameter of a net, for
    ``bayesianize``, it lets the data determine the scale of each layer without a further site. With
    ``dim`` each slice of the parameter has its own scale, independent of the others, such as the weights
    of each input (automatic relevance determination). The KL of a normal to it has no closed form;
    :class:`~pyro_structvi.StructuredELBO` samples it.

    Args:
        df: The degrees of freedom :math:`\nu`, positive, ``(*batch)`` or a number.
        scale: The typical scale s, positive, ``(*batch)`` or a number.
        event_shape: The shape of the parameter; () for single elements.
        dim: The dimension of the event with a scale for each index: 1 for the inputs of a weight
            ``(out, in, ...)``, 0 for its outputs. None for one scale of all elements.
        validate_args: Whether to check arguments and values; Pyro's setting when None.

    Raises:
        ValueError: If ``df`` or ``scale`` is not positive, their shapes do not broadcast, dtypes or
            devices differ, or the event has no dimension ``dim``.

    Example:
        >>> from pyro_structvi import bayesianize
        >>> prior = lambda name, value: IsotropicStudentT(4.0, 0.5, value.shape)
        >>> bayesianize(torch.nn.Linear(3, 2), prior=prior).weight.shape
        torch.Size([2, 3])
        >>> IsotropicStudentT(4.0, 0.5, (2, 3)).variance[0, 0]
        tensor(0.5000)
        >>> of_inputs = IsotropicStudentT(1.0, 0.1, (2, 3), dim=1)
        >>> columns = IsotropicStudentT(1.0, 0.1, (2,))
        >>> w = torch.ones(2, 3)
        >>> torch.allclose(of_inputs.log_prob(w), columns.log_prob(w.mT).sum())
        True

    References:
        Kotz and Nadarajah (2004), "Multivariate t distributions and their applications", section 1.1;
        Neal (1996), "Bayesian learning for neural networks", for priors of the scales of layers and of
        inputs.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {
        "scale": constraints.positive,
        "df": constraints.positive,
    }
    df: Tensor
    scale: Tensor
    dim: int | None = None

    @checked
    def __init__(
        self,
        df: Tensor | Positive,
        scale: Tensor | Positive,
        event_shape: Any = (),
        dim: int | None = None,
        validate_args: bool | None = None,
    ) -> None:
        like = next((value for value in (df, scale) if isinstance(value, Tensor)), torch.empty(()))
        df, scale = (
            value if isinstance(value, Tensor) else like.new_full((), value)
            for value in (df, scale)
        )
        if validates(validate_args):
            check_same_kind("scale", scale, "df", df)
            check_positive("df", df)
            check_positive("scale", scale)
            pairs = zip(df.shape[::-1], scale.shape[::-1], strict=False)
            if any(one != other and 1 not in (one, other) for one, other in pairs):
                raise ValueError(
                    "`df` and `scale` must have shapes that broadcast, but got "
                    f"{shape_text(df.shape)} and {shape_text(scale.shape)}."
                )
        self.df, self.scale = torch.broadcast_tensors(df, scale)
        self._set_shapes(self.df.shape, as_size("event_shape", event_shape), validate_args)
        if dim is not None:
            if not -len(self.event_shape) <= dim < len(self.event_shape):
                raise ValueError(
                    f"`dim` must be a dimension of the event shape {shape_text(self.event_shape)}, but "
                    f"got {dim}."
                )
            self.dim = dim % len(self.event_shape)

    @property
    def _groups(self) -> torch.Size:
        """The event shape of one element for each scale."""
        sizes = enumerate(self.event_shape)
        return torch.Size(size if axis == self.dim else 1 for axis, size in sizes)

    @property
    def mean(self) -> Tensor:
        """Zero, ``(*batch_shape, *event_shape)``; NaN where ``df`` is at most 1."""
        return self._of_elements(torch.where(self.df > 1, 0.0, math.nan).to(self.df))

    @property
    def mode(self) -> Tensor:
        return self._of_elements(torch.zeros_like(self.df))

    @property
    def variance(self) -> Tensor:
        """The variance of each element; infinite where ``df`` is at most 2, NaN where at most 1."""
        finite = self.scale.square() * self.df / (self.df - 2)
        wide = torch.where(self.df > 1, math.inf, math.nan).to(self.df)
        return self._of_elements(torch.where(self.df > 2, finite, wide))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density, in nats, with shape ``(*sample, *batch_shape)``."""
        if self._validate_args:
            self._validate_sample(value)
        event_dim = len(self.event_shape)
        df, scale = self._before_event(self.df), self._before_event(self.scale)
        square = (value / scale).square()
        shared = [axis - event_dim for axis in range(event_dim) if axis != self.dim]
        size = math.prod(self.event_shape[axis] for axis in shared)
        square = square.sum(shared, keepdim=True) if shared else square  # no axes would be all
        constant = log_gamma_ratio(df, size) - size * (0.5 * (math.pi * df).log() + scale.log())
        return event_sum(constant - 0.5 * (df + size) * (square / df).log1p(), event_dim)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draw values ``(*sample_shape, *batch_shape, *event_shape)``."""
        sample_shape = as_size("sample_shape", sample_shape)
        shape = self._extended_shape(sample_shape)
        noise = torch.randn(shape, dtype=self.scale.dtype, device=self.scale.device)
        df = self._before_event(self.df).expand(self.batch_shape + self._groups)
        chi2 = Chi2(df, validate_args=False).rsample(sample_shape)
        return noise * self._before_event(self.scale) * (df / chi2).sqrt()

    def _before_event(self, values: Tensor) -> Tensor:
        return values[(..., *(None for _ in self.event_shape))]

    def _of_elements(self, values: Tensor) -> Tensor:
        return self._before_event(values).expand(self.batch_shape + self.event_shape)
