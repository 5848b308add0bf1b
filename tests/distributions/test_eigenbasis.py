"""What EigenbasisNormal has beyond the contract: special cases, bases from angles, errors."""

import math

import pytest
import torch

from pyro_structvi.distributions import EigenbasisNormal
from pyro_structvi.structures.eigenbasis import block_rotation, num_angles


def identity(size):
    return torch.eye(size, dtype=torch.float64)


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
