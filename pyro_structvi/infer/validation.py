"""How good a guide is on data that it is not trained on, and when it no longer gets better."""

import math
import random
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from pyro_structvi._checks import (
    NO_CLASS,
    Rule,
    brief,
    check,
    check_no_nan,
    check_tensors,
    naming,
)
from pyro_structvi.infer.history import History
from pyro_structvi.infer.ranks import by_first_rank
from pyro_structvi.infer.runs.module_states import cloned, load_parts, parts_state, plain
from pyro_structvi.infer.runs.random_states import unchanged_randomness
from pyro_structvi.infer.schedules import LinearAnnealing
from pyro_structvi.infer.steps.loss import Loss
from pyro_structvi.posterior.predicting import predict
from pyro_structvi.posterior.prediction import Prediction
from pyro_structvi.posterior.runs import evaluation_mode
from pyro_structvi.sites.structured import StructuredGuide

NUM_DRAWS = 20  # of the guide, the same ones' noise at each validation
SEED = 0
LEAST_STEPS = 100  # between two validations, unless told otherwise

Metric = Annotated[Callable[[Prediction, Tensor], Any], NO_CLASS]
ValidationData = Annotated[
    tuple[Any, ...],
    Rule("a tuple `(x, y)` of inputs and observations", lambda value: len(value) == 2),
]


def mean_log_density(prediction: Prediction, y: Tensor) -> float:
    """Return the log predictive density of an example, in nats, on average over the examples."""
    assert prediction.log_density is not None
    return float(prediction.log_density.mean())


class Validation:
    """Measures a guide on data of its own between steps, and keeps the best parameters.

    What it draws is separate from the randomness of the training, and the same at each time, so that
    differences come from the parameters.

    Args:
        loss: The loss, with model and guide.
        data: Inputs and observations, ``(x, y)``; a tuple for several inputs.
        metric: A function of a prediction and ``y``, higher is better; the mean log predictive density
            of an example when None.
        every: How many steps apart; when None once an epoch, and every 100 steps at most.
        patience: How many values that are no better end the training; it is never ended when None.
        batch_size: How many inputs are run at once.
        device: The guide's device, on which the data are kept.

    Raises:
        TypeError: If the data are no tensors.
        ValueError: If lengths differ, or the data hold NaN.
    """

    def __init__(
        self,
        loss: Loss,
        data: tuple[Any, Tensor],
        metric: Metric | None,
        every: int | None,
        patience: int | None,
        batch_size: int | None,
        device: torch.device | None,
    ) -> None:
        x, y = data
        check_tensors("validation[0]", x)
        check("validation[1]", y, Tensor)
        inputs = x if isinstance(x, tuple) else (x,)
        for value in (*inputs, y):
            check_no_nan("validation", value)
        lengths = [len(value) if value.dim() else 0 for value in (*inputs, y)]
        if len(set(lengths)) != 1:
            raise ValueError(
                f"The tensors of `validation` must have one length, but got {lengths}."
            )
        moved = tuple(value.to(device) for value in inputs)
        self._x, self._y = moved if isinstance(x, tuple) else moved[0], y.to(device)
        self._loss, self._device, self._batch_size = loss, device, batch_size
        self._metric = metric or mean_log_density
        self._every, self._patience = every, patience
        self._best: float | None = None
        self._waited = 0
        self._best_state: Mapping[str, Any] | None = None

    @property
    def is_over(self) -> bool:
        """Whether there was no better value for as long as the patience lasts."""
        return self._patience is not None and self._waited >= self._patience

    def is_due(self, history: History, total: int, num_batches: int) -> bool:
        """Whether to measure now: at the beginning, so often, and at the end."""
        done = len(history.elbo)
        every = self._every or max(num_batches, LEAST_STEPS)
        return (done % every == 0 or done == total) and done not in history.validation_steps[-1:]

    def add_to(self, history: History) -> None:
        """Measure, write the value down, and keep the parameters if it is the best; alike on all ranks.

        While the weight of the KL rises, no value counts for the best one or the patience: the objective
        is another one there.

        Raises:
            TypeError: If the metric is no number.
            ValueError: If it is NaN.
        """
        value = by_first_rank(self._measure)
        history.validation.append(value)
        history.validation_steps.append(len(history.elbo))
        weight = self._loss.elbo.kl_weight
        if isinstance(weight, LinearAnnealing) and len(history.elbo) < weight.num_steps:
            return
        if self._best is None or value > self._best:
            self._best, self._waited = value, 0
            if self._patience is not None:
                self._best_state = parts_state(self._loss, cloned)
        else:
            self._waited += 1

    def restore_best(self) -> None:
        """Put guide and model back to where the best value was measured, where there is patience."""
        if self._patience is not None and self._best_state is not None:
            load_parts(self._loss, self._best_state)

    @property
    def settings(self) -> dict[str, Any]:
        """What has to be the same in a run that goes on, by its name in the error."""
        name = getattr(self._metric, "__qualname__", type(self._metric).__name__)
        return {"the number of examples in `validation`": len(self._y), "`metric`": name}

    def state(self) -> dict[str, Any]:
        """Return what a run needs to go on."""
        best = plain("model", self._best_state)
        return {
            "value": self._best,
            "waited": self._waited,
            "settings": self.settings,
            "best": best,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state` returned, if parameters were kept there."""
        if state["best"] is not None:
            self._best, self._waited = state["value"], state["waited"]
            self._best_state = state["best"]

    def _measure(self) -> float:
        model, guide = self._loss.parts
        members = guide.ensemble if isinstance(guide, StructuredGuide) else None
        draws = NUM_DRAWS if members is None else members.size
        with unchanged_randomness(self._device), evaluation_mode(guide):
            _seed(self._device)
            with naming("validation", (self._x, self._y)):
                prediction = predict(
                    model,
                    guide,
                    self._x,
                    num_samples=draws,
                    y=self._y,
                    batch_size=self._batch_size,
                    stream=True,
                )
            value = self._metric(prediction, self._y)
        return _number(value)


def _seed(device: torch.device | None) -> None:
    """Seed the generators of the host and of the device."""
    torch.default_generator.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002
    if device is not None and device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(SEED)


def _number(value: Any) -> float:
    is_one = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
    if not (is_one or isinstance(value, Real)):
        raise TypeError(
            f"`metric(prediction, y)` must return a number, higher for better, but returned "
            f"{brief(value)}."
        )
    number = float(value)
    if math.isnan(number):
        raise ValueError("`metric(prediction, y)` must return a number, but returned NaN.")
    return number
