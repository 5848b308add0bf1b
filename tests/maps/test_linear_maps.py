"""Linear maps: how calls are read, what the maps compute, and the laws of images under convolutions."""

import pytest
import torch
import torch.nn.functional as F

from pyro_structvi.distributions import MeanFieldNormal
from pyro_structvi.maps import BiasColumnMap, ConvolutionMap, DenseMap, LinearMap
from pyro_structvi.maps.calls import parse_application
from tests import dense_oracles as dense
from tests.distributions.cases import CASES, CONVOLUTION_CASES
from tests.distributions.subject import arguments, with_arguments

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
KERNELS = {1: (3,), 2: (3, 2), 3: (2, 3, 2)}
SPACES = {1: (9,), 2: (7, 6), 3: (5, 6, 4)}
BATCH, OUT, CHANNELS = 2, 4, 4


# torch says so for kernels of an even length; they are tested because their padding is lopsided.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12, check_stride=False)


# ---- the oracle ----------------------------------------------------------------------------------

GEOMETRIES = {
    "plain": {},
    "stride": {"stride": 2},
    "padding": {"padding": 1},
    "same": {"padding": "same"},
    "valid": {"padding": "valid"},
    "dilation": {"dilation": 2},
    "same, dilated": {"padding": "same", "dilation": 2},
    "all": {"stride": 2, "padding": 2, "dilation": 2},
    "groups": {"groups": 2},
    "depthwise": {"groups": 4},
    "groups and all": {"groups": 2, "stride": 2, "padding": 1, "dilation": 2},
}


UNEVEN = {"stride": (2, 1, 1), "padding": (0, 2, 1), "dilation": (1, 2, 1)}
SETTINGS = [
    pytest.param(dim, geometry, id=f"{dim}d, {name}")
    for dim in CONVOLUTIONS
    for name, geometry in (
        *GEOMETRIES.items(),
        ("uneven", {key: value[:dim] for key, value in UNEVEN.items()}),
    )
]


def filters_shape(dim, geometry):
    return (OUT, CHANNELS // geometry.get("groups", 1), *KERNELS[dim])


def make_input(dim):
    return torch.randn(BATCH, CHANNELS, *SPACES[dim])


@pytest.mark.parametrize(
    "geometry",
    [
        {},
        {"stride": 2, "padding": 1, "dilation": 2},
        {"stride": (1, 3), "padding": (2, 0), "dilation": (2, 1)},
    ],
    ids=["plain", "all", "uneven"],
)
def test_patches_are_those_of_unfold(geometry):
    x = make_input(2)
    unfolded = F.unfold(x, KERNELS[2], **geometry)
    cut = dense.patches(x, KERNELS[2], **geometry)[:, 0].flatten(1, 2)
    assert torch.equal(cut, unfolded.mT)


@pytest.mark.parametrize(("dim", "geometry"), SETTINGS)
def test_a_convolution_is_its_filters_times_patches(dim, geometry):
    x, filters = make_input(dim), torch.randn(filters_shape(dim, geometry))
    covariance = torch.eye(filters.numel())
    mean, variance = dense.convolution_moments(x, filters, covariance, **geometry)
    close(CONVOLUTIONS[dim](x, filters, **geometry), mean)
    close(CONVOLUTIONS[dim](x.square(), torch.ones_like(filters), **geometry), variance)


# ---- reading calls -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "keywords"),
    [
        ("xwb", ""),
        ("xw", "b"),
        ("x", "wb"),
        ("", "xwb"),
        ("xw", ""),
    ],
)
def test_a_linear_call_is_read_whatever_way_it_is_written(args, keywords):
    values = {"x": torch.randn(5, 3), "w": torch.randn(2, 3), "b": torch.randn(2)}
    names = {"x": "input", "w": "weight", "b": "bias"}
    application = parse_application(
        F.linear, tuple(values[key] for key in args), {names[key]: values[key] for key in keywords}
    )
    assert application.linear_map == DenseMap()
    assert application.x is values["x"]
    assert application.weight is values["w"]
    assert application.bias is (values["b"] if "b" in args + keywords else None)


@pytest.mark.parametrize("dim", CONVOLUTIONS)
@pytest.mark.parametrize("positional", range(8))
def test_a_convolution_call_is_read_whatever_way_it_is_written(dim, positional):
    """The first arguments by position, the others by keyword."""
    function = CONVOLUTIONS[dim]
    values = {
        "input": make_input(dim),
        "weight": torch.randn(filters_shape(dim, {"groups": 2})),
        "bias": torch.randn(OUT),
        "stride": 2,
        "padding": 1,
        "dilation": 2,
        "groups": 2,
    }
    names = list(values)
    application = parse_application(
        function,
        tuple(values[name] for name in names[:positional]),
        {name: values[name] for name in names[positional:]},
    )
    linear_map, x, weight, bias = application
    assert linear_map == ConvolutionMap(function, (2, *KERNELS[dim]), 2, 1, 2, 2)
    assert (x is values["input"], weight is values["weight"], bias is values["bias"]) == (True,) * 3
    close(linear_map(x, weight.flatten(1), bias), function(**values))


@pytest.mark.parametrize("dim", CONVOLUTIONS)
def test_a_convolution_call_has_the_defaults_of_torch(dim):
    x, weight = make_input(dim), torch.randn(filters_shape(dim, {}))
    application = parse_application(CONVOLUTIONS[dim], (x, weight), {})
    assert application.bias is None
    close(application.linear_map(x, weight.flatten(1)), CONVOLUTIONS[dim](x, weight))


@pytest.mark.parametrize(
    "function",
    [F.conv_transpose2d, F.bilinear, F.embedding_bag, torch.matmul, torch.Tensor.add, len],
)
def test_other_functions_are_no_linear_maps_of_their_weight(function):
    assert parse_application(function, (torch.ones(2), torch.ones(2)), {}) is None


# ---- the maps ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(), (5,), (2, 5)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_dense_map_is_linear(lead, with_bias):
    x, matrix = torch.randn(*lead, 3), torch.randn(4, 3)
    bias = torch.randn(4) if with_bias else None
    close(DenseMap()(x, matrix, bias), F.linear(x, matrix, bias))


@pytest.mark.parametrize("with_bias", [False, True])
def test_the_dense_map_broadcasts_over_batches_of_matrices(with_bias):
    x, matrix = torch.randn(7, 1, 3), torch.randn(2, 4, 3)
    bias = torch.randn(4) if with_bias else None
    expected = torch.stack([F.linear(x[:, 0], single, bias) for single in matrix], 1)
    close(DenseMap()(x, matrix, bias), expected)


def test_the_dense_bank_and_mix_are_two_linear_maps():
    x, bank, mixing, bias = torch.randn(7, 3), torch.randn(2, 3), torch.randn(4, 2), torch.randn(4)
    hidden = DenseMap().bank(x, bank)
    close(hidden, x @ bank.mT)
    close(DenseMap().mix(hidden, mixing, bias), x @ (mixing @ bank).mT + bias)


@pytest.mark.parametrize(("shape", "expected"), [((3,), False), ((5, 3), False), ((5, 2, 3), True)])
def test_the_dense_map_has_positions_beyond_the_batch(shape, expected):
    assert DenseMap().has_positions(torch.zeros(shape)) is expected


@pytest.mark.parametrize("shape", [(4, 9), (2, 4, 9)])
def test_a_convolution_always_has_positions(shape):
    assert ConvolutionMap(F.conv1d, (4, 3)).has_positions(torch.zeros(shape))


@pytest.mark.parametrize(("dim", "channel_dim"), [(1, -2), (2, -3), (3, -4)])
def test_the_channel_dimension_is_counted_from_the_right(dim, channel_dim):
    x, filters = make_input(dim), torch.randn(7, CHANNELS, *KERNELS[dim])
    linear_map = ConvolutionMap(CONVOLUTIONS[dim], filters.shape[1:])
    assert linear_map.channel_dim == channel_dim
    for given in (x, x[0]):
        assert linear_map(given, filters.flatten(1)).shape[channel_dim] == 7
    assert DenseMap().channel_dim == -1


def make_map(dim, geometry):
    return ConvolutionMap(CONVOLUTIONS[dim], filters_shape(dim, geometry)[1:], **geometry)


@pytest.mark.parametrize(("dim", "geometry"), SETTINGS)
def test_bank_and_mix_are_the_convolution_with_the_product(dim, geometry):
    """Filters ``mixing @ bank`` are the literal computation, for every group alike."""
    linear_map, x = make_map(dim, geometry), make_input(dim)
    shape = filters_shape(dim, geometry)
    size = torch.Size(shape[1:]).numel()
    bank, mixing, bias = torch.randn(3, size), torch.randn(OUT, 3), torch.randn(OUT)
    filters = (mixing @ bank).reshape(shape)
    expected = CONVOLUTIONS[dim](x, filters, bias, **geometry)
    hidden = linear_map.bank(x, bank)
    assert hidden.shape[1] == 3 * geometry.get("groups", 1)
    close(linear_map.mix(hidden, mixing, bias), expected)


# ---- several weights at once, and biases as columns ----------------------------------------------

DENSE = [((3,), 0), ((5, 3), 1), ((5, 2, 3), 1), ((5, 2, 6, 3), 1)]


@pytest.fixture(params=[True, False], ids=["scaled inputs", "scaled outputs"])
def route(request, monkeypatch):
    """Send ``combine`` one way or the other, whatever the sizes are."""
    monkeypatch.setattr(LinearMap, "_scales_inputs", lambda *sizes: request.param)


def assert_several_are_each(linear_map, x, matrices, batch_dim):
    """Compare ``stack`` and ``combine`` with one application after another."""
    images = torch.stack([linear_map(x, matrix) for matrix in matrices], batch_dim)
    close(linear_map.stack(x, matrices), images)
    coefficients = torch.randn(*x.shape[:batch_dim], len(matrices))
    spread = coefficients.reshape(*coefficients.shape, *(1 for _ in images.shape[batch_dim + 1 :]))
    total = (spread * images).sum(batch_dim)
    onto = torch.randn_like(total)
    close(linear_map.combine(x, coefficients, matrices, onto), onto + total)


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(("shape", "batch_dim"), DENSE)
def test_several_dense_weights_are_each(shape, batch_dim, joined):
    linear_map = BiasColumnMap(DenseMap()) if joined else DenseMap()
    matrices = torch.randn(2, 4, 3 + joined)
    assert_several_are_each(linear_map, torch.randn(shape), matrices, batch_dim)


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(("dim", "geometry"), SETTINGS)
def test_several_convolutions_are_each(dim, geometry, joined):
    plain, x = make_map(dim, geometry), make_input(dim)
    size = torch.Size(filters_shape(dim, geometry)[1:]).numel()
    linear_map = BiasColumnMap(plain) if joined else plain
    matrices = torch.randn(3, OUT, size + joined)
    assert_several_are_each(linear_map, x, matrices, 1)
    assert_several_are_each(linear_map, x[0], matrices, 0)


def test_the_smaller_tensors_are_formed():
    """Counted with the weights that scaled inputs need in another order."""
    narrow, wide = torch.zeros(100, 4), torch.zeros(100, 400)
    assert LinearMap._scales_inputs(narrow, torch.zeros(2, 50, 4), torch.zeros(100, 50))
    assert not LinearMap._scales_inputs(wide, torch.zeros(2, 50, 400), torch.zeros(100, 50))
    few = torch.zeros(3, 4)
    assert not LinearMap._scales_inputs(few, torch.zeros(2, 50, 4), torch.zeros(3, 50))
    assert LinearMap._scales_inputs(few, torch.zeros(1, 50, 4), torch.zeros(3, 50))


@pytest.mark.parametrize("positions", [True, False])
def test_dimensions_between_are_positions_or_examples(positions):
    linear_map, outputs = DenseMap(positions=positions), torch.zeros(5, 2, 4)
    assert linear_map.event_dim(outputs) == (2 if positions else 1)
    assert linear_map.has_positions(torch.zeros(5, 2, 3)) is positions


@pytest.mark.parametrize(("dim", "geometry"), SETTINGS)
def test_squared_norms_are_those_of_the_patches(dim, geometry):
    x, groups = make_input(dim), geometry.get("groups", 1)
    cut = dense.patches(x, KERNELS[dim], **geometry)
    expected = cut.square().sum(-1).repeat_interleave(OUT // groups, 1)
    norms = make_map(dim, geometry).squared_norm(x, OUT)
    close(norms.expand(expected.shape), expected)
    close(BiasColumnMap(make_map(dim, geometry)).squared_norm(x, OUT), norms + 1)


@pytest.mark.parametrize(("dim", "geometry"), SETTINGS)
def test_a_bias_column_is_a_bias(dim, geometry):
    x, plain = make_input(dim), make_map(dim, geometry)
    size = torch.Size(filters_shape(dim, geometry)[1:]).numel()
    matrix, bias, bank = torch.randn(OUT, size + 1), torch.randn(OUT), torch.randn(2, size + 1)
    joined, same = plain.join_bias(x)
    assert same is x
    close(joined(x, matrix, bias), plain(x, matrix[:, :-1], matrix[:, -1] + bias))
    ones = plain.bank(x, torch.zeros(2, size)) + 1
    column = bank[:, -1].repeat(geometry.get("groups", 1)).reshape(-1, *(1 for _ in range(dim)))
    close(joined.bank(x, bank), plain.bank(x, bank[:, :-1]) + column * ones)


@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_a_bias_column_of_a_dense_map_is_a_further_one(batch):
    x, matrix, bias = torch.randn(7, *batch, 3), torch.randn(*batch, OUT, 4), torch.randn(OUT)
    joined, inputs = BiasColumnMap(DenseMap()), torch.cat([x, torch.ones(7, *batch, 1)], -1)
    close(joined(x, matrix, bias), (matrix @ inputs.unsqueeze(-1)).squeeze(-1) + bias)
    close(joined.bank(x, matrix), (matrix @ inputs.unsqueeze(-1)).squeeze(-1))
    close(joined.squared_norm(x, OUT), inputs.square().sum(-1, keepdim=True))


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_a_dense_bank_and_norm_are_each(batch, joined):
    x, bank = torch.randn(7, 5, *batch, 3), torch.randn(*batch, 2, 3 + joined)
    linear_map = BiasColumnMap(DenseMap()) if joined else DenseMap()
    hidden, norms = linear_map.bank_and_squared_norm(x, bank)
    close(hidden, linear_map.bank(x, bank))
    close(norms, linear_map.squared_norm(x, 1))


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(("dim", "geometry"), SETTINGS)
def test_the_bank_and_norms_of_a_convolution_are_each(dim, geometry, joined):
    plain, x, groups = make_map(dim, geometry), make_input(dim), geometry.get("groups", 1)
    bank = torch.randn(2, torch.Size(filters_shape(dim, geometry)[1:]).numel() + joined)
    linear_map = BiasColumnMap(plain) if joined else plain
    hidden, norms = linear_map.bank_and_squared_norm(x, bank)
    close(hidden, linear_map.bank(x, bank))
    cut = dense.patches(x, KERNELS[dim], **geometry)
    assert norms.shape[1] == groups
    close(norms, cut.square().sum(-1) + joined)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("shape", [(3,), (7, 3)])
def test_a_joined_law_is_that_of_an_input_with_a_one(case, shape):
    q, x = case.make((), (OUT, 4), torch.float64), torch.randn(shape)
    image = q.image_under(*DenseMap().join_bias(x))
    inputs = torch.cat([x, torch.ones(*shape[:-1], 1)], -1)
    close(image.mean, dense.image_mean(inputs, q.loc, 2))
    close(image.covariance_matrix, dense.image_covariance(inputs, case.covariance(q), OUT))


# ---- the law of an image under a convolution -----------------------------------------------------


def serves(case, geometry):
    return case.serves_groups or geometry.get("groups", 1) == 1


@pytest.mark.parametrize(
    ("case", "dim", "geometry"),
    [
        pytest.param(case, *setting.values, id=f"{case.name}, {setting.id}")
        for case in CONVOLUTION_CASES
        for setting in SETTINGS
        if serves(case, setting.values[1])
    ],
)
def test_every_position_of_a_convolution_has_its_exact_law(case, dim, geometry):
    shape, x = filters_shape(dim, geometry), make_input(dim)
    q = case.make((), shape, torch.float64)
    covariance, shared = case.covariance(q), case.shared_covariance(q)
    mean, variance = dense.convolution_moments(x, q.loc, covariance, **geometry)
    image = q.image_under(make_map(dim, geometry), x)
    assert image.batch_shape + image.event_shape == mean.shape
    assert len(image.event_shape) == dim + 1
    close(image.mean, mean)
    close(image.variance, variance)
    drawn = dense.drawn_feature_map_covariance(x, covariance, shared, OUT, KERNELS[dim], **geometry)
    close(image.covariance_matrix, drawn)


@pytest.mark.parametrize("case", CONVOLUTION_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dim", CONVOLUTIONS)
def test_an_input_without_batch_has_the_law_of_a_batch_of_one(case, dim):
    x = make_input(dim)
    q = case.make((), filters_shape(dim, {}), torch.float64)
    linear_map = make_map(dim, {})
    single, batch = q.image_under(linear_map, x[1]), q.image_under(linear_map, x)
    assert single.batch_shape == ()
    close(single.mean, batch.mean[1])
    close(single.variance, batch.variance[1])


def assert_bias_moves_only_the_moments(q, linear_map, x, channel_shape):
    """Compare the image with a bias to that without: a constant, or a random one's moments."""
    plain = q.image_under(linear_map, x)
    bias = torch.randn(OUT)
    constant = q.image_under(linear_map, x, bias)
    close(constant.mean, plain.mean + bias.reshape(channel_shape))
    close(constant.variance, plain.variance)
    scale = torch.rand(OUT) + 0.1
    random = q.image_under(linear_map, x, MeanFieldNormal(bias, scale))
    close(random.mean, plain.mean + bias.reshape(channel_shape))
    close(random.variance, plain.variance + scale.square().reshape(channel_shape))


@pytest.mark.parametrize(
    ("case", "groups"),
    [
        pytest.param(case, groups, id=f"{case.name}, {groups}")
        for case in CONVOLUTION_CASES
        for groups in (1, 2, 4)
        if serves(case, {"groups": groups})
    ],
)
@pytest.mark.parametrize("dim", CONVOLUTIONS)
def test_a_bias_moves_the_moments_of_a_convolution(case, dim, groups):
    geometry = {"groups": groups, "padding": 1}
    q = case.make((), filters_shape(dim, geometry), torch.float64)
    channel_shape = (OUT, *(1 for _ in range(dim)))
    assert_bias_moves_only_the_moments(q, make_map(dim, geometry), make_input(dim), channel_shape)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("batch_shape", [(), (2,)])
def test_a_bias_moves_the_moments_of_a_linear_layer(case, batch_shape):
    q = case.make(batch_shape, (OUT, 3), torch.float64)
    x = torch.randn(7, *(1 for _ in batch_shape), 3)
    assert_bias_moves_only_the_moments(q, DenseMap(), x, (OUT,))


@pytest.mark.parametrize("case", CONVOLUTION_CASES, ids=lambda case: case.name)
def test_a_convolution_of_zeros_has_finite_gradients(case):
    """Padding alone makes patches of zeros, and rounding may make a variance negative."""
    x = torch.zeros(1, CHANNELS, *SPACES[2])
    q = with_arguments(case.make((), filters_shape(2, {}), torch.float64), torch.clone)
    draw = q.image_under(make_map(2, {"padding": 1}), x).rsample()
    assert (draw.abs() < 1e-15).all()
    for gradient in torch.autograd.grad(draw.sum(), arguments(q)):
        assert torch.isfinite(gradient).all()
