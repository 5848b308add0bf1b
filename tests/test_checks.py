"""Each message about arguments, word for word."""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from pyro_structvi import _checks as checks
from tests.bad_input.public import public_callables


@pytest.mark.parametrize(
    ("shape", "text"),
    [((), "()"), ((3,), "(3,)"), ([3, 2], "(3, 2)"), (torch.Size([1, 2]), "(1, 2)")],
)
def test_shape_text(shape, text):
    assert checks.shape_text(shape) == text


def assert_message(message):
    """Expect a ``ValueError`` with exactly this message."""
    return pytest.raises(ValueError, match=f"^{re.escape(message)}$")


def test_shape():
    checks.check_shape("x", torch.zeros(3, 2), [3, 2], "(in, k)")
    with assert_message("`x` must have shape (in, k) = (3, 2), but got (3,)."):
        checks.check_shape("x", torch.zeros(3), (3, 2), "(in, k)")


@pytest.mark.parametrize("shape", [(), (1,), (3,), (4, 3), (4, 1), (1, 3), (1, 1)])
def test_broadcastable_shapes_pass(shape):
    checks.check_broadcastable("s", torch.zeros(shape), (4, 3), "the shape of `loc`")


@pytest.mark.parametrize(
    ("shape", "text"),
    [((4,), "(4,)"), ((2, 3), "(2, 3)"), ((1, 4, 3), "(1, 4, 3)"), ((0,), "(0,)")],
)
def test_shapes_that_do_not_broadcast(shape, text):
    message = f"`s` must broadcast to the shape of `loc` = (4, 3), but got shape {text}."
    with assert_message(message):
        checks.check_broadcastable("s", torch.zeros(shape), (4, 3), "the shape of `loc`")


@pytest.mark.parametrize("values", [[1.0, 1e-300], [], 2.0])
def test_positive_values_pass(values):
    checks.check_positive("scale", torch.tensor(values))


@pytest.mark.parametrize(
    ("values", "worst"),
    [
        ([1.0, 0.0], "0.0"),
        ([1.0, -2.5, -1.0], "-2.5"),
        ([float("nan"), 1.0], "nan"),
        ([1.0, float("inf")], "inf"),
    ],
)
def test_values_that_are_not_positive(values, worst):
    message = (
        rf"^`scale` must be positive and finite everywhere, but .* {worst}\. Pass a standard "
        r"deviation, for instance `scale\.exp\(\)` of an unconstrained tensor\.$"
    )
    with pytest.raises(ValueError, match=message):
        checks.check_positive("scale", torch.tensor(values, requires_grad=True))


@pytest.mark.parametrize("shape", [(2, 2), (3, 2, 2), (0, 0)])
def test_cholesky_factors_pass(shape):
    checks.check_cholesky_factor("L", torch.ones(shape).tril())


def test_what_is_no_cholesky_factor():
    message = (
        "`L` must be lower triangular, but it has an entry 0.5 above the diagonal. Pass "
        "`torch.linalg.cholesky(covariance)`, or `L.tril()`."
    )
    with assert_message(message):
        checks.check_cholesky_factor("L", torch.tensor([[1.0, 0.5], [2.0, 1.0]]))
    with pytest.raises(ValueError, match=r"^`L\.diagonal\(\)` must be positive and finite"):
        checks.check_cholesky_factor("L", torch.tensor([[1.0, 0.0], [2.0, 0.0]]))


@pytest.mark.parametrize("value", [2, 0.5, 1e-300])
def test_positive_numbers_pass(value):
    assert checks.check_positive_number("rate", value) == value
    assert isinstance(checks.check_positive_number("rate", value), float)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "1", None])
def test_what_is_no_positive_number(value):
    with assert_message(f"`rate` must be a positive number, but got {value!r}."):
        checks.check_positive_number("rate", value)


def test_positive_integers_pass():
    checks.check("rank", 1, checks.Count)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "1", None])
def test_what_is_no_positive_integer(value):
    with assert_message(f"`rank` must be a whole number of at least 1, but got {value!r}."):
        checks.check("rank", value, checks.Count)


def test_same_kind():
    x = torch.zeros(2, dtype=torch.float32)
    checks.check_same_kind("x", x, "loc", torch.ones(3, dtype=torch.float32))
    message = (
        "`x` must have the dtype of `loc`, torch.float64, but got torch.float32. Convert it with "
        "`x.to(loc)`."
    )
    with assert_message(message):
        checks.check_same_kind("x", x, "loc", torch.ones(3, dtype=torch.float64))


def test_same_device():
    message = "`x` must have the device of `loc`, meta, but got cpu. Convert it with `x.to(loc)`."
    with assert_message(message):
        checks.check_same_kind("x", torch.zeros(2), "loc", torch.ones(3, device="meta"))


@pytest.mark.parametrize("values", [[1.0, float("inf")], [1, 2], []])
def test_values_without_nan_pass(values):
    checks.check_no_nan("y", torch.tensor(values))


def test_nan():
    message = (
        "`y` holds 2 NaN of 3 values. Drop those rows or fill them in first, for instance with "
        "`torch.nan_to_num(y)`."
    )
    with assert_message(message):
        checks.check_no_nan("y", torch.tensor([float("nan"), 1.0, float("nan")]))


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


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"number": 2, "count": 3, "name": True, "pair": (0, -1), "shape": [0, 2]},
        {"table": {"w": torch.zeros(1)}, "net": nn.Tanh(), "call": nn.Tanh(), "anything": nn.Tanh},
        {"count": "many", "table": 3, "validate_args": False},
        {"unknown": "abc"},
    ],
)
def test_arguments_that_fit_their_annotations_pass(arguments):
    assert annotated(**arguments) == arguments.get("number", 1.0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"number": "abc"}, ValueError, "`number` must be a number, but got 'abc'."),
        ({"count": 0}, ValueError, "`count` must be a whole number of at least 1, but got 0."),
        ({"name": "c"}, ValueError, """`name` must be "a", "b", True or False, but got 'c'."""),
        ({"name": 3}, TypeError, """`name` must be "a", "b", True or False, but got 3."""),
        ({"table": [1.0]}, TypeError, "`table` must be a Mapping, but got [1.0]."),
        ({"table": {3: 3}}, TypeError, "`table.keys()` must be a string, but got 3."),
        (
            {"table": {"w": [0.0] * 99}},
            TypeError,
            "`table['w']` must be a torch.Tensor, but got a list. Convert it with "
            "`torch.as_tensor(table['w'])`.",
        ),
        (
            {"pair": (1, 2, 3)},
            ValueError,
            "`pair` must be (a whole number, a whole number), but got (1, 2, 3).",
        ),
        ({"shape": "ab"}, TypeError, "`shape` must be a Sequence, but got 'ab'."),
        ({"shape": (1.5,)}, TypeError, "`shape` must be a Sequence, but got (1.5,)."),
        (
            {"net": nn.Tanh},
            TypeError,
            "`net` must be a torch.nn.Module, but got the class Tanh. Pass an instance of it, "
            "`Tanh(...)`.",
        ),
        (
            {"call": nn.Tanh},
            TypeError,
            "`call` must be a function or a module, but got the class Tanh.",
        ),
        (
            {"net": torch.zeros(2, 3).long()},
            TypeError,
            "`net` must be a torch.nn.Module, but got a torch.Tensor of shape (2, 3) and dtype "
            "torch.int64.",
        ),
        (
            {"validate_args": "yes"},
            TypeError,
            "`validate_args` must be True or False, but got 'yes'.",
        ),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_their_annotations(arguments, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        annotated(**arguments)


def test_arguments_by_position_are_checked():
    with pytest.raises(ValueError, match="`count` must be a whole number"):
        annotated(1.0, -1)


@checks.checked
def with_arguments_of_another(first: checks.Count, *args: Any, rank: checks.Count = 1) -> None:
    pass


def test_arguments_for_another_function_are_not_checked():
    """They stand by position where the function's own further arguments have names."""
    with_arguments_of_another(1, "text", None)
    with pytest.raises(ValueError, match="`rank` must be a whole number"):
        with_arguments_of_another(1, "text", rank=0)
    with pytest.raises(ValueError, match="`first` must be a whole number"):
        with_arguments_of_another(0, "text")


def test_a_checked_function_says_what_it_takes():
    assert list(inspect.signature(annotated).parameters)[:2] == ["number", "count"]
    assert repr(checks.Count) == "typing.Annotated[int, a whole number of at least 1]"


@dataclass
class Options(checks.CheckedFields):
    rank: checks.Count = 1
    name: "str" = 3  # not read, being in quotes


def test_fields_are_checked():
    assert Options(2).rank == 2
    with assert_message("`rank` must be a whole number of at least 1, but got 0."):
        Options(0)


# ---- tensors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "arguments", "error", "message"),
    [
        ("check_shape", (3, (1,), "(N,)"), TypeError, "`x` must be a torch.Tensor, but got 3"),
        (
            "check_shape",
            (torch.zeros(2), (1,), "(N,)", "y"),
            ValueError,
            "`x` must have shape (N,) = (1,), but got (2,), beside `y`.",
        ),
        ("check_real", (torch.ones(2).long(),), ValueError, "`x` must hold real numbers, but got"),
        ("check_real", (torch.ones(2), 2), ValueError, "`x` must hold real numbers in at least 2"),
        (
            "check_finite",
            (torch.tensor([1.0, float("inf")]),),
            ValueError,
            "`x` must be finite everywhere, but is not.",
        ),
        ("check_mask", (torch.ones(2),), TypeError, "`x` must be a tensor of booleans, but got"),
        ("check_classes", (torch.tensor([3]), 3), ValueError, "`x` must hold whole numbers of at"),
        ("check_classes", (torch.tensor([-1]), 3), ValueError, "`x` must hold whole numbers of at"),
        ("check_classes", (torch.ones(1), 3), ValueError, "`x` must hold whole numbers of at"),
        ("check_tensors", ((),), TypeError, "`x` must be a tensor, or a tuple for a model"),
        ("check_tensors", ((torch.ones(1), 3),), TypeError, "`x[1]` must be a tensor"),
        ("check_tensors", (torch.ones(()),), ValueError, "`x` must hold at least one example"),
        ("check_no_nan", (torch.ones(1, device="meta"),), ValueError, "`x` must hold values"),
    ],
)
def test_tensors_that_do_not_fit(check, arguments, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        getattr(checks, check)("x", *arguments)


def test_signatures_of_public_callables_are_types():
    """As ``help``, a notebook and the reference show them, without the rules of arguments."""
    shown = {name: str(inspect.signature(value)) for name, value in public_callables().items()}
    assert len(shown) > 100
    assert {name: text for name, text in shown.items() if "Annotated" in text} == {}
    assert shown["KTied"] == "(rank: int = 2, *, join_bias: bool = True) -> None"
