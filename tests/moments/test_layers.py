"""Pooling by maxima, normalization, dropout, softmax, attention and recurrent layers."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pyro_structvi as ps
from pyro_structvi.moments import RandomTensor, Settings
from pyro_structvi.moments.layers import maximum_of_two
from pyro_structvi.moments.linear import posteriors_of, random_values
from pyro_structvi.posterior.one_pass import MomentsWarning
from tests.moments.signs import (
    assert_exact,
    assert_moments,
    assert_same,
    assert_tangent,
    known,
    part_of,
    random_input,
)

pytestmark = pytest.mark.filterwarnings(f"ignore::{MomentsWarning.__module__}.MomentsWarning")

# ---- maxima --------------------------------------------------------------------------------------


def integrated_maximum(means, scales):
    """Return the moments of the largest of independent normals, by its density."""
    grid = torch.linspace(-20, 20, 16_001)
    z = (grid - means.unsqueeze(-1)) / scales.unsqueeze(-1)
    density = torch.exp(-0.5 * z.square()) / (scales.unsqueeze(-1) * (2 * torch.pi) ** 0.5)
    below = 0.5 * torch.erfc(-z / 2**0.5)
    others = [
        density[i] * torch.cat([below[:i], below[i + 1 :]]).prod(0) for i in range(len(means))
    ]
    total = torch.stack(others).sum(0)
    loc = torch.trapezoid(grid * total, grid)
    return loc, torch.trapezoid((grid - loc).square() * total, grid)


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 2.0), (0.02, 1.0)])
def test_the_larger_of_two_is_clarks(scales):
    scales = torch.tensor(scales)
    for distance in (0.0, 0.1, -1.0, 3.0, -8.0):
        means = torch.tensor([distance + 0.3, 0.3])
        values = means.requires_grad_(), scales.square().requires_grad_()
        found = maximum_of_two(*zip(*values, strict=True))
        expected = integrated_maximum(means, scales)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
        assert torch.autograd.gradcheck(lambda *v: maximum_of_two(*zip(*v, strict=True)), values)


def test_the_larger_of_two_keeps_small_variances():
    """Far from zero, where squares are 1e12 times the variance, and of two known numbers."""
    for distance in (0.0, 0.5e-4, -2e-4):
        near = [(torch.tensor(distance), torch.tensor(1e-8)), (torch.zeros(()), torch.tensor(4e-8))]
        far = [(mean + 100.0, variance) for mean, variance in near]
        torch.testing.assert_close(
            maximum_of_two(*far)[1], maximum_of_two(*near)[1], rtol=1e-6, atol=0
        )
    for dtype in (torch.float32, torch.float64):
        values = ([1.0, -50.0, 2.0], [2.0, -70.0, 2.0], [0.0] * 3, [0.0] * 3)
        ma, mb, va, vb = (torch.tensor(v, dtype=dtype, requires_grad=True) for v in values)
        loc, variance = maximum_of_two((ma, va), (mb, vb))
        torch.testing.assert_close(loc, torch.maximum(ma, mb))
        assert (variance < 1e-12).all()
        for gradient in torch.autograd.grad((loc + variance).sum(), [ma, mb, va, vb]):
            assert torch.isfinite(gradient).all()


@pytest.mark.parametrize(("size", "bound"), [(2, 1e-7), (3, 0.02), (9, 0.1)])
def test_larger_windows_have_an_error_of_a_few_percent(size, bound):
    """Relative to the standard deviation: equal means and variances, the hardest case; two are exact."""
    x = RandomTensor(torch.zeros(1, 1, size), torch.ones(1, 1, size), Settings())
    found = F.max_pool1d(x, size)
    loc, variance = integrated_maximum(torch.zeros(size), torch.ones(size))
    assert (found.loc.squeeze() - loc).abs() < bound * variance.sqrt()
    assert (found.variance.squeeze().sqrt() - variance.sqrt()).abs() < bound * variance.sqrt()


POOLS = (
    (lambda x: F.max_pool1d(x, 3, stride=2, padding=1), (2, 3, 7)),
    (nn.MaxPool2d(2), (2, 3, 4, 5)),
    (nn.MaxPool2d((3, 2), stride=(1, 2), padding=(1, 0)), (2, 2, 4, 4)),
    (nn.MaxPool3d(2, stride=1), (1, 2, 3, 3, 2)),
)


def test_windows_are_torchs():
    """Without variance a maximum is torch's, and with little it is the largest element's."""
    for function, shape in POOLS:
        loc = torch.randperm(torch.Size(shape).numel()).double().reshape(shape) - 20
        variance, expected = torch.rand(shape) * 1e-6, function(loc)
        index = (loc.flatten(2).unsqueeze(2) == expected.flatten(2).unsqueeze(-1)).int().argmax(-1)
        own = variance.flatten(2).gather(2, index).reshape(expected.shape)
        for size in (0.0, 1.0):
            found = function(RandomTensor(loc, size * variance, Settings()))
            torch.testing.assert_close(found.loc, expected)
            torch.testing.assert_close(found.variance, size * own, atol=1e-12, rtol=1e-6)


# ---- normalization -------------------------------------------------------------------------------


def test_batch_norm_by_running_statistics_is_exact():
    """Also with a random weight, a product of independent factors, and a random shift."""
    norm = nn.BatchNorm1d(2).eval()
    parts = [random_input(*shape) for shape in ((2, 2, 2), (2,), (2,))]
    for tensor in (norm.running_mean, norm.running_var, norm.weight.data, norm.bias.data):
        tensor.copy_(torch.rand(2) + 0.5)
    assert_tangent(norm(parts[0]), norm, parts[0])

    def by_statistics(x, *parameters):
        return F.batch_norm(x, norm.running_mean, norm.running_var, *parameters)

    assert_exact(by_statistics(*parts), by_statistics, *map(part_of, parts))


# Each with the shape of its input, and the groups of elements that are normalized together.
NORMS = {
    "layer": (nn.LayerNorm(5), (2, 3, 5), 1),
    "layer over two dimensions": (nn.LayerNorm((3, 5)), (2, 3, 5), 1),
    "group": (nn.GroupNorm(2, 4), (3, 4, 5), 2),
    "rms": (nn.RMSNorm(5), (2, 3, 5), 1),
    "layer, full": (nn.LayerNorm(6), (3, 6), 1),
    "group, full": (nn.GroupNorm(2, 6), (3, 6), 2),
    "rms, full": (nn.RMSNorm(6), (3, 6), 1),
}


@pytest.mark.parametrize("name", NORMS)
def test_normalizations_divide_by_the_expected_square_about_the_mean(name):
    """By definition, with the matrix of the tangent; without variance it is torch's."""
    norm, shape, groups = NORMS[name]
    norm, x = norm.double(), random_input(*shape, full="full" in name)
    for part in norm.parameters():
        part.data.copy_(torch.rand(part.shape) + 0.5)
    size = torch.Size(shape[1:] if isinstance(norm, nn.GroupNorm) else norm.weight.shape).numel()
    average = torch.block_diag(*torch.ones(groups, size // groups, size // groups)) * groups / size
    matrix = torch.eye(size) - (0 if "rms" in name else average)
    (loc, covariance), found = part_of(x), norm(x)
    rows = [slice(start, start + size) for start in range(0, loc.numel(), size)]
    covariance = matrix @ torch.stack([covariance[row, row] for row in rows]) @ matrix.mT
    loc = loc.reshape(-1, size) @ matrix
    squares = loc.square() + covariance.diagonal(dim1=-2, dim2=-1)
    weight = norm.weight.flatten().repeat_interleave(size // norm.weight.numel())
    root = (squares @ average + (norm.eps or 1e-16)).rsqrt()
    z, scale = loc * root, weight * root
    # The scale of a group moves with its elements along z.
    within = torch.eye(size) - average * z.unsqueeze(-1) * z.unsqueeze(-2)
    within = scale.unsqueeze(-1) * within
    expected = within @ covariance @ within.mT
    shift = norm(torch.zeros(shape))
    assert (found.covariance is not None) == ("full" in name)
    assert_moments(found, (loc * scale).reshape(shape) + shift, torch.block_diag(*expected))
    without = norm(known(x.loc))
    torch.testing.assert_close(without.loc, norm(x.loc))
    assert (without.variance == 0).all()


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d, partial(nn.GroupNorm, 2)]
)
def test_a_known_input_is_normalized_by_torch_before_a_random_scale_and_shift(norm):
    """As in a net that begins with such a layer."""
    norm, x, scale, shift = norm(4).eval(), torch.randn(3, 4), random_input(4), random_input(4)
    z = norm(x)  # with a scale of one, and no shift
    shift = None if isinstance(norm, nn.RMSNorm) else shift
    parts = {"weight": scale} if shift is None else {"weight": scale, "bias": shift}
    found = torch.func.functional_call(norm, parts, (x,))
    loc, variance = z * scale.loc, z.square() * scale.variance
    if shift is not None:
        loc, variance = loc + shift.loc, variance + shift.variance
    torch.testing.assert_close(found.loc, loc)
    torch.testing.assert_close(found.variance, variance)
    if shift is not None:  # alone
        found = torch.func.functional_call(norm, {"weight": scale.loc, "bias": shift}, (x,))
        torch.testing.assert_close(found.loc, loc)
        torch.testing.assert_close(found.variance, shift.variance.expand(3, 4))


# ---- dropout and softmax -------------------------------------------------------------------------


@pytest.mark.parametrize("function", [F.dropout, F.dropout2d], ids=["elements", "channels"])
def test_dropout_in_training_has_the_moments_over_what_is_dropped(function):
    """``x b / (1 - p)`` for an independent b of zero or one."""
    x, p = random_input(2, 3, 2, 2), 0.3
    found = function(x, p, training=True)
    square = (x.loc.square() + x.variance) / (1 - p)
    torch.testing.assert_close(found.loc, x.loc)
    torch.testing.assert_close(found.variance, square - x.loc.square())
    module = nn.Dropout(p, inplace=True)
    assert module(x) is x
    torch.testing.assert_close(x.variance, found.variance)
    none = function(x, 1.0, training=True)
    assert not none.loc.any()
    assert not none.variance.any()


@pytest.mark.parametrize("function", [F.softmax, F.log_softmax], ids=["softmax", "logarithm"])
@pytest.mark.parametrize("full", [False, True], ids=["diagonal", "full"])
def test_the_softmax_is_that_of_the_means_with_the_moments_of_its_tangent(function, full):
    x = random_input(2, 4, full=full)
    found = function(x, dim=-1)
    assert (found.covariance is not None) == full
    assert_tangent(found, lambda value: function(value, dim=-1), x)
    torch.testing.assert_close(x.softmax(-1).loc, torch.softmax(x, -1).loc)
    torch.testing.assert_close(nn.Softmax(1)(x).loc, x.loc.softmax(1))


# ---- attention -----------------------------------------------------------------------------------


def composed(q, k, v, mask=None, scale=None):
    """Return attention by its parts, each of which has a rule."""
    scores = torch.matmul(q * (q.shape[-1] ** -0.5 if scale is None else scale), k.mT)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.matmul(F.softmax(scores, -1), v)


def test_attention_is_the_composition_of_its_parts():
    q, k, v = (random_input(2, 3, 5, 4) for _ in range(3))
    assert_same(F.scaled_dot_product_attention(q, k, v), composed(q, k, v))
    assert_same(F.scaled_dot_product_attention(q, k, v, scale=0.3), composed(q, k, v, scale=0.3))
    shared = [each[..., :1, :, :] for each in (k, v)]
    repeated = [each.repeat_interleave(q.shape[-3], -3) for each in shared]
    assert_same(F.scaled_dot_product_attention(q, *shared, enable_gqa=True), composed(q, *repeated))
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert_same(found, composed(q, k, v, causal))
    padding = torch.tensor([True, True, False, True, False])
    assert_same(F.scaled_dot_product_attention(q, k, v, padding), composed(q, k, v, padding))
    added = torch.zeros(5, 5).masked_fill(~causal, -torch.inf)
    assert_same(F.scaled_dot_product_attention(q, k, v, added), composed(q, k, v, causal))
    with pytest.raises(ValueError, match="`attn_mask` must be None if `is_causal=True`"):
        F.scaled_dot_product_attention(q, k, v, padding, is_causal=True)


@pytest.mark.parametrize("need_weights", [True, False])
def test_multi_head_attention_is_the_composition_of_its_parts(need_weights):
    layer = nn.MultiheadAttention(6, 2, batch_first=True).eval()
    x = random_input(3, 4, 6)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    found, weights = layer(x, x, x, need_weights=need_weights, attn_mask=~mask)
    q, k, v = (
        part.unflatten(-1, (2, 3)).transpose(1, 2)
        for part in F.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
    )
    mixed = composed(q, k, v, mask).transpose(1, 2).flatten(2)
    assert_same(found, layer.out_proj(mixed))
    assert (weights is not None) == need_weights
    point = known(x.loc)
    found = layer(point, point, point, attn_mask=~mask)[0]
    torch.testing.assert_close(found.loc, layer(x.loc, x.loc, x.loc, attn_mask=~mask)[0])
    assert (found.variance < 1e-12).all()


CAUSAL = torch.ones(5, 5, dtype=torch.bool).tril()
NONE_FOR_SECOND = CAUSAL & (torch.arange(5) != 1).unsqueeze(-1)
AVERAGES = {
    "function": F.scaled_dot_product_attention,
    "causal": lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "four dimensions": composed,
    "three dimensions": lambda *parts: composed(*(x.flatten(0, -3) for x in parts)).view(
        2, 2, 5, 4
    ),
    "converted": lambda q, k, v, mask: (
        (q @ k.mT * 0.5).masked_fill(~mask, -torch.inf).float().softmax(-1).to(v) @ v
    ),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_attention_has_the_variance_of_its_tangent_in_keys_and_values(name):
    """Weights sum to one, so that a shift of all values has no variance."""
    q, k, v = (torch.randn(2, 2, 5, 4) for _ in range(3))
    v, sizes = v + 10, [1e-10 * (1 + torch.rand(k.shape)) for _ in range(2)]
    random = (RandomTensor(*pair, Settings()) for pair in zip((k, v), sizes, strict=True))
    mask = CAUSAL.expand(2, 2, 5, 5)
    found = AVERAGES[name](q, *random, mask)
    matrices = torch.func.jacrev(composed, (1, 2))(q, k, v, CAUSAL)
    pairs = zip(matrices, sizes, strict=True)
    expected = sum(each.flatten(4).square() @ size.flatten() for each, size in pairs)
    rounding = 1e-6 if name == "converted" else 1e-12
    torch.testing.assert_close(found.loc, composed(q, k, v, CAUSAL), rtol=rounding, atol=0)
    torch.testing.assert_close(found.variance, expected, rtol=max(rounding, 1e-6), atol=0)


def test_a_query_without_keys_has_the_output_zero_as_torchs():
    q, k, v = (torch.randn(2, 3, 5, 4).requires_grad_() for _ in range(3))
    added = torch.zeros(5, 5).masked_fill(~NONE_FOR_SECOND, -torch.inf)
    for mask in (NONE_FOR_SECOND, added):
        random = (RandomTensor(each, 0.1 + 0 * each, Settings()) for each in (q, k, v))
        found = F.scaled_dot_product_attention(*random, mask)
        torch.testing.assert_close(found.loc, F.scaled_dot_product_attention(q, k, v, mask))
        assert (found.variance[..., 1, :] == 0).all()
        assert found.variance[..., 0, :].min() > 0
        for gradient in torch.autograd.grad((found.loc + found.variance).sum(), [q, k, v]):
            assert torch.isfinite(gradient).all()


def test_dropout_of_attention_is_that_of_its_weights():
    q, k, v = (random_input(2, 3, 5, 4) for _ in range(3))
    weights = (q * 0.5 @ k.mT).softmax(-1)
    expected = F.dropout(weights, 0.3) @ v
    assert_same(F.scaled_dot_product_attention(q, k, v, dropout_p=0.3), expected)
    assert expected.variance.min() > (weights @ v).variance.min()


# ---- recurrent layers ----------------------------------------------------------------------------


STEPS = 4
RECURRENT = {
    "RNN": {},
    "RNN, relu": {"nonlinearity": "relu"},
    "LSTM": {},
    "GRU": {},
    "LSTM, all options": {
        "num_layers": 2,
        "bidirectional": True,
        "proj_size": 2,
        "batch_first": True,
    },
    "GRU, all options": {"num_layers": 2, "bidirectional": True, "bias": False},
}


def recurrent(name):
    kind = name.partition(",")[0]
    return getattr(nn, kind)(3, 4, **RECURRENT[name])


@pytest.mark.parametrize("name", RECURRENT)
def test_without_variance_outputs_and_states_are_torchs(name):
    """All that a layer returns, of inputs in a batch and of one sequence."""
    layer = recurrent(name)
    ways = 1 + layer.bidirectional
    shape = (layer.num_layers * ways, 2)
    hx = torch.randn(*shape, layer.proj_size or 4)
    hx = (hx, torch.randn(*shape, 4)) if isinstance(layer, nn.LSTM) else hx
    x = torch.randn(2, STEPS, 3) if layer.batch_first else torch.randn(STEPS, 2, 3)
    for states in ((), (hx,)):
        torch.testing.assert_close(locs(layer(known(x), *states)), locs(layer(x, *states)))
    one = x.select(0 if layer.batch_first else 1, 0)
    torch.testing.assert_close(locs(layer(known(one))), locs(layer(one)))
    cell = getattr(nn, f"{type(layer).__name__}Cell")(3, 4, bias="options" not in name)
    torch.testing.assert_close(locs(cell(known(one))), locs(cell(one)))


def locs(values):
    if isinstance(values, tuple):
        return tuple(locs(value) for value in values)
    return values.loc if isinstance(values, RandomTensor) else values


def by_hand(kind, x, weight, own, bias, own_bias):
    h = c = torch.zeros(len(x), 4)
    for step in x.unbind(1):
        a, b = F.linear(step, weight, bias), F.linear(h, own, own_bias)
        if kind == "RNN":
            h = torch.tanh(a + b)
        elif kind == "LSTM":
            i, f, g, o = (a + b).split(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        else:
            (ar, az, an), (br, bz, bn) = a.split(4, -1), b.split(4, -1)
            n = torch.tanh(an + torch.sigmoid(ar + br) * bn)
            h = torch.lerp(n, h, torch.sigmoid(az + bz))
    return h


class Last(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = getattr(nn, kind)(3, 4, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0][:, -1]


@pytest.mark.parametrize(
    ("kind", "join_bias"), [("RNN", False), ("LSTM", True), ("GRU", False), ("GRU", True)]
)
def test_a_layer_has_the_moments_of_its_equations(kind, join_bias):
    """Also where a weight and its bias have a joint posterior."""
    x, model = torch.randn(2, STEPS, 3), ps.Regressor(ps.bayesianize(Last(kind), prior=1.0), 2, 0.1)
    guide = ps.MatrixNormalGuide(model, join_bias=join_bias)
    guide.initialize(x, torch.zeros(2, 4))
    for value in guide.parameters():
        value.data = 0.3 * torch.randn_like(value)
    values = random_values(posteriors_of(guide.joint_posterior()), Settings())
    names = [f"net.layer.{name}_l0" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    expected = by_hand(kind, x, *(values[name] for name in names))
    assert expected.variance.min() > 1e-3
    found = ps.predict_moments(model, guide, x)
    torch.testing.assert_close(found.mean, expected.loc, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.function_variance, expected.variance, rtol=1e-10, atol=1e-12)


def test_a_cell_under_autocast_takes_a_state_in_single_precision():
    cell, x = nn.GRUCell(3, 4).float(), torch.randn(2, 3, dtype=torch.float32)
    h = torch.randn(2, 4, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = cell(known(x), h)
    torch.testing.assert_close(found.loc, cell(x, h), rtol=0.05, atol=0.05, check_dtype=False)


def test_an_interpolation_of_independent_normals_is_exact():
    """A polynomial of degree one in each argument."""
    parts = [random_input(2) for _ in range(3)]
    for known_ones in [(), (0,), (1,), (2,), (0, 1), (1, 2), (0, 2)]:
        given = [part.loc if k in known_ones else part for k, part in enumerate(parts)]
        exact = [
            (part.loc, torch.zeros(2, 2)) if k in known_ones else part_of(part)
            for k, part in enumerate(parts)
        ]
        assert_exact(torch.lerp(*given), torch.lerp, *exact)


def test_dropout_between_layers_is_that_of_a_dense_net():
    """In training, between two layers and not after the last."""
    layer, x = nn.RNN(3, 4, num_layers=2, dropout=0.5), torch.randn(STEPS, 2, 3)
    parts = nn.RNN(3, 4), nn.RNN(4, 4)
    for number, part in enumerate(parts):
        own = {name: getattr(layer, f"{name[:-1]}{number}") for name, _ in part.named_parameters()}
        part.load_state_dict(own)
    expected, _ = parts[1](F.dropout(parts[0](known(x))[0], 0.5, True))
    output, _ = layer(known(x))
    assert_same(output, expected)
    assert expected.variance.min() > 0


class Packed(Last):
    def forward(self, x):
        lengths = torch.full((len(x),), x.shape[1])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return self.layer(packed)[1][0]


@pytest.mark.filterwarnings("default")
def test_uses_at_each_step_are_told_of_and_packed_sequences_refused():
    x = torch.randn(2, STEPS, 3)
    model = ps.Regressor(ps.bayesianize(Packed("LSTM"), prior=1.0), 2, 0.1)
    message = r"A packed sequence has no moments.*net\.layer"
    with pytest.raises(NotImplementedError, match=message):
        ps.predict_moments(model, ps.MeanFieldGuide(model), x)
    model = ps.Regressor(ps.bayesianize(Last("GRU"), prior=1.0), 2, 0.1)
    with pytest.warns(MomentsWarning, match=r"net\.layer\.weight_hh_l0.*as recurrent layers do"):
        ps.predict_moments(model, ps.MeanFieldGuide(model), x)


def test_the_variance_of_a_sharp_average_does_not_cancel_in_single_precision():
    """By the differences between all pairs of values, of which the average of one is its distance."""
    scores, spread = (10 * torch.randn(2, 5, 6)).float(), (100 * torch.rand(2, 5, 6)).float()
    values = (torch.randn(2, 6, 4) + 100).float()
    found = RandomTensor(scores, spread, Settings()).softmax(-1) @ values
    weights = scores.double().softmax(-1)
    pairs = values.double().unsqueeze(1) - values.double().unsqueeze(2)
    distances = torch.einsum("bqi,bijd->bqjd", weights, pairs)
    expected = torch.einsum("bqj,bqjd->bqd", weights.square() * spread, distances.square())
    torch.testing.assert_close(found.variance, expected.float(), rtol=1e-4, atol=0)
