"""The KL between two Gaussians over a weight is that of two dense multivariate normals."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch.distributions import MultivariateNormal, kl_divergence

import pyro_structvi as ps
from pyro_structvi.distributions import (
    FullNormal,
    InducingNormal,
    KTiedNormal,
    LowRankNormal,
    MatrixNormal,
    PointMass,
    PrunedNormal,
)
from pyro_structvi.structures import kl_between as between
from pyro_structvi.structures.inducing.augmented import AugmentedNormal
from tests.distributions.cases import CASES, make_full
from tests.guide_cases import GUIDES

OF_CLASS = {type(case.make((), (4, 3), torch.float64)): case for case in CASES}
GAUSSIAN = {
    case.name: case for kind, case in OF_CLASS.items() if not issubclass(kind, AugmentedNormal)
}
NAMES = list(GAUSSIAN)
TIED, LOW_RANK = (next(n for n in NAMES if part in n) for part in ("tied", "low rank"))
BATCHES = [((), ()), ((2,), ()), ((), (2,)), ((2, 1), (3,))]


def make(name, batch_shape=(), event_shape=(4, 3), dtype=torch.float64):
    return GAUSSIAN[name].make(batch_shape, event_shape, dtype)


def dense(name, q):
    mean = q.mean.flatten(len(q.batch_shape))
    return MultivariateNormal(mean, GAUSSIAN[name].covariance(q))


def close(actual, expected, **tolerance):
    torch.testing.assert_close(actual, expected, **({"rtol": 1e-9, "atol": 1e-9} | tolerance))


def leaves(q):
    """Return a copy whose arguments are leaves, and these."""
    new = q.expand(q.batch_shape)
    arguments = [getattr(q, name).detach().clone().requires_grad_() for name in q.argument_names]
    for name, value in zip(q.argument_names, arguments, strict=True):
        setattr(new, name, value)
    return new, arguments


@pytest.mark.parametrize("p_name", NAMES)
@pytest.mark.parametrize("q_name", NAMES)
def test_every_pair_has_the_dense_kl_and_its_gradients(q_name, p_name):
    for event_shape in ((4, 3), (3, 2, 2), (1, 4)):
        q, of_q = leaves(make(q_name, (), event_shape))
        p, of_p = leaves(make(p_name, (), event_shape))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of ambiguous rules
            ours = kl_divergence(q, p)
        expected = kl_divergence(dense(q_name, q), dense(p_name, p))
        close(ours, expected)
        inputs = [*of_q, *of_p]
        found, exact = (torch.autograd.grad(value, inputs) for value in (ours, expected))
        for one, other in zip(found, exact, strict=True):
            close(
                one.tril() if one.dim() > 1 and one.shape[-1] == one.shape[-2] else one,
                (other.tril() if one.dim() > 1 and one.shape[-1] == one.shape[-2] else other),
                rtol=1e-7,
                atol=1e-8,
            )


@pytest.mark.parametrize("p_name", NAMES)
@pytest.mark.parametrize("q_name", NAMES)
def test_batches_broadcast(q_name, p_name):
    for q_batch, p_batch in BATCHES:
        q, p = make(q_name, q_batch), make(p_name, p_batch)
        ours = kl_divergence(q, p)
        assert ours.shape == torch.broadcast_shapes(q_batch, p_batch)
        close(ours, kl_divergence(dense(q_name, q), dense(p_name, p)))


@pytest.mark.parametrize("name", NAMES)
def test_it_is_zero_from_itself(name):
    q = make(name)
    close(kl_divergence(q, q), torch.zeros(()))


@pytest.mark.parametrize(
    ("q_name", "p_name"),
    [
        (q, p)
        for q in NAMES
        for p in NAMES
        if any(all(map(isinstance, (make(q), make(p)), kinds)) for kinds, _ in between._TRACES)
    ],
)
def test_rules_agree_with_the_columns(q_name, p_name):
    """Each rule for a trace is that of all columns."""
    q, p = make(q_name), make(p_name)
    rule = next(rule for kinds, rule in between._TRACES if all(map(isinstance, (q, p), kinds)))
    close(rule(q, p), between._trace_of_columns(q, p))


def test_a_strong_direction_keeps_its_digits_in_single_precision():
    """The diagonal part's trace is 1e6 times what is left of it."""
    factors = 1e3 * torch.randn(1, 30, 20, dtype=torch.float32)
    p = LowRankNormal(torch.zeros(30, 20), factors.double(), 1.0, 1.0)
    exact = kl_divergence(p, p)
    single = LowRankNormal(torch.zeros(30, 20, dtype=torch.float32), factors, 1.0, 1.0)
    ours = kl_divergence(single, single)
    assert ours.dtype == torch.float32
    close(ours.double(), exact, rtol=0, atol=1e-2)


# ---- priors of torch -----------------------------------------------------------------------------


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
def test_multivariate_normals_over_all_elements(name, kind):
    for q_batch, p_batch in BATCHES:
        q, p = make(name, q_batch), multivariate(12, kind, p_batch)
        exact = MultivariateNormal(p.loc, p.covariance_matrix)
        expected = kl_divergence(dense(name, q), exact)
        close(kl_divergence(q, p), expected)
        reshaped = dist.TransformedDistribution(
            p, [dist.transforms.ReshapeTransform((12,), (4, 3))]
        )
        close(kl_divergence(q, reshaped), expected)


@pytest.mark.parametrize("kind", ["full", "low rank"])
@pytest.mark.parametrize("name", NAMES)
def test_multivariate_normals_over_rows(name, kind):
    q, p = make(name), multivariate(3, kind, (4,))
    blocks = torch.block_diag(*p.covariance_matrix)
    expected = kl_divergence(dense(name, q), MultivariateNormal(p.loc.flatten(), blocks))
    close(kl_divergence(q, p.to_event(1)), expected)


@pytest.mark.parametrize("kind", ["full", "low rank"])
def test_multivariate_normals_over_vectors(kind):
    q = make("mean field", (), (5,))
    p = multivariate(5, kind)
    exact = MultivariateNormal(p.loc, p.covariance_matrix)
    close(kl_divergence(q, p), kl_divergence(dense("mean field", q), exact))


def test_what_has_no_closed_form_says_so():
    q = make("matrix normal")
    others = [
        dist.TransformedDistribution(
            dist.Normal(torch.zeros(4, 3), 1.0), dist.transforms.ExpTransform()
        ),
        dist.TransformedDistribution(
            dist.Normal(torch.zeros(12), 1.0).to_event(1),
            [dist.transforms.ReshapeTransform((12,), (4, 3))],
        ),
        multivariate(5, "full"),
    ]
    for p in others:
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


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"weights of one shape, but got \(4, 3\) and \(3, 4\)"):
        kl_divergence(make("matrix normal"), make("rowwise", (), (3, 4)))


# ---- as the prior of a site ----------------------------------------------------------------------


def priors():
    full = make_full((), (2, 3), torch.float64)
    flat = dist.MultivariateNormal(full.loc.flatten(), scale_tril=full.scale_tril.tril())
    return {
        TIED: make(TIED, (), (2, 3)),
        "matrix normal": make("matrix normal", (), (2, 3)),
        "rowwise": make("rowwise", (), (2, 3)),
        "low rank": make(next(n for n in NAMES if "low rank" in n), (), (2, 3)),
        "full": full,
        "multivariate": dist.TransformedDistribution(
            flat, [dist.transforms.ReshapeTransform((6,), (2, 3))]
        ),
        "rows": dist.MultivariateNormal(torch.zeros(2, 3), torch.eye(3) + 0.3).to_event(1),
    }


@pytest.mark.parametrize(
    "guide_name", ["mean field", "k-tied", "matrix normal", "rowwise", "low rank"]
)
@pytest.mark.parametrize("prior_name", priors())
def test_it_is_the_prior_of_a_site(prior_name, guide_name):
    prior = priors()[prior_name]

    def model(x, y=None):
        weight = pyro.sample("weight", prior)
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(F.linear(x, weight), 0.5).to_event(1), obs=y)

    guide = GUIDES[guide_name](model)
    data = torch.randn(6, 3), torch.randn(6, 2)
    guide.initialize(*data)
    for options in ({}, {"num_particles": 2, "vectorize_particles": True}):
        terms = ps.StructuredELBO(**options).terms(model, guide, *data)
        assert not terms.sampled
        close(terms.kl["weight"], kl_divergence(guide["weight"](), prior))
        terms.elbo.backward()
    assert all(torch.isfinite(value.grad).all() for value in guide.parameters())
    # The mean of log q - log p over draws is the KL.
    q = guide["weight"]()
    draws = q.rsample((20_000,)).detach()
    nats = q.log_prob(draws) - prior.log_prob(draws)
    error = nats.std() / len(nats) ** 0.5
    assert abs(nats.mean() - terms.kl["weight"]) < 5 * error


def test_yesterdays_posterior_is_todays_prior():
    """Two steps of exact inference are one, where the family has the exact posterior."""
    x, y = torch.randn(40, 3), torch.randn(40, 1)
    first = FullNormal(torch.zeros(1, 3), torch.eye(3))

    def model_with(prior):
        def model(x, y=None):
            weight = pyro.sample("weight", prior)
            with pyro.plate("data", len(x)):
                pyro.sample("obs", dist.Normal(F.linear(x, weight), 0.5).to_event(1), obs=y)

        return model

    def exact(prior, x, y):
        precision = torch.linalg.inv(prior.covariance_matrix) + x.mT @ x / 0.25
        linear = torch.linalg.solve(prior.covariance_matrix, prior.loc[0]) + (x.mT @ y)[:, 0] / 0.25
        covariance = torch.linalg.inv(precision)
        loc = (covariance @ linear).reshape(1, 3)
        return FullNormal(loc, torch.linalg.cholesky(covariance))

    after_half = exact(first, x[:20], y[:20])
    at_once, in_two = exact(first, x, y), exact(after_half, x[20:], y[20:])
    close(kl_divergence(in_two, at_once), torch.zeros(()))
    model, posterior = model_with(after_half), in_two
    guide = ps.FullCovarianceGuide(model, init_loc_fn=lambda site: posterior.loc, init_scale=0.1)
    guide.initialize(x[20:], y[20:])
    ps.fit(model, guide, (x[20:], y[20:]), num_steps=120, lr=0.03, progress=False)
    assert kl_divergence(guide["weight"](), at_once) < 0.05


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
