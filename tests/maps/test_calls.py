"""How calls are read: by position and by keyword, with torch's defaults, or not at all."""

import pytest
import torch
import torch.nn.functional as F

from pyro_structvi.maps import ConvolutionMap, DenseMap
from pyro_structvi.maps.calls import Rewrite, parse_application
from tests.maps.test_conformance import (
    CHANNELS,
    CONVOLUTIONS,
    KERNELS,
    OUT,
    SPACES,
    close,
)


def make_input(dim):
    return torch.randn(2, CHANNELS, *SPACES[dim])


def filters_shape(dim, groups=1):
    return (OUT, CHANNELS // groups, *KERNELS[dim])


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
@pytest.mark.parametrize("positional", [0, 2, 5, 7])
def test_a_convolution_call_is_read_whatever_way_it_is_written(dim, positional):
    """The first arguments by position, the others by keyword."""
    function = CONVOLUTIONS[dim]
    values = {
        "input": make_input(dim),
        "weight": torch.randn(filters_shape(dim, groups=2)),
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
    linear_map, x, weight, bias, _ = application
    assert linear_map == ConvolutionMap(function, (2, *KERNELS[dim]), 2, 1, 2, 2)
    assert (x is values["input"], weight is values["weight"], bias is values["bias"]) == (True,) * 3
    close(linear_map(x, weight.flatten(1), bias), function(**values))


@pytest.mark.parametrize("dim", CONVOLUTIONS)
def test_a_convolution_call_has_the_defaults_of_torch(dim):
    x, weight = make_input(dim), torch.randn(filters_shape(dim))
    application = parse_application(CONVOLUTIONS[dim], (x, weight), {})
    assert application.bias is None
    close(application.linear_map(x, weight.flatten(1)), CONVOLUTIONS[dim](x, weight))


@pytest.mark.parametrize(
    "function",
    [F.embedding_bag, torch.matmul, torch.Tensor.add, len],
)
def test_other_functions_are_no_linear_maps_of_their_weight(function):
    assert parse_application(function, (torch.ones(2), torch.ones(2)), {}) is None


def test_self_attention_is_read_as_other_calls():
    x, weight = torch.randn(3, 2, 4), torch.randn(12, 4)
    given = {
        **dict.fromkeys(("query", "key", "value"), x),
        "embed_dim_to_check": 4,
        "num_heads": 2,
        "in_proj_weight": weight,
        **dict.fromkeys(("in_proj_bias", "bias_k", "bias_v", "out_proj_bias")),
        "add_zero_attn": False,
        "dropout_p": 0.0,
        "out_proj_weight": torch.randn(4, 4),
    }
    reading = parse_application(F.multi_head_attention_forward, (), given)
    assert isinstance(reading, Rewrite)
    close(reading.compute()[0], F.multi_head_attention_forward(**given)[0])
    crossed = given | {"key": x + 1}
    assert parse_application(F.multi_head_attention_forward, (), crossed) is None
