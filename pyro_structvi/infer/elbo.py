"""The evidence lower bound with its KL terms in closed form."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.poutine as poutine
import torch
from pyro.distributions import Delta
from pyro.distributions.util import scale_and_mask
from pyro.infer import ELBO
from pyro.infer.util import is_validation_enabled, torch_item
from pyro.poutine.util import prune_subsample_sites
from pyro.util import check_model_guide_match, check_site_shape
from torch import Tensor
from torch.distributions import kl_divergence

from pyro_structvi._checks import check_positive_integer
from pyro_structvi.distributions import Auxiliary, JoinedPrior, PointMass
from pyro_structvi.families.coupling import one_member
from pyro_structvi.families.family import one_step
from pyro_structvi.guides import StructuredGuide
from pyro_structvi.infer.schedules import Schedule
from pyro_structvi.lazy.messenger import DelayDraws
from pyro_structvi.lazy.site_role import SiteRole
from pyro_structvi.lazy.weight import LazyWeight
from pyro_structvi.linalg.precision import autocast_off


class SampledKLWarning(UserWarning):
    """The KL of a site has no closed form and is estimated by sampling."""


@dataclass(frozen=True)
class ELBOTerms:
    """The parts of one estimate of the evidence lower bound, in nats.

    Attributes:
        log_likelihood: Estimated expectation of the log density of each observed site, scaled to
            the whole data set.
        kl: The KL divergence of each latent site's posterior from its prior.
        sampled: The latent sites whose KL was estimated from one draw, for want of a closed form.
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
        likelihood = (
            torch.stack(list(self.log_likelihood.values())).sum() if self.log_likelihood else 0
        )
        kl = torch.stack(list(self.kl.values())).sum() if self.kl else 0
        bound = likelihood - kl_weight * kl
        return bound if isinstance(bound, Tensor) else torch.tensor(float(bound))


class StructuredELBO(ELBO):
    r"""The evidence lower bound that evaluates what enters it, and nothing else.

    .. math:: \mathcal{L} = \mathrm{E}_q[\log p(y \mid x, W)] - w \sum_s \mathrm{KL}(q_s \| p_s)

    Log densities are computed at observed sites only, so a weight that has not been drawn stays
    undrawn. Where no closed form is registered, ``log q - log p`` at the draw stands in, and a
    :class:`SampledKLWarning` names the site once. The closed form needs the posteriors of
    different sites to be independent, or to say at an auxiliary site what they share, as in every
    guide of this package. For an ensemble of points the terms are averages over its members.

    The scale and mask of a latent site are those of the *model*: a ``poutine.scale`` around the
    model weighs the KL of the sites inside it.

    Args:
        kl_weight: The weight w of the KL: a number, or a schedule from the training step to a number.
        num_particles: How many independent draws to average.
        vectorize_particles: Whether one pass is to run them all, by :func:`torch.func.vmap` over guide
            and model: faster for small nets, and as many times the memory. Not for layers that update
            running statistics. Pyro's validation then looks at shapes only, not at values.

    Raises:
        ValueError: If ``kl_weight`` is negative or not finite, or ``num_particles`` is below 1.
        RuntimeError: In training, if particles or members cannot be run in one pass.

    Example:
        >>> from pyro_structvi import KTiedGuide, Regressor, bayesianize
        >>> net = bayesianize(torch.nn.Linear(2, 1), prior=1.0)
        >>> model = Regressor(net, num_data=8, noise_scale=0.1)
        >>> guide, elbo = KTiedGuide(model), StructuredELBO()
        >>> terms = elbo.terms(model, guide, torch.zeros(8, 2), torch.zeros(8, 1))
        >>> sorted(terms.kl)
        ['net.bias', 'net.weight']
    """

    def __init__(
        self,
        kl_weight: float | Schedule = 1.0,
        num_particles: int = 1,
        vectorize_particles: bool = False,
    ) -> None:
        check_positive_integer("num_particles", num_particles)
        if not callable(kl_weight) and not 0 <= kl_weight < math.inf:
            raise ValueError(
                f"`kl_weight` must be a finite number of at least 0, but got {kl_weight!r}."
            )
        super().__init__(num_particles=num_particles, vectorize_particles=vectorize_particles)
        self.kl_weight = kl_weight
        self.step = 0
        self._warned: set[str] = set()

    @property
    def current_kl_weight(self) -> float:
        """The weight of the KL at the present step."""
        return self.kl_weight(self.step) if callable(self.kl_weight) else self.kl_weight

    def advance(self) -> None:
        """Count a training step, on which the schedule of the KL's weight depends."""
        self.step += 1

    def terms(
        self, model: Callable[..., Any], guide: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> ELBOTerms:
        """Estimate the bound and return its parts, differentiable.

        Args:
            model: The model.
            guide: The guide.
            *args: Their arguments.
            **kwargs: Their keyword arguments.

        Returns:
            The parts, averaged over the particles.

        Raises:
            ValueError: If a latent site of the model is missing in the guide.
        """
        ensemble = None
        if isinstance(guide, StructuredGuide):
            if not guide.is_initialized:
                guide.initialize(*args, **kwargs)
            ensemble = guide.ensemble

        def run(number: Tensor | int) -> ELBOTerms:
            with one_member(None if ensemble is None else number):
                return self._particle_terms(*self._get_trace(model, guide, args, kwargs))

        count = self.num_particles * (1 if ensemble is None else ensemble.size)
        with one_step():
            if count == 1:
                return run(0)
            if self.vectorize_particles:
                return _run_together(run, count, guide, "vectorize_particles=False")
            if ensemble is not None and ensemble.vectorize:
                return _run_together(run, count, guide, "vectorize=False")
            return _average([run(number) for number in range(count)])

    def differentiable_loss(
        self, model: Callable[..., Any], guide: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Tensor:
        """Return the loss, minus the bound; a training step where gradients are enabled."""
        loss = -self.terms(model, guide, *args, **kwargs).weighted(self.current_kl_weight)
        if torch.is_grad_enabled():
            self.advance()
        return loss

    def loss(
        self, model: Callable[..., Any], guide: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> float:
        """Return the loss as a number, without gradients and without a training step."""
        with torch.no_grad():
            return float(torch_item(self.differentiable_loss(model, guide, *args, **kwargs)))

    def loss_and_grads(
        self, model: Callable[..., Any], guide: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> float:
        """Return the loss as a number and add its gradients to the parameters."""
        loss = self.differentiable_loss(model, guide, *args, **kwargs)
        if loss.requires_grad:
            torch.autograd.backward(loss)
        return float(torch_item(loss))

    def _get_trace(
        self,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, Any]:
        with DelayDraws():
            guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
        replayed = poutine.replay(model, trace=guide_trace)
        model_trace = poutine.trace(replayed).get_trace(*args, **kwargs)
        if is_validation_enabled():
            check_model_guide_match(model_trace, guide_trace, self.max_plate_nesting)
        return prune_subsample_sites(model_trace), prune_subsample_sites(guide_trace)

    def _particle_terms(self, model_trace: Any, guide_trace: Any) -> ELBOTerms:
        likelihood: dict[str, Tensor] = {}
        kl: dict[str, Tensor] = {}
        sampled = []
        joints = _joint_sites(guide_trace)
        parts = {part for names in joints.values() for part in names}
        model_trace.compute_log_prob(site_filter=_enters_likelihood)
        for name, site in model_trace.nodes.items():
            if site["type"] != "sample":
                continue
            if site["is_observed"]:
                if _enters_likelihood(name, site):
                    if is_validation_enabled():
                        check_site_shape(site, self.max_plate_nesting)
                    likelihood[name] = site["log_prob_sum"]
                continue
            if name in parts:
                continue
            if name not in guide_trace.nodes:
                raise ValueError(
                    f"The model's latent site '{name}' is missing in the guide. Call "
                    "`guide.initialize(...)` with the model's arguments so that it is found, or "
                    "add it to your guide."
                )
            kl[name], closed = _site_kl(guide_trace.nodes[name], site)
            if not closed:
                sampled.append(name)
        for name, names in joints.items():
            if any(part in model_trace.nodes for part in names):  # else this pass skips the layer
                prior = _join_priors(model_trace, *names)
                kl[name], closed = _site_kl(guide_trace.nodes[name], prior)
                if not closed:
                    sampled.append(name)
        done = kl.keys() | model_trace.nodes.keys() | parts
        for name, site in guide_trace.nodes.items():
            if site["type"] == "sample" and name not in done:
                closed = isinstance(site["fn"], Auxiliary)
                nats = site["fn"].kl() if closed else site["fn"].log_prob(site["value"])
                coupled = [part for part in SiteRole.of(site).coupled if part in model_trace.nodes]
                handled = _handlers_of(model_trace, coupled) if coupled else site
                kl[name] = scale_and_mask(nats, handled["scale"], handled["mask"]).sum()
                if not closed:
                    sampled.append(name)
        self._say_once(sampled)
        return ELBOTerms(likelihood, kl, tuple(sampled))

    def _say_once(self, sampled: list[str]) -> None:
        new = [name for name in sampled if name not in self._warned]
        if new:
            self._warned.update(new)
            warnings.warn(
                f"No closed-form KL is registered for the sites {new}; it is estimated from one "
                "draw for each particle, which is unbiased but noisier.",
                SampledKLWarning,
                stacklevel=2,
            )


def _average(passes: list[ELBOTerms]) -> ELBOTerms:
    """Average the terms of several passes."""

    def mean(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.stack([part[name] for part in parts]).mean(0) for name in parts[0]}

    likelihoods, kls = (
        [getattr(each, name) for each in passes] for name in ("log_likelihood", "kl")
    )
    return ELBOTerms(mean(likelihoods), mean(kls), passes[0].sampled)


def _run_together(
    run: Callable[[Any], ELBOTerms], count: int, guide: Callable[..., Any], remedy: str
) -> ELBOTerms:
    """Run several passes as one, by vmap, and average their terms."""
    if not isinstance(guide, StructuredGuide):
        raise TypeError(
            f"`vectorize_particles` needs a StructuredGuide, but got {type(guide).__name__}. Leave "
            "it out to run one particle after another."
        )
    guide.factorize()
    sampled: tuple[str, ...] = ()

    def terms_of(number: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        nonlocal sampled
        terms = run(number)
        sampled = terms.sampled
        return terms.log_likelihood, terms.kl

    numbers = torch.arange(count, device=next(guide.parameters()).device)
    checks_shapes = is_validation_enabled()
    try:
        with pyro.validation_enabled(False):  # of values, which there are none of under vmap
            pyro.infer.enable_validation(checks_shapes)
            parts = torch.func.vmap(terms_of, randomness="different")(numbers)
    except RuntimeError as error:
        run(0)  # what is wrong in any case, the model says itself
        raise RuntimeError(
            "This model cannot run several draws of its weights in one pass: "
            f"{str(error).splitlines()[0]} Pass `{remedy}` to run one after another."
        ) from error
    likelihood, kl = ({name: value.mean(0) for name, value in part.items()} for part in parts)
    return ELBOTerms(likelihood, kl, sampled)


def _enters_likelihood(name: str, site: Any) -> bool:
    """Whether a site is an observation with a density, not the record of a deterministic value."""
    return bool(site["is_observed"]) and not site["infer"].get("_deterministic")


def _is_delta(distribution: Any) -> bool:
    while isinstance(distribution, torch.distributions.Independent):
        distribution = distribution.base_dist
    return isinstance(distribution, Delta) and not isinstance(distribution, PointMass)


def _joint_sites(guide_trace: Any) -> dict[str, tuple[str, ...]]:
    """Return the guide's joint sites of a weight and its bias, with the names of the parts."""
    return {
        name: joins
        for name, site in guide_trace.nodes.items()
        if site["type"] == "sample" and (joins := SiteRole.of(site).joins)
    }


def _join_priors(model_trace: Any, weight: str, bias: str) -> dict[str, Any]:
    """Return the model's two sites of a weight and its joined bias as one."""
    sites = [model_trace.nodes.get(name) for name in (weight, bias)]
    if any(site is None or site["is_observed"] for site in sites):
        raise ValueError(
            f"The guide has one posterior for the weight '{weight}' and its bias '{bias}', but the "
            "model does not sample both. Make the guide from the model as it is trained, or give the "
            "weight a family with `join_bias=False`."
        )
    handled = _handlers_of(model_trace, (weight, bias))
    return {**handled, "fn": JoinedPrior(*(site["fn"] for site in sites))}


def _handlers_of(model_trace: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return the scale and the mask that sites with one posterior have in the model."""
    first, *others = (model_trace.nodes[name] for name in names)
    for attribute, default in (("scale", 1.0), ("mask", True)):
        ours = default if first[attribute] is None else first[attribute]
        for name, site in zip(names[1:], others, strict=True):
            other = default if site[attribute] is None else site[attribute]
            if ours is not other and not torch.equal(torch.as_tensor(ours), torch.as_tensor(other)):
                raise ValueError(
                    f"The sites '{names[0]}' and '{name}' have one posterior, and so must have one "
                    f"{attribute} in the model, but got {ours} and {other}. Put both under the same "
                    "handler, or give them posteriors of their own (`join_bias=False` for a bias)."
                )
    return {"scale": first["scale"], "mask": first["mask"]}


def _site_kl(guide_site: Any, model_site: Any) -> tuple[Tensor, bool]:
    """Return the KL of one site under the model's scale and mask, and whether it is closed form."""

    def weighed(nats: Tensor) -> Tensor:
        total: Tensor = scale_and_mask(nats, model_site["scale"], model_site["mask"]).sum()
        return total

    posterior, prior, value = guide_site["fn"], model_site["fn"], guide_site["value"]
    try:
        if _is_delta(posterior):  # Pyro's KL of a Delta forgets its log_density, the Jacobian
            raise NotImplementedError
        with autocast_off(value):
            return weighed(kl_divergence(posterior, prior)), True
    except NotImplementedError:
        if isinstance(value, LazyWeight):
            value = value.draw_for_density()
        return weighed(posterior.log_prob(value)) - weighed(prior.log_prob(value)), False
