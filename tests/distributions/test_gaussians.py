"""What each Gaussian structure has beyond the contract: shapes, costs, precision, gradients."""

import math

import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Normal, kl_divergence

from pyro_structvi.distributions import (
    EigenbasisNormal,
    FullNormal,
    KTiedNormal,
    LogScaleNormal,
    LowRankNormal,
    MeanFieldNormal,
)
from pyro_structvi.linalg.matrices import blocks_of_rows, floored_sqrt, sum_of_logs
from pyro_structvi.maps import BiasColumnMap, ConvolutionMap, DenseMap
from pyro_structvi.structures.eigenbasis import block_rotation, num_angles
from tests import dense_oracles as dense
from tests.distributions.cases import (
    make_full,
    make_k_tied,
    make_low_rank,
    make_matrix_normal,
    make_rowwise,
)
from tests.recorded_sizes import RecordsSizes
from tests.unit_noise import assert_close


def test_scale_broadcasts_to_loc():
    loc, scale = torch.randn(2, 4, 3), torch.rand(4, 1) + 0.1
    q = MeanFieldNormal(loc, scale, event_dim=2)
    assert (q.batch_shape, q.event_shape) == ((2,), (4, 3))
    torch.testing.assert_close(q.stddev, scale.expand(2, 4, 3), check_stride=False)
    assert MeanFieldNormal(torch.zeros(4, 3), torch.tensor(0.5)).variance_sum.item() == 3.0


@pytest.mark.parametrize(
    ("event_dim", "batch_shape"), [(None, ()), (3, ()), (2, (2,)), (1, (2, 4)), (0, (2, 4, 3))]
)
def test_event_dim_splits_the_shape(event_dim, batch_shape):
    q = MeanFieldNormal(torch.zeros(2, 4, 3), torch.tensor(1.0), event_dim)
    assert q.batch_shape == batch_shape
    assert q.log_prob(torch.zeros(2, 4, 3)).shape == batch_shape


def test_single_numbers_equal_a_normal():
    """A site of scalars, such as a bias in a plate, has no event dimension at all."""
    loc, scale, value = torch.randn(5), torch.rand(5) + 0.1, torch.randn(5)
    q, plain = MeanFieldNormal(loc, scale, event_dim=0), Normal(loc, scale)
    torch.testing.assert_close(q.log_prob(value), plain.log_prob(value))
    torch.testing.assert_close(q.entropy(), plain.entropy())
    torch.testing.assert_close(q.variance_sum, plain.variance)


def test_scales_that_would_enlarge_loc_are_refused():
    message = r"`scale` must broadcast to the shape of `loc` = \(4, 3\), but got shape \(2, 4, 3\)"
    with pytest.raises(ValueError, match=message):
        MeanFieldNormal(torch.zeros(4, 3), torch.ones(2, 4, 3))
    scale = torch.ones(4, 3)
    scale[1, 2] = float("inf")
    with pytest.raises(ValueError, match="`scale` must be positive and finite everywhere"):
        MeanFieldNormal(torch.zeros(4, 3), scale)


def test_validation_can_be_switched_off():
    q = MeanFieldNormal(torch.zeros(4, 3), torch.tensor(-1.0), validate_args=False)
    assert q.variance.eq(1).all()
    assert q.log_prob(torch.full((4, 3), float("nan"))).isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_roots_of_half_precision_are_single(dtype):
    variance = torch.tensor([0.0, 1e-6, 4.0], dtype=dtype, requires_grad=True)
    scale = floored_sqrt(variance)
    assert scale.dtype == torch.float32
    torch.testing.assert_close(scale, variance.float().sqrt(), rtol=1e-6, atol=1e-18)
    assert torch.isfinite(torch.autograd.grad(scale.sum(), variance)[0]).all()


# ---- k-tied: the costs it saves ------------------------------------------------------------------


def test_kl_to_a_uniform_prior_at_rank_one_forms_no_variances_of_the_size_of_the_weight(
    monkeypatch,
):
    for name in ("stddev", "variance", "covariance_matrix"):
        refused = property(lambda self: pytest.fail("it was formed"))
        monkeypatch.setattr(KTiedNormal, name, refused, raising=False)
    q = make_k_tied(1)((), (40, 30), torch.float64)
    assert torch.isfinite(kl_divergence(q, dist.Normal(0.0, 1.0).expand((40, 30)).to_event(2)))


def test_the_kl_keeps_nothing_of_the_weights_size_but_the_means():
    q = KTiedNormal(
        torch.randn(40, 30).requires_grad_(),
        (torch.rand(40, 2) + 0.1).requires_grad_(),
        (torch.rand(30, 2) + 0.1).requires_grad_(),
    )
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        kl_divergence(q, dist.Normal(torch.tensor(0.0), torch.tensor(1.0)).expand((40, 30)))
    large = [value for value in kept if value.untyped_storage().nbytes() >= 1200]
    assert all(value.data_ptr() == q.loc.data_ptr() for value in large)


def test_the_sum_of_logs_is_added_up_in_blocks_and_under_vmap():
    rows, columns = torch.rand(700, 2) + 0.1, torch.rand(900, 2) + 0.1
    assert len(blocks_of_rows(rows, 900)) > 1
    arguments = rows.requires_grad_(), columns.requires_grad_()
    plain = (rows @ columns.mT).log().sum()
    torch.testing.assert_close(sum_of_logs(*arguments), plain)
    own = torch.autograd.grad(sum_of_logs(*arguments), arguments)
    torch.testing.assert_close(own, torch.autograd.grad(plain, arguments))

    factors = torch.rand(3) + 0.5
    mapped = torch.func.vmap(lambda factor: sum_of_logs(factor * rows, columns))(factors).sum()
    looped = sum(sum_of_logs(factor * rows, columns) for factor in factors)
    torch.testing.assert_close(
        torch.autograd.grad(mapped, arguments), torch.autograd.grad(looped, arguments)
    )


# ---- low rank: reading shapes, and staying precise -----------------------------------------------


@pytest.mark.parametrize(
    ("loc", "factors", "event_dim", "batch", "rank"),
    [
        ((4, 3), (2, 4, 3), None, (), 2),
        ((4, 3), (4, 4, 3), None, (), 4),  # as a matrix, not as four vectors
        ((5, 4, 3), (2, 5, 4, 3), None, (), 2),
        ((2, 4, 3), (2, 2, 4, 3), 2, (2,), 2),
        ((2, 4, 3), (2, 2, 4, 3), 3, (), 2),
        ((4,), (4, 4), None, (), 4),
        ((4,), (4, 2), 0, (4,), 2),
    ],
)
def test_batch_and_rank_are_read_from_the_shapes(loc, factors, event_dim, batch, rank):
    q = LowRankNormal(torch.zeros(loc), torch.zeros(factors), 1.0, event_dim=event_dim)
    assert (q.batch_shape, q.rank) == (batch, rank)


@pytest.mark.parametrize(
    ("factors", "event_dim"), [((4, 3), None), ((2, 4, 2), None), ((0, 4, 3), None), ((2, 4, 3), 1)]
)
def test_shapes_that_do_not_fit_are_an_error(factors, event_dim):
    message = r"`factors` must have shape \(\*batch, K, out, \*rest\).*for \(4, 3\)"
    with pytest.raises(ValueError, match=message):
        LowRankNormal(torch.zeros(4, 3), torch.zeros(factors), 1.0, event_dim=event_dim)


def test_scale_and_alpha_may_be_numbers():
    loc, factors = torch.zeros(2, 3).float(), torch.randn(4, 2, 3).float()
    for kind in (MeanFieldNormal, lambda loc, s: LowRankNormal(loc, loc[None], s)):
        assert kind(loc, 2).variance.eq(4).all()
        assert kind(loc, 2.0).variance.dtype == torch.float32
    default = LowRankNormal(loc, factors, 0.5)  # with one over the rank
    given = LowRankNormal(loc, factors, 0.5, alpha=0.25)
    assert torch.equal(default.variance, given.variance)
    assert default.expand((2,)).alpha == 0.25


def test_a_low_rank_density_does_not_cancel_beside_a_small_diagonal():
    """Along the direction it is the density of one number."""
    loc, along = torch.zeros(4, requires_grad=True), torch.ones(4)
    q = LowRankNormal(loc, along[None], 2.0**-30, alpha=1.0, event_dim=1)
    distance = q.mahalanobis(3 * along - loc)
    torch.testing.assert_close(distance.detach(), torch.tensor(9.0))
    (gradient,) = torch.autograd.grad(distance, loc)
    torch.testing.assert_close(gradient.sum(), torch.tensor(-6.0))


def test_a_look_without_gradients_leaves_the_image_its_gradients():
    q = make_low_rank(2)((), (4, 3), torch.float64)
    factors = q.factors.requires_grad_()
    image = q.image(torch.randn(5, 3))
    with torch.no_grad():
        assert not image.variance.requires_grad
    image.variance.sum().backward()
    assert factors.grad.abs().sum() > 0
    assert q.image_under(DenseMap(), torch.zeros(0, 3)).rsample().shape == (0, 4)


@pytest.mark.parametrize("make_q", [make_full, make_low_rank(2), make_matrix_normal, make_rowwise])
def test_an_expert_with_one_input_may_have_no_examples(make_q):
    image = make_q((), (2, 1), torch.float64).image_under(DenseMap(), torch.zeros(0, 1))
    assert image.rsample().shape == (0, 2)
    assert image.covariance_matrix.shape == (0, 2, 2)


def test_a_distribution_that_was_made_without_gradients_has_whole_ones_or_none():
    log_scale = torch.full((3,), 0.5, requires_grad=True)
    factors = torch.randn(2, 4, 3, requires_grad=True)
    shape = (4, 3)
    with torch.no_grad():
        q = LogScaleNormal(torch.zeros(3), log_scale)
        low_rank = LowRankNormal(torch.zeros(shape), factors, torch.tensor(0.3))
        for each in (q, low_rank):
            assert not each.entropy().requires_grad
            assert not each.variance.requires_grad
    for _ in range(2):  # no graph is kept from one backward pass to the next
        divergence = kl_divergence(q, Normal(torch.zeros(3), 1.0))
        (gradient,) = torch.autograd.grad(divergence, log_scale)
        torch.testing.assert_close(gradient, (2 * log_scale.detach()).exp() - 1)
        same = LowRankNormal(torch.zeros(shape), factors, torch.tensor(0.3))
        gradients = [
            torch.autograd.grad(kl_divergence(each, Normal(torch.zeros(shape), 1.0)), factors)
            for each in (low_rank, same)
        ]
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("shape", [(1,), (2,), (100, 100)], ids=str)
def test_the_determinant_is_precise_in_single_and_mixed_precision(shape, autocast):
    """More factors than elements, too, under a diagonal as small as exp(-10)."""
    scale = torch.tensor(0.0067, dtype=torch.float32)
    for factors in torch.randn(50 if len(shape) == 1 else 1, 3, *shape):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            single = LowRankNormal(torch.zeros(shape).float(), factors.float(), scale)
            found = single.log_det_covariance
        exact = LowRankNormal(torch.zeros(shape), factors, scale.double()).log_det_covariance
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)


# ---- a full covariance: inputs of zeros, and gradients -------------------------------------------


@pytest.mark.parametrize("shape", [(1, 3), (1, 2, 3)], ids=["one position", "two"])
def test_inputs_of_zeros_have_draws_and_moments_and_no_density(shape):
    image = make_full((), (4, 3), torch.float64).image_under(DenseMap(), torch.zeros(shape))
    assert torch.isnan(image.log_prob(torch.zeros(image.loc.shape))).all()
    assert torch.isnan(image.entropy()).all()
    assert image.rsample().eq(0).all()
    assert image.variance.eq(0).all()


def test_one_output_has_the_gradient_of_local_reparameterization():
    q, x = make_full((), (1, 3), torch.float64), torch.randn(50, 3)
    factor = q.scale_tril.clone().requires_grad_()
    image = FullNormal(q.loc, factor).image(x)
    drawn = image.rsample()
    noise = ((drawn - image.mean) / image.variance.sqrt()).detach()
    weights = torch.randn_like(drawn)
    (own,) = torch.autograd.grad((weights * drawn).sum(), factor)
    (expected,) = torch.autograd.grad((weights * noise * image.variance.sqrt()).sum(), factor)
    torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-12)


# ---- groups of a convolution under a rowwise normal; rotations of an eigenbasis ------------------


@pytest.mark.parametrize("join", [False, True], ids=["plain", "joined"])
def test_a_group_of_a_convolution_has_the_law_of_a_convolution_of_its_own(join):
    """The oracle joins a bias by a further entry 1 of every patch."""
    q, x = make_rowwise((), (4, 6 + join), torch.float64), torch.randn(2, 6, 3)
    linear_map = ConvolutionMap(F.conv1d, (3, 2), padding=1, groups=2)
    linear_map = BiasColumnMap(linear_map) if join else linear_map
    bias = torch.randn(4)
    patches = F.pad(dense.patches(x, (2,), padding=1, groups=2), (0, int(join)), value=1.0)
    covariances = dense.full_covariance(q.scale_tril).unflatten(0, (2, -1))
    mean = torch.einsum("bgpi,goi->bgop", patches, q.loc.unflatten(0, (2, -1)))
    mean = mean.flatten(1, 2) + bias.unsqueeze(-1)
    variance = torch.einsum("bgpi,goij,bgpj->bgop", patches, covariances, patches).flatten(1, 2)
    image = q.image_under(linear_map, x, bias)
    assert_close(image.mean, mean)
    assert_close(image.variance, variance)


@pytest.mark.parametrize("block_size", [1, 2, 3, 7, 64])
def test_a_rotation_consists_of_blocks(block_size):
    angles = torch.randn(num_angles(7, block_size))
    rotation = block_rotation(angles, 7, block_size)
    torch.testing.assert_close(rotation @ rotation.mT, torch.eye(7))
    torch.testing.assert_close(torch.linalg.det(rotation), torch.ones(()))
    block = torch.arange(7) // block_size
    assert not rotation[block[:, None] != block].any()


def test_a_block_of_two_turns_by_its_angle_and_a_basis_must_be_orthogonal():
    turn = 2 * math.atan(0.3 / 2)
    cos, sin = math.cos(turn), math.sin(turn)
    rotation = block_rotation(torch.tensor([0.3]), 2, 64)
    torch.testing.assert_close(rotation, torch.tensor([[cos, sin], [-sin, cos]]))
    message = "`row_basis` must have orthonormal columns.*Pass `torch.linalg.qr"
    with pytest.raises(ValueError, match=message):
        EigenbasisNormal(torch.zeros(2, 2), torch.ones(2, 2), 2 * torch.eye(2), torch.eye(2))


# ---- Cholesky factors: the lower triangle counts, and nothing above it ---------------------------


MAKE = {"full": make_full, "matrix normal": make_matrix_normal, "rowwise": make_rowwise}


def everything(q):
    """Return all that may look at a triangular argument."""
    torch.manual_seed(0)
    x, value = torch.randn(5, 3), torch.randn(4, 3)
    image = q.image(x)
    return [
        *(q.variance, q.variance_sum, q.covariance_matrix, q.log_det_covariance, q.rsample()),
        *(q.log_prob(value), q.entropy(), image.variance, image.covariance_matrix),
        *(image.rsample(), image.log_prob(torch.zeros(5, 4))),
    ]


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_only_the_lower_triangle_counts(make):
    q = make((), (4, 3), torch.float64)
    names = [name for name in q.argument_names if "tril" in name]
    above = (
        getattr(q, name) + torch.full_like(getattr(q, name), torch.nan).triu(1) for name in names
    )
    full = type(q)(q.loc, *above, validate_args=False)
    for actual, expected in zip(everything(full), everything(q), strict=True):
        assert torch.equal(actual, expected)


# ---- a draw of outputs forms nothing larger than what its structure needs ------------------------


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
    with RecordsSizes(q.loc) as recorded:
        q.image_under(linear_map, x, torch.randn(shape[0])).rsample()
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
