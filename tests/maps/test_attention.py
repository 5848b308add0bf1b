"""Attention: torch's values for given weights, and projections that are drawn as outputs."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pyro_structvi as ps
from pyro_structvi.maps.attention import attention
from pyro_structvi.weights.lazy import LazyWeight
from tests.lazy_weights import lazy, narrow_normal
from tests.unit_noise import close

BATCH, LENGTH, SIZE, HEADS = 3, 5, 4, 2
CAUSAL = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)
ATTENTION_MASKS = {
    "none": None,
    "boolean": CAUSAL,
    "numbers": torch.randn(LENGTH, LENGTH, dtype=torch.float64),
    "for each head": torch.stack([CAUSAL, CAUSAL ^ (torch.arange(LENGTH) == 1)] * BATCH),
}
PADDING_MASKS = {
    "none": None,
    "boolean": torch.arange(LENGTH) >= torch.tensor([[5], [3], [4]]),
    "numbers": torch.randn(BATCH, LENGTH, dtype=torch.float64),
}


def arguments(x, bias=True, **options):
    given = {
        **dict.fromkeys(("query", "key", "value"), x),
        "embed_dim_to_check": SIZE,
        "num_heads": HEADS,
        "in_proj_weight": torch.randn(3 * SIZE, SIZE),
        "in_proj_bias": torch.randn(3 * SIZE) if bias else None,
        **dict.fromkeys(("bias_k", "bias_v")),
        "add_zero_attn": False,
        "dropout_p": 0.0,
        "out_proj_weight": torch.randn(SIZE, SIZE),
        "out_proj_bias": torch.randn(SIZE) if bias else None,
    }
    return given | options


def assert_same(given):
    ours, theirs = attention(**given), F.multi_head_attention_forward(**given)
    close(ours[0], theirs[0])
    assert (ours[1] is None) == (theirs[1] is None)
    if ours[1] is not None:
        close(ours[1], theirs[1])


MASKS = [
    *((name, "none") for name in ATTENTION_MASKS),
    *(("boolean", "boolean"), ("numbers", "numbers"), ("none", "boolean"), ("none", "numbers")),
]


@pytest.mark.parametrize(("attention", "padding"), MASKS)
def test_values_are_those_of_torch(attention, padding):
    masks = {"attn_mask": ATTENTION_MASKS[attention], "key_padding_mask": PADDING_MASKS[padding]}
    is_causal = (attention, padding) == ("boolean", "none")
    x = torch.randn(LENGTH, BATCH, SIZE)
    for need_weights in (True, False):
        assert_same(arguments(x, need_weights=need_weights, is_causal=is_causal, **masks))


@pytest.mark.parametrize("bias", [True, False])
def test_biases_heads_single_examples_and_other_sequences_of_any_size(bias):
    x, key, value = torch.randn(3, LENGTH, BATCH, SIZE)
    average = {"average_attn_weights": bias}
    sizes = {"q": SIZE, "k": 3, "v": 6}
    separate = {
        "key": torch.randn(7, BATCH, 3),
        "value": torch.randn(7, BATCH, 6),
        "use_separate_proj_weight": True,
        "in_proj_weight": None,
        **{f"{name}_proj_weight": torch.randn(SIZE, size) for name, size in sizes.items()},
    }
    other = {"key": key, "value": value}
    for query, options in ((x, average), (x[:, 0], average), (x, other), (x, {"value": value})):
        assert_same(arguments(query, bias, **options))
    assert_same(arguments(x, bias, **separate))


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_for_training(training):
    x = torch.randn(LENGTH, BATCH, SIZE)
    given = arguments(x, dropout_p=0.5, training=training)
    draws = [attention(**given)[0] for _ in range(2)]
    assert torch.equal(*draws) != training


def test_the_hint_of_a_causal_mask_needs_the_mask():
    given = arguments(torch.randn(LENGTH, BATCH, SIZE), is_causal=True)
    for need_weights in (True, False):
        with pytest.raises(ValueError, match=r"`attn_mask` must be the causal mask if `is_causal"):
            attention(**given, need_weights=need_weights)


def test_what_is_not_served_is_torchs():
    x = torch.randn(LENGTH, BATCH, SIZE)
    for options in (
        {"add_zero_attn": True},
        {"bias_k": torch.zeros(1, 1, SIZE), "bias_v": torch.zeros(1, 1, SIZE)},
    ):
        assert attention(**(arguments(x) | options)) is None


@pytest.mark.parametrize("batch_first", [True, False])
def test_examples_come_first_in_both_projections(batch_first, monkeypatch):
    met = {}
    draw = LazyWeight.sample_outputs

    def record(self, application):
        met[self.use.name] = tuple(application.x.shape)
        return draw(self, application)

    monkeypatch.setattr(LazyWeight, "sample_outputs", record)
    module = nn.MultiheadAttention(SIZE, HEADS, batch_first=batch_first)
    x = torch.randn(BATCH, LENGTH, SIZE)
    net = x if batch_first else x.transpose(0, 1)
    weights = {
        "in_proj_weight": lazy(narrow_normal(3 * SIZE, SIZE), "in"),
        "out_proj.weight": lazy(narrow_normal(SIZE, SIZE), "out"),
    }
    for weight, name in zip(weights.values(), ("in_proj_weight", "out_proj.weight"), strict=True):
        weight.distribution.loc = module.get_parameter(name).detach()
    expected = module(net, net, net)[0]
    values = dict(module.named_parameters()) | weights
    call = {name.replace(".", "_"): value for name, value in values.items()}
    query = x.transpose(0, 1)
    outputs = F.multi_head_attention_forward(**(arguments(query) | call))[0]
    outputs = outputs.transpose(0, 1) if batch_first else outputs
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-6)
    assert met == {"in": (BATCH, LENGTH, SIZE), "out": (BATCH, LENGTH, SIZE)}
    assert not any(weight.is_drawn for weight in weights.values())


class Attends(nn.Module):
    """Self-attention, or attention of the first half of positions to the second."""

    def __init__(self, cross):
        super().__init__()
        self.attention = nn.MultiheadAttention(SIZE, HEADS, batch_first=True)
        self.head = nn.Linear(SIZE, 2)
        self.cross = cross

    def forward(self, x):
        other = x[:, 2:] if self.cross else x
        return self.head(self.attention(x[:, :2] if self.cross else x, other, other)[0].mean(1))


def drawn_in_a_step(net, monkeypatch, **options):
    model = ps.Classifier(ps.bayesianize(net, normalization=True), 6)
    data = torch.randn(6, LENGTH, SIZE), torch.randint(2, (6,))
    guide = ps.KTiedGuide(model, **options)
    guide.initialize(*data)
    drawn = set()
    draw = LazyWeight.draw
    with monkeypatch.context() as patch:
        patch.setattr(LazyWeight, "draw", lambda self: drawn.add(self.use.name) or draw(self))
        ps.StructuredELBO().loss_and_grads(model, guide, *data)
    for name, parameter in guide.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().max() > 0, name
    return drawn


def test_only_the_packed_weight_of_cross_attention_is_drawn(monkeypatch):
    for join_bias in (False, True):
        drawn = drawn_in_a_step(Attends(cross=False), monkeypatch, join_bias=join_bias)
        assert drawn == set()
    drawn = drawn_in_a_step(Attends(cross=True), monkeypatch)
    assert "net.attention.in_proj_weight" in drawn
    assert "net.head.weight" not in drawn
