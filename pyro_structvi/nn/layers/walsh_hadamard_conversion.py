"""Walsh-Hadamard layers in the place of a net's dense layers and convolutions."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyro.distributions as dist
from torch import Tensor, nn

from pyro_structvi._checks import check_fields
from pyro_structvi.nn.layers.channels import is_plain
from pyro_structvi.nn.layers.walsh_hadamard import (
    WalshHadamardConv,
    WalshHadamardConv1d,
    WalshHadamardConv2d,
    WalshHadamardConv3d,
    WalshHadamardLayer,
    WalshHadamardLinear,
)
from pyro_structvi.nn.priors import Prior, resolve_prior

_CONVOLUTIONS: dict[type, type[WalshHadamardConv]] = {
    nn.Conv1d: WalshHadamardConv1d,
    nn.Conv2d: WalshHadamardConv2d,
    nn.Conv3d: WalshHadamardConv3d,
}


@dataclass(frozen=True)
class WalshHadamard:
    """Walsh-Hadamard layers in the place of a net's own; see :class:`WalshHadamardLinear`.

    For the ``layers`` of ``bayesianize``. The prior of a weight there is that of its elements, and
    must be one normal around zero for all of them. The bias keeps its prior.

    Args:
        filters_per_example: As for :class:`WalshHadamardConv`; dense layers always draw for each
            example.

    Example:
        >>> from pyro_structvi import bayesianize
        >>> net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
        >>> bayes_net = bayesianize(net, prior=0.3, layers={"0": WalshHadamard()})
        >>> bayes_net[0]
        WalshHadamardLinear(weight (64, 4) of 16 x 4 coefficients)
    """

    filters_per_example: bool = field(default=False, repr=False)
    needs: ClassVar[str] = (
        "an nn.Linear or a convolution without groups, with nothing frozen, and without hooks or "
        "reparametrized weights"
    )

    def __post_init__(self) -> None:
        """Check the option."""
        check_fields(self)

    def fits(self, module: nn.Module) -> bool:
        """Whether there is a Walsh-Hadamard layer for the module."""
        kind_fits = type(module) is nn.Linear or type(module) in _CONVOLUTIONS
        is_frozen = not all(parameter.requires_grad for parameter in module.parameters())
        one_group = getattr(module, "groups", 1) == 1
        return kind_fits and one_group and not is_frozen and is_plain(module)

    def convert(self, module: Any, name: str, prior: Prior) -> WalshHadamardLayer:
        """Return the layer that takes the module's place.

        Args:
            module: The module; it stays as it is.
            name: Its name in the net.
            prior: That of the net's parameters.

        Returns:
            The layer. A guide's means start where its weights have the mean square of the module's.

        Raises:
            ValueError: If the prior of the weight is not one normal around zero for all elements.
        """
        prefix = f"{name}." if name else ""
        options = {
            "bias": False,
            "prior_scale": _one_scale(prior, f"{prefix}weight", module.weight),
            "device": module.weight.device,
            "dtype": module.weight.dtype,
        }
        layer: WalshHadamardLayer
        if type(module) is nn.Linear:
            layer = WalshHadamardLinear(module.in_features, module.out_features, **options)
        else:
            layer = _CONVOLUTIONS[type(module)](
                module.in_channels,
                module.out_channels,
                module.kernel_size,
                module.stride,
                module.padding,
                module.dilation,
                padding_mode=module.padding_mode,
                filters_per_example=self.filters_per_example,
                **options,
            )
        layer._start_like(module.weight.square().mean())
        if module.bias is not None:
            bias_prior = resolve_prior(prior, f"{prefix}bias", module.bias)
            layer._sample_bias(bias_prior, module.bias.detach())
        return layer


def _one_scale(prior: Prior, name: str, weight: Tensor) -> float:
    """Return the standard deviation that a prior means for all elements of a weight."""
    resolved = resolve_prior(
        prior, name, weight, weight.shape[1:].numel()
    )  # of a layer (out, *rest)
    if isinstance(resolved, dist.Normal) and not resolved.loc.any():
        smallest, largest = resolved.scale.aminmax()
        if smallest == largest:
            return float(largest)
    raise ValueError(
        f"The prior for '{name}' must be one normal around zero for all elements, such as a number "
        f"or FanIn(), since the layer becomes WalshHadamard(), but got {resolved!r}."
    )
