"""One step of the training loop, and what it says where numbers are not finite."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pyro_structvi.infer.batches import Arguments
from pyro_structvi.infer.elbo import ELBOTerms, StructuredELBO
from pyro_structvi.infer.ranks import Loss, data_parallel, mean_over_ranks, of_all_ranks
from pyro_structvi.infer.schedules import Schedule


class Stepper:
    """One optimization step: loss, gradients, a check that both are finite, and the update.

    Args:
        model: The model.
        guide: The guide, with its parameters.
        elbo: The objective.
        lr: Learning rate.
        lr_schedule: A factor of it for each step, or None.
        optimizer: Called with ``(parameters, lr=lr)``; fused Adam when None.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: nn.Module,
        elbo: StructuredELBO,
        lr: float,
        lr_schedule: Schedule | None,
        optimizer: Callable[..., torch.optim.Optimizer] | None,
    ) -> None:
        loss = Loss(model, guide, elbo)
        self.elbo, self.lr_schedule = elbo, lr_schedule
        self.parameters = {
            name: parameter
            for name, parameter in loss.named_parameters()
            if parameter.requires_grad
        }
        make = optimizer or _fused_adam
        self.optimizer = make(list(self.parameters.values()), lr=lr)
        self.rates = [(group, group["lr"]) for group in self.optimizer.param_groups]
        self.loss = data_parallel(loss)

    def step(
        self, step: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[float, float, float, float]:
        """Take a step.

        Args:
            step: Its number.
            args: The model's arguments.
            kwargs: The model's keyword arguments.

        Returns:
            Log likelihood and KL, the weight of the latter, and the learning rate.

        Raises:
            FloatingPointError: If loss or gradient are not finite; parameters are then unchanged.
        """
        factor = 1.0 if self.lr_schedule is None else self.lr_schedule(step)
        for group, rate in self.rates:
            group["lr"] = rate * factor
        self.optimizer.zero_grad(set_to_none=True)
        loss, terms = self.loss(*args, **kwargs)
        torch.autograd.backward(loss)
        likelihood, kl, norm = mean_over_ranks(self._numbers(loss, terms)).tolist()
        if not math.isfinite(likelihood + kl + norm):
            raise self._error(step, (args, kwargs), terms)
        self.optimizer.step()
        weight = self.elbo.current_kl_weight
        self.elbo.step += 1
        return likelihood, kl, weight, self.optimizer.param_groups[0]["lr"]

    def _numbers(self, loss: Tensor, terms: ELBOTerms | ValueError) -> Tensor:
        """Return the log likelihood, the KL and the norm of the gradient, all NaN for a refusal."""
        if isinstance(terms, ValueError):
            return loss.detach().expand(3).clone()
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        likelihood = terms.weighted(0.0)
        kl = -ELBOTerms({}, terms.kl).elbo  # not a difference of large numbers
        return torch.stack([likelihood, kl, norm.to(likelihood)]).detach()

    def _error(self, step: int, batch: Arguments, terms: ELBOTerms | ValueError) -> Exception:
        """Say, on all ranks alike, what is not finite: inputs, terms, gradients, or a refusal."""
        refusal = terms if isinstance(terms, ValueError) else None
        reports = of_all_ranks((self._not_finite(batch, terms), refusal and str(refusal)))
        refusals = [text for _, text in reports if text]
        for kind in ("data", "log likelihood of the sites", "KL of the sites", "gradient of"):
            for rank, (found, _) in enumerate(reports):
                if found[kind] and not (refusals and kind == "gradient of"):
                    where = f" on rank {rank}" if len(reports) > 1 else ""
                    error = FloatingPointError(
                        f"At step {step}, the {kind} {found[kind]} is not finite{where}. The "
                        "parameters are those before this step. A smaller `lr` or `init_scale`, or an "
                        "annealed `kl_weight`, may help."
                    )
                    error.__cause__ = refusal
                    return error
        if refusals:
            return refusal or ValueError(refusals[0])
        return FloatingPointError(
            f"At step {step}, the norm of all gradients overflows. The parameters are unchanged."
        )

    def _not_finite(self, batch: Arguments, terms: ELBOTerms | ValueError) -> dict[str, list[str]]:
        """Return the names of what is not finite here, by kind."""
        args, kwargs = batch
        inputs = {**{f"argument {i}": value for i, value in enumerate(args)}, **kwargs}
        parts = terms if isinstance(terms, ELBOTerms) else ELBOTerms({}, {})
        kinds: dict[str, dict[str, Any]] = {
            "data": inputs,
            "log likelihood of the sites": parts.log_likelihood,
            "KL of the sites": parts.kl,
            "gradient of": {name: p.grad for name, p in self.parameters.items()},
        }

        def is_bad(value: Any) -> bool:
            return isinstance(value, Tensor) and not bool(torch.isfinite(value).all())

        return {
            kind: [name for name, value in values.items() if is_bad(value)]
            for kind, values in kinds.items()
        }


def _fused_adam(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=lr, fused=True)
