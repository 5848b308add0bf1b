"""Time and gradient noise of layers with inducing weights, by what is drawn: outputs, or the weight.

    python docs/scripts/inducing_layers.py
    python docs/scripts/inducing_layers.py --rounds 30 --draws 1000

Layers are those of a ResNet-18 on CIFAR (3 x 3 filters, batch 32) and two dense ones (batch 512), each
with 64 x 64 inducing weights, as a guide starts them. Time is that of a forward pass and all gradients
as a ratio to the layer with a plain weight, the median over rounds that time every way in turn.

*Outputs* are drawn for each example and position; the *weight* is drawn once for a batch; *factors*
are such a draw that is not formed. *Taken* is what a layer does in training. The variance of the
gradient of a squared error, the weight being drawn, is over that with drawn outputs: for the means of
the inducing weights (average over elements), and for the scale of the noise given them.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import constraints

from pyro_structvi.extend import LatentSite, SitePosterior
from pyro_structvi.families import InducingWeights
from pyro_structvi.maps import ConvolutionMap, DenseMap, LinearMap

Ways = dict[str, Callable[[], tuple[Tensor, list[Tensor]]]]  # outputs, and what takes gradients


class Layer(NamedTuple):
    """A map, the shape of its weight, and that of its input."""

    linear_map: LinearMap
    shape: tuple[int, ...]
    input_shape: tuple[int, ...]


def convolution(channels: int, size: int) -> Layer:
    linear_map = ConvolutionMap(F.conv2d, (channels, 3, 3), padding=1)
    return Layer(linear_map, (channels, channels, 3, 3), (32, channels, size, size))


LAYERS = {
    "convolution, 64, 32 x 32": convolution(64, 32),
    "convolution, 128, 16 x 16": convolution(128, 16),
    "convolution, 256, 8 x 8": convolution(256, 8),
    "convolution, 512, 4 x 4": convolution(512, 4),
    "dense, 1024 -> 2048": Layer(DenseMap(), (2048, 1024), (512, 1024)),
    "dense, 4096 -> 4096": Layer(DenseMap(), (4096, 4096), (512, 4096)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--draws", type=int, default=200, help="gradients an estimate")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, inducing weights 64 x 64")
    print(f"{'':<27}{'time / plain weight':^27}{'':<9}{'variance, weight / outputs':>27}")
    print(f"{'layer':<27}{'outputs':>9}{'weight':>9}{'factors':>9}  {'taken':<9}", end="")
    print(f"{'means':>13}{'noise scale':>13}")
    for title, layer in LAYERS.items():
        torch.manual_seed(0)
        posterior = make_posterior(layer.shape)
        x = torch.randn(layer.input_shape, requires_grad=True)
        ways = make_ways(layer, posterior, x)
        times = measure(ways, options.rounds)
        means, scale = noise_ratios(ways, posterior, options.draws)
        print(f"{title:<27}" + "".join(f"{times[way]:>9.2f}" for way in list(ways)[1:]), end="")
        print(f"  {taken(layer, posterior, x):<9}{means:>13.3g}{scale:>13.3g}", flush=True)


def make_posterior(shape: tuple[int, ...]) -> SitePosterior:
    """Start from a He draw, with that prior."""
    weight = torch.nn.init.kaiming_normal_(torch.empty(shape), nonlinearity="relu")
    scale = (2 / weight[0].numel()) ** 0.5
    site = LatentSite("weight", weight.shape, len(shape), constraints.real, prior_scale=scale)
    family = InducingWeights((64, 64))
    return SitePosterior(family, site, family.init(site, weight, 0.01))


def make_ways(layer: Layer, posterior: SitePosterior, x: Tensor) -> Ways:
    linear_map, matrix = layer.linear_map, posterior().mean.detach().flatten(1).requires_grad_()
    parameters = [*posterior.parameters(), x]
    return {
        "plain": lambda: (linear_map(x, matrix), [matrix, x]),
        "outputs": lambda: (posterior().image_under(linear_map, x).rsample(), parameters),
        "weight": lambda: (linear_map(x, posterior().rsample().flatten(1)), parameters),
        "factors": lambda: (posterior().draw_factored().apply(linear_map, x), parameters),
    }


def taken(layer: Layer, posterior: SitePosterior, x: Tensor) -> str:
    return posterior().ways_to_apply(layer.linear_map, x)[0]


def measure(ways: Ways, rounds: int) -> dict[str, float]:
    """Return the ratio of each way's time to that of a plain weight."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    gradient = torch.randn_like(ways["plain"]()[0])
    for number in range(rounds + 2):
        for way, make in ways.items():
            start = time.perf_counter()
            outputs, parameters = make()
            torch.autograd.grad(outputs, parameters, gradient)
            if number >= 2:  # the first rounds warm up
                seconds[way].append(time.perf_counter() - start)
    return {
        way: statistics.median(
            own / plain for own, plain in zip(times, seconds["plain"], strict=True)
        )
        for way, times in seconds.items()
    }


def noise_ratios(ways: Ways, posterior: SitePosterior, draws: int) -> list[float]:
    """Return the variance with a drawn weight over that with drawn outputs, for two parameters."""
    parameters = [posterior.inducing_loc, posterior.log_conditional_scale]
    targets = torch.randn_like(ways["plain"]()[0])

    def variances(way: str) -> list[float]:
        gradients = [
            torch.autograd.grad((ways[way]()[0] - targets).square().sum(), parameters)
            for _ in range(draws)
        ]
        return [float(torch.stack(own).var(0).mean()) for own in zip(*gradients, strict=True)]

    return [
        drawn / local
        for drawn, local in zip(variances("weight"), variances("outputs"), strict=True)
    ]


if __name__ == "__main__":
    main()
