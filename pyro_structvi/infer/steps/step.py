"""One training step: its arguments, loss, checks and terms."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.infer import ELBO
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

from pyro_structvi._checks import brief
from pyro_structvi._pyro import ONE_THREAD, random_subsample
from pyro_structvi._torch import inside_transform, is_recording, norm_of, put_together, take_apart
from pyro_structvi.infer.batches import Arguments
from pyro_structvi.infer.elbo import StructuredELBO
from pyro_structvi.infer.steps.modules import Modules
from pyro_structvi.infer.steps.optimizer import OneOptimizer
from pyro_structvi.infer.terms import ELBOTerms


class Call:
    """The arguments of one call, with tensors separated from the structure that holds them.

    Attributes:
        tensors: The tensors among the arguments.
        key: Equal for calls that can share one compiled step.

    Raises:
        TypeError: If an argument is neither a tensor nor hashable.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        leaves, self._structure = take_apart((args, kwargs))
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        kinds = [
            (value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
            for value in self.tensors
        ]
        types = [type(leaf) for leaf in leaves]
        self.key = (self._structure, *types, *self._leaves, *kinds)
        for leaf in self._leaves:
            by_value = isinstance(leaf, Hashable) and type(leaf).__hash__ is not object.__hash__
            if not (by_value or leaf is None or callable(leaf)):
                raise TypeError(
                    f"The arguments of a compiled step must be tensors or hashable, but got "
                    f"{brief(leaf)}. Pass arrays as tensors, and objects by their parts."
                )

    def with_tensors(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors."""
        given = iter(tensors)
        leaves = [
            next(given) if is_tensor else leaf
            for is_tensor, leaf in zip(self._is_tensor, self._leaves, strict=True)
        ]
        args, kwargs = put_together(leaves, self._structure)
        return args, kwargs


class SubsampleRecorder(Messenger):
    """Records how plates draw their subsamples, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[Callable[[], Tensor]] = []

    def _pyro_sample(self, message: dict[str, Any]) -> None:
        draw = random_subsample(message)
        if draw is not None:
            self.draws.append(draw)


class SubsamplePlayer(Messenger):
    """Gives plates subsamples that were drawn beforehand, in order."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        super().__init__()
        self._values = iter(values)

    def _pyro_sample(self, message: dict[str, Any]) -> None:
        if random_subsample(message) is not None:
            if inside_transform():
                raise RuntimeError("particles in one pass share a plate's subsample in a graph")
            message["value"] = next(self._values, None)  # None: the plate draws itself


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
        """Whether the objective has terms, so that it can be compiled."""
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
        """Return the loss and its terms."""
        terms = self.terms(*args, **kwargs)
        return -terms.weighted(self.elbo.current_kl_weight), terms


class CheckedLoss(Loss):
    """A loss that is NaN, with the error instead of terms, if a distribution refuses a value.

    All processes of a distributed run then take the same backward pass and stop at the same step.
    """

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ELBOTerms | ValueError]:
        """Return the loss and its terms, or NaN and the error."""
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

    Loss, log likelihood and KL are NaN for an error instead of terms.
    """
    given = [gradient for gradient in gradients if gradient is not None]
    norm = (
        norm_of(given, for_compilers=is_recording()).to(loss) if given else torch.zeros_like(loss)
    )
    if isinstance(terms, ValueError):
        return torch.stack([loss, loss, loss, norm]).detach()
    likelihood = ELBOTerms(terms.log_likelihood, {}).elbo
    kl = -ELBOTerms({}, terms.kl).elbo  # not a difference of large numbers
    return torch.stack([loss, likelihood.to(loss), kl.to(loss), norm]).detach()


Check = Callable[[Arguments, Tensor, ELBOTerms | ValueError], list[float]]


@dataclass(frozen=True)
class StepTerms:
    """The terms of a step before its update, in nats.

    Attributes:
        loss: The loss.
        log_likelihood: The expected log likelihood; NaN for Pyro's objectives, which have no terms.
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
        optimizer: The optimizer.
        check: A function of arguments, numbers and terms that is called before each update, when
            gradients are set; it returns the numbers or raises. None for no check.

    Attributes:
        notes: Notes on tracing and compilation, with steps and reasons.
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
        """Take a step and count it for the schedule of the KL weight.

        On an error parameters and buffers stay as they were.
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
        """Take a step that is not counted; return the numbers of :func:`numbers_of`."""

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


_REMEDY = "A smaller `lr` or `init_scale`, or an annealed `kl_weight`, may help"


class FiniteCheck:
    """Stops a step before its update if terms or gradients are not finite.

    Args:
        loss: The loss.
        optimizer: The optimizer.
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
        """Return an error that names the inputs, terms or gradients that are not finite."""
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
        """Return the names of everything that is not finite, by kind."""
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


@dataclass(repr=False)
class History:
    """The history of a fit: lists with one entry a step, and of validations one entry each.

    Attributes:
        elbo: The estimated evidence lower bound, in nats, with the KL at full weight.
        log_likelihood: Its expected log likelihood, scaled to all data.
        kl: Its KL divergence.
        kl_weight: The weight of the KL in the step's loss.
        lr: The learning rate of the first parameter group.
        validation: The values of the metric on the validation data.
        validation_steps: After how many steps each was measured.
        interrupted: Whether the fit was stopped from the keyboard.
        compilation: Notes on tracing and compilation, with the step and the reason, a line each.
    """

    elbo: list[float] = field(default_factory=list)
    log_likelihood: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    kl_weight: list[float] = field(default_factory=list)
    lr: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    validation_steps: list[int] = field(default_factory=list)
    interrupted: bool = False
    compilation: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        """Return the number of steps and the last bound."""
        return (
            f"History({len(self.elbo)} steps{''.join(f', elbo={e:.6g}' for e in self.elbo[-1:])})"
        )

    def add(self, terms: StepTerms, lr: float) -> None:
        """Write down a step."""
        self.log_likelihood.append(terms.log_likelihood)
        self.kl.append(terms.kl)
        self.elbo.append(terms.log_likelihood - terms.kl)
        self.kl_weight.append(terms.kl_weight)
        self.lr.append(lr)
