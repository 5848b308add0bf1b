"""An experiment of the paper: a net and its data, posteriors, training, scores, and rows of tables."""

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pyro_structvi as ps
from benchmarks.paper_tables import HEADER, paper_tables
from benchmarks.rows import ResultsFile
from pyro_structvi.diagnostics import compress_scales, spectra
from pyro_structvi.extend import Family
from pyro_structvi.families import KTied, MeanField
from pyro_structvi.weights.site_role import LocalReparam

Rows = list[tuple[str, str, str, float]]  # table, row, quantity, value
Part = tuple[Tensor, Tensor]

POSTERIORS: dict[str, int | None] = {
    "mean field": None,
    **{f"k-tied, k = {k}": k for k in (1, 2, 3)},
}
PAPER = {"epochs": 300, "draws": 100}
SMOKE = {"epochs": None, "steps": 3, "batch_size": 16, "draws": 2, "seeds": 1, "limit": 48}


@dataclass(frozen=True)
class Experiment:
    """A net and its data.

    Attributes:
        title: The net and the data set, as in the titles of tables.
        make_net: Makes the net.
        likelihood: The model around it.
        tied: A pattern of the sites whose standard deviations are tied.
        train: Inputs and labels of the training part.
        validation: Those of the part that was held out of the training data.
        test: Those of the test part.
        others: Families of sites that are not mean field in any of the posteriors.
        local_reparam: As for every guide.
    """

    title: str
    make_net: Callable[[], nn.Module]
    likelihood: type[ps.Classifier] | type[ps.BinaryClassifier]
    tied: str
    train: Part
    validation: Part
    test: Part
    others: dict[str, Family] = field(default_factory=dict)
    local_reparam: LocalReparam = True

    def make_model(self, prior_scale: float) -> ps.Classifier | ps.BinaryClassifier:
        """Return the model: one normal prior for all weights and biases."""
        net = self.make_net().to(self.train[0].device)
        return self.likelihood(ps.bayesianize(net, prior=prior_scale), num_data=len(self.train[0]))

    def make_guide(self, model: Any, rank: int | None, **options: Any) -> ps.StructuredGuide:
        """Return mean field where ``rank`` is None; else the k-tied posterior at the tied weights."""
        tied = {} if rank is None else {self.tied: KTied(rank, join_bias=False)}
        families = {**self.others, **tied, "*": MeanField()}
        return ps.StructuredGuide(
            model, families, **{"local_reparam": self.local_reparam} | options
        )


def make_parser(
    description: str, rows: Iterable[str] = POSTERIORS, **defaults: Any
) -> argparse.ArgumentParser:
    """Return the options that all of these scripts have, with what may be measured."""
    parser = argparse.ArgumentParser(
        description=description.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data", type=Path, help="a file instead of a download")
    parser.add_argument("--seeds", type=int, default=1, help="how many runs of each posterior")
    parser.add_argument("--steps", type=int, help="of each fit")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--prior-scale", type=float, default=0.2, help="standard deviation")
    parser.add_argument("--draws", type=int, help="of the posterior, for the scores")
    parser.add_argument("--limit", type=int, help="use only so many examples of each part")
    parser.add_argument("--posterior", choices=rows, action="append", help="default: all")
    parser.add_argument("--smoke", action="store_true", help="a few steps, to see that it runs")
    parser.add_argument("--output", type=Path, help="a CSV file; what it has is not measured again")
    parser.set_defaults(test_limit=None, paper_size=False, **defaults)
    return parser


def experiment_parser(description: str, **defaults: Any) -> argparse.ArgumentParser:
    """Return the options of the three experiments besides."""
    parser = make_parser(description)
    parser.add_argument("--epochs", type=int, help="in place of steps")
    parser.add_argument("--test-limit", type=int, help="use only so many examples to test on")
    parser.add_argument("--select", action="store_true", help="only compare the two priors")
    parser.add_argument("--paper-size", action="store_true", help="300 epochs and 100 draws")
    parser.set_defaults(**defaults)
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the options, with the paper's sizes or tiny ones where these are asked for."""
    options = parser.parse_args()
    if options.paper_size:
        vars(options).update(PAPER, steps=None, limit=None, test_limit=None)
    if options.smoke:
        vars(options).update(SMOKE)
    torch.set_num_threads(1)
    return options


def held_out(
    data: Iterable[Tensor], validation_share: float, test_limit: int | None
) -> dict[str, Any]:
    """Return the parts of an experiment, with the last training examples held out, as the paper does."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x, y, x_test, y_test = (tensor.to(device) for tensor in data)
    count = len(x) - round(validation_share * len(x))
    return {
        "train": (x[:count], y[:count]),
        "validation": (x[count:], y[count:]),
        "test": (x_test[:test_limit], y_test[:test_limit]),
    }


def measure_all(experiment: Experiment, options: argparse.Namespace) -> None:
    """Measure what the file of results does not have, and print its tables."""
    results = ResultsFile(options.output, HEADER)
    measure = prior_rows if options.select else posterior_rows
    for seed in range(options.seeds):
        for table, name, run in measure(experiment, options, seed):
            if not results.has(table, name, str(seed)):
                rows = run()
                results.add(*((*row[:2], str(seed), row[2], f"{row[3]:.5g}") for row in rows))
    print(paper_tables(options.output) if options.output else f"k-tied, {experiment.title}")


Job = tuple[str, str, Callable[[], Rows]]  # the first table and row that it fills


def posterior_rows(experiment: Experiment, options: argparse.Namespace, seed: int) -> Iterator[Job]:
    """Yield what is to be measured of each posterior; of mean field, its spectra and ranks too."""
    table = f"Figure 4: {experiment.title}"
    for name in options.posterior or POSTERIORS:

        def run(name: str = name) -> Rows:
            model, guide = fitted(experiment, options, POSTERIORS[name], seed)
            parameters = sum(value.numel() for value in guide.parameters()) / 1000
            scores = scores_of(experiment, model, guide, experiment.test, options.draws)
            rows = [
                (table, name, *score)
                for score in (scores | {"parameters / 1000": parameters}).items()
            ]
            if POSTERIORS[name] is None:
                rows += spectrum_rows(experiment, guide)
                rows += compressed_rows(experiment, options, model, guide, scores)
            return rows

        yield table, name, run


def prior_rows(experiment: Experiment, options: argparse.Namespace, seed: int) -> Iterator[Job]:
    """Yield the scores on the validation part with both standard deviations that the paper tried."""
    table = f"Validation: {experiment.title}"
    for name in options.posterior or ("mean field", "k-tied, k = 2"):
        for scale in (0.2, 0.3):
            row = f"{name}, prior {scale}"

            def run(name: str = name, scale: float = scale, row: str = row) -> Rows:
                tried = argparse.Namespace(**vars(options) | {"prior_scale": scale})
                model, guide = fitted(experiment, tried, POSTERIORS[name], seed)
                scores = scores_of(experiment, model, guide, experiment.validation, options.draws)
                return [(table, row, *score) for score in scores.items()]

            yield table, row, run


def fitted(
    experiment: Experiment, options: argparse.Namespace, rank: int | None, seed: int
) -> tuple[Any, ps.StructuredGuide]:
    """Train by the defaults of ``fit``, with the KL annealed over the first half of the steps."""
    torch.manual_seed(seed)
    model = experiment.make_model(options.prior_scale)
    guide = experiment.make_guide(model, rank)
    steps = options.steps
    if options.epochs:
        steps = options.epochs * -(-len(experiment.train[0]) // options.batch_size)
    ps.fit(
        *(model, guide, experiment.train),
        num_steps=steps,
        batch_size=options.batch_size,
        kl_weight=ps.LinearAnnealing(-(-steps // 2)),
        progress=False,
    )
    return model, guide


def scores_of(
    experiment: Experiment, model: Any, guide: ps.StructuredGuide, part: Part, draws: int
) -> dict[str, float]:
    """Return minus the ELBO of an example, its KL, the NLL and the accuracy.

    The bound of a part has its own expected log likelihood and the KL divided by the number of training
    examples. The NLL is that of the mean of the draws' probabilities.
    """
    x, y = part
    prediction = ps.predict(model, guide, x, num_samples=draws, y=y, batch_size=1000)
    with torch.no_grad():
        terms = ps.StructuredELBO().terms(model, guide, x[:2], y[:2])
    kl = float(sum(terms.kl.values())) / len(experiment.train[0])
    is_binary = experiment.likelihood is ps.BinaryClassifier
    right = (prediction.mean > 0.5) if is_binary else prediction.mean.argmax(-1)
    return {
        "-ELBO": kl - float(prediction.likelihood.log_prob(y).mean()),
        "KL": kl,
        "NLL": -float(prediction.log_density.mean()),
        "accuracy (%)": 100 * float((right == y).float().mean()),
    }


def compressed_rows(
    experiment: Experiment,
    options: argparse.Namespace,
    model: Any,
    guide: ps.StructuredGuide,
    scores: dict[str, float],
) -> Rows:
    """Return the scores of a mean-field posterior whose scales have become matrices of low rank."""
    table = f"Table 2: {experiment.title}, compressed after training"
    rows = [(table, "full", *score) for score in scores.items()]
    for rank in (1, 2, 3):
        tied = tied_only(guide, compress_scales(guide, rank), experiment.make_guide(model, rank))
        found = scores_of(experiment, model, tied, experiment.test, options.draws)
        rows += [(table, f"rank {rank}", *score) for score in found.items()]
    return rows


def tied_only(
    guide: ps.StructuredGuide, compressed: ps.StructuredGuide, tied: ps.StructuredGuide
) -> ps.StructuredGuide:
    """Return ``tied`` with the compressed posteriors at its tied weights, and the others' own."""
    with torch.no_grad():
        for name in tied.site_names:
            is_tied = isinstance(tied[name].family, KTied)
            tied[name].load_state_dict((compressed if is_tied else guide)[name].state_dict())
    return tied


def spectrum_rows(experiment: Experiment, guide: ps.StructuredGuide) -> Rows:
    """Return which share of the squared singular values lies beyond the first ones."""
    rows: Rows = []
    for name, spectrum in spectra(guide).items():
        if len(spectrum.scale) == 1:  # one unit: nothing to be of low rank
            continue
        site = name.removeprefix("net.").removesuffix(".weight")
        for what, share in (("scales", spectrum.scale_share), ("means", spectrum.mean_share)):
            table = f"Figure 2: {experiment.title}, variance of {what} left unexplained (%)"
            rows += [(table, site, f"rank {k}", 100 * float(share[k:].sum())) for k in (1, 2, 3)]
    return rows
