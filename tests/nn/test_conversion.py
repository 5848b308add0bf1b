"""bayesianize: what it converts, what it leaves, what it shares."""

import copy
import pickle

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
import torch.nn.functional as F
from pyro.infer import SVI
from pyro.nn import PyroModule
from torch import nn

import pyro_structvi as ps
from pyro_structvi.sites.finding import find_declared_sites


def sites_of(module):
    return {name: found.prior for name, found in find_declared_sites(module).items()}


class TiedNet(nn.Module):
    """A decoder with the encoder's weight."""

    def __init__(self):
        super().__init__()
        self.decoder = nn.Linear(3, 3)
        self.encoder = nn.Linear(3, 3)
        self.decoder.weight = self.encoder.weight

    def forward(self, x):
        return self.decoder(torch.tanh(self.encoder(x)))


class SharedNet(nn.Module):
    """One layer used in two places of the tree."""

    def __init__(self):
        super().__init__()
        layer = nn.Linear(3, 3)
        self.first = nn.Sequential(layer, nn.Tanh())
        self.second = layer

    def forward(self, x):
        return self.second(self.first(x))


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


@pytest.mark.parametrize("prior", [1.0, dist.Laplace(0.0, 1.0)])
def test_priors_move_and_convert_with_the_net(prior):
    bayes_net = ps.bayesianize(nn.Linear(3, 2), prior=prior)
    for dtype in (torch.float32, torch.float64):
        bayes_net = bayes_net.to(dtype)
        assert sites_of(bayes_net)["weight"].sample().dtype == dtype
        assert poutine.block(bayes_net)(torch.zeros(1, 3, dtype=dtype)).dtype == dtype
    assert sites_of(bayes_net.to("meta"))["weight"].mean.device.type == "meta"


# ---- tied and shared weights ---------------------------------------------------------------------


@pytest.mark.parametrize("net_class", [TiedNet, SharedNet])
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
