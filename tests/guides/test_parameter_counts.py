"""Parameters of every guide for one layer W (m, n), as Table 1 of Ritter et al. (2021) and others count.

Where the table has ``O(...)``, so have the guides: the terms of the formulas are those of the table, and
what it leaves out is written out here.
"""

import pytest
import torch
from torch import nn

import pyro_structvi as ps
from pyro_structvi.families import MeanField

M, N, K, M_OUT, M_IN = 12, 9, 3, 4, 5


def triangle(size):
    return size * (size + 1) // 2


GUIDES = {
    "Deterministic-W": (ps.MAPGuide, M * N),
    "MC dropout": (ps.MCDropoutGuide, M * N),
    "FFG-W": (ps.MeanFieldGuide, 2 * M * N),
    "FFG-W, drawn": (lambda model: ps.MeanFieldGuide(model, local_reparam=False), 2 * M * N),
    "Ensemble-W": (lambda model: ps.EnsembleGuide(model, K), K * M * N),
    "k-tied FFG-W": (lambda model: ps.KTiedGuide(model, K), M * N + K * (M + N)),
    # Louizos and Welling's has diagonal factors, m n + m + n; with k = 1 it is this one.
    "Matrix-normal-W, diagonal": (lambda model: ps.KTiedGuide(model, 1), M * N + M + N),
    "Matrix-normal-W": (ps.MatrixNormalGuide, M * N + triangle(M) + triangle(N)),
    "rowwise": (ps.RowwiseGuide, M * N + M * triangle(N)),
    "low rank": (lambda model: ps.AutoLowRankLRT(model, K), (K + 1) * M * N),
    "low rank, full diagonal": (
        lambda model: ps.AutoLowRankLRT(model, K, "full"),
        (K + 2) * M * N,
    ),
    "full covariance": (ps.FullCovarianceGuide, M * N + triangle(M * N)),
    # m M_out + n M_in + 2 M_out M_in, the two diagonals of Z, and the scale of the noise
    "FFG-U": (
        lambda model: ps.InducingWeightGuide(model, (M_OUT, M_IN)),
        M * M_OUT + N * M_IN + 2 * M_OUT * M_IN + M_OUT + M_IN + 1,
    ),
    "Ensemble-U": (
        lambda model: ps.InducingWeightGuide(model, (M_OUT, M_IN), "ensemble", ensemble_size=K),
        M * M_OUT + N * M_IN + K * M_OUT * M_IN + M_OUT + M_IN + 1,
    ),
}


def count(*modules):
    """Count every parameter once, though a model and its guide may share some."""
    return sum(parameter.numel() for parameter in nn.ModuleList(modules).parameters())


def make_model(**options):
    net = nn.Linear(N, M, bias=False)
    return ps.Classifier(ps.bayesianize(net, prior=1.0, **options), num_data=10)


@pytest.mark.parametrize("title", GUIDES)
def test_a_guide_has_the_parameters_of_its_formula(title):
    make_guide, expected = GUIDES[title]
    model = make_model()
    assert count(model, make_guide(model)) == expected


def test_a_subnetwork_counts_what_is_chosen():
    model = make_model()
    chosen = {"net.weight": torch.arange(M * N).reshape(M, N) < 7}
    assert count(ps.SubnetworkGuide(model, chosen)) == 7 + triangle(7)


def test_rank_one_weights_count_the_net_and_two_vectors():
    model = make_model(layers={"": ps.RankOne()})
    assert count(model, ps.MeanFieldGuide(model)) == M * N + 2 * (M + N)


def test_walsh_hadamard_weights_count_four_numbers_for_each_row():
    """Two diagonals, and mean and standard deviation of the third, of 16 numbers for 9 inputs."""
    model = make_model(layers={"": ps.WalshHadamard()})
    assert count(model, ps.StructuredGuide(model, {"*": MeanField()})) == 4 * 16
