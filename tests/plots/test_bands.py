"""Figures: panels, bands and data."""

import pytest
import torch

import pyro_structvi as ps
from pyro_structvi.plots import plot_regressions
from tests.models import make_regressor


def test_one_panel_a_method_with_three_bands(tmp_path):
    model, grid = make_regressor(), torch.randn(7, 3)
    prediction = ps.predict(model, ps.MeanFieldGuide(model), grid, 5)
    line = torch.linspace(0, 1, 7)
    titles = [f"method {index}" for index in range(5)]
    figure = plot_regressions(dict.fromkeys(titles, prediction), line, line, line, truth=line)
    assert [panel.get_title() for panel in figure.axes] == titles
    bands = [c for c in figure.axes[0].collections if "Poly" in type(c).__name__]
    assert len(bands) == 3
    widths = [band.get_paths()[0].vertices[:, 1] for band in bands]
    height = [vertices.max() - vertices.min() for vertices in widths]
    assert height == sorted(height)
    figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_no_prediction():
    with pytest.raises(ValueError, match="`predictions` must hold at least one prediction"):
        plot_regressions({}, torch.zeros(1), torch.zeros(1), torch.zeros(1))
