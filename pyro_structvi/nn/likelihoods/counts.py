"""A net as a model of counts."""

from typing import Any

import pyro.distributions as dist
from torch import Tensor

from pyro_structvi._checks import naming
from pyro_structvi.nn.likelihoods.likelihood import Likelihood, finite_likelihood


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
        >>> from pyro_structvi import bayesianize
        >>> model = PoissonRegressor(bayesianize(torch.nn.Linear(4, 1), prior=1.0), num_data=100)
        >>> model(torch.zeros(5, 4)).shape
        torch.Size([5, 1])

    References:
        McCullagh and Nelder (1989), "Generalized linear models", chapter 6.
    """

    def forward(self, x: Any, y: Tensor | None = None) -> Tensor:
        """Sample the counts at site ``obs``, or observe them.

        Args:
            x: The net's input, first dimension the batch; a mapping gives keyword arguments where the
                net's ``forward`` has their names.
            y: Whole numbers of at least 0, of the shape of the net's output, in any dtype, or None.

        Returns:
            The logarithms of the rates, in float32 where the net's output has half precision.

        Raises:
            ValueError: If ``y`` has another shape than the net's output.
        """
        with naming("x", x):
            logs, event, y = self._run_numbers(x, y)
            counts = finite_likelihood(lambda: dist.Poisson(logs.exp()).to_event(event))
            self._observe(counts, y)
        return logs
