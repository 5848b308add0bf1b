"""Deep nets by AdamW, by IVON, and by guides of this package: accuracy, likelihood, seconds.

    python -m benchmarks.deep_nets --data mnist.npz --net MLP --epochs 10 --output FILE.csv
    python -m benchmarks.deep_nets --data cifar10.npz --net ResNet-20 --num-train 5000 --epochs 60
    python -m benchmarks.deep_nets --data imdb.npz --net LSTM --num-train 5000 --epochs 10
    python -m benchmarks.deep_nets --data cifar10.npz --net "ResNet-20, BatchNorm" --device cuda
    python -m benchmarks.deep_nets --data mnist.npz --net MLP --method "k-tied 2" --quick

A file of images has ``x_train``, ``y_train``, ``x_test`` and ``y_test``: classes, and images of bytes of
the shape ``(n, height, width)`` or ``(n, height, width, 3)``. Color images are shifted and flipped in
training, and the entropies of the predictions tell the test images of ``--foreign`` from those of the
file. A file of texts has ``tokens_train`` (integers from 3 on in order of frequency, all texts one
after another), ``offsets_train`` (where they begin and end) and ``y_train``, and likewise the test. The
net "LSTM" predicts the class of a text, and "GPT" the next token.

Guides are trained by ``fit`` with its default optimizer, the rate of ``--lr``, the KL weight of
``--kl-weight``, the initial standard deviation of ``--init-scale`` and the prior ``FanIn(scale)`` with
``--prior-scale``. ``--bfloat16`` is mixed precision, for all methods. "From AdamW" always has the rate
0.03 in the second half of the epochs. "Sampled weights" has one sample for a batch in place of samples
of outputs, and "torch's Adam" the rate 0.001. "AdamW" has the rate 0.001 unless its name has another,
and "IVON" (``pip install ivon-opt``) 0.2 and the initial Hessian 0.1, or as its name has. All these
rates fall along a cosine.
What the file of results has is not measured again; give ``--quick`` a file of its own.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from torch import Tensor, nn
from tqdm.auto import trange

import pyro_structvi as ps
from benchmarks.deep_data import BATCH_SIZES, NETS, VOCABULARY, Batches, Data, load
from benchmarks.deep_nets_table import DEEP_NETS, deep_nets_tables
from benchmarks.rows import ResultsFile
from pyro_structvi import metrics

NUM_DRAWS = 20
PRIOR_SCALE = 2**0.5  # of `FanIn`
INIT_SCALE = 0.01
POINTS = ("AdamW", "SGD", "IVON")  # how names of methods without a guide begin


# ---- methods -------------------------------------------------------------------------------------

Probabilities = Callable[[Tensor], Tensor]  # of classes, for a batch of inputs


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2).float(), y.flatten())


def by_adamw(
    net: nn.Module, batches: Batches, options: Any, lr: float = 1e-3, decay: float = 0.01
) -> Probabilities:
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=decay)
    return of_point(net, optimizer, batches, options)


def by_sgd(net: nn.Module, batches: Batches, options: Any) -> Probabilities:
    optimizer = torch.optim.SGD(
        net.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    return of_point(net, optimizer, batches, options)


def of_point(net: nn.Module, optimizer: Any, batches: Batches, options: Any) -> Probabilities:
    def step(x: Tensor, y: Tensor) -> None:
        cross_entropy(net(x), y).backward()

    train(optimizer, step, batches, options.epochs)
    return lambda x: net(x).softmax(-1)


def by_ivon(
    net: nn.Module, batches: Batches, options: Any, lr: float = 0.2, hessian: float = 0.1
) -> Probabilities:
    from ivon import IVON

    size = len(batches.x)
    optimizer = IVON(net.parameters(), lr=lr, ess=size, hess_init=hessian, weight_decay=1e-4)

    def step(x: Tensor, y: Tensor) -> None:
        with optimizer.sampled_params(train=True):
            cross_entropy(net(x), y).backward()

    train(optimizer, step, batches, options.epochs)

    def predict(x: Tensor) -> Tensor:
        draws = []
        for _ in range(NUM_DRAWS):
            with optimizer.sampled_params():
                draws.append(net(x).softmax(-1))
        return torch.stack(draws).mean(0)

    return predict


def train(optimizer: Any, step: Callable[..., None], batches: Batches, num_epochs: int) -> None:
    """Train with a rate that falls to zero along a cosine."""
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_epochs * len(batches))
    for _ in trange(num_epochs, leave=False):
        for x, y in batches:
            optimizer.zero_grad()
            step(x, y)
            optimizer.step()
            decay.step()


def by_guide(
    make_guide: Callable[..., ps.StructuredGuide], prior: Any = None, **own: Any
) -> Callable[..., Any]:
    """Return the method of a guide, with a prior and arguments of ``fit`` of its own."""

    def method(net: nn.Module, batches: Batches, options: Any) -> Probabilities:
        weights = ps.FanIn(options.prior_scale) if prior is None else prior
        bayesian = ps.bayesianize(net, prior=weights, normalization=False)
        likelihood = ps.Classifier if batches.y.dim() == 1 else ps.TokenClassifier
        model = likelihood(bayesian, num_data=len(batches.x))
        start = {"init_scale": options.init_scale, "init_relative_scale": options.relative_scale}
        guide = make_guide(model, **start)
        arguments = {"kl_weight": options.kl_weight, "num_epochs": options.epochs}
        arguments |= {"lr": options.lr, **own}
        ps.fit(model, guide, batches, **arguments)
        model.eval()
        predict = partial(ps.predict, model, guide, num_samples=NUM_DRAWS, stream=True)
        if options.batch_statistics is not None:
            predict.keywords["batch_statistics"] = batches.x[: options.batch_statistics]
        return lambda x: predict(x).mean

    return method


def from_adamw(
    make_guide: Callable[..., ps.StructuredGuide], lr: float = 1e-3
) -> Callable[..., Probabilities]:
    """Return the method of a guide of a net that AdamW trained for half of the epochs."""

    def method(net: nn.Module, batches: Batches, options: Any) -> Probabilities:
        half = argparse.Namespace(**vars(options) | {"epochs": -(-options.epochs // 2)})
        by_adamw(net, batches, half, lr)
        return by_guide(make_guide, lr=0.03)(net, batches, half)

    return method


def with_temperature(method: Callable[..., Probabilities]) -> Callable[..., Probabilities]:
    """Return the method with logits divided by a temperature (Guo et al., 2017).

    The method trains on nine tenths of the examples, and the others determine the temperature.
    """

    def scaled(net: nn.Module, batches: Batches, options: Any) -> Probabilities:
        is_held_out = torch.arange(len(batches.x)) % 10 == 0
        x, y = batches.x[is_held_out], batches.y[is_held_out]
        kept = batches.x[~is_held_out], batches.y[~is_held_out]
        predict = method(net, Batches(*kept, min(batches.batch_size, len(kept[0]))), options)
        net.eval()
        with torch.no_grad():
            logits = torch.cat([logits_of(predict(part)) for part in x.split(250)])

        def loss(temperature: float) -> float:
            return cross_entropy(logits / temperature, y).item()

        temperature = minimize_scalar(loss, bounds=(0.1, 10.0), method="bounded").x
        return lambda x: (logits_of(predict(x)) / temperature).softmax(-1)

    return scaled


def logits_of(probabilities: Tensor) -> Tensor:
    return probabilities.clamp_min(1e-12).log()


mean_field = partial(ps.MeanFieldGuide, local_reparam="exact")
METHODS: dict[str, Callable[..., Probabilities]] = {
    "AdamW": by_adamw,
    "AdamW, temperature scaling": with_temperature(by_adamw),
    "AdamW, rate 0.002, temperature scaling": with_temperature(partial(by_adamw, lr=2e-3)),
    "AdamW, rate 0.002": partial(by_adamw, lr=2e-3),
    "AdamW, rate 0.004": partial(by_adamw, lr=4e-3),
    "AdamW, rate 0.002, weight decay 0.1": partial(by_adamw, lr=2e-3, decay=0.1),
    "SGD, rate 0.1": by_sgd,
    "IVON": by_ivon,
    "IVON, rate 0.1": partial(by_ivon, lr=0.1, hessian=0.5),
    "IVON, Hessian 0.5": partial(by_ivon, hessian=0.5),
    "point": by_guide(ps.MAPGuide),
    "ensemble of 5": by_guide(partial(ps.EnsembleGuide, vectorize=False)),
    "mean field": by_guide(mean_field),
    "k-tied 2": by_guide(partial(ps.KTiedGuide, local_reparam="exact")),
    "k-tied 2 from AdamW": from_adamw(partial(ps.KTiedGuide, local_reparam="exact")),
    "mean field from AdamW, rate 0.002": from_adamw(mean_field, lr=2e-3),
    "matrix normal": by_guide(partial(ps.MatrixNormalGuide, local_reparam="exact")),
    "low rank 2": by_guide(partial(ps.LowRankGuide, rank=2, local_reparam="exact")),
    "eigenbasis": by_guide(partial(ps.EigenbasisGuide, local_reparam="exact")),
    "mean field, whole KL": by_guide(mean_field, kl_weight="annealed"),
    "mean field, prior N(0, 1)": by_guide(mean_field, prior=1.0),
    "mean field, sampled weights": by_guide(partial(ps.MeanFieldGuide, local_reparam=False)),
    "mean field, torch's Adam": by_guide(mean_field, optimizer=torch.optim.Adam, lr=1e-3),
}
OTHERS = ("IVON", "SGD", "rate", "temperature", "N(0, 1)", "sampled", "torch's")
OWN = [name for name in METHODS if not any(word in name for word in OTHERS)]


# ---- measurement ---------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="an .npz file")
    parser.add_argument("--net", choices=NETS, required=True)
    parser.add_argument(
        "--method", choices=METHODS, action="append", help=f"default: {', '.join(OWN)}"
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--num-train", type=int, help="how many of the first images or texts")
    parser.add_argument("--size", type=int, help="of images, which are averaged down to it")
    parser.add_argument("--foreign", type=Path, help="an .npz file whose test images to detect")
    parser.add_argument("--kl-weight", type=float, default=0.02)
    parser.add_argument("--lr", type=float, help="of guides; default: that of `fit`")
    parser.add_argument("--init-scale", type=float, default=INIT_SCALE, help="of guides")
    parser.add_argument("--relative-scale", type=float, help="of guides, as a share of the prior's")
    parser.add_argument(
        "--prior-scale",
        type=float,
        default=PRIOR_SCALE,
        help="of the prior, over the root of the fan-in",
    )
    parser.add_argument(
        "--batch-statistics",
        type=int,
        help="how many training inputs give BatchNorm its statistics at each draw of a guide",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bfloat16", action="store_true", help="train by mixed precision")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a few images")
    parser.add_argument("--output", type=Path, help="a CSV file; what it has is not measured again")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    num_train = 200 if options.quick else options.num_train
    data, test, foreign = load(options.data, options.net, num_train, options.size, options.foreign)
    if options.quick:
        test = test[0][:100], test[1][:100]
    data, test = (tuple(value.to(options.device) for value in each) for each in (data, test))
    foreign = None if foreign is None else foreign.to(options.device)
    results = ResultsFile(options.output, DEEP_NETS)
    for seed, name in product(range(options.seeds), options.method or OWN):
        key = (options.net, recipe_of(len(data[0]), options), label_of(name, options), str(seed))
        if not results.has(*key):
            torch.manual_seed(seed)
            results.add((*key, *measure(METHODS[name], data, test, foreign, options)))
    print(deep_nets_tables(results.rows))


def recipe_of(num_train: int, options: argparse.Namespace) -> str:
    """Return the settings of all methods."""
    kind = "images" if options.net not in VOCABULARY else "texts"
    pixels = "" if options.size is None else f" of {options.size} x {options.size}"
    precision = ", bfloat16" if options.bfloat16 else ""
    device = "" if options.device == "cpu" else ", on a GPU"
    return f"{num_train} {kind}{pixels}, {options.epochs} epochs{precision}{device}"


def label_of(name: str, options: argparse.Namespace) -> str:
    """Return the name of a method, with the settings of guides."""
    if name.startswith(POINTS):
        return name
    settings = [] if "whole KL" in name else [f"KL weight {options.kl_weight:g}"]
    if options.lr is not None:
        settings.append(f"rate {options.lr:g}")
    if options.relative_scale is not None:
        settings.append(f"relative scale {options.relative_scale:g}")
    if options.init_scale != INIT_SCALE:
        settings.append(f"initial scale {options.init_scale:g}")
    if options.prior_scale != PRIOR_SCALE:
        settings.append(f"prior scale {options.prior_scale:g}")
    if options.batch_statistics is not None:
        settings.append(f"statistics of {options.batch_statistics}")
    return ", ".join([name, *settings])


def measure(
    method: Callable[..., Probabilities],
    data: Data,
    test: Data,
    foreign: Tensor | None,
    options: argparse.Namespace,
) -> tuple[str, ...]:
    """Return accuracy, negative log likelihood, seconds of training, and the AUROC of foreign images."""
    net = NETS[options.net]().to(options.device)
    batches = Batches(*data, min(BATCH_SIZES[options.net], len(data[0])))
    kind = data[0].device.type
    start = time.perf_counter()
    # Its cache would hold casts of the initial weights.
    with torch.autocast(kind, torch.bfloat16, enabled=options.bfloat16, cache_enabled=False):
        predict = method(net, batches, options)
    if kind == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    net.eval()
    predict = torch.no_grad()(predict)
    scores = [score(predict(x), y) for x, y in zip(*(v.split(250) for v in test), strict=True)]
    are_right, losses, entropies = map(torch.cat, zip(*scores, strict=True))
    auroc = ""
    if foreign is not None:
        others = [entropy(predict(x)) for x in foreign.split(250)]
        auroc = f"{metrics.detection_scores(entropies, torch.cat(others)).auroc:.4f}"
    return f"{are_right.mean():.4f}", f"{losses.mean():.4f}", f"{seconds:.0f}", auroc


def score(probabilities: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each class to predict whether it is right, its loss, and the entropy."""
    probabilities, y = probabilities.double().flatten(0, -2), y.flatten()
    losses = F.nll_loss(logits_of(probabilities), y, reduction="none")
    is_right = (probabilities.argmax(-1) == y).double()
    return is_right, losses, entropy(probabilities)


def entropy(probabilities: Tensor) -> Tensor:
    return torch.special.entr(probabilities.double()).sum(-1)


if __name__ == "__main__":
    main()
