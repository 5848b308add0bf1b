"""A model and dense regressions for guides that correlate layers."""

import itertools
from functools import partial

import torch
from torch import nn

import pyro_structvi as ps
from tests.guides.inducing_guides import randomize

NOISE = 0.3
scramble = partial(randomize, scale=0.3)


def make_net(*sizes):
    layers = [nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))[:-1]


def make_model(*sizes, num_data=20):
    return ps.Regressor(
        ps.bayesianize(make_net(*sizes), prior=0.8), num_data=num_data, noise_scale=NOISE
    )


def dense_regression(rows, target, precision, scale):
    """Return the mean ``(in, out)`` and the covariance of a regression's weights.

    With a precision for each output, covariances are ``(out, in, in)``.
    """
    if precision.dim() == 2:
        columns = zip(target.T, precision.T, strict=True)
        parts = [dense_regression(rows, y.unsqueeze(-1), own, scale) for y, own in columns]
        return torch.cat([mean for mean, _ in parts], -1), torch.stack([cov for _, cov in parts])
    covariance = torch.linalg.inv(
        torch.diag(scale**-2)
        + sum(p * torch.outer(x, x) for p, x in zip(precision, rows, strict=True))
    )
    return covariance @ rows.mT @ (precision.unsqueeze(-1) * target), covariance
