"""Predictions: every draw of the posterior is one consistent function of the inputs."""

import math
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical, Independent, OneHotCategorical
from tqdm.auto import tqdm

from pyro_structvi._checks import Count, Positive, Program, check_tensors, checked
from pyro_structvi._nested import map_nested, nested_tensors
from pyro_structvi._pyro import ONE_THREAD
from pyro_structvi.distributions.own_tensors import in_single
from pyro_structvi.posterior.draws import Posterior, as_arguments, check_posterior, count_draws
from pyro_structvi.posterior.passes import Passes
from pyro_structvi.posterior.runs import evaluation_mode, observed_log_prob


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
    max_memory: Positive = 1 / 32,
    progress: bool = False,
) -> Prediction:
    """Predict with draws of a posterior.

    Each draw fixes all global sites, so that the model is one function over all inputs and all
    mini-batches. Latents of single examples (in a plate with observations) take the posterior's values
    where the plate has the size that it was fitted to, and are drawn from the model elsewhere; a
    :class:`LocalLatentWarning` says which. The model runs in evaluation mode and without gradients.
    One pass has many draws where :func:`torch.func.vmap` can map it; its Python code runs once for them.

    Args:
        model: A model that samples its observations when called with inputs only.
        posterior: A guide, or draws by site ``(draws, *shape)``, such as those of
            ``reference.nuts``.
        x: Inputs, first dimension the N examples; a tuple for a model of several inputs. An input is a
            tensor, or a mapping of tensors, such as a ``BatchEncoding``.
        num_samples: Number of draws; None for all that are given, or 100 of a guide.
        y: Observations at which to evaluate the predictive density.
        batch_size: How many inputs to run at once; None for all.
        stream: Whether to drop each draw's function values once they were averaged; memory then
            does not grow with the number of draws.
        site: The observed site's name, where it cannot be told from the model.
        max_memory: How much memory the weights and the layers' outputs may take, in GiB, of draws that
            run in one pass: by default 32 MiB. What torch needs beside, such as noise, may take as much
            again. More is often faster on a GPU. Draws run one by one where a single one takes more, or
            where torch cannot vectorize the model; only the time differs.
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
    averages = [_Averages() for _ in batches]
    functions: list[list[Tensor]] = [[] for _ in batches]
    with ONE_THREAD, evaluation_mode(model), _bar(total, progress) as bar:
        passes = Passes(model, posterior, batches, site, _read, max_memory)
        for done in passes.run(total):
            averages[done.batch].add(done.outputs)
            if not stream:
                functions[done.batch].append(done.outputs["function"])
            if done.batch == len(batches) - 1:
                bar.update(len(done.outputs["mean"]))
    joined = _join([own.result() for own in averages])
    if not stream:
        joined["functions"] = torch.cat([torch.cat(own) for own in functions], 1)
    return Prediction(**joined, num_samples=total)


def _bar(total: int, progress: bool) -> Any:
    return tqdm(total=total, desc="predict", disable=not progress)


def _split(
    args: tuple[Any, ...], y: Tensor | None, batch_size: int | None
) -> list[tuple[tuple[Any, ...], Tensor | None]]:
    """Cut the arguments into mini-batches along the first dimension."""
    if y is not None:
        check_tensors("y", y)
    # What a mapping holds may have another length, as the edges of a graph, if it is not cut.
    cut = args if batch_size is not None else [each for each in args if isinstance(each, Tensor)]
    lengths = [len(value) for value in nested_tensors((cut, y))]
    size = max(lengths, default=1)
    if set(lengths) - {size} or size == 0:
        raise ValueError(f"`x` and `y` must have one length, but got {lengths}.")
    if batch_size is None:
        return [map_nested(lambda tensor: tensor, (args, y))]
    parts = [slice(start, start + batch_size) for start in range(0, size, batch_size)]
    return [map_nested(itemgetter(part), (args, y)) for part in parts]


def _read(distribution: Any, returned: Any, y: Tensor | None) -> dict[str, Tensor]:
    """Return what a model says of the observations at a draw."""
    likelihood = in_single(distribution)
    mean, variance, is_categorical = _moments(likelihood)
    per_example = isinstance(returned, Tensor) and returned.shape[:1] == mean.shape[:1]
    found = {"function": returned if per_example else mean, "mean": mean, "variance": variance}
    if is_categorical:
        found["entropy"] = _entropy(mean)
    if y is not None:
        found["log_density"] = observed_log_prob(likelihood, y)
    return found


def _moments(likelihood: Any) -> tuple[Tensor, Tensor, bool]:
    base = likelihood
    while isinstance(base, Independent):
        base = base.base_dist
    if isinstance(base, (Categorical, OneHotCategorical)):
        has_logits = isinstance(base, Categorical) and "probs" not in vars(base)
        probs = base.logits.exp() if has_logits else base.probs  # a softmax takes longer
        probs = probs / probs.sum(
            -1, keepdim=True
        )  # which is not 1 after a softmax in half precision
        return probs, probs * (1 - probs), base is likelihood
    return likelihood.mean, likelihood.variance, False


def _entropy(probabilities: Tensor) -> Tensor:
    entropies: Tensor = torch.special.entr(probabilities)
    return entropies.sum(-1)


class _Averages:
    """Averages over draws, which come some at a time.

    References:
        Chan, Golub and LeVeque (1983), "Algorithms for computing the sample variance", Eq. 2.1.
    """

    def __init__(self) -> None:
        self.count = 0
        self.averages: dict[str, Tensor] = {}
        self.squares: Tensor
        self.log_density: Tensor | None = None

    def add(self, new: dict[str, Tensor]) -> None:
        """Add what was read at several draws, ``(draws, *shape)`` each."""
        added, before = len(new["mean"]), self.count
        self.count += added
        averages = {name: new[name].mean(0) for name in _AVERAGED if name in new}
        squares = (new["mean"] - averages["mean"]).square().sum(0)
        density = new["log_density"].logsumexp(0) if "log_density" in new else None
        if not before:
            self.averages, self.squares, self.log_density = averages, squares, density
            return
        change = {name: averages[name] - own for name, own in self.averages.items()}
        self.squares += squares + change["mean"].square() * (before * added / self.count)
        for name, own in self.averages.items():
            own += change[name] * (added / self.count)
        if self.log_density is not None and density is not None:
            self.log_density = torch.logaddexp(self.log_density, density)

    def result(self) -> dict[str, Tensor | None]:
        """Return what a prediction has of one mini-batch."""
        function_variance = self.squares / self.count
        found: dict[str, Tensor | None] = {
            "mean": self.averages["mean"],
            "variance": self.averages["variance"] + function_variance,
            "function_variance": function_variance,
            "entropy": None,
            "mutual_information": None,
            "log_density": None,
            "functions": None,
        }
        if "entropy" in self.averages:
            entropy = _entropy(self.averages["mean"])
            found["entropy"] = entropy
            found["mutual_information"] = (entropy - self.averages["entropy"]).clamp_min(0)
        if self.log_density is not None:
            found["log_density"] = self.log_density - math.log(self.count)
        return found


_AVERAGED = ("mean", "variance", "entropy")


def _join(parts: list[dict[str, Tensor | None]]) -> dict[str, Any]:
    """Put mini-batches together."""
    columns = {name: [part[name] for part in parts] for name in parts[0]}
    return {
        name: None if own[0] is None else torch.cat([part for part in own if part is not None])
        for name, own in columns.items()
    }
