"""Deep nets by AdamW, by IVON, and by guides of this package: accuracy, likelihood, seconds.

    python -m benchmarks.deep_nets --data mnist.npz --net MLP --epochs 10 --output FILE.csv
    python -m benchmarks.deep_nets --data cifar10.npz --net ResNet-20 --num-train 5000 --epochs 60
    python -m benchmarks.deep_nets --data mnist.npz --net MLP --method "k-tied 2" --quick

A file has ``x_train``, ``y_train``, ``x_test`` and ``y_test``: classes, and images of bytes of the shape
``(n, height, width)`` or ``(n, height, width, 3)``. Color images are shifted and flipped in training.
Guides are trained by ``fit`` with its default optimizer, the rate of ``--lr``, the KL weight of
``--kl-weight`` and the initial standard deviation of ``--init-scale``; "from AdamW" always has the rate
0.03 in the second half of the epochs. "AdamW" has the rate 0.001 unless its name has another, and "IVON"
(``pip install ivon-opt``) 0.2 with the initial Hessian 0.1, or 0.1 with 0.5; both fall along a cosine.
What the file of results has is not measured again; give ``--quick`` a file of its own.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm.auto import trange

import pyro_structvi as ps
from benchmarks.deep_nets_table import DEEP_NETS, deep_nets_table
from benchmarks.nets import make_lenet, make_mlp
from benchmarks.rows import ResultsFile

NUM_DRAWS = 20
PRIOR = ps.FanIn(2**0.5)
BATCH_SIZES = {"MLP": 200, "LeNet": 200, "ResNet-20": 50}


class Images:
    """Mini-batches of images in random order; those of three channels are shifted and flipped."""

    def __init__(self, x: Tensor, y: Tensor, batch_size: int) -> None:
        self.x, self.y, self.batch_size = x, y, batch_size

    def __len__(self) -> int:
        """The number of mini-batches of an epoch."""
        return len(self.x) // self.batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the mini-batches of an epoch."""
        for index in torch.randperm(len(self.x)).split(self.batch_size)[: len(self)]:
            x = self.x[index]
            yield (augment(x) if x.shape[1] == 3 else x), self.y[index]


def augment(x: Tensor) -> Tensor:
    """Return images shifted by at most an eighth of their size, every other one mirrored."""
    size = x.shape[-1]
    shift = size // 8
    padded = F.pad(x, (shift,) * 4)
    corners = torch.randint(2 * shift + 1, (len(x), 2)).tolist()
    cut = [
        image[:, top : top + size, left : left + size]
        for image, (top, left) in zip(padded, corners, strict=True)
    ]
    shifted = torch.stack(cut)
    is_mirrored = torch.rand(len(x), 1, 1, 1) < 0.5
    return torch.where(is_mirrored, shifted.flip(-1), shifted)


class Block(nn.Module):
    """Two convolutions around which the input is added; a shortcut without parameters."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stride = outputs // inputs
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, outputs, 3, self.stride, 1, bias=False), nn.GroupNorm(8, outputs)),
            nn.ReLU(),
            *(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.GroupNorm(8, outputs)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block."""
        if self.stride == 1:
            return F.relu(self.body(x) + x)
        channels = x.shape[1]
        shortcut = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, channels // 2, channels // 2))
        return F.relu(self.body(x) + shortcut)


def make_resnet20() -> nn.Sequential:
    widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    blocks = [Block(*pair) for pair in pairwise(widths)]
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.GroupNorm(8, 16), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


NETS: dict[str, Callable[[], nn.Module]] = {
    "MLP": lambda: nn.Sequential(nn.Flatten(), make_mlp(784, 400, 400, 10)),
    "LeNet": make_lenet,
    "ResNet-20": make_resnet20,
}


# ---- methods -------------------------------------------------------------------------------------

Probabilities = Callable[[Tensor], Tensor]  # of classes, for a batch of images


def by_adamw(net: nn.Module, batches: Images, options: Any, lr: float = 1e-3) -> Probabilities:
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.01)

    def step(x: Tensor, y: Tensor) -> None:
        F.cross_entropy(net(x), y).backward()

    train(optimizer, step, batches, options.epochs)
    return lambda x: net(x).softmax(-1)


def by_ivon(
    net: nn.Module, batches: Images, options: Any, lr: float = 0.2, hessian: float = 0.1
) -> Probabilities:
    from ivon import IVON

    size = len(batches.x)
    optimizer = IVON(net.parameters(), lr=lr, ess=size, hess_init=hessian, weight_decay=1e-4)

    def step(x: Tensor, y: Tensor) -> None:
        with optimizer.sampled_params(train=True):
            F.cross_entropy(net(x), y).backward()

    train(optimizer, step, batches, options.epochs)

    def predict(x: Tensor) -> Tensor:
        draws = []
        for _ in range(NUM_DRAWS):
            with optimizer.sampled_params():
                draws.append(net(x).softmax(-1))
        return torch.stack(draws).mean(0)

    return predict


def train(optimizer: Any, step: Callable[..., None], batches: Images, num_epochs: int) -> None:
    """Train with a rate that falls to zero along a cosine."""
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_epochs * len(batches))
    for _ in trange(num_epochs, leave=False):
        for x, y in batches:
            optimizer.zero_grad()
            step(x, y)
            optimizer.step()
            decay.step()


def by_guide(make_guide: Callable[..., ps.StructuredGuide], **own: Any) -> Callable[..., Any]:
    """Return the method of a guide, with arguments of ``fit`` of its own."""

    def method(net: nn.Module, batches: Images, options: Any) -> Probabilities:
        bayesian = ps.bayesianize(net, prior=PRIOR, normalization=False)
        model = ps.Classifier(bayesian, num_data=len(batches.x))
        guide = make_guide(model, init_scale=options.init_scale)
        arguments = {"kl_weight": options.kl_weight, "num_epochs": options.epochs}
        arguments |= {"lr": options.lr, **own}
        ps.fit(model, guide, batches, **arguments)
        model.eval()
        return lambda x: ps.predict(model, guide, x, num_samples=NUM_DRAWS).mean

    return method


def from_adamw(make_guide: Callable[..., ps.StructuredGuide]) -> Callable[..., Probabilities]:
    """Return the method of a guide of a net that AdamW trained for half of the epochs."""

    def method(net: nn.Module, batches: Images, options: Any) -> Probabilities:
        half = argparse.Namespace(**vars(options) | {"epochs": -(-options.epochs // 2)})
        by_adamw(net, batches, half)
        return by_guide(make_guide, lr=0.03)(net, batches, half)

    return method


METHODS: dict[str, Callable[..., Probabilities]] = {
    "AdamW": by_adamw,
    "AdamW, rate 0.002": partial(by_adamw, lr=2e-3),
    "AdamW, rate 0.004": partial(by_adamw, lr=4e-3),
    "IVON": by_ivon,
    "IVON, rate 0.1": partial(by_ivon, lr=0.1, hessian=0.5),
    "point": by_guide(ps.MAPGuide),
    "ensemble of 5": by_guide(partial(ps.EnsembleGuide, vectorize=False)),
    "mean field": by_guide(partial(ps.MeanFieldGuide, local_reparam="exact")),
    "k-tied 2": by_guide(partial(ps.KTiedGuide, local_reparam="exact")),
    "k-tied 2 from AdamW": from_adamw(partial(ps.KTiedGuide, local_reparam="exact")),
    "matrix normal": by_guide(partial(ps.MatrixNormalGuide, local_reparam="exact")),
    "mean field, whole KL": by_guide(
        partial(ps.MeanFieldGuide, local_reparam="exact"), kl_weight="annealed"
    ),
}
OWN = [name for name in METHODS if "IVON" not in name and "rate" not in name]


# ---- measurement ---------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="an .npz file")
    parser.add_argument("--net", choices=NETS, required=True)
    parser.add_argument(
        "--method", choices=METHODS, action="append", help=f"default: {', '.join(OWN)}"
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--num-train", type=int, help="how many of the first images; default: all")
    parser.add_argument("--size", type=int, help="of images, which are averaged down to it")
    parser.add_argument("--kl-weight", type=float, default=0.01)
    parser.add_argument("--lr", type=float, help="of guides; default: that of `fit`")
    parser.add_argument("--init-scale", type=float, default=0.01, help="of guides")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a few images")
    parser.add_argument("--output", type=Path, help="a CSV file; what it has is not measured again")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    images, test = load(options.data, 200 if options.quick else options.num_train, options.size)
    test = tuple(part[:100] for part in test) if options.quick else test
    results = ResultsFile(options.output, DEEP_NETS)
    for seed, name in product(range(options.seeds), options.method or OWN):
        pixels = "" if options.size is None else f" of {options.size} x {options.size}"
        recipe = f"{len(images[0])} images{pixels}, {options.epochs} epochs"
        recipe += f", KL weight {options.kl_weight:g}"
        recipe += "" if options.lr is None else f", rate {options.lr:g}"
        recipe += "" if options.init_scale == 0.01 else f", initial scale {options.init_scale:g}"
        if not results.has(options.net, recipe, name, str(seed)):
            torch.manual_seed(seed)
            row = measure(METHODS[name], images, test, options)
            results.add((options.net, recipe, name, str(seed), *row))
    print(deep_nets_table(results.rows))


def load(path: Path, num_train: int | None, size: int | None) -> list[tuple[Tensor, Tensor]]:
    """Return the images and classes for training and test, standardized by the former."""
    with np.load(path) as file:
        parts = [[file[f"{kind}_{name}"] for kind in "xy"] for name in ("train", "test")]
    parts[0] = [part[:num_train] for part in parts[0]]
    x = [torch.tensor(images).float() / 255 for images, _ in parts]
    x = [each.movedim(-1, 1) if each.dim() == 4 else each.unsqueeze(1) for each in x]
    if size is not None:
        x = [F.avg_pool2d(each, each.shape[-1] // size) for each in x]
    std, mean = torch.std_mean(x[0], (0, 2, 3), keepdim=True)
    y = [torch.tensor(classes).long() for _, classes in parts]
    return [((images - mean) / std, classes) for images, classes in zip(x, y, strict=True)]


def measure(
    method: Callable[..., Probabilities],
    images: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    options: argparse.Namespace,
) -> tuple[str, ...]:
    """Return accuracy, negative log likelihood, and the seconds of training."""
    net = NETS[options.net]()
    batches = Images(*images, min(BATCH_SIZES[options.net], len(images[0])))
    start = time.perf_counter()
    predict = method(net, batches, options)
    seconds = time.perf_counter() - start
    net.eval()
    with torch.no_grad():
        probabilities = torch.cat([predict(x) for x in test[0].split(500)]).double()
    accuracy = (probabilities.argmax(-1) == test[1]).double().mean()
    loss = F.nll_loss(probabilities.clamp_min(1e-12).log(), test[1])
    return f"{accuracy:.4f}", f"{loss:.4f}", f"{seconds:.0f}"


if __name__ == "__main__":
    main()
