"""Images of weights under convolutions."""

import torch
import torch.nn.functional as F

from pyro_structvi.maps import ConvolutionMap
from tests.distributions.cases import CONVOLUTION_CASES
from tests.distributions.subject import arguments, with_arguments


def test_a_convolution_of_zeros_has_finite_gradients():
    """Padding alone makes patches of zeros, and rounding may make a variance negative."""
    linear_map = ConvolutionMap(F.conv2d, (4, 3, 2), padding=1)
    for case in CONVOLUTION_CASES:
        q = with_arguments(case.make((), (4, 4, 3, 2), torch.float64), torch.clone)
        draw = q.image_under(linear_map, torch.zeros(1, 4, 7, 6)).rsample()
        assert (draw.abs() < 1e-15).all(), case.name
        for gradient in torch.autograd.grad(draw.sum(), arguments(q)):
            assert torch.isfinite(gradient).all(), case.name
