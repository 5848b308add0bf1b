"""The options that every guide takes."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Annotated, Any, TypedDict

from torch import Tensor

from pyro_structvi._checks import NO_CLASS, shape_text
from pyro_structvi.nn.priors import matches
from pyro_structvi.sites.family import Family
from pyro_structvi.sites.latent_site import LatentSite, bijection_at
from pyro_structvi.weights.site_role import LocalReparam

InitLocFn = Annotated[Callable[[dict[str, Any]], Tensor | None], NO_CLASS]
CreatePlates = Annotated[Callable[..., Any], NO_CLASS]  # to plates


class GuideOptions(TypedDict, total=False):
    """Options that every guide takes; see :class:`StructuredGuide`."""

    init_scale: float
    init_loc_fn: InitLocFn | None
    local_reparam: LocalReparam
    create_plates: CreatePlates | None


# Families of sites that no pattern serves; the first one that fits is taken. Structures add theirs.
DEFAULTS: list[Family] = []


def choose_families(
    sites: Mapping[str, LatentSite], families: Mapping[str, Family]
) -> dict[str, Family]:
    """Return the family of each site: of the first pattern whose family can serve it, or a default.

    Args:
        sites: The sites by name.
        families: The family for each pattern.

    Raises:
        ValueError: If a weight has no family, if a family cannot serve a site that is named outright,
            if a site is discrete or on a support that has no bijection from the real numbers, or if it
            lacks the ``to_event`` that its family needs.
    """
    chosen = {name: _choose_family(site, families) for name, site in sites.items()}
    unserved = [name for name, family in chosen.items() if family is None]
    if unserved:
        raise ValueError(
            f"No family was given for the weights {unserved}. The patterns of "
            f"`families` are {list(families)}, the model's sites {list(sites)}. Add a pattern, for "
            f"instance {{'{unserved[0]}': MeanField()}} or {{'*': MeanField()}}."
        )
    return {name: family for name, family in chosen.items() if family is not None}


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
    """Raise a ``ValueError`` if there are no sites, or a pattern does not match any of them."""
    if not sites:
        raise ValueError(
            "The model has no latent site for a guide to serve. Make the net Bayesian first, "
            "with `bayesianize(net, prior=1.0)`."
        )
    for pattern in families:
        if not any(matches(name, pattern) for name in sites):
            raise ValueError(
                f"The pattern '{pattern}' of `families` matches none of the model's sites {list(sites)}."
            )
