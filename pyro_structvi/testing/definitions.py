"""Dense covariances and divergences by their definitions, independent of the distributions' classes.

A weight ``W`` of shape ``(*batch, *event)`` with ``event = (out, *rest)`` is a vector ``vec(W)``, row
by row, of length ``D = prod(event)``. Covariances are dense, ``(*batch, D, D)``: meant for small sizes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence


def zero_covariance(q: torch.distributions.Distribution) -> Tensor:
    """Return zeros ``(D, D)``."""
    size = q.event_shape.numel()
    return torch.zeros(size, size)


def mean_field_covariance(scale: Tensor, event_dim: int) -> Tensor:
    """Return ``diag(sigma_1^2, ..., sigma_D^2)``."""
    return torch.diag_embed(scale.flatten(-event_dim).square())


def k_tied_covariance(row_scale: Tensor, column_scale: Tensor) -> Tensor:
    """Return ``diag(sigma_ij^2)`` with ``sigma_ij = sum_a R_ia C_ja``, i before j."""
    stddev = (row_scale.unsqueeze(-2) * column_scale.unsqueeze(-3)).sum(-1)
    return torch.diag_embed(stddev.flatten(-2).square())


def low_rank_covariance(factors: Tensor, scale: Tensor, alpha: float, event_dim: int) -> Tensor:
    """Return ``alpha sum_k v_k v_k' + diag(sigma_1^2, ..., sigma_D^2)``, one term after another."""
    vectors = factors.flatten(-event_dim).unbind(-2)
    outer = torch.stack([vector.unsqueeze(-1) * vector.unsqueeze(-2) for vector in vectors]).sum(0)
    diagonal = scale.expand(factors.select(-event_dim - 1, 0).shape)
    return alpha * outer + mean_field_covariance(diagonal, event_dim)


def full_covariance(scale_tril: Tensor) -> Tensor:
    """Return ``S_ij = sum_k L_ik L_jk`` with ``L_ik = 0`` for k > i."""
    index = torch.arange(scale_tril.shape[-1])
    lower = torch.where(index <= index.unsqueeze(-1), scale_tril, 0.0)
    return (lower.unsqueeze(-2) * lower.unsqueeze(-3)).sum(-1)


def rowwise_covariance(scale_tril: Tensor) -> Tensor:
    """Return the covariance with the blocks ``L_i L_i'`` of the rows i on its diagonal."""
    out, size = scale_tril.shape[-3:-1]
    blocks = enumerate(full_covariance(scale_tril).unbind(-3))
    bands = [F.pad(block, (i * size, (out - 1 - i) * size)) for i, block in blocks]
    return torch.cat(bands, -2)


def matrix_normal_covariance(scale_tril_row: Tensor, scale_tril_column: Tensor) -> Tensor:
    """Return ``Cov(W_ij, W_kl) = A_ik B_jl`` with the covariances A and B of the two factors."""
    rows, columns = full_covariance(scale_tril_row), full_covariance(scale_tril_column)
    product = rows[..., :, None, :, None] * columns[..., None, :, None, :]
    return product.flatten(-4, -3).flatten(-2)


def dense_normal(loc: Tensor, covariance: Tensor, event_dim: int) -> MultivariateNormal:
    """Return the multivariate normal of ``vec(W)``."""
    return MultivariateNormal(loc.flatten(-event_dim), covariance)


def kl_to_independent_normals(
    loc: Tensor, covariance: Tensor, prior_loc: Tensor, prior_scale: Tensor, event_dim: int
) -> Tensor:
    """Return the KL of two multivariate normals; prior arguments broadcast to ``loc``."""
    prior_covariance = mean_field_covariance(prior_scale.expand(loc.shape), event_dim)
    prior = dense_normal(prior_loc.expand(loc.shape), prior_covariance, event_dim)
    return kl_divergence(dense_normal(loc, covariance, event_dim), prior)


# ---- inducing weights ----------------------------------------------------------------------------


def augmented_covariance(
    row_factor: Tensor,
    column_factor: Tensor,
    row_diagonal: Tensor,
    column_diagonal: Tensor,
    column_scale: Tensor,
) -> Tensor:
    """Return the covariance of ``vec(W)`` followed by ``vec(U)``, from the matrix normal they are in.

    In that matrix normal ``[[W, U_c], [U_r, U]]`` rows have the covariance ``[[I, Z_r'], [Z_r, Z_r Z_r'
    + D_r^2]]``; columns likewise, with that part scaled which belongs to ``W``.
    """
    rows = _augmented_side(row_factor, row_diagonal, torch.ones_like(row_factor[..., 0, :]))
    columns = _augmented_side(column_factor, column_diagonal, column_scale)
    product = rows[..., :, None, :, None] * columns[..., None, :, None, :]
    out, size = row_factor.shape[-1], column_factor.shape[-1]
    index = torch.arange(rows.shape[-1] * columns.shape[-1]).reshape(rows.shape[-1], -1)
    kept = torch.cat([index[:out, :size].flatten(), index[out:, size:].flatten()])
    return product.flatten(-4, -3).flatten(-2)[..., kept.unsqueeze(-1), kept]


def _augmented_side(factor: Tensor, diagonal: Tensor, scale: Tensor) -> Tensor:
    inducing = factor @ factor.mT + torch.diag_embed(diagonal.square())
    return _blocks(torch.diag_embed(scale.square()), (factor * scale.unsqueeze(-2)).mT, inducing)


def _blocks(first: Tensor, cross: Tensor, second: Tensor) -> Tensor:
    return torch.cat([torch.cat([first, cross], -1), torch.cat([cross.mT, second], -1)], -2)


def conditional_moments(covariance: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return ``G`` and ``S`` for which ``vec(W)`` given whitened ``u`` is ``N(G u, S)``.

    The covariance is that of ``vec(W)``, of length ``size``, followed by ``vec(U)``; with the Cholesky
    factor L of the covariance of U, ``u = L^-1 vec(U)``.
    """
    cross, inducing = covariance[..., :size, size:], covariance[..., size:, size:]
    solved = torch.linalg.solve(inducing, cross.mT)
    gain = solved.mT @ torch.linalg.cholesky(inducing)
    return gain, covariance[..., :size, :size] - cross @ solved


def kl_with_inducing_weights(
    loc: Tensor,
    covariance: Tensor,
    gain: Tensor,
    noise: Tensor,
    own_scale: Tensor,
    prior_loc: Tensor,
    prior_scale: Tensor,
) -> Tensor:
    """Return the KL over ``vec(W)`` and whitened inducing weights u, as one of two normals.

    In the posterior, u is ``N(loc, covariance)``, and ``vec(W)`` given u is ``N(gain u, noise)``. In the
    prior, ``vec(W)`` is ``N(prior_loc, diag(prior_scale^2))``, and u given it as where ``vec(W)`` is
    ``N(0, diag(own_scale^2))``, u is standard normal, and their covariance is ``gain``.
    """
    seen = gain @ covariance
    mean = torch.cat([(gain @ loc.unsqueeze(-1)).squeeze(-1), loc], -1)
    posterior = MultivariateNormal(mean, _blocks(seen @ gain.mT + noise, seen, covariance))
    backward = (gain / own_scale.square().unsqueeze(-1)).mT
    spread = torch.diag_embed(prior_scale.square()) @ backward.mT
    inducing = backward @ spread + torch.eye(loc.shape[-1]) - backward @ gain
    prior_mean = torch.cat([prior_loc, (backward @ prior_loc.unsqueeze(-1)).squeeze(-1)], -1)
    joint = _blocks(torch.diag_embed(prior_scale.square()), spread, inducing)
    return kl_divergence(posterior, MultivariateNormal(prior_mean, joint))
