"""Where the posterior of a site starts, without a trace in the global state of random numbers."""

import math
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar

import numpy as np
import torch
from pyro.ops.tensor_utils import periodic_repeat
from torch import Tensor

from pyro_structvi.sites.choosing import InitLocFn
from pyro_structvi.sites.finding import FoundSite
from pyro_structvi.weights.torch_distributions import example_of, median

_SHAPES_ONLY: ContextVar[bool] = ContextVar("shapes_only", default=False)


@contextmanager
def shapes_only() -> Iterator[None]:
    """Let guides that are made in this block have parameters without values, on torch's meta device."""
    token = _SHAPES_ONLY.set(True)
    try:
        yield
    finally:
        _SHAPES_ONLY.reset(token)


@contextmanager
def separate_randomness() -> Iterator[None]:
    """Draw from random numbers that the global seed determines, and put the global state back after.

    They differ from those that are drawn without this block next, so that a start has nothing in common
    with data that is made after it. Python's and NumPy's generators go on in it, and are put back.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices), ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002
        seed = int(torch.randint(2**62, ()))
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed_all(seed)
        yield


def start_of(found: FoundSite, init_loc_fn: InitLocFn | None) -> Tensor:
    """Return where the posterior of a site of the model is centred at first.

    Args:
        found: The site.
        init_loc_fn: As for :class:`~pyro_structvi.guides.StructuredGuide`.

    Raises:
        ValueError: If ``init_loc_fn`` returns a value of another shape.
    """
    site = found.site
    if _SHAPES_ONLY.get():
        dtype = None if found.initial is None else found.initial.dtype
        return torch.empty(site.shape, dtype=dtype, device="meta")
    loc = None
    if init_loc_fn is not None:
        with suppress(
            NotImplementedError
        ):  # of what has no draws, which Pyro's functions begin with
            loc = init_loc_fn({"name": site.name, "fn": found.prior})
    if loc is None:
        loc = _default_start(found)
    for plate in site.plates:
        dim = plate.dim - site.event_dim
        if plate.subsample_size is not None and loc.dim() >= -dim and loc.shape[dim] < plate.size:
            loc = periodic_repeat(loc, plate.size, dim)
    if loc.shape != site.shape:
        raise ValueError(
            f"`init_loc_fn` must return a value of shape {tuple(site.shape)} for the site "
            f"'{site.name}', but got {tuple(loc.shape)}."
        )
    return loc.detach()


def _default_start(found: FoundSite) -> Tensor:
    """Return the value in the original net, or else a He draw for a weight, the prior's median."""
    site, like = found.site, example_of(found.prior)
    if found.initial is not None and site.is_real:
        return found.initial.to(like)
    if site.is_real and not site.plates and len(site.shape) >= 2:
        deviation = math.sqrt(2 / (site.fan_in or site.shape[1:].numel()))
        return deviation * like.new_empty(site.shape).normal_()
    return median(found.prior)
