"""Starting one posterior where another has arrived."""

import pytest
import torch
from torch import nn

import pyro_structvi as ps
from pyro_structvi import warm_start
from pyro_structvi.distributions import FullNormal
from pyro_structvi.families import KTied, LowRank, MeanField
from tests.guide_cases import GUIDES
from tests.models import make_regressor, regression_data


@pytest.mark.parametrize("shape", [(7, 5), (1, 4)])
def test_one_column_is_the_best_approximation(shape):
    """Eckart and Young: the error is the sum of the other squared singular values."""
    scale = torch.rand(shape) + 0.1
    rows, columns = warm_start.tie_scales(scale, 1)
    assert rows.min() > 0
    assert columns.min() > 0
    error = (rows @ columns.mT - scale).square().sum()
    torch.testing.assert_close(
        error, torch.linalg.svdvals(scale)[1:].square().sum(), atol=1e-12, rtol=1e-9
    )


@pytest.mark.parametrize("rank", [1, 3])
def test_a_product_of_positive_factors_is_found(rank):
    scale = (torch.rand(12, rank) + 0.1) @ (torch.rand(9, rank) + 0.1).mT
    rows, columns = warm_start.tie_scales(scale, rank, steps=20_000)
    assert (rows.shape, columns.shape) == ((12, rank), (9, rank))
    assert min(rows.min(), columns.min()) > 0
    assert ((rows @ columns.mT - scale).abs() / scale).max() < 1e-2


@pytest.mark.parametrize("name", ["k-tied, joined", "rowwise", "matrix normal", "low rank"])
def test_a_full_covariance_begins_as_the_distribution_it_is_given(name):
    model, data = make_regressor(), regression_data()
    guide = GUIDES[name](model)
    ps.fit(model, guide, data, num_steps=5, progress=False)
    before = {name: value.clone() for name, value in guide.state_dict().items()}
    full = warm_start.full_covariance_from(guide)
    for site in dict.fromkeys(guide[each].site.name for each in guide.site_names):
        q, p = guide[site](), full[site]()
        assert isinstance(p, FullNormal)
        assert torch.equal(p.mean, q.mean)
        flat = q.covariance_matrix.reshape(-1, *p.covariance_matrix.shape)[0]
        torch.testing.assert_close(p.covariance_matrix, flat, rtol=1e-9, atol=1e-12)
    assert all(torch.equal(before[name], value) for name, value in guide.state_dict().items())
    ps.fit(model, full, data, num_steps=2, progress=False)
    with pytest.raises(ValueError, match="`guide` must have a Gaussian posterior without a full"):
        warm_start.full_covariance_from(full)


def test_posteriors_without_a_regular_covariance_stay():
    model, data = make_regressor(), regression_data()
    guide = ps.MeanFieldGuide(model)
    ps.pruning.prune_mean_field(guide, 0.5)
    inducing = ps.InducingWeightGuide(model, inducing_shape=(2, 2))
    for each in (guide, inducing):
        each.initialize(*data)
        with pytest.raises(
            ValueError, match="`guide` must have a Gaussian posterior without a full"
        ):
            warm_start.full_covariance_from(each)


def test_a_full_covariance_of_nearly_dependent_elements_keeps_them_in_float32():
    """Standard deviations of 10 and of 0.001 in one row: squared, the smaller is below the rounding."""
    model = make_regressor().float()
    guide = ps.AutoLowRankLRT(model, rank=1, diagonal="constant", diagonal_variance=1e-6, alpha=1.0)
    weight = guide["net.0.weight"]
    with torch.no_grad():
        for posterior in guide.posteriors.values():
            posterior.factors.fill_(10.0)
    full = warm_start.full_covariance_from(guide)["net.0.weight"]()
    size = weight().loc.numel()
    log_det = (
        torch.tensor(1e-6).double().log() * size
        + torch.tensor(1 + size * 100 / 1e-6).double().log()
    )
    torch.testing.assert_close(full.log_det_covariance.double(), log_det, rtol=1e-3, atol=0)


def test_a_guide_is_tied():
    model, data = make_regressor(), regression_data()
    guide = ps.MeanFieldGuide(model, init_scale=0.1)
    ps.fit(model, guide, data, num_steps=10, lr=0.05, progress=False)
    before = {name: value.clone() for name, value in guide.state_dict().items()}
    tied = warm_start.k_tied_from_mean_field(guide, rank=2)
    for name in ("net.0.weight", "net.2.weight"):
        assert tied[name].family == KTied(2, join_bias=False)
        assert torch.equal(tied[name]().mean, guide[name]().mean)
        rows, columns = warm_start.tie_scales(guide[name]().stddev.detach(), 2)
        torch.testing.assert_close(tied[name]().stddev, rows @ columns.mT)
    for name in ("net.0.bias", "net.2.bias"):
        assert tied[name].family == MeanField()
        assert torch.equal(tied[name]().stddev, guide[name]().stddev)
    assert all(torch.equal(before[name], value) for name, value in guide.state_dict().items())
    ps.fit(model, tied, data, num_steps=2, lr=0.01, progress=False)
    assert not torch.equal(tied["net.0.weight"]().mean, guide["net.0.weight"]().mean)


def test_filters_and_other_families_keep_their_kind():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    model = ps.Classifier(ps.bayesianize(net, prior=1.0), 5)
    guide = ps.StructuredGuide(model, {"net.2.*": LowRank(2), "*": MeanField()})
    tied = warm_start.k_tied_from_mean_field(guide, rank=1)
    assert tied["net.0.weight"].family == KTied(1, join_bias=False)
    assert tied["net.2.weight"].family == LowRank(2)
    assert torch.equal(tied["net.2.weight"].factors, guide["net.2.weight"].factors)


def test_what_is_refused():
    mixture = ps.MixtureGuide(make_regressor(), ps.MeanFieldGuide, 2)
    for start in (warm_start.full_covariance_from, warm_start.k_tied_from_mean_field):
        with pytest.raises(
            ValueError, match=r"but is a mixture\. Call this for each of its members"
        ):
            start(mixture)
    model = make_regressor()
    with pytest.raises(ValueError, match="must have mean field at some weight"):
        warm_start.k_tied_from_mean_field(ps.KTiedGuide(model))
    pruned = ps.MeanFieldGuide(model)
    ps.pruning.prune_mean_field(pruned, 0.3)
    with pytest.raises(
        ValueError, match=r"mean field at some weight, but has .* PrunedMeanField\(\)"
    ):
        warm_start.k_tied_from_mean_field(pruned)
    with pytest.raises(ValueError, match="`scale` must be positive and finite"):
        warm_start.tie_scales(torch.tensor([[1.0, 0.0]]), rank=1)
    with pytest.raises(MemoryError, match="`max_memory`"):
        warm_start.full_covariance_from(ps.RowwiseGuide(model), max_memory=1e-9)
