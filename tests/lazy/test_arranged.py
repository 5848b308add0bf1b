"""Weights whose dimensions a call takes in another order: outputs are drawn with the exact moments."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.functional import jacobian as jacobian_of

import pyro_structvi as ps
from pyro_structvi.distributions import MeanFieldNormal, RowwiseNormal
from pyro_structvi.structures.mean_field import LogScaleNormal
from pyro_structvi.weights.lazy import DelayDraws, LazyWeight
from tests.distributions.cases import make_low_rank, make_matrix_normal
from tests.lazy_weights import k_tied_normal, lazy
from tests.unit_noise import assert_close, unit_draws

ROWS, IN, OUT, STACK = 5, 3, 4, 2


def mean_field(*shape):
    return MeanFieldNormal(torch.randn(shape), torch.rand(shape) + 0.1)


TRANSPOSABLE = {
    "mean field": mean_field,
    "log scale": lambda *shape: LogScaleNormal(torch.randn(shape), torch.randn(shape)),
    "k-tied": lambda *shape: k_tied_normal(shape),
    "low rank": lambda *shape: make_low_rank(2)((), shape, torch.float64),
    "isotropic low rank": lambda *shape: make_low_rank(2, True)((), shape, torch.float64),
    "matrix normal": lambda *shape: make_matrix_normal((), shape, torch.float64),
}
INDEPENDENT = ("mean field", "log scale", "k-tied")

# Calls with inputs (rows, in) and a weight (in, out).
TRANSPOSED = {
    "matmul": lambda x, w: torch.matmul(x, w),
    "@": lambda x, w: x @ w,
    "mm": lambda x, w: x.mm(w),
    "mm by name": lambda x, w: torch.mm(x, mat2=w),
    "addmm": lambda x, w: torch.addmm(torch.ones(OUT), x, w),
    "linear of w.t()": lambda x, w: F.linear(x, w.t()),
    "linear of w.T": lambda x, w: F.linear(x, w.T),
    "linear of a transpose": lambda x, w: F.linear(x, w.transpose(-1, 0)),
    "linear of a permutation": lambda x, w: F.linear(x, torch.permute(w, dims=(1, 0))),
    "turned three times": lambda x, w: x @ w.mT.mT.t().T,
    "einsum": lambda x, w: torch.einsum("bi,io->bo", x, w),
    "einsum of a list": lambda x, w: torch.einsum("bi,io->bo", [x, w]),
    "einsum of a transpose": lambda x, w: torch.einsum("bi, oi -> bo", x, w.mT),
}

# Calls that need independent elements: the sizes of inputs and weight by letter, and the call.
SIZES = {"r": ROWS, "i": IN, "o": OUT, "s": STACK, "b": STACK + ROWS}
OTHERS = {
    "bmm": ("sri", "sio", torch.bmm),
    "a batched matmul": ("sri", "soi", lambda x, w: x @ w.mT),
    "baddbmm": ("sri", "sio", lambda x, w: torch.baddbmm(torch.ones(STACK, 1, OUT), x, w)),
    "einsum of heads": ("ri", "soi", lambda x, w: torch.einsum("ni,hoi->nho", x, w)),
    "einsum that sums two": ("rsi", "sio", lambda x, w: torch.einsum("nhi,hio->on", x, w)),
    "einsum of a stack": ("rsi", "iso", lambda x, w: torch.einsum("nei,ieo->eno", x, w)),
    "bilinear": ("ri", "oii", lambda x, w: F.bilinear(x, 2 * x, w, torch.ones(OUT))),
    "experts by index": (
        *("sri", "soi"),
        lambda x, w: torch.stack([F.linear(x[0], w[0]), F.linear(x[1], w[torch.tensor(-1)])]),
    ),
    "grouped_mm": (
        *("bi", "sio"),
        lambda x, w: F.grouped_mm(x, w, offs=torch.tensor([STACK, STACK + ROWS]).int()),
    ),
}
TRANSPOSED_CONVOLUTIONS = {
    1: (F.conv_transpose1d, {"stride": 2, "padding": 1, "output_padding": 1}),
    2: (F.conv_transpose2d, {"stride": (2, 1), "dilation": (1, 2)}),
    3: (F.conv_transpose3d, {}),
}


OTHER_CALLS = [
    lambda w: torch.addmm(torch.ones(OUT), torch.ones(ROWS, IN), w, beta=2),
    lambda w: torch.addmm(torch.ones(ROWS, OUT), torch.ones(ROWS, IN), w),
    lambda w: torch.addmm(torch.ones(1), torch.ones(ROWS, IN), w),
    lambda w: w @ torch.ones(OUT, 2),
    lambda w: torch.einsum("ii,io->io", torch.ones(IN, IN), w),
    lambda w: torch.einsum("bi,io->b", torch.ones(ROWS, IN), w),
    lambda w: torch.einsum("...i,io->...o", torch.ones(ROWS, IN), w),
    lambda w: w.transpose(0, 1) + 1,
    lambda w: w[0] * 2,
]


def covariance_of_outputs(function, x, q):
    jacobian = jacobian_of(lambda w: function(x, w).flatten(), q.mean.detach()).flatten(1)
    return jacobian @ q.covariance_matrix @ jacobian.mT


@pytest.mark.parametrize(
    ("call", "structure"),
    [*((call, "low rank") for call in TRANSPOSED), *(("@", name) for name in TRANSPOSABLE)],
)
def test_a_transposed_weight_draws_the_outputs_of_each_row(call, structure):
    x, function, q = torch.randn(ROWS, IN), TRANSPOSED[call], TRANSPOSABLE[structure](IN, OUT)
    found = unit_draws(lambda: function(x, lazy(q)))
    assert_close(found.mean, function(x, q.mean))
    same_row = torch.block_diag(*torch.ones(ROWS, OUT, OUT))
    assert_close(found.covariance, covariance_of_outputs(function, x, q) * same_row)


def test_an_inner_product_with_a_weight_is_one_output():
    x, q = torch.randn(IN, OUT), TRANSPOSABLE["mean field"](IN, OUT)
    found = unit_draws(lambda: torch.einsum("io,io->", x, lazy(q)))
    assert_close(found.mean, (x * q.mean).sum())
    assert_close(found.covariance.squeeze(), (x.square() * q.variance).sum())


def in_two_products(x, w):
    """Return what ``grouped_mm`` does, which torch has in single precision only."""
    return torch.cat([x[:STACK] @ w[0], x[STACK:] @ w[1]])


def test_a_grouped_product_is_that_of_torch():
    x, w = torch.randn(STACK + ROWS, 4).float(), torch.randn(STACK, 4, 8).float()
    _, _, function = OTHERS["grouped_mm"]
    torch.testing.assert_close(function(x, w), in_two_products(x, w))


@pytest.mark.parametrize(
    ("call", "structure"),
    [
        *((call, "k-tied") for call in OTHERS),
        *((call, name) for call in ("bmm", "experts by index") for name in INDEPENDENT[:2]),
    ],
)
def test_outputs_of_other_orders_have_their_moments(call, structure):
    *letters, function = OTHERS[call]
    x_shape, shape = ([SIZES[letter] for letter in each] for each in letters)
    x, q = torch.randn(x_shape), TRANSPOSABLE[structure](*shape)
    reference = in_two_products if function is OTHERS["grouped_mm"][-1] else function
    found = unit_draws(lambda: function(x, lazy(q)))
    assert_close(found.mean, reference(x, q.mean))
    assert_close(found.covariance.diagonal(), covariance_of_outputs(reference, x, q).diagonal())


def test_an_expert_of_a_transposed_stack_draws_the_outputs_of_each_row():
    x, q = torch.randn(ROWS, IN), mean_field(STACK, IN, OUT)

    def function(x, w):
        return F.linear(x, w.mT[1])

    found = unit_draws(lambda: function(x, lazy(q)))
    assert_close(found.mean, function(x, q.mean))
    same_row = torch.block_diag(*torch.ones(ROWS, OUT, OUT))
    assert_close(found.covariance, covariance_of_outputs(function, x, q) * same_row)


@pytest.mark.parametrize(
    ("dim", "structure"),
    [*((dim, "k-tied") for dim in TRANSPOSED_CONVOLUTIONS), (2, "mean field"), (2, "low rank")],
)
def test_a_transposed_convolution_draws_its_outputs(dim, structure):
    function, options = TRANSPOSED_CONVOLUTIONS[dim]
    x = torch.randn(2, IN, *(4, 3, 2)[:dim])
    q = TRANSPOSABLE[structure](IN, OUT, *(3, 2, 2)[:dim])
    bias = torch.randn(OUT)

    def call(x, w):
        return function(x, w, bias, **options)

    found = unit_draws(lambda: call(x, lazy(q)))
    assert_close(found.mean, call(x, q.mean))
    assert_close(found.covariance.diagonal(), covariance_of_outputs(call, x, q).diagonal())


def test_other_calls_draw_the_weight():
    rowwise = RowwiseNormal(torch.randn(IN, OUT), torch.eye(OUT).expand(IN, OUT, OUT))
    grouped = lambda w: F.conv_transpose1d(torch.ones(2, IN, 5), w, groups=IN)  # noqa: E731
    for q, call in (
        *((mean_field(IN, OUT), call) for call in OTHER_CALLS),
        (rowwise, lambda w: torch.ones(ROWS, IN) @ w),
        (mean_field(IN, 1, OUT), grouped),
    ):
        weight = lazy(q)
        value = call(weight)
        assert weight.is_drawn
        torch.testing.assert_close(value, call(weight.draw()))


def test_two_views_of_one_weight_are_one_weight():
    weight = lazy(mean_field(IN, OUT))
    view = weight.t()
    assert (view.shape, view.dtype) == ((OUT, IN), torch.float64)
    assert repr(view).startswith("ArrangedView(LazyWeight")
    assert not weight.is_drawn
    F.linear(torch.ones(2, IN), view)
    with pytest.raises(RuntimeError, match="uses the weight at site 'weight' more often"):
        F.linear(torch.ones(2, IN), view)


def test_an_expert_met_twice_is_refused_and_so_is_the_stack_after_it():
    weight = lazy(mean_field(STACK, OUT, IN))
    x = torch.ones(ROWS, IN)
    F.linear(x, weight[0])
    F.linear(x, weight[1])
    with pytest.raises(RuntimeError, match="more often"):
        F.linear(x, weight[0])
    with pytest.raises(RuntimeError, match="more often"):
        weight.sum()
    weight = lazy(mean_field(STACK, IN, OUT))
    assert weight[0].shape == (IN, OUT)  # this is no use
    torch.bmm(torch.ones(STACK, ROWS, IN), weight)
    with pytest.raises(RuntimeError, match="more often"):
        weight[0]


# ---- counting ------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Each row goes to one of the experts, or to all."""

    def __init__(self, twice=False):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(STACK, IN, OUT))
        self.twice = twice

    def forward(self, x):
        halves = x.chunk(STACK)
        outputs = torch.cat([half @ self.weight[e] for e, half in enumerate(halves)])
        return outputs + (x @ self.weight[0] if self.twice else 0)


@pytest.mark.parametrize(
    ("twice", "local_reparam", "is_lazy"),
    [(False, True, True), (True, True, False), (False, "exact", False)],
)
def test_uses_of_experts_count_apart(twice, local_reparam, is_lazy):
    """Experts have no rows that are examples: nothing to warn of, but "exact" draws them."""
    model = ps.Regressor(ps.bayesianize(Experts(twice), 1.0), num_data=4, noise_scale=1.0)
    guide = ps.MeanFieldGuide(model, local_reparam=local_reparam)
    x, y = torch.randn(4, IN), torch.randn(4, OUT)
    guide.initialize(x, y)
    with DelayDraws():
        assert (type(guide(x, y)["net.weight"]) is LazyWeight) == is_lazy
    ps.StructuredELBO().differentiable_loss(model, guide, x, y).backward()
    assert all(value.grad.isfinite().all() for value in guide.parameters())
