"""The KL between two Gaussians over a weight is that of two dense multivariate normals."""

import itertools
import warnings

import pyro.distributions as dist
import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

import pyro_structvi as ps
from pyro_structvi.distributions import (
    InducingNormal,
    KTiedNormal,
    LowRankNormal,
    MatrixNormal,
    PointMass,
    PrunedNormal,
)
from pyro_structvi.structures.inducing.augmented import AugmentedNormal
from pyro_structvi.testing.contracts import Leaf
from tests.distributions.cases import CASES, make_full
from tests.unit_noise import close

OF_CLASS = {type(case.make((), (4, 3), torch.float64)): case for case in CASES}
GAUSSIAN = {
    case.name: case for kind, case in OF_CLASS.items() if not issubclass(kind, AugmentedNormal)
}
NAMES = list(GAUSSIAN)
TIED = next(name for name in NAMES if "tied" in name)
BATCHES = [((), ()), ((2,), ()), ((), (2,)), ((2, 1), (3,))]


def make(name, batch_shape=(), event_shape=(4, 3), dtype=torch.float64):
    return GAUSSIAN[name].make(batch_shape, event_shape, dtype)


def dense(name, q):
    mean = q.mean.flatten(len(q.batch_shape))
    return MultivariateNormal(mean, GAUSSIAN[name].covariance(q))


def leaves(q):
    """Return a copy whose arguments are leaves, and these."""
    new, found = q.expand(q.batch_shape), []
    for name in q.argument_names:
        value = getattr(q, name).detach().clone().requires_grad_()
        setattr(new, name, value)
        found.append(Leaf(name, value, q.arg_constraints[name]))
    return new, found


@pytest.mark.parametrize("q_name", NAMES)
def test_every_pair_has_the_dense_kl_and_its_gradients(q_name):
    for p_name, event_shape in itertools.product(NAMES, ((4, 3), (3, 2, 2), (1, 4))):
        q, of_q = leaves(make(q_name, (), event_shape))
        p, of_p = leaves(make(p_name, (), event_shape))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of ambiguous rules
            ours = kl_divergence(q, p)
        expected = kl_divergence(dense(q_name, q), dense(p_name, p))
        close(ours, expected)
        inputs = [*of_q, *of_p]
        values = [leaf.value for leaf in inputs]
        found, exact = (torch.autograd.grad(value, values) for value in (ours, expected))
        for leaf, one, other in zip(inputs, found, exact, strict=True):
            close(leaf.along(one), leaf.along(other), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("q_name", NAMES)
def test_batches_broadcast(q_name):
    for p_name, (q_batch, p_batch) in itertools.product(NAMES, BATCHES):
        q, p = make(q_name, q_batch), make(p_name, p_batch)
        ours = kl_divergence(q, p)
        assert ours.shape == torch.broadcast_shapes(q_batch, p_batch)
        close(ours, kl_divergence(dense(q_name, q), dense(p_name, p)))


def test_a_strong_direction_keeps_its_digits_in_single_precision():
    """The diagonal part's trace is 1e6 times what is left of it."""
    factors = 1e3 * torch.randn(1, 30, 20, dtype=torch.float32)
    p = LowRankNormal(torch.zeros(30, 20), factors.double(), 1.0, 1.0)
    exact = kl_divergence(p, p)
    single = LowRankNormal(torch.zeros(30, 20, dtype=torch.float32), factors, 1.0, 1.0)
    ours = kl_divergence(single, single)
    assert ours.dtype == torch.float32
    close(ours.double(), exact, rtol=0, atol=1e-2)


def multivariate(size, kind, batch=()):
    loc = torch.randn(*batch, size)
    if kind == "full":
        q = make_full(batch, (size,), torch.float64)
        return dist.MultivariateNormal(loc, scale_tril=q.scale_tril.tril())
    return dist.LowRankMultivariateNormal(
        loc, torch.randn(*batch, size, 2), torch.rand(*batch, size) + 0.1
    )


@pytest.mark.parametrize("kind", ["full", "low rank"])
@pytest.mark.parametrize("name", NAMES)
def test_multivariate_normals_over_all_elements_or_rows(name, kind):
    reshape = dist.transforms.ReshapeTransform((12,), (4, 3))
    for q_batch, p_batch in BATCHES:
        q, p = make(name, q_batch), multivariate(12, kind, p_batch)
        exact = MultivariateNormal(p.loc, p.covariance_matrix)
        expected = kl_divergence(dense(name, q), exact)
        close(kl_divergence(q, p), expected)
        close(kl_divergence(q, dist.TransformedDistribution(p, [reshape])), expected)
    q, p = make(name), multivariate(3, kind, (4,))
    blocks = torch.block_diag(*p.covariance_matrix)
    expected = kl_divergence(dense(name, q), MultivariateNormal(p.loc.flatten(), blocks))
    close(kl_divergence(q, p.to_event(1)), expected)
    if name == "mean field":
        q, p = make(name, (), (5,)), multivariate(5, kind)
        exact = MultivariateNormal(p.loc, p.covariance_matrix)
        close(kl_divergence(q, p), kl_divergence(dense(name, q), exact))


def test_what_has_no_closed_form_says_so():
    q, normal = make("matrix normal"), dist.Normal(torch.zeros(4, 3), 1.0)
    reshape = dist.transforms.ReshapeTransform((12,), (4, 3))
    for p in (
        dist.TransformedDistribution(normal, dist.transforms.ExpTransform()),
        dist.TransformedDistribution(dist.Normal(torch.zeros(12), 1.0).to_event(1), [reshape]),
        multivariate(5, "full"),
    ):
        with pytest.raises(NotImplementedError):
            kl_divergence(q, p)
    made = (case.make((), (4, 3), torch.float64) for case in CASES)
    inducing = next(q for q in made if isinstance(q, InducingNormal))
    pruned = PrunedNormal(torch.ones(4, 3), 1.0, torch.ones(3).bool())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for pair in ((inducing, q), (q, inducing), (inducing, inducing), (pruned, q)):
            with pytest.raises(NotImplementedError):
                kl_divergence(*pair)
        for other in (inducing, pruned):
            p = make(TIED)
            normal = dist.Normal(p.loc, p.stddev).to_event(2)
            close(kl_divergence(other, p), kl_divergence(other, normal))
    for other in (make("rowwise", (), (3, 4)), make(TIED, (), (3, 4))):
        with pytest.raises(ValueError, match=r"one shape, but got \(4, 3\) and \(3, 4\)"):
            kl_divergence(q, other)


@pytest.mark.parametrize("batch", [(5,), (2, 1)])
def test_independent_normals_may_have_more_batches(batch):
    p = dist.Normal(torch.randn(*batch, 4, 3), 1.5).to_event(2)
    p_dense = MultivariateNormal(p.mean.flatten(-2), 1.5**2 * torch.eye(12))
    for own in ((), (5,)):
        q = make("matrix normal", own)
        q_dense = dense("matrix normal", q)
        every = torch.broadcast_shapes(own, batch)
        close(kl_divergence(q, p), kl_divergence(q_dense.expand(every), p_dense.expand(every)))


def test_points_and_joined_biases():
    prior = KTiedNormal(torch.zeros(2, 3), torch.ones(2, 1), torch.ones(3, 1))
    point = PointMass(torch.randn(2, 3), event_dim=2)
    close(kl_divergence(point, prior), -prior.log_prob(point.v))
    joined = ps.distributions.JoinedPrior(prior, dist.Normal(torch.zeros(2), 2.0).to_event(1))
    normals = ps.distributions.JoinedPrior(
        dist.Normal(torch.zeros(2, 3), 1.0).to_event(2), joined.bias
    )
    for name in ("matrix normal", TIED):
        q = make(name, (), (2, 4))
        close(kl_divergence(q, joined), kl_divergence(q, normals))
    matrix = MatrixNormal(torch.zeros(2, 3), torch.eye(2), torch.eye(3))
    with pytest.raises(NotImplementedError):
        kl_divergence(q, ps.distributions.JoinedPrior(matrix, joined.bias))
