"""The law of what pruning leaves."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pyro.infer import Trace_ELBO
from torch.distributions import Normal, kl_divergence

import pyro_structvi as ps
from pyro_structvi.distributions import PrunedNormal
from pyro_structvi.families import MeanField, PrunedMeanField
from pyro_structvi.maps import ConvolutionMap
from pyro_structvi.posterior.pruning import prune_mean_field
from tests import dense_oracles as oracle
from tests.models import make_regressor, regression_data
from tests.posterior.pruned_guides import fit, make_guide


@pytest.fixture
def model():
    return make_regressor()


# ---- the law of what is left ---------------------------------------------------------------------


def pruned_normal(batch=(), shape=(4, 3)):
    """Return a law, and the arguments it was made of."""
    loc, scale = torch.randn(*batch, *shape), torch.rand(*batch, *shape) + 0.1
    kept = torch.rand(*batch, *shape) < 0.6
    kept[..., 0, :] = False  # a unit without any input
    return PrunedNormal(loc, scale, kept, event_dim=len(shape)), loc, scale, kept


@pytest.mark.parametrize("batch", [(), (2,)])
def test_density_entropy_and_kl_are_those_of_the_kept(batch):
    q, loc, scale, kept = pruned_normal(batch)
    value, prior = q.sample((5,)), Normal(torch.randn(4, 3), torch.rand(4, 3) + 0.5)
    density, entropy, kl = q.log_prob(value), q.entropy(), kl_divergence(q, prior)
    assert density.shape == (5, *batch)
    for index in np.ndindex(*batch):
        mask = kept[index]
        plain = Normal(loc[index][mask], scale[index][mask])
        left = value[(slice(None), *index)][:, mask]
        torch.testing.assert_close(density[(slice(None), *index)], plain.log_prob(left).sum(-1))
        torch.testing.assert_close(entropy[index], plain.entropy().sum())
        ratio, shift = scale[index] / prior.scale, (loc[index] - prior.loc) / prior.scale
        terms = (ratio**2 + shift**2 - 1 - 2 * ratio.log()) / 2
        torch.testing.assert_close(kl[index], terms[mask].sum())


def test_moments_and_draws_are_zero_where_pruned():
    q, loc, scale, kept = pruned_normal()
    torch.testing.assert_close(q.mean, loc * kept)
    torch.testing.assert_close(q.variance, (scale * kept).square())
    assert torch.equal(q.sample((3,)) != 0, kept.expand(3, 4, 3))
    wide = q.expand((2,))
    torch.testing.assert_close(wide.entropy(), q.entropy().expand(2))
    assert torch.equal(wide.kept, kept.expand(2, 4, 3))


def test_image_is_that_of_a_weight_with_zeros():
    q, *_ = pruned_normal()
    x = torch.randn(5, 3)
    image = q.image(x)
    torch.testing.assert_close(image.mean, oracle.image_mean(x, q.mean, 2))
    covariance = oracle.image_covariance(x, q.covariance_matrix, 4)
    torch.testing.assert_close(image.covariance_matrix, covariance)


def test_convolved_image_is_that_of_a_weight_with_zeros():
    q, *_ = pruned_normal(shape=(4, 2, 3))
    x = torch.randn(5, 2, 7)
    image = q.image_under(ConvolutionMap(F.conv1d, (2, 3), padding=1), x)
    mean, variance = oracle.convolution_moments(x, q.mean, q.covariance_matrix, padding=1)
    torch.testing.assert_close(image.mean, mean)
    torch.testing.assert_close(image.variance, variance)


def test_gradients_are_finite_and_end_at_what_is_kept():
    """A unit without any input has outputs of variance zero."""
    _, loc, scale, kept = pruned_normal()
    loc.requires_grad_()
    scale.requires_grad_()
    q = PrunedNormal(loc, scale, kept)
    loss = q.image(torch.randn(5, 3)).rsample().square().sum() + q.log_prob(q.rsample())
    loss = loss + kl_divergence(q, Normal(torch.zeros(4, 3), 1.0)) + q.entropy()
    for gradient in torch.autograd.grad(loss, [loc, scale]):
        assert torch.equal(gradient != 0, kept)
        assert gradient.isfinite().all()


def test_the_bound_counts_the_kl_of_the_kept(model):
    guide, data = make_guide("mean field", model), regression_data()
    fit(model, guide)
    prune_mean_field(guide, 0.5)
    kl = ps.StructuredELBO().terms(model, guide, *data).kl
    for name, posterior in ((name, guide[name]) for name in guide.site_names):
        kept = posterior.value("kept")
        plain = Normal(posterior.loc[kept], posterior.log_scale[kept].exp())
        torch.testing.assert_close(kl[name], kl_divergence(plain, Normal(0.0, 1.0)).sum())


def test_nothing_pruned_is_mean_field(model):
    torch.manual_seed(1)
    plain = ps.StructuredGuide(model, {"*": MeanField()})
    torch.manual_seed(1)
    pruned = ps.StructuredGuide(model, {"*": PrunedMeanField()})
    data = regression_data()
    for objective in (ps.StructuredELBO(), Trace_ELBO()):
        losses = []
        for guide in (plain, pruned):
            torch.manual_seed(2)
            losses.append(objective.loss(model, guide, *data))
        assert losses[0] == pytest.approx(losses[1], rel=1e-12)
