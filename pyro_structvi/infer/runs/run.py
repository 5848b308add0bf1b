"""A fit between its steps: what was done, where the data are, and how that is kept and found again."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import Any

import torch

from pyro_structvi._checks import naming
from pyro_structvi.infer.callbacks import Callbacks, call_all, close_all
from pyro_structvi.infer.data.batches import Arguments, num_examples
from pyro_structvi.infer.data.feed import Feed, Place
from pyro_structvi.infer.history import History
from pyro_structvi.infer.ranks import of_all_ranks, world
from pyro_structvi.infer.runs.checkpoint import CheckpointFile
from pyro_structvi.infer.runs.interrupts import interrupts_between_steps
from pyro_structvi.infer.runs.module_states import check_parts, load_parts, parts_state, plain
from pyro_structvi.infer.runs.random_states import (
    random_states,
    set_random_states,
    unchanged_randomness,
)
from pyro_structvi.infer.schedules import RateSchedule
from pyro_structvi.infer.steps.loss import Loss
from pyro_structvi.infer.steps.optimizer import OneOptimizer
from pyro_structvi.infer.steps.step import StepTerms
from pyro_structvi.infer.validation import Validation

# Options of an optimizer that say how it computes, depend on the number of steps, or are compared
# otherwise.
NOT_COMPARED = {"params", "lr", "fused", "foreach", "capturable", "warm_up"}


class Run:
    """A fit between its steps.

    Args:
        loss: The loss.
        device: The guide's device.
        file: Where checkpoints are kept, if they are.
        every: How many steps apart.
        validation: What measures the guide, if something does.
        callbacks: Functions that see the history after each step.

    Attributes:
        history: What happened so far.
        total: The number of steps, once it is known.
        done: How many of them were taken.
    """

    def __init__(
        self,
        loss: Loss,
        device: torch.device | None,
        file: CheckpointFile | None,
        every: int,
        validation: Validation | None,
        callbacks: Callbacks,
    ) -> None:
        self.history = History()
        self.total = 0
        self._validation, self._callbacks = validation, callbacks
        self._loss, self._device, self._file, self._every = loss, device, file, every
        self._saved = None if file is None else file.saved
        self._settings: dict[str, Any] = {"the number of processes": world()[1]}
        if file is not None:
            file.check(self._settings)
        self.done: int = 0 if self._saved is None else self._saved["steps"]
        self._own = None if self._saved is None else self._saved["ranks"][world()[0]]
        self._feed: Feed | None = None
        self._optimizer: OneOptimizer | None = None
        self._interrupted: Callable[[], bool] = lambda: False

    # ---- the beginning ---------------------------------------------------------------------------

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """Draw in this block what a run draws first, such as seeds; one that goes on draws the same."""
        if self._file is None:
            yield
            return
        self._before = random_states(self._device)
        if self._own is not None:
            set_random_states(self._own["began"], self._device)
        self._began = random_states(self._device)
        with self.unchanged_on_error():
            yield

    def check(self, total: int, loader: Any, settings: Mapping[str, Any]) -> None:
        """Raise a ``ValueError`` if a checkpoint was begun with other settings, or has more steps.

        Args:
            total: The number of steps.
            loader: The data.
            settings: What else has to be the same, by its name in the error.
        """
        self.total = total
        self._num_batches = len(loader)
        self._settings |= {
            "the kind of `data`": type(loader).__name__,
            "the number of examples in `data`": num_examples(loader),
            "the number of mini-batches in `data`": len(loader),
            **settings,
        }
        if self._device is not None:
            self._settings["the device of `guide`"] = self._device.type
        if self._file is not None:
            self._file.check(self._settings)
        if total < self.done:
            raise ValueError(
                f"`num_steps` must be at least the {self.done} steps that `checkpoint` has taken, but "
                f"got {total}, or `num_epochs` of as many. Ask for more, or give another path."
            )

    def feed(self, loader: Any) -> Feed:
        """Return the batches from where the run is."""
        place = None if self._own is None else Place(**self._own["place"])
        left = self.total - self.done
        self._feed = Feed(loader, self._device, left, self._file is not None, place)
        return self._feed

    @contextmanager
    def first_arguments(self) -> Iterator[Arguments]:
        """Give the next arguments, for what is made of them; a run that goes on keeps its randomness."""
        assert self._feed is not None
        with ExitStack() as stack:
            if self._own is not None:
                set_random_states(self._own["now"], self._device)
            arguments = self._feed.peek()
            if self._own is not None:
                stack.enter_context(unchanged_randomness(self._device))
            yield arguments

    @contextmanager
    def unchanged_on_error(self) -> Iterator[None]:
        """Put the randomness of the caller back where a block raises before the first step."""
        try:
            yield
        except Exception:
            if self._file is not None:
                set_random_states(self._before, self._device)
            raise

    def begin(self, optimizer: OneOptimizer, lr_schedule: RateSchedule) -> None:
        """Load the checkpoint, or write the first one, by which a run goes on that was soon killed.

        What the start of the guide is worth is measured before.

        Raises:
            RuntimeError: If the guide's families have other options; nothing is loaded.
            ValueError: If parameters, optimizer or schedules are others; nothing is loaded.
        """
        self._optimizer, self._trained = optimizer, [*self._loss.trained]
        if self._saved is not None:
            with naming("checkpoint", self._saved["path"]):
                self._check_saved(self._saved, optimizer, lr_schedule)
                self._load(self._saved, optimizer)
        self._validate()
        if self._saved is None and self._file is not None:
            self._write()

    # ---- between the steps -----------------------------------------------------------------------

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Take the steps in this block: with checkpoints, an interrupt waits for the end of a step."""
        with ExitStack() as stack:
            stack.callback(close_all, self._callbacks)
            if self._file is not None and world()[1] == 1:
                self._interrupted = stack.enter_context(interrupts_between_steps())
            yield
            if self._validation is not None:
                self._validation.restore_best()

    @property
    def is_over(self) -> bool:
        """Whether there is no further step to take."""
        has_waited = self._validation is not None and self._validation.is_over
        return has_waited or self.done == self.total

    def after_step(self, terms: StepTerms, lr: float) -> bool:
        """Write down a step, and do what is due after it; say whether to stop."""
        self.history.add(terms, lr)
        self.done += 1
        self._validate()
        stops = call_all(self._callbacks, self.history)
        self.history.interrupted = self._interrupted()
        stops = stops or self.is_over or self.history.interrupted
        if self._file is not None and (stops or self.done % self._every == 0):
            self._write()
        return stops

    def _validate(self) -> None:
        validation = self._validation
        if validation is None or not validation.is_due(self.history, self.total, self._num_batches):
            return
        assert self._feed is not None
        self._feed.place()  # waits for what may draw meanwhile
        validation.add_to(self.history)

    # ---- checkpoints -----------------------------------------------------------------------------

    def _write(self) -> None:
        assert self._file is not None
        assert self._feed is not None
        place = self._feed.place()  # before the random states: it waits for what draws from them
        now = random_states(self._device)
        own = {"began": self._began, "now": now, "place": vars(place)}
        ranks = of_all_ranks(plain("data", own))
        self._file.write(lambda: self._state() | {"ranks": ranks})

    def _state(self) -> dict[str, Any]:
        assert self._optimizer is not None
        assert self._optimizer.torch is not None
        made = self._optimizer.torch
        validation = self._validation
        return {
            "settings": self._settings,
            "steps": self.done,
            **parts_state(self._loss, plain),
            "validation": None if validation is None else validation.state(),
            "trained": self._trained,
            "optimizer": {
                "class": type(made).__name__,
                "state": plain("optimizer", made.state_dict()),
            },
            "history": _lists_of(self.history),
        }

    def _check_saved(
        self, saved: Mapping[str, Any], optimizer: OneOptimizer, lr_schedule: RateSchedule
    ) -> None:
        assert self._file is not None
        check_parts(self._loss, saved)
        check_same = self._file.check_same
        check_same("the parameters that are trained", self._trained, saved["trained"])
        check_same("`optimizer`", type(optimizer.torch).__name__, saved["optimizer"]["class"])
        groups = saved["optimizer"]["state"]["param_groups"]
        check_same("the number of groups of `optimizer`", len(optimizer.options), len(groups))
        for own, given in zip(plain("optimizer", optimizer.options), groups, strict=True):
            for name in own.keys() - NOT_COMPARED:
                check_same(f"the option `{name}` of `optimizer`", own[name], given.get(name))
        if self._validation is not None and saved["validation"] is not None:
            for name, own in self._validation.settings.items():
                check_same(name, own, saved["validation"]["settings"][name])
        self._check_schedules(saved["history"], optimizer, lr_schedule)

    def _check_schedules(
        self, history: Mapping[str, Any], optimizer: OneOptimizer, lr_schedule: RateSchedule
    ) -> None:
        """Ask the schedules of this call for the steps that were taken, whatever functions they are."""
        assert self._file is not None
        elbo, rate = self._loss.elbo, optimizer.rate
        numbers = zip(history["lr"].tolist(), history["kl_weight"].tolist(), strict=True)
        for step, (lr, kl_weight) in enumerate(numbers):
            elbo.step = step
            own = rate * lr_schedule(step) if callable(lr_schedule) else rate
            where = f"at step {step}"
            of_all_steps = lr_schedule == "cosine" and step > 0  # which may be more now
            if not of_all_steps and not math.isclose(own, lr, rel_tol=1e-6):
                self._file.check_same(
                    f"the learning rate of `lr` and `lr_schedule` {where}", own, lr
                )
            is_annealed = self._settings["`kl_weight`"] == "annealed"  # over the steps, more now
            if not is_annealed and not math.isclose(
                elbo.current_kl_weight, kl_weight, rel_tol=1e-6
            ):
                self._file.check_same(f"`kl_weight` {where}", elbo.current_kl_weight, kl_weight)
        elbo.step = 0

    def _load(self, saved: Mapping[str, Any], optimizer: OneOptimizer) -> None:
        assert optimizer.torch is not None
        load_parts(self._loss, saved)
        if self._validation is not None and saved["validation"] is not None:
            self._validation.load(saved["validation"])
        optimizer.torch.load_state_dict(saved["optimizer"]["state"])
        self._loss.elbo.step = self.done
        for name, values in saved["history"].items():
            setattr(self.history, name, [*values] if isinstance(values, list) else values.tolist())


def _lists_of(history: History) -> dict[str, Any]:
    """Return the lists of a history, those of numbers as tensors, which are read much faster."""
    lists = {field.name: getattr(history, field.name) for field in fields(history)}
    return {name: _as_tensor(values) for name, values in lists.items() if isinstance(values, list)}


def _as_tensor(values: list[Any]) -> Any:
    if any(isinstance(value, str) for value in values):
        return values
    dtype = torch.int64 if {*map(type, values)} == {int} else torch.float64
    return torch.tensor(values, dtype=dtype, device="cpu")
