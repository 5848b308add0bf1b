"""The parts of a training step: its arguments, loss, numbers and errors, and the history of steps."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pyro.poutine as poutine
import torch
from torch import Tensor, nn

from pyro_structvi._checks import brief
from pyro_structvi._torch import is_recording, norm_of, put_together, take_apart
from pyro_structvi.infer.batches import Arguments
from pyro_structvi.infer.elbo import StructuredELBO
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
        self._leaves, self._structure = take_apart((args, kwargs))
        self.tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self.key = (self._structure, *map(_kind_of, self._leaves))

    def with_tensors(self, tensors: Iterable[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other tensors."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        args, kwargs = put_together(leaves, self._structure)
        return args, kwargs


def _kind_of(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad, type(leaf)
    try:
        hash(leaf)  # also of its parts
        by_value = isinstance(leaf, Hashable) and type(leaf).__hash__ is not object.__hash__
    except TypeError:
        by_value = False
    if not (by_value or leaf is None or callable(leaf)):
        raise TypeError(
            f"The arguments of a compiled step must be tensors or hashable, but got {brief(leaf)}. "
            "Pass arrays as tensors, and objects by their parts."
        )
    return type(leaf), leaf


class Loss(nn.Module):
    """Minus the bound of a model and a guide, which may be modules.

    Attributes:
        parts: Model and guide with their handlers; in a tuple, so that they are not submodules.
    """

    def __init__(
        self, model: Callable[..., Any], guide: Callable[..., Any], elbo: StructuredELBO
    ) -> None:
        super().__init__()
        self.parts, self.elbo = (model, guide), elbo
        for name, part in (("guide", guide), ("model", model)):
            module = poutine.unwrap(part)
            if isinstance(module, nn.Module):
                self.add_module(name, module)

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters of the modules that require gradients, by name."""
        return {name: value for name, value in self.named_parameters() if value.requires_grad}

    def terms(self, *args: Any, **kwargs: Any) -> ELBOTerms:
        """Return the terms of the bound, or raise the error of a distribution that refuses a value."""
        try:
            return self.elbo.terms(*self.parts, *args, **kwargs)
        except ValueError as error:
            clearer = error_of(self, (), (args, kwargs), error)
            raise clearer from (error.__cause__ if clearer is error else error)


def numbers_of(loss: Tensor, terms: ELBOTerms, gradients: Iterable[Tensor | None]) -> Tensor:
    """Return loss, log likelihood, KL and the norm of all gradients as one tensor, ``(4,)``."""
    given = [gradient for gradient in gradients if gradient is not None]
    norm = norm_of(given, for_compilers=is_recording()) if given else torch.zeros_like(loss)
    likelihood = ELBOTerms(terms.log_likelihood, {}).elbo
    kl = -ELBOTerms({}, terms.kl).elbo  # not a difference of large numbers
    return torch.stack([each.to(loss) for each in (loss, likelihood, kl, norm)]).detach()


@dataclass(frozen=True)
class StepTerms:
    """The terms of a step before its update, in nats, and the weight of the KL in its loss."""

    loss: float
    log_likelihood: float
    kl: float
    kl_weight: float


_REMEDY = "A smaller `lr` or `init_scale`, or an annealed `kl_weight`, may help"


def error_of(
    loss: Loss,
    parameters: Iterable[nn.Parameter],
    batch: Arguments,
    terms: ELBOTerms | ValueError,
) -> Exception:
    """Return an error that names the inputs, terms or gradients that are not finite.

    Args:
        loss: The loss.
        parameters: The trained parameters, with their gradients.
        batch: The arguments of the step.
        terms: The terms of the bound, or the error of the distribution that refused a value.
    """
    where, kept = f"At step {loss.elbo.step}", "Parameters and buffers are those before this step."
    args, kwargs = batch
    kinds: dict[str, dict[str, Any]] = {
        "data": {f"argument {i}": value for i, value in enumerate(args)} | kwargs
    }
    if isinstance(terms, ELBOTerms):
        names = {parameter: name for name, parameter in loss.named_parameters()}
        kinds["log likelihood of the sites"] = terms.log_likelihood
        kinds["KL of the sites"] = terms.kl
        kinds["gradient of"] = {
            names.get(p, f"parameter {i}"): p.grad for i, p in enumerate(parameters)
        }
    for kind, values in kinds.items():
        bad = [name for name, value in values.items() if not _is_finite(value)]
        if bad:
            remedy = "Drop or mend these examples" if kind == "data" else _REMEDY
            return FloatingPointError(f"{where}, the {kind} {bad} is not finite. {kept} {remedy}.")
    if isinstance(terms, ELBOTerms):
        return FloatingPointError(f"{where}, the norm of all gradients overflows. {kept}")
    if not loss.elbo.step:
        return terms
    text = str(terms).split("Trace Shapes:")[0].strip()  # those of Pyro's
    return ValueError(
        f"{where}: {text} {kept} Where the data are as in earlier steps, the parameters were led "
        f"astray. {_REMEDY}."
    )


def _is_finite(value: Any) -> bool:
    has_values = isinstance(value, Tensor) and not value.is_meta
    return not has_values or bool(torch.isfinite(value).all())


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
        last = "".join(f", elbo={elbo:.6g}" for elbo in self.elbo[-1:])
        return f"History({len(self.elbo)} steps{last})"

    def add(self, terms: StepTerms, lr: float) -> None:
        """Write down a step."""
        self.log_likelihood.append(terms.log_likelihood)
        self.kl.append(terms.kl)
        self.elbo.append(terms.log_likelihood - terms.kl)
        self.kl_weight.append(terms.kl_weight)
        self.lr.append(lr)
