"""The KL to independent normals: every form that a prior's arguments may take, and its gradients."""

import itertools
import re

import pyro.distributions as dist
import pytest
import torch
from torch.distributions import Independent, Laplace, Normal, kl_divergence

from pyro_structvi.distributions import JoinedPrior, LowRankNormal, MeanFieldNormal, PointMass
from pyro_structvi.linalg.factorizations import log_det
from pyro_structvi.linalg.matrices import RowGram
from tests.distributions.cases import CASES
from tests.distributions.subject import named_arguments, rebuilt

SHAPE = (4, 3)

# Shapes of a prior's arguments in memory, all of them expanded to that of the weight.
FORMS = [(), (1, 1), (4, 1), (1, 3), (3,), (4, 3)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_form_of_a_prior_has_the_dense_kl(case):
    q = case.make((), SHAPE, torch.float64)
    for loc_form, scale_form in itertools.product(FORMS, FORMS):
        loc = torch.randn(loc_form, requires_grad=True)
        scale = (torch.rand(scale_form) + 0.5).requires_grad_()
        exact = case.kl(q, loc, scale)
        divergence = kl_divergence(q, Normal(loc.expand(SHAPE), scale.expand(SHAPE)))
        torch.testing.assert_close(divergence, exact)
        of_divergence = torch.autograd.grad(divergence, [loc, scale])
        torch.testing.assert_close(of_divergence, torch.autograd.grad(exact, [loc, scale]))


BATCHES = [((1,), (4,)), ((2, 1), (3,)), ((), (4,)), ((4,), ()), ((2, 3), (1, 3))]


@pytest.mark.parametrize("batches", BATCHES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_batches_of_posterior_and_prior_broadcast(case, batches):
    q, whole = case.make(batches[0], SHAPE, torch.float64), torch.broadcast_shapes(*batches)
    loc, scales = torch.randn(*batches[1], *SHAPE), torch.rand(*batches[1], *SHAPE) + 0.5
    for scale in (scales, scales[..., :1, :1].expand(scales.shape)):
        divergence = kl_divergence(q, Independent(Normal(loc, scale), 2))
        own = (value.expand(*whole, *SHAPE) for value in (loc, scale))
        torch.testing.assert_close(divergence, case.kl(q.expand(whole), *own))


@pytest.mark.parametrize("batches", BATCHES)
def test_batches_of_points_and_priors_broadcast(batches):
    point, loc = torch.randn(*batches[0], *SHAPE), torch.randn(*batches[1], *SHAPE)
    prior = dist.Normal(loc, 0.5).to_event(2)
    divergence = kl_divergence(PointMass(point, event_dim=2), prior)
    torch.testing.assert_close(divergence, -prior.log_prob(point))


@pytest.mark.parametrize("kind", [Normal, Laplace])
@pytest.mark.parametrize(
    ("event", "batch", "of_prior"),
    [((3,), (), (2, 3)), ((2, 3), (2,), (3,)), ((2, 3), (), (3,))],
)
def test_a_prior_over_events_of_another_shape_is_refused(kind, event, batch, of_prior):
    q = MeanFieldNormal(torch.zeros(event), 1.0)
    other = Independent(kind(torch.zeros(batch + of_prior), 2.0), len(of_prior))
    with pytest.raises(ValueError, match=re.escape(f"got {event} and {of_prior}. Reshape")):
        kl_divergence(q, other)
    nested = Independent(Independent(kind(torch.zeros(event), 2.0), 1), len(event) - 1)
    whole = Independent(kind(torch.zeros(event), 2.0), len(event))
    torch.testing.assert_close(kl_divergence(q, nested), kl_divergence(q, whole))


@pytest.mark.parametrize(("batch", "shape"), [((), (1, 4, 3)), ((2,), (3, 4, 3)), ((), (2, 5))])
def test_gradients_of_a_gram_matrix_are_those_of_finite_differences(batch, shape):
    factors = torch.randn(*batch, *shape, requires_grad=True)
    flat = factors.flatten(len(batch) + 1)
    torch.testing.assert_close(RowGram.apply(factors, len(batch)), flat @ flat.mT)
    assert torch.autograd.gradcheck(RowGram.apply, (factors, len(batch)))
    assert torch.autograd.gradgradcheck(RowGram.apply, (factors, len(batch)))


def test_forward_mode_agrees_with_reverse():
    for case in (case for case in CASES if case.has_forward_mode):
        q = case.make((), SHAPE, torch.float64)
        named = named_arguments(q)

        def divergence(loc, *values, q=q, names=tuple(named)):
            new = rebuilt(q, dict(zip(names, values, strict=True)))
            return kl_divergence(new, Normal(loc.expand(SHAPE), 0.7, validate_args=False))

        values = torch.tensor(0.3), *named.values()
        tangents = tuple(torch.randn_like(value) for value in values)
        _, forward = torch.func.jvp(divergence, values, tangents)
        gradients = torch.func.grad(divergence, argnums=tuple(range(len(values))))(*values)
        reverse = sum((g * t).sum() for g, t in zip(gradients, tangents, strict=True))
        torch.testing.assert_close(forward, reverse, msg=case.name)


def test_a_kl_is_mapped_by_vmap():
    def divergence(loc, factors):
        q = LowRankNormal(loc, factors, torch.tensor(0.3), validate_args=False)
        return kl_divergence(q, Normal(torch.zeros(()).expand(SHAPE), 1.0, validate_args=False))

    loc, factors = torch.randn(5, *SHAPE), torch.randn(5, 2, *SHAPE)
    looped = torch.stack([divergence(*pair) for pair in zip(loc, factors, strict=True)])
    torch.testing.assert_close(torch.func.vmap(divergence)(loc, factors), looped)


@pytest.mark.parametrize(
    ("difference", "autocast"), [(1.0, False), (1e-2, False), (1e-3, False), (1e-3, True)]
)
def test_nearly_parallel_factors_keep_their_determinant_in_single_precision(difference, autocast):
    """Added up in single precision throughout, the last is off by some hundredths or tenths."""
    factors = torch.randn(1, 900, 400) + difference * torch.randn(2, 900, 400)
    single = LowRankNormal(
        torch.zeros(900, 400).float(), 0.01 * factors.float(), torch.tensor(7e-3).float()
    )
    double = LowRankNormal(single.loc.double(), single.factors.double(), single.scale.double())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        terms = [log_det(q._capacitance) / 2 for q in (single, double)]
    torch.testing.assert_close(*terms, rtol=0, atol=3e-3)


def test_a_joined_prior_has_both_densities():
    weight, bias = Normal(torch.zeros(2, 3), 1.5), Normal(torch.ones(2), 0.5)
    prior, value = JoinedPrior(weight, bias), torch.randn(2, 4)
    expected = weight.log_prob(value[:, :3]).sum() + bias.log_prob(value[:, 3]).sum()
    torch.testing.assert_close(prior.log_prob(value), expected)
    assert prior.event_shape == (2, 4)
    student = torch.distributions.StudentT(3.0, torch.zeros(2), 1.0)
    with pytest.raises(NotImplementedError):
        kl_divergence(MeanFieldNormal(value, torch.tensor(1.0)), JoinedPrior(weight, student))
