"""A copy of a net in which weights are sample sites."""

import copy
from typing import Any

from pyro.nn import PyroModule, PyroSample
from torch import nn

from pyro_structvi._pyro import declared_samples, make_pyro_module, tie_site
from pyro_structvi._torch import compiled_module, unlisted_weights
from pyro_structvi.nn.every_site import refuse_outside, sample_every_site
from pyro_structvi.nn.frozen import freeze
from pyro_structvi.nn.layers.rank_one import RankOneLayer
from pyro_structvi.nn.layers.walsh_hadamard import WalshHadamardLayer
from pyro_structvi.nn.prior_sites import sample_from
from pyro_structvi.nn.random_module import RandomModule
from pyro_structvi.nn.reparametrized import computed_weights

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
