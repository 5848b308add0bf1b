"""Weights that a net computes from its parameters: by parametrizations, or by hooks."""

import copy
from collections.abc import Container, Iterator
from typing import Any

from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

from pyro_structvi._pyro import declared_samples, make_pyro_module, tie_site
from pyro_structvi._torch import (
    SpectralParametrization,
    compiled_module,
    forward_hooks,
    is_householder,
    unlisted_weights,
)
from pyro_structvi.nn.priors import sample_from
from pyro_structvi.nn.random_module import RandomModule, refuse_outside, sample_every_site
from pyro_structvi.nn.rank_one import RankOneLayer
from pyro_structvi.nn.walsh_hadamard import WalshHadamardLayer


def check_reparametrized(net: nn.Module, sampled: Container[int]) -> None:
    """Refuse parametrizations that are wrong for random parameters."""
    for name, module in net.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in sampled:
                continue
            for step in _steps_from(module, attribute):
                reason = None
                if isinstance(step, (SpectralParametrization, SpectralNorm)):
                    reason = (
                        "is under `spectral_norm`, which divides a draw by a norm that it estimated "
                        "from other draws. Remove it, with `remove_parametrizations` of "
                        "`torch.nn.utils.parametrize` or `torch.nn.utils.remove_spectral_norm`, or "
                        "freeze the weight"
                    )
                elif is_householder(step):
                    reason = (
                        "is under `orthogonal` by Householder reflections, which turns columns of a "
                        'draw into zeros. Pass `orthogonal_map="cayley"` or "matrix_exp" to '
                        "`orthogonal`"
                    )
                if reason:
                    full_name = f"{name}.{attribute}".removeprefix(".")
                    raise ValueError(f"The weight of the parameter '{full_name}' {reason}.")


def _steps_from(module: nn.Module, attribute: str) -> list[Any]:
    """Return the parametrizations, or hooks, that make a weight of a parameter."""
    if isinstance(module, ParametrizationList):
        return list(module)
    return [
        hook for hook in forward_hooks(module) if f"{getattr(hook, 'name', None)}_orig" == attribute
    ]


def computed_weights(net: nn.Module) -> dict[int, Tensor]:
    """Return what hooks have computed from parameters, as tensors that can be copied, by identity."""
    return {
        id(value): value.detach()
        for module in net.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }


_NAMES = "frozen_parameters"


def freeze(module: nn.Module, attribute: str) -> None:
    """Turn a parameter into a buffer with the same memory: Pyro's param store would thaw it."""
    parameter = getattr(module, attribute)
    is_usual = type(parameter) is nn.Parameter
    delattr(module, attribute)
    module.register_buffer(attribute, parameter.detach() if is_usual else parameter)
    if (
        not is_usual
    ):  # its class says how it is read, as in 4 bits; Pyro looks at what is no attribute
        module.__dict__[attribute] = parameter
    module.__dict__.setdefault(_NAMES, []).append(attribute)


def frozen_names(module: nn.Module) -> list[str]:
    """Return the attributes of a module that were frozen parameters."""
    names: list[str] = vars(module).get(_NAMES, [])
    return names


def buffers_that_change(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of a module, without those of its children, that a pass may change."""
    frozen = frozen_names(module)
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if name not in frozen:
            yield name, buffer


FACTOR_LAYERS = (RankOneLayer, WalshHadamardLayer)  # with sites of their own


def copy_with_sites(
    net: nn.Module, priors: dict[int, Any], converted: dict[int, Any]
) -> PyroModule:
    """Return a copy of a net whose parameters are sample sites where they have a prior.

    What becomes a site, or is frozen, is shared with the net and not copied: nobody writes to it.

    Args:
        net: A module with initialized weights.
        priors: Priors of parameters, by the parameters' identity.
        converted: What takes the place of modules, by the modules' identity.

    Returns:
        The copy, in which frozen parameters are buffers, and shared ones one site.
    """
    shared: dict[int, Any] = {
        id(parameter): parameter
        for parameter in net.parameters()
        if id(parameter) in priors or not parameter.requires_grad
    }
    bayes_net = _copy(net, shared | converted | computed_weights(net))
    with unlisted_weights(bayes_net):
        for module in bayes_net.modules():
            if not isinstance(module, PyroModule):
                module.parameter_names = [name for name, _ in _own_parameters(module)]
        make_pyro_module(bayes_net, RandomModule)
        _leave_fast_path(bayes_net)
        _sample_parameters(bayes_net, priors)
        for module in bayes_net.modules():
            for attribute, parameter in _own_parameters(module):
                if not parameter.requires_grad:
                    freeze(module, attribute)
            if declared_samples(module):
                module.register_state_dict_post_hook(keep_priors_only)
    refuse_outside(bayes_net)
    sample_every_site(bayes_net)
    return bayes_net


def without_compiler(net: nn.Module) -> nn.Module:
    """Return the module inside of one that ``torch.compile`` returned."""
    inside = compiled_module(net)
    return net if inside is None else inside


def _copy(net: nn.Module, memo: dict[int, Any]) -> Any:
    """Return a deep copy without compilers, in which what the memo knows has its place."""
    for module in [*net.modules()]:
        inside = without_compiler(module)
        if inside is not module and id(module) not in memo:
            memo[id(module)] = copy.deepcopy(inside, memo)
    return copy.deepcopy(net, memo)


def _own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a module without those of its children, by attribute."""
    return list(module.named_parameters(recurse=False, remove_duplicate=False))


def _leave_fast_path(bayes_net: PyroModule) -> None:
    """Let encoders call their layers: in evaluation torch would apply the layers' weights itself."""
    for module in bayes_net.modules():
        if not any(isinstance(part, FACTOR_LAYERS) for part in module.modules()):
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
                _tie(module, attribute, *owners[id(parameter)])
                continue
            owners[id(parameter)] = (module, attribute)
            sample_from(module, attribute, priors[id(parameter)], parameter.shape)
            initial = module.__dict__.setdefault("initial_values", {})
            initial[attribute] = parameter.detach()


def keep_priors_only(module: PyroModule, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Hold priors in a state dict and no draws, where a module writes its weights into it by itself."""
    buffers = dict(module.named_buffers(recurse=False))
    for attribute in declared_samples(module):
        state.pop(prefix + attribute, None)
        for name in (name for name in buffers if name.startswith(f"{attribute}_prior_")):
            state.setdefault(prefix + name, buffers[name].detach())


def _tie(module: PyroModule, attribute: str, owner: PyroModule, owners_attribute: str) -> None:
    """Let an attribute be the site of another module: its prior under its name."""
    tie_site(module, attribute, owner, owners_attribute)
    setattr(module, attribute, PyroSample(TiedPrior(owner, owners_attribute)))


class TiedPrior:
    """The prior of a site that another module owns.

    Attributes:
        owner: The module that owns the site.
        attribute: The site's attribute there.
    """

    is_tied = True

    def __init__(self, owner: PyroModule, attribute: str) -> None:
        self.owner = owner
        self.attribute = attribute

    def __call__(self, module: PyroModule) -> Any:
        """Return the owner's prior."""
        return declared_samples(self.owner)[self.attribute](self.owner)
