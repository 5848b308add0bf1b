"""Conversion of a torch net to a net with priors."""

import copy
import math
import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

from pyro_structvi._checks import checked, naming, warn_user
from pyro_structvi._nested import nested_tensors
from pyro_structvi._pyro import declared_samples, make_pyro_module, tie_site
from pyro_structvi._torch import (
    BatchOrInstanceNorm,
    SpectralParametrization,
    forward_hooks,
    is_householder,
    unlisted_weights,
    without_compiler,
)
from pyro_structvi.nn.padding import keep_padding_rows
from pyro_structvi.nn.priors import (
    Prior,
    TiedPrior,
    check_patterns,
    leaves_out,
    matching,
    resolve_prior,
    sample_from,
)
from pyro_structvi.nn.random_module import (
    OwnParameters,
    RandomModule,
    check_any_in_pass,
    freeze,
    keep_priors_only,
    sample_every_site,
)
from pyro_structvi.nn.rank_one import FactorLayer, RankOne
from pyro_structvi.nn.walsh_hadamard import WalshHadamard

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class PointEstimateWarning(UserWarning):
    """Some parameters of the net stay point estimates, trained without a posterior."""


@checked
def bayesianize(
    net: nn.Module,
    prior: Prior = 1.0,
    normalization: bool | None = None,
    *,
    layers: Mapping[str, RankOne | WalshHadamard] | None = None,
) -> PyroModule:
    """Return a copy of a net whose weights are sample sites with priors.

    The given net does not change. Its weights are shared as initial means of a guide, and its frozen
    parameters as buffers: a large frozen base takes its memory once, and loading a state dict writes
    into it. A weight shared by several modules becomes one site. Priors are buffers. An embedding with a
    ``padding_idx`` looks up that row as it is, unless another module shares its weight.

    Args:
        net: Any module; the result of ``torch.compile`` is unwrapped.
        prior: The prior of the weights: a standard deviation, as a number or a tensor with an entry for
            each element; a :class:`FanIn`; a :class:`HierarchicalScale`; a distribution of single
            elements or of all elements together; a function ``(name, parameter) -> prior``; or a mapping
            from patterns of names in ``net.named_parameters()`` to any of these. The first match wins.
            None leaves a parameter without a posterior, trained or frozen.
        normalization: Whether the parameters of normalization layers, and scales of whole layers, become
            sites. When None they stay point estimates, with a warning. Frozen parameters always stay.
        layers: Layers that replace the net's layers, by patterns of names in ``net.named_modules()``:
            ``{"0": RankOne(), "*": WalshHadamard()}``. The first match that fits the module wins. The
            name of a bare layer is "".

    Returns:
        A ``PyroModule`` with the call signature of the net. Outside of Pyro's handlers its random
        parameters have no values, and reading them raises an error.

    Raises:
        TypeError: If ``net`` is not a module or has modules of TorchScript, or a prior or a layer has an
            unknown type.
        ValueError: If the net has no weights or uninitialized lazy weights, a prior does not fit or
            needs an unknown fan-in, a pattern matches nothing that fits, a layer to be replaced shares
            its weight with another, or a weight is under spectral normalization, made orthogonal by
            Householder reflections, or clipped by ``max_norm``.

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
    compiled = [
        name for name, part in net.named_modules() if isinstance(part, torch.jit.ScriptModule)
    ]
    if compiled:
        raise TypeError(
            f"`net` must be of Python's modules, but {compiled} are of TorchScript, which computes with "
            "its own weights. Pass the net that was scripted or traced."
        )
    without = [
        name
        for name, value in net.named_parameters()
        if is_lazy(value) or value.is_meta or not value.numel()
    ]
    if without:
        raise ValueError(
            f"`net` must have values in all its parameters, but {without} have none. Call a lazy net "
            "once, `net(x)`; write `net.to_empty(device='cpu')` on the meta device, and load weights; "
            "leave layers without elements out."
        )
    check_patterns(prior, [_plain_name(name) for name, _ in net.named_parameters()])
    converted = _convert_layers(net, {} if layers is None else layers, prior)
    replaced = {  # with priors of the layers
        id(parameter)
        for module in net.modules()
        if id(module) in converted or isinstance(module, FactorLayer)
        for parameter in module.parameters()
    }
    priors, points = _find_priors(net, prior, normalization, replaced)
    if not priors and not replaced:
        names = [_plain_name(name) for name, _ in net.named_parameters()]
        raise ValueError(
            f"`net` has no weights to put a prior on; its parameters are {names}. Pass a net with "
            "unfrozen weights, a `prior` that is not None for some of them, or `normalization=True`."
        )
    if points and normalization is None:
        warn_user(
            f"These parameters stay point estimates: {points}. Pass `normalization=True` to put priors "
            "on normalization layers and scales of layers too, or `normalization=False` to silence this "
            "warning.",
            PointEstimateWarning,
        )
    _check_reparametrized(net, priors)
    _check_lookups(net, priors)
    return _copy_with_sites(net, priors, converted)


class LastLayer(OwnParameters):
    """A Bayesian last layer: features are point estimates, and the last layer has a prior.

    The outputs are normal, so the bound has no noise with ``StructuredELBO(estimator="moments")``, or
    ``"bound"`` for classes, and ``predict_moments`` is exact up to quadrature.

    Args:
        features: From inputs to features ``(batch, ..., in)``; trained along with the posterior, and not
            copied.
        head: The last layer, from features to outputs; it is copied.
        prior: As for :func:`bayesianize`.
        frozen: Whether the features are in evaluation mode and without gradients. The given module
            itself is put there, also for other nets that use it.

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


# ---- layouts of parameters -----------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """The layout of a parameter, as in a ``LatentSite``."""

    fan_in: float | None = None
    input_dim: int | None = None
    groups: int = 1


def layout_of(module: nn.Module, shape: torch.Size) -> Layout:
    """Return the layout of a parameter.

    A transposed convolution has the weight ``(in, out / groups, *kernel)``; a stride reduces the taps
    that reach an output. A ``Conv1D``, as in GPT-2, has ``(in, out)`` and the attribute ``nf``. Other
    matrices are ``(out, in)``. The layout of more dimensions in custom modules, such as stacked experts,
    is unknown; a leading dimension of size 1, as for tokens and positions, is a batch.
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


def parametrized(modules: Iterable[nn.Module]) -> dict[int, nn.Module]:
    """Return the modules with parametrized weights, by the identity of their parametrizations."""
    return {
        id(own): module
        for module in modules
        if nn.utils.parametrize.is_parametrized(module)
        for own in module.parametrizations.values()  # type: ignore[operator]
    }


def find_layouts(net: nn.Module) -> dict[int, Layout]:
    """Return the layouts of a net's parameters, by identity.

    A parameter with several uses has the layout with the largest fan-in: an embedding that is also the
    last layer is a matrix ``(out, in)``.
    """
    found: dict[int, Layout] = {}
    computed = parametrized(net.modules())
    for module in net.modules():
        for _, parameter in _own_parameters(module):
            own = layout_of(computed.get(id(module), module), parameter.shape)
            known = found.get(id(parameter), own)
            is_larger = (own.fan_in or 0) > (known.fan_in or 0)
            found[id(parameter)] = own if is_larger else known
    return found


def _own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a module without its children, by attribute."""
    return list(module.named_parameters(recurse=False, remove_duplicate=False))


_NORMALIZATIONS = (BatchOrInstanceNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_NORM = re.compile("Norm(?!al)|LayerScale|GRN$")
_SCALE = re.compile(r"gamma_?\d*|lambda_?\d+|layer_scale\w*")


def _normalization_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the own parameters of a module that normalize, or scale a whole layer.

    These belong to torch's normalization layers; to classes with such names that have vectors only, as
    ``LlamaRMSNorm`` and ``LayerScale``; or are vectors ``gamma``, ``layer_scale`` and ``lambda_1``, as
    in ConvNeXt and vision transformers. A vector has one dimension larger than 1.
    """
    own = _own_parameters(module)
    vectors = [(name, value) for name, value in own if max(value.shape, default=1) == value.numel()]
    has_name = any(_NORM.search(kind.__name__) for kind in type(module).__mro__)
    if isinstance(module, _NORMALIZATIONS) or (len(vectors) == len(own) and has_name):
        return [value for _, value in own]
    return [value for name, value in vectors if _SCALE.fullmatch(name)]


def _find_priors(
    net: nn.Module, prior: Prior, normalization: bool | None, replaced: Container[int]
) -> tuple[dict[int, Any], list[str]]:
    """Return priors of parameters, by identity, and the names of normalizing point estimates."""
    normalizing = {
        id(parameter)
        for module in (() if normalization else net.modules())
        for parameter in _normalization_parameters(module)
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
    """Return the name of a parameter without compilers."""
    return name.replace("_orig_mod.", "")


# ---- layers with factored weights ----------------------------------------------------------------


def _convert_layers(
    net: nn.Module, layers: Mapping[str, RankOne | WalshHadamard], prior: Prior
) -> dict[int, Any]:
    """Return the new layers, by the identity of the replaced modules."""
    modules = dict(net.named_modules(remove_duplicate=False))
    chosen: dict[int, tuple[nn.Module, RankOne | WalshHadamard]] = {}
    for pattern, layer in layers.items():
        found = matching(pattern, modules, "layers", "modules")
        fitting = [modules[name] for name in found if layer.fits(modules[name])]
        if not fitting:
            kinds = {name: type(modules[name]).__name__ for name in found}
            raise ValueError(
                f"{layer} needs {layer.needs}, but the pattern '{pattern}' of `layers` matches only "
                f"{kinds}."
            )
        for module in fitting:
            chosen.setdefault(id(module), (module, layer))
    names = {id(module): name for name, module in net.named_modules()}
    owners = Counter(id(value) for part in net.modules() for _, value in _own_parameters(part))
    for key, (module, _) in chosen.items():
        if any(owners[id(own)] > 1 for own in module.parameters()):
            raise ValueError(
                f"The module '{names[key]}' shares a parameter with another one, so it cannot be "
                "replaced by a new layer. Leave it out of `layers`."
            )
    return {
        key: layer.convert(module, names[key], prior) for key, (module, layer) in chosen.items()
    }


# ---- the copy with sites -------------------------------------------------------------------------


def _check_reparametrized(net: nn.Module, sampled: Container[int]) -> None:
    """Raise a ``ValueError`` for parametrizations that are wrong for random parameters."""
    for name, module in net.named_modules():
        for attribute, parameter in _own_parameters(module):
            if id(parameter) not in sampled:
                continue
            hooks = forward_hooks(module)
            steps = [hook for hook in hooks if f"{getattr(hook, 'name', None)}_orig" == attribute]
            full_name = f"{name}.{attribute}".removeprefix(".")
            for step in module if isinstance(module, ParametrizationList) else steps:
                if isinstance(step, (SpectralParametrization, SpectralNorm)):
                    raise ValueError(
                        f"The weight of the parameter '{full_name}' is under `spectral_norm`, which "
                        "divides a draw by a norm that it estimated from other draws. Remove it, with "
                        "`remove_parametrizations` of `torch.nn.utils.parametrize` or "
                        "`torch.nn.utils.remove_spectral_norm`, or freeze the weight."
                    )
                if is_householder(step):
                    raise ValueError(
                        f"The weight of the parameter '{full_name}' is under `orthogonal` by "
                        "Householder reflections, which turns columns of a draw into zeros. Pass "
                        '`orthogonal_map="cayley"` or "matrix_exp" to `orthogonal`.'
                    )


def _check_lookups(net: nn.Module, sampled: Container[int]) -> None:
    """Raise a ``ValueError`` for a random weight that an embedding writes to, unseen by gradients."""
    for name, module in net.named_modules():
        is_clipped = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm
        if is_clipped and id(module.weight) in sampled:
            weight = f"{name}.weight".removeprefix(".")
            raise ValueError(
                f"The embedding of '{weight}' must have no `max_norm` where its weight has a prior, but "
                f"got {module.max_norm}: it writes into draws, and gradients do not see that. Leave it "
                f"out, or give the weight no prior, `prior={{'{weight}': None, '*': ...}}`."
            )


def _copy_with_sites(
    net: nn.Module, priors: dict[int, Any], converted: dict[int, Any]
) -> PyroModule:
    """Return a copy with sites, which shares sampled and frozen parameters with the net."""
    memo: dict[int, Any] = {
        id(parameter): parameter
        for parameter in net.parameters()
        if id(parameter) in priors or not parameter.requires_grad
    } | converted
    for module in net.modules():
        # Hooks and recurrent layers keep computed weights, and torch copies leaves only.
        own = nested_tensors([*vars(module).values()])
        memo |= {id(value): value.detach() for value in own if not value.is_leaf}
    for module in [*net.modules()]:
        inside = without_compiler(module)
        if inside is not module and id(module) not in memo:
            memo[id(module)] = copy.deepcopy(inside, memo)
    bayes_net: Any = copy.deepcopy(net, memo)
    keep_padding_rows(bayes_net, priors)
    with unlisted_weights(bayes_net):
        for module in bayes_net.modules():
            if not isinstance(module, PyroModule):
                module.parameter_names = [name for name, _ in _own_parameters(module)]
        make_pyro_module(bayes_net, RandomModule)
        _leave_fast_path(bayes_net)
        _sample_parameters(bayes_net, priors)
        for module in bayes_net.modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                module.sparse = False  # a gradient with that of the KL is dense
            for attribute, parameter in _own_parameters(module):
                if not parameter.requires_grad:
                    freeze(module, attribute)
            if declared_samples(module):
                module.register_state_dict_post_hook(keep_priors_only)
    bayes_net.register_forward_pre_hook(check_any_in_pass)
    sample_every_site(bayes_net)
    assert isinstance(bayes_net, PyroModule)
    return bayes_net


def _leave_fast_path(bayes_net: PyroModule) -> None:
    """Let encoders call their layers: in evaluation mode torch applies the weights of the layers."""
    for module in bayes_net.modules():
        if not any(isinstance(part, FactorLayer) for part in module.modules()):
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def _sample_parameters(bayes_net: PyroModule, priors: dict[int, Any]) -> None:
    owners: dict[int, tuple[PyroModule, str]] = {}
    for module in bayes_net.modules():
        for attribute, parameter in _own_parameters(module):
            if id(parameter) not in priors:
                continue
            if id(parameter) in owners:
                owner = owners[id(parameter)]
                tie_site(module, attribute, *owner)
                setattr(module, attribute, PyroSample(TiedPrior(*owner)))
                continue
            owners[id(parameter)] = (module, attribute)
            sample_from(module, attribute, priors[id(parameter)], parameter.shape)
            initial = module.__dict__.setdefault("initial_values", {})
            initial[attribute] = parameter.detach()
