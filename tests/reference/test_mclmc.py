"""Microcanonical Langevin sampling."""

import sys

import arviz as az
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.integrate import solve_ivp
from torch import nn

import pyro_structvi as ps
from pyro_structvi.reference import mclmc as sample
from pyro_structvi.reference.draws import split_r_hat
from pyro_structvi.reference.mclmc import LogJoint, _Chains, _interruptible, _kick
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


@pytest.mark.parametrize("make_guide", [ps.MeanFieldGuide, ps.RowwiseGuide, ps.MAPGuide])
def test_draws_of_a_gaussian_posterior_have_its_moments(make_guide):
    """4,000 draws, which are nearly independent: 5 standard errors are a false alarm in 2e6."""
    model, data, mean, covariance = linear_regression()
    guide = make_guide(model)
    ps.fit(model, guide, data, num_steps=300, progress=False)
    draws = sample(model, guide, data, progress=False, thinning=2, adjusted=True, num_warmup=500)
    w = draws["net.weight"].squeeze()
    assert w.shape == (4000, 3)
    tril = torch.linalg.cholesky(covariance)
    z = torch.linalg.solve_triangular(tril, (w - mean).mT, upper=False)
    error = 5 / 2000**0.5  # of half as many effective draws
    assert z.mean(1).abs().max() < error
    assert ((z @ z.mT) / 4000 - torch.eye(3)).abs().max() < 2**0.5 * error
    assert draws.r_hat < 1.02


def test_without_acceptance_small_steps_have_the_exact_moments():
    """Within 5 standard errors of a quarter as many effective draws."""
    model, data, mean, covariance = linear_regression()
    guide = ps.FullCovarianceGuide(model)
    ps.fit(model, guide, data, num_steps=300, progress=False)
    draws = sample(model, guide, data, progress=False, energy_variance=1e-6, num_warmup=500)
    w = draws["net.weight"].squeeze()
    ratios = w.var(0) / covariance.diagonal()
    assert (ratios - 1).abs().max() < 5 * (2 / 1000) ** 0.5
    assert (w.mean(0) - mean).div(covariance.diagonal().sqrt()).abs().max() < 5 / 1000**0.5


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
        values, _ = target.values_at(position)
        trace = pyro.poutine.trace(pyro.poutine.condition(model, data=values)).get_trace(*data)
        jacobian = values["noise_scale"].log()  # of exp, in units of the guide's deviation
        expected.append(trace.log_prob_sum() + jacobian)
    assert {name: value.shape for name, value in values.items()} == {
        name: value.shape for name, value in guide.draw().items()
    }
    torch.testing.assert_close(found[0] - found[1], expected[0] - expected[1], rtol=1e-10, atol=0)


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
    model, data, *_ = linear_regression()
    guide = ps.MeanFieldGuide(model)
    guide.initialize(*data)
    target = LogJoint(model, guide, data)
    start = 0.1 * torch.randn(64, target.size)

    def error(step_size):
        torch.manual_seed(1)
        chains = _Chains(target, start)
        chains.step_size = step_size
        return float(chains._move(refreshes=False)[0].abs().mean())

    assert 6 < error(0.02) / error(0.01) < 11


def test_draws_go_into_predictions_and_inference_data():
    model, data = make_regressor(), regression_data()
    guide = ps.MeanFieldGuide(model)
    guide.initialize(*data)
    options = {"num_warmup": 20, "num_samples": 4, "num_chains": 2, "progress": False}
    with pytest.warns(ps.reference.NotMixedWarning):
        draws = sample(model, guide, data, thinning=1, **options)
    assert ps.predict(model, draws, data[0]).functions.shape == (8, 12, 1)
    found = ps.to_inference_data(model, draws, *data)
    assert dict(found.posterior.sizes)["chain"] == 2
    assert found.sample_stats["energy_change"].shape == (2, 4)


def test_chains_start_at_the_members_of_an_ensemble():
    model, data = make_regressor(), regression_data()
    guide = ps.EnsembleGuide(model, size=3)
    guide.initialize(*data)
    target = LogJoint(model, guide, data)
    for number in range(3):
        draw = guide.draw(number=number)
        values, _ = target.values_at(target.start(draw))
        torch.testing.assert_close(values, draw)


def test_a_model_that_cannot_be_recorded_has_the_same_draws(monkeypatch):
    model, data, *_ = linear_regression()
    guide = ps.MeanFieldGuide(model)
    guide.initialize(*data)
    options = {"num_warmup": 20, "num_samples": 4, "num_chains": 2, "progress": False}

    def draws():
        return sample(model, guide, data, **options)["net.weight"]

    recorded = draws()

    def refuse(*args):
        raise RuntimeError

    monkeypatch.setattr(sys.modules[LogJoint.__module__], "Record", refuse)
    torch.testing.assert_close(draws(), recorded)


def test_an_interrupt_keeps_the_draws_so_far(monkeypatch):
    model, data, *_ = linear_regression()
    guide = ps.MeanFieldGuide(model)
    guide.initialize(*data)
    original, calls = _Chains.step, []

    def step(chains):
        calls.append(chains)
        if len(calls) == 61:
            raise KeyboardInterrupt
        return original(chains)

    monkeypatch.setattr(_Chains, "step", step)
    options = {"num_warmup": 50, "num_samples": 50, "num_chains": 2, "progress": False}
    with pytest.warns(UserWarning, match="Interrupted: the draws are those so far"):
        draws = sample(model, guide, data, **options)
    assert draws["net.weight"].shape == (12, 1, 3)


@pytest.mark.parametrize("name", ["position", "lp"])
def test_an_interrupt_before_enough_draws_or_between_two_statistics(name):
    complete = [torch.zeros(2)] * 4
    stats = {"position": complete, "lp": complete, name: complete[:3]}
    with pytest.raises(KeyboardInterrupt), _interruptible(stats):
        raise KeyboardInterrupt
    stats[name] = [*complete, complete[0]]
    with pytest.warns(UserWarning, match="Interrupted"), _interruptible(stats):
        raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore::pyro_structvi.reference.NotMixedWarning")
def test_a_draw_is_one_trajectory_or_ten_steps():
    model, data, *_ = linear_regression()
    guide = ps.MeanFieldGuide(model)
    guide.initialize(*data)
    options = {"num_warmup": 20, "num_samples": 4, "num_chains": 2, "progress": False}
    for adjusted, thinning in ((False, 10), (True, 1)):
        by_default, chosen = (
            sample(model, guide, data, adjusted=adjusted, thinning=each, **options)["net.weight"]
            for each in (None, thinning)
        )
        torch.testing.assert_close(by_default, chosen, rtol=0, atol=0)


def test_split_r_hat_is_that_of_arviz():
    values = torch.randn(3, 10, 2) + torch.arange(3.0).reshape(3, 1, 1)
    own = [az.rhat(values[..., i].numpy(), method="split") for i in range(2)]
    np.testing.assert_allclose(split_r_hat(values), own, rtol=1e-12)


def test_what_cannot_be_sampled_is_refused():
    model, data, *_ = linear_regression()
    with pytest.raises(ValueError, match=r"`guide` must be initialized"):
        sample(pyro.poutine.mask(model, mask=True), ps.MeanFieldGuide(lambda x, y: None), data)
    guide = ps.MeanFieldGuide(model)
    guide.initialize(*data)
    with pytest.raises(ValueError, match="`num_samples` must be at least 4"):
        sample(model, guide, data, num_samples=3)
    with pytest.raises(TypeError, match="`data` must be a tuple of tensors with all examples"):
        sample(model, guide, [data])

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
