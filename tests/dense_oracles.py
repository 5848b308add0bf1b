"""Textbook definitions to compare with: dense covariances, and nothing that the package computes.

A weight ``W`` of shape ``(*batch, *event)`` with ``event = (out, *rest)`` is a vector ``vec(W)``, row
by row, of length ``D = prod(event)``. Everything is written with its dense covariance ``(*batch, D,
D)``; the functions are slow, and meant for sizes at which that does not matter.
"""

import itertools
import math

import torch
import torch.nn.functional as F

from pyro_structvi.testing.entry import *  # noqa: F403
from pyro_structvi.testing.entry import dense_normal

# ---- densities -----------------------------------------------------------------------------------


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


def expected_quadratic(mean, covariance, linear, quadratic):
    """Return ``E[a'w + w'Aw / 2]`` of a normal ``w``: ``a'm + m'Am / 2 + tr(A Sigma) / 2``."""
    trace = (quadratic * covariance).sum((-2, -1))
    return mean @ linear + ((mean @ quadratic) * mean).sum(-1) / 2 + trace / 2


# ---- convolutions --------------------------------------------------------------------------------


def patches(x, kernel, stride=1, padding=0, dilation=1, groups=1):
    """Cut the patches that a convolution multiplies with its filters, one position at a time.

    Args:
        x: Input ``(batch, channels, *space)``.
        kernel: Its spatial shape.
        stride: A number, or one for each spatial dimension.
        padding: The same, or "same" or "valid".
        dilation: A number, or one for each spatial dimension.
        groups: How many sets of channels are treated apart.

    Returns:
        Patches ``(batch, groups, *positions, in)`` with ``in`` the channels of a group times the
        kernel's size.
    """
    stride, dilation = _per_dimension(stride, kernel), _per_dimension(dilation, kernel)
    reach = [gap * (size - 1) for gap, size in zip(dilation, kernel, strict=True)]
    if padding == "same":
        sides = [(total // 2, total - total // 2) for total in reach]
    else:
        widths = _per_dimension(0 if padding == "valid" else padding, kernel)
        sides = [(width, width) for width in widths]
    padded = F.pad(x, [side for pair in reversed(sides) for side in pair])
    counts = [
        (full - far - 1) // step + 1
        for full, far, step in zip(padded.shape[2:], reach, stride, strict=True)
    ]
    cut = []
    for position in itertools.product(*(range(count) for count in counts)):
        window = tuple(
            slice(index * step, index * step + far + 1, gap)
            for index, step, far, gap in zip(position, stride, reach, dilation, strict=True)
        )
        patch = padded[(slice(None), slice(None), *window)]
        cut.append(patch.reshape(x.shape[0], groups, -1))
    return torch.stack(cut, 2).unflatten(2, counts)


def convolution_moments(x, loc, covariance, groups=1, **geometry):
    """Return mean and variance of a convolution's outputs ``(batch, out, *positions)``.

    Output channel ``o`` at a position with patch ``p`` is ``w_o . p``: its mean is ``m_o . p`` and its
    variance ``p' Sigma_oo p``, where ``Sigma_oo`` is the block of the filter ``w_o``.
    """
    out, size = loc.shape[0], loc[0].numel()
    cut = patches(x, loc.shape[2:], groups=groups, **geometry)
    blocks = covariance.reshape(out, size, out, size)
    means, variances = [], []
    for channel in range(out):
        patch = cut[:, channel // (out // groups)]
        means.append(patch @ loc[channel].flatten())
        variances.append(((patch @ blocks[channel, :, channel, :]) * patch).sum(-1))
    return torch.stack(means, 1), torch.stack(variances, 1)


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


def drawn_feature_map_covariance(x, covariance, shared, out, kernel, groups=1, **geometry):
    """Return the covariance of feature maps of which only a part is one draw for all positions.

    The noise with the covariance ``shared`` is drawn once for an example. All the rest is drawn anew
    at each position: the channels at one position keep their covariance, positions have none.
    """
    whole, joint = (
        feature_map_covariance(x, part, out, kernel, groups, **geometry)
        for part in (covariance, shared)
    )
    same_position = torch.eye(whole.shape[-1] // out).repeat(out, out)
    return joint + same_position * (whole - joint)


def _per_dimension(value, kernel):
    return tuple(value) if isinstance(value, (tuple, list)) else (value,) * len(kernel)
