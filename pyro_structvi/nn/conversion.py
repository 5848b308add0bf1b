"""How a parameter meets the inputs of its module: over how many terms an output sums."""

import math
import re
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pyro_structvi._checks import check_elements, checked, naming, warn_user
from pyro_structvi._torch import BatchOrInstanceNorm
from pyro_structvi.nn.priors import Prior, check_patterns, leaves_out, matches, resolve_prior
from pyro_structvi.nn.rank_one import RankOne
from pyro_structvi.nn.sampled_copy import (
    FACTOR_LAYERS,
    check_reparametrized,
    copy_with_sites,
    without_compiler,
)
from pyro_structvi.nn.walsh_hadamard import WalshHadamard

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Layout:
    """How a parameter meets inputs.

    Attributes:
        fan_in: Over how many terms an output sums; 0 for what multiplies no input, such as a bias; None
            where it cannot be known.
        input_dim: The dimension that counts input channels; None where there is none, or none is known.
        groups: In how many groups the input channels come, each with outputs of its own.
    """

    fan_in: float | None = None
    input_dim: int | None = None
    groups: int = 1


def layout_of(module: nn.Module, attribute: str, shape: torch.Size) -> Layout:
    """Return how a parameter meets the inputs of its module.

    A transposed convolution keeps its weight as ``(in, out / groups, *kernel)``, and an output sums over
    the taps that reach it, which a stride makes fewer. An output of an embedding is one term, of its
    row. A ``Conv1D``, as in GPT-2, has ``(in, out)`` and the attribute ``nf``. Any other matrix is
    ``(out, in)``. Of more dimensions in modules that are none of torch's, as of stacked experts, nothing
    is known; but what begins with a dimension of size 1, as tokens and positions do, meets a batch, and
    no inputs.
    """
    if len(shape) < 2:
        return Layout(fan_in=0)
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return Layout(fan_in=1, input_dim=0)
    if isinstance(module, _TRANSPOSED):
        taps = (max(k / s, 1) for k, s in zip(shape[2:], module.stride, strict=True))
        return Layout(shape[0] // module.groups * math.prod(taps), input_dim=0)
    if isinstance(module, _CONVOLUTIONS):
        return Layout(shape[1:].numel(), input_dim=1, groups=module.groups)
    if len(shape) == 2 and getattr(module, "nf", None) == shape[1]:
        return Layout(shape[0], input_dim=0)
    if len(shape) == 2 or isinstance(module, nn.Bilinear):
        return Layout(shape[1:].numel(), input_dim=1)
    return Layout(fan_in=0) if shape[0] == 1 else Layout()


def parametrized(net: nn.Module) -> dict[int, nn.Module]:
    """Return the modules whose weights are computed, by the identity of what keeps their parameters."""
    return {
        id(own): module
        for module in net.modules()
        if nn.utils.parametrize.is_parametrized(module)
        for own in module.parametrizations.values()  # type: ignore[operator]
    }


def find_layouts(net: nn.Module) -> dict[int, Layout]:
    """Return the layouts of a net's parameters, by identity.

    Of a parameter with several uses it is that with the largest fan-in: a table of words that is the
    last layer too is a matrix ``(out, in)``.
    """
    found: dict[int, Layout] = {}
    computed = parametrized(net)
    for module in net.modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            own = layout_of(computed.get(id(module), module), attribute, parameter.shape)
            known = found.get(id(parameter), own)
            is_larger = (own.fan_in or 0) > (known.fan_in or 0)
            found[id(parameter)] = own if is_larger else known
    return found


_OF_TORCH = (BatchOrInstanceNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_NORM = re.compile("Norm(?!al)|LayerScale|GRN$")
_SCALE = re.compile(r"gamma_?\d*|lambda_?\d+|layer_scale\w*")


def normalization_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the own parameters of a module that normalize, or scale a whole layer.

    These are the parameters of torch's normalization layers; vectors of a class whose name says so, such
    as ``LlamaRMSNorm`` and ``LayerScale``; and vectors ``gamma``, ``layer_scale`` and ``lambda_1``, as
    ConvNeXt and vision transformers call the scales of their layers.

    A vector has one dimension larger than 1.
    """
    own = list(module.named_parameters(recurse=False, remove_duplicate=False))
    vectors = [(name, value) for name, value in own if max(value.shape, default=1) == value.numel()]
    if isinstance(module, _OF_TORCH):
        return [value for _, value in own]
    if len(vectors) == len(own) and any(
        _NORM.search(kind.__name__) for kind in type(module).__mro__
    ):
        return [value for _, value in own]
    return [value for name, value in vectors if _SCALE.fullmatch(name)]


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


class LastLayer(PyroModule):
    """A net whose features are points and whose last layer has a prior: a Bayesian last layer.

    The outputs are then normal under any posterior of the layer whose image is, so the bound has no
    noise with ``StructuredELBO(estimator="moments")``, or ``"bound"`` for classes, and predictions by
    ``predict_moments(...)`` are exact up to quadrature over the likelihood.

    Args:
        features: From inputs to features ``(batch, ..., in)``; trained along with the posterior.
        head: The last layer, from features to outputs; it is copied.
        prior: As for :func:`bayesianize`.
        frozen: Whether the features stay as they are, in evaluation mode and without gradients.

    Attributes:
        features: The features, the module that was given.
        head: The last layer with its sample sites.

    Raises:
        TypeError: If ``features`` or ``head`` is no module.

    Example:
        >>> import torch
        >>> from pyro_structvi import Classifier, FullCovarianceGuide, StructuredELBO, fit
        >>> net = LastLayer(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 3), prior=1.0)
        >>> model = Classifier(net)
        >>> guide = FullCovarianceGuide(model)
        >>> data = torch.randn(20, 4), torch.arange(20) % 3
        >>> elbo = StructuredELBO(estimator="bound")
        >>> history = fit(model, guide, data, num_steps=5, elbo=elbo, progress=False)
        >>> list(guide.median())
        ['net.head.weight', 'net.head.bias']

    References:
        Harrison, Willes and Snoek (2024), "Variational Bayesian last layers".
    """

    @checked
    def __init__(
        self, features: nn.Module, head: nn.Module, prior: Prior = 1.0, frozen: bool = False
    ) -> None:
        super().__init__()
        self.features = features.requires_grad_(False).eval() if frozen else features
        self.head = bayesianize(head, prior)
        self.frozen = frozen

    def forward(self, x: Any) -> Tensor:
        """Return the outputs of the last layer."""
        if self.frozen:
            self.features.eval()
        with naming("x", x):
            outputs: Tensor = self.head(self.features(x))
        return outputs
