"""A net as a model of classes."""

import pyro.distributions as dist
from torch import Tensor, nn

from pyro_structvi._checks import Count, check_positive, check_shape
from pyro_structvi.nn.likelihoods.likelihood import Likelihood, Output, finite_likelihood


class Classifier(Likelihood):
    """A net as a model of classes: ``y_n ~ Categorical(softmax(net(x_n)))``.

    Args:
        net: A module from ``(batch, ...)`` to logits ``(batch, classes)``, with sample sites; it may
            return an object with ``logits``.
        num_data: Number of training examples; the log likelihood of a batch counts
            ``num_data / batch`` times. :func:`~pyro_structvi.fit` sets it where it is left out.
        output: What takes the logits from what the net returns; a tensor is taken as it is, and of
            anything else its ``logits``.
        class_weights: How often the examples of each class count, ``(classes,)``, as the ``weight`` of
            ``torch.nn.CrossEntropyLoss``: ``N / (classes * counts)`` balances them. Predictive densities
            have no weights.

    Raises:
        ValueError: If ``num_data`` is not a whole number of at least 1, or a weight is not positive.
        TypeError: If ``net`` is not a module.

    Example:
        >>> import torch
        >>> from pyro.infer import Predictive
        >>> from pyro_structvi import bayesianize
        >>> model = Classifier(bayesianize(torch.nn.Linear(4, 3), prior=1.0), num_data=100)
        >>> Predictive(model, num_samples=3)(torch.zeros(5, 4))["obs"].shape
        torch.Size([3, 5])
    """

    def __init__(
        self,
        net: nn.Module,
        num_data: Count | None = None,
        output: Output | None = None,
        *,
        class_weights: Tensor | None = None,
    ) -> None:
        super().__init__(net, num_data, output)
        if class_weights is not None:
            check_positive("class_weights", class_weights)
            check_shape("class_weights", class_weights, [class_weights.numel()], "(classes,)")
        self.register_buffer("class_weights", class_weights)

    def lower_bound(self, mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        r"""Return Jensen's bound, :math:`m_y - \log \sum_c \exp(m_c + v_c / 2)`, ``(batch,)``.

        Args:
            mean: Means m of normal logits, ``(batch, classes)``.
            variance: Their variances v.
            y: Classes ``(batch,)``.

        References:
            Harrison, Willes and Snoek (2024), "Variational Bayesian last layers", Sec. 3.2.
        """
        chosen = mean.gather(-1, y.unsqueeze(-1)).squeeze(-1)
        return chosen - (mean + 0.5 * variance).logsumexp(-1)

    def observe(self, output: Tensor, plates: int, y: Tensor | None) -> Tensor:
        """Sample or observe the classes.

        Args:
            output: Logits ``(*plates, batch, classes)``.
            plates: How many of their dimensions are vectorized plates around the model.
            y: Classes ``(batch,)`` as integers, or None.

        Returns:
            The logits, in float32 where the net's output has half precision.
        """
        self._check_classes(output, plates, y, "batch")
        weights = self.class_weights
        if weights is not None:
            check_shape("class_weights", weights, output.shape[-1:], "(classes,)")
            weights = None if y is None else weights[y]
        self._observe(finite_likelihood(lambda: dist.Categorical(logits=output)), y, weights)
        return output
