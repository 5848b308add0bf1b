"""What a posterior predicts."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical, OneHotCategorical

from pyro_structvi._checks import Count, checked, shape_text
from pyro_structvi.distributions.own_tensors import base_of
from pyro_structvi.posterior.mixture import mixture_quantile


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
            >>> prediction = predict(model, MeanFieldGuide(model), torch.zeros(5, 1), 20)
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
            >>> prediction = predict(model, MeanFieldGuide(model), torch.zeros(5, 1), 20)
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
            >>> prediction = predict(model, MeanFieldGuide(model), torch.zeros(5, 1), 20)
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
