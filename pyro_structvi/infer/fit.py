"""A training loop: mini-batches, one optimizer, a progress bar, and a history."""

import math
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field
from typing import Any

import pyro.poutine as poutine
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from pyro_structvi._checks import (
    check_no_nan,
    check_positive_integer,
    check_positive_number,
)
from pyro_structvi.guides import StructuredGuide
from pyro_structvi.infer.elbo import ELBOTerms, StructuredELBO
from pyro_structvi.infer.schedules import Schedule


@dataclass
class History:
    """What happened in each step of a fit; all lists have one entry a step.

    Attributes:
        elbo: The estimated evidence lower bound, in nats, with the KL at full weight.
        log_likelihood: Its expected log likelihood, scaled to all data.
        kl: Its KL divergence.
        kl_weight: The weight of the KL in the step's loss.
        lr: The learning rate of the first parameter group.
        interrupted: Whether the fit was stopped from the keyboard.
    """

    elbo: list[float] = field(default_factory=list)
    log_likelihood: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    kl_weight: list[float] = field(default_factory=list)
    lr: list[float] = field(default_factory=list)
    interrupted: bool = False


def fit(
    model: Callable[..., Any],
    guide: nn.Module,
    data: Any,
    *,
    num_epochs: int | None = None,
    num_steps: int | None = None,
    batch_size: int | None = None,
    lr: float = 1e-3,
    lr_schedule: Schedule | None = None,
    kl_weight: float | Schedule = 1.0,
    num_particles: int = 1,
    vectorize_particles: bool = False,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    progress: bool = True,
) -> History:
    """Fit a guide, and the model's own parameters, by stochastic gradients of the ELBO.

    The learning rate and the KL weight are set anew for each step. A loss or a gradient that is not
    finite stops the fit *before* the parameters change. An interrupt from the keyboard ends the fit
    and returns the history so far.

    Args:
        model: The model; its point-estimated parameters are trained along.
        guide: The guide, a module.
        data: Tensors ``(x, y)`` with the example as first dimension; or a ``Dataset``; or an
            iterable of mini-batches such as a ``DataLoader``. A batch is a tuple of the model's
            arguments, a dict of its keyword arguments, or one tensor. Batches are moved to the
            guide's device.
        num_epochs: Passes through the data; give this or ``num_steps``.
        num_steps: Optimization steps; give this or ``num_epochs``.
        batch_size: Examples a step, for tensors and datasets; None for all at once.
        lr: Learning rate.
        lr_schedule: A factor of the learning rate for each step, such as ``CosineDecay(1000)``.
        kl_weight: Weight of the KL, a number or a schedule, such as ``LinearAnnealing(1000)``.
        num_particles: Draws averaged in each step.
        vectorize_particles: Whether one pass runs them all; see :class:`StructuredELBO`.
        optimizer: Called with ``(parameters, lr=lr)``; fused Adam when None.
        progress: Whether to show a progress bar with the ELBO.

    Returns:
        The history.

    Raises:
        TypeError: If the guide is no module.
        ValueError: If an argument is out of range, lengths differ, or the data hold NaN.
        FloatingPointError: If the loss or a gradient is not finite; the message names sites and
            step, and the parameters are the last good ones.

    Example:
        >>> from pyro_structvi import KTiedGuide, Regressor, bayesianize
        >>> x = torch.linspace(-1, 1, 32).unsqueeze(-1)
        >>> model = Regressor(bayesianize(nn.Linear(1, 1), prior=1.0), num_data=32, noise_scale=0.1)
        >>> guide = KTiedGuide(model)
        >>> history = fit(model, guide, (x, 2 * x), num_steps=200, lr=0.05, progress=False)
        >>> history.elbo[-1] > history.elbo[0]
        True
    """
    if isinstance(model, StructuredGuide):
        raise TypeError(
            "`model` must be a model, but got a guide: write `fit(model, guide, data)`."
        )
    if not isinstance(guide, nn.Module):
        raise TypeError(
            f"`guide` must be a torch.nn.Module, but got {type(guide).__name__}. Train the guide "
            "of a function with `pyro.infer.SVI`."
        )
    if (num_epochs is None) == (num_steps is None):
        raise ValueError(
            f"Give one of `num_epochs` and `num_steps`, but got {num_epochs!r} and {num_steps!r}."
        )
    elbo = StructuredELBO(kl_weight, num_particles, vectorize_particles)
    check_positive_number("lr", lr)
    loader = _as_batches(data, batch_size, _device_of(guide))
    if num_epochs is None:
        total = check_positive_integer("num_steps", num_steps)
    else:
        total = check_positive_integer("num_epochs", num_epochs) * len(loader)

    history = History()
    batches = _endless(loader, _device_of(guide))
    stepper: _Stepper | None = None
    module = poutine.unwrap(model)
    training = [root for root in (module, guide) if isinstance(root, nn.Module)]
    modes = [(part, part.training) for root in training for part in root.modules()]
    try:
        for root in training:
            root.train()
        bar = tqdm(range(total), desc="fit", disable=not progress)
        for step in bar:
            args, kwargs = next(batches)
            if stepper is None:
                _initialize(guide, args, kwargs)
                _check_local_sites(guide, len(loader))
                stepper = _Stepper(model, guide, elbo, lr, lr_schedule, optimizer)
            stepper.step(step, args, kwargs, history)
            if step % 10 == 0 or step == total - 1:
                bar.set_postfix(elbo=f"{history.elbo[-1]:.4g}", refresh=False)
    except KeyboardInterrupt:
        history.interrupted = True
    finally:
        for part, mode in modes:
            part.training = mode
    return history


class _Stepper:
    """One optimization step: loss, gradients, a check that both are finite, and the update."""

    def __init__(
        self,
        model: Callable[..., Any],
        guide: nn.Module,
        elbo: StructuredELBO,
        lr: float,
        lr_schedule: Schedule | None,
        optimizer: Callable[..., torch.optim.Optimizer] | None,
    ) -> None:
        self.model, self.guide, self.elbo = model, guide, elbo
        module = poutine.unwrap(model)
        roots = {"guide": guide} | ({"model": module} if isinstance(module, nn.Module) else {})
        self.parameters = {
            f"{root}.{name}": parameter
            for root, module in roots.items()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        values = list(self.parameters.values())
        make = optimizer or _fused_adam
        self.optimizer = make(values, lr=lr)
        self.rates = [(group, group["lr"]) for group in self.optimizer.param_groups]
        self.lr_schedule = lr_schedule

    def step(
        self, step: int, args: tuple[Any, ...], kwargs: dict[str, Any], history: History
    ) -> None:
        factor = 1.0 if self.lr_schedule is None else self.lr_schedule(step)
        for group, rate in self.rates:
            group["lr"] = rate * factor
        weight = self.elbo.current_kl_weight
        self.elbo.step += 1

        self.optimizer.zero_grad(set_to_none=True)
        try:
            terms = self.elbo.terms(self.model, self.guide, *args, **kwargs)
        except ValueError as error:  # a distribution refuses NaN in terms of its support
            explanation = self._explain(step, args, kwargs, None)
            if explanation is None:
                raise
            raise FloatingPointError(explanation) from error
        torch.autograd.backward(-terms.weighted(weight))
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        likelihood = terms.weighted(0.0)
        kl = -ELBOTerms({}, terms.kl).elbo  # not a difference of large numbers
        numbers = torch.stack([likelihood, kl, norm.to(likelihood)]).tolist()
        if not all(math.isfinite(number) for number in numbers):
            raise FloatingPointError(self._explain(step, args, kwargs, terms))
        self.optimizer.step()

        history.log_likelihood.append(numbers[0])
        history.kl.append(numbers[1])
        history.elbo.append(numbers[0] - numbers[1])
        history.kl_weight.append(weight)
        history.lr.append(self.optimizer.param_groups[0]["lr"])

    def _explain(
        self, step: int, args: tuple[Any, ...], kwargs: dict[str, Any], terms: ELBOTerms | None
    ) -> str | None:
        """Say what is not finite: inputs first, then terms of the loss, then gradients."""
        inputs = {**{f"argument {i}": value for i, value in enumerate(args)}, **kwargs}
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        gradients = {
            name: parameter.grad
            for name, parameter in self.parameters.items()
            if parameter.grad is not None
        }
        kinds = {
            "the data": tensors,
            "the log likelihood of the sites": terms.log_likelihood if terms else {},
            "the KL of the sites": terms.kl if terms else {},
            "the gradient of": gradients if terms else {},
        }
        for kind, values in kinds.items():
            bad = [name for name, value in values.items() if not bool(torch.isfinite(value).all())]
            if bad:
                return (
                    f"At step {step}, {kind} {bad} is not finite. The parameters are those before "
                    "this step. A smaller `lr` or `init_scale`, or an annealed `kl_weight`, may help."
                )
        if terms:
            return f"At step {step}, the norm of all gradients overflows. The parameters are unchanged."
        return None


def _fused_adam(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=lr, fused=True)


def _initialize(guide: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let a guide make the parameters that it makes at its first call."""
    if isinstance(guide, StructuredGuide):
        if not guide.is_initialized:
            guide.initialize(*args, **kwargs)
    elif not list(guide.parameters()):
        with torch.no_grad():
            guide(*args, **kwargs)


def _check_local_sites(guide: nn.Module, num_batches: int) -> None:
    local = guide.local_site_names if isinstance(guide, StructuredGuide) else []
    if local and num_batches > 1:
        raise ValueError(
            f"The sites {local} belong to single examples, and the guide cannot tell which examples "
            "a mini-batch holds. Fit all examples at once (leave `batch_size` out)."
        )


def _device_of(guide: nn.Module) -> torch.device | None:
    parameter = next(guide.parameters(), None)
    return None if parameter is None else parameter.device


class _TensorBatches:
    """Shuffled mini-batches of tensors that stay where they are."""

    def __init__(self, tensors: tuple[Tensor, ...], batch_size: int | None) -> None:
        lengths = [len(tensor) for tensor in tensors]
        if len(set(lengths)) != 1 or lengths[0] == 0:
            raise ValueError(f"The data must have one positive length, but got {lengths}.")
        for index, tensor in enumerate(tensors):
            check_no_nan(f"data[{index}]", tensor)
        self.tensors = tensors
        self.size = lengths[0]
        self.batch_size = self.size if batch_size is None else batch_size

    def __len__(self) -> int:
        return math.ceil(self.size / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        if self.batch_size >= self.size:
            yield self.tensors
            return
        order = torch.randperm(self.size, device=self.tensors[0].device)
        for chosen in order.split(self.batch_size):
            yield tuple(tensor[chosen] for tensor in self.tensors)


def _as_batches(data: Any, batch_size: int | None, device: torch.device | None) -> Any:
    if batch_size is not None:
        check_positive_integer("batch_size", batch_size)
    if isinstance(data, Tensor):
        data = (data,)
    if isinstance(data, (dict, tuple)) and not all(isinstance(item, Tensor) for item in data):
        raise TypeError(
            "`data` must be a tuple of tensors, but got "
            f"{[type(item).__name__ for item in data]}. Convert arrays with `torch.as_tensor`; give "
            "keyword arguments as a list of mini-batches, `[{'x': x, 'y': y}]`."
        )
    if isinstance(data, (tuple, list)) and data and all(isinstance(t, Tensor) for t in data):
        return _TensorBatches(tuple(tensor.to(device) for tensor in data), batch_size)
    if isinstance(data, Dataset):
        size = len(data) if batch_size is None else batch_size  # type: ignore[arg-type]
        return DataLoader(data, batch_size=size, shuffle=batch_size is not None)
    if batch_size is not None:
        raise ValueError(
            "`batch_size` is for tensors and datasets; mini-batches that are given have their own."
        )
    if not isinstance(data, Iterable) or not isinstance(data, Sized) or not len(data):
        raise TypeError(
            "`data` must be a tuple of tensors, a Dataset, or a sized iterable of mini-batches "
            f"such as a DataLoader, but got {data!r}."
        )
    return data


def _endless(
    loader: Iterable[Any], device: torch.device | None
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Go through the batches again and again, as arguments on the guide's device."""

    def move(value: Any) -> Any:
        return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value

    while True:
        batch = None
        for batch in loader:
            if isinstance(batch, dict):
                yield (), {name: move(value) for name, value in batch.items()}
            else:
                values = batch if isinstance(batch, (tuple, list)) else (batch,)
                yield tuple(move(value) for value in values), {}
        if batch is None:
            raise ValueError(
                "A pass through `data` gave no mini-batch. Pass something that can be gone through "
                "again and again, such as a DataLoader or a list."
            )
