"""Bayesian LoRA: posteriors over the adapters of a small language model, on few film reviews.

    python examples/lora.py --data FILE.npz --base base.pt --results lora.json
    python examples/lora.py --data FILE.npz --base base.pt --results lora.json --select
    python examples/lora.py --data FILE.npz --method "mean field" --method "low rank"
    python examples/lora.py --data FILE.npz --smoke

A small transformer learns to predict the next word of IMDB's training reviews, without their labels.
Then it is frozen. Adapters W = B A beside its projections to queries and values, by ``peft``, and a head
learn from 2,000 labelled reviews whether a review is positive. The methods differ in the posterior of A,
B and the head:

- "map", and the baselines around it: "laplace", the diagonal Laplace approximation of its weights, and
  "ensemble", five of it;
- mean field, k-tied, low rank, and a full covariance of each matrix;
- "A only": B is no random variable but a parameter that is trained along, as in BLoB.

A row has the accuracy, the NLL in nats and the calibration error on test reviews, and how well the
entropy of a prediction tells these reviews from others of the same lengths whose words are drawn at
random, each as often as it is in the training reviews: the AUROC, 0.5 for chance. They are means over
seeds, with standard errors; a seed chooses the labelled reviews too. ``--select`` chooses the prior's
standard deviation, the learning rate and the weight of the KL, one after the other, by the NLL of 500
validation reviews with seed 0.

``FILE.npz`` holds ``tokens_train``, all reviews one after another as integers (0 for padding, 2 for an
unknown word, words from 3 on, the most frequent first), ``offsets_train``, where they begin and end, and
``y_train``; and the same for the test. Needs ``pip install transformers peft``.

References:
    Hu et al. (2022), "LoRA: low-rank adaptation of large language models"; Yang, Robeyns, Wang and
    Aitchison (2024), "Bayesian low-rank adaptation for large language models"; Wang, Shi, Han, Metaxas
    and Wang (2024), "BLoB: Bayesian low-rank adaptation by backpropagation for large language models".
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pyro
import torch
from lora_base import Data, Reviews, load, pretrained
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

import pyro_structvi as ps
from pyro_structvi.metrics import classification_scores, detection_scores

SMOKE = {
    "vocabulary": 500,
    "length": 16,
    "hidden": 16,
    "layers": 2,
    "pretrain_steps": 20,
    "rank": 2,
    "train": 64,
    "validation": 32,
    "test": 64,
    "epochs": 2,
    "num_samples": 4,
    "seeds": 1,
}
TRIED = {"prior-scales": [0.1, 0.3, 1.0], "rates": [0.1, 0.03, 0.01], "kl-weights": [0.1, 1.0]}
METRICS = {
    "accuracy": "accuracy",
    "nll": "NLL",
    "calibration_error": "calibration",
    "auroc": "AUROC",
    "seconds": "seconds",
}


@dataclass(frozen=True)
class Method:
    """A posterior over adapters and head, with its settings.

    Attributes:
        guide: Makes the guide.
        prior_scale: The prior's standard deviation.
        kl_weight: The weight of the KL at the end of the training.
        prior_on: The factors of W = B A that have a prior, and so a posterior.
        num_samples: How many nets the posterior has, if it has so many.
        is_laplace: Whether a Laplace approximation around the fitted guide takes its place.
        lr: The learning rate, a share of the prior's standard deviation.
    """

    guide: Callable[[ps.Classifier], ps.StructuredGuide]
    prior_scale: float = 0.1
    kl_weight: float = 1.0
    prior_on: str = "AB"
    num_samples: int | None = None
    is_laplace: bool = False
    lr: float = 0.1

    @property
    def settings(self) -> dict[str, float]:
        """What ``--select`` chooses."""
        return {"prior_scale": self.prior_scale, "lr": self.lr, "kl_weight": self.kl_weight}

    @property
    def is_variational(self) -> bool:
        """Whether the weight of the KL is a setting of its own, and not another prior scale."""
        return self.num_samples is None and not self.is_laplace


def low_rank(model: ps.Classifier) -> ps.StructuredGuide:
    return ps.AutoLowRankLRT(model, rank=2, diagonal="full", join_bias=False)


METHODS = {
    "map": Method(ps.MAPGuide, num_samples=1),
    "laplace": Method(ps.MAPGuide, is_laplace=True),
    "ensemble": Method(lambda model: ps.EnsembleGuide(model, size=5), 0.3, num_samples=5),
    "mean field": Method(ps.MeanFieldGuide, kl_weight=0.1),
    "mean field, A only": Method(ps.MeanFieldGuide, prior_on="A"),
    "k-tied": Method(lambda model: ps.KTiedGuide(model, rank=2, join_bias=False), kl_weight=0.1),
    "low rank": Method(low_rank, kl_weight=0.1),
    "low rank, A only": Method(low_rank, kl_weight=0.1, prior_on="A"),
    "full covariance": Method(ps.FullCovarianceGuide, 0.03, 0.1),
}


def main() -> None:
    options = parse()
    # peft asks transformers for what it calls otherwise now.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = load(options, device)
    base = pretrained(data.text, options, device)
    results: dict[str, dict[str, Any]] = {}
    titles = "".join(f"{title:>16}" for title in METRICS.values())
    print(f"{'method':20}{'prior':>7}{'rate':>7}{'KL':>7}{titles}")
    for name in options.method or METHODS:
        method, tried = METHODS[name], []
        if options.select:
            method, tried = select(method, base, data, options)
        scores = [run(method, base, data, options, seed) for seed in range(options.seeds)]
        columns = {metric: [own[metric] for own in scores] for metric in METRICS}
        results[name] = method.settings | columns | {"tried": tried}
        settings = "".join(f"{value:7g}" for value in method.settings.values())
        cells = "".join(f"{summary(values):>16}" for values in columns.values())
        print(f"{name:20}{settings}{cells}", flush=True)
        if options.results:
            numbers = {k: v for k, v in vars(options).items() if not isinstance(v, Path)}
            options.results.write_text(
                json.dumps({"options": numbers, "methods": results}, indent=1)
            )
    print(reading(results))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the reviews, an .npz file")
    parser.add_argument("--base", type=Path, help="where the pretrained net is kept")
    parser.add_argument("--results", type=Path, help="a .json file for the numbers")
    parser.add_argument("--method", choices=METHODS, action="append", help="unless all of them")
    parser.add_argument("--seeds", type=int, default=3, help="how many runs of each method")
    parser.add_argument("--select", action="store_true", help="choose the settings by validation")
    for setting, tried in TRIED.items():
        parser.add_argument(f"--{setting}", type=float, nargs="+", default=tried, metavar="X")
    parser.add_argument("--vocabulary", type=int, default=8000, help="most frequent words kept")
    parser.add_argument("--length", type=int, default=128, help="last words of a review kept")
    parser.add_argument("--hidden", type=int, default=128, help="width of the transformer")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--pretrain-steps", type=int, default=3000)
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapters")
    parser.add_argument("--train", type=int, default=2000, help="labelled reviews")
    parser.add_argument("--validation", type=int, default=500, help="further ones, for --select")
    parser.add_argument("--test", type=int, default=2000, help="reviews to test on")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--num-samples", type=int, default=20, help="posterior draws at the end")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to try things out")
    options = parser.parse_args()
    if options.smoke:
        vars(options).update(SMOKE)
    return options


def select(
    method: Method, base: LlamaForCausalLM, data: Data, options: argparse.Namespace
) -> tuple[Method, list[dict[str, float]]]:
    """Return a method with settings of a low validation NLL, and what was tried."""
    train, validation = split(data.train, 0, options)
    tried: dict[Method, float] = {}
    choices = {"prior_scale": options.prior_scales, "lr": options.rates}
    if method.is_variational:
        choices["kl_weight"] = options.kl_weights
    for setting, values in choices.items():
        candidates = [replace(method, **{setting: value}) for value in values]
        for each in candidates:
            if each not in tried:
                model, posterior, _ = fit(each, base, train, options, seed=0)
                prediction = predict(each, model, posterior, validation, options)
                tried[each] = classification_scores(prediction.mean, validation.y).nll
        method = min(candidates, key=lambda each: tried[each])
    return method, [each.settings | {"nll": nll} for each, nll in tried.items()]


def split(reviews: Reviews, seed: int, options: argparse.Namespace) -> tuple[Reviews, Reviews]:
    """Choose the labelled reviews, and others for validation."""
    order = torch.randperm(len(reviews.y), generator=torch.Generator().manual_seed(seed))
    order = order.to(reviews.y.device)
    first, last = options.train, options.train + options.validation
    return reviews[order[:first]], reviews[order[first:last]]


def run(
    method: Method, base: LlamaForCausalLM, data: Data, options: argparse.Namespace, seed: int
) -> dict[str, float]:
    """Train with one seed; return the scores on the test reviews."""
    train, _ = split(data.train, seed, options)
    model, posterior, seconds = fit(method, base, train, options, seed)
    usual, strange = (
        predict(method, model, posterior, reviews, options) for reviews in (data.test, data.strange)
    )
    scores = classification_scores(usual.mean, data.test.y)
    auroc = detection_scores(usual.entropy, strange.entropy).auroc
    return asdict(scores) | {"auroc": auroc, "seconds": seconds}


def fit(
    method: Method,
    base: LlamaForCausalLM,
    train: Reviews,
    options: argparse.Namespace,
    seed: int,
) -> tuple[ps.Classifier, ps.StructuredGuide | Mapping[str, Tensor], float]:
    """Return the model, its posterior, and the seconds that it took to train it."""
    pyro.set_rng_seed(seed)
    prior = {f"*lora_{factor}*": method.prior_scale for factor in method.prior_on}
    prior |= {"*score*": method.prior_scale, "*": None}
    net = ps.bayesianize(with_adapters(base, options.rank), prior=prior)
    model = ps.Classifier(net, num_data=len(train.y))
    guide = method.guide(model)
    steps = options.epochs * -(-len(train.y) // options.batch_size)
    start = time.perf_counter()
    ps.fit(
        model,
        guide,
        (train.inputs, train.y),
        num_epochs=options.epochs,
        batch_size=options.batch_size,
        lr=method.lr,
        kl_weight=ps.LinearAnnealing(-(-steps // 2), end=method.kl_weight),
        progress=False,
    )
    posterior = laplace(model, guide, train, options.num_samples) if method.is_laplace else guide
    return model, posterior, time.perf_counter() - start


def with_adapters(base: LlamaForCausalLM, rank: int) -> nn.Module:
    """Return a classifier with the frozen net, new adapters and a new head."""
    net = LlamaForSequenceClassification(base.config)
    net.model.load_state_dict(base.model.state_dict())
    adapters = LoraConfig(
        task_type="SEQ_CLS", r=rank, lora_alpha=2 * rank, target_modules=["q_proj", "v_proj"]
    )
    return get_peft_model(net, adapters).to(base.device)


def laplace(
    model: ps.Classifier, center: ps.StructuredGuide, train: Reviews, num_samples: int
) -> dict[str, Tensor]:
    """Return draws of the diagonal Laplace approximation around a maximum a posteriori estimate."""
    # Words see only what comes before them, and the padding comes last: it needs no mask.
    variances = ps.element_scores.laplace_variances(model, center, train.tokens, batch_size=200)
    return {
        name: median + variances[name].sqrt() * torch.randn(num_samples, *median.shape).to(median)
        for name, median in center.median().items()
    }


def predict(
    method: Method,
    model: ps.Classifier,
    posterior: ps.StructuredGuide | Mapping[str, Tensor],
    reviews: Reviews,
    options: argparse.Namespace,
) -> Any:
    num_samples = method.num_samples or options.num_samples
    return ps.predict(
        model, posterior, reviews.inputs, num_samples=num_samples, batch_size=500, stream=True
    )


def summary(values: list[float]) -> str:
    """Return a mean, with its standard error if there are several values."""
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{mean(values):.3f} ± {stdev(values) / len(values) ** 0.5:.3f}"


def reading(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Say in a sentence what the table shows."""

    def best(metric: str, pick: Callable[..., str]) -> str:
        name = pick(results, key=lambda name: mean(results[name][metric]))
        return f"{name} ({mean(results[name][metric]):.3f})"

    said = [
        f"the lowest NLL has {best('nll', min)}",
        f"the lowest calibration error {best('calibration_error', min)}",
        f"the highest accuracy {best('accuracy', max)}",
        f"random words are told best by {best('auroc', max)}",
    ]
    for name, alone in ((name, f"{name}, A only") for name in results):
        if alone in results:
            less = mean(results[name]["nll"]) - mean(results[alone]["nll"])
            said.append(f"with B random too the NLL of {name} is {abs(less):.3f} ")
            said[-1] += "higher" if less > 0 else "lower"
    return f"\nOver {len(results)} methods, {', '.join(said[:-1])}, and {said[-1]}."


if __name__ == "__main__":
    main()
