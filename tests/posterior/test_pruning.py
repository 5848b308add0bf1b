"""Pruning: the smallest elements become zero and stay zero, and the report counts the remaining ones.

Expected zeros come from numpy. Densities, KL and images are compared with torch's normals or dense sums.
"""

import copy
import pickle

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from torchvision.models import resnet50

import pyro_structvi as ps
from pyro_structvi.distributions import PrunedNormal
from pyro_structvi.families import InducingWeights, KTied, MeanField, PrunedMeanField
from pyro_structvi.posterior.pruning import prune_inducing_factors, prune_mean_field
from tests import dense_oracles as oracle
from tests.models import make_regressor, regression_data

PRUNE = {"inducing weights": prune_inducing_factors, "mean field": prune_mean_field}


def make_guide(kind, model=None):
    model = make_regressor() if model is None else model
    if kind == "mean field":
        return ps.MeanFieldGuide(model, init_scale=0.1)
    return ps.InducingWeightGuide(model, inducing_shape=(2, 2), init_scale=0.1)


def fit(model, guide, num_steps=5):
    data = regression_data()
    return ps.fit(model, guide, data, num_steps=num_steps, lr=0.02, progress=False)


@pytest.fixture(params=PRUNE)
def kind(request):
    return request.param


@pytest.fixture
def model():
    return make_regressor()


def fitted(kind, model):
    guide = make_guide(kind, model)
    fit(model, guide)
    return guide


@pytest.fixture
def guide(kind, model):
    return fitted(kind, model)


def prunable(guide):
    """Return what the laws of a guide hold of numbers that can be pruned, in a fixed order, flat."""
    laws = [posterior() for posterior in guide.posteriors.values()]
    numbers = [
        (q.loc, q.scale) if hasattr(q, "scale") else (q.joint.row_factor, q.joint.column_factor)
        for q in laws
    ]
    return torch.cat([part.detach().flatten() for parts in numbers for part in parts])


# ---- which go ------------------------------------------------------------------------------------


@pytest.mark.parametrize("amount", [0.3, 0.95])
def test_the_smallest_factor_entries_over_all_sites_go(amount, model):
    guide = fitted("inducing weights", model)
    before = prunable(guide)
    magnitudes = np.abs(before.numpy())
    kept = magnitudes >= np.sort(magnitudes)[round(amount * len(magnitudes))]
    report = prune_inducing_factors(guide, amount)
    torch.testing.assert_close(prunable(guide), before * torch.as_tensor(kept), rtol=0, atol=0)
    assert report.totals == {"net.0.weight": 2 * (5 + 4), "net.2.weight": 2 * (1 + 6)}
    assert (report.total, report.total_left) == (32, kept.sum()) == (32, 32 - round(amount * 32))


@pytest.mark.parametrize("amount", [0.3, 0.95])
def test_the_least_certain_weights_over_all_sites_go_and_leave_the_bound(amount, model):
    guide = fitted("mean field", model)
    laws = [posterior() for posterior in guide.posteriors.values()]
    ratios = np.concatenate([(q.loc.abs() / q.scale).detach().numpy().ravel() for q in laws])
    kept = ratios >= np.sort(ratios)[round(amount * len(ratios))]
    report = prune_mean_field(guide, amount)
    masks = torch.as_tensor(kept).split([q.loc.numel() for q in laws])
    kl = ps.StructuredELBO().terms(model, guide, *regression_data()).kl
    for (name, before), mask in zip(zip(guide.site_names, laws, strict=True), masks, strict=True):
        q, mask = guide[name](), mask.reshape(before.loc.shape)
        torch.testing.assert_close(q.loc, before.loc * mask, rtol=0, atol=0)
        torch.testing.assert_close(q.scale, before.scale * mask, rtol=0, atol=0)
        plain = Normal(before.loc[mask], before.scale[mask])
        torch.testing.assert_close(kl[name], kl_divergence(plain, Normal(0.0, 1.0)).sum())
    sizes = (("net.0.weight", 15), ("net.0.bias", 5), ("net.2.weight", 5), ("net.2.bias", 1))
    assert report.totals == dict(sizes)
    assert report.total_left == kept.sum() == 26 - round(amount * 26)
    assert report.num_parameters == 2 * report.total_left


def test_a_bound_on_the_spread_stays_in_force_and_both_kinds_are_counted(model):
    guide = ps.StructuredGuide(model, {"*": MeanField(max_scale=0.05)}, init_scale=1.0)
    prune_mean_field(guide, 0.2)
    family = guide["net.0.weight"].family
    assert family == PrunedMeanField(max_scale=0.05) != MeanField(max_scale=0.05)
    scale = guide["net.0.weight"]().scale
    torch.testing.assert_close(scale, 0.025 * (scale > 0))
    families = {"net.0.weight": InducingWeights((2, 2), join_bias=True), "*": MeanField()}
    guide = ps.StructuredGuide(model, families)
    total = sum(parameter.numel() for parameter in guide.parameters())
    assert prune_inducing_factors(guide, 0.5).num_parameters == total - 9
    assert prune_mean_field(guide, 0.5).num_parameters == total - 9 - 2 * 3


def test_other_families_numbers_and_sites_in_plates_stay():
    def model():
        pyro.sample("matrix", dist.Normal(torch.zeros(3, 2), 1.0).to_event(2))
        pyro.sample("tied", dist.Normal(torch.zeros(3, 2), 1.0).to_event(2))
        pyro.sample("number", dist.Normal(0.0, 1.0))
        pyro.sample("positive", dist.LogNormal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("groups", 4):
            pyro.sample("shift", dist.Normal(torch.zeros(4), 1.0))

    guide = ps.StructuredGuide(model, {"tied": KTied(1), "*": MeanField()})
    guide.initialize()
    report = prune_mean_field(guide, 0.5)
    assert (report.totals, report.left) == ({"matrix": 6}, {"matrix": 3})
    assert report.num_parameters == 2 * 3 + (6 + 3 + 2) + 2 * (1 + 2 + 4)


# ---- the paper's counts --------------------------------------------------------------------------


@pytest.mark.slow
def test_half_of_the_factors_leaves_13_percent_of_a_resnet_50():
    """Ritter et al. (2021), section 4.3; with the batch norms, which the paper counts along."""
    torch.set_default_dtype(torch.float32)
    net = resnet50(num_classes=10)
    net.conv1, net.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    deterministic = sum(parameter.numel() for parameter in net.parameters())
    model = ps.Classifier(ps.bayesianize(net, prior=1.0, normalization=False), num_data=50_000)
    guide = ps.InducingWeightGuide(model, inducing_shape=(64, 64))
    points = sum(parameter.numel() for parameter in model.parameters())
    left = prune_inducing_factors(guide, 0.5).num_parameters + points
    total = sum(parameter.numel() for parameter in guide.parameters()) + points
    assert (total, deterministic) == (5_710_902, 23_520_842)
    assert round(100 * left / deterministic, 1) == 13.2


# ---- afterwards ----------------------------------------------------------------------------------


def test_fine_tuning_keeps_zeros_and_a_further_call_counts_them(kind, model, guide):
    first = PRUNE[kind](guide, 0.3)
    before = prunable(guide)
    fit(model, guide)
    after = prunable(guide)
    assert torch.equal(after == 0, before == 0)
    assert (after == 0).any()
    assert (after != before)[before != 0].all()
    second = PRUNE[kind](guide, 0.6)
    assert (prunable(guide) == 0)[before == 0].all()
    assert second.total_left == first.total - round(0.6 * first.total)
    assert PRUNE[kind](guide, 0.6) == second
    message = r"at least the 0\.\d+ that is pruned already, but got 0\.25\. Pruning is not undone"
    with pytest.raises(ValueError, match=message):
        PRUNE[kind](guide, 0.25)
    gone = prunable(guide) == 0
    single = prunable(guide.to(torch.float32))
    assert single.dtype == torch.float32
    assert torch.equal(single == 0, gone)


# ---- the distribution ----------------------------------------------------------------------------


def test_copies_and_states_keep_what_is_pruned_and_train_on(kind, model, guide):
    """After a step the masked factors have a gradient, which torch's copies refuse."""
    PRUNE[kind](guide, 0.5)
    fit(model, guide)
    expected = prunable(guide)
    loaded = make_guide(kind, model)
    PRUNE[kind](loaded, 0.0)
    loaded.load_state_dict(guide.state_dict())
    for new in (copy.deepcopy(guide), pickle.loads(pickle.dumps(guide)), loaded):
        torch.testing.assert_close(prunable(new), expected, rtol=0, atol=0)
        further = copy.deepcopy(new)
        fit(model, new)
        assert torch.equal(prunable(new) == 0, expected == 0)
        assert (prunable(new) != expected).any()
        torch.testing.assert_close(prunable(guide), expected, rtol=0, atol=0)
    # What was loaded counts, whether or not it has been called since.
    assert PRUNE[kind](further, 0.7) == PRUNE[kind](guide, 0.7)
    torch.testing.assert_close(prunable(further), prunable(guide), rtol=0, atol=0)


def test_kept_factors_are_made_anew(model):
    """Without gradients a posterior is kept for as long as its parameters stay."""
    guide, (x, _) = make_guide("inducing weights", model), regression_data()
    with torch.no_grad():
        before = guide["net.0.weight"]()
        assert guide["net.0.weight"]() is before
        prune_inducing_factors(guide, 0.5)
        after = guide["net.0.weight"]()
        assert guide["net.0.weight"]() is after
    fresh = copy.deepcopy(guide)["net.0.weight"]()
    torch.testing.assert_close(after.mean, fresh.mean, rtol=0, atol=0)
    assert (after.mean - before.mean).abs().max() > 1e-3
    assert ps.predict(model, guide, x, num_samples=3).mean.isfinite().all()


def pruned_normal(batch=(), shape=(4, 3)):
    """Return a law, and the arguments it was made of."""
    loc, scale = torch.randn(*batch, *shape), torch.rand(*batch, *shape) + 0.1
    kept = torch.rand(*batch, *shape) < 0.6
    kept[..., 0, :] = False  # a unit without any input
    loc, scale = loc.requires_grad_(), scale.requires_grad_()
    return PrunedNormal(loc, scale, kept, event_dim=len(shape)), loc, scale, kept


def test_members_are_those_of_the_kept():
    q, loc, scale, kept = pruned_normal((2,))
    value, prior = q.sample((5,)), Normal(torch.randn(4, 3), torch.rand(4, 3) + 0.5)
    density, entropy, kl = q.log_prob(value), q.entropy(), kl_divergence(q, prior)
    for index in range(2):
        mask = kept[index]
        plain = Normal(loc[index][mask], scale[index][mask])
        left = value[:, index][:, mask]
        torch.testing.assert_close(density[:, index], plain.log_prob(left).sum(-1))
        torch.testing.assert_close(entropy[index], plain.entropy().sum())
        own = Normal(prior.loc[mask], prior.scale[mask])
        torch.testing.assert_close(kl[index], kl_divergence(plain, own).sum())
    torch.testing.assert_close(q.mean, loc * kept)
    torch.testing.assert_close(q.variance, (scale * kept).square())
    assert torch.equal(value != 0, kept.expand(5, 2, 4, 3))


def test_outputs_and_gradients_are_those_of_a_weight_with_zeros():
    q, loc, scale, kept = pruned_normal()
    wide, x = q.expand((2,)), torch.randn(5, 3)
    torch.testing.assert_close(wide.entropy(), q.entropy().expand(2))
    assert torch.equal(wide.kept, kept.expand(2, 4, 3))
    image = q.image(x)
    torch.testing.assert_close(image.mean, oracle.image_mean(x, q.mean, 2))
    covariance = oracle.image_covariance(x, q.covariance_matrix, 4)
    torch.testing.assert_close(image.covariance_matrix, covariance)
    # Also of a unit without any input, whose outputs have no variance.
    loss = image.rsample().square().sum() + q.log_prob(q.rsample())
    loss = loss + kl_divergence(q, Normal(torch.zeros(4, 3), 1.0)) + q.entropy()
    for gradient in torch.autograd.grad(loss, [loc, scale]):
        assert torch.equal(gradient != 0, kept)
        assert gradient.isfinite().all()


# ---- errors --------------------------------------------------------------------------------------


def test_what_is_refused(kind, model):
    with pytest.raises(ValueError, match="`amount` must be a number of at least 0 and below 1"):
        PRUNE[kind](make_guide(kind, model), 1.0)
    guide = ps.StructuredGuide(model, {"*.weight": KTied(1), "*.bias": PrunedMeanField()})
    if kind == "mean field":
        guide = make_guide("inducing weights", model)
    message = "`guide` must have .* at a weight or a vector, but its families are .* are pruned by"
    with pytest.raises(ValueError, match=message):
        PRUNE[kind](guide, 0.5)
    with pytest.raises(ValueError, match="but is a mixture"):
        PRUNE[kind](ps.MixtureGuide(model, ps.MeanFieldGuide, 1), 0.5)
    loc, scale, nan = torch.zeros(4, 3), torch.ones(4, 3), torch.full((4, 3), torch.nan)
    kept = scale.bool()
    with pytest.raises(ValueError, match=r"^`value` holds .* NaN"):
        PrunedNormal(loc, scale, kept, validate_args=True).log_prob(nan)
    assert PrunedNormal(loc, scale, kept, validate_args=False).log_prob(nan).isnan()
    with pytest.raises(ValueError, match="`kept` must broadcast to the shape of `loc`"):
        PrunedNormal(loc, scale, torch.ones(4, dtype=torch.bool), validate_args=True)
