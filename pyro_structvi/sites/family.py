"""The contract of families, their options in state dicts, and the choice of families for sites."""

import json
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import partial
from inspect import ismethod
from typing import Annotated, Any, ClassVar, TypedDict

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor, nn

from pyro_structvi._checks import NO_CLASS, CheckedFields, Positive, shape_text
from pyro_structvi.nn.priors import matches, matching
from pyro_structvi.sites.latent_site import LatentSite, bijection_at, has_bijection
from pyro_structvi.sites.parameterization import unit_of_lower
from pyro_structvi.weights.site_role import LocalReparam


@dataclass(frozen=True)
class Family(CheckedFields):
    """A kind of posterior for one site, with its options; a SitePosterior holds the parameters.

    A family defines ``fits``, ``init`` and ``distribution``. See "Write your own family" in the
    documentation.

    Attributes:
        needs: A description of the supported sites, for errors.
        constants: The names of tensors of ``init`` that are not trained.
        delayed: The names of parameters with a slow start, ``warm_up`` of
            :class:`~pyro_structvi.infer.StructuredAdam`.
    """

    needs: ClassVar[str] = "a site that its `fits` accepts"
    constants: ClassVar[tuple[str, ...]] = ()
    delayed: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        """Keep the representation, which ``dataclass`` writes for a class that does not define one."""
        super().__init_subclass__(**options)
        if "__repr__" not in vars(cls):
            cls.__repr__ = cls.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        """Show the options, those with ``repr=False`` where they are not the defaults."""
        pairs = [(own, getattr(self, own.name)) for own in fields(self)]
        shown = [
            f"{own.name}={value!r}"
            for own, value in pairs
            if own.repr or (own.compare and value != own.default)
        ]
        return f"{type(self).__qualname__}({', '.join(shown)})"

    def fits(self, site: LatentSite) -> bool:
        """Whether this family supports the site."""
        raise NotImplementedError

    def init(self, site: LatentSite, loc: Tensor, scale: float) -> dict[str, Tensor]:
        """Return the starting values of the unconstrained parameters, new tensors by name.

        For a site in plates each ends with the dimensions of the plates and of an unconstrained event.

        Args:
            site: The site.
            loc: The initial center of the posterior, a value of the site.
            scale: The initial standard deviation of each (unconstrained) element.
        """
        raise NotImplementedError

    def distribution(self, site: LatentSite, **parameters: Tensor) -> TorchDistribution:
        """Return the distribution for unconstrained parameters."""
        raise NotImplementedError

    def unit(self, site: LatentSite, name: str, value: Tensor) -> float:
        """Return the typical scale of a parameter, which is the unit of steps of an optimizer.

        By default it is 1 for a logarithm, ``log_...``; it decreases with the size of a Cholesky factor,
        ``...lower``; any other parameter has the unit of the site.
        """
        if name.endswith("lower"):
            return unit_of_lower(value)
        return 1.0 if "log_" in name else site.unit


@dataclass(frozen=True)
class ContinuousFamily(Family):
    """A family of unconstrained values, which a bijection maps onto the support of a site."""

    needs: ClassVar[str] = "a continuous site, with a bijection onto its support"

    def fits(self, site: LatentSite) -> bool:
        """Whether torch has a bijection onto the support."""
        return has_bijection(site.support)


@dataclass(frozen=True)
class MatrixFamily(Family):
    """A family for weights seen as matrices ``(out, in)``, by default with their biases.

    Args:
        join_bias: Whether the bias of a layer becomes a further column of its weight, with one
            posterior for both, as by default. The bias of ``<name>weight<suffix>`` is the site
            ``<name>bias<suffix>`` of shape ``(out,)``, if there is one and the family fits both
            together. Otherwise, with False, and where its first matching pattern does not match the
            weight, the bias has the family of its pattern, or mean field.
    """

    join_bias: bool = field(default=True, kw_only=True, repr=False)
    needs: ClassVar[str] = "a real weight of at least two dimensions, (out, *rest)"

    def fits(self, site: LatentSite) -> bool:
        """Whether the site is a real event with at least two dimensions."""
        return site.is_real and not site.is_batch and len(site.shape) >= 2


@dataclass(frozen=True)
class FactoredFamily(MatrixFamily):
    """A family whose distributions factor matrices, which are reused without gradients."""


@dataclass(frozen=True)
class MemoryLimitedFamily(MatrixFamily):
    """A family with dense covariances and a limit of memory.

    Args:
        max_memory: The limit for one site by the formula of :meth:`check_memory`, in GiB.
        join_bias: As for :class:`MatrixFamily`.
    """

    max_memory: Positive = field(default=8.0, compare=False)  # does not define the posterior

    def check_memory(
        self, site: LatentSite, elements: str, factors: int, size: int, bytes_each: int
    ) -> None:
        """Raise a ``MemoryError`` if training a site needs more than ``max_memory``.

        That is four times the parameters, for gradients and Adam's two moments, and twice the dense
        factors: covariances of ``size`` elements each, which ``elements`` describes in the error.
        """
        parameters = size + size * (size + 1) // 2
        gibibytes = factors * (4 * parameters + 2 * size**2) * bytes_each / 2**30
        if gibibytes > self.max_memory:
            raise MemoryError(
                f"A full covariance of {elements} {' and '.join(site.names)} would take "
                f"{_memory_text(gibibytes)} in training, and `max_memory` allows "
                f"{_memory_text(self.max_memory)}. Use AutoLowRankLRT, or a StructuredGuide with "
                f"another family for this site, such as {{'{site.name}': LowRank(rank=2), '*': "
                f"{type(self).__name__}()}}; or pass a larger `max_memory`."
            )


def _memory_text(gibibytes: float) -> str:
    return f"{gibibytes / 1024:.3g} TiB" if gibibytes >= 1024 else f"{gibibytes:.3g} GiB"


KEY = "_extra_state"  # torch's key for the result of `get_extra_state`
MOST_NAMED = 5


def as_tensor(family: Family) -> Tensor:
    """Return the options of a family as the bytes of a JSON text, since a state dict holds tensors."""
    parts = (
        f"{json.dumps(name)}: {json.dumps(value, default=partial(_identity_of, family, name))}"
        for name, value in _options_of(family).items()
    )
    text = f"{{{', '.join(parts)}}}"
    return torch.tensor([*text.encode()], dtype=torch.uint8, device="cpu")


def _identity_of(family: Family, name: str, value: Any) -> Any:
    """Return the identity of an option, the same in every process."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    owner = type(value) if isinstance(value, Enum) else value
    text = repr(value)
    if hasattr(owner, "__qualname__") and not ismethod(owner):  # a class or a function
        text = f"{owner.__module__}.{owner.__qualname__}"
        text += f".{value.name}" if isinstance(value, Enum) else ""
    if any(part in text for part in (" at 0x", "<lambda>", "<locals>")):
        raise TypeError(
            f"`{name}` of {type(family).__name__} must be told from other values by its name or `repr`, "
            f"as in a state dict, but got {text}. Define functions and classes by name in a module, and "
            "give the class of an object a `__repr__`."
        )
    return text


def check_start(family: Family, taken: nn.Module, names: Iterable[str]) -> None:
    """Raise unless options are hashable, and names of parameters no attributes of a module."""
    try:
        hash(family)
    except TypeError as error:
        options = {each.name: getattr(family, each.name) for each in fields(family)}
        wrong = [f"`{name}`" for name, value in options.items() if not isinstance(value, Hashable)]
        raise TypeError(
            f"{', '.join(wrong) or 'Options'} of {family!r} must be hashable, to find the sites of one "
            f"family, but got {error}. Write a tuple in place of a list or dict."
        ) from error
    for name in names:
        if hasattr(taken, name):
            raise ValueError(
                f"`init` of {family!r} must return tensors under other names than the attributes of a "
                f"torch module, but one is '{name}'. Write another name, such as '{name}_'."
            )


def check_options(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Compare the families of a module with a state dict before it is loaded."""
    found = []
    for name, part in module.named_modules():
        family, site = getattr(part, "family", None), getattr(part, "site", None)
        key = f"{prefix}{name}.{KEY}" if name else f"{prefix}{KEY}"
        if isinstance(family, Family) and site is not None and key in state:
            own, loaded = _read(key, as_tensor(family)), _read(key, state[key])
            pairs = ((each, loaded.get(each), own.get(each)) for each in [*loaded, *own])
            # A family of another class differs in all of its options.
            different = next((pair for pair in pairs if pair[1] != pair[2]), None)
            if different is not None:
                option, theirs, ours = different
                text = f"{option} = {theirs!s:.60} instead of {ours!s:.60}"
                found.append(f"{text} at the site '{site.name}'")
    if found:
        more = f", and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        raise RuntimeError(
            "`state_dict` must be that of a guide with the same families and options, but it has "
            f"{'; '.join(found[:MOST_NAMED])}{more}. Make the guide with the options of the state dict. "
            "Nothing was loaded."
        )


def _options_of(family: Family, name: str = "") -> dict[str, Any]:
    """Return the class and the options that define a posterior, in families within it too, by name."""
    options: dict[str, Any] = {name or "family": type(family).__name__}
    for each in (own for own in fields(family) if own.compare):
        value, inside = getattr(family, each.name), f"{name}.{each.name}".lstrip(".")
        options |= _options_of(value, inside) if isinstance(value, Family) else {inside: value}
    return options


def _read(key: str, value: Any) -> dict[str, Any]:
    """Read the result of :func:`as_tensor`, also as floats after arithmetic on a state dict."""
    try:
        codes = value.double().round().to(torch.uint8).tolist()
        # NaN by its name, since it does not equal itself.
        options: dict[str, Any] = dict(json.loads(bytes(codes), parse_constant=str))
    except (AttributeError, TypeError, ValueError) as error:
        raise RuntimeError(
            f"`state_dict['{key}']` must be the options of a family as `guide.state_dict()` has them, "
            "but they cannot be read. Leave the entry as it is, or drop it and pass `strict=False`."
        ) from error
    return options


InitLocFn = Annotated[Callable[[dict[str, Any]], Tensor | None], NO_CLASS]
CreatePlates = Annotated[Callable[..., Any], NO_CLASS]  # to plates


class GuideOptions(TypedDict, total=False):
    """Options that every guide takes; see :class:`StructuredGuide`."""

    init_scale: float
    init_relative_scale: float | None
    init_loc_fn: InitLocFn | None
    local_reparam: LocalReparam
    create_plates: CreatePlates | None


# Families of sites without a pattern, in order of preference; structures append to it.
DEFAULTS: list[Family] = []


def choose_families(
    sites: Mapping[str, LatentSite], families: Mapping[str, Family]
) -> dict[str, Family]:
    """Return the family of each site: of the first pattern with a family that fits, or a default."""
    found = {name: _choose_family(site, families) for name, site in sites.items()}
    chosen = {name: family for name, family in found.items() if family is not None}
    unserved = [name for name in found if name not in chosen]
    if unserved:
        raise ValueError(
            f"No family was given for the weights {unserved}. The patterns of "
            f"`families` are {list(families)}, the model's sites {list(sites)}. Add a pattern, for "
            f"instance {{'{unserved[0]}': MeanField()}} or {{'*': MeanField()}}."
        )
    return chosen


def joins_with(
    site: LatentSite,
    family: Family | None,
    sites: Mapping[str, LatentSite],
    patterns: Iterable[str] = (),
) -> str:
    """Return the name of the bias to join with a weight, or "" for none; see :class:`MatrixFamily`."""
    if not (isinstance(family, MatrixFamily) and family.join_bias and len(site.shape) >= 2):
        return ""
    module, _, attribute = site.name.rpartition(".")
    name = f"{module}.".lstrip(".") + attribute.replace("weight", "bias")
    bias = sites.get(name)
    if bias is None or not bias.is_real or bias.is_batch or bias.shape != site.shape[:1]:
        return ""
    pattern = next((pattern for pattern in patterns if matches(name, pattern)), "*")
    return name if matches(site.name, pattern) and family.fits(site.join_bias(bias)) else ""


def _choose_family(site: LatentSite, families: Mapping[str, Family]) -> Family | None:
    if site.support.is_discrete:
        raise ValueError(
            f"The latent site '{site.name}' is discrete. If it is an observation, pass its "
            "value to the model; otherwise enumerate it and hide it from the guide with "
            f"`poutine.block(model, hide=['{site.name}'])`, as "
            "https://pyro.ai/examples/enumeration.html shows."
        )
    whole = replace(site, event_dim=len(site.shape))
    for pattern, family in families.items():
        if not matches(site.name, pattern):
            continue
        if family.fits(site):
            return family
        if not site.plates and site.shape.numel() > 1 and family.fits(whole):
            raise ValueError(
                f"{family} needs one event, but the site '{site.name}' is a batch of shape "
                f"{shape_text(site.shape[: len(site.shape) - site.event_dim])} in no plate. Write "
                f"`.to_event({len(site.shape) - site.event_dim})` at its distribution in the model."
            )
        if pattern == site.name:
            raise ValueError(
                f"{family} needs {family.needs}, but the site '{site.name}' has shape "
                f"{tuple(site.shape)} and support {site.support}. Give it another family, such "
                "as `MeanField()`, or leave it out to get the default."
            )
    if site.is_real and not site.is_batch and len(site.shape) >= 2:
        return None
    bijection_at(site.name, site.support)
    return next(family for family in DEFAULTS if family.fits(site))


def check_patterns(sites: Collection[str], families: Mapping[str, Family]) -> None:
    """Raise a ``ValueError`` if there are no sites, or a pattern matches none of them."""
    if not sites:
        raise ValueError(
            "The model has no latent site for a guide to serve. Make the net Bayesian first, "
            "with `bayesianize(net, prior=1.0)`."
        )
    for pattern in families:
        matching(pattern, sites, "families", "model's sites")
