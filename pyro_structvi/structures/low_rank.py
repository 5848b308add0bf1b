"""Low rank plus diagonal."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import constraints

from pyro_structvi._checks import (
    Count,
    Positive,
    check_broadcastable,
    check_positive,
    checked,
    shape_text,
)
from pyro_structvi.linalg.factorizations import log_det, tril_or_nan
from pyro_structvi.linalg.matrices import (
    floored_sqrt,
    grad_cached_property,
    identity_like,
    row_gram,
    standard_normal,
)
from pyro_structvi.maps.calls import Arrangement
from pyro_structvi.maps.linear_map import LinearMap
from pyro_structvi.sites.family import GuideOptions, MatrixFamily
from pyro_structvi.sites.latent_site import LatentSite
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.weights.outputs import GaussianOutputs, meet_channels
from pyro_structvi.weights.weight_distribution import GaussianWeight


class LowRankNormal(GaussianWeight):
    r"""A normal whose covariance is low rank plus diagonal.

    .. math:: \Sigma = \alpha \sum_{k=1}^K v_k v_k^\top + \operatorname{diag}(\sigma^2)

    Its image under ``x`` is low rank plus diagonal, with factors :math:`V_k x` and the diagonal
    :math:`\sum_j \sigma_{ij}^2 x_j^2`. A draw takes one number for each factor and output of an example.
    The low-rank part is exact over the positions of an example.

    Args:
        loc: Means, ``(*batch, out, *rest)``.
        factors: The directions ``v_k``, ``(*batch, K, out, *rest)``.
        scale: Standard deviations of the diagonal part, a positive number or tensor, broadcastable
            to ``loc``; one number, an isotropic part, is cheaper.
        alpha: The positive factor of the low-rank part; 1/K when None.
        event_dim: How many trailing dimensions of ``loc`` are the weight; all of them when None.
        validate_args: Whether to check arguments and values; Pyro's setting when None.

    Raises:
        ValueError: If shapes do not fit each other, or ``scale`` or ``alpha`` is not positive.

    Example:
        >>> q = LowRankNormal(torch.zeros(2, 2), torch.ones(1, 2, 2), torch.tensor(1.0))
        >>> q.image(torch.tensor([3.0, 4.0])).covariance_matrix
        tensor([[74., 49.],
                [49., 74.]])

    References:
        Tomczak, Swaroop and Turner (2020), "Efficient low rank Gaussian variational inference for
        neural networks", Lemmas 1 and 2.
    """

    arg_constraints: ClassVar = {
        "loc": constraints.real,
        "factors": constraints.real,
        "scale": constraints.positive,
    }
    factors: Tensor
    scale: Tensor

    @checked
    def __init__(
        self,
        loc: Tensor,
        factors: Tensor,
        scale: Tensor | float,
        alpha: Positive | None = None,
        event_dim: int | None = None,
        validate_args: bool | None = None,
    ) -> None:
        event_dim = loc.dim() if event_dim is None else event_dim
        split = loc.dim() - event_dim
        if factors.shape[:split] + factors.shape[split + 1 :] != loc.shape or not factors.numel():
            raise ValueError(
                "`factors` must have shape (*batch, K, out, *rest) for `loc` (*batch, out, *rest) with "
                f"`event_dim={event_dim}`, but got {shape_text(factors.shape)} for "
                f"{shape_text(loc.shape)}."
            )
        scale = torch.as_tensor(scale).to(loc) if isinstance(scale, (int, float)) else scale
        parameters = {"loc": loc, "factors": factors, "scale": scale}
        super().__init__(parameters, event_dim, validate_args)
        if self._validate_args:
            check_broadcastable("scale", scale, loc.shape, "the shape of `loc`")
            check_positive("scale", scale)
        self.alpha = 1 / self.rank if alpha is None else float(alpha)
        scale = scale.reshape(*(1 for _ in range(loc.dim() - scale.dim())), *scale.shape)
        isotropic = scale.shape[split:].numel() == 1
        own_shape = (scale if isotropic else loc).shape[split:]
        self.scale = scale.expand(self.batch_shape + own_shape)

    @property
    def rank(self) -> int:
        return int(self.factors.shape[len(self.batch_shape)])

    @property
    def is_isotropic(self) -> bool:
        return self.scale.shape[len(self.batch_shape) :].numel() == 1

    @property
    def variance(self) -> Tensor:
        return self.alpha * self.factors.square().sum(len(self.batch_shape)) + self.scale.square()

    @property
    def variance_sum(self) -> Tensor:
        low_rank = self._gram.diagonal(dim1=-2, dim2=-1).sum(-1).to(self.loc.dtype)
        return self.alpha * low_rank + self._diagonal_sum(self.scale.square())

    @property
    def log_det_covariance(self) -> Tensor:
        low_rank = log_det(self._capacitance).to(self.loc.dtype)
        return 2 * self._diagonal_sum(self.scale.log()) + low_rank

    @property
    def _capacitance(self) -> Tensor:
        r"""The K x K matrix :math:`I + \alpha V^\top \operatorname{diag}(\sigma^{-2}) V`, in double."""
        batch_dim = len(self.batch_shape)
        if self.is_isotropic:
            gram = self._gram / self.scale.double().square().reshape(*self.batch_shape, 1, 1)
        else:
            gram = row_gram(self.factors / self.scale.unsqueeze(batch_dim), batch_dim)
        return identity_like(gram) + self.alpha * gram

    @property
    def _flat_factors(self) -> Tensor:
        return self.factors.flatten(len(self.batch_shape) + 1)

    def _diagonal_sum(self, diagonal: Tensor) -> Tensor:
        """Sum a diagonal, possibly isotropic, over the event."""
        total = diagonal.flatten(len(self.batch_shape)).sum(-1)
        return self.event_shape.numel() * total if self.is_isotropic else total

    @grad_cached_property
    def _gram(self) -> Tensor:
        r""":math:`V^\top V`, double, ``(*batch_shape, K, K)``."""
        return row_gram(self.factors, len(self.batch_shape))

    @property
    def precision_directions(self) -> Tensor:
        r"""The u in the precision :math:`\operatorname{diag}(\sigma^{-2}) - \sum_k u_k u_k^\top`."""
        scale, factors, tril = self._whitened
        directions = torch.linalg.solve_triangular(tril, factors, upper=False)
        scaled: Tensor = directions / scale.unsqueeze(-2)
        return scaled.reshape(self.factors.shape)

    @property
    def _whitened(self) -> tuple[Tensor, Tensor, Tensor]:
        r""":math:`\sigma`, :math:`B = \sqrt{\alpha} V' / \sigma`, and the factor of :math:`I + B B'`."""
        scale = self.scale.expand(self.loc.shape).flatten(len(self.batch_shape)).double()
        factors = self.alpha**0.5 * self._flat_factors.double() / scale.unsqueeze(-2)
        gram = factors @ factors.mT
        return scale, factors, tril_or_nan(identity_like(gram) + gram)

    def mahalanobis(self, difference: Tensor) -> Tensor:
        # The least |d / sigma - B' c|^2 + |c|^2 over c: squares that do not cancel. Those of Woodbury's
        # identity do where the diagonal is small beside the directions.
        scale, factors, tril = self._whitened
        whitened = difference.double().flatten(-len(self.event_shape)) / scale
        seen = torch.linalg.solve_triangular(tril, factors @ whitened.unsqueeze(-1), upper=False)
        coefficients = torch.linalg.solve_triangular(tril.mT, seen, upper=True).mT
        rest = whitened - (coefficients @ factors).squeeze(-2)
        squares: Tensor = rest.square().sum(-1) + coefficients.square().sum((-2, -1))
        return squares.to(self.loc.dtype)

    @property
    def noise_shape(self) -> torch.Size:
        return torch.Size([self.rank + self.event_shape.numel()])

    def scale_noise(self, noise: Tensor) -> Tensor:
        """Return the directions times the first K numbers, plus the diagonal part."""
        of_factors, of_diagonal = noise.split([self.rank, self.event_shape.numel()], -1)
        shape = noise.shape[:-1] + self.event_shape
        low_rank = self.alpha**0.5 * (of_factors.unsqueeze(-2) @ self._flat_factors)
        return torch.addcmul(low_rank.reshape(shape), of_diagonal.reshape(shape), self.scale)

    def image_around(self, mean: Tensor, linear_map: LinearMap, x: Tensor) -> GaussianOutputs:
        if self.is_isotropic:
            unit = meet_channels(linear_map, self.scale.square().reshape(*self.batch_shape, 1))
            # One channel if all outputs have the same inputs.
            variance = unit * linear_map.squared_norm(x, self.event_shape[0])
        else:
            variance = linear_map(x * x, self.as_matrix(self.scale.square()))
        return _LowRankOutputs(self, linear_map, x, mean, variance)

    def spread(self, moment: Tensor) -> Tensor:
        directions = self.factors.reshape(self.rank, self.event_shape[0], -1)
        # Two products, as in `dense_output_variance`.
        rows = torch.einsum("kia,...ab->...kib", directions, moment)
        low_rank = torch.einsum("...kib,kjb->...ij", rows, directions)
        unit = self.as_matrix(self.scale.square().expand(self.loc.shape))
        diagonal = moment.diagonal(dim1=-2, dim2=-1) @ unit.mT
        return self.alpha * low_rank + torch.diag_embed(diagonal)

    @checked
    def rows(self, index: Tensor) -> "LowRankNormal":
        loc = F.embedding(index, self.loc)
        scale = self.scale if self.is_isotropic else F.embedding(index, self.scale)
        factors = torch.stack([F.embedding(index, factor) for factor in self.factors], 1)
        return LowRankNormal(loc, factors, scale, self.alpha, event_dim=2, validate_args=False)

    @checked
    def rearranged(self, arrangement: Arrangement) -> "LowRankNormal | None":
        if arrangement.stack:
            return None
        loc, factors = arrangement(self.loc), arrangement(self.factors)
        scale = self.scale.reshape(()) if self.is_isotropic else arrangement(self.scale)
        event_dim = arrangement.event_dim
        return LowRankNormal(loc, factors, scale, self.alpha, event_dim, validate_args=False)


class _LowRankOutputs(GaussianOutputs):
    """Outputs of a low-rank weight."""

    def __init__(
        self, weight: LowRankNormal, linear_map: LinearMap, x: Tensor, loc: Tensor, diagonal: Tensor
    ) -> None:
        super().__init__(loc, linear_map.event_dim(loc))
        out = weight.event_shape[0]
        self._matrices = weight.factors.reshape(*weight.batch_shape, weight.rank, out, -1)
        self._alpha, self._linear_map, self._x = weight.alpha, linear_map, x
        self._diagonal = diagonal  # of one channel, if that is isotropic

    @property
    def factors(self) -> Tensor:
        """The images ``V_k x`` of the directions, ``(*batch_shape, K, *event_shape)``."""
        images = self._linear_map.stack(self._x, self._matrices)
        return images.expand(*self.batch_shape, self._matrices.shape[-3], *self.event_shape)

    @property
    def variance(self) -> Tensor:
        low_rank = self.factors.square().sum(len(self.batch_shape))
        return self._alpha * low_rank + self._diagonal

    @property
    def covariance_matrix(self) -> Tensor:
        factors = self.factors.flatten(len(self.batch_shape) + 1)
        own = self._diagonal.expand(self.loc.shape).flatten(len(self.batch_shape))
        return self._alpha * factors.mT @ factors + torch.diag_embed(own)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        shape, samples = self._extended_shape(sample_shape), torch.Size(sample_shape).numel()
        batch, size = self.batch_shape.numel(), self.event_shape.numel()
        rank = self._matrices.shape[-3]
        coefficients = self._alpha**0.5 * standard_normal((batch, samples, rank), self.loc)
        images = self.factors.reshape(batch, rank, size)
        draws = torch.baddbmm(self.loc.reshape(batch, 1, size), coefficients, images)
        draws = draws.transpose(0, 1).reshape(shape)
        return torch.addcmul(draws, standard_normal(shape, self.loc), floored_sqrt(self._diagonal))


Diagonal = Literal["constant", "isotropic", "full"]

CONSTANT = 0.1  # a constant diagonal's scale relative to 1 / sqrt(fan-in) or to the prior


@dataclass(frozen=True)
class LowRank(MatrixFamily):
    """Normals with a covariance of rank K plus a diagonal.

    Parameters are ``loc``, ``factors (K, *shape)`` and ``log_scale`` of a learned diagonal, one
    number or ``(*shape)``.

    Args:
        rank: The number K of directions, at least 1.
        diagonal: The diagonal part of the covariance: "constant" is ELRG-VI, "full" ELRG-D-VI;
            "isotropic" learns one variance for each site.
        diagonal_variance: The variance of a constant diagonal, exp(-10) in the paper. When None, its
            standard deviation is 0.1 over the root of the fan-in, so that outputs have little noise,
            and at most a tenth of the prior's.
        alpha: The factor of the low-rank part; 1/K when None, as in the paper.
        join_bias: Whether a layer's bias is a further column of its weight, as by default.

    Raises:
        ValueError: If an option is out of its range.

    Example:
        >>> from pyro_structvi import Classifier, StructuredGuide, bayesianize
        >>> model = Classifier(bayesianize(torch.nn.Linear(4, 3), prior=1.0), num_data=10)
        >>> guide = StructuredGuide(model, {"*.weight": LowRank(rank=2)})
        >>> guide["net.weight"]().covariance_matrix.shape
        torch.Size([15, 15])
    """

    rank: Count = 1
    diagonal: Diagonal = "full"
    diagonal_variance: Positive | None = None
    alpha: Positive | None = None
    delayed: ClassVar[tuple[str, ...]] = ("factors",)
    needs: ClassVar[str] = "a real site of at least one dimension, in no plate"

    @property
    def constants(self) -> tuple[str, ...]:  # type: ignore[override]
        follows = self.diagonal == "constant" and self.diagonal_variance is None
        return ("diagonal_scale",) if follows else ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.diagonal_variance is not None and self.diagonal != "constant":
            raise ValueError(
                f'`diagonal_variance` is for diagonal="constant"; with "{self.diagonal}" it is '
                "learned. Leave it out, and set its start by the guide's `init_scale`."
            )

    def fits(self, site: LatentSite) -> bool:
        """Whether the site is a real event with at least one dimension."""
        return site.is_real and not site.is_batch and len(site.shape) >= 1

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        """Start with the variance ``scale^2`` on average, half of it in a learned diagonal."""
        constant = self.diagonal == "constant"
        part = scale if constant else scale / math.sqrt(2)
        spread = part / math.sqrt(self.rank * self._alpha)
        parameters = {
            "loc": loc.clone(),
            "factors": spread * loc.new_empty(self.rank, *loc.shape).normal_(),
        }
        if self.constants:
            inputs = site.fan_in or site.shape[1:].numel()
            most = math.inf if site.prior_scale is None else site.prior_scale
            own = CONSTANT * min(1 / math.sqrt(inputs), most)
            parameters["diagonal_scale"] = loc.new_tensor(own)
        if not constant:
            shape = loc.shape if self.diagonal == "full" else ()
            parameters["log_scale"] = loc.new_full(shape, math.log(part))
        return parameters

    def distribution(self, site: LatentSite, **parameters: Tensor) -> LowRankNormal:
        loc = parameters["loc"]
        if self.constants:
            scale = parameters["diagonal_scale"]
        elif self.diagonal_variance is not None:
            scale = loc.new_full((), math.sqrt(self.diagonal_variance))
        else:
            scale = parameters["log_scale"].exp()
        factors, event_dim = parameters["factors"], site.event_dim
        return LowRankNormal(loc, factors, scale, self._alpha, event_dim, validate_args=False)

    def unit(self, site: LatentSite, name: str, value: Tensor) -> float:
        """Return the unit of steps, a tenth of the site's unit for directions."""
        return 0.1 * site.unit if name == "factors" else super().unit(site, name, value)

    @property
    def _alpha(self) -> float:
        return 1 / self.rank if self.alpha is None else self.alpha


class AutoLowRankLRT(StructuredGuide):
    """Low rank plus diagonal at every weight and vector, with local reparameterization.

    This is ELRG-D-VI with a full diagonal, and ELRG-VI with a constant one (Tomczak, Swaroop and
    Turner, 2020), whose ELBO is hundreds of nats lower on small nets.

    Args:
        model: A ``PyroModule`` or any callable with latent sites.
        rank: The number K of directions.
        diagonal: The diagonal part, as for :class:`LowRank`.
        diagonal_variance: A fixed variance of the diagonal part, as for :class:`LowRank`.
        alpha: The factor of the low-rank part, as for :class:`LowRank`.
        join_bias: Whether a layer's bias is a further column of its weight, as by default.
        **options: ``init_scale``, ``init_loc_fn``, ``local_reparam``; see :class:`StructuredGuide`.

    Example:
        >>> from pyro_structvi import Classifier, bayesianize
        >>> net = torch.nn.Linear(400, 400, bias=False)
        >>> model = Classifier(bayesianize(net, prior=0.3), num_data=100)
        >>> sum(parameter.numel() for parameter in AutoLowRankLRT(model, rank=2).parameters())
        640000
    """

    def __init__(
        self,
        model: Callable[..., Any],
        rank: int = 1,
        diagonal: Diagonal = "full",
        *,
        diagonal_variance: float | None = None,
        alpha: float | None = None,
        join_bias: bool = True,
        **options: Unpack[GuideOptions],
    ) -> None:
        family = LowRank(rank, diagonal, diagonal_variance, alpha, join_bias=join_bias)
        super().__init__(model, {"*": family}, **options)


LowRankGuide = AutoLowRankLRT
