"""The joint prior of a weight and its inducing weights: marginals, conditionals, arguments."""

import pytest
import torch

from pyro_structvi.distributions import AugmentedMatrixNormal, InducingNormal
from pyro_structvi.testing.noise import assert_mean
from tests import dense_oracles as dense
from tests.distributions.cases import (
    CONVOLUTION,
    INDUCING,
    MATRIX,
    joint_covariance,
    make_joint,
    prior_scale,
)
from tests.distributions.subject import FLOAT32, FLOAT64
from tests.unit_noise import assert_draws, close


@pytest.mark.parametrize("event_shape", [MATRIX, CONVOLUTION], ids=str)
@pytest.mark.parametrize(("batch_shape", "bias_scale"), [((), True), ((2, 3), False)])
def test_it_is_a_part_of_a_matrix_normal_with_its_marginals_and_conditionals(
    batch_shape, event_shape, bias_scale
):
    joint = make_joint(batch_shape, event_shape, FLOAT64, bias_scale)
    covariance, size = joint_covariance(joint), joint.event_shape.numel()
    close(joint.covariance_matrix, covariance)
    prior, inducing = joint.weight_prior(), joint.inducing_prior()
    assert prior.batch_shape == inducing.batch_shape == batch_shape
    assert (prior.event_shape, inducing.event_shape) == (event_shape, INDUCING)
    close(prior.covariance_matrix, covariance[..., :size, :size])
    of_inducing = covariance[..., size:, size:]
    close(inducing.covariance_matrix, of_inducing)
    assert prior.mean.eq(0).all()
    assert inducing.mean.eq(0).all()

    u, scale = torch.randn(*batch_shape, *INDUCING), torch.rand(batch_shape) + 0.2
    cross, flat = covariance[..., :size, size:], u.flatten(-2).unsqueeze(-1)
    spread = covariance[..., :size, :size] - cross @ torch.linalg.solve(of_inducing, cross.mT)
    given, mean = joint.condition(u, scale), cross @ torch.linalg.solve(of_inducing, flat)
    close(given.mean.flatten(-len(event_shape)), mean.squeeze(-1))
    close(given.covariance_matrix, scale.square()[..., None, None] * spread)
    close(joint.condition(u).covariance_matrix, spread)
    close(joint.condition(u, 0.3).covariance_matrix, 0.09 * spread)
    whitened = joint.whiten(u.expand(5, *u.shape)).flatten(-2)
    expected = torch.linalg.solve(torch.linalg.cholesky(of_inducing), flat).squeeze(-1)
    close(whitened, expected.expand(whitened.shape))


@pytest.mark.parametrize(("bias_scale", "sample_shape"), [(False, ()), (True, (2,))])
def test_draws_of_both_have_the_joint_covariance(bias_scale, sample_shape):
    joint, lead = make_joint((2,), CONVOLUTION, FLOAT64, bias_scale), len(sample_shape) + 1

    def draw():
        return torch.cat([part.flatten(lead) for part in joint.rsample(sample_shape)], -1)

    covariance = joint_covariance(joint).expand(*sample_shape, -1, -1, -1)
    assert_draws(draw, torch.zeros(()), covariance)


def equal_eigenvalues():
    """Return a joint prior with orthonormal factors: all eigenvalues of a side are equal."""
    factors = (
        torch.linalg.qr(torch.randn(size, inducing)).Q.mT
        for size, inducing in zip(MATRIX, INDUCING, strict=True)
    )
    diagonals = (torch.full((inducing,), 0.5) for inducing in INDUCING)
    return AugmentedMatrixNormal(*factors, *diagonals, 0.7)


def leaves(joint):
    return {
        name: value.detach().clone().requires_grad_() for name, value in joint.arguments.items()
    }


@pytest.mark.parametrize("make", [equal_eigenvalues, lambda: make_joint((), MATRIX, FLOAT64)])
def test_the_density_has_the_dense_gradients_even_where_eigenvalues_are_equal(make):
    """The first of the two: the derivative of an eigenvector does not exist there."""
    arguments = leaves(make())
    joint, u = AugmentedMatrixNormal(**arguments), torch.randn(INDUCING)
    value, tensors = torch.randn(5, *MATRIX), list(arguments.values())
    gain, spread = dense.conditional_moments(joint_covariance(joint), 12)
    factor = torch.linalg.cholesky(joint_covariance(joint)[12:, 12:])
    mean = (gain @ torch.linalg.solve(factor, u.flatten())).reshape(MATRIX)
    oracle = dense.log_prob(value, mean, 0.36 * spread, 2)
    density = joint.condition(u, 0.6).log_prob(value)
    close(density, oracle)
    expected = torch.autograd.grad(oracle.sum(), tensors)
    found = torch.autograd.grad(density.sum(), tensors, retain_graph=True)
    for own, gradient in zip(found, expected, strict=True):
        close(own, gradient)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(density.sum(), joint.row_factor, create_graph=True)


def test_factors_are_computed_when_needed_and_once_with_gradients(factorizations):
    joint = AugmentedMatrixNormal(**leaves(make_joint((), MATRIX, FLOAT64)))
    joint.weight_prior()
    assert factorizations == []
    for context in (torch.no_grad, torch.enable_grad, torch.enable_grad):
        with context():
            given = joint.condition(torch.zeros(INDUCING))
            given.log_prob(given.rsample())
            given.image(torch.randn(7, 3)).rsample()
            joint.rsample()
    assert sorted(factorizations) == [(2, 2), (3, 3)]
    assert joint.rows.basis.requires_grad
    with torch.no_grad():
        joint = AugmentedMatrixNormal(**joint.arguments)
    assert not joint.rows.basis.requires_grad


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64])
def test_a_singular_prior_says_what_jitter_it_took_and_leaves_the_weight_its_law(dtype):
    """Two rows of Z are equal, and the diagonal is too small to tell them apart."""
    arguments = make_joint((), MATRIX, dtype).arguments
    arguments["row_factor"][1] = arguments["row_factor"][0]
    arguments["row_diagonal"] = torch.full((3,), 1e-12, dtype=dtype)
    arguments = {name: value.requires_grad_() for name, value in arguments.items()}
    joint = AugmentedMatrixNormal(**arguments)
    mean_diagonal = joint.row_factor.double().square().sum(-1).mean().item()
    assert 1e-12 * mean_diagonal == pytest.approx(joint.rows.jitter.item(), rel=1e-5)
    assert joint.columns.jitter.item() == 0
    weight, _ = joint.rsample((50,))
    given = joint.condition(torch.zeros(INDUCING, dtype=dtype))
    value = weight.sum() + given.log_prob(given.rsample())
    for gradient in torch.autograd.grad(value, list(arguments.values())):
        assert torch.isfinite(gradient).all()
    whole = InducingNormal(joint, torch.zeros(INDUCING, dtype=dtype), 1.0, conditional_scale=1.0)
    prior = joint.weight_prior().covariance_matrix
    torch.testing.assert_close(whole.covariance_matrix, prior, rtol=0, atol=1e-3)


@pytest.mark.parametrize("diagonal", [1e-1, 1e-3, 1e-5])
@pytest.mark.parametrize("autocast", [False, True])
def test_draws_are_as_far_from_the_mean_as_the_density_says(diagonal, autocast):
    """In single and mixed precision; squared distances of draws have the mean D.

    With a small diagonal, inducing weights leave some directions of the weight next to no noise.
    """
    arguments = make_joint((), MATRIX, FLOAT32).arguments
    for name in ("row_diagonal", "column_diagonal"):
        arguments[name] = torch.full_like(arguments[name], diagonal)
    joint = AugmentedMatrixNormal(**arguments)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        given = joint.condition(torch.zeros(INDUCING, dtype=FLOAT32), 0.01)
        distances = given.mahalanobis(given.rsample((2000,)) - given.mean)
    assert_mean(distances.unsqueeze(-1), torch.tensor([12.0]))


def test_it_expands_and_shares_memory():
    joint = make_joint((3,), CONVOLUTION, FLOAT64, bias_scale=True)
    expanded = joint.expand(torch.Size([2, 3]))
    assert (expanded.batch_shape, expanded.event_shape) == ((2, 3), CONVOLUTION)
    covariance = joint_covariance(joint)
    close(expanded.covariance_matrix, covariance.expand(2, *covariance.shape))
    for name, value in joint.arguments.items():
        assert expanded.arguments[name].data_ptr() == value.data_ptr()


def test_one_scale_serves_a_batch_and_may_be_a_number():
    arguments = make_joint((2, 3), MATRIX, FLOAT64).arguments
    joint = AugmentedMatrixNormal(**arguments | {"scale": torch.tensor([0.2, 0.3, 0.4])})
    each = AugmentedMatrixNormal(**arguments | {"scale": joint.scale.expand(2, 3)})
    close(joint.covariance_matrix, each.covariance_matrix)
    close(prior_scale(joint), torch.tensor([0.2, 0.3, 0.4]).unsqueeze(-1).expand(3, 3))
    arguments = make_joint((), MATRIX, FLOAT32).arguments
    joint = AugmentedMatrixNormal(**arguments | {"scale": 1, "bias_scale": 0.5})
    assert joint.column_scale.tolist() == [[1.0, 1.0, 0.5]]
    assert joint.column_scale.dtype == FLOAT32
    unchecked = arguments | {"scale": torch.tensor(-1.0).float()}
    joint = AugmentedMatrixNormal(**unchecked, validate_args=False)
    assert joint.weight_prior().variance.eq(1).all()


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("row_factor", (4,), r"must have shape \(\*batch, M_out, out\), .* \(4,\)"),
        (
            "column_factor",
            (5, 2, 3),
            r"must have shape \(\*batch, M_in, in\) = \(2, 3\), but got \(5",
        ),
        ("row_diagonal", (2,), r"must have shape \(\*batch, M_out\) = \(3,\), but got \(2,\)"),
        ("column_diagonal", (3,), r"must have shape \(\*batch, M_in\) = \(2,\), but got \(3,\)"),
        ("scale", (2,), r"must broadcast to \(\*batch,\) = \(\), but got shape \(2,\)"),
        ("bias_scale", (1,), r"must broadcast to \(\*batch,\) = \(\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(name, shape, message):
    arguments = make_joint((), MATRIX, FLOAT64).arguments
    with pytest.raises(ValueError, match=f"`{name}` {message}"):
        AugmentedMatrixNormal(**arguments | {name: torch.ones(shape)})


def test_an_event_shape_that_does_not_fit_is_refused():
    arguments = make_joint((), MATRIX, FLOAT64, bias_scale=True).arguments
    message = r"`event_shape` must be \(out, \*rest\) with out = 4 and prod\(rest\) = 3, but got"
    for event_shape in ((3, 4), (4, 3, 2), (4,), ()):
        with pytest.raises(ValueError, match=message):
            AugmentedMatrixNormal(**arguments, event_shape=event_shape)
    for name in ("column_factor", "row_diagonal", "column_diagonal", "scale", "bias_scale"):
        message = rf"`{name}` must have the dtype of `row_factor`, torch.float64, .* torch.float32"
        with pytest.raises(ValueError, match=message):
            AugmentedMatrixNormal(**arguments | {name: arguments[name].float()})
        if name != "column_factor":
            with pytest.raises(ValueError, match=rf"`{name}` must be positive and finite every"):
                AugmentedMatrixNormal(**arguments | {name: -arguments[name]})


ZEROS = torch.zeros(2, *INDUCING).double()


@pytest.mark.parametrize(
    ("u", "scale", "message"),
    [
        (ZEROS[0], 1.0, r"`u` must have shape \(\*batch, M_out, M_in\) = \(2, 3, 2\), but got \(3"),
        (ZEROS.float(), 1.0, "`u` must have the dtype of `row_factor`"),
        *((ZEROS, wrong, "`conditional_scale` must be positive") for wrong in (0.0, -1.0)),
        (ZEROS, float("nan"), "`conditional_scale` must be positive and finite everywhere"),
        (ZEROS, -torch.ones(()).double(), "`conditional_scale` must be positive and finite every"),
        (
            *(ZEROS, torch.ones(3).double()),
            r"`conditional_scale` must broadcast to \(\*batch,\) = \(2,\), but got shape \(3,\)",
        ),
        (ZEROS, torch.ones(2).float(), "`conditional_scale` must have the dtype of `row_factor`"),
    ],
)
def test_conditions_that_do_not_fit_are_refused(u, scale, message):
    with pytest.raises(ValueError, match=message):
        make_joint((2,), MATRIX, FLOAT64).condition(u, scale)
