"""Global inducing points: weights given their inputs, their family, and their propagation."""

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import pyro.poutine as poutine
import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import constraints

from pyro_structvi._pyro import outside_plates
from pyro_structvi._torch import inside_checkpoint
from pyro_structvi.linalg.factorizations import tril_or_nan
from pyro_structvi.linalg.matrices import autocast_off, identity_like
from pyro_structvi.maps.calls import Application, Call
from pyro_structvi.maps.linear_map import LinearMap
from pyro_structvi.sites.family import MatrixFamily
from pyro_structvi.sites.finding import buffers_kept, in_evaluation, modules_of
from pyro_structvi.sites.latent_site import LatentSite
from pyro_structvi.sites.site_posterior import Coupling, How, SitePosterior, median_of
from pyro_structvi.structures.matrix_normal import MatrixNormal
from pyro_structvi.structures.rowwise import RowwiseNormal
from pyro_structvi.weights.lazy import WeightPlaceholder, as_drawn
from pyro_structvi.weights.site_role import SiteUse
from pyro_structvi.weights.weight_distribution import GaussianWeight, TensorDistribution


class NormalGivenInputs(TensorDistribution):
    r"""The posterior of a Bayesian linear regression of pseudo-outputs V on inputs ``X (rows, in)``.

    .. math:: W_{i \cdot} \mid X \sim N(S X^\top \Lambda V_{\cdot i}, S), \qquad
        S^{-1} = \operatorname{diag}(s)^{-2} + X^\top \Lambda X,

    independent over rows i. It has no draws and no density without X.

    Args:
        event_shape: The weight's shape, ``(out, *rest)``.
        target: The pseudo-outputs V, ``(rows, out)``.
        log_precision: The logarithm of :math:`\Lambda`, ``(rows,)`` or for each i ``(rows, out)``.
        log_scale: Logarithms of the standard deviations s without any row, ``(in,)``.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"log_scale": constraints.real}
    has_rsample = False

    def __init__(
        self, event_shape: torch.Size, target: Tensor, log_precision: Tensor, log_scale: Tensor
    ) -> None:
        self._set_shapes(torch.Size(), event_shape, validate_args=False)
        self.target, self.log_precision, self.log_scale = target, log_precision, log_scale

    def _refuse(self, *_: Any) -> Any:
        raise NotImplementedError(
            "A weight that is drawn given its inputs has no marginal distribution. Use `guide.draw()`, "
            "or `condition(rows)` for its distribution given the inputs `rows (rows, in)`."
        )

    mean = variance = property(_refuse)
    rsample = log_prob = _refuse

    def condition(self, rows: Tensor) -> GaussianWeight:
        """Return the distribution given inputs ``(rows, in)``, computed in double precision."""
        dtype, shape = self.log_scale.dtype, self.event_shape
        with autocast_off(rows):
            scale = self.log_scale.double().exp()
            root = (0.5 * self.log_precision.double()).exp()
            rows, target = rows.double() * scale, self.target.double()
            if root.dim() == 2:
                root = root.mT.unsqueeze(-1)
                loc, column = _regress(root * rows, root * target.mT.unsqueeze(-1), scale)
                loc = loc.squeeze(-1).to(dtype).reshape(shape)
                return RowwiseNormal(loc, column.to(dtype), False)
            rows, target = root.unsqueeze(-1) * rows, root.unsqueeze(-1) * target
            if len(rows) < len(scale):
                return _regress_few_rows(shape, rows, target, scale, dtype)
            loc, column = _regress(rows, target, scale)
            loc = loc.mT.to(dtype).reshape(shape)
            return MatrixNormal(loc, torch.eye(len(loc)).to(loc), column.to(dtype), False)


def _regress(rows: Tensor, target: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean ``(*, in, out)`` and covariance factor ``(*, in, in)``, for unit precisions."""
    precision = rows.mT @ rows
    identity = identity_like(precision)
    # Reversed elements give a lower triangular factor of the covariance without a factorization of it.
    tril = tril_or_nan((identity + precision).flip(-2, -1))
    inverse = torch.linalg.solve_triangular(tril, identity, upper=False)
    column = inverse.flip(-2, -1).mT
    loc, scale = column @ (column.mT @ (rows.mT @ target)), scale.unsqueeze(-1)
    return scale * loc, scale * column


def _regress_few_rows(
    shape: torch.Size, rows: Tensor, target: Tensor, scale: Tensor, dtype: torch.dtype
) -> GaussianWeight:
    """Return the distribution by Woodbury's identity, with a factor of the size of the rows."""
    gram = rows @ rows.mT
    tril = tril_or_nan(identity_like(gram) + gram)
    both = torch.linalg.solve_triangular(tril, torch.cat([rows, target], -1), upper=False)
    whitened, seen = both.split([len(scale), target.shape[-1]], -1)
    loc = (scale.unsqueeze(-1) * (whitened.mT @ seen)).mT
    return _FewRows(loc.to(dtype).reshape(shape), rows, scale, tril, whitened)


class _FewRows(GaussianWeight):
    r"""Independent rows of covariance ``D (I + Y' Y)^-1 D``, for Y with fewer rows than columns.

    With the Cholesky factor L of :math:`I + Y Y^\top` it is :math:`D A A^\top D` with :math:`A = I -
    Y^\top L^{-\top} (I + L)^{-1} Y`. Here ``inputs`` is Y, ``scale`` the diagonal of D, ``tril`` is
    L, and ``whitened`` is :math:`L^{-1} Y`, all in double precision.
    """

    arg_constraints: ClassVar[dict[str, Any]] = dict.fromkeys(
        ("loc", "inputs", "scale", "tril", "whitened"), constraints.real
    )

    def __init__(
        self, loc: Tensor, inputs: Tensor, scale: Tensor, tril: Tensor, whitened: Tensor
    ) -> None:
        own = {"loc": loc, "inputs": inputs, "scale": scale, "tril": tril, "whitened": whitened}
        super().__init__(own, event_dim=loc.dim(), validate_args=False)

    @property
    def _row_variance(self) -> Tensor:
        return self.scale.square() * (1 - self.whitened.square().sum(-2))

    @property
    def variance(self) -> Tensor:
        row: Tensor = self._row_variance.to(self.loc.dtype)
        return row.expand(len(self.loc), -1).reshape(self.loc.shape)

    @property
    def variance_sum(self) -> Tensor:
        total: Tensor = len(self.loc) * self._row_variance.sum()
        return total.to(self.loc.dtype)

    @property
    def log_det_covariance(self) -> Tensor:
        logs: Tensor = self.scale.log().sum() - self.tril.diagonal().log().sum()
        return (2 * len(self.loc) * logs).to(self.loc.dtype)

    def scale_noise(self, noise: Tensor) -> Tensor:
        rows = self.as_matrix(noise).to(self.scale.dtype)
        return self.as_weight(self._scaled(rows).to(self.loc.dtype))

    def _scaled(self, noise: Tensor) -> Tensor:
        """Return ``e A D`` for rows e of noise ``(*, in)``."""
        upper = (self.tril + identity_like(self.tril)).mT
        gain = torch.linalg.solve_triangular(upper, self.whitened, upper=True)
        return (noise - (noise @ self.inputs.mT) @ gain) * self.scale

    def mahalanobis(self, difference: Tensor) -> Tensor:
        rows = self.as_matrix(difference).double() / self.scale
        seen = rows @ self.inputs.mT
        squares: Tensor = rows.square().sum((-2, -1)) + seen.square().sum((-2, -1))
        return squares.to(self.loc.dtype)

    def output_variance(self, linear_map: LinearMap, x: Tensor) -> Tensor:
        images = linear_map.bank(x, self._scaled(torch.eye(len(self.scale)).to(self.scale)).to(x))
        shared: Tensor = images.square().sum(linear_map.channel_dim, keepdim=True)
        return shared.repeat_interleave(len(self.loc), linear_map.channel_dim)


def already_drawn(distribution: Any, value: Tensor) -> Any:
    """Return a copy of a distribution whose only draw is the given value."""
    known = copy.copy(distribution)

    def drawn(sample_shape: Any = ()) -> Tensor:
        if sample_shape:
            raise NotImplementedError("There is only one draw, since later layers depend on it.")
        return value

    # Attributes of the object keep its class, which determines the KL.
    known.__dict__.update(rsample=drawn, sample=drawn, ways_to_apply=lambda *_: ("weight",))
    return known


@dataclass(frozen=True)
class GlobalInducing(MatrixFamily):
    """A Bayesian linear regression of learned pseudo-outputs on a layer's inputs at inducing points.

    Parameters are ``target (rows, out)`` and ``log_precision (rows,)``, with a row for each inducing
    point and position, and ``log_scale (in,)``, the standard deviations without any row. Layers of
    two to four outputs, such as a mean and a noise scale, have ``log_precision (rows, out)``.
    """

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        """Return the initial weight, which determines the targets, and the prior's scales."""
        if loc.is_meta:
            raise NotImplementedError(
                "The number of parameters of a GlobalInducingGuide depends on its points. Make the "
                "guide with its points, and count `guide.parameters()`."
            )
        log_scale = loc.new_full((loc[0].numel(),), math.log(site.prior_scale or 1.0))
        if site.bias is not None:
            log_scale[-1] = math.log(site.bias.prior_scale or 1.0)
        return {"loc": loc.clone(), "log_scale": log_scale}

    def distribution(self, site: LatentSite, **parameters: Tensor) -> NormalGivenInputs:
        if "target" not in parameters:
            raise RuntimeError(
                f"The weight at site '{site.name}' has no posterior before the inducing points are "
                "known. Train the guide, or call `guide.initialize(...)` with the model's arguments."
            )
        return NormalGivenInputs(site.shape, **parameters)

    def unit(self, site: LatentSite, name: str, value: Tensor) -> float:
        """Return the unit of steps: 1 for pseudo-outputs, which is about their scale in the prior."""
        return 1.0 if name == "target" else super().unit(site, name, value)


class DeferredWeight(WeightPlaceholder):
    """A weight or bias that a :class:`Run` draws, like a tensor of its shape, dtype and device."""

    run: "Run"
    site: LatentSite

    def __new__(cls, run: "Run", site: LatentSite, name: str, like: Tensor) -> Self:
        return cls._make(like, like.shape, SiteUse(name), run=run, site=site)

    def __repr__(self, **options: object) -> str:  # type: ignore[override]
        return f"DeferredWeight(site='{self.use.name}', shape={tuple(self.shape)})"

    def draw(self) -> Tensor:
        return self.run.value(self.site, self.use.name)

    def sample_outputs(self, call: Call) -> None:
        """Sample the weight given the inputs; the call is then an ordinary one."""
        if isinstance(call, Application):
            self.run.meet(self.site, call)


class Propagation(Coupling):
    """A run of the net on the inducing points, which draws each weight given its inputs."""

    def __init__(
        self, posteriors: Iterable[SitePosterior], model: Callable[..., Any], inputs: Tensor
    ) -> None:
        self._posteriors = {each.site.name: each for each in posteriors}
        super().__init__(self._posteriors)
        self._run_on = model, inputs

    def condition(
        self, how: How, at: Mapping[str, Any], number: Tensor | int | None
    ) -> dict[str, Any]:
        if how == "marginals":
            raise NotImplementedError(
                f"The weights {list(self.sites)} depend on each other, and have no quantiles or moments "
                "in closed form. Take those of draws: `guide.draw()`."
            )
        model, inputs = self._run_on
        found: dict[str, Any] = {}

        def note(name: str, distribution: Any) -> Tensor:
            value = median_of(distribution) if how == "mean" else distribution.rsample()
            found[name] = already_drawn(distribution, value)
            return value

        own, others = list[SitePosterior](), dict[str, Tensor]()
        for name, each in self._posteriors.items():
            if isinstance(each.family, GlobalInducing):
                own.append(each)
            else:
                others |= each.site.split(note(name, at[name]))
        run = Run(own, lambda name, rows: note(name, at[name].condition(rows)), others)
        # A draw is for predictions, also after training.
        with nullcontext() if how == "sample" else in_evaluation(modules_of(model)):
            run.run(model, inputs)
        return found


class Run(Messenger):
    """Runs a model and draws each weight, by its site's name and its inputs, when these are known."""

    def __init__(
        self,
        own: Iterable[SitePosterior],
        draw: Callable[[str, Tensor], Tensor],
        others: Mapping[str, Tensor],
    ) -> None:
        super().__init__()
        self._draw = draw
        self._drawn: dict[str, Tensor] = {}
        self._values: dict[str, Tensor] = dict(others)
        for posterior in own:
            site, like = posterior.site, posterior.value("log_scale")
            for name, part in site.split(like.new_empty(site.shape)).items():
                self._values[name] = DeferredWeight(self, site, name, part)

    def run(self, model: Callable[..., Any], inputs: Tensor) -> None:
        self._like, self._is_differentiated = inputs, torch.is_grad_enabled()
        with buffers_kept(model), outside_plates(), poutine.block(), self:
            model(inputs)

    def _pyro_sample(self, msg: Any) -> None:
        if msg["value"] is not None or site_is_subsample(msg):
            return
        value = self._values.get(msg["name"])
        # A site without a value is an observation, which is not used.
        msg["value"] = self._like.new_zeros(msg["fn"].shape()) if value is None else value

    def value(self, site: LatentSite, name: str) -> Tensor:
        """Return a weight or bias, or raise if the weight was not applied to an input before."""
        if name not in self._drawn:
            raise RuntimeError(
                f"The weight at site '{site.name}' is drawn given the inputs of a linear layer or "
                f"convolution, but the net uses '{name}' in another way first. Give it another family, "
                f"as by `families={{'{site.name}': MeanField()}}`."
            )
        return self._drawn[name]

    def meet(self, site: LatentSite, application: Application) -> None:
        """Draw a weight with its bias, given its first inputs."""
        if site.name in self._drawn:
            return
        if self._is_differentiated and inside_checkpoint():  # which would compute the draw again
            raise RuntimeError(
                f"A GlobalInducingGuide draws the weight at site '{site.name}' where the net applies it,"
                " which must not be in an activation checkpoint. Take no checkpoint there, or give the "
                f"weight another family, as by `families={{'{site.name}': MeanField()}}`."
            )
        linear_map, x = application.linear_map, as_drawn(application.x)
        arrangement = application.arrangement
        if linear_map.groups > 1 or not (arrangement is None or arrangement.is_plain):
            raise RuntimeError(
                f"The weight at site '{site.name}' is transposed, stacked or in groups in the call that "
                "applies it, for which there is no regression here. Give it another family, as by "
                f"`families={{'{site.name}': MeanField()}}`."
            )
        if site.bias is not None:
            linear_map, x = linear_map.join_bias(x)
        size = site.shape[1:].numel()
        patches = linear_map.bank(x, torch.eye(size, dtype=x.dtype, device=x.device))
        rows = patches.movedim(linear_map.channel_dim, -1).reshape(-1, size)
        self._drawn |= site.split(self._draw(site.name, rows))
