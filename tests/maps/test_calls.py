"""How calls are read: by position and by keyword, with torch's defaults, or not at all."""

import pytest
import torch
import torch.nn.functional as F

from pyro_structvi.maps import ConvolutionMap, DenseMap
from pyro_structvi.maps.calls import parse_application
from tests.maps.test_conformance import CHANNELS, CONVOLUTIONS, KERNELS, OUT, SPACES
from tests.unit_noise import close


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


@pytest.mark.parametrize(("dim", "positional"), [(1, 0), (2, 2), (3, 7)])
def test_a_convolution_call_is_read_whatever_way_it_is_written(dim, positional):
    """The first arguments by position, the others by keyword; or with the defaults of torch."""
    function = CONVOLUTIONS[dim]
    x, weight = torch.randn(2, CHANNELS, *SPACES[dim]), torch.randn(OUT, 2, *KERNELS[dim])
    options = {"stride": 2, "padding": 1, "dilation": 2, "groups": 2}
    values = {"input": x, "weight": weight, "bias": torch.randn(OUT)} | options
    args, keywords = [*values.values()][:positional], dict([*values.items()][positional:])
    linear_map, *tensors, _ = parse_application(function, args, keywords)
    assert linear_map == ConvolutionMap(function, (2, *KERNELS[dim]), 2, 1, 2, 2)
    assert all(own is values[name] for own, name in zip(tensors, values, strict=False))
    close(linear_map(x, weight.flatten(1), values["bias"]), function(**values))
    plain = parse_application(function, (x[:, :2], weight), {})
    assert plain.bias is None
    close(plain.linear_map(x[:, :2], weight.flatten(1)), function(x[:, :2], weight))


def test_other_functions_are_no_linear_maps_of_their_weight():
    for function in (F.embedding, F.embedding_bag, torch.matmul, torch.Tensor.add, len):
        assert parse_application(function, (torch.ones(2), torch.ones(2)), {}) is None
