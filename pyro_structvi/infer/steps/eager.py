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
    """

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float]:
        """Take a step that is not counted; return its numbers."""
        if self.optimizer.is_pyros:
            with poutine.trace(param_only=True) as capture:
                loss, terms = self._differentiate(args, kwargs)
            met = [site["value"].unconstrained() for site in capture.trace.nodes.values()]
            if isinstance(terms, ELBOTerms):
                self.optimizer.adopt(dict.fromkeys(met))
        else:
            loss, terms = self._differentiate(args, kwargs)
        numbers = numbers_of(loss, terms, [p.grad for p in self.optimizer.parameters])
        if not self.loss.is_structured:
            numbers[1:3] = math.nan
        return self._update((args, kwargs), numbers, terms)

    def _differentiate(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, ELBOTerms | ValueError]:
        """Give the parameters their gradients; return the loss and its terms."""
        if not self.loss.is_structured:
            loss = self.loss.elbo.loss_and_grads(*self.loss.parts, *args, **kwargs)
            return torch.tensor(float(loss)), ELBOTerms({}, {})
        loss, terms = self.loss(*args, **kwargs)
        if loss.requires_grad:
            torch.autograd.backward(loss)
        return loss, terms
