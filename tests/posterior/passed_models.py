"""Models whose passes run many draws at once."""

import torch
from torch import nn

import pyro_structvi as ps

ONE_BY_ONE = 1e-9  # GiB, with room for no draw
TENSORS = ("mean", "variance", "function_variance", "entropy", "mutual_information", "log_density")


def draws_of(guide, count):
    each = [guide.draw(number=number) for number in range(count)]
    return {name: torch.stack([draw[name] for draw in each]) for name in each[0]}


def counted(model):
    """Return a model that counts the times it is run, and the counter."""
    runs = []

    def counting(*args):
        runs.append(1)
        return model(*args)

    return counting, runs


def assert_same(ours, expected):
    for name in (*TENSORS, "functions"):
        torch.testing.assert_close(
            getattr(ours, name), getattr(expected, name), rtol=1e-12, atol=1e-12
        )


def regressor_of(*layers, noise_scale=0.3, **options):
    net = ps.bayesianize(nn.Sequential(*layers), normalization=False, **options)
    return ps.Regressor(net, 12, noise_scale)


def normalized():
    return regressor_of(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Dropout(0.5), nn.Linear(4, 1)
    )
