"""Draws of NUTS: what they are, how they are made and kept, and arguments."""

import copy
import os
import pickle
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS, init_to_median
from pyro.infer import Predictive
from pyro.ops.stats import split_gelman_rubin
from scipy.stats import norm
from torch import nn

from pyro_structvi import FanIn, Regressor, bayesianize
from pyro_structvi.reference import (
    DivergenceWarning,
    NotMixedWarning,
    NUTSDraws,
    nuts,
    sampling,
    to_numpyro,
)

NUM_DATA, NUM_CHAINS, NUM_SAMPLES = 12, 2, 20
TINY = {"num_warmup": 15, "num_samples": NUM_SAMPLES, "num_chains": NUM_CHAINS, "progress": False}


def make_data(num_data=NUM_DATA):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_data, 3, generator=generator)
    return x, x[:, :1] + 0.5 * torch.randn(num_data, 1, generator=generator)


def make_model():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    return Regressor(bayesianize(net, FanIn()), NUM_DATA, dist.Gamma(4.0, 8.0))


@pytest.fixture(scope="module")
def model():
    return make_model().float()


class GivenChains(MCMC):
    """A sampler whose draws are given, so that what is made of them can be tested without compiling."""

    chains, diverging = None, np.zeros((NUM_CHAINS, NUM_SAMPLES), bool)
    numbers = np.arange(NUM_CHAINS * NUM_SAMPLES).reshape(NUM_CHAINS, NUM_SAMPLES)

    def run(self, *args, extra_fields):
        self.fields = extra_fields

    def get_samples(self, group_by_chain):
        assert group_by_chain
        return self.chains

    def get_extra_fields(self, group_by_chain):
        assert group_by_chain
        found = {name: self.numbers + 100.0 * at for at, name in enumerate(self.fields)}
        return found | {"diverging": self.diverging, "num_steps": self.numbers + 1}


@pytest.fixture(scope="module")
def chains():
    random = np.random.default_rng(0)
    shapes = {
        "net.0.weight": (4, 3),
        "net.0.bias": (4,),
        "net.2.weight": (1, 4),
        "net.2.bias": (1,),
        "noise_scale": (),
    }
    return {
        name: np.abs(random.standard_normal((NUM_CHAINS, NUM_SAMPLES, *shape)))
        for name, shape in shapes.items()
    }


@pytest.fixture
def given_chains(little_compiling, chains, monkeypatch):
    monkeypatch.setattr(GivenChains, "chains", chains)
    monkeypatch.setattr(sampling, "MCMC", GivenChains)


@pytest.fixture
def draws(model, given_chains):
    x, y = make_data()
    return nuts(model, x.float(), y.float(), **TINY)


def test_draws_are_those_of_the_chains(chains, draws):
    assert draws.keys() == chains.keys()
    assert draws.num_chains == NUM_CHAINS
    assert isinstance(draws.divergences, int)
    for other in (draws, copy.copy(draws), pickle.loads(pickle.dumps(draws))):
        assert type(other) is NUTSDraws
        for name, value in other.grouped().items():
            assert draws[name].dtype == torch.float32
            np.testing.assert_array_equal(value, chains[name].astype(np.float32))
            np.testing.assert_array_equal(draws[name], value.reshape(-1, *value.shape[2:]))
        for name, value in vars(draws).items():
            np.testing.assert_equal(vars(other)[name], value)
    assert jax.numpy.zeros(()).dtype == np.float32, "JAX's default precision is unchanged"


def test_r_hats_are_those_of_function_values_and_of_weights(model, draws):
    predictive = Predictive(model, posterior_samples=draws, return_sites=["_RETURN"])
    values = predictive(make_data()[0].float())["_RETURN"].detach()
    values = values.double().reshape(NUM_CHAINS, NUM_SAMPLES, NUM_DATA, 1)
    # The draws were rounded to float32, R-hat was not.
    assert draws.r_hat == pytest.approx(float(split_gelman_rubin(values).max()), rel=1e-3)
    weights = map(torch.as_tensor, draws.grouped().values())
    largest = max(float(split_gelman_rubin(value.double()).max()) for value in weights)
    assert draws.weight_r_hat == pytest.approx(largest, rel=1e-3)


def test_chains_that_disagree_are_warned_of(model, chains, given_chains, monkeypatch):
    first = {name: each.copy() for name, each in chains.items()}
    first["net.2.bias"][0] += 9
    monkeypatch.setattr(GivenChains, "chains", first)
    x, y = make_data()
    message = r"is [0-9.]+, so .* 1 of 2 chains .* Raise `num_warmup` and `num_samples`"
    with pytest.warns(NotMixedWarning, match=message):
        assert nuts(model, x.float(), y.float(), **TINY).r_hat > 2


def test_given_divergences_are_counted_and_warned_of(model, given_chains, monkeypatch):
    diverging = np.zeros((NUM_CHAINS, NUM_SAMPLES), bool)
    diverging[1, 3:6] = True
    monkeypatch.setattr(GivenChains, "diverging", diverging)
    x, y = make_data()
    with pytest.warns(DivergenceWarning, match=r"3 of 40 transitions .* above 0\.8, .* to 0\.95"):
        assert nuts(model, x.float(), y.float(), **TINY).divergences == 3


def test_statistics_are_the_samplers_under_arviz_names(draws):
    numbers = GivenChains.numbers
    # Trees of depth d take at least 2^(d - 1) steps.
    depths = [next(d for d in range(9) if 2**d > steps) for steps in range(1, numbers.size + 1)]
    expected = {
        "lp": -numbers,
        "diverging": np.zeros(numbers.shape, bool),
        "energy": numbers + 200.0,
        "acceptance_rate": numbers + 300.0,
        "step_size": numbers + 400.0,
        "n_steps": numbers + 1,
        "tree_depth": np.reshape(depths, numbers.shape),
    }
    assert draws.sample_stats.keys() == expected.keys()
    for name, value in draws.sample_stats.items():
        np.testing.assert_array_equal(value, expected[name])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pyro_structvi.reference.NotMixedWarning")
def test_draws_are_those_of_numpyro_in_float64():
    model = make_model()
    x, y = make_data()
    options = {"target_accept_prob": 0.9, "max_tree_depth": 5}
    found = nuts(model, x, y, **TINY, **options, seed=3)
    with jax.enable_x64(True):
        kernel = NUTS(to_numpyro(model), init_strategy=init_to_median, **options)
        with pytest.warns(UserWarning, match="not enough devices"):
            mcmc = MCMC(kernel, num_warmup=15, num_samples=20, num_chains=2, progress_bar=False)
        mcmc.run(jax.random.PRNGKey(3), x.numpy(), y.numpy())
        expected = mcmc.get_samples(group_by_chain=True)
    assert set(found) == set(expected)
    for name, value in found.grouped().items():
        assert value.dtype == np.float64
        np.testing.assert_allclose(value, expected[name], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pyro_structvi.reference.NotMixedWarning")
def test_statistics_are_those_of_the_draws():
    """The log joint at each draw, and identities of the sampler."""
    model = Regressor(bayesianize(nn.Linear(3, 1), 1.0), NUM_DATA, 0.5)
    x, y = make_data()
    found = nuts(model, x, y, **TINY, max_tree_depth=4)
    stats = found.sample_stats
    assert all(value.shape == (NUM_CHAINS, NUM_SAMPLES) for value in stats.values())
    # All sites are over the real line, so unconstrained coordinates are the weights themselves.
    joint = [
        pyro.poutine
        .trace(pyro.poutine.condition(model, {k: v[n] for k, v in found.items()}))
        .get_trace(x, y)
        .log_prob_sum()
        .item()
        for n in range(NUM_CHAINS * NUM_SAMPLES)
    ]
    np.testing.assert_allclose(stats["lp"].ravel(), joint, rtol=1e-9)
    assert (stats["energy"] >= -stats["lp"]).all()  # the kinetic energy is no less than zero
    assert ((stats["acceptance_rate"] >= 0) & (stats["acceptance_rate"] <= 1)).all()
    assert (stats["step_size"] == stats["step_size"][:, :1]).all()
    assert (stats["step_size"] > 0).all()
    assert (2 ** (stats["tree_depth"] - 1) <= stats["n_steps"]).all()
    assert (stats["n_steps"] < 2 ** stats["tree_depth"]).all()
    assert stats["tree_depth"].max() <= 4
    assert stats["diverging"].sum() == found.divergences


@pytest.mark.slow
def test_chains_run_in_parallel_where_there_are_devices():
    script = """
        import jax, torch
        from pyro_structvi import Regressor, bayesianize
        from pyro_structvi.reference import nuts

        assert jax.local_device_count() == 2
        model = Regressor(bayesianize(torch.nn.Linear(1, 1), 1.0), 3, 1.0)
        draws = nuts(model, torch.ones(3, 1), torch.ones(3, 1), num_warmup=9, num_samples=8,
                     num_chains=2, progress=True)
        first, second = draws.grouped()["net.weight"]
        assert first.shape == (8, 1, 1) and (first != second).all()
    """
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_posterior_of_a_linear_regression_is_the_closed_form():
    x, y = make_data(40)
    prior = {"weight": torch.tensor([0.5, 1.0, 2.0]), "bias": 0.3}
    model = Regressor(bayesianize(nn.Linear(3, 1), prior), 40, 0.5)
    draws = nuts(model, x, y, num_samples=1000, progress=False)
    design = np.column_stack([x.numpy(), np.ones(40)])
    precision = design.T @ design / 0.25 + np.diag(1 / np.array([0.5, 1, 2, 0.3]) ** 2)
    mean = np.linalg.solve(precision, design.T @ y.numpy()[:, 0] / 0.25)
    arrays = draws.grouped()
    samples = np.concatenate([arrays["net.weight"][:, :, 0], arrays["net.bias"]], axis=-1)
    # White under the posterior: means 0, products of two coordinates 0, squares 1.
    white = (samples - mean) @ np.linalg.cholesky(precision)
    rows, columns = np.tril_indices(4)
    products = white[..., rows] * white[..., columns]
    series = np.concatenate([white, products], axis=-1)
    means = np.concatenate([np.zeros(4), rows == columns])
    effective = np.minimum(effective_sample_size(series), series[..., 0].size)
    assert (effective > 200).all()
    z_values = (series.mean((0, 1)) - means) / series.std((0, 1)) * np.sqrt(effective)
    assert np.abs(z_values).max() < norm.isf(0.5e-6 / 14)  # a false alarm in 1e6
    assert draws.divergences == 0
    assert draws.r_hat < 1.02


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pyro_structvi.reference.NotMixedWarning")
def test_the_number_of_examples_is_that_of_the_data_where_it_is_not_given():
    draws = []
    for num_data in (None, NUM_DATA):
        torch.manual_seed(0)
        model = Regressor(bayesianize(nn.Linear(3, 1), prior=1.0), num_data, 0.5)
        draws.append(nuts(model, *make_data(), num_warmup=80, num_samples=4, progress=False))
        assert model.num_data == NUM_DATA
    assert all(torch.equal(draws[0][name], draws[1][name]) for name in draws[0])


def test_a_part_of_the_data_and_too_few_draws_are_refused(model):
    x, y = make_data()
    message = "must hold all 12 training examples .*but got 5: a sampler needs all the data"
    with pytest.raises(ValueError, match=message):
        nuts(model, x[:5], y[:5])
    with pytest.raises(ValueError, match=r"`num_samples` must be at least 4, .*but got 3"):
        nuts(model, x, y, num_samples=3)
    with pytest.raises(ValueError, match=r"`y` must have shape that of the net's output = \(12, 1"):
        nuts(model, x.float(), y[:, 0].float())
    for dtype in (torch.float64, torch.int64):
        message = (
            f"The input of the weight at site .* must have dtype torch.float32, but got {dtype}"
        )
        with pytest.raises(ValueError, match=message):
            nuts(model, x.to(dtype), y.float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda x: 2 * x,
            "another model: at a draw from the prior the model's log joint is .*another method",
        ),
        (
            lambda x: x + pyro.sample("shift", dist.Normal(0.0, 1.0)),
            r"another model: the model's sites are \['shift', 'net\.weight', ",
        ),
    ],
)
def test_a_model_that_the_translation_misses_is_refused(change, message):
    class Changed(Regressor):
        def _standardized(self, x):
            return change(x)

    model = Changed(bayesianize(nn.Linear(3, 1), 1.0), NUM_DATA, 0.1)
    state = torch.get_rng_state()
    with pytest.raises(NotImplementedError, match=message):
        nuts(model, *make_data())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.gpu
def test_draws_are_on_the_device_of_the_model():
    model = make_model().cuda()
    x, y = make_data()
    draws = nuts(model, x.cuda(), y.cuda(), **TINY)
    assert all(value.is_cuda for value in draws.values())
