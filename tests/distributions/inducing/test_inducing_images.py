"""Outputs of a weight with inducing weights: costs, drawn weights, mixed precision."""

import pytest
import torch
import torch.nn.functional as F

from pyro_structvi.distributions import AugmentedMatrixNormal, InducingNormal
from pyro_structvi.maps import BiasColumnMap, ConvolutionMap, DenseMap
from tests.distributions.cases import make_joint, make_mean_field, positive
from tests.distributions.inducing.inducing_laws import ORACLE, make
from tests.distributions.subject import FLOAT32, FLOAT64, arguments, with_arguments
from tests.recorded_sizes import RecordsSizes

OUT, IN = 3, 4


@pytest.mark.parametrize("join", [False, True], ids=["plain", "joined"])
def test_a_draw_of_outputs_forms_nothing_of_the_weights_size(join):
    q, x = make(make_mean_field, (60, 70 + join), bias_scale=join), torch.randn(4, 70)
    linear_map = BiasColumnMap(DenseMap()) if join else DenseMap()
    assert max(q.joint.rows.basis.numel(), q.joint.columns.basis.numel()) < 4 * 70
    with RecordsSizes() as recorded:
        q.image_under(linear_map, x).rsample()
    assert max(recorded.sizes) <= 4 * 70


def test_a_covariance_of_outputs_forms_nothing_of_the_squared_size_of_inducing_weights():
    joint = make_joint((), (30, 30), FLOAT64, inducing_shape=(20, 20))
    q = InducingNormal(joint, torch.randn(20, 20), positive(20, 20, dtype=FLOAT64), 0.3)
    with RecordsSizes() as recorded:
        covariance = q.image(torch.randn(4, 30)).covariance_matrix
    assert covariance.shape == (4, 30, 30)
    assert max(recorded.sizes) <= covariance.numel()


@pytest.mark.parametrize(
    ("shape", "image_size", "ways"),
    [
        ((8, 4, 3, 3), 6, ("weight", "outputs")),
        ((6, 2000), None, ("outputs", "weight")),
        ((80, 2000), None, ("outputs", "factors", "weight")),
        ((500, 300, 3, 3), 3, ("outputs", "factors", "weight")),
        ((80, 20, 3, 3), 3, ("factors", "weight", "outputs")),
    ],
    ids=["few inputs", "thin", "dense", "many inputs", "some inputs"],
)
def test_outputs_are_drawn_unless_noise_at_every_position_costs_more(shape, image_size, ways):
    q = make(make_mean_field, shape)
    if image_size is None:
        linear_map, x = DenseMap(), torch.randn(5, shape[1])
    else:
        linear_map = ConvolutionMap(F.conv2d, shape[1:])
        x = torch.randn(5, shape[1], image_size, image_size)
    assert q.ways_to_apply(linear_map, x) == ways


def single_precision():
    joint = make_joint((), (OUT, IN), FLOAT32, bias_scale=True, inducing_shape=(2, 2))
    loc, scale = torch.randn(2, 2).float(), positive(2, 2, dtype=FLOAT32)
    return with_arguments(InducingNormal(joint, loc, scale, 0.3), torch.clone)


def assert_finite_gradients(value, leaves):
    for gradient in torch.autograd.grad(value.sum(), leaves):
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixed_precision_draws_outputs_and_passes_gradients_on(dtype):
    """Means are compared within what eight bits of mantissa and 20 000 draws allow."""
    q, x = single_precision(), torch.randn(IN - 1).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = q.image_under(BiasColumnMap(DenseMap()), x.expand(20_000, -1)).rsample()
    assert outputs.dtype == torch.bfloat16
    expected = q.image(F.pad(x.float(), (0, 1), value=1.0))
    torch.testing.assert_close(outputs.float().mean(0), expected.mean, rtol=0.03, atol=0.03)
    torch.testing.assert_close(outputs.float().var(0), expected.variance, rtol=0.08, atol=0.01)
    assert_finite_gradients(outputs.float(), arguments(q))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_draws_outputs_of_the_rounded_arguments(dtype):
    """Bounds as for mixed precision."""
    q = with_arguments(single_precision(), lambda value: value.detach().to(dtype))
    x = torch.randn(IN).to(dtype)
    outputs = q.image(x.expand(20_000, -1)).rsample()
    assert outputs.dtype == dtype
    exact = with_arguments(q, lambda value: value.detach().double()).image(x.double())
    torch.testing.assert_close(outputs.double().mean(0), exact.mean, rtol=0.03, atol=0.03)
    torch.testing.assert_close(outputs.double().var(0), exact.variance, rtol=0.08, atol=0.01)


def test_mixed_precision_draws_weights_in_the_parameters_dtype():
    q = single_precision()
    with torch.autocast("cpu", torch.bfloat16):
        weight = q.rsample()
        assert q.mean.dtype == weight.dtype == FLOAT32
    exact = ORACLE.mean(with_arguments(q, lambda value: value.detach().double()))
    torch.testing.assert_close(q.mean.double(), exact, rtol=1e-5, atol=1e-6)
    assert_finite_gradients(weight, arguments(q))


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e12])
def test_inputs_of_any_size_have_finite_outputs_and_gradients(size):
    q = single_precision()
    x = (size * torch.randn(5, IN)).float().requires_grad_()
    outputs = q.image(x).rsample()
    assert torch.isfinite(outputs).all()
    assert_finite_gradients(outputs, [x, *arguments(q)])


def test_where_the_inducing_weights_see_all_of_the_input_gradients_are_finite():
    """With Z of full rank and D near zero, noise has no part that they do not see."""
    values = make_joint((), (OUT, IN), FLOAT64, inducing_shape=(OUT, IN)).arguments
    for name in ("row_diagonal", "column_diagonal"):
        values[name] = torch.full_like(values[name], 1e-9)
    q = InducingNormal(AugmentedMatrixNormal(**values), torch.zeros(OUT, IN), 0.5, 1.0)
    q = with_arguments(q, torch.clone)
    assert_finite_gradients(q.image(torch.randn(7, IN)).rsample(), arguments(q))
