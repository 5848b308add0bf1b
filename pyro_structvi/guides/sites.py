"""Which latent sites a model has, and how often it uses each: by looking, or by one run."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.nn import PyroModule
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn

from pyro_structvi._pyro import declared_name, declared_samples, outside_plates
from pyro_structvi.distributions.medians import unwrapped
from pyro_structvi.families import LatentSite, Plate
from pyro_structvi.lazy.counting import CountedWeight
from pyro_structvi.lazy.site_role import SiteRole
from pyro_structvi.lazy.weight import SiteUse
from pyro_structvi.linalg.shapes import shrink
from pyro_structvi.nn.layout import layout_of, parametrized


@dataclass
class FoundSite:
    """A latent site as it was found.

    Attributes:
        site: What a family may know of it.
        prior: Its distribution in the model.
        initial: The value it had before the net was made Bayesian, if it had one.
        use: How often one pass used it, with ``count`` None where no pass was run.
    """

    site: LatentSite
    prior: Any
    initial: Tensor | None
    use: SiteUse


def find_declared_sites(model: Any) -> dict[str, FoundSite]:
    """Find the ``PyroSample`` attributes of a module tree, without running it.

    Args:
        model: Any callable; only a ``PyroModule`` declares sites.

    Returns:
        The sites by name, in the order of the tree.
    """
    found: dict[str, FoundSite] = {}
    computed = parametrized(model) if isinstance(model, nn.Module) else {}
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if not isinstance(module, PyroModule):
            continue
        for attribute, prior in declared_samples(module).items():
            if getattr(prior, "is_tied", False):  # another module's site
                continue
            if not hasattr(prior, "sample"):
                prior = getattr(prior, "at_median", prior)(module)
            if isinstance(prior, Tensor):  # a deterministic function of other sites
                continue
            name = declared_name(module, attribute)
            initial = module.__dict__.get("initial_values", {}).get(attribute)
            shape = torch.Size(prior.shape())
            layout = layout_of(computed.get(id(module), module), attribute, shape)
            site = LatentSite(
                name,
                shape,
                len(shape),
                prior.support,
                prior_scale=_scale_of(prior),
                fan_in=layout.fan_in,
                input_dim=layout.input_dim,
                groups=layout.groups,
            )
            found[name] = FoundSite(site, prior, initial, SiteUse(name))
    return found


def find_sites_by_running(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, FoundSite]:
    """Run the model once on draws from its prior, and record its latent sites and their uses.

    Buffers of the model, such as running statistics, are put back afterwards.

    Args:
        model: The model.
        args: Its arguments, observations included.
        kwargs: Its keyword arguments.

    Returns:
        The sites by name, in the order of execution.

    Raises:
        NotImplementedError: If a latent site stands in a subsampled plate.
    """
    recorder = _SiteRecorder()
    with torch.no_grad(), _buffers_kept(model), outside_plates(), poutine.block(), recorder:
        model(*args, **kwargs)
    declared = find_declared_sites(poutine.unwrap(model))
    for name, found in recorder.found.items():
        is_local = any(plate.name in recorder.observed_plates for plate in found.site.plates)
        found.site = replace(found.site, is_local=is_local)
        if name in declared:
            own = declared[name]
            found.initial = own.initial
            layout = {key: getattr(own.site, key) for key in ("fan_in", "input_dim", "groups")}
            found.site = replace(found.site, **layout)
    return recorder.found


class _SiteRecorder(Messenger):
    """Records each latent site, and hands the model a value that counts its uses."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, FoundSite] = {}
        self.observed_plates: set[str] = set()

    def _pyro_post_sample(self, msg: Any) -> None:
        name = msg["name"]
        if site_is_subsample(msg):
            return
        if SiteRole.of(msg).is_observation:
            self.observed_plates.update(frame.name for frame in msg["cond_indep_stack"])
            return
        frames = [frame for frame in msg["cond_indep_stack"] if frame.vectorized]
        for frame in frames:
            if frame.full_size not in (None, frame.size):
                raise NotImplementedError(
                    f"The latent site '{name}' stands in the plate '{frame.name}', which is "
                    f"subsampled ({frame.size} of {frame.full_size}). Structured guides serve "
                    "global sites and full plates. Take the site out, with "
                    f"`poutine.block(model, hide=['{name}'])`, and write a separate guide for it."
                )
        value: Tensor = msg["value"]
        event_dim = msg["fn"].event_dim if frames else value.dim()
        plates = tuple(Plate(frame.name, frame.size, frame.dim) for frame in frames)
        site = LatentSite(
            name,
            value.shape,
            event_dim,
            msg["fn"].support,
            plates,
            prior_scale=_scale_of(msg["fn"]),
        )
        use = SiteUse(name)
        self.found[name] = FoundSite(site, msg["fn"], None, use)
        msg["value"] = CountedWeight(value, use)


def _scale_of(prior: Any) -> float | None:
    """Return the standard deviation of a prior, root mean square over its elements."""
    try:
        deviation = unwrapped(prior).stddev
        scales = shrink(deviation, deviation.dim())
    except (NotImplementedError, AttributeError):
        return None
    if scales.is_meta:
        return None
    scale = float(scales.detach().square().mean().sqrt() if scales.numel() > 1 else scales)
    return scale if 0 < scale < math.inf else None


@contextmanager
def _buffers_kept(model: Any) -> Iterator[None]:
    module = poutine.unwrap(model)
    buffers = list(module.buffers()) if isinstance(module, nn.Module) else []
    kept = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, kept, strict=True):
            buffer.copy_(value)
