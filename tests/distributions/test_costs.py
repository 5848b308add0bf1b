"""A draw of outputs forms nothing larger than what its structure needs."""

import pytest
import torch
import torch.nn.functional as F

from pyro_structvi.distributions import MeanFieldNormal
from pyro_structvi.maps import ConvolutionMap, DenseMap
from tests.distributions.cases import make_full, make_k_tied, make_matrix_normal, make_rowwise
from tests.recorded_sizes import RecordsSizes

# A maker, the weight's shape, a map and the shape of its input, and the largest size.
COSTS = {
    "k-tied": (make_k_tied(2), (40, 30), DenseMap(), (5, 30), 40 * 30 // 2),
    "k-tied, a convolution": (
        *(make_k_tied(2), (40, 16, 3, 3), ConvolutionMap(F.conv2d, (16, 3, 3))),
        *((1, 16, 4, 4), 40 * 16 * 9 // 2),
    ),
    "matrix normal": (make_matrix_normal, (20, 30), DenseMap(), (50, 30), 50 * 30),
    "rowwise": (make_rowwise, (20, 30), DenseMap(), (50, 30), 50 * 20 * 30),
    "full": (make_full, (4, 3), DenseMap(), (50, 3), 50 * 4 * 12),
}


@pytest.mark.parametrize(
    ("make", "shape", "linear_map", "x_shape", "largest"), COSTS.values(), ids=COSTS
)
def test_the_largest_tensor(make, shape, linear_map, x_shape, largest):
    q, x = make((), shape, torch.float64), torch.randn(x_shape)
    for bias in (None, MeanFieldNormal(torch.randn(shape[0]), torch.rand(shape[0]))):
        with RecordsSizes(q.loc) as recorded:
            q.image_under(linear_map, x, bias).rsample()
        assert max(recorded.sizes) <= largest


@pytest.mark.parametrize(("inputs", "needs_gradients"), [(1, True), (3, False)])
def test_a_full_covariance_draws_one_weight_where_outputs_show_all_noise_or_no_gradient_is_needed(
    inputs, needs_gradients
):
    q, x = make_full((), (4, inputs), torch.float64), torch.randn(50, inputs)
    torch.manual_seed(0)
    expected = q.image(x).rsample()
    torch.manual_seed(0)
    with RecordsSizes() as recorded, torch.set_grad_enabled(needs_gradients):
        drawn = q.image(x).rsample()
    assert max(recorded.sizes) == 50 * 4 * inputs
    torch.testing.assert_close(drawn, expected, rtol=1e-12, atol=1e-12)
