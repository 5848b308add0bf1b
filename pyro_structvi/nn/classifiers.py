"""Likelihoods of classes, labels and tokens."""

from typing import Any

import pyro.distributions as dist
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_structvi._checks import Count, check_positive, check_shape, checked
from pyro_structvi.nn.likelihood import Likelihood, Output, Terms


class Classifier(Likelihood):
    """A net as a model of classes: ``y_n ~ Categorical(softmax(net(x_n)))``.

    Args:
        net: A module with sample sites, from ``(batch, ...)`` to logits ``(batch, classes)``.
        num_data: Number of training examples; the log likelihood of a batch is multiplied by
            ``num_data / batch``. When None, :func:`~pyro_structvi.fit` sets it.
        output: From the net's return value to the logits; by default a tensor, or its ``logits``.
        class_weights: Weights of the log likelihoods of each class, ``(classes,)``, as ``weight`` of
            ``torch.nn.CrossEntropyLoss``: ``N / (classes * counts)`` balances classes. Predictive
            densities have no weights.
        standardize: Training inputs; the net has standardized ones, see :class:`Likelihood`.

    Raises:
        ValueError: If a weight is not positive.

    Example:
        >>> import torch
        >>> from pyro.infer import Predictive
        >>> from pyro_structvi import bayesianize
        >>> model = Classifier(bayesianize(torch.nn.Linear(4, 3), prior=1.0), num_data=100)
        >>> Predictive(model, num_samples=3)(torch.zeros(5, 4))["obs"].shape
        torch.Size([3, 5])
    """

    @checked
    def __init__(
        self,
        net: nn.Module,
        num_data: Count | None = None,
        output: Output | None = None,
        *,
        class_weights: Tensor | None = None,
        standardize: Tensor | None = None,
    ) -> None:
        super().__init__(net, num_data, output, standardize)
        if class_weights is not None:
            check_positive("class_weights", class_weights)
            check_shape("class_weights", class_weights, [class_weights.numel()], "(classes,)")
        self.register_buffer("class_weights", class_weights)

    def lower_bound(self, mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        r"""Return Jensen's bound, :math:`m_y - \log \sum_c \exp(m_c + v_c / 2)`, ``(batch,)``.

        The logits are normal with means m and variances v.

        References:
            Harrison, Willes and Snoek (2024), "Variational Bayesian last layers", Sec. 3.2.
        """
        chosen = mean.gather(-1, y.unsqueeze(-1)).squeeze(-1)
        return chosen - (mean + 0.5 * variance).logsumexp(-1)

    def observe(self, output: Tensor, plates: int, y: Tensor | None) -> Tensor:
        """Sample or observe classes ``(batch,)``, integers, and return the logits."""
        _check_classes(type(self).__name__, output, plates, y, "batch")
        weights = self.class_weights
        if weights is not None:
            check_shape("class_weights", weights, output.shape[-1:], "(classes,)")
            # The likelihood refuses classes out of range.
            weights = None if y is None else weights[y.clamp(0, len(weights) - 1)]
        self._observe(lambda: dist.Categorical(logits=output), y, weights)
        return output


class BinaryClassifier(Likelihood):
    """A net as a model of binary targets: ``y_n ~ Bernoulli(sigmoid(net(x_n)))``.

    Several outputs are labels, independent given the weights (multi-label classification).

    Args:
        net: A module with sample sites, from ``(batch, ...)`` to logits ``(batch,)`` or
            ``(batch, labels)``.
        num_data: As for :class:`Classifier`.
        output: As for :class:`Classifier`.

    Example:
        >>> import torch
        >>> from pyro.infer import Predictive
        >>> from pyro_structvi import bayesianize
        >>> model = BinaryClassifier(bayesianize(torch.nn.Linear(4, 3), prior=1.0), num_data=100)
        >>> Predictive(model, num_samples=3)(torch.zeros(5, 4))["obs"].shape
        torch.Size([3, 5, 3])
    """

    terms: Terms = "elements"

    def observe(self, output: Tensor, plates: int, y: Tensor | None) -> Tensor:
        """Sample or observe zeros and ones in any dtype, and return the logits."""
        return self._observe_numbers(
            lambda logits: dist.Bernoulli(logits=logits), output, plates, y
        )


class TokenClassifier(Likelihood):
    """A net as a model of one class for each token: ``y_nt ~ Categorical(softmax(net(x_n)_t))``.

    For language models and tags of words. Tokens of the class ``ignore_index``, such as padding, have no
    likelihood.

    Args:
        net: A module with sample sites, from ``(batch, ...)`` to logits ``(batch, length, classes)``.
        num_data: Number of training sequences, as for :class:`Classifier`.
        ignore_index: The class of ignored tokens.
        shift: Whether the logits at a token predict the next token, as in causal language models. Then
            ``y`` are the tokens, the last logits are dropped, and ``predict`` scores ``y[:, 1:]``.
        output: As for :class:`Classifier`.

    Example:
        >>> import torch
        >>> from pyro.infer import Predictive
        >>> from pyro_structvi import bayesianize
        >>> net = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
        >>> model = TokenClassifier(bayesianize(net, prior=1.0), num_data=100, shift=True)
        >>> Predictive(model, num_samples=3)(torch.zeros(2, 5, dtype=torch.long))["obs"].shape
        torch.Size([3, 2, 4])
    """

    @checked
    def __init__(
        self,
        net: nn.Module,
        num_data: Count | None = None,
        ignore_index: int = -100,
        shift: bool = False,
        output: Output | None = None,
    ) -> None:
        super().__init__(net, num_data, output)
        self.ignore_index, self.shift = ignore_index, shift

    def observe(self, output: Tensor, plates: int, y: Tensor | None) -> Tensor:
        """Sample or observe classes ``(batch, length)``, integers; return the logits, shifted."""
        _check_classes(type(self).__name__, output, plates, y, "batch", "length")
        logits = output
        if self.shift:
            logits, y = logits[..., :-1, :], None if y is None else y[:, 1:]
        options: dict[str, Any] = {"logits": logits, "ignore_index": self.ignore_index}
        self._observe(lambda: PaddedCategorical(**options).to_event(1), y)
        return logits


class PaddedCategorical(dist.Categorical):
    """A categorical distribution that ignores one value.

    Args:
        probs: Probabilities ``(*batch, classes)``.
        logits: Logits in their place.
        ignore_index: The value whose log probability is zero.
        validate_args: Whether to check arguments and values; the setting of Pyro when None.

    Example:
        >>> import torch
        >>> tokens = PaddedCategorical(logits=torch.zeros(3, 2), ignore_index=-100)
        >>> tokens.log_prob(torch.tensor([0, 1, -100]))
        tensor([-0.6931, -0.6931,  0.0000])
    """

    def __init__(
        self,
        probs: Tensor | None = None,
        logits: Tensor | None = None,
        ignore_index: int = -100,
        validate_args: bool | None = None,
    ) -> None:
        self.ignore_index = ignore_index
        super().__init__(probs=probs, logits=logits, validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        """Return this distribution with a larger batch shape, sharing memory."""
        new = self._get_checked_instance(type(self), _instance)
        new.ignore_index = self.ignore_index
        return super().expand(batch_shape, new)

    @constraints.dependent_property(is_discrete=True, event_dim=0)
    def support(self) -> constraints.Constraint:
        """Classes and the ignored value."""
        return _ClassOr(self.ignore_index, super().support)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return log probabilities of the values' shape, zero for ignored values."""
        ignored = value == self.ignore_index
        log_probs: Tensor = super().log_prob(value.masked_fill(ignored, 0))
        return log_probs.masked_fill(ignored, 0.0)


class _ClassOr(constraints.Constraint):
    is_discrete = True

    def __init__(self, ignore_index: int, classes: constraints.Constraint) -> None:
        self.ignore_index, self.classes = ignore_index, classes
        super().__init__()

    def check(self, value: Tensor) -> Tensor:
        is_class: Tensor = self.classes.check(value)
        return is_class | (value == self.ignore_index)


def _check_classes(kind: str, logits: Tensor, plates: int, y: Tensor | None, *dims: str) -> None:
    """Raise a ``ValueError`` unless there are logits ``(*dims, classes)``, and classes ``dims``."""
    if logits.dim() != plates + len(dims) + 1:
        raise ValueError(
            f"A {kind}'s net must return logits of shape ({', '.join(dims)}, classes), but got "
            f"{tuple(logits.shape)}."
        )
    if y is not None:
        shape = logits.shape[plates:-1]
        check_shape("y", y, shape, f"({', '.join(dims)}{',' if len(dims) == 1 else ''})")
        if y.is_floating_point() or y.is_complex():
            raise ValueError(
                f"`y` must hold classes as integers, but got {y.dtype}. Pass `y.long()`."
            )
