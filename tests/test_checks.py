"""Each message about arguments, word for word."""

import re

import pytest
import torch

from pyro_structvi import _checks as checks


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
    assert checks.check_positive_integer("rank", 1) == 1


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "1", None])
def test_what_is_no_positive_integer(value):
    with assert_message(f"`rank` must be a whole number of at least 1, but got {value!r}."):
        checks.check_positive_integer("rank", value)


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
