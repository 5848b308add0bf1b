"""Names for the dimensions of weights, observations and outputs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.nn import PyroModule
from torch import nn

from pyro_structvi._pyro import declared_name, declared_samples
from pyro_structvi.nn.layout import layout_of, parametrized


def dims_of_sites(
    model: Callable[..., Any], shapes: Mapping[str, Sequence[int]]
) -> dict[str, list[str]]:
    """Return names for the dimensions of a model's sites.

    Those of a weight that a module declares end in ``_out``, ``_in`` and ``_kernel``, and that of a bias
    or of a normalization in ``_out``; dimensions of one kind are numbered. Where nothing is known of a
    site they are numbered as ArviZ does it, ``_dim_0`` and so on.

    Args:
        model: The model.
        shapes: The shapes of values, by site.

    Example:
        >>> from pyro_structvi import bayesianize
        >>> net = bayesianize(nn.Conv2d(3, 8, 5), prior=1.0)
        >>> dims_of_sites(net, {"weight": (8, 3, 5, 5)})["weight"]
        ['weight_out', 'weight_in', 'weight_kernel_0', 'weight_kernel_1']
    """
    found = {name: numbered_dims(name, len(shape)) for name, shape in shapes.items()}
    for name, module, attribute in _declared(model):
        kinds = _kinds(module, attribute, torch.Size(shapes.get(name, ())))
        if kinds:
            found[name] = [f"{name}_{kind}" for kind in _told_apart(kinds)]
    return found


def dims_of_observations(site: str, shape: Sequence[int]) -> list[str]:
    """Return names for the dimensions of observations ``(N, *event)`` at a site."""
    return [f"{site}_id", *numbered_dims(site, len(shape) - 1)]


def dims_beside(
    name: str, shape: Sequence[int], known: Sequence[str], known_shape: Sequence[int]
) -> list[str]:
    """Return names for the dimensions of a variable, the known ones for as long as their sizes agree."""
    pairs = zip(shape, known_shape, strict=False)
    shared = next((at for at, (own, other) in enumerate(pairs) if own != other), len(known))
    shared = min(shared, len(shape))
    return [*known[:shared], *numbered_dims(name, len(shape) - shared)]


def numbered_dims(name: str, count: int) -> list[str]:
    """Return names for dimensions of which nothing is known, as ArviZ gives them."""
    return [f"{name}_dim_{number}" for number in range(count)]


def _declared(model: Any) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield each site that a module declares, with the module that has the weight, and its attribute."""
    net = poutine.unwrap(model)
    computed = parametrized(net) if isinstance(net, nn.Module) else {}
    for module in net.modules() if isinstance(net, nn.Module) else ():
        for attribute in declared_samples(module) if isinstance(module, PyroModule) else ():
            owner = computed.get(id(module), module)
            yield (
                declared_name(module, attribute),
                owner,
                attribute if owner is module else "weight",
            )


def _kinds(module: nn.Module, attribute: str, shape: torch.Size) -> list[str]:
    """Return what each dimension of a weight or bias counts; nothing where that is not known."""
    if len(shape) == 1 and ("weight" in attribute or "bias" in attribute):
        return ["out"]
    layout = layout_of(module, attribute, shape)
    if layout.input_dim is None or "weight" not in attribute:
        return []
    further = "in" if isinstance(module, nn.Bilinear) else "kernel"
    first = ["in", "out"] if layout.input_dim == 0 else ["out", "in"]
    return [*first, *(further for _ in shape[2:])]


def _told_apart(kinds: list[str]) -> list[str]:
    """Return the kinds, with numbers where there are several of one."""
    return [
        f"{kind}_{kinds[:at].count(kind)}" if kinds.count(kind) > 1 else kind
        for at, kind in enumerate(kinds)
    ]
