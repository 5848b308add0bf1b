"""Linear maps of random inputs by random weights: exact, by enumerating two-point draws of both."""

import pytest
import torch
import torch.nn.functional as F

from pyro_structvi.distributions import FullNormal, MatrixNormal, MeanFieldNormal, RowwiseNormal
from pyro_structvi.moments import RandomTensor, Settings
from pyro_structvi.moments import linear as linear_module
from pyro_structvi.moments.linear import RandomWeight
from tests.distributions.cases import CASES
from tests.moments.signs import assert_exact, enumerated, part_of, random_input

FLOAT64 = torch.float64
CASE_NAMES = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
FULL = pytest.mark.parametrize("full", [False, True], ids=["diagonal", "full"])


def dense_part(case, q):
    """Return mean and covariance of a weight by the definition of its structure."""
    return case.mean(q).detach(), case.covariance(q).detach()


def independent(*shape):
    q = MeanFieldNormal(torch.randn(shape), torch.rand(shape) + 0.2)
    return q, (q.loc, torch.diag(q.scale.flatten().square()))


def one_example(found, index):
    covariance = None if found.covariance is None else found.covariance[index : index + 1]
    part = slice(index, index + 1)
    return RandomTensor(found.loc[part], found.variance[part], found.settings, covariance)


def assert_examples_exact(found, function, x, *parts):
    """Compare the outputs of each example; ``function`` takes a batch of one."""
    for index in range(len(x)):
        loc, covariance = part_of(x, index)
        batch_of_one = (loc.unsqueeze(0), covariance)
        assert_exact(one_example(found, index), function, batch_of_one, *parts)


@FULL
@CASE_NAMES
def test_a_dense_layer_of_a_random_input(case, full):
    q = case.make((), (2, 3), FLOAT64)
    x, known_bias = random_input(2, 3, full=full), torch.randn(2)
    weight = RandomWeight(q, Settings(full))
    found = F.linear(x, weight, known_bias)
    assert (found.covariance is not None) == full
    assert_examples_exact(found, lambda x, w: F.linear(x, w, known_bias), x, dense_part(case, q))


@FULL
@CASE_NAMES
def test_a_dense_layer_with_a_random_bias_of_its_own(case, full):
    q, x = case.make((), (2, 2), FLOAT64), random_input(1, 2, full=full)
    bias, bias_part = independent(2)
    settings = Settings(full)
    found = F.linear(x, RandomWeight(q, settings), RandomWeight(bias, settings))
    assert_examples_exact(found, F.linear, x, dense_part(case, q), bias_part)


@FULL
@CASE_NAMES
def test_a_dense_layer_with_a_joined_bias(case, full):
    q, x, settings = case.make((), (2, 3), FLOAT64), random_input(2, 2, full=full), Settings(full)
    weight = RandomWeight(q, settings, "weight", torch.Size((2, 2)))
    bias = RandomWeight(q, settings, "bias", torch.Size((2,)))
    found = F.linear(x, weight, bias)
    joint = dense_part(case, q)
    assert_examples_exact(found, lambda x, w: F.linear(x, w[:, :-1], w[:, -1]), x, joint)


@CASE_NAMES
def test_a_known_input_has_the_covariance_of_the_weight(case):
    q, x = case.make((), (2, 3), FLOAT64), torch.randn(1, 2)
    weight = RandomWeight(q, Settings(True), "weight", torch.Size((2, 2)))
    bias = RandomWeight(q, Settings(True), "bias", torch.Size((2,)))
    found = F.linear(x, weight, bias)
    assert found.covariance is not None
    assert_exact(found, lambda w: F.linear(x, w[:, :-1], w[:, -1]), dense_part(case, q))


@pytest.mark.parametrize("has_bias", [False, True])
@FULL
def test_a_known_layer_of_a_random_input(full, has_bias):
    x, weight, bias = random_input(2, 3, full=full), torch.randn(2, 3), torch.randn(2)
    bias = bias if has_bias else None
    found = F.linear(x, weight, bias)
    assert_examples_exact(found, lambda x: F.linear(x, weight, bias), x)


@FULL
def test_a_random_bias_of_a_known_layer(full):
    (bias, bias_part), x = independent(2), torch.randn(1, 3)
    weight = torch.randn(2, 3)
    found = F.linear(x, weight, RandomWeight(bias, Settings(full)))
    assert_exact(found, lambda b: F.linear(x, weight, b), bias_part)


def test_positions_keep_variances():
    q, x = MatrixNormal(torch.randn(2, 3), *_factors(2, 3)), random_input(2, 4, 3)
    found = F.linear(x, RandomWeight(q, Settings()))
    flat = RandomTensor(x.loc.flatten(0, 1), x.variance.flatten(0, 1), Settings())
    expected = F.linear(flat, RandomWeight(q, Settings()))
    torch.testing.assert_close(found.variance.flatten(0, 1), expected.variance)


def _factors(*sizes):
    return [torch.randn(size, size).tril(-1) + torch.eye(size) for size in sizes]


# ---- weights in another order of their dimensions ------------------------------------------------

ARRANGED = {
    "matmul": (lambda x, w: x @ w, (3, 2)),
    "mm": (torch.mm, (3, 2)),
    "addmm": (lambda x, w: torch.addmm(torch.ones(2), x, w), (3, 2)),
    "einsum": (lambda x, w: torch.einsum("bi,io->bo", x, w), (3, 2)),
    "transposed": (lambda x, w: x @ w.T, (2, 3)),
    "linear of the transposed": (lambda x, w: F.linear(x, w.t()), (3, 2)),
}


@pytest.mark.parametrize("call", ["mm", "einsum", "transposed", "linear of the transposed"])
@FULL
@pytest.mark.parametrize("case", CASES[::4], ids=lambda case: case.name)
def test_calls_that_take_a_weight_in_another_order(case, full, call):
    assert_arranged_exact(case, full, call)


@pytest.mark.parametrize("call", ["matmul", "addmm"])
@CASE_NAMES
def test_a_weight_in_another_order(case, call):
    assert_arranged_exact(case, True, call)


def assert_arranged_exact(case, full, call):
    function, shape = ARRANGED[call]
    q, x = case.make((), shape, FLOAT64), random_input(1, 3, full=full)
    found = function(x, RandomWeight(q, Settings(full)))
    loc, covariance = dense_part(case, q)
    if "transposed" in call:  # a view of the weight, which keeps variances alone
        covariance = torch.diag(covariance.diagonal())
    assert (found.covariance is not None) == full
    assert_examples_exact(found, function, x, (loc, covariance))


def parts_of_joint(q):
    shape = torch.Size((2, 2))
    return (
        RandomWeight(q, Settings(), "weight", shape),
        RandomWeight(q, Settings(), "bias", shape[:1]),
    )


@CASE_NAMES
def test_a_weight_in_another_order_without_its_joined_bias(case):
    q, x = case.make((), (2, 3), FLOAT64), random_input(1, 2)
    weight, _ = parts_of_joint(q)
    found = x @ weight
    joint = dense_part(case, q)
    assert_examples_exact(found, lambda x, w: x @ w[:, :-1], x, joint)


def test_a_weight_in_another_order_beside_its_joined_bias_is_refused():
    weight, bias = parts_of_joint(FullNormal(torch.randn(2, 3), torch.eye(6)))
    with pytest.raises(NotImplementedError, match="A weight and bias with a joint posterior meet"):
        torch.addmm(bias, random_input(1, 2), weight)


def test_a_stack_of_weights_with_independent_elements():
    (q, part), x = independent(2, 2, 2), random_input(2, 1, 2)
    found = torch.bmm(x, RandomWeight(q, Settings()))
    assert_exact(found, torch.bmm, part_of(x), part)


def test_a_stack_of_correlated_weights_is_refused():
    q = FullNormal(torch.randn(2, 2, 2), torch.eye(8))
    message = "A stack of weights that are correlated has no moments"
    with pytest.raises(NotImplementedError, match=message):
        torch.bmm(random_input(2, 1, 2), RandomWeight(q, Settings()))


def test_a_large_weight_in_another_order_is_refused(monkeypatch):
    monkeypatch.setattr(linear_module, "LARGEST", 5)
    q = MatrixNormal(torch.randn(3, 2), *_factors(3, 2))
    found = random_input(1, 3) @ RandomWeight(q, Settings())  # has a rule of its own
    assert found.shape == (1, 2)
    q = RowwiseNormal(torch.randn(3, 2), torch.eye(2).expand(3, 2, 2))
    message = (
        "A RowwiseNormal of 6 elements meets a call that takes its dimensions in another order"
    )
    with pytest.raises(NotImplementedError, match=message):
        torch.einsum("bi,io->bo", random_input(1, 3), RandomWeight(q, Settings()))


# ---- convolutions and look-ups -------------------------------------------------------------------

CONVOLUTIONS = {
    "conv": (F.conv1d, (2, 1, 2), {"padding": 1, "stride": 2}, 1),
    "grouped": (F.conv1d, (2, 1, 2), {"groups": 2}, 2),
    "transposed": (F.conv_transpose1d, (1, 2, 2), {"stride": 2}, 1),
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
@CASE_NAMES
def test_a_convolution_of_a_random_input(case, kind):
    function, shape, options, channels = CONVOLUTIONS[kind]
    q, x = case.make((), shape, FLOAT64), random_input(1, channels, 2 if kind == "grouped" else 3)
    bias, bias_part = independent(2)
    found = function(x, RandomWeight(q, Settings()), RandomWeight(bias, Settings()), **options)

    def exact(x, w, b):
        return function(x, w, b, **options)

    loc, covariance = enumerated(exact, part_of(x), dense_part(case, q), bias_part)
    torch.testing.assert_close(found.loc, loc, rtol=1e-10, atol=1e-12)
    variance = covariance.diagonal().reshape(loc.shape)
    torch.testing.assert_close(found.variance, variance, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["conv", "grouped"])
@CASE_NAMES
def test_a_convolution_with_a_joined_bias(case, kind):
    function, shape, options, channels = CONVOLUTIONS[kind]
    q, x = case.make((), (2, 3), FLOAT64), random_input(1, channels, 4 - channels)
    weight = RandomWeight(q, Settings(), "weight", torch.Size(shape))
    bias = RandomWeight(q, Settings(), "bias", torch.Size((2,)))
    found = function(x, weight, bias, **options)

    def exact(x, w):
        return function(x, w[:, :-1].reshape(shape), w[:, -1], **options)

    loc, covariance = enumerated(exact, part_of(x), dense_part(case, q))
    torch.testing.assert_close(found.loc, loc, rtol=1e-10, atol=1e-12)
    variance = covariance.diagonal().reshape(loc.shape)
    torch.testing.assert_close(found.variance, variance, rtol=1e-9, atol=1e-12)


@CASE_NAMES
def test_rows_that_are_looked_up(case):
    q, index = case.make((), (4, 3), FLOAT64), torch.tensor([[0, 3], [2, 2]])
    found = F.embedding(index, RandomWeight(q, Settings()))
    loc, covariance = dense_part(case, q)
    torch.testing.assert_close(found.loc, loc[index])
    torch.testing.assert_close(found.variance, covariance.diagonal().reshape(4, 3)[index])


def test_gradients_of_a_dense_layer():
    tensors = [torch.randn(2, 3), torch.rand(2, 3), torch.randn(2, 3), torch.rand(2, 3) + 0.1]

    def run(m, v, loc, scale):
        weight = RandomWeight(MeanFieldNormal(loc, scale), Settings())
        found = F.linear(RandomTensor(m, v, Settings()), weight)
        return found.loc, found.variance

    assert torch.autograd.gradcheck(run, [tensor.requires_grad_() for tensor in tensors])
