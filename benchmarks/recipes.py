"""Ways to train, guides, and which posteriors contain which."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

import pyro_structvi as ps
from benchmarks.natural import NaturalSteps
from pyro_structvi.extend import LatentSite, SitePosterior
from pyro_structvi.guides import StructuredGuide
from pyro_structvi.infer.training import WARM_UP

Start = Callable[[LatentSite], float]


def constant(value: float) -> Start:
    return lambda site: value


def share_of_prior(share: float) -> Start:
    return lambda site: share * (site.prior_scale or 1.0)


class Recipe(NamedTuple):
    """How a guide is started and trained; a field that is None is the library's default.

    Attributes:
        start: The standard deviation of the elements of a site at the start.
        lr: The learning rate.
        decays: Whether it falls to zero along half a cosine.
        rates: What the learning rate of a parameter is multiplied by, for parts of names; "lower" slows
            long rows of Cholesky factors besides.
        averages: Whether the parameters of the last quarter of steps are averaged.
        natural: Take natural gradient steps, and this share of the learning rate for precisions.
        structured: Options of the library's own optimizer; Adam with its defaults when None.
        widens: Train this guide by the defaults in the first half of the steps, and the full covariance
            that begins as its distribution in the second.
        anneals: Whether the weight of the KL rises as in ``fit``; it is 1 in every step otherwise.
        particles: Draws averaged in a step.
        starts: Trained at once, the best bound of which is kept.
        is_nested: Whether they start at the medians of mean-field posteriors.
        only: The one guide that it is for.
    """

    start: Start | None = None
    lr: float | None = None
    decays: bool = True
    rates: tuple[tuple[str, float], ...] = ()
    averages: bool = False
    natural: float | None = None
    structured: dict[str, Any] | None = None
    widens: str | None = None
    anneals: bool = False
    particles: int = 1
    starts: int = 1
    is_nested: bool = False
    only: str | None = None

    def prepare(self, guide: StructuredGuide) -> None:
        """Give the posteriors of a guide their start."""
        for key, posterior in guide.posteriors.items() if self.start else ():
            assert isinstance(posterior, SitePosterior)
            site, family, loc = posterior.site, posterior.family, posterior().mean.detach()
            own = family.init(site, loc, self.start(site))
            guide.posteriors[key] = SitePosterior(family, site, own)

    def options(self, guide: nn.Module, num_steps: int) -> dict[str, Any]:
        """Return the arguments of ``fit``."""
        rate = self.lr if self.decays or self.lr is None else lambda step: self.lr
        options: dict[str, Any] = {} if rate is None else {"lr": rate}
        if self.particles > 1:
            options["elbo"] = ps.StructuredELBO(self.particles, vectorize_particles=True)
        if not self.anneals:
            options["kl_weight"] = 1.0
        if self.structured is None:
            options["optimizer"] = partial(adam_by_kind, guide, dict(self.rates))
        elif self.structured:
            own = {"warm_up": WARM_UP * num_steps} | self.structured
            options["optimizer"] = partial(ps.StructuredAdam, guide=guide, **own)
        if self.natural is not None:
            options["optimizer"] = lambda _, lr: NaturalSteps(guide, lr, self.natural)
        if self.averages:
            average = Average(guide, 3 * num_steps // 4, num_steps)
            options["optimizer"] = partial(average.after_steps_of, options["optimizer"])
        return options


class Average:
    """The mean of a guide's parameters from a step on, which takes their place in the last step."""

    def __init__(self, guide: nn.Module, first: int, last: int) -> None:
        self.parameters = [*guide.parameters()]
        self.first, self.last, self.step = first, last, 0
        self.sums = [torch.zeros_like(each) for each in self.parameters]

    def after_steps_of(
        self, make: Callable[..., torch.optim.Optimizer], *args: Any, **own: Any
    ) -> Any:
        """Return an optimizer after whose steps the parameters are counted."""
        optimizer = make(*args, **own)
        optimizer.register_step_post_hook(lambda *_: self.add())
        return optimizer

    @torch.no_grad()
    def add(self) -> None:
        """Count the parameters after a step."""
        self.step += 1
        if self.step <= self.first:
            return
        for total, parameter in zip(self.sums, self.parameters, strict=True):
            total += parameter
            if self.step == self.last:
                parameter.copy_(total / (self.last - self.first))


def adam_by_kind(
    guide: nn.Module, rates: dict[str, float], parameters: list[nn.Parameter], lr: float
) -> torch.optim.Optimizer:
    """Return Adam with the learning rate of each parameter multiplied by what its kind says.

    Of entries below the diagonal of a Cholesky factor the rate is also divided by the root of the
    longest row, since Adam moves a row of n entries by the root of n times as much as one.
    """
    factors: dict[int, float] = {}
    for path, value in guide.named_parameters():
        name = path.rpartition(".")[2]
        factor = next((rates[kind] for kind in rates if kind in name), 1.0)
        if name.endswith("lower") and "lower" in rates and value.numel():
            factor /= math.isqrt(2 * value.shape[-1]) ** 0.5  # n - 1, from n (n - 1) / 2
        factors[id(value)] = factor
    groups = [{"params": [each], "lr": lr * factors.get(id(each), 1.0)} for each in parameters]
    return torch.optim.Adam(groups, fused=True)


RECIPES: dict[str, Recipe] = {
    "default": Recipe(structured={}, anneals=True),
    "best of 5 starts": Recipe(structured={}, anneals=True, starts=5),
    "nested starts": Recipe(structured={}, lr=0.03, starts=5, is_nested=True),
    "whole KL": Recipe(structured={}),
    "widened from rowwise": Recipe(lr=0.01, structured={}, widens="rowwise", only="full"),
    "widened from rowwise, lr 0.1": Recipe(structured={}, widens="rowwise", only="full"),
    "whole KL, no limit": Recipe(structured={"clip": None}),
    "whole KL, no warm-up": Recipe(structured={"warm_up": 0}),
    "whole KL, units alone": Recipe(structured={"posterior_lr": 0.0}),
    "whole KL, squares by 0.999": Recipe(structured={"betas": (0.9, 0.999)}),
    "0.01, lr 0.01": Recipe(constant(0.01), 0.01),
    "0.01, lr 0.02": Recipe(constant(0.01), 0.02),
    "0.01, lr 0.05": Recipe(constant(0.01), 0.05),
    "0.01, lr 0.05, 10 particles": Recipe(constant(0.01), 0.05, particles=10),
    "0.01, lr 0.1": Recipe(constant(0.01), 0.1),
    "0.1, lr 0.05": Recipe(constant(0.1), 0.05),
    "prior/3, lr 0.05": Recipe(share_of_prior(0.3), 0.05),
    "prior/10, lr 0.05, scales x 3": Recipe(share_of_prior(0.1), 0.05, rates=(("log_", 3),)),
    "0.01, lr 0.05, scales x 3": Recipe(constant(0.01), 0.05, rates=(("log_", 3),)),
    "prior/10, lr 0.05": Recipe(share_of_prior(0.1), 0.05),
    "prior/10, lr 0.1": Recipe(share_of_prior(0.1), 0.1),
    "prior/10, lr 0.05, constant": Recipe(share_of_prior(0.1), 0.05, decays=False),
    "prior/10, lr 0.05, constant, averaged": Recipe(
        share_of_prior(0.1), 0.05, decays=False, averages=True
    ),
    "0.01, lr 0.05, long rows slower": Recipe(constant(0.01), 0.05, rates=(("lower", 1.0),)),
    "prior/10, lr 0.05, long rows slower": Recipe(
        share_of_prior(0.1), 0.05, rates=(("lower", 1.0),)
    ),
    "prior/10, natural 0.1": Recipe(share_of_prior(0.1), 0.1, natural=0.1, only="mean field"),
    "prior/10, natural 0.03": Recipe(share_of_prior(0.1), 0.03, natural=0.3, only="mean field"),
    "prior/10, natural 0.3": Recipe(share_of_prior(0.1), 0.3, natural=0.1, only="mean field"),
}

MakeGuide = Callable[[Any], StructuredGuide]
low_rank = partial(partial, ps.AutoLowRankLRT, join_bias=True)
inducing = partial(partial, ps.InducingWeightGuide, inducing_shape=(8, 8))

GUIDES: dict[str, MakeGuide] = {
    "mean field": ps.MeanFieldGuide,
    "k-tied 1": partial(ps.KTiedGuide, rank=1, join_bias=False),
    "k-tied 2": partial(ps.KTiedGuide, rank=2, join_bias=False),
    "matrix normal": partial(ps.MatrixNormalGuide, join_bias=False),
    "eigenbasis": partial(ps.EigenbasisGuide, join_bias=False),
    "rowwise": partial(ps.RowwiseGuide, join_bias=True),
    "full": ps.FullCovarianceGuide,
    "low rank 1": low_rank(rank=1, diagonal="constant"),
    "low rank 2": low_rank(rank=2, diagonal="constant"),
    "low rank 2, of the paper": low_rank(
        rank=2, diagonal="constant", diagonal_variance=math.exp(-10)
    ),
    "low rank 2, full diagonal": low_rank(rank=2, diagonal="full"),
    "FFG-U": inducing(),
    "FCG-U": inducing(inducing_posterior="full"),
    "global inducing": ps.GlobalInducingGuide,
}

# Factors of a million entries and more.
TOO_LARGE = {"digits": {"full"}, "rings": {"full"}, "three hidden layers": {"full"}}
