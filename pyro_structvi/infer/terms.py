"""The terms of the evidence lower bound, by the role of each site in the traces of model and guide."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.distributions import Delta, MaskedDistribution
from pyro.distributions.util import scale_and_mask
from pyro.infer.util import is_validation_enabled
from pyro.util import check_site_shape
from torch import Tensor
from torch.distributions import constraints, kl_divergence

from pyro_structvi._checks import LATER, shape_text
from pyro_structvi._pyro import site_values
from pyro_structvi.linalg.matrices import at_least_single, autocast_off
from pyro_structvi.moments.integration import (
    excess_of_log_total,
    is_softmax,
    likelihood_at_nodes,
    observation_at,
)
from pyro_structvi.moments.linear import member_numbers, posteriors_of, random_values
from pyro_structvi.moments.net import check_served, output_moments
from pyro_structvi.moments.random_tensor import Settings
from pyro_structvi.nn.likelihood import Likelihood
from pyro_structvi.nn.random_module import read_declared
from pyro_structvi.weights.lazy import DelayDraws, LazyWeight
from pyro_structvi.weights.site_distributions import Auxiliary, JoinedPrior, PointMass
from pyro_structvi.weights.site_role import SiteRole, sample_nodes
from pyro_structvi.weights.torch_distributions import (
    base_of,
    element_support,
    in_single,
    may_depend,
)
from pyro_structvi.weights.weight_distribution import WeightDistribution


@dataclass(frozen=True)
class ELBOTerms:
    """The parts of one estimate of the evidence lower bound, in nats.

    Attributes:
        log_likelihood: Estimated expectation of the log density of each observed site, scaled to
            the whole data set.
        kl: The KL divergence of each latent site's posterior from its prior.
        sampled: The weights whose KL was estimated from one draw, for want of a closed form.
    """

    log_likelihood: dict[str, Tensor]
    kl: dict[str, Tensor]
    sampled: tuple[str, ...] = ()

    @property
    def elbo(self) -> Tensor:
        """The bound itself, with the KL at its full weight."""
        return self.weighted(1.0)

    def weighted(self, kl_weight: float | Tensor) -> Tensor:
        """Return the sum of log likelihoods minus ``kl_weight`` times the sum of KLs."""
        likelihood, kl = (
            torch.stack([*part.values()]).sum() if part else 0
            for part in (self.log_likelihood, self.kl)
        )
        bound = likelihood - kl_weight * kl
        return bound if isinstance(bound, Tensor) else torch.tensor(float(bound))


Term = tuple[Tensor, bool]  # nats, and whether it is a weight's KL that was sampled


def terms_of(model_trace: Any, guide_trace: Any, max_plate_nesting: float) -> ELBOTerms:
    """Return the terms of one pass, each by the role of its site, from the traces of model and guide."""
    model, guide = sample_nodes(model_trace), sample_nodes(guide_trace)
    likelihood: dict[str, Tensor] = {}
    kl: dict[str, Term] = {}
    for name, site in model.items():
        if site["is_observed"]:
            if not site["infer"].get("_deterministic"):  # the record of a value, without a density
                likelihood[name] = _observed_term(model_trace, name, max_plate_nesting)
        elif name not in guide:
            remedy = (
                "Train by Pyro's `SVI` with `TraceEnum_ELBO`, which sums over discrete values."
                if site["fn"].has_enumerate_support
                else "Call `guide.initialize(...)` with the model's arguments so that it is found, or "
                "add it to your guide."
            )
            raise ValueError(f"The model's latent site '{name}' is missing in the guide. {remedy}")
        elif not SiteRole.of(guide[name]).is_slice:
            kl[name] = _latent_term(guide[name], site)
    for name, site in guide.items():
        _check_reparametrized(name, site["fn"])
        role = SiteRole.of(site)
        if any(part in model for part in role.joins):
            kl[name] = _joined_term(site, role.joins, model)
        elif name not in model and not role.is_slice:
            if not role.is_auxiliary:
                raise ValueError(
                    f"The guide's site '{name}' is missing in the model, so nothing would bound its "
                    "posterior. Let the model sample it in each pass, used or not; or mark it by "
                    "`infer={'is_auxiliary': True}` if only the guide is to have it."
                )
            coupled = [part for part in role.coupled if part in model]
            handled = _handlers_of(coupled, model) if coupled else site
            is_closed = isinstance(site["fn"], Auxiliary)
            nats = site["fn"].kl() if is_closed else site["fn"].log_prob(site["value"])
            kl[name] = _weighed(nats, handled), not is_closed
    sampled = tuple(name for name, (_, is_sampled) in kl.items() if is_sampled)
    return ELBOTerms(likelihood, {name: nats for name, (nats, _) in kl.items()}, sampled)


def _check_reparametrized(name: str, posterior: Any) -> None:
    """Raise a ``NotImplementedError`` if gradients do not pass through the draws of a site."""
    if torch.is_grad_enabled() and not posterior.has_rsample and may_depend(posterior):
        raise NotImplementedError(
            f"The guide's site '{name}' must have draws that can be differentiated, but "
            f"{type(posterior).__name__} has none (`has_rsample` is False), and its parameters would "
            "get no gradient of the likelihood. Train by Pyro's `SVI` with `TraceGraph_ELBO`, or with "
            "`TraceEnum_ELBO`, which sums over discrete values."
        )


def _observed_term(trace: Any, name: str, max_plate_nesting: float) -> Tensor:
    """Return the log density of an observation, in single precision at least."""
    site = trace.nodes[name]
    site["fn"], site["value"] = in_single(site["fn"]), at_least_single(site["value"])
    with autocast_off(site["value"]):
        site["value"], is_inside = _checked(site["fn"], site["value"])
        trace.compute_log_prob(site_filter=lambda other, _: other == name)
    if is_validation_enabled():
        check_site_shape(site, max_plate_nesting)
    return _with_support(site["log_prob_sum"], is_inside)


def _checked(likelihood: Any, value: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return an observation, and in a record whether it is in the support, which Python would check."""
    while isinstance(likelihood, (torch.distributions.Independent, MaskedDistribution)):
        likelihood = likelihood.base_dist
    if likelihood._validate_args is not LATER:
        return value, None
    try:
        support = element_support(likelihood.support)
    except NotImplementedError:  # of which Python warns
        return value, None
    if support is constraints.real:  # only NaN is not in it
        return value, None
    is_inside = support.check(value)
    if support.is_discrete and not support.event_dim:
        # A wrong index ends the process on a GPU.
        value = torch.where(is_inside, value, 0)
    return value, is_inside.all()


def _with_support(nats: Tensor, is_inside: Tensor | None) -> Tensor:
    """Return a log density, which outside of the support is minus infinity."""
    return nats if is_inside is None else nats + is_inside.to(nats.dtype).log()


def _latent_term(site: Any, in_model: Any) -> Term:
    """Return the KL of a site's posterior from its prior, under the model's scale and mask."""
    posterior, prior, value = in_single(site["fn"]), in_single(in_model["fn"]), site["value"]
    base, use = base_of(posterior), SiteRole.of(site).use
    try:
        # Pyro's KL of a Delta forgets its log_density, the Jacobian.
        if isinstance(base, Delta) and not isinstance(base, PointMass):
            raise NotImplementedError
        # A closed form takes the marginals of sites whose posterior is joint.
        if use is not None and use.is_dependent:
            raise NotImplementedError
        with autocast_off(value):
            return _weighed(kl_divergence(posterior, prior), in_model), False
    except NotImplementedError:
        if isinstance(value, LazyWeight):
            value = value.draw_for_density()
        nats = _weighed(posterior.log_prob(value), in_model)
        nats = nats - _weighed(prior.log_prob(value), in_model)
        is_weight = isinstance(posterior, WeightDistribution) or len(posterior.event_shape) > 1
        return nats, is_weight


def _joined_term(site: Any, parts: Sequence[str], model: dict[str, Any]) -> Term:
    """Return the KL of a weight and its bias together from the priors of the model's two sites."""
    weight, bias = parts
    if any(part not in model or model[part]["is_observed"] for part in parts):
        raise ValueError(
            f"The guide has one posterior for the weight '{weight}' and its bias '{bias}', but the "
            "model does not sample both. Make the guide from the model as it is trained, or give the "
            "weight a family with `join_bias=False`."
        )
    prior = JoinedPrior(*(model[part]["fn"] for part in parts))
    return _latent_term(site, {**_handlers_of(parts, model), "fn": prior})


def _weighed(nats: Tensor, handled: Any) -> Tensor:
    weighed: Tensor = scale_and_mask(nats, handled["scale"], handled["mask"])
    if weighed.numel() != nats.numel():
        raise ValueError(
            f"A scale or mask around the site '{handled['name']}' must have its batch shape "
            f"{shape_text(nats.shape)}, but gives {shape_text(weighed.shape)}, which would count its KL "
            "several times. Put a handler for each example around the observation only."
        )
    return weighed.sum()


def _handlers_of(names: Sequence[str], model: dict[str, Any]) -> dict[str, Any]:
    """Return the scale and the mask that sites with one posterior have in the model."""
    first, *others = (model[name] for name in names)
    for attribute, default in (("scale", 1.0), ("mask", True)):
        ours = default if first[attribute] is None else first[attribute]
        for name, site in zip(names[1:], others, strict=True):
            other = default if site[attribute] is None else site[attribute]
            if ours is not other and not torch.equal(torch.as_tensor(ours), torch.as_tensor(other)):
                raise ValueError(
                    f"The sites '{names[0]}' and '{name}' have one posterior, and so must have one "
                    f"{attribute} in the model, but got {ours} and {other}. Put both under the same "
                    "handler, or give each a separate posterior (`join_bias=False` for a bias)."
                )
    return {"name": names[0], "scale": first["scale"], "mask": first["mask"]}


def average(passes: list[ELBOTerms]) -> ELBOTerms:
    """Average the terms of several passes."""
    if len(passes) == 1:
        return passes[0]

    def mean(*parts: dict[str, Tensor]) -> dict[str, Tensor]:
        # A pass may lack a site, such as a member of a mixture without joined biases.
        names = dict.fromkeys(name for part in parts for name in part)
        each = {name: [part[name] for part in parts if name in part] for name in names}
        return {name: torch.stack(own).sum(0) / len(parts) for name, own in each.items()}

    likelihood = mean(*(each.log_likelihood for each in passes))
    sampled = dict.fromkeys(name for each in passes for name in each.sampled)
    return ELBOTerms(likelihood, mean(*(each.kl for each in passes)), tuple(sampled))


def expected_terms(
    model: Any, guide: Any, args: tuple[Any, ...], kwargs: dict[str, Any], bounds: bool
) -> ELBOTerms:
    """Return the terms of the bound, with the expected log likelihood by moments and quadrature.

    With ``bounds`` a lower bound in closed form replaces the quadrature.

    References:
        Wu, Nowozin, Meeds, Turner, Hernandez-Lobato and Gaunt (2019), "Deterministic variational
        inference for robust Bayesian neural networks", Eqs. 3 to 8.
    """
    check_served(model, guide, "guide")
    bound = signature(model.forward).bind(*args, **kwargs)
    x, y = bound.arguments["x"], bound.arguments.get("y")
    if y is None:
        raise ValueError("`y` must be given, the observations, but got None.")
    if bound.arguments.get("weights") is not None:
        raise NotImplementedError(
            "Weights of examples have no expectation by moments. Leave `estimator` out, so that the "
            "bound is estimated by draws."
        )
    joint = guide.begin_pass(*args, **kwargs)
    settings = Settings()

    def of_member(number: int | None) -> ELBOTerms:
        sites = posteriors_of(joint, number)
        # Jensen's bound holds for normal outputs, as they are given the features.
        output = output_moments(model, random_values(sites, settings), x, settings, draws=bounds)
        kls = _kl_terms(model, joint.program(number), args, kwargs)
        if bounds or is_softmax(model):
            at = observation_at(model, output.loc, y)
        else:
            at = likelihood_at_nodes(model, output, {site.name: q for site, q in sites}, y)
        observed, likelihood = at_least_single(at.y), in_single(at.likelihood)
        observed, is_inside = _checked(likelihood, observed)
        if bounds:
            each = model.lower_bound(output.loc, output.variance, observed)
        elif is_softmax(model):
            each = likelihood.log_prob(observed) - excess_of_log_total(output)
        else:
            with autocast_off(observed):
                log_probs = likelihood.log_prob(observed)
            each = torch.einsum("k,k...->...", at.weights.to(log_probs), log_probs)
        nats = _with_support((each * at.scale).sum(), is_inside)
        return ELBOTerms({at.site: nats}, kls.kl, kls.sampled)

    return average([of_member(number) for number in member_numbers(guide)])


def _kl_terms(
    model: Likelihood, guide: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ELBOTerms:
    """Return the KLs of all sites that a model declares, without running its net."""

    def priors() -> None:
        with site_values(model):
            read_declared(model)

    with DelayDraws(always=True):
        guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
    model_trace = poutine.trace(poutine.replay(priors, trace=guide_trace)).get_trace()
    return terms_of(model_trace, guide_trace, 0)
