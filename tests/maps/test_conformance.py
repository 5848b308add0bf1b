"""What every linear map obeys: each member against patches, written out, and a dense matrix."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from pyro_structvi.maps import BiasColumnMap, ConvolutionMap, DenseMap, LinearMap, shape_per_example
from pyro_structvi.maps.calls import parse_application
from tests import dense_oracles as dense
from tests.distributions.cases import CONVOLUTION_CASES
from tests.distributions.subject import arguments, with_arguments
from tests.unit_noise import close

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
KERNELS = {1: (3,), 2: (3, 2), 3: (2, 3, 2)}
SPACES = {1: (9,), 2: (7, 6), 3: (5, 6, 4)}
OUT, CHANNELS, COUNT = 4, 4, 3

# torch says so for kernels of an even length; they are tested because their padding is lopsided.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")


@pytest.fixture(params=[False, True], ids=["convolves", "multiplies"])
def multiplies(request, monkeypatch):
    """Either way of a bank, whatever the sizes are."""
    monkeypatch.setattr(ConvolutionMap, "_multiplies_first", lambda *sizes: request.param)


@dataclass
class Subject:
    """A map with an input, and the patches ``(*batch, groups, positions, in)`` that it cuts out."""

    linear_map: LinearMap
    x: torch.Tensor
    patches: torch.Tensor
    positions: tuple
    batch_dim: int
    is_last: bool = False

    @property
    def groups(self):
        return self.patches.shape[-3]

    @property
    def batch(self):
        return self.x.shape[: self.batch_dim]

    @property
    def size(self):
        return self.patches.shape[-1]

    def randn(self, *shape):
        return torch.randn(*shape, self.size)

    def outputs(self, matrix, bias=0.0):
        """Return patches times rows, ``(*batch, channels, positions)`` in the layout of the map."""
        rows = matrix.unflatten(0, (self.groups, -1))
        channels = torch.einsum("...gpi,goi->...gop", self.patches, rows).flatten(-3, -2)
        return self.lay_out(channels + torch.as_tensor(bias).reshape(-1, 1))

    def bank(self, filters, bias):
        return self.outputs(filters.repeat(self.groups, 1), bias.repeat(self.groups))

    def squared_norm(self, repeats):
        return self.lay_out(self.patches.square().sum(-1).repeat_interleave(repeats, -2))

    def lay_out(self, channels):
        if self.is_last:
            channels = channels.mT
            return channels.reshape(*channels.shape[:-2], *self.positions, channels.shape[-1])
        return channels.reshape(*channels.shape[:-1], *self.positions)

    def with_column(self):
        ones = torch.ones(*self.patches.shape[:-1], 1)
        patches = torch.cat([self.patches, ones], -1)
        return replace(self, linear_map=BiasColumnMap(self.linear_map), patches=patches)


def dense_subject(shape, positions=True):
    x, batch_dim = torch.randn(shape), len(shape[:-1]) if not positions else len(shape[:1])
    batch_dim = 0 if len(shape) == 1 else batch_dim
    between = tuple(shape[batch_dim:-1])
    patches = x.reshape(*shape[:batch_dim], 1, -1, shape[-1])
    return Subject(DenseMap(positions), x, patches, between, batch_dim, is_last=True)


def convolution_subject(dim, has_batch=True, **geometry):
    x, groups = torch.randn(2, CHANNELS, *SPACES[dim]), geometry.get("groups", 1)
    cut = dense.patches(x, KERNELS[dim], **geometry)
    linear_map = ConvolutionMap(CONVOLUTIONS[dim], (CHANNELS // groups, *KERNELS[dim]), **geometry)
    positions, patches = cut.shape[2:-1], cut.flatten(2, -2)
    if has_batch:
        return Subject(linear_map, x, patches, positions, 1)
    return Subject(linear_map, x[0], patches[0], positions, 0)


EVERYTHING = {"stride": 2, "padding": 2, "dilation": 2}
UNEVEN = {"stride": (2, 1, 1), "padding": (0, 2, 1), "dilation": (1, 2, 1)}
PLAIN = {
    "one vector": lambda: dense_subject((3,)),
    "dense": lambda: dense_subject((5, 3)),
    "grid": lambda: dense_subject((5, 2, 6, 3)),
    "all examples": lambda: dense_subject((5, 2, 3), positions=False),
    "1d, valid": lambda: convolution_subject(1, padding="valid"),
    "1d, groups and all": lambda: convolution_subject(1, groups=2, **EVERYTHING),
    "1d, no batch": lambda: convolution_subject(1, has_batch=False, groups=2),
    "2d, same": lambda: convolution_subject(2, padding="same", dilation=(2, 1)),
    "3d, uneven": lambda: convolution_subject(3, **UNEVEN),
}
SUBJECTS = {
    **PLAIN,
    **{
        f"{name}, bias column": lambda make=PLAIN[name]: make().with_column()
        for name in ("one vector", "grid", "all examples", "1d, groups and all")
    },
    "1d, two columns": lambda: PLAIN["1d, groups and all"]().with_column().with_column(),
}


@pytest.fixture(params=SUBJECTS.values(), ids=SUBJECTS)
def subject(request, fresh_state):
    return request.param()


def test_a_weight_meets_every_patch(subject):
    matrix, bias, x = subject.randn(OUT), torch.randn(OUT), subject.x
    close(subject.linear_map(x, matrix), subject.outputs(matrix))
    close(subject.linear_map(x, matrix, bias), subject.outputs(matrix, bias))
    joined, seen = subject.linear_map.join_bias(x)
    close(joined(seen, torch.cat([matrix, bias.unsqueeze(-1)], -1)), subject.outputs(matrix, bias))
    assert joined.has_positions(seen) == subject.linear_map.has_positions(x)
    without = subject.linear_map.without_positions()
    outputs = without(x, matrix)
    close(outputs, subject.outputs(matrix))
    assert without.has_positions(x) == (not subject.is_last)
    assert without.event_dim(outputs) == (1 if subject.is_last else 1 + len(subject.positions))
    assert without.has_bias_column == subject.linear_map.has_bias_column


def test_bank_and_mix_are_the_map_of_the_product(subject, multiplies):
    filters, shift = subject.randn(COUNT), torch.randn(COUNT)
    mixing, bias = torch.randn(OUT, COUNT), torch.randn(OUT)
    linear_map, x = subject.linear_map, subject.x
    close(linear_map.bank(x, filters, shift), subject.bank(filters, shift))
    hidden = linear_map.bank(x, filters)
    close(hidden, subject.bank(filters, torch.zeros(COUNT)))
    close(linear_map.mix(hidden, mixing), subject.outputs(mixing @ filters))
    close(linear_map.mix(hidden, mixing, bias), subject.outputs(mixing @ filters, bias))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_few_filters_have_the_gradients_and_layout_of_a_convolution(layout):
    """Also of the second order, and for an empty batch."""
    linear_map = ConvolutionMap(F.conv2d, (20, 3, 2), stride=(1, 2), padding=1)
    x = torch.randn(2, 20, 6, 5).contiguous(memory_format=layout)
    filters, mixing = torch.randn(3, 120), torch.randn(OUT, 3)
    assert linear_map._multiplies_first(x, filters) == (layout is torch.contiguous_format)
    outputs = linear_map.mix(linear_map.bank(x, filters), mixing)
    assert outputs.is_contiguous(memory_format=layout)
    inputs = [value.requires_grad_() for value in (x, filters, mixing)]
    composed = linear_map.mix(linear_map.bank(x, filters), mixing)
    direct = linear_map(x, mixing @ filters)
    close(composed, direct)
    sensitivity = torch.randn_like(direct)
    of_composed, of_direct = (
        torch.autograd.grad(outputs.square(), inputs, sensitivity, create_graph=True)
        for outputs in (composed, direct)
    )
    second = [
        torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
        for first in (of_composed, of_direct)
    ]
    for actual, expected in zip((*of_composed, *second[0]), (*of_direct, *second[1]), strict=True):
        close(actual, expected)
    assert linear_map.bank(x[:0], filters).shape == (0, 3, *direct.shape[2:])


def test_few_filters_meet_many_channels_under_vmap():
    linear_map = ConvolutionMap(F.conv1d, (20, 3), padding="same", groups=2)
    x, filters = torch.randn(4, 2, 40, 7), torch.randn(4, 3, 60)
    each = [linear_map.bank(*pair) for pair in zip(x, filters, strict=True)]
    close(torch.vmap(linear_map.bank)(x, filters), torch.stack(each))


def test_squared_norms_are_those_of_the_patches(subject):
    expected = subject.squared_norm(OUT // subject.groups)
    norms = subject.linear_map.squared_norm(subject.x, OUT)
    close(norms.expand(expected.shape), expected)
    norms = subject.linear_map.squared_norm(subject.x, subject.groups)
    close(norms, subject.squared_norm(1))


def test_stacked_weights_are_each(subject):
    matrices, biases = subject.randn(COUNT, OUT), torch.randn(COUNT, OUT)
    plain = torch.stack(list(map(subject.outputs, matrices)), subject.batch_dim)
    close(subject.linear_map.stack(subject.x, matrices), plain)
    shifted = torch.stack(list(map(subject.outputs, matrices, biases)), subject.batch_dim)
    close(subject.linear_map.stack(subject.x, matrices, biases), shifted)


def test_what_a_map_says_of_its_dimensions(subject):
    linear_map, x = subject.linear_map, subject.x
    outputs = linear_map(x, subject.randn(OUT))
    assert linear_map.groups == subject.groups
    assert outputs.shape[linear_map.channel_dim] == OUT
    assert linear_map.event_dim(x) == linear_map.event_dim(outputs) == x.dim() - subject.batch_dim
    is_convolution = not subject.is_last
    assert linear_map.has_positions(x) == (is_convolution or len(subject.positions) > 0)
    assert linear_map.has_bias_column == isinstance(linear_map, BiasColumnMap)
    assert linear_map.is_dense == isinstance(linear_map, DenseMap)
    shape = shape_per_example(linear_map, x, OUT)
    assert torch.Size(shape).numel() == OUT * x.shape[: subject.batch_dim].numel()
    assert torch.zeros(shape).expand_as(outputs).shape == outputs.shape


@pytest.mark.parametrize("join", [False, True], ids=["plain", "bias column"])
def test_a_dense_map_takes_batches_of_matrices(join):
    """Their dimensions are in the input too, before its last."""
    plain, x = DenseMap(positions=False), torch.randn(7, 2, 3)
    linear_map, size = (BiasColumnMap(plain), 4) if join else (plain, 3)
    patches = torch.cat([x, torch.ones(7, 2, size - 3)], -1)
    matrices, biases = torch.randn(2, COUNT, OUT, size), torch.randn(2, COUNT, OUT)
    each = torch.einsum("nbi,bkoi->nbko", patches, matrices) + biases
    matrix, bias = matrices[:, 0], biases[:, 0]
    close(linear_map(x, matrix, bias), each[:, :, 0])
    close(linear_map.stack(x, matrices, biases), each)
    close(linear_map.bank(x, matrix, bias), each[:, :, 0])
    close(linear_map.squared_norm(x, OUT), patches.square().sum(-1, keepdim=True))


def test_a_convolution_of_zeros_has_finite_gradients():
    """Padding alone makes patches of zeros, and rounding may make a variance negative."""
    linear_map = ConvolutionMap(F.conv2d, (4, 3, 2), padding=1)
    for case in CONVOLUTION_CASES:
        q = with_arguments(case.make((), (4, 4, 3, 2), torch.float64), torch.clone)
        draw = q.image_under(linear_map, torch.zeros(1, 4, 7, 6)).rsample()
        assert (draw.abs() < 1e-15).all(), case.name
        for gradient in torch.autograd.grad(draw.sum(), arguments(q)):
            assert torch.isfinite(gradient).all(), case.name


# ---- how calls are read --------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "positional"), [(1, 0), (2, 2), (3, 7)])
def test_a_convolution_call_is_read_whatever_way_it_is_written(dim, positional):
    """The first arguments by position, the others by keyword; or with the defaults of torch."""
    function = CONVOLUTIONS[dim]
    x, weight = torch.randn(2, CHANNELS, *SPACES[dim]), torch.randn(OUT, 2, *KERNELS[dim])
    options = {"stride": 2, "padding": 1, "dilation": 3, "groups": 2}
    values = {"input": x, "weight": weight, "bias": torch.randn(OUT)} | options
    args, keywords = [*values.values()][:positional], dict([*values.items()][positional:])
    linear_map, *tensors, _ = parse_application(function, args, keywords)
    assert linear_map == ConvolutionMap(function, (2, *KERNELS[dim]), 2, 1, 3, 2)
    assert all(own is values[name] for own, name in zip(tensors, values, strict=False))
    close(linear_map(x, weight.flatten(1), values["bias"]), function(**values))
    plain = parse_application(function, (x[:, :2], weight), {})
    assert plain.bias is None
    close(plain.linear_map(x[:, :2], weight.flatten(1)), function(x[:, :2], weight))


def test_other_functions_are_no_linear_maps_of_their_weight():
    for function in (F.embedding, F.embedding_bag, torch.matmul, torch.Tensor.add, len):
        assert parse_application(function, (torch.ones(2), torch.ones(2)), {}) is None


@pytest.mark.parametrize(("args", "keywords"), [("xwb", ""), ("x", "wb"), ("xw", "")])
def test_a_linear_call_is_read_whatever_way_it_is_written(args, keywords):
    values = {"x": torch.randn(5, 3), "w": torch.randn(2, 3), "b": torch.randn(2)}
    names = {"x": "input", "w": "weight", "b": "bias"}
    positional = tuple(values[key] for key in args)
    application = parse_application(F.linear, positional, {names[k]: values[k] for k in keywords})
    assert application.linear_map == DenseMap()
    assert application.x is values["x"]
    assert application.weight is values["w"]
    assert application.bias is (values["b"] if "b" in args + keywords else None)
