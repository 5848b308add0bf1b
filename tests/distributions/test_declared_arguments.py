"""Tensor arguments that a distribution declares by annotations."""

from typing import Annotated

import pytest
import torch
from torch.distributions import constraints

from pyro_structvi.testing import check_distribution, random_weight
from pyro_structvi.weights.arguments import Argument
from pyro_structvi.weights.weight_distribution import GaussianWeight, IndependentWeight


class Declared(GaussianWeight):
    """With a factor for each group of g inputs, and k numbers for each output and for each input."""

    factors: Annotated[torch.Tensor, Argument("out, in / g, g, g", constraints.lower_cholesky)]
    rows: Annotated[torch.Tensor, Argument("out, k", constraints.positive)]
    columns: Annotated[torch.Tensor, Argument("D, k")]
    unrelated: Annotated[int, "of no distribution"]
    log_det_covariance = None  # required, and never read

    def __init__(self, loc, factors, rows, columns, validate_args=True):
        named = {"factors": factors, "rows": rows, "columns": columns}
        super().__init__({"loc": loc, **named}, validate_args=validate_args)


def declared(loc=(4, 6), group=3, groups=2, rows=(4, 5), columns=(24, 5), batch=(), **options):
    factors = torch.eye(group).expand(*batch, 4, groups, group, group)
    return Declared(
        torch.zeros((*batch, *loc)),
        factors,
        torch.ones(*batch, *rows),
        torch.ones(*batch, *columns),
        **options,
    )


def test_constraints_and_names_are_those_of_the_annotations():
    assert Declared.arg_constraints == {
        "loc": constraints.real,
        "factors": constraints.lower_cholesky,
        "rows": constraints.positive,
        "columns": constraints.real,
    }
    assert declared().argument_names == ("loc", "factors", "rows", "columns")


def test_arguments_are_inherited():
    class Scaled(Declared):
        scale: Annotated[torch.Tensor, Argument("", constraints.positive)]

        def __init__(self, loc, factors, rows, columns, scale):
            named = {"factors": factors, "rows": rows, "columns": columns, "scale": scale}
            GaussianWeight.__init__(self, {"loc": loc, **named}, validate_args=True)

    parts = [getattr(declared(), name) for name in declared().argument_names]
    q = Scaled(*parts, torch.tensor(2.0))
    assert q.argument_names == ("loc", "factors", "rows", "columns", "scale")
    assert q.expand((3,)).rows.shape == (3, 4, 5)
    with pytest.raises(ValueError, match="rows"):
        Scaled(*parts[:2], -parts[2], parts[3], torch.tensor(2.0))


@pytest.mark.parametrize(
    ("batch", "loc"), [((), (4, 6)), ((2,), (4, 3, 2)), ((2, 7), (4, 2, 1, 3))]
)
def test_batch_and_event_are_told_apart_by_the_letters(batch, loc):
    q = declared(loc, batch=batch)
    assert (q.batch_shape, q.event_shape) == (batch, loc)
    expanded = q.expand((9, *batch))
    assert expanded.factors.shape == (9, *batch, 4, 2, 3, 3)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            {"group": 4, "groups": 1},
            r"`factors` must have shape \(\*batch, out, in / g, g, g\) = \(4, 3/2, 4, 4\), "
            r"but got \(4, 1, 4, 4\), beside `loc`\.",
        ),
        ({"groups": 3}, r"`factors` must have .* = \(4, 2, 3, 3\), but got \(4, 3, 3, 3\)"),
        (
            {"columns": (24, 4)},
            r"`columns` must have .* = \(24, 5\), but got \(24, 4\), beside `loc and rows`\.",
        ),
        ({"columns": (5,)}, r"`columns` must have shape \(\*batch, D, k\) = \(24, 5\)"),
        ({"loc": ()}, r"`loc` must have shape \(\*batch, out, \*rest\) and `factors` .* got \(\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, message):
    with pytest.raises(ValueError, match=message):
        declared(**shapes)


class Scaled(IndependentWeight):
    """With one number for each weight, and spaces left out in the shape of another argument."""

    scale: Annotated[torch.Tensor, Argument("", constraints.positive)]
    share: Annotated[torch.Tensor, Argument("out,in/g", constraints.unit_interval)]

    def __init__(self, loc, scale, share, validate_args=True):
        super().__init__({"loc": loc, "scale": scale, "share": share}, validate_args=validate_args)

    @property
    def stddev(self):
        return self.as_weight(
            self.scale[..., None, None] * torch.ones_like(self.as_matrix(self.loc))
        )

    def output_variance(self, linear_map, x):
        return linear_map(x.square(), self.as_matrix(self.variance))


def test_an_argument_may_be_one_number_for_each_weight():
    with pytest.raises(
        ValueError, match=r"`sizes` must have .* \['g'\] are missing. Write .*, g=2\)"
    ):
        random_weight(Scaled)((), (4, 6), torch.float64)
    for batch in ((), (5,)):
        q = random_weight(Scaled, g=2)(batch, (4, 6), torch.float64)
        assert q.scale.shape == batch
        assert q.share.shape == (*batch, 4, 3)
        assert q.batch_shape == batch
        check_distribution(q)
    with pytest.raises(ValueError, match=r"`scale` must have .* = \(4,\), but got \(1,\)"):
        Scaled(torch.zeros(4, 6), torch.ones(1), torch.ones(4, 3))


@pytest.mark.parametrize(("share", "expected"), [(0.5, None), (1.5, "constraint Interval")])
def test_every_constraint_is_checked(share, expected):
    arguments = torch.zeros(4, 6), torch.tensor(1.0), torch.full((4, 3), share)
    if expected is None:
        Scaled(*arguments)
        return
    with pytest.raises(ValueError, match=f"`share` must satisfy the {expected}"):
        Scaled(*arguments)


def test_values_are_checked_where_arguments_are_validated():
    named = {"factors": torch.ones(4, 2, 3, 3), "rows": torch.ones(4, 5)}
    with pytest.raises(ValueError, match="`factors` must be lower triangular"):
        Declared(torch.zeros(4, 6), columns=torch.ones(24, 5), **named)
    named = {"factors": torch.eye(3).expand(4, 2, 3, 3), "rows": -torch.ones(4, 5)}
    with pytest.raises(ValueError, match="`rows` must be positive"):
        Declared(torch.zeros(4, 6), columns=torch.ones(24, 5), **named)
    Declared(torch.zeros(4, 6), columns=torch.ones(24, 5), validate_args=False, **named)
    with pytest.raises(TypeError, match="`validate_args` must be True or False"):
        declared(validate_args="abc")


def test_annotations_may_be_strings():
    """As a file with ``from __future__ import annotations`` has them."""
    source = """
from __future__ import annotations

class Own(GaussianWeight):
    factors: Annotated[torch.Tensor, Argument("out, k", constraints.positive)]
    other: Unknown
"""
    with pytest.raises(NameError, match="Unknown"):
        exec(source, dict(globals()))
    known = dict(globals())
    exec(source.replace("Unknown", "torch.Tensor"), known)
    expected = {"loc": constraints.real, "factors": constraints.positive}
    assert known["Own"].arg_constraints == expected
