"""What FullNormal has beyond the contract: one weight for all positions, the triangle, the costs."""

import pytest
import torch
import torch.nn.functional as F

from pyro_structvi.distributions import FullNormal, MeanFieldNormal
from pyro_structvi.maps import BiasColumnMap, ConvolutionMap, DenseMap
from tests import dense_oracles as dense
from tests.distributions.cases import make_full
from tests.lazy_weights import lazy
from tests.recorded_sizes import RecordsSizes
from tests.statistics import assert_moments

OUT, IN = 4, 3
FILTERS = (4, 3, 2, 2)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12, check_stride=False)


# ---- positions -----------------------------------------------------------------------------------


def operator(x):
    """Return the matrix from ``vec(W)`` to the outputs of one example, position by position."""
    return torch.cat([torch.kron(torch.eye(OUT), row.unsqueeze(0)) for row in x.reshape(-1, IN)])


def example_moments(x, q):
    """Return mean and covariance of the outputs of one example ``(*positions, in)``, flattened."""
    applied = operator(x)
    return applied @ q.loc.flatten(), applied @ dense.full_covariance(q.scale_tril) @ applied.mT


POSITIONS = {"sequence": (2,), "grid": (1, 2)}


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS.keys())
def test_positions_of_an_example_have_their_exact_joint_law(positions):
    q, x = make_full((), (OUT, IN), torch.float64), torch.randn(5, *positions, IN)
    mean, covariance = map(
        torch.stack, zip(*(example_moments(example, q) for example in x), strict=True)
    )
    image = q.image_under(DenseMap(), x)
    assert (image.batch_shape, image.event_shape) == ((5,), (*positions, OUT))
    y = torch.randn(5, *positions, OUT)
    close(image.mean.flatten(1), mean)
    close(image.variance.flatten(1), covariance.diagonal(dim1=-2, dim2=-1))
    close(image.variance_sum, covariance.diagonal(dim1=-2, dim2=-1).sum(-1))
    close(image.covariance_matrix, covariance)
    close(image.log_prob(y), dense.log_prob(y.flatten(1), mean, covariance, 1))


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS.keys())
def test_a_layer_with_positions_draws_one_weight_for_each_example(positions):
    """Two examples 20 000 times, each pair independent of the others, and its examples too."""
    q, x = make_full((), (OUT, IN), torch.float64), torch.randn(2, *positions, IN)
    outputs = F.linear(x.repeat(20_000, *(1 for _ in positions), 1), lazy(q))
    means, covariances = zip(*(example_moments(example, q) for example in x), strict=True)
    draws = outputs.reshape(20_000, 2, -1)
    assert_moments(draws, torch.stack(means), torch.block_diag(*covariances))


def test_a_random_bias_is_one_for_all_positions():
    q, x = make_full((), (OUT, IN), torch.float64), torch.randn(2, 2, IN)
    bias = MeanFieldNormal(torch.randn(OUT), torch.rand(OUT) + 0.1)
    image = q.image_under(DenseMap(), x, bias)
    shared = torch.kron(torch.ones(2, 2), torch.diag(bias.variance))
    expected = [example_moments(example, q)[1] + shared for example in x]
    close(image.covariance_matrix, torch.stack(expected))
    close(image.variance.flatten(1), image.covariance_matrix.diagonal(dim1=-2, dim2=-1))
    assert_moments(image.rsample((20_000,)), image.mean, torch.block_diag(*image.covariance_matrix))


@pytest.mark.parametrize("lead", [(), (2,), (2, 2)], ids=["one x", "batch", "positions"])
def test_a_joined_bias_is_the_column_that_meets_a_one(lead):
    """The law is that of a layer without bias whose inputs have a further entry, 1."""
    q, x = make_full((), (OUT, IN + 1), torch.float64), torch.randn(*lead, IN)
    joined = q.image_under(*DenseMap().join_bias(x))
    plain = q.image_under(DenseMap(), F.pad(x, (0, 1), value=1.0))
    assert (joined.batch_shape, joined.event_shape) == (plain.batch_shape, plain.event_shape)
    close(joined.mean, plain.mean)
    close(joined.covariance_matrix, plain.covariance_matrix)
    blocks = plain.covariance_matrix.reshape(-1, *2 * (plain.event_shape.numel(),))
    assert_moments(joined.rsample((20_000,)), plain.mean, torch.block_diag(*blocks))


@pytest.mark.parametrize("join", [lambda layer: layer, BiasColumnMap], ids=["plain", "joined"])
def test_a_convolution_has_no_image(join):
    q = make_full((), FILTERS, torch.float64)
    assert q.image_under(join(ConvolutionMap(F.conv2d, (3, 2, 2))), torch.randn(5, 3, 4, 4)) is None


@pytest.mark.parametrize("shape", [(1, IN), (1, 2, IN)], ids=["one position", "two"])
def test_inputs_of_zeros_have_draws_and_moments_and_no_density(shape):
    image = make_full((), (OUT, IN), torch.float64).image_under(DenseMap(), torch.zeros(shape))
    assert torch.isnan(image.log_prob(torch.zeros(image.loc.shape))).all()
    assert torch.isnan(image.entropy()).all()
    assert image.rsample().eq(0).all()
    assert image.variance.eq(0).all()


def test_an_image_expands():
    q, x = make_full((), (OUT, IN), torch.float64), torch.randn(5, IN)
    image = q.image(x)
    expanded = image.expand((2, 5))
    close(expanded.covariance_matrix, image.covariance_matrix.expand(2, 5, OUT, OUT))
    close(expanded.variance, image.variance.expand(2, 5, OUT))


# ---- costs ---------------------------------------------------------------------------------------


def test_a_draw_of_the_image_forms_one_weight_for_each_example_and_nothing_larger():
    q, x = make_full((), (OUT, IN), torch.float64), torch.randn(50, IN)
    with RecordsSizes() as recorded:
        q.image(x).rsample()
    assert max(recorded.sizes) == 50 * OUT * IN


# ---- arguments -----------------------------------------------------------------------------------


def everything(q):
    """Return all that may look at the triangular argument."""
    torch.manual_seed(0)
    x, value = torch.randn(5, IN), torch.randn(OUT, IN)
    image = q.image(x)
    return [
        *(q.variance, q.variance_sum, q.covariance_matrix, q.log_det_covariance, q.rsample()),
        *(q.log_prob(value), q.entropy(), image.variance, image.covariance_matrix),
        *(image.rsample(), image.log_prob(torch.zeros(5, OUT))),
    ]


def test_only_the_lower_triangle_counts():
    q = make_full((), (OUT, IN), torch.float64)
    above = torch.full((OUT * IN, OUT * IN), torch.nan).triu(1)
    full = FullNormal(q.loc, q.scale_tril + above, validate_args=False)
    assert torch.isnan(full.scale_tril).any()
    for actual, expected in zip(everything(full), everything(q), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("loc", "scale_tril", "message"),
    [
        ((4, 3), (4, 4), r"`scale_tril` must have shape \(\*batch, D, D\) = \(12, 12\).* \(4, 4\)"),
        ((4, 3), (12, 4), r"`scale_tril` must have shape .* = \(12, 12\), but got \(12, 4\)"),
        ((5, 4), (6, 4, 4), r"`scale_tril` must have shape .* = \(5, 4, 4\), but got \(6, 4, 4\)"),
        (
            (4,),
            (4,),
            r"`loc` must have shape .* `scale_tril` \(\*batch, D, D\).* \(4,\) and \(4,\)",
        ),
        (
            (4,),
            (5, 4, 4),
            r"`loc` must have shape \(\*batch, out, \*rest\).* \(4,\) and \(5, 4, 4\)",
        ),
        ((), (1, 1), r"`loc` must have shape .* but got \(\) and \(1, 1\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(loc, scale_tril, message):
    with pytest.raises(ValueError, match=message):
        FullNormal(torch.zeros(loc), torch.zeros(scale_tril))


def test_an_entry_above_the_diagonal_is_refused():
    tril = torch.eye(3)
    tril[0, 2] = 0.25
    message = r"`scale_tril` must be lower triangular, but it has an entry 0\.25 .*linalg\.cholesky"
    with pytest.raises(ValueError, match=message):
        FullNormal(torch.zeros(3), tril)


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_the_diagonal_must_be_positive_and_finite(wrong):
    tril = torch.eye(3)
    tril[1, 1] = wrong
    message = r"`scale_tril\.diagonal\(\)` must be positive and finite everywhere"
    with pytest.raises(ValueError, match=message):
        FullNormal(torch.zeros(3), tril)


def test_a_factor_of_another_dtype_is_refused():
    message = r"`scale_tril` must have the dtype of `loc`, torch\.float64, but got torch\.float32"
    with pytest.raises(ValueError, match=message):
        FullNormal(torch.zeros(3), torch.eye(3, dtype=torch.float32))


def test_the_dimensions_of_the_factor_tell_a_batch_from_a_weight():
    q = FullNormal(torch.zeros(5, 3), torch.eye(3).expand(5, 3, 3))
    assert (q.batch_shape, q.event_shape) == ((5,), (3,))
    q = FullNormal(torch.zeros(5, 3), torch.eye(15))
    assert (q.batch_shape, q.event_shape) == ((), (5, 3))
