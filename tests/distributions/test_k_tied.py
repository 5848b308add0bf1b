"""What KTiedNormal has beyond the contract: its rank, and the costs it saves."""

import pytest
import torch
from pyro.distributions import Normal
from torch.distributions import kl_divergence

from pyro_structvi.distributions import KTiedNormal
from pyro_structvi.linalg.matrices import blocks_of_rows, sum_of_logs
from tests.distributions.cases import make_k_tied


def test_rank_is_the_rank_of_the_standard_deviations():
    q = make_k_tied(3)((), (6, 5), torch.float64)
    assert q.rank == torch.linalg.matrix_rank(q.stddev) == 3


def test_kl_to_a_uniform_prior_at_rank_one_forms_no_variances_of_the_size_of_the_weight(
    monkeypatch,
):
    for name in ("stddev", "variance", "covariance_matrix"):
        refused = property(lambda self: pytest.fail("it was formed"))
        monkeypatch.setattr(KTiedNormal, name, refused, raising=False)
    q = make_k_tied(1)((), (40, 30), torch.float64)
    assert torch.isfinite(kl_divergence(q, Normal(0.0, 1.0).expand((40, 30)).to_event(2)))


def test_the_kl_keeps_nothing_of_the_weights_size_but_the_means():
    q = KTiedNormal(
        torch.randn(40, 30).requires_grad_(),
        (torch.rand(40, 2) + 0.1).requires_grad_(),
        (torch.rand(30, 2) + 0.1).requires_grad_(),
    )
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        kl_divergence(q, Normal(torch.tensor(0.0), torch.tensor(1.0)).expand((40, 30)))
    large = [value for value in kept if value.untyped_storage().nbytes() >= 1200]
    assert all(value.data_ptr() == q.loc.data_ptr() for value in large)


def test_the_sum_of_logs_is_added_up_in_blocks_and_under_vmap():
    rows, columns = torch.rand(700, 2) + 0.1, torch.rand(900, 2) + 0.1
    assert len(blocks_of_rows(rows, 900)) > 1
    arguments = rows.requires_grad_(), columns.requires_grad_()
    plain = (rows @ columns.mT).log().sum()
    torch.testing.assert_close(sum_of_logs(*arguments), plain)
    own = torch.autograd.grad(sum_of_logs(*arguments), arguments)
    torch.testing.assert_close(own, torch.autograd.grad(plain, arguments))

    factors = torch.rand(3) + 0.5
    mapped = torch.func.vmap(lambda factor: sum_of_logs(factor * rows, columns))(factors).sum()
    looped = sum(sum_of_logs(factor * rows, columns) for factor in factors)
    torch.testing.assert_close(
        torch.autograd.grad(mapped, arguments), torch.autograd.grad(looped, arguments)
    )
