"""Tables 2 and 3, Figure 5: a ResNet-18 on CIFAR-10, in the weights and in inducing weights.

    python -m examples.papers.ritter2021.resnet --data cifar10.npz --outside fashion_mnist.npz
    python -m examples.papers.ritter2021.resnet --paper-size

Images that are corrupted, and images of something else, are predicted too. Without files the data are
downloaded by torchvision. What was measured is added to the file of results and is not measured again.
The default is a narrow net on images of half the resolution, for a CPU.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet

import pyro_structvi as ps
from benchmarks.paper_tables import HEADER
from benchmarks.rows import ResultsFile
from examples.papers.data import Images, downloaded, load_images
from examples.papers.ritter2021.augmentation import ShiftedAndFlipped
from examples.papers.ritter2021.corruptions import CORRUPTIONS, corrupt
from pyro_structvi.families import MeanField
from pyro_structvi.metrics import classification_scores, detection_scores

SEVERITIES = (1, 3, 5)
MAX_SCALE, MAX_CONDITIONAL, MAX_INDUCING = 0.1, 0.03, 0.1
SECONDS, PARAMETERS, COST = "CPU seconds of training", "parameters", "ms of a draw per image"
PER_PASS = 500  # images that are predicted, and of the training, for the statistics of batch norms
ADDED = (SECONDS, PARAMETERS)  # over the members of an ensemble
TABLES = {
    "clean": "Table 2 and Figure 3: CIFAR-10",
    "outside": "Table 3: other images, by the largest probability",
    "corrupted": "Figure 5: corrupted CIFAR-10",
}

Make = Callable[[Any, Any], ps.StructuredGuide]
METHODS: dict[str, Make] = {
    "Deterministic": lambda model, options: ps.MAPGuide(model),
    "Ensemble-W": lambda model, options: ps.MAPGuide(model),
    "FFG-W": lambda model, options: ps.StructuredGuide(model, {"*": MeanField(MAX_SCALE)}),
    "FFG-U": lambda model, options: ps.InducingWeightGuide(
        *(model, (options.size, options.size)),
        max_conditional_scale=MAX_CONDITIONAL,
        max_inducing_scale=MAX_INDUCING,
    ),
    "Ensemble-U": lambda model, options: ps.InducingWeightGuide(
        *(model, (options.size, options.size), "ensemble"),
        ensemble_size=options.members,
        max_conditional_scale=MAX_CONDITIONAL,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="an .npz file of CIFAR-10")
    parser.add_argument("--outside", type=Path, help="an .npz file of Fashion-MNIST")
    parser.add_argument("--method", choices=METHODS, action="append", help="default: all")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--width", type=int, default=16, help="channels of the first layers")
    parser.add_argument("--stride", type=int, default=2, help="of the first convolution")
    parser.add_argument("--size", type=int, default=16, help="M of the inducing weights")
    parser.add_argument("--members", type=int, default=3, help="of an ensemble")
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--corrupted", type=int, default=500, help="images of each corruption")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--limit", type=int, help="use only so many images")
    parser.add_argument("--augment", action="store_true", help="shift and flip images at random")
    parser.add_argument("--output", type=Path, help="a CSV file; what it has is not measured again")
    parser.add_argument("--nets", type=Path, default=Path("demo_output/ritter2021"))
    parser.add_argument("--paper-size", action="store_true", help="full width; for a GPU")
    parser.add_argument("--smoke", action="store_true", help="a few steps only")
    options = parser.parse_args()
    if options.paper_size:
        options.width, options.stride, options.size, options.members = 64, 1, 64, 5
        options.epochs, options.corrupted, options.augment = 200, 10_000, True
    if options.smoke:
        options.width, options.size, options.epochs, options.members = 4, 4, 1, 2
        options.draws, options.corrupted, options.limit = 2, 4, 32
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    images = load_images("CIFAR10", options.data, options.limit)
    sets = test_sets(images, load_outside(options), options.corrupted)
    results = ResultsFile(options.output, HEADER)
    for method in options.method or METHODS:
        for seed in range(options.members if method == "Deterministic" else options.seeds):
            if not results.has(TABLES["clean"], method, str(seed)):
                found = measure(method, seed, images, sets, options)
                rows = scores(found, images.y_test, options.corrupted)
                results.add(*((table, method, str(seed), *cell) for table, *cell in rows))


# ---- data ----------------------------------------------------------------------------------------


def load_outside(options: argparse.Namespace) -> Tensor:
    """Return grey images of clothes, 28 x 28, as colour images of the size of CIFAR-10's."""
    arrays = np.load(options.outside) if options.outside else downloaded("FashionMNIST")
    grey = torch.from_numpy(arrays["x_test"][: options.limit or 4000]).float() / 255
    images = grey[:, None].expand(-1, 3, -1, -1)
    return nn.functional.interpolate(images, (32, 32), mode="bilinear", antialias=True).clamp(0, 1)


def test_sets(images: Images, outside: Tensor, count: int) -> dict[str, Tensor]:
    """Return normalized test images by the name of their kind."""
    few = images.x_test[:count]
    sets = {"clean": images.x_test, "outside": outside}
    for severity in SEVERITIES:
        each = [corrupt(few, kind, severity) for kind in CORRUPTIONS]
        sets[f"severity {severity}"] = torch.cat(each)
    return {name: normalized(own) for name, own in sets.items()}


def normalized(images: Tensor) -> Tensor:
    mean, scale = torch.tensor([0.491, 0.482, 0.447]), torch.tensor([0.247, 0.243, 0.262])
    return (images - mean[:, None, None]) / scale[:, None, None]


# ---- nets ----------------------------------------------------------------------------------------


def make_net(width: int, stride: int) -> nn.Module:
    """Return a ResNet-18 for images of 32 x 32, with fewer channels and fewer positions if asked."""
    net = ResNet(BasicBlock, [2, 2, 2, 2], num_classes=10)
    net.inplanes = width
    net.conv1 = nn.Conv2d(3, width, 3, stride, padding=1, bias=False)
    net.bn1, net.maxpool = nn.BatchNorm2d(width), nn.Identity()
    for block in range(4):
        layer = net._make_layer(BasicBlock, width << block, 2, stride=2 if block else 1)
        setattr(net, f"layer{block + 1}", layer)
    net.fc = nn.Linear(width << 3, 10)
    return net


def measure(
    method: str, seed: int, images: Images, sets: Mapping[str, Tensor], options: Any
) -> dict[str, Any]:
    """Return probabilities by the name of the set, the parameters, and seconds."""
    if method == "Ensemble-W":
        nets = [
            measure("Deterministic", options.members * seed + member, images, sets, options)
            for member in range(options.members)
        ]
        count = {key: 1 if key in ADDED else len(nets) for key in nets[0]}
        return {key: sum(net[key] for net in nets) / count[key] for key in count}
    size = (options.width, options.stride, options.size, options.epochs, len(images.x_train))
    path = options.nets / f"{method}-{seed}-{'-'.join(map(str, size))}.pt"
    if not path.exists():
        options.nets.mkdir(parents=True, exist_ok=True)
        torch.save(trained(method, seed, images, sets, options), path)
    found: dict[str, Any] = torch.load(path)
    return found


def trained(
    method: str, seed: int, images: Images, sets: Mapping[str, Tensor], options: Any
) -> dict[str, Any]:
    """Train a posterior, and return what it predicts."""
    torch.manual_seed(seed)
    net = ps.bayesianize(
        make_net(options.width, options.stride), ps.FanIn(2**0.5), normalization=False
    )
    model = ps.Classifier(net.to(options.device), num_data=len(images.x_train))
    guide = METHODS[method](model, options)
    x, y = normalized(images.x_train), images.y_train
    steps = options.epochs * -(-len(x) // options.batch_size)
    data = ShiftedAndFlipped(x, y, options.batch_size) if options.augment else (x, y)
    start = time.process_time()
    ps.fit(
        *(model, guide, data),
        num_epochs=options.epochs,
        batch_size=None if options.augment else options.batch_size,
        kl_weight=0.0 if method == "Deterministic" else ps.LinearAnnealing(-(-steps // 2)),
        progress=False,
    )
    found: dict[str, Any] = {SECONDS: time.process_time() - start}
    draws = 1 if method == "Deterministic" else options.draws
    few = None if method == "Deterministic" else x[:PER_PASS].to(options.device)
    predicted, start = 0, time.process_time()
    for name, own in sets.items():
        prediction = ps.predict(
            *(model, guide, own.to(options.device)),
            num_samples=draws,
            batch_size=PER_PASS,
            stream=True,
            batch_statistics=few,  # of each draw: members would share the running ones
        )
        found[name] = prediction.mean.cpu()
        predicted += draws * (len(own) + (0 if few is None else len(few)))
    found[COST] = 1e3 * (time.process_time() - start) / predicted
    found[PARAMETERS] = sum(value.numel() for value in guide.parameters())
    return found


# ---- scores --------------------------------------------------------------------------------------


def scores(found: Mapping[str, Any], y: Tensor, count: int) -> list[tuple[str, str, str]]:
    """Return lines ``(table, quantity, value)``."""
    clean = classification_scores(found["clean"], y)
    inside, outside = (1 - found[name].amax(-1) for name in ("clean", "outside"))
    detection = detection_scores(inside, outside)
    cells: dict[str, dict[str, float]] = {
        "clean": {
            "accuracy (%)": 100 * clean.accuracy,
            "ECE (%)": 100 * clean.calibration_error,
            "NLL (nats)": clean.nll,
            **{name: float(own) for name, own in found.items() if not isinstance(own, Tensor)},
        },
        "outside": {
            "AUROC, Fashion-MNIST": detection.auroc,
            "AUPR, Fashion-MNIST": detection.aupr,
        },
        "corrupted": {},
    }
    for severity in SEVERITIES:
        labels = y[:count].repeat(len(CORRUPTIONS))
        own = classification_scores(found[f"severity {severity}"], labels)
        cells["corrupted"][f"accuracy (%), severity {severity}"] = 100 * own.accuracy
        cells["corrupted"][f"ECE (%), severity {severity}"] = 100 * own.calibration_error
    return [
        (TABLES[kind], quantity, f"{value:.6g}")
        for kind, own in cells.items()
        for quantity, value in own.items()
    ]


if __name__ == "__main__":
    main()
