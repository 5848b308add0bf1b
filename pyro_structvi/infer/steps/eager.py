"""The engine that runs model and guide as Python in each step."""

import math
from typing import Any

import pyro.poutine as poutine
import torch
from torch import Tensor

from pyro_structvi.infer.steps.loss import numbers_of
from pyro_structvi.infer.steps.step import Step
from pyro_structvi.infer.terms import ELBOTerms


class EagerStep(Step):
    """A step as ``SVI`` takes it, but with one optimizer.

    Args:
        loss: The loss.
        optimizer: What updates the parameters; one made of Pyro's adopts those that a step meets.
        check: See :class:`Step`.
        is_shared: Likewise.
    """

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float]:
        """Take a step that is not counted; return loss, log likelihood and KL."""
        if self.optimizer.is_pyros:
            with poutine.trace(param_only=True) as capture:
                numbers, terms = self._differentiate(args, kwargs)
            met = [site["value"].unconstrained() for site in capture.trace.nodes.values()]
            if isinstance(terms, ELBOTerms):
                self.optimizer.adopt(dict.fromkeys(met))
        else:
            numbers, terms = self._differentiate(args, kwargs)
        return self._update((args, kwargs), numbers, terms)

    def _differentiate(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, ELBOTerms | ValueError]:
        """Give the parameters their gradients."""
        if not self.loss.is_structured:
            loss = self.loss.elbo.loss_and_grads(*self.loss.parts, *args, **kwargs)
            return torch.tensor([float(loss), math.nan, math.nan]), ELBOTerms({}, {})
        loss, terms = self.loss(*args, **kwargs)
        if loss.requires_grad:
            torch.autograd.backward(loss)
        return numbers_of(loss, terms), terms
