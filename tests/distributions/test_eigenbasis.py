"""What EigenbasisNormal has beyond the contract: special cases, bases from angles, errors."""

import math

import pytest
import torch

from pyro_structvi.distributions import EigenbasisNormal, MatrixNormal, MeanFieldNormal
from pyro_structvi.structures.eigenbasis import block_rotation, num_angles
from tests.distributions.cases import make_eigenbasis, make_matrix_normal

SHAPE = (4, 3)


def identity(size):
    return torch.eye(size, dtype=torch.float64)


def test_identity_bases_are_mean_field():
    own = make_eigenbasis((), SHAPE, torch.float64)
    q = EigenbasisNormal(own.loc, own.scale, identity(4), identity(3))
    exact = MeanFieldNormal(own.loc, own.scale)
    torch.testing.assert_close(q.covariance_matrix, exact.covariance_matrix)


def test_scales_of_rank_one_are_a_matrix_normal():
    exact: MatrixNormal = make_matrix_normal((), SHAPE, torch.float64)
    factors = exact.scale_tril_row, exact.scale_tril_column
    (rows, row_basis), (columns, column_basis) = (torch.linalg.eigh(L @ L.mT) for L in factors)
    scale = rows.sqrt().outer(columns.sqrt())
    q = EigenbasisNormal(exact.loc, scale, row_basis, column_basis)
    torch.testing.assert_close(q.covariance_matrix, exact.covariance_matrix)
    torch.testing.assert_close(q.log_det_covariance, exact.log_det_covariance)


def test_several_outputs_of_a_regression_with_kronecker_noise_are_in_the_family():
    inputs, noise = torch.randn(9, 3, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    hessians = noise @ noise.mT, inputs.mT @ inputs
    posterior = torch.linalg.inv(torch.kron(*hessians) + 2 * identity(12))
    (rows, row_basis), (columns, column_basis) = map(torch.linalg.eigh, hessians)
    scale = (rows.outer(columns) + 2).rsqrt()
    q = EigenbasisNormal(torch.zeros_like(scale), scale, row_basis, column_basis)
    torch.testing.assert_close(q.covariance_matrix, posterior)


@pytest.mark.parametrize("block_size", [1, 2, 3, 7, 64])
def test_a_rotation_consists_of_blocks(block_size):
    angles = torch.randn(num_angles(7, block_size), dtype=torch.float64)
    rotation = block_rotation(angles, 7, block_size)
    torch.testing.assert_close(rotation @ rotation.mT, identity(7))
    torch.testing.assert_close(torch.linalg.det(rotation), rotation.new_ones(()))
    block = torch.arange(7) // block_size
    assert not rotation[block[:, None] != block].any()


def test_a_block_of_two_turns_by_its_angle():
    turn = 2 * math.atan(0.3 / 2)
    exact = torch.tensor(
        [[math.cos(turn), math.sin(turn)], [-math.sin(turn), math.cos(turn)]], dtype=torch.float64
    )
    angles = torch.tensor([0.3], dtype=torch.float64)
    torch.testing.assert_close(block_rotation(angles, 2, 64), exact)


def test_a_basis_must_be_orthogonal():
    message = "`row_basis` must have orthonormal columns.*Pass `torch.linalg.qr"
    with pytest.raises(ValueError, match=message):
        EigenbasisNormal(torch.zeros(2, 2), torch.ones(2, 2), 2 * torch.eye(2), torch.eye(2))
