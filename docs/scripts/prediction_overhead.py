"""Time of predictions with inducing weights over that of an ensemble of as many plain nets.

    python docs/scripts/prediction_overhead.py
    python docs/scripts/prediction_overhead.py --batches 512 --samples 1 10 100

The net is 1024-2048-2048-10, with 64 x 64 inducing weights. S samples of a prediction are S draws of all
weights, each applied to the whole batch; the ensemble's are S passes of the plain net. What all draws
share is factored once for a prediction, and each draw forms its weights once for a batch: the ratio
falls with S, and with the batch. It is the median over rounds that time every number in turn.
"""

import argparse
import statistics
import time
from itertools import pairwise

import torch
from torch import Tensor, nn

import pyro_structvi as ps

WIDTHS = (1024, 2048, 2048, 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 2, 5, 10, 20, 50])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)
    net = make_net()
    model = ps.Classifier(ps.bayesianize(net, prior=ps.FanIn(2**0.5)), num_data=60_000)
    guide = ps.InducingWeightGuide(model, inducing_shape=(64, 64))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; inducing over ensemble")
    print(f"{'batch':<10}" + "".join(f"{f'S = {count}':>9}" for count in options.samples))
    for batch in options.batches:
        x = torch.randn(batch, WIDTHS[0])
        ratios: dict[int, list[float]] = {count: [] for count in options.samples}
        for number in range(options.rounds + 1):
            for count, own in ratios.items():
                ratio = predict(model, guide, x, count) / predict_by_ensemble(net, x, count)
                if number >= 1:  # the first round warms up
                    own.append(ratio)
        row = "".join(f"{statistics.median(own):>9.2f}" for own in ratios.values())
        print(f"{batch:<10}{row}", flush=True)


def make_net() -> nn.Sequential:
    layers = [unit for size, out in pairwise(WIDTHS) for unit in (nn.Linear(size, out), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def predict(model: ps.Classifier, guide: ps.StructuredGuide, x: Tensor, count: int) -> float:
    """Return the seconds, with nothing kept of predictions before."""
    for posterior in guide.posteriors.values():
        posterior()  # where gradients are on, no factor is kept
    start = time.perf_counter()
    ps.predict(model, guide, x, num_samples=count, stream=True)
    return time.perf_counter() - start


@torch.no_grad()
def predict_by_ensemble(net: nn.Module, x: Tensor, count: int) -> float:
    start = time.perf_counter()
    torch.stack([net(x).softmax(-1) for _ in range(count)]).mean(0)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
