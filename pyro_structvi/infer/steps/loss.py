"""The loss of a step as a module, with the terms that it is made of."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.infer import ELBO
from torch import Tensor, nn

from pyro_structvi._torch_steps import norm_of
from pyro_structvi.infer.elbo import StructuredELBO
from pyro_structvi.infer.terms import ELBOTerms


class Loss(nn.Module):
    """Minus the bound of a model and a guide.

    Args:
        model: The model, a module or not.
        guide: The guide, a module or not.
        elbo: The objective.

    Attributes:
        parts: Model and guide with their handlers; in a tuple, so that they are not submodules.
    """

    def __init__(self, model: Callable[..., Any], guide: Callable[..., Any], elbo: ELBO) -> None:
        super().__init__()
        self.parts, self.elbo = (model, guide), elbo
        for name, part in (("guide", guide), ("model", model)):
            module = poutine.unwrap(part)
            if isinstance(module, nn.Module):
                self.add_module(name, module)

    @property
    def is_structured(self) -> bool:
        """Whether the objective gives the terms of its bound, so that it can be compiled."""
        return isinstance(self.elbo, StructuredELBO)

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters of the modules that require gradients, by name."""
        return {name: value for name, value in self.named_parameters() if value.requires_grad}

    def terms(self, *args: Any, **kwargs: Any) -> ELBOTerms:
        """Return the terms of the bound, differentiable."""
        terms: ELBOTerms = self.elbo.terms(*self.parts, *args, **kwargs)
        return terms

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ELBOTerms | ValueError]:
        """Return the loss and the terms it is made of."""
        terms = self.terms(*args, **kwargs)
        return -terms.weighted(self.elbo.current_kl_weight), terms


class CheckedLoss(Loss):
    """A loss of NaN, and the error in the place of the terms, where a distribution refuses a value.

    Processes which met no such value then go through the same backward pass and stop at the same step.
    """

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ELBOTerms | ValueError]:
        """Return the loss and the terms it is made of, or the error that there are none."""
        try:
            return super().forward(*args, **kwargs)
        except ValueError as error:
            if not self.trained:
                raise
            sums = [math.nan * parameter.sum() for parameter in self.trained.values()]
            return torch.stack(sums).sum(), error


def numbers_of(
    loss: Tensor, terms: ELBOTerms | ValueError, gradients: Iterable[Tensor | None]
) -> Tensor:
    """Return loss, log likelihood, KL and the norm of all gradients as one tensor, ``(4,)``.

    For an error in the place of the terms the first three are NaN.
    """
    given = [gradient for gradient in gradients if gradient is not None]
    norm = norm_of(given).to(loss) if given else torch.zeros_like(loss)
    if isinstance(terms, ValueError):
        return torch.stack([loss, loss, loss, norm]).detach()
    likelihood = ELBOTerms(terms.log_likelihood, {}).elbo
    kl = -ELBOTerms({}, terms.kl).elbo  # not a difference of large numbers
    return torch.stack([loss, likelihood.to(loss), kl.to(loss), norm]).detach()
