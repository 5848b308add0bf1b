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


class Residual(nn.Module):
    """A net with a custom forward."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv1d(2, 1, 1))
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        return self.head((x + self.body(x)).squeeze(1))


@pytest.mark.parametrize("net", [Residual(), TiedNet()])
def test_the_net_itself_stays_as_it_is(net):
    before, types = copy.deepcopy(net.state_dict()), [type(module) for module in net.modules()]
    bayes_net = ps.bayesianize(net)
    assert [type(module) for module in net.modules()] == types
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert isinstance(bayes_net, PyroModule)
    assert not list(bayes_net.parameters())


# ---- priors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prior", "weight", "bias"),
    [
        (ps.FanIn(2.0, vector_scale=0.3), 2 / 3**0.5, 0.3),
        ({"weight": torch.arange(1.0, 7).reshape(2, 3), "bias": 1.0}, None, 1.0),
        (lambda name, value: 1.0 + len(name) + value.dim(), 9.0, 6.0),
    ],
)
def test_priors_in_several_forms(prior, weight, bias):
    sites = sites_of(ps.bayesianize(nn.Linear(3, 2), prior=prior))
    expected = prior["weight"] if weight is None else torch.full((2, 3), weight)
    torch.testing.assert_close(sites["weight"].stddev, expected.double())
    torch.testing.assert_close(sites["bias"].stddev, torch.full((2,), bias))


def test_a_prior_by_pattern_first_match_wins():
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    sites = sites_of(ps.bayesianize(net, prior={"0.weight": 2.0, "*.weight": 3.0, "*": 4.0}))
    scales = {name: prior.stddev.flatten()[0].item() for name, prior in sites.items()}
    assert scales == {"0.weight": 2, "0.bias": 4, "1.weight": 3, "1.bias": 4}


@pytest.mark.parametrize("prior", [1.0, dist.Laplace(0.0, 1.0)])
def test_priors_move_and_convert_with_the_net(prior):
    bayes_net = ps.bayesianize(nn.Linear(3, 2), prior=prior)
    for dtype in (torch.float32, torch.float64):
        bayes_net = bayes_net.to(dtype)
        assert sites_of(bayes_net)["weight"].sample().dtype == dtype
        assert poutine.block(bayes_net)(torch.zeros(1, 3, dtype=dtype)).dtype == dtype
    assert sites_of(bayes_net.to("meta"))["weight"].mean.device.type == "meta"


def test_models_can_be_pickled():
    model = ps.Classifier(ps.bayesianize(TiedNet(), prior=0.5), num_data=10)
    model = pickle.loads(pickle.dumps(model))
    poutine.block(model)(torch.zeros(2, 3))
    assert set(sites_of(model)) == {"net.decoder.weight", "net.decoder.bias", "net.encoder.bias"}


# ---- tied and shared weights ---------------------------------------------------------------------


@pytest.mark.parametrize("net_class", [TiedNet, SharedNet])
def test_shared_weights_stay_one_site(net_class):
    model = ps.Regressor(ps.bayesianize(net_class()), num_data=12, noise_scale=0.3)
    x, y = torch.randn(12, 3), torch.randn(12, 3)
    guide = ps.KTiedGuide(model, init_scale=0.5)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), ps.StructuredELBO())
    svi.step(x, y)
    weights = [name for name in guide.site_names if name.endswith("weight")]
    assert len(weights) == 1
    values = guide.draw()
    output = poutine.condition(model, values)(x)
    weight = values[weights[0]]
    biases = [values[name] for name in guide.site_names if name.endswith("bias")]
    first, second = (biases * 2)[:2]
    expected = F.linear(torch.tanh(F.linear(x, weight, first)), weight, second)
    if net_class is TiedNet:
        by_name = {name: values[name] for name in guide.site_names}
        hidden = torch.tanh(F.linear(x, weight, by_name["net.encoder.bias"]))
        expected = F.linear(hidden, weight, by_name["net.decoder.bias"])
    torch.testing.assert_close(output, expected)


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("net", [nn.ReLU(), nn.LayerNorm(3)])
def test_a_net_without_weights(net):
    with pytest.raises(ValueError, match="`net` has no weights to put a prior on"):
        ps.bayesianize(net)


@pytest.mark.parametrize(
    ("prior", "pattern"),
    [
        ({"fcc.*": 1.0, "0.bias": 1.0, "*": None}, "fcc.*"),
        ({"0.*": {"0.weight": 1.0, "1.bias": 2.0, "*": 3.0}, "*": 1.0}, "1.bias"),
    ],
)
def test_a_pattern_of_a_prior_that_matches_nothing(prior, pattern):
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    message = f"The pattern '{pattern}' of `prior` matches none of the parameters \\['0.weight'"
    with pytest.raises(ValueError, match=message.replace("*", r"\*")):
        ps.bayesianize(net, prior)


def test_a_net_that_is_none():
    with pytest.raises(TypeError, match=r"`net` must be a torch.nn.Module, but got a function"):
        ps.bayesianize(lambda x: x)


@pytest.mark.parametrize(
    ("prior", "error", "message"),
    [
        (0.0, ValueError, "`prior for weight` must be a positive number, but got 0.0"),
        (float("nan"), ValueError, "`prior for weight` must be a positive number"),
        (
            torch.tensor([1.0, 2.0]),
            ValueError,
            r"must broadcast to the shape of 'weight' = \(2, 3\)",
        ),
        (-torch.ones(3), ValueError, "`prior for weight` must be positive and finite"),
        ({"bias": 1.0}, ValueError, r"No pattern of the prior \['bias'\] matches.*'weight'"),
        (
            "wide",
            TypeError,
            "`prior` must be a number, a torch.Tensor, a FanIn, a HierarchicalScale, a Distribution",
        ),
        (True, TypeError, "`prior` must be a number, a torch.Tensor, a FanIn"),
        (
            dist.MixtureSameFamily(
                dist.Categorical(torch.ones(2)), dist.Normal(torch.zeros(2), torch.ones(2))
            ),
            TypeError,
            "must be a distribution that its tensor arguments define",
        ),
    ],
)
def test_a_prior_that_does_not_fit(prior, error, message):
    with pytest.raises(error, match=message):
        ps.bayesianize(nn.Linear(3, 2), prior=prior)


def test_fan_in_scales_must_be_positive():
    with pytest.raises(ValueError, match="`vector_scale` must be a positive number, but got 0"):
        ps.FanIn(vector_scale=0)


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
