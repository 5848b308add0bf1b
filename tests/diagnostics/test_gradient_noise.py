"""Signal-to-noise ratios of gradients, against those of one weight in closed form."""

import math

import pyro
import pytest
import torch
from scipy.stats import ncf
from torch import nn

import pyro_structvi as ps
from pyro_structvi.diagnostics import gradient_snr
from pyro_structvi.diagnostics.gradient_noise import _moments, _summary
from tests.diagnostics.conjugate import NOISE, SITE, make_model
from tests.models import make_regressor, regression_data

FALSE_ALARM = 1e-6
LOC, SCALE = 0.8, 0.3
KEYS = f"posteriors.{SITE.replace('.', '/')}.loc", f"posteriors.{SITE.replace('.', '/')}.log_scale"


def one_weight(local_reparam):
    """Return a model of one weight, its guide and data."""
    x = torch.tensor([[0.5], [-1.0], [0.2]])
    model = make_model(len(x), 1)
    guide = ps.MeanFieldGuide(model, init_scale=SCALE, local_reparam=local_reparam)
    with torch.no_grad():
        guide[SITE].loc.fill_(LOC)
    return model, guide, (x, torch.tensor([[0.4], [-0.1], [0.3]]))


def closed_form(x, y, kl_weight, local_reparam):
    """Return mean, variance, third and fourth cumulant of the gradients of ``loc`` and ``log_scale``.

    The loss of outputs ``z_n = (m + s e_n) x_n`` is ``sum_n (z_n - y_n)^2 / (2 noise^2)`` and the KL.
    Its gradients are sums over n of ``a_n e_n^2 + b_n e_n``, plus c, with one e for all n where the
    weight is drawn.
    """
    x, y = x.flatten(), y.flatten()
    curvature, slope = x.square() / NOISE**2, (LOC * x - y) * x / NOISE**2
    zero = torch.zeros_like(x)
    terms = {
        0: (zero, curvature * SCALE, slope.sum() + kl_weight * LOC),
        1: (curvature * SCALE**2, slope * SCALE, kl_weight * (SCALE**2 - 1)),
    }
    cumulants = []
    for a, b, c in terms.values():
        if not local_reparam:
            a, b = a.sum().reshape(1), b.sum().reshape(1)
        cumulants.append((
            float(a.sum() + c),
            float((2 * a**2 + b**2).sum()),
            float((8 * a**3 + 6 * a * b**2).sum()),
            float((48 * a**4 + 48 * a**2 * b**2).sum()),
        ))
    return cumulants


def assert_snr_of_normals(found, expected, count):
    """Of normal draws, their number times mean^2 / variance has a noncentral F distribution."""
    bounds = [FALSE_ALARM / 2, 1 - FALSE_ALARM / 2]
    low, high = ncf.ppf(bounds, 1, count - 1, count * expected) / count
    assert low < found < high


@pytest.mark.parametrize(("kl_weight", "local_reparam"), [(0.25, True), (1.0, False)])
def test_one_weight_in_closed_form(kl_weight, local_reparam):
    """Exact for ``loc``, whose gradient is normal; for ``log_scale`` to first order in 1 / draws."""
    model, guide, data = one_weight(local_reparam)
    count, objective = 200, ps.StructuredELBO(kl_weight)
    noise = gradient_snr(model, guide, *data, num_samples=count, objective=objective)
    of_loc, of_scale = closed_form(*data, kl_weight, local_reparam)
    assert_snr_of_normals(noise[KEYS[0]].snr, of_loc[0] ** 2 / of_loc[1], count)
    mean, variance, third, fourth = of_scale
    by_mean, by_variance = 2 * mean / variance, -((mean / variance) ** 2)
    spread = by_mean**2 * variance + by_variance**2 * (fourth + 2 * variance**2)
    error = math.sqrt((spread + 2 * by_mean * by_variance * third) / count)
    assert abs(noise[KEYS[1]].snr - mean**2 / variance) < 5.0 * error  # P = 6e-7


def test_a_schedule_is_read_at_its_present_step_and_stays_there():
    model, guide, data = one_weight(True)
    objective = ps.StructuredELBO(ps.LinearAnnealing(num_steps=10, end=1.0, start=0.0))
    objective.step = 5
    pyro.set_rng_seed(1)
    found = gradient_snr(model, guide, *data, num_samples=20, objective=objective)
    pyro.set_rng_seed(1)
    constant = ps.StructuredELBO(objective.current_kl_weight)
    assert objective.step == 5
    assert found == gradient_snr(model, guide, *data, num_samples=20, objective=constant)


def test_moments_and_ratios_by_their_definitions():
    draws = torch.randn(7, 3, 2) * torch.tensor([1.0, 5.0]) + 10
    rows = iter(draws)
    mean, variance = _moments(lambda: {"a": next(rows)}, 7)
    torch.testing.assert_close(mean["a"], draws.mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(variance["a"], draws.var(0), rtol=1e-12, atol=0)
    noise = _summary(mean["a"].square(), variance["a"], 6 / 7)
    ratio = draws.mean(0).square() / draws.var(0)
    assert noise.snr == pytest.approx(float(ratio.mean()), rel=1e-12)
    assert noise.median_snr == pytest.approx(float(ratio.median()), rel=1e-12)
    second = (draws.square().mean(0) / draws.var(0)).mean()
    assert noise.second_moment_ratio == pytest.approx(float(second), rel=1e-12)
    signal, variance = torch.tensor([0.0, 4.0, 9.0]), torch.tensor([0.0, 2.0, 1.0])
    assert _summary(signal, variance, 0.5).snr == (2 + 9) / 2, "without a gradient: left out"
    assert math.isinf(_summary(signal, torch.zeros(3), 0.5).snr)
    nothing = _summary(torch.zeros(2), torch.zeros(2), 0.5)
    assert math.isnan(nothing.snr + nothing.median_snr)


class Drawn(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x


def test_nothing_changes():
    net = nn.Sequential(nn.Linear(3, 4), Drawn(), nn.Linear(4, 1))
    model, data = ps.Regressor(ps.bayesianize(net, prior=1.0), 12, 0.3), regression_data()
    guide = ps.KTiedGuide(model, rank=2)
    guide.initialize(*data)
    for value in guide.parameters():
        value.grad = torch.ones_like(value)
    parameters = {name: value.clone() for name, value in guide.named_parameters()}
    calls, state = float(model.net[1].calls), torch.get_rng_state()
    with torch.no_grad():
        noise = gradient_snr(model, guide, *data, num_samples=4)
    assert set(noise) == set(parameters)
    assert torch.equal(torch.get_rng_state(), state)
    assert float(model.net[1].calls) == calls
    for name, value in guide.named_parameters():
        assert torch.equal(value, parameters[name])
        assert torch.equal(value.grad, torch.ones_like(value))


def test_parameters_that_are_not_trained_are_left_out():
    model, data = make_regressor(), regression_data()
    guide = ps.MeanFieldGuide(model)
    first, *others = guide.parameters()
    first.requires_grad_(False)
    assert len(gradient_snr(model, guide, *data, num_samples=2)) == len(others)
    with pytest.raises(ValueError, match=r"`num_samples` must be at least 2, .* but got 1"):
        gradient_snr(model, guide, *data, num_samples=1)
    for each in others:
        each.requires_grad_(False)
    with pytest.raises(ValueError, match="`guide` must have parameters to train, but has none"):
        gradient_snr(model, guide, *data, num_samples=2)
