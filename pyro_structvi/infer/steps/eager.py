"""Eager training steps."""

import math
from contextlib import nullcontext
from typing import Any

import pyro.poutine as poutine
import torch

from pyro_structvi._checks import shape_text
from pyro_structvi._pyro import ONE_THREAD
from pyro_structvi.infer.steps.modules import Modules
from pyro_structvi.infer.steps.optimizer import OneOptimizer
from pyro_structvi.infer.steps.step import Loss, StepTerms, error_of, numbers_of


class EagerStep:
    """A step of ``SVI`` with one optimizer; a Pyro optimizer adopts the parameters of each step.

    Attributes:
        notes: Notes on tracing and compilation, with steps and reasons.
    """

    def __init__(self, loss: Loss, optimizer: OneOptimizer) -> None:
        self.loss, self.optimizer = loss, optimizer
        self.notes: list[str] = []
        self._modules = Modules(loss.parts)
        self._numbers = torch.zeros(4)  # of the last eager step

    def __call__(self, *args: Any, **kwargs: Any) -> StepTerms:
        """Take a step and count it for the schedule of the KL weight.

        On an error or an interrupt parameters and buffers stay as they were.
        """
        weight = self.loss.elbo.current_kl_weight
        self.optimizer.check_rates()
        try:
            with ONE_THREAD:
                loss, likelihood, kl, _ = self.take(args, kwargs)
        except BaseException:
            self.loss.zero_grad()
            self.optimizer.forget_gradients()
            raise
        finally:
            torch.clear_autocast_cache()  # of the weights before the update
        self.loss.elbo.advance()
        return StepTerms(loss, likelihood, kl, weight)

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float]:
        """Take a step that is not counted; return the numbers of :func:`numbers_of`."""
        return self.take_eagerly(args, kwargs)

    def take_eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float]:
        """Take a step by Python that is not counted; return its numbers."""
        restore, is_pyros = self._modules.saved(), self.optimizer.pyro is not None
        try:
            with poutine.trace(param_only=True) if is_pyros else nullcontext() as capture:
                terms = self.loss.terms(*args, **kwargs)
                loss = -terms.weighted(self.loss.elbo.current_kl_weight)
                if loss.requires_grad:
                    torch.autograd.backward(loss)
            if capture is None:
                self._refuse_other_parameters()
            else:
                met = [site["value"].unconstrained() for site in capture.trace.nodes.values()]
                self.optimizer.adopt(dict.fromkeys(met))
            parameters = self.optimizer.parameters
            self._numbers = numbers_of(loss, terms, [each.grad for each in parameters])
            read: list[float] = self._numbers.tolist()
            if not math.isfinite(sum(read[1:])):
                raise error_of(self.loss, parameters, (args, kwargs), terms)
            self.optimizer.step()
        except BaseException:
            restore()
            raise
        self.loss.zero_grad()  # also of parameters that the optimizer does not train
        return read

    def _refuse_other_parameters(self) -> None:
        untouched = [p for p in self.optimizer.parameters if p.requires_grad and p.grad is None]
        known = [*self._modules.tensors(), *self.loss.parameters()] if untouched else []
        own = {id(tensor) for tensor in known}
        foreign = [shape_text(p.shape) for p in untouched if id(p) not in own]
        if foreign:
            raise ValueError(
                f"`optim` must train parameters of model and guide, but {len(foreign)} of its "
                f"parameters, of shapes {foreign[:3]}, belong to neither. Make it of "
                "`guide.parameters()`, and of `model.parameters()` if there are point estimates."
            )
