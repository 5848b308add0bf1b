"""The training loop: one optimizer, a progress bar, and a history."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from inspect import signature
from typing import Annotated, Any, Literal

import torch
from pyro.optim import PyroOptim
from torch import nn
from tqdm.auto import tqdm

from pyro_structvi._checks import Count, NonNegative, Positive, Program, Rule, brief, check, checked
from pyro_structvi.infer.callbacks import Callbacks
from pyro_structvi.infer.data.batches import TensorBatches, as_batches, num_examples
from pyro_structvi.infer.data.data_size import set_num_data
from pyro_structvi.infer.data.feed import Feed
from pyro_structvi.infer.data.first_batch import warn_of_first_batch
from pyro_structvi.infer.elbo import Estimator, StructuredELBO
from pyro_structvi.infer.history import History
from pyro_structvi.infer.ignored_data import warn_of_ignored_data
from pyro_structvi.infer.ranks import (
    noise_of_rank,
    of_all_ranks,
    share_buffers,
    share_start,
    shared_seed,
    world,
)
from pyro_structvi.infer.runs.checkpoint import CheckpointFile
from pyro_structvi.infer.runs.run import Run
from pyro_structvi.infer.schedules import CosineDecay, LinearAnnealing, RateSchedule, Schedule
from pyro_structvi.infer.steps.engines import Compiled, Engine, engine_of_fit, may_change_modules
from pyro_structvi.infer.steps.finite import FiniteCheck
from pyro_structvi.infer.steps.loss import CheckedLoss, Loss
from pyro_structvi.infer.steps.optimizer import OneOptimizer
from pyro_structvi.infer.steps.step import StepTerms
from pyro_structvi.infer.structured_adam import StructuredAdam
from pyro_structvi.infer.training_mode import training_mode
from pyro_structvi.infer.validation import Metric, Validation, ValidationData
from pyro_structvi.sites.structured import StructuredGuide

TrainedGuide = Annotated[
    nn.Module,
    Rule("a torch.nn.Module (`pyro.infer.SVI` trains the guide of a function)", lambda guide: True),
]

WARM_UP = 0.15  # of the steps, in which the rate of correlations rises: see "Training" in the docs
ANNEALED = 0.5  # of the steps, in which the weight of the KL rises: see "Training" in the docs


@checked
def fit(
    model: Program,
    guide: TrainedGuide,
    data: Any,
    *,
    num_epochs: Count | None = None,
    num_steps: Count | None = None,
    batch_size: Count | None = None,
    lr: Positive | None = None,
    lr_schedule: RateSchedule = "cosine",
    kl_weight: NonNegative | Schedule | Literal["annealed"] = "annealed",
    num_particles: Count = 1,
    vectorize_particles: bool = False,
    estimator: Estimator = "draws",
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    compiled: Compiled = "auto",
    progress: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
    every: Count = 1000,
    resume: bool = False,
    validation: ValidationData | None = None,
    metric: Metric | None = None,
    validate_every: Count | None = None,
    patience: Count | None = None,
    callbacks: Callbacks = (),
) -> History:
    """Fit a guide, and the model's own parameters, by stochastic gradients of the ELBO.

    Model and guide are in training mode meanwhile; a part that is frozen and in evaluation mode stays
    so. The learning rate and the KL weight are set anew for each step. A loss or a gradient that is not
    finite stops the fit *before* the parameters change. An interrupt from the keyboard ends the fit
    and returns the history so far.

    Where torch's default process group is initialized, as in a script under ``torchrun``, all its
    processes train one guide by the mean of their gradients, each with its share of the data and noise
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
        lr: Learning rate; the optimizer's own when None, 0.1 for :class:`StructuredAdam`.
        lr_schedule: A factor of the learning rate for each step, such as ``CosineDecay(1000)``; "cosine"
            falls to zero over all steps of this call, and None leaves the rate as it is.
        kl_weight: Weight of the KL, a number or a schedule, such as ``LinearAnnealing(1000)``;
            "annealed" rises linearly to 1 over the first half of the steps of this call.
        num_particles: Draws averaged in each step.
        vectorize_particles: Whether one pass runs them all; see :class:`StructuredELBO`.
        estimator: "draws", or "moments" or "bound" for a bound without noise; see
            :class:`StructuredELBO`.
        optimizer: Called with ``(parameters, lr=lr)``, without ``lr`` where that is None;
            :class:`StructuredAdam` of the guide when None, with 15 % of the steps for ``warm_up``.
        compiled: Whether steps run without Python, as those of :class:`CompiledSVI`. "auto" traces them
            after a few ordinary ones and lets inductor compile the trace, each if the measured times say
            that it pays for the steps to come; what cannot be traced runs as Python, and the history
            says why. "traced" only traces, needs no compiler, and keeps a trace whose first step has
            Python's loss, terms and norm of gradients to the last bit; so does "auto" with
            ``checkpoint``. True traces and compiles at once, and raises where it cannot. False runs
            Python in each step.
        progress: Whether to show a progress bar with the ELBO, on rank 0.
        checkpoint: The path of a file that has what it takes to go on as if nothing had happened. It is
            written before the first step, every so many steps, at the end, and at an interrupt from the
            keyboard, which then waits for the end of a step; it is whole at any time. See "Training that
            loses nothing" in the documentation.
        every: How many steps the checkpoints are apart.
        resume: Whether to go on from the checkpoint where there is one; otherwise it must be a new file.
            Data, batch size, processes, parameters, optimizer and schedules must be those that it was
            begun with; ``num_steps`` or ``num_epochs`` count from the beginning and may be larger.
            The learning rate of "cosine" then goes on as that of the longer run.
        validation: Inputs and observations ``(x, y)`` on which the guide is measured; for several inputs
            ``x`` is a tuple. They are kept on the guide's device and run in mini-batches of
            ``batch_size``.
        metric: What is measured: a function of a :class:`~pyro_structvi.posterior.prediction.Prediction`
            (of 20 draws, or of each member of an ensemble) and ``y``, higher is better. The mean log
            predictive density of an example, in nats, when None.
        validate_every: How many steps the measurements are apart, besides one before the first step and
            one after the last; when None once an epoch, and every 100 steps at most.
        patience: How many measurements that are no better end the fit. Guide and model then have, also
            where the fit ends otherwise, the parameters and buffers of the best one.
        callbacks: Functions of the history, called after each step (on rank 0), such as a
            :class:`TensorBoard`; one that returns True ends the fit.

    Returns:
        The history, of all steps from the beginning.

    Raises:
        TypeError: If the guide is not a module, or was sharded; if an optimizer's state cannot be kept.
        ValueError: If an argument is out of range, lengths differ, the data hold NaN, processes have
            different numbers of batches, nothing tells the model's ``num_data``, or a checkpoint was
            begun with something else.
        FileExistsError: If there is a checkpoint, and ``resume`` is false.
        OSError: If a checkpoint cannot be written; the last one is still there.
        RuntimeError: If the guide of a checkpoint has families of other options.
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
    _check_optimizer(optimizer, lr)
    if resume and checkpoint is None:
        raise ValueError("`resume=True` needs `checkpoint`, the path to go on from, but got None.")
    _check_validation(validation, metric=metric, validate_every=validate_every, patience=patience)
    is_annealed = kl_weight == "annealed"
    weight = 1.0 if kl_weight == "annealed" else kl_weight
    elbo = StructuredELBO(weight, num_particles, vectorize_particles, estimator)
    device = _device_of(guide)
    own_lr = {} if lr is None else {"lr": lr}
    loss = CheckedLoss(model, guide, elbo)
    file = None if checkpoint is None else CheckpointFile(checkpoint, resume)
    own = (metric, validate_every, patience, batch_size, device)
    measured = None if validation is None else Validation(loss, validation, *own)
    run = Run(loss, device, file, every, measured, callbacks)
    with run.beginning():
        loader = as_batches(data, batch_size, device, shared_seed(), world())
        size, total = num_examples(loader), _count_steps(num_epochs, num_steps, loader)
        if is_annealed:
            rise = math.ceil(ANNEALED * total)
            elbo.kl_weight = LinearAnnealing(rise, start=1 / rise)  # a single step has the whole KL
        settings = {
            "`batch_size`": batch_size,
            "`num_particles`": num_particles,
            "`vectorize_particles`": vectorize_particles,
            "`estimator`": estimator,
            "`lr_schedule`": "cosine" if lr_schedule == "cosine" else "a function or None",
            "`kl_weight`": "annealed" if is_annealed else "a number or a function",
        }
        run.check(total, loader, settings)
    default = partial(StructuredAdam, guide=guide, warm_up=WARM_UP * total)
    make_optimizer = partial(optimizer or default, **own_lr)
    set_num_data(model, guide, size)
    with training_mode(model, guide), noise_of_rank(device):
        feed = run.feed(loader)
        is_silent = not progress or world()[0] > 0
        bar = tqdm(desc="fit", total=total, initial=run.done, disable=is_silent)
        with closing(feed), bar, run.steps():
            others = any(map(may_change_modules, (*callbacks, lr_schedule, weight)))
            watches = others or measured is not None or not isinstance(loader, TensorBatches)
            engine = engine_of_fit(compiled, total - run.done, file is not None, watches)
            steps = _steps(
                engine, guide, loss, make_optimizer, lr_schedule, feed, len(loader), size, run
            )
            history = _record(steps, run, bar)
        share_buffers(loss)
    warn_of_ignored_data(history)
    return history


def _steps(
    engine: Engine,
    guide: nn.Module,
    loss: Loss,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    lr_schedule: RateSchedule,
    batches: Feed,
    num_batches: int,
    size: int | None,
    run: Run,
) -> Iterator[tuple[StepTerms, float]]:
    """Take a step with each batch; yield its terms and its learning rate."""
    with run.unchanged_on_error(), run.first_arguments() as (args, kwargs):
        _initialize(guide, args, kwargs)
        _check_local_sites(guide, num_batches)
        warn_of_first_batch(loss.parts, args, kwargs, num_batches, size)
        made = make_optimizer([*loss.trained.values()])
        check("optimizer(parameters, lr=lr)", made, torch.optim.Optimizer)
        optimizer = OneOptimizer(made)
        share_start(loss)
        schedule = CosineDecay(run.total) if lr_schedule == "cosine" else lr_schedule
        run.begin(optimizer, lr_schedule)
    step = engine(loss, optimizer, FiniteCheck(loss, optimizer))
    step.notes = run.history.compilation
    for number, (args, kwargs) in enumerate(() if run.is_over else batches, run.done):
        if schedule is not None:
            optimizer.scale_rates(schedule(number))
        yield step(*args, **kwargs), optimizer.rate


def _record(steps: Iterator[tuple[StepTerms, float]], run: Run, bar: Any) -> History:
    """Take the steps and write down what happens in them."""
    try:
        for terms, lr in steps:
            stops = run.after_step(terms, lr)
            if run.done % 10 == 1 or run.done == run.total:
                bar.set_postfix(elbo=f"{run.history.elbo[-1]:.4g}", refresh=False)
            bar.update()
            if stops:
                break
    except KeyboardInterrupt:
        if world()[1] > 1:  # the others wait for this process, and must see it end
            raise
        run.history.interrupted = True
    return run.history


def _check_validation(data: ValidationData | None, **options: Any) -> None:
    unused = [name for name, value in options.items() if value is not None]
    if data is None and unused:
        raise ValueError(
            f"`{unused[0]}` needs `validation`, a tuple `(x, y)` to measure the guide on, but got None."
        )


def _check_optimizer(optimizer: Any, lr: float | None) -> None:
    is_optimizer = not isinstance(optimizer, type) or issubclass(optimizer, torch.optim.Optimizer)
    if isinstance(optimizer, PyroOptim) or not is_optimizer:
        raise TypeError(
            "`optimizer` must be `torch.optim.Adam` or another function of `(parameters, lr=lr)` that "
            f"returns an optimizer of torch, but got {brief(optimizer)}. Pass Pyro's to `CompiledSVI`."
        )
    if lr is None and optimizer is not None:
        rate = signature(optimizer).parameters.get("lr")
        if rate is not None and rate.default is rate.empty:
            raise ValueError(
                "`lr` must be a number where `optimizer` has no rate of its own, but got None. "
                "Write `fit(..., lr=1e-3)`."
            )


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
            guide.handed_out.clear()  # the optimizer is made afterwards
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
