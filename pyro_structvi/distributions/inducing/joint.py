"""The joint prior of a weight and its inducing weights, and what it says of one given the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributions import Distribution

from pyro_structvi._checks import (
    check_broadcastable,
    check_positive,
    check_same_kind,
    check_shape,
    shape_text,
)
from pyro_structvi.distributions.inducing.conditional import ConditionalNormal
from pyro_structvi.distributions.matrix_normal import MatrixNormal
from pyro_structvi.distributions.mean_field import MeanFieldNormal
from pyro_structvi.linalg.factorizations import OrthonormalRows
from pyro_structvi.linalg.precision import autocast_off


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

    @classmethod
    def of(cls, factor: Tensor, diagonal: Tensor) -> Self:
        """Factor ``Z (*batch, M, size)`` and the diagonal ``D (*batch, M)``."""
        with autocast_off(factor):
            return cls(factor, diagonal, *OrthonormalRows.apply(factor, diagonal))

    @cached_property
    def scale_tril(self) -> Tensor:
        """The factor :math:`L`, ``(*batch, M, M)``, in double precision."""
        factor, square = self.factor.double(), self.diagonal.double().square()
        psi = factor @ factor.mT + torch.diag_embed(square + self.jitter.unsqueeze(-1))
        tril: Tensor = torch.linalg.cholesky_ex(psi).L
        return tril

    @cached_property
    def gram(self) -> Tensor:
        """The matrix ``B B'``, ``(*batch, M, M)``."""
        identity = torch.eye(self.basis.shape[-2], dtype=self.basis.dtype, device=self.basis.device)
        return identity - self.complement

    @cached_property
    def complement(self) -> Tensor:
        """The matrix ``I - B B' = H H'``, ``(*batch, M, M)``."""
        with autocast_off(self.remainder):
            return self.remainder @ self.remainder.mT


class AugmentedMatrixNormal:
    r"""The joint prior of a weight W and inducing weights U, a normal of Khatri-Rao structure.

    .. math:: \begin{pmatrix} \operatorname{vec} W \\ \operatorname{vec} U \end{pmatrix} \sim N\left(0,
        \begin{pmatrix} \sigma^2 I & \sigma Z_r^\top \otimes Z_c^\top \\
        \sigma Z_r \otimes Z_c & \Psi_r \otimes \Psi_c \end{pmatrix} \right), \qquad
        \Psi = Z Z^\top + D^2

    with ``vec`` row by row. Whatever Z and D are, W alone has independent entries
    :math:`N(0, \sigma^2)`, so they are free parameters of a posterior. *Whitened* inducing weights are
    :math:`\tilde U =
    L_r^{-1} U L_c^{-\top}` with :math:`L = \operatorname{chol}(\Psi)`, standard normal. Then, with
    :math:`B = L^{-1} Z` and :math:`P = B^\top B`,

    .. math:: E[W \mid U] = \sigma B_r^\top \tilde U B_c, \qquad
        \operatorname{Cov}[W \mid U] = \sigma^2 (I - P_r \otimes P_c).

    The factors are computed at their first use, once for the life of the object.

    Args:
        row_factor: :math:`Z_r`, ``(*batch, M_out, out)``.
        column_factor: :math:`Z_c`, ``(*batch, M_in, in)``.
        row_diagonal: The diagonal of :math:`D_r`, ``(*batch, M_out)``, positive.
        column_diagonal: The diagonal of :math:`D_c`, ``(*batch, M_in)``, positive.
        scale: The prior's standard deviation of W, a number or ``(*batch,)``.
        bias_scale: That of the last column, where a bias stands, if it has one of its own.
        event_shape: The weight's own shape ``(out, *rest)`` where it is no matrix; ``in = prod(rest)``.
        validate_args: Whether to check the arguments; Pyro's own setting when None.

    Raises:
        ValueError: If shapes do not fit each other, or a diagonal or the scale is not positive.

    Example:
        >>> row_factor, column_factor = torch.ones(1, 2), torch.ones(1, 3)
        >>> joint = AugmentedMatrixNormal(row_factor, column_factor, torch.ones(1), torch.ones(1), 0.5)
        >>> joint.covariance_matrix.shape
        torch.Size([7, 7])
        >>> joint.condition(torch.tensor([[2.0]])).mean
        tensor([[0.0833, 0.0833, 0.0833],
                [0.0833, 0.0833, 0.0833]])

    References:
        Ritter, Kukla, Zhang and Li (2021), "Sparse uncertainty representation in deep learning with
        inducing weights", Eq. 5-6.
    """

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
        self.inducing_shape = torch.Size([row_factor.shape[-2], column_factor.shape[-2]])
        self._with_grad = torch.is_grad_enabled()
        if Distribution._validate_args if validate_args is None else validate_args:
            self._check()

    def _tensor(self, value: Tensor | float) -> Tensor:
        return value if isinstance(value, Tensor) else self.row_factor.new_tensor(value)

    def _check(self) -> None:
        out, size = self.row_factor.shape[-1], self.column_factor.shape[-1]
        shapes = {
            "column_factor": ((*self.inducing_shape[1:], size), "(*batch, M_in, in)"),
            "row_diagonal": (self.inducing_shape[:1], "(*batch, M_out)"),
            "column_diagonal": (self.inducing_shape[1:], "(*batch, M_in)"),
        }
        for name, (expected, meaning) in shapes.items():
            check_shape(name, getattr(self, name), (*self.batch_shape, *expected), meaning)
        for name in self.scales:
            check_broadcastable(name, getattr(self, name), self.batch_shape, "(*batch,)")
        if self.event_shape[:1] != (out,) or self.event_shape[1:].numel() != size:
            raise ValueError(
                f"`event_shape` must be (out, *rest) with out = {out} and prod(rest) = {size}, but "
                f"got {shape_text(self.event_shape)}."
            )
        for name, value in self.arguments.items():
            check_same_kind(name, value, "row_factor", self.row_factor)
        for name in ("row_diagonal", "column_diagonal", *self.scales):
            check_positive(name, getattr(self, name))

    @property
    def scales(self) -> tuple[str, ...]:
        """The names of the prior's standard deviations that were given."""
        return ("scale",) if self.bias_scale is None else ("scale", "bias_scale")

    @property
    def arguments(self) -> dict[str, Tensor]:
        """The tensors that this was made of, by name."""
        names = ("row_factor", "column_factor", "row_diagonal", "column_diagonal", *self.scales)
        return {name: getattr(self, name) for name in names}

    # ---- factors -----------------------------------------------------------------------------------

    @cached_property
    def rows(self) -> InducingSide:
        """The factored rows."""
        with torch.set_grad_enabled(self._with_grad):
            return InducingSide.of(self.row_factor, self.row_diagonal)

    @cached_property
    def columns(self) -> InducingSide:
        """The factored columns."""
        with torch.set_grad_enabled(self._with_grad):
            return InducingSide.of(self.column_factor, self.column_diagonal)

    @property
    def jitter(self) -> tuple[Tensor, Tensor]:
        """What was added to the diagonals of the rows' and the columns' matrix to factor them."""
        return self.rows.jitter, self.columns.jitter

    @property
    def column_scale(self) -> Tensor:
        """The prior's standard deviation, ``(*batch, 1)``, or ``(*batch, in)`` of each column."""
        scale = self.scale.unsqueeze(-1)
        if self.bias_scale is None:
            return scale
        columns = scale.expand(*scale.shape[:-1], self.column_factor.shape[-1] - 1)
        return torch.cat([columns, self.bias_scale.unsqueeze(-1)], -1)

    def whiten(self, u: Tensor) -> Tensor:
        """Return whitened inducing weights for ``u (*sample, *batch, M_out, M_in)``."""
        half = torch.linalg.solve_triangular(self.rows.scale_tril, u.double(), upper=False)
        whole = torch.linalg.solve_triangular(self.columns.scale_tril, half.mT, upper=False)
        whitened: Tensor = whole.mT.to(u.dtype)
        return whitened

    # ---- laws ----------------------------------------------------------------------------------------

    @property
    def covariance_matrix(self) -> Tensor:
        """The dense covariance of ``vec(W)`` followed by ``vec(U)``; for small sizes."""
        scale = self.column_scale
        prior = torch.diag_embed(self.weight_prior().variance.reshape(*self.batch_shape, -1))
        cross = _kronecker(self.row_factor, self.column_factor * scale.unsqueeze(-2))
        inducing = _kronecker(*(side.scale_tril @ side.scale_tril.mT for side in self._sides))
        above = torch.cat([prior, cross.mT], -1)
        return torch.cat([above, torch.cat([cross, inducing.to(cross.dtype)], -1)], -2)

    def weight_prior(self) -> MeanFieldNormal:
        """Return the law of W alone: independent normals."""
        out = self.event_shape[0]
        shape = (*self.batch_shape, out, self.column_factor.shape[-1])
        scale = self.column_scale.unsqueeze(-2).expand(shape)
        scale = scale.reshape(*self.batch_shape, *self.event_shape)
        loc = torch.zeros_like(scale)
        return MeanFieldNormal(loc, scale, len(self.event_shape), validate_args=False)

    def condition(self, u: Tensor, conditional_scale: Tensor | float = 1.0) -> ConditionalNormal:
        r"""Return the law of W given U, its standard deviations multiplied by a number.

        Args:
            u: Inducing weights, ``(*batch, M_out, M_in)``, not whitened.
            conditional_scale: The :math:`\lambda` of the paper's Eq. 7, positive, a number or
                ``(*batch,)``.

        Returns:
            A normal with the conditional mean and :math:`\lambda^2` times the conditional covariance.

        Raises:
            ValueError: If ``u`` has another shape, or ``conditional_scale`` is not positive.
        """
        shape = (*self.batch_shape, *self.inducing_shape)
        check_shape("u", u, shape, "(*batch, M_out, M_in)")
        check_same_kind("u", u, "row_factor", self.row_factor)
        return ConditionalNormal(self, self.whiten(u), conditional_scale)

    def inducing_prior(self) -> MatrixNormal:
        r"""Return the law of U alone, the matrix normal of :math:`\Psi_r` and :math:`\Psi_c`."""
        rows, columns = (side.scale_tril.to(self.row_factor.dtype) for side in self._sides)
        loc = rows.new_zeros(*self.batch_shape, *self.inducing_shape)
        return MatrixNormal(loc, rows, columns, validate_args=False)

    def rsample(self, sample_shape: Any = ()) -> tuple[Tensor, Tensor]:
        """Draw W and U together, with shapes ``(*sample, *batch, *event)`` of each."""
        noise, whitened = self.draw_standard(torch.Size(sample_shape))
        weight = noise * self.column_scale.unsqueeze(-2)
        rows, columns = (side.scale_tril.to(noise.dtype) for side in self._sides)
        return weight.reshape(*weight.shape[:-2], *self.event_shape), rows @ whitened @ columns.mT

    def draw_standard(self, sample_shape: torch.Size) -> tuple[Tensor, Tensor]:
        r"""Draw W for a prior scale of 1, as a matrix, and the whitened U that belongs to it.

        :math:`E_1` is the weight; its inducing weights are :math:`B_r (E_1 B_c^\top + E_3 H_c^\top) +
        H_r E_2`, so that no factor of :math:`Z Z^\top` is needed (the paper's Eq. 12 has two).
        """
        rows, columns = self._sides
        shape = (*sample_shape, *self.batch_shape)
        (inducing_out, inducing_in), out = self.inducing_shape, self.row_factor.shape[-1]

        def noise(*size: int) -> Tensor:
            like = self.row_factor
            return torch.randn(*shape, *size, dtype=like.dtype, device=like.device)

        weight = noise(out, self.column_factor.shape[-1])
        with autocast_off(weight):
            inner = weight @ columns.basis.mT + noise(out, inducing_in) @ columns.remainder.mT
            whitened = rows.basis @ inner + rows.remainder @ noise(inducing_out, inducing_in)
        return weight, whitened

    def expand(self, batch_shape: torch.Size) -> "AugmentedMatrixNormal":
        """Return this joint prior with a larger batch shape, sharing memory."""
        expanded = {
            name: value.expand(batch_shape + value.shape[len(self.batch_shape) :])
            for name, value in self.arguments.items()
        }
        return AugmentedMatrixNormal(**expanded, event_shape=self.event_shape, validate_args=False)

    @property
    def _sides(self) -> tuple[InducingSide, InducingSide]:
        return self.rows, self.columns


def _kronecker(rows: Tensor, columns: Tensor) -> Tensor:
    product = torch.einsum("...ab,...cd->...acbd", rows, columns)
    return product.flatten(-4, -3).flatten(-2)
