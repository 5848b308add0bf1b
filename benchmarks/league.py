"""How far posteriors are from the exact one, which NUTS samples on the same model, and what they cost.

    make league                                                # every problem
    make league BENCH="--problem cosine --method MeanFieldGuide --seeds 1"
    make league BENCH="--data energy.npz"                      # a regression with a gap, too
    make league BENCH="--smoke"                                # a few steps, to see that it runs

Every posterior is trained by the defaults of ``fit``. What was measured is added to the file of
results, a line for each number, and is not measured again; the draws of NUTS are kept in a folder.
Processes with other problems or methods may add to one file at a time. The ceiling is a second run of
NUTS with another seed. A file of data has ``x`` and ``y``. Seconds are of CPU.

A method is named by its call; without ``--method`` one of each structure is measured. ``--peers``
measures other packages, see ``peers.py``.
"""

import argparse
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyro.poutine as poutine
import torch
from torch import Tensor, nn

import pyro_structvi as ps
from benchmarks.choices import CHOICES, call_of
from benchmarks.convergence import bound
from benchmarks.league_problems import LEAGUE, LeagueProblem, regression_gap
from benchmarks.league_tables import (
    CEILING,
    HEADER,
    PRIOR,
    SAMPLED,
    draw_figure,
    league_tables,
)
from benchmarks.peers import PEERS
from benchmarks.problems import Problem
from benchmarks.rows import ResultsFile
from pyro_structvi.families import Dropout, PointEstimate
from pyro_structvi.testing import guides_for, layered_for, points_for

DROPOUT = 'StructuredGuide({"net.0.*": PointEstimate(), "*": Dropout(rate=0.1)})'


MIXTURE = "MixtureGuide(partial(MatrixNormalGuide, join_bias=True), size=5)"
matrix_normal = partial(ps.MatrixNormalGuide, join_bias=True)


def mc_dropout(model: Any) -> nn.Module:
    """Dropout before every layer but the first, which keeps its inputs."""
    is_deep = isinstance(model.net, nn.Sequential)
    first = {"net.0.*": PointEstimate()} if is_deep else {}
    return ps.StructuredGuide(model, {**first, "*": Dropout(rate=0.1)})


REGISTERED = [*points_for("demo").values(), *guides_for("demo").values()]
REGISTERED += layered_for("demo").values()
SHOWN: dict[str, Callable[[Any], nn.Module]] = {
    **{choice.code: choice.make for choice in CHOICES},
    DROPOUT: mc_dropout,
    MIXTURE: lambda model: ps.MixtureGuide(model, matrix_normal, size=5),
}
METHODS: dict[str, Callable[[Any], nn.Module]] = {
    **SHOWN,
    **{call_of(each.guide.__name__, each.options): each for each in REGISTERED},
}


# Parts of calls whose guides have points: what is maximized for these bounds nothing.
NO_BOUND = ("MAPGuide", "EnsembleGuide", "Dropout(", '"ensemble"')
SMALLEST_RATIO = 0.01  # of standard deviations, so that a point has a number that is finite and bad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problem", choices=[*LEAGUE, "none"], action="append")
    parser.add_argument("--data", type=Path, action="append", default=[], help="an .npz file")
    parser.add_argument(
        "--method",
        choices=[CEILING, PRIOR, SAMPLED, *METHODS, *PEERS],
        action="append",
        metavar="CALL",
    )
    parser.add_argument(
        "--peers", action="store_true", help="posteriors of other packages, in place of guides"
    )
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seeds", type=int, default=3, help="runs, whose mean and error are given")
    parser.add_argument("--draws", type=int, default=1000, help="of each posterior")
    parser.add_argument("--warmup", type=int, default=500, help="of each of NUTS' four chains")
    parser.add_argument(
        "--smoke", action="store_true", help="a few steps only, to see that it runs"
    )
    parser.add_argument("--references", type=Path, default=Path("demo_output/league"))
    parser.add_argument("--output", type=Path, help="a CSV file; what it has is not measured again")
    parser.add_argument("--figure", type=Path, help="where to draw distance over cost")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.seeds, options.draws, options.warmup = 20, 1, 40, 20
    options.references.mkdir(parents=True, exist_ok=True)
    makers = {name: LEAGUE[name] for name in options.problem or LEAGUE if name != "none"}
    makers |= {path.stem: lambda path=path: regression_gap(path) for path in options.data}
    torch.set_num_threads(1)
    results = ResultsFile(options.output, HEADER)
    default = PEERS if options.peers else [PRIOR, CEILING, SAMPLED, *SHOWN]
    for name, make in makers.items():
        for method in options.method or default:
            for seed in range(1 if method in (PRIOR, CEILING) else options.seeds):
                if results.has(name, method, str(seed)):
                    continue
                found = measure(name, make, method, seed, options)
                results.add(
                    *(
                        (name, method, str(seed), key, f"{value:.6g}")
                        for key, value in found.items()
                    )
                )
    print(league_tables(results.rows))
    if options.figure:
        draw_figure(results.rows, options.figure)


def measure(
    name: str, make: Callable[[], LeagueProblem], method: str, seed: int, options: Any
) -> dict[str, float]:
    """Return what is measured of one posterior, by the names of quantities."""
    torch.manual_seed(0)  # of data and net
    problem = make()
    reference, first = reference_draws(name, problem, 0, options)
    torch.manual_seed(seed)
    model = problem.model
    if method == CEILING:
        posterior, second = reference_draws(name, problem, 1, options)
        found = worse_of(first, second)
    elif method == PRIOR:
        posterior, found = prior_draws(problem, options.draws), {}
    elif method == SAMPLED:
        posterior, found = sampled_draws(problem, seed, options)
    elif method in PEERS:
        model, posterior, found = PEERS[method](problem, options)
    else:
        posterior = METHODS[method](model)
        found = train(problem, method, posterior, options)
    torch.manual_seed(seed)
    for region, x in problem.regions.items():
        y = problem.scored.get(region)
        ours, theirs = (
            ps.predict(*own, x, num_samples=options.draws, y=y)
            for own in ((model, posterior), (problem.model, reference))
        )
        values = distances(problem.compares, ours, theirs)
        if y is not None:
            values["log density"] = float(ours.log_density.mean())
            values["log density of NUTS"] = float(theirs.log_density.mean())
        found |= {f"{region}: {key}": value for key, value in values.items()}
    return found


def train(problem: LeagueProblem, method: str, guide: nn.Module, options: Any) -> dict[str, float]:
    start = time.process_time()
    ps.fit(
        *(problem.model, guide, (problem.x, problem.y)),
        num_steps=options.steps,
        batch_size=problem.batch_size,
        progress=False,
    )
    found = {"seconds": time.process_time() - start}
    if not any(part in method for part in NO_BOUND):
        own = Problem(problem.title, problem.model, problem.x, problem.y)
        elbo, _ = bound(own, guide, 20 if options.smoke else 500)
        found["ELBO"] = elbo
        if problem.evidence is not None:
            found["gap to the evidence"] = problem.evidence - elbo
    return found


def reference_draws(
    name: str, problem: LeagueProblem, seed: int, options: Any
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return draws of the exact posterior, and what the sampler says of them."""
    if problem.exact is not None:
        torch.manual_seed(1000 + seed)
        return problem.exact(4 * options.draws), {"seconds": 0.0}
    path = options.references / f"{name}-{seed}-{options.warmup}-{options.draws}.pt"
    if not path.exists():
        from pyro_structvi import reference

        start = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", reference.DivergenceWarning)  # they are counted
            warnings.simplefilter("ignore", reference.NotMixedWarning)  # its R-hat is written down
            draws = reference.nuts(
                *(problem.model, problem.x, problem.y),
                num_warmup=options.warmup,
                num_samples=options.draws // 2,
                seed=seed,
                progress=False,
                **problem.nuts,
            )
        said = {
            "seconds": time.process_time() - start,
            "R-hat": draws.r_hat,
            "divergences": float(draws.divergences),
        }
        said |= {"effective draws": effective_draws(problem, draws)}
        torch.save((dict(draws), said), path)
    loaded: tuple[dict[str, Tensor], dict[str, float]] = torch.load(path)
    return loaded


def sampled_draws(
    problem: LeagueProblem, seed: int, options: Any
) -> tuple[Mapping[str, Tensor], dict[str, float]]:
    """Return draws of microcanonical Langevin chains from points, and their R-hat and seconds."""
    from pyro_structvi import reference

    start, data = time.process_time(), (problem.x, problem.y)
    guide = ps.EnsembleGuide(problem.model, size=8)
    steps = min(1000, options.steps)
    ps.fit(problem.model, guide, data, num_steps=steps, kl_weight=1.0, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", reference.NotMixedWarning)  # its R-hat is written down
        draws = reference.mclmc(
            *(problem.model, guide, data),
            num_warmup=options.steps,
            num_draws=max(4, options.draws // 8),
            thinning=max(1, 16 * options.steps // options.draws),
            seed=seed,
            progress=False,
        )
    return draws, {"seconds": time.process_time() - start, "R-hat": draws.r_hat}


def worse_of(first: dict[str, float], second: dict[str, float]) -> dict[str, float]:
    """Return what two runs of the sampler say of themselves, of each quantity the worse."""
    least = {"effective draws"}
    return {key: (min if key in least else max)(first[key], second[key]) for key in second}


def effective_draws(problem: LeagueProblem, draws: Any) -> float:
    """Return the smallest effective number of draws of the functions in the last region."""
    import numpyro.diagnostics

    x = [*problem.regions.values()][-1]
    functions = ps.predict(problem.model, draws, x).functions
    chains = functions.reshape(draws.num_chains, -1, *functions.shape[1:])
    return float(numpyro.diagnostics.effective_sample_size(chains.double().numpy()).min())


def prior_draws(problem: LeagueProblem, count: int) -> dict[str, Tensor]:
    """Return draws of the prior by site."""
    with torch.no_grad(), poutine.block():
        traces = [poutine.trace(problem.model).get_trace(problem.x[:1]) for _ in range(count)]
    names = [name for name in traces[0].stochastic_nodes if name not in ("data", "obs")]
    return {name: torch.stack([trace.nodes[name]["value"] for trace in traces]) for name in names}


def distances(compares: str, ours: Any, theirs: Any) -> dict[str, float]:
    """Return the distances of two predictions, by name; the first is the one that counts."""
    from pyro_structvi import metrics

    if compares == "classes":
        found = {
            "total variation": metrics.total_variation(ours.mean, theirs.mean),
            "agreement": metrics.agreement(ours.mean, theirs.mean),
        }
        return found | spreads(*(centered(own.functions) for own in (ours, theirs)))
    functions = metrics.predictive_distance(ours.functions, theirs.functions)
    found = {
        "Wasserstein": functions.wasserstein,
        "difference of means": functions.mean_difference,
    }
    if compares == "observations":
        drawn: Mapping[str, Tensor] = {
            key: own.sample_observations() for key, own in (("ours", ours), ("theirs", theirs))
        }
        found["Wasserstein"] = metrics.wasserstein(drawn["ours"], drawn["theirs"])
    return found | spreads(ours.functions, theirs.functions)


def centered(logits: Tensor) -> Tensor:
    """Return logits less their mean over classes, which no probability depends on."""
    return logits - logits.mean(-1, keepdim=True)


def spreads(ours: Tensor, theirs: Tensor) -> dict[str, float]:
    """Return how the spread of function draws compares with the exact one, averaged over inputs.

    A point has no spread, so it cannot win here, however near to the exact mean it is. The logarithms
    count by their absolute values: too wide is as bad as too narrow. The coverage is the share of the
    exact draws in the central 90 % of ours; below 0.9 our posterior is too sure.
    """
    ours, theirs = ours.double(), theirs.double()
    ratio = (ours.std(0) / theirs.std(0)).clamp_min(SMALLEST_RATIO)
    low, high = (ours.quantile(level, 0) for level in (0.05, 0.95))
    return {
        "log ratio of deviations": float(ratio.log().abs().mean()),
        "ratio of standard deviations": float(ratio.log().mean().exp()),
        "coverage": float(((theirs >= low) & (theirs <= high)).double().mean()),
    }


if __name__ == "__main__":
    main()
