"""What EigenbasisNormal has beyond the contract: special cases, bases from angles, errors."""

import math

import pytest
import torch

from pyro_structvi.distributions import EigenbasisNormal
from pyro_structvi.structures.eigenbasis import block_rotation, num_angles


@pytest.mark.parametrize("block_size", [1, 2, 3, 7, 64])
def test_a_rotation_consists_of_blocks(block_size):
    angles = torch.randn(num_angles(7, block_size))
    rotation = block_rotation(angles, 7, block_size)
    torch.testing.assert_close(rotation @ rotation.mT, torch.eye(7))
    torch.testing.assert_close(torch.linalg.det(rotation), torch.ones(()))
    block = torch.arange(7) // block_size
    assert not rotation[block[:, None] != block].any()


def test_a_block_of_two_turns_by_its_angle_and_a_basis_must_be_orthogonal():
    turn = 2 * math.atan(0.3 / 2)
    cos, sin = math.cos(turn), math.sin(turn)
    rotation = block_rotation(torch.tensor([0.3]), 2, 64)
    torch.testing.assert_close(rotation, torch.tensor([[cos, sin], [-sin, cos]]))
    message = "`row_basis` must have orthonormal columns.*Pass `torch.linalg.qr"
    with pytest.raises(ValueError, match=message):
        EigenbasisNormal(torch.zeros(2, 2), torch.ones(2, 2), 2 * torch.eye(2), torch.eye(2))
