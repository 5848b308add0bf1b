"""Predictions: every draw of the posterior is one consistent function of the inputs."""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyro_structvi._checks import Count, Positive, Program, brief, checked
from pyro_structvi._pyro import ONE_THREAD
from pyro_structvi._torch import put_together, take_apart
from pyro_structvi.moments.random_tensor import Settings
from pyro_structvi.posterior.draws import (
    Posterior,
    batches_of,
    check_posterior,
    count_draws,
)
from pyro_structvi.posterior.one_pass import predict_in_one_pass
from pyro_structvi.posterior.passes import Passes, statistics_for
from pyro_structvi.posterior.prediction import (
    Prediction,
    StackedLikelihood,
    entropy_of,
    observation_moments,
)
from pyro_structvi.posterior.runs import evaluation_mode, observed_log_prob
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.weights.torch_distributions import base_of, in_single

MOST_STREAMED = 100  # draws whose likelihoods a streamed prediction keeps


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

    Each draw fixes all global sites, so that the model is one function over all inputs and all
    mini-batches. Latents of single examples (in a plate with observations) take the posterior's values
    where the plate has the size that it was fitted to, and are drawn from the model elsewhere; a
    :class:`LocalLatentWarning` says which. The model runs in evaluation mode and without gradients.
    One pass has many draws where :func:`torch.func.vmap` can map it; its Python code runs once for them.

    Args:
        model: A model that samples its observations when called with inputs only.
        posterior: A guide, or draws by site ``(draws, *shape)``, such as those of
            ``reference.nuts``.
        *inputs: The model's inputs, first dimension the N examples, each a tensor or a mapping of
            tensors, such as a ``BatchEncoding``. Or one ``DataLoader`` or another iterable of
            mini-batches, inputs or tuples ``(*inputs, y)``, which are all kept in memory.
        num_samples: Number of draws; None for all that are given, or 100 of a guide.
        y: Observations at which to evaluate the predictive density.
        batch_size: How many inputs to run at once; None for all.
        stream: Whether to drop each draw's function values once they were averaged; memory then
            does not grow with the number of draws. Quantiles are those of at most 100 evenly spaced
            draws.
        site: The observed site's name, where it cannot be told from the model.
        max_memory: How much memory the weights and the layers' outputs may take, in GiB, of draws that
            run in one pass: by default 32 MiB. What torch needs beside, such as noise, may take as much
            again. More is often faster on a GPU. Draws run one by one where a single one takes more, or
            where torch cannot vectorize the model; only the time differs.
        batch_statistics: Inputs, some hundred of the training's, a tuple where there are several. At
            each draw batch normalizations use the mean and variance that they meet on these, in place of
            running statistics. Members of an ensemble need it.
        progress: Whether to show a progress bar.
        differentiable: Whether the prediction can be differentiated, by the inputs and the parameters.

    Returns:
        Moments, entropies and densities, computed online and in single precision at least (a net in
        half precision, or autocast, too), and the function values unless streamed.

    Raises:
        TypeError: If ``posterior`` is neither a guide nor draws, or an input is a number.
        ValueError: If ``batch_statistics`` are given for a model without batch normalization, a number
            is not positive, lengths differ, the observed site is ambiguous, ``posterior`` does not have
            exactly the model's global sites, or the model returns tensors without the examples first in
            mini-batches.

    Example:
        >>> from pyro_structvi import Classifier, MeanFieldGuide, bayesianize
        >>> model = Classifier(bayesianize(torch.nn.Linear(4, 3), prior=1.0), num_data=10)
        >>> prediction = predict(model, MeanFieldGuide(model), torch.zeros(5, 4), num_samples=20)
        >>> prediction.mean.shape, prediction.functions.shape
        (torch.Size([5, 3]), torch.Size([20, 5, 3]))
    """
    check_posterior(model, posterior)
    x = _one_or_several(inputs)
    statistics = statistics_for(model, posterior, batch_statistics)
    batches = batches_of(x, y, batch_size, posterior)
    total = count_draws(posterior, num_samples)
    reader = _Reader(len(batches), not stream, -(-total // MOST_STREAMED) if stream else 1)
    averages = [_Averages(reader) for _ in batches]
    kept: list[list[dict[str, Tensor]]] = [[] for _ in batches]
    with ONE_THREAD, evaluation_mode(model, differentiable), _bar(total, progress) as bar:
        passes = Passes(model, posterior, batches, site, reader, max_memory, statistics)
        for done in passes.run(total):
            kept[done.batch].append(reader.kept(done.outputs, averages[done.batch].count))
            averages[done.batch].add(done.outputs)
            if done.batch == len(batches) - 1:
                bar.update(len(done.outputs["mean"]))
    joined = _join([own.result() for own in averages])
    return Prediction(**joined, **reader.draws(kept), num_samples=total)


@checked
def predict_moments(
    model: Program,
    guide: StructuredGuide,
    *inputs: Any,
    y: Tensor | None = None,
    batch_size: Count | None = None,
    covariance: Literal["diagonal", "full"] = "diagonal",
    linearize: bool = False,
    differentiable: bool = False,
) -> Prediction:
    """Predict in one pass, by the moments of each layer's output given those of its input.

    The expectation of the likelihood is a quadrature. It is an approximation, with no function values;
    the page "One pass" of the documentation says how good.

    Args:
        model: A likelihood around a net, such as a :class:`~pyro_structvi.Regressor`.
        guide: A guide of this package.
        *inputs: The one input of the net, ``(N, ...)``.
        y: Observations at which to evaluate the predictive density.
        batch_size: How many inputs to run at once; None for all.
        covariance: "full" to keep the covariance between the units of dense layers, in place of their
            variances.
        linearize: Whether a function without a rule is replaced by its tangent at the mean, in place of
            an error.
        differentiable: Whether the prediction can be differentiated, by the input and the parameters.

    Returns:
        Moments, entropies and densities.

    Raises:
        NotImplementedError: If a function of the net has no rule.
        TypeError: If the model is no likelihood around a net of one input, or the guide is another.
        ValueError: If lengths differ.

    Example:
        >>> from pyro_structvi import Classifier, MeanFieldGuide, bayesianize
        >>> model = Classifier(bayesianize(torch.nn.Linear(4, 3), prior=1.0), num_data=10)
        >>> predict_moments(model, MeanFieldGuide(model), torch.zeros(5, 4)).mean.shape
        torch.Size([5, 3])

    References:
        Wu et al. (2019), "Deterministic variational inference for robust Bayesian neural networks".
    """
    check_posterior(model, guide)
    settings = Settings(covariance == "full", linearize)
    x = _one_or_several(inputs)
    return predict_in_one_pass(model, guide, x, y, batch_size, settings, differentiable)


def _one_or_several(inputs: tuple[Any, ...]) -> Any:
    """Return the input of a model, or the tuple of several."""
    if not inputs or any(isinstance(each, (int, float)) for each in inputs):
        raise TypeError(
            f"`inputs` must be tensors or mini-batches, but got {brief(inputs)}. Write "
            "`predict(model, guide, x, num_samples=100)`."
        )
    return inputs[0] if len(inputs) == 1 else inputs


def _bar(total: int, progress: bool) -> Any:
    return tqdm(total=total, desc="predict", disable=not progress)


class _Reader:
    """Reads what a model says of the observations at a draw, and puts the draws together again.

    Args:
        num_batches: How many mini-batches there are.
        keeps: Whether to keep each draw's function values.
        stride: Of how many draws one has its likelihood kept.
    """

    def __init__(self, num_batches: int, keeps: bool, stride: int = 1) -> None:
        self.num_batches, self.keeps, self.stride = num_batches, keeps, stride
        self.likelihood: StackedLikelihood | None = None  # by the first draw, which runs by itself
        self.structure: Any = None
        self.entropy: Callable[[Tensor], Tensor] | None = None

    def __call__(self, node: Any, returned: Any, y: Tensor | None) -> dict[str, Tensor]:
        likelihood = in_single(node["fn"])
        base = base_of(likelihood)
        mean, variance = observation_moments(base)
        returned = mean if returned is None else returned
        leaves, structure = take_apart(returned)
        if self.keeps:
            self._check(leaves, len(mean))
        if self.likelihood is None:
            self.likelihood, self.structure = StackedLikelihood(likelihood), structure
            self.entropy = entropy_of(base, likelihood)
        found = {"mean": mean, "variance": variance}
        if self.keeps or self.entropy is None:  # classes have no quantiles
            found |= self.likelihood.take_apart(likelihood)
        if self.keeps:
            found |= {f"function.{number}": leaf for number, leaf in enumerate(leaves)}
        if self.entropy is not None:
            found["entropy"] = self.entropy(mean)
        if y is not None:
            found["log_density"] = observed_log_prob(node, y)
        return found

    def _check(self, leaves: list[Any], size: int) -> None:
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves}))
            raise TypeError(
                "The model must return a tensor, tensors in a tuple or dict, or nothing, so that its "
                f"values can be stacked over draws, but returns {kinds}."
            )
        if self.num_batches > 1 and any(leaf.shape[:1] != (size,) for leaf in leaves):
            raise ValueError(
                "With `batch_size`, what the model returns must have the examples as its first "
                f"dimension, {size} in a mini-batch, but has shapes "
                f"{[tuple(leaf.shape) for leaf in leaves]}. Leave `batch_size` out, or let the model "
                "return nothing else."
            )

    def kept(self, outputs: dict[str, Tensor], before: int = 0) -> dict[str, Tensor]:
        """Return what is kept of a pass, after so many draws."""
        rows = torch.arange(len(outputs["mean"]))[-before % self.stride :: self.stride]
        parts = {name: value for name, value in outputs.items() if "." in name}
        return parts if self.stride == 1 else {name: own[rows] for name, own in parts.items()}

    def draws(self, kept: list[list[dict[str, Tensor]]]) -> dict[str, Any]:
        """Return the stacked functions and likelihoods of what was kept of each mini-batch."""
        if self.likelihood is None or not kept[0][0]:
            return {"functions": None, "likelihood": None}
        columns = {
            name: [torch.cat([done[name] for done in own]) for own in kept] for name in kept[0][0]
        }
        joined = {
            name: own[0] if len(own) == 1 else torch.cat(own, 1) for name, own in columns.items()
        }
        functions = [value for name, value in joined.items() if name.startswith("function.")]
        likelihoods = {key: value for key, value in joined.items() if key.startswith("likelihood.")}
        return {
            "functions": put_together(functions, self.structure) if self.keeps else None,
            "likelihood": self.likelihood.put_together(likelihoods),
        }


class _Averages:
    """Averages over draws, which come some at a time.

    References:
        Chan, Golub and LeVeque (1983), "Algorithms for computing the sample variance", Eq. 2.1.
    """

    def __init__(self, reader: _Reader) -> None:
        self.reader, self.count = reader, 0
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
        }
        if self.reader.entropy is not None:
            entropy = self.reader.entropy(self.averages["mean"])
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
