"""The Walsh-Hadamard transform, compared with SciPy's matrix."""

import math

import pytest
import torch
from scipy.linalg import hadamard

from pyro_structvi.linalg.matrices import walsh_hadamard_transform


@pytest.mark.parametrize("shape", [(3, 1), (2,), (0, 8), (2, 1, 3, 64), (3, 2048)])
def test_it_multiplies_by_the_matrix_and_so_do_gradients(shape):
    x, size = torch.randn(shape, requires_grad=True), shape[-1]
    matrix = torch.from_numpy(hadamard(size, float)) / math.sqrt(size)
    found, direction = walsh_hadamard_transform(x), torch.randn(shape)
    torch.testing.assert_close(found, x @ matrix)
    (gradient,) = torch.autograd.grad((found * direction).sum(), x)
    torch.testing.assert_close(gradient, direction @ matrix)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
def test_any_dtype(dtype):
    x = torch.randn(3, 256, dtype=dtype)
    found, wide = walsh_hadamard_transform(x), torch.promote_types(dtype, torch.float64)
    assert found.dtype == dtype
    tolerance, exact = 16 * torch.finfo(dtype).eps, walsh_hadamard_transform(x.to(wide))
    torch.testing.assert_close(found.to(wide), exact, atol=tolerance, rtol=tolerance)


def test_no_state_is_left_by_inference_mode_or_a_transform():
    x = torch.randn(3, 16)
    with torch.inference_mode():
        expected = walsh_hadamard_transform(x)
    per_row = torch.func.vmap(torch.func.grad(lambda row: walsh_hadamard_transform(row)[0]))(x)
    torch.testing.assert_close(per_row, torch.full_like(x, 0.25))
    torch.testing.assert_close(walsh_hadamard_transform(x), expected)


def test_other_sizes_are_refused():
    for shape in ((), (2, 0), (4, 6)):
        with pytest.raises(ValueError, match="The last dimension of `x` must be a power of two"):
            walsh_hadamard_transform(torch.zeros(shape))
