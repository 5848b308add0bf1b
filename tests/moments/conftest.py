"""What tests of moments share."""

import pytest
import torch


@pytest.fixture
def x():
    return torch.randn(5, 3)
