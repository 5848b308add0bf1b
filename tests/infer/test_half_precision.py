"""The terms of the bound of nets in half precision are sums in float32."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import nn

import pyro_structvi as ps
from pyro_structvi.weights.torch_distributions import in_single
from tests.guide_cases import GUIDES, once

HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def single_precision(fresh_state):
    torch.set_default_dtype(torch.float32)


def linear(outputs, dtype, prior=1.0):
    return ps.bayesianize(nn.Linear(3, outputs).to(dtype), prior=prior)


def terms_at_points(model, *data):
    """Return the terms and the output at the values of a guide of points, which are not random."""
    outputs = []
    model.register_forward_hook(lambda *args: outputs.append(args[-1]))
    terms = ps.StructuredELBO().terms(model, ps.MAPGuide(model), *data)
    return terms, outputs[-1]


@pytest.mark.parametrize("autocast", [True, False])
def test_the_log_likelihood_is_not_rounded(autocast):
    dtype = torch.float32 if autocast else HALF
    x, y = torch.randn(50, 3).to(dtype), torch.randint(4, (50,))
    with torch.autocast("cpu", HALF, enabled=autocast):
        terms, logits = terms_at_points(ps.Classifier(linear(4, dtype), 60_000), x, y)
    losses = nn.functional.cross_entropy(logits.double(), y, reduction="sum")
    ours = terms.log_likelihood["obs"]
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), -1200 * losses, rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("ignore::pyro_structvi.infer.data_warnings.NumDataWarning")
@pytest.mark.parametrize(
    ("autocast", "noise_scale"), [(True, 0.1), (False, 0.1), (True, dist.LogNormal(-1.0, 0.1))]
)
def test_a_regressor_takes_targets_in_single_precision(autocast, noise_scale):
    dtype = torch.float32 if autocast else HALF
    x, y = torch.randn(50, 3).to(dtype), torch.randn(50, 2)
    model = ps.Regressor(linear(2, dtype), 5_000, noise_scale)
    if isinstance(noise_scale, float):
        assert model.noise_scale.dtype == torch.float32
    with torch.autocast("cpu", HALF, enabled=autocast):
        terms, mean = terms_at_points(model, x, y)
        scale = ps.MAPGuide(model).median().get("noise_scale", torch.tensor(0.1))
        history = ps.fit(model, ps.MeanFieldGuide(model), (x, y), num_steps=2, progress=False)
    expected = 100 * torch.distributions.Normal(mean.double(), scale.double()).log_prob(y).sum()
    torch.testing.assert_close(terms.log_likelihood["obs"].double(), expected, rtol=1e-5, atol=0)
    assert len(history.elbo) == 2


@pytest.mark.parametrize("kind", ["normal", "log normal", "low rank"])
def test_a_users_own_likelihood_in_half_precision(kind):
    """Each element is that of the rounded parameters, and so is the sum, also of an event."""
    mean, y = torch.randn(60, 8).to(HALF), torch.rand(60, 8).to(HALF)
    factors = torch.randn(60, 8, 2)

    def likelihood(mean, factors):
        if kind == "normal":
            return dist.Normal(mean, 0.125).to_event(1)
        if kind == "log normal":
            return dist.LogNormal(mean, torch.ones_like(mean)).to_event(1)
        return dist.LowRankMultivariateNormal(mean, factors, torch.ones_like(mean))

    own = mean.float() if kind == "low rank" else mean  # torch cannot factor it in half
    in_model = likelihood(own, factors)

    def model(y=None):
        pyro.sample("weight", dist.Normal(torch.zeros(()), 1.0))
        with pyro.plate("data", 60):
            pyro.sample("obs", in_model, obs=y)

    guide = ps.MeanFieldGuide(model)
    guide.initialize(y)
    with torch.autocast("cpu", HALF):
        terms = ps.StructuredELBO().terms(model, guide, y)
    expected = likelihood(mean.double(), factors.double()).log_prob(y.double()).sum()
    torch.testing.assert_close(terms.log_likelihood["obs"].double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("guide_name", ["mean field", "k-tied", "rowwise", "matrix normal"])
@pytest.mark.parametrize("prior", [0.7, dist.Laplace(0.0, 0.7)])
def test_the_kl_of_parameters_in_half_precision_is_not_rounded(guide_name, prior):
    net = ps.bayesianize(nn.Linear(40, 30, bias=False).to(HALF), prior=prior)
    model = ps.Classifier(net, 10)
    guide = GUIDES[guide_name](model)
    data = torch.randn(10, 40).to(HALF), torch.randint(30, (10,))
    ours = ps.StructuredELBO().terms(model, guide, *data).kl["net.weight"]
    assert ours.dtype == torch.float32
    q = in_single(guide["net.weight"]())
    scale = torch.tensor(0.7).to(HALF).float()
    shape = (30, 40)
    p = type(prior)(0.0, scale) if isinstance(prior, dist.Laplace) else dist.Normal(0.0, scale)
    expected = torch.distributions.kl_divergence(q, p.expand(shape).to_event(2))
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    ours.backward()
    for parameter in guide.parameters():
        assert parameter.grad is None or parameter.grad.dtype == HALF


def test_what_was_formed_in_half_precision_is_formed_anew():
    scales = torch.randn(30, 40).to(HALF)
    q = ps.distributions.LogScaleNormal(torch.zeros_like(scales), scales)
    assert q.variance_sum.dtype == HALF
    expected = (2 * scales.double()).exp().sum()
    torch.testing.assert_close(in_single(q).variance_sum.double(), expected, rtol=1e-6, atol=0)
    assert q.variance_sum.dtype == HALF


def test_a_prior_without_samples_in_half_precision_serves():
    """Torch has no gamma numbers in half precision on a processor."""
    model = ps.Regressor(linear(2, HALF, dist.StudentT(3.0)), 20, 0.1)
    guide = ps.MeanFieldGuide(model)
    guide.initialize(torch.randn(20, 3).to(HALF), torch.randn(20, 2))
    assert guide.uses["net.weight"].count == 1


@pytest.mark.parametrize("local_reparam", [True, False])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
@pytest.mark.parametrize("dtype", [HALF, torch.float16])
def test_inducing_weights_of_a_net_in_half_precision(kind, local_reparam, dtype):
    """Terms are those of the same parameters in double, within rounding; draws hardly vary."""
    layer = nn.Linear(6, 8) if kind == "linear" else nn.Conv2d(2, 3, 3)
    x = torch.randn((10, 6) if kind == "linear" else (10, 2, 5, 5))
    y = torch.randn_like(layer(x))
    model = ps.Regressor(ps.bayesianize(layer.to(dtype), prior=1.0), 10, 0.5)
    options = {"init_scale": 1e-3, "local_reparam": local_reparam}
    guide = ps.InducingWeightGuide(model, inducing_shape=(2, 2), **options)
    guide.initialize(x.to(dtype), y)
    assert {parameter.dtype for parameter in guide.parameters()} == {dtype}
    ours = ps.StructuredELBO().terms(model, guide, x.to(dtype), y)
    (sum(ours.kl.values()) - ours.log_likelihood["obs"]).backward()
    assert all(parameter.grad.isfinite().all() for parameter in guide.parameters())
    model.double(), guide.double()
    exact = ps.StructuredELBO().terms(model, guide, x.to(dtype).double(), y.double())
    for one, other in ((ours.kl, exact.kl), (ours.log_likelihood, exact.log_likelihood)):
        assert all(value.dtype == torch.float32 for value in one.values())
        one = {name: value.double() for name, value in one.items()}
        torch.testing.assert_close(one, other, rtol=torch.finfo(dtype).eps, atol=0)


PARTLY = {"2.*": 1.0, "*": None}


@pytest.mark.parametrize(
    ("prior", "how"),
    [
        *((1.0, "traced"), (PARTLY, "traced"), (PARTLY, "SVI")),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1.0, False), (PARTLY, False), (1.0, "SVI"))
        ),
    ],
)
def test_no_step_in_a_block_of_autocast_uses_casts_of_old_weights(prior, how):
    """As torch does with its cache, for weights without a posterior and the means of layers."""
    x = torch.randn(12, 3)

    def train(cache_enabled):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
        model = ps.Regressor(ps.bayesianize(net, prior=prior), 12, 0.3)
        guide = ps.MeanFieldGuide(model)
        with torch.autocast("cpu", HALF, cache_enabled=cache_enabled):
            if how == "SVI":
                svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), ps.StructuredELBO())
                return [svi.step(x, x[:, :1]) for _ in range(20)]
            options = {"num_steps": 20, "lr": lambda step: 0.1, "compiled": how, "progress": False}
            losses = ps.fit(model, guide, (x, x[:, :1]), **options).elbo
            with guide.sampled():
                return [*losses, *model.net(x).flatten().tolist()]

    assert train(cache_enabled=True) == train(cache_enabled=False)


@pytest.mark.parametrize("name", once(GUIDES))
def test_starting_values_do_not_depend_on_autocast(name):
    """The first step of a loop makes those of a function."""
    x, y, states = torch.randn(5, 3), torch.randn(5, 2), []
    for autocast in (False, True):
        torch.manual_seed(0)
        model = ps.Regressor(linear(2, torch.float32), 5, 0.1)
        with torch.autocast("cpu", HALF, enabled=autocast):
            guide = GUIDES[name](model)
            guide.initialize(x, y)
        states.append(guide.state_dict())
    torch.testing.assert_close(*states, rtol=0, atol=0)
