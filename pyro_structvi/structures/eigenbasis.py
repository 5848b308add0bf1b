"""Normals with independent elements in orthogonal bases of rows and columns."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_structvi._checks import Count, checked
from pyro_structvi.linalg.matrices import at_least_single, floored_sqrt, identity_like
from pyro_structvi.maps.calls import Arrangement
from pyro_structvi.maps.linear_map import LinearMap
from pyro_structvi.sites.family import GuideOptions, MatrixFamily
from pyro_structvi.sites.latent_site import LatentSite
from pyro_structvi.sites.parameterization import cholesky_factor, unit_of_row
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.weights.arguments import Argument, orthogonal
from pyro_structvi.weights.outputs import MixedOutputs
from pyro_structvi.weights.weight_distribution import GaussianWeight, Way


class EigenbasisNormal(GaussianWeight):
    r"""A normal with independent elements in orthogonal bases of rows and columns.

    .. math:: W = M + U (S \circ E) V^\top, \qquad
        \operatorname{Cov}(\operatorname{vec}(W)) = (U \otimes V) \operatorname{diag}(S^2)
        (U \otimes V)^\top,

    with independent standard normals in ``E (out, in)`` and ``vec`` row by row. Identity bases give
    mean field, and scales of rank 1 the matrix normal. A posterior with the Hessian
    :math:`A \otimes B` of a likelihood and an isotropic prior is of this form. The image under ``x`` is
    :math:`N(M x, U \operatorname{diag}(S^2 (V^\top x)^2) U^\top)`.

    Args:
        loc: Means ``M``, ``(*batch, out, *rest)``.
        scale: Standard deviations ``S`` in the bases, ``(*batch, out, in)``, positive.
        row_basis: The orthogonal matrix ``U``, ``(*batch, out, out)``, with the basis in its columns.
        column_basis: The orthogonal matrix ``V``, ``(*batch, in, in)``, likewise.
        validate_args: Whether to check arguments and values; Pyro's setting when None.

    Raises:
        ValueError: If shapes do not fit each other, a scale is not positive, or a basis is not
            orthogonal.

    Example:
        >>> basis = torch.tensor([[0.6, -0.8], [0.8, 0.6]])
        >>> scale = torch.tensor([[2.0, 1.0], [1.0, 1.0]])
        >>> q = EigenbasisNormal(torch.zeros(2, 2), scale, torch.eye(2), basis)
        >>> q.variance
        tensor([[2.0800, 2.9200],
                [1.0000, 1.0000]])
        >>> q.image(basis[:, 0]).variance
        tensor([4., 1.])

    References:
        George, Laurent, Bouthillier, Ballas and Vincent (2018), "Fast approximate natural gradient
        descent in a Kronecker-factored eigenbasis"; Vyas et al. (2025), "SOAP: improving and stabilizing
        Shampoo using Adam".
    """

    scale: Annotated[Tensor, Argument("out, in", constraints.positive)]
    row_basis: Annotated[Tensor, Argument("out, out", orthogonal)]
    column_basis: Annotated[Tensor, Argument("in, in", orthogonal)]

    def __init__(
        self,
        loc: Tensor,
        scale: Tensor,
        row_basis: Tensor,
        column_basis: Tensor,
        validate_args: bool | None = None,
    ) -> None:
        bases = {"row_basis": row_basis, "column_basis": column_basis}
        super().__init__({"loc": loc, "scale": scale, **bases}, validate_args=validate_args)

    @property
    def variance(self) -> Tensor:
        return self.as_weight(
            self.row_basis.square() @ self.scale.square() @ self.column_basis.square().mT
        )

    @property
    def variance_sum(self) -> Tensor:
        return self.scale.square().sum((-2, -1))

    @property
    def log_det_covariance(self) -> Tensor:
        return 2 * self.scale.log().sum((-2, -1))

    def scale_noise(self, noise: Tensor) -> Tensor:
        scaled = self.scale * self.as_matrix(noise)
        return self.as_weight(self.row_basis @ scaled @ self.column_basis.mT)

    def whiten(self, difference: Tensor) -> Tensor:
        rotated = self.row_basis.mT @ self.as_matrix(difference) @ self.column_basis
        return self.as_weight(rotated / self.scale)

    def ways_to_apply(self, linear_map: LinearMap, x: Tensor) -> tuple[Way, ...]:
        # Groups have different patches, and the row basis mixes their outputs.
        return ("outputs", "weight") if linear_map.groups == 1 else ("weight",)

    def spread(self, moment: Tensor) -> Tensor:
        rotated = self.column_basis.mT @ moment @ self.column_basis
        diagonal = rotated.diagonal(dim1=-2, dim2=-1) @ self.scale.square().mT
        return (self.row_basis * diagonal.unsqueeze(-2)) @ self.row_basis.mT

    def image_around(self, mean: Tensor, linear_map: LinearMap, x: Tensor) -> MixedOutputs:
        """Return normals that are correlated over channels, and independent over positions."""
        rotated = linear_map.bank(x, self.column_basis.mT).to(self.loc.dtype)
        variance = linear_map.mix(rotated.square(), self.scale.square())
        scales = floored_sqrt(variance).movedim(linear_map.channel_dim, -1)
        return MixedOutputs(linear_map, mean, scales, self.row_basis)

    @checked
    def rearranged(self, arrangement: Arrangement) -> "EigenbasisNormal | None":
        if not arrangement.is_transpose:
            return None
        bases = self.column_basis, self.row_basis
        return EigenbasisNormal(arrangement(self.loc), self.scale.mT, *bases, validate_args=False)


@dataclass(frozen=True)
class Eigenbasis(MatrixFamily):
    """Normals with independent elements in orthogonal bases of a layer's outputs and inputs.

    Parameters are ``loc``, ``log_scale (out, in)``, and the angles of both bases, ``row_angles`` and
    ``column_angles``. A basis is block diagonal with blocks of at most ``block_size``, each of them
    the Cayley transform :math:`(I + A)^{-1} (I - A)` of the skew-symmetric matrix A with half of its
    b (b - 1) / 2 angles below the diagonal.

    It contains mean field, and the matrix normal if a block covers each side.

    Args:
        block_size: The largest size of a block, at least 1; blocks of 1 rotate nothing.
            The cost of a step has a term ``(out + in) * block_size ** 2``.
        join_bias: Whether a layer's bias is a further column of its weight, as by default.

    Example:
        >>> from pyro_structvi import Classifier, StructuredGuide, bayesianize
        >>> model = Classifier(bayesianize(torch.nn.Linear(4, 3), prior=1.0), num_data=10)
        >>> guide = StructuredGuide(model, {"*.weight": Eigenbasis()})
        >>> sum(parameter.numel() for parameter in guide.parameters())
        43

    References:
        Cayley transform: Helfrich, Willmott and Ye (2018), "Orthogonal recurrent neural networks with
        scaled Cayley transform".
    """

    delayed: ClassVar[tuple[str, ...]] = ("row_angles", "column_angles")
    block_size: Count = 64

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        """Start with identity bases, and ``scale`` times exp(N(0, 0.1^2)) noise."""
        out, size = loc.shape[0], loc[0].numel()
        return {
            "loc": loc.clone(),
            # Equal scales would have no gradient with respect to the bases.
            "log_scale": math.log(scale) + 0.1 * loc.new_empty(out, size).normal_(),
            "row_angles": loc.new_zeros(num_angles(out, self.block_size)),
            "column_angles": loc.new_zeros(num_angles(size, self.block_size)),
        }

    def distribution(self, site: LatentSite, **parameters: Tensor) -> EigenbasisNormal:
        scale = parameters["log_scale"].exp()
        rows, columns = (
            block_rotation(parameters[name], size, self.block_size)
            for name, size in zip(self.delayed, scale.shape, strict=True)
        )
        return EigenbasisNormal(parameters["loc"], scale, rows, columns, validate_args=False)

    def unit(self, site: LatentSite, name: str, value: Tensor) -> float:
        """Return the unit of steps; angles have the unit of a row of as many entries."""
        if name not in self.delayed:
            return super().unit(site, name, value)
        out, size = site.shape[0], site.shape[1:].numel()
        length = min(self.block_size, out if name == "row_angles" else size)
        return unit_of_row(length)


class EigenbasisGuide(StructuredGuide):
    """Independent normals in orthogonal bases at every weight, mean field at vectors.

    It contains mean field, and the matrix normal of layers with at most ``block_size`` inputs and
    outputs.

    Args:
        model: A ``PyroModule`` or any callable with latent sites.
        block_size: The largest size of a block, as for :class:`pyro_structvi.families.Eigenbasis`.
        join_bias: Whether a layer's bias is a further column of its weight, as by default.
        **options: ``init_scale``, ``init_loc_fn``, ``local_reparam``; see :class:`StructuredGuide`.

    Example:
        >>> from pyro_structvi import Classifier, bayesianize
        >>> net = torch.nn.Linear(400, 400, bias=False)
        >>> model = Classifier(bayesianize(net, prior=0.3), num_data=100)
        >>> sum(parameter.numel() for parameter in EigenbasisGuide(model).parameters())
        344432
    """

    def __init__(
        self,
        model: Callable[..., Any],
        block_size: int = 64,
        *,
        join_bias: bool = True,
        **options: Unpack[GuideOptions],
    ) -> None:
        super().__init__(model, {"*": Eigenbasis(block_size, join_bias=join_bias)}, **options)


def num_angles(size: int, block_size: int) -> int:
    """Return the number of angles of :func:`block_rotation`."""
    whole, rest = divmod(size, block_size)
    return (whole * block_size * (block_size - 1) + rest * (rest - 1)) // 2


def block_rotation(angles: Tensor, size: int, block_size: int) -> Tensor:
    """Return the block diagonal of Cayley transforms of ``angles (num_angles(size, block_size),)``."""
    whole, rest = divmod(size, block_size)
    split = whole * num_angles(block_size, block_size)
    blocks: list[Tensor] = []
    if whole:
        blocks += cayley(angles[:split].view(whole, split // whole), block_size)
    if rest:
        blocks.append(cayley(angles[split:], rest))
    return torch.block_diag(*blocks)


def cayley(angles: Tensor, size: int) -> Tensor:
    """Return rotations ``(*batch, n, n)`` from angles ``(*batch, n (n - 1) / 2)``."""
    lower = at_least_single(cholesky_factor(angles.new_zeros(*angles.shape[:-1], size), angles / 2))
    skew, identity = lower - lower.mT, identity_like(lower)  # without the diagonal
    rotation: Tensor = torch.linalg.solve(identity + skew, identity - skew)
    return rotation.to(angles.dtype)
