"""What separates guides from the best predictions on a table: modes, widths, shapes, recipe, prior.

    python -m benchmarks.decomposition --data airfoil.npz --output benchmarks/results/decomposition.csv
    python -m benchmarks.decomposition --data energy.npz --steps 20 --chain-steps 40  # a trial

The net, the likelihood and the prior are those of ``benchmarks.sampling``. Each row changes one thing:
"one point" and "ten points" have no width; guides have one Gaussian mode, or ten around the points;
chains have the exact shape of the posterior around one point or around ten. "KL x 0.1" is a cold
posterior, "prior / fan-in" another prior. Scores are the test error and the mean negative log density of
the mixture, in standardized units.
"""

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import pyro_structvi as ps
from benchmarks.markdown import markdown
from benchmarks.rows import ResultsFile
from benchmarks.sampling import make_model, sample
from benchmarks.uci import Split, splits
from benchmarks.uci_tables import DECOMPOSED
from pyro_structvi import reference

MEMBERS, ENERGY = 10, 0.1  # chains, and their energy's variance
GUIDES: dict[str, Callable[..., Any]] = {
    "mean field": ps.MeanFieldGuide,
    "matrix normal": partial(ps.MatrixNormalGuide, join_bias=True),
    "full covariance": partial(ps.FullCovarianceGuide, join_bias=True),
    "global inducing": ps.GlobalInducingGuide,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, action="append", required=True, help="an .npz file")
    parser.add_argument("--split", type=int, default=0)
    parser.add_argument("--steps", type=int, default=5000, help="of guides")
    parser.add_argument("--map-steps", type=int, default=1000, help="of points")
    parser.add_argument("--chain-steps", type=int, default=20_000)
    parser.add_argument("--output", type=Path, help="a CSV file; what it has is not measured again")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", reference.NotMixedWarning)
    results = ResultsFile(options.output, DECOMPOSED)
    for path in options.data:
        split = [*splits(path, gaps=False)][options.split]
        for name, fitted in rows(split, options):
            key = (path.stem, split.name, name)
            if not results.has(*key):
                begin = time.process_time()
                model, posterior, draws = fitted()
                seconds = time.process_time() - begin
                results.add((*key, *scores(model, posterior, draws, split), f"{seconds:.0f}"))
    print(markdown(DECOMPOSED, [list(row) for row in results.rows]))


def rows(split: Split, options: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the name of each row, and a function that returns model, posterior and number of draws."""
    data = split.train

    def points(size: int, prior: Any = 1.0) -> Any:
        torch.manual_seed(0)
        model = make_model(split, prior)
        guide = ps.EnsembleGuide(model, size)
        ps.fit(model, guide, data, num_steps=options.map_steps, kl_weight=1.0, progress=False)
        return model, guide, size

    def of_guide(make: Any, size: int, starts: bool, prior: Any = 1.0, **own: Any) -> Any:
        model, ensemble, _ = points(size, prior) if starts else (None, None, None)
        if model is None:
            torch.manual_seed(0)
            model = make_model(split, prior)
        guide = ps.MixtureGuide(model, make, size, starts=ensemble) if size > 1 else make(model)
        ps.fit(model, guide, data, num_steps=options.steps, progress=False, **own)
        return model, guide, 500

    def chains(size: int, prior: Any = 1.0) -> Any:
        model, guide, _ = points(size, prior)
        own = argparse.Namespace(chains=MEMBERS, samples=200, steps=options.chain_steps)
        return model, sample(model, guide, data, own, energy_variance=ENERGY), None

    yield "one point", partial(points, 1)
    yield "ten points", partial(points, MEMBERS)
    yield "ten points, prior / fan-in", partial(points, MEMBERS, ps.FanIn(1.0))
    for name, make in GUIDES.items():
        yield name, partial(of_guide, make, 1, False)
    matrix = GUIDES["matrix normal"]
    yield "matrix normal, KL x 0.1", partial(of_guide, matrix, 1, False, kl_weight=0.1)
    yield "matrix normal, prior / fan-in", partial(of_guide, matrix, 1, False, ps.FanIn(1.0))
    yield "ten matrix normals", partial(of_guide, matrix, MEMBERS, False)
    yield "ten matrix normals, from points", partial(of_guide, matrix, MEMBERS, True)
    yield (
        "ten mean fields, from points, KL x 0.1",
        partial(of_guide, GUIDES["mean field"], MEMBERS, True, kl_weight=0.1),
    )
    yield "chains around one point", partial(chains, 1)
    yield "chains around ten points", partial(chains, MEMBERS)
    yield "chains around ten points, prior / fan-in", partial(chains, MEMBERS, ps.FanIn(1.0))


def scores(model: Any, posterior: Any, draws: int | None, split: Split) -> tuple[str, str]:
    """Return the root mean square error, and the mean negative log density."""
    x, y = split.test
    prediction = ps.predict(model, posterior, x, num_samples=draws, y=y, stream=True)
    error = (prediction.mean - y).square().mean().sqrt()
    return f"{float(error):.4f}", f"{-float(prediction.log_density.mean()):.3f}"


if __name__ == "__main__":
    main()
