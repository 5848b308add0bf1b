"""What a report leaves out, and what it refuses."""

import math
import os
import re

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_structvi as ps
from pyro_structvi.diagnostics import (
    report,
)
from pyro_structvi.diagnostics.report_page import cell_text
from pyro_structvi.infer import History
from pyro_structvi.sites.starts import separate_randomness
from tests.diagnostics.reported_fits import curve, written
from tests.models import make_regressor, regression_data

pytestmark = pytest.mark.slow  # the example of the docstring is the fast one


# ---- what is left out ----------------------------------------------------------------------------


def left_out(found, title):
    return [text for text in found.sections[title] if "left out" in text or "Left out" in text]


def test_points_have_no_importance_weights_and_no_scales(tmp_path):
    model = make_regressor()
    found = written(tmp_path / "page.html", model, ps.MAPGuide(model), regression_data())
    [reason] = left_out(found, "Distance to the posterior")
    assert re.search("must have a density over all weights.*'net.0.weight'", reason)
    assert [text[:40] for text in left_out(found, "Spectra of the posterior")] == [
        "The figure of the standard deviations is",
        "The figure of a matrix of standard devia",
    ]
    assert found.column("Numbers")["elements with a point for their posterior"] == "26"


def test_weights_that_are_drawn_together_have_no_spectra(tmp_path, quick):
    model = make_regressor()
    guide = ps.InducingWeightGuide(model, (2, 2), "full", shared=True)
    found = written(tmp_path / "page.html", model, guide, regression_data())
    [reason] = left_out(found, "Spectra of the posterior")
    assert "have one posterior with those of others" in reason


def test_tokens_have_a_log_density_only(tmp_path, quick):
    model = ps.TokenClassifier(ps.bayesianize(nn.Linear(3, 4), prior=1.0), 6)
    data = torch.randn(6, 5, 3), torch.randint(4, (6, 5))
    guide = ps.MeanFieldGuide(model)
    found = written(tmp_path / "page.html", model, guide, data, num_samples=7)
    with separate_randomness():
        density = ps.predict(model, guide, data[0], num_samples=7, y=data[1]).log_density.mean()
    assert found.column("Scores") == {"log density": cell_text(float(density))}
    assert len(left_out(found, "Predictions")) == 1


def one_hot(x, y=None):
    weight = pyro.sample("weight", dist.Normal(torch.zeros(2, 3), 1.0).to_event(2))
    with pyro.plate("data", len(x)):
        pyro.sample("obs", dist.OneHotCategorical(logits=x @ weight.T), obs=y)


def test_a_function_with_observations_without_order(tmp_path, quick):
    data = torch.randn(6, 3), torch.eye(2)[torch.randint(2, (6,))]
    found = written(tmp_path / "page.html", one_hot, ps.MeanFieldGuide(one_hot), data)
    assert found.title == "MeanFieldGuide of a one_hot"
    assert [*found.column("Scores")] == ["log density"]
    [reason] = left_out(found, "Predictions")
    assert "Classes have no order" in reason


def test_some_random_examples_and_mappings(tmp_path):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x):
            return self.layer(x["left"] + x["right"])

    model = ps.Regressor(ps.bayesianize(Sum(), prior=1.0), 12, 0.3)
    x, y = regression_data()
    found = written(
        *(tmp_path / "page.html", model, ps.MeanFieldGuide(model), ({"left": x, "right": x}, y)),
        batch_size=5,
        importance_samples=0,
    )
    assert "at 5 random training examples" in found.sections["Noise of gradients"][1]
    assert left_out(found, "Distance to the posterior") == ["Left out, by `importance_samples=0`."]


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"guide": nn.Linear(1, 1)}, TypeError, "`guide` must be a StructuredGuide"),
        ({"data": torch.zeros(3)}, TypeError, r"`data` must be a tuple \(x, y\) .* a torch.Tensor"),
        ({"data": (torch.zeros(3, 1), None)}, TypeError, r"`data` must be a tuple \(x, y\)"),
        ({"test_data": [1, 2]}, TypeError, r"`test_data` must be a tuple .* got \[1, 2\]"),
        (
            {"data": (torch.zeros(3, 1), torch.zeros(2, 1))},
            ValueError,
            r"`data` must have as many inputs as observations, but got \[3\] and 2",
        ),
        (
            {"data": (torch.full((2, 1), math.nan), torch.zeros(2, 1))},
            ValueError,
            r"`data\[0\]` holds 2 NaN",
        ),
        (
            {"test_data": (torch.zeros(2, 1), torch.full((2, 1), math.inf))},
            ValueError,
            r"`test_data\[1\]` must be finite everywhere",
        ),
        (
            {"test_data": (torch.zeros(2, 1).double(), torch.zeros(2, 3).double())},
            ValueError,
            "`y` must have shape that of the predictions",
        ),
        ({"history": History()}, ValueError, "`history` must hold at least one step"),
        ({"importance_samples": 99}, ValueError, "`importance_samples` must be at least 100"),
        ({"num_samples": 0}, ValueError, "`num_samples` must be a whole number of at least 1"),
        ({"path": "{folder}"}, ValueError, "`path` must be that of a file in a folder"),
        ({"path": "{folder}/none/page.html"}, ValueError, "`path` must be .* Make the folder"),
        ({"path": 3}, TypeError, "`path` must be a string or a PathLike"),
    ],
)
def test_what_is_refused_before_anything_is_written(arguments, error, message, tmp_path, quick):
    model, guide, data, _ = curve()
    valid = {"model": model, "guide": guide, "data": data, "path": str(tmp_path / "page.html")}
    chosen = valid | arguments
    if isinstance(chosen["path"], str):
        chosen["path"] = chosen["path"].format(folder=tmp_path)
    with pytest.raises(error, match=message):
        report(**chosen)
    assert not any(tmp_path.iterdir())


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path, quick, monkeypatch):
    def refuse(*paths):
        raise OSError("no room")

    model, guide, data, _ = curve()
    path = tmp_path / "page.html"
    path.write_text("the old one")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(OSError, match="no room"):
            report(model, guide, data, path)
    assert path.read_text() == "the old one"
    assert [*tmp_path.iterdir()] == [path]
    report(model, guide, data, path)
    assert path.read_text().startswith("<!DOCTYPE html>")
