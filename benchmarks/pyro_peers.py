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

# Learning rates, and initial standard deviations: Pyro's default of 0.1, and less, since from there the
# bound of some nets ends lower.
SETTINGS = ((0.01, 0.1), (0.01, 0.01), (0.003, 0.1))
DECAY = 0.1  # of the rate, over all steps, as Pyro's "SVI tips and tricks" advises


def autoguide(
    make: Callable[..., nn.Module], problem: "LeagueProblem", options: Any
) -> tuple[Any, nn.Module, dict[str, float]]:
    """Return the model, Pyro's guide of it, and what is measured of the fit.

    Training is ``SVI`` with one particle of ``Trace_ELBO`` a step, which ``JitTrace_ELBO`` traces once
    for speed, and ``ClippedAdam`` with its defaults. The guide begins at medians of the prior
    (``init_to_median``). Steps and mini-batches are those of the league's guides. Each pair of a rate,
    which falls to a tenth over the steps, and an initial standard deviation is tried; the guide with the
    best bound counts. Seconds are those of its training alone.
    """
    if problem.model.num_data is None:
        problem.model.num_data = len(problem.x)  # as ``fit`` sets it
    particles = 20 if options.smoke else 500
    found = {"ELBO": -math.inf}
    for rate, scale in SETTINGS:
        pyro.clear_param_store()  # names of parameters are those of the guide before
        tried = make(problem.model, init_loc_fn=init_to_median, init_scale=scale)
        start = time.process_time()
        train(problem, tried, rate, options.steps)
        seconds = time.process_time() - start
        loss = Trace_ELBO(num_particles=particles)
        with torch.no_grad():
            elbo = -loss.loss(problem.model, tried, problem.x, problem.y)
        if elbo > found["ELBO"]:
            guide = tried
            found = {"seconds": seconds, "ELBO": elbo, "rate": rate, "initial deviation": scale}
    pyro.clear_param_store()  # or the guide would read the parameters of the last one from there
    if problem.evidence is not None:
        found["gap to the evidence"] = problem.evidence - found["ELBO"]
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
