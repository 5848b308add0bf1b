"""Predictions: every draw of the posterior is one consistent function of the inputs."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical, Independent, OneHotCategorical
from tqdm.auto import tqdm

from pyro_structvi._checks import Count, Program, check_tensors, checked
from pyro_structvi._pyro import ONE_THREAD
from pyro_structvi.distributions.own_tensors import in_single
from pyro_structvi.posterior.draws import (
    Posterior,
    as_arguments,
    check_posterior,
    count_draws,
    evaluation_mode,
    find_observation,
    iterate_draws,
    left_to_the_model,
    observed_log_prob,
    run_at_draw,
)


@dataclass(frozen=True)
class Prediction:
    """What a posterior predicts at N inputs.

    Attributes:
        mean: Predictive mean of the observation, ``(N, *event)``; for classes their probabilities
            ``(N, classes)``.
        variance: Predictive variance of the observation, noise included, of the same shape.
        function_variance: Variance over draws of the conditional mean: what more data would remove.
        entropy: Entropy of the predictive class probabilities, ``(N,)``, in nats; None for others.
        mutual_information: Entropy minus the average entropy of a draw, ``(N,)``, in nats: the part
            of the uncertainty about the class that comes from the weights. None for others.
        log_density: Log of the predictive density of ``y``, ``(N,)``, in nats; None without ``y``.
        functions: The model's return value for each draw, ``(num_samples, N, ...)``; None if
            streamed.
        num_samples: How many draws were averaged.
    """

    mean: Tensor
    variance: Tensor
    function_variance: Tensor
    entropy: Tensor | None
    mutual_information: Tensor | None
    log_density: Tensor | None
    functions: Tensor | None
    num_samples: int


@checked
def predict(
    model: Program,
    posterior: Posterior,
    x: Any,
    num_samples: Count | None = None,
    *,
    y: Tensor | None = None,
    batch_size: Count | None = None,
    stream: bool = False,
    site: str | None = None,
    progress: bool = False,
) -> Prediction:
    """Predict with draws of a posterior.

    Each draw fixes all global sites, so that the model is one function over all inputs and all
    mini-batches. Latents of single examples (in a plate with observations) take the posterior's values
    where the plate has the size that it was fitted to, and are drawn from the model elsewhere; a
    :class:`LocalLatentWarning` says which. The model runs in evaluation mode and without gradients.

    Args:
        model: A model that samples its observations when called with inputs only.
        posterior: A guide, or draws by site ``(draws, *shape)``, such as those of
            ``reference.nuts``.
        x: Inputs, first dimension the N examples; a tuple for a model of several inputs.
        num_samples: Number of draws; None for all that are given, or 100 of a guide.
        y: Observations at which to evaluate the predictive density.
        batch_size: How many inputs to run at once; None for all.
        stream: Whether to drop each draw's function values once they were averaged; memory then
            does not grow with the number of draws.
        site: The observed site's name, where it cannot be told from the model.
        progress: Whether to show a progress bar.

    Returns:
        Moments, entropies and densities, computed online and in single precision at least (a net in
        half precision, or autocast, too), and the function values unless streamed.

    Raises:
        TypeError: If ``posterior`` is neither a guide nor draws.
        ValueError: If a number is not positive, lengths differ, the observed site is ambiguous, or
            ``posterior`` does not have exactly the model's global sites.

    Example:
        >>> from pyro_structvi import Classifier, MeanFieldGuide, bayesianize
        >>> model = Classifier(bayesianize(torch.nn.Linear(4, 3), prior=1.0), num_data=10)
        >>> prediction = predict(model, MeanFieldGuide(model), torch.zeros(5, 4), num_samples=20)
        >>> prediction.mean.shape, prediction.functions.shape
        (torch.Size([5, 3]), torch.Size([20, 5, 3]))
    """
    check_posterior(model, posterior)
    args = as_arguments(x)
    batches = _split(args, y, batch_size)
    total = count_draws(posterior, num_samples)
    accumulator = _Accumulator()
    functions = []
    with ONE_THREAD, evaluation_mode(model):
        new = left_to_the_model(model, posterior, batches[0][0], site, len(batches) == 1)
        draws = iterate_draws(posterior, total, batches[0][0])
        for values in tqdm(draws, total=total, desc="predict", disable=not progress):
            outputs = [
                _run(model, values, new, arguments, target, site) for arguments, target in batches
            ]
            joined = _Conditional.join(outputs)
            accumulator.add(joined)
            if not stream:
                functions.append(joined.function)
    return accumulator.result(torch.stack(functions) if functions else None)


def _split(
    args: tuple[Any, ...], y: Tensor | None, batch_size: int | None
) -> list[tuple[tuple[Any, ...], Tensor | None]]:
    """Cut the arguments into mini-batches along the first dimension."""
    if y is not None:
        check_tensors("y", y)
    size = len(args[0])
    lengths = [len(value) for value in (*args, *(() if y is None else (y,)))]
    if size == 0 or set(lengths) != {size}:
        raise ValueError(f"`x` and `y` must have one length, but got {lengths}.")
    step = size if batch_size is None else batch_size
    return [
        (
            tuple(value[start : start + step] for value in args),
            None if y is None else y[start : start + step],
        )
        for start in range(0, size, step)
    ]


@dataclass
class _Conditional:
    """What the model says of the observations, given one draw of its global sites."""

    function: Tensor
    mean: Tensor
    variance: Tensor
    entropy: Tensor | None
    log_density: Tensor | None

    @staticmethod
    def join(parts: "list[_Conditional]") -> "_Conditional":
        """Put the mini-batches back together."""
        joined = {
            name: None if value is None else torch.cat([getattr(part, name) for part in parts])
            for name, value in vars(parts[0]).items()
        }
        return _Conditional(**joined)  # type: ignore[arg-type]


def _run(
    model: Callable[..., Any],
    values: dict[str, Tensor],
    new: set[str],
    args: tuple[Any, ...],
    y: Tensor | None,
    site: str | None,
) -> _Conditional:
    trace = run_at_draw(model, values, args, new)
    likelihood = in_single(trace.nodes[find_observation(trace, values, site)]["fn"])
    mean, variance, is_categorical = _moments(likelihood)
    returned = trace.nodes["_RETURN"]["value"]
    per_example = isinstance(returned, Tensor) and returned.shape[:1] == mean.shape[:1]
    return _Conditional(
        function=returned if per_example else mean,
        mean=mean,
        variance=variance,
        entropy=_entropy(mean) if is_categorical else None,
        log_density=None if y is None else observed_log_prob(likelihood, y),
    )


def _moments(likelihood: Any) -> tuple[Tensor, Tensor, bool]:
    base = likelihood
    while isinstance(base, Independent):
        base = base.base_dist
    if isinstance(base, (Categorical, OneHotCategorical)):
        probs = base.probs / base.probs.sum(
            -1, keepdim=True
        )  # as after a softmax in half precision
        return probs, probs * (1 - probs), base is likelihood
    return likelihood.mean, likelihood.variance, False


def _entropy(probabilities: Tensor) -> Tensor:
    entropies: Tensor = torch.special.entr(probabilities)
    return entropies.sum(-1)


class _Accumulator:
    """Averages over draws, one draw at a time (Welford's update for the variance)."""

    def __init__(self) -> None:
        self.count = 0
        self.averages: _Conditional | None = None
        self.squares: Tensor
        self.log_density_sum: Tensor | None = None

    def add(self, new: _Conditional) -> None:
        self.count += 1
        if self.averages is None:
            self.averages = new
            self.squares = torch.zeros_like(new.mean)
            self.log_density_sum = new.log_density
            return
        old = self.averages
        change = new.mean - old.mean
        old.mean = old.mean + change / self.count
        self.squares += change * (new.mean - old.mean)
        old.variance = old.variance + (new.variance - old.variance) / self.count
        if old.entropy is not None and new.entropy is not None:
            old.entropy = old.entropy + (new.entropy - old.entropy) / self.count
        if self.log_density_sum is not None and new.log_density is not None:
            self.log_density_sum = torch.logaddexp(self.log_density_sum, new.log_density)

    def result(self, functions: Tensor | None) -> Prediction:
        averages = self.averages
        assert averages is not None
        function_variance = self.squares / self.count
        entropy = information = None
        if averages.entropy is not None:
            entropy = _entropy(averages.mean)
            information = (entropy - averages.entropy).clamp_min(0)
        log_density = self.log_density_sum
        if log_density is not None:
            log_density = log_density - math.log(self.count)
        return Prediction(
            mean=averages.mean,
            variance=averages.variance + function_variance,
            function_variance=function_variance,
            entropy=entropy,
            mutual_information=information,
            log_density=log_density,
            functions=functions,
            num_samples=self.count,
        )
