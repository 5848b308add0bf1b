"""Layouts of parameters: fan-ins, by the variance of outputs, and input channels to drop."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule, PyroSample
from torch import nn

import pyro_structvi as ps
from pyro_structvi.distributions import BernoulliDropout, PointMass
from pyro_structvi.families import Dropout
from pyro_structvi.nn.conversion import find_layouts


class Conv1D(nn.Module):
    """As GPT-2 has it: a dense layer with its weight as (in, out)."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(0.02 * torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(5, 3)
        self.experts = nn.Parameter(torch.randn(3, 4, 5))

    def forward(self, x):
        return torch.einsum("be,eoi,bi->bo", self.router(x).softmax(-1), self.experts, x)


class Norm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return self.weight * x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()


class LlamaRMSNorm(Norm):
    pass


class Block(nn.Module):
    def __init__(self, *shape, name="gamma"):
        super().__init__()
        self.name = name
        setattr(self, name, nn.Parameter(torch.full(shape, 1e-5)))

    def forward(self, x):
        return x * getattr(self, self.name)


class LayerScale(Block):
    pass


class NormLinear(nn.Linear):
    """A dense layer with a misleading name."""


# ---- fan-in --------------------------------------------------------------------------------------

UNIT = {  # modules with inputs of second moment 1, whose outputs then have the prior's variance
    "linear": (lambda: nn.Linear(6, 3, bias=False), (6,)),
    "bilinear": (lambda: nn.Bilinear(3, 4, 5, bias=False), (3,)),
    "grouped": (lambda: nn.Conv1d(4, 6, 3, groups=2, bias=False), (4, 5)),
    "transposed": (lambda: nn.ConvTranspose1d(4, 6, 3, bias=False, padding=2), (4, 6)),
    "transposed, grouped": (
        lambda: nn.ConvTranspose2d(4, 6, 2, groups=2, stride=2, bias=False),
        (4, 3, 3),
    ),
    "Conv1D": (lambda: Conv1D(3, 7), (7,)),
}


@pytest.mark.parametrize("name", UNIT)
def test_outputs_have_the_prior_variance_one(name):
    """The exact variance of each output: the sum of its squared derivatives by the weight."""
    make, shape = UNIT[name]
    module = make()
    layout = find_layouts(module)[id(module.weight)]
    deviation = ps.FanIn().standard_deviation(module.weight, layout.fan_in)
    x = torch.randint(2, (1, *shape)) * 2.0 - 1
    inputs = (x, torch.ones(1, 4)) if name == "bilinear" else (x,)

    def outputs(weight):
        return torch.func.functional_call(module, {"weight": weight}, inputs).flatten()

    jacobian = torch.autograd.functional.jacobian(outputs, module.weight.detach()).flatten(1)
    variance = deviation**2 * jacobian.square().sum(-1)
    torch.testing.assert_close(variance, torch.ones_like(variance))


def test_fan_ins():
    """Of one entry of an embedding, of tokens and positions it is zero: they meet no inputs."""
    strided = nn.ConvTranspose1d(4, 6, 3, stride=2)
    normed = nn.utils.parametrizations.weight_norm(nn.ConvTranspose1d(4, 6, 3))
    embedding, head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
    head.weight = embedding.weight
    attention = nn.MultiheadAttention(8, 2, kdim=3, vdim=5, add_bias_kv=True)
    whole, positions = nn.MultiheadAttention(8, 2), Block(1, 4, 5, name="positions")
    for module, weight, expected in (
        (strided, strided.weight, 4 * 3 / 2),  # an average of taps
        (normed, normed.parametrizations.weight.original1, 12),
        (nn.Sequential(embedding, head), head.weight, 4),  # the larger of two uses
        (nn.Sequential(head, embedding), head.weight, 4),
        (whole, whole.in_proj_weight, 8),
        (attention, attention.q_proj_weight, 8),
        (attention, attention.k_proj_weight, 3),
        (attention, attention.v_proj_weight, 5),
        (attention, attention.bias_k, 0),
        (attention, attention.out_proj.weight, 8),
        (attention, attention.out_proj.bias, 0),
    ):
        assert find_layouts(module)[id(weight)].fan_in == expected
    for module, x in (
        (nn.Embedding(10, 4), torch.zeros(1).long()),
        (positions, torch.ones(2, 4, 5)),
    ):
        net = ps.bayesianize(module, prior=ps.FanIn(0.7, vector_scale=0.7))
        (prior,) = (
            node["fn"]
            for node in pyro.poutine.trace(net).get_trace(x).nodes.values()
            if node["type"] == "sample"
        )
        assert prior.stddev.unique().tolist() == [0.7]


@pytest.mark.parametrize(
    ("make", "stated"),
    [
        (ps.FanIn, lambda: ps.FanIn(fan_in=5)),
        (
            lambda: ps.HierarchicalScale(dist.LogNormal(0.0, 1.0), fan_in=True),
            lambda: ps.HierarchicalScale(dist.LogNormal(0.0, 1.0), fan_in=5),
        ),
    ],
)
def test_of_stacked_experts_it_must_be_stated(make, stated):
    with pytest.raises(ValueError, match=r"needs the fan-in of 'experts'.*fan_in=\.\.\."):
        ps.bayesianize(Experts(), prior=make())
    net = ps.bayesianize(Experts(), prior={"experts": stated(), "*": make()})
    trace = pyro.poutine.trace(net).get_trace(torch.zeros(1, 5))
    scale = trace.nodes["experts_scale"]["value"] if "experts_scale" in trace.nodes else 1.0
    prior = trace.nodes["experts"]["fn"].stddev
    torch.testing.assert_close(prior, scale / math.sqrt(5) * torch.ones(3, 4, 5))


def test_starts_of_declared_sites_follow_the_module():
    module = PyroModule[nn.ConvTranspose1d](50, 2, 30)
    module.weight = PyroSample(dist.Normal(0.0, 1.0).expand([50, 2, 30]).to_event(3))
    start = ps.MAPGuide(module).median()["weight"]
    assert start.std().item() == pytest.approx(math.sqrt(2 / 1500), rel=0.05)


# ---- normalization -------------------------------------------------------------------------------

SCALES = {
    "LlamaRMSNorm": lambda: LlamaRMSNorm(4),
    "RMSNorm": lambda: nn.RMSNorm(4),
    "LayerScale": lambda: LayerScale(4, name="scale"),
    "gamma": lambda: Block(4),
    "lambda1": lambda: Block(4, name="lambda1"),
    "layer_scale": lambda: Block(1, 4, name="layer_scale"),
}


@pytest.mark.parametrize("name", SCALES)
def test_scales_stay_points(name):
    net = nn.Sequential(nn.Linear(3, 4), SCALES[name]())
    (parameter,) = (own for own, _ in net[1].named_parameters())
    with pytest.warns(ps.nn.PointEstimateWarning, match=rf"\['1.{parameter}'\]"):
        bayes_net = ps.bayesianize(net)
    assert ps.MeanFieldGuide(bayes_net).site_names == ["0.weight", "0.bias"]
    guide = ps.MeanFieldGuide(ps.bayesianize(net, normalization=True))
    assert f"1.{parameter}" in guide.site_names
    net = nn.Sequential(NormLinear(3, 4), Block(4, 4, name="gamma"), Block(4, name="scale"))
    guide = ps.MeanFieldGuide(ps.bayesianize(net))  # whose names do not make them points
    assert guide.site_names == ["0.weight", "0.bias", "1.gamma", "2.scale"]


# ---- dropout -------------------------------------------------------------------------------------

DROPPED = {
    "convolution": (lambda: nn.Conv1d(4, 6, 3), (4, 5)),
    "grouped": (lambda: nn.Conv1d(4, 6, 3, groups=2), (4, 5)),
    "transposed, grouped": (lambda: nn.ConvTranspose1d(4, 6, 3, groups=2), (4, 5)),
    "Conv1D": (lambda: Conv1D(3, 7), (7,)),
    "embedding": (lambda: nn.Embedding(50, 3), ()),
}


@pytest.mark.parametrize("name", DROPPED)
def test_a_draw_is_dropout_of_the_inputs(name):
    make, shape = DROPPED[name]
    net = make()
    guide = ps.StructuredGuide(ps.bayesianize(net), {"*": Dropout(0.5)})
    q = guide["weight"]()
    assert isinstance(q, BernoulliDropout)
    if name == "embedding":
        draw = guide.draw()["weight"]
        assert 0 < (draw != 0).any(-1).sum() < 50
        torch.testing.assert_close((draw != 0).all(-1), (draw != 0).any(-1))
        return
    assert q.num_channels == shape[0]
    draws = [guide.draw()["weight"].detach() for _ in range(20)]
    draw = next(each for each in draws if 0 < q._are_there(each).sum() < q.num_channels)
    kept = q._are_there(draw)
    x = torch.randn(2, *shape)
    mask = 2 * kept.to(x).reshape(-1, *(1 for _ in shape[1:]))
    ours = torch.func.functional_call(net, {"weight": draw}, (x,))
    torch.testing.assert_close(ours, net(x * mask))


def test_experts_need_a_dimension_and_tokens_have_none():
    model = ps.bayesianize(Experts())
    with pytest.raises(ValueError, match=r"No family was given for the weights .'experts'"):
        ps.StructuredGuide(model, {"*": Dropout(0.5)})
    with pytest.raises(ValueError, match="`input_dim` where that of a weight is not known"):
        ps.StructuredGuide(model, {"experts": Dropout(0.5), "*": Dropout(0.5)})
    families = {"experts": Dropout(0.5, input_dim=2), "*": Dropout(0.5)}
    draw = ps.StructuredGuide(model, families).draw()["experts"]
    per_input = (draw != 0).movedim(2, 0).flatten(1)
    assert torch.equal(per_input.any(1), per_input.all(1))
    tokens = ps.StructuredGuide(ps.bayesianize(Block(1, 4, 5, name="t")), {"*": Dropout(0.5)})
    assert isinstance(tokens["t"](), PointMass)


def test_no_image_where_inputs_are_elsewhere():
    with pytest.raises(ValueError, match=r"must have dimension 1.*rsample"):
        BernoulliDropout(torch.ones(4, 3), 0.5, input_dim=0).image(torch.ones(2, 3))
    with pytest.raises(ValueError, match="`input_dim` must be a dimension"):
        BernoulliDropout(torch.ones(4, 3), 0.5, input_dim=2)
    with pytest.raises(ValueError, match="`groups` must divide"):
        BernoulliDropout(torch.ones(4, 3), 0.5, groups=3)
