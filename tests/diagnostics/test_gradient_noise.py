"""Signal-to-noise ratios of gradients, spectra of scales, and coverage of intervals."""

import math
from statistics import median

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.stats import norm
from torch import nn

import pyro_structvi as ps
from pyro_structvi.diagnostics import compress_scales, expected_coverage, gradient_snr, spectra
from pyro_structvi.diagnostics.gradient_noise import _moments, _summary
from pyro_structvi.sites.finding import separate_randomness
from tests.conjugate import SITE, make_model
from tests.models import linear_function, make_regressor, regression_data
from tests.predictions import normal_prediction

LOC, SCALE = 0.8, 0.3
KEYS = f"posteriors.{SITE.replace('.', '/')}.loc", f"posteriors.{SITE.replace('.', '/')}.log_scale"


def one_weight(local_reparam):
    x = torch.tensor([[0.5], [-1.0], [0.2]])
    model = make_model(len(x), 1)
    guide = ps.MeanFieldGuide(model, init_scale=SCALE, local_reparam=local_reparam)
    with torch.no_grad():
        guide[SITE].loc.fill_(LOC)
    return model, guide, (x, torch.tensor([[0.4], [-0.1], [0.3]]))


@pytest.mark.parametrize(("kl_weight", "local_reparam"), [(0.25, True), (1.0, False)])
def test_ratios_are_those_of_the_objectives_gradients(kl_weight, local_reparam):
    model, guide, data = one_weight(local_reparam)
    objective, draws = ps.StructuredELBO(kl_weight=kl_weight), []
    pyro.set_rng_seed(1)
    noise = gradient_snr(model, guide, *data, num_samples=20, objective=objective)
    pyro.set_rng_seed(1)
    with separate_randomness():
        for _ in range(20):
            loss = objective.differentiable_loss(model, guide, *data)
            gradients = torch.autograd.grad(loss, [*guide.parameters()])
            draws.append(torch.cat([each.flatten() for each in gradients]))
    draws = torch.stack(draws)
    expected = draws.mean(0).square() / draws.var(0)
    assert [noise[key].snr for key in KEYS] == pytest.approx(expected.tolist(), rel=1e-9)


def test_a_schedule_is_read_at_its_present_step_and_stays_there():
    model, guide, data = one_weight(True)
    objective = ps.StructuredELBO(kl_weight=ps.LinearAnnealing(num_steps=10, end=1.0, start=0.0))
    objective.step = 5
    pyro.set_rng_seed(1)
    found = gradient_snr(model, guide, *data, num_samples=20, objective=objective)
    pyro.set_rng_seed(1)
    constant = ps.StructuredELBO(kl_weight=objective.current_kl_weight)
    assert objective.step == 5
    assert found == gradient_snr(model, guide, *data, num_samples=20, objective=constant)


def test_moments_and_ratios_by_their_definitions():
    draws = torch.randn(7, 3, 2) * torch.tensor([1.0, 5.0]) + 10
    rows = iter(draws)
    mean, variance = _moments(lambda: {"a": next(rows)}, 7)
    torch.testing.assert_close(mean["a"], draws.mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(variance["a"], draws.var(0), rtol=1e-12, atol=0)
    noise = _summary(mean["a"].square(), variance["a"], 7)
    ratio = draws.mean(0).square() / draws.var(0)
    assert noise.snr == pytest.approx(float(ratio.mean()), rel=1e-12)
    assert noise.median_snr == pytest.approx(median(ratio.flatten().tolist()), rel=1e-12)
    second = (draws.square().mean(0) / draws.var(0)).mean()
    assert noise.second_moment_ratio == pytest.approx(float(second), rel=1e-12)
    signal, variance = torch.tensor([0.0, 4.0, 9.0]), torch.tensor([0.0, 2.0, 1.0])
    assert _summary(signal, variance, 2).snr == (2 + 9) / 2, "without a gradient: left out"
    assert math.isinf(_summary(signal, torch.zeros(3), 2).snr)
    nothing = _summary(torch.zeros(2), torch.zeros(2), 2)
    assert math.isnan(nothing.snr + nothing.median_snr)


class Drawn(nn.Module):
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


def test_a_new_guide_of_a_function_gets_its_parameters_first():
    data = regression_data()
    guide = ps.MeanFieldGuide(linear_function)
    noise = gradient_snr(linear_function, guide, *data, num_samples=2)
    assert {*noise} == {name for name, _ in guide.named_parameters()} != set()


# ---- spectra -------------------------------------------------------------------------------------


def convolution_model():
    net = nn.Sequential(nn.Conv2d(2, 6, 3), nn.Flatten(), nn.Linear(24, 5))
    return ps.Classifier(ps.bayesianize(net, prior=1.0), 5)


def spread(guide):
    with torch.no_grad():
        for value in guide.parameters():
            value.add_(0.5 * torch.randn_like(value))
    return guide


@pytest.mark.parametrize("rank", [1, 3])
def test_k_tied_scales_have_rank_k(rank):
    guide = spread(ps.KTiedGuide(convolution_model(), rank=rank))
    found = spectra(guide)
    assert [*found] == ["net.0.weight", "net.2.weight"]
    for spectrum in found.values():
        assert spectrum.scale[rank - 1] > 1e-3 * spectrum.scale[0]
        assert spectrum.scale[rank:].max() < 1e-12 * spectrum.scale[0]
        assert float(spectrum.scale_share[:rank].sum()) == pytest.approx(1.0, abs=1e-12)


def test_singular_values_and_shares_by_eigenvalues():
    """Filters in the layout of the paper, (h, w, in, out), flattened to (h w in, out)."""
    guide = spread(ps.MeanFieldGuide(convolution_model()))
    spectrum, q = spectra(guide)["net.0.weight"], guide["net.0.weight"]()
    for values, shares, tensor in (
        (spectrum.mean, spectrum.mean_share, q.mean),
        (spectrum.scale, spectrum.scale_share, q.stddev),
    ):
        matrix = tensor.detach().permute(2, 3, 1, 0).reshape(-1, 6)
        eigenvalues = torch.linalg.eigvalsh(matrix.mT @ matrix).flip(0)
        torch.testing.assert_close(values.square(), eigenvalues, rtol=1e-9, atol=1e-12)
        expected = eigenvalues / matrix.square().sum()
        torch.testing.assert_close(shares, expected, rtol=1e-9, atol=1e-12)


def test_a_joined_bias_is_no_column_of_its_weight_and_points_have_no_scales():
    guide = spread(ps.RowwiseGuide(make_regressor(), join_bias=True))
    spectrum, q = spectra(guide)["net.0.weight"], guide["net.0.weight"]()
    scale = torch.linalg.svdvals(q.stddev.detach()[:, :-1])
    torch.testing.assert_close(spectrum.scale, scale, rtol=1e-9, atol=0)
    points = spectra(ps.MAPGuide(make_regressor()))["net.0.weight"]
    assert points.scale.max() == points.scale_share.max() == 0


def test_a_guide_without_a_matrix_is_refused():
    def model():
        pyro.sample("vector", dist.Normal(torch.zeros(4), 1.0).to_event(1))

    guide = ps.MeanFieldGuide(model)
    guide.initialize()
    with pytest.raises(ValueError, match=r"`guide` must have a weight with .* shapes \[\(4,\)\]"):
        spectra(guide)


# ---- coverage ------------------------------------------------------------------------------------


def test_counts_with_bounds_included_and_the_error_is_that_of_the_examples():
    prediction = normal_prediction(torch.tensor([0.0, 1.0, 2.0, 3.0]), 1.0)
    half = norm.ppf(0.75)
    y = torch.arange(4.0) + half * torch.tensor([1.0, 1.01, -0.99, -1.01])
    found = expected_coverage(prediction, y, levels=[0.5])[0.5]
    assert (found.observed, found.standard_error) == (0.5, pytest.approx(math.sqrt(0.25 / 4)))
    assert [*expected_coverage(prediction, y)] == [0.5, 0.8, 0.9, 0.95]
    low, high = prediction.interval(0.5)
    for end in (low, high):
        assert expected_coverage(prediction, end, levels=[0.5])[0.5].observed == 1.0
    y = torch.tensor([[0.0, 9.0], [0.0, 0.0], [9.0, 9.0]])  # several targets count each
    found = expected_coverage(normal_prediction(torch.zeros(3, 2), 1.0), y, [0.8])[0.8]
    assert (found.observed, found.standard_error) == (0.5, pytest.approx(math.sqrt(0.16 / 3)))


def test_other_observations_and_levels_are_refused():
    prediction, y = normal_prediction(torch.zeros(3), 1.0), torch.zeros(3)
    with pytest.raises(ValueError, match=r"`y` must have shape .* = \(3,\), but got \(4,\)"):
        expected_coverage(prediction, torch.zeros(4))
    with pytest.raises(ValueError, match="`y` must be finite everywhere"):
        expected_coverage(prediction, y + torch.nan)
    with pytest.raises(ValueError, match="`levels` must hold at least one level"):
        expected_coverage(prediction, y, [])
    with pytest.raises(ValueError, match=r"`levels\[1\]` must be .*, but got 1\.0"):
        expected_coverage(prediction, y, [0.5, 1.0])


def test_compressed_scales_have_the_rank_and_are_near_the_best():
    """The best approximation that may be negative leaves the other squared singular values."""
    model, data = make_regressor(), regression_data()
    guide = ps.MeanFieldGuide(model, init_scale=0.1)
    ps.fit(model, guide, data, num_steps=100, lr=0.05, progress=False)
    before, name = spectra(guide)["net.0.weight"], "net.0.weight"
    for rank in (1, 2):
        compressed = compress_scales(guide, rank)
        assert spectra(compressed)[name].scale[rank:].max() < 1e-12
        assert torch.equal(compressed[name]().mean, guide[name]().mean)
        error = (compressed[name]().stddev - guide[name]().stddev).square().sum().detach()
        best = before.scale[rank:].square().sum()
        if rank == 1:
            torch.testing.assert_close(error, best, rtol=1e-9, atol=1e-12)
        assert best * (1 - 1e-9) <= error <= 1.5 * best + 1e-12
