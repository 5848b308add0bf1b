"""Dense covariances and divergences by their definitions, independent of the distributions' classes.

A weight ``W`` of shape ``(*batch, *event)`` with ``event = (out, *rest)`` is a vector ``vec(W)``, row
by row, of length ``D = prod(event)``. Covariances are dense, ``(*batch, D, D)``: meant for small sizes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import MultivariateNormal, constraints, kl_divergence

from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.structures.full_covariance import FullNormal
from pyro_structvi.structures.k_tied import KTiedNormal
from pyro_structvi.structures.low_rank import LowRankNormal
from pyro_structvi.structures.matrix_normal import MatrixNormal
from pyro_structvi.structures.mean_field import LogScaleNormal, MeanFieldNormal
from pyro_structvi.structures.rowwise import RowwiseNormal
from pyro_structvi.weights.weight_distribution import WeightDistribution


def zero_covariance(q: torch.distributions.Distribution) -> Tensor:
    """Return zeros ``(D, D)``."""
    size = q.event_shape.numel()
    return torch.zeros(size, size)


def mean_field_covariance(scale: Tensor, event_dim: int) -> Tensor:
    """Return ``diag(sigma_1^2, ..., sigma_D^2)``."""
    return torch.diag_embed(scale.flatten(-event_dim).square())


def k_tied_covariance(row_scale: Tensor, column_scale: Tensor) -> Tensor:
    """Return ``diag(sigma_ij^2)`` with ``sigma_ij = sum_a R_ia C_ja``, i before j."""
    stddev = (row_scale.unsqueeze(-2) * column_scale.unsqueeze(-3)).sum(-1)
    return torch.diag_embed(stddev.flatten(-2).square())


def low_rank_covariance(factors: Tensor, scale: Tensor, alpha: float, event_dim: int) -> Tensor:
    """Return ``alpha sum_k v_k v_k' + diag(sigma_1^2, ..., sigma_D^2)``, one term after another."""
    vectors = factors.flatten(-event_dim).unbind(-2)
    outer = torch.stack([vector.unsqueeze(-1) * vector.unsqueeze(-2) for vector in vectors]).sum(0)
    diagonal = scale.expand(factors.select(-event_dim - 1, 0).shape)
    return alpha * outer + mean_field_covariance(diagonal, event_dim)


def full_covariance(scale_tril: Tensor) -> Tensor:
    """Return ``S_ij = sum_k L_ik L_jk`` with ``L_ik = 0`` for k > i."""
    index = torch.arange(scale_tril.shape[-1])
    lower = torch.where(index <= index.unsqueeze(-1), scale_tril, 0.0)
    return (lower.unsqueeze(-2) * lower.unsqueeze(-3)).sum(-1)


def rowwise_covariance(scale_tril: Tensor) -> Tensor:
    """Return the covariance with the blocks ``L_i L_i'`` of the rows i on its diagonal."""
    out, size = scale_tril.shape[-3:-1]
    blocks = enumerate(full_covariance(scale_tril).unbind(-3))
    bands = [F.pad(block, (i * size, (out - 1 - i) * size)) for i, block in blocks]
    return torch.cat(bands, -2)


def matrix_normal_covariance(scale_tril_row: Tensor, scale_tril_column: Tensor) -> Tensor:
    """Return ``Cov(W_ij, W_kl) = A_ik B_jl`` with the covariances A and B of the two factors."""
    rows, columns = full_covariance(scale_tril_row), full_covariance(scale_tril_column)
    product = rows[..., :, None, :, None] * columns[..., None, :, None, :]
    return product.flatten(-4, -3).flatten(-2)


def dense_normal(loc: Tensor, covariance: Tensor, event_dim: int) -> MultivariateNormal:
    """Return the multivariate normal of ``vec(W)``."""
    return MultivariateNormal(loc.flatten(-event_dim), covariance)


def kl_to_independent_normals(
    loc: Tensor, covariance: Tensor, prior_loc: Tensor, prior_scale: Tensor, event_dim: int
) -> Tensor:
    """Return the KL of two multivariate normals; prior arguments broadcast to ``loc``."""
    prior_covariance = mean_field_covariance(prior_scale.expand(loc.shape), event_dim)
    prior = dense_normal(prior_loc.expand(loc.shape), prior_covariance, event_dim)
    return kl_divergence(dense_normal(loc, covariance, event_dim), prior)


# ---- inducing weights ----------------------------------------------------------------------------


def augmented_covariance(
    row_factor: Tensor,
    column_factor: Tensor,
    row_diagonal: Tensor,
    column_diagonal: Tensor,
    column_scale: Tensor,
) -> Tensor:
    """Return the covariance of ``vec(W)`` followed by ``vec(U)``, from the matrix normal they are in.

    In that matrix normal ``[[W, U_c], [U_r, U]]`` rows have the covariance ``[[I, Z_r'], [Z_r, Z_r Z_r'
    + D_r^2]]``; columns likewise, with that part scaled which belongs to ``W``.
    """
    rows = _augmented_side(row_factor, row_diagonal, torch.ones_like(row_factor[..., 0, :]))
    columns = _augmented_side(column_factor, column_diagonal, column_scale)
    product = rows[..., :, None, :, None] * columns[..., None, :, None, :]
    out, size = row_factor.shape[-1], column_factor.shape[-1]
    index = torch.arange(rows.shape[-1] * columns.shape[-1]).reshape(rows.shape[-1], -1)
    kept = torch.cat([index[:out, :size].flatten(), index[out:, size:].flatten()])
    return product.flatten(-4, -3).flatten(-2)[..., kept.unsqueeze(-1), kept]


def _augmented_side(factor: Tensor, diagonal: Tensor, scale: Tensor) -> Tensor:
    inducing = factor @ factor.mT + torch.diag_embed(diagonal.square())
    return _blocks(torch.diag_embed(scale.square()), (factor * scale.unsqueeze(-2)).mT, inducing)


def _blocks(first: Tensor, cross: Tensor, second: Tensor) -> Tensor:
    return torch.cat([torch.cat([first, cross], -1), torch.cat([cross.mT, second], -1)], -2)


def conditional_moments(covariance: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return ``G`` and ``S`` such that ``vec(W)`` given whitened ``u`` is ``N(G u, S)``.

    The covariance is over ``vec(W)``, of length ``size``, followed by ``vec(U)``; with the Cholesky
    factor L of the covariance of U, ``u = L^-1 vec(U)``.
    """
    cross, inducing = covariance[..., :size, size:], covariance[..., size:, size:]
    solved = torch.linalg.solve(inducing, cross.mT)
    gain = solved.mT @ torch.linalg.cholesky(inducing)
    return gain, covariance[..., :size, :size] - cross @ solved


def kl_with_inducing_weights(
    loc: Tensor,
    covariance: Tensor,
    gain: Tensor,
    noise: Tensor,
    own_scale: Tensor,
    prior_loc: Tensor,
    prior_scale: Tensor,
) -> Tensor:
    """Return the KL over ``vec(W)`` and whitened inducing weights u, as one of two normals.

    In the posterior, u is ``N(loc, covariance)``, and ``vec(W)`` given u is ``N(gain u, noise)``. In the
    prior, ``vec(W)`` is ``N(prior_loc, diag(prior_scale^2))``, and u given it as where ``vec(W)`` is
    ``N(0, diag(own_scale^2))``, u is standard normal, and their covariance is ``gain``.
    """
    seen = gain @ covariance
    mean = torch.cat([(gain @ loc.unsqueeze(-1)).squeeze(-1), loc], -1)
    posterior = MultivariateNormal(mean, _blocks(seen @ gain.mT + noise, seen, covariance))
    backward = (gain / own_scale.square().unsqueeze(-1)).mT
    spread = torch.diag_embed(prior_scale.square()) @ backward.mT
    inducing = backward @ spread + torch.eye(loc.shape[-1]) - backward @ gain
    prior_mean = torch.cat([prior_loc, (backward @ prior_loc.unsqueeze(-1)).squeeze(-1)], -1)
    joint = _blocks(torch.diag_embed(prior_scale.square()), spread, inducing)
    return kl_divergence(posterior, MultivariateNormal(prior_mean, joint))


Shape = tuple[int, ...]
Make = Callable[[Shape, Shape, torch.dtype], WeightDistribution]


def positive(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return positive numbers around 1/2."""
    return torch.exp(0.3 * torch.randn(shape, dtype=dtype) - 0.7)


def cholesky_factor(batch_shape: Shape, size: int, dtype: torch.dtype) -> Tensor:
    """Return lower triangular matrices ``(*batch_shape, size, size)`` with positive diagonals."""
    below = torch.randn(*batch_shape, size, size, dtype=dtype).tril(-1) / size**0.5
    factor: Tensor = below + torch.diag_embed(positive(*batch_shape, size, dtype=dtype))
    return factor


def random_weight(distribution: Any, **sizes: int) -> Make:
    """Return a function of batch shape, event shape and dtype to random distributions of a class.

    Args:
        distribution: A class that declares its arguments by annotations with ``Argument``.
        **sizes: The sizes of further letters in their shapes.

    Example:
        >>> make = random_weight(KTiedNormal, k=2)
        >>> make((5,), (4, 3), torch.float32).row_scale.shape
        torch.Size([5, 4, 2])
    """

    def make(batch_shape: Shape, event_shape: Shape, dtype: torch.dtype) -> WeightDistribution:
        out, size = event_shape[0], torch.Size(event_shape[1:]).numel()
        known = {"out": out, "in": size, "D": out * size, **sizes}

        def length(letter: str) -> int:
            whole, _, part = letter.partition(" / ")
            return known[whole] // (known[part] if part else 1)

        arguments = [torch.randn(*batch_shape, *event_shape, dtype=dtype)]
        for argument in distribution._arguments.values():
            shape = (*batch_shape, *map(length, argument.letters))
            if argument.constraint is constraints.lower_cholesky:
                arguments.append(cholesky_factor(shape[:-2], shape[-1], dtype))
            elif argument.constraint is constraints.positive:
                arguments.append(positive(*shape, dtype=dtype))
            else:
                arguments.append(torch.randn(shape, dtype=dtype))
        q: WeightDistribution = distribution(*arguments)
        return q

    return make


def make_mean_field(batch_shape: Shape, event_shape: Shape, dtype: torch.dtype) -> MeanFieldNormal:
    """Return independent normals."""
    shape = (*batch_shape, *event_shape)
    loc = torch.randn(shape, dtype=dtype)
    return MeanFieldNormal(loc, positive(*shape, dtype=dtype), event_dim=len(event_shape))


def make_log_scale(batch_shape: Shape, event_shape: Shape, dtype: torch.dtype) -> LogScaleNormal:
    """Return independent normals given by the logarithms of their scales."""
    q = make_mean_field(batch_shape, event_shape, dtype)
    return LogScaleNormal(q.loc, q.scale.log(), len(event_shape))


def make_k_tied(rank: int) -> Make:
    """Return what makes k-tied normals of a rank."""
    return random_weight(KTiedNormal, k=rank)


def make_low_rank(rank: int, isotropic: bool = False) -> Make:
    """Return what makes low-rank normals."""

    def make(batch_shape: Shape, event_shape: Shape, dtype: torch.dtype) -> LowRankNormal:
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
make_rowwise = random_weight(RowwiseNormal)


Place = Literal["tests", "demo", "benchmarks"]

VECTOR, MATRIX, CONVOLUTION = (4,), (4, 3), (4, 3, 2, 2)
TESTS: tuple[Place, ...] = ("tests",)
DEMO: tuple[Place, ...] = ("demo",)
BENCHMARKS: tuple[Place, ...] = ("benchmarks",)
EVERYWHERE = TESTS + DEMO + BENCHMARKS


@dataclass(frozen=True)
class GuideVariant:
    """A guide with its options; calling it with a model, and further options, makes the guide.

    Args:
        name: The guide's name in tests and tables.
        guide: The guide's class.
        num_parameters: The number of variational parameters of a layer ``(out, in)`` without a bias.
        options: Its options.
        used_in: The places that run it.
    """

    name: str
    guide: Callable[..., StructuredGuide]
    num_parameters: Callable[[int, int], int]
    options: Mapping[str, Any] = field(default_factory=dict)
    used_in: tuple[Place, ...] = EVERYWHERE

    def __call__(self, model: Callable[..., Any], **options: Any) -> StructuredGuide:
        """Make the guide of a model."""
        return self.guide(model, **{**self.options, **options})


@dataclass(frozen=True)
class Structure:
    """A distribution over a weight, with its moments by definition and the guides that use it.

    Args:
        name: Its name in tests.
        make: A function of ``batch_shape, event_shape, dtype`` to a distribution with random
            arguments, all of them of that dtype.
        covariance: The dense covariance ``(*batch_shape, D, D)`` of row-major ``vec(W)`` from the
            arguments by definition; by default the property of the class.
        mean: The mean ``(*batch_shape, *event_shape)``, likewise.
        kl_with_inducing: For a KL that counts inducing weights too, an upper bound of the one over
            the weight: its dense value for a prior's ``loc`` and ``scale``, of the mean's shape.
        event_shapes: The shapes of weight it serves.
        shared_covariance: The part of the covariance whose noise all positions of an example share,
            ``(D, D)``; the rest of the noise is drawn independently at every position.
        has_convolution_image: Whether outputs of a convolution are drawn in the weight's place.
        serves_groups: Whether that holds for convolutions with groups too.
        has_forward_mode: Whether its KL has derivatives in forward mode.
        guides: The guides that put it on a model.
    """

    name: str
    make: Make
    covariance: Callable[[Any], Tensor] = lambda q: q.covariance_matrix
    mean: Callable[[Any], Tensor] = lambda q: q.loc
    kl_with_inducing: Callable[[Any, Tensor, Tensor], Tensor] | None = None
    event_shapes: tuple[Shape, ...] = (MATRIX, CONVOLUTION)
    shared_covariance: Callable[[Any], Tensor] = zero_covariance
    has_convolution_image: bool = True
    serves_groups: bool = True
    has_forward_mode: bool = True
    guides: tuple[GuideVariant, ...] = ()

    def kl(self, q: Any, loc: Tensor, scale: Tensor) -> Tensor:
        """Return the dense KL to independent normals, whose arguments broadcast to the mean."""
        mean = self.mean(q)
        if self.kl_with_inducing is not None:
            return self.kl_with_inducing(q, loc.expand(mean.shape), scale.expand(mean.shape))
        return kl_to_independent_normals(mean, self.covariance(q), loc, scale, len(q.event_shape))
