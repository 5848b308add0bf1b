"""Predictions with draws of a posterior: mixtures of the likelihoods at the draws."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pyro.distributions import OrderedLogistic
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, OneHotCategorical
from tqdm.auto import tqdm

from pyro_structvi._checks import Count, Positive, Program, Rule, checked, shape_text
from pyro_structvi._nested import nested_tensors
from pyro_structvi._pyro import ONE_THREAD
from pyro_structvi._torch import put_together, take_apart
from pyro_structvi.posterior.passes import (
    Passes,
    Posterior,
    batches_of,
    check_posterior,
    count_draws,
)
from pyro_structvi.posterior.quantiles import mixture_quantile
from pyro_structvi.posterior.runs import evaluation_mode, observed_elements, observed_log_prob
from pyro_structvi.weights.torch_distributions import (
    base_of,
    in_single,
    map_tensors,
    moments_of,
    tensors_of,
)

Level = Annotated[float, Rule("strictly between 0 and 1", lambda value: 0 < value < 1)]

MOST_STREAMED = 100  # draws whose likelihoods a streamed prediction keeps
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2  # its multiples are spread evenly modulo 1


@dataclass(frozen=True, repr=False)
class Prediction:
    """The predictive distribution at N inputs: the mixture of the likelihoods at the draws.

    Attributes:
        mean: Predictive mean of the observation, ``(N, *event)``; for classes their probabilities
            ``(N, classes)``.
        variance: Predictive variance of the observation including noise, of the same shape.
            Meaningless for ``VonMises``, whose moments in torch are circular.
        function_variance: Variance of the conditional mean over draws, which more data would reduce.
        entropy: Entropy of the predictive class probabilities, ``(N,)``, in nats, or of each token or
            binary label, ``(N, *event)``; None for other observations.
        mutual_information: Entropy minus the average entropy of a draw, in nats: the uncertainty about
            the class due to the weights. None for other observations.
        log_density: Log of the predictive density of ``y``, in nats, ``(N,)``; ``()`` for one density of
            all examples together, as under correlated noise. Zero for what the model masks. None without
            ``y``.
        functions: Return values of the model at each draw, ``(num_samples, N, ...)``, in a tuple or dict
            if the model returns one; the conditional means if it returns nothing. None if streamed.
        likelihood: The distribution of the observations at each draw, of batch shape
            ``(num_samples, N)``, at most 100 draws if streamed. None for streamed classes, or if it does
            not consist of tensors with an entry for each example.
        num_samples: Number of draws.
        observed: Which elements of ``y`` count, ``(N, *event)``, if the model masks others; None if all
            do, or without ``y``.

    Example:
        >>> from pyro_structvi import MeanFieldGuide, Regressor, bayesianize, predict
        >>> model = Regressor(bayesianize(torch.nn.Linear(1, 1), prior=1.0), 8, 0.1)
        >>> prediction = predict(model, MeanFieldGuide(model), torch.zeros(5, 1), num_samples=20)
        >>> prediction.sample_observations(3).shape, prediction.quantile(0.5).shape
        (torch.Size([60, 5, 1]), torch.Size([5, 1]))
        >>> lower, upper = prediction.interval(0.9)
        >>> bool((lower < upper).all())
        True
    """

    mean: Tensor
    variance: Tensor
    function_variance: Tensor
    entropy: Tensor | None = None
    mutual_information: Tensor | None = None
    log_density: Tensor | None = None
    functions: Any = None
    likelihood: Any = None
    num_samples: int = 0
    observed: Tensor | None = None

    def __repr__(self) -> str:
        given = [(name, each) for name, each in vars(self).items() if isinstance(each, Tensor)]
        shapes = ", ".join(f"{name}: {shape_text(each.shape)}" for name, each in given)
        return f"Prediction({shapes}; {self.num_samples} draws)"

    @checked
    def sample_observations(self, num_samples: Count = 1) -> Tensor:
        """Sample observations ``(num_samples * S, N, *event)``, including noise, for S draws of weights.

        Raises:
            ValueError: If classes were streamed.
        """
        drawn: Tensor = self._likelihood("draws").sample((num_samples,))
        return drawn.flatten(0, 1)

    @checked
    def quantile(self, q: float | Tensor) -> Tensor:
        """Return quantiles of each element of an observation.

        They are quantiles of the mixture if torch has the likelihood's distribution function and its
        inverse, as for normal noise, and for Student's t-distribution with one number of degrees of
        freedom, at most 200; else of 2,000 sampled observations, as for counts.

        Args:
            q: A level strictly between 0 and 1, or several, ``(Q,)``, for ``(Q, N, *event)``.

        Raises:
            ValueError: If a level is not between 0 and 1, or the observations are classes.
        """
        levels = torch.as_tensor(q, dtype=q.dtype if isinstance(q, Tensor) else torch.float64)
        has_levels = levels.dim() <= 1 and levels.is_floating_point() and levels.numel() > 0
        if not has_levels or not bool(((levels > 0) & (levels < 1)).all()):
            raise ValueError(
                "`q` must be a number, or numbers (Q,), strictly between 0 and 1 everywhere, but got "
                f"{levels.dtype} of shape {tuple(levels.shape)}."
            )
        likelihood = self._likelihood("quantiles")
        base = base_of(likelihood)
        is_ordered = isinstance(base, OrderedLogistic)
        if isinstance(base, (Categorical, OneHotCategorical)) and not is_ordered:
            raise ValueError(
                "Classes have no order, and so no quantiles. Take `prediction.mean`, their "
                "probabilities."
            )
        found = mixture_quantile(likelihood, levels.reshape(-1))
        return found if levels.dim() else found.squeeze(0)

    @checked
    def interval(self, level: Level = 0.95) -> tuple[Tensor, Tensor]:
        """Return the central interval that contains an observation with probability ``level``.

        Its ends, each ``(N, *event)``, are the quantiles at ``(1 - level) / 2`` and ``(1 + level) / 2``.

        Raises:
            ValueError: As :meth:`quantile`.
        """
        ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
        lower, upper = self.quantile(ends)
        return lower, upper

    def _likelihood(self, wanted: str) -> Any:
        if self.likelihood is None:
            raise ValueError(
                f"The prediction has no likelihood at each draw, so it has no {wanted}. "
                "Call `predict` with `stream=False`; a likelihood must consist of tensors with an entry "
                "for each example."
            )
        return self.likelihood


def observed_densities(prediction: Prediction) -> Tensor:
    """Return the log predictive densities of the examples that are observed, at least in part."""
    density, observed = prediction.log_density, prediction.observed
    assert density is not None
    return density if observed is None else density[observed.reshape(*density.shape, -1).any(-1)]


def observed_targets(prediction: Prediction, y: Tensor) -> Tensor:
    """Return which elements of targets the model does not mask, in their shape; an error if none."""
    seen = torch.ones_like(y, dtype=torch.bool)
    if prediction.observed is not None:
        seen &= prediction.observed
    if not bool(seen.any()):
        raise ValueError(
            "`prediction` must have an observed target, but the model masks all of them. Predict where "
            "it does not."
        )
    return seen


@checked
def predict(
    model: Program,
    posterior: Posterior,
    *inputs: Any,
    num_samples: Count | None = None,
    y: Tensor | None = None,
    batch_size: Count | None = None,
    stream: bool = False,
    site: str | None = None,
    max_memory: Positive = 1 / 32,
    batch_statistics: Any = None,
    progress: bool = False,
    differentiable: bool = False,
) -> Prediction:
    """Predict with draws of a posterior.

    A draw fixes all global sites, so the model is one function over all inputs and mini-batches. Local
    latent sites, in a plate with observations, take the posterior's values if the plate has its fitted
    size, and are sampled from the model otherwise; a :class:`LocalLatentWarning` names them. The model
    runs in evaluation mode, at several draws in one pass if :func:`torch.func.vmap` can vectorize it.

    Args:
        model: A model that samples its observations when called with inputs only.
        posterior: A guide, or draws by site ``(draws, *shape)``, such as the result of
            ``reference.nuts``.
        *inputs: The model's inputs, each a tensor or a mapping of tensors with the N examples first. Or
            one ``DataLoader`` or other iterable of mini-batches, inputs or tuples ``(*inputs, y)``, all
            kept in memory.
        num_samples: Number of draws; None for all given draws, each member of an ensemble of points, or
            100 draws of another guide, and of an ensemble with unequal weights.
        y: Observations for the predictive density.
        batch_size: Inputs in a mini-batch; None for all.
        stream: Whether to keep averages only, so that memory does not grow with the number of draws.
            Quantiles then use at most 100 draws, spread over all.
        site: The name of the observed site, if ambiguous.
        max_memory: Memory for weights and layer outputs of the draws in one pass, in GiB. Temporary
            tensors may double it. Larger values are often faster on a GPU.
        batch_statistics: Reference inputs, some hundred training inputs. Batch and instance
            normalization use their mean and variance at each draw in place of running statistics.
            Ensembles need it, and posteriors whose features differ much from draw to draw.
        progress: Whether to show a progress bar.
        differentiable: Whether to keep gradients with respect to inputs and parameters.

    Raises:
        TypeError: If ``posterior`` is neither a guide nor draws, or an input is a number.
        ValueError: If lengths differ, the observed site is ambiguous, the sites of ``posterior`` are not
            the model's global sites, a plate takes a random part of them, ``batch_statistics`` are
            given for a model without batch normalization, or mini-batches have observations or outputs
            without the examples first.
        NotImplementedError: For ``batch_statistics`` with a ``GlobalInducingGuide``.

    Example:
        >>> from pyro_structvi import Classifier, MeanFieldGuide, bayesianize
        >>> model = Classifier(bayesianize(torch.nn.Linear(4, 3), prior=1.0), num_data=10)
        >>> prediction = predict(model, MeanFieldGuide(model), torch.zeros(5, 4), num_samples=20)
        >>> prediction.mean.shape, prediction.functions.shape
        (torch.Size([5, 3]), torch.Size([20, 5, 3]))
    """
    check_posterior(model, posterior)
    batches = batches_of(inputs, y, batch_size, posterior)
    total = count_draws(posterior, num_samples)
    reader = _Reader(_streamed(total) if stream else range(total), not stream, len(batches))
    averages = [Averages() for _ in batches]
    bar = tqdm(total=total, desc="predict", disable=not progress)
    with ONE_THREAD, evaluation_mode(model, differentiable), bar:
        passes = Passes(model, posterior, batches, site, reader, max_memory, batch_statistics)
        for done in passes.run(total):
            if batch_size is not None or batches[1:]:
                _check_examples(done.outputs, batches[done.batch][0])
            reader.keep(done.outputs, averages[done.batch].count, done.batch)
            averages[done.batch].add(done.outputs)
            if done.batch == len(batches) - 1:
                bar.update(len(done.outputs["mean"]))
    moments = [own.result(reader.entropy) for own in averages]
    joined: dict[str, Any] = _join(moments)
    return Prediction(**joined | reader.draws(), num_samples=total)


def _join(moments: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join the moments of mini-batches along the examples."""
    if not moments[1:]:
        return moments[0]
    if "log_density" in moments[0] and not moments[0]["log_density"].dim():
        raise ValueError(
            "With several mini-batches, `y` must have a density for each example, but the model has one "
            "of all examples together, as under correlated noise. Predict all examples at once, or "
            "leave `y` out."
        )
    return {name: torch.cat([own[name] for own in moments]) for name in moments[0]}


def _check_examples(outputs: dict[str, Tensor], args: tuple[Any, ...]) -> None:
    """Raise unless the tensors of a mini-batch have the examples first, which are joined there."""
    size = next((len(value) for value in nested_tensors(args)), len(outputs["mean"][0]))
    shapes = [
        own[0].shape for name, own in outputs.items() if name == "mean" or "function." in name
    ]
    if wrong := [(*shape,) for shape in shapes if shape[:1] != (size,)]:
        raise ValueError(
            "With mini-batches, observations of the model and the tensors that it returns must have the "
            f"examples as first dimension, {size} in a mini-batch, but have the shapes {wrong}. Leave "
            "`batch_size` out, put the plate of the examples to the left of other plates, or let the "
            "model return nothing else."
        )


def _streamed(total: int) -> list[int]:
    """Return the draws whose likelihoods are kept, one of each ``stride`` successive ones.

    Their places among these follow no pattern, since draws of a mixture take its members in turn.
    """
    stride = -(-total // MOST_STREAMED)
    return [
        start + int(min(stride, total - start) * (number * _GOLDEN_RATIO % 1))
        for number, start in enumerate(range(0, total, stride))
    ]


class _Reader:
    """Reads moments at each draw, and keeps the likelihoods of ``numbers`` and function values.

    Streamed predictions keep no function values.
    """

    def __init__(self, numbers: Sequence[int], keeps: bool, num_batches: int) -> None:
        self.numbers, self.keeps = numbers, keeps
        self._kept: list[dict[str, Tensor]] = [{} for _ in range(num_batches)]
        self.likelihood: _StackedLikelihood | None = None  # from the first draw, which runs alone
        self.structure: Any = None
        self.entropy: Callable[[Tensor], Tensor] | None = None

    def __call__(self, node: Any, returned: Any, y: Tensor | None) -> dict[str, Tensor]:
        likelihood = in_single(node["fn"])
        base = base_of(likelihood)
        probs = class_probabilities(base)
        try:
            mean, variance = moments_of(base) if probs is None else (probs, probs * (1 - probs))
        except NotImplementedError as error:
            raise NotImplementedError(
                f"A {type(base).__name__} has no mean and variance in torch, which a prediction has of "
                "the observations. Draw observations by `pyro.infer.Predictive`."
            ) from error
        leaves, structure = take_apart(mean if returned is None else returned)
        if self.keeps and not all(isinstance(leaf, Tensor) for leaf in leaves):
            kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves}))
            raise TypeError(
                "The model must return a tensor, tensors in a tuple or dict, or nothing, so that its "
                f"values can be stacked over draws, but returns {kinds}."
            )
        if self.likelihood is None:
            self.likelihood, self.structure = _StackedLikelihood(likelihood), structure
            self.entropy = entropy_of(base)
        found = {"mean": mean, "variance": variance}
        if self.keeps or self.entropy is None:  # classes have no quantiles
            found |= self.likelihood.take_apart(likelihood)
        if self.keeps:
            found |= {f"function.{number}": leaf for number, leaf in enumerate(leaves)}
        if self.entropy is not None:
            found["entropy"] = self.entropy(mean)
        if y is not None:
            found["log_density"] = observed_log_prob(node, y)
            if (observed := observed_elements(node, y)) is not None:
                found["observed"] = observed
        return found

    def keep(self, outputs: dict[str, Tensor], before: int, batch: int) -> None:
        """Copy the kept parts of a pass that follows ``before`` draws to their places.

        Small tensors that stay between large temporary ones would fragment the memory.
        """
        after = before + len(outputs["mean"])
        draws = slice(bisect_left(self.numbers, before), bisect_left(self.numbers, after))
        chosen = [number - before for number in self.numbers[draws]]
        kept = self._kept[batch]
        for name, value in outputs.items():
            if "." in name:
                if name not in kept:
                    kept[name] = value.new_empty((len(self.numbers), *value.shape[1:]))
                kept[name][draws] = value[chosen]

    def draws(self) -> dict[str, Any]:
        """Return stacked functions and likelihoods."""
        joined, *others = self._kept
        if self.likelihood is None or not joined:
            return {}
        if others:
            joined = {name: torch.cat([own[name] for own in self._kept], 1) for name in joined}
        functions = [value for name, value in joined.items() if name.startswith("function.")]
        return {
            "functions": put_together(functions, self.structure) if self.keeps else None,
            "likelihood": self.likelihood.put_together(joined),
        }


_AVERAGED = ("mean", "variance", "entropy")


class Averages:
    """Averages over draws, updated with several at a time as by Chan, Golub and LeVeque (1983)."""

    def __init__(self) -> None:
        self.count = 0
        self.averages: dict[str, Tensor] = {}
        self.squares: Tensor
        self.log_density: Tensor | None = None
        self.observed: Tensor | None = None

    def add(self, new: dict[str, Tensor]) -> None:
        """Add values ``(draws, *shape)``."""
        added, before = len(new["mean"]), self.count
        self.count += added
        averages = {name: new[name].mean(0) for name in _AVERAGED if name in new}
        squares = (new["mean"] - averages["mean"]).square().sum(0)
        density = new["log_density"].logsumexp(0) if "log_density" in new else None
        if not before:
            self.averages, self.squares, self.log_density = averages, squares, density
            self.observed = new["observed"][0] if "observed" in new else None
            return
        change = averages["mean"] - self.averages["mean"]
        # In place: of many classes, the memory of new tensors takes longer than the arithmetic.
        self.squares.add_(squares).addcmul_(change, change, value=before * added / self.count)
        for name, own in self.averages.items():  # a sum of parts, since a variance may be infinite
            own.mul_(before / self.count).add_(averages[name], alpha=added / self.count)
        if self.log_density is not None and density is not None:
            self.log_density = torch.logaddexp(self.log_density, density)

    def result(self, entropy_at: Callable[[Tensor], Tensor] | None) -> dict[str, Tensor]:
        """Return the moments of a mini-batch, given the entropy as a function of probabilities."""
        mean, function_variance = self.averages["mean"], self.squares / self.count
        found = {
            "mean": mean,
            "variance": self.averages["variance"] + function_variance,
            "function_variance": function_variance,
        }
        if entropy_at is not None:
            found["entropy"] = entropy = entropy_at(mean)
            found["mutual_information"] = (entropy - self.averages["entropy"]).clamp_min(0)
        if self.log_density is not None:
            found["log_density"] = self.log_density - math.log(self.count)
        if self.observed is not None:
            found["observed"] = self.observed
        return found


class _StackedLikelihood:
    """Stacks the likelihoods of single draws, by the places of their tensors."""

    def __init__(self, likelihood: Any) -> None:
        self.template = likelihood
        tensors, batch = tensors_of(likelihood), likelihood.batch_shape
        fits = bool(batch) and all(value.shape[: len(batch)] == batch for value in tensors)
        fits = fits and not _is_broadcast(likelihood)
        places = reversed([*enumerate(tensors)] if fits else [])
        self.places = {id(value): place for place, value in places}  # the first of each tensor

    def take_apart(self, likelihood: Any) -> dict[str, Tensor]:
        """Return the tensors of a likelihood; none if likelihoods cannot be stacked."""
        tensors = tensors_of(likelihood)
        return {f"likelihood.{place}": tensors[place] for place in self.places.values()}

    def put_together(self, tensors: dict[str, Tensor]) -> Any:
        """Return stacked likelihoods, given tensors ``(draws, N, ...)``; None if they cannot be."""
        if not self.places:
            return None
        new = {key: tensors[f"likelihood.{place}"] for key, place in self.places.items()}
        stacked = map_tensors(self.template, lambda old: new[id(old)])
        _set_batch_shape(stacked, next(iter(new.values())).shape[:2])
        return stacked


def _is_broadcast(distribution: Any) -> bool:
    """Whether torch broadcasts a tensor over the batch, as a covariance that all examples share."""
    prefix = "_unbroadcasted_"
    return any(
        _is_broadcast(value)
        if isinstance(value, Distribution)
        else isinstance(value, Tensor)
        and name.startswith(prefix)
        and value.shape != getattr(distribution, name.removeprefix(prefix)).shape
        for name, value in [*vars(distribution).items()]  # reading a property adds to them
    )


def _set_batch_shape(distribution: Any, shape: torch.Size) -> None:
    """Put a shape in place of the first batch dimension, in place and in all contained distributions."""
    if distribution.batch_shape:
        distribution._batch_shape = shape + distribution.batch_shape[1:]
    for value in vars(distribution).values():
        if isinstance(value, Distribution):
            _set_batch_shape(value, shape)


def class_probabilities(base: Any) -> Tensor | None:
    """Return the probabilities of classes, or None for other observations."""
    if not isinstance(base, (Categorical, OneHotCategorical)):
        return None
    has_logits = isinstance(base, Categorical) and "probs" not in vars(base)
    probs: Tensor = base.logits.exp() if has_logits else base.probs  # a softmax takes longer
    return probs / probs.sum(-1, keepdim=True)  # a softmax in half precision has another sum


def entropy_of(base: Any) -> Callable[[Tensor], Tensor] | None:
    """Return the entropy of each class or label as a function of probabilities; else None."""
    if isinstance(base, (Categorical, OneHotCategorical)):
        return lambda probabilities: torch.special.entr(probabilities).sum(-1)
    if isinstance(base, Bernoulli):
        return lambda p: torch.special.entr(p) + torch.special.entr(1 - p)
    return None
