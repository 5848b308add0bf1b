"""Quality of a guide on data that it is not trained on, and the end of its improvement."""

import math
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from pyro_structvi._checks import (
    CheckedFields,
    Count,
    Program,
    Rule,
    brief,
    check,
    check_no_nan,
    check_tensors,
    naming,
)
from pyro_structvi._nested import map_nested, nested_tensors
from pyro_structvi._torch import tree_map
from pyro_structvi.infer.elbo import LinearAnnealing
from pyro_structvi.infer.history import History
from pyro_structvi.infer.steps.eager import Loss
from pyro_structvi.nn.random_module import separate_elements
from pyro_structvi.posterior.prediction import Prediction, observed_densities, predict
from pyro_structvi.posterior.runs import evaluation_mode
from pyro_structvi.sites.finding import separate_randomness
from pyro_structvi.sites.site_posterior import SitePosterior
from pyro_structvi.structures.points import are_points

NUM_DRAWS = 20  # of the guide, with the same noise at each validation
SEED = 0
LEAST_STEPS = 100  # between two validations, unless told otherwise


@dataclass(frozen=True, eq=False)
class Validation(CheckedFields):
    """Measurements of the guide between the steps of :func:`~pyro_structvi.fit`, on other data.

    They are taken before the first step, every so many steps, and after the last step. The draws have
    separate random numbers, the same at each time, so that differences come from the parameters.

    Args:
        data: Inputs and observations ``(x, y)``; ``x`` is a tuple for several inputs, or a mapping.
            They are kept on the guide's device and run in mini-batches of ``batch_size``.
        metric: A function of a :class:`~pyro_structvi.posterior.prediction.Prediction` (of 20 draws, or
            of each member of an ensemble, by ``predict(stream=True)``, without function values) and
            ``y`` that returns a number, higher is better. The mean log predictive density of an
            example, in nats, when None; without examples that the model masks.
        every: How many steps the measurements are apart; when None once an epoch, and every 100 steps
            at most.
        patience: How many measurements in a row that are no better end the fit. Guide and model then
            have, also where the fit ends otherwise but by an error, the parameters and buffers of the
            best one. While an annealed weight of the KL rises, only points are stopped. When None,
            nothing ends the fit.

    Example:
        >>> from pyro_structvi import MeanFieldGuide, Regressor, bayesianize, fit
        >>> x = torch.linspace(-1, 1, 32).unsqueeze(-1)
        >>> model = Regressor(bayesianize(torch.nn.Linear(1, 1), prior=1.0), noise_scale=0.1)
        >>> guide, other = MeanFieldGuide(model), Validation((x, 2 * x), every=50)
        >>> history = fit(model, guide, (x, 2 * x), num_steps=100, validation=other, progress=False)
        >>> history.validation_steps
        [0, 50, 100]
    """

    data: Annotated[
        tuple[Any, ...],
        Rule("a tuple `(x, y)` of inputs and observations", lambda value: len(value) == 2),
    ]
    metric: Program | None = None
    every: Count | None = None
    patience: Count | None = None

    def __post_init__(self) -> None:
        """Check the arguments."""
        super().__post_init__()
        x, y = self.data
        check_tensors("data[0]", x)
        check("data[1]", y, Tensor)
        tensors = [*nested_tensors((x, y))]
        for value in tensors:
            check_no_nan("data", value)
        lengths = [len(value) if value.dim() else 0 for value in tensors]
        if len(set(lengths)) != 1:
            raise ValueError(
                f"The tensors of `data` must have one length for validation, but got {lengths}."
            )


@contextmanager
def same_randomness(device: torch.device) -> Iterator[None]:
    """Use separate random numbers, the same in each such block."""
    with separate_randomness():
        torch.default_generator.manual_seed(SEED)
        random.seed(SEED)
        np.random.seed(SEED)  # noqa: NPY002
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(SEED)
        yield


def mean_log_density(prediction: Prediction, y: Tensor) -> float:
    """Return the log predictive density of an observed example, in nats, on average over these."""
    return float(observed_densities(prediction).mean())


class Measurements:
    """The measurements of a fit, with the best parameters."""

    def __init__(
        self,
        options: Validation,
        loss: Loss,
        batch_size: int | None,
        device: torch.device | None,
    ) -> None:
        self._x, self._y = map_nested(lambda value: value.to(device), options.data)
        self._options, self._loss, self._batch_size = options, loss, batch_size
        self._metric = options.metric or mean_log_density
        self._best: float | None = None
        self._waited = 0
        self._best_state: Mapping[str, Any] | None = None
        # The state before a measurement at the end that is not on the schedule.
        self._before_end: tuple[Any, ...] | None = None

    @property
    def is_over(self) -> bool:
        """Whether there was no better value for as long as the patience lasts."""
        return self._options.patience is not None and self._waited >= self._options.patience

    def add_if_due(self, history: History, total: int, num_batches: int) -> None:
        """Measure if it is time to, write the value down, and keep the parameters if it is the best."""
        done = len(history.elbo)
        every = self._options.every or max(num_batches, LEAST_STEPS)
        if (done % every and done != total) or done in history.validation_steps[-1:]:
            return
        value = self._measure()
        own = self._best, self._waited, self._best_state, len(history.validation)
        self._before_end = own if done % every else None
        history.validation.append(value)
        history.validation_steps.append(done)
        weight = self._loss.elbo.kl_weight
        if isinstance(weight, LinearAnnealing) and done < weight.num_steps:
            posteriors = (each for each in self._loss.modules() if isinstance(each, SitePosterior))
            # The objective is another one there, but points may be best before they overfit.
            if not are_points(posteriors):
                return
        if self._best is None or value > self._best:
            self._best, self._waited = value, 0
            if self._options.patience is not None:
                self._best_state = tree_map(_clone, parts_state(self._loss))
        else:
            self._waited += 1

    def restore_best(self) -> None:
        """Put guide and model back to where the best value was measured, where there is patience."""
        if self._options.patience is not None and self._best_state is not None:
            load_parts(self._loss, self._best_state)

    @property
    def settings(self) -> dict[str, Any]:
        """Conditions of a resumed run, by their names in errors."""
        name = getattr(self._metric, "__qualname__", type(self._metric).__name__)
        return {
            "the number of examples in `validation`": len(self._y),
            "`metric` of `validation`": name,
        }

    def state(self) -> dict[str, Any]:
        """Return the state of a run that can be resumed, maybe for longer than to this end."""
        own = self._best, self._waited, self._best_state, None
        value, waited, best, count = own if self._before_end is None else self._before_end
        return {"value": value, "waited": waited, "best": plain("model", best), "count": count}

    def load(self, state: Mapping[str, Any], history: History) -> None:
        """Go on from what :meth:`state` returned; the best is known if parameters were kept there."""
        if state["count"] is not None:
            del history.validation[state["count"] :], history.validation_steps[state["count"] :]
        if state["best"] is not None:
            self._best, self._waited = state["value"], state["waited"]
            self._best_state = state["best"]

    def _measure(self) -> float:
        model, guide = self._loss.parts
        draws = getattr(guide, "num_points", 0) or NUM_DRAWS
        with same_randomness(self._y.device), evaluation_mode(guide):
            with naming("validation", (self._x, self._y)):
                prediction = predict(
                    *(model, guide, self._x),
                    num_samples=draws,
                    y=self._y,
                    batch_size=self._batch_size,
                    stream=True,
                )
            value = self._metric(prediction, self._y)
        is_one = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
        if not (is_one or isinstance(value, Real)):
            raise TypeError(
                f"`metric(prediction, y)` must return a number, higher for better, but returned "
                f"{brief(value)}."
            )
        if math.isnan(float(value)):
            raise ValueError("`metric(prediction, y)` must return a number, but returned NaN.")
        return float(value)


def parts_state(loss: Loss) -> dict[str, Any]:
    """Return the state dicts of guide and model, not copied, and by ``buffers`` what these leave out."""
    state: dict[str, Any] = {"guide": None, "model": None, "buffers": {}}
    for name, part in loss.named_children():
        state[name] = own = dict(part.state_dict())
        # Steps may change buffers that are not persistent, too.
        others = {key: value for key, value in part.named_buffers() if key not in own}
        state["buffers"][name] = others
    return state


def load_parts(loss: Loss, state: Mapping[str, Any]) -> None:
    """Put guide and model into a state that ``parts_state`` returned, both or, on an error, neither."""
    before = tree_map(_clone, parts_state(loss))
    try:
        _load(loss, state)
    except Exception:
        _load(loss, before)
        raise


def _load(loss: Loss, state: Mapping[str, Any]) -> None:
    for name, part in loss.named_children():
        separate_elements(part)
        part.load_state_dict(state[name])
        buffers = dict(part.named_buffers())
        with torch.no_grad():
            for key, value in state["buffers"][name].items():
                if key in buffers:
                    buffers[key].copy_(value)


def _clone(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def plain(name: str, state: Any) -> Any:
    """Return a state with tensors on the host, as ``torch.load(..., weights_only=True)`` can read it.

    Raises:
        TypeError: If it holds anything but numbers, texts, tensors, and lists and dicts of them.
    """

    def convert(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().to("cpu", copy=True)
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, Real):
            return int(value) if isinstance(value, Integral) else float(value)
        raise TypeError(
            f"`{name}` must have a state of tensors, numbers and texts for a checkpoint, but it holds "
            f"{brief(value)}. Leave `checkpoint` out, or keep it elsewhere."
        )

    return tree_map(convert, state)
