"""Flipout: one draw of a weight, with random signs that make it another one for each example."""

import torch
from torch import Tensor

from pyro_structvi.distributions.gaussian_weight import GaussianWeight
from pyro_structvi.linalg.shapes import standard_normal
from pyro_structvi.maps import LinearMap, shape_per_example


def flipout(
    q: GaussianWeight, linear_map: LinearMap, x: Tensor, bias: Tensor | None = None
) -> Tensor:
    r"""Draw the outputs of a map whose weight has independent elements, symmetric about their means.

    .. math:: y_n = M x_n + r_n \circ \Delta (s_n \circ x_n), \qquad \Delta = W - M

    with one draw of :math:`\Delta` and, for each example, signs r of the output channels and s of the
    input channels. The outputs of an example, at all positions, have the distribution that a drawn
    weight gives; those of different examples are uncorrelated given their inputs.

    Args:
        q: A distribution with ``has_independent_elements``.
        linear_map: A dense map or a convolution.
        x: Its input, the first dimension of which is the batch.
        bias: Nothing, or a tensor ``(out,)``.

    Returns:
        The outputs.

    Example:
        >>> from pyro_structvi.distributions import MeanFieldNormal
        >>> from pyro_structvi.maps import DenseMap
        >>> q = MeanFieldNormal(torch.zeros(2, 3), torch.tensor(1.0))
        >>> y = flipout(q, DenseMap(), torch.ones(4, 1, 3).expand(4, 2, 3))
        >>> bool((y[:, 0] == y[:, 1]).all()), bool((y[0] == y[1]).all())
        (True, False)

    References:
        Wen, Vicol, Ba, Tran and Grosse (2018), "Flipout: efficient pseudo-independent weight
        perturbations on mini-batches", Eq. 3.
    """
    channels = x.shape[linear_map.channel_dim]
    inputs = x * _signs(shape_per_example(linear_map, x, channels), x)
    perturbation = q.as_matrix(q.scale_noise(standard_normal(q.noise_shape, q.loc)))
    outputs = linear_map(inputs, perturbation)
    signs = _signs(shape_per_example(linear_map, x, q.event_shape[0]), outputs)
    return linear_map(x, q.as_matrix(q.loc), bias) + signs * outputs


def _signs(shape: list[int], like: Tensor) -> Tensor:
    return 2 * torch.randint(2, shape, dtype=like.dtype, device=like.device) - 1
