"""Depth against structure: what products of mean-field layers vary like, and how good they are.

    python -m examples.papers.tutorial.depth --data mnist.npz --output results.csv --figure f.png
    python -m examples.papers.tutorial.depth --smoke

MNIST in 4 x 4 pixels; layers of 16 units without biases, so that a linear net is the product of its
weights, 10 x 16. The covariance of the product is exact for linear nets; with leaky ReLU the product is
that at one image, the net's Jacobian, and its covariance that of draws. Without ``--data`` the images
are downloaded. What the file of results has is not measured again, and the figure shows the first seed
of what was.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyro_structvi as ps
from benchmarks.paper_tables import HEADER
from benchmarks.rows import ResultsFile
from examples.papers.data import Images, load_images
from pyro_structvi.metrics import classification_scores
from pyro_structvi.plots.figures import DIVERGING, figure_of, make_panels

PIXELS, WIDTH, CLASSES = 4, 16, 10
TITLE = "Depth against structure, MNIST in 4 x 4 pixels"
DRAWS = 20_000
SLOPE = nn.LeakyReLU().negative_slope


class Posterior(NamedTuple):
    """A net of equal layers, and a guide for it."""

    depth: int
    activation: type[nn.Module]
    guide: Callable[[Any], nn.Module]

    @property
    def is_linear(self) -> bool:
        """Whether the net is the product of its weights."""
        return self.activation is nn.Identity


POSTERIORS = {
    "1 layer, mean field": Posterior(1, nn.Identity, ps.MeanFieldGuide),
    "5 linear layers, mean field": Posterior(5, nn.Identity, ps.MeanFieldGuide),
    "10 linear layers, mean field": Posterior(10, nn.Identity, ps.MeanFieldGuide),
    "5 layers, leaky ReLU, mean field": Posterior(5, nn.LeakyReLU, ps.MeanFieldGuide),
    "10 layers, leaky ReLU, mean field": Posterior(10, nn.LeakyReLU, ps.MeanFieldGuide),
    "1 layer, matrix normal": Posterior(
        1, nn.Identity, partial(ps.MatrixNormalGuide, join_bias=False)
    ),
    "1 layer, full covariance": Posterior(1, nn.Identity, ps.FullCovarianceGuide),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="an .npz file instead of a download")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--smoke", action="store_true", help="random images and a few steps")
    parser.add_argument("--output", type=Path, help="a CSV file; what it has is not measured again")
    parser.add_argument("--figure", type=Path, help="an image file for the covariances")
    options = parser.parse_args()
    if options.smoke:
        options.seeds, options.steps = 1, 10
    images = small_images(random_images() if options.smoke else load_images("MNIST", options.data))
    results = ResultsFile(options.output, HEADER)
    shown: dict[str, Tensor] = {}
    for seed in range(options.seeds):
        for name, posterior in POSTERIORS.items():
            if not results.has(TITLE, name, str(seed)):
                scores, covariance = measure(posterior, seed, images, options.steps)
                results.add(*((TITLE, name, str(seed), *score) for score in scores.items()))
                shown.setdefault(name, covariance)
    if options.figure and shown:
        draw(shown, options.figure)


def random_images() -> Images:
    x, y = torch.rand(200, 1, 28, 28), torch.randint(CLASSES, (200,))
    return Images(x, y, x, y)


def small_images(images: Images) -> Images:
    """Return means over squares, standardized."""
    train, test = (
        F.adaptive_avg_pool2d(x, PIXELS).flatten(1) for x in (images.x_train, images.x_test)
    )
    center, spread = train.mean(0), train.std(0)
    return images._replace(x_train=(train - center) / spread, x_test=(test - center) / spread)


def make_net(posterior: Posterior) -> nn.Sequential:
    """Return layers that start as rotations, so that depth does not shrink what passes through."""
    widths = [PIXELS**2, *[WIDTH] * (posterior.depth - 1), CLASSES]
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        linear = nn.Linear(inputs, outputs, bias=False)
        nn.init.orthogonal_(linear.weight)
        layers += [linear, posterior.activation()]
    return nn.Sequential(*layers[:-1])


def measure(
    posterior: Posterior, seed: int, images: Images, steps: int
) -> tuple[dict[str, str], Tensor]:
    """Train one posterior; return what the table shows of it, and the covariance of the product."""
    torch.manual_seed(seed)
    data = (images.x_train, images.y_train)
    model = ps.Classifier(ps.bayesianize(make_net(posterior), ps.FanIn()), num_data=len(data[0]))
    guide = posterior.guide(model)
    ps.fit(model, guide, data, num_steps=steps, batch_size=1000, progress=False)
    with torch.no_grad():
        bound = float(ps.StructuredELBO(num_particles=20).terms(model, guide, *data).elbo)
    prediction = ps.predict(model, guide, images.x_test, num_samples=100, stream=True)
    scores = classification_scores(prediction.mean, images.y_test)
    covariance = covariance_of_product(posterior, guide, images.x_test[0])
    found = {
        "test log likelihood": -scores.nll,
        "error (%)": 100 * (1 - scores.accuracy),
        "ELBO / example": bound / len(data[0]),
        "mean absolute correlation": mean_correlation(covariance),
        "parameters": sum(parameter.numel() for parameter in guide.parameters()),
    }
    return {quantity: f"{value:.5g}" for quantity, value in found.items()}, covariance


# ---- the product of the layers ----------------------------------------------------------------------


def covariance_of_product(posterior: Posterior, guide: Any, x: Tensor) -> Tensor:
    """Return the covariance of the product, exact where independent elements are multiplied."""
    with torch.no_grad():
        weights = [guide[name]() for name in guide.site_names]
        if posterior.depth == 1:
            return weights[0].covariance_matrix  # type: ignore[no-any-return]
        if posterior.is_linear:
            return product_covariance([q.mean for q in weights], [q.variance for q in weights])
        draws = [q.sample((DRAWS,)) for q in weights]
        return products(draws, x, SLOPE).flatten(1).double().T.cov()


def product_covariance(means: Sequence[Tensor], variances: Sequence[Tensor]) -> Tensor:
    r"""Return the covariance of a product of independent matrices of independent elements.

    With P' = W P and the second moments T of P,

    .. math:: T'_{ij,kl} = \sum_{ab} M_{ia} M_{kb} T_{aj,bl} + \delta_{ik} \sum_a S_{ia} T_{aj,al}.

    Args:
        means: M of each matrix, the factor that is applied first in the first place.
        variances: S of each matrix.

    Returns:
        The covariance of the product's elements, row by row, in double precision.
    """
    mean = torch.eye(means[0].shape[1], dtype=torch.double)
    moments = torch.einsum("aj,bl->ajbl", mean, mean)
    for M, S in ((M.double(), S.double()) for M, S in zip(means, variances, strict=True)):
        own = torch.einsum("ia,ajal->jli", S, moments)
        moments = torch.einsum("ia,ajbl,kb->ijkl", M, moments, M)
        moments.diagonal(dim1=0, dim2=2).add_(own)
        mean = M @ mean
    flat = mean.flatten()
    return moments.reshape(len(flat), len(flat)) - torch.outer(flat, flat)


def products(weights: Sequence[Tensor], x: Tensor, slope: float = 1.0) -> Tensor:
    """Return the products of draws of weights, with leaky ReLU between them as it acts on an input.

    Args:
        weights: Draws ``(draws, out, in)`` of each weight, the one that is applied first in the first
            place.
        x: The input, ``(in,)``.
        slope: What leaky ReLU multiplies values below zero by; 1 for a linear net.
    """
    product = weights[0]
    for weight in weights[1:]:
        is_positive = (product @ x).unsqueeze(-1) > 0
        product = weight @ torch.where(is_positive, product, slope * product)
    return product


def mean_correlation(covariance: Tensor) -> float:
    """Return the mean of the absolute correlations between different elements."""
    scale = covariance.diagonal().sqrt()
    correlations = (covariance / scale / scale[:, None]).abs()
    size = len(covariance)
    return float((correlations.sum() - size) / (size * (size - 1)))


def draw(covariances: Mapping[str, Tensor], path: Path) -> None:
    """Draw the correlations of each product."""
    columns = -(-len(covariances) // 2)
    panels = make_panels(2, columns, 3.4 * columns, 6.0)
    for panel, (name, covariance) in zip(panels, covariances.items(), strict=False):
        scale = covariance.diagonal().sqrt()
        image = panel.imshow(covariance / scale / scale[:, None], DIVERGING, vmin=-1, vmax=1)
        panel.set_title(name.replace(", ", ",\n"), fontsize="small")
    for panel in panels[len(covariances) :]:
        panel.set_axis_off()
    figure = figure_of(panels[0])
    figure.colorbar(image, ax=panels, label="correlation")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
