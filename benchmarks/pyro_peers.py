"""Pyro's own guides, trained as Pyro's tutorials train them."""

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyro
import torch
from pyro.infer import SVI, JitTrace_ELBO, Trace_ELBO
from pyro.infer.autoguide import init_to_median
from torch import Tensor, nn

if TYPE_CHECKING:
    from benchmarks.league_problems import LeagueProblem

RATES = (0.01, 0.003)
DECAY = 0.1  # of the rate, over all steps, as Pyro's "SVI tips and tricks" advises
INIT_SCALE = 0.01  # the default of 0.1 is so wide that a net of 50 units starts with noise alone


def autoguide(
    make: Callable[..., nn.Module], problem: "LeagueProblem", options: Any
) -> tuple[Any, nn.Module, dict[str, float]]:
    """Return the model, Pyro's guide of it, and what is measured of the fit.

    Training is ``SVI`` with one particle of ``Trace_ELBO`` a step, which ``JitTrace_ELBO`` traces once
    for speed, and ``ClippedAdam`` with its defaults. The guide begins at medians of the prior
    (``init_to_median``) with standard deviations of 0.01. Steps and mini-batches are those of the
    league's guides. Each of the two rates is tried, and falls to a tenth over the steps; the guide with
    the better bound counts. Seconds are those of this guide's training alone.
    """
    if problem.model.num_data is None:
        problem.model.num_data = len(problem.x)  # as ``fit`` sets it
    particles = 20 if options.smoke else 500
    best: tuple[float, nn.Module, float] = (-math.inf, nn.Identity(), 0.0)
    for rate in RATES:
        pyro.clear_param_store()  # names of parameters are those of the guide before
        guide = make(problem.model, init_loc_fn=init_to_median, init_scale=INIT_SCALE)
        start = time.process_time()
        train(problem, guide, rate, options.steps)
        seconds = time.process_time() - start
        with torch.no_grad():
            loss = Trace_ELBO(num_particles=particles).loss(
                problem.model, guide, problem.x, problem.y
            )
        best = max(best, (-loss, guide, seconds), key=lambda own: own[0])
    pyro.clear_param_store()  # or the guide would read the parameters of the last rate from there
    elbo, guide, seconds = best
    found = {"seconds": seconds, "ELBO": elbo}
    if problem.evidence is not None:
        found["gap to the evidence"] = problem.evidence - elbo
    return problem.model, guide, found


def train(problem: "LeagueProblem", guide: nn.Module, rate: float, num_steps: int) -> None:
    """Train a guide by Pyro."""
    optimizer = pyro.optim.ClippedAdam({"lr": rate, "lrd": DECAY ** (1 / num_steps)})
    guide(problem.x, problem.y)  # makes its parameters, which no trace should do
    svi = SVI(problem.model, guide, optimizer, JitTrace_ELBO(ignore_jit_warnings=True))
    for _ in range(num_steps):
        svi.step(*batch(problem))


def batch(problem: "LeagueProblem") -> tuple[Tensor, Tensor]:
    """Return all examples, or a random mini-batch."""
    if problem.batch_size is None:
        return problem.x, problem.y
    chosen = torch.randperm(len(problem.x))[: problem.batch_size]
    return problem.x[chosen], problem.y[chosen]
