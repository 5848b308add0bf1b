"""What a likelihood says of an observation: its moments, and the entropy of classes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, OneHotCategorical


def class_probabilities(base: Any) -> Tensor | None:
    """Return the probabilities of classes, or None for observations of another kind."""
    if not isinstance(base, (Categorical, OneHotCategorical)):
        return None
    has_logits = isinstance(base, Categorical) and "probs" not in vars(base)
    probs: Tensor = base.logits.exp() if has_logits else base.probs  # a softmax takes longer
    return probs / probs.sum(-1, keepdim=True)  # which is not 1 after a softmax in half precision


def observation_moments(base: Any) -> tuple[Tensor, Tensor]:
    """Return mean and variance of a likelihood; of classes, those of their indicators."""
    probs = class_probabilities(base)
    return (base.mean, base.variance) if probs is None else (probs, probs * (1 - probs))


def entropy_of(base: Any, likelihood: Any) -> Callable[[Tensor], Tensor] | None:
    """Return the entropy as a function of probabilities, for one class of each example or for labels."""
    if isinstance(base, (Categorical, OneHotCategorical)) and base is likelihood:
        return lambda probabilities: torch.special.entr(probabilities).sum(-1)
    if isinstance(base, Bernoulli):
        return lambda p: torch.special.entr(p) + torch.special.entr(1 - p)
    return None


def own_entropy(base: Any, likelihood: Any, probabilities: Tensor) -> Tensor | None:
    """Return the entropy at the probabilities of a likelihood, by its logits where it has them."""
    if isinstance(base, Categorical) and base is likelihood and "probs" not in vars(base):
        logits = base.logits.clamp_min(torch.finfo(base.logits.dtype).min)
        return -(probabilities * logits).sum(-1)
    entropy = entropy_of(base, likelihood)
    return None if entropy is None else entropy(probabilities)
