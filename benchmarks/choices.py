"""The guides that the tables of the front page name, each with the options of its numbers."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

import pyro_structvi as ps


class Choice(NamedTuple):
    """A guide that the tables name.

    Attributes:
        guide: The name of its class.
        page: Its page, from ``docs/``.
        captures: The part of the posterior that it can tell.
        options: Its options.
    """

    guide: str
    page: str
    captures: str
    options: Mapping[str, Any] = {}

    @property
    def code(self) -> str:
        """The guide as it is called, without the model."""
        return call_of(self.guide, self.options)

    def make(self, model: Any) -> nn.Module:
        """Return the guide of a model."""
        guide: nn.Module = getattr(ps, self.guide)(model, **self.options)
        return guide


def call_of(guide: str, options: Mapping[str, Any]) -> str:
    """Return a guide's name with its options as they are written in code."""
    names = {key: getattr(value, "__name__", repr(value)) for key, value in options.items()}
    written = ", ".join(f"{key}={value}".replace("'", '"') for key, value in names.items())
    return f"{guide}({written})" if written else guide


MEAN_FIELD = Choice("MeanFieldGuide", "guides/mean_field.md", "no correlation")
FAMILIES = [
    Choice("GlobalInducingGuide", "guides/global_inducing.md", "correlations of all layers"),
    Choice(
        *("MatrixNormalGuide", "guides/matrix_normal.md", "correlations of rows, and of columns"),
        {"join_bias": True},
    ),
    Choice(
        *("RowwiseGuide", "guides/rowwise.md", "all correlations within a unit"),
        {"join_bias": True},
    ),
    Choice(
        *("FullCovarianceGuide", "guides/full_covariance.md", "all correlations within a layer"),
    ),
    Choice(
        *("AutoLowRankLRT", "guides/low_rank.md", "directions of correlation in a layer"),
        {"rank": 5, "diagonal": "full", "join_bias": True},
    ),
    Choice(
        *("InducingWeightGuide", "guides/inducing_weights.md"),
        "correlations within a layer, in few numbers",
        {"inducing_shape": (64, 64)},
    ),
    Choice(
        *("KTiedGuide", "guides/k_tied.md", "no correlation, with half of the numbers"),
        {"rank": 2, "join_bias": False},
    ),
    MEAN_FIELD,
]
PICTURED = [choice for choice in FAMILIES if choice.guide != "FullCovarianceGuide"]  # front page
POINTS = [
    Choice("EnsembleGuide", "guides/points.md", "several modes, each a point", {"size": 5}),
    Choice("MAPGuide", "guides/points.md", "one point"),
]
CHOICES = FAMILIES + POINTS
