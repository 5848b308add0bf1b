"""A linear regression with an exact posterior, of which the diagnostics are known."""

from collections import namedtuple

import torch
from torch import nn
from torch.distributions import MultivariateNormal

import pyro_structvi as ps
from pyro_structvi.sites.parameterization import parameters_of_rows

SITE, NOISE = "net.weight", 0.5

Exact = namedtuple("Exact", ["mean", "covariance", "log_evidence"])


def make_model(num_data, inputs):
    return ps.Regressor(ps.bayesianize(nn.Linear(inputs, 1, bias=False), 1.0), num_data, NOISE)


def exact(x, y):
    precision = x.mT @ x / NOISE**2 + torch.eye(x.shape[1])
    marginal = x @ x.mT + NOISE**2 * torch.eye(len(x))
    evidence = MultivariateNormal(torch.zeros(len(x)), marginal).log_prob(y.squeeze(-1))
    mean = torch.linalg.solve(precision, x.mT @ y / NOISE**2)
    return Exact(mean.mT, precision.inverse(), evidence)


def full_guide(model, mean, covariance, **options):
    guide = ps.FullCovarianceGuide(model, **options)
    posterior = guide[SITE]
    factor = torch.linalg.cholesky(covariance)
    with torch.no_grad():
        for name, value in {"loc": mean, **parameters_of_rows(factor, mean)}.items():
            posterior.value(name).copy_(value)
    return guide
