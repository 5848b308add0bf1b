"""The translation of a model to NumPyro has its log joint, or is refused with a reason."""

import importlib
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
import torch.nn.functional as F
from numpyro.infer.util import log_density
from pyro.nn import PyroModule, PyroSample
from torch import nn

import pyro_structvi.reference
from pyro_structvi import (
    BinaryClassifier,
    Classifier,
    FanIn,
    MeanFieldGuide,
    PoissonRegressor,
    Regressor,
    bayesianize,
)
from pyro_structvi.distributions import IsotropicStudentT
from pyro_structvi.moments.nonlinear import NONLINEARITIES
from pyro_structvi.moments.rules import RULES
from pyro_structvi.reference import jax_net, to_numpyro
from pyro_structvi.reference.jax_net import JaxNet

pytestmark = pytest.mark.usefixtures("little_compiling")
BATCH, NUM_DATA = 6, 24


def make_regressor(net, prior=1.0, noise_scale=0.3):
    return Regressor(bayesianize(net, prior, normalization=True), NUM_DATA, noise_scale)


class Calls(nn.Module):
    """A net whose forward pass is a linear layer and any function of its output ``(batch, 4)``."""

    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.register_buffer("offset", torch.arange(4.0))
        self.function = function

    def forward(self, x):
        return self.function(self.linear(x) + self.offset)


def make_mlp(outputs=2):
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs))


def make_data(outputs=2):
    generator = torch.Generator().manual_seed(1)
    x = 2 * torch.randn(BATCH, 3, generator=generator)
    return x, torch.randn(BATCH, outputs, generator=generator)


def evaluate_pyro(model, x, y):
    """Draw all sites from a distribution other than the prior; return them and the log joint."""
    generator = torch.Generator().manual_seed(2)
    prior = poutine.trace(model).get_trace(x)
    values = {
        name: 0.1 + 0.8 * torch.rand(node["value"].shape, generator=generator)
        for name, node in prior.nodes.items()
        if node["type"] == "sample" and name not in ("data", "obs")
        if not node["infer"].get("_deterministic")
    }
    trace = poutine.trace(poutine.condition(model, values)).get_trace(x, y)
    return values, trace.log_prob_sum().item()


def evaluate_numpyro(translated, x, y, values):
    arrays = {name: value.numpy() for name, value in values.items()}
    # As one function: JAX compiles it once, instead of each operation by itself.
    log_joint = jax.jit(lambda x, y, arrays: log_density(translated, (x, y), {}, arrays)[0])
    with jax.enable_x64(True):
        return log_joint(x.numpy(), y.numpy(), arrays).item()


def assert_same_log_joint(model, x, y):
    translated = to_numpyro(model)
    values, expected = evaluate_pyro(model, x, y)
    assert values
    assert evaluate_numpyro(translated, x, y, values) == pytest.approx(expected, rel=1e-8)
    return values


class Residual(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.activation = nn.GELU()

    def forward(self, x):
        return x + 0.5 * self.activation(self.linear(x))


def add_to_relu_in_place(h):
    return F.relu(h, inplace=True) + h


def relu_of_a_view(h):
    """Views whose tensors are not read again may be changed in place, and shapes may be read."""
    doubled = h * 2
    shape = doubled.shape
    view = F.relu(doubled.view(-1, h.size(0)), inplace=True)
    return F.elu(view, inplace=True).reshape(shape[0], -1)


def augmented(h):
    """``own`` and ``h`` are one tensor, and ``double`` is a number."""
    h = h * 2
    own, count = h, h.size(0)
    double = count
    double *= 2
    own += 1
    own *= h
    own -= 0.5
    own /= 3
    own **= 2
    same = F.dropout(own, training=False)
    same += 1
    return own + h * double / count


@pytest.mark.parametrize(
    "prior",
    [
        0.7,
        {"2.weight": torch.tensor([[0.5], [2.0]]), "*": 1.0},
        {"2.weight": torch.linspace(0.5, 2, 10).reshape(2, 5), "*": FanIn(scale=1.4)},
        {
            "0.weight": dist.StudentT(3.0, 0.2, 0.5),
            "0.bias": dist.Normal(torch.linspace(-1, 1, 5), 0.4),
            "2.weight": dist.Laplace(torch.tensor([[0.1], [0.2]]), 0.8),
            "2.bias": dist.Cauchy(0.3, 2.0),
        },
        {
            "0.weight": dist.HalfNormal(0.9),
            "0.bias": dist.Gamma(2.0, 3.0),
            "2.weight": dist.LogNormal(0.2, 0.6),
            "2.bias": dist.InverseGamma(2.5, 1.5),
        },
        {
            "0.weight": dist.Beta(2.0, 3.0),
            "0.bias": dist.Exponential(1.7),
            "2.weight": dist.Uniform(0.0, 1.5),
            "2.bias": dist.HalfCauchy(0.9),
        },
        pytest.param(lambda name, value: IsotropicStudentT(3.0, 0.6, value.shape), id="t"),
        pytest.param(
            lambda name, value: IsotropicStudentT(3.0, 0.6, value.shape, dim=value.dim() - 1),
            id="t by input",
        ),
    ],
    ids=str,
)
def test_log_joint_agrees_for_each_prior(prior):
    assert_same_log_joint(make_regressor(make_mlp(), prior), *make_data())


COUNTS = torch.tensor([[0, 3], [1, 0], [2, 1], [7, 1], [0, 0], [1, 2]], dtype=torch.float64)
FLOOR = {"noise": "heteroscedastic", "noise_floor": 0.3}
GAMMAS = dist.Gamma(2.0, 4.0).expand([2]).to_event(1)


@pytest.mark.parametrize(
    ("make", "outputs", "y"),
    [
        (lambda net: Regressor(net, NUM_DATA, noise="heteroscedastic"), 4, COUNTS),
        (lambda net: Regressor(net, NUM_DATA, torch.tensor([0.2, 0.7]), df=2.5), 2, COUNTS),
        (lambda net: Regressor(net, NUM_DATA, **FLOOR, df="learned"), 4, COUNTS),
        pytest.param(
            lambda net: Regressor(net, NUM_DATA, dist.Gamma(2.0, 4.0)),
            *(2, COUNTS),
            marks=pytest.mark.slow,
        ),
        (lambda net: Regressor(net, NUM_DATA, GAMMAS), 2, COUNTS),
        (lambda net: PoissonRegressor(net, NUM_DATA), 2, COUNTS),
        (lambda net: BinaryClassifier(net, NUM_DATA), 2, COUNTS.clamp_max(1)),
        (lambda net: Classifier(net, NUM_DATA), 4, torch.tensor([0, 1, 2, 3, 0, 1])),
    ],
    ids=["scales", "student", "both", "noise", "noises", "counts", "labels", "classes"],
)
def test_log_joint_agrees_for_each_likelihood(make, outputs, y):
    model = make(bayesianize(make_mlp(outputs=outputs), 1.0))
    assert_same_log_joint(model, make_data()[0], y)


@pytest.mark.parametrize(
    "activation",
    [
        *(nn.ELU(0.6), nn.GELU(), nn.GELU("tanh"), nn.LeakyReLU(0.3, inplace=True), nn.ReLU()),
        *(nn.Sigmoid(), nn.SiLU(), nn.Softplus(beta=2.0, threshold=3.0), nn.Tanh(), nn.Identity()),
    ],
    ids=str,
)
def test_activations_and_their_derivatives_are_torchs(activation):
    # From deep in both tails to the middle; no kink is on the grid.
    grid = torch.cat([torch.linspace(-7, 7, 200), torch.tensor([-800.0, -40, 40, 800])])
    leaf = grid.clone().requires_grad_()
    expected = activation(leaf * 1.0)
    (derivative,) = torch.autograd.grad(expected.sum(), leaf)
    net = JaxNet(activation, [])

    def value_and_slopes(x):
        values, vjp = jax.vjp(lambda x: net(x, {}), x)
        return values, vjp(jax.numpy.ones_like(values))[0]

    with jax.enable_x64(True):
        values, slopes = jax.jit(value_and_slopes)(grid.numpy())
    np.testing.assert_allclose(values, expected.detach().numpy(), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(slopes, derivative.numpy(), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    "function",
    [
        lambda h: torch.add(h, h.add(1)) - torch.sub(h, 2),
        lambda h: torch.mul(h, h).mul(0.1) / torch.div(h, 3),
        lambda h: (2 - h) * -(h**2),
        lambda h: h @ h.T,
        lambda h: torch.matmul(h, h.mT),
        lambda h: h.view(h.size(0), 2, -1).flatten(1),
        lambda h: h.reshape(h.shape[0], 2, 2),
        lambda h: torch.flatten(h.reshape(h.size()).view(h.size(0), 4, 1), 1, 2),
        lambda h: torch.cat([h, F.relu(h), torch.relu(h), h.relu()], dim=1),
        lambda h: torch.tanh(h) + h.tanh() + F.tanh(h),
        lambda h: torch.sigmoid(h) + h.sigmoid() + F.sigmoid(h),
        lambda h: torch.sin(h) * torch.exp(0.1 * h),
        lambda h: h.unsqueeze(-1).squeeze(2).squeeze(1),
        lambda h: h.unsqueeze(1).unsqueeze(-1).squeeze((1, 2, -1)),
        lambda h: h[:, 1:] * h[:, :1],
        lambda h: h[:, [0, 3]] * h[[1], 2:],
        lambda h: h[:, [True, False, True, True]],
        lambda h: h.view(-1, 2, 2)[0, :, [0, 1]] - h.view(-1, 2, 2)[[0, 1], :, 0],
        lambda h: F.linear(h, h),
        lambda h: F.dropout(h, 0.5, training=False),
        add_to_relu_in_place,
        relu_of_a_view,
        augmented,
    ],
)
def test_functions_are_torchs(function):
    x, net = make_data()[0], Calls(function).requires_grad_(False)
    with jax.enable_x64(True):
        found = jax.jit(JaxNet(net, []))(x.numpy(), {})
    np.testing.assert_allclose(found, net(x), rtol=1e-12, atol=1e-13)


def test_log_joint_agrees_for_nested_modules():
    inner = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), Residual(), nn.Sequential(nn.ReLU()))
    net = nn.Sequential(nn.Linear(3, 5), inner, nn.Linear(5, 2, bias=False))
    values = assert_same_log_joint(make_regressor(net).eval(), *make_data())
    assert "net.1.2.linear.weight" in values


def test_bare_frozen_and_tied_layers_are_translated():
    net = make_mlp()
    net[0].requires_grad_(False)
    model = make_regressor(net)
    pyro.clear_param_store()
    assert set(assert_same_log_joint(model, *make_data())) == {"net.2.weight", "net.2.bias"}
    to_numpyro(model)
    assert not list(pyro.get_param_store())
    assert not any(parameter.requires_grad for parameter in model.net[0].parameters())
    plain = nn.Sequential(bayesianize(nn.Linear(3, 2), 1.0), nn.Tanh())
    for own in (make_regressor(nn.Linear(3, 2)), Regressor(plain, NUM_DATA, 0.3)):
        assert_same_log_joint(own, *make_data())
    tied = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    tied[2].weight = tied[0].weight
    x, y = make_data(outputs=3)
    values = assert_same_log_joint(make_regressor(tied), x.unsqueeze(1), y.unsqueeze(1))
    assert set(values) == {"net.0.weight", "net.0.bias", "net.2.bias"}


def test_the_output_of_a_likelihood_is_translated():
    class Named(nn.Linear):
        def forward(self, x):
            return SimpleNamespace(logits=super().forward(x))

    x, y = make_data()
    for output in (lambda result: 3 * result[:, :2], lambda result: result.tanh()[:, 1:]):
        assert_same_log_joint(Regressor(bayesianize(make_mlp(3), 1.0), 24, 0.3, output), x, y)
    assert_same_log_joint(Regressor(bayesianize(Named(3, 2), 1.0), 24, 0.3), x, y)


def test_sites_written_by_hand_are_translated():
    class Scaled(PyroModule):
        def __init__(self):
            super().__init__()
            self.scale = PyroSample(dist.Normal(0.0, torch.ones(2)).to_event(1))
            self.unused = PyroSample(dist.Normal(0.0, 1.0))

        def forward(self, x):
            return x[:, :2] * self.scale

    model = Regressor(Scaled(), NUM_DATA, 0.3)
    assert set(assert_same_log_joint(model, *make_data())) == {"net.scale"}
    MeanFieldGuide(model)  # from now on each pass samples all sites
    assert set(assert_same_log_joint(model, *make_data())) == {"net.scale", "net.unused"}


def test_layers_that_a_net_does_not_use_have_their_prior():
    net = Calls(lambda x: x[:, :2])
    net.unused = nn.Linear(3, 2, bias=False)
    values = assert_same_log_joint(make_regressor(net), *make_data())
    assert "net.unused.weight" in values


@pytest.mark.slow
def test_the_translation_samples_and_returns_what_the_model_does():
    import numpyro

    x, _ = make_data()
    model = make_regressor(make_mlp(), noise_scale=dist.HalfNormal(0.5))
    translated = numpyro.handlers.seed(to_numpyro(model), 0)
    trace = numpyro.handlers.trace(translated).get_trace(x.numpy())
    assert trace["net.0.weight"]["value"].shape == (5, 3)
    assert trace["obs"]["value"].shape == (BATCH, 2)
    assert trace["obs"]["value"].dtype == np.float32
    assert translated(x.numpy()).shape == (BATCH, 2)


def choose_by_value(h):
    return h if h.sum() > 0 else -h


def elsewhere(h):
    """A function of another library."""
    return torch.overrides.handle_torch_function(elsewhere, (h,), h)


def read_after_its_view_has_changed(h):
    h = h * 2
    F.relu(h.view(-1, 2), inplace=True)
    return h


def read_a_view_after_its_tensor_has_changed(h):
    h = h * 2
    view = h[:, :2]
    F.relu(h, inplace=True)
    return view.tanh()


def read_after_a_view_has_grown(h):
    h = h * 2
    view = h[:1]
    view += 1
    return h.tanh()


def sample_inside(h):
    return h + pyro.sample("z", dist.Normal(0.0, 1.0))


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (nn.Conv1d(3, 1, 1), r"`conv1d` .* module 'net' \(Conv1d\) has no .*Supported.* cat, div"),
        (
            nn.Sequential(nn.Linear(3, 5), nn.Sequential(nn.LayerNorm(5))),
            r"module 'net\.1\.0' \(LayerNorm\) has no translation",
        ),
        (Calls(torch.erf), r"function `erf` in .* 'net' \(Calls\) has no translation"),
        (Calls(lambda h: h.cumsum(0)), r"function `cumsum` in .* 'net' \(Calls\) has no"),
        (
            nn.Sequential(Calls(lambda h: torch.div(h, 2, rounding_mode="floor"))),
            r"function `div` in .* 'net\.0' \(Calls\) has arguments without.*rounding_mode",
        ),
        (Calls(lambda h: h.new_zeros(h.ndim)), r"attribute `ndim` of a tensor in .* 'net' \(Calls"),
        (
            nn.Sequential(Calls(choose_by_value)),
            r"module 'net\.0' \(Calls\) cannot be traced \(.*control flow",
        ),
        (Calls(elsewhere), r"function `\S+\.elsewhere` in"),
        (Calls(read_after_its_view_has_changed), r"is read by `output` after a view of it, or"),
        (Calls(read_a_view_after_its_tensor_has_changed), r"is read by `tanh` after a view of it"),
        (Calls(read_after_a_view_has_grown), r"is read by `tanh` after a view of it"),
        (Calls(lambda h: h + torch.randn(3)), r"draws random numbers inside a forward pass"),
        (Calls(sample_inside), r"draws the site 'z' inside a forward pass"),
        (nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)), r"'net\.1' \(Dropout\) is active.*eval"),
    ],
)
def test_a_net_without_translation_is_refused(net, message):
    with pytest.raises(NotImplementedError, match=f"(?s){message}"):
        to_numpyro(make_regressor(net))


def test_models_without_translation_are_refused():
    by_hand = PyroModule[nn.Linear](3, 1)
    by_hand.weight = PyroSample(lambda module: dist.Normal(0.0, 1.0).expand([1, 3]).to_event(2))
    points = bayesianize(nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5)), normalization=False)
    net, data = bayesianize(nn.Linear(3, 1)), (torch.randn(5, 3), torch.randn(5, 1))
    frozen = nn.Linear(3, 1).requires_grad_(False)

    class Doubled(Regressor):
        def observe(self, output, plates, y):
            return super().observe(2 * output, plates, y)

    hooked = Regressor(bayesianize(nn.Linear(3, 1)), 5, 0.3)
    hooked.register_forward_pre_hook(lambda module, args: (2 * args[0], *args[1:]))
    with pytest.raises(TypeError, match=r"must be a Classifier, .* or Regressor, but got"):
        to_numpyro(nn.Linear(3, 1))
    with pytest.raises(ValueError, match=r"no latent site to sample.*bayesianize\(net"):
        to_numpyro(Regressor(frozen, 5, 0.3))
    for model, message in (
        (Regressor(net, 5, 0.3, standardize=data), "`standardize` must be None"),
        (Classifier(net, 5, class_weights=torch.ones(1)), "`class_weights` must be None"),
        (
            make_regressor(nn.Linear(3, 1), dist.Gumbel(0.0, 1.0)),
            r"site 'net\.weight' is a Gumbel, .* Supported are Beta, .*Uniform",
        ),
        (hooked, "Hooks of a Regressor have no translation"),
        (Doubled(net, 5, 0.3), "A Doubled has its own `observe`, .* Translate a Regressor"),
        (Regressor(by_hand, NUM_DATA, 0.3), r"site 'net\.weight' is a function of its modul"),
        (
            Regressor(points, NUM_DATA, 0.3),
            r"module 'net\.1' \(LayerNorm\) has point estimates, \['weight', 'bias'\].*freeze",
        ),
    ):
        with pytest.raises(NotImplementedError, match=message):
            to_numpyro(model)


@pytest.mark.parametrize("missing", ["numpyro", "jax"])
def test_a_missing_library_is_named_with_its_extra(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    message = r'cannot be imported.*pip install "pyro-structvi\[reference\]"'
    monkeypatch.delattr(pyro_structvi.reference, "nuts")
    importlib.reload(pyro_structvi.reference)
    with pytest.raises(ImportError, match=message):
        _ = pyro_structvi.reference.nuts


def test_what_is_translated_has_moments_too():
    """The two tables have nothing in common but names: a function is added to both."""
    inside_of_graphs = {"getattr", "size", "linear"}  # attributes, and what is read as a map
    inside_of_graphs |= {f"i{name}" for name in jax_net._AUGMENTED}  # of values
    assert {*jax_net._FUNCTIONS} - {*RULES, *NONLINEARITIES} == inside_of_graphs
