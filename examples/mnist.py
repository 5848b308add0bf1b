"""The papers' 400-400-10 net on MNIST, with a guide of your choice.

    python examples/mnist.py --guide k-tied --rank 2

downloads MNIST by torchvision; ``--data FILE.npz`` reads arrays ``x_train, y_train, x_test, y_test``
(images as unsigned bytes) instead.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import pyro_structvi as ps
from pyro_structvi.metrics import classification_scores

GUIDES: dict[str, Callable[[ps.Classifier, int], ps.StructuredGuide]] = {
    "mean-field": lambda model, rank: ps.MeanFieldGuide(model),
    "k-tied": lambda model, rank: ps.KTiedGuide(model, rank, join_bias=False),
    "low-rank": lambda model, rank: ps.AutoLowRankLRT(model, rank, join_bias=False),
    "low-rank-full-diagonal": lambda model, rank: ps.AutoLowRankLRT(
        model, rank, diagonal="full", join_bias=False
    ),
    "inducing": lambda model, rank: ps.InducingWeightGuide(model, max_conditional_scale=0.1),
    "inducing-unbounded": lambda model, rank: ps.InducingWeightGuide(model),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--guide", choices=GUIDES, default="k-tied")
    parser.add_argument("--rank", type=int, default=2, help="rank of a k-tied or low-rank guide")
    parser.add_argument("--data", type=Path, help="an .npz file instead of a download")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--lr", type=float, help="unless the default of fit")
    parser.add_argument("--prior-scale", type=float, default=0.2, help="prior standard deviation")
    parser.add_argument("--num-samples", type=int, default=50, help="posterior draws at the end")
    parser.add_argument("--limit", type=int, help="use only so many examples, to try things out")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x_train, y_train, x_test, y_test = load(options.data, options.limit, device)
    net = nn.Sequential(
        nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10)
    ).to(device)
    bayes_net = ps.bayesianize(net, prior=options.prior_scale)
    model = ps.Classifier(bayes_net, num_data=len(x_train))
    guide = GUIDES[options.guide](model, options.rank)

    steps = options.epochs * -(-len(x_train) // options.batch_size)
    start = time.perf_counter()
    history = ps.fit(
        model,
        guide,
        (x_train, y_train),
        num_epochs=options.epochs,
        batch_size=options.batch_size,
        lr=options.lr,
        kl_weight=ps.LinearAnnealing(-(-steps // 2)),
    )
    minutes = (time.perf_counter() - start) / 60
    prediction = ps.predict(
        model,
        guide,
        x_test,
        num_samples=options.num_samples,
        batch_size=2000,
        stream=True,
        progress=True,
    )
    scores = classification_scores(prediction.mean, y_test)
    last = history.elbo[-steps // options.epochs :]
    has_rank = options.guide.startswith(("k-tied", "low-rank"))
    print(f"guide              {options.guide}{f', rank {options.rank}' if has_rank else ''}")
    print(f"parameters         {sum(p.numel() for p in guide.parameters())}")
    print(f"training           {minutes:.2f} min, {60e3 * minutes / steps:.1f} ms a step")
    print(f"-ELBO / example    {-sum(last) / len(last) / len(x_train):.4f} nats")
    print(f"test accuracy      {scores.accuracy:.4f}")
    print(f"test NLL           {scores.nll:.4f} nats")
    print(f"calibration error  {scores.calibration_error:.4f}")


def load(
    path: Path | None, limit: int | None, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    arrays = dict(np.load(path)) if path else download()

    def images(name: str) -> Tensor:
        return torch.from_numpy(arrays[name][:limit]).flatten(1).to(device).float() / 255

    def labels(name: str) -> Tensor:
        return torch.from_numpy(arrays[name][:limit]).long().to(device)

    return images("x_train"), labels("y_train"), images("x_test"), labels("y_test")


def download() -> dict[str, np.ndarray]:
    from torchvision.datasets import MNIST

    train, test = (MNIST("data", train=part, download=True) for part in (True, False))
    return {
        "x_train": train.data.numpy(),
        "y_train": train.targets.numpy(),
        "x_test": test.data.numpy(),
        "y_test": test.targets.numpy(),
    }


if __name__ == "__main__":
    main()
