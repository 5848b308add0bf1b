"""Fits that reports are made of."""

import re

import torch
from torch import nn

import pyro_structvi as ps
from pyro_structvi.diagnostics import (
    report,
)
from tests.diagnostics.pages import Page

SECTIONS = [
    *("What was fitted", "Predictions", "Evidence lower bound"),
    *("Distance to the posterior", "Noise of gradients", "Spectra of the posterior"),
]


def curve(size=20):
    """Return a model of one input, its guide, and two sets of data."""
    net = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1))
    model = ps.Regressor(ps.bayesianize(net, prior=1.0), size, 0.3)
    x = torch.linspace(-1, 1, size).unsqueeze(-1)
    guide = ps.KTiedGuide(model, rank=2, init_scale=0.2)
    return model, guide, (x, x.sin()), (x[:9] + 0.01, x[:9].cos())


def written(path, model, guide, data, test_data=None, **options):
    """Write a page, read it, and check what holds for every one."""
    assert report(model, guide, data, path, test_data=test_data, **options) == path
    text = path.read_text()
    without_images = re.sub(r'src="data:[^"]*"', "", text)
    assert not re.search("http|//|url|@import|<script|<link", without_images)
    found = Page(text)
    for image in found.images:
        references = re.findall(r'(?:xlink:)?href="([^"]*)"', image)
        assert all(each.startswith(("#", "data:image/png;base64,")) for each in references)
    assert [*found.sections] == SECTIONS
    assert all(len(texts[0]) > 30 for texts in found.sections.values()), "how to read it"
    assert "prefers-color-scheme: dark" in text
    return found
