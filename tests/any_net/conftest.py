"""Nets of other libraries run in single precision."""

import pytest
import torch


@pytest.fixture(autouse=True)
def single_precision():
    """Nets of these libraries make tensors in single precision, and ONNX Runtime has few kernels of
    double precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)
