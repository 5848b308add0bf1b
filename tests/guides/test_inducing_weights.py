"""InducingWeightGuide: parameters, initial values, and bounds on scales."""

import pytest
import torch
from torch import nn

import pyro_structvi as ps
from pyro_structvi.sites.parameterization import capped, uncapped
from tests.guides.inducing_guides import KINDS, SHAPE, make_guide
from tests.unit_noise import close


def test_only_a_weight_that_is_smaller_in_both_directions_has_fewer():
    for layer, expected in (
        (nn.Linear(9, 8), (3, 3)),
        (nn.Linear(1, 2), (2, 2)),
        (nn.Linear(2, 2), (3, 3)),  # with its bias as large in one direction
        (nn.Linear(1, 8, bias=False), (3, 3)),
    ):
        guide = make_guide(ps.Classifier(ps.bayesianize(layer), num_data=8), (3, 3))
        assert guide["net.weight"]().inducing.event_shape == expected


@pytest.mark.parametrize("kind", ["nested", "nested, shared"])
def test_prior_scales_are_no_parameters(kind):
    guide = make_guide(**KINDS[kind])
    assert not [name for name, _ in guide.named_parameters() if name.endswith("prior_scale")]
    ends = "inducing_prior_scale", "posterior.prior_scale"
    inner = [name for name in guide.state_dict() if name.endswith(ends)]
    assert len(inner) == (1 if "shared" in kind else 2)


def biased_model(out=6, inputs=5, **priors):
    net = nn.Linear(inputs, out)
    priors = {"weight": 0.7, "bias": 1.5} | priors
    return ps.Classifier(ps.bayesianize(net, prior=priors), num_data=8), net


@pytest.mark.parametrize(
    ("posterior", "shape"), [("diagonal", (3, 2)), ("matrix", (2, 3)), ("full", (1, 4))]
)
def test_the_start_is_the_best_approximation_of_low_rank(posterior, shape):
    """Best in units of the priors; the singular values fall off, as those that matter should."""
    model, _ = biased_model()
    columns = torch.tensor([0.7] * 5 + [1.5])
    u, _, v = torch.linalg.svd(torch.randn(6, 6))
    matrix = (u * torch.logspace(0, -5, 6)) @ v * columns
    model.net.initial_values["weight"], model.net.initial_values["bias"] = (
        matrix[:, :-1].contiguous(),
        matrix[:, -1].contiguous(),
    )
    median = make_guide(model, shape, inducing_posterior=posterior).median()
    found = torch.cat([median["net.weight"], median["net.bias"].unsqueeze(-1)], -1) / columns
    u, s, v = torch.linalg.svd(matrix / columns)
    rank = min(shape)
    best = (u[:, :rank] * s[:rank]) @ v[:rank]
    error = (found - matrix / columns).norm()
    assert error < (1 + 1e-6) * (best - matrix / columns).norm()
    close(found, best, atol=1e-4)


@pytest.mark.parametrize("shape", [(64, 64), (6, 64), (3, 8)], ids=str)
def test_a_side_that_is_seen_whole_starts_along_its_axes_and_at_the_net(shape):
    model, net = biased_model()
    guide = make_guide(model, shape)
    rows, columns = guide["net.weight"].row_factor, guide["net.weight"].column_factor
    close(columns[:6], torch.eye(6))
    if shape == (3, 8):
        close(rows @ rows.mT, torch.eye(3), atol=1e-6)
        return
    close(rows, torch.eye(6))
    close(guide.median()["net.weight"], net.weight.detach(), atol=1e-8)
    close(guide.median()["net.bias"], net.bias.detach(), atol=1e-8)


@pytest.mark.parametrize(
    ("posterior", "shape"), [("diagonal", (64, 64)), ("matrix", (3, 64)), ("full", (3, 2))]
)
def test_the_start_has_the_covariance_of_mean_field(posterior, shape):
    """``init_scale^2`` times the identity, and for the bias the ratio of prior variances."""
    model, _ = biased_model()
    q = make_guide(model, shape, inducing_posterior=posterior, init_scale=0.2)["net.weight"]()
    variance = torch.tensor([0.04] * 5 + [0.04 * (1.5 / 0.7) ** 2]).expand(6, 6)
    close(q.covariance_matrix, torch.diag(variance.flatten()))


def test_prior_scales_are_those_of_weight_and_bias():
    net = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 2), nn.Linear(2, 2, bias=False))
    prior = ps.FanIn(1.4, vector_scale=0.3)
    guide = make_guide(ps.Regressor(ps.bayesianize(net, prior=prior), 12, noise_scale=0.3))
    for layer, expected in (
        (0, [1.4 / 8**0.5, 0.3]),
        (1, [1.4 / 5**0.5, 0.3]),
        (2, [1.4 / 2**0.5]),
    ):
        close(guide[f"net.{layer}.weight"].prior_scale, torch.tensor(expected))


def test_a_bound_keeps_a_value_of_up_to_half_of_it_and_leaves_gradients():
    for value, most in ((10.0, None), (0.1, 0.3), (0.2, 0.3), (10.0, 100.0)):
        expected = value if most is None else min(value, most / 2)
        close(capped(torch.tensor(uncapped(value, most)), most), torch.tensor(expected))
    x = torch.linspace(-30.0, 30.0, 61, requires_grad=True)
    values = capped(x, 0.3)
    assert ((values > 0) & (values <= 0.3)).all()
    assert (values.diff() > 0)[:45].all()
    (gradient,) = torch.autograd.grad(values.sum(), x)
    assert (gradient > 0).all()
    close(values[:10], x[:10].exp(), rtol=1e-8)


def test_scales_start_at_the_bounds_half_at_most_and_stay_below():
    """The prior has 0.7: the start would be 0.2 / 0.7 for both."""
    bounds = {"max_conditional_scale": 0.03, "max_inducing_scale": 0.1}
    guide = make_guide(biased_model()[0], init_scale=0.2, **bounds)
    q = guide["net.weight"]()
    close(q.conditional_scale, torch.tensor(0.015))
    close(q.inducing.scale, torch.full(SHAPE, 0.05))
    with torch.no_grad():
        for name in ("log_conditional_scale", "inducing_log_scale"):
            guide["net.weight"].value(name).fill_(20.0)
    q = guide["net.weight"]()
    close(q.conditional_scale, torch.tensor(0.03), rtol=1e-6)
    close(q.inducing.scale, torch.full(SHAPE, 0.1), rtol=1e-6)
