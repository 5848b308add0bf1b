"""Textbook definitions with dense covariances, independent of the package.

A weight ``W`` of shape ``(*batch, *event)`` with ``event = (out, *rest)`` is a vector ``vec(W)``, row
by row, of length ``D = prod(event)``; covariances have shape ``(*batch, D, D)``.
"""

import math

import torch
import torch.nn.functional as F
from torch.distributions import MultivariateNormal, kl_divergence

# ---- covariances of structures -------------------------------------------------------------------


def mean_field_covariance(scale, event_dim):
    return torch.diag_embed(scale.flatten(-event_dim).square())


def k_tied_covariance(row_scale, column_scale):
    """Return ``diag(sigma_ij^2)`` with ``sigma_ij = sum_a R_ia C_ja``."""
    return mean_field_covariance(torch.einsum("...ia,...ja->...ij", row_scale, column_scale), 2)


def low_rank_covariance(factors, scale, alpha, event_dim):
    """Return ``alpha sum_k v_k v_k' + diag(sigma_1^2, ..., sigma_D^2)``."""
    vectors = factors.flatten(-event_dim)
    diagonal = scale.expand(factors.select(-event_dim - 1, 0).shape)
    return alpha * vectors.mT @ vectors + mean_field_covariance(diagonal, event_dim)


def full_covariance(scale_tril):
    return scale_tril.tril() @ scale_tril.tril().mT


def rowwise_covariance(scale_tril):
    """Return the covariance with the blocks ``L_i L_i'`` of the rows i on its diagonal."""
    blocks, same = full_covariance(scale_tril), torch.eye(scale_tril.shape[-3]).to(scale_tril)
    return torch.einsum("...iab,ij->...iajb", blocks, same).flatten(-2).flatten(-3, -2)


def matrix_normal_covariance(scale_tril_row, scale_tril_column):
    """Return ``Cov(W_ij, W_kl) = A_ik B_jl`` with the covariances A and B of the factors."""
    return _kronecker(full_covariance(scale_tril_row), full_covariance(scale_tril_column))


def eigenbasis_covariance(scale, row_basis, column_basis):
    """Return ``Cov(W_ij, W_kl) = sum_ab U_ia V_jb S_ab^2 U_ka V_lb``."""
    bases = _kronecker(row_basis, column_basis)
    return bases @ torch.diag_embed(scale.square().flatten(-2)) @ bases.mT


def _kronecker(rows, columns):
    return torch.einsum("...ik,...jl->...ijkl", rows, columns).flatten(-4, -3).flatten(-2)


# ---- inducing weights ----------------------------------------------------------------------------


def augmented_covariance(row_factor, column_factor, row_diagonal, column_diagonal, column_scale):
    """Return the covariance of ``vec(W)`` followed by ``vec(U)``, from their matrix normal.

    In the matrix normal ``[[W, U_c], [U_r, U]]`` rows have the covariance ``[[I, Z_r'], [Z_r, Z_r Z_r'
    + D_r^2]]``; columns likewise, with a scaled part of ``W``.
    """
    rows = _augmented_side(row_factor, row_diagonal, torch.ones_like(row_factor[..., 0, :]))
    columns = _augmented_side(column_factor, column_diagonal, column_scale)
    out, size = row_factor.shape[-1], column_factor.shape[-1]
    index = torch.arange(rows.shape[-1] * columns.shape[-1]).reshape(rows.shape[-1], -1)
    kept = torch.cat([index[:out, :size].flatten(), index[out:, size:].flatten()])
    return _kronecker(rows, columns)[..., kept.unsqueeze(-1), kept]


def _augmented_side(factor, diagonal, scale):
    inducing = factor @ factor.mT + torch.diag_embed(diagonal.square())
    return _blocks(torch.diag_embed(scale.square()), (factor * scale.unsqueeze(-2)).mT, inducing)


def _blocks(first, cross, second):
    return torch.cat([torch.cat([first, cross], -1), torch.cat([cross.mT, second], -1)], -2)


def conditional_moments(covariance, size):
    """Return ``G`` and ``S`` such that ``vec(W)`` given whitened ``u`` is ``N(G u, S)``.

    The covariance is over ``vec(W)``, of length ``size``, followed by ``vec(U)``; with the Cholesky
    factor L of the covariance of U, ``u = L^-1 vec(U)``.
    """
    cross, inducing = covariance[..., :size, size:], covariance[..., size:, size:]
    solved = torch.linalg.solve(inducing, cross.mT)
    gain = solved.mT @ torch.linalg.cholesky(inducing)
    return gain, covariance[..., :size, :size] - cross @ solved


def kl_with_inducing_weights(loc, covariance, gain, noise, own_scale, prior_loc, prior_scale):
    """Return the KL over ``vec(W)`` and whitened inducing weights u, as a KL of two normals.

    In the posterior, u is ``N(loc, covariance)``, and ``vec(W)`` given u is ``N(gain u, noise)``. In the
    prior, ``vec(W)`` is ``N(prior_loc, diag(prior_scale^2))``; u given ``vec(W)`` follows from the joint
    normal of ``N(0, diag(own_scale^2))`` and a standard normal u with the cross-covariance ``gain``.
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


# ---- densities -----------------------------------------------------------------------------------


def dense_normal(loc, covariance, event_dim):
    """Return the multivariate normal of ``vec(W)``."""
    return MultivariateNormal(loc.flatten(-event_dim), covariance)


def kl_to_independent_normals(loc, covariance, prior_loc, prior_scale, event_dim):
    """Return the KL of two multivariate normals; prior arguments broadcast to ``loc``."""
    prior_covariance = mean_field_covariance(prior_scale.expand(loc.shape), event_dim)
    prior = dense_normal(prior_loc.expand(loc.shape), prior_covariance, event_dim)
    return kl_divergence(dense_normal(loc, covariance, event_dim), prior)


def log_prob(value, loc, covariance, event_dim):
    return dense_normal(loc, covariance, event_dim).log_prob(value.flatten(-event_dim))


def entropy(covariance):
    """Return ``log det(2 pi e Sigma) / 2``."""
    return torch.linalg.slogdet(2 * math.pi * math.e * covariance).logabsdet / 2


# ---- the image W x -------------------------------------------------------------------------------


def image_mean(x, loc, event_dim):
    """Return ``M x`` for ``x (*batch, in)``, with ``M`` the mean seen as ``(out, in)``."""
    matrix = loc.unsqueeze(-1) if event_dim == 1 else loc.flatten(1 - event_dim)
    return (matrix * x.unsqueeze(-2)).sum(-1)


def image_covariance(x, covariance, out):
    """Return ``(I_out kron x') Sigma (I_out kron x)``, from ``W x = (I_out kron x') vec(W)``."""
    rows = [F.pad(x, (i * x.shape[-1], (out - 1 - i) * x.shape[-1])) for i in range(out)]
    operator = torch.stack(rows, -2)
    return operator @ covariance @ operator.mT


# ---- convolutions --------------------------------------------------------------------------------


def patches(x, kernel, groups=1, **geometry):
    """Return the patches ``(batch, groups, *positions, in)`` that a convolution multiplies with filters.

    They are its outputs for filters that are one at an element of a patch and zero elsewhere.

    Args:
        x: Input ``(batch, channels, *space)``.
        kernel: Its spatial shape.
        groups: How many sets of channels are treated apart.
        geometry: Stride, padding and dilation, as torch's convolutions take them.
    """
    channels = x.shape[1] // groups
    size = channels * math.prod(kernel)
    filters = torch.cat([torch.eye(size).to(x).reshape(size, channels, *kernel)] * groups)
    convolve = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(kernel)]
    cut = convolve(x, filters, groups=groups, **geometry)
    return cut.unflatten(1, (groups, size)).movedim(2, -1)


def feature_map_covariance(x, covariance, out, kernel, groups=1, **geometry):
    """Return the covariance ``(batch, O, O)`` of whole feature maps, ``O`` = out times positions.

    It is ``A Sigma A'``, where ``A`` maps ``vec(W)`` to the outputs of an example, channel by channel.
    """
    cut = patches(x, kernel, groups=groups, **geometry).flatten(2, -2)  # (batch, groups, P, in)
    size = cut.shape[-1]
    operator = torch.cat(
        [
            F.pad(cut[:, channel // (out // groups)], (channel * size, (out - 1 - channel) * size))
            for channel in range(out)
        ],
        1,
    )
    return operator @ covariance @ operator.mT
