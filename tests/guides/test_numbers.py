"""What a guide says of itself: its parameters, as formulas count them, its memory and its report."""

import math
import re
import warnings
from dataclasses import fields
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import nn
from torch.distributions import constraints

import pyro_structvi as ps
from pyro_structvi.families import (
    FullCovariance,
    InducingWeights,
    KTied,
    MatrixNormalFamily,
    MeanField,
    PointEstimate,
)
from pyro_structvi.testing import GUIDES, LAYERED, POINTS, guides_for, points_for
from tests.models import linear_function, make_regressor, regression_data
from tests.recorded_sizes import RecordsSizes

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


def formula(variant, m, n):
    return FORMULAS[variant.guide](m, n, **variant.options)


def formula_or_estimate(variant, m, n):
    """Return the number by the formula, or of a structure without one that of `estimate_memory`."""
    if variant.guide in FORMULAS:
        return formula(variant, m, n)
    return ps.estimate_memory(variant, make_counted(n, m)).total


def count(*modules):
    return sum(parameter.numel() for parameter in nn.ModuleList(modules).parameters())


def make_counted(size=N, outputs=M, **options):
    net = nn.Linear(size, outputs, bias=False)
    return ps.Classifier(ps.bayesianize(net, prior=1.0, **options), num_data=10)


def test_a_guide_has_the_parameters_of_its_formula():
    for guide in (*GUIDES, *POINTS):
        model = make_counted(8)
        assert count(model, guide(model)) == formula_or_estimate(guide, M, 8), guide.name


def test_a_layer_behind_another_has_the_parameters_of_its_formula():
    net = nn.Sequential(nn.Linear(3, N, bias=False), nn.Linear(N, M, bias=False))
    model = ps.Classifier(ps.bayesianize(net, prior=1.0), num_data=10)
    guide = LAYERED[0](model, inputs=torch.randn(100, 3))
    assert count(guide["net.1.weight"]) == formula(LAYERED[0], M, N)


def test_the_table_of_guides_counts_by_the_formulas():
    """Each row with a guide of the registry shows its number for a layer of 400 x 400."""
    guides = [*GUIDES, *POINTS, *LAYERED]
    counted = {(guide.guide.__name__, formula_or_estimate(guide, 400, 400)) for guide in guides}
    shown = {
        (name, int(number.replace(",", ""))) for name, number in ROW.findall(TABLE.read_text())
    }
    known = {name for name, _ in counted}
    assert known == {name for name, _ in shown} - {"SubnetworkGuide"}
    assert {row for row in shown if row[0] in known} <= counted


def test_a_subnetwork_and_factored_layers_count_their_own():
    model = make_counted()
    chosen = {"net.weight": torch.arange(M * N).reshape(M, N) < 7}
    assert count(ps.SubnetworkGuide(model, chosen)) == 7 + triangle(7)
    model = make_counted(layers={"": ps.RankOne()})
    assert count(model, ps.MeanFieldGuide(model)) == M * N + 2 * (M + N)
    # Two diagonals, and mean and standard deviation of another one, of 16 numbers for 9 inputs.
    model = make_counted(layers={"": ps.WalshHadamard()})
    assert count(model, ps.StructuredGuide(model, {"*": MeanField()})) == 4 * 16


def test_estimates_and_reports_have_each_parameter_of_every_structure():
    """Each of its numbers once, with the scale at which it starts, before it is made and after."""
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4, 3))
    model = ps.Classifier(ps.bayesianize(net, prior=1.0), 12)
    data = torch.randn(12, 1, 3, 3), torch.randint(3, (12,))
    for name, make_guide in (guides_for("tests") | points_for("tests")).items():
        estimate, guide = ps.estimate_memory(make_guide, model), make_guide(model)
        for site in estimate.parameters.keys() & {*guide.site_names}:
            assert estimate.parameters[site] == count(guide[site]), name
        assert estimate.total == count(guide), name
        stored = [*guide.parameters(), *guide.buffers()]
        assert estimate.parameter_bytes == sum(v.numel() * v.element_size() for v in stored), name
        report = guide.report(*data).parameters
        assert sorted(each.name for each in report) == sorted(guide.site_names), name
        assert all(each.scale is None or 0 < each.scale < 1 for each in report), name
        own = sum(count(posterior) for posterior in guide.posteriors.values())
        assert sum(each.parameters for each in report) == own, name
    estimate = ps.estimate_memory(ps.MeanFieldGuide, model)
    assert estimate.training_bytes == 4 * estimate.parameter_bytes  # gradients, Adam's two moments
    members = ps.estimate_memory(ps.MixtureGuide, model, ps.MeanFieldGuide, 3).parameters
    by_name = ps.estimate_memory(ps.MixtureGuide, model, make_guide=ps.MeanFieldGuide, size=3)
    assert by_name.parameters == members
    with pytest.raises(TypeError, match="`make_guide` must be a function"):
        ps.estimate_memory(3, model, make_guide=ps.MeanFieldGuide)
    assert members == {name: 3 * number for name, number in estimate.parameters.items()}


def test_nothing_is_allocated_and_limits_hold():
    large = ps.Classifier(ps.bayesianize(nn.Linear(1000, 1000), prior=1.0), 12)
    with RecordsSizes() as recorded:
        estimate = ps.estimate_memory(ps.StructuredGuide, large, {"*": KTied(2)}, init_scale=0.1)
    assert estimate.total == 1000 * 1001 + 2 * (1000 + 1001)  # with the bias
    assert max(recorded.stored) <= 1000
    assert not ps.MeanFieldGuide(large)["net.weight"].loc.is_meta
    with pytest.raises(MemoryError, match="A full covariance of the 1,001,000 elements"):
        ps.estimate_memory(ps.StructuredGuide, large, {"*": FullCovariance()})
    with pytest.raises(ValueError, match="must declare its sample sites"):
        ps.estimate_memory(ps.MeanFieldGuide, linear_function)


# ---- the report ----------------------------------------------------------------------------------


def reported(guide, *args):
    return {each.name: each for each in guide.report(*args).parameters}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.plain, self.twice, self.odd = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.norm = nn.LayerNorm(4)
        self.spare, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 3)

    def forward(self, x):
        x = self.plain(self.words(x))
        x = self.norm(self.twice(self.twice(x)))
        return self.head(x + x @ (2 * self.odd.weight))


def make(make_guide=ps.MeanFieldGuide, prior=0.5, **options):
    net = Net()
    net.head.bias.requires_grad_(False)
    model = ps.Classifier(ps.bayesianize(net, prior, False), num_data=6)
    x, y = torch.randint(5, (6,)), torch.randint(3, (6,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ps.guides.UnusedSiteWarning)
        guide = make_guide(model, **options)
        guide.initialize(x, y)
    return net, guide, x, y


@pytest.mark.parametrize("make_guide", [ps.MeanFieldGuide, ps.KTiedGuide])
def test_a_bias_has_the_reason_of_its_weight(make_guide):
    """Also a bias that is joined to its weight, or used again."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows, self.shared, self.last = nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x):
            h = self.rows(x.reshape(-1, 2)).tanh().reshape(len(x), 2, 3).sum(1)
            return self.last(self.shared(h) + self.shared.bias)

    torch.manual_seed(0)
    model = ps.Regressor(ps.bayesianize(Net(), prior=0.5), num_data=6, noise_scale=1.0)
    guide = make_guide(model, local_reparam="exact")
    found = guide.report(torch.randn(6, 4), torch.zeros(6, 1)).parameters
    why = {each.name.removeprefix("net."): each.why for each in found}
    rows, last = "rows that are not examples", ""
    assert (why["rows.weight"], why["rows.bias"]) == (rows, rows)
    assert (why["last.weight"], why["last.bias"]) == (last, last)
    assert why["shared.bias"] == "2 uses"
    if make_guide is ps.KTiedGuide:  # a separate bias leaves the outputs of its weight
        assert why["shared.weight"] == "2 uses"


def test_each_way_is_told_apart():
    net, guide, x, y = make()
    before = torch.get_rng_state()
    with poutine.trace() as trace:
        report = guide.report(x, y)
    assert torch.equal(torch.get_rng_state(), before)
    assert not trace.trace.nodes
    found = {each.name: (each.state, each.drawn, each.why) for each in report.parameters}
    assert found == {
        "net.words.weight": ("random", "rows", ""),
        "net.plain.weight": ("random", "outputs", ""),
        "net.twice.weight": ("random", "weight", "2 uses"),
        "net.odd.weight": ("random", "weight", "a call that is not read as a linear map"),
        "net.spare.weight": ("random", "nothing", ""),
        "net.head.weight": ("random", "outputs", ""),
        "net.norm.weight": ("trained", "", ""),
        "net.norm.bias": ("trained", "", ""),
        "net.head.bias": ("frozen", "", ""),
    }
    assert report.local_share == pytest.approx((20 + 16 + 12) / (20 + 3 * 16 + 12))
    names = sorted(name.removeprefix("net.") for name in found)
    assert names == sorted(name for name, _ in net.named_parameters())
    head, *rows = str(report).splitlines()
    assert head.split() == [each.name for each in fields(ps.guides.ParameterReport)]
    assert rows[0].split()[:4] == ["net.words.weight", "(5,", "4)", "random"]
    assert len(rows) == 9


def test_numbers_are_those_of_prior_and_posterior():
    _, guide, x, y = make(init_scale=0.03, prior={"head.*": 0.7, "*": 0.5}, local_reparam=False)
    found = reported(guide, x, y)
    head, norm = (found[f"net.{name}.weight"] for name in ("head", "norm"))
    assert (head.shape, head.parameters, head.posterior) == ((3, 4), 24, "MeanField")
    assert (head.prior, head.scale) == pytest.approx((0.7, 0.03))
    assert (norm.prior, norm.scale, norm.parameters) == (None, None, 4)
    assert found["net.plain.weight"].why == "local_reparam=False"


def test_points_and_joined_biases_and_weights_that_are_drawn_together():
    families = {"net.0.*": PointEstimate(), "*.weight": FullCovariance(join_bias=True)}
    guide = ps.StructuredGuide(make_regressor(), {**families, "*": MeanField()})
    found = reported(guide, *regression_data())
    first = found["net.0.weight"]
    point = ("point", "weight", "a point", None)
    assert (first.state, first.drawn, first.why, first.scale) == point
    weights = [each for each in found.values() if each.posterior == "FullCovariance"]
    biases = [each for each in found.values() if each.posterior.startswith("with ")]
    assert len(weights) == len(biases) > 0
    assert {each.drawn for each in (*weights, *biases)} == {"outputs"}
    assert {each.parameters for each in biases} == {0}
    total = sum(each.parameters for each in found.values())
    assert total == sum(each.numel() for each in guide.parameters())
    families = {"*.weight": InducingWeights((3, 2), posterior=MatrixNormalFamily(), shared=True)}
    guide = ps.StructuredGuide(make_regressor(), {**families, "*": MeanField()})
    found = reported(guide, *regression_data())
    weights = [found[name] for name in guide.uses if name.endswith("weight")]
    # The scale given the shared draw would be too small.
    kinds = {(each.posterior, each.scale, each.drawn) for each in weights}
    assert kinds == {("InducingWeights", None, "outputs")}
    shared = found["inducing_weights of net.0.weight"]
    assert (shared.state, shared.shape, shared.posterior) == (
        "shared",
        (6, 2),
        "MatrixNormalFamily",
    )
    assert sum(each.parameters for each in found.values()) == count(guide)


def test_a_joined_bias_has_the_scale_of_its_own_elements():
    guide, data = ps.FullCovarianceGuide(make_regressor()), regression_data()
    guide.initialize(*data)
    with torch.no_grad():
        for value in guide.parameters():
            value += torch.randn_like(value)
    found = reported(guide, *data)
    for layer, (rows, inputs) in {"net.0": (5, 3), "net.2": (1, 5)}.items():
        dense = guide[f"{layer}.weight"]().covariance_matrix
        variances = dense.diagonal().reshape(rows, inputs + 1)
        for name, own in (("weight", variances[:, :-1]), ("bias", variances[:, -1])):
            expected = float(own.detach().mean().sqrt())
            assert found[f"{layer}.{name}"].scale == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("train_rest", [False, True])
def test_chosen_elements_are_random(train_rest):
    mask = torch.arange(15).reshape(5, 3) < 5  # a third
    options = {"init_scale": 0.3, "train_rest": train_rest}
    guide = ps.SubnetworkGuide(make_regressor(), {"net.0.weight": mask}, **options)
    found = reported(guide, *regression_data())
    row = found.pop("net.0.weight")
    assert (row.state, row.drawn) == ("random", "weight")
    assert row.why == "chosen elements, drawn together"
    assert row.scale == pytest.approx(0.3 / math.sqrt(3))
    assert found.pop("subnetwork of net.0.weight").parameters == 5 + triangle(5)
    assert {(each.state, each.scale) for each in found.values()} == {("point", None)}
    estimate = ps.estimate_memory(
        ps.SubnetworkGuide, guide.model, {"net.0.weight": mask}, **options
    )
    assert estimate.total == count(guide)
    assert estimate.parameters["subnetwork of net.0.weight"] == 5 + triangle(5)


def test_frozen_parameters_are_not_counted():
    """Of the net, also without a prior, and of the guide."""
    net = ps.LastLayer(nn.Sequential(nn.Linear(3, 4)), nn.Linear(4, 1), frozen=True)
    model = ps.Regressor(net, num_data=12, noise_scale=0.1)
    guide = ps.MeanFieldGuide(model)
    guide["net.head.weight"].log_scale.requires_grad_(False)
    found = reported(guide, *regression_data())
    rows = {name.removeprefix("net."): (row.state, row.parameters) for name, row in found.items()}
    assert rows == {
        "head.weight": ("random", 4),
        "head.bias": ("random", 2),
        "features.0.weight": ("frozen", 0),
        "features.0.bias": ("frozen", 0),
    }


def test_parameters_of_a_function_are_trained_and_reported():
    net = nn.Linear(3, 1)

    def model(x, y=None):
        pyro.module("net", net)
        shares = pyro.param("shares", torch.full((3,), 1 / 3), constraint=constraints.simplex)
        weight = pyro.sample("weight", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(x @ (weight * shares) + net(x)[:, 0], 1.0), obs=y[:, 0])

    found = reported(ps.MeanFieldGuide(model), *regression_data())
    rows = {name: (row.state, row.shape, row.parameters) for name, row in found.items()}
    assert rows == {
        "weight": ("random", (3,), 6),
        "net$$$weight": ("trained", (1, 3), 3),
        "net$$$bias": ("trained", (1,), 1),
        "shares": ("trained", (3,), 3),
    }


def test_a_mixture_reports_on_all_its_members():
    model, data = make_regressor(), regression_data()
    scales = iter((0.3, 0.4))
    guide = ps.MixtureGuide(model, lambda m: ps.MeanFieldGuide(m, init_scale=next(scales)), 2)
    guide.weights.copy_(torch.tensor([0.2, 0.8]))
    found, of_one = reported(guide, *data), reported(guide.members[0], *data)
    assert found.keys() == of_one.keys()
    for name, row in found.items():
        means = [member[name].loc.detach() for member in guide.members]
        between = 0.2 * 0.8 * (means[0] - means[1]).square().mean().item()
        assert row.scale == pytest.approx(math.sqrt(0.2 * 0.3**2 + 0.8 * 0.4**2 + between))
        assert row.parameters == 2 * of_one[name].parameters
    assert sum(row.parameters for row in found.values()) == count(guide)
    ensemble = ps.EnsembleGuide(model, 2)
    one, other = (member.median()["net.0.weight"] for member in ensemble.members)
    row = reported(ensemble, *data)["net.0.weight"]
    assert row.scale == pytest.approx((one - other).square().mean().sqrt().item() / 2)
    net = ps.bayesianize(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), {"1.*": 1.0, "*": None})
    kinds = iter((ps.MAPGuide, ps.MeanFieldGuide))
    model = ps.Regressor(net, num_data=12, noise_scale=0.1)
    guide = ps.MixtureGuide(model, lambda m: next(kinds)(m), 2, vectorize=False)
    found = reported(guide, *data)
    assert found["net.1.weight"].posterior == "PointEstimate, MeanField"
    assert (found["net.0.weight"].state, found["net.0.weight"].parameters) == ("trained", 6)


def test_frozen_parameters_are_not_copied_to_be_put_back(monkeypatch):
    """Neither by a trial run nor by a step: a large base takes its memory once."""
    cloned = []
    clone = torch.Tensor.clone
    monkeypatch.setattr(
        torch.Tensor, "clone", lambda self, **kw: cloned.append(self.shape) or clone(self, **kw)
    )
    net = nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    net[0].requires_grad_(False)
    model = ps.Classifier(ps.bayesianize(net, 0.5, False), num_data=6)
    x, y = torch.randn(6, 7), torch.randint(3, (6,))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    cloned.clear()
    guide = ps.MeanFieldGuide(model)
    guide.initialize(x, y)
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
    ps.fit(model, guide, (x, y), num_steps=2, progress=False)
    assert (7,) in cloned  # running statistics
    assert (7, 7) not in cloned
