"""Outputs of a weight with inducing weights: positions, draws, costs, mixed precision, drawn weights."""

import pytest
import torch
import torch.nn.functional as F

from pyro_structvi.distributions import AugmentedMatrixNormal, InducingNormal, MeanFieldNormal
from pyro_structvi.maps import BiasColumnMap, ConvolutionMap, DenseMap
from pyro_structvi.structures.inducing import augmented
from tests import dense_oracles as dense
from tests.distributions.cases import make_joint, make_mean_field, positive
from tests.distributions.inducing.inducing_laws import (
    LAWS,
    MIXTURES,
    NORMAL,
    ORACLE,
    choosing,
    make,
    member_of,
)
from tests.distributions.subject import FLOAT32, FLOAT64, arguments, with_arguments
from tests.lazy_weights import lazy
from tests.recorded_sizes import RecordsSizes
from tests.unit_noise import assert_draws

OUT, IN = 3, 4
EVERY_MIXTURE = pytest.mark.parametrize("law", MIXTURES.values(), ids=MIXTURES)
EVERY_LAW = pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
JOINED = pytest.mark.parametrize("join", [False, True], ids=["plain", "joined"])


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10, check_stride=False)


def make_layer(law, join=False):
    return make(law, (OUT, IN + join), bias_scale=join, inducing_shape=(2, 2))


# ---- positions -----------------------------------------------------------------------------------


class Dense:
    """A dense layer at positions of two examples, and what its outputs' law is, densely.

    Outputs are ordered as ``(positions, out)``; a joined bias is a further entry 1 of each input.
    """

    def __init__(self, *space):
        self.x = torch.randn(2, *space, IN)
        self.patches, self.plain_map = self.x.flatten(1, -2), DenseMap()

    def order(self, outputs):
        """Turn ``(..., positions, out)`` into the order of the layer's own outputs."""
        return outputs

    def law(self, q, join):
        """Return mean and covariance: inducing weights are shared by positions, noise is not."""
        inputs = F.pad(self.patches, (0, int(join)), value=1.0)
        operator = torch.einsum("bpn,oc->bpocn", inputs, torch.eye(OUT)).flatten(-2)
        operator = self.order(operator.movedim(-1, 1)).flatten(2).mT  # (batch, outputs, D)
        shared = ORACLE.shared_covariance(q)
        noise = ORACLE.covariance(q) - shared
        positions = torch.eye(inputs.shape[1])[:, None, :, None].expand(-1, OUT, -1, OUT)
        positions = self.order(self.order(positions).movedim((0, 1), (2, 3)))
        same = positions.reshape(2 * (inputs.shape[1] * OUT,))
        covariance = operator @ shared @ operator.mT + same * (operator @ noise @ operator.mT)
        return self.order(inputs @ ORACLE.mean(q).mT).flatten(1), covariance

    def image(self, q, join, bias=None):
        linear_map = BiasColumnMap(self.plain_map) if join else self.plain_map
        return q.image_under(linear_map, self.x, bias)


class Convolution(Dense):
    """The same for a padded convolution, with outputs ordered as ``(out, positions)``."""

    def __init__(self):
        self.x, self.plain_map = torch.randn(2, 2, 3), ConvolutionMap(F.conv1d, (2, 2), padding=1)
        self.patches = dense.patches(self.x, (2,), padding=1)[:, 0]

    def order(self, outputs):
        return outputs.transpose(-1, -2)


LAYERS = {"sequence": lambda: Dense(2), "grid": lambda: Dense(2, 1), "convolution": Convolution}
EVERY_LAYER = pytest.mark.parametrize("make_layer_of", LAYERS.values(), ids=LAYERS)


def test_the_shared_part_is_not_nothing():
    """The oracle tells positions that share from positions that do not."""
    layer, q = Convolution(), make_layer(make_mean_field)
    _, covariance = layer.law(q, False)
    between = covariance.reshape(2, OUT, 4, OUT, 4)[:, :, 0, :, 2]
    assert between.abs().max() > 0.05 * covariance.diagonal(dim1=-2, dim2=-1).min()


def with_bias(layer, mean, covariance, bias):
    """Add the moments of a bias whose noise is independent over positions."""
    positions = torch.ones(2, layer.patches.shape[1], 1)
    spread, shift = (
        layer.order(positions * part).flatten(1) for part in (bias.variance, bias.mean)
    )
    return mean + shift, covariance + torch.diag_embed(spread)


def assert_moments(image, mean, covariance):
    assert image.batch_shape == (2,)
    close(image.mean.flatten(1), mean)
    close(image.variance.flatten(1), covariance.diagonal(dim1=-2, dim2=-1))
    close(image.covariance_matrix, covariance)


@JOINED
@EVERY_LAYER
@pytest.mark.parametrize("law", NORMAL.values(), ids=NORMAL)
def test_positions_share_the_inducing_weights_and_nothing_else(law, make_layer_of, join):
    """Moments, and draws of the whole batch; with a random bias where none is joined."""
    q, layer = make_layer(law, join), make_layer_of()
    bias = None if join else MeanFieldNormal(torch.randn(OUT), positive(OUT, dtype=FLOAT64))
    image = layer.image(q, join, bias)
    mean, covariance = layer.law(q, join)
    if bias is not None:
        mean, covariance = with_bias(layer, mean, covariance, bias)
    assert_moments(image, mean, covariance)
    assert_draws(lambda: image.rsample().flatten(1), mean, covariance)


@JOINED
@EVERY_LAYER
def test_several_draws_are_independent(make_layer_of, join):
    q, layer = make_layer(make_mean_field, join), make_layer_of()
    image, (mean, covariance) = layer.image(q, join), layer.law(q, join)
    assert_draws(lambda: image.rsample((2,)).flatten(2), mean, covariance.expand(2, -1, -1, -1))


@JOINED
@EVERY_LAYER
@EVERY_MIXTURE
def test_outputs_of_a_mixture_are_those_of_its_members(law, make_layer_of, join):
    q, layer = make_layer(law, join), make_layer_of()
    image = layer.image(q, join)
    assert_moments(image, *layer.law(q, join))
    mean, covariance = layer.law(member_of(q, 1), join)
    with choosing(1):
        assert_draws(lambda: image.rsample().flatten(1), mean, covariance)


@JOINED
@EVERY_LAW
def test_an_input_without_a_batch_is_one_example(law, join):
    q, layer = make_layer(law, join), Convolution()
    _, covariance = (moment[1] for moment in layer.law(q, join))
    layer.x = layer.x[1]
    image = layer.image(q, join)
    assert (image.batch_shape, image.rsample().shape) == ((), (OUT, 4))
    assert image.rsample((5,)).shape == (5, OUT, 4)
    close(image.covariance_matrix, covariance)


@pytest.mark.parametrize("join", [lambda layer: layer, BiasColumnMap], ids=["plain", "joined"])
def test_a_convolution_with_groups_gets_one_drawn_weight(join):
    linear_map = join(ConvolutionMap(F.conv1d, (2, 2), groups=3))
    x = torch.randn(5, 6, 4)
    assert make_layer(make_mean_field).ways_to_apply(linear_map, x) == ("weight",)
    weight = lazy(make(make_mean_field, (OUT, 2, 2)))
    outputs = F.conv1d(x, weight, groups=3)
    assert weight.is_drawn
    close(outputs, F.conv1d(x, weight.draw(), groups=3))


# ---- costs ---------------------------------------------------------------------------------------


@JOINED
def test_a_draw_of_outputs_forms_nothing_of_the_weights_size(join):
    q, x = make(make_mean_field, (60, 70 + join), bias_scale=join), torch.randn(4, 70)
    linear_map = BiasColumnMap(DenseMap()) if join else DenseMap()
    assert max(q.joint.rows.basis.numel(), q.joint.columns.basis.numel()) < 4 * 70
    with RecordsSizes() as recorded:
        q.image_under(linear_map, x).rsample()
    assert max(recorded.sizes) <= 4 * 70


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


def test_whether_a_weight_is_drawn_is_seen_in_the_layer(monkeypatch):
    x = torch.randn(5, 2, 4)
    for cost, drawn in ((1e9, True), (-1e9, False)):
        monkeypatch.setattr(augmented, "NOISE_COST", cost)
        lazy_weight = lazy(make(make_mean_field, (OUT, 2, 2)))
        F.conv1d(x, lazy_weight)
        assert lazy_weight.is_drawn is drawn


# ---- drawn weights -------------------------------------------------------------------------------


@EVERY_LAYER
@JOINED
def test_a_draw_in_factors_is_applied_as_its_weight(make_layer_of, join):
    q, layer = with_arguments(make_layer(make_mean_field, join), torch.clone), make_layer_of()
    draw, bias = q.draw_factored(), torch.randn(OUT)
    linear_map = BiasColumnMap(layer.plain_map) if join else layer.plain_map
    outputs = draw.apply(linear_map, layer.x, bias)
    expected = linear_map(layer.x, draw.weight(), bias)
    close(outputs, expected)
    probe, leaves = torch.randn_like(outputs), arguments(q)
    gradients = torch.autograd.grad((expected * probe).sum(), leaves, retain_graph=True)
    for found, gradient in zip(
        torch.autograd.grad((outputs * probe).sum(), leaves), gradients, strict=True
    ):
        close(found, gradient)


# ---- numbers -------------------------------------------------------------------------------------


def single_precision():
    joint = make_joint((), (OUT, IN), FLOAT32, bias_scale=True, inducing_shape=(2, 2))
    loc, scale = torch.randn(2, 2).float(), positive(2, 2, dtype=FLOAT32)
    return with_arguments(InducingNormal(joint, loc, scale, 0.3), torch.clone)


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
    for gradient in torch.autograd.grad(outputs.float().sum(), arguments(q)):
        assert torch.isfinite(gradient).all()


def test_mixed_precision_draws_weights_in_the_parameters_dtype():
    q = single_precision()
    with torch.autocast("cpu", torch.bfloat16):
        weight = q.rsample()
        assert q.mean.dtype == weight.dtype == FLOAT32
    exact = ORACLE.mean(with_arguments(q, lambda value: value.detach().double()))
    torch.testing.assert_close(q.mean.double(), exact, rtol=1e-5, atol=1e-6)
    for gradient in torch.autograd.grad(weight.sum(), arguments(q)):
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e12])
def test_inputs_of_any_size_have_finite_outputs_and_gradients(size):
    q = single_precision()
    x = (size * torch.randn(5, IN)).float().requires_grad_()
    outputs = q.image(x).rsample()
    assert torch.isfinite(outputs).all()
    for gradient in torch.autograd.grad(outputs.sum(), [x, *arguments(q)]):
        assert torch.isfinite(gradient).all()


def test_where_the_inducing_weights_see_all_of_the_input_gradients_are_finite():
    """With Z of full rank and D near zero, noise has no part that they do not see."""
    values = make_joint((), (OUT, IN), FLOAT64, inducing_shape=(OUT, IN)).arguments
    for name in ("row_diagonal", "column_diagonal"):
        values[name] = torch.full_like(values[name], 1e-9)
    q = InducingNormal(AugmentedMatrixNormal(**values), torch.zeros(OUT, IN), 0.5, 1.0)
    q = with_arguments(q, torch.clone)
    outputs = q.image(torch.randn(7, IN)).rsample()
    for gradient in torch.autograd.grad(outputs.sum(), arguments(q)):
        assert torch.isfinite(gradient).all()
