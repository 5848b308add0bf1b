"""Turn any torch net into a PyroModule whose weights are sample sites."""

from collections import Counter
from collections.abc import Container, Mapping
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from pyro_structvi._checks import check_elements, checked, warn_user
from pyro_structvi._patterns import matches
from pyro_structvi.nn.layers.rank_one import RankOne
from pyro_structvi.nn.layers.walsh_hadamard_conversion import WalshHadamard
from pyro_structvi.nn.layout import find_layouts
from pyro_structvi.nn.normalization import normalization_parameters
from pyro_structvi.nn.priors import Prior, check_patterns, leaves_out, resolve_prior
from pyro_structvi.nn.reparametrized import check_reparametrized
from pyro_structvi.nn.sampled_copy import FACTOR_LAYERS, copy_with_sites, without_compiler


class PointEstimateWarning(UserWarning):
    """Some parameters of the net stay point estimates: they are trained, without a posterior."""


@checked
def bayesianize(
    net: nn.Module,
    prior: Prior = 1.0,
    normalization: bool | None = None,
    *,
    layers: Mapping[str, RankOne | WalshHadamard] | None = None,
) -> Any:
    """Return a copy of a net whose weights are sample sites with priors.

    The given net is not changed. Its weights are kept, by reference, as the values at which a guide's
    means start. Its frozen parameters are shared too, as buffers: a large base takes its memory once,
    and a state dict that is loaded is written into it. A weight shared by several modules becomes one
    site. Priors are buffers: ``.to()``, ``.double()`` and state dicts carry them along.

    Args:
        net: Any module, a bare ``nn.Linear`` too. Of what ``torch.compile`` returned the module inside
            is taken; ``fit`` compiles its own steps.
        prior: The prior of the weights: a standard deviation, one for all or a
            tensor with one for each element; a :class:`FanIn`; a :class:`HierarchicalScale`; a
            distribution of single elements, or of all elements together; a function ``(name,
            parameter) -> prior``; or a mapping from patterns of parameter names, as in
            ``net.named_parameters()``, to any of these. The first match wins. None, alone or in a
            mapping, leaves a parameter as it is, trained or frozen, without a posterior.
        normalization: Whether the parameters of normalization layers, and scales of whole layers, get
            sites too. When None they stay point estimates, and a warning says so. Frozen parameters
            always stay.
        layers: Layers that replace the net's layers, for patterns of module names as in
            ``net.named_modules()``: ``{"0": RankOne(), "*": WalshHadamard()}``. The first match wins
            that fits the module. Of a bare layer the name is "".

    Returns:
        A ``PyroModule`` that is called as the net is, inside of a model under Pyro's handlers. Elsewhere
        its random parameters have no values, and what asks for them raises an error.

    Raises:
        TypeError: If ``net`` is not a module, or a prior or a layer has an unknown type.
        ValueError: If the net has no weights, or lazy ones without a shape, a prior does not fit or
            needs a fan-in that cannot be known, a pattern matches no parameter or no module that fits, a
            layer to be replaced shares its weight with another, or a weight is under spectral
            normalization or made orthogonal by Householder reflections.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> from pyro_structvi import FanIn, MeanFieldGuide
        >>> bayes_net = bayesianize(net, prior={"*.bias": 1.0, "*": FanIn()})
        >>> guide = MeanFieldGuide(bayes_net)
        >>> with guide.sampled():
        ...     bayes_net(torch.zeros(5, 4)).shape
        torch.Size([5, 1])
        >>> type(guide.to_net()).__name__
        'Sequential'
    """
    net = without_compiler(net)
    _check_initialized(net)
    check_elements("net", net.named_parameters())
    check_patterns(prior, [_plain_name(name) for name, _ in net.named_parameters()])
    converted = _convert_layers(net, {} if layers is None else layers, prior)
    replaced = _parameters_of_layers(net, converted)
    priors, points = _find_priors(net, prior, normalization, replaced)
    if not priors and not replaced:
        names = [_plain_name(name) for name, _ in net.named_parameters()]
        raise ValueError(
            f"`net` has no weights to put a prior on; its parameters are {names}. Pass a net with "
            "unfrozen weights, a `prior` that is not None for some of them, or `normalization=True`."
        )
    if points and normalization is None:
        warn_user(
            f"These parameters stay point estimates: {points}. Pass `normalization=True` to put a prior "
            "on those of normalization layers too, and on scales of layers, or `normalization=False` to "
            "keep them so without this message.",
            PointEstimateWarning,
        )
    check_reparametrized(net, priors)
    return copy_with_sites(net, priors, converted)


def _find_priors(
    net: nn.Module, prior: Prior, normalization: bool | None, replaced: Container[int]
) -> tuple[dict[int, Any], list[str]]:
    """Return priors of the parameters that are to be sites, by identity, and names of normalizations'.

    These stay point estimates.
    """
    normalizing = {
        id(parameter)
        for module in (() if normalization else net.modules())
        for parameter in normalization_parameters(module)
    }
    layouts = find_layouts(net)
    priors, points = {}, []
    for full_name, parameter in net.named_parameters():
        key, name = id(parameter), _plain_name(full_name)
        if key in replaced or not parameter.requires_grad or leaves_out(prior, name):
            continue
        if key in normalizing:
            points.append(name)
            continue
        found = resolve_prior(prior, name, parameter, layouts[key].fan_in)
        if found is not None:
            priors[key] = found
    return priors, points


def _plain_name(name: str) -> str:
    """Return the name that a parameter has without compilers."""
    return name.replace("_orig_mod.", "")


def _check_initialized(net: nn.Module) -> None:
    lazy = [name for name, value in net.named_parameters() if is_lazy(value)]
    if lazy:
        raise ValueError(
            f"`net` must have weights with shapes, but {lazy} wait for their first input. Call it once, "
            "`net(x)`, before `bayesianize(net)`."
        )


def _convert_layers(
    net: nn.Module, layers: Mapping[str, RankOne | WalshHadamard], prior: Prior
) -> dict[int, Any]:
    """Return what takes the place of modules of the net, by the modules' identity."""
    chosen: dict[int, tuple[nn.Module, RankOne | WalshHadamard]] = {}
    for pattern, layer in layers.items():
        for module in _find_fitting(net, pattern, layer):
            chosen.setdefault(id(module), (module, layer))
    names = {id(module): name for name, module in net.named_modules()}
    _check_untied(net, {key: names[key] for key in chosen})
    return {
        key: layer.convert(module, names[key], prior) for key, (module, layer) in chosen.items()
    }


def _find_fitting(net: nn.Module, pattern: str, layer: RankOne | WalshHadamard) -> list[nn.Module]:
    modules = dict(net.named_modules(remove_duplicate=False))
    matching = {name: module for name, module in modules.items() if matches(name, pattern)}
    fitting = [module for module in matching.values() if layer.fits(module)]
    if not matching:
        raise ValueError(
            f"The pattern '{pattern}' of `layers` matches none of the modules {list(modules)}."
        )
    if not fitting:
        kinds = {name: type(module).__name__ for name, module in matching.items()}
        raise ValueError(
            f"{layer} needs {layer.needs}, but the pattern '{pattern}' of `layers` matches only "
            f"{kinds}."
        )
    return fitting


def _check_untied(net: nn.Module, chosen: dict[int, str]) -> None:
    owners = Counter(
        id(parameter) for module in net.modules() for parameter in module.parameters(recurse=False)
    )
    for module in net.modules():
        if id(module) in chosen and any(owners[id(own)] > 1 for own in module.parameters()):
            raise ValueError(
                f"The module '{chosen[id(module)]}' shares a parameter with another one, so it "
                "cannot be replaced by a layer of its own. Leave it out of `layers`."
            )


def _parameters_of_layers(net: nn.Module, converted: dict[int, Any]) -> set[int]:
    """Return the parameters that belong to rank-1 and Walsh-Hadamard layers, old or new."""
    return {
        id(parameter)
        for module in net.modules()
        if id(module) in converted or isinstance(module, FACTOR_LAYERS)
        for parameter in module.parameters()
    }
