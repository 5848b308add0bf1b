"""What MatrixNormal has beyond the contract: groups, costs."""

import pytest
import torch
import torch.nn.functional as F

from pyro_structvi.distributions import MeanFieldNormal
from pyro_structvi.maps import DenseMap
from tests.distributions.cases import make_matrix_normal
from tests.lazy_weights import lazy
from tests.recorded_sizes import RecordsSizes

OUT, IN = 4, 3


def make(*event_shape):
    return make_matrix_normal((), event_shape or (OUT, IN), torch.float64)


# ---- the image -----------------------------------------------------------------------------------


def test_a_convolution_with_groups_uses_one_drawn_weight():
    weight, x = lazy(make(OUT, 2, 2, 2)), torch.randn(5, 4, 3, 3)
    outputs = F.conv2d(x, weight, groups=2)
    assert weight.is_drawn
    assert torch.equal(outputs, F.conv2d(x, weight.draw(), groups=2))


# ---- costs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("random_bias", [False, True])
def test_a_draw_of_the_image_forms_nothing_larger_than_inputs_outputs_and_factors(random_bias):
    q, x = make(20, 30), torch.randn(50, 30)
    bias = MeanFieldNormal(torch.randn(20), torch.rand(20)) if random_bias else None
    with RecordsSizes() as recorded:
        q.image_under(DenseMap(), x, bias).rsample()
    assert max(recorded.sizes) == 50 * 30
