"""Expectations of classes over normal logits, by quadrature."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_structvi.linalg.factorizations import stable_cholesky
from pyro_structvi.linalg.precision import floored_sqrt
from pyro_structvi.moments.nodes import joint_covariance, nodes_of
from pyro_structvi.moments.random_tensor import RandomTensor
from pyro_structvi.nn.likelihoods.classifier import Classifier
from pyro_structvi.nn.likelihoods.likelihood import Likelihood

BLOCK = 2**16  # logits at nodes that are held at once, so that they stay in the processor's cache


class ClassExpectations(NamedTuple):
    """Expectations of a softmax over its logits.

    Attributes:
        probabilities: The probabilities of classes, ``(batch, classes)``.
        variance: Their variances.
        entropy: The entropy of the classes, ``(batch,)``, in nats.
        log_density: The log of the probability of the observed classes, ``(batch,)``; None without.
    """

    probabilities: Tensor
    variance: Tensor
    entropy: Tensor
    log_density: Tensor | None


def is_softmax(model: Likelihood) -> bool:
    """Whether the observation is a class with the net's output as logits; not where a class differs."""
    return type(model).observe is Classifier.observe


def class_expectations(output: RandomTensor, y: Tensor | None) -> ClassExpectations:
    """Return expectations over random logits ``(batch, classes)``.

    Args:
        output: The logits.
        y: Observed classes ``(batch,)``, or None.
    """
    parts: list[tuple[Tensor, ...]] = []
    for rows, logits, weights in _blocks(output):
        logits.sub_(logits.detach().amax(1, keepdim=True))  # of which nothing here is a function
        exponentials = logits.exp()
        total = exponentials.sum(1, keepdim=True)
        at_nodes = exponentials / total
        mean = at_nodes @ weights
        variance = (at_nodes - mean.unsqueeze(-1)).square() @ weights
        log_total = total.log().squeeze(1)
        entropy = (log_total - (at_nodes * logits).sum(1)) @ weights
        found = [mean, variance, entropy]
        if y is not None:
            chosen = logits.gather(1, y[rows, None, None].expand(-1, 1, len(weights))).squeeze(1)
            found.append((chosen - log_total + weights.log()).logsumexp(-1))
        parts.append((*found,))
    mean, variance, entropy, *density = (torch.cat(part) for part in zip(*parts, strict=True))
    return ClassExpectations(mean, variance, entropy, density[0] if density else None)


def excess_of_log_total(output: RandomTensor) -> Tensor:
    """Return the expectation of ``logsumexp`` minus that at the mean logits, ``(batch,)``."""
    parts = [logits.logsumexp(1) @ weights for _, logits, weights in _blocks(output)]
    return torch.cat(parts) - output.loc.logsumexp(-1)


def _blocks(output: RandomTensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield some rows at a time, their logits ``(rows, classes, nodes)``, and the nodes' weights."""
    classes = output.shape[-1]
    nodes, weights = nodes_of(classes, output.loc)
    points = nodes.mT.contiguous()  # else all that is formed of them has their strides
    loc = output.loc.clamp_min(torch.finfo(output.loc.dtype).min / 4).unsqueeze(-1)
    covariance = joint_covariance(output)
    if covariance is None:
        factor = floored_sqrt(output.variance).unsqueeze(-1)
    else:
        factor = stable_cholesky(covariance.double())[0].to(covariance)
    step = max(1, BLOCK // points.numel())
    for start in range(0, len(loc), step):
        rows = slice(start, start + step)
        own = factor[rows]
        if covariance is None:
            logits = torch.addcmul(loc[rows], own, points)
        else:
            logits = torch.baddbmm(loc[rows], own, points.expand(len(own), -1, -1))
        yield rows, logits, weights
