"""Guides of Cholesky factors: the exact posterior of a linear regression, parameters, memory.

With weights and biases W (out, in + 1), inputs with a further 1 as rows of X, noise s_i of output i and
prior deviations p, the rows of W are independent in the posterior, row i with the covariance

    Sigma_i = (X'X / s_i^2 + diag(p)^-2)^-1,

which is a matrix normal where all s_i are equal. At the exact posterior no bound is left.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Independent, MultivariateNormal, Normal, kl_divergence

import pyro_structvi as ps
from pyro_structvi.families import FullCovariance, LowRank, Rowwise
from pyro_structvi.maps import DenseMap
from tests.guides.matrix_guides import minimize

OUT, IN, NUM_DATA = 3, 4, 30
PRIOR = {"weight": 0.7, "bias": 1.5}
SCALES = torch.tensor([*IN * [PRIOR["weight"]], PRIOR["bias"]]).double()
EQUAL, DIFFERENT = (torch.tensor(noise).double() for noise in ([0.4] * 3, [0.3, 0.5, 0.8]))


def exact_elbo(q, x, y, noise):
    """Return the bound: a normal's log density needs the moments of its mean only."""
    image = q.image_under(*DenseMap().join_bias(x))
    log_likelihood = Normal(image.mean, noise).log_prob(y).sum()
    prior = Independent(Normal(torch.zeros(OUT, IN + 1), SCALES.expand(OUT, -1)), 2)
    return log_likelihood - (image.variance / noise**2).sum() / 2 - kl_divergence(q, prior)


@pytest.mark.parametrize(
    ("make_guide", "noise"),
    [(ps.RowwiseGuide, DIFFERENT), (ps.MatrixNormalGuide, EQUAL), (ps.FullCovarianceGuide, EQUAL)],
)
def test_it_finds_the_exact_posterior(make_guide, noise):
    """Inputs are far from zero; the bound is scaled, since torch's LBFGS ignores small products."""
    x = torch.randn(NUM_DATA, IN) @ (torch.eye(IN) + 0.5) + torch.linspace(-1, 1, IN)
    y = x @ torch.randn(IN, OUT) + 0.5 + noise * torch.randn(NUM_DATA, OUT)
    inputs = F.pad(x, (0, 1), value=1.0)
    weights = 1 / noise[:, None, None] ** 2
    covariances = torch.linalg.inv(inputs.mT @ inputs * weights + torch.diag(SCALES**-2))
    mean = (covariances @ (inputs.mT @ y / noise**2).mT.unsqueeze(-1)).squeeze(-1)
    marginals = inputs * SCALES**2 @ inputs.mT + torch.eye(NUM_DATA) / weights
    evidence = MultivariateNormal(torch.zeros(NUM_DATA), marginals).log_prob(y.mT).sum()
    assert (covariances[:, :-1, -1].abs() > 0.1 * covariances[:, -1:, -1]).any(), "correlated"

    net = ps.bayesianize(nn.Linear(IN, OUT), prior=PRIOR)
    model = ps.Regressor(net, NUM_DATA, noise_scale=noise)
    guide = make_guide(model, init_scale=0.1, join_bias=True)

    def elbo():
        return exact_elbo(guide["net.weight"](), x, y, noise)

    loss = lambda: -1e6 * elbo()  # noqa: E731
    minimize(guide, loss, max_iter=1000, tolerance_grad=1e-7, tolerance_change=0)
    q = guide["net.weight"]()
    torch.testing.assert_close(q.mean, mean, rtol=1e-5, atol=1e-8)
    expected = torch.block_diag(*covariances)
    torch.testing.assert_close(q.covariance_matrix, expected, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(elbo(), evidence, rtol=1e-9, atol=0)


MEMORY = {
    ps.FullCovarianceGuide: (
        *((784, 400), r"314,000 elements of net\.weight and net\.bias", r"1\.43 TiB", "", 15),
        r"15 elements of net\.weight and net\.bias",
    ),
    ps.RowwiseGuide: (
        *((30_000, 400), r"30,001 elements in each of the 400 rows of net\.weight and net\.bias"),
        *(r"5\.24 TiB", r" '\*': Rowwise\(\)\}; or pass a", 5),
        r"5 elements in each of the 3 rows of net\.weight and net\.bias",
    ),
}


@pytest.mark.parametrize(
    ("make_guide", "sizes", "elements", "memory", "remedy", "size", "few"),
    [(guide, *row) for guide, row in MEMORY.items()],
)
def test_a_layer_that_takes_too_much_is_refused_before_anything_large_is_allocated(
    make_guide, sizes, elements, memory, remedy, size, few
):
    """Parameters, gradients and two moments are 4 (D + D (D + 1) / 2) numbers, factors 2 D^2."""

    def classifier(*sizes):
        return ps.Classifier(ps.bayesianize(nn.Linear(*sizes), prior=1.0), num_data=10).float()

    message = (
        rf"A full covariance of the {elements} would take {memory} in training, and `max_memory` "
        r"allows 8 GiB\. Use AutoLowRankLRT, or .*\{'net\.weight': LowRank\(rank=2\),.*"
        rf"{remedy}.* larger `max_memory`"
    )
    with pytest.raises(MemoryError, match=message):  # where there is none, by no other error
        make_guide(classifier(*sizes), join_bias=True)
    count = 15 // size  # of matrices
    numbers = count * (4 * (size + size * (size + 1) / 2) + 2 * size**2)
    small, gibibytes = classifier(4, 3), numbers * 4 / 2**30
    make_guide(small, max_memory=gibibytes * 1.001, join_bias=True)
    with pytest.raises(MemoryError, match=rf"{few} would .* GiB"):
        make_guide(small, max_memory=gibibytes * 0.999, join_bias=True)
    family = FullCovariance if size == 15 else Rowwise
    families = {"net.weight": LowRank(rank=2), "*": family(max_memory=gibibytes * 0.999)}
    ps.StructuredGuide(small, families)
