"""Reports of the posterior and the sampling of each parameter, and estimates of memory."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import pyro.poutine as poutine
import torch
from torch import Tensor, nn

from pyro_structvi._checks import Program, checked, shape_text
from pyro_structvi._pyro import declared_name, unwrapped
from pyro_structvi.nn.random_module import frozen_names
from pyro_structvi.sites.finding import check_call, separate_randomness, trial_run
from pyro_structvi.sites.site_posterior import SitePosterior, joint_name
from pyro_structvi.weights.lazy import DelayDraws, LazySlice, LazyWeight
from pyro_structvi.weights.site_distributions import PointMass
from pyro_structvi.weights.site_role import SiteUse
from pyro_structvi.weights.weight_distribution import WeightDistribution

Moments = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class ParameterReport:
    """The posterior and the sampling of one parameter of a model.

    Attributes:
        name: The name of the site or parameter.
        shape: Its shape.
        state: "random", "point" for a point mass, "shared" for a posterior that several sites share,
            "trained" for a parameter without a prior, "frozen".
        posterior: The family of its posterior; "with ..." for a bias that is joined to its weight.
        drawn: The values that an ELBO samples: "outputs" of its layer, "rows" of a lookup, "factors" of
            the weight, the "weight", or "nothing" for an unused site.
        why: The reason for sampling the weight.
        prior: The standard deviation of the prior, None if it has none; under a
            :class:`~pyro_structvi.HierarchicalScale` at the median of the scale.
        scale: The root of the mean variance of the posterior, in a mixture within and between members;
            None for a point, and if it is unknown, as for inducing weights that layers share.
        parameters: The number of trained parameters.
    """

    name: str
    shape: tuple[int, ...]
    state: str
    posterior: str = ""
    drawn: str = ""
    why: str = ""
    prior: float | None = None
    scale: float | None = None
    parameters: int = 0


@dataclass(frozen=True)
class GuideReport:
    """The posterior and the sampling of each parameter of a model, printed as a table.

    Attributes:
        parameters: One record for each parameter, sites first, then posteriors that sites share, and
            parameters without a prior, also those that a pass of the model reads by ``pyro.param``.
    """

    parameters: tuple[ParameterReport, ...]

    @property
    def local_share(self) -> float:
        """The share of sampled outputs or rows among the used random elements."""
        sizes = {True: 0, False: 0}
        for each in self.parameters:
            if each.state == "random" and each.drawn != "nothing":
                sizes[each.drawn in ("outputs", "rows")] += torch.Size(each.shape).numel()
        return sizes[True] / max(sum(sizes.values()), 1)

    def __str__(self) -> str:
        head = tuple(each.name for each in fields(ParameterReport))
        rows = [head, *(tuple(map(_cell, astuple(each))) for each in self.parameters)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = (
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        )
        return "\n".join(line.rstrip() for line in lines)


def report(self: Any, *args: Any, **kwargs: Any) -> GuideReport:
    """Report for each parameter whether it is random, what an ELBO samples, and why.

    One pass is run as by ``StructuredELBO``; the model and the global random state are restored. The
    arguments are the model's, observations included. ``print`` shows the report as a table.

    Example:
        >>> from pyro_structvi import Classifier, MeanFieldGuide, bayesianize
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> model = Classifier(bayesianize(net, {"2.*": 0.5, "*": None}), num_data=20)
        >>> x, y = torch.randn(20, 4), torch.zeros(20, dtype=torch.long)
        >>> print(MeanFieldGuide(model).report(x, y))
        name          shape   state    posterior  drawn    why  prior  scale  parameters
        net.2.weight  (3, 8)  random   MeanField  outputs       0.5    0.01   48
        net.2.bias    (3,)    random   MeanField  outputs       0.5    0.01   6
        net.0.weight  (8, 4)  trained                                         32
        net.0.bias    (8,)    trained                                         8
    """
    return report_on(self, [self], [1.0], args, kwargs)


def report_on(
    guide: Any, members: Sequence[Any], weights: Sequence[float], args: Any, kwargs: Any
) -> GuideReport:
    """Report on a guide, the mixture of its members with these weights."""
    model = guide.needed_model
    check_call(model, args, kwargs)
    with separate_randomness():
        if not guide.is_initialized:
            guide.initialize(*args, **kwargs)
        passes = [(member, *trial_pass(model, member, *args, **kwargs)) for member in members]
    first, drawn, of_model = passes[0]
    sites = {
        name: _over_members([_report_site(name, *each) for each in passes], weights)
        for name in first.uses
        if name in drawn.nodes
    }
    own = (_with_reason_of_weight(each, sites) for each in sites.values())
    others = _report_others(guide, unwrapped(model), of_model)
    return GuideReport((*own, *_report_shared(members), *others))


def trial_pass(
    model: Callable[..., Any], guide: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Any, Any]:
    """Run guide and model once, as ``StructuredELBO`` does, and return their traces."""
    with trial_run(model), DelayDraws():
        drawn = poutine.trace(guide).get_trace(*args, **kwargs)
        of_model = poutine.trace(poutine.replay(model, trace=drawn)).get_trace(*args, **kwargs)
    return drawn, of_model


def _report_site(
    name: str, guide: Any, drawn: Any, of_model: Any
) -> tuple[ParameterReport, Moments | None]:
    """Return the row of a site of one member without its scale, and the mean and variance."""
    posterior, value = guide[name], drawn.nodes[name]["value"]
    site = posterior.site
    q = drawn.nodes[name if site.bias is None else joint_name(site)]["fn"]
    is_owner = site.name == name
    prior = site.prior_scale if is_owner or site.bias is None else site.bias.prior_scale
    family = type(posterior.family).__name__ if is_owner else f"with {site.name}"
    count = _count_trained(posterior) if is_owner else 0
    if isinstance(q, PointMass) and not bool(q.variance.any()):
        state, way = "point", ("weight", "a point")
    else:
        state, way = "random", _way_of(value, [guide.uses[each] for each in site.names], q)
    row = ParameterReport(
        name, tuple(value.shape), state, family, *way, prior=prior, parameters=count
    )
    return row, _moments_of(posterior, name, q)


def _count_trained(posterior: SitePosterior) -> int:
    return sum(each.numel() for each in posterior.parameters() if each.requires_grad)


def _way_of(value: Any, uses: Sequence[SiteUse], q: Any) -> tuple[str, str]:
    """Return the kind of values sampled in a pass, and the reason if it is the weight.

    A weight and its joined bias are sampled for the reasons of both.
    """
    if isinstance(value, LazySlice):
        value = value.whole
    if isinstance(value, LazyWeight):
        value = next(iter(value.used_items), value)
        return value.sampled or "nothing", value.reason if value.sampled == "weight" else ""
    reasons = (reason for use in uses if (reason := _reason_of(use, q)))
    return "weight", next(reasons, "a site in a plate")


def _reason_of(use: SiteUse, q: Any) -> str:
    """Return the reason of a site's use for sampling the weight, or ""."""
    reasons = {
        "local_reparam=False": use.local_reparam is False,
        use.eager_reason: bool(use.eager_reason),
        f"{use.count} uses": use.count is not None and use.count > 1,
        "chosen elements, drawn together": isinstance(q, PointMass),
        "a site that is not a weight": not isinstance(q, WeightDistribution),
        "examples that interact": use.examples_interact,
        "rows that are not examples": use.has_other_rows,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _with_reason_of_weight(
    own: ParameterReport, sites: Mapping[str, ParameterReport]
) -> ParameterReport:
    """Give a bias, which is sampled if its weight is, the reason of the weight."""
    module, dot, attribute = own.name.rpartition(".")
    weight = sites.get(module + dot + attribute.replace("bias", "weight"), own)
    is_of_weight = weight.state == "random" and own.drawn == weight.drawn == "weight"
    return replace(own, why=weight.why) if is_of_weight else own


@torch.no_grad()
def _moments_of(posterior: SitePosterior, name: str, q: Any) -> Moments | None:
    """Return mean and variance of a site's elements; None if unknown, as for coupled sites."""
    try:
        own = q if isinstance(q, PointMass) else posterior()
        mean, variance = (posterior.site.split(each)[name] for each in (own.mean, own.variance))
    except (NotImplementedError, RuntimeError):
        return None
    return mean, variance


def _over_members(
    found: Sequence[tuple[ParameterReport, Moments | None]], weights: Sequence[float]
) -> ParameterReport:
    """Return the row of a site, with the scale of the mixture of the members."""
    rows, moments = [row for row, _ in found], [own for _, own in found if own is not None]
    families = ", ".join(dict.fromkeys(row.posterior for row in rows))
    is_known = len(moments) == len(rows)
    scale = _scale_of_mixture(moments, weights) if is_known else None
    count = sum(row.parameters for row in rows)
    return replace(rows[0], posterior=families, scale=scale, parameters=count)


@torch.no_grad()
def _scale_of_mixture(moments: Sequence[Moments], weights: Sequence[float]) -> float | None:
    """Return the root of the mean variance within and between members; None for one point."""
    pairs = [*zip(weights, moments, strict=True)]
    center = sum(weight * mean for weight, (mean, _) in pairs)
    parts = (weight * (own + (mean - center) ** 2) for weight, (mean, own) in pairs)
    return float(torch.as_tensor(sum(parts)).mean().sqrt()) or None


def _report_shared(members: Iterable[Any]) -> Iterator[ParameterReport]:
    """Report the posteriors that several sites share, of all members in one row."""
    found: dict[str, list[SitePosterior]] = {}
    for member in members:
        own = {*member.posteriors.values()}
        for posterior in member.all_posteriors():
            if posterior not in own:
                found.setdefault(posterior.site.name, []).append(posterior)
    for name, shared in found.items():
        shape, family = tuple(shared[0].site.shape), type(shared[0].family).__name__
        count = sum(map(_count_trained, shared))
        yield ParameterReport(name, shape, "shared", family, parameters=count)


def _report_others(guide: Any, model: Any, of_model: Any) -> Iterator[ParameterReport]:
    """Report the parameters outside of posteriors, trained and frozen."""
    modules = [guide, model] if isinstance(model, nn.Module) else [guide]
    found = {name: value for module in modules for name, value in module.named_parameters()}
    for name in of_model.param_nodes:
        # A module reads its own parameter, also if Pyro's store has another of that name.
        found.setdefault(name, of_model.nodes[name]["value"])
    known = {parameter for each in guide.all_posteriors() for parameter in each.parameters()}
    for name, value in found.items():
        parameter = value if isinstance(value, nn.Parameter) else value.unconstrained()
        if parameter not in known:
            known.add(parameter)
            is_trained = parameter.requires_grad
            state, count = ("trained", parameter.numel()) if is_trained else ("frozen", 0)
            yield ParameterReport(name, tuple(value.shape), state, parameters=count)
    for module in modules[-1].modules():
        for attribute in frozen_names(module):
            shape = tuple(getattr(module, attribute).shape)
            yield ParameterReport(declared_name(module, attribute), shape, "frozen")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return shape_text(value)
    return f"{value:.2g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class MemoryEstimate:
    """The parameters of a guide, and the memory of training them.

    Attributes:
        parameters: The number of trained parameters of each site in all members, by name; a joined bias
            counts with its weight, and a shared posterior of several sites has a separate name.
        parameter_bytes: The bytes of all parameters and constants.
        training_bytes: These bytes with gradients and Adam's two moments, without activations and two
            further moments of ``StructuredAdam`` for each number of a correlated posterior's noise.
    """

    parameters: dict[str, int]
    parameter_bytes: int
    training_bytes: int

    @property
    def total(self) -> int:
        """The number of all trained parameters."""
        return sum(self.parameters.values())


@checked
def estimate_memory(
    make_guide: Callable[..., Any], model: Program, /, *args: Any, **options: Any
) -> MemoryEstimate:
    """Count the parameters of a guide without allocating them.

    Args:
        make_guide: The class of a guide, or a function that returns a guide.
        model: A model that declares its sites, as by ``bayesianize``.
        *args: Further arguments of ``make_guide``, such as the families of a ``StructuredGuide``.
        **options: Its keyword arguments.

    Raises:
        ValueError: If the model declares no sites.
        MemoryError: If a site exceeds ``max_memory`` of its family.

    Example:
        >>> import torch
        >>> from pyro_structvi import Classifier, KTiedGuide, bayesianize
        >>> net = bayesianize(torch.nn.Linear(4096, 4096), prior=0.02)
        >>> estimate = estimate_memory(KTiedGuide, Classifier(net, num_data=100), rank=2)
        >>> estimate.total, estimate.training_bytes
        (16797698, 268763168)
    """
    with torch.device("meta"):
        guide = make_guide(model, *args, **options)
    if not guide.site_names:
        raise ValueError(
            "`model` must declare its sample sites, as `bayesianize` does, but none is known before it "
            "runs. Make the guide, call `guide.initialize(...)`, and count its parameters."
        )
    parameters: dict[str, int] = {}
    for posterior in guide.all_posteriors():  # members of a mixture have the same sites
        own, name = sum(value.numel() for value in posterior.parameters()), posterior.site.name
        parameters[name] = parameters.get(name, 0) + own
    trained = sum(value.numel() * value.element_size() for value in guide.parameters())
    constant = sum(value.numel() * value.element_size() for value in guide.buffers())
    return MemoryEstimate(parameters, trained + constant, 4 * trained + constant)
