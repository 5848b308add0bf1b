"""The registry of structures, under the names that these tests use."""
# ruff: noqa: F401

from pyro_structvi.testing import STRUCTURES as CASES
from pyro_structvi.testing import Structure as Case
from pyro_structvi.testing.entry import (
    CONVOLUTION,
    MATRIX,
    VECTOR,
    cholesky_factor,
    make_full,
    make_k_tied,
    make_log_scale,
    make_low_rank,
    make_matrix_normal,
    make_mean_field,
    make_rowwise,
    positive,
)
from pyro_structvi.testing.entry import zero_covariance as no_covariance
from pyro_structvi.testing.inducing import (
    INDUCING,
    InducingOracle,
    joint_covariance,
    make_conditional,
    make_inducing,
    make_joint,
    prior_scale,
)

CONVOLUTION_CASES = [case for case in CASES if case.has_convolution_image]
