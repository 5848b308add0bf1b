"""Functions that move, sum or scale elements: exact, by their matrix, for independent elements."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyro_structvi.distributions import MeanFieldNormal
from pyro_structvi.moments import RandomTensor, Settings
from pyro_structvi.moments.linear import RandomWeight
from tests.moments.signs import assert_exact, assert_tangent, part_of, random_input

MASK = torch.tensor([True, False, True, False])
OTHER = torch.arange(24.0).reshape(2, 3, 4)

# Functions of (2, 3, 4), affine in its elements, to a tensor or several.
MOVES = {
    "shapes": (
        lambda x: x.reshape(2, 12),
        lambda x: x.view(-1, 4),
        lambda x: x.view_as(torch.zeros(6, 4)),
        lambda x: torch.flatten(x, 1),
        nn.Flatten(),
        nn.Unflatten(-1, (2, 2)),
        lambda x: x[:, :1].squeeze(1),
        lambda x: x.unsqueeze(1).expand(2, 5, 3, 4),
        lambda x: x.permute(1, 0, 2).contiguous().view(3, 8),
        lambda x: x.to(torch.float64).clone(),
        nn.Identity(),
    ),
    "orders": (
        lambda x: x.permute(2, 0, 1),
        lambda x: x.transpose(1, 2),
        lambda x: x.mT,
        lambda x: x[0].T,
        lambda x: torch.movedim(x, 0, -1),
        lambda x: x.roll(1, -1),
        lambda x: x.flip(1),
        lambda x: F.pixel_shuffle(x.reshape(1, 4, 2, 3), 2),
    ),
    "parts": (
        lambda x: x[:, 1, ::2],
        lambda x: x[..., MASK],
        lambda x: x[..., None, :2],
        lambda x: x.index_select(1, torch.tensor([2, 0])),
        lambda x: x.gather(1, torch.zeros(2, 1, 4, dtype=torch.long)),
        lambda x: x.narrow(2, 1, 2),
        lambda x: x.select(1, 2),
        lambda x: x.chunk(2, -1),
        lambda x: x.split([1, 2], 1),
        lambda x: x.unbind(1),
        lambda x: torch.tensor_split(x, 2, -1),
        lambda x: [*x],
    ),
    "copies and joins": (
        lambda x: x.repeat(1, 2, 1),
        lambda x: x.repeat_interleave(2, 1),
        lambda x: torch.cat([x[:, :1], x[:, 1:] * 2], 1),
        lambda x: torch.cat([x, OTHER], dim=-1),
        lambda x: torch.stack([x, OTHER, x], 1),
        lambda x: torch.where(MASK, x, OTHER),
        lambda x: x.where(MASK, OTHER),
        lambda x: torch.where(MASK, 0.0, x),
        lambda x: x.masked_fill(MASK, 2.0),
        lambda x: F.pad(x, (1, 2), value=3.0),
        lambda x: F.pad(x, (1, 2), mode="reflect"),
        nn.ZeroPad2d(1),
        lambda x: F.interpolate(x, scale_factor=2),
        nn.Upsample(scale_factor=2, mode="nearest"),
    ),
    "sums": (
        lambda x: x + OTHER,
        lambda x: 1 + x,
        lambda x: torch.add(x, OTHER, alpha=2),
        lambda x: x - OTHER[0],
        lambda x: 1.0 - x,
        lambda x: torch.sub(OTHER[:, :1], x[:, :1], alpha=3),
        lambda x: x.sum(),
        lambda x: x.sum(1, keepdim=True),
        lambda x: torch.sum(x, dim=(0, -1)),
        lambda x: x.mean(),
        lambda x: x.mean(-1),
        lambda x: torch.mean(x, (1, 2), keepdim=True),
    ),
    "products": (
        lambda x: -x,
        lambda x: x * OTHER,
        lambda x: 3 * x,
        lambda x: x[:, :1] * torch.ones(3, 1),
        lambda x: x / (1 + OTHER),
        lambda x: torch.div(x, 3),
        lambda x: torch.matmul(torch.arange(15.0).reshape(5, 3), x),
    ),
    "averages": (
        lambda x: F.avg_pool1d(x, 2, stride=1),
        lambda x: F.avg_pool2d(x, 2, padding=1),
        lambda x: F.avg_pool3d(x.reshape(1, 1, 2, 3, 4), (2, 1, 2)),
        lambda x: F.adaptive_avg_pool1d(x, 3),
        lambda x: F.adaptive_avg_pool1d(x.reshape(2, 1, 12), 5),  # uneven windows
        nn.AdaptiveAvgPool2d((2, 3)),
        nn.AdaptiveAvgPool2d((None, 3)),
        nn.AdaptiveAvgPool2d(1),
    ),
    "no dropout": (
        lambda x: F.dropout(x, 0.5, training=False),
        lambda x: nn.Dropout2d().eval()(x[None]),
        nn.AlphaDropout().eval(),
        nn.Dropout(0.0),
    ),
}


def as_tuple(found):
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


@pytest.mark.parametrize("kind", MOVES)
def test_means_and_variances_move_alike(kind):
    x = random_input(2, 3, 4)
    for function in MOVES[kind]:
        for number, found in enumerate(as_tuple(function(x))):
            assert type(found) is RandomTensor
            assert_tangent(found, lambda v, n=number, run=function: as_tuple(run(v))[n], x)


def test_known_tensors_take_the_shape_of_random_ones():
    x, known = random_input(2, 3), torch.arange(6.0)
    assert torch.equal(known.view_as(x), known.view(2, 3))
    assert torch.equal(known[:3].expand_as(x), known[:3].expand(2, 3))
    assert torch.equal(torch.zeros_like(x), torch.zeros(2, 3))
    assert torch.equal(x.new_ones(4), torch.ones(4))
    assert known.float().type_as(x).dtype == torch.float64
    assert (len(x), x.dim(), x.size(1), x.numel(), x.dtype) == (2, 2, 3, 6, torch.float64)


KEEP = (
    lambda x: x.flatten(1),
    lambda x: x[:, 1:],
    lambda x: x.flip(1),
    lambda x: x.chunk(2, 1)[0],
    lambda x: x[torch.tensor([1, 1, 0])],
    lambda x: x.repeat(1, 2),
    lambda x: x * torch.tensor([1.0, -2.0, 3.0]) + 4,
    lambda x: 1 - x / 2,
    lambda x: x * torch.tensor([[2.0], [3.0]]),
    lambda x: F.batch_norm(x, torch.ones(3), torch.full((3,), 2.0), torch.ones(3) * 3),
    lambda x: torch.cat([torch.arange(4.0).reshape(2, 2), x], 1),
    lambda x: torch.cat([x, x, torch.ones(2, 1)], 1),
    lambda x: torch.cat([x, torch.ones(2, 3)]),
    lambda x: F.pad(x, (1, 2), value=3.0),
    lambda x: torch.where(MASK[:3], x, OTHER[0, 0, :3]),
    lambda x: x.masked_fill(torch.tensor([[True], [False]]), 2.0),
    lambda x: torch.lerp(x, torch.ones(2, 3), 0.3),
    lambda x: F.avg_pool1d(x, 2, stride=1, padding=1),
    lambda x: F.adaptive_avg_pool1d(x, 2),
    lambda x: x.mean(1, keepdim=True).expand(2, 3),
    lambda x: x[:, 0].unsqueeze(-1) * torch.arange(3.0),
)


def test_covariances_between_units_are_kept():
    x = random_input(2, 3, full=True)
    for function in KEEP:
        found = function(x)
        assert found.covariance is not None
        assert_tangent(found, function, x)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 3)])
def test_one_number_for_all_units_makes_them_dependent(shape):
    """As a scalar that scales a layer."""
    x, loc, scale = random_input(1, 3, full=True), torch.randn(shape), torch.rand(shape)
    own = loc, torch.diag(scale.square().flatten())
    for function in (torch.add, torch.mul):
        for a in (
            RandomTensor(loc, scale.square(), x.settings),
            RandomWeight(MeanFieldNormal(loc, scale), x.settings),
        ):
            found = function(x, a)
            assert found.covariance is not None
            assert_exact(found, function, part_of(x), own)


def test_tensors_that_are_joined_are_independent_of_each_other():
    a, b = (random_input(1, 3, full=True) for _ in range(2))
    one = random_input(1, 2)
    one.settings = Settings(full_covariance=True)
    for function in (
        lambda a, b, one: torch.cat([a, one, b, a], 1),
        lambda a, b, one: torch.cat([a, b]),
        lambda a, b, one: torch.where(MASK[:3], a, b),
    ):
        found = function(a, b, one)
        assert found.covariance is not None
        assert_exact(found, function, *map(part_of, (a, b, one)))


def test_covariances_are_dropped_where_rows_are_mixed():
    x = random_input(2, 3, full=True)
    for mixed in (x.T, x.reshape(3, 2), torch.stack([x, x]), F.pad(x, (0, 0, 1, 0))):
        assert mixed.covariance is None
    found = x.float()
    assert found.loc.dtype == found.variance.dtype == found.covariance.dtype == torch.float32
    torch.testing.assert_close(found.covariance, x.covariance.float())


SUMS = (
    *(lambda x: x.sum(1), lambda x: x.sum(-1, True), lambda x: x.sum((1,)), lambda x: x.sum()),
    *(lambda x: x.mean(1), lambda x: x.mean(-1, True), lambda x: x.mean((1,)), lambda x: x.mean()),
    *(lambda x: x.sum(0), lambda x: x.mean(0)),
)


def test_sums_over_units_count_their_covariance():
    x = random_input(2, 3, full=True)
    for function in SUMS:
        assert_tangent(function(x), function, x)


# ---- products, and sums of two random terms ------------------------------------------------------

PRODUCTS = (
    (lambda a, b: a + b, (2, 2), (2, 2)),
    (lambda a, b: a + b, (2,), (2, 2)),
    (lambda a, b: torch.add(a, b, alpha=-2), (2, 2), (2, 2)),
    (lambda a, b: a - b, (2, 2), (2, 2)),
    (lambda a, b: a * b, (2, 2), (2, 2)),
    (lambda a, b: a * b, (2, 1), (2, 2)),
    (lambda a, b: torch.matmul(a, b), (1, 2, 2), (1, 2, 2)),
    (torch.bmm, (1, 2, 2), (1, 2, 2)),
    (lambda a, b: a @ b, (2, 2), (2,)),
    (lambda a, b: torch.einsum("bi,io->bo", a, b), (2, 2), (2, 2)),
    (F.linear, (2, 2), (2, 2)),
    (lambda a, b: torch.where(torch.eye(2) > 0, a, b), (2, 2), (2, 2)),
    (lambda a, b: torch.cat([a, b]), (2, 2), (1, 2)),
)


def test_products_and_sums_of_independent_tensors():
    for function, *shapes in PRODUCTS:
        a, b = (random_input(*shape) for shape in shapes)
        assert_exact(function(a, b), function, part_of(a), part_of(b))
    a, b = (random_input(1, 3, full=True) for _ in range(2))
    assert_exact(a + 2 * b, lambda a, b: a + 2 * b, part_of(a), part_of(b))
    for shapes in (((2, 3), (2, 3)), ((1, 3), (3,)), ((2, 3), (2, 1))):
        factors = [random_input(*shape, full=True) for shape in shapes]
        found = torch.mul(*factors)
        assert found.covariance is not None
        assert_exact(found, torch.mul, *map(part_of, factors))
    one = random_input(1, 3)
    one.settings = Settings(full_covariance=True)
    assert_exact(a - one, lambda a, b: a - b, part_of(a), part_of(one))


def test_a_tensor_and_itself_are_no_independent_terms():
    x = random_input(2, 3)
    torch.testing.assert_close((x * x).loc, x.loc.square() + x.variance)
    torch.testing.assert_close((x * x).variance, torch.square(x).variance)
    torch.testing.assert_close((x + x).variance, 4 * x.variance)
    torch.testing.assert_close((x - x).variance, 0 * x.variance)


REFUSED = (
    (lambda x: 1 / x, r"`rdiv`|`reciprocal`"),
    (lambda x: x[x], "An index that is random has no moments"),
    (
        lambda x: F.interpolate(x[None], scale_factor=2, mode="bilinear"),
        r"`interpolate` with `mode='bilinear'` has no moments",
    ),
    (lambda x: F.max_pool1d(x, 2, ceil_mode=True), "Max pooling with `ceil_mode`"),
    (lambda x: F.max_pool1d(x, 2, dilation=2), "Max pooling with `ceil_mode`"),
    (
        lambda x: F.avg_pool2d(x, 2, padding=1, count_include_pad=False),
        "Average pooling with `ceil_mode`",
    ),
    (
        lambda x: F.bilinear(x, torch.ones(2, 3, 2), torch.ones(5, 4, 2)),
        "A bilinear layer of a random input has no moments",
    ),
    (torch.sort, "The function `sort` has no rule for the moments"),
    (lambda x: x.__setitem__(0, 1.0), "The function `setitem` has no rule"),
    (
        lambda x: F.batch_norm(x, None, None, training=True),
        "Batch normalization by the statistics of a batch has no moments",
    ),
    (lambda x: F.alpha_dropout(x, 0.5, training=True), "Alpha dropout has no moments"),
)


def test_other_functions_and_options_are_refused():
    for function, message in REFUSED:
        with pytest.raises(NotImplementedError, match=message):
            function(random_input(2, 3, 4))
