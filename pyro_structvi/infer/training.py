"""The training loop: one optimizer, a progress bar, and a history."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from inspect import signature
from typing import Annotated, Any, Literal

import torch
from pyro.optim import PyroOptim
from torch import nn
from tqdm.auto import tqdm

from pyro_structvi._checks import (
    Count,
    NonNegative,
    Positive,
    Program,
    Rule,
    brief,
    check,
    checked,
)
from pyro_structvi._pyro import declared_samples, unwrapped
from pyro_structvi._torch import has_overlap, own_tensors
from pyro_structvi.infer.batches import (
    Feed,
    TensorBatches,
    as_batches,
    keeps_order,
    num_examples,
)
from pyro_structvi.infer.checkpoint import Checkpoint, CheckpointFile, Run
from pyro_structvi.infer.data_warnings import (
    set_num_data,
    warn_of_first_batch,
    warn_of_ignored_data,
    warn_of_vanishing_noise,
    warning_of_shared_parameters,
)
from pyro_structvi.infer.elbo import CosineDecay, LinearAnnealing, Schedule, StructuredELBO
from pyro_structvi.infer.history import History
from pyro_structvi.infer.steps.compiled import Compiled, step_of_fit
from pyro_structvi.infer.steps.eager import Loss, StepTerms
from pyro_structvi.infer.steps.optimizer import OneOptimizer
from pyro_structvi.infer.structured_adam import StructuredAdam
from pyro_structvi.infer.validation import Measurements, Validation
from pyro_structvi.sites.structured import StructuredGuide

TrainedGuide = Annotated[
    nn.Module,
    Rule("a torch.nn.Module (`pyro.infer.SVI` trains the guide of a function)", lambda guide: True),
]
Rate = Positive | Schedule
Weight = NonNegative | Schedule | Literal["annealed"]

WARM_UP = 0.15  # of the steps, in which the rate of correlations rises: see "Training" in the docs
ANNEALED = 0.5  # of the steps, in which the weight of the KL rises: see "Training" in the docs


@checked
def fit(
    model: Program,
    guide: TrainedGuide,
    data: Any,
    *,
    num_steps: Count | None = None,
    num_epochs: Count | None = None,
    batch_size: Count | None = None,
    lr: Rate | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    elbo: StructuredELBO | None = None,
    kl_weight: Weight = "annealed",
    compiled: Compiled = "auto",
    checkpoint: Checkpoint | None = None,
    validation: Validation | None = None,
    progress: bool = True,
) -> History:
    """Fit a guide, and the model's own parameters, by stochastic gradients of the ELBO.

    Model and guide are in training mode meanwhile, except parts that are frozen and in evaluation mode.
    A loss or a gradient that is not finite stops the fit *before* the parameters change. An interrupt
    from the keyboard ends the fit after the present step, a second one at once, and the history so far
    is returned. :mod:`pyro_structvi.lightning` trains on several devices.

    Args:
        model: The model; its point-estimated parameters and its ``pyro.param`` are trained along.
        guide: The guide, a module.
        data: Tensors ``(x, y)`` with the example as first dimension; or a ``Dataset``; or an
            iterable of mini-batches such as a ``DataLoader``. A batch is a tuple of the model's
            arguments, a dict of its keyword arguments, or one tensor; but a list of tensors is as a
            tuple of them. Batches are moved to the guide's device; tensors as a whole, if they take at
            most a quarter of a GPU's free memory.
        num_steps: Optimization steps; give this or ``num_epochs``.
        num_epochs: Passes through the data.
        batch_size: Examples a step, for tensors and datasets; None for all at once.
        lr: Learning rate at the first step, which falls to zero along a cosine over all steps of this
            call; the optimizer's own when None, 0.1 for :class:`StructuredAdam`. Or a function of the
            step that returns the rate itself: ``lambda step: 1e-3`` is a constant rate.
        optimizer: Called with ``(parameters, lr=lr)``, without ``lr`` where that is None. For a function
            ``lr`` it is called with a rate of 1, and the function multiplies its rates.
            :class:`StructuredAdam` of the guide when None, with 15 % of the steps for ``warm_up``.
        elbo: The objective, with its number of particles and its estimator; ``StructuredELBO()`` when
            None. It is not changed.
        kl_weight: Weight of the KL, a number or a function of the step, such as
            ``LinearAnnealing(1000)``; "annealed" rises linearly to 1 over the first half of the steps of
            this call. A weight other than 1 that ``elbo`` has is used where this is left out.
        compiled: Whether steps run without Python, as in :class:`CompiledSVI`. "auto" traces them
            if at least 100 are to come, and lets inductor compile the trace if by the measured times it
            pays for the steps to come; a step that cannot be traced runs as Python, for the reason in
            ``history.compilation``. "traced" only traces, needs no compiler, and keeps a trace whose
            first step has Python's loss, terms and norm of gradients to the last bit; so does "auto"
            with ``checkpoint``. True traces and compiles at once, and raises where it cannot. False runs
            Python in each step.
        checkpoint: The file of a fit that can be resumed.
        validation: Measurements on other data, and early stopping by them.
        progress: Whether to show a progress bar with the ELBO.

    Returns:
        The history, of all steps from the beginning.

    Raises:
        TypeError: If an argument has another type, the guide was sharded, or an optimizer's state cannot
            be kept.
        ValueError: If an argument is out of range, lengths differ, the data hold NaN, the model's
            ``num_data`` is unknown, or a checkpoint was begun with something else.
        FileExistsError: If there is a checkpoint that is not to be resumed from.
        OSError: If a checkpoint cannot be written; the last one is still there.
        RuntimeError: If the guide of a checkpoint has parameters of other shapes, or families of other
            options.
        FloatingPointError: If the loss or a gradient is not finite; the message names sites and step,
            and the parameters are the last good ones.

    Warns:
        DataScaleWarning: If inputs or observations lie far outside of what the prior expects.
        NumDataWarning: If the model counts another number of examples than the data have.
        SharedParametersWarning: If a ``PyroModule`` or a guide of Pyro shares parameters with a former
            one, whose names Pyro's param store has.
        SlowFamilyWarning: If a posterior takes hundreds of times as long as its layer.
        VanishingNoiseWarning: If learned noise of point estimates ends below a hundredth of the
            observations' standard deviation, without ``patience`` of ``validation``.
        UserWarning: If the posterior starts far outside of the prior, or ends by ignoring most of the
            data.

    Example:
        >>> from pyro_structvi import KTiedGuide, Regressor, bayesianize
        >>> x = torch.linspace(-1, 1, 32).unsqueeze(-1)
        >>> model = Regressor(bayesianize(nn.Linear(1, 1), prior=1.0), num_data=32, noise_scale=0.1)
        >>> guide = KTiedGuide(model)
        >>> history = fit(model, guide, (x, 2 * x), num_steps=200, lr=0.05, progress=False)
        >>> history.elbo[-1] > history.elbo[0]
        True
    """
    check_parts_of_fit(model, guide, optimizer, lr)
    device = next((parameter.device for parameter in guide.parameters()), None)
    file = CheckpointFile(checkpoint, device)
    loader = as_batches(data, batch_size, device, file.place["seed"])
    total = _count_steps(num_steps, num_epochs, len(loader))
    file.check_total(total)
    set_num_data(model, guide, num_examples(loader))
    loss = Loss(model, guide, objective_of(elbo, kl_weight, total))
    measured = None if validation is None else Measurements(validation, loss, batch_size, device)
    feed = Feed(loader, device, file.place["epoch"], file.place["taken"])
    with _training_mode(model, guide):
        args, kwargs = feed.peek()
        with warning_of_shared_parameters(loss):
            initialize(guide, args, kwargs)
            loss.add_stored_parameters(args, kwargs)
        check_local_sites(guide, loader, len(loader))
        warn_of_first_batch(loss.parts, args, kwargs, len(loader), num_examples(loader))
        made = make_optimizer(optimizer, guide, [*loss.trained.values()], lr, total)
        rate = lr if callable(lr) else CosineDecay(total)
        run = Run(loss, OneOptimizer(made), feed, measured, total, rate)
        run.settings |= {
            "`batch_size`": batch_size,
            "`lr`": "a function" if callable(lr) else "a number or None",
            "`kl_weight`": "annealed" if is_annealed(elbo, kl_weight) else "a number or a function",
        }
        file.load(run)
        watches = measured is not None or not isinstance(loader, TensorBatches)
        # Functions of the user's may change model and guide when they are called.
        given = [each for each in (lr, loss.elbo.kl_weight) if callable(each)]
        watches = watches or not all(
            type(each).__module__.startswith("pyro_structvi.") for each in given
        )
        to_come = total - run.done
        step = step_of_fit(loss, run.optimizer, compiled, to_come, checkpoint is not None, watches)
        step.notes = run.history.compilation
        with tqdm(desc="fit", total=total, initial=run.done, disable=not progress) as bar:
            _train(step, run, file, bar)
    warn_of_ignored_data(run.history)
    if validation is None or validation.patience is None:
        warn_of_vanishing_noise(loss.parts, args, kwargs)
    return run.history


def _train(step: Callable[..., StepTerms], run: Run, file: CheckpointFile, bar: Any) -> None:
    """Take the steps; write down what happens in them, measure, and write checkpoints."""
    history, optimizer, batches = run.history, run.optimizer, iter(run.feed)

    def measure() -> None:
        if run.measured is not None:
            run.measured.add_if_due(history, run.total, len(run.feed.loader))

    measure()
    if file.saved is None:
        file.write_if_due(run, True)
    try:
        with file.interrupts_between_steps() as is_interrupted:
            while not (run.is_over or history.interrupted):
                optimizer.scale_rates(run.rate(run.done))
                args, kwargs = next(batches)
                history.add(step(*args, **kwargs), optimizer.rate)
                measure()
                history.interrupted = is_interrupted()
                file.write_if_due(run, run.is_over or history.interrupted)
                if run.done % 10 == 1 or run.done == run.total:
                    bar.set_postfix(elbo=f"{history.elbo[-1]:.4g}", refresh=False)
                bar.update()
    except KeyboardInterrupt:
        history.interrupted = True
    finally:
        optimizer.scale_rates(1.0)  # of an optimizer that the user made, for a further fit
    if run.measured is not None:
        run.measured.restore_best()


# ---- arguments, of `fit` and of trainers -----------------------------------------------------------


def check_parts_of_fit(model: Any, guide: nn.Module, optimizer: Any, lr: Any) -> None:
    """Raise unless model and guide can be trained, and the optimizer is one of torch's."""
    if isinstance(model, StructuredGuide):
        raise TypeError(
            "`model` must be a model, but got a guide: write `fit(model, guide, data)`."
        )
    if any(hasattr(parameter, "full_tensor") for parameter in guide.parameters()):
        raise TypeError(
            "`guide` must have whole parameters, but got sharded ones. Train it in a loop of your own, "
            "as the page on more than one device shows."
        )
    parts = [part for part in (unwrapped(model), guide) if isinstance(part, nn.Module)]
    trained = (each for part in parts for each in part.parameters() if each.requires_grad)
    if any(parameter.is_inference() for parameter in trained):
        raise ValueError(
            "`model` and `guide` must be made outside of `torch.inference_mode()`, in which parameters "
            "cannot be trained."
        )
    is_optimizer = not isinstance(optimizer, type) or issubclass(optimizer, torch.optim.Optimizer)
    if isinstance(optimizer, PyroOptim) or not is_optimizer:
        raise TypeError(
            "`optimizer` must be `torch.optim.Adam` or another function of `(parameters, lr=lr)` that "
            f"returns an optimizer of torch, but got {brief(optimizer)}. Pass Pyro's to `CompiledSVI`."
        )
    if optimizer is StructuredAdam:
        raise TypeError(
            "`optimizer` must be a function of `(parameters, lr=lr)`, but got StructuredAdam, which "
            "needs the guide, too. Leave it out, or write `partial(StructuredAdam, guide=guide)`."
        )
    if lr is None and optimizer is not None:
        rate = signature(optimizer).parameters.get("lr")
        if rate is not None and rate.default is rate.empty:
            raise ValueError(
                "`lr` must be a number where `optimizer` has no rate of its own, but got None. "
                "Write `fit(..., lr=1e-3)`."
            )


def check_local_sites(guide: nn.Module, batches: Any, number: float) -> None:
    """Raise a ``ValueError`` if the sites of single examples would meet other examples."""
    if keeps_order(batches, number):
        return
    parts = [each for each in guide.modules() if isinstance(each, StructuredGuide)]
    local = {name: None for each in parts for name in each.local_site_names}
    if local and not all(each.are_plates_given for each in parts):
        raise ValueError(
            f"The sites {[*local]} belong to single examples, and the guide cannot tell which examples "
            "a mini-batch holds. Make a new guide and fit all examples at once, in one order (leave "
            "`batch_size` out, and do not shuffle), or let the data number the examples and give the "
            "guide `create_plates`."
        )


def check_in_modules(parts: tuple[Any, Any], args: Any, kwargs: Any) -> None:
    """Raise a ``ValueError`` if model or guide read parameters that only Pyro's store has."""
    if stored := Loss(*parts, StructuredELBO()).stored_parameters(args, kwargs):
        raise ValueError(
            f"`model` must have its parameters in modules, but reads {[*stored]} by `pyro.param`, which "
            "no optimizer of a Trainer has. Make them `PyroParam` attributes of a `PyroModule`, or "
            "train by `fit`."
        )


def is_annealed(elbo: StructuredELBO | None, kl_weight: Any) -> bool:
    """Whether the weight of the KL rises over the steps of the run."""
    return kl_weight == "annealed" and (elbo is None or elbo.kl_weight == 1)


def objective_of(elbo: StructuredELBO | None, kl_weight: Any, num_steps: int) -> StructuredELBO:
    """Return a copy of the objective with the weight of the KL, at its first step."""
    own = StructuredELBO() if elbo is None else copy(elbo)
    own.step = 0
    if own.kl_weight != 1:
        if kl_weight != "annealed":
            raise ValueError(
                f"Give one of `kl_weight` and a `kl_weight` of `elbo`, but got {brief(kl_weight)} and "
                f"{brief(own.kl_weight)}. Write `elbo=StructuredELBO()` without one."
            )
        return own
    if kl_weight == "annealed":
        rise = math.ceil(ANNEALED * num_steps)
        kl_weight = LinearAnnealing(rise, start=1 / rise)  # a single step has the whole KL
    own.kl_weight = kl_weight
    return own


def make_optimizer(
    optimizer: Callable[..., torch.optim.Optimizer] | None,
    guide: nn.Module,
    parameters: list[nn.Parameter],
    lr: Any,
    num_steps: int,
) -> torch.optim.Optimizer:
    """Return the optimizer of parameters, with a rate of 1 for a function ``lr``."""
    if not parameters:
        raise ValueError("Model and guide must have a parameter to train, but got none.")
    make = optimizer or partial(StructuredAdam, guide=guide, warm_up=WARM_UP * num_steps)
    own = {} if lr is None else {"lr": 1.0 if callable(lr) else lr}
    made = make(parameters, **own)
    check("optimizer(parameters, lr=lr)", made, torch.optim.Optimizer)
    return made


def initialize(guide: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let a guide make the parameters that it makes at its first call, and compare several examples."""
    if isinstance(guide, StructuredGuide):
        if not guide.is_initialized:
            for part in guide.modules():  # the members of a mixture, too
                if isinstance(part, StructuredGuide):
                    part.handed_out.clear()  # the optimizer is made afterwards
        if not guide.is_initialized or any(use.is_uncompared for use in guide.uses.values()):
            guide.initialize(*args, **kwargs)
    elif not list(guide.parameters()):
        with torch.no_grad():
            guide(*args, **kwargs)
        for parameter in guide.parameters():
            # Pyro's guides start at expanded values under `module_local_params`.
            if has_overlap(parameter):
                parameter.data = parameter.data.clone()


@contextmanager
def _training_mode(model: Callable[..., Any], guide: nn.Module) -> Iterator[None]:
    """Put model and guide into training mode in this block, but for frozen parts in evaluation mode."""
    roots = [root for root in (unwrapped(model), guide) if isinstance(root, nn.Module)]
    modes = [(part, part.training) for root in roots for part in root.modules()]
    try:
        for root in roots:
            _put_into_training(root)
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for part, mode in modes:
            part.training = mode


def _put_into_training(module: nn.Module) -> None:
    """Put a module into training mode, unless it is in evaluation mode and nothing in it is trained.

    Then it has tensors, and none that requires gradients or is sampled.
    """
    parts = [*module.modules()]
    is_trained = any(parameter.requires_grad for parameter in module.parameters())
    is_frozen = (
        any(map(own_tensors, parts)) and not is_trained and not any(map(declared_samples, parts))
    )
    if module.training or not is_frozen:
        module.training = True
        for child in module.children():
            _put_into_training(child)


def _count_steps(num_steps: int | None, num_epochs: int | None, num_batches: int) -> int:
    if (num_epochs is None) == (num_steps is None):
        raise ValueError(
            f"Give one of `num_epochs` and `num_steps`, but got {num_epochs!r} and {num_steps!r}."
        )
    return num_epochs * num_batches if num_epochs else num_steps or 0
