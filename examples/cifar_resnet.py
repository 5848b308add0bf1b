"""A ResNet-18 on CIFAR-10, with a guide of your choice.

    python examples/cifar_resnet.py --data DIR

downloads CIFAR-10 by torchvision into ``DIR`` if it is not there. ``--random-images N`` trains on noise
instead, to try things out without a network.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import pyro
import torch
from torch import Tensor, nn
from torchvision.datasets import CIFAR10
from torchvision.models import resnet18

import pyro_structvi as ps
from pyro_structvi.metrics import classification_scores

GUIDES: dict[str, Callable[[ps.Classifier, int], ps.StructuredGuide]] = {
    "map": lambda model, rank: ps.MAPGuide(model),
    "mean-field": lambda model, rank: ps.MeanFieldGuide(model),
    "k-tied": lambda model, rank: ps.KTiedGuide(model, rank, join_bias=False),
    "low-rank": lambda model, rank: ps.AutoLowRankLRT(model, rank, join_bias=False),
    "inducing": lambda model, rank: ps.InducingWeightGuide(model, max_conditional_scale=0.1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--guide", choices=GUIDES, default="k-tied")
    parser.add_argument("--rank", type=int, default=2, help="rank of a k-tied or low-rank guide")
    parser.add_argument("--data", type=Path, default=Path("data"), help="where CIFAR-10 is kept")
    parser.add_argument("--random-images", type=int, help="train on so many images of noise")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, help="unless the default of fit")
    parser.add_argument("--kl-weight", type=float, default=1.0, help="weight of the KL at the end")
    parser.add_argument("--num-samples", type=int, default=20, help="posterior draws at the end")
    parser.add_argument("--load", type=Path, help="a checkpoint to start from")
    parser.add_argument("--save", type=Path, help="where to put a checkpoint at the end")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not options.random_images:
        CIFAR10(options.data, download=True)
    pyro.set_rng_seed(options.seed)
    x, y = load(options, train=True)
    net = bayesian_resnet().to(device)
    model = ps.Classifier(net, num_data=len(x))
    guide = GUIDES[options.guide](model, options.rank)
    parts = nn.ModuleDict({"model": model, "guide": guide})
    if options.load:
        parts.load_state_dict(torch.load(options.load, map_location=device))

    steps = options.epochs * -(-len(x) // options.batch_size)
    start = time.perf_counter()
    history = ps.fit(
        model,
        guide,
        (x, y),
        num_epochs=options.epochs,
        batch_size=options.batch_size,
        lr=options.lr,
        kl_weight=ps.LinearAnnealing(-(-steps // 2), end=options.kl_weight),
    )
    seconds = time.perf_counter() - start
    if options.save:
        torch.save(parts.state_dict(), options.save)
    print(f"guide              {options.guide}, on {device.type}")
    print(f"parameters         {sum(p.numel() for p in guide.parameters())}")
    print(f"training           {seconds / 60:.2f} min, {1e3 * seconds / steps:.1f} ms a step")
    last = history.elbo[-steps // options.epochs :]
    bound = "-" if options.guide == "map" else f"{-sum(last) / len(last) / len(x):.4f} nats"
    print(f"-ELBO / example    {bound}")
    evaluate(model, guide, load(options, train=False), device, options.num_samples)


def load(options: argparse.Namespace, train: bool) -> tuple[Tensor, Tensor]:
    if options.random_images:
        noise = torch.Generator().manual_seed(int(train))
        x = torch.randn(options.random_images, 3, 32, 32, generator=noise)
        return x, torch.arange(options.random_images) % 10
    data = CIFAR10(options.data, train=train)
    pixels = torch.from_numpy(data.data).permute(0, 3, 1, 2).float() / 255
    mean, scale = torch.tensor([0.491, 0.482, 0.447]), torch.tensor([0.247, 0.243, 0.262])
    return (pixels - mean[:, None, None]) / scale[:, None, None], torch.tensor(data.targets)


def bayesian_resnet() -> nn.Module:
    """Make a ResNet-18 for small images: no stride and no pooling in front; batch norm as it is."""
    net = resnet18(num_classes=10)
    net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    net.maxpool = nn.Identity()
    return ps.bayesianize(net, prior=ps.FanIn(2**0.5), normalization=False)


def evaluate(
    model: ps.Classifier,
    guide: ps.StructuredGuide,
    test: tuple[Tensor, Tensor],
    device: torch.device,
    num_samples: int,
) -> None:
    x, y = (values.to(device) for values in test)
    prediction = ps.predict(
        model, guide, x, num_samples=num_samples, batch_size=1000, stream=True, progress=True
    )
    scores = classification_scores(prediction.mean, y)
    print(f"test accuracy      {scores.accuracy:.4f}")
    print(f"test NLL           {scores.nll:.4f} nats")
    print(f"calibration error  {scores.calibration_error:.4f}")


if __name__ == "__main__":
    main()
