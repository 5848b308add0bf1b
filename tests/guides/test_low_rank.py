"""AutoLowRankLRT: the optimum that Lemma 3 of its paper states, its options, start and memory.

For a Gaussian posterior with covariance ``S`` and eigenpairs ``(l_i, u_i)``, ``l_1 >= ... >= l_D``, the
covariance of rank K plus ``s^2 I`` that is nearest in KL(q || posterior) keeps the first K eigenpairs
and has the harmonic mean of the other eigenvalues as ``s^2``. The KL left over is
``(D - K)/2 [log mean(1 / l_i) - mean log(1 / l_i)]`` over ``i > K``.
"""

import math
from collections import namedtuple
from functools import partial
from itertools import pairwise

import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Independent, MultivariateNormal, Normal, kl_divergence

import pyro_structvi as ps
from pyro_structvi.distributions import LowRankNormal
from tests.guides.matrix_guides import minimize
from tests.lazy_weights import lazy

SIZE, NUM_DATA, PRIOR, NOISE = 7, 20, 2.0, 0.3
DEFAULT = 0.1**2 / SIZE  # variance of a constant diagonal
SPECTRUM = (2.0, 1.0, 0.5, 0.2, 0.12, 0.06, 0.03)  # of the posterior covariance


# A linear regression without bias, and its exact posterior over the D weights.
Regression = namedtuple("Regression", ["x", "y", "mean", "covariance", "log_evidence"])


def orthonormal(rows, columns):
    return torch.linalg.qr(torch.randn(rows, columns)).Q


def make_regression(covariance):
    """Choose X so that ``X'X / noise^2 + I / prior^2 = covariance^-1``."""
    root = torch.linalg.cholesky(covariance.inverse() - torch.eye(SIZE) / PRIOR**2).mT
    x = NOISE * orthonormal(NUM_DATA, SIZE) @ root
    y = x @ torch.randn(SIZE, 1) + NOISE * torch.randn(NUM_DATA, 1)
    posterior = torch.linalg.inv(x.mT @ x / NOISE**2 + torch.eye(SIZE) / PRIOR**2)
    torch.testing.assert_close(posterior, covariance)
    marginal = PRIOR**2 * x @ x.mT + NOISE**2 * torch.eye(NUM_DATA)
    log_evidence = MultivariateNormal(torch.zeros(NUM_DATA), marginal).log_prob(y.squeeze(-1))
    return Regression(x, y, (posterior @ x.mT @ y / NOISE**2).mT, posterior, log_evidence)


@pytest.fixture
def regression():
    eigenvectors = orthonormal(SIZE, SIZE)
    return make_regression(eigenvectors * torch.tensor(SPECTRUM) @ eigenvectors.mT)


def make_guide(rank, **options):
    net = ps.bayesianize(nn.Linear(SIZE, 1, bias=False), prior=PRIOR)
    model = ps.Regressor(net, num_data=NUM_DATA, noise_scale=NOISE)
    return model, ps.AutoLowRankLRT(model, rank, init_scale=0.1, **options)


def gap(guide, regression):
    """Return log evidence - ELBO; a normal's log density needs the outputs' mean and variance only."""
    q = guide["net.weight"]()
    image = q.image(regression.x)
    fit_of_mean = Normal(image.mean, NOISE).log_prob(regression.y).sum()
    prior = Independent(Normal(torch.zeros(1, SIZE), PRIOR), 2)
    elbo = fit_of_mean - image.variance.sum() / (2 * NOISE**2) - kl_divergence(q, prior)
    return regression.log_evidence - elbo


def fit_exactly(guide, regression):
    minimize(guide, lambda: gap(guide, regression), tolerance_grad=1e-11)
    return guide["net.weight"]()


def with_top_eigenpairs(covariance, rank, variance):
    """Return the covariance with its K largest eigenpairs, and ``variance`` in all other directions."""
    vectors = torch.linalg.eigh(covariance).eigenvectors.flip(-1)
    spectrum = torch.tensor(SPECTRUM)
    spectrum[rank:] = variance
    return vectors * spectrum @ vectors.mT


def lemma_3(covariance, rank):
    """Return the optimum's covariance, its variance ``s^2`` and the KL that is left over."""
    precisions = 1 / torch.tensor(SPECTRUM[rank:])
    variance = 1 / precisions.mean()  # the harmonic mean
    left_over = (SIZE - rank) / 2 * (precisions.mean().log() - precisions.log().mean())
    return with_top_eigenpairs(covariance, rank, variance), variance, left_over


assert_near = partial(torch.testing.assert_close, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rank", [1, 4])
def test_isotropic_optimum_is_that_of_lemma_3(rank, regression):
    _, guide = make_guide(rank, diagonal="isotropic")
    covariance, variance, left_over = lemma_3(regression.covariance, rank)
    q = fit_exactly(guide, regression)
    assert_near(q.mean, regression.mean)
    assert_near(q.covariance_matrix, covariance)
    assert_near(q.scale.square().squeeze(), variance)
    assert_near(gap(guide, regression), left_over)


def test_full_optimum_has_no_gap_where_the_posterior_is_low_rank_plus_diagonal():
    rank = 2
    factors, diagonal = orthonormal(SIZE, rank), torch.linspace(0.05, 0.6, SIZE)
    regression = make_regression(factors @ factors.mT + torch.diag(diagonal))
    isotropic, full = (make_guide(rank, diagonal=kind)[1] for kind in ("isotropic", "full"))
    fit_exactly(isotropic, regression)
    assert_near(fit_exactly(full, regression).covariance_matrix, regression.covariance)
    assert abs(gap(full, regression)) < 1e-6 < 0.1 < gap(isotropic, regression)


def make_net(*widths):
    layers = [nn.Linear(size, out) for size, out in pairwise(widths)]
    return nn.Sequential(*[unit for layer in layers for unit in (layer, nn.ReLU())][:-1])


def make_classifier(net, prior=1.0):
    return ps.Classifier(ps.bayesianize(net, prior=prior), num_data=50)


@pytest.mark.parametrize(
    ("options", "variance"), [({"diagonal_variance": math.exp(-10)}, math.exp(-10)), ({}, DEFAULT)]
)
def test_a_constant_diagonal_has_no_parameter_and_stays(options, variance, regression):
    model, guide = make_guide(2, diagonal="constant", **options)
    posterior = guide["net.weight"]
    before = posterior().scale.clone()
    assert {name for name, _ in posterior.named_parameters()} == {"loc", "factors"}
    ps.fit(model, guide, (regression.x, regression.y), num_steps=20, lr=0.1, progress=False)
    assert torch.equal(posterior().scale, before)
    assert before.square().item() == pytest.approx(variance, rel=1e-15)


def test_a_constant_diagonal_follows_fan_in_and_prior_of_each_site():
    prior = {"0.weight": 3.0, "0.bias": 0.2, "2.weight": dist.Cauchy(0.0, 1.0), "*": 5.0}
    model = make_classifier(make_net(4, 3, 2), prior)
    guide = ps.AutoLowRankLRT(model, diagonal="constant", join_bias=False)
    expected = {"0.weight": 0.05, "0.bias": 0.02, "2.weight": 0.1 / 3**0.5, "2.bias": 0.1}
    for name, scale in expected.items():
        assert guide[f"net.{name}"]().scale.item() == pytest.approx(scale)
    wide, narrow = (
        ps.AutoLowRankLRT(make_classifier(make_net(4, 3), prior), diagonal="constant")
        for prior in (0.4, 0.1)
    )
    narrow.load_state_dict(wide.state_dict())
    assert narrow["net.0.weight"]().scale.item() == pytest.approx(0.04)
    with pytest.raises(ValueError, match='constant"; with "full" it is learned'):
        ps.AutoLowRankLRT(model, diagonal_variance=0.1)


def numbers_saved(compute, known):
    """Return how many numbers autograd saves for the backward pass in storages that are not known."""
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = compute()
    kept = storages.keys() - {tensor.untyped_storage().data_ptr() for tensor in known}
    return sum(storages[address].nbytes() for address in kept) // output.element_size()


def layer(rank, inputs, out, batch=256, diagonal=()):
    q = LowRankNormal(
        torch.randn(out, inputs).requires_grad_(),
        torch.randn(rank, out, inputs).requires_grad_(),
        torch.full(diagonal, 0.1).requires_grad_(),
    )
    x = torch.randn(batch, inputs).requires_grad_()
    return q, x, (q.loc, q.factors, q.scale, x)


@pytest.mark.parametrize("diagonal", ["isotropic", "full"])
@pytest.mark.parametrize(("rank", "inputs", "out"), [(1, 16, 256), (5, 256, 16)])
def test_a_layer_saves_at_most_what_the_paper_states(rank, inputs, out, diagonal):
    """Table 1: (K + 2) numbers for each example and output; a full diagonal takes one more.

    Parameters and inputs do not count. Norms, scales and coefficients of an example may be added, and
    for a full diagonal the squares of inputs and scales. A weight for each example exceeds the bound.
    """
    full = diagonal == "full"
    q, x, known = layer(rank, inputs, out, diagonal=(out, inputs) if full else ())
    bound = (rank + 2 + full) * out * len(x) + (rank + 4) * len(x)
    bound += (inputs * len(x) + inputs * out) * full
    assert numbers_saved(lambda: F.linear(x, lazy(q)), known) <= bound
    naive = numbers_saved(lambda: (q.rsample((len(x),)) @ x.unsqueeze(-1)).squeeze(-1), known)
    assert naive >= inputs * out * len(x) > bound
