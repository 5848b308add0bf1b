"""The structures with random arguments and dense moments by definition."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pyro_structvi import Regressor, bayesianize
from pyro_structvi.distributions import (
    AugmentedMatrixNormal,
    ConditionalNormal,
    EigenbasisNormal,
    FullNormal,
    GaussianWeight,
    InducingNormal,
    KTiedNormal,
    LogScaleNormal,
    LowRankNormal,
    MatrixNormal,
    MeanFieldNormal,
    RowwiseNormal,
)
from pyro_structvi.maps import ConvolutionMap
from pyro_structvi.testing import guides_for, random_weight
from pyro_structvi.testing.distributions import cholesky_factor, positive
from tests import dense_oracles as dense
from tests.unit_noise import unit_draws

__all__ = ["cholesky_factor", "positive"]

VECTOR, MATRIX, CONVOLUTION, INDUCING = (4,), (4, 3), (4, 3, 2, 2), (3, 2)

# ---- random distributions ------------------------------------------------------------------------


def make_mean_field(batch_shape, event_shape, dtype):
    shape = (*batch_shape, *event_shape)
    loc = torch.randn(shape, dtype=dtype)
    return MeanFieldNormal(loc, positive(*shape, dtype=dtype), event_dim=len(event_shape))


def make_log_scale(batch_shape, event_shape, dtype):
    q = make_mean_field(batch_shape, event_shape, dtype)
    return LogScaleNormal(q.loc, q.scale.log(), len(event_shape))


def make_k_tied(rank):
    return random_weight(KTiedNormal, k=rank)


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


make_full = random_weight(FullNormal)
make_matrix_normal = random_weight(MatrixNormal)
make_eigenbasis = random_weight(EigenbasisNormal)
make_rowwise = random_weight(RowwiseNormal)


def make_joint(batch_shape, event_shape, dtype, bias_scale=False, inducing_shape=INDUCING):
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
        return InducingNormal.from_inducing(joint, inducing, positive(*batch_shape, dtype=dtype))

    return make


# ---- inducing weights ----------------------------------------------------------------------------


def prior_scale(joint):
    """Return the standard deviation of each column, ``(*batch_shape, in)``."""
    columns = [joint.scale for _ in range(joint.column_factor.shape[-1])]
    if joint.bias_scale is not None:
        columns[-1] = joint.bias_scale
    return torch.stack(columns, -1)


def joint_covariance(joint):
    factors = joint.row_factor, joint.column_factor, joint.row_diagonal, joint.column_diagonal
    return dense.augmented_covariance(*factors, prior_scale(joint))


class InducingOracle:
    """The dense moments of a weight, from the covariance of its inducing weights."""

    def __init__(self, covariance):
        self._of_inducing = covariance

    def _parts(self, q):
        """Return gain and noise of the weight given u, and the moments of u."""
        gain, noise = dense.conditional_moments(joint_covariance(q.joint), q.event_shape.numel())
        noise = noise * q.conditional_scale.square()[..., None, None]
        return gain, noise, q.inducing.mean.flatten(-2), self._of_inducing(q.inducing)

    def mean(self, q):
        gain, _, mean, _ = self._parts(q)
        return (gain @ mean.unsqueeze(-1)).reshape(q.batch_shape + q.event_shape)

    def shared_covariance(self, q):
        """Return the part of the covariance that comes from the inducing weights."""
        gain, _, _, covariance = self._parts(q)
        return gain @ covariance @ gain.mT

    def covariance(self, q):
        return self.shared_covariance(q) + self._parts(q)[1]

    def kl(self, q, loc, scale):
        """Return the KL over weight and inducing weights, for a prior's ``loc`` and ``scale``."""
        gain, noise, mean, covariance = self._parts(q)
        own = prior_scale(q.joint).unsqueeze(-2)
        own = own.expand(*q.batch_shape, q.event_shape[0], own.shape[-1]).flatten(-2)
        loc, scale = (value.flatten(-len(q.event_shape)) for value in (loc, scale))
        return dense.kl_with_inducing_weights(mean, covariance, gain, noise, own, loc, scale)


# ---- cases ---------------------------------------------------------------------------------------


def no_covariance(q):
    return torch.zeros(q.event_shape.numel(), q.event_shape.numel())


@dataclass(frozen=True)
class Case:
    """A distribution over a weight with its dense moments.

    Attributes:
        make: A function of ``batch_shape, event_shape, dtype`` to a distribution with random arguments.
        covariance: The covariance ``(*batch_shape, D, D)`` of ``vec(W)``.
        mean: The mean ``(*batch_shape, *event_shape)``.
        kl_with_inducing: The upper bound of the KL that counts inducing weights too.
        serves_vectors: Whether a weight may be a vector.
        shared_covariance: The covariance of the noise that all positions of an example share.
        has_convolution_image: Whether outputs of a convolution are sampled in place of the weight.
        serves_groups: Whether this holds for convolutions with groups too.
        has_forward_mode: Whether the KL has derivatives in forward mode.
    """

    name: str
    make: Callable[..., Any]
    covariance: Callable[..., Any]
    mean: Callable[..., Any] = lambda q: q.loc
    kl_with_inducing: Callable[..., Any] | None = None
    serves_vectors: bool = True
    shared_covariance: Callable[..., Any] = no_covariance
    has_convolution_image: bool = True
    serves_groups: bool = True
    has_forward_mode: bool = True

    def kl(self, q, loc, scale):
        """Return the dense KL to independent normals, whose arguments broadcast to the mean."""
        mean = self.mean(q)
        if self.kl_with_inducing is not None:
            return self.kl_with_inducing(q, loc.expand(mean.shape), scale.expand(mean.shape))
        event_dim = len(q.event_shape)
        return dense.kl_to_independent_normals(mean, self.covariance(q), loc, scale, event_dim)


def independent(q):
    return dense.mean_field_covariance(q.scale, len(q.event_shape))


def matrix_normal(q):
    return dense.matrix_normal_covariance(q.scale_tril_row, q.scale_tril_column)


def eigenbasis(q):
    return dense.eigenbasis_covariance(q.scale, q.row_basis, q.column_basis)


def full(q):
    return dense.full_covariance(q.scale_tril)


def low_rank(q, scale=None):
    scale = q.scale if scale is None else scale
    return dense.low_rank_covariance(q.factors, scale, 0.8, len(q.event_shape))


def inducing_case(name, make, covariance, kl_is_dense=False):
    oracle = InducingOracle(covariance)
    return Case(
        name,
        make,
        oracle.covariance,
        mean=oracle.mean,
        kl_with_inducing=None if kl_is_dense else oracle.kl,
        serves_vectors=False,
        shared_covariance=oracle.shared_covariance,
        serves_groups=False,
        has_forward_mode=False,
    )


CASES = [
    Case("mean field", make_mean_field, independent),
    Case("mean field by logarithms", make_log_scale, independent),
    *(
        Case(
            f"{rank}-tied",
            make_k_tied(rank),
            lambda q: dense.k_tied_covariance(q.row_scale, q.column_scale),
        )
        for rank in (1, 2, 3)
    ),
    Case("matrix normal", make_matrix_normal, matrix_normal, serves_groups=False),
    Case("eigenbasis", make_eigenbasis, eigenbasis, serves_groups=False),
    Case("rowwise", make_rowwise, lambda q: dense.rowwise_covariance(q.scale_tril)),
    *(
        Case(
            f"low rank {rank}{', isotropic' if isotropic else ''}",
            make_low_rank(rank, isotropic),
            low_rank,
            shared_covariance=partial(low_rank, scale=torch.zeros(())),
        )
        for rank, isotropic in ((1, True), (2, False), (3, True))
    ),
    inducing_case("given inducing weights", make_conditional, no_covariance, kl_is_dense=True),
    inducing_case("inducing weights, diagonal", make_inducing(make_mean_field, False), independent),
    inducing_case(
        "inducing weights, diagonal, a bias", make_inducing(make_mean_field, True), independent
    ),
    inducing_case(
        "inducing weights, matrix normal, a bias",
        make_inducing(make_matrix_normal, True),
        matrix_normal,
    ),
    inducing_case("inducing weights, full", make_inducing(make_full, False), full),
    Case("full", make_full, full, has_convolution_image=False),
]


CONVOLUTIONS = {
    "has_convolution_image": ConvolutionMap(F.conv1d, (6, 2)),
    "serves_groups": ConvolutionMap(F.conv1d, (3, 2), groups=2),
}


def covariance_of_draws(q):
    """Return the diagonal blocks of ``A A'``, for draws ``mean + A e``."""
    size, whole = q.event_shape.numel(), unit_draws(q.rsample).covariance
    blocks = whole.unfold(0, size, size).unfold(1, size, size).diagonal()
    return blocks.movedim(-1, 0).reshape(*q.batch_shape, size, size)


def cases_of_registry():
    """Give a case to each normal structure of the registry, by its declared arguments and its draws."""
    net = bayesianize(nn.Linear(MATRIX[1], MATRIX[0], bias=False), prior=1.0)
    model, images = Regressor(net, num_data=1, noise_scale=1.0), torch.zeros(5, 6, 4)
    found = {}
    for name, make_guide in guides_for("tests").items():
        q = make_guide(model)["net.weight"]()
        if isinstance(q, GaussianWeight) and q._arguments:
            sizes = {}
            for argument_name, argument in q._arguments.items():
                shape = getattr(q, argument_name).shape
                sizes |= dict(zip(argument.letters, shape, strict=True))
            own = {k: sizes[k] for k in sizes if k.isalpha() and k not in {"out", "in", "D"}}
            flags = {
                flag: q.ways_to_apply(linear_map, images)[0] == "outputs"
                for flag, linear_map in CONVOLUTIONS.items()
            }
            make = random_weight(type(q), **own)
            found[type(q)] = Case(name, make, covariance_of_draws, serves_vectors=False, **flags)
    return found


OF_CLASSES = {type(case.make((), MATRIX, torch.float64)): case for case in CASES}
CASES += [case for kind, case in cases_of_registry().items() if kind not in OF_CLASSES]
CONVOLUTION_CASES = [case for case in CASES if case.has_convolution_image]
