"""IsotropicStudentT: its density, moments and draws, and its use as a prior."""

import math

import pytest
import torch
from pyro import poutine
from pyro.distributions import MultivariateStudentT, StudentT
from scipy import stats
from torch import nn

import pyro_structvi as ps
from pyro_structvi.distributions import IsotropicStudentT
from pyro_structvi.infer import SampledKLWarning
from tests.guide_cases import GUIDES
from tests.models import make_regressor, regression_data


def prior(name, value):
    return IsotropicStudentT(4.0, 0.5, value.shape)


def test_density_and_moments_are_those_of_the_multivariate_t():
    df, scale = 2.5 + 3 * torch.rand(3, 1), 0.2 + torch.rand(2)
    q = IsotropicStudentT(df, scale, (2, 4))
    tril = scale[:, None, None] * torch.eye(8)
    dense = MultivariateStudentT(df.expand(3, 2), torch.zeros(8), tril)
    value = torch.randn(5, 3, 2, 2, 4)
    torch.testing.assert_close(q.log_prob(value), dense.log_prob(value.flatten(-2)))
    for moment in ("mean", "variance"):
        torch.testing.assert_close(getattr(q, moment).flatten(-2), getattr(dense, moment))
    wide = q.expand((5, 3, 2))
    torch.testing.assert_close(wide.log_prob(value), q.log_prob(value))
    assert wide.mode.shape == wide.rsample().shape == (5, 3, 2, 2, 4)

    def log_prob(value, df, scale):
        return IsotropicStudentT(df, scale, (2, 4), validate_args=False).log_prob(value)

    leaves = [tensor.requires_grad_() for tensor in (value[0], df, scale)]
    assert torch.autograd.gradcheck(log_prob, leaves)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_slices_with_scales_of_their_own_are_independent(dim):
    df, scale = 2.5 + 3 * torch.rand(3, 1), 0.2 + torch.rand(2)
    q = IsotropicStudentT(df, scale, (2, 4, 3), dim=dim).expand((5, 3, 2))
    value = torch.randn(6, 5, 3, 2, 2, 4, 3)
    slices = value.movedim(dim if dim < 0 else dim - 3, 0)
    shared = IsotropicStudentT(df, scale, slices.shape[-2:])
    torch.testing.assert_close(q.log_prob(value), shared.log_prob(slices).sum(0))
    torch.testing.assert_close(
        q.variance, IsotropicStudentT(df, scale, (2, 4, 3)).variance.expand(q.shape())
    )


def test_draws_of_slices_have_independent_f_distributions():
    """As for one scale; norms of slices are independent, so their order is as of no relation."""
    draws = IsotropicStudentT(3.0, 0.5, (2, 3), dim=1).rsample((4000,))
    ratios = draws.square().sum(-2) / (2 * 0.25)
    for column in ratios.T:
        assert stats.kstest(column, stats.f(2, 3).cdf).pvalue > 5e-5
    assert stats.spearmanr(ratios[:, 0], ratios[:, 1]).pvalue > 5e-5
    of_all = IsotropicStudentT(3.0, 0.5, (2, 3)).rsample((4000,)).square().sum(-2)
    assert stats.spearmanr(of_all[:, 0], of_all[:, 1]).pvalue < 5e-5


def test_many_degrees_of_freedom_are_a_normal_in_single_precision():
    value = torch.linspace(-3, 3, 8).float()
    q = IsotropicStudentT(torch.tensor(1e9).float(), torch.tensor(0.7).float(), (8,))
    expected = torch.distributions.Normal(0.0, 0.7).log_prob(value).sum()
    torch.testing.assert_close(q.log_prob(value), expected, check_dtype=False)


@pytest.mark.parametrize("df", [0.5, 1.5, 3.0])
def test_an_element_has_the_students_t_distribution(df):
    q, elements = IsotropicStudentT(df, 0.7), StudentT(df, 0.0, 0.7)
    value = torch.linspace(-3, 3, 7)
    torch.testing.assert_close(q.log_prob(value), elements.log_prob(value))
    torch.testing.assert_close(q.mean, elements.mean, equal_nan=True)
    torch.testing.assert_close(q.variance, elements.variance, equal_nan=True)


def test_norms_of_draws_have_an_f_distribution():
    """With D elements, norm^2 / (D s^2) has D and df degrees of freedom; one false alarm in 10,000."""
    q = IsotropicStudentT(3.0, torch.tensor([0.5, 2.0]), (3, 2))
    scale = torch.tensor([0.5, 2.0], requires_grad=True)
    draws = IsotropicStudentT(3.0, scale, (3, 2)).rsample((4000,))
    ratios = draws.detach().square().sum((-2, -1)) / (6 * q.scale.square())
    for column in ratios.T:
        assert stats.kstest(column, stats.f(6, 3).cdf).pvalue > 5e-5
    directions = draws.detach()[:, 0] / draws.detach()[:, 0].norm(dim=(-2, -1), keepdim=True)
    assert directions.mean(0).abs().max() < 4.5 / math.sqrt(6 * 4000)
    (gradient,) = torch.autograd.grad(draws.sum(), scale)
    torch.testing.assert_close(gradient, draws.detach().sum((0, 2, 3)) / scale.detach())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 1.0), "`df` must be a torch.Tensor or a positive number"),
        ((torch.tensor([1.0, 0.0]), 1.0), "`df` must be positive"),
        ((1.0, torch.tensor([1.0, -1.0])), "`scale` must be positive"),
        ((torch.ones(2), torch.ones(3)), r"broadcast, but got \(2,\) and \(3,\)"),
        ((torch.ones(2), torch.ones(2).half()), "`scale` must have the dtype of `df`"),
    ],
)
def test_arguments_that_do_not_fit(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        IsotropicStudentT(*arguments, (2, 3))


@pytest.mark.parametrize(("shape", "dim"), [((2, 3), 2), ((2, 3), -3), ((), 0)])
def test_a_dimension_that_the_event_does_not_have(shape, dim):
    with pytest.raises(ValueError, match="`dim` must be a dimension of the event shape"):
        IsotropicStudentT(1.0, 1.0, shape, dim=dim)


def test_it_moves_and_converts_with_the_net():
    bayes_net = ps.bayesianize(nn.Linear(2, 3).float(), prior)
    for dtype in (torch.float32, torch.float64):
        drawn = poutine.block(bayes_net.to(dtype))(torch.zeros(1, 2, dtype=dtype))
        assert drawn.dtype == dtype
    sites = poutine.trace(bayes_net).get_trace(torch.zeros(1, 2))
    assert sites.nodes["weight"]["fn"].scale.dtype == torch.float64


@pytest.mark.parametrize("guide_name", ["k-tied", "points"])
@pytest.mark.filterwarnings(f"ignore::{SampledKLWarning.__module__}.{SampledKLWarning.__name__}")
def test_the_bound_is_the_density_of_drawn_weights(guide_name):
    model, data = make_regressor(prior=prior), regression_data()
    guide = GUIDES.get(guide_name, ps.MAPGuide)(model)
    guide.initialize(*data)
    is_random = guide_name != "points"
    elbo = ps.StructuredELBO(num_particles=400 if is_random else 1, vectorize_particles=True)
    terms = elbo.terms(model, guide, *data)
    draws = guide.joint_posterior().draw_many(range(400))
    for name, kl in terms.kl.items():
        q, p = guide[name](), IsotropicStudentT(4.0, 0.5, guide[name].site.shape)
        values = torch.stack([draws[name][index] for index in range(400)])
        if not is_random:
            torch.testing.assert_close(kl, -p.log_prob(q.v))
            continue
        logs = q.log_prob(values) - p.log_prob(values)
        assert abs(kl - logs.mean()) < 6 * logs.std() / math.sqrt(400)


@pytest.mark.parametrize("df", [1e9, 1e12, 1e16, 1e300])
def test_with_many_degrees_of_freedom_it_is_a_normal(df):
    """Densities differ by terms of order 1 / df, and by the rounding of log df."""
    df, w = torch.tensor(df), torch.randn(2, 3)
    expected = torch.distributions.Normal(0.0, 0.7).log_prob(w).sum()
    found = IsotropicStudentT(df, torch.tensor(0.7), (2, 3)).log_prob(w)
    torch.testing.assert_close(found, expected, rtol=0, atol=100 / float(df) + 1e-11)
