"""Checkpoints of a fit: a resumed run equals an uninterrupted one."""

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pyro.util import get_rng_state, set_rng_state

from pyro_structvi._checks import CheckedFields, Count, naming
from pyro_structvi.infer.batches import Feed, num_examples
from pyro_structvi.infer.history import History
from pyro_structvi.infer.steps.eager import Loss
from pyro_structvi.infer.steps.optimizer import OneOptimizer
from pyro_structvi.infer.validation import Measurements, load_parts, parts_state, plain
from pyro_structvi.nn.likelihood import Likelihood
from pyro_structvi.nn.random_module import prior_buffers
from pyro_structvi.posterior.files import check_parts, parts_of, write_atomically

FORMAT = 7

# Options of an optimizer that say how it computes, depend on the number of steps, are compared
# otherwise, or follow from priors and starts.
NOT_COMPARED = {"params", "lr", "fused", "foreach", "capturable", "warm_up", "unit"}

STANDARDS = {f"{data}_{part}" for data in ("input", "target") for part in ("mean", "scale")}
OF_LIKELIHOOD = STANDARDS | {"noise_scale", "class_weights"}  # buffers that no step changes


@dataclass(frozen=True)
class Checkpoint(CheckedFields):
    """A file that resumes a :func:`~pyro_structvi.fit` after an interruption, bit for bit.

    The file is written before the first step, every so many steps, at the end, and at an interrupt from
    the keyboard. Each write goes to a temporary file, which then replaces it. See "Resume and stop
    training" in the documentation.

    Args:
        path: The path of the file, in a folder that exists.
        every: How many steps two writes are apart.
        resume: Whether to go on from the file where there is one; otherwise it must be new. Data, batch
            size, parameters, optimizer and schedules must be the same as at first; ``num_steps`` or
            ``num_epochs`` count from the first step, and may be larger. For as many steps as at first,
            with tensors and a ``Dataset``, parameters are the same to the last bit; any other loader
            begins its epoch again.

    Example:
        >>> import tempfile
        >>> from pyro_structvi import MeanFieldGuide, Regressor, bayesianize, fit
        >>> x = torch.linspace(-1, 1, 32).unsqueeze(-1)
        >>> model = Regressor(bayesianize(torch.nn.Linear(1, 1), prior=1.0), noise_scale=0.1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = Checkpoint(f"{folder}/run.pt", resume=True)
        ...     for steps in (10, 20):
        ...         guide = MeanFieldGuide(model)
        ...         history = fit(
        ...             model, guide, (x, x), num_steps=steps, checkpoint=run, progress=False
        ...         )
        >>> len(history.elbo)
        20
    """

    path: str | os.PathLike[str]
    every: Count = 1000
    resume: bool = False


class Run:
    """The parts of a fit that a checkpoint holds, with the history of the steps that were taken.

    ``total`` is the number of steps, ``rate`` a function of the step to the factor of learning rates,
    and ``settings`` are conditions of a resumed run, by their names in errors.
    """

    def __init__(
        self,
        loss: Loss,
        optimizer: OneOptimizer,
        feed: Feed,
        measured: Measurements | None,
        total: int,
        rate: Callable[[int], float],
    ) -> None:
        self.loss, self.optimizer, self.feed, self.measured = loss, optimizer, feed, measured
        self.total, self.rate, self.history = total, rate, History()
        names = {value: name for name, value in loss.trained.items()}
        self.settings: dict[str, Any] = {
            "the kind of `data`": type(feed.loader).__name__,
            "the number of examples in `data`": num_examples(feed.loader),
            "the number of mini-batches in `data`": len(feed.loader),
            "the device of `guide`": None if feed.device is None else feed.device.type,
            "`num_particles` of `elbo`": loss.elbo.num_particles,
            "`vectorize_particles` of `elbo`": loss.elbo.vectorize_particles,
            "`estimator` of `elbo`": loss.elbo.estimator,
            "the parameters that are trained": [*loss.trained],
            "their dtypes": sorted({str(value.dtype) for value in loss.trained.values()}),
            "`optimizer`": type(optimizer.torch).__name__,
            # Its state has parameters by their places.
            "the parameters of groups of `optimizer`": [
                [names.get(value, "another") for value in group["params"]]
                for group in optimizer.groups
            ],
        }
        for number, group in enumerate(optimizer.options):
            for name in group.keys() - NOT_COMPARED:
                self.settings[f"the option `{name}` of `optimizer` in group {number}"] = group[name]
        if measured is not None:
            self.settings |= measured.settings

    @property
    def done(self) -> int:
        """The number of steps that were taken."""
        return len(self.history.elbo)

    @property
    def is_over(self) -> bool:
        """Whether there is no further step to take."""
        return self.done >= self.total or (self.measured is not None and self.measured.is_over)


class CheckpointFile:
    """The file of a :class:`Checkpoint`, or none, so that nothing is done.

    ``saved`` has its contents before this run, None where there is nothing to go on from. ``place`` has
    the seed of the order of the data, the epoch, and the mini-batches that were used of it.
    """

    def __init__(self, options: Checkpoint | None, device: torch.device | None) -> None:
        self._options, self._device = options, device
        self.saved: dict[str, Any] | None = None
        if options is not None:
            self._path = Path(options.path).resolve()  # also where the working directory changes
            self.saved = self._open(options.resume)
        seed = int(torch.randint(2**62, (), device="cpu"))
        start = {"seed": seed, "epoch": 0, "taken": 0}
        self.place: dict[str, int] = start if self.saved is None else self.saved["place"]

    def check_total(self, total: int) -> None:
        """Raise a ``ValueError`` if more steps were taken than are to be."""
        done = 0 if self.saved is None else self.saved["steps"]
        if total < done:
            raise ValueError(
                f"`num_steps` must be at least the {done} steps that `checkpoint` has taken, but "
                f"got {total}, or `num_epochs` of as many. Ask for more, or give another path."
            )

    def load(self, run: Run) -> None:
        """Put a run into the state of the file, if there is one; on an error nothing is loaded."""
        saved = self.saved
        if saved is None:
            return
        with naming("checkpoint", str(self._path)):
            self._check(run, saved)
            assert run.optimizer.torch is not None
            run.optimizer.torch.load_state_dict(saved["optimizer"])  # at first: it may raise
            load_parts(run.loss, saved)
        for name, values in saved["history"].items():
            setattr(run.history, name, [*values] if isinstance(values, list) else values.tolist())
        if run.measured is not None and saved["validation"] is not None:
            run.measured.load(saved["validation"], run.history)
        run.loss.elbo.step = run.done
        set_random_states(saved["random"], self._device)

    def write_if_due(self, run: Run, is_due: bool) -> None:
        """Put a run in the file's place, if there is a file, now and after so many steps."""
        if self._options is None or not (is_due or run.done % self._options.every == 0):
            return
        assert run.optimizer.torch is not None
        state = {
            "format": FORMAT,
            "steps": run.done,
            "settings": plain("optimizer", run.settings),
            "parts": parts_of(run.loss.parts[0]),
            **{name: plain(name, state) for name, state in parts_state(run.loss).items()},
            "optimizer": plain("optimizer", run.optimizer.torch.state_dict()),
            "history": {  # tensors of numbers, which are read much faster than lists
                name: values if name == "compilation" else torch.from_numpy(np.array(values))
                for name, values in vars(run.history).items()
                if isinstance(values, list)
            },
            "validation": None if run.measured is None else run.measured.state(),
            "place": {**self.place, "epoch": run.feed.epoch, "taken": run.feed.taken},
            "random": random_states(self._device),
        }
        write_atomically("checkpoint", self._path, lambda partial: torch.save(state, partial))

    @contextmanager
    def interrupts_between_steps(self) -> Iterator[Callable[[], bool]]:
        """Let an interrupt wait for the end of a step; a second one does not.

        Yields a function that returns whether there was an interrupt. Handlers of others are left in
        place, and threads, which Python does not interrupt, as they are.
        """
        asked: list[int] = []
        usual = signal.default_int_handler
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGINT) is not usual:
            yield lambda: False
            return

        def ask(number: int, frame: Any) -> None:
            asked.append(number)
            signal.signal(signal.SIGINT, usual)

        signal.signal(signal.SIGINT, ask)
        try:
            yield lambda: bool(asked)
        finally:
            signal.signal(signal.SIGINT, usual)

    def _open(self, resume: bool) -> dict[str, Any] | None:
        folder = self._path.parent
        if self._path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ValueError(
                "`checkpoint` must be the path of a file in a folder that can be written to, but got "
                f"'{self._path}'. Make the folder first: `pathlib.Path(...).mkdir(parents=True)`."
            )
        if not self._path.exists():
            return None
        if not resume:
            raise FileExistsError(
                f"`checkpoint` must be a new file, but '{self._path}' exists. Write "
                "`Checkpoint(path, resume=True)` to go on from it, or give another path."
            )
        try:
            with self._path.open("rb") as file:  # torch reads some names in other ways
                state = torch.load(file, map_location="cpu", weights_only=True)
            if not isinstance(state, dict) or state["format"] != FORMAT:
                raise KeyError("format")
        except Exception as error:  # torch has many for what is no file of its own
            raise ValueError(
                f"`checkpoint` must be a file that `fit` has written, but '{self._path}' is not, or not "
                "by this version. Pass another path, or remove it."
            ) from error
        return state

    def _check(self, run: Run, saved: Mapping[str, Any]) -> None:
        """Raise unless settings, parameters and the schedules of the steps taken are as they were."""
        check_parts(saved["parts"], run.loss.parts[0])
        model = saved["model"] or {}
        for name, own in _constants(run.loss):
            given = model.get(name, own)
            is_alike = (given.shape, given.dtype) == (own.shape, own.dtype)
            if is_alike and not torch.equal(given.cpu(), own.cpu()):
                raise ValueError(
                    f"`checkpoint` must go on with what it was begun with, but `{name}` of the model "
                    f"has other values here than in '{self._path}'. Pass the same, or another path."
                )
        for name, own in plain("optimizer", run.settings).items():
            self._check_same(name, own, saved["settings"].get(name))
        elbo, rate = run.loss.elbo, run.optimizer.rate
        history = saved["history"]
        numbers = zip(history["lr"].tolist(), history["kl_weight"].tolist(), strict=True)
        for elbo.step, (lr, kl_weight) in enumerate(numbers):
            where = f"at step {elbo.step}"
            # Those by default depend on the number of steps, which may be larger.
            if run.settings["`lr`"] == "a function" or elbo.step == 0:
                self._check_same(f"the learning rate {where}", rate * run.rate(elbo.step), lr)
            if run.settings["`kl_weight`"] != "annealed":
                self._check_same(f"`kl_weight` {where}", elbo.current_kl_weight, kl_weight)
        elbo.step = 0

    def _check_same(self, name: str, own: Any, saved: Any) -> None:
        are_numbers = isinstance(own, float) and isinstance(saved, float)
        if not (own == saved or (are_numbers and math.isclose(own, saved, rel_tol=1e-6))):
            raise ValueError(
                f"`checkpoint` must go on with what it was begun with, but {name} is {own!r} here, and "
                f"{saved!r} in '{self._path}'. Pass the same, or another path."
            )


def _constants(loss: Loss) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers of priors and likelihood, by their keys in the model's state dict.

    The state would replace them, so that another prior or noise scale would change nothing.
    """
    model = dict(loss.named_children()).get("model")
    for path, part in () if model is None else model.named_modules():
        own = part.named_buffers(recurse=False) if isinstance(part, Likelihood) else ()
        given = [(name, buffer) for name, buffer in own if name in OF_LIKELIHOOD]
        for name, buffer in (*given, *prior_buffers(part)):
            yield f"{path}.{name}".removeprefix("."), buffer


def random_states(device: torch.device | None) -> dict[str, Any]:
    """Return the states of the generators of torch, Python and NumPy, and of the guide's GPU."""
    states: dict[str, Any] = get_rng_state()
    name, numbers, *rest = states["numpy"]
    gpu = device if device is not None and device.type == "cuda" else None
    return states | {
        "numpy": (name, numbers.tolist(), *rest),
        "gpu": None if gpu is None else torch.cuda.get_rng_state(gpu),
    }


def set_random_states(states: dict[str, Any], device: torch.device | None) -> None:
    """Put the states of generators back."""
    set_rng_state(states)
    if states["gpu"] is not None and device is not None:
        torch.cuda.set_rng_state(states["gpu"], device)
