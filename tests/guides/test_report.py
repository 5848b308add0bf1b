"""The report of a guide: each parameter once, with its kind of sampling."""

import warnings
from dataclasses import fields

import pytest
import torch
from pyro import poutine
from torch import nn

import pyro_structvi as ps
from pyro_structvi.families import (
    FullCovariance,
    InducingWeights,
    MatrixNormalFamily,
    MeanField,
    PointEstimate,
)
from tests.guide_cases import GUIDES, POINTS
from tests.models import make_regressor, regression_data


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
    weights = [each for name, each in found.items() if name.endswith("weight")]
    # The scale given the shared draw would be too small.
    kinds = {(each.posterior, each.scale, each.drawn) for each in weights}
    assert kinds == {("InducingWeights", None, "outputs")}


def test_every_structure_is_reported():
    """Each of its numbers once, with the scale at which it starts."""
    model, data = make_regressor(), regression_data()
    for name, make_guide in (GUIDES | POINTS).items():
        guide = make_guide(model)
        report = guide.report(*data).parameters
        assert sorted(each.name for each in report) == sorted(guide.site_names), name
        assert all(each.scale is None or 0 < each.scale < 1 for each in report), name
        own = (value for posterior in guide.posteriors.values() for value in posterior.parameters())
        assert sum(each.parameters for each in report) == sum(map(torch.numel, own)), name


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
