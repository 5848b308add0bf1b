"""Functions that move, sum or scale elements: exact, by their matrix, for independent elements."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyro_structvi.moments import RandomTensor, Settings
from tests.moments.signs import assert_exact, part_of, random_input

MASK = torch.tensor([True, False, True, False])
OTHER = torch.arange(24.0).reshape(2, 3, 4)

# Functions of (2, 3, 4), affine in its elements, to a tensor or several.
MOVES = {
    "reshape": lambda x: x.reshape(2, 12),
    "view": lambda x: x.view(-1, 4),
    "view as": lambda x: x.view_as(torch.zeros(6, 4)),
    "flatten": lambda x: x.flatten(1),
    "flatten, as a function": lambda x: torch.flatten(x, 1),
    "flatten, as a module": nn.Flatten(),
    "unflatten": lambda x: x.unflatten(-1, (2, 2)),
    "unflatten, as a module": nn.Unflatten(-1, (2, 2)),
    "permute": lambda x: x.permute(2, 0, 1),
    "transpose": lambda x: x.transpose(1, 2),
    "mT": lambda x: x.mT,
    "T": lambda x: x[0].T,
    "movedim": lambda x: torch.movedim(x, 0, -1),
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "expand": lambda x: x.unsqueeze(1).expand(2, 5, 3, 4),
    "repeat": lambda x: x.repeat(1, 2, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "roll": lambda x: x.roll(1, -1),
    "flip": lambda x: x.flip(1),
    "index": lambda x: x[:, 1, ::2],
    "index by a mask": lambda x: x[..., MASK],
    "index by an ellipsis": lambda x: x[..., None, :2],
    "index_select": lambda x: x.index_select(1, torch.tensor([2, 0])),
    "gather": lambda x: x.gather(1, torch.zeros(2, 1, 4, dtype=torch.long)),
    "narrow": lambda x: x.narrow(2, 1, 2),
    "select": lambda x: x.select(1, 2),
    "chunk": lambda x: x.chunk(2, -1),
    "split": lambda x: x.split([1, 2], 1),
    "unbind": lambda x: x.unbind(1),
    "tensor_split": lambda x: torch.tensor_split(x, 2, -1),
    "iteration": lambda x: [*x],
    "cat": lambda x: torch.cat([x[:, :1], x[:, 1:] * 2], 1),
    "cat with what is known": lambda x: torch.cat([x, OTHER], dim=-1),
    "stack": lambda x: torch.stack([x, OTHER, x], 1),
    "where": lambda x: torch.where(MASK, x, OTHER),
    "where, as a method": lambda x: x.where(MASK, OTHER),
    "where, with a number": lambda x: torch.where(MASK, 0.0, x),
    "masked_fill": lambda x: x.masked_fill(MASK, 2.0),
    "pad": lambda x: F.pad(x, (1, 2), value=3.0),
    "pad by reflection": lambda x: F.pad(x, (1, 2), mode="reflect"),
    "zero padding": nn.ZeroPad2d(1),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "upsampling": nn.Upsample(scale_factor=2, mode="nearest"),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.reshape(1, 4, 2, 3), 2),
    "contiguous": lambda x: x.permute(1, 0, 2).contiguous().view(3, 8),
    "to": lambda x: x.to(torch.float64).clone(),
    "add": lambda x: x + OTHER,
    "add, reversed": lambda x: 1 + x,
    "add with a factor": lambda x: torch.add(x, OTHER, alpha=2),
    "subtract": lambda x: x - OTHER[0],
    "subtract from": lambda x: 1.0 - x,
    "subtract a random one with a factor": lambda x: torch.sub(OTHER[:, :1], x[:, :1], alpha=3),
    "negate": lambda x: -x,
    "multiply": lambda x: x * OTHER,
    "multiply, reversed": lambda x: 3 * x,
    "multiply and broadcast": lambda x: x[:, :1] * torch.ones(3, 1),
    "divide": lambda x: x / (1 + OTHER),
    "divide by a number": lambda x: torch.div(x, 3),
    "sum": lambda x: x.sum(),
    "sum over a dimension": lambda x: x.sum(1, keepdim=True),
    "sum over several": lambda x: torch.sum(x, dim=(0, -1)),
    "mean": lambda x: x.mean(),
    "mean over a dimension": lambda x: x.mean(-1),
    "mean over several": lambda x: torch.mean(x, (1, 2), keepdim=True),
    "matmul with what is known": lambda x: torch.matmul(torch.randn(5, 3), x),
    "average pooling": lambda x: F.avg_pool1d(x, 2, stride=1),
    "average pooling with padding": lambda x: F.avg_pool2d(x, 2, padding=1),
    "average pooling of three": lambda x: F.avg_pool3d(x.reshape(1, 1, 2, 3, 4), (2, 1, 2)),
    "adaptive average pooling": lambda x: F.adaptive_avg_pool1d(x, 3),
    "adaptive average pooling with uneven windows": lambda x: F.adaptive_avg_pool1d(
        x.reshape(2, 1, 12), 5
    ),
    "adaptive average pooling of two": nn.AdaptiveAvgPool2d((2, 3)),
    "adaptive average pooling, of one side": nn.AdaptiveAvgPool2d((None, 3)),
    "global average pooling": nn.AdaptiveAvgPool2d(1),
    "dropout in evaluation": lambda x: F.dropout(x, 0.5, training=False),
    "dropout of channels in evaluation": lambda x: nn.Dropout2d().eval()(x[None]),
    "alpha dropout in evaluation": nn.AlphaDropout().eval(),
    "dropout without a rate": nn.Dropout(0.0),
    "identity": nn.Identity(),
}


def as_list(found):
    return [*found] if isinstance(found, (tuple, list)) else [found]


@pytest.mark.parametrize("name", MOVES)
def test_means_and_variances_move_alike(name):
    """An affine function ``J x + c`` of independent elements has the variances ``J^2 v``."""
    x, seed = random_input(2, 3, 4), torch.get_rng_state()

    def run(value):
        torch.set_rng_state(seed)
        return as_list(MOVES[name](value))

    known = run(x.loc)
    matrices = torch.func.jacrev(lambda value: tuple(run(value)))(x.loc)
    for found, loc, matrix in zip(run(x), known, matrices, strict=True):
        assert type(found) is RandomTensor
        assert found.shape == loc.shape
        torch.testing.assert_close(found.loc, loc)
        torch.testing.assert_close(
            found.variance, (matrix.square() * x.variance).sum((-3, -2, -1)), check_stride=False
        )


def test_an_alias_gets_what_in_place_functions_do():
    x = random_input(2, 3)
    y = x.masked_fill_(torch.tensor([True, False, True]), 1.5)
    assert y is x
    assert (x.variance[:, [0, 2]] == 0).all()
    assert (x.variance[:, 1] > 0).all()


def test_known_tensors_take_the_shape_of_random_ones():
    x, known = random_input(2, 3), torch.arange(6.0)
    assert torch.equal(known.view_as(x), known.view(2, 3))
    assert torch.equal(known[:3].expand_as(x), known[:3].expand(2, 3))
    assert torch.equal(torch.zeros_like(x), torch.zeros(2, 3))
    assert torch.equal(x.new_ones(4), torch.ones(4))
    assert known.float().type_as(x).dtype == torch.float64
    assert (len(x), x.dim(), x.size(1), x.numel(), x.dtype) == (2, 2, 3, 6, torch.float64)


def test_a_conversion_keeps_the_covariance():
    x = random_input(2, 3, full=True)
    found = x.float()
    assert found.loc.dtype == found.variance.dtype == found.covariance.dtype == torch.float32
    torch.testing.assert_close(found.covariance, x.covariance.float())


KEEP = {
    "flatten": lambda x: x.flatten(1),
    "slice": lambda x: x[:, 1:],
    "one column": lambda x: x[:, :1],
    "permutation": lambda x: x.flip(1),
    "chunk": lambda x: x.chunk(2, 1)[0],
    "rows": lambda x: x[torch.tensor([1, 1, 0])],
    "repeated": lambda x: x.repeat(1, 2),
    "scaled": lambda x: x * torch.tensor([1.0, -2.0, 3.0]) + 4,
    "scaled by a number": lambda x: 1 - x / 2,
    "scaled by one column": lambda x: x * torch.tensor([[2.0], [3.0]]),
    "batch norm": lambda x: F.batch_norm(
        x, torch.ones(3), torch.full((3,), 2.0), torch.ones(3) * 3
    ),
}


@pytest.mark.parametrize("name", KEEP)
def test_covariances_between_units_are_kept(name):
    x, function = random_input(2, 3, full=True), KEEP[name]
    found, matrix = function(x), torch.func.jacrev(function)(x.loc)
    for index in range(len(found)):
        own = matrix[index].flatten(1)
        expected = own @ torch.block_diag(*x.covariance) @ own.mT
        torch.testing.assert_close(found.covariance[index], expected)
        torch.testing.assert_close(found.variance[index], expected.diagonal())


@pytest.mark.parametrize("name", ["sum", "mean"])
def test_sums_over_units_count_their_covariance(name):
    x = random_input(2, 3, full=True)
    expected = x.covariance.sum((-2, -1)) / (1 if name == "sum" else 9)
    for dim, keepdim in ((1, False), (-1, True), ((1,), False)):
        found = getattr(x, name)(dim, keepdim)
        torch.testing.assert_close(found.variance.flatten(), expected)
    everything = getattr(x, name)()
    torch.testing.assert_close(everything.variance, expected.sum() / (1 if name == "sum" else 4))
    rows = getattr(x, name)(0)
    expected = x.variance.sum(0) / (1 if name == "sum" else 4)
    torch.testing.assert_close(rows.variance, expected)


# ---- products, and sums of two random terms ------------------------------------------------------

PRODUCTS = {
    "sum": (lambda a, b: a + b, (2, 2), (2, 2)),
    "sum that broadcasts": (lambda a, b: a + b, (2,), (2, 2)),
    "sum with a factor": (lambda a, b: torch.add(a, b, alpha=-2), (2, 2), (2, 2)),
    "difference": (lambda a, b: a - b, (2, 2), (2, 2)),
    "product": (lambda a, b: a * b, (2, 2), (2, 2)),
    "product that broadcasts": (lambda a, b: a * b, (2, 1), (2, 2)),
    "matmul": (lambda a, b: torch.matmul(a, b), (1, 2, 2), (1, 2, 2)),
    "bmm": (torch.bmm, (1, 2, 2), (1, 2, 2)),
    "operator": (lambda a, b: a @ b, (2, 2), (2, 2)),
    "matrix and vector": (lambda a, b: a @ b, (2, 2), (2,)),
    "einsum": (lambda a, b: torch.einsum("bi,io->bo", a, b), (2, 2), (2, 2)),
    "linear": (F.linear, (2, 2), (2, 2)),
    "where": (lambda a, b: torch.where(torch.eye(2) > 0, a, b), (2, 2), (2, 2)),
    "cat": (lambda a, b: torch.cat([a, b]), (2, 2), (1, 2)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_and_sums_of_independent_tensors(name):
    function, *shapes = PRODUCTS[name]
    a, b = (random_input(*shape) for shape in shapes)
    assert_exact(function(a, b), function, part_of(a), part_of(b))


def test_a_sum_of_two_tensors_with_covariances():
    a, b = (random_input(1, 3, full=True) for _ in range(2))
    parts = [(part.loc, part.covariance[0]) for part in (a, b)]
    assert_exact(a + 2 * b, lambda a, b: a + 2 * b, *parts)
    one = random_input(1, 3)
    one = RandomTensor(one.loc, one.variance, Settings(full_covariance=True))
    assert_exact(a - one, lambda a, b: a - b, parts[0], part_of(one))


def test_a_product_with_itself_is_a_square():
    x = random_input(2, 3)
    torch.testing.assert_close((x * x).loc, x.loc.square() + x.variance)
    torch.testing.assert_close((x * x).variance, torch.square(x).variance)


def test_a_sum_with_itself_is_a_double():
    x = random_input(2, 3)
    torch.testing.assert_close((x + x).variance, 4 * x.variance)
    torch.testing.assert_close((x - x).variance, 0 * x.variance)


REFUSED = {
    "division by a random tensor": (lambda x: 1 / x, r"`rdiv`|`reciprocal`"),
    "a random index": (lambda x: x[x], "An index that is random has no moments"),
    "bilinear interpolation": (
        lambda x: F.interpolate(x[None], scale_factor=2, mode="bilinear"),
        r"`interpolate` with `mode='bilinear'` has no moments",
    ),
    "ceil_mode": (lambda x: F.max_pool1d(x, 2, ceil_mode=True), "Max pooling with `ceil_mode`"),
    "dilation": (lambda x: F.max_pool1d(x, 2, dilation=2), "Max pooling with `ceil_mode`"),
    "padding that does not count": (
        lambda x: F.avg_pool2d(x, 2, padding=1, count_include_pad=False),
        "Average pooling with `ceil_mode`",
    ),
    "a function without a rule": (torch.sort, "The function `sort` has no rule for the moments"),
    "an assignment": (lambda x: x.__setitem__(0, 1.0), "The function `setitem` has no rule"),
    "batch statistics": (
        lambda x: F.batch_norm(x, None, None, training=True),
        "Batch normalization by the statistics of a batch has no moments",
    ),
    "attention with dropout": (
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1),
        "Attention with dropout has no moments",
    ),
    "dropout of channels by values": (
        lambda x: F.alpha_dropout(x, 0.5, training=True),
        "Alpha dropout has no moments",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_moments_is_refused(name):
    function, message = REFUSED[name]
    with pytest.raises(NotImplementedError, match=message):
        function(random_input(2, 3, 4))
