"""Families and couplings of inducing weights."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Unpack

import torch
from pyro.distributions import Normal
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_structvi._checks import Count, Positive, Rule, checked
from pyro_structvi.linalg.matrices import at_least_single
from pyro_structvi.sites.family import FactoredFamily, Family, GuideOptions
from pyro_structvi.sites.latent_site import LatentSite
from pyro_structvi.sites.parameterization import capped, uncapped
from pyro_structvi.sites.site_posterior import Coupling, SharedPosterior, SitePosterior, couple
from pyro_structvi.sites.structured import StructuredGuide
from pyro_structvi.structures.full_covariance import FullCovariance
from pyro_structvi.structures.inducing.augmented import AugmentedMatrixNormal
from pyro_structvi.structures.inducing.normal import InducingNormal
from pyro_structvi.structures.inducing.outputs import InducingSide
from pyro_structvi.structures.matrix_normal import MatrixNormalFamily
from pyro_structvi.structures.mean_field import MeanField
from pyro_structvi.structures.points import Members, SameMember
from pyro_structvi.weights.site_distributions import Auxiliary
from pyro_structvi.weights.weight_distribution import WeightDistribution

DIAGONAL = 1e-3

InducingShape = Annotated[
    tuple[Count, Count], Rule("(M_out, M_in), such as (64, 64)", lambda shape: True)
]


@dataclass(frozen=True)
class InducingWeights(FactoredFamily):
    r"""A posterior over a small matrix of inducing weights for each weight, with the prior's noise.

    For a weight ``(out, in)`` and inducing weights ``(M_out, M_in)``, parameters are ``row_factor
    (M_out, out)``, ``column_factor (M_in, in)``, ``log_row_diagonal (M_out,)``, ``log_column_diagonal
    (M_in,)``, ``log_conditional_scale ()``, and the parameters of the posterior over whitened inducing
    weights with the prefix ``inducing_``. None has ``out in`` elements.

    The initial mean is a low-rank approximation of the guide's initial weight. The initial covariance
    is ``init_scale^2`` times the identity; for a joined bias, also times the ratio of the prior
    variances.

    Args:
        shape: The inducing weights' ``(M_out, M_in)``. A weight that is smaller in both dimensions has
            inducing weights of the same shape.
        posterior: The family of their posterior: ``MeanField()`` is FFG-U, ``FullCovariance()`` FCG-U,
            ``Members(K)`` Ensemble-U, whose K nets share all parameters but the inducing weights.
        shared: Whether the inducing weights of all sites of this family, stacked as rows of a matrix,
            have one joint posterior, which correlates layers.
        max_conditional_scale: The maximum of the scale :math:`\lambda` of the conditional noise; no
            bound when None. In the prior it is 1.
        prior_scale: The standard deviation of the joint prior; the model's prior when None. The ELBO is
            a lower bound of the evidence for any value, and is tightest for the model's.
        join_bias: Whether a layer's bias is a further column of its weight, as by default.

    Raises:
        ValueError: If an option is out of its range; when a guide is made, if the model's prior has no
            standard deviation and ``prior_scale`` is None.

    Example:
        >>> from pyro_structvi import Classifier, StructuredGuide, bayesianize
        >>> model = Classifier(bayesianize(torch.nn.Linear(400, 300), prior=0.1), num_data=10)
        >>> guide = StructuredGuide(model, {"*.weight": InducingWeights((16, 16))})
        >>> sum(parameter.numel() for parameter in guide.parameters())
        11761
    """

    shape: InducingShape = (64, 64)
    posterior: Family = field(default_factory=MeanField)
    shared: bool = False
    max_conditional_scale: Positive | None = None
    prior_scale: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shared and isinstance(self.posterior, (MeanField, Members)):
            raise ValueError(
                "`shared` is for a posterior with correlations, such as MatrixNormalFamily(), but got "
                f"{self.posterior}. Leave `shared` out: independent inducing weights have nothing to "
                "share, and the members of an ensemble are whole nets anyway."
            )

    @property
    def constants(self) -> tuple[str, ...]:  # type: ignore[override]
        return "prior_scale", *(f"inducing_{name}" for name in self.posterior.constants)

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        dtype, loc = loc.dtype, at_least_single(loc)  # half precision has no factorizations
        prior_scale = self.prior_scales(site)
        matrix = loc.flatten(1) / prior_scale[0]
        matrix[:, -1] *= prior_scale[0] / prior_scale[-1]
        sizes = self._inducing_sizes(*matrix.shape)
        rows, columns = _leading_directions(matrix, *sizes)
        own = scale / prior_scale[0]
        inner = {"loc": _inducing_mean(matrix, rows, columns)}
        if not self.shared:
            inner = self.posterior.init(self._inducing_site(sizes), inner["loc"], own)
        values = {
            "row_factor": rows,
            "column_factor": columns,
            "log_row_diagonal": loc.new_full((sizes[0],), math.log(DIAGONAL)),
            "log_column_diagonal": loc.new_full((sizes[1],), math.log(DIAGONAL)),
            "log_conditional_scale": loc.new_tensor(uncapped(own, self.max_conditional_scale)),
            "prior_scale": loc.new_tensor(prior_scale),
            **{f"inducing_{name}": value for name, value in inner.items()},
        }
        return {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in values.items()
        }

    def distribution(self, site: LatentSite, **parameters: Tensor) -> InducingNormal:
        joint = AugmentedMatrixNormal(
            parameters["row_factor"],
            parameters["column_factor"],
            parameters["log_row_diagonal"].exp(),
            parameters["log_column_diagonal"].exp(),
            *parameters["prior_scale"],
            event_shape=site.shape,
            validate_args=False,
        )
        inducing = None
        if not self.shared:
            names = (name for name in parameters if name.startswith("inducing_"))
            inner = {name.removeprefix("inducing_"): parameters[name] for name in names}
            site = self._inducing_site(joint.inducing_shape)
            inducing = self.posterior.distribution(site, **inner)
            if not isinstance(inducing, WeightDistribution):
                raise TypeError(
                    f"Inducing weights need a posterior over weights, but got {self.posterior}. Use "
                    "`MeanField()`, `MatrixNormalFamily()`, `FullCovariance()` or `Members(5)`."
                )
        scale = capped(parameters["log_conditional_scale"], self.max_conditional_scale)
        return InducingNormal.from_inducing(joint, inducing, scale, validate_args=False)

    def unit(self, site: LatentSite, name: str, value: Tensor) -> float:
        """Return the unit of factors with rows of unit length, or of inducing weights.

        Inducing weights have a standard normal prior. Their unit is at most 1, and smaller if the
        root mean square change of the weight would exceed the weight's unit.
        """
        if name.startswith("inducing_"):
            whole = site.shape[0], site.shape[1:].numel()
            sizes = self._inducing_sizes(*whole)
            reach = math.sqrt(math.prod(whole) / math.prod(map(min, whole, sizes)))
            unit = min(1.0, reach * site.unit / self.prior_scales(site)[0])
            inner = replace(self._inducing_site(sizes), fan_in=None, prior_scale=unit)
            return self.posterior.unit(inner, name.removeprefix("inducing_"), value)
        factor = name in ("row_factor", "column_factor")
        return 1 / math.sqrt(value.shape[-1]) if factor else super().unit(site, name, value)

    def prior_scales(self, site: LatentSite) -> list[float]:
        """Return the prior's standard deviation, or two if weight and bias have different ones."""
        own = [site.prior_scale] + ([] if site.bias is None else [site.bias.prior_scale])
        scales = [value if self.prior_scale is None else self.prior_scale for value in own]
        found = [scale for scale in scales if scale is not None]
        if len(found) < len(scales):
            raise ValueError(
                f"The prior of {' and '.join(site.names)} has no finite standard deviation to build "
                "inducing weights on. Pass `prior_scale=` to InducingWeights."
            )
        return found[:1] if len(set(found)) == 1 else found

    def _inducing_sizes(self, out: int, size: int) -> tuple[int, int]:
        smaller = out < self.shape[0] and size < self.shape[1]
        return (out, size) if smaller else self.shape

    def _inducing_site(self, shape: Sequence[int]) -> LatentSite:
        return LatentSite("inducing", torch.Size(shape), 2, constraints.real, prior_scale=1.0)


def _leading_directions(matrix: Tensor, out: int, size: int) -> tuple[Tensor, Tensor]:
    """Return factors ``(out, m)`` and ``(size, n)`` with the leading singular vectors of a matrix.

    Further rows are random, and orthonormal while there are enough dimensions. A factor that spans
    the whole space is the identity, so that independent inducing weights start as independent
    weights.
    """
    u, _, v = torch.svd_lowrank(matrix, q=min(out, size, *matrix.shape), niter=4)
    factors = []
    for vectors, count in ((u, out), (v, size)):
        length, rank = vectors.shape
        others = vectors.new_empty(length, count - rank).normal_()
        basis, _ = torch.linalg.qr(torch.cat([vectors, others[:, : length - rank]], -1))
        if count >= length:
            basis = torch.eye(length).to(vectors)
        spare = others[:, length - rank :] / math.sqrt(length)
        factors.append(torch.cat([basis, spare], -1).mT.contiguous())
    return factors[0], factors[1]


def _inducing_mean(matrix: Tensor, *factors: Tensor) -> Tensor:
    """Return the whitened inducing weights whose conditional mean is closest to a matrix."""
    sides = []
    for factor in factors:
        diagonal = factor.new_full(factor.shape[:1], DIAGONAL)
        sides.append(torch.linalg.pinv(InducingSide.of(factor, diagonal).basis.double()))
    mean: Tensor = sides[0].mT @ matrix.double() @ sides[1]
    return mean.to(matrix.dtype)


class SharedInducing(SharedPosterior):
    """A joint posterior of inducing weights, stacked as rows of a matrix as wide as the widest site."""

    def __init__(
        self, family: InducingWeights, posteriors: Mapping[str, SitePosterior], scale: float
    ) -> None:
        starts = {name: posterior.release("inducing_loc") for name, posterior in posteriors.items()}
        shapes = {name: start.shape for name, start in starts.items()}
        columns = max(shape[1] for shape in shapes.values())
        loc = torch.cat([
            nn.functional.pad(start, (0, columns - start.shape[1])) for start in starts.values()
        ])
        name = f"inducing_weights of {next(iter(starts))}"
        site = LatentSite(name, loc.shape, 2, constraints.real, prior_scale=1.0)
        logs = [math.log(scale / family.prior_scales(post.site)[0]) for post in posteriors.values()]
        start = family.posterior.init(site, loc, math.exp(sum(logs) / len(logs)))
        super().__init__(posteriors, SitePosterior(family.posterior, site, start))
        self.shapes = shapes

    def auxiliary(self, q: Any) -> Auxiliary:
        zero, one = q.mean.new_zeros(()), q.mean.new_ones(())
        return Auxiliary(q, Normal(zero, one).expand(q.event_shape).to_event(2))

    def split(self, value: Tensor, q: Any) -> dict[str, Tensor]:
        rows = value.split([shape[0] for shape in self.shapes.values()])
        parts = zip(self.shapes.items(), rows, strict=True)
        return {name: part[:, : shape[1]] for (name, shape), part in parts}

    def marginals(self, at: Mapping[str, Any], number: Tensor | int | None) -> dict[str, Any]:
        raise NotImplementedError(
            f"The inducing weights of the sites {list(self.sites)} have one joint posterior, without "
            "quantiles of single sites. Compute quantiles of draws from `guide.draw()`."
        )


InducingPosterior = Literal["diagonal", "matrix", "full", "ensemble"]


@couple.register
def _(
    family: InducingWeights, posteriors: Mapping[str, SitePosterior], scale: float
) -> Coupling | None:
    if isinstance(family.posterior, Members):
        return SameMember(posteriors)
    return SharedInducing(family, posteriors, scale) if family.shared else None


class InducingWeightGuide(StructuredGuide):
    r"""Inducing weights for every weight and its bias; mean field for vectors.

    No parameter has a weight's size, and outputs are drawn without forming a weight. With wide layers
    the guide has fewer parameters than the net, and a step takes less time.

    Args:
        model: A ``PyroModule`` or any callable with latent sites.
        inducing_shape: The ``(M_out, M_in)`` of each layer, as for :class:`InducingWeights`.
        inducing_posterior: Their posterior: "diagonal" (FFG-U), "matrix" (a matrix normal), "full"
            (FCG-U; of ``(M_out M_in)^2 / 2`` parameters), "ensemble" (Ensemble-U), or a family.
        ensemble_size: The members of an ensemble.
        shared: Whether all layers have one joint "matrix" or "full" posterior, which correlates them.
        max_conditional_scale: The maximum scale of the noise given the inducing weights, in units of
            the prior's standard deviation; no bound when None. The authors' code has 0.03 for
            CIFAR, and 0.1 for ensembles.
        max_inducing_scale: The maximum standard deviation of a whitened inducing weight, for
            "diagonal"; no bound when None. The paper uses 0.1.
        join_bias: Whether a layer's bias is a further column of its weight, as by default.
        **options: ``init_scale``, ``init_loc_fn``, ``local_reparam``; see :class:`StructuredGuide`.

    Raises:
        ValueError: If an option is out of its range, or is not supported by the posterior.

    Example:
        >>> from pyro_structvi import Classifier, bayesianize
        >>> model = Classifier(bayesianize(torch.nn.Linear(4096, 4096), prior=0.02), num_data=100)
        >>> guide = InducingWeightGuide(model, inducing_shape=(64, 64))
        >>> sum(parameter.numel() for parameter in guide.parameters())  # of 16,781,312 weights
        532673

    References:
        Ritter, Kukla, Zhang and Li (2021), "Sparse uncertainty representation in deep learning with
        inducing weights".
    """

    @checked
    def __init__(
        self,
        model: Callable[..., Any],
        inducing_shape: InducingShape = (64, 64),
        inducing_posterior: InducingPosterior | Family = "diagonal",
        *,
        ensemble_size: Count | None = None,
        shared: bool = False,
        max_conditional_scale: float | None = None,
        max_inducing_scale: Positive | None = None,
        join_bias: bool = True,
        **options: Unpack[GuideOptions],
    ) -> None:
        for name, option, kind in (
            ("ensemble_size", ensemble_size, "ensemble"),
            ("max_inducing_scale", max_inducing_scale, "diagonal"),
        ):
            if option is not None and inducing_posterior != kind:
                raise ValueError(
                    f'`{name}` is for inducing_posterior="{kind}", but got {inducing_posterior!r}.'
                )
        families: dict[Any, Family] = {
            "diagonal": MeanField(max_inducing_scale),
            "matrix": MatrixNormalFamily(),
            "full": FullCovariance(),
            "ensemble": Members(ensemble_size or 5),
        }
        is_family = isinstance(inducing_posterior, Family)  # which need not be hashable
        posterior: Any = inducing_posterior if is_family else families[inducing_posterior]
        family = InducingWeights(
            inducing_shape, posterior, shared, max_conditional_scale, join_bias=join_bias
        )
        super().__init__(model, {"*": family}, **options)
