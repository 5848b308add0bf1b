"""A net as a model of binary targets: one yes or no for each example, or for each of several labels."""

import pyro.distributions as dist
from torch import Tensor

from pyro_structvi.nn.likelihoods.likelihood import Likelihood, Terms, finite_likelihood


class BinaryClassifier(Likelihood):
    """A net as a model of binary targets: ``y_n ~ Bernoulli(sigmoid(net(x_n)))``.

    With several outputs each is a label, independent of the others given the weights (multi-label
    classification).

    Args:
        net: A module from ``(batch, ...)`` to logits ``(batch,)`` or ``(batch, labels)``, with sample
            sites; it may return an object with ``logits``.
        num_data: Number of training examples; the log likelihood of a batch counts
            ``num_data / batch`` times. :func:`~pyro_structvi.fit` sets it where it is left out.
        output: What takes the logits from what the net returns; a tensor is taken as it is, and of
            anything else its ``logits``.

    Raises:
        ValueError: If ``num_data`` is not a whole number of at least 1.
        TypeError: If ``net`` is not a module.

    Example:
        >>> import torch
        >>> from pyro.infer import Predictive
        >>> from pyro_structvi import bayesianize
        >>> model = BinaryClassifier(bayesianize(torch.nn.Linear(4, 3), prior=1.0), num_data=100)
        >>> Predictive(model, num_samples=3)(torch.zeros(5, 4))["obs"].shape
        torch.Size([3, 5, 3])
    """

    @property
    def terms(self) -> Terms:
        """Single outputs."""
        return "elements"

    def observe(self, output: Tensor, plates: int, y: Tensor | None) -> Tensor:
        """Sample or observe the targets.

        Args:
            output: Logits ``(*plates, batch)`` or ``(*plates, batch, labels)``.
            plates: How many of their dimensions are vectorized plates around the model.
            y: Zeros and ones of the shape of the logits, in any dtype, or None.

        Returns:
            The logits, in float32 where the net's output has half precision.
        """
        y, event = self._as_numbers(output, plates, y), output.dim() - plates - 1
        labels = finite_likelihood(lambda: dist.Bernoulli(logits=output).to_event(event))
        self._observe(labels, y)
        return output
