"""What a likelihood says of an observation: its moments, and the entropy of classes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, OneHotCategorical


def observation_moments(base: Any) -> tuple[Tensor, Tensor]:
    """Return mean and variance of a likelihood; of classes, those of their indicators."""
    if isinstance(base, (Categorical, OneHotCategorical)):
        has_logits = isinstance(base, Categorical) and "probs" not in vars(base)
        probs = base.logits.exp() if has_logits else base.probs  # a softmax takes longer
        probs = probs / probs.sum(
            -1, keepdim=True
        )  # which is not 1 after a softmax in half precision
        return probs, probs * (1 - probs)
    return base.mean, base.variance


def entropy_of(base: Any, likelihood: Any) -> Callable[[Tensor], Tensor] | None:
    """Return the entropy as a function of probabilities, for one class of each example or for labels."""
    if isinstance(base, (Categorical, OneHotCategorical)) and base is likelihood:
        return lambda probabilities: torch.special.entr(probabilities).sum(-1)
    if isinstance(base, Bernoulli):
        return lambda p: torch.special.entr(p) + torch.special.entr(1 - p)
    return None
