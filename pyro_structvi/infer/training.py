"""The training loop: one optimizer, a progress bar, and a history."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import pyro.poutine as poutine
import torch
from pyro.optim import PyroOptim
from torch import nn
from tqdm.auto import tqdm

from pyro_structvi._checks import Count, NonNegative, Positive, Program, Rule, brief, check, checked
from pyro_structvi._pyro import declared_samples
from pyro_structvi._torch import own_tensors
from pyro_structvi.guides import StructuredGuide
from pyro_structvi.infer.batches import Arguments, arguments, as_batches, num_examples
from pyro_structvi.infer.data_size import check_scale, set_num_data
from pyro_structvi.infer.elbo import StructuredELBO
from pyro_structvi.infer.ranks import (
    noise_of_rank,
    of_all_ranks,
    share_buffers,
    share_start,
    shared_seed,
    world,
)
from pyro_structvi.infer.schedules import Schedule
from pyro_structvi.infer.steps.auto import AutoStep
from pyro_structvi.infer.steps.compiled import CompiledStep
from pyro_structvi.infer.steps.eager import EagerStep
from pyro_structvi.infer.steps.finite import FiniteCheck
from pyro_structvi.infer.steps.loss import CheckedLoss, Loss
from pyro_structvi.infer.steps.optimizer import OneOptimizer
from pyro_structvi.infer.steps.step import Check, Step, StepTerms

TrainedGuide = Annotated[
    nn.Module,
    Rule("a torch.nn.Module (`pyro.infer.SVI` trains the guide of a function)", lambda guide: True),
]
Engine = Callable[[Loss, OneOptimizer, Check], Step]
Compiled = Literal["auto", True, False]


def _engine(compiled: Compiled, num_steps: int) -> Engine:
    """Return what makes the engine of a fit."""
    is_shared = world()[1] > 1
    if compiled == "auto":
        return partial(AutoStep, is_shared=is_shared, num_steps=num_steps)
    return partial(CompiledStep if compiled else EagerStep, is_shared=is_shared)


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
        compilation: What was traced or compiled, when and why, or why not, a line each.
    """

    elbo: list[float] = field(default_factory=list)
    log_likelihood: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    kl_weight: list[float] = field(default_factory=list)
    lr: list[float] = field(default_factory=list)
    interrupted: bool = False
    compilation: list[str] = field(default_factory=list)

    def _add(self, terms: StepTerms, lr: float) -> None:
        self.log_likelihood.append(terms.log_likelihood)
        self.kl.append(terms.kl)
        self.elbo.append(terms.log_likelihood - terms.kl)
        self.kl_weight.append(terms.kl_weight)
        self.lr.append(lr)


@checked
def fit(
    model: Program,
    guide: TrainedGuide,
    data: Any,
    *,
    num_epochs: Count | None = None,
    num_steps: Count | None = None,
    batch_size: Count | None = None,
    lr: Positive = 1e-3,
    lr_schedule: Schedule | None = None,
    kl_weight: NonNegative | Schedule = 1.0,
    num_particles: Count = 1,
    vectorize_particles: bool = False,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    compiled: Compiled = "auto",
    progress: bool = True,
) -> History:
    """Fit a guide, and the model's own parameters, by stochastic gradients of the ELBO.

    Model and guide are in training mode meanwhile; a part that is frozen and in evaluation mode stays
    so. The learning rate and the KL weight are set anew for each step. A loss or a gradient that is not
    finite stops the fit *before* the parameters change. An interrupt from the keyboard ends the fit
    and returns the history so far.

    Where torch's default process group is initialized, as in a script under ``torchrun``, all its
    processes train one guide, each with its share of the data and noise that differs, by the mean of their
    gradients; the noise follows from rank 0's seed. See "More than one device" in the documentation.

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
        compiled: Whether steps run without Python, as those of :class:`CompiledSVI`. "auto" traces them
            after a few ordinary ones and lets inductor compile the trace, each if the measured times say
            that it pays for the steps to come; what cannot be traced runs as Python, and the history
            says why. True does both at once, and raises where it cannot. False runs Python in each step.
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
    is_optimizer = not isinstance(optimizer, type) or issubclass(optimizer, torch.optim.Optimizer)
    if isinstance(optimizer, PyroOptim) or not is_optimizer:
        raise TypeError(
            "`optimizer` must be `torch.optim.Adam` or another function of `(parameters, lr=lr)` that "
            f"returns an optimizer of torch, but got {brief(optimizer)}. Pass Pyro's to `CompiledSVI`."
        )
    elbo = StructuredELBO(kl_weight, num_particles, vectorize_particles)
    device = _device_of(guide)
    loader = as_batches(data, batch_size, device, shared_seed(), world())
    total = _count_steps(num_epochs, num_steps, loader)
    size = num_examples(loader)
    set_num_data(poutine.unwrap(model), size)
    make_optimizer = partial(optimizer or partial(torch.optim.Adam, fused=True), lr=lr)
    loss = CheckedLoss(model, guide, elbo)
    with _training_mode(model, guide), noise_of_rank(device):
        batches = arguments(loader, device, total)
        bar = tqdm(batches, "fit", total, disable=not progress or world()[0] > 0)
        with closing(batches), bar:
            engine = _engine(compiled, total)
            history = History()
            steps = _steps(
                engine, guide, loss, make_optimizer, lr_schedule, bar, len(loader), size, history
            )
            return _record(steps, bar, history)


def _steps(
    engine: Engine,
    guide: nn.Module,
    loss: Loss,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    lr_schedule: Schedule | None,
    batches: Iterable[Arguments],
    num_batches: int,
    size: int | None,
    history: History,
) -> Iterator[tuple[StepTerms, float]]:
    """Take a step with each batch; yield its terms and its learning rate."""
    step: Step | None = None
    for number, (args, kwargs) in enumerate(batches):
        if step is None:
            _initialize(guide, args, kwargs)
            _check_local_sites(guide, num_batches)
            check_scale(loss.parts[0], args, kwargs, num_batches, size)
            made = make_optimizer([*loss.trained.values()])
            check("optimizer(parameters, lr=lr)", made, torch.optim.Optimizer)
            optimizer = OneOptimizer(made)
            share_start(loss)
            step = engine(loss, optimizer, FiniteCheck(loss, optimizer))
            history.compilation = step.notes
        if lr_schedule is not None:
            optimizer.scale_rates(lr_schedule(number))
        yield step(*args, **kwargs), optimizer.rate
    share_buffers(loss)


def _record(steps: Iterator[tuple[StepTerms, float]], bar: Any, history: History) -> History:
    """Take the steps and write down what happens in them."""
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
    """Put model and guide into training mode in this block, but for frozen parts in evaluation mode."""
    roots = [root for root in (poutine.unwrap(model), guide) if isinstance(root, nn.Module)]
    modes = [(part, part.training) for root in roots for part in root.modules()]
    try:
        for root in roots:
            _train(root)
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _train(module: nn.Module) -> None:
    if not module.training and _is_frozen(module):
        return
    module.training = True
    for child in module.children():
        _train(child)


def _is_frozen(module: nn.Module) -> bool:
    """Whether a module has tensors, and none that is trained or sampled."""
    parts = [*module.modules()]
    has_tensors = any(True for part in parts for _ in own_tensors(part))
    is_trained = any(parameter.requires_grad for parameter in module.parameters())
    return has_tensors and not is_trained and not any(map(declared_samples, parts))


def _check_modules(model: Any, guide: Any) -> None:
    if isinstance(model, StructuredGuide):
        raise TypeError(
            "`model` must be a model, but got a guide: write `fit(model, guide, data)`."
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
    total = num_epochs * len(loader) if num_epochs else num_steps or 0
    totals = of_all_ranks(total)
    if len(set(totals)) > 1:
        raise ValueError(
            f"All ranks must take as many steps, but they would take {totals}. Give each a loader of "
            "as many batches, such as one with a `DistributedSampler`, or `num_steps`."
        )
    return total


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
