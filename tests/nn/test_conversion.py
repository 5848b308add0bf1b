"""bayesianize: what it converts, what stays a point estimate, what it shares."""

import copy
import pickle
import re
from collections import OrderedDict

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
import torch.nn.functional as F
from pyro.infer import SVI, Trace_ELBO
from pyro.nn import PyroModule
from torch import nn
from torch.func import functional_call

import pyro_structvi as ps
from pyro_structvi.nn import PointEstimateWarning, RankOneLinear
from pyro_structvi.sites.finding import find_declared_sites
from tests.models import regression_data


def sites_of(module):
    return {name: found.prior for name, found in find_declared_sites(module).items()}


class TiedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = nn.Linear(3, 3)
        self.encoder = nn.Linear(3, 3)
        self.decoder.weight = self.encoder.weight

    def forward(self, x):
        return self.decoder(torch.tanh(self.encoder(x)))


def shared_net():
    """Return a net with one layer in two places of the tree."""
    layer = nn.Linear(3, 3)
    return nn.Sequential(OrderedDict(first=nn.Sequential(layer, nn.Tanh()), second=layer))


def test_the_net_itself_stays_as_it_is():
    net = TiedNet()
    before, types = copy.deepcopy(net.state_dict()), [type(module) for module in net.modules()]
    bayes_net = ps.bayesianize(net)
    assert [type(module) for module in net.modules()] == types
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert isinstance(bayes_net, PyroModule)
    assert not list(bayes_net.parameters())
    again = pickle.loads(pickle.dumps(bayes_net))
    poutine.block(again)(torch.zeros(2, 3))
    assert {*sites_of(again)} == {"decoder.weight", "decoder.bias", "encoder.bias"}


# ---- priors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prior", "weight", "bias"),
    [
        (ps.FanIn(2.0, vector_scale=0.3), 2 / 3**0.5, 0.3),
        ({"weight": torch.arange(1.0, 7).reshape(2, 3), "bias": 1.0}, None, 1.0),
        (lambda name, value: 1.0 + len(name) + value.dim(), 9.0, 6.0),
        ({"w*": 2.0, "weight": 3.0, "*": 4.0}, 2.0, 4.0),  # the first match wins
    ],
)
def test_priors_in_several_forms(prior, weight, bias):
    sites = sites_of(ps.bayesianize(nn.Linear(3, 2), prior=prior))
    expected = prior["weight"] if weight is None else torch.full((2, 3), weight)
    torch.testing.assert_close(sites["weight"].stddev, expected.double())
    torch.testing.assert_close(sites["bias"].stddev, torch.full((2,), bias))


# ---- tied and shared weights ---------------------------------------------------------------------


@pytest.mark.parametrize("net_class", [TiedNet, shared_net])
def test_shared_weights_stay_one_site(net_class):
    model = ps.Regressor(ps.bayesianize(net_class()), num_data=12, noise_scale=0.3)
    x, y = torch.randn(12, 3), torch.randn(12, 3)
    guide = ps.KTiedGuide(model, init_scale=0.5)
    SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), ps.StructuredELBO()).step(x, y)
    values = guide.draw()
    (weight,) = (value for name, value in values.items() if name.endswith("weight"))
    names = ["net.encoder.bias", "net.decoder.bias"]
    first, second = (
        [values[name] for name in names]
        if net_class is TiedNet
        else [value for name, value in values.items() if name.endswith("bias")] * 2
    )
    expected = F.linear(torch.tanh(F.linear(x, weight, first)), weight, second)
    torch.testing.assert_close(poutine.condition(model, values)(x), expected)


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prior", "error", "message"),
    [
        (
            {"fcc.*": 1.0, "0.bias": 1.0, "*": None},
            ValueError,
            r"The pattern 'fcc.\*' of `prior` matches none of the parameters \['0.weight'",
        ),
        (
            {"0.*": {"0.weight": 1.0, "1.bias": 2.0, "*": 3.0}, "*": 1.0},
            ValueError,
            "The pattern '1.bias' of `prior` matches none",
        ),
        ({"*.bias": 1.0}, ValueError, r"No pattern of the prior \['\*.bias'\] matches.*'0.weight'"),
        (torch.ones(4), ValueError, r"must broadcast to the shape of '0.weight' = \(2, 3\)"),
        (
            dist.MixtureSameFamily(
                dist.Categorical(torch.ones(2)), dist.Normal(torch.zeros(2), torch.ones(2))
            ),
            TypeError,
            "must be a distribution that its tensor arguments define",
        ),
        (dist.Stable(1.5, 0.5, coords="S"), TypeError, "that its tensor arguments define"),
    ],
    ids=str,
)
def test_a_prior_that_does_not_fit(prior, error, message):
    with pytest.raises(error, match=message):
        ps.bayesianize(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), prior)
    with pytest.raises(ValueError, match="`net` has no weights to put a prior on"):
        ps.bayesianize(nn.LayerNorm(3))


class WritesItself(nn.Linear):
    """Writes its weight into a state dict, as the layers of PyTorch Geometric do."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "weight"] = self.weight if keep_vars else self.weight.detach()


def test_a_state_dict_holds_no_draw_and_loads():
    nets = [ps.bayesianize(nn.Sequential(WritesItself(3, 2), nn.Linear(2, 1))) for _ in range(2)]
    state = nets[0].state_dict()
    assert not [name for name in state if name.endswith((".weight", ".bias"))]
    nets[1].load_state_dict(state)
    assert nets[1].state_dict().keys() == state.keys()


# ---- points --------------------------------------------------------------------------------------


def test_normalization_layers_stay_and_that_is_said():
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    names = ["1.weight", "1.bias", "2.weight", "2.bias"]
    with pytest.warns(PointEstimateWarning, match=re.escape(str(names))):
        bayes_net = ps.bayesianize(net)
    assert set(sites_of(bayes_net)) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert [name for name, _ in bayes_net.named_parameters()] == names
    model = ps.Regressor(bayes_net, num_data=12, noise_scale=0.3)
    ps.fit(model, ps.MeanFieldGuide(model), regression_data(), num_steps=2, progress=False)
    assert torch.equal(net[1].weight, torch.ones(4)), "they are copies"
    assert not torch.equal(model.net[1].weight, torch.ones(4))


def test_frozen_parameters_stay_frozen_without_a_copy_and_keep_their_class():
    net = nn.Sequential(Quantized(3, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    net[:2].requires_grad_(False)
    bayes_net = ps.bayesianize(net)
    assert bayes_net[0].weight is net[0].weight
    assert bayes_net[1].weight.data_ptr() == net[1].weight.data_ptr()
    assert set(sites_of(bayes_net)) == {"2.weight", "2.bias"}
    model = ps.Regressor(bayes_net, num_data=12, noise_scale=0.3)
    before = [net[i].weight.clone() for i in (0, 1)]
    ps.fit(model, ps.MeanFieldGuide(model), regression_data(), num_steps=3, progress=False)
    assert not list(model.parameters())
    for i in (0, 1):
        assert torch.equal(model.net[i].weight, before[i])
        assert not net[i].weight.requires_grad


def frozen_later():
    layers = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)
    net = ps.bayesianize(nn.Sequential(*layers), prior={"0.*": None, "*": 1.0})
    net[0].requires_grad_(False)
    return net


def frozen_beside_a_part():
    return nn.Sequential(nn.Linear(3, 4).requires_grad_(False), ps.bayesianize(nn.Linear(4, 1)))


def frozen_under_factors():
    return nn.Sequential(RankOneLinear(nn.Linear(3, 1).requires_grad_(False)))


@pytest.mark.parametrize("make_net", [frozen_later, frozen_beside_a_part, frozen_under_factors])
def test_what_is_frozen_outside_of_the_conversion_stays_frozen(make_net):
    net, data = make_net(), regression_data()
    model = ps.Regressor(net, num_data=12, noise_scale=0.3)
    guide, before = ps.MeanFieldGuide(model), net[0].weight.clone()
    ps.fit(model, guide, data, num_steps=2, progress=False)
    SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), ps.StructuredELBO()).step(*data)
    assert torch.equal(net[0].weight, before)
    assert not net[0].weight.requires_grad


def normalized():
    net = nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1))
    return ps.bayesianize(net, normalization=False)


@pytest.mark.parametrize(
    "make_net",
    [
        *(normalized, lambda: RankOneLinear(nn.Linear(3, 1))),
        lambda: ps.LastLayer(nn.Linear(3, 4), nn.Linear(4, 1)),
    ],
)
def test_a_second_model_trains_its_own_parameters(make_net):
    """Those of the first model have the same names in Pyro's param store."""
    data = regression_data()
    for net in (make_net(), make_net()):
        model = ps.Regressor(net, num_data=12, noise_scale=0.3)
        before = next(net.parameters()).clone()
        svi = SVI(model, ps.MeanFieldGuide(model), pyro.optim.Adam({"lr": 0.1}), Trace_ELBO())
        svi.step(*data)
        assert not torch.equal(next(net.parameters()), before)


def test_a_frozen_transpose_is_another_parameter():
    """Both have the memory and the shape of one matrix."""
    net = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(2)), nn.Linear(3, 1))
    net[1].weight = nn.Parameter(net[0].weight.detach().t())
    net[:2].requires_grad_(False)
    guide = ps.MeanFieldGuide(ps.Regressor(ps.bayesianize(net), num_data=12, noise_scale=0.3))
    (x, _), draw = regression_data(), guide.median()
    own = {name.removeprefix("net."): value for name, value in draw.items()}
    torch.testing.assert_close(guide.to_net()(x), functional_call(net, own, (x,)))


class Redirecting(nn.Module):
    """Looks up in a child what it has not, as the wrappers of adapters do."""

    def __init__(self):
        super().__init__()
        self.inside = nn.ModuleDict({"own": nn.Linear(3, 1)})

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "inside":
                raise KeyError(name) from None
            return getattr(self._modules["inside"]["own"], name)

    def forward(self, x):
        return self.inside["own"](x) + self.in_features


class FourBits(nn.Parameter):
    """A parameter that is read by its class, as in bitsandbytes."""

    def __new__(cls, data, factor):
        self = torch.Tensor._make_subclass(cls, data, False)
        self.factor = factor
        return self


class Quantized(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.weight = FourBits(self.weight.detach(), 2.0)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.factor * self.weight.detach(), self.bias)


def test_weights_that_cannot_be_random_are_named():
    with pytest.raises(
        ValueError, match=r"for weight` must be None for a complex .*view_as_complex"
    ):
        ps.bayesianize(nn.Linear(3, 2, dtype=torch.complex128))
    with pytest.raises(ValueError, match=r"\['0.weight', '0.bias'\] have none. Call a lazy net"):
        ps.bayesianize(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1)))
    traced = torch.jit.trace(nn.Linear(3, 4), torch.zeros(5, 3))
    with pytest.raises(TypeError, match=r"\['0'\] are of TorchScript.* the net that was scripted"):
        ps.bayesianize(nn.Sequential(traced, nn.Linear(4, 1)))
    with pytest.raises(ValueError, match=r"\['weight', 'bias'\] have none.*to_empty"):
        ps.bayesianize(nn.Linear(2, 1, device="meta"))


def test_nets_that_redirect_attributes_become_bayesian():
    net = nn.Sequential(Redirecting(), nn.Linear(1, 1))
    bayes_net = ps.bayesianize(net, 1.0)
    assert isinstance(bayes_net[0], Redirecting)
    x, y = regression_data()
    model = ps.Regressor(bayes_net, num_data=12, noise_scale=0.3)
    guide = ps.MeanFieldGuide(model, init_scale=1e-9)
    guide.initialize(x, y)
    assert len(guide.site_names) == 4
    torch.testing.assert_close(
        ps.predict(model, guide, x, num_samples=1).mean, net(x).detach(), rtol=1e-6, atol=1e-6
    )
    again = pickle.loads(pickle.dumps(bayes_net))
    assert type(again[0]) is type(bayes_net[0])
    assert sites_of(again).keys() == sites_of(bayes_net).keys()


class Block(nn.Module):
    """Has its layers in a module without a class of its own."""

    def __init__(self):
        super().__init__()
        self.down = nn.Module()
        self.down.first, self.down.last = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.down.last(torch.tanh(self.down.first(x)))


@pytest.mark.parametrize("trace", [lambda net: net, torch.fx.symbolic_trace])
def test_modules_without_a_class_of_their_own_become_bayesian(trace):
    """A traced net has such ones in the places of its own, and copies itself in its own way."""
    net, (x, _) = trace(Block()), regression_data()
    model = ps.Regressor(ps.bayesianize(net, 1.0), num_data=12, noise_scale=0.3)
    guide = ps.MeanFieldGuide(model, init_scale=0.3)
    assert guide.site_names[:2] == ["net.down.first.weight", "net.down.first.bias"]
    values = guide.draw()
    own = {name.removeprefix("net."): value for name, value in values.items()}
    expected = functional_call(net, own, (x,))
    draws = {name: value.detach().unsqueeze(0) for name, value in values.items()}
    plain, copied = guide.to_net(values), copy.deepcopy(model)
    assert type(plain.down) is nn.Module
    for outputs in (plain(x), *(ps.predict(each, draws, x).mean for each in (model, copied))):
        torch.testing.assert_close(outputs, expected)


def test_a_compiled_net_is_taken_out_of_its_compiler():
    net = nn.Sequential(torch.compile(nn.Linear(3, 4)), nn.ReLU(), nn.Linear(4, 1))
    names = {"0.weight", "0.bias", "2.weight", "2.bias"}
    inside = ps.bayesianize(net, {"0.weight": 1.0, "*": 2.0})
    assert set(sites_of(inside)) == names
    assert inside[0].bias.shape == (4,)
    assert set(sites_of(ps.bayesianize(torch.compile(net)))) == names


def test_a_prior_of_none_leaves_parameters_as_they_are():
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    net[0].bias.requires_grad_(False)
    bayes_net = ps.bayesianize(net, {"2.*": 1.0, "*": None})
    assert set(sites_of(bayes_net)) == {"2.weight", "2.bias"}
    assert set(dict(bayes_net.named_parameters())) == {"0.weight", "1.weight", "1.bias"}
    assert bayes_net[0].weight is not net[0].weight  # it is trained, and the net's own is not
    by_function = ps.bayesianize(
        net, lambda name, value: 1.0 if name == "2.weight" else None, False
    )
    assert set(sites_of(by_function)) == {"2.weight"}
    with pytest.raises(ValueError, match="a `prior` that is not None"):
        ps.bayesianize(net, None)


class Bag(nn.Module):
    """The sum of embedded tokens; their padding has a row that is not zero."""

    def __init__(self, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(5, 3, padding_idx=-1)
        self.embedding.weight.data[-1] = 2.0
        self.head = nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(input=tokens).sum(1))


PADDED = torch.tensor([[0, 4, 4], [1, 2, 3], [4, 4, 4]])


@pytest.mark.parametrize("local_reparam", [True, False])
def test_padding_is_looked_up_as_it_is_and_is_a_row_of_a_plain_net(local_reparam):
    seen = []
    model = ps.Classifier(ps.bayesianize(Bag(), prior={"head.*": None, "*": 1.0}), 3)
    guide = ps.MeanFieldGuide(model, init_scale=0.5, local_reparam=local_reparam)
    x, y = PADDED, torch.tensor([0, 1, 2])
    ps.fit(model, guide, (x, y), num_steps=2, progress=False)
    model.net.embedding.register_forward_hook(lambda module, args, outputs: seen.append(outputs))
    ps.StructuredELBO().terms(model, guide, x, y)
    assert (seen[-1][2] == 2.0).all()
    assert (seen[-1][1] != 2.0).all()
    prediction = ps.predict(model, guide, x, num_samples=4)
    of_padding = prediction.functions[:, 2]
    torch.testing.assert_close(of_padding, of_padding[:1].expand_as(of_padding))
    assert (prediction.function_variance[:2] > 0).all()
    by_moments = ps.predict_moments(model, guide, x)
    torch.testing.assert_close(by_moments.mean[2], prediction.mean[2])
    draw = guide.draw()
    plain = guide.to_net(draw)
    assert (plain.embedding.weight[-1] == 2.0).all()
    assert torch.equal(plain.embedding.weight[:-1], draw["net.embedding.weight"][:-1])
    assert [*plain.state_dict()] == [*Bag().state_dict()]
    with guide.sampled(draw):
        assert torch.equal(plain(x), model.net(x))
    assert guide.sample_functions(3)(x)[:, 1].unique(dim=0).shape[0] == 3


class DirectHead(Bag):
    """Classes by the embedding's own weight, past its module, with lookups that keep padding or not."""

    def __init__(self, looks_up):
        super().__init__()
        self.looks_up = looks_up
        del self.head

    def forward(self, tokens):
        weight = self.embedding.weight
        if self.looks_up:
            return F.linear(self.embedding(tokens).sum(1), weight)
        return F.embedding(tokens, weight).sum(1)


@pytest.mark.parametrize("looks_up", [True, False])
@pytest.mark.parametrize("has_run", [True, False])
def test_a_plain_net_keeps_a_row_of_padding_for_lookups_alone(looks_up, has_run):
    model = ps.Classifier(ps.bayesianize(DirectHead(looks_up).double(), prior=1.0), 3)
    guide = ps.MeanFieldGuide(model, init_scale=0.5)
    if has_run:
        guide.initialize(PADDED, torch.tensor([0, 1, 2]))
    draw = guide.draw()
    plain = guide.to_net(draw)
    assert torch.equal(plain.embedding.weight, draw["net.embedding.weight"])
    again = ps.Classifier(ps.bayesianize(copy.deepcopy(plain), prior=1.0), 3)
    with guide.sampled(draw):
        expected = model.net(PADDED)
    torch.testing.assert_close(plain(PADDED), expected, rtol=0, atol=0)
    with ps.MeanFieldGuide(again).sampled(draw):
        torch.testing.assert_close(again.net(PADDED), expected, rtol=0, atol=0)
    torch.manual_seed(1)
    draws = guide.joint_posterior().draw_many(range(3))
    torch.manual_seed(1)
    functions = guide.sample_functions(3)(PADDED)
    torch.testing.assert_close(functions, ps.predict(model, draws, PADDED).functions)


def test_a_tied_embedding_has_a_posterior_of_its_row_of_padding():
    net = ps.bayesianize(Bag(tied=True), prior=1.0)
    guide = ps.MeanFieldGuide(ps.Classifier(net, 3), init_scale=0.5)
    with guide.sampled() as draw:
        assert (net.embedding(torch.tensor([4])) != 2.0).all()
        assert torch.equal(guide.to_net(draw)(PADDED), net(PADDED))
