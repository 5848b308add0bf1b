"""A full covariance over a weight."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_structvi.linalg.matrices import (
    at_least_single,
    once_differentiable,
    solve_lower,
    standard_normal,
)
from pyro_structvi.maps.linear_map import LinearMap
from pyro_structvi.sites.family import GuideOptions, MemoryLimitedFamily
from pyro_structvi.sites.latent_site import LatentSite
from pyro_structvi.sites.parameterization import (
    cholesky_factor,
    factor_of_rows,
    parameters_of_rows,
    unit_of_across,
)
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.weights.arguments import Argument
from pyro_structvi.weights.outputs import GaussianOutputs
from pyro_structvi.weights.weight_distribution import GaussianWeight, Way


class FullNormal(GaussianWeight):
    r"""A normal with any covariance, by its Cholesky factor.

    .. math:: \operatorname{vec}(W) \sim N(\operatorname{vec}(M), L L^\top)

    with ``vec`` row by row, for the D = out * in elements. The image under ``x`` is a normal with the
    covariance :math:`(I \otimes x^\top) L L^\top (I \otimes x)`. A draw of it takes one weight for each
    example, batch x D x D products and batch x out x D numbers.

    Args:
        loc: Means, ``(*batch, out, *rest)``.
        scale_tril: The lower triangular factor ``L``, ``(*batch, D, D)``, with a positive diagonal;
            where it is not checked, its upper triangle is ignored.
        validate_args: Whether to check arguments and values; Pyro's setting when None.

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
        Tomczak et al. (2020), as for :class:`LowRankNormal`, the full-rank row of Table 1.
    """

    scale_tril: Annotated[Tensor, Argument("D, D", constraints.lower_cholesky)]
    has_exact_positions = True

    def __init__(self, loc: Tensor, scale_tril: Tensor, validate_args: bool | None = None) -> None:
        super().__init__({"loc": loc, "scale_tril": scale_tril}, validate_args=validate_args)

    @property
    def variance(self) -> Tensor:
        return self.scale_tril.tril().square().sum(-1).reshape(self.loc.shape)

    @property
    def log_det_covariance(self) -> Tensor:
        return 2 * self.scale_tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    @property
    def noise_shape(self) -> torch.Size:
        return self.scale_tril.shape[-1:]

    def scale_noise(self, noise: Tensor) -> Tensor:
        scaled = torch.einsum("...d,...ed->...e", noise, self.scale_tril.tril())
        return scaled.reshape(*noise.shape[:-1], *self.event_shape)

    def whiten(self, difference: Tensor) -> Tensor:
        flat = difference.flatten(difference.dim() - len(self.event_shape))
        return solve_lower(self.scale_tril, flat)

    def ways_to_apply(self, linear_map: LinearMap, x: Tensor) -> tuple[Way, ...]:
        """Sample the weight of a convolution, cheaper than a bank of filters for each example."""
        return ("outputs", "weight") if linear_map.is_dense else ("weight",)

    def image_around(self, mean: Tensor, linear_map: LinearMap, x: Tensor) -> "_FullOutputs":
        """Return outputs of a dense map, without a density for more positions than inputs."""
        return _FullOutputs(self, x, mean, linear_map.event_dim(mean))


class _FullOutputs(GaussianOutputs):
    """Outputs under a full covariance, drawn by one weight for each example."""

    def __init__(self, weight: FullNormal, x: Tensor, loc: Tensor, event_dim: int) -> None:
        super().__init__(loc, event_dim)
        self._weight = weight
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
        return self._columns.square().sum(-3).reshape(self.loc.shape)

    @property
    def covariance_matrix(self) -> Tensor:
        columns = self._columns.flatten(-2)
        return columns.mT @ columns

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        lead = torch.Size(sample_shape) + self.batch_shape
        noise = standard_normal((*lead, self._weight.scale_tril.shape[-1]), self.loc)
        if torch.is_grad_enabled() and self.event_shape.numel() < noise.shape[-1]:
            drawn = rao_blackwell_sample(self._columns.flatten(-2), noise)
            outputs = drawn.unflatten(-1, (-1, self.event_shape[-1]))
        else:  # without a gradient, or if the outputs determine the noise
            outputs = self._x @ self._weight.as_matrix(self._weight.scale_noise(noise)).mT
        return self.loc + outputs.reshape(*lead, *self.event_shape)


def rao_blackwell_sample(columns: Tensor, noise: Tensor) -> Tensor:
    r"""Return :math:`f = K^\top e` with a gradient of smaller variance.

    The gradient with respect to K is :math:`e\,g^\top`. If f does not determine e, the conditional
    expectation :math:`E[e \mid f] = K (K^\top K)^{-1} f` replaces e. Draws are ``(*sample, *batch,
    E)`` for ``K (*batch, D, E)`` with E less than D and ``e (*sample, *batch, D)``.

    References:
        Casella and Robert (1996), "Rao-Blackwellisation of sampling schemes".
    """
    noise = noise.unsqueeze(-2)
    with torch.no_grad():
        drawn = noise @ columns
        wide = at_least_single(columns)  # half precision has no factorization
        covariance = wide.mT @ wide
        diagonal = covariance.diagonal(dim1=-2, dim2=-1)
        details = torch.finfo(wide.dtype)
        diagonal += 10 * details.eps * diagonal.mean(-1, keepdim=True) + details.tiny
        tril, failed = torch.linalg.cholesky_ex(covariance)
        # Two triangular systems, since `cholesky_solve` cannot be captured in a CUDA graph.
        half = torch.linalg.solve_triangular(tril, drawn.mT.to(tril), upper=False)
        seen = torch.linalg.solve_triangular(tril.mT, half, upper=True).mT @ wide.mT
        # The gradient with all of the noise has the same mean.
        seen = torch.where((failed == 0)[..., None, None], seen.to(noise), noise)
    outputs = seen @ columns
    # The second derivative needs E[e e'], and not the square of E[e].
    outputs = once_differentiable(
        outputs,
        "A draw of outputs under a full covariance",
        " Pass `local_reparam=False` to the guide to draw weights, which has them all.",
    )
    return (outputs + (drawn - outputs.detach())).squeeze(-2)


@dataclass(frozen=True)
class FullCovariance(MemoryLimitedFamily):
    r"""Normals with a full covariance over the D elements of a site, for small layers.

    Parameters are ``loc``, ``log_diagonal (D,)`` and the entries of the Cholesky factor below the
    diagonal, divided by the diagonal entry of their row, so that one learning rate suits rows of any
    size. For a matrix with rows of n elements, these are ``lower (out, n (n - 1) / 2)`` within rows
    and ``across (out (out - 1) / 2, n, n)`` between rows, with a smaller unit of steps; for a vector,
    ``lower (D (D - 1) / 2,)``.

    In training a site takes 4 P + 2 D^2 numbers for its P = D + D (D + 1) / 2 parameters with their
    gradients, Adam's two moments, and the dense factor and its gradient; 16 D^2 bytes in float32.
    Intermediate results of a step take about as much again, and a few times batch x outputs x D numbers.

    Args:
        max_memory: The maximum by this formula, in GiB; a larger site raises a ``MemoryError``.
        join_bias: Whether a layer's bias is a further column of its weight, as by default.

    Example:
        >>> from pyro_structvi import Classifier, StructuredGuide, bayesianize
        >>> model = Classifier(bayesianize(torch.nn.Linear(4, 3), prior=1.0), num_data=10)
        >>> guide = StructuredGuide(model, {"*.weight": FullCovariance()})
        >>> {name: tuple(value.shape) for name, value in guide["net.weight"].named_parameters()}
        {'loc': (3, 5), 'log_diagonal': (15,), 'lower': (3, 10), 'across': (3, 5, 5)}
    """

    delayed: ClassVar[tuple[str, ...]] = ("lower", "across")
    needs: ClassVar[str] = "a real site of at least one dimension, in no plate"

    def fits(self, site: LatentSite) -> bool:
        """Whether the site is a real event with at least one dimension."""
        return site.is_real and not site.is_batch and len(site.shape) >= 1

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        """Start with the covariance ``scale^2`` times the identity, within ``max_memory``."""
        size = loc.numel()
        self.check_memory(site, f"the {size:,} elements of", 1, size, loc.element_size())
        factor = scale * torch.eye(size, dtype=loc.dtype, device=loc.device)
        return {"loc": loc.clone()} | parameters_of_rows(factor, loc)

    def unit(self, site: LatentSite, name: str, value: Tensor) -> float:
        return unit_of_across(value) if name == "across" else super().unit(site, name, value)

    def distribution(self, site: LatentSite, **parameters: Tensor) -> FullNormal:
        loc = parameters.pop("loc")
        factor = factor_of_rows if "across" in parameters else cholesky_factor
        return FullNormal(loc, factor(**parameters), validate_args=False)


class FullCovarianceGuide(StructuredGuide):
    """A full covariance over the weight and bias of each layer, for small nets.

    A layer of D weights and biases has D + D (D + 1) / 2 parameters and takes about D^2 (1 + out / in)
    multiplications for each example. Dense layers draw a weight for each example, convolutions one
    for the batch.

    Args:
        model: A ``PyroModule`` or any callable with latent sites.
        join_bias: Whether a layer's bias is a further column of its weight, as by default.
        max_memory: The maximum for one layer, in GiB, as for :class:`FullCovariance`.
        **options: ``init_scale``, ``init_loc_fn``, ``local_reparam``; see :class:`StructuredGuide`.

    Example:
        >>> from pyro_structvi import Regressor, bayesianize
        >>> net = bayesianize(torch.nn.Linear(4, 3), prior=1.0)
        >>> guide = FullCovarianceGuide(Regressor(net, num_data=8, noise_scale=0.1))
        >>> sum(parameter.numel() for parameter in guide.parameters())
        135

    References:
        FCG-W in Ritter et al. (2021), as for :class:`InducingWeightGuide`.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        join_bias: bool = True,
        max_memory: float = 8.0,
        **options: Unpack[GuideOptions],
    ) -> None:
        family = FullCovariance(max_memory, join_bias=join_bias)
        super().__init__(model, {"*": family}, **options)
