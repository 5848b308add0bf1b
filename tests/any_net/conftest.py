"""Nets of other libraries run in single precision."""

import pytest
import torch


def pytest_ignore_collect(collection_path, config):
    """Leave these libraries unimported, unless their tests are asked for by an option or a path."""
    is_named = any("any_net" in each for each in config.args)
    return None if config.getoption("--nets") or is_named else True


@pytest.fixture(autouse=True)
def single_precision():
    """Nets of these libraries make tensors in single precision, and ONNX Runtime has few kernels of
    double precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)
