"""The structures that go through the suite of ``test_contract.py``; a new one is added here."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pyro_structvi.distributions import (
    AugmentedMatrixNormal,
    ConditionalNormal,
    FullNormal,
    InducingNormal,
    KTiedNormal,
    LogScaleNormal,
    LowRankNormal,
    MatrixNormal,
    MeanFieldNormal,
    RowwiseNormal,
)
from tests.dense_oracles import (
    augmented_covariance,
    conditional_moments,
    full_covariance,
    k_tied_covariance,
    kl_to_independent_normals,
    kl_with_inducing_weights,
    low_rank_covariance,
    matrix_normal_covariance,
    mean_field_covariance,
    rowwise_covariance,
)

VECTOR, MATRIX, CONVOLUTION = (4,), (4, 3), (4, 3, 2, 2)


def no_covariance(q):
    """Return zeros ``(D, D)``."""
    return torch.zeros(2 * (q.event_shape.numel(),))


@dataclass(frozen=True)
class Case:
    """A structure, as the suite sees it.

    Attributes:
        name: What its tests are called.
        make: A function of ``batch_shape, event_shape, dtype`` to a distribution with random
            arguments, all of them of that dtype.
        covariance: The dense covariance ``(*batch_shape, D, D)`` of row-major ``vec(W)``, from the
            distribution's arguments and by its definition.
        mean: The mean ``(*batch_shape, *event_shape)``, likewise.
        kl_with_inducing: For a KL that counts inducing weights too, an upper bound of the one over
            the weight: its dense value for a prior's ``loc`` and ``scale``, of the mean's shape.
        event_shapes: The shapes of weight it serves.
        shared_covariance: The part of the covariance whose noise all positions of an example share,
            ``(D, D)``; the rest of the noise is drawn independently at every position.
        has_convolution_image: Whether outputs of a convolution are drawn in the weight's place.
        serves_groups: Whether that holds for convolutions with groups too.
        has_forward_mode: Whether its KL has derivatives in forward mode.
    """

    name: str
    make: Callable
    covariance: Callable
    mean: Callable = lambda q: q.loc
    kl_with_inducing: Callable | None = None
    event_shapes: tuple = (MATRIX, CONVOLUTION)
    shared_covariance: Callable = no_covariance
    has_convolution_image: bool = True
    serves_groups: bool = True
    has_forward_mode: bool = True

    def kl(self, q, loc, scale):
        """Return the dense KL to independent normals, whose arguments broadcast to the mean."""
        mean = self.mean(q)
        if self.kl_with_inducing is not None:
            return self.kl_with_inducing(q, loc.expand(mean.shape), scale.expand(mean.shape))
        return kl_to_independent_normals(mean, self.covariance(q), loc, scale, len(q.event_shape))


def positive(*shape, dtype):
    """Return positive numbers around 1/2."""
    return (0.3 * torch.randn(shape, dtype=dtype) - 0.7).exp()


def make_mean_field(batch_shape, event_shape, dtype):
    shape = (*batch_shape, *event_shape)
    loc = torch.randn(shape, dtype=dtype)
    return MeanFieldNormal(loc, positive(*shape, dtype=dtype), event_dim=len(event_shape))


def make_log_scale(batch_shape, event_shape, dtype):
    q = make_mean_field(batch_shape, event_shape, dtype)
    return LogScaleNormal(q.loc, q.scale.log(), len(event_shape))


def make_k_tied(rank):
    def make(batch_shape, event_shape, dtype):
        out, size = event_shape[0], torch.Size(event_shape[1:]).numel()
        return KTiedNormal(
            torch.randn(*batch_shape, *event_shape, dtype=dtype),
            positive(*batch_shape, out, rank, dtype=dtype),
            positive(*batch_shape, size, rank, dtype=dtype),
        )

    return make


def make_low_rank(rank, isotropic=False):
    def make(batch_shape, event_shape, dtype):
        shape = (*batch_shape, *event_shape)
        diagonal = (*batch_shape, *(1 for _ in event_shape)) if isotropic else shape
        return LowRankNormal(
            torch.randn(shape, dtype=dtype),
            torch.randn(*batch_shape, rank, *event_shape, dtype=dtype),
            positive(*diagonal, dtype=dtype),
            alpha=0.8,
            event_dim=len(event_shape),
        )

    return make


def cholesky_factor(batch_shape, size, dtype):
    """Return lower triangular matrices ``(*batch_shape, size, size)`` with positive diagonals."""
    below = torch.randn(*batch_shape, size, size, dtype=dtype).tril(-1) / size**0.5
    return below + torch.diag_embed(positive(*batch_shape, size, dtype=dtype))


def make_full(batch_shape, event_shape, dtype):
    scale_tril = cholesky_factor(batch_shape, torch.Size(event_shape).numel(), dtype)
    return FullNormal(torch.randn(*batch_shape, *event_shape, dtype=dtype), scale_tril)


def make_matrix_normal(batch_shape, event_shape, dtype):
    sizes = event_shape[0], torch.Size(event_shape[1:]).numel()
    loc = torch.randn(*batch_shape, *event_shape, dtype=dtype)
    return MatrixNormal(loc, *(cholesky_factor(batch_shape, size, dtype) for size in sizes))


def make_rowwise(batch_shape, event_shape, dtype):
    out, size = event_shape[0], torch.Size(event_shape[1:]).numel()
    loc = torch.randn(*batch_shape, *event_shape, dtype=dtype)
    return RowwiseNormal(loc, cholesky_factor((*batch_shape, out), size, dtype))


# ---- inducing weights ----------------------------------------------------------------------------

INDUCING = (3, 2)


def make_joint(batch_shape, event_shape, dtype, bias_scale=False, inducing_shape=INDUCING):
    """Return a joint prior with random arguments."""
    sizes = event_shape[0], torch.Size(event_shape[1:]).numel()
    factors = (
        torch.randn(*batch_shape, *shape, dtype=dtype) / size**0.5
        for size, *shape in zip(sizes, inducing_shape, sizes, strict=True)
    )
    diagonals = (positive(*batch_shape, size, dtype=dtype) for size in inducing_shape)
    scales = (positive(*batch_shape, dtype=dtype) for _ in range(1 + bias_scale))
    return AugmentedMatrixNormal(*factors, *diagonals, *scales, event_shape=event_shape)


def make_conditional(batch_shape, event_shape, dtype):
    joint = make_joint(batch_shape, event_shape, dtype, bias_scale=True)
    whitened = torch.randn(*batch_shape, *INDUCING, dtype=dtype)
    return ConditionalNormal(joint, whitened, positive(*batch_shape, dtype=dtype))


def make_inducing(make_posterior, bias_scale):
    def make(batch_shape, event_shape, dtype):
        joint = make_joint(batch_shape, event_shape, dtype, bias_scale)
        inducing = make_posterior(batch_shape, INDUCING, dtype)
        scale = positive(*batch_shape, dtype=dtype)
        if make_posterior is make_mean_field:
            return InducingNormal(joint, inducing.loc, inducing.scale, scale)
        return InducingNormal.from_inducing(joint, inducing, scale)

    return make


def prior_scale(joint):
    """Return the standard deviation of each column, ``(*batch_shape, in)``."""
    size = joint.column_factor.shape[-1]
    columns = [joint.scale for _ in range(size)]
    if joint.bias_scale is not None:
        columns[-1] = joint.bias_scale
    return torch.stack(columns, -1)


def joint_covariance(joint):
    names = ("row_factor", "column_factor", "row_diagonal", "column_diagonal")
    return augmented_covariance(*(getattr(joint, name) for name in names), prior_scale(joint))


class InducingOracle:
    """The moments of a weight whose inducing weights have a known covariance.

    Args:
        covariance: The covariance of row-major whitened inducing weights, from their distribution.
    """

    def __init__(self, covariance):
        self._of_inducing = covariance

    def _parts(self, q):
        """Return what is known of the weight given the inducing weights, and these."""
        gain, noise = conditional_moments(joint_covariance(q.joint), q.event_shape.numel())
        noise = noise * q.conditional_scale.square()[..., None, None]
        return gain, noise, q.inducing.mean.flatten(-2), self._of_inducing(q.inducing)

    def mean(self, q):
        gain, _, mean, _ = self._parts(q)
        return (gain @ mean.unsqueeze(-1)).reshape(q.batch_shape + q.event_shape)

    def shared_covariance(self, q):
        gain, _, _, covariance = self._parts(q)
        return gain @ covariance @ gain.mT

    def covariance(self, q):
        return self.shared_covariance(q) + self._parts(q)[1]

    def kl(self, q, loc, scale):
        gain, noise, mean, covariance = self._parts(q)
        own = prior_scale(q.joint).unsqueeze(-2)
        own = own.expand(*q.batch_shape, q.event_shape[0], own.shape[-1]).flatten(-2)
        loc, scale = (value.flatten(-len(q.event_shape)) for value in (loc, scale))
        return kl_with_inducing_weights(mean, covariance, gain, noise, own, loc, scale)


def inducing_case(name, make, covariance, kl_is_dense=True):
    oracle = InducingOracle(covariance)
    return Case(
        name,
        make,
        oracle.covariance,
        mean=oracle.mean,
        kl_with_inducing=None if kl_is_dense else oracle.kl,
        shared_covariance=oracle.shared_covariance,
        serves_groups=False,
        has_forward_mode=not kl_is_dense,
    )


CASES = [
    Case(
        "mean field",
        make_mean_field,
        lambda q: mean_field_covariance(q.scale, len(q.event_shape)),
        event_shapes=(VECTOR, MATRIX, CONVOLUTION),
    ),
    Case(
        "mean field by logarithms",
        make_log_scale,
        lambda q: mean_field_covariance(q.scale, len(q.event_shape)),
        event_shapes=(VECTOR, MATRIX, CONVOLUTION),
    ),
    *(
        Case(
            f"{rank}-tied",
            make_k_tied(rank),
            lambda q: k_tied_covariance(q.row_scale, q.column_scale),
        )
        for rank in (1, 2, 3)
    ),
    Case(
        "matrix normal",
        make_matrix_normal,
        lambda q: matrix_normal_covariance(q.scale_tril_row, q.scale_tril_column),
        serves_groups=False,
    ),
    Case(
        "rowwise",
        make_rowwise,
        lambda q: rowwise_covariance(q.scale_tril),
        event_shapes=(VECTOR, MATRIX, CONVOLUTION),
    ),
    *(
        Case(
            f"low rank {rank}{', isotropic' if isotropic else ''}",
            make_low_rank(rank, isotropic),
            lambda q: low_rank_covariance(q.factors, q.scale, 0.8, len(q.event_shape)),
            event_shapes=(VECTOR, MATRIX, CONVOLUTION),
            shared_covariance=lambda q: low_rank_covariance(
                q.factors, torch.zeros(()), 0.8, len(q.event_shape)
            ),
        )
        for rank, isotropic in ((1, True), (2, False), (3, True))
    ),
    inducing_case("given inducing weights", make_conditional, no_covariance),
    *(
        inducing_case(
            f"inducing weights, {name}{', a bias' if bias_scale else ''}",
            make_inducing(make_posterior, bias_scale),
            covariance,
            kl_is_dense=False,
        )
        for name, make_posterior, covariance, bias_scale in (
            ("diagonal", make_mean_field, lambda q: mean_field_covariance(q.scale, 2), False),
            ("diagonal", make_mean_field, lambda q: mean_field_covariance(q.scale, 2), True),
            (
                "matrix normal",
                make_matrix_normal,
                lambda q: matrix_normal_covariance(q.scale_tril_row, q.scale_tril_column),
                True,
            ),
            ("full", make_full, lambda q: full_covariance(q.scale_tril), False),
        )
    ),
    Case(
        "full",
        make_full,
        lambda q: full_covariance(q.scale_tril),
        event_shapes=(VECTOR, MATRIX, CONVOLUTION),
        has_convolution_image=False,
    ),
]

CONVOLUTION_CASES = [case for case in CASES if case.has_convolution_image]
