"""One step of optimization, whichever engine takes it."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pyro_structvi._pyro import ONE_THREAD
from pyro_structvi.infer.batches import Arguments
from pyro_structvi.infer.steps.loss import Loss
from pyro_structvi.infer.steps.modules import Modules
from pyro_structvi.infer.steps.optimizer import OneOptimizer
from pyro_structvi.infer.terms import ELBOTerms

Check = Callable[[Arguments, Tensor, ELBOTerms | ValueError], list[float]]


@dataclass(frozen=True)
class StepTerms:
    """What a step found before its update, in nats.

    Attributes:
        loss: The loss.
        log_likelihood: The expected log likelihood; NaN for an objective of Pyro's, which has no terms.
        kl: The KL divergence, likewise.
        kl_weight: Its weight in the loss.
    """

    loss: float
    log_likelihood: float
    kl: float
    kl_weight: float


class Step(ABC):
    """Takes one real step at each call, with the arguments of model and guide.

    Args:
        loss: The loss.
        optimizer: What updates the parameters.
        check: Sees arguments, numbers, terms and the gradients before each update, returns the numbers
            and may raise; None to only read them.

    Attributes:
        notes: What was traced or compiled, when and why, or why not.
    """

    def __init__(
        self,
        loss: Loss,
        optimizer: OneOptimizer,
        check: Check | None = None,
    ) -> None:
        self.loss, self.optimizer = loss, optimizer
        self.notes: list[str] = []
        self._check = check
        self._modules = Modules(loss.parts)

    def __call__(self, *args: Any, **kwargs: Any) -> StepTerms:
        """Take a step, and count it where the weight of the KL may depend on it.

        Where it raises, parameters and buffers are those before it.
        """
        weight = self.loss.elbo.current_kl_weight if self.loss.is_structured else 1.0
        self.optimizer.check_rates()
        try:
            with ONE_THREAD, self._modules.buffers_kept_on_error():
                numbers = self.take(args, kwargs)
        except Exception:
            self.loss.zero_grad()
            self.optimizer.forget_gradients()
            raise
        if self.loss.is_structured:
            self.loss.elbo.advance()
        loss, likelihood, kl, _ = numbers
        return StepTerms(loss, likelihood, kl, weight)

    @abstractmethod
    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float]:
        """Take a step that is not counted; return its numbers, those of ``numbers_of``."""

    def _update(
        self, batch: Arguments, numbers: Tensor, terms: ELBOTerms | ValueError
    ) -> list[float]:
        """Check numbers and gradients, then update the parameters; return the numbers."""
        read = self._read(batch, numbers, terms)
        self.optimizer.step()
        return read

    def _read(
        self, batch: Arguments, numbers: Tensor, terms: ELBOTerms | ValueError
    ) -> list[float]:
        """Return the numbers, once they are checked."""
        if self._check is not None:
            return self._check(batch, numbers, terms)
        read: list[float] = numbers.tolist()
        return read
