"""Variance of the ELBO's gradient, with drawn weights and by local reparameterization.

    python docs/scripts/gradient_variance.py

The batch is fixed, so that only the noise of the weights varies. The table gives the variance of one
gradient, averaged over the parameters of a kind, and the ratio of the two estimators.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn

import pyro_structvi as ps

GUIDES: dict[str, Callable[..., ps.StructuredGuide]] = {
    "mean field": ps.MeanFieldGuide,
    "k-tied, k = 2": ps.KTiedGuide,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gradients", type=int, default=1000, help="gradients an estimate")
    parser.add_argument("--batch-size", type=int, default=100)
    options = parser.parse_args()

    torch.manual_seed(0)
    x = torch.randn(options.batch_size, 20)
    y = x[:, :1].sin()
    net = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 1))
    model = ps.Regressor(ps.bayesianize(net, prior=0.3), num_data=len(x), noise_scale=0.1)
    print(f"torch {torch.__version__}, {options.gradients} gradients, batch {options.batch_size}")
    print(f"{'guide':<15}{'parameters':<15}{'drawn':>10}{'local':>10}{'ratio':>8}")
    for title, make_guide in GUIDES.items():
        variances = []
        for local_reparam in (False, True):
            torch.manual_seed(1)
            guide = make_guide(model, init_scale=0.05, local_reparam=local_reparam)
            variances.append(gradient_variances(model, guide, x, y, options.gradients))
        drawn, local = variances
        for kind in drawn:
            ratio = drawn[kind] / local[kind]
            print(f"{title:<15}{kind:<15}{drawn[kind]:>10.3g}{local[kind]:>10.3g}{ratio:>8.1f}")


def gradient_variances(
    model: ps.Regressor, guide: ps.StructuredGuide, x: Tensor, y: Tensor, count: int
) -> dict[str, float]:
    loss = ps.StructuredELBO()(model, guide)
    loss(x, y)  # the run that counts uses
    locs = [value for name, value in guide.named_parameters() if name.endswith("loc")]
    scales = [value for name, value in guide.named_parameters() if not name.endswith("loc")]
    return {
        kind: variance(loss, parameters, x, y, count)
        for kind, parameters in {"means": locs, "log scales": scales}.items()
    }


def variance(
    loss: Callable[..., Tensor], parameters: list[Tensor], x: Tensor, y: Tensor, count: int
) -> float:
    gradients = torch.stack([
        torch.cat([part.flatten() for part in torch.autograd.grad(loss(x, y), parameters)])
        for _ in range(count)
    ])
    return float(gradients.var(0).mean())


if __name__ == "__main__":
    main()
