"""A linear map whose weight has the bias as its last column."""

from dataclasses import dataclass

from torch import Tensor

from pyro_structvi.maps.linear_map import LinearMap


@dataclass(frozen=True)
class BiasColumnMap(LinearMap):
    """A map whose matrices ``(out, in + 1)`` have the bias as their last column.

    For a convolution a channel of ones in the input would not do, since padding adds zeros to it. For
    a dense map it would, see :meth:`DenseMap.join_bias`; which is faster depends on the structure.
    Biases given beside the column are added to it.

    Attributes:
        linear_map: The map without the column.
    """

    linear_map: LinearMap

    @property
    def channel_dim(self) -> int:
        """The channel dimension of the map without the column."""
        return self.linear_map.channel_dim

    @property
    def groups(self) -> int:
        """The groups of the map without the column."""
        return self.linear_map.groups

    @property
    def has_bias_column(self) -> bool:
        """True."""
        return True

    def without_positions(self) -> "BiasColumnMap":
        """Return the same of the map without the column."""
        return BiasColumnMap(self.linear_map.without_positions())

    def __call__(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """Apply ``matrix (out, in + 1)``, its last column as the bias."""
        return self.linear_map(x, *_split(matrix, bias))

    def bank(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """Apply filters ``(M, in + 1)``, their last column as biases."""
        return self.linear_map.bank(x, *_split(matrix, bias))

    def mix(self, hidden: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """Recombine the channels as the map without the column does."""
        return self.linear_map.mix(hidden, matrix, bias)

    def squared_norm(self, x: Tensor, out: int) -> Tensor:
        """Return ``|patch|^2 + 1``."""
        return self.linear_map.squared_norm(x, out) + 1

    def bank_and_squared_norm(
        self, x: Tensor, matrix: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return both, by the map without the column."""
        hidden, norms = self.linear_map.bank_and_squared_norm(x, *_split(matrix, bias))
        return hidden, norms + 1

    def stack(self, x: Tensor, matrices: Tensor, biases: Tensor | None = None) -> Tensor:
        """Apply ``K`` weights ``(K, out, in + 1)``, their last columns as biases."""
        return self.linear_map.stack(x, *_split(matrices, biases))

    def combine(
        self,
        x: Tensor,
        coefficients: Tensor,
        matrices: Tensor,
        onto: Tensor,
        biases: Tensor | None = None,
    ) -> Tensor:
        """Add the outputs of ``K`` weights ``(K, out, in + 1)``, their last columns as biases."""
        matrices, biases = _split(matrices, biases)
        return self.linear_map.combine(x, coefficients, matrices, onto, biases)

    def join_bias(self, x: Tensor) -> tuple[LinearMap, Tensor]:
        """Return the map with one more column, and the input."""
        return BiasColumnMap(self), x

    def event_dim(self, outputs: Tensor) -> int:
        """Return the number for the map without the column."""
        return self.linear_map.event_dim(outputs)

    def has_positions(self, x: Tensor) -> bool:
        """Return whether the map without the column has positions."""
        return self.linear_map.has_positions(x)


def _split(matrix: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the matrix without its last column, and that column plus the bias."""
    column = matrix[..., -1]
    return matrix[..., :-1], column if bias is None else column + bias
