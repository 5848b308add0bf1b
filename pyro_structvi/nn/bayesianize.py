"""Turn any torch net into a PyroModule whose weights are sample sites."""

import copy
import warnings
from typing import Any

from pyro.nn import PyroModule, PyroSample
from pyro.nn.module import to_pyro_module_
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from pyro_structvi.nn.priors import Prior, resolve_prior, sample_from

_NORMALIZATION = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


class PointEstimateWarning(UserWarning):
    """Some parameters of the net stayed what they were: trained, but without a posterior."""


def bayesianize(net: nn.Module, prior: Prior = 1.0, normalization: bool | None = None) -> Any:
    """Return a copy of a net whose weights are sample sites with priors.

    The net that is given stays as it is. Its weights are remembered, by reference, as the place
    where a guide's means start. A weight shared by several modules stays one site. Priors are
    buffers: ``.to()``, ``.double()`` and state dicts carry them along.

    Args:
        net: Any module, a bare ``nn.Linear`` too.
        prior: What the weights are like before any data: a standard deviation, one for all or a
            tensor with one for each element; a :class:`FanIn`; a Pyro distribution of single
            elements; a function ``(name, parameter) -> prior``; or a mapping from patterns of
            parameter names, as in ``net.named_parameters()``, to any of these. The first match wins.
        normalization: Whether the parameters of normalization layers get sites too. When None they
            stay point estimates, and a warning says so. Frozen parameters always stay.

    Returns:
        A ``PyroModule`` that is called as the net is.

    Raises:
        TypeError: If ``net`` is no module, or the prior is of no known kind.
        ValueError: If the net has no weights, or a prior does not fit.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> from pyro_structvi import FanIn
        >>> bayes_net = bayesianize(net, prior={"*.bias": 1.0, "*": FanIn()})
        >>> bayes_net(torch.zeros(5, 4)).shape
        torch.Size([5, 1])
        >>> torch.equal(bayes_net(torch.ones(5, 4)), bayes_net(torch.ones(5, 4)))
        False
    """
    if not isinstance(net, nn.Module):
        raise TypeError(f"`net` must be a torch.nn.Module, but got {type(net).__name__}.")
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    stays = _point_estimates(net, bool(normalization))
    sampled = {
        key: resolve_prior(prior, name, parameter)
        for name, parameter in net.named_parameters()
        if (key := id(parameter)) not in stays
    }
    if not sampled:
        raise ValueError(
            f"`net` has no weights to put a prior on; its parameters are {list(names.values())}. "
            "Pass a net with unfrozen weights, or `normalization=True`."
        )
    if stays and normalization is None:
        warnings.warn(
            f"These parameters stay point estimates: {[names[key] for key in stays]}. Pass "
            "`normalization=True` to put a prior on those of normalization layers too, or "
            "`normalization=False` to keep them so without this message.",
            PointEstimateWarning,
            stacklevel=2,
        )
    # Parameters that become sites are shared with the net, not copied: only their values are kept.
    shared = {id(parameter): parameter for parameter in net.parameters()}
    bayes_net = copy.deepcopy(net, {key: shared[key] for key in sampled})
    to_pyro_module_(bayes_net)
    _sample_parameters(bayes_net, sampled)
    _freeze_for_good(bayes_net)
    return bayes_net


def _point_estimates(net: nn.Module, normalization: bool) -> dict[int, Tensor]:
    """Return the parameters without a posterior, by identity."""
    return {
        id(parameter): parameter
        for module in net.modules()
        for parameter in module.parameters(recurse=False)
        if not parameter.requires_grad or (isinstance(module, _NORMALIZATION) and not normalization)
    }


def _sample_parameters(bayes_net: PyroModule, sampled: dict[int, Any]) -> None:
    owners: dict[int, tuple[PyroModule, str]] = {}
    for module in bayes_net.modules():
        for attribute, parameter in list(module._parameters.items()):
            if parameter is None or id(parameter) not in sampled:
                continue
            if id(parameter) in owners:
                _tie(module, attribute, *owners[id(parameter)])
                continue
            owners[id(parameter)] = (module, attribute)
            sample_from(module, attribute, sampled[id(parameter)], parameter.shape)
            initial = module.__dict__.setdefault("initial_values", {})
            initial[attribute] = parameter.detach()


def _freeze_for_good(bayes_net: PyroModule) -> None:
    """Turn frozen parameters into buffers: Pyro's param store would thaw them."""
    for module in bayes_net.modules():
        for attribute, parameter in list(module._parameters.items()):
            if parameter is not None and not parameter.requires_grad:
                del module._parameters[attribute]
                module.register_buffer(attribute, parameter.detach())


def _tie(module: PyroModule, attribute: str, owner: PyroModule, owners_attribute: str) -> None:
    """Let an attribute be the site of another module: its prior under its name."""
    prior = TiedPrior(owner, owners_attribute)
    names = module.__dict__.setdefault("_pyro_get_fullname", _TiedNames(module))
    names.tied[attribute] = prior
    setattr(module, attribute, PyroSample(prior))


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
        return self.owner._pyro_samples[self.attribute](self.owner)


class _TiedNames:
    """Stands in for ``_pyro_get_fullname`` of a module some of whose attributes are tied."""

    def __init__(self, module: PyroModule) -> None:
        self.module = module
        self.tied: dict[str, TiedPrior] = {}

    def __call__(self, attribute: str) -> str:
        if attribute in self.tied:
            prior = self.tied[attribute]
            return str(prior.owner._pyro_get_fullname(prior.attribute))
        return str(PyroModule._pyro_get_fullname(self.module, attribute))
