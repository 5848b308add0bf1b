"""The Walsh-Hadamard transform, compared with SciPy's matrix."""

import math

import pytest
import torch
from scipy.linalg import hadamard

from pyro_structvi.linalg.matrices import walsh_hadamard_transform


@pytest.mark.parametrize("shape", [(3, 1), (2,), (0, 8), (2, 1, 3, 64), (3, 2048)])
def test_it_multiplies_by_the_matrix(shape):
    x, size = torch.randn(shape), shape[-1]
    matrix = torch.from_numpy(hadamard(size, float)) / math.sqrt(size)
    torch.testing.assert_close(walsh_hadamard_transform(x), x @ matrix)


def test_gradients_are_transforms():
    size = 64
    x, direction = torch.randn(2, size, requires_grad=True), torch.randn(2, size)
    (gradient,) = torch.autograd.grad((walsh_hadamard_transform(x) * direction).sum(), x)
    torch.testing.assert_close(gradient, walsh_hadamard_transform(direction))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
def test_any_dtype(dtype):
    x = torch.randn(3, 256, dtype=dtype)
    transformed = walsh_hadamard_transform(x)
    assert transformed.dtype == dtype
    wide = x.to(torch.promote_types(dtype, torch.float64))
    tolerance = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        transformed.to(wide), walsh_hadamard_transform(wide), atol=tolerance, rtol=tolerance
    )


def test_no_state_is_left_by_inference_mode_or_a_transform():
    x = torch.randn(3, 16)
    with torch.inference_mode():
        expected = walsh_hadamard_transform(x)
    per_row = torch.func.vmap(torch.func.grad(lambda row: walsh_hadamard_transform(row)[0]))(x)
    torch.testing.assert_close(per_row, torch.full_like(x, 0.25))
    leaf = x.clone().requires_grad_()
    result = walsh_hadamard_transform(leaf)
    result.sum().backward()
    torch.testing.assert_close(result.detach(), expected)
    assert torch.isfinite(leaf.grad).all()


@pytest.mark.parametrize("shape", [(), (2, 0), (4, 6)])
def test_other_sizes_are_refused(shape):
    with pytest.raises(ValueError, match="The last dimension of `x` must be a power of two"):
        walsh_hadamard_transform(torch.zeros(shape))
