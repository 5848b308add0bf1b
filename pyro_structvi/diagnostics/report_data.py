"""What a report is made from: a model, its fitted guide, and data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro.poutine as poutine
import torch
from torch import Tensor

from pyro_structvi._checks import brief, check_finite, check_no_nan, check_tensors
from pyro_structvi._nested import map_nested, nested_tensors
from pyro_structvi.posterior.draws import as_arguments
from pyro_structvi.posterior.predicting import predict
from pyro_structvi.posterior.prediction import Prediction
from pyro_structvi.sites.structured import StructuredGuide


@dataclass(frozen=True)
class Data:
    """Inputs and observations.

    Attributes:
        name: The argument that they were given as.
        args: The model's inputs, as a tuple.
        y: The observations, ``(N, ...)``.
    """

    name: str
    args: tuple[Any, ...]
    y: Tensor

    @classmethod
    def checked(cls, name: str, data: Any) -> "Data":
        """Return inputs and observations, or raise an error that names the argument."""
        if not isinstance(data, tuple) or len(data) != 2 or not isinstance(data[1], Tensor):
            raise TypeError(
                f"`{name}` must be a tuple (x, y) of inputs and a tensor of observations, but got "
                f"{brief(data)}. Put several inputs into one tuple, ((x1, x2), y)."
            )
        x, y = data
        check_tensors(f"{name}[0]", x)
        check_tensors(f"{name}[1]", y)
        for tensor in nested_tensors(x):
            check_no_nan(f"{name}[0]", tensor)
        if y.is_floating_point() and not y.is_meta:
            check_finite(f"{name}[1]", y)
        args = as_arguments(x)
        lengths = {len(each) for each in args if isinstance(each, Tensor)}
        if lengths - {len(y)}:
            raise ValueError(
                f"`{name}` must have as many inputs as observations, but got {sorted(lengths)} and "
                f"{len(y)}."
            )
        return cls(name, args, y)

    def some(self, count: int | None) -> tuple[Any, ...]:
        """Return the model's arguments at so many random examples; at all of them when None."""
        if count is None or count >= len(self.y):
            return (*self.args, self.y)
        chosen = torch.randperm(len(self.y))[:count]
        some: tuple[Any, ...] = map_nested(
            lambda each: each[chosen.to(each.device)], (*self.args, self.y)
        )
        return some

    def plane(self, dim: int, count: int) -> tuple[Tensor, Tensor] | None:
        """Return some examples' inputs ``(n, dim)`` and observations; None for inputs of other kinds."""
        x = self.args[0]
        fits = len(self.args) == 1 and isinstance(x, Tensor) and x.is_floating_point()
        if not fits or x.dim() > 2 or x.numel() != dim * len(self.y):
            return None
        chosen = torch.randperm(len(self.y))[:count]
        return x.reshape(-1, dim).cpu()[chosen], self.y.cpu()[chosen]


@dataclass(frozen=True)
class Fitted:
    """A fitted guide.

    Attributes:
        model: The model.
        guide: The guide.
        train: What it was fitted to.
        test: New data, or None.
        num_samples: Draws for a prediction, as for ``predict``.
        batch_size: Examples that run at once; None for all.
    """

    model: Callable[..., Any]
    guide: StructuredGuide
    train: Data
    test: Data | None
    num_samples: int | None
    batch_size: int | None

    @property
    def names(self) -> tuple[str, str]:
        """The names of the guide's class, and of the model's class or function."""
        model = poutine.unwrap(self.model)
        return type(self.guide).__name__, getattr(model, "__name__", type(model).__name__)

    def predict(self, args: tuple[Any, ...], y: Tensor | None = None) -> Prediction:
        """Return the prediction at inputs."""
        return predict(
            self.model,
            self.guide,
            args,
            num_samples=self.num_samples,
            y=y,
            batch_size=self.batch_size,
        )
