"""Natural gradient steps for mean field, in the manner of IVON."""

from typing import Any

import torch
from torch import Tensor, nn

from pyro_structvi.extend import SitePosterior
from pyro_structvi.families import MeanField


class NaturalSteps(torch.optim.Optimizer):
    r"""Newton steps of means by the posterior's own variance, for a guide of mean field alone.

    With the gradient g of the loss by a log scale, the Hessian by the mean is (g + 1) / sigma^2, and an
    average of precisions with the weight r on the new one multiplies the precision by 1 + r g; the
    square that is added keeps it positive. Means move by lr sigma^2 times an average of their gradients.

    Args:
        guide: The guide.
        lr: Learning rate of means, near 1 without noise.
        rate: The weight r, as a share of ``lr``.
        momentum: How much of the average of gradients is kept.

    References:
        Shen et al. (2024), "Variational learning is effective for large deep networks", algorithm 1.
    """

    def __init__(self, guide: nn.Module, lr: float, rate: float, momentum: float = 0.9) -> None:
        pairs = [each for each in guide.modules() if isinstance(each, SitePosterior)]
        if not all(isinstance(each.family, MeanField) for each in pairs):
            raise ValueError("`guide` must have mean field at every site.")
        groups = [{"params": [each.loc, each.log_scale]} for each in pairs]
        super().__init__(groups, {"lr": lr, "rate": rate, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update by the gradients."""
        for group in self.param_groups:
            loc, log_scale = group["params"]
            state = self.state[loc]
            count = state["count"] = state.get("count", 0) + 1
            mean: Tensor = state.setdefault("mean", torch.zeros_like(loc))
            mean.lerp_(loc.grad, 1 - group["momentum"])
            change = group["rate"] * group["lr"] * log_scale.grad
            log_scale.sub_(torch.log1p(change + change.square() / 2) / 2)
            unbiased = mean / (1 - group["momentum"] ** count)
            loc.sub_(group["lr"] * (2 * log_scale).exp() * unbiased)
