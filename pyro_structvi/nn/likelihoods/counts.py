"""A net as a model of counts."""

import pyro.distributions as dist
from torch import Tensor

from pyro_structvi.nn.likelihoods.likelihood import Likelihood, Terms, finite_likelihood


class PoissonRegressor(Likelihood):
    """A net as a model of counts: ``y_n ~ Poisson(exp(net(x_n)))``.

    Args:
        net: A module from ``(batch, ...)`` to logarithms of rates ``(batch, *target)``, with sample
            sites.
        num_data: Number of training examples; the log likelihood of a batch counts
            ``num_data / batch`` times. :func:`~pyro_structvi.fit` sets it where it is left out.
        output: What takes the logarithms from what the net returns; a tensor is taken as it is, and of
            anything else its ``logits``.

    Raises:
        ValueError: If ``num_data`` is not a whole number of at least 1.
        TypeError: If ``net`` is not a module.

    Example:
        >>> import torch
        >>> from pyro.infer import Predictive
        >>> from pyro_structvi import bayesianize
        >>> model = PoissonRegressor(bayesianize(torch.nn.Linear(4, 1), prior=1.0), num_data=100)
        >>> Predictive(model, num_samples=3)(torch.zeros(5, 4))["obs"].shape
        torch.Size([3, 5, 1])

    References:
        McCullagh and Nelder (1989), "Generalized linear models", chapter 6.
    """

    @property
    def terms(self) -> Terms:
        """Single outputs."""
        return "elements"

    def observe(self, output: Tensor, plates: int, y: Tensor | None) -> Tensor:
        """Sample or observe the counts.

        Args:
            output: Logarithms of rates, ``(*plates, batch, *target)``.
            plates: How many of their dimensions are vectorized plates around the model.
            y: Whole numbers of at least 0, of the shape of the net's output, in any dtype, or None.

        Returns:
            The logarithms of the rates, in float32 where the net's output has half precision.
        """
        y, event = self._as_numbers(output, plates, y), output.dim() - plates - 1
        counts = finite_likelihood(lambda: dist.Poisson(output.exp()).to_event(event))
        self._observe(counts, y)
        return output
