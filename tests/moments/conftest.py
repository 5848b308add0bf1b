"""Tests of moments compute in double precision."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _double():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def x():
    """Five inputs of a layer of three."""
    return torch.randn(5, 3)
