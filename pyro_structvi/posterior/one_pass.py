"""Predictions in one pass, by the moments of the net's output."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Normal

from pyro_structvi._checks import check_no_nan, check_same_kind, check_shape, warn_user
from pyro_structvi.linalg.precision import at_least_single, autocast_off, floored_sqrt
from pyro_structvi.moments.integration import (
    AtNodes,
    class_expectations,
    is_softmax,
    likelihood_at_nodes,
    observation_at,
)
from pyro_structvi.moments.linear import (
    Sites,
    by_name,
    member_numbers,
    posteriors_of,
    random_values,
)
from pyro_structvi.moments.net import check_served, output_moments, used_more_than_once
from pyro_structvi.moments.random_tensor import RandomTensor, Settings
from pyro_structvi.nn.likelihood import Likelihood
from pyro_structvi.posterior.draws import batches_of
from pyro_structvi.posterior.prediction import (
    Prediction,
    class_probabilities,
    entropy_of,
    own_entropy,
)
from pyro_structvi.posterior.runs import evaluation_mode
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.weights.torch_distributions import base_of, in_single

Batch = tuple[tuple[Any, ...], Tensor | None]

LARGEST = 2**15  # outputs whose nodes are held at once


class MomentsWarning(UserWarning):
    """Moments leave out a dependence that a model is known to have."""


class _Member(NamedTuple):
    """What one posterior, or one member of an ensemble, predicts; ``(N, *event)`` but for entropies."""

    mean: Tensor
    noise: Tensor
    function_variance: Tensor
    entropy: Tensor | None
    log_density: Tensor | None


def predict_in_one_pass(
    model: Any,
    guide: Any,
    x: Any,
    y: Tensor | None,
    batch_size: int | None,
    settings: Settings,
    differentiable: bool,
) -> Prediction:
    """Return the predictions of a model by the moments of its net's output.

    Args:
        model: A likelihood around a net.
        guide: A guide of this package.
        x: Inputs.
        y: Observations, or None.
        batch_size: How many inputs to run at once; None for all.
        settings: How moments are propagated.
        differentiable: Whether to keep gradients.

    Raises:
        TypeError: If model or guide is something else.
        NotImplementedError: If a function of the net has no moments.
    """
    check_served(model, guide, "posterior")
    batches = batches_of(x, y, batch_size, guide)
    args = batches[0][0]
    if len(args) != 1:
        raise TypeError(f"`inputs` must be the one input of the net, but got {len(args)}.")
    with evaluation_mode(model, differentiable):
        joint = guide.joint_posterior(*args)
        _warn_of_shared(model, guide)
        of_members = [
            _predict(model, posteriors_of(joint, number), batches, settings)
            for number in member_numbers(guide)
        ]
    return _mixture(of_members[0][0], [member for _, member in of_members])


def _warn_of_shared(model: Likelihood, guide: StructuredGuide) -> None:
    shared = used_more_than_once(model, guide)
    if shared:
        warn_user(
            f"A pass uses the weights {shared} more than once, as recurrent layers do at each step, and "
            "moments count each use as independent. Compare with draws before you rely on variances.",
            MomentsWarning,
        )


def _predict(
    model: Likelihood, sites: Sites, batches: list[Batch], settings: Settings
) -> tuple[Any, _Member]:
    """Return the likelihood of the last inputs, and what a posterior predicts at all of them."""
    values, posteriors = random_values(sites, settings), by_name(sites)
    parts: list[_Member] = []
    likelihood: Any = None
    for (x, *_), y in batches:
        output = output_moments(model, values, x, settings)
        if is_softmax(model):
            likelihood, found = _read_classes(model, output, y)
            parts.append(found)
            continue
        for cut in _cuts(output):
            part = _cut(output, cut)
            at = likelihood_at_nodes(model, part, posteriors)
            likelihood = in_single(at.likelihood)
            parts.append(_read(likelihood, at, None if y is None else y[cut]))
    return likelihood, _Member(*map(_joined, zip(*parts, strict=True)))


def _joined(parts: Any) -> Any:
    """Return what mini-batches have, one after the other, or None where there is nothing."""
    return None if parts[0] is None else torch.cat(parts)


def _cuts(output: RandomTensor) -> list[slice]:
    """Return parts of a batch whose nodes fit into memory."""
    size = max(1, LARGEST // max(1, output.shape[1:].numel()))
    return [slice(start, start + size) for start in range(0, len(output), size)]


def _cut(output: RandomTensor, cut: slice) -> RandomTensor:
    covariance = None if output.covariance is None else output.covariance[cut]
    part = RandomTensor(output.loc[cut], output.variance[cut], output.settings, covariance)
    form = output.form_covariance
    part.form_covariance = None if form is None else lambda: form()[cut]
    return part


def _read_classes(model: Likelihood, output: RandomTensor, y: Tensor | None) -> tuple[Any, _Member]:
    """Return the likelihood at the mean of logits, and what a posterior predicts of their classes."""
    likelihood = observation_at(model, output.loc, None).likelihood
    if y is not None:
        check_shape("y", y, likelihood.batch_shape, "that of the predictions")
        check_no_nan("y", y)
        likelihood.log_prob(y)  # which says what is wrong with classes
    mean, variance, entropy, log_density = class_expectations(output, y)
    noise = mean * (1 - mean) - variance
    return likelihood, _Member(mean, noise, variance, entropy, log_density)


def _read(likelihood: Any, at: AtNodes, y: Tensor | None) -> _Member:
    """Average what a likelihood ``(nodes, N)`` says over its nodes."""
    base, weights = base_of(likelihood), at.weights

    def average(values: Tensor) -> Tensor:
        return torch.einsum("k,k...->...", weights.to(values), values)

    probs = class_probabilities(base)
    means = base.mean if probs is None else probs
    mean = average(means)
    variance = average((means - mean).square())
    # An indicator has the variance m (1 - m) in all, of which that of the function is a part.
    noise = average(base.variance) if probs is None else mean * (1 - mean) - variance
    entropy = own_entropy(base, likelihood, means)
    density = None if y is None else _log_density(likelihood, at, mean, variance, y)
    return _Member(
        *(mean, noise, variance),
        None if entropy is None else average(entropy),
        density,
    )


def _log_density(likelihood: Any, at: AtNodes, mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    """Return the log of the predictive density of observations, ``(N,)``.

    Under normal noise the function is integrated out exactly, and only the noise scale has nodes. The
    elements of an example are independent, given what they share.
    """
    check_no_nan("y", y)
    shape = likelihood.batch_shape[1:] + likelihood.event_shape
    check_shape("y", y, shape, "that of the predictions")
    y, base = at_least_single(y), base_of(likelihood)
    if not likelihood.support.is_discrete:
        check_same_kind("y", y, "prediction.mean", mean)
    elif isinstance(base, Bernoulli):
        y = y.to(mean)
    with autocast_off(y):
        if isinstance(base, Normal):
            scale = floored_sqrt(base.scale.square() + variance)
            base = Normal(mean, scale, validate_args=False)
        log_probs = base.log_prob(y)
    weights = at.weights.to(log_probs).reshape(-1, at.shared)
    log_probs = log_probs.unflatten(0, weights.shape)
    of_shared = weights.sum(0)
    inner = _meet(weights / of_shared, log_probs) + log_probs
    each = inner.logsumexp(0).flatten(2).sum(-1) if inner.dim() > 3 else inner.logsumexp(0)
    density: Tensor = (_meet(of_shared, each) + each).logsumexp(0)
    return density


def _meet(weights: Tensor, values: Tensor) -> Tensor:
    """Return logarithms of weights in as many dimensions as values that they stand in front of."""
    return weights.log().reshape(*weights.shape, *(1 for _ in values.shape[weights.dim() :]))


def _mixture(like: Any, members: list[_Member]) -> Prediction:
    """Return the prediction of a mixture of posteriors, of one in most cases."""
    base = base_of(like)
    entropy_at = entropy_of(base, like)
    means = torch.stack([member.mean for member in members])
    noise = torch.stack([member.noise for member in members]).mean(0)
    own = torch.stack([member.function_variance for member in members])
    mean = means.mean(0)
    function_variance = own.mean(0) + (means - mean).square().mean(0)
    entropy = information = density = None
    if entropy_at is not None:
        entropy = entropy_at(mean)
        within = torch.stack([m.entropy for m in members if m.entropy is not None]).mean(0)
        information = (entropy - within).clamp_min(0)
    if members[0].log_density is not None:
        each = [m.log_density for m in members if m.log_density is not None]
        density = torch.stack(each).logsumexp(0) - math.log(len(each))
    variances = torch.stack([member.noise for member in members]) + own
    return Prediction(
        *(mean, noise + function_variance, function_variance, entropy, information, density),
        functions=None,
        likelihood=_likelihood(base, means, variances),
        num_samples=0,
    )


def _likelihood(base: Any, means: Tensor, variances: Tensor) -> Any:
    """Return the predictive distribution of each member, ``(members, N)``, where it is a usual one."""
    if isinstance(base, Normal):
        made: Any = Normal(means, floored_sqrt(variances), validate_args=False)
    elif isinstance(base, Bernoulli):
        made = Bernoulli(means, validate_args=False)
    elif isinstance(base, Categorical):
        made = Categorical(means, validate_args=False)
        return torch.distributions.Independent(made, means.dim() - 3)
    else:
        return None
    return torch.distributions.Independent(made, means.dim() - 2)
