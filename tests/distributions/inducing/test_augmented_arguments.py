"""Arguments of the joint prior of a weight and its inducing weights."""

import pytest
import torch

from pyro_structvi.distributions import AugmentedMatrixNormal
from tests.distributions.cases import (
    CONVOLUTION,
    INDUCING,
    MATRIX,
    joint_covariance,
    make_joint,
    prior_scale,
)
from tests.distributions.inducing.test_augmented import close
from tests.distributions.subject import FLOAT32, FLOAT64


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
    ("shapes", "message"),
    [
        ({"row_factor": (4,)}, r"`row_factor` must have shape \(\*batch, M_out, out\), .* \(4,\)"),
        ({"column_factor": ()}, r"`column_factor` must have shape \(\*batch, M_in, in\), .* \(\)"),
        (
            {"column_factor": (5, 2, 3)},
            r"`column_factor` must have shape \(\*batch, M_in, in\) = \(2, 3\), but got \(5, 2, 3\)",
        ),
        (
            {"row_diagonal": (2,)},
            r"`row_diagonal` must have shape \(\*batch, M_out\) = \(3,\), but got \(2,\)",
        ),
        (
            {"column_diagonal": (3,)},
            r"`column_diagonal` must have shape \(\*batch, M_in\) = \(2,\), but got \(3,\)",
        ),
        ({"scale": (2,)}, r"`scale` must broadcast to \(\*batch,\) = \(\), but got shape \(2,\)"),
        ({"bias_scale": (1,)}, r"`bias_scale` must broadcast to \(\*batch,\) = \(\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, message):
    arguments = make_joint((), MATRIX, FLOAT64).arguments
    changed = {name: torch.ones(shape) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=message):
        AugmentedMatrixNormal(**arguments | changed)


def test_an_event_shape_that_does_not_fit_is_refused():
    arguments = make_joint((), MATRIX, FLOAT64).arguments
    message = r"`event_shape` must be \(out, \*rest\) with out = 4 and prod\(rest\) = 3, but got"
    for event_shape in ((3, 4), (4, 3, 2), (4,), ()):
        with pytest.raises(ValueError, match=message):
            AugmentedMatrixNormal(**arguments, event_shape=event_shape)


POSITIVE = ["row_diagonal", "column_diagonal", "scale", "bias_scale"]


@pytest.mark.parametrize("name", POSITIVE)
def test_scales_must_be_positive_and_finite(name):
    arguments = make_joint((), MATRIX, FLOAT64, bias_scale=True).arguments
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        arguments[name] = torch.full_like(arguments[name], wrong)
        with pytest.raises(ValueError, match=rf"`{name}` must be positive and finite everywhere"):
            AugmentedMatrixNormal(**arguments)


@pytest.mark.parametrize("name", ["column_factor", *POSITIVE])
def test_arguments_of_another_dtype_are_refused(name):
    arguments = make_joint((), MATRIX, FLOAT64, bias_scale=True).arguments
    arguments[name] = arguments[name].float()
    message = rf"`{name}` must have the dtype of `row_factor`, torch.float64, .* torch.float32"
    with pytest.raises(ValueError, match=message):
        AugmentedMatrixNormal(**arguments)


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
