"""Parameters of every guide for one layer W (m, n), as Table 1 of Ritter et al. (2021) and others count.

The formulas include terms that the table omits.
"""

import re
from pathlib import Path

import torch
from torch import nn

import pyro_structvi as ps
from pyro_structvi.families import MeanField
from pyro_structvi.testing import GUIDES, LAYERED, POINTS

M, N = 12, 9
TABLE = Path(__file__).parents[2] / "docs/start/choosing_a_guide.md"
ROW = re.compile(r"^\| \[`(?P<guide>\w+)[^|]*\|[^|]*\| (?P<count>[\d,]+) ", re.MULTILINE)


def triangle(size):
    return size * (size + 1) // 2


def angles(size, block_size):
    whole, rest = divmod(size, block_size)
    return whole * triangle(block_size - 1) + triangle(rest - 1)


def inducing_parameters(m, n, inducing_shape, inducing_posterior="diagonal", **options):
    """Table 1, the two diagonals of Z and the scale of the noise."""
    is_small = m <= inducing_shape[0] and n <= inducing_shape[1]
    rows, columns = (m, n) if is_small else inducing_shape
    size = rows * columns
    of_posterior = {
        "diagonal": 2 * size,
        "full": size + triangle(size),
        "ensemble": options.get("ensemble_size", 0) * size,
    }
    return rows * (m + 1) + columns * (n + 1) + of_posterior[inducing_posterior] + 1


FORMULAS = {
    ps.MeanFieldGuide: lambda m, n, **_: 2 * m * n,
    ps.KTiedGuide: lambda m, n, rank=2, **_: m * n + rank * (m + n),
    ps.MatrixNormalGuide: lambda m, n, **_: m * n + triangle(m) + triangle(n),
    ps.EigenbasisGuide: lambda m, n, block_size=64, **_: (
        2 * m * n + sum(angles(size, block_size) for size in (m, n))
    ),
    ps.RowwiseGuide: lambda m, n, **_: m * n + m * triangle(n),
    ps.AutoLowRankLRT: lambda m, n, rank, diagonal="full", **_: (
        (rank + 1 + (diagonal == "full")) * m * n
    ),
    ps.InducingWeightGuide: inducing_parameters,
    ps.FullCovarianceGuide: lambda m, n, **_: m * n + triangle(m * n),
    ps.GlobalInducingGuide: lambda m, n, points=100: points * (m + 1) + n,  # of a later layer
    ps.MAPGuide: lambda m, n: m * n,
    ps.MixtureGuide: lambda m, n, make_guide, size: size * FORMULAS[make_guide](m, n),
    ps.EnsembleGuide: lambda m, n, size, **_: size * m * n,
    ps.MCDropoutGuide: lambda m, n, **_: m * n,
}


def expected(variant, m, n):
    return FORMULAS[variant.guide](m, n, **variant.options)


def count(*modules):
    return sum(parameter.numel() for parameter in nn.ModuleList(modules).parameters())


def make_model(size=N, **options):
    net = nn.Linear(size, M, bias=False)
    return ps.Classifier(ps.bayesianize(net, prior=1.0, **options), num_data=10)


def test_a_guide_has_the_parameters_of_its_formula():
    for guide in (*GUIDES, *POINTS):
        model = make_model(8)
        assert count(model, guide(model)) == expected(guide, M, 8), guide.name


def test_a_layer_behind_another_has_the_parameters_of_its_formula():
    net = nn.Sequential(nn.Linear(3, N, bias=False), nn.Linear(N, M, bias=False))
    model = ps.Classifier(ps.bayesianize(net, prior=1.0), num_data=10)
    guide = LAYERED[0](model, inputs=torch.randn(100, 3))
    assert count(guide["net.1.weight"]) == expected(LAYERED[0], M, N)


def test_the_table_of_guides_counts_by_the_formulas():
    """Each row with a guide of the registry shows its number for a layer of 400 x 400."""
    guides = [*GUIDES, *POINTS, *LAYERED]
    counted = {(guide.guide.__name__, expected(guide, 400, 400)) for guide in guides}
    shown = {
        (name, int(number.replace(",", ""))) for name, number in ROW.findall(TABLE.read_text())
    }
    known = {name for name, _ in counted}
    assert known == {name for name, _ in shown} - {"SubnetworkGuide"}
    assert {row for row in shown if row[0] in known} <= counted


def test_a_subnetwork_and_factored_layers_count_their_own():
    model = make_model()
    chosen = {"net.weight": torch.arange(M * N).reshape(M, N) < 7}
    assert count(ps.SubnetworkGuide(model, chosen)) == 7 + triangle(7)
    model = make_model(layers={"": ps.RankOne()})
    assert count(model, ps.MeanFieldGuide(model)) == M * N + 2 * (M + N)
    # Two diagonals, and mean and standard deviation of another one, of 16 numbers for 9 inputs.
    model = make_model(layers={"": ps.WalshHadamard()})
    assert count(model, ps.StructuredGuide(model, {"*": MeanField()})) == 4 * 16
