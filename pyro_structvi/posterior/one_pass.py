"""Predictions in one pass, from the moments of the net's output."""

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Categorical,
    Independent,
    MultivariateNormal,
    Normal,
    Poisson,
    StudentT,
)

from pyro_structvi._checks import Count, Program, checked, warn_user
from pyro_structvi.linalg.matrices import autocast_off, floored_sqrt
from pyro_structvi.linalg.quadrature import gauss_hermite
from pyro_structvi.moments.integration import (
    AtNodes,
    class_expectations,
    is_softmax,
    joint_covariance,
    likelihood_at_nodes,
    observation_at,
)
from pyro_structvi.moments.linear import (
    Sites,
    member_numbers,
    posteriors_of,
    random_values,
)
from pyro_structvi.moments.net import check_served, output_moments, used_more_than_once
from pyro_structvi.moments.nonlinear import averages, correlations
from pyro_structvi.moments.random_tensor import RandomTensor, Settings
from pyro_structvi.nn.likelihood import Likelihood
from pyro_structvi.nn.regressors import LogRatePoisson
from pyro_structvi.posterior.passes import Batch, Values, batches_of, check_posterior
from pyro_structvi.posterior.prediction import (
    Averages,
    Prediction,
    class_probabilities,
    entropy_of,
)
from pyro_structvi.posterior.runs import checked_observations, evaluation_mode
from pyro_structvi.sites.site_posterior import stack_draws
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.weights.torch_distributions import base_of, in_single

LARGEST = 2**15  # outputs with nodes in memory at once
PRECISIONS = 128  # nodes of the precision of Student's t noise
NEWTON_STEPS = 50  # to the mode of a log rate, the last of them at it


class MomentsWarning(UserWarning):
    """Moments leave out a dependence in the model."""


@checked
def predict_moments(
    model: Program,
    guide: StructuredGuide,
    *inputs: Any,
    y: Tensor | None = None,
    batch_size: Count | None = None,
    covariance: Literal["diagonal", "full"] = "diagonal",
    linearize: bool = False,
    differentiable: bool = False,
) -> Prediction:
    """Predict in one pass, with the moments of each layer's output given the moments of its input.

    The result is an approximation without function values; the page "One pass" of the documentation has
    its errors.

    Args:
        model: A likelihood around a net, such as a :class:`~pyro_structvi.Regressor`.
        guide: A guide of this package.
        *inputs: The one input of the net, ``(N, ...)``.
        y: Observations for the predictive density.
        batch_size: Inputs in a mini-batch; None for all.
        covariance: "full" to keep the covariance between the units of dense layers, in place of their
            variances.
        linearize: Whether to replace a function without a rule by its tangent at the mean, in place of
            an error.
        differentiable: Whether to keep gradients with respect to the input and the parameters.

    Returns:
        Moments, entropies and densities. The density of several targets ``(N, E)`` is joint for normal
        noise that is known or has one learned scale, if the net ends with a dense layer of up to 128
        outputs or ``covariance="full"``; else targets count as independent.

    Raises:
        NotImplementedError: If a function of the net has no rule, or the guide draws sites jointly.
        TypeError: If the model is no likelihood around a net of one input, or the guide is another.
        ValueError: If lengths differ.

    Example:
        >>> from pyro_structvi import Classifier, MeanFieldGuide, bayesianize
        >>> model = Classifier(bayesianize(torch.nn.Linear(4, 3), prior=1.0), num_data=10)
        >>> predict_moments(model, MeanFieldGuide(model), torch.zeros(5, 4)).mean.shape
        torch.Size([5, 3])

    References:
        Wu et al. (2019), "Deterministic variational inference for robust Bayesian neural networks".
    """
    check_posterior(model, guide)
    check_served(model, guide, "posterior")
    assert isinstance(model, Likelihood)
    batches = batches_of(inputs, y, batch_size, guide)
    args = batches[0][0]
    if len(args) != 1:
        raise TypeError(f"`inputs` must be the one input of the net, but got {len(args)}.")
    with evaluation_mode(model, differentiable):
        joint = guide.joint_posterior(*args)
        if shared := used_more_than_once(model, guide):
            warn_user(
                f"A pass uses the weights {shared} more than once, as recurrent layers do at each step, "
                "and moments count each use as independent. Compare with draws before you rely on "
                "variances.",
                MomentsWarning,
            )
        settings = Settings(covariance == "full", linearize)
        members = [
            _predict(model, posteriors_of(joint, number), batches, settings)
            for number in member_numbers(guide)
        ]
    return _mixture(members[0][0], stack_draws([moments for _, moments in members]))


def _predict(
    model: Likelihood, sites: Sites, batches: list[Batch], settings: Settings
) -> tuple[Any, Values]:
    """Return the likelihood of the last inputs, and the moments of one posterior at all inputs."""
    values, posteriors = random_values(sites, settings), {site.name: q for site, q in sites}
    parts: list[Values] = []
    likelihood: Any = None
    for (x, *_), y in batches:
        output = output_moments(model, values, x, settings)
        if is_softmax(model):
            likelihood = observation_at(model, output.loc, None).likelihood
            if y is not None:
                checked_observations(y, likelihood, likelihood.batch_shape)
            parts.append(class_expectations(output, y))
            continue
        size = max(1, LARGEST // max(1, output.shape[1:].numel()))
        for start in range(0, len(output), size):
            cut = slice(start, start + size)
            part = _cut(output, cut)
            at = likelihood_at_nodes(model, part, posteriors)
            likelihood = in_single(at.likelihood)
            found = _read(likelihood, at)
            if y is not None:
                correlation = _correlation(part) if model.terms == "elements" else None
                found["log_density"] = _log_density(likelihood, at, y[cut], correlation)
            parts.append(found)
    return likelihood, {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _cut(output: RandomTensor, cut: slice) -> RandomTensor:
    covariance = None if output.covariance is None else output.covariance[cut]
    part = RandomTensor(output.loc[cut], output.variance[cut], output.settings, covariance)
    form = output.form_covariance
    part.form_covariance = None if form is None else lambda: form()[cut]
    return part


def _read(likelihood: Any, at: AtNodes) -> Values:
    """Average the moments of a likelihood ``(nodes, N)`` over its nodes."""
    base = base_of(likelihood)
    probs = class_probabilities(base)
    means = base.mean if probs is None else probs
    mean, own = averages(means, at.weights.to(means))
    # An indicator has the variance m (1 - m), which includes the variance of the function.
    if probs is None:
        variance = averages(base.variance, at.weights.to(means))[0] + own
    else:
        variance = mean * (1 - mean)
    found = {"mean": mean, "variance": variance, "function_variance": own}
    if (entropy_at := entropy_of(base)) is not None:
        found["entropy"] = averages(entropy_at(means), at.weights.to(means))[0]
    return found


def _correlation(output: RandomTensor) -> Tensor | None:
    """Return the correlations between several outputs ``(N, E)``, ``(N, E, E)``, or None if unknown."""
    covariance = joint_covariance(output) if output.dim() == 2 and output.shape[1] > 1 else None
    if covariance is None:
        return None
    return correlations(covariance, output.variance)


def _log_density(likelihood: Any, at: AtNodes, y: Tensor, correlation: Tensor | None) -> Tensor:
    """Return the log of the predictive density of observations, ``(N,)``.

    With normal and Student's t noise the function is integrated exactly, and only the noise scale has
    nodes. The elements of an example are jointly normal given a shared scale, if their correlation is
    known and their noise normal, and else independent given shared variables. A count has nodes around
    its own log rate.
    """
    shape, base = likelihood.batch_shape[1:] + likelihood.event_shape, base_of(likelihood)
    y = checked_observations(y, likelihood, shape)
    with autocast_off(y):
        weights = at.weights.to(base.mean)
        if isinstance(base, Poisson):
            log_rates = base.log_rate if isinstance(base, LogRatePoisson) else base.rate.log()
            counts = poisson_log_normal_log_prob(y, *averages(log_rates, weights))
            return counts.flatten(1).sum(-1) if counts.dim() > 1 else counts
        if not isinstance(base, (Normal, StudentT)):
            log_probs = base.log_prob(y)
        else:
            mean, own, noise, weights = _given_noise(base, at.inner, weights)
            is_joint = isinstance(base, Normal) and len(weights) == at.shared
            if correlation is not None and is_joint:
                joint = []  # one node at a time, for memory
                for loc, scale, sigma in zip(mean, floored_sqrt(own), noise, strict=True):
                    covariance = correlation * scale.unsqueeze(-1) * scale.unsqueeze(-2)
                    covariance = covariance + torch.diag_embed(sigma.square())
                    normal = MultivariateNormal(loc, covariance, validate_args=False)
                    joint.append(normal.log_prob(y))
                return _log_average(weights, torch.stack(joint))
            if isinstance(base, StudentT):
                # All examples share it, as a noise scale that is a site.
                df = base.df if at.inner == 1 else base.df.unflatten(0, (at.inner, -1))[0]
                log_probs = student_t_plus_normal_log_prob(y - mean, df, noise, own)
            else:
                scale = floored_sqrt(noise.square() + own)
                log_probs = Normal(mean, scale, validate_args=False).log_prob(y)
    weights = weights.to(log_probs).reshape(-1, at.shared)
    log_probs = log_probs.unflatten(0, weights.shape)
    of_shared = weights.sum(0)
    each = _log_average(weights / of_shared, log_probs)
    return _log_average(of_shared, each.flatten(2).sum(-1) if each.dim() > 2 else each)


def student_t_plus_normal_log_prob(
    value: Tensor, df: Tensor, scale: Tensor, variance: Tensor
) -> Tensor:
    r"""Return the log density of Student's t noise of a scale plus a normal with mean zero.

    The noise is normal given a precision :math:`g \sim \mathrm{Gamma}(\nu / 2, \nu / 2)`, so that the
    sum has the variance :math:`\sigma^2 / g + v`. Nodes are evenly spaced in :math:`\log g`; all parts
    that they leave out are below exp(-30) of the density. Terms of the size of df are in double.
    """
    dtype = value.dtype
    value, df, scale, variance = (part.double() for part in (value, df, scale, variance))
    width = (2 / df).sqrt()  # of the density of log g
    low = -(value / scale).square().div(df).log1p() - 60 / (df + 1) - 8 * width
    high = torch.minimum(8 * width, (60 / df).log1p() + 1)
    low, high = low.detach(), high.detach()
    step = (high - low) / (PRECISIONS - 1)
    total = torch.full_like(low, -math.inf)
    for number in range(PRECISIONS):  # one node at a time, for memory
        log_g = low + number * step
        of_sum = scale.square() * (-log_g).exp() + variance
        log_normal = -0.5 * (value.square() / of_sum + of_sum.log())
        total = torch.logaddexp(total, log_normal + df / 2 * (log_g - log_g.exp()))
    constant = df / 2 * (df / 2).log() - torch.lgamma(df / 2) - math.log(2 * math.pi) / 2
    return (total + step.log() + constant).to(dtype)


def poisson_log_normal_log_prob(y: Tensor, loc: Tensor, variance: Tensor) -> Tensor:
    """Return the log probability of counts whose log rate is normal.

    Gauss-Hermite quadrature around the mode of the log rate given the count, with the curvature there:
    large counts know their rate better than the prediction. Their terms cancel, and are in double.
    """
    dtype, (y, loc, variance) = loc.dtype, (part.double() for part in (y, loc, variance))
    scale = floored_sqrt(variance)
    with torch.no_grad():
        # From the right of the mode Newton's method approaches it without passing it.
        start = (y.clamp_min(1).log() - loc) / scale.clamp_min(torch.finfo(scale.dtype).eps)
        mode = start.clamp_min(0)
        for _ in range(NEWTON_STEPS):
            rate = (loc + scale * mode).exp()
            mode = mode + (scale * (y - rate) - mode) / (1 + variance * rate)
        width = (1 + variance * (loc + scale * mode).exp()).rsqrt()
    nodes, weights = gauss_hermite(32, loc)
    nodes = nodes.reshape(-1, *(1 for _ in loc.shape))
    at = mode + width * nodes
    log_rate = loc + scale * at
    log_terms = y * log_rate - log_rate.exp() + (nodes.square() - at.square()) / 2
    counts = _log_average(weights, log_terms) + width.log() - torch.lgamma(y + 1)
    return counts.to(dtype)


def _given_noise(
    base: Normal | StudentT, inner: int, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return mean and variance of the function given the noise scale, the scale, and weights.

    Each is ``(nodes, N, ...)``, at the nodes of the variables that the scale depends on.
    """
    if inner == 1:  # no grid: the scale does not depend on the function
        mean, own = averages(base.mean, weights)
        return mean.expand_as(base.mean), own.expand_as(base.mean), base.scale, weights
    means, scale, both = (
        part.unflatten(0, (inner, -1)) for part in (base.mean, base.scale, weights)
    )
    mean, own = averages(means, both.sum(1))
    return mean, own, scale[0], both.sum(0)


def _log_average(weights: Tensor, log_values: Tensor) -> Tensor:
    """Return the log of a weighted sum over the first dimension; weights cover leading dimensions."""
    ones = (1 for _ in log_values.shape[weights.dim() :])
    return (weights.log().reshape(*weights.shape, *ones) + log_values).logsumexp(0)


def _mixture(like: Any, members: Values) -> Prediction:
    """Return the prediction of an equal mixture of posteriors, given moments ``(members, N, ...)``."""
    base, averages = base_of(like), Averages()
    averages.add(members)
    found: dict[str, Any] = averages.result(entropy_of(base))
    found["function_variance"] = found["function_variance"] + members["function_variance"].mean(0)
    likelihood = _likelihood(base, members["mean"], members["variance"])
    return Prediction(**found, likelihood=likelihood)


def _likelihood(base: Any, means: Tensor, variances: Tensor) -> Any:
    """Return the predictive distribution of each member, ``(members, N)``, or None."""
    made: Any
    if isinstance(base, Normal):
        made = Normal(means, floored_sqrt(variances), validate_args=False)
    elif isinstance(base, Bernoulli):
        made = Bernoulli(means, validate_args=False)
    elif isinstance(base, Categorical):
        made = Categorical(means, validate_args=False)
    else:
        return None
    return Independent(made, len(made.batch_shape) - 2)
