"""Singular values of means and scales, and what tying scales leaves of them."""

import pytest
import torch
from torch import nn

import pyro_structvi as ps
from pyro_structvi.diagnostics import compress_scales, spectra
from tests.models import make_regressor, regression_data


def convolution_model():
    net = nn.Sequential(nn.Conv2d(2, 6, 3), nn.Flatten(), nn.Linear(24, 5))
    return ps.Classifier(ps.bayesianize(net, prior=1.0), 5)


def spread(guide):
    """Give all parameters of a guide other random values."""
    with torch.no_grad():
        for value in guide.parameters():
            value.add_(0.5 * torch.randn_like(value))
    return guide


@pytest.mark.parametrize("rank", [1, 3])
def test_k_tied_scales_have_rank_k(rank):
    guide = spread(ps.KTiedGuide(convolution_model(), rank=rank))
    found = spectra(guide)
    assert [*found] == ["net.0.weight", "net.2.weight"]
    for spectrum in found.values():
        assert spectrum.scale[rank - 1] > 1e-3 * spectrum.scale[0]
        assert spectrum.scale[rank:].max() < 1e-12 * spectrum.scale[0]
        assert float(spectrum.scale_share[:rank].sum()) == pytest.approx(1.0, abs=1e-12)


def test_singular_values_and_shares_by_eigenvalues():
    """Filters in the layout of the paper, (h, w, in, out), flattened to (h w in, out)."""
    guide = spread(ps.MeanFieldGuide(convolution_model()))
    spectrum, q = spectra(guide)["net.0.weight"], guide["net.0.weight"]()
    for values, shares, tensor in (
        (spectrum.mean, spectrum.mean_share, q.mean),
        (spectrum.scale, spectrum.scale_share, q.stddev),
    ):
        matrix = tensor.detach().permute(2, 3, 1, 0).reshape(-1, 6)
        eigenvalues = torch.linalg.eigvalsh(matrix.mT @ matrix).flip(0)
        torch.testing.assert_close(values.square(), eigenvalues, rtol=1e-9, atol=1e-12)
        expected = eigenvalues / matrix.square().sum()
        torch.testing.assert_close(shares, expected, rtol=1e-9, atol=1e-12)


def test_a_joined_bias_is_no_column_of_its_weight_and_points_have_no_scales():
    guide = spread(ps.RowwiseGuide(make_regressor(), join_bias=True))
    spectrum, q = spectra(guide)["net.0.weight"], guide["net.0.weight"]()
    scale = torch.linalg.svdvals(q.stddev.detach()[:, :-1])
    torch.testing.assert_close(spectrum.scale, scale, rtol=1e-9, atol=0)
    points = spectra(ps.MAPGuide(make_regressor()))["net.0.weight"]
    assert points.scale.max() == points.scale_share.max() == 0


def test_a_guide_without_a_matrix_is_refused():
    def model():
        import pyro
        import pyro.distributions as dist

        pyro.sample("vector", dist.Normal(torch.zeros(4), 1.0).to_event(1))

    guide = ps.MeanFieldGuide(model)
    guide.initialize()
    with pytest.raises(ValueError, match=r"`guide` must have a weight with .* shapes \[\(4,\)\]"):
        spectra(guide)


def test_compressed_scales_have_the_rank_and_are_near_the_best():
    """The best approximation that may be negative leaves the other squared singular values."""
    model, data = make_regressor(), regression_data()
    guide = ps.MeanFieldGuide(model, init_scale=0.1)
    ps.fit(model, guide, data, num_steps=100, lr=0.05, progress=False)
    before, name = spectra(guide)["net.0.weight"], "net.0.weight"
    for rank in (1, 2):
        compressed = compress_scales(guide, rank)
        assert spectra(compressed)[name].scale[rank:].max() < 1e-12
        assert torch.equal(compressed[name]().mean, guide[name]().mean)
        error = (compressed[name]().stddev - guide[name]().stddev).square().sum().detach()
        best = before.scale[rank:].square().sum()
        if rank == 1:
            torch.testing.assert_close(error, best, rtol=1e-9, atol=1e-12)
        assert best * (1 - 1e-9) <= error <= 1.5 * best + 1e-12
