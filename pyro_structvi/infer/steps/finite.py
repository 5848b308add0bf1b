"""What training says, on all ranks alike, where numbers are not finite."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from pyro_structvi.infer.data.batches import Arguments
from pyro_structvi.infer.ranks import mean_over_ranks, of_all_ranks
from pyro_structvi.infer.steps.loss import Loss
from pyro_structvi.infer.steps.optimizer import OneOptimizer
from pyro_structvi.infer.terms import ELBOTerms

_REMEDY = "A smaller `lr` or `init_scale`, or an annealed `kl_weight`, may help"


class FiniteCheck:
    """Stops a step before its update where terms or gradients are not finite on some rank.

    Args:
        loss: The loss.
        optimizer: What updates the parameters.
        is_shared: Whether all processes of a group take this step together.
    """

    def __init__(self, loss: Loss, optimizer: OneOptimizer, is_shared: bool = True) -> None:
        self._loss, self._optimizer, self.is_shared = loss, optimizer, is_shared

    def __call__(
        self, batch: Arguments, numbers: Tensor, terms: ELBOTerms | ValueError
    ) -> list[float]:
        """Return loss, log likelihood, KL and the gradients' norm as means over the ranks.

        Args:
            batch: The arguments of the step.
            numbers: The same of this rank, ``(4,)``.
            terms: The terms of the bound, or the error of the distribution that refused a value.

        Raises:
            FloatingPointError: If a term or a gradient is not finite.
            ValueError: If a distribution refused a value that is finite.
        """
        means: list[float] = (mean_over_ranks(numbers) if self.is_shared else numbers).tolist()
        loss, *others, norm = means
        if not math.isfinite(sum([*others, norm] if self._loss.is_structured else [loss, norm])):
            raise self._error(batch, terms)
        return means

    @property
    def _where(self) -> str:
        return f"At step {self._loss.elbo.step}" if self._loss.is_structured else "In this step"

    def _error(self, batch: Arguments, terms: ELBOTerms | ValueError) -> Exception:
        """Say what is not finite: inputs, terms, gradients, or a refusal."""
        refusal = terms if isinstance(terms, ValueError) else None
        report = self._not_finite(batch, terms), refusal and str(refusal)
        reports = of_all_ranks(report) if self.is_shared else [report]
        refusals = [text for _, text in reports if text]
        for kind in ("data", "log likelihood of the sites", "KL of the sites", "gradient of"):
            for rank, (found, _) in enumerate(reports):
                if found[kind] and not (refusals and kind == "gradient of"):
                    where = f" on rank {rank}" if len(reports) > 1 else ""
                    remedy = "Drop or mend these examples" if kind == "data" else _REMEDY
                    error = FloatingPointError(
                        f"{self._where}, the {kind} {found[kind]} is not finite{where}. "
                        f"Parameters and buffers are those before this step. {remedy}."
                    )
                    error.__cause__ = refusal
                    return error
        if refusals and self._loss.is_structured and self._loss.elbo.step:
            text = str(refusals[0]).split("Trace Shapes:")[0].strip()  # those of Pyro's
            return ValueError(
                f"{self._where}: {text} Parameters and buffers are those before this step. Where the "
                f"data are as in earlier steps, the parameters were led astray. {_REMEDY}."
            )
        if refusals:
            return refusal or ValueError(refusals[0])
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
