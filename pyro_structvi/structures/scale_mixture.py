"""A mixture of normals around zero with several scales: a spike and a slab."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_structvi._checks import check_positive, check_same_kind, checked, shape_text, validates
from pyro_structvi.linalg.matrices import shrink
from pyro_structvi.weights.arguments import as_size
from pyro_structvi.weights.weight_distribution import TensorDistribution


class ScaleMixtureNormal(TensorDistribution):
    r"""A number from one of K normals around zero, chosen with known probabilities.

    .. math:: p(w) = \sum_k \pi_k\, N(w; 0, \sigma_k^2)

    With a small and a large scale it is the "spike and slab" prior of Blundell et al. (2015). It is a
    prior of single elements, for ``bayesianize``. The KL of a normal to it has no closed form;
    :class:`~pyro_structvi.StructuredELBO` samples it.

    Args:
        scales: The standard deviations, positive, ``(*batch, K)``.
        probs: The probabilities, positive, broadcastable to the scales; they are normalized.
        validate_args: Whether to check arguments and values; Pyro's setting when None.

    Raises:
        ValueError: If the shapes do not fit each other, a scale or a probability is not positive, or
            dtypes or devices differ.

    Example:
        >>> prior = ScaleMixtureNormal(torch.tensor([1.0, 0.1]), torch.tensor([0.25, 0.75]))
        >>> prior.variance
        tensor(0.2575)
        >>> from pyro_structvi import bayesianize
        >>> bayesianize(torch.nn.Linear(3, 2), prior=prior).weight.shape
        torch.Size([2, 3])

    References:
        Blundell, Cornebise, Kavukcuoglu and Wierstra (2015), "Weight uncertainty in neural networks",
        section 3.3.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {
        "scales": constraints.independent(constraints.positive, 1),
        "probs": constraints.simplex,
    }
    has_rsample = False
    support = constraints.real
    scales: Tensor
    probs: Tensor

    @checked
    def __init__(self, scales: Tensor, probs: Tensor, validate_args: bool | None = None) -> None:
        if validates(validate_args):
            check_same_kind("probs", probs, "scales", scales)
            check_positive("scales", scales)
            check_positive("probs", probs)
            if not scales.dim() or scales.shape[-1:] != probs.shape[-1:]:
                raise ValueError(
                    "`scales` and `probs` must have shape (*batch, K) with one K, but got "
                    f"{shape_text(scales.shape)} and {shape_text(probs.shape)}."
                )
        probs = probs / probs.sum(-1, keepdim=True)
        self.scales, self.probs = torch.broadcast_tensors(scales, probs)
        self._set_shapes(self.scales.shape[:-1], torch.Size(), validate_args)

    @property
    def mean(self) -> Tensor:
        """Zero, ``(*batch_shape,)``."""
        return self.scales.new_zeros(()).expand(self.batch_shape)

    @property
    def mode(self) -> Tensor:
        return self.mean

    @property
    def variance(self) -> Tensor:
        scales, probs = self._components
        return (probs * scales.square()).sum(-1).expand(self.batch_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density, in nats, with shape ``(*sample, *batch_shape)``."""
        if self._validate_args:
            self._validate_sample(value)
        value = value.expand(torch.broadcast_shapes(value.shape, self.batch_shape))
        scales, probs = self._components
        exponents = -0.5 * (value.unsqueeze(-1) / scales).square()
        logs = exponents + (probs / scales).log()
        # Torch's logsumexp has gradients off by a factor where the logs are large.
        largest = logs.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(logs.dtype).min)
        total = largest.squeeze(-1) + (logs - largest).exp().sum(-1).log()
        return total - 0.5 * math.log(2 * math.pi)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw numbers ``(*sample_shape, *batch_shape)``; they carry no gradients."""
        shape = self._extended_shape(as_size("sample_shape", sample_shape))
        scales, probs = (value.detach() for value in self._components)
        uniform = torch.rand((*shape, 1), dtype=scales.dtype, device=scales.device)
        chosen = (uniform >= probs.cumsum(-1)[..., :-1]).sum(-1, keepdim=True)
        scale = scales.expand(*shape, -1).gather(-1, chosen).squeeze(-1)
        return scale * torch.randn_like(scale)

    @property
    def _components(self) -> tuple[Tensor, Tensor]:
        """Scales and probabilities, with batch dimensions that repeat one entry at size 1."""
        scales, probs = (
            shrink(value.movedim(-1, 0), len(self.batch_shape)).movedim(0, -1)
            for value in (self.scales, self.probs)
        )
        return scales, probs
