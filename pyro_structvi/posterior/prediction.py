"""The predictive distribution: a mixture of the likelihoods at the draws of a posterior."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import getattr_static
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, OneHotCategorical
from torch.distributions.utils import lazy_property

from pyro_structvi._checks import Count, checked, shape_text
from pyro_structvi.linalg.quadrature import bisect
from pyro_structvi.weights.torch_distributions import base_of, map_tensors, tensors_of

_DRAWS = 2000  # of observations, for quantiles where torch knows no distribution function


class StackedLikelihood:
    """Takes the likelihoods of single draws apart, and puts those of all draws together.

    Args:
        template: The likelihood at one draw, whose first batch dimension is the examples'.
    """

    def __init__(self, template: Any) -> None:
        self.template = template = _as_given(template)
        batch = template.batch_shape
        found = {id(tensor): (path, tensor) for path, tensor in _paths(template)}
        fits = all(tensor.shape[: len(batch)] == batch for _, tensor in found.values())
        is_known = bool(tensors_of(template)) and bool(batch) and fits
        self.paths = {path: key for key, (path, _) in found.items()} if is_known else {}

    def take_apart(self, likelihood: Any) -> dict[str, Tensor]:
        """Return the tensors of a draw's likelihood by names; none if draws of it cannot be stacked."""
        return {f"likelihood.{path}": attrgetter(path)(likelihood) for path in self.paths}

    def put_together(self, tensors: dict[str, Tensor]) -> Any:
        """Return the likelihoods of several draws as one distribution; None if they cannot be stacked.

        Args:
            tensors: What :meth:`take_apart` returns, stacked ``(draws, N, ...)``.
        """
        if not self.paths:
            return None
        new = {key: tensors[f"likelihood.{path}"] for path, key in self.paths.items()}
        stacked = map_tensors(self.template, lambda old: new.get(id(old), old))
        shared = {id(part) for part in _parts(self.template)}
        shape = next(iter(tensors.values())).shape[:2]
        for part in _parts(stacked):
            if id(part) not in shared:
                part._batch_shape = shape + part.batch_shape[1:]
        return stacked


def _as_given(distribution: Any) -> Any:
    """Return a copy without what the distribution has formed of its tensors, such as probabilities."""
    new = copy.copy(distribution)
    kind, members = type(distribution), vars(distribution)
    formed = {
        name for name in members if isinstance(getattr_static(kind, name, None), lazy_property)
    }
    given = {id(value) for name, value in members.items() if name not in formed}
    for name, value in members.items():
        if name in formed and id(value) not in given:
            vars(new).pop(name)
        elif isinstance(value, Distribution):
            vars(new)[name] = _as_given(value)
    return new


def _paths(distribution: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for name, value in vars(distribution).items():
        if isinstance(value, Tensor):
            yield prefix + name, value
        elif isinstance(value, Distribution):
            yield from _paths(value, f"{prefix}{name}.")


def _parts(distribution: Any) -> Iterator[Any]:
    yield distribution
    for value in vars(distribution).values():
        if isinstance(value, Distribution):
            yield from _parts(value)


def mixture_quantile(likelihood: Any, q: Tensor) -> Tensor:
    """Return quantiles of the mixture of a stacked likelihood, for each element of an observation.

    By bisection of the mixture's distribution function, which starts between the least and the largest
    quantile of a part; from draws where the parts have no distribution function, by the order statistics
    whose interval of level l holds one more draw with probability l.

    Args:
        likelihood: Likelihoods ``(draws, N, ...)``.
        q: Levels between 0 and 1, ``(Q,)``.

    Returns:
        The quantiles ``(Q, N, *event)``.
    """
    base = base_of(likelihood)
    levels = q.to(base.mean).reshape(-1, *[1] * (len(base.batch_shape) + len(base.event_shape)))
    try:
        parts = base.icdf(levels)
    except NotImplementedError:
        count = -(-_DRAWS // base.batch_shape[0])
        drawn = likelihood.sample((count,)).flatten(0, 1)
        return _order_statistics(drawn, q)

    def is_below(values: Tensor) -> Tensor:
        found: Tensor = base.cdf(values.unsqueeze(1)).mean(1) < levels.squeeze(1)
        return found

    return bisect(is_below, parts.amin(1), parts.amax(1))


def _order_statistics(draws: Tensor, q: Tensor) -> Tensor:
    """Return the draws ``(S, ...)`` at the positions q (S + 1), the nearest ones outwards."""
    ordered, size = draws.sort(0).values, len(draws)
    positions = q * (size + 1)
    ranks = torch.where(q < 0.5, positions.floor(), positions.ceil()).long() - 1
    return ordered[ranks.clamp(0, size - 1).to(ordered.device)]


def class_probabilities(base: Any) -> Tensor | None:
    """Return the probabilities of classes, or None for observations of another kind."""
    if not isinstance(base, (Categorical, OneHotCategorical)):
        return None
    has_logits = isinstance(base, Categorical) and "probs" not in vars(base)
    probs: Tensor = base.logits.exp() if has_logits else base.probs  # a softmax takes longer
    return probs / probs.sum(-1, keepdim=True)  # which is not 1 after a softmax in half precision


def observation_moments(base: Any) -> tuple[Tensor, Tensor]:
    """Return mean and variance of a likelihood; of classes, those of their indicators."""
    probs = class_probabilities(base)
    return (base.mean, base.variance) if probs is None else (probs, probs * (1 - probs))


def entropy_of(base: Any, likelihood: Any) -> Callable[[Tensor], Tensor] | None:
    """Return the entropy as a function of probabilities, for one class of each example or for labels."""
    if isinstance(base, (Categorical, OneHotCategorical)) and base is likelihood:
        return lambda probabilities: torch.special.entr(probabilities).sum(-1)
    if isinstance(base, Bernoulli):
        return lambda p: torch.special.entr(p) + torch.special.entr(1 - p)
    return None


def own_entropy(base: Any, likelihood: Any, probabilities: Tensor) -> Tensor | None:
    """Return the entropy at the probabilities of a likelihood, by its logits where it has them."""
    if isinstance(base, Categorical) and base is likelihood and "probs" not in vars(base):
        logits = base.logits.clamp_min(torch.finfo(base.logits.dtype).min)
        return -(probabilities * logits).sum(-1)
    entropy = entropy_of(base, likelihood)
    return None if entropy is None else entropy(probabilities)


@dataclass(frozen=True, repr=False)
class Prediction:
    """What a posterior predicts at N inputs.

    The predictive distribution is the mixture of the likelihoods at the draws of the weights;
    intervals, quantiles and draws of observations are those of this mixture, noise included.

    Attributes:
        mean: Predictive mean of the observation, ``(N, *event)``; for classes their probabilities
            ``(N, classes)``.
        variance: Predictive variance of the observation, noise included, of the same shape.
        function_variance: Variance over draws of the conditional mean: what more data would remove.
        entropy: Entropy of the predictive class probabilities, ``(N,)``, in nats, or of each binary
            label, ``(N, *event)``; None for others.
        mutual_information: Entropy minus the average entropy of a draw, of the same shape, in nats: the
            part of the uncertainty about the class that comes from the weights. None for others.
        log_density: Log of the predictive density of ``y``, ``(N,)``, in nats; None without ``y``.
        functions: What the model returns at each draw, ``(num_samples, N, ...)``; for a model that
            returns several tensors, a tuple or dict of them as it returns them; for one that returns
            nothing, the conditional mean. None if streamed.
        likelihood: The distribution of the observations at each draw, of batch shape
            ``(num_samples, N)``, of at most 100 if streamed; None for streamed classes, or where it does
            not consist of tensors with an entry for each example.
        num_samples: How many draws were averaged.
    """

    mean: Tensor
    variance: Tensor
    function_variance: Tensor
    entropy: Tensor | None
    mutual_information: Tensor | None
    log_density: Tensor | None
    functions: Any
    likelihood: Any
    num_samples: int

    def __repr__(self) -> str:
        """Return the shapes of the tensors."""
        given = [(name, each) for name, each in vars(self).items() if isinstance(each, Tensor)]
        shapes = ", ".join(f"{name}: {shape_text(each.shape)}" for name, each in given)
        return f"Prediction({shapes}; {self.num_samples} draws)"

    @checked
    def sample_observations(self, num_samples: Count = 1) -> Tensor:
        """Draw observations, noise included.

        Args:
            num_samples: How many for each draw of the weights.

        Returns:
            Draws ``(num_samples * S, N, *event)`` for S draws of the weights.

        Raises:
            ValueError: If classes were streamed.

        Example:
            >>> from pyro_structvi import MeanFieldGuide, Regressor, bayesianize, predict
            >>> model = Regressor(bayesianize(torch.nn.Linear(1, 1), prior=1.0), 8, 0.1)
            >>> prediction = predict(model, MeanFieldGuide(model), torch.zeros(5, 1), num_samples=20)
            >>> prediction.sample_observations(3).shape
            torch.Size([60, 5, 1])
        """
        drawn: Tensor = self._likelihood("draws").sample((num_samples,))
        return drawn.flatten(0, 1)

    @checked
    def quantile(self, q: float | Tensor) -> Tensor:
        """Return quantiles of the predictive distribution, for each element of an observation.

        They are exact for the mixture of draws where torch has the likelihood's distribution function
        and its inverse, as for normal noise; of 2,000 draws of observations elsewhere, as for Student's
        t-distribution and counts.

        Args:
            q: A level strictly between 0 and 1, or several, ``(Q,)``.

        Returns:
            The quantiles ``(N, *event)``, or ``(Q, N, *event)``.

        Raises:
            ValueError: If a level is not between 0 and 1, or the observations are classes.

        Example:
            >>> from pyro_structvi import MeanFieldGuide, Regressor, bayesianize, predict
            >>> model = Regressor(bayesianize(torch.nn.Linear(1, 1), prior=1.0), 8, 0.1)
            >>> prediction = predict(model, MeanFieldGuide(model), torch.zeros(5, 1), num_samples=20)
            >>> prediction.quantile(0.5).shape
            torch.Size([5, 1])
        """
        levels = torch.as_tensor(q)
        if levels.dim() > 1 or not levels.is_floating_point() or not levels.numel():
            raise ValueError(
                f"`q` must be a number, or numbers (Q,), between 0 and 1, but got {levels.dtype} of "
                f"shape {tuple(levels.shape)}."
            )
        if not bool(((levels > 0) & (levels < 1)).all()):
            raise ValueError("`q` must be strictly between 0 and 1 everywhere.")
        likelihood = self._likelihood("quantiles")
        if isinstance(base_of(likelihood), (Categorical, OneHotCategorical)):
            raise ValueError(
                "Classes have no order, and so no quantiles. Take `prediction.mean`, their "
                "probabilities."
            )
        found = mixture_quantile(likelihood, levels.reshape(-1))
        return found if levels.dim() else found.squeeze(0)

    @checked
    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the central interval in which an observation lies with a probability.

        Args:
            level: The probability, strictly between 0 and 1.

        Returns:
            Lower and upper ends, each ``(N, *event)``: the quantiles at ``(1 - level) / 2`` and
            ``(1 + level) / 2``.

        Raises:
            ValueError: If the level is not between 0 and 1, or the observations are classes.

        Example:
            >>> from pyro_structvi import MeanFieldGuide, Regressor, bayesianize, predict
            >>> model = Regressor(bayesianize(torch.nn.Linear(1, 1), prior=1.0), 8, 0.1)
            >>> prediction = predict(model, MeanFieldGuide(model), torch.zeros(5, 1), num_samples=20)
            >>> lower, upper = prediction.interval(0.9)
            >>> bool((lower < upper).all())
            True
        """
        if not 0 < level < 1:
            raise ValueError(f"`level` must be strictly between 0 and 1, but got {level}.")
        lower, upper = self.quantile(torch.tensor([(1 - level) / 2, (1 + level) / 2]))
        return lower, upper

    def _likelihood(self, what: str) -> Any:
        if self.likelihood is None:
            raise ValueError(
                f"The prediction does not hold the likelihood at each draw, of which {what} are taken. "
                "Call `predict` with `stream=False`; a likelihood must consist of tensors with an entry "
                "for each example."
            )
        return self.likelihood
