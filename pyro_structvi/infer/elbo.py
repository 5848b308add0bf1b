"""The evidence lower bound with its KL terms in closed form, and schedules for the weight of the KL."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, SupportsFloat

import pyro
import pyro.poutine as poutine
import torch
from pyro.infer import ELBO
from pyro.infer.util import is_validation_enabled
from pyro.poutine.util import site_is_subsample
from pyro.util import check_model_guide_match
from torch import Tensor

from pyro_structvi._checks import (
    NO_CLASS,
    CheckedFields,
    Count,
    NonNegative,
    Program,
    checked,
    warn_user,
)
from pyro_structvi._torch import kernels_for_vmap, without_generators
from pyro_structvi.infer.terms import ELBOTerms, average, expected_terms, terms_of
from pyro_structvi.nn.random_module import transient_pass
from pyro_structvi.sites.finding import modules_of
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.weights.lazy import DelayDraws

Estimator = Literal["draws", "moments", "bound"]
Schedule = Annotated[Callable[[int], float], NO_CLASS]


@dataclass(frozen=True)
class LinearAnnealing(CheckedFields):
    """Rise linearly from ``start`` at step 0 to ``end`` at step ``num_steps``, and stay there.

    Both values are at least 0.

    Example:
        >>> weight = LinearAnnealing(num_steps=100)
        >>> weight(0), weight(25), weight(1000)
        (0.0, 0.25, 1.0)

    References:
        Swiatkowski et al. (2020), appendix A.2 of the submission to ICLR 2020: the k-tied Normal needs
        an annealed KL.
    """

    num_steps: Count
    start: NonNegative = 0.0
    end: NonNegative = 1.0

    @checked
    def __call__(self, step: int) -> float:
        """Return the value at a step, counted from 0."""
        fraction = min(step / self.num_steps, 1.0)
        return self.start + fraction * (self.end - self.start)


@dataclass(frozen=True)
class CosineDecay(CheckedFields):
    """Fall from ``start`` at step 0 to ``end`` at step ``num_steps`` by half a cosine, and stay there.

    Both values are at least 0.

    Example:
        >>> rate = CosineDecay(num_steps=100, start=0.1)
        >>> rate(0), round(rate(50), 3), rate(100)
        (0.1, 0.05, 0.0)
    """

    num_steps: Count
    start: NonNegative = 1.0
    end: NonNegative = 0.0

    @checked
    def __call__(self, step: int) -> float:
        """Return the value at a step, counted from 0."""
        fraction = min(step / self.num_steps, 1.0)
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * fraction)) / 2


class SampledKLWarning(UserWarning):
    """The KL of a weight has no closed form and is estimated by sampling."""


class StructuredELBO(ELBO):
    r"""The evidence lower bound, which evaluates only the densities that it needs.

    .. math:: \mathcal{L} = \mathrm{E}_q[\log p(y \mid x, W)] - w \sum_s \mathrm{KL}(q_s \| p_s)

    Log densities are computed at observed sites only, so a weight that has not been sampled stays
    unsampled. Without a closed form or a registered quadrature the KL is ``log q - log p`` at the draw,
    after one :class:`SampledKLWarning` for each weight. Posteriors of different sites must be
    independent or share an auxiliary site, as in every guide of this package. For a mixture of guides
    the terms are averages over its members, whatever their weights. Latent sites take scale and mask
    from the *model*: a ``poutine.scale`` there weighs the KL of the sites inside.

    Args:
        num_particles: How many independent draws to average.
        kl_weight: The weight w of the KL: a number, or a schedule from the training step to a number.
        vectorize_particles: Whether one pass runs them all, by :func:`torch.func.vmap` over guide and
            model: faster for small nets, and as many times the memory. Not for layers that update
            running statistics. Pyro's validation then looks at shapes only.
        estimator: "draws" for an unbiased estimate by draws of weights or outputs; "moments" for one
            without noise, by the moments of the net's output (:class:`~pyro_structvi.moments.NetMoments`
            says what they leave out) and quadrature over the likelihood, exact to quadrature where only
            the last layer is random; "bound" for the same with Jensen's bound of the softmax, so that a
            classifier whose last layer alone is random has a true lower bound, in closed form.

    Raises:
        RuntimeError: In training, if particles or members cannot be run in one pass.

    Example:
        >>> from pyro_structvi import KTiedGuide, Regressor, bayesianize
        >>> net = bayesianize(torch.nn.Linear(2, 1), prior=1.0)
        >>> model = Regressor(net, num_data=8, noise_scale=0.1)
        >>> guide, elbo = KTiedGuide(model), StructuredELBO()
        >>> terms = elbo.terms(model, guide, torch.zeros(8, 2), torch.zeros(8, 1))
        >>> sorted(terms.kl)
        ['net.weight+bias']
    """

    @checked
    def __init__(
        self,
        num_particles: Count = 1,  # the first argument of Pyro's objectives, too
        *,
        kl_weight: NonNegative | Schedule = 1.0,
        vectorize_particles: bool = False,
        estimator: Estimator = "draws",
    ) -> None:
        super().__init__(num_particles=num_particles, vectorize_particles=vectorize_particles)
        if estimator != "draws" and num_particles > 1:
            raise ValueError(
                f'`num_particles` must be 1 with `estimator="{estimator}"`, which draws nothing, but '
                f"got {num_particles}. Leave it out."
            )
        self.estimator: Estimator = estimator
        self.kl_weight = kl_weight
        self.step = 0
        self._warned: set[str] = set()

    @property
    def current_kl_weight(self) -> float:
        """The weight of the KL at the present step.

        Raises:
            ValueError: If a schedule returns a number that is negative or not finite.
        """
        if not callable(self.kl_weight):
            return self.kl_weight
        weight: Any = self.kl_weight(self.step)
        number = float(weight) if isinstance(weight, SupportsFloat) else math.nan
        if not 0 <= number < math.inf:
            raise ValueError(
                "`kl_weight` must return a finite number of at least 0, but at step "
                f"{self.step} got {weight!r}."
            )
        return number

    def advance(self) -> None:
        """Count a training step, on which the schedule of the KL's weight depends."""
        self.step += 1

    @checked
    def terms(self, model: Program, guide: Program, *args: Any, **kwargs: Any) -> ELBOTerms:
        """Estimate the bound and return its parts, differentiable, averaged over the particles.

        Raises:
            ValueError: If a latent site of the model is missing in the guide.
        """
        # Within one block of autocast, torch would use the casts of the weights of the last step.
        torch.clear_autocast_cache()
        if self.estimator != "draws":
            bounds = self.estimator == "bound"
            terms = expected_terms(model, guide, args, kwargs, bounds)
        elif isinstance(guide, StructuredGuide):
            terms = self._particles(model, guide, args, kwargs)
        elif self.vectorize_particles and self.num_particles > 1:
            raise TypeError(
                f"`vectorize_particles` needs a StructuredGuide, but got {type(guide).__name__}. "
                "Leave it out to run one particle after another."
            )
        else:
            traces = (
                self._get_trace(model, guide, args, kwargs) for _ in range(self.num_particles)
            )
            terms = average([terms_of(*each, self.max_plate_nesting) for each in traces])
        new = [name for name in terms.sampled if name not in self._warned]
        if new:
            self._warned.update(new)
            warn_user(
                f"No closed-form KL is registered for the weights {new}; it is estimated from one "
                "draw for each particle, which is unbiased but noisier.",
                SampledKLWarning,
            )
        return terms

    def _particles(
        self, model: Program, guide: StructuredGuide, args: Any, kwargs: Any
    ) -> ELBOTerms:
        """Return the terms of all particles and members, in turn or in one pass by vmap."""
        joint, members = guide.begin_pass(*args, **kwargs), guide.num_members

        def run(number: Any) -> ELBOTerms:
            program = joint.program(number if members > 1 else None)
            traces = self._get_trace(model, program, args, kwargs)
            return terms_of(*traces, self.max_plate_nesting)

        count = self.num_particles * members
        if count == 1 or not (self.vectorize_particles or getattr(guide, "vectorize", False)):
            return average([run(number) for number in range(count)])
        joint.factorize()
        try:
            like = next(guide.parameters(), torch.empty(()))
            with kernels_for_vmap(like), transient_pass(modules_of(model)):
                own = run if guide.runs_together else without_generators(run)
                terms = _run_together(own, joint.stacked(count))
            guide.runs_together = True
            return terms
        except RuntimeError as error:
            # The model says itself what is wrong with one draw, too.
            terms_of(*self._get_trace(model, guide, args, kwargs), self.max_plate_nesting)
            of_objective = "`vectorize_particles=False` to the objective"
            place = of_objective if self.vectorize_particles else "`vectorize=False` to the guide"
            raise RuntimeError(
                "This model cannot run several draws of its weights in one pass: "
                f"{str(error).splitlines()[0]} Pass {place} to run one after another."
            ) from error

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
            return self.differentiable_loss(model, guide, *args, **kwargs).item()

    def loss_and_grads(
        self, model: Callable[..., Any], guide: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> float:
        """Return the loss as a number and add its gradients to the parameters."""
        loss = self.differentiable_loss(model, guide, *args, **kwargs)
        if loss.requires_grad:
            torch.autograd.backward(loss)
        return loss.item()

    def _get_trace(self, model: Program, guide: Program, args: Any, kwargs: Any) -> tuple[Any, Any]:
        with DelayDraws():
            guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
        replayed = poutine.replay(model, trace=guide_trace)
        model_trace = poutine.trace(replayed).get_trace(*args, **kwargs)
        _check_plates(model_trace)
        if is_validation_enabled():
            check_model_guide_match(model_trace, guide_trace, self.max_plate_nesting)
        return model_trace, guide_trace


def _check_plates(model_trace: Any) -> None:
    """Raise a ``ValueError`` for a plate of the model with the examples of a larger one of the guide."""
    for name, site in model_trace.nodes.items():
        if site_is_subsample(site) and len(site["value"]) > site["fn"].size:
            raise ValueError(
                f"The plate '{name}' has size {site['fn'].size} in the model, and the guide has "
                f"{len(site['value'])} examples in it. Make a new guide for other sizes; for "
                "mini-batches give the plate the size of all data, and `create_plates` to the guide."
            )


def _run_together(run: Callable[[Any], ELBOTerms], numbers: Any) -> ELBOTerms:
    """Run several passes as one, by vmap, and average their terms."""
    sampled: tuple[str, ...] = ()

    def terms_at(number: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        nonlocal sampled
        terms = run(number)
        sampled = terms.sampled
        return terms.log_likelihood, terms.kl

    checks_shapes = is_validation_enabled()
    with pyro.validation_enabled(False):  # of values, which there are none of under vmap
        pyro.infer.enable_validation(checks_shapes)
        parts = torch.func.vmap(terms_at, randomness="different")(numbers)
    likelihood, kl = ({name: value.mean(0) for name, value in part.items()} for part in parts)
    return ELBOTerms(likelihood, kl, sampled)
