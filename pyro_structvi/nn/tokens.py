"""The likelihood of a class for each token, without padding."""

from typing import Any, ClassVar

import pyro.distributions as dist
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_structvi._checks import Count, checked
from pyro_structvi.nn.likelihood import Likelihood, Output


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

    __constants__: ClassVar = ["ignore_index", "shift"]

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
        self._check_classes(output, plates, y, "batch", "length")
        logits = output
        if self.shift:
            logits, y = logits[..., :-1, :], None if y is None else y[:, 1:]
        if not logits.shape[-2]:
            raise ValueError(
                "A TokenClassifier must predict at least one token, but the net returns logits of shape "
                f"{tuple(output.shape)}. Sequences need one token, and two with `shift=True`."
            )
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
        ignored = value.long() == self.ignore_index  # to bytes -100 is 156
        log_probs: Tensor = super().log_prob(value.masked_fill(ignored, 0))
        return log_probs.masked_fill(ignored, 0.0)


class _ClassOr(constraints.Constraint):
    is_discrete = True

    def __init__(self, ignore_index: int, classes: constraints.Constraint) -> None:
        self.ignore_index, self.classes = ignore_index, classes
        super().__init__()

    def check(self, value: Tensor) -> Tensor:
        is_class: Tensor = self.classes.check(value)
        return is_class | (value.long() == self.ignore_index)
