"""The errors of training where numbers are not finite."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from pyro_structvi.infer.batches import Arguments
from pyro_structvi.infer.steps.loss import Loss
from pyro_structvi.infer.steps.optimizer import OneOptimizer
from pyro_structvi.infer.terms import ELBOTerms

_REMEDY = "A smaller `lr` or `init_scale`, or an annealed `kl_weight`, may help"


class FiniteCheck:
    """Stops a step before its update where terms or gradients are not finite.

    Args:
        loss: The loss.
        optimizer: What updates the parameters.
    """

    def __init__(self, loss: Loss, optimizer: OneOptimizer) -> None:
        self._loss, self._optimizer = loss, optimizer

    def __call__(
        self, batch: Arguments, numbers: Tensor, terms: ELBOTerms | ValueError
    ) -> list[float]:
        """Return loss, log likelihood, KL and the gradients' norm.

        Args:
            batch: The arguments of the step.
            numbers: The same as a tensor, ``(4,)``.
            terms: The terms of the bound, or the error of the distribution that refused a value.

        Raises:
            FloatingPointError: If a term or a gradient is not finite.
            ValueError: If a distribution refused a value that is finite.
        """
        read: list[float] = numbers.tolist()
        loss, *others, norm = read
        if not math.isfinite(sum([*others, norm] if self._loss.is_structured else [loss, norm])):
            raise self._error(batch, terms)
        return read

    @property
    def _where(self) -> str:
        return f"At step {self._loss.elbo.step}" if self._loss.is_structured else "In this step"

    def _error(self, batch: Arguments, terms: ELBOTerms | ValueError) -> Exception:
        """Say what is not finite: inputs, terms, gradients, or a refusal."""
        refusal = terms if isinstance(terms, ValueError) else None
        for kind, found in self._not_finite(batch, terms).items():
            if found and not (refusal and kind == "gradient of"):
                remedy = "Drop or mend these examples" if kind == "data" else _REMEDY
                error = FloatingPointError(
                    f"{self._where}, the {kind} {found} is not finite. "
                    f"Parameters and buffers are those before this step. {remedy}."
                )
                error.__cause__ = refusal
                return error
        if refusal and self._loss.is_structured and self._loss.elbo.step:
            text = str(refusal).split("Trace Shapes:")[0].strip()  # those of Pyro's
            return ValueError(
                f"{self._where}: {text} Parameters and buffers are those before this step. Where the "
                f"data are as in earlier steps, the parameters were led astray. {_REMEDY}."
            )
        if refusal:
            return refusal
        return FloatingPointError(
            f"{self._where}, the norm of all gradients overflows. The parameters are unchanged."
        )

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        names = {parameter: name for name, parameter in self._loss.named_parameters()}
        return {
            names.get(parameter, f"parameter {number}"): parameter
            for number, parameter in enumerate(self._optimizer.parameters)
        }

    def _not_finite(self, batch: Arguments, terms: ELBOTerms | ValueError) -> dict[str, list[str]]:
        """Return the names of what is not finite here, by kind."""
        args, kwargs = batch
        inputs = {**{f"argument {i}": value for i, value in enumerate(args)}, **kwargs}
        parts = terms if isinstance(terms, ELBOTerms) else ELBOTerms({}, {})
        kinds: dict[str, dict[str, Any]] = {
            "data": inputs,
            "log likelihood of the sites": parts.log_likelihood,
            "KL of the sites": parts.kl,
            "gradient of": {name: p.grad for name, p in self._named_parameters().items()},
        }

        def is_bad(value: Any) -> bool:
            has_values = isinstance(value, Tensor) and not value.is_meta
            return has_values and not bool(torch.isfinite(value).all())

        return {
            kind: [name for name, value in values.items() if is_bad(value)]
            for kind, values in kinds.items()
        }
