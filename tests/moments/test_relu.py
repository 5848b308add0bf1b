"""Gradients by hand of a rectified normal's moments."""

import torch

from pyro_structvi.moments.nonlinear import relu

M = torch.tensor([-9.0, -2.0, -0.1, 0.0, 0.3, 1.5, 12.0], dtype=torch.float64)
V = torch.tensor([0.7, 2.0, 0.1, 1.3, 0.4, 0.05, 3.0], dtype=torch.float64)


def test_derivatives_and_batches():
    inputs = (M.clone().requires_grad_(), V.clone().requires_grad_())
    assert torch.autograd.gradcheck(relu, inputs, rtol=1e-6)
    assert torch.autograd.gradgradcheck(relu, inputs, rtol=1e-6)
    by_both = (0, 1)
    forward, backward = (
        made(relu, argnums=by_both)(M, V) for made in (torch.func.jacfwd, torch.func.jacrev)
    )
    torch.testing.assert_close(forward, backward, rtol=1e-12, atol=1e-14)
    means, variances = torch.stack([M, M - 1]), torch.stack([V, 2 * V])
    torch.testing.assert_close(torch.func.vmap(relu)(means, variances), relu(means, variances))


def test_gradients_at_the_floor_of_the_variance_are_finite():
    """A known input of zero is half above it, and its variance has no part in the mean."""
    m, v = (torch.zeros(1, dtype=torch.float64, requires_grad=True) for _ in range(2))
    loc, variance = relu(m, v)
    (loc + variance).backward()
    assert (float(m.grad), float(v.grad)) == (0.5, 0.5)
