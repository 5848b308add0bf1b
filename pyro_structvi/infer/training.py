"""The training loop: one optimizer, a progress bar, and a history."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyro.poutine as poutine
import torch
from torch import nn
from tqdm.auto import tqdm

from pyro_structvi._checks import check_positive_integer, check_positive_number
from pyro_structvi.guides import StructuredGuide
from pyro_structvi.infer.batches import Arguments, arguments, as_batches, num_examples
from pyro_structvi.infer.elbo import StructuredELBO
from pyro_structvi.infer.ranks import (
    data_parallel,
    noise_of_rank,
    of_all_ranks,
    share_buffers,
    shared_seed,
    world,
)
from pyro_structvi.infer.schedules import Schedule
from pyro_structvi.infer.steps.eager import EagerStep
from pyro_structvi.infer.steps.finite import FiniteCheck
from pyro_structvi.infer.steps.loss import CheckedLoss, Loss
from pyro_structvi.infer.steps.optimizer import OneOptimizer
from pyro_structvi.infer.steps.step import Check, Step, StepTerms
from pyro_structvi.nn.likelihoods import Likelihood

Engine = Callable[[Loss, OneOptimizer, Check], Step]


def _eager(loss: Loss, optimizer: OneOptimizer, check: Check) -> Step:
    return EagerStep(loss, optimizer, check, data_parallel(loss))


class NumDataWarning(UserWarning):
    """The model was told of another number of examples than the data have."""


@dataclass
class History:
    """What happened in each step of a fit; all lists have one entry a step.

    On several processes the terms are means over them.

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

    def _add(self, terms: StepTerms, lr: float) -> None:
        self.log_likelihood.append(terms.log_likelihood)
        self.kl.append(terms.kl)
        self.elbo.append(terms.log_likelihood - terms.kl)
        self.kl_weight.append(terms.kl_weight)
        self.lr.append(lr)


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

    Where torch's default process group is initialized, as in a script under ``torchrun``, all its
    processes train one guide by ``DistributedDataParallel``, each with its share of the data and noise
    that differs; the noise follows from rank 0's seed. See "More than one device" in the documentation.

    Tensors are kept on a GPU if they take at most a quarter of its free memory. Otherwise, and for data
    in other forms, a thread loads the next batch, pins it and copies it to the GPU during a step.

    Args:
        model: The model; its point-estimated parameters are trained along.
        guide: The guide, a module.
        data: Tensors ``(x, y)`` with the example as first dimension; or a ``Dataset``; or an
            iterable of mini-batches such as a ``DataLoader``. A batch is a tuple of the model's
            arguments, a dict of its keyword arguments, or one tensor. Batches are moved to the
            guide's device. Several processes share out tensors and a ``Dataset``, which each is given
            whole; an iterable is used as it is, and the epoch of its ``sampler`` is set.
        num_epochs: Passes through the data; give this or ``num_steps``.
        num_steps: Optimization steps; give this or ``num_epochs``.
        batch_size: Examples a step, for tensors and datasets; None for all at once. On each of several
            processes there are as many.
        lr: Learning rate.
        lr_schedule: A factor of the learning rate for each step, such as ``CosineDecay(1000)``.
        kl_weight: Weight of the KL, a number or a schedule, such as ``LinearAnnealing(1000)``.
        num_particles: Draws averaged in each step.
        vectorize_particles: Whether one pass runs them all; see :class:`StructuredELBO`.
        optimizer: Called with ``(parameters, lr=lr)``; fused Adam when None.
        progress: Whether to show a progress bar with the ELBO, on rank 0.

    Returns:
        The history.

    Raises:
        TypeError: If the guide is not a module, or was sharded.
        ValueError: If an argument is out of range, lengths differ, the data hold NaN, processes have
            different numbers of batches, or nothing tells the model's ``num_data``.
        FloatingPointError: If the loss or a gradient is not finite, on all processes if on one; the
            message names sites and step, and the parameters are the last good ones.

    Example:
        >>> from pyro_structvi import KTiedGuide, Regressor, bayesianize
        >>> x = torch.linspace(-1, 1, 32).unsqueeze(-1)
        >>> model = Regressor(bayesianize(nn.Linear(1, 1), prior=1.0), num_data=32, noise_scale=0.1)
        >>> guide = KTiedGuide(model)
        >>> history = fit(model, guide, (x, 2 * x), num_steps=200, lr=0.05, progress=False)
        >>> history.elbo[-1] > history.elbo[0]
        True
    """
    _check_modules(model, guide)
    elbo = StructuredELBO(kl_weight, num_particles, vectorize_particles)
    check_positive_number("lr", lr)
    device = _device_of(guide)
    loader = as_batches(data, batch_size, device, shared_seed(), world())
    total = _count_steps(num_epochs, num_steps, loader)
    _set_num_data(poutine.unwrap(model), num_examples(loader))
    make_optimizer = partial(optimizer or partial(torch.optim.Adam, fused=True), lr=lr)
    loss = CheckedLoss(model, guide, elbo)
    with _training_mode(model, guide), noise_of_rank(device):
        batches = arguments(loader, device, total)
        bar = tqdm(batches, "fit", total, disable=not progress or world()[0] > 0)
        with closing(batches), bar:
            steps = _steps(_eager, guide, loss, make_optimizer, lr_schedule, bar, len(loader))
            return _record(steps, bar)


def _steps(
    engine: Engine,
    guide: nn.Module,
    loss: Loss,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    lr_schedule: Schedule | None,
    batches: Iterable[Arguments],
    num_batches: int,
) -> Iterator[tuple[StepTerms, float]]:
    """Take a step with each batch; yield its terms and its learning rate."""
    step: Step | None = None
    for number, (args, kwargs) in enumerate(batches):
        if step is None:
            _initialize(guide, args, kwargs)
            _check_local_sites(guide, num_batches)
            optimizer = OneOptimizer(make_optimizer([*loss.trained.values()]))
            step = engine(loss, optimizer, FiniteCheck(loss, optimizer))
        if lr_schedule is not None:
            optimizer.scale_rates(lr_schedule(number))
        yield step(*args, **kwargs), optimizer.rate
    share_buffers(loss)


def _record(steps: Iterator[tuple[StepTerms, float]], bar: Any) -> History:
    """Take the steps and write down what happens in them."""
    history = History()
    try:
        for number, (terms, lr) in enumerate(steps):
            history._add(terms, lr)
            if number % 10 == 0 or number == bar.total - 1:
                bar.set_postfix(elbo=f"{history.elbo[-1]:.4g}", refresh=False)
    except KeyboardInterrupt:
        if world()[1] > 1:  # the others wait for this process, and must see it end
            raise
        history.interrupted = True
    return history


@contextmanager
def _training_mode(model: Callable[..., Any], guide: nn.Module) -> Iterator[None]:
    """Put model and guide into training mode in this block."""
    roots = [root for root in (poutine.unwrap(model), guide) if isinstance(root, nn.Module)]
    modes = [(part, part.training) for root in roots for part in root.modules()]
    try:
        for root in roots:
            root.train()
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _check_modules(model: Any, guide: Any) -> None:
    if isinstance(model, StructuredGuide):
        raise TypeError(
            "`model` must be a model, but got a guide: write `fit(model, guide, data)`."
        )
    if not isinstance(guide, nn.Module):
        raise TypeError(
            f"`guide` must be a torch.nn.Module, but got {type(guide).__name__}. Train the guide "
            "of a function with `pyro.infer.SVI`."
        )
    if any(hasattr(parameter, "full_tensor") for parameter in guide.parameters()):
        raise TypeError(
            "`guide` must have whole parameters, but got sharded ones. Train it in a loop of your own, "
            "as the page on more than one device shows."
        )


def _count_steps(num_epochs: int | None, num_steps: int | None, loader: Any) -> int:
    """Return the number of steps, the same on all ranks."""
    if (num_epochs is None) == (num_steps is None):
        raise ValueError(
            f"Give one of `num_epochs` and `num_steps`, but got {num_epochs!r} and {num_steps!r}."
        )
    if num_epochs is None:
        total = check_positive_integer("num_steps", num_steps)
    else:
        total = check_positive_integer("num_epochs", num_epochs) * len(loader)
    totals = of_all_ranks(total)
    if len(set(totals)) > 1:
        raise ValueError(
            f"All ranks must take as many steps, but they would take {totals}. Give each a loader of "
            "as many batches, such as one with a `DistributedSampler`, or `num_steps`."
        )
    return total


def _set_num_data(model: Any, found: int | None) -> None:
    """Tell a model how many examples there are, or compare with what it was told."""
    if not isinstance(model, Likelihood):
        return
    if not model.is_num_data_given:
        if found is None:
            raise ValueError(
                "`num_data` must be given to the model, since `data` does not tell how many examples "
                f"it has: `{type(model).__name__}(net, num_data=...)`."
            )
        model.num_data = found
    elif found not in (None, model.num_data):
        warnings.warn(
            f"The model was told of num_data={model.num_data} examples, and `data` has {found}. The "
            "likelihood counts as that of the former; leave `num_data` out to have it set.",
            NumDataWarning,
            stacklevel=3,
        )


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
    takes_batches = getattr(guide, "create_plates", None) is not None
    if local and ((num_batches > 1 and not takes_batches) or world()[1] > 1):
        raise ValueError(
            f"The sites {local} belong to single examples, and the guide cannot tell which examples "
            "a mini-batch holds. Fit all examples at once (leave `batch_size` out), in one process. Or, "
            "in one process too, let the data number the examples and give the guide `create_plates`."
        )


def _device_of(guide: nn.Module) -> torch.device | None:
    parameter = next(guide.parameters(), None)
    return None if parameter is None else parameter.device
