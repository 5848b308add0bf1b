"""The Normal with one full covariance over all elements of a weight."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_structvi._checks import check_cholesky_factor, check_shape, shape_text
from pyro_structvi.distributions.mean_field import bias_moments
from pyro_structvi.distributions.weight_distribution import WeightDistribution
from pyro_structvi.linalg.fused import floored_sqrt
from pyro_structvi.maps.linear_maps import DenseMap, LinearMap


class FullNormal(WeightDistribution):
    r"""A normal with any covariance, by its Cholesky factor.

    .. math:: \operatorname{vec}(W) \sim N(\operatorname{vec}(M), L L^\top)

    with ``vec`` row by row and ``L`` lower triangular, of D x D numbers for the D = out * in elements.
    The image under ``x`` is a normal with the covariance :math:`(I \otimes x^\top) L L^\top (I \otimes
    x)`. A draw of it is one weight for each example, applied to that example's input: the noise of all
    examples times :math:`L^\top`, one product of size batch x D x D.

    Args:
        loc: Means, ``(*batch, out, *rest)``.
        scale_tril: The factor ``L``, ``(*batch, D, D)``, with a positive diagonal. Only the lower
            triangle counts.
        validate_args: Whether to check arguments and the values given to ``log_prob``; Pyro's own
            setting when None.

    Raises:
        ValueError: If shapes do not fit each other, or ``scale_tril`` is not lower triangular with a
            positive diagonal.

    Example:
        >>> q = FullNormal(torch.zeros(1, 2), torch.tensor([[1.0, 0.0], [3.0, 2.0]]))
        >>> q.covariance_matrix
        tensor([[ 1.,  3.],
                [ 3., 13.]])
        >>> q.image(torch.tensor([1.0, -1.0])).variance
        tensor([8.])

    References:
        Tomczak, Swaroop and Turner (2020), "Efficient low rank Gaussian variational inference for
        neural networks", the full-rank row of Table 1.
    """

    arg_constraints: ClassVar = {
        "loc": constraints.real,
        "scale_tril": constraints.lower_cholesky,
    }
    _parameters = ("loc", "scale_tril")
    has_exact_positions = True
    scale_tril: Tensor

    def __init__(self, loc: Tensor, scale_tril: Tensor, validate_args: bool | None = None) -> None:
        batch_dim = scale_tril.dim() - 2
        if batch_dim < 0 or loc.dim() <= batch_dim:
            raise ValueError(
                "`loc` must have shape (*batch, out, *rest) and `scale_tril` (*batch, D, D), with D "
                f"the number of weights, but got {shape_text(loc.shape)} and "
                f"{shape_text(scale_tril.shape)}."
            )
        parameters = {"loc": loc, "scale_tril": scale_tril}
        super().__init__(parameters, loc.dim() - batch_dim, validate_args)
        if self._validate_args:
            size = self.event_shape.numel()
            check_shape("scale_tril", scale_tril, (*self.batch_shape, size, size), "(*batch, D, D)")
            check_cholesky_factor("scale_tril", scale_tril)

    @property
    def variance(self) -> Tensor:
        """The variance of each weight, ``(*batch_shape, *event_shape)``."""
        return self.scale_tril.tril().square().sum(-1).reshape(self.loc.shape)

    @property
    def variance_sum(self) -> Tensor:
        """The trace of the covariance, ``(*batch_shape,)``."""
        return self.scale_tril.tril().square().sum((-2, -1))

    @property
    def covariance_matrix(self) -> Tensor:
        """The dense covariance ``(*batch_shape, D, D)``."""
        tril = self.scale_tril.tril()
        return tril @ tril.mT

    @property
    def log_det_covariance(self) -> Tensor:
        """The log determinant of the covariance, ``(*batch_shape,)``, in nats."""
        return 2 * self.scale_tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def _mahalanobis(self, difference: Tensor) -> Tensor:
        batch = difference.shape[: difference.dim() - len(self.event_shape)]
        sample = batch[: len(batch) - len(self.batch_shape)]
        own = batch[len(sample) :]
        columns = difference.reshape(sample.numel(), *own, -1).movedim(0, -1)
        tril = self.scale_tril.expand(*own, *self.scale_tril.shape[-2:])
        whitened = torch.linalg.solve_triangular(tril, columns, upper=False)
        distance: Tensor = whitened.square().sum(-2).movedim(-1, 0).reshape(batch)
        return distance

    def _perturbation(self, shape: torch.Size) -> Tensor:
        return self._draw_flat(shape[: len(shape) - len(self.event_shape)]).reshape(shape)

    def _draw_flat(self, shape: torch.Size) -> Tensor:
        """Draw ``vec(W - loc)`` with shape ``(*shape, D)``, where ``shape`` ends in the batch's."""
        tril = self.scale_tril.tril()
        noise = torch.randn(*shape, tril.shape[-1], dtype=tril.dtype, device=tril.device)
        return torch.einsum("...d,...ed->...e", noise, tril)

    def image_under(
        self, linear_map: LinearMap, x: Tensor, bias: "Tensor | WeightDistribution | None" = None
    ) -> "FullNormal | None":
        """Return the law of ``linear_map(x, W) + bias``; None for a convolution.

        One weight serves all positions of an example, and so does a random bias: their joint law is
        exact. The examples of a batch, and those of each weight of a batch of weights, are
        independent.

        A convolution gets None, since a filter bank for each example costs more than drawing once:
        its weight is then drawn, once for the batch.

        Args:
            linear_map: A dense map or a convolution.
            x: Its input.
            bias: Nothing, a tensor ``(out,)``, or the distribution of one with independent elements,
                independent of ``W`` too.

        Returns:
            A normal over the outputs. Where its covariance is singular, as for an input of zeros or
            for more positions than inputs, it has draws and moments, and no density.
        """
        if not isinstance(linear_map, DenseMap):
            return None
        linear_map = self._map_for_batch(linear_map)
        bias_loc, bias_variance = bias_moments(bias)
        loc = linear_map(x, self._matrix(self.loc), bias_loc)
        return _FullImage(self, x, loc, linear_map.event_dim(loc), bias_variance)


class DenseImage(FullNormal):
    """The law of the outputs of a map, which has a dense covariance where one is asked for."""

    @property
    def scale_tril(self) -> Tensor:  # type: ignore[override]
        """The Cholesky factor of the covariance, ``(*batch_shape, E, E)`` for E outputs."""
        tril, info = torch.linalg.cholesky_ex(self.covariance_matrix)
        factor: Tensor = tril.masked_fill((info > 0)[..., None, None], torch.nan)
        return factor

    @property
    def variance_sum(self) -> Tensor:
        """The trace of the covariance, ``(*batch_shape,)``."""
        return self._event_sum(self.variance)

    def expand(self, batch_shape: Any, _instance: Any = None) -> FullNormal:
        """Return this law with a larger batch shape, and its covariance factored."""
        return FullNormal(self.loc, self.scale_tril, False).expand(batch_shape, _instance)


class _FullImage(DenseImage):
    """The image of a full covariance. A draw of it is one weight for each example."""

    def __init__(
        self,
        weight: FullNormal,
        x: Tensor,
        loc: Tensor,
        event_dim: int,
        bias_variance: Tensor | None,
    ) -> None:
        WeightDistribution.__init__(self, {"loc": loc}, event_dim, False)
        self._weight, self._bias_variance = weight, bias_variance
        self._x = x.unsqueeze(-2) if event_dim == 1 else x.flatten(-event_dim, -2)

    @property
    def _columns(self) -> Tensor:
        """The images of the columns of ``L``, ``(*batch_shape, D, positions, out)``."""
        weight = self._weight
        tril = weight.scale_tril.tril()
        tril = tril.reshape(*weight.batch_shape, weight.event_shape[0], -1, tril.shape[-1])
        return torch.einsum("...pi,...oid->...dpo", self._x, tril)

    @property
    def variance(self) -> Tensor:
        """The variance of each output, ``(*batch_shape, *event_shape)``."""
        variance = self._columns.square().sum(-3)
        if self._bias_variance is not None:
            variance = variance + self._bias_variance.unsqueeze(-2)
        return variance.reshape(self.loc.shape)

    @property
    def covariance_matrix(self) -> Tensor:
        """The dense covariance ``(*batch_shape, E, E)`` for E outputs."""
        columns = self._columns.flatten(-2)
        covariance = columns.mT @ columns
        if self._bias_variance is not None:
            positions = self._x.shape[-2]
            covariance = covariance + torch.diag_embed(self._bias_variance).repeat(
                *(1 for _ in self._bias_variance.shape[:-1]), positions, positions
            )
        return covariance

    def _perturbation(self, shape: torch.Size) -> Tensor:
        lead = shape[: len(shape) - len(self.event_shape)]
        weights = self._weight._draw_flat(lead).unflatten(-1, (self.event_shape[-1], -1))
        outputs = self._x @ weights.mT
        if self._bias_variance is not None:
            noise = torch.randn_like(outputs[..., :1, :])
            outputs = outputs + noise * floored_sqrt(self._bias_variance).unsqueeze(-2)
        draws: Tensor = outputs.reshape(shape)
        return draws
