"""Training steps by Python, with the loss, the numbers and the errors of every step."""

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import pyro.poutine as poutine
import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from pyro_structvi._checks import shape_text
from pyro_structvi._pyro import ONE_THREAD, module_parameter, parameter_names, unwrapped
from pyro_structvi._torch import is_recording
from pyro_structvi.infer.batches import Arguments
from pyro_structvi.infer.elbo import StructuredELBO
from pyro_structvi.infer.steps.optimizer import OneOptimizer
from pyro_structvi.infer.steps.state import Modules
from pyro_structvi.infer.terms import ELBOTerms
from pyro_structvi.sites.finding import separate_randomness, trial_run
from pyro_structvi.sites.site_posterior import module_key
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.sites.trial_handlers import ValuesWithoutDraws


class Loss(nn.Module):
    """Minus the bound of a model and a guide, which may be modules."""

    def __init__(
        self, model: Callable[..., Any], guide: Callable[..., Any], elbo: StructuredELBO
    ) -> None:
        super().__init__()
        self.parts, self.elbo = (model, guide), elbo  # with their handlers, and no submodules
        for name, part in (("guide", guide), ("model", model)):
            module = unwrapped(part)
            if isinstance(module, nn.Module):
                self.add_module(name, module)

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters of the modules that require gradients, by name."""
        return {name: value for name, value in self.named_parameters() if value.requires_grad}

    def stored_parameters(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, nn.Parameter]:
        """Run model and guide once, and return the parameters that only Pyro's store has, by name.

        A program reads them by ``pyro.param``. An error comes again in the first step, which words it.
        """
        model, guide = self.parts
        met, later = poutine.trace(param_only=True), suppress(ValueError, RuntimeError)
        with later, trial_run(model), separate_randomness(), met, ValuesWithoutDraws():
            model(*args, **kwargs)
            if not isinstance(guide, StructuredGuide):  # which owns its parameters
                guide(*args, **kwargs)
        # A module uses its own parameters, also where the store has a former module's of their names;
        # only constrained ones become the former module's, of which `fit` warns.
        own = {name for module in self.modules() for name in parameter_names(module)}
        known = {id(parameter) for parameter in self.parameters()}
        return {
            name: value
            for name, site in met.trace.nodes.items()
            if name not in own
            and (value := module_parameter(name, site["args"])) is not None
            and id(value) not in known
        }

    def add_stored_parameters(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Add the parameters that only Pyro's store has."""
        if new := self.stored_parameters(args, kwargs):
            stored = nn.Module()
            self.add_module("stored", stored)
            for name, value in new.items():
                stored.register_parameter(module_key(name), value)

    def terms(self, *args: Any, **kwargs: Any) -> ELBOTerms:
        """Return the terms of the bound, or raise the error of a distribution that refuses a value."""
        try:
            return self.elbo.terms(*self.parts, *args, **kwargs)
        except ValueError as error:
            clearer = error_of(self, [], (args, kwargs), error)
            raise clearer from (error.__cause__ if clearer is error else error)


@dataclass(frozen=True)
class StepTerms:
    """The terms of a step before its update, in nats, and the weight of the KL in its loss."""

    loss: float
    log_likelihood: float
    kl: float
    kl_weight: float


class EagerStep:
    """A step of ``SVI`` with one optimizer; a Pyro optimizer adopts the parameters of each step."""

    def __init__(self, loss: Loss, optimizer: OneOptimizer) -> None:
        self.loss, self.optimizer = loss, optimizer
        self.notes: list[str] = []  # on tracing and compilation, with steps and reasons
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


def numbers_of(loss: Tensor, terms: ELBOTerms, gradients: Iterable[Tensor | None]) -> Tensor:
    """Return loss, log likelihood, KL and the norm of all gradients as one tensor, ``(4,)``."""
    given = [gradient for gradient in gradients if gradient is not None]
    foreach = False if is_recording() else None  # compilers take no norms of several tensors
    norm = get_total_norm(given, foreach=foreach) if given else torch.zeros_like(loss)
    likelihood = ELBOTerms(terms.log_likelihood, {}).elbo
    kl = -ELBOTerms({}, terms.kl).elbo  # not a difference of large numbers
    return torch.stack([each.to(loss) for each in (loss, likelihood, kl, norm)]).detach()


_REMEDY = "A smaller `lr` or `init_scale`, or an annealed `kl_weight`, may help"


def error_of(
    loss: Loss, parameters: list[nn.Parameter], batch: Arguments, terms: ELBOTerms | ValueError
) -> Exception:
    """Return an error that names the inputs, terms or gradients that are not finite.

    A distribution that refuses a value leaves its error in place of the terms.
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
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        bad = [name for name, own in tensors.items() if not (own.is_meta or own.isfinite().all())]
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
