"""The terms of the evidence lower bound without draws, by the moments of the net's output."""

from collections.abc import Callable
from inspect import signature
from typing import Any

import pyro.poutine as poutine
import torch
from torch import Tensor

from pyro_structvi._pyro import site_values
from pyro_structvi.infer.terms import ELBOTerms, average, terms_of
from pyro_structvi.linalg.precision import at_least_single, autocast_off
from pyro_structvi.moments.integration import (
    AtNodes,
    excess_of_log_total,
    is_softmax,
    likelihood_at_nodes,
    observation_at,
)
from pyro_structvi.moments.linear import by_name, member_numbers, posteriors_of, random_values
from pyro_structvi.moments.net import check_served, output_moments
from pyro_structvi.moments.random_tensor import Settings
from pyro_structvi.nn.likelihood import Likelihood
from pyro_structvi.nn.random_module import read_declared
from pyro_structvi.weights.handlers import LeaveUndrawn
from pyro_structvi.weights.torch_distributions import in_single


def expected_terms(
    model: Any, guide: Any, args: tuple[Any, ...], kwargs: dict[str, Any], bounds: bool
) -> ELBOTerms:
    """Return the terms of the bound, with the expected log likelihood by moments and quadrature.

    Args:
        model: A likelihood around a net.
        guide: A guide of this package.
        args: Their arguments.
        kwargs: Their keyword arguments.
        bounds: Whether a lower bound in closed form stands in the place of quadrature.

    Raises:
        TypeError: If model or guide is something else.
        ValueError: If there are no observations.
        NotImplementedError: If a function of the net has no moments.

    References:
        Wu, Nowozin, Meeds, Turner, Hernandez-Lobato and Gaunt (2019), "Deterministic variational
        inference for robust Bayesian neural networks", Eqs. 3 to 8.
    """
    check_served(model, guide, "guide")
    bound = signature(model.forward).bind(*args, **kwargs)
    x, y = bound.arguments["x"], bound.arguments.get("y")
    if y is None:
        raise ValueError("`y` must be given, the observations, but got None.")
    joint = guide.begin_pass(*args, **kwargs)
    settings = Settings()

    def of_member(number: int | None) -> ELBOTerms:
        sites = posteriors_of(joint, number)
        output = output_moments(model, random_values(sites, settings), x, settings)
        kls = _kl_terms(model, guide.in_pass(joint, number), args, kwargs)
        if bounds:
            at = observation_at(model, output.loc, y)
            expected = (model.lower_bound(output.loc, output.variance, at.y) * at.scale).sum()
        elif is_softmax(model):
            at = observation_at(model, output.loc, y)
            each = at.likelihood.log_prob(at.y) - excess_of_log_total(output)
            expected = (each * at.scale).sum()
        else:
            at = likelihood_at_nodes(model, output, by_name(sites), y)
            expected = _expected(at)
        return ELBOTerms({at.site: expected}, kls.kl, kls.sampled)

    return average([of_member(number) for number in member_numbers(guide)])


def _expected(at: AtNodes) -> Tensor:
    """Return the expected log likelihood of a batch, scaled as the model scales it."""
    y, likelihood = at_least_single(at.y), in_single(at.likelihood)
    with autocast_off(y):
        log_probs = likelihood.log_prob(y)
    each = torch.einsum("k,k...->...", at.weights.to(log_probs), log_probs)
    expected: Tensor = (each * at.scale).sum()
    return expected


def _kl_terms(
    model: Likelihood, guide: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ELBOTerms:
    """Return the KLs of all sites that a model declares, without running its net."""

    def priors() -> None:
        with site_values(model):
            read_declared(model)

    with LeaveUndrawn():
        guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
    model_trace = poutine.trace(poutine.replay(priors, trace=guide_trace)).get_trace()
    return terms_of(model_trace, guide_trace, 0)
