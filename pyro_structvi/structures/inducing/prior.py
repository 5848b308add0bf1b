"""The joint prior of a weight and its inducing weights."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from pyro_structvi._checks import (
    check_broadcastable,
    check_finite,
    check_positive,
    check_same_kind,
    check_shape,
    checked,
    shape_text,
    validates,
)
from pyro_structvi.linalg.factorizations import OrthonormalRows
from pyro_structvi.linalg.matrices import identity_like, standard_normal
from pyro_structvi.linalg.precision import autocast_off, grad_cached_property
from pyro_structvi.structures.mean_field import MeanFieldNormal
from pyro_structvi.weights.arguments import as_expanded


@dataclass(frozen=True)
class InducingSide:
    r"""What the rows, or the columns, of a joint prior are factored into.

    With :math:`\Psi = Z Z^\top + D^2 = L L^\top`:

    Attributes:
        factor: :math:`Z`, ``(*batch, M, size)``.
        diagonal: The diagonal of :math:`D`, ``(*batch, M)``.
        basis: :math:`B = L^{-1} Z`, ``(*batch, M, size)``; whitened inducing weights meet the weight
            through it.
        remainder: :math:`H = L^{-1} D`, ``(*batch, M, M)``, so that :math:`B B^\top + H H^\top = I`.
        jitter: What was added to the diagonal of :math:`\Psi`, ``(*batch,)``.
    """

    factor: Tensor
    diagonal: Tensor
    basis: Tensor
    remainder: Tensor
    jitter: Tensor
    _with_grad: bool = field(default_factory=torch.is_grad_enabled, init=False, repr=False)

    @classmethod
    def of(cls, factor: Tensor, diagonal: Tensor) -> Self:
        """Factor ``Z (*batch, M, size)`` and the diagonal ``D (*batch, M)``."""
        with autocast_off(factor):
            return cls(factor, diagonal, *OrthonormalRows.apply(factor, diagonal))

    @grad_cached_property
    def scale_tril(self) -> Tensor:
        """The factor :math:`L`, ``(*batch, M, M)``, in double precision."""
        factor, square = self.factor.double(), self.diagonal.double().square()
        psi = factor @ factor.mT + torch.diag_embed(square + self.jitter.unsqueeze(-1))
        tril: Tensor = torch.linalg.cholesky_ex(psi).L
        return tril

    @grad_cached_property
    def gram(self) -> Tensor:
        """The matrix ``B B'``, ``(*batch, M, M)``."""
        return identity_like(self.complement) - self.complement

    @grad_cached_property
    def complement(self) -> Tensor:
        """The matrix ``I - B B' = H H'``, ``(*batch, M, M)``."""
        with autocast_off(self.remainder):
            return self.remainder @ self.remainder.mT


class InducingPrior:
    """The joint prior of W and U: its arguments, its factors, W alone, and U whitened.

    :class:`AugmentedMatrixNormal` documents the arguments, and adds the distributions of U and of W
    given U. Factors are computed at their first use, once for the life of the object.
    """

    @checked
    def __init__(
        self,
        row_factor: Tensor,
        column_factor: Tensor,
        row_diagonal: Tensor,
        column_diagonal: Tensor,
        scale: Tensor | float,
        bias_scale: Tensor | float | None = None,
        *,
        event_shape: Sequence[int] | None = None,
        validate_args: bool | None = None,
    ) -> None:
        for name, factor, side in (("row", row_factor, "out"), ("column", column_factor, "in")):
            if factor.dim() < 2:
                raise ValueError(
                    f"`{name}_factor` must have shape (*batch, M_{side}, {side}), but got "
                    f"{shape_text(factor.shape)}."
                )
        self.row_factor, self.column_factor = row_factor, column_factor
        self.row_diagonal, self.column_diagonal = row_diagonal, column_diagonal
        self.scale = self._tensor(scale)
        self.bias_scale = None if bias_scale is None else self._tensor(bias_scale)
        out, size = row_factor.shape[-1], column_factor.shape[-1]
        self.batch_shape = row_factor.shape[:-2]
        self.event_shape = torch.Size((out, size) if event_shape is None else event_shape)
        self.matrix_shape = torch.Size((out, size))
        self.inducing_shape = torch.Size([row_factor.shape[-2], column_factor.shape[-2]])
        self._with_grad = torch.is_grad_enabled()
        if validates(validate_args):
            self._check()

    def _tensor(self, value: Tensor | float) -> Tensor:
        return value if isinstance(value, Tensor) else self.row_factor.new_tensor(value)

    def _check(self) -> None:
        out, size = self.matrix_shape
        shapes = {
            "column_factor": ((*self.inducing_shape[1:], size), "(*batch, M_in, in)"),
            "row_diagonal": (self.inducing_shape[:1], "(*batch, M_out)"),
            "column_diagonal": (self.inducing_shape[1:], "(*batch, M_in)"),
        }
        for name, (expected, meaning) in shapes.items():
            check_shape(
                name,
                getattr(self, name),
                (*self.batch_shape, *expected),
                meaning,
                by="row_factor and column_factor",
            )
        scales = [name for name in self.arguments if name.endswith("scale")]
        for name in scales:
            check_broadcastable(name, getattr(self, name), self.batch_shape, "(*batch,)")
        if self.event_shape[:1] != (out,) or self.event_shape[1:].numel() != size:
            raise ValueError(
                f"`event_shape` must be (out, *rest) with out = {out} and prod(rest) = {size}, but "
                f"got {shape_text(self.event_shape)}, beside `row_factor` and `column_factor`."
            )
        for name, value in self.arguments.items():
            check_same_kind(name, value, "row_factor", self.row_factor)
        for name in ("row_factor", "column_factor"):
            check_finite(name, getattr(self, name))
        for name in ("row_diagonal", "column_diagonal", *scales):
            check_positive(name, getattr(self, name))

    @property
    def arguments(self) -> dict[str, Tensor]:
        """The tensors that this was made of, by name."""
        names = ["row_factor", "column_factor", "row_diagonal", "column_diagonal", "scale"]
        if self.bias_scale is not None:
            names.append("bias_scale")
        return {name: getattr(self, name) for name in names}

    def expand(self, batch_shape: torch.Size) -> Self:
        """Return this joint prior with a larger batch shape, sharing memory."""
        batch_shape = as_expanded(batch_shape, self.batch_shape)
        expanded = {
            name: value.expand(batch_shape + value.shape[len(self.batch_shape) :])
            for name, value in self.arguments.items()
        }
        return type(self)(**expanded, event_shape=self.event_shape, validate_args=False)

    # ---- factors ---------------------------------------------------------------------------------

    @grad_cached_property
    def rows(self) -> InducingSide:
        """The factored rows."""
        return InducingSide.of(self.row_factor, self.row_diagonal)

    @grad_cached_property
    def columns(self) -> InducingSide:
        """The factored columns."""
        return InducingSide.of(self.column_factor, self.column_diagonal)

    @property
    def jitter(self) -> tuple[Tensor, Tensor]:
        """What was added to the diagonals of the rows' and the columns' matrix to factor them."""
        return self.rows.jitter, self.columns.jitter

    @property
    def column_scale(self) -> Tensor:
        """The prior's standard deviation of W, ``(*batch, 1, 1)``, or ``(*batch, 1, in)`` by column."""
        scale = self.scale[..., None, None]
        if self.bias_scale is None:
            return scale
        columns = scale.expand(*scale.shape[:-1], self.matrix_shape[1] - 1)
        return torch.cat([columns, self.bias_scale[..., None, None]], -1)

    # ---- W alone, and U whitened -----------------------------------------------------------------

    def weight_prior(self) -> MeanFieldNormal:
        """Return the distribution of W alone: independent normals."""
        scale = self.column_scale.expand(*self.batch_shape, *self.matrix_shape)
        scale = scale.reshape(*self.batch_shape, *self.event_shape)
        loc = torch.zeros_like(scale)
        return MeanFieldNormal(loc, scale, len(self.event_shape), validate_args=False)

    def whiten(self, u: Tensor) -> Tensor:
        """Return whitened inducing weights for ``u (*sample, *batch, M_out, M_in)``."""
        half = torch.linalg.solve_triangular(self.rows.scale_tril, u.double(), upper=False)
        whole = torch.linalg.solve_triangular(self.columns.scale_tril, half.mT, upper=False)
        whitened: Tensor = whole.mT.to(u.dtype)
        return whitened

    def draw_standard(self, sample_shape: torch.Size) -> tuple[Tensor, Tensor]:
        r"""Draw W for a prior scale of 1, as a matrix, and the whitened U that belongs to it.

        :math:`E_1` is the weight; its inducing weights are :math:`B_r (E_1 B_c^\top + E_3 H_c^\top) +
        H_r E_2`, so that no factor of :math:`Z Z^\top` is needed (the paper's Eq. 12 has two).
        """
        shape, (inducing_out, inducing_in) = (*sample_shape, *self.batch_shape), self.inducing_shape
        weight, for_columns, for_rows = (
            standard_normal((*shape, *size), self.row_factor)
            for size in (
                self.matrix_shape,
                (self.matrix_shape[0], inducing_in),
                (inducing_out, inducing_in),
            )
        )
        with autocast_off(weight):
            inner = weight @ self.columns.basis.mT + for_columns @ self.columns.remainder.mT
            return weight, self.rows.basis @ inner + self.rows.remainder @ for_rows


def kronecker(rows: Tensor, columns: Tensor) -> Tensor:
    """Return the Kronecker product of matrices, ``(*batch, A C, B D)``."""
    product = torch.einsum("...ab,...cd->...acbd", rows, columns)
    return product.flatten(-4, -3).flatten(-2)
