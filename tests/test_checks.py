"""Each check of arguments: what passes, and what is refused by name."""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from pyro_structvi import _checks as checks
from tests.bad_input.public import public_callables

INF, NAN = float("inf"), float("nan")
SINGLE, META = torch.zeros(2, dtype=torch.float32), torch.ones(3, device="meta")
BROADCAST = (4, 3), "the shape of `loc`"


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


FIT = (
    ("shape", torch.zeros(3, 2), [3, 2], "(in, k)"),
    *(
        ("broadcastable", torch.zeros(shape), *BROADCAST)
        for shape in [(), (1,), (3,), (4, 3), (4, 1), (1, 3), (1, 1)]
    ),
    *(("positive", values) for values in (double(1.0, 1e-300), double(), torch.tensor(2.0))),
    *(("cholesky_factor", torch.ones(shape).tril()) for shape in [(2, 2), (3, 2, 2), (0, 0)]),
    ("same_kind", SINGLE, "loc", torch.ones(3, dtype=torch.float32)),
    *(("no_nan", values) for values in (double(1.0, INF), torch.tensor([1, 2]), double())),
)


def test_arguments_that_fit_pass():
    for check, *arguments in FIT:
        getattr(checks, f"check_{check}")("x", *arguments)
    for value in (2, 0.5, 1e-300):
        checks.check("rate", value, checks.Positive)
    checks.check("rank", 1, checks.Count)
    assert [checks.shape_text(shape) for shape in ((), [3, 2])] == ["()", "(3, 2)"]


def refused(message, check, *arguments, error=ValueError):
    return pytest.param(check, arguments, error, message, id=f"{check}: {message}")


POSITIVE = "`x` must be positive and finite everywhere, but"
BESIDE = "`x` must have shape (N,) = (1,), but got (2,), beside `y`."


@pytest.mark.parametrize(
    ("check", "arguments", "error", "message"),
    [
        refused("`x` must be a torch.Tensor, but got 3", "shape", 3, (1,), "(N,)", error=TypeError),
        refused(BESIDE, "shape", torch.zeros(2), (1,), "(N,)", "y"),
        *(
            refused(
                f"`x` must broadcast to the shape of `loc` = (4, 3), but got shape {shape}.",
                *("broadcastable", torch.zeros(shape), *BROADCAST),
            )
            for shape in [(4,), (2, 3), (1, 4, 3), (0,)]
        ),
        *(
            refused(POSITIVE, "positive", values.requires_grad_())
            for values in (double(1.0, 0.0), double(NAN, 1.0), double(1.0, INF))
        ),
        refused("`x` must be lower tri", "cholesky_factor", double([1.0, 0.5], [2.0, 1.0])),
        refused("`x.diagonal()` must be pos", "cholesky_factor", double([1.0, 0.0], [2.0, 0.0])),
        *(
            refused(f"`x` must be a positive number, but got {each!r}.", "", each, checks.Positive)
            for each in (0, -1.0, NAN, INF, True, "1", None)
        ),
        *(
            refused(
                f"`x` must be a whole number of at least 1, but got {value!r}.",
                *("", value, checks.Count),
            )
            for value in (0, -1, 1.0, True, "1", None)
        ),
        refused("`x` must have the dtype of `loc`", "same_kind", SINGLE, "loc", double(1.0)),
        refused("`x` must have the device of `loc`", "same_kind", SINGLE, "loc", META.float()),
        refused("`x` holds 2 NaN of 3 values.", "no_nan", double(NAN, 1.0, NAN)),
        refused("`x` must hold values", "no_nan", META),
        refused("`x` must hold real numbers, but got", "real", torch.ones(2).long()),
        refused("`x` must hold real numbers in at least 2", "real", torch.ones(2), 2),
        refused("`x` must be finite everywhere, but is not.", "finite", double(1.0, INF)),
        refused("`x` must be a tensor of booleans, but", "mask", torch.ones(2), error=TypeError),
        *(
            refused("`x` must hold whole numbers of at", "classes", values, 3)
            for values in (torch.tensor([3]), torch.tensor([-1]), torch.ones(1))
        ),
        refused("`x` must be a tensor, or a tuple for a model", "tensors", (), error=TypeError),
        refused("`x[1]` must be a tensor", "tensors", (torch.ones(1), 3), error=TypeError),
        refused("`x` must hold at least one example", "tensors", torch.ones(())),
    ],
)
def test_arguments_that_do_not_fit(check, arguments, error, message):
    function = getattr(checks, f"check_{check}" if check else "check")
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        function("x", *arguments)


# ---- annotations ---------------------------------------------------------------------------------


@checks.checked
def annotated(
    number: float = 1.0,
    count: checks.Count | None = None,
    name: Literal["a", "b"] | bool = "a",
    table: Mapping[str, Tensor] | None = None,
    pair: tuple[int, int] = (1, 2),
    shape: Sequence[checks.Whole] = (),
    net: nn.Module | None = None,
    call: checks.Program = print,
    anything: Any = None,
    validate_args: bool | None = None,
    **options: int,
):
    return number


def test_arguments_that_fit_their_annotations_pass():
    for arguments in (
        {},
        {"number": 2, "count": 3, "name": True, "pair": (0, -1), "shape": [0, 2]},
        {"table": {"w": torch.zeros(1)}, "net": nn.Tanh(), "call": nn.Tanh(), "anything": nn.Tanh},
        {"count": "many", "table": 3, "validate_args": False},
        {"unknown": "abc"},
    ):
        assert annotated(**arguments) == arguments.get("number", 1.0)


def test_arguments_that_do_not_fit_their_annotations():
    names = """must be "a", "b", True or False, but got"""
    instance = (
        "must be a torch.nn.Module, but got the class Tanh. Pass an instance of it, `Tanh(...)`."
    )
    tensor = (
        "must be a torch.nn.Module, but got a torch.Tensor of shape (2, 3) and dtype torch.int64."
    )
    pair = "must be (a whole number, a whole number), but got (1, 2, 3)."
    for error, name, value, message in (
        (ValueError, "number", "abc", "must be a number, but got 'abc'."),
        (ValueError, "count", 0, "must be a whole number of at least 1, but got 0."),
        (ValueError, "name", "c", f"{names} 'c'."),
        (TypeError, "name", 3, f"{names} 3."),
        (TypeError, "table", [1.0], "must be a Mapping, but got [1.0]."),
        (ValueError, "pair", (1, 2, 3), pair),
        (TypeError, "shape", "ab", "must be a Sequence, but got 'ab'."),
        (TypeError, "net", nn.Tanh, instance),
        (TypeError, "call", nn.Tanh, "must be a function or a module, but got the class Tanh."),
        (TypeError, "net", torch.zeros(2, 3).long(), tensor),
        (TypeError, "validate_args", "yes", "must be True or False, but got 'yes'."),
    ):
        with pytest.raises(error, match=f"^{re.escape(f'`{name}` {message}')}$"):
            annotated(**{name: value})
    with pytest.raises(
        ValueError, match=r"^`shape\[1\]` must be a whole number .*, but got 1\.5\.$"
    ):
        annotated(shape=(1, 1.5))
    with pytest.raises(TypeError, match=r"^`table.keys\(\)` must be a string, but got 3\.$"):
        annotated(table={3: 3})
    with pytest.raises(TypeError, match=r"^`table\['w'\]` must be .* got a list. Convert it with"):
        annotated(table={"w": [0.0] * 99})


def test_rows_of_pandas_and_wrong_items_of_a_list_are_named():
    rows = pd.DataFrame({"u": [0.1, 0.5]}, index=[1, 2])
    message = (
        "`x` must be a torch.Tensor, but got a Series. Convert it with `torch.as_tensor(x.to_num"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        checks.check("x", rows["u"], Tensor)
    with pytest.raises(TypeError, match=r"`torch\.as_tensor\(x\.to_numpy\(\)\)`\.$"):
        checks.check_tensors("x", rows)
    message = "^`x` must be a torch.Tensor or a Sequence, but got a list, whose item 1 is a date.$"
    with pytest.raises(TypeError, match=message):
        checks.check("x", [1.0, date(2020, 1, 2)], Tensor | Sequence[float])


@checks.checked
def with_arguments_of_another(first: checks.Count, *args: Any, rank: checks.Count = 1) -> None:
    pass


@dataclass
class Options(checks.CheckedFields):
    rank: checks.Count = 1
    name: "str" = 3  # not read, being in quotes


def test_arguments_by_position_and_fields_are_checked():
    """Those for another function stand by position where the function's own have names."""
    with_arguments_of_another(1, "text", None)
    assert Options(2).rank == 2
    for call, name in (
        (lambda: annotated(1.0, -1), "count"),
        (lambda: with_arguments_of_another(1, "text", rank=0), "rank"),
        (lambda: with_arguments_of_another(0, "text"), "first"),
        (lambda: Options(0), "rank"),
    ):
        with pytest.raises(ValueError, match=f"`{name}` must be a whole number of at least 1"):
            call()


def test_signatures_of_public_callables_are_types():
    """As ``help``, a notebook and the reference show them, without the rules of arguments."""
    shown = {name: str(inspect.signature(value)) for name, value in public_callables().items()}
    assert len(shown) > 100
    assert {name: text for name, text in shown.items() if "Annotated" in text} == {}
    assert shown["KTied"] == "(rank: int = 2, *, join_bias: bool = True) -> None"
    assert list(inspect.signature(annotated).parameters)[:2] == ["number", "count"]
    assert repr(checks.Count) == "typing.Annotated[int, a whole number of at least 1]"
