"""Microcanonical Langevin sampling."""

import sys
from types import SimpleNamespace

import arviz as az
import numpy as np
import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.ops.stats import split_gelman_rubin
from scipy.integrate import solve_ivp
from torch import nn
from torch.distributions.transforms import ReshapeTransform

import pyro_structvi as ps
from pyro_structvi.distributions import IsotropicStudentT
from pyro_structvi.infer.data_warnings import NumDataWarning
from pyro_structvi.posterior.pruning import prune_mean_field
from pyro_structvi.reference import mclmc as sample
from pyro_structvi.reference.chains import Chains, _kick, gradients_of
from pyro_structvi.reference.draws import bulk_ess
from pyro_structvi.reference.log_joint import LogJoint
from pyro_structvi.reference.mclmc import _moving
from tests.conjugate import full_guide
from tests.models import make_regressor, regression_data

NOISE, PRIOR = 0.5, 2.0


def linear_regression(prior=PRIOR):
    """Return a conjugate regression, its data, and the exact mean and covariance of its weight."""
    x = torch.randn(20, 3) @ torch.tensor([[1.0, 0.8, 0.0], [0.0, 0.5, 0.3], [0.0, 0.0, 1.0]])
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]) + NOISE * torch.randn(20, 1)
    net = ps.bayesianize(nn.Linear(3, 1, bias=False), prior=prior)
    model = ps.Regressor(net, num_data=20, noise_scale=NOISE)
    precision = x.mT @ x / NOISE**2 + torch.eye(3) / PRIOR**2
    covariance = torch.linalg.inv(precision)
    return model, (x, y), (covariance @ (x.mT @ y) / NOISE**2).squeeze(), covariance


def mean_field_of_regression():
    model, data, *_ = linear_regression()
    guide = ps.MeanFieldGuide(model)
    guide.initialize(*data)
    return model, guide, data


@pytest.mark.parametrize(
    ("make_guide", "options"),
    [
        (None, {"thinning": 2, "adjusted": True}),  # the exact posterior
        pytest.param(ps.RowwiseGuide, {"thinning": 2, "adjusted": True}, marks=pytest.mark.slow),
        pytest.param(ps.MAPGuide, {"thinning": 2, "adjusted": True}, marks=pytest.mark.slow),
        pytest.param(ps.FullCovarianceGuide, {"energy_variance": 1e-6}, marks=pytest.mark.slow),
    ],
)
def test_draws_of_a_gaussian_posterior_have_its_moments(make_guide, options):
    """4,000 draws, nearly independent with acceptance: 5 standard errors are a false alarm in 2e6."""
    model, data, mean, covariance = linear_regression()
    if make_guide is None:
        guide = full_guide(model, mean.unsqueeze(0), covariance)
        guide.initialize(*data)
    else:
        guide = make_guide(model)
        ps.fit(model, guide, data, num_steps=300, progress=False)
    draws = sample(model, guide, data, progress=False, num_warmup=300, **options)
    w = draws["net.weight"].squeeze()
    assert w.shape == (4000, 3)
    tril = torch.linalg.cholesky(covariance)
    z = torch.linalg.solve_triangular(tril, (w - mean).mT, upper=False)
    error = 5 / (2000 if "adjusted" in options else 1000) ** 0.5  # of fewer effective draws
    assert z.mean(1).abs().max() < error
    assert ((z @ z.mT) / 4000 - torch.eye(3)).abs().max() < 2**0.5 * error
    assert draws.r_hat < 1.02


@pytest.mark.parametrize("make_guide", [ps.KTiedGuide, ps.RowwiseGuide, ps.InducingWeightGuide])
def test_the_density_is_the_log_joint_in_the_coordinates_of_the_guide(make_guide):
    """With a positive site, whose Jacobian counts; differences, since a constant is left out."""
    net = ps.bayesianize(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), prior=1.0)
    model = ps.Regressor(net, num_data=12, noise=dist.LogNormal(0.0, 0.5))
    data = regression_data()
    guide = make_guide(model)
    guide.initialize(*data)
    target = LogJoint(model, guide, data)
    positions = torch.randn(2, target.size)
    found = [target(position) for position in positions]
    expected = []
    for position in positions:
        values, *_ = target.values_at(position)
        trace = pyro.poutine.trace(pyro.poutine.condition(model, data=values)).get_trace(*data)
        jacobian = values["noise_scale"].log()  # of exp, in units of the guide's deviation
        expected.append(trace.log_prob_sum() + jacobian)
    assert {name: value.shape for name, value in values.items()} == {
        name: value.shape for name, value in guide.draw().items()
    }
    torch.testing.assert_close(found[0] - found[1], expected[0] - expected[1], rtol=1e-10, atol=0)


@pytest.mark.parametrize("is_pruned", [False, True])
def test_coordinates_that_change_no_value_have_a_density(is_pruned):
    """The density is normal over all coordinates, and the values have the posterior's covariance."""
    model, data, _, covariance = linear_regression()
    guide = ps.MeanFieldGuide(model) if is_pruned else ps.LowRankGuide(model, rank=2)
    guide.initialize(*data)
    kept = torch.ones(3, dtype=torch.bool)
    if is_pruned:
        prune_mean_field(guide, 1 / 3)
        kept = guide["net.weight"]().kept.flatten()
    target = LogJoint(model, guide, data)
    at = torch.zeros(target.size)
    hessian = torch.func.hessian(target)(at)
    torch.linalg.cholesky(-hessian)
    values = torch.func.jacrev(lambda z: target.values_at(z)[0]["net.weight"].flatten())(at)
    found = values @ torch.linalg.inv(-hessian) @ values.mT
    exact = torch.linalg.inv(torch.linalg.inv(covariance)[kept][:, kept])
    torch.testing.assert_close(found[kept][:, kept], exact, rtol=1e-9, atol=0)
    assert (found[~kept] == 0).all()


def multivariate_normal(name, value):
    tril = 0.5 * torch.eye(value.numel()) + 0.1 * torch.ones(value.numel(), value.numel()).tril()
    flat = dist.MultivariateNormal(torch.zeros(value.numel()), scale_tril=tril)
    reshape = ReshapeTransform((value.numel(),), value.shape)
    return flat if value.dim() == 1 else dist.TransformedDistribution(flat, [reshape])


@pytest.mark.parametrize(
    "prior",
    [multivariate_normal, lambda name, value: IsotropicStudentT(3.0, 0.6, value.shape)],
    ids=["normal", "t"],
)
def test_priors_of_all_elements_together_run_in_one_pass(prior):
    model, data = make_regressor(prior=prior), regression_data()
    guide = ps.EnsembleGuide(model, 3)
    guide.initialize(*data)
    target = LogJoint(model, guide, data)
    positions = torch.randn(2, target.size)
    expected = torch.stack([target(position) for position in positions])
    torch.testing.assert_close(torch.func.vmap(target)(positions), expected)
    loss = ps.StructuredELBO().loss(model, guide, *data)
    guide.vectorize = False
    assert loss == pytest.approx(ps.StructuredELBO().loss(model, guide, *data), rel=1e-12)


def test_a_kick_is_the_flow_of_the_velocity():
    """Beside an integrator of ordinary differential equations, for a short and a long time."""
    velocity, gradient = nn.functional.normalize(torch.randn(2, 5), dim=-1), 3 * torch.randn(2, 5)
    for time in (0.1, 4.0):
        turned, change = _kick(velocity, gradient, time)
        for number in range(2):
            g = gradient[number].numpy()

            def flow(_, state, g=g):
                u = state[:5]
                return np.append((g - u * (u @ g)) / 4, u @ g)

            start = np.append(velocity[number].numpy(), 0.0)
            end = solve_ivp(flow, (0, time), start, rtol=1e-11, atol=1e-12).y[:, -1]
            np.testing.assert_allclose(turned[number], end[:5], rtol=1e-7, atol=1e-9)
            np.testing.assert_allclose(change[number], end[5], rtol=1e-8)


def test_the_change_of_the_energy_falls_with_the_cube_of_the_step():
    target = LogJoint(*mean_field_of_regression())
    start = 0.1 * torch.randn(64, target.size)

    def error(step_size):
        torch.manual_seed(1)
        chains = Chains(start, gradients_of(target, start, 1, compiled=False))
        chains.step_size = step_size
        return float(chains._move(refreshes=False)[0].abs().mean())

    assert 6 < error(0.02) / error(0.01) < 11


@pytest.mark.parametrize("make_guide", [ps.MAPGuide, ps.EnsembleGuide])
def test_the_unit_of_points_is_the_deviation_of_the_prior(make_guide):
    prior = {"*.weight": ps.FanIn(1.0), "*": 3.0}
    net = ps.bayesianize(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)), prior=prior)
    model = ps.Regressor(net, num_data=12, noise=dist.LogNormal(0.0, 0.5))
    x, y = torch.randn(12, 4), torch.randn(12, 1)
    guide = make_guide(model)
    guide.initialize(x, y)
    target = LogJoint(model, guide, (x, y))
    for number in range(2):  # a chain starts at each member
        start = target.start(guide.draw(number=number))
        before, after = (target.values_at(start + move)[0] for move in (0.0, 1.0))
        torch.testing.assert_close(before, guide.draw(number=number))
        units = {name: after[name] - before[name] for name in after if name != "noise_scale"}
        expected = {"net.0.weight": 0.5, "net.2.weight": 5**-0.5, "net.0.bias": 3.0}
        for name, unit in units.items():
            torch.testing.assert_close(unit, torch.full_like(unit, expected.get(name, 3.0)))


@pytest.mark.filterwarnings("ignore::pyro_structvi.reference.NotMixedWarning")
def test_convergence_is_that_of_function_values_at_the_data(monkeypatch):
    model, guide, data = mean_field_of_regression()
    options = {"num_warmup": 20, "num_draws": 20, "num_chains": 3, "progress": False}
    draws = sample(model, guide, data, **options)
    functions = ps.predict(model, draws, data[0]).functions.reshape(3, 20, -1)
    assert draws.r_hat == pytest.approx(split_gelman_rubin(functions).max())
    assert draws.ess == pytest.approx(bulk_ess(functions).min())
    each = [split_gelman_rubin(chain).max() for chain in functions.split(1)]
    np.testing.assert_allclose(draws.chain_r_hat, each)
    assert draws.ess_per_second == draws.ess / draws.seconds > 0
    found = ps.to_inference_data(model, draws, *data)
    assert dict(found.posterior.sizes)["chain"] == 3
    assert found.sample_stats["energy_change"].shape == (3, 20)
    whole = LogJoint(model, guide, data).functions_at(torch.ones(3))

    monkeypatch.setattr(sys.modules[LogJoint.__module__], "MOST_FUNCTIONS", 7)
    few = LogJoint(model, guide, data).functions_at(torch.ones(3))
    torch.testing.assert_close(few, whole[::3])


def stuck(gradients, start, rows):
    """Return a density with a wall around the starting points of some rows."""

    def run(positions):
        value, gradient = gradients(positions)
        has_left = (positions != start).any(-1)
        return value - 1e6 * (has_left & torch.tensor(rows)), gradient

    return run


def test_a_chain_that_cannot_move_is_left_out(monkeypatch):
    model, data, mean, covariance = linear_regression()
    guide = full_guide(model, mean.unsqueeze(0), covariance)
    guide.initialize(*data)

    def some_stuck(target, position, *args):
        return stuck(gradients_of(target, position, *args), position, rows)

    monkeypatch.setattr(sys.modules[sample.__module__], "gradients_of", some_stuck)
    options = {"num_chains": 3, "num_warmup": 100, "thinning": 2, "progress": False}
    rows = [False, True, False]
    with pytest.warns(ps.reference.StuckChainWarning, match="1 of 3 chains are left out"):
        draws = sample(model, guide, data, **options)
    assert draws.num_chains == 2
    assert draws.sample_stats["diverging"].shape == (2, 500)
    assert not draws.sample_stats["diverging"].any()
    assert draws.r_hat < 1.05
    w = draws["net.weight"].squeeze()
    assert (w.mean(0) - mean).div(covariance.diagonal().sqrt()).abs().max() < 5 / 200**0.5
    rows = [True] * 3
    with pytest.raises(RuntimeError, match="no chain can move"):
        sample(model, guide, data, **options | {"num_draws": 4})


def test_chains_whose_trajectories_are_all_rejected_are_named():
    chains = SimpleNamespace(num_moved=torch.tensor([5, 5]), num_steps=5)
    positions = torch.stack([torch.zeros(5, 3), torch.randn(5, 3)])
    with pytest.warns(
        ps.reference.StuckChainWarning, match=r"1 of 2 .*rejected.*`energy_variance`"
    ):
        assert _moving(chains, positions).tolist() == [False, True]
    with pytest.raises(
        RuntimeError, match=r"No chain has moved.*rejected.*lower `energy_variance`"
    ):
        _moving(chains, torch.zeros(2, 5, 3))


@pytest.mark.filterwarnings("ignore::pyro_structvi.reference.NotMixedWarning")
@pytest.mark.parametrize("make_guide", [ps.MAPGuide, ps.MeanFieldGuide])
def test_a_mixture_has_the_coordinates_of_one_net(make_guide):
    model, data, *_ = linear_regression()
    guide = ps.MixtureGuide(model, make_guide, 3)
    guide.initialize(*data)
    target = LogJoint(model, guide, data)
    values = guide.draw(number=1)
    assert target.size == sum(value.numel() for value in values.values())
    position = target.start(values)
    found, jacobian, _ = target.values_at(position)
    for name, value in values.items():
        torch.testing.assert_close(found[name], value)
    density = poutine.trace(poutine.condition(model, data=values)).get_trace(*data).log_prob_sum()
    torch.testing.assert_close(target(position), density + jacobian)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pyro_structvi.reference.NotMixedWarning")
def test_chains_at_points_of_a_narrow_posterior_do_not_run_away():
    """The first steps are a thousand times too large, and the noise may shrink the density's scale."""
    x = torch.randn(60, 1)
    y = 2 * x + 1e-3 * x.abs() * torch.randn(60, 1)
    net = ps.bayesianize(nn.Linear(1, 2), prior=10.0)
    model = ps.Regressor(net, num_data=60, noise="heteroscedastic")
    guide = ps.EnsembleGuide(model, size=4)
    ps.fit(model, guide, (x, y), num_steps=1000, progress=False)
    options = {"num_chains": 4, "num_warmup": 500, "num_draws": 50, "progress": False}
    draws = sample(model, guide, (x, y), energy_variance=0.1, **options)
    lp = draws.sample_stats["lp"]
    assert draws.num_chains == 4
    assert lp.max() - lp.min() < 100  # of two modes; runaway chains lie 1e4 below and more


@pytest.mark.filterwarnings("ignore::pyro_structvi.reference.NotMixedWarning")
def test_long_runs_are_compiled_where_that_is_possible(monkeypatch):
    model, guide, data = mean_field_of_regression()
    module, calls = sys.modules[Chains.__module__], []
    options = {"num_warmup": 5, "num_draws": 4, "num_chains": 2, "progress": False}

    def refuse(*args):
        calls.append(args)
        raise RuntimeError("no compiler")

    def draws(**own):
        return sample(model, guide, data, **options | own)["net.weight"]

    monkeypatch.setattr(module.Record, "compile", refuse)
    plain = draws()
    assert not calls
    with pytest.raises(RuntimeError, match="`model` cannot be compiled: no compiler"):
        draws(compiled=True)
    monkeypatch.setattr(module, "WORTH_COMPILING", 0.0)
    torch.testing.assert_close(draws(), plain)
    assert len(calls) == 2
    torch.testing.assert_close(draws(compiled=False, thinning=10), plain, rtol=0, atol=0)
    assert len(calls) == 2
    assert not torch.equal(draws(adjusted=True), plain)
    torch.testing.assert_close(draws(adjusted=True), draws(adjusted=True, thinning=1))
    monkeypatch.setattr(module, "Record", refuse)  # as of a model that cannot be recorded
    torch.testing.assert_close(draws(), plain)


@pytest.mark.filterwarnings("ignore::pyro_structvi.reference.NotMixedWarning")
def test_an_interrupt_keeps_the_draws_so_far_if_they_are_enough(monkeypatch):
    model, guide, data = mean_field_of_regression()
    original, calls = Chains.step, []

    def step(chains):
        calls.append(chains)
        if len(calls) == last:
            raise KeyboardInterrupt
        return original(chains)

    monkeypatch.setattr(Chains, "step", step)
    options = {"num_warmup": 50, "num_draws": 50, "num_chains": 2, "progress": False}
    last = 41
    with pytest.warns(UserWarning, match="Interrupted: the draws are those so far"):
        draws = sample(model, guide, data, **options)
    assert draws["net.weight"].shape == (8, 1, 3)
    calls.clear()
    last = 40
    with pytest.raises(KeyboardInterrupt):
        sample(model, guide, data, **options)


@pytest.mark.parametrize("count", [4, 7, 20, 101])
def test_effective_sample_sizes_and_r_hats_are_those_of_arviz(count):
    """Independent, correlated, alternating and shifted chains, and one with ties."""
    values = torch.randn(3, count, 5)
    for number in range(1, count):
        values[:, number, 1:3] += torch.tensor([0.9, -0.6]) * values[:, number - 1, 1:3]
    values[..., 3] += torch.arange(3.0).unsqueeze(-1)
    values[..., 4] = values[..., 4].round()
    expected = [az.ess(values[..., i].numpy(), method="bulk") for i in range(5)]
    np.testing.assert_allclose(bulk_ess(values), expected, rtol=1e-8)
    assert bulk_ess(torch.tensor([1.0, torch.nan]).expand(2, 8, 2)).isnan().all()
    if count % 2 == 0:
        expected = [az.rhat(values[..., i].numpy(), method="split") for i in range(5)]
        np.testing.assert_allclose(split_gelman_rubin(values), expected, rtol=1e-12)


@pytest.mark.filterwarnings("ignore::pyro_structvi.reference.NotMixedWarning")
def test_the_examples_of_the_data_count_once():
    """Of the data of the sampler, which may be others than those of the fit."""
    told, data, _, covariance = linear_regression()
    model = ps.Regressor(
        ps.bayesianize(nn.Linear(3, 1, bias=False), prior=PRIOR), noise_scale=NOISE
    )
    guide, part = ps.FullCovarianceGuide(model), (data[0][:5], data[1][:5])
    ps.fit(model, guide, part, num_steps=50, progress=False)
    options = {"num_warmup": 200, "thinning": 3, "energy_variance": 1e-3, "progress": False}
    deviations = sample(model, guide, data, num_draws=100, **options)["net.weight"].squeeze().std(0)
    torch.testing.assert_close(deviations, covariance.diagonal().sqrt(), rtol=0.2, atol=0.0)
    own = ps.MeanFieldGuide(told)
    own.initialize(*data)
    with pytest.warns(NumDataWarning, match="num_data=20 examples, and `data` has 5"):
        sample(told, own, part, num_warmup=20, num_draws=4, progress=False)


@pytest.mark.filterwarnings("ignore::pyro_structvi.reference.NotMixedWarning")
@pytest.mark.parametrize("is_mixture", [False, True])
def test_points_of_sites_of_single_examples_are_starts(is_mixture):
    def model(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("examples", len(y)):
            z = pyro.sample("z", dist.Normal(mean, 1.0))
            pyro.sample("y", dist.Normal(z, 0.5), obs=y)

    data, options = (torch.randn(5),), {"num_warmup": 2, "num_draws": 4, "num_chains": 2}
    guide = ps.MixtureGuide(model, ps.MAPGuide, 2) if is_mixture else ps.MAPGuide(model)
    guide.initialize(*data)
    draws = sample(model, guide, data, **options, thinning=1, progress=False)
    assert draws["z"].shape == (8, 5)
    assert len(draws["z"].unique()) > 5


def test_what_cannot_be_sampled_is_refused():
    model, guide, data = mean_field_of_regression()
    with pytest.raises(ValueError, match=r"`guide` must be initialized"):
        sample(pyro.poutine.mask(model, mask=True), ps.MeanFieldGuide(lambda x, y: None), data)
    with pytest.raises(ValueError, match="`num_draws` must be at least 4"):
        sample(model, guide, data, num_draws=3)
    with pytest.raises(TypeError, match="`data` must be a tuple of tensors with all examples"):
        sample(model, guide, [data])
    with pytest.raises(RuntimeError, match=r"log joint is not finite.*infinite values in `data`"):
        sample(model, guide, (data[0], data[1] / 0), progress=False)

    for dtype in (torch.float32, torch.int64):
        message = (
            f"The input of the weight at site .* must have dtype torch.float64, but got {dtype}"
        )
        with pytest.raises(ValueError, match=message):
            sample(model, guide, (data[0].to(dtype), data[1]), progress=False)

    one = ps.Regressor(ps.bayesianize(nn.Linear(1, 1, bias=False), prior=1.0), 20, noise_scale=1.0)
    guide_of_one, (x, y) = ps.MeanFieldGuide(one), (data[0][:, :1], data[1])
    guide_of_one.initialize(x, y)
    with pytest.raises(ValueError, match=r"at least two latent numbers.*but has 1"):
        sample(one, guide_of_one, (x, y), progress=False)

    def larger(x, y):
        pyro.sample("extra", dist.Normal(0.0, 1.0))
        return model(x, y)

    with pytest.raises(ValueError, match=r"The sites \['extra'\] of `model` are missing"):
        sample(larger, guide, data, progress=False)

    with pytest.raises(ValueError, match=r"\['obs'\].*missing.*pass the observations in `data`"):
        sample(model, guide, data[:1], progress=False)

    def within(x, y):
        scale = pyro.sample("scale", dist.HalfNormal(2.0))
        mean = pyro.sample("mean", dist.Uniform(0.0, scale))
        with pyro.plate("examples", 20):
            pyro.sample("y", dist.Normal(mean, scale), obs=y[:, 0])

    guide_within = ps.MeanFieldGuide(within)
    guide_within.initialize(*data)
    with pytest.raises(ValueError, match=r"support of the site 'mean' .* depends on other sites"):
        sample(within, guide_within, data, progress=False)

    def subsampled(x, y):
        weight = pyro.sample("weight", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("examples", 20, subsample_size=5) as chosen:
            pyro.sample("y", dist.Normal(x[chosen] @ weight, 1.0), obs=y[chosen, 0])

    guide_of_parts = ps.MeanFieldGuide(subsampled)
    guide_of_parts.initialize(*data)
    with pytest.raises(
        ValueError, match=r"all 20 examples of its plate 'examples'.*takes 5 at 'y'"
    ):
        sample(subsampled, guide_of_parts, data, progress=False)


@pytest.mark.slow
def test_the_first_steps_are_as_large_as_their_target_says():
    """The energy changes by the variance that is asked for, within a factor of 3, at both ends."""
    size, initial, final, changes = 50, 0.02, 1e-4, []
    precision = torch.linspace(1.0, 400.0, size)

    class Recorded(Chains):
        def _move(self, *args, **kwargs):
            change, moved = super()._move(*args, **kwargs)
            changes.append(change.square().mean() / size)
            return change, moved

    def gradients(z):
        return -(precision * z.square()).sum(-1) / 2, -precision * z

    position = torch.randn(20, size) / precision.sqrt()
    warm = Recorded(position, gradients)
    warm.warm_up(1000, initial, final, progress=False)
    first, last = (torch.stack(part).mean() for part in (changes[50:100], changes[-250:]))
    assert 1 / 3 < first / initial < 3
    assert 1 / 3 < last / final < 3
    plain = Chains(position, gradients)
    plain.warm_up(1000, final, final, progress=False)
    assert (warm.step_size / plain.step_size).log().abs().max() < 0.1
