"""Reparameterized sampling with Rao-Blackwellized gradients."""

import torch
from torch import Tensor


def rao_blackwell_sample(columns: Tensor, noise: Tensor) -> Tensor:
    r"""Return :math:`f = K^\top e`, with a gradient of less variance than that of e.

    The gradient of a function of f by K is :math:`e\,g^\top`. Where there is more noise than there are
    outputs, most of e does not show in f; in its place stands its expectation given f,
    :math:`K (K^\top K)^{-1} f`. The mean of the gradient is the same, and its variance smaller
    (Rao-Blackwell). For one output it is the gradient of its standard deviation times
    :math:`f / \sqrt{K^\top K}`, that of local reparameterization.

    Args:
        columns: K, ``(*batch, D, E)``, where E is less than D.
        noise: Standard normal noise e, ``(*sample, *batch, D)``.

    Returns:
        Draws ``(*sample, *batch, E)``.

    References:
        Kingma, Salimans and Welling (2015), "Variational dropout and the local reparameterization
        trick", for one output; Casella and Robert (1996), "Rao-Blackwellisation of sampling schemes".
    """
    noise = noise.unsqueeze(-2)
    with torch.no_grad():
        drawn = noise @ columns
        covariance = columns.mT @ columns
        diagonal = covariance.diagonal(dim1=-2, dim2=-1)
        details = torch.finfo(columns.dtype)
        diagonal += 10 * details.eps * diagonal.mean(-1, keepdim=True) + details.tiny
        tril, failed = torch.linalg.cholesky_ex(covariance)
        seen = torch.cholesky_solve(drawn.mT, tril).mT @ columns.mT
        # All of the noise gives a gradient of the same mean.
        seen = torch.where((failed == 0)[..., None, None], seen, noise)
    outputs = seen @ columns
    return (outputs + (drawn - outputs.detach())).squeeze(-2)
