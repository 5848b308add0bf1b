"""The pictures of the guides' pages: a covariance, and a regression beside NUTS.

    python docs/scripts/guide_pictures.py                     # all, about five minutes
    python docs/scripts/guide_pictures.py --guide "k-tied"    # one
    python docs/scripts/guide_pictures.py --part covariance   # without regressions and NUTS

The covariance is that of 20 weights of a linear layer whose outputs are mixed before they are
observed, so that the exact posterior is a normal and is drawn beside it. The regression is that of the
league: 1-50-1 with tanh, 100 examples in two clusters. ``--results`` keeps what was computed, so that
a second run draws without fitting.
"""

import argparse
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import pyro_structvi as ps
from benchmarks.figure_sources import metadata, short_run
from pyro_structvi.plots import plot_band
from pyro_structvi.plots.figures import DIVERGING, figure_of, make_panels

DOCS = Path(__file__).parents[1]
NUM_DRAWS = 400
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Picture:
    """A posterior, for both models.

    Args:
        page: The page that shows it.
        make: Makes the guide of a model.
        layer: What replaces the random layers, if anything does.
        num_chosen: How many elements a subnetwork has in the linear layer and in the regression.
        has_covariance: Whether its covariance in a linear layer shows what it is.
    """

    page: str
    make: Callable[[Any], ps.StructuredGuide] = ps.MeanFieldGuide
    layer: Any = None
    num_chosen: tuple[int, int] | None = None
    has_covariance: bool = True


PICTURES = {
    "mean field": Picture("mean_field"),
    "k-tied, k = 2": Picture("k_tied", lambda m: ps.KTiedGuide(m, join_bias=False)),
    "matrix normal": Picture("matrix_normal", lambda m: ps.MatrixNormalGuide(m, join_bias=True)),
    "eigenbasis": Picture("eigenbasis", ps.EigenbasisGuide),
    "rowwise": Picture("rowwise", lambda m: ps.RowwiseGuide(m, join_bias=True)),
    "low rank, K = 5, full diagonal": Picture(
        "low_rank", lambda m: ps.AutoLowRankLRT(m, rank=5, diagonal="full", join_bias=True)
    ),
    "low rank, K = 5, constant diagonal": Picture(
        "low_rank_constant",
        lambda m: ps.AutoLowRankLRT(m, rank=5, diagonal="constant", join_bias=True),
    ),
    "full covariance": Picture("full_covariance", ps.FullCovarianceGuide),
    "inducing weights": Picture("inducing_weights", ps.InducingWeightGuide),
    "global inducing": Picture("global_inducing", ps.GlobalInducingGuide, has_covariance=False),
    "subnetwork": Picture("subnetwork", ps.MAPGuide, num_chosen=(10, 40)),
    "Walsh-Hadamard": Picture("walsh_hadamard", layer=ps.WalshHadamard()),
    "rank-1": Picture("rank_one", layer=ps.RankOne()),
    "mixture of 5 matrix normals": Picture(
        "mixtures",
        lambda m: ps.MixtureGuide(m, ps.MatrixNormalGuide, size=5),
        has_covariance=False,
    ),
    "ensemble of 5": Picture("points", lambda m: ps.EnsembleGuide(m, size=5)),
    "MC dropout": Picture("dropout", ps.MCDropoutGuide),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--guide", action="append", help="part of a name; may be repeated")
    parser.add_argument("--folder", type=Path, default=DOCS / "guides", help="of the pictures")
    parser.add_argument("--overview", type=Path, default=DOCS / "gallery/regression.png")
    parser.add_argument("--results", type=Path, help="a folder that keeps what was computed")
    parser.add_argument(
        "--steps", type=int, default=3000, help="of a regression; a third of it else"
    )
    parser.add_argument("--nuts", type=int, default=250, help="draws of each of four chains")
    parser.add_argument("--part", choices=["covariance", "regression"], help="both when left out")
    options = parser.parse_args()
    matplotlib.rcParams["svg.hashsalt"] = "pictures of the guides"
    matplotlib.rcParams["svg.fonttype"] = "none"
    titles = [t for t in PICTURES if not options.guide or any(part in t for part in options.guide)]
    if options.part != "regression":
        for title in (title for title in titles if PICTURES[title].has_covariance):
            picture = PICTURES[title]
            torch.manual_seed(0)
            print(title)
            covariance = covariance_of(*fitted(picture, linear_model, 0, options.steps // 3))
            path = options.folder / f"{picture.page}_covariance.svg"
            draw_covariance(title, covariance, path, source_of(picture))
    if options.part != "covariance":
        regressions(titles, options)


def regressions(titles: list[str], options: argparse.Namespace) -> None:
    """Draw each regression beside NUTS, and all of them in one figure."""
    reference = kept(options.results, "NUTS", lambda: sampled(options.nuts))
    computed = {}
    for title in titles:
        picture = PICTURES[title]
        computed[title] = kept(
            options.results, picture.page, lambda p=picture: predicted(p, options.steps)
        )
        panels = make_panels(1, 2, 6.6, 2.4, sharey=True)
        draw_regressions(panels, [("NUTS", reference), (title, computed[title])])
        path = options.folder / f"{picture.page}_regression.svg"
        save(panels[0], path, source_of(picture))
    if len(titles) == len(PICTURES):
        draw_all(computed, reference, options.overview)


def kept(folder: Path | None, name: str, compute: Callable[[], Arrays]) -> Arrays:
    """Return arrays of a file, or compute them and write it."""
    if folder is None:
        return compute()
    path = folder / f"{name}.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(path, **compute())
    with np.load(path) as file:
        return dict(file)


# ---- the models ----------------------------------------------------------------------------------


class Mix(nn.Module):
    """Outputs times a known matrix."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.register_buffer("matrix", matrix)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix.mT


def linear_data() -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, targets and the matrix that mixes the four outputs; the noise is 1."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(40, 5, generator=random) + 1.5 * torch.randn(40, 1, generator=random)
    mixing = torch.eye(4) + 0.7 * torch.ones(4, 4).tril(-1)
    weight = torch.randn(4, 5, generator=random)
    return x, x @ weight.T @ mixing.T + torch.randn(40, 4, generator=random), mixing


def linear_model(layer: Any) -> tuple[Any, Tensor, Tensor]:
    x, y, mixing = linear_data()
    net = nn.Sequential(nn.Linear(5, 4, bias=False), Mix(mixing))
    layers = None if layer is None else {"0": layer}
    net = ps.bayesianize(net, prior=1.0, layers=layers)
    return ps.Regressor(net, num_data=len(x), noise_scale=1.0), x, y


def cosine_data() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    left = -1 + 0.3 * torch.rand(50, 1, generator=random)
    right = 0.5 + 0.5 * torch.rand(50, 1, generator=random)
    x = torch.cat([left, right])
    return x, torch.cos(4 * x + 0.8) + 0.1 * torch.randn(100, 1, generator=random)


def cosine_model(layer: Any = None) -> tuple[Any, Tensor, Tensor]:
    x, y = cosine_data()
    net = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
    layers = None if layer is None else {"*": layer}
    net = ps.bayesianize(net, prior=ps.FanIn(4.0, 1.0), layers=layers)
    return ps.Regressor(net, num_data=len(x), noise_scale=0.1), x, y


GRID = torch.linspace(-2, 2, 81).unsqueeze(-1)


# ---- what is computed ----------------------------------------------------------------------------


def sampled(num_draws: int) -> Arrays:
    """Return what NUTS predicts on the grid."""
    torch.manual_seed(0)
    model, x, y = cosine_model()
    options: Any = {"num_warmup": 2 * num_draws, "num_samples": num_draws, "num_chains": 4}
    draws = ps.reference.nuts(model, x, y, progress=False, **options)
    return moments(model, draws, 4 * num_draws)


def predicted(picture: Picture, steps: int) -> Arrays:
    """Return what a guide predicts on the grid."""
    torch.manual_seed(0)
    return moments(*fitted(picture, cosine_model, 1, steps))


def moments(model: Any, posterior: Any, num_draws: int = NUM_DRAWS) -> Arrays:
    prediction = ps.predict(model, posterior, GRID, num_samples=num_draws)
    mean, scale = prediction.mean, prediction.variance.sqrt()
    return {"mean": mean.detach().flatten().numpy(), "scale": scale.detach().flatten().numpy()}


def fitted(picture: Picture, make: Callable[..., Any], index: int, steps: int) -> tuple[Any, Any]:
    """Return a model and its posterior, fitted by the defaults of ``fit``."""
    model, x, y = make(picture.layer)
    guide = picture.make(model)
    ps.fit(model, guide, (x, y), num_steps=steps, progress=False)
    if picture.num_chosen is not None:
        variances = ps.element_scores.laplace_variances(model, guide, x, num_samples=10)
        chosen = ps.element_scores.largest(variances, picture.num_chosen[index])
        guide = ps.SubnetworkGuide(model, chosen, guide)
        ps.fit(model, guide, (x, y), num_steps=steps, progress=False)
    return model, guide


def source_of(picture: Picture) -> str:
    """Return the ELBO of a short training of the regression, which any change of a default changes."""
    torch.manual_seed(0)
    model, x, y = cosine_model(picture.layer)
    return short_run(model, picture.make(model), x, y)


def exact_covariance() -> Tensor:
    """Return the covariance of the linear layer's exact posterior."""
    x, _, mixing = linear_data()
    precision = torch.kron((mixing.T @ mixing).contiguous(), (x.T @ x).contiguous())
    return torch.linalg.inv(precision + torch.eye(20))


@torch.no_grad()
def covariance_of(model: Any, guide: Any) -> Tensor:
    """Return the covariance of the linear layer's weight, of draws where its elements are no site."""
    name = "net.0.weight"
    if isinstance(guide, ps.EnsembleGuide):
        members = torch.stack([member.median()[name].flatten() for member in guide.members])
        return members.T.cov(correction=0)
    if name in guide.site_names and not isinstance(guide, ps.SubnetworkGuide):
        return guide[name]().covariance_matrix
    draws = torch.stack([weight_of(model.net[0], guide.draw()).flatten() for _ in range(4000)])
    return draws.T.cov()


def weight_of(layer: Any, draw: dict[str, Tensor]) -> Tensor:
    if "net.0.coefficients" in draw:
        return layer.weight(draw["net.0.coefficients"])
    if "net.0.output_scale" in draw:
        return layer.weight * draw["net.0.output_scale"].outer(draw["net.0.input_scale"])
    return draw["net.0.weight"]


# ---- what is drawn -------------------------------------------------------------------------------


def draw_covariance(title: str, own: Tensor, path: Path, source: str) -> None:
    """Draw the exact covariance, and that of a posterior beside it."""
    panels = make_panels(1, 2, 6.6, 2.8)
    exact = exact_covariance()
    limit = float(exact.abs().max())
    pairs = [("exact posterior", exact), (title, own)]
    for panel, (name, covariance) in zip(panels, pairs, strict=True):
        shown = {"vmin": -limit, "vmax": limit, "interpolation": "nearest"}
        image = panel.imshow(covariance, cmap=DIVERGING, **shown)
        panel.set_title(name, fontsize="medium")
        panel.set(xticks=[0, 5, 10, 15], yticks=[0, 5, 10, 15], xlabel="weight")
    figure_of(panels[0]).colorbar(image, ax=panels, shrink=0.85, label="covariance")
    save(panels[0], path, source)


def draw_all(computed: dict[str, Arrays], reference: Arrays, path: Path) -> None:
    """Draw every regression."""
    named = [("NUTS", reference), *computed.items()]
    rows = -(-len(named) // 4)
    panels = make_panels(rows, 4, 11.0, 2.1 * rows, sharex=True, sharey=True)
    draw_regressions(panels, named)
    for panel in panels[len(named) :]:
        panel.remove()
    save(panels[0], path)


def draw_regressions(panels: Iterable[Any], named: Iterable[tuple[str, Arrays]]) -> None:
    x, y = (values.flatten().numpy() for values in cosine_data())
    grid = GRID.flatten().numpy()
    for panel, (title, own) in zip(panels, named, strict=False):
        truth = np.cos(4 * grid + 0.8)
        plot_band(grid, own["mean"], own["scale"], panel, widths=(1, 2), truth=truth, label=None)
        panel.set(xlabel="", ylabel="")
        panel.scatter(x[::2], y[::2], s=4, color="#D55E00", zorder=3)
        panel.set_ylim(-4, 4)
        panel.set_title(title, fontsize="medium")


def save(ax: Any, path: Path, source: str = "") -> None:
    """Write a figure, its coordinates rounded to two digits, and not its texts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ax.figure.savefig(path, metadata=metadata(path, source), facecolor="white", dpi=75)
    if path.suffix == ".svg":
        text = re.sub(
            r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), path.read_text()
        )
        path.write_text(text)
    else:
        Image.open(path).convert("RGB").quantize(32).save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
